// A config of the CUDA gemm: which kernel, and how the work is divided. As a struct, as text, and
// what it asks of the device. No CUDA header.
#pragma once

#include "../../blocks/product/config_fields.h"
#include "../../blocks/product/cuda/schedule.h"
#include "../../blocks/product/cuda/shape.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

struct GemmConfig {
  enum class Design : int32_t {
    kPlain,      // any types, one element at a time (plain.cu)
    kMma,        // mma.sync: sm_80 and later (mma.cuh)
    kWarpgroup,  // TMA into wgmma: sm_90a alone (warpgroup.cuh), to which all fields belong
  };
  enum Schedule : int32_t { kDataParallel, kSplitK, kStreamK, kHybrid };  // see schedule.h
  Design design = Design::kPlain;
  int32_t block_m = 128, block_n = 128;
  int32_t swap_ab = 0;                   // 1: w is the 64-row operand of wgmma, tokens are columns
  int32_t cluster_m = 1, cluster_n = 1;  // blocks that share tiles of w, of a
  int32_t num_stages = 4;
  int32_t schedule = kDataParallel;
  int32_t split_k = 1;  // kSplitK
  int32_t group_m = 8;  // tiles of rows before the next columns

  int block_r() const { return swap_ab ? block_n : block_m; }
  int block_c() const { return swap_ab ? block_m : block_n; }
  int cluster_r() const { return swap_ab ? cluster_n : cluster_m; }
  int cluster_c() const { return swap_ab ? cluster_m : cluster_n; }

  static constexpr const char* kScheduleNames[] = {"data_parallel", "split_k", "stream_k",
                                                   "hybrid"};
  static constexpr const char* kDesigns[] = {"plain", "mma", "warpgroup"};
  static constexpr ConfigField<GemmConfig> kFields[] = {
      {"block_m", &GemmConfig::block_m},
      {"block_n", &GemmConfig::block_n},
      {"swap_ab", &GemmConfig::swap_ab},
      {"cluster_m", &GemmConfig::cluster_m},
      {"cluster_n", &GemmConfig::cluster_n},
      {"num_stages", &GemmConfig::num_stages},
      {"schedule", &GemmConfig::schedule, kScheduleNames, 4},
      {"split_k", &GemmConfig::split_k},
      {"group_m", &GemmConfig::group_m},
  };
  static constexpr Status kMustRead =
      "gemm config: it must read like 'warpgroup block_m=128 block_n=128 swap_ab=0 cluster_m=1 "
      "cluster_n=1 num_stages=5 schedule=data_parallel split_k=1 group_m=8'";
};

// ---- What a config asks of the device --------------------------------------------------------

inline int64_t warpgroup_shared_bytes(const GemmArgs& args, const GemmConfig& c) {
  const int scales =
      is_block_scaled(args) ? warp_scale_bytes(c.block_r(), c.block_c(), c.swap_ab, false) : 0;
  return warpgroup_shared_bytes(
      c.block_m, c.block_n, c.num_stages,
      scales + warp_staging_bytes(c.block_r(), c.block_c(), c.swap_ab, is_fp8(args.a_dtype), scales,
                                  is_widened(args)));
}

// The cut of a product by a config: tiles as workers take them.
inline TileSchedule cut_product(const GemmConfig& c, int64_t m, int64_t n, int64_t k_bytes,
                                int sm_count) {
  const int64_t tiles = ceil_div(m, c.block_m * c.cluster_m) * ceil_div(n, c.block_n * c.cluster_n);
  const int chunks = static_cast<int>(ceil_div(k_bytes, kChunkBytes));
  const int most = sm_count / (c.cluster_m * c.cluster_n);
  int64_t whole = tiles;
  int split_k = 1;
  int64_t units = tiles;
  switch (c.schedule) {
    case GemmConfig::kDataParallel:
      break;
    case GemmConfig::kSplitK:
      split_k = std::min(c.split_k, chunks);
      if (split_k > 1) whole = 0;
      units = tiles * split_k;
      break;
    case GemmConfig::kStreamK:
      whole = 0, split_k = kStreamKSplit;
      units = std::min(tiles * chunks, tiles * (kMaxContributors - 2));
      break;
    case GemmConfig::kHybrid:
      // The last wave that is not full, and the one before it, so that no interval is short.
      whole = tiles % most == 0 ? tiles : std::max<int64_t>(0, tiles / most - 1) * most;
      split_k = whole == tiles ? 1 : kStreamKSplit;
      units = whole == tiles ? tiles : std::min(tiles * chunks, tiles * (kMaxContributors - 2));
      break;
  }
  return TileSchedule::make(static_cast<int32_t>(tiles), chunks, static_cast<int32_t>(whole),
                            split_k, static_cast<int32_t>(std::min<int64_t>(most, units)));
}

// Flags first, then the partial sums.
inline int64_t flag_bytes(const TileSchedule& schedule, int cluster) {
  if (schedule.slots() == 0) return 0;
  return ceil_div(int64_t{schedule.shared_tiles()} * cluster * kMathGroups * kMaxSteps *
                      kMaxContributors * 8,
                  256) *
         256;
}
inline int64_t workspace_bytes(const GemmConfig& c, const TileSchedule& schedule) {
  const int cluster = c.cluster_m * c.cluster_n;
  return flag_bytes(schedule, cluster) +
         schedule.slots() * cluster * int64_t{c.block_m} * c.block_n * 4;
}

// Stages of FP8 weights before they are widened, by what a config leaves of shared memory.
inline int narrow_stages_of(const GemmArgs& args, const GemmConfig& c, const GemmDevice& device) {
  const int narrow = narrow_row_bytes(args.a_dtype, args.w_dtype);
  if (narrow == 0) return 0;
  const int64_t left =
      device.shared_bytes_per_block - kStaticBytes - warpgroup_shared_bytes(args, c);
  return static_cast<int>(std::min<int64_t>(left / (c.block_n * narrow), kMaxStages));
}

// What the tensor cores' kernels leave: e4m3fnuz, and no K.
inline bool needs_plain(const GemmArgs& args) {
  return args.a_dtype == DType::kFloat8E4M3FNUZ || args.w_dtype == DType::kFloat8E4M3FNUZ ||
         args.k == 0;
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

inline Status check_config(const GemmArgs& args, const GemmConfig& c, const GemmDevice& device) {
  if (c.design == GemmConfig::Design::kPlain) return nullptr;
  if (needs_plain(args)) return "gemm config: only plain serves e4m3fnuz, and no K";
  if (c.design == GemmConfig::Design::kMma) return nullptr;
  if (!fits_warpgroup(args, device)) {
    return "gemm config: warpgroup asks for sm_90, operands of one type or FP8 weights, rows at "
           "multiples of 16 bytes, and a 16-bit output where one of them is FP8";
  }
  if (c.swap_ab < 0 || c.swap_ab > 1) return "gemm config: swap_ab must be 0 or 1";
  if (find_tile(args, c.block_m, c.block_n, c.swap_ab) < 0) return kNoTile;
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
  if (c.split_k < 1 || c.group_m < 1 || c.group_m > 1024) {
    return "gemm config: split_k must be at least 1, group_m 1 to 1024";
  }
  const TileSchedule s =
      cut_product(c, args.m, args.n, args.k * size_of(args.a_dtype), device.sm_count);
  if (s.split_k > kMaxContributors) return "gemm config: split_k is at most 32";
  return nullptr;
}

}  // namespace cuda
}  // namespace rocm_kernels
