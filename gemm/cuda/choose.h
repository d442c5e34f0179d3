// Which config serves a product: a model of its time over the tiles that are compiled.
//
//   time = launch + chunks that the busiest worker takes x time of a chunk
//                   or bytes / memory, or bytes that tiles ask L2 for / L2, whichever is longest
//          + tiles that it ends x time of an end + combining, where tiles are shared
//
// The times of a chunk and of an end are each tile's own. All were fitted on an H200 by
// benchmarks/gemm_tiles.py, to products of which every config was timed and to others of which the
// best of each schedule was; the tiles of weights that are widened by themselves. How near the
// picks are to the best: docs/kernels/gemm.md, "The choice".
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
    {256, 128, false, {0.686, 0.701, 0.734}, {1.0, 2.1, 1.1}},
    {256, 96, false, {0.444, 0.511, 0.537}, {0.8, 1.5, 0.9}},
    {256, 64, false, {0.267, 0.331, 0.373}, {0.8, 0.7, 1.0}},
    {128, 160, false, {0.398, 0.436, 0.446}, {1.3, 1.6, 1.4}},
    {128, 128, false, {0.309, 0.347, 0.366}, {0.6, 0.9, 0.6}},
    {128, 192, false, {0.455, 0.554, 0.515}, {1.1, 0.6, 1.6}},
    {128, 96, false, {0.285, 0.301, 0.284}, {0.4, 0.3, 1.0}},
    {128, 64, false, {0.254, 0.207, 0.223}, {0.2, 0.3, 1.5}},
    {128, 128, true, {0.333, 0.314, 0.405}, {2.2, 4.6, 2.1}},
    {96, 128, true, {0.274, 0.294, 0.310}, {1.9, 2.1, 2.2}},
    {64, 128, true, {0.216, 0.216, 0.261}, {1.0, 1.7, 1.9}},
    {64, 256, true, {0.363, 0.406, 0.429}, {2.3, 2.0, 2.5}},
    {32, 128, true, {0.183, 0.189, 0.180}, {0.9, 1.5, 2.1}},
};
constexpr TileTime kFp8BlockTiles[] = {
    {256, 96, false, {0.690, 0.704, 0.697}, {1.3, 1.4, 1.8}},
    {256, 64, false, {0.428, 0.484, 0.469}, {0.3, 0.5, 0.8}},
    {256, 128, false, {0.770, 0.802, 0.779}, {1.3, 0.9, 2.0}},
    {128, 64, false, {0.266, 0.252, 0.231}, {0.0, 0.7, 1.4}},
    {128, 128, false, {0.359, 0.386, 0.399}, {0.7, 1.6, 1.3}},
    {128, 96, false, {0.296, 0.333, 0.331}, {0.5, 1.1, 1.3}},
    {128, 160, false, {0.594, 0.625, 0.606}, {1.6, 1.3, 1.7}},
    {128, 192, false, {0.644, 0.666, 0.652}, {0.8, 0.7, 1.6}},
    {128, 128, true, {0.548, 0.540, 0.566}, {2.2, 4.3, 2.4}},
    {96, 128, true, {0.440, 0.441, 0.453}, {2.1, 3.0, 2.4}},
    {64, 128, true, {0.340, 0.346, 0.350}, {2.0, 2.1, 2.4}},
    {64, 256, true, {0.592, 0.603, 0.614}, {3.1, 2.5, 3.3}},
    {32, 128, true, {0.229, 0.211, 0.225}, {1.4, 1.9, 2.2}},
};
constexpr TileTime k16BitTiles[] = {
    {256, 64, false, {0.331, 0.296, 0.368}, {0.0, 1.0, 0.8}},
    {256, 128, false, {0.611, 0.657, 0.698}, {1.2, 1.5, 0.6}},
    {128, 64, false, {0.209, 0.208, 0.243}, {0.0, 0.1, 0.7}},
    {128, 160, false, {0.330, 0.407, 0.409}, {0.7, 1.2, 1.9}},
    {128, 128, false, {0.267, 0.328, 0.332}, {0.6, 0.7, 1.6}},
    {128, 96, false, {0.274, 0.265, 0.253}, {0.1, 0.0, 1.5}},
    {128, 192, false, {0.457, 0.506, 0.480}, {2.0, 1.0, 2.6}},
    {128, 256, false, {0.589, 0.670, 0.648}, {3.5, 2.1, 3.2}},
    {256, 128, true, {0.679, 0.663, 0.732}, {3.2, 7.8, 2.7}},
    {128, 128, true, {0.323, 0.312, 0.360}, {2.4, 4.1, 2.6}},
    {96, 128, true, {0.251, 0.293, 0.291}, {2.4, 2.8, 2.7}},
    {64, 128, true, {0.209, 0.220, 0.228}, {1.0, 1.9, 2.8}},
    {32, 128, true, {0.178, 0.212, 0.204}, {2.1, 0.9, 2.5}},
};

