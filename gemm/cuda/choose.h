// Which config serves a product: a model of its time over the tiles that are compiled.
//
//   time = launch + chunks that the busiest worker takes x time of a chunk
//                   or bytes / memory, or bytes that tiles ask L2 for / L2, whichever is longest
//          + tiles that it ends x time of an end + combining, where tiles are shared
//
// The times of a chunk and of an end are each tile's own. All were fitted on an H200 to 26,000
// times of 396 products (M from 33 to 4096, twelve weights, three kinds of operands and scales) by
// benchmarks/gemm_tiles.py: the pick takes 2 % longer than the best config on average, and at most
// 1.09 times as long in 95 % of them.
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
    {256, 96, false, {0.513, 0.609, 0.536}, {3.1, 1.1, 2.4}},
    {256, 64, false, {0.355, 0.385, 0.392}, {1.4, 1.3, 2.0}},
    {256, 128, false, {0.726, 0.726, 0.745}, {3.2, 2.9, 2.9}},
    {128, 64, false, {0.244, 0.272, 0.243}, {0.8, 0.7, 1.5}},
    {128, 96, false, {0.317, 0.325, 0.304}, {0.8, 0.7, 1.7}},
    {128, 128, false, {0.356, 0.354, 0.356}, {1.1, 2.0, 1.9}},
    {128, 128, true, {0.339, 0.379, 0.403}, {3.5, 4.1, 3.2}},
    {96, 128, true, {0.311, 0.310, 0.331}, {2.3, 2.4, 2.6}},
    {64, 256, true, {0.403, 0.393, 0.447}, {3.9, 3.6, 4.0}},
    {64, 128, true, {0.270, 0.246, 0.266}, {1.7, 2.2, 2.4}},
    {32, 128, true, {0.187, 0.212, 0.184}, {2.6, 1.9, 2.9}},
};
constexpr TileTime kFp8BlockTiles[] = {
    {256, 96, false, {0.763, 0.721, 0.726}, {1.9, 2.8, 3.0}},
    {256, 64, false, {0.599, 0.644, 0.590}, {2.1, 1.3, 2.2}},
    {256, 128, false, {0.868, 0.900, 0.901}, {3.6, 3.1, 3.1}},
    {128, 64, false, {0.328, 0.279, 0.357}, {0.8, 1.5, 0.9}},
    {128, 96, false, {0.389, 0.384, 0.373}, {1.3, 1.2, 2.0}},
    {128, 128, false, {0.451, 0.450, 0.466}, {1.8, 1.9, 2.0}},
    {128, 128, true, {0.587, 0.583, 0.599}, {3.0, 3.8, 3.1}},
    {96, 128, true, {0.469, 0.471, 0.484}, {2.8, 3.1, 3.0}},
    {64, 256, true, {0.619, 0.623, 0.628}, {3.7, 3.3, 3.9}},
    {64, 128, true, {0.369, 0.375, 0.379}, {2.4, 2.4, 2.9}},
    {32, 128, true, {0.255, 0.254, 0.274}, {2.2, 2.2, 2.6}},
};
constexpr TileTime k16BitTiles[] = {
    {256, 64, false, {0.357, 0.341, 0.369}, {0.1, 0.0, 1.7}},
    {256, 128, false, {0.686, 0.639, 0.669}, {2.8, 3.6, 3.0}},
    {128, 64, false, {0.208, 0.208, 0.233}, {0.3, 0.2, 1.5}},
    {128, 256, false, {0.659, 0.672, 0.645}, {3.5, 2.0, 4.3}},
    {128, 96, false, {0.231, 0.300, 0.242}, {0.9, 0.2, 2.1}},
    {128, 128, false, {0.333, 0.345, 0.343}, {1.7, 1.0, 1.7}},
    {256, 128, true, {0.748, 0.653, 0.739}, {4.2, 8.6, 4.1}},
    {128, 128, true, {0.341, 0.352, 0.383}, {2.5, 3.6, 2.5}},
    {96, 128, true, {0.259, 0.274, 0.347}, {2.5, 3.0, 2.3}},
    {64, 128, true, {0.198, 0.225, 0.234}, {2.5, 1.9, 2.5}},
    {32, 128, true, {0.156, 0.176, 0.159}, {3.3, 2.3, 4.2}},
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
  constexpr double kLaunch = 1.26;                  // us
  constexpr double kMemory = 4.51e6, kL2 = 9.28e6;  // bytes an us; some of memory's from L2
  constexpr double kCombine = 2, kCombineKilobyte = 0.045, kStreamed = 1.98;
  constexpr double kIdleGain = 0.121;  // of a chunk's time, were all other SMs idle
  // Rows that end in a line of 128 bytes: two lines for one, and block scales word by word.
  constexpr double kUnalignedL2 = 0.466, kUnaligned = 0.0575, kUnalignedBlocks = 0.235;
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
  const bool unaligned = k_bytes % kChunkBytes != 0;
  const double slower =
      !unaligned ? 1 : 1 + (is_block_scaled(args) ? kUnalignedBlocks : kUnaligned);
  const double chunk = tile.chunk[cluster] * (1 - kIdleGain * (1 - std::min(1.0, busy))) * slower;
  const double bytes = (double(args.m) + double(args.n)) * k_bytes +
                       double(args.m) * args.n * size_of(args.out_dtype);
  const double tile_rows = double(std::min<int64_t>(c.block_m, args.m)) / c.cluster_n +
                           double(std::min<int64_t>(c.block_n, args.n)) / c.cluster_m;
  const double l2_bytes = double(s.tiles) * c.cluster_m * c.cluster_n * tile_rows * k_bytes;
  // What nearly weighs as much adds to the longest.
  const auto to_sixth = [](double time) { return time * time * time * time * time * time; };
  const double fed = std::pow(to_sixth(chunks * chunk) + to_sixth(bytes / kMemory) +
                                  to_sixth(l2_bytes * (unaligned ? 1 + kUnalignedL2 : 1) / kL2),
                              1.0 / 6);
  return kLaunch + fed + ends * tile.end[cluster] + combine;
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
      const int64_t stage_bytes = int64_t{c.block_m + c.block_n} * kChunkBytes;
      c.num_stages = 0;
      const int64_t left = device.shared_bytes_per_block - kStaticBytes -
                           warpgroup_shared_bytes(c, is_block_scaled(args));
      c.num_stages =
          static_cast<int>(std::min<int64_t>(std::min(kInFlight, left) / stage_bytes, kMaxStages));
      if (c.num_stages < 2) continue;
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
