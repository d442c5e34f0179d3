// Which config serves a product: a model of its time over the tiles that are compiled.
//
//   time = launch + max(chunks that the busiest worker takes x time of a chunk, bytes / memory)
//          + tiles that it ends x time of an end + combining, where tiles are shared
//
// The times of a chunk and of an end are each tile's own. They were fitted on an H200 to 5,700
// times of 192 products (M from 33 to 4096, eight weights, three kinds of operands and scales): the
// pick takes 2 % longer than the best config on average, and at most 1.1 times as long in 95 % of
// them.
#pragma once

#include <algorithm>
#include <cmath>

#include "config.h"

namespace rocm_kernels {
namespace cuda {

// A tile that is compiled, and what it takes alone, in clusters of two along m and along n.
struct TileTime {
  int block_m, block_n;
  bool rows_are_w;
  float chunk[3];  // us for 128 bytes of K
  float end[3];    // us for scales, rounding and stores, and the pipeline's start
};
constexpr TileTime kFp8Tiles[] = {
    {256, 128, false, {0.920, 0.950, 0.950}, {3.4, 2.6, 2.6}},
    {128, 128, false, {0.500, 0.490, 0.480}, {2.0, 1.8, 2.0}},
    {256, 96, false, {0.720, 0.680, 0.680}, {3.0, 2.4, 2.6}},
    {256, 64, false, {0.500, 0.480, 0.480}, {2.6, 2.2, 2.4}},
    {128, 96, false, {0.431, 0.440, 0.422}, {1.9, 1.8, 2.0}},
    {128, 64, false, {0.372, 0.313, 0.326}, {1.7, 1.6, 1.8}},
    {32, 128, true, {0.342, 0.268, 0.311}, {1.2, 1.4, 2.6}},
    {64, 128, true, {0.372, 0.313, 0.326}, {2.7, 3.0, 3.3}},
    {96, 128, true, {0.431, 0.445, 0.422}, {3.0, 2.8, 3.5}},
    {128, 128, true, {0.486, 0.454, 0.452}, {4.2, 4.4, 4.5}},
    {64, 256, true, {0.448, 0.478, 0.476}, {6.8, 4.4, 6.8}},
};
constexpr TileTime kFp8BlockTiles[] = {
    {256, 128, false, {1.030, 1.020, 1.000}, {2.0, 2.6, 2.0}},
    {128, 128, false, {0.560, 0.560, 0.550}, {1.6, 1.2, 1.6}},
    {256, 96, false, {0.800, 0.780, 0.780}, {2.0, 2.0, 2.0}},
    {256, 64, false, {0.560, 0.550, 0.550}, {1.8, 1.8, 1.8}},
    {128, 96, false, {0.480, 0.480, 0.480}, {1.5, 1.2, 1.5}},
    {128, 64, false, {0.390, 0.400, 0.400}, {1.4, 1.2, 1.4}},
    {32, 128, true, {0.344, 0.341, 0.378}, {1.6, 1.3, 1.6}},
    {64, 128, true, {0.388, 0.431, 0.443}, {2.8, 2.1, 2.4}},
    {96, 128, true, {0.492, 0.521, 0.531}, {3.0, 3.5, 1.8}},
    {128, 128, true, {0.612, 0.639, 0.621}, {3.5, 3.6, 3.6}},
    {64, 256, true, {0.631, 0.606, 0.624}, {4.5, 3.3, 4.9}},
};
constexpr TileTime k16BitTiles[] = {
    {128, 256, false, {0.800, 0.755, 0.780}, {2.5, 1.2, 2.5}},
    {256, 128, false, {0.820, 0.770, 0.762}, {1.5, 1.5, 1.2}},
    {128, 128, false, {0.490, 0.435, 0.435}, {1.0, 0.8, 1.4}},
    {256, 64, false, {0.490, 0.450, 0.470}, {1.2, 1.2, 1.2}},
    {128, 96, false, {0.440, 0.340, 0.360}, {1.0, 0.8, 1.2}},
    {128, 64, false, {0.365, 0.278, 0.334}, {0.9, 0.8, 1.0}},
    {32, 128, true, {0.333, 0.238, 0.335}, {0.3, 0.5, 1.6}},
    {64, 128, true, {0.365, 0.278, 0.334}, {2.7, 2.4, 2.9}},
    {96, 128, true, {0.461, 0.331, 0.334}, {1.0, 3.3, 3.1}},
    {128, 128, true, {0.491, 0.435, 0.449}, {1.6, 2.9, 2.4}},
    {256, 128, true, {0.850, 0.790, 0.820}, {2.7, 2.5, 3.0}},
};

// The tiles that are compiled for these operands, in `count`.
inline const TileTime* tiles_of(const GemmArgs& args, int& count) {
  const auto all = [&](const auto& tiles) {
    count = static_cast<int>(sizeof(tiles) / sizeof(tiles[0]));
    return tiles;
  };
  if (!is_fp8(args.a_dtype)) return all(k16BitTiles);
  return is_block_scaled(args) ? all(kFp8BlockTiles) : all(kFp8Tiles);
}

// Some are left out for outputs that are seldom: FP8 to float16, 16 bits to float32.
inline bool is_compiled(const GemmArgs& args, const TileTime& tile) {
  const int block_r = tile.rows_are_w ? tile.block_n : tile.block_m;
  const int block_c = tile.rows_are_w ? tile.block_m : tile.block_n;
  if (is_fp8(args.a_dtype)) {
    return args.out_dtype != DType::kFloat16 ||
           (tile.rows_are_w ? block_r == 128 && block_c <= 64 : block_c == 128);
  }
  return args.out_dtype != DType::kFloat32 ||
         (block_r == 128 && block_c == (tile.rows_are_w ? 32 : 128));
}

// Microseconds.
inline double predict(const GemmArgs& args, const GemmConfig& c, const TileTime& tile,
                      const GemmDevice& device) {
  constexpr double kLaunch = 2.3, kMemory = 5.5e6;  // us; bytes an us, some of them from L2
  constexpr double kCombine = 2.1, kCombineKilobyte = 0.045, kStreamed = 2.5;
  constexpr double kIdleGain = 0.14;  // of a chunk's time, were all other SMs idle
  const int64_t k_bytes = args.k * size_of(args.a_dtype);
  const TileSchedule s = cut_product(c, args.m, args.n, k_bytes, device.sm_count);
  const int workers = device.sm_count / (c.cluster_m * c.cluster_n);
  const double shared = s.split == 1 ? 0 : s.shared_tiles();
  double chunks, ends, busy, combine = 0.0;
  const double kilobytes = c.block_m * c.block_n * 4 / 1000.0;
  if (s.split > 0) {
    const double units = double(s.whole) + double(s.shared_tiles()) * s.split;
    ends = std::ceil(units / workers);
    chunks = ends * std::ceil(double(s.chunks) / s.split);
    busy = units / workers;
    if (shared > 0) combine = kCombine + kilobytes * kCombineKilobyte;
  } else {
    const double rounds = double(s.whole) / workers;
    ends = std::ceil(rounds) + 1;
    chunks = std::ceil(rounds * s.chunks + shared * s.chunks / s.workers);
    busy = s.whole > 0 ? 1.0 : double(s.workers) / workers;
    combine = (kCombine + 1.5 * kilobytes * kCombineKilobyte) * kStreamed;
  }
  const int cluster = c.cluster_m == 2 ? 1 : c.cluster_n == 2 ? 2 : 0;
  const double chunk = tile.chunk[cluster] * (1 - kIdleGain * (1 - std::min(1.0, busy)));
  const double bytes = (double(args.m) + double(args.n)) * k_bytes +
                       double(args.m) * args.n * size_of(args.out_dtype);
  return kLaunch + std::max(chunks * chunk, bytes / kMemory) + ends * tile.end[cluster] + combine;
}

// Calls visit(config, tile) for every config of the warpgroup kernel that the model weighs.
template <class Visit>
void for_each_warpgroup_config(const GemmArgs& args, const GemmDevice& device, const Visit& visit) {
  int count;
  const TileTime* const tiles = tiles_of(args, count);
  const int chunks = static_cast<int>(ceil_div(args.k * size_of(args.a_dtype), kChunkBytes));
  for (int i = 0; i < count; ++i) {
    const TileTime& tile = tiles[i];
    if (!is_compiled(args, tile)) continue;
    // Tiles that are mostly beyond the matrix are not worth a look.
    if (tile.block_m > 32 && args.m * 4 <= tile.block_m) continue;
    GemmConfig c;
    c.design = GemmConfig::Design::kWarpgroup;
    c.block_m = tile.block_m;
    c.block_n = tile.block_n;
    c.rows = tile.rows_are_w ? GemmConfig::kRowsOfW : GemmConfig::kRowsOfA;
    for (const int cluster : {0, 1, 2}) {
      c.cluster_m = cluster == 1 ? 2 : 1;
      c.cluster_n = cluster == 2 ? 2 : 1;
      if ((c.cluster_m == 2 && args.m <= c.block_m) || (c.cluster_n == 2 && args.n <= c.block_n)) {
        continue;
      }
      constexpr int64_t kInFlight = 200 << 10;
      c.num_stages = static_cast<int>(
          std::clamp<int64_t>(kInFlight / ((c.block_m + c.block_n) * kChunkBytes), 3, kMaxStages));
      const int64_t count_tiles =
          ceil_div(args.m, c.block_m * c.cluster_m) * ceil_div(args.n, c.block_n * c.cluster_n);
      const int workers = device.sm_count / (c.cluster_m * c.cluster_n);
      if (count_tiles > INT32_MAX) continue;
      c.schedule = GemmConfig::kDataParallel;
      c.split_k = 1;
      visit(c, tile);
      // Splits that fill the workers once, or nearly; each part at least four chunks.
      const int most = static_cast<int>(
          std::min<int64_t>({workers / count_tiles, chunks / 4, kMaxContributors}));
      c.schedule = GemmConfig::kSplitK;
      for (c.split_k = std::max(2, most - 1); c.split_k <= most; ++c.split_k) visit(c, tile);
      if (most >= 4) c.split_k = most / 2, visit(c, tile);
      c.split_k = 1;
      c.schedule = GemmConfig::kHybrid;
      if (count_tiles % workers != 0 && count_tiles > workers / 4 && chunks >= 8 &&
          count_tiles < int64_t{workers} * 64) {
        visit(c, tile);
      }
    }
  }
}

// Whether wgmma serves these operands: sm_90a, both of one type, aligned; FP8 sums are short of
// float32, so their output is 16-bit, and float16 wants more than one of them to average.
inline bool fits_warpgroup(const GemmArgs& args, const GemmDevice& device) {
  return device.compute_capability == 90 && args.k > 0 && args.a_dtype == args.w_dtype &&
         args.a_dtype != DType::kFloat8E4M3FNUZ && has_aligned_rows(args) &&
         (!is_fp8(args.a_dtype) || args.out_dtype == DType::kBFloat16 ||
          (args.out_dtype == DType::kFloat16 && args.k >= kScaleBlock)) &&
         (is_fp8(args.a_dtype) || !is_block_scaled(args)) &&
         (args.m == 1 || args.a_stride >= args.k) && (args.n == 1 || args.w_stride >= args.k);
}

inline GemmConfig choose(const GemmArgs& args, const GemmDevice& device) {
  GemmConfig best;
  const bool fnuz =
      args.a_dtype == DType::kFloat8E4M3FNUZ || args.w_dtype == DType::kFloat8E4M3FNUZ;
  if (fnuz || args.k == 0) return best;
  best.design = GemmConfig::Design::kMma;
  if (!fits_warpgroup(args, device)) return best;
  double best_time = INFINITY;
  for_each_warpgroup_config(args, device, [&](const GemmConfig& c, const TileTime& tile) {
    const double time = predict(args, c, tile, device);
    if (time < best_time) best_time = time, best = c;
  });
  return best;
}

inline Status check(const GemmArgs& args, const GemmConfig& c, const GemmDevice& device) {
  const bool fnuz =
      args.a_dtype == DType::kFloat8E4M3FNUZ || args.w_dtype == DType::kFloat8E4M3FNUZ;
  if (c.design == GemmConfig::Design::kPlain) return nullptr;
  if (fnuz || args.k == 0) return "gemm config: only plain serves e4m3fnuz, and no K";
  if (c.design == GemmConfig::Design::kMma) return nullptr;
  if (!fits_warpgroup(args, device)) {
    return "gemm config: warpgroup asks for sm_90, operands of one type with rows at multiples of "
           "16 bytes, and a 16-bit output of FP8";
  }
  int count;
  const TileTime* const tiles = tiles_of(args, count);
  if (std::none_of(tiles, tiles + count, [&](const TileTime& tile) {
        return tile.block_m == c.block_m && tile.block_n == c.block_n &&
               tile.rows_are_w == c.rows_are_w() && is_compiled(args, tile);
      })) {
    return kNoTile;
  }
  if (c.num_stages < 2 || c.num_stages > kMaxStages) return "gemm config: num_stages: 2 to 8";
  if (warpgroup_shared_bytes(c, is_block_scaled(args)) + kStaticBytes >
      device.shared_bytes_per_block) {
    return "gemm config: num_stages do not fit in shared memory";
  }
  if (c.cluster_m < 1 || c.cluster_n < 1 || int64_t{c.cluster_m} * c.cluster_n > 2) {
    return "gemm config: a cluster has one block, or two along m or n";
  }
  if (c.split_k < 1 || c.group < 1 || c.group > 1024) {
    return "gemm config: split_k must be at least 1, group 1 to 1024";
  }
  const TileSchedule s =
      cut_product(c, args.m, args.n, args.k * size_of(args.a_dtype), device.sm_count);
  if (s.split > kMaxContributors) return "gemm config: split_k is at most 32";
  return nullptr;
}

}  // namespace cuda
}  // namespace rocm_kernels
