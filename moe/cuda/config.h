// A config of the mixture-of-experts ops on NVIDIA GPUs: which kernels multiply, what they ask of
// the device, and by which pipeline they serve a shape. No CUDA header.
#pragma once

#include <algorithm>

#include "../config.h"
#include "pipelines.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda::moe {

struct MoeConfig : MoeTiling {
  enum class Design : int32_t {
    kPlain,          // no tensor cores: any types and alignment, any GPU (gpu/plain.h)
    kStreamed,       // few rows an expert: weights without a pause (streamed.cuh)
    kTiled,          // tiles by mma.sync (tiled.cuh)
    kWarpgroup,      // many rows an expert: gemm's tiles by TMA and wgmma (grouped_tiles.cuh)
    kResident,       // few tokens in FP8: blocks keep all rows, and quantise them (resident.cuh)
    kStreamedWgmma,  // few rows an expert in FP8: streamed to wgmma (streamed_wgmma.cuh)
  };
  static constexpr const char* kDesigns[] = {"plain",     "streamed", "tiled",
                                             "warpgroup", "resident", "streamed_wgmma"};
  Design design = Design::kPlain;

  // What these say of the launches of a layer stands in moe/gpu/fused_moe.h.
  bool routes_itself(int64_t, int64_t) const {
    return is_resident() || design == Design::kStreamed || design == Design::kStreamedWgmma;
  }
  // The tile of two blocks of a cluster has the 128 columns.
  bool ends_in_groups() const { return design == Design::kWarpgroup && block_n == 128; }
  bool is_resident() const { return design == Design::kResident; }
  bool takes_units() const { return design == Design::kStreamedWgmma; }
  bool sorts_rows() const { return design == Design::kWarpgroup; }
};

// The products of a layer: gate_up and down. (grouped_gemm's is the first.)
inline int32_t k_of(const MoeShape& s, int product) { return product == 0 ? s.k : s.n / 2; }
inline int32_t n_of(const MoeShape& s, int product) { return product == 0 ? s.n : s.k; }
inline int32_t longest_k(const MoeShape& s) {
  return s.fused ? std::max(k_of(s, 0), k_of(s, 1)) : s.k;
}
inline StreamedStage streamed_stage(const MoeShape& s, const MoeConfig& c, int product) {
  return streamed_stage(c, s.a(), s.w(), k_of(s, product), s.blocks >> product & 1);
}

inline ResidentShape resident_shape(const MoeShape& s, const MoeDevice& device, int product) {
  const ResidentSplit split =
      resident_split(product == 1, most_row_tiles(s.rows, s.experts, kResidentBlockM),
                     n_of(s, product) / kResidentBlockN, k_of(s, product), device.sm_count);
  return resident_shape(product == 1, s.tokens, s.rows, k_of(s, product), s.blocks >> product & 1,
                        split);
}

// By what the rows of w that share a block's scales ask for.
inline Status check_halves(const MoeShape& s, int32_t block_n) {
  if ((s.blocks & 1) != 0 && !s.interleaved && s.n / 2 % (block_n / 2) != 0) {
    return "moe config: with block scales, I must be a multiple of half of block_n";
  }
  return nullptr;
}

inline Status check_streamed(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (device.compute_capability < 90) return "moe config: the streamed design needs sm_90 or later";
  if (!s.fused) return "moe config: the streamed design serves fused_moe alone";
  if ((c.block_m != 8 && c.block_m != 16 && c.block_m != kStreamedMaxM) ||
      (c.block_n != 32 && c.block_n != kStreamedMaxN)) {
    return "moe config: streamed tiles are 8, 16 or 32 x 32 or 64";
  }
  if (c.split_k != 1) return "moe config: the streamed design does not divide K; split_k must be 1";
  if (s.rows > kStreamedMaxSlots) return "moe config: more than 4096 slots are not streamed";
  if (s.experts > kFewExperts) return "moe config: more than 512 experts are not streamed";
  for (int product = 0; product < 2; ++product) {
    const int32_t k = k_of(s, product);
    if (k * size_of(s.a()) % 16 != 0 || w_row_bytes(s.w(), k) % 16 != 0) {
      return "moe config: streamed rows must be whole numbers of 16 bytes";
    }
    if (streamed_stages(streamed_stage(s, c, product), s.rows, device) < 2) {
      return "moe config: an SM has too little shared memory to stream by this tile";
    }
  }
  return check_halves(s, streamed_stage(s, c, 0).block_n);
}

inline Status check_streamed_wgmma(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (device.compute_capability != 90) return "moe config: the streamed_wgmma design is sm_90a's";
  if (!s.fused) return "moe config: the streamed_wgmma design serves fused_moe alone";
  if (s.a() != DType::kFloat8E4M3FN || s.w() != DType::kFloat8E4M3FN) {
    return "moe config: the streamed_wgmma design multiplies FP8 alone";
  }
  if ((c.block_m != 8 && c.block_m != 16 && c.block_m != kStreamedMaxM) ||
      c.block_n != kStreamedWgmmaN) {
    return "moe config: streamed_wgmma tiles are 8, 16 or 32 x 64";
  }
  if (c.split_k != 1) {
    return "moe config: the streamed_wgmma design does not divide K; split_k must be 1";
  }
  if (s.rows > kStreamedMaxSlots) return "moe config: more than 4096 slots are not streamed";
  if (s.experts > kFewExperts) return "moe config: more than 512 experts are not streamed";
  for (int product = 0; product < 2; ++product) {
    if (k_of(s, product) % 16 != 0) {
      return "moe config: streamed rows must be whole numbers of 16 bytes";
    }
    const StreamedWgmmaStage stage = {c.block_m, (s.blocks >> product & 1) != 0};
    if (streamed_wgmma_stages(stage, s.rows, device) < kStreamedWgmmaLeastStages) {
      return "moe config: an SM has too little shared memory to stream by this tile";
    }
  }
  return check_halves(s, c.block_n);
}

