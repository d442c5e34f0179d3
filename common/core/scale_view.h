// A scale operand of a matrix product: float32 values at one of four granularities. A scale always
// dequantises: real value = stored value * scale.
#pragma once

#include <cstdint>

#include "compiler.h"

namespace rocm_kernels {

constexpr int64_t kScaleBlock = 128;  // edge of a scale block along K, and along N for w

struct ScaleView {
  enum class Kind : int32_t {
    kNone,    // 1 everywhere
    kTensor,  // data[0]
    kRow,     // data[row * row_stride]: a row of a, or an output channel of w
    kBlock,   // a: data[m * row_stride + (k / 128) * block_stride]
              // w: data[(n / 128) * row_stride + (k / 128) * block_stride]
  };
  const float* data = nullptr;
  int64_t row_stride = 0;
  int64_t block_stride = 0;
  Kind kind = Kind::kNone;

  ROCM_KERNELS_HOST_DEVICE bool is_blocked() const { return kind == Kind::kBlock; }

  // Where the factor of a whole row lies; kTensor and kRow alone have one.
  ROCM_KERNELS_HOST_DEVICE const float* outer_address(int64_t row) const {
    return kind == Kind::kRow ? data + row * row_stride : data;
  }
  // The factor of a whole row, applied to its finished sum; 1 where there is none.
  ROCM_KERNELS_HOST_DEVICE float outer(int64_t row) const {
    if (kind == Kind::kTensor) return ROCM_KERNELS_LOAD_CONSTANT(data);
    if (kind == Kind::kRow) return ROCM_KERNELS_LOAD_CONSTANT(data + row * row_stride);
    return 1.0f;
  }
  // The factor of a block of K, applied to the partial sum over that block; 1 where there is none.
  // `row` counts rows of a, or blocks of 128 rows of w; `k_block` blocks of 128 along K.
  ROCM_KERNELS_HOST_DEVICE float block(int64_t row, int64_t k_block) const {
    if (!is_blocked()) return 1.0f;
    return ROCM_KERNELS_LOAD_CONSTANT(data + row * row_stride + k_block * block_stride);
  }
};

}  // namespace rocm_kernels