// FP8 weights of a 16-bit a: chunks of 64 elements. Never in clusters along m, which would share w.
constexpr TileTime kWidenedTiles[] = {
    {256, 128, false, {0.738, 0, 0.747}, {0.8, 0, 1.8}},
    {128, 128, false, {0.404, 0, 0.410}, {3.9, 0, 4.5}},
    {128, 128, true, {0.451, 0, 0.453}, {3.0, 0, 3.9}},
    {64, 128, true, {0.396, 0, 0.390}, {0.5, 0, 1.4}},
    {32, 128, true, {0.334, 0, 0.336}, {1.2, 0, 1.6}},
};
constexpr TileTime kWidenedBlockTiles[] = {
    {128, 128, false, {0.546, 0, 0.575}, {2.0, 0, 2.0}},
    {128, 128, true, {0.702, 0, 0.721}, {3.1, 0, 3.7}},
    {64, 128, true, {0.569, 0, 0.587}, {2.0, 0, 2.4}},
    {32, 128, true, {0.440, 0, 0.466}, {1.2, 0, 1.4}},
};

// The tiles that are compiled for these operands, in `count`.
inline const TileTime* tiles_of(const GemmArgs& args, int& count) {
  const auto all = [&](const auto& tiles) {
    count = static_cast<int>(sizeof(tiles) / sizeof(tiles[0]));
    return tiles;
  };
  if (is_widened(args)) return is_block_scaled(args) ? all(kWidenedBlockTiles) : all(kWidenedTiles);
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
  if (is_widened(args)) return true;
  return args.out_dtype != DType::kFloat32 ||
         (block_r == 128 && block_c == (tile.rows_are_w ? 32 : 128));
}

// Microseconds.
inline double predict(const GemmArgs& args, const GemmConfig& c, const TileTime& tile,
                      const GemmDevice& device) {
  constexpr double kLaunch = 2.38;                  // us
  constexpr double kMemory = 4.99e6, kL2 = 10.7e6;  // bytes an us; some of memory's from L2
  constexpr double kL2Holds = 102e6, kMissed = 0.552;
  constexpr double kCombine = 1.24, kCombineKilobyte = 0.0475, kStreamed = 2.48;
  constexpr double kIdleGain = 0.143;      // of a chunk's time, were all other SMs idle
  constexpr double kUnalignedL2 = 0.412;   // rows that end in a line of 128 bytes: two for one
  constexpr double kUnalignedFp8 = 0.048;  // of a chunk's time
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
  const double slower = unaligned && is_fp8(args.a_dtype) ? 1 + kUnalignedFp8 : 1;
  const double chunk = tile.chunk[cluster] * (1 - kIdleGain * (1 - std::min(1.0, busy))) * slower;
  const double of_w = double(size_of(args.w_dtype)) / size_of(args.a_dtype);
  const double bytes = (double(args.m) + double(args.n) * of_w) * k_bytes +
                       double(args.m) * args.n * size_of(args.out_dtype);
  const double tile_rows = double(std::min<int64_t>(c.block_m, args.m)) / c.cluster_n +
                           double(std::min<int64_t>(c.block_n, args.n)) / c.cluster_m * of_w;
  const double l2_bytes = double(s.tiles) * c.cluster_m * c.cluster_n * tile_rows * k_bytes;
  double again = 0;  // bytes that come from memory once more
  if (s.split == 0) {
    // Workers are at different places of K, so that L2 keeps an operand for one of them alone.
    const double beyond = bytes / kL2Holds - 1;
    again = kMissed * l2_bytes * shared / s.tiles * std::min(1.0, std::max(0.0, beyond));
  }
  // What nearly weighs as much adds to the longest.
  const auto to_sixth = [](double time) { return time * time * time * time * time * time; };
  const double sum = to_sixth(chunks * chunk) + to_sixth((bytes + again) / kMemory) +
                     to_sixth(l2_bytes * (unaligned ? 1 + kUnalignedL2 : 1) / kL2);
  const double fed = std::cbrt(std::sqrt(sum));  // double's pow is newer than manylinux_2_28
  return kLaunch + fed + ends * tile.end[cluster] + combine;
}