inline Status check_resident(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (device.compute_capability < 90) return "moe config: the resident design needs sm_90 or later";
  if (!s.fused) return "moe config: the resident design serves fused_moe alone";
  if (s.a() != DType::kFloat8E4M3FN) return "moe config: the resident design quantises to FP8";
  if (c.block_m != kResidentBlockM || c.block_n != kResidentBlockN) {
    return "moe config: resident tiles are 8 x 16";
  }
  if (c.split_k != 1) return "moe config: the resident design does not divide K; split_k must be 1";
  if (!s.x_aligned) return "moe config: resident rows of x must start at multiples of 16 bytes";
  if (s.rows > kResidentSlots) return "moe config: more than 32 slots are not resident";
  for (int product = 0; product < 2; ++product) {
    if (k_of(s, product) % 16 != 0) {
      return "moe config: resident rows must be whole numbers of 16 bytes";
    }
    if (resident_stages(resident_shape(s, device, product), device) < kResidentLeastStages) {
      return "moe config: rows of this length leave too little shared memory to be resident";
    }
  }
  return nullptr;
}

inline Status check_warpgroup(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (device.compute_capability != 90) return "moe config: the warpgroup design is sm_90a's";
  if (!is_moe_warpgroup_tile(c.block_m, c.block_n) ||
      !fits_registers({c.block_m, c.block_n}, s.blocks != 0, s.a() != s.w())) {
    return "moe config: warpgroup tiles are 256 x 128, but for block scales with 16-bit inputs, "
           "128 x 128, 64 x 256 and 32 x 256";
  }
  if (c.split_k != 1) {
    return "moe config: the warpgroup design does not divide K; split_k must be 1";
  }
  // What the tensor core's own sums lack shows in an output that is not rounded more than they are
  // (gemm.md has the errors). A layer rounds h, and out.
  if (!s.fused && s.out() != DType::kBFloat16 && (is_fp8(s.a()) || s.out() == DType::kFloat32)) {
    return "moe config: the warpgroup design's sums are too coarse for this output";
  }
  if (s.fused && (s.blocks & 1) != 0 && !s.interleaved && s.n / 2 % 64 != 0) {
    return "moe config: warpgroup tiles of block scales take an I that is a multiple of 64";
  }
  return nullptr;
}

inline Status check_config(const MoeShape& s, const MoeConfig& c, const MoeDevice& device) {
  if (c.design == MoeConfig::Design::kPlain) {
    return equal_configs(c, MoeConfig{}) ? nullptr
                                         : "moe config: the plain design takes its default fields";
  }
  if (s.n == 0 || s.k == 0) return "moe config: only the plain design takes an empty product";
  if (s.w() == DType::kFloat8E4M3FNUZ) {
    return "moe config: only the plain design takes float8_e4m3fnuz";
  }
  if (s.w() == DType::kFloat4E2M1x2 && s.a() != DType::kBFloat16) {
    return "moe config: only the plain design takes float16 with MXFP4";
  }
  if (!s.aligned) return "moe config: rows must start at multiples of 16 bytes, and not overlap";
  if (c.group_m < 1 || c.xcds != 1) return "moe config: group_m must be at least 1, xcds 1";
  if (c.walks_experts() && c.design != MoeConfig::Design::kWarpgroup) {
    return "moe config: order=expert is the warpgroup design's";
  }
  if (c.design == MoeConfig::Design::kStreamed) return check_streamed(s, c, device);
  if (c.design == MoeConfig::Design::kStreamedWgmma) return check_streamed_wgmma(s, c, device);
  if (c.design == MoeConfig::Design::kResident) return check_resident(s, c, device);
  if (c.design == MoeConfig::Design::kWarpgroup) return check_warpgroup(s, c, device);
  const int tile = find_moe_tile(c.block_m, c.block_n);
  if (tile < 0) {
    return "moe config: block_m x block_n must be 128 x 128, 64 x 128, 32 x 64 or 16 x 64";
  }
  if (kMoeTiles[tile].shared_bytes(moe_step_bytes_a(s.a(), s.w())) >
      device.shared_bytes_per_block) {
    return "moe config: a block of this GPU has too little shared memory for this tile";
  }
  const int64_t blocks = (int64_t{s.n} / 2 + kScaleBlock - 1) / kScaleBlock;
  if (c.split_k < 1 || c.split_k > (s.fused ? blocks : 1)) {
    return "moe config: split_k must be at least 1, at most the blocks of 128 of I, and 1 for "
           "grouped_gemm";
  }
  const int64_t columns = std::max(s.n, s.k);
  const int64_t tiles = int64_t{s.rows} * ((columns + c.block_n - 1) / c.block_n) * c.split_k;
  if (tiles >= int64_t{1} << 31) return "moe config: 2^31 tiles or more; take a larger tile";
  return nullptr;
}

// Whether FP8 can be streamed to wgmma, by the smallest of its tiles.
inline bool streams_to_wgmma(const MoeShape& s, const MoeDevice& device) {
  MoeConfig config;
  config.design = MoeConfig::Design::kStreamedWgmma;
  config.block_m = 8;
  config.block_n = kStreamedWgmmaN;
  return check_config(s, config, device) == nullptr;
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
