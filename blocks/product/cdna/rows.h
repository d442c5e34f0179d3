// The rows of one operand that meet in a tile: where they lie in memory, and their block scales.
//
// A kernel's loaders ask for the bytes from base() to row `row` of the tile, kOutside for one that
// is not the matrix's, and likewise for its scale.
#pragma once

#include "../../../common/cdna/buffer.h"
#include "problem.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

// Rows one after the other: those of `matrix` from `begin` on.
struct DenseRows {
  const uint8_t* matrix;  // [rows, K]
  int64_t stride;         // bytes
  int begin, rows;
  ScaleView scale;
  int scale_rows;  // that share a block scale: 1 of a, 128 of w

  static ROCM_KERNELS_DEVICE DenseRows of_a(const GemmProblem& p, int begin) {
    return {p.a, p.a_stride, begin, p.m, p.scale_a, 1};
  }
  static ROCM_KERNELS_DEVICE DenseRows of_w(const GemmProblem& p, int begin) {
    return {p.w, p.w_stride, begin, p.n, p.scale_w, static_cast<int>(kScaleBlock)};
  }

  ROCM_KERNELS_DEVICE const uint8_t* base() const { return matrix + begin * stride; }
  ROCM_KERNELS_DEVICE uint32_t offset(int row) const {
    return begin + row < rows ? static_cast<uint32_t>(row * stride) : kOutside;
  }
  ROCM_KERNELS_DEVICE const float* scales() const {
    return scale.data + begin / scale_rows * scale.row_stride;
  }
  ROCM_KERNELS_DEVICE uint32_t scale_offset(int row) const {
    const int inside = begin + row < rows ? begin + row : rows - 1;
    const int from_base = inside / scale_rows - begin / scale_rows;
    return static_cast<uint32_t>(from_base * scale.row_stride * 4);
  }
};

#endif

}  // namespace rocm_kernels::cdna