// Stages of FP8 weights before they are widened, by what a config leaves of shared memory.
inline int narrow_stages_of(const GemmArgs& args, const GemmConfig& c, const GemmDevice& device) {
  const int narrow = narrow_row_bytes(args.a_dtype, args.w_dtype);
  if (narrow == 0) return 0;
  const int64_t left =
      device.shared_bytes_per_block - kStaticBytes - warpgroup_shared_bytes(args, c);
  return static_cast<int>(std::min<int64_t>(left / (c.block_n * narrow), kMaxStages));
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
      if ((c.cluster_m == 2 && (args.m <= c.block_m || is_widened(args))) ||
          (c.cluster_n == 2 && args.n <= c.block_n)) {
        continue;
      }
      constexpr int64_t kInFlight = 200 << 10;
      const int64_t stage_bytes = int64_t{c.block_m + c.block_n} * kChunkBytes;
      c.num_stages = 0;
      const int64_t left =
          device.shared_bytes_per_block - kStaticBytes - warpgroup_shared_bytes(args, c);
      c.num_stages =
          is_widened(args)
              ? widened_stages(c.block_m, c.block_n, narrow_row_bytes(args.a_dtype, args.w_dtype),
                               warpgroup_shared_bytes(args, c), device.shared_bytes_per_block)
                    .wide
              : static_cast<int>(
                    std::min<int64_t>(std::min(kInFlight, left) / stage_bytes, kMaxStages));
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

// Whether wgmma serves these operands: sm_90a, w of a's type or FP8, aligned; FP8 sums are short of
// float32, so their output is 16-bit, and float16 wants more than one of them to average.
inline bool fits_warpgroup(const GemmArgs& args, const GemmDevice& device) {
  const bool fnuz =
      args.a_dtype == DType::kFloat8E4M3FNUZ || args.w_dtype == DType::kFloat8E4M3FNUZ;
  return device.compute_capability == 90 && args.k > 0 && !fnuz && has_aligned_rows(args) &&
         (args.a_dtype == args.w_dtype ||
          (is_widened(args) && args.out_dtype != DType::kFloat32)) &&
         (!is_fp8(args.a_dtype) || args.out_dtype == DType::kBFloat16 ||
          (args.out_dtype == DType::kFloat16 && args.k >= kScaleBlock)) &&
         (is_fp8(args.w_dtype) || !is_block_scaled(args)) &&
         (args.m == 1 || args.a_stride >= args.k) && (args.n == 1 || args.w_stride >= args.k);
}

// Data-parallel unless sharing sums is thought to be that much quicker. The model errs by some
// percent, and sharing loses more where it is wrongly taken than it gains where it is just taken:
// on an H200, over 8,192 products, the pick is so on average nearer to the best of the schedules,
// and slower than data-parallel in 0.6 % of them, not in 3 % (docs/kernels/gemm_journal.md).
constexpr double kSharedMargin = 1.04;

inline GemmConfig choose(const GemmArgs& args, const GemmDevice& device) {
  GemmConfig best;
  const bool fnuz =
      args.a_dtype == DType::kFloat8E4M3FNUZ || args.w_dtype == DType::kFloat8E4M3FNUZ;
  if (fnuz || args.k == 0) return best;
  best.design = GemmConfig::Design::kMma;
  if (!fits_warpgroup(args, device)) return best;
  double best_time = INFINITY;
  for_each_warpgroup_config(args, device, [&](const GemmConfig& c, const TileTime& tile) {
    const double margin = c.schedule == GemmConfig::kDataParallel ? 1 : kSharedMargin;
    const double time = predict(args, c, tile, device) * margin;
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
    return "gemm config: warpgroup asks for sm_90, operands of one type or FP8 weights, rows at "
           "multiples of 16 bytes, and a 16-bit output where one of them is FP8";
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
  if (warpgroup_shared_bytes(args, c) + kStaticBytes > device.shared_bytes_per_block ||
      (is_widened(args) && narrow_stages_of(args, c, device) < 2)) {
    return "gemm config: num_stages do not fit in shared memory";
  }
  if (c.cluster_m < 1 || c.cluster_n < 1 || int64_t{c.cluster_m} * c.cluster_n > 2) {
    return "gemm config: a cluster has one block, or two along m or n";
  }
  if (is_widened(args) && c.cluster_m > 1) {
    return "gemm config: blocks do not share weights that are widened; cluster_m must be 1";
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
