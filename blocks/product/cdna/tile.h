// A tile of a product on AMD's matrix instructions, and what it costs: registers, LDS, workgroups
// that a compute unit holds at once. Each op has its own table of them. No HIP header.
#pragma once

#include <algorithm>
#include <cstdint>

#include "../../../common/cdna/operands.h"
#include "shape.h"

namespace rocm_kernels::cdna {

// K is walked in lines: 128 bytes of each row of both operands, 128 elements of FP8 or 64 of 16
// bits. FP8 weights of a 16-bit a are decoded on their way to LDS, and so have 64 elements a line.
constexpr int kLine = 128;
constexpr int32_t line_elements(MmaKind kind) { return kLine / a_bytes(kind); }

struct GemmTile {
  int32_t block_m, block_n;
  int32_t waves_m, waves_n;  // of the workgroup, side by side
  int32_t vgprs;             // that no kernel of the tile exceeds
  bool block_scales;         // served with them, too
  int32_t lines_ahead = 1;   // that are on their way to registers

  constexpr int32_t waves() const { return waves_m * waves_n; }
  constexpr int32_t threads() const { return waves() * 64; }
  constexpr int32_t lds_bytes() const { return (block_m + block_n) * kLine; }
  constexpr int32_t wave_m() const { return block_m / waves_m; }
  constexpr int32_t wave_n() const { return block_n / waves_n; }
};

// Workgroups of a tile that a compute unit holds at once.
inline int32_t workgroups_at_once(const GemmTile& tile, const Target& target) {
  const int32_t by_registers = 512 / tile.vgprs * 4 / tile.waves();
  return std::max(1, std::min(by_registers, target.lds_bytes / tile.lds_bytes()));
}

}  // namespace rocm_kernels::cdna
