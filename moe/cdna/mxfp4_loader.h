// Lines of MXFP4 weights on their way to LDS, where they are bfloat16.
//
// A line is 64 elements, 32 bytes of a row; a thread brings 8 of them and the byte of their scale.
#pragma once

#include "../../blocks/product/cdna/main_loop.h"
#include "mxfp4.h"
#include "rows.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

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
          decode_mxfp4(codes_[i], e8m0_scale(exponent_[i]));
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
