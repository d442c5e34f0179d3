// Which config serves a product: a model of its time over the tiles that are compiled.
//
//   time = launch + max(rounds of units x chunks x time of a chunk, bytes / memory) + ends
//
// A chunk takes the longest of: the tensor cores' time and that of adding up their sums; the bytes
// that its SM takes in; the bytes that L2 gives, which the blocks of a cluster share. The constants
// were fitted on an H200 over 128 products of FP8 and 64 of bfloat16, 20 to 40 configs each
// (docs/kernels/gemm.md).
#pragma once

#include <cmath>

#include "config.h"

namespace rocm_kernels {
namespace cuda {

struct GemmTimeModel {
  double clock;                                  // GHz
  double add_row, add_block, add_block_swapped;  // cycles of a scheduler for a sum
  double ingest, l2;                             // bytes a nanosecond of an SM
  double memory;                                 // TB/s
  double launch, end, end_of_sums;           // us: of a launch, of a tile, of 128 x 128 sums of it
  double combine, stream, combine_kilobyte;  // us where a tile is shared; times that if streamed
};
constexpr GemmTimeModel kFp8Time = {1.075, 0.687, 1.619, 3.106, 105.6, 46.6, 4.16,
                                    2.39,  0.27,  3.44,  0.583, 2.22,  0.057};
constexpr GemmTimeModel k16BitTime = {1.075, 0,    0,    0,     105.6, 46.6, 4.16,
                                      2.39,  0.27, 3.44, 0.583, 2.22,  0.057};

// Microseconds.
inline double predict(const GemmArgs& args, const GemmConfig& c, const GemmDevice& device) {
  const bool fp8 = is_fp8(args.a_dtype);
  const GemmTimeModel& model = fp8 ? kFp8Time : k16BitTime;
  const int64_t k_bytes = args.k * size_of(args.a_dtype);
  const double chunks = static_cast<double>(ceil_div(k_bytes, kChunkBytes));
  const int workers = device.sm_count / (c.cluster_m * c.cluster_n);
  const int64_t tiles =
      ceil_div(args.m, c.block_m * c.cluster_m) * ceil_div(args.n, c.block_n * c.cluster_n);
  const double area = double(c.block_m) * c.block_n;
  const double add = !is_block_scaled(args) ? model.add_row
                     : c.rows_are_w         ? model.add_block_swapped
                                            : model.add_block;
  const double products = (area * kChunkBytes / 8192 + area / 128 * add) / model.clock / 1000;
  const double ingest = (c.block_m + c.block_n) * double{kChunkBytes} / model.ingest / 1000;
  double busy = 1.0;  // share of the workers
  double main, ends, combine = 0.0;
  const double end = model.end + area / 16384 * model.end_of_sums;
  const double kilobytes = area * 4 / 1000;
  const bool streamed =
      c.schedule == GemmConfig::Schedule::kHybrid || c.schedule == GemmConfig::Schedule::kStreamK;
  if (streamed) {
    const TileSchedule s = cut_product(c, args.m, args.n, k_bytes, device.sm_count);
    const double rest = s.shared_tiles();
    const double rounds = double(s.whole) / workers;
    main = std::ceil(rounds * chunks + rest * chunks / s.workers);
    ends = (std::ceil(rounds) + (rest > 0 ? 1 : 0)) * end;
    if (rest > 0) {
      combine = (model.combine + kilobytes * model.combine_kilobyte * 1.5) * model.stream;
    }
  } else {
    const int split = c.schedule == GemmConfig::Schedule::kSplitK ? c.split_k : 1;
    const double rounds = static_cast<double>(ceil_div(tiles * split, workers));
    main = rounds * std::ceil(chunks / split);
    ends = rounds * end;
    if (split > 1) combine = model.combine + kilobytes * model.combine_kilobyte;
    busy = std::min(1.0, double(tiles) * split / workers);
  }
  const double l2 = (double(c.block_m) / c.cluster_n + double(c.block_n) / c.cluster_m) *
                    kChunkBytes / model.l2 / 1000 * std::max(busy, 0.5);
  const double chunk = std::max({products, ingest, l2});
  const double bytes = double(args.m) * k_bytes + double(args.n) * k_bytes +
                       double(args.m) * args.n * size_of(args.out_dtype);
  return model.launch + std::max(main * chunk, bytes / model.memory / 1e6) + ends + combine;
}

// Calls visit(config) for every config of the warpgroup kernel that the model weighs.
template <class Visit>
void for_each_warpgroup_config(const GemmArgs& args, const GemmDevice& device, const Visit& visit) {
  struct Shape {
    int block_m, block_n;
    bool rows_are_w;
  };
  constexpr Shape kFp8Shapes[] = {{256, 128, false}, {128, 128, false}, {32, 128, true},
                                  {64, 128, true},   {96, 128, true},   {128, 128, true},
                                  {64, 256, true}};
  constexpr Shape k16BitShapes[] = {{128, 256, false}, {256, 128, false}, {128, 128, false},
                                    {32, 128, true},   {64, 128, true},   {96, 128, true},
                                    {128, 128, true},  {256, 128, true}};
  constexpr Shape kFp8HalfShapes[] = {
      {256, 128, false}, {128, 128, false}, {32, 128, true}, {64, 128, true}};  // float16 out
  constexpr Shape kFloatShapes[] = {{128, 128, false}, {32, 128, true}};        // float32 out
  const auto visit_shape = [&](const Shape& shape) {
    GemmConfig c;
    c.kernel = GemmConfig::Kernel::kWarpgroup;
    c.block_m = shape.block_m;
    c.block_n = shape.block_n;
    c.rows_are_w = shape.rows_are_w;
    // Tiles that are mostly beyond the matrix are not worth a look.
    if (c.block_m > 32 && args.m * 4 <= c.block_m) return;
    const int64_t k_bytes = args.k * size_of(args.a_dtype);
    const int chunks = static_cast<int>(ceil_div(k_bytes, kChunkBytes));
    for (const int cluster : {0, 1, 2}) {
      c.cluster_m = cluster == 1 ? 2 : 1;
      c.cluster_n = cluster == 2 ? 2 : 1;
      if ((c.cluster_m == 2 && args.m <= c.block_m) || (c.cluster_n == 2 && args.n <= c.block_n)) {
        continue;
      }
      constexpr int64_t kInFlight = 200 << 10;
      c.num_stages = static_cast<int>(
          std::clamp<int64_t>(kInFlight / ((c.block_m + c.block_n) * kChunkBytes), 3, kMaxStages));
      while (c.num_stages > 2 && warpgroup_shared_bytes(c, is_block_scaled(args)) + kStaticBytes >
                                     device.shared_bytes_per_block) {
        --c.num_stages;
      }
      const int64_t tiles =
          ceil_div(args.m, c.block_m * c.cluster_m) * ceil_div(args.n, c.block_n * c.cluster_n);
      const int workers = device.sm_count / (c.cluster_m * c.cluster_n);
      if (tiles > INT32_MAX) continue;
      c.schedule = GemmConfig::Schedule::kDataParallel;
      c.split_k = 1;
      visit(c);
      // Splits that fill the workers once, or nearly; each part at least four chunks.
      const int most =
          static_cast<int>(std::min<int64_t>({workers / tiles, chunks / 4, kMaxContributors}));
      c.schedule = GemmConfig::Schedule::kSplitK;
      for (c.split_k = std::max(2, most - 1); c.split_k <= most; ++c.split_k) visit(c);
      if (most >= 4) c.split_k = most / 2, visit(c);
      c.split_k = 1;
      if (tiles % workers != 0 && tiles > workers / 4 && tiles < int64_t{workers} * 64 &&
          chunks >= 8) {
        c.schedule = GemmConfig::Schedule::kHybrid;
        visit(c);
      }
    }
  };
  if (is_fp8(args.a_dtype) && args.out_dtype == DType::kFloat16) {
    for (const Shape& shape : kFp8HalfShapes) visit_shape(shape);
  } else if (is_fp8(args.a_dtype)) {
    for (const Shape& shape : kFp8Shapes) visit_shape(shape);
  } else if (args.out_dtype == DType::kFloat32) {
    for (const Shape& shape : kFloatShapes) visit_shape(shape);
  } else {
    for (const Shape& shape : k16BitShapes) visit_shape(shape);
  }
}

// Whether wgmma serves these operands: sm_90a, both of one type, aligned; FP8 sums are short of
// float32, so their output is 16-bit.
inline bool fits_warpgroup(const GemmArgs& args, const GemmDevice& device) {
  return device.compute_capability == 90 && args.k > 0 && args.a_dtype == args.w_dtype &&
         args.a_dtype != DType::kFloat8E4M3FNUZ && has_aligned_rows(args) &&
         (!is_fp8(args.a_dtype) || args.out_dtype != DType::kFloat32) &&
         (is_fp8(args.a_dtype) || !is_block_scaled(args)) &&
         (args.m == 1 || args.a_stride >= args.k) && (args.n == 1 || args.w_stride >= args.k);
}

inline GemmConfig choose(const GemmArgs& args, const GemmDevice& device) {
  GemmConfig best;
  const bool fnuz =
      args.a_dtype == DType::kFloat8E4M3FNUZ || args.w_dtype == DType::kFloat8E4M3FNUZ;
  if (fnuz || args.k == 0) return best;
  best.kernel = GemmConfig::Kernel::kMma;
  if (!fits_warpgroup(args, device)) return best;
  double best_time = INFINITY;
  for_each_warpgroup_config(args, device, [&](const GemmConfig& c) {
    const double time = predict(args, c, device);
    if (time < best_time) best_time = time, best = c;
  });
  return best;
}

inline Status check(const GemmArgs& args, const GemmConfig& c, const GemmDevice& device) {
  const bool fnuz =
      args.a_dtype == DType::kFloat8E4M3FNUZ || args.w_dtype == DType::kFloat8E4M3FNUZ;
  if (c.kernel == GemmConfig::Kernel::kPlain) return nullptr;
  if (fnuz || args.k == 0) return "gemm config: only plain serves e4m3fnuz, and no K";
  if (c.kernel == GemmConfig::Kernel::kMma) return nullptr;
  if (!fits_warpgroup(args, device)) {
    return "gemm config: warpgroup asks for sm_90, operands of one type with rows at multiples of "
           "16 bytes, and a 16-bit output of FP8";
  }
  if (c.num_stages < 2 || c.num_stages > kMaxStages) return "gemm config: num_stages: 2 to 8";
  if (warpgroup_shared_bytes(c, is_block_scaled(args)) + kStaticBytes >
      device.shared_bytes_per_block) {
    return "gemm config: num_stages do not fit in shared memory";
  }
  if (c.cluster_m * c.cluster_n > 2) return "gemm config: a cluster has at most two blocks";
  const TileSchedule s =
      cut_product(c, args.m, args.n, args.k * size_of(args.a_dtype), device.sm_count);
  if (s.split > kMaxContributors) return "gemm config: split_k is at most 32";
  return nullptr;
}

}  // namespace cuda
}  // namespace rocm_kernels
