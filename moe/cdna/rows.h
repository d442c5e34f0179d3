// Rows (blocks/product/cdna/rows.h) of a tile of a grouped product: gathered rows of a, an expert's
// rows of w.
#pragma once

#include "../../blocks/product/cdna/rows.h"
#include "../gpu/problem.h"

namespace rocm_kernels::cdna::moe {

#if ROCM_KERNELS_CDNA

// Rows of x: the tokens of the slots [begin, end) of an expert.
struct GatheredRows {
  const uint8_t* matrix;  // [T, H], which spans less than 2 GiB
  int64_t stride;         // bytes
  const int32_t* slots;
  int slots_of_token, begin, end;
  ScaleView scale;

  ROCM_KERNELS_DEVICE const uint8_t* base() const { return matrix; }
  ROCM_KERNELS_DEVICE uint32_t offset(int row) const {
    return begin + row < end ? static_cast<uint32_t>(token(begin + row) * stride) : kOutside;
  }
  ROCM_KERNELS_DEVICE const float* scales() const { return scale.data; }
  ROCM_KERNELS_DEVICE uint32_t scale_offset(int row) const {
    const int inside = begin + row < end ? begin + row : end - 1;
    return static_cast<uint32_t>(token(inside) * scale.row_stride * 4);
  }

 private:
  ROCM_KERNELS_DEVICE int token(int row) const { return slots[row] / slots_of_token; }
};

// The rows of a that a tile of rows multiplies.
template <bool kGateUp>
ROCM_KERNELS_DEVICE auto rows_of_a(const GroupedProblem& p, const RowTile& tile, int bytes) {
  const auto* a = static_cast<const uint8_t*>(p.a);
  const int64_t stride = p.a_stride * bytes;
  if constexpr (kGateUp) {
    return GatheredRows{a, stride, p.row_slots, p.slots_of_token, tile.begin, tile.end, p.scale_a};
  } else {
    return DenseRows{a, stride, tile.begin, tile.end, p.scale_a, 1};
  }
}

// Rows of an expert's w that a tile of columns multiplies: see w_row_of().
template <bool kPaired, int kRun>
struct ExpertRows {
  const uint8_t* matrix;     // [N, K] of one expert, which spans less than 2 GiB
  int64_t stride;            // bytes
  const uint8_t* exponents;  // [N, K / 32]: MXFP4
  int64_t exponent_stride;
  ScaleView scale;
  int begin, n;
  bool interleaved;

  ROCM_KERNELS_DEVICE ExpertRows(const GroupedProblem& p, int expert, int first, int bytes)
      : matrix(static_cast<const uint8_t*>(p.w.data) + expert * p.w.expert_stride * bytes),
        stride(p.w.row_stride * bytes),
        exponents(p.w.mx_scales + expert * p.w.mx_expert_stride),
        exponent_stride(p.w.mx_row_stride),
        scale(p.w.scale_of(expert)),
        begin(first),
        n(p.n),
        interleaved(p.interleaved) {}

  // The row of w that `row` of the tile is, or -1.
  ROCM_KERNELS_DEVICE int w_row(int row) const {
    return w_row_of<kPaired, kRun>(begin, row, n, interleaved);
  }

  ROCM_KERNELS_DEVICE const uint8_t* base() const { return matrix; }
  ROCM_KERNELS_DEVICE uint32_t offset(int row) const {
    const int from = w_row(row);
    return from >= 0 ? static_cast<uint32_t>(from * stride) : kOutside;
  }
  ROCM_KERNELS_DEVICE uint32_t exponent_offset(int row) const {
    const int from = w_row(row);
    return from >= 0 ? static_cast<uint32_t>(from * exponent_stride) : kOutside;
  }
  ROCM_KERNELS_DEVICE const float* scales() const { return scale.data; }
  // kRun rows of a tile that begin at a multiple of it share a scale.
  ROCM_KERNELS_DEVICE uint32_t scale_offset(int row) const {
    const int from = w_row(row);
    return from >= 0 ? static_cast<uint32_t>(from / kScaleBlock * scale.row_stride * 4) : 0;
  }
};

#endif

}  // namespace rocm_kernels::cdna::moe
