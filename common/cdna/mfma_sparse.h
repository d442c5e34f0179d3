// The sparse trick: at M <= 8 the 4:2 sparse matrix instruction does twice the K of the dense one.
//
// v_smfmac takes a left operand of 16 rows of which each four elements of k hold two values, and
// says for each pair where among the four it stands. Eight dense rows of a become 16 sparse rows:
// of each four k, sparse row 2r holds the first two of dense row r, sparse row 2r + 1 the last two.
// The two sums of a dense row are added at the end, so its bits differ from those of the dense
// kind.
#pragma once

#include "mfma.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

template <>
struct Mma<MmaKind::kFp8Sparse> {
  static constexpr int kFragmentsW = 2;
  static constexpr int kFragmentsA = 2;
  static constexpr int kRowsA = 8;

  static ROCM_KERNELS_DEVICE constexpr int a_row(int row) { return row / 2; }

  // a is the left operand: lane 16 * g + j holds sparse rows 4 * g .. 4 * g + 3 for row j of w.
  static ROCM_KERNELS_DEVICE Accumulator multiply_add(const Words (&w)[kFragmentsW],
                                                      const Words (&a)[kFragmentsA], int lane,
                                                      Accumulator sum) {
    // Lanes have the fragments of dense row i / 2 and keep one half of every word.
    const bool odd = lane & 1;
    const uint32_t select = odd ? 0x07060302u : 0x05040100u;
    const int positions = odd ? static_cast<int>(0xEEEEEEEEu) : 0x44444444;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const detail::Words2 kept = {__builtin_amdgcn_perm(a[step].y, a[step].x, select),
                                   __builtin_amdgcn_perm(a[step].w, a[step].z, select)};
      sum = __builtin_amdgcn_smfmac_f32_16x16x64_fp8_fp8(
          __builtin_bit_cast(int __attribute__((ext_vector_type(2))), kept),
          __builtin_bit_cast(int __attribute__((ext_vector_type(4))), w[step]), sum, positions, 0,
          0);
    }
    return sum;
  }

  // A lane has both halves of dense rows 2 * g and 2 * g + 1. There is one tile of a: i is 0.
  template <int kPitch>
  static ROCM_KERNELS_DEVICE void store_sums(float* sums, int, int j, int rows, int columns,
                                             int lane, Accumulator sum) {
    const int row = 2 * (lane / kMmaRows), column = lane % kMmaRows;
    float* target = sums + row * kPitch + j * kMmaRows + column;
    const bool wanted = j * kMmaRows + column < columns;
    if (wanted && row < rows) target[0] = sum.x + sum.y;
    if (wanted && row + 1 < rows) target[kPitch] = sum.z + sum.w;
  }
};

#endif

}  // namespace rocm_kernels::cdna
