// A config of the AMD skinny_gemm: which kernel, and how the work is divided. As a struct, as text,
// and what it asks of a workgroup. No HIP header: tests and tools include it too.
#pragma once

#include "../../blocks/product/cdna/shape.h"
#include "../../blocks/product/cdna/sink_lds.h"
#include "../../blocks/product/schedule.h"
#include "../../gemm/gemm.h"
#include "tiles.h"

namespace rocm_kernels::cdna::skinny {

struct SkinnyGemmConfig {
  enum class Design : int32_t {
    kRegisterPipeline,  // each wave streams w into registers (register_pipeline.h)
    kSpecialisedWaves,  // producers fill stages in LDS, consumers multiply (specialised_waves.h)
  };
  Design design = Design::kRegisterPipeline;
  int32_t block_n = 16;    // rows of w of a tile: see tiles.h
  int32_t waves = 8;       // of a workgroup: 4 or 8
  int32_t split_k = 1;     // workgroups that share the K of a tile, or kStreamKSplit
  int32_t workgroups = 0;  // stream-K: how many
  int32_t xcds = 1;        // > 1: workers of neighbouring tiles run on one XCD
  int32_t producers = 0;   // kSpecialisedWaves: waves that load; the others multiply
  int32_t sparse = 0;      // 1: the 4:2 sparse instruction serves 8 dense rows (FP8, M <= 8)

  static constexpr const char* kDesigns[] = {"register_pipeline", "specialised_waves"};
  static constexpr ConfigField<SkinnyGemmConfig> kFields[] = {
      {"block_n", &SkinnyGemmConfig::block_n}, {"waves", &SkinnyGemmConfig::waves},
      {"split_k", &SkinnyGemmConfig::split_k}, {"workgroups", &SkinnyGemmConfig::workgroups},
      {"xcds", &SkinnyGemmConfig::xcds},       {"producers", &SkinnyGemmConfig::producers},
      {"sparse", &SkinnyGemmConfig::sparse},
  };
  static constexpr Status kMustRead =
      "gemm config: it must read like 'register_pipeline block_n=16 waves=4 split_k=2 "
      "workgroups=0 xcds=8 producers=0 sparse=0'";
};

// The shape that speaks for its class of M (last_row_of_class): what serves it serves the class.
inline GemmShape class_of(GemmShape shape) {
  shape.m = static_cast<int32_t>(last_row_of_class(shape.m));
  return shape;
}

// ---- What a config asks of a workgroup ---------------------------------------------------------

inline Schedule schedule_of(const GemmShape& shape, const SkinnyGemmConfig& config) {
  return Schedule::make((shape.n + config.block_n - 1) / config.block_n, k_blocks_of(shape.k),
                        config.split_k, config.workgroups, config.xcds);
}

constexpr int32_t kLdsLimit = 65536 - 64;

// Stages of the specialised waves in LDS, each with two counters: 8 where they fit, else 4.
inline int32_t lds_stage_bytes(const GemmShape& s, const SkinnyGemmConfig& c) {
  const int32_t tiles = mma_tiles_of(block_m_of(s.m)) + mma_tiles_of(c.block_n);
  return tiles * transpose_bytes(s.a_bytes, s.w_bytes);
}
inline int32_t num_lds_stages(const GemmShape& s, const SkinnyGemmConfig& c) {
  return 8 * (lds_stage_bytes(s, c) + 8) <= kLdsLimit ? 8 : 4;
}

// LDS of a workgroup: the main loop's, and in the same place, later, the Sink's.
inline int32_t lds_bytes_of(const GemmShape& s, const SkinnyGemmConfig& c) {
  const bool specialised = c.design == SkinnyGemmConfig::Design::kSpecialisedWaves;
  const int32_t adders = specialised ? c.waves - c.producers : c.waves;
  const int32_t sink = waves_sink_bytes(adders, s.m, c.block_n);
  const int32_t loop = specialised ? num_lds_stages(s, c) * (lds_stage_bytes(s, c) + 8)
                                   : c.waves * transpose_bytes(s.a_bytes, s.w_bytes);
  return sink > loop ? sink : loop;
}

// Whether the design can serve the shape: nullptr, or why not.
inline Status check_config(const GemmShape& s, const SkinnyGemmConfig& c) {
  using Design = SkinnyGemmConfig::Design;
  if (s.m > kSkinnyGemmMaxRows) return "gemm config: the designs for few rows take 1 to 64";
  const bool fp8 = s.a_bytes == 1 && s.w_bytes == 1;
  const int tile = find_tile(block_m_of(s.m), c.block_n, s.a_bytes);
  if (tile < 0) {
    return "gemm config: block_n must be 8 (M <= 32), 16, 32 (not for 16-bit a of M > 32) "
           "or 64 (FP8 a of M = 17 to 32)";
  }
  if (s.block_scaled && s.w_bytes != 1) return "block scales need FP8 w";
  if (c.waves != 4 && c.waves != 8) return "gemm config: waves must be 4 or 8";
  if (c.design == Design::kSpecialisedWaves &&
      (c.waves != 8 || c.producers != 4 || !kSkinnyTiles[tile].specialised || !fp8 ||
       s.block_scaled)) {
    return "gemm config: specialised_waves needs 8 waves, 4 of them producers, block_n of "
           "16 or more, FP8 operands and no block scales";
  }
  if (c.sparse < 0 || c.sparse > 1 || (c.sparse && (s.m > 8 || !fp8 || s.block_scaled))) {
    return "gemm config: sparse must be 0, or 1 with FP8 operands, M <= 8 and no block "
           "scales";
  }
  if (c.split_k < 0 || c.split_k > 255 || (c.split_k == kStreamKSplit && c.workgroups < 1)) {
    return "gemm config: split_k must be 1 to 255, or 0 with workgroups >= 1 (stream-K)";
  }
  if (c.split_k > k_blocks_of(s.k)) {
    return "gemm config: split_k must not exceed the K blocks (128 elements each)";
  }
  if (c.xcds < 1) return "gemm config: xcds must be at least 1";
  if (lds_bytes_of(s, c) > kLdsLimit) {
    return "gemm config: the sums of so many waves, rows and columns exceed 64 KiB of LDS";
  }
  const Schedule schedule = schedule_of(s, c);
  if (c.split_k == kStreamKSplit &&
      (c.workgroups > schedule.tiles * schedule.k_blocks || c.workgroups / schedule.tiles >= 254)) {
    return "gemm config: more stream-K workgroups than K blocks of all tiles, or than 253 a "
           "tile";
  }
  if (c.xcds > schedule.workgroups()) {
    return "gemm config: xcds must be at most the number of workgroups";
  }
  return nullptr;
}

}  // namespace rocm_kernels::cdna::skinny
