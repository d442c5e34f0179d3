// Matrix instructions of CDNA3 and CDNA4, by the kinds of operands that they take.
#pragma once

#include "buffer.h"
#include "operands.h"

namespace rocm_kernels::cdna {

using Accumulator = float __attribute__((ext_vector_type(4)));  // a lane's part of a 16 x 16 tile

#if ROCM_KERNELS_CDNA

namespace detail {

using Words2 = uint32_t __attribute__((ext_vector_type(2)));
using Words8 = uint32_t __attribute__((ext_vector_type(8)));
using Half4 = _Float16 __attribute__((ext_vector_type(4)));
using Half8 = _Float16 __attribute__((ext_vector_type(8)));
using Short4 = short __attribute__((ext_vector_type(4)));
using BFloat8 = __bf16 __attribute__((ext_vector_type(8)));

ROCM_KERNELS_DEVICE Words2 low(Words v) { return __builtin_shufflevector(v, v, 0, 1); }
ROCM_KERNELS_DEVICE Words2 high(Words v) { return __builtin_shufflevector(v, v, 2, 3); }

ROCM_KERNELS_DEVICE Accumulator mfma_fp8(Words2 x, Words2 y, Accumulator sum) {
  return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, x),
                                                    __builtin_bit_cast(long, y), sum, 0, 0, 0);
}

// 16 bytes a lane of two 16-bit operands.
template <bool kBFloat>
ROCM_KERNELS_DEVICE Accumulator mfma_16bit(Words x, Words y, Accumulator sum) {
#if defined(__gfx950__)
  if constexpr (kBFloat) {
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(BFloat8, x),
                                                   __builtin_bit_cast(BFloat8, y), sum, 0, 0, 0);
  } else {
    return __builtin_amdgcn_mfma_f32_16x16x32_f16(__builtin_bit_cast(Half8, x),
                                                  __builtin_bit_cast(Half8, y), sum, 0, 0, 0);
  }
#else
  const auto mma = [](Words2 p, Words2 q, Accumulator partial) {
    if constexpr (kBFloat) {
      return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
          __builtin_bit_cast(Short4, p), __builtin_bit_cast(Short4, q), partial, 0, 0, 0);
    } else {
      return __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Half4, p),
                                                   __builtin_bit_cast(Half4, q), partial, 0, 0, 0);
    }
  };
  return mma(high(x), high(y), mma(low(x), low(y), sum));
#endif
}

// Four FP8 codes to four 16-bit floats: exact, since both 16-bit formats hold every FP8 value.
template <bool kBFloat>
ROCM_KERNELS_DEVICE Words2 decode(uint32_t codes) {
  const auto first = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(codes), false);
  const auto second = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(codes), true);
  const float f0 = first[0], f1 = first[1], f2 = second[0], f3 = second[1];
  if constexpr (kBFloat) {
    // The upper halves of two floats, packed: v_perm_b32 picks bytes 2, 3 of each.
    const auto pack = [](float x, float y) {
      return __builtin_amdgcn_perm(__builtin_bit_cast(uint32_t, y), __builtin_bit_cast(uint32_t, x),
                                   0x07060302u);
    };
    return Words2{pack(f0, f1), pack(f2, f3)};
  } else {
    return Words2{__builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(f0, f1)),
                  __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(f2, f3))};
  }
}

template <bool kBFloat>
ROCM_KERNELS_DEVICE Words decode8(Words2 codes) {
  return __builtin_shufflevector(decode<kBFloat>(codes.x), decode<kBFloat>(codes.y), 0, 1, 2, 3);
}

}  // namespace detail

// Fragments of 16 bytes that a lane reads of a 16-row tile of a K block, what is done with them,
// and where the sums are.
//
// w is the left operand: lane 16 * g + j holds rows 4 * g .. 4 * g + 3 of w for row j of a. The
// sparse kind takes a as the left one (mfma_sparse.h).
template <MmaKind kKind>
struct Mma {
  static constexpr int kFragmentsW = 2 * w_bytes(kKind);
  static constexpr int kFragmentsA = 2 * a_bytes(kKind);
  static constexpr int kRowsA = kMmaRows;  // of a that an instruction serves

  // Row of the tile of a whose fragments a lane reads as its row `row`.
  static ROCM_KERNELS_DEVICE constexpr int a_row(int row) { return row; }

  // sum += w[16 rows] . a[16 rows]^T over a K block.
  static ROCM_KERNELS_DEVICE Accumulator multiply_add(const Words (&w)[kFragmentsW],
                                                      const Words (&a)[kFragmentsA], int,
                                                      Accumulator sum) {
    if constexpr (kKind == MmaKind::kFp8) {
#if defined(__gfx950__)
      // 128 elements of k in one instruction, 32 bytes a lane; unit block scales (0 means none).
      const auto join = [](Words x, Words y) {
        return __builtin_bit_cast(int __attribute__((ext_vector_type(8))),
                                  __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7));
      };
      sum = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(join(w[0], w[1]), join(a[0], a[1]),
                                                             sum, 0, 0, 0, 0, 0, 0);
#else
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        sum = detail::mfma_fp8(detail::low(w[step]), detail::low(a[step]), sum);
        sum = detail::mfma_fp8(detail::high(w[step]), detail::high(a[step]), sum);
      }
#endif
    } else if constexpr (kKind == MmaKind::kFloat16 || kKind == MmaKind::kBFloat16) {
#pragma unroll
      for (int load = 0; load < kFragmentsW; ++load) {
        sum = detail::mfma_16bit<kKind == MmaKind::kBFloat16>(w[load], a[load], sum);
      }
    } else {
      constexpr bool kBFloat = kKind == MmaKind::kBFloat16Fp8;
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        sum = detail::mfma_16bit<kBFloat>(detail::decode8<kBFloat>(detail::low(w[step])),
                                          a[2 * step], sum);
        sum = detail::mfma_16bit<kBFloat>(detail::decode8<kBFloat>(detail::high(w[step])),
                                          a[2 * step + 1], sum);
      }
    }
    return sum;
  }

  // Writes a lane's sums of 16 x 16 tile (i, j) to `sums`, [rows of a][kPitch floats, by rows of
  // w], where they are below `rows` and `columns`.
  template <int kPitch>
  static ROCM_KERNELS_DEVICE void store_sums(float* sums, int i, int j, int rows, int columns,
                                             int lane, Accumulator sum) {
    const int row = i * kMmaRows + lane % kMmaRows, group = lane / kMmaRows;
    if (row < rows && j * kMmaRows + 4 * group < columns) {
      *reinterpret_cast<Accumulator*>(sums + row * kPitch + j * kMmaRows + 4 * group) = sum;
    }
  }
};

#endif

}  // namespace rocm_kernels::cdna
