// A config of the AMD gemm: the tile, and how the work is divided. As a struct, as text, and what
// it asks of the device. No HIP header: tests and tools include it too.
#pragma once

#include "../../blocks/product/cdna/problem.h"
#include "../../blocks/product/cdna/shape.h"
#include "../../blocks/product/schedule.h"
#include "tiles.h"

namespace rocm_kernels::cdna {

struct GemmConfig {
  enum class Design : int32_t {
    kTiled,  // tiles by matrix instructions (main_loop.h)
    kPlain,  // no matrix instructions: any GPU, either FP8 dialect (plain.h)
  };
  Design design = Design::kTiled;
  int32_t block_m = 128, block_n = 128;  // of a tile: see tiles.h
  int32_t split_k = 1;                   // workgroups that share the K of a tile, or kStreamKSplit
  int32_t workgroups = 0;                // stream-K: how many
  int32_t whole_rounds = 0;              // stream-K: rounds of whole tiles before the rest
  int32_t group_m = 8;                   // tiles of M that are walked down before the next of N
  int32_t xcds = 8;                      // > 1: workers of neighbouring tiles run on one XCD

  static constexpr const char* kDesigns[] = {"tiled", "plain"};
  static constexpr ConfigField<GemmConfig> kFields[] = {
      {"block_m", &GemmConfig::block_m},
      {"block_n", &GemmConfig::block_n},
      {"split_k", &GemmConfig::split_k},
      {"workgroups", &GemmConfig::workgroups},
      {"whole_rounds", &GemmConfig::whole_rounds},
      {"group_m", &GemmConfig::group_m},
      {"xcds", &GemmConfig::xcds},
  };
  static constexpr Status kMustRead =
      "gemm config: it must read like 'tiled block_m=128 block_n=128 split_k=1 workgroups=0 "
      "whole_rounds=0 group_m=8 xcds=8'";
};

// ---- What a config asks of the device ----------------------------------------------------------

inline TileOrder order_of(const GemmShape& s, const GemmConfig& c) {
  return {(s.m + c.block_m - 1) / c.block_m, (s.n + c.block_n - 1) / c.block_n, c.group_m};
}

// Units of work are lines of K of a tile; there is one even where K is 0, so that out is written.
inline Schedule schedule_of(const GemmShape& s, const GemmConfig& c) {
  const TileOrder order = order_of(s, c);
  const int32_t elements = kLine / s.a_bytes;
  const int32_t lines = s.k <= elements ? 1 : (s.k + elements - 1) / elements;
  return Schedule::make(order.tiles_m * order.tiles_n, lines, c.split_k, c.workgroups, c.xcds,
                        c.whole_rounds);
}

// Whether the config can serve the shape: nullptr, or why not.
inline Status check_config(const GemmShape& s, const GemmConfig& c) {
  if (c.design == GemmConfig::Design::kPlain) return nullptr;
  if (s.block_scaled && s.w_bytes != 1) return "block scales need FP8 w";
  if (find_gemm_tile(c.block_m, c.block_n, s.block_scaled) < 0) {
    return "gemm config: block_m x block_n must be 256 x 256 (no block scales), 256 x 128, "
           "128 x 128, 128 x 64, 64 x 128 or 64 x 64";
  }
  if (c.split_k < 0 || c.split_k > 255 || (c.split_k == kStreamKSplit && c.workgroups < 1)) {
    return "gemm config: split_k must be 1 to 255, or 0 with workgroups >= 1 (stream-K)";
  }
  if (c.xcds < 1 || c.group_m < 1 || c.whole_rounds < 0) {
    return "gemm config: xcds and group_m must be at least 1, whole_rounds at least 0";
  }
  const int64_t tiles =
      int64_t{(s.m + c.block_m - 1) / c.block_m} * ((s.n + c.block_n - 1) / c.block_n);
  const int64_t lines = (int64_t{s.k} * s.a_bytes + kLine - 1) / kLine;
  if (tiles * (lines > 0 ? lines : 1) >= int64_t{1} << 31 || tiles * c.split_k >= int64_t{1}
                                                                                      << 31) {
    return "gemm config: more than 2^31 lines of K in all tiles; take a larger tile";
  }
  if (c.split_k > 1 && c.split_k > lines) {
    return "gemm config: split_k must not exceed the lines of K (128 bytes of a row of a each)";
  }
  if (c.split_k == kStreamKSplit) {
    const int64_t left = tiles - int64_t{c.whole_rounds} * c.workgroups;
    if (left <= 0) return "gemm config: whole_rounds leaves no tile to divide";
    if (c.workgroups > left * lines || c.workgroups / left >= 254) {
      return "gemm config: more stream-K workgroups than lines of K, or than 253 a tile";
    }
  }
  const int64_t workgroups = c.split_k == kStreamKSplit ? c.workgroups : tiles * c.split_k;
  if (c.xcds > workgroups) return "gemm config: xcds must be at most the number of workgroups";
  return nullptr;
}

}  // namespace rocm_kernels::cdna
