// Which config serves a product: a model of its time over the tiles that are compiled.
//
//   time = launch + chunks that the busiest worker takes x time of a chunk
//                   or bytes / memory, or bytes that tiles ask L2 for / L2, whichever is longest
//          + tiles that it ends x time of an end + combining by contributors, where tiles are
//          shared
//
// The times of a chunk and of an end are each tile's own; memory and L2 are the device's. All were
// fitted on an H200 and an H100 together by benchmarks/gemm_tiles.py, to products of which every
// config was timed and to others of which the best of each schedule was; the tiles of weights that
// are widened by themselves, on an H200. How near the picks are to the best: docs/kernels/gemm.md,
// "The choice".
#pragma once

#include <algorithm>
#include <cmath>

#include "../../blocks/product/choice.h"
#include "../../blocks/product/cuda/config.h"
#include "../../skinny_gemm/cuda/choose.h"

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
    {256, 128, false, {0.7321, 0.7677, 0.7288}, {1.541, 1.397, 2.131}},
    {256, 64, false, {0.3869, 0.4222, 0.3886}, {0.874, 1.144, 1.332}},
    {256, 96, false, {0.5636, 0.5782, 0.5487}, {1.191, 1.112, 1.836}},
    {128, 192, false, {0.5316, 0.5728, 0.5437}, {1.416, 1.332, 1.659}},
    {128, 96, false, {0.3309, 0.3462, 0.3031}, {0.108, 0.891, 1.095}},
    {128, 64, false, {0.2725, 0.2388, 0.2559}, {0.000, 1.129, 0.486}},
    {128, 128, false, {0.4008, 0.3851, 0.3709}, {0.567, 1.000, 1.155}},
    {128, 160, false, {0.4501, 0.4732, 0.4734}, {1.639, 1.276, 1.451}},
    {128, 128, true, {0.4284, 0.3989, 0.4381}, {1.497, 3.086, 1.918}},
    {96, 128, true, {0.3554, 0.3144, 0.3487}, {1.289, 2.760, 1.850}},
    {64, 128, true, {0.3257, 0.2916, 0.2959}, {0.330, 1.418, 1.594}},
    {64, 256, true, {0.5411, 0.4287, 0.5039}, {0.882, 2.021, 2.135}},
    {32, 128, true, {0.2258, 0.2037, 0.2079}, {0.773, 1.350, 2.136}},
};
constexpr TileTime kFp8BlockTiles[] = {
    {256, 128, false, {0.8221, 0.8265, 0.8075}, {1.231, 1.460, 1.901}},
    {256, 64, false, {0.5028, 0.5217, 0.4796}, {0.492, 0.717, 1.008}},
    {256, 96, false, {0.6958, 0.7416, 0.7081}, {0.879, 0.996, 1.953}},
    {128, 192, false, {0.6995, 0.6553, 0.6767}, {0.734, 2.105, 1.579}},
    {128, 96, false, {0.3557, 0.3663, 0.3374}, {0.876, 1.569, 1.657}},
    {128, 128, false, {0.4000, 0.3987, 0.4054}, {1.160, 2.104, 1.417}},
    {128, 160, false, {0.6067, 0.6399, 0.6280}, {2.053, 1.639, 1.964}},
    {128, 64, false, {0.2841, 0.2945, 0.2542}, {0.500, 0.976, 1.403}},
    {128, 128, true, {0.5977, 0.5827, 0.5939}, {2.504, 3.621, 2.801}},
    {96, 128, true, {0.4774, 0.4511, 0.4729}, {2.167, 3.159, 2.581}},
    {64, 128, true, {0.3788, 0.3487, 0.3699}, {1.779, 2.699, 2.433}},
    {64, 256, true, {0.6393, 0.6172, 0.6479}, {2.700, 2.868, 3.087}},
    {32, 128, true, {0.2562, 0.2188, 0.2562}, {1.620, 2.358, 2.359}},
};
constexpr TileTime k16BitTiles[] = {
    {256, 128, false, {0.6821, 0.7046, 0.6726}, {1.954, 1.241, 2.000}},
    {256, 64, false, {0.3851, 0.4249, 0.3765}, {0.500, 0.762, 1.327}},
    {128, 192, false, {0.5205, 0.5143, 0.4992}, {1.322, 1.577, 1.746}},
    {128, 96, false, {0.2631, 0.2931, 0.2772}, {0.825, 0.741, 1.350}},
    {128, 128, false, {0.3476, 0.3661, 0.3640}, {0.993, 1.522, 1.230}},
    {128, 160, false, {0.4089, 0.4262, 0.4212}, {1.918, 1.500, 1.333}},
    {128, 256, false, {0.6696, 0.7254, 0.6872}, {2.100, 0.717, 1.950}},
    {128, 64, false, {0.2211, 0.2153, 0.2157}, {0.000, 0.710, 0.725}},
    {256, 128, true, {0.7801, 0.7310, 0.7696}, {2.197, 7.459, 2.967}},
    {128, 128, true, {0.4026, 0.3389, 0.4019}, {1.392, 4.235, 1.781}},
    {96, 128, true, {0.3380, 0.3242, 0.3356}, {0.939, 1.318, 1.566}},
    {64, 128, true, {0.2820, 0.2289, 0.2797}, {0.854, 1.583, 1.475}},
    {32, 128, true, {0.2124, 0.1913, 0.2176}, {1.653, 1.259, 2.396}},
};

