// Lines of MXFP4 weights on their way to LDS, where they are bfloat16: four bits times a power of
// two is exact there.
//
// A line is 64 elements, 32 bytes of a row; a thread brings 8 of them and the byte of their scale.
#pragma once

#include "../../gemm/cdna/main_loop.h"
#include "rows.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

// Eight codes, the first in the low bits, times 2^(exponent - 127), as bfloat16.
ROCM_KERNELS_DEVICE Words decode_mxfp4(uint32_t codes, uint32_t exponent) {
  // A code's low three bits look up the bytes of its magnitude: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
  constexpr uint32_t kLow[2] = {0xC0800000u, 0xC0804000u}, kHigh[2] = {0x3F3F3F00u, 0x40404040u};
  const uint32_t even = codes & 0x07070707u, odd = codes >> 4 & 0x07070707u;
  const uint32_t even_low = __builtin_amdgcn_perm(kLow[1], kLow[0], even);
  const uint32_t even_high = __builtin_amdgcn_perm(kHigh[1], kHigh[0], even);
  const uint32_t odd_low = __builtin_amdgcn_perm(kLow[1], kLow[0], odd);
  const uint32_t odd_high = __builtin_amdgcn_perm(kHigh[1], kHigh[0], odd);
  const uint32_t bits = exponent == 255 ? 0x7FC00000u
                        : exponent == 0 ? 0x00400000u
                                        : exponent << 23;
  const float scale = __builtin_bit_cast(float, bits);
  Words words;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t select = half == 0 ? 0x05010400u : 0x07030602u;
    const uint32_t evens = __builtin_amdgcn_perm(even_high, even_low, select);
    const uint32_t odds = __builtin_amdgcn_perm(odd_high, odd_low, select);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pair = 2 * half + i;
      const uint32_t sign_even = codes << (28 - 8 * pair) & 0x80000000u;
      const uint32_t sign_odd = codes << (24 - 8 * pair) & 0x80000000u;
      const uint32_t first = (i == 0 ? evens << 16 : evens & 0xFFFF0000u) | sign_even;
      const uint32_t second = (i == 0 ? odds << 16 : odds & 0xFFFF0000u) | sign_odd;
      const float low = __builtin_bit_cast(float, first) * scale;
      const float high = __builtin_bit_cast(float, second) * scale;
      words[pair] = __builtin_amdgcn_perm(__builtin_bit_cast(uint32_t, high),
                                          __builtin_bit_cast(uint32_t, low), 0x07060302u);
    }
  }
  return words;
}

template <int kRows, int kThreads>
class Mxfp4Loader {
 public:
  static constexpr int kRowsAtOnce = kThreads / 8;
  static constexpr int kLoads = kRows / kRowsAtOnce;
  static_assert(kRows % kRowsAtOnce == 0, "Mxfp4Loader: the workgroup must cover whole rows");

  template <class Rows>
  explicit ROCM_KERNELS_DEVICE Mxfp4Loader(const Rows& rows)
      : buffer_(buffer_at(rows.base())), exponents_(buffer_at(rows.exponents)) {
    const int thread = static_cast<int>(threadIdx.x), chunk = thread % 8;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      row_[i] = rows.offset(i * kRowsAtOnce + thread / 8) + chunk * 4;
      exponent_row_[i] = rows.exponent_offset(i * kRowsAtOnce + thread / 8) + chunk / 4;
    }
    place_ = thread / 8 * kLine + (chunk ^ thread / 8 % 8) * 16;
  }

  // Asks for line `index`.
  ROCM_KERNELS_DEVICE void load(int index) { load(index, 0); }

  ROCM_KERNELS_DEVICE void store(uint8_t* lds) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      *reinterpret_cast<Words*>(lds + place_ + i * kRowsAtOnce * kLine) =
          decode_mxfp4(codes_[i], exponent_[i]);
    }
  }

  // The line that K cuts: zeros beyond K, of which a chunk of 8 has all or none. `row_bytes`: of
  // bfloat16.
  ROCM_KERNELS_DEVICE void copy_cut(int index, int row_bytes, uint8_t* lds) {
    const int element = index * (kLine / 2) + static_cast<int>(threadIdx.x % 8) * 8;
    load(index, element * 2 < row_bytes ? 0 : kOutside);
    store(lds);
  }

 private:
  ROCM_KERNELS_DEVICE void load(int index, uint32_t hide) {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      codes_[i] = __builtin_amdgcn_raw_buffer_load_b32(buffer_, row_[i] | hide, index * 32, 0);
      exponent_[i] =
          __builtin_amdgcn_raw_buffer_load_b8(exponents_, exponent_row_[i] | hide, index * 2, 0);
    }
  }

  Buffer buffer_, exponents_;
  int place_;
  uint32_t row_[kLoads], exponent_row_[kLoads];  // bytes to what the thread loads
  uint32_t codes_[kLoads], exponent_[kLoads];
};

#endif

}  // namespace rocm_kernels::cdna
