// A config of the mixture-of-experts ops on AMD GPUs: which kernels multiply, and what they ask of
// the device. No HIP header.
#pragma once

#include <algorithm>

#include "../../blocks/product/cdna/shape.h"
#include "../config.h"
#include "tiles.h"

namespace rocm_kernels::cdna::moe {

struct MoeConfig : MoeTiling {
  enum class Design : int32_t {
    kPlain,     // no matrix instructions: any types and alignment, any GPU (gpu/plain.h)
    kStreamed,  // few rows an expert: weights without a pause (streamed.h)
    kTiled,     // tiles by matrix instructions (tiled.h)
  };
  static constexpr const char* kDesigns[] = {"plain", "streamed", "tiled"};
  Design design = Design::kPlain;

  // What these say of the launches of a layer stands in moe/gpu/fused_moe.h.
  //
  // The slots of a layer of few are those of a wave's lanes (streamed_tile.h); an id has nine bits.
  bool routes_itself(int64_t slots, int64_t experts) const {
    constexpr int64_t kSlotsOfWave = 64;
    return design == Design::kStreamed && slots <= kSlotsOfWave && experts <= kFewExperts;
  }
  bool ends_in_groups() const { return design == Design::kTiled && block_n == 256; }
  static constexpr bool is_resident() { return false; }
  static constexpr bool sorts_rows() { return false; }
  static constexpr bool takes_units() { return false; }
};

// The kernels with matrix instructions take these operands.
inline Status check_operands(const MoeShape& s, const Target& target) {
  if (!target.matrix_instructions) return "moe config: only the plain design runs here";
  if (s.n == 0 || s.k == 0) return "moe config: only the plain design takes an empty product";
  if (is_fp8(s.w()) && s.w() != target.fp8) {
    return "moe config: w's FP8 dialect is not this GPU's; only the plain design takes it";
  }
  if (s.a() == DType::kFloat16 && s.w() != DType::kFloat16) {
    return "moe config: only the plain design takes float16 with narrower weights";
  }
  if (!s.compact) return "moe config: an expert's w must span less than 2 GiB; make it contiguous";
  if (s.fused && (s.blocks & 1) != 0 && !s.interleaved && s.n / 2 % 32 != 0) {
    return "moe config: with block scales I must be a multiple of 32";
  }
  return nullptr;
}

inline Status check_config(const MoeShape& s, const MoeConfig& c, const Target& target) {
  if (c.design == MoeConfig::Design::kPlain) {
    return equal_configs(c, MoeConfig{}) ? nullptr
                                         : "moe config: the plain design takes its default fields";
  }
  if (const Status error = check_operands(s, target)) return error;
  if (c.design == MoeConfig::Design::kTiled && find_moe_tile(c.block_m, c.block_n) < 0) {
    return "moe config: block_m x block_n must be 128 x 256, 128 x 128, 64 x 128 or 32 x 128";
  }
  if (c.design == MoeConfig::Design::kStreamed) {
    const bool fp4 = s.w() == DType::kFloat4E2M1x2;
    if (!has_streamed_tile(c.block_m, c.block_n, fp4)) {
      return "moe config: streamed tiles are 16 x 16, 16 x 32 or 32 x 32, of MXFP4 8 x 16, 8 x 32 "
             "or 16 x 32";
    }
    if (fp4 && (s.k < streamed_k_block(true) || (s.fused && s.n / 2 < streamed_k_block(true)))) {
      return "moe config: MXFP4 is streamed by lines of 256 elements of K, of which a row must "
             "have one";
    }
  }
  const int64_t lines = (int64_t{s.n} / 2 * size_of(s.a()) + kLine - 1) / kLine;
  if (c.split_k < 1 || c.split_k > (s.fused ? lines : 1)) {
    return "moe config: split_k must be at least 1, at most the lines of I (128 bytes of a row of "
           "h "
           "each), and 1 for grouped_gemm";
  }
  if (c.group_m < 1 || c.xcds < 1) return "moe config: group_m and xcds must be at least 1";
  if (c.walks_experts()) return "moe config: order=expert is NVIDIA's warpgroup design's";
  const int64_t columns = std::max(s.n, s.k);
  const int64_t tiles = int64_t{s.rows} * ((columns + c.block_n - 1) / c.block_n) * c.split_k;
  if (tiles >= int64_t{1} << 31) return "moe config: 2^31 tiles or more; take a larger tile";
  return nullptr;
}

}  // namespace rocm_kernels::cdna::moe