// FP8 weights of a 16-bit a: chunks of 64 elements. Never in clusters along m, which would share w.
constexpr TileTime kWidenedTiles[] = {
    {256, 128, false, {0.696, 0, 0.715}, {3.3, 0, 3.9}},
    {128, 128, false, {0.377, 0, 0.390}, {5.2, 0, 5.5}},
    {128, 128, true, {0.432, 0, 0.439}, {4.0, 0, 4.7}},
    {64, 128, true, {0.365, 0, 0.364}, {2.6, 0, 3.3}},
    {32, 128, true, {0.311, 0, 0.319}, {2.4, 0, 2.7}},
};
constexpr TileTime kWidenedBlockTiles[] = {
    {128, 128, false, {0.526, 0, 0.550}, {2.4, 0, 3.2}},
    {128, 128, true, {0.671, 0, 0.693}, {4.3, 0, 4.8}},
    {64, 128, true, {0.531, 0, 0.576}, {3.0, 0, 3.4}},
    {32, 128, true, {0.427, 0, 0.452}, {2.2, 0, 2.4}},
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
  constexpr double kLaunch = 1.741;   // us
  constexpr double kMemory = 0.8043;  // of what the memory could read
  constexpr double kL2 = 0.1356;      // of L2, an us
  constexpr float kL2Power = 0.7672;  // tiles that ask at once count so
  constexpr double kL2Holds = 1.644, kMissed = 0.8769;
  constexpr double kCombine = 0.8441, kCombineKilobyte = 0.04261, kContributor = 0.1257;
  constexpr double kStreamed = 2.759;
  constexpr float kHeat = 0.02121;
  constexpr double kIdleGain = 0.2684;      // of a chunk's time, were all other SMs idle
  constexpr double kUnalignedL2 = 0.5829;   // rows that end in a line of 128 bytes: two for one
  constexpr double kUnalignedFp8 = 0.1712;  // of a chunk's time
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
    if (shared > 0) combine = kCombine + kilobytes * kCombineKilobyte + s.split * kContributor;
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
  // The clock falls with time. (float's pow: double's is newer than manylinux_2_28.)
  const double warm = std::pow(float(chunks / 64), kHeat);
  const double chunk =
      tile.chunk[cluster] * (1 - kIdleGain * (1 - std::min(1.0, busy))) * slower * warm;
  const double of_w = double(size_of(args.w_dtype)) / size_of(args.a_dtype);
  const double bytes = (double(args.m) + double(args.n) * of_w) * k_bytes +
                       double(args.m) * args.n * size_of(args.out_dtype);
  // What tiles ask L2 for, and how many of them ask for the same at about the same time, which is
  // partly served by one read.
  const double a_bytes =
      double(s.tiles) * c.cluster_m * std::min<int64_t>(c.block_m, args.m) * k_bytes;
  const double w_bytes =
      double(s.tiles) * c.cluster_n * std::min<int64_t>(c.block_n, args.n) * of_w * k_bytes;
  const auto at_once = [](int64_t length, int tile) {
    return double(std::pow(float(ceil_div(length, tile)), kL2Power - 1));
  };
  const double l2_bytes = a_bytes * at_once(args.n, c.block_n * c.cluster_n) +
                          w_bytes * at_once(args.m, c.block_m * c.cluster_m);
  double again = 0;  // bytes that come from memory once more
  if (s.split == 0) {
    // Workers are at different places of K, so that L2 keeps an operand for one of them alone.
    const double beyond = bytes / (kL2Holds * device.memory.l2_bytes) - 1;
    again = kMissed * (a_bytes + w_bytes) * shared / s.tiles * std::min(1.0, std::max(0.0, beyond));
  }
  // What nearly weighs as much adds to the longest.
  const auto to_fourth = [](double time) { return time * time * time * time; };
  const double sum =
      to_fourth(chunks * chunk) +
      to_fourth((bytes + again) / (kMemory * device.memory.bytes_per_us)) +
      to_fourth(l2_bytes * (unaligned ? 1 + kUnalignedL2 : 1) / (kL2 * device.memory.l2_bytes));
  const double fed = std::sqrt(std::sqrt(sum));
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

// Data-parallel unless sharing sums is thought to be that much quicker: the model errs by some
// percent, and with it the pick is seldomer slower than data-parallel
// (docs/kernels/gemm_journal.md, "A margin for sharing").
constexpr double kSharedMargin = 1.03;

// What the tensor cores' kernels leave: e4m3fnuz, and no K.
inline bool needs_plain(const GemmArgs& args) {
  return args.a_dtype == DType::kFloat8E4M3FNUZ || args.w_dtype == DType::kFloat8E4M3FNUZ ||
         args.k == 0;
}

// Calls visit(config, tile) for what the model weighs by the M of the class: a class of few rows
// has as many tiles for each M, so that the work is cut alike.
template <class Visit>
void for_each_judged_config(GemmArgs args, const GemmDevice& device, const Visit& visit) {
  args.m = judged_rows(args.m);
  for_each_warpgroup_config(args, device, [&](const GemmConfig& c, const TileTime& tile) {
    visit(c, predict(args, c, tile, device));
  });
}

inline GemmConfig choose_tiles(const GemmArgs& args, const GemmDevice& device) {
  GemmConfig best;
  if (needs_plain(args)) return best;
  best.design = GemmConfig::Design::kMma;
  if (!fits_warpgroup(args, device)) return best;
  double best_time = INFINITY;
  for_each_judged_config(args, device, [&](const GemmConfig& c, double time) {
    if (c.schedule != GemmConfig::kDataParallel) time *= kSharedMargin;
    if (time < best_time) best_time = time, best = c;
  });
  return best;
}

// Up to how many rows the designs for few rows are the quicker where they serve, from measurements
// on an H200 and an H100 (docs/kernels/gemm.md). mma.sync keeps up with the weight for 16 rows, for
// 32 where a has 16 bits: with block scales 32 and 64 rows took 132 and 193 us that wgmma takes 50
// for. FP8 has wgmma among these designs, too.
inline int64_t few_rows(const GemmArgs& args, const GemmDevice& device) {
  if (!fits_warpgroup(args, device)) return kSkinnyGemmMaxRows;
  if (!is_fp8(args.a_dtype)) return 32;
  const bool cut_line = args.k % kChunkBytes != 0;
  return is_block_scaled(args) || cut_line ? 16 : kSkinnyGemmMaxRows;
}

using Config = std::variant<GemmConfig, skinny::SkinnyGemmConfig>;

inline Config choose_config(const GemmArgs& args, const GemmDevice& device) {
  if (args.m <= kSkinnyGemmMaxRows && skinny::serves(args) && args.m <= few_rows(args, device)) {
    return skinny::choose_config(args, device);
  }
  // Rows that are not aligned: mma.cuh makes 128 rows of a whatever there are.
  if (args.m <= 16 && !skinny::serves(args)) return GemmConfig{};
  return choose_tiles(args, device);
}

// What choose_config() depends on.
struct GemmShape {
  int32_t m, n, k;
  int32_t a_dtype, w_dtype, out_dtype;
  int32_t block_scaled, fits_warpgroup, serves_few, chunks;  // 0 or 1
};
constexpr ConfigField<GemmShape> kGemmShapeFields[] = {
    {"m", &GemmShape::m},
    {"n", &GemmShape::n},
    {"k", &GemmShape::k},
    {"a_dtype", &GemmShape::a_dtype},
    {"w_dtype", &GemmShape::w_dtype},
    {"out_dtype", &GemmShape::out_dtype},
    {"block_scaled", &GemmShape::block_scaled},
    {"fits_warpgroup", &GemmShape::fits_warpgroup},
    {"serves_few", &GemmShape::serves_few},
    {"chunks", &GemmShape::chunks},
};

// choose_config() weighs some 200 configs in 7 us of a host thread, and a call asks twice.
inline Config cached_choice(const GemmArgs& args, const GemmDevice& device) {
  const GemmShape shape = {static_cast<int32_t>(args.m),
                           static_cast<int32_t>(args.n),
                           static_cast<int32_t>(args.k),
                           static_cast<int32_t>(args.a_dtype),
                           static_cast<int32_t>(args.w_dtype),
                           static_cast<int32_t>(args.out_dtype),
                           is_block_scaled(args),
                           fits_warpgroup(args, device),
                           skinny::serves(args),
                           skinny::alignment_of(args).chunks};
  return kept_choice<Config>(kGemmShapeFields, shape, device.id,
                             [&] { return choose_config(args, device); });
}

inline Status check_config(const GemmArgs& args, const GemmConfig& c, const GemmDevice& device) {
  if (c.design == GemmConfig::Design::kPlain) return nullptr;
  if (needs_plain(args)) return "gemm config: only plain serves e4m3fnuz, and no K";
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

// Calls visit(config) for every config that is worth timing.
template <class Visit>
void for_each_config(const GemmArgs& args, const GemmDevice& device, const Visit& visit) {
  if (skinny::serves(args)) visit(Config(skinny::choose_config(args, device)));
  if (!needs_plain(args) && fits_warpgroup(args, device)) {
    for_each_judged_config(args, device, [&](const GemmConfig& c, double) { visit(Config(c)); });
  }
  for (const auto design : {GemmConfig::Design::kMma, GemmConfig::Design::kPlain}) {
    GemmConfig c;
    c.design = design;
    if (check_config(args, c, device) == nullptr) visit(Config(c));
  }
}

}  // namespace cuda
}  // namespace rocm_kernels
