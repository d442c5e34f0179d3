// The last step of a product: four neighbours of a row of out, rounded once.
#pragma once

#include "../../../common/cdna/mfma.h"
#include "problem.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

template <typename T>
ROCM_KERNELS_DEVICE void store_four_as(void* out, int64_t at, Accumulator sum, int count,
                                       bool wide) {
  Vec<T, 4> values;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float value = sum[i];
    values[i] = from_float<T>(value);
  }
  T* target = static_cast<T*>(out) + at;
  if (wide && count >= 4) {
    store<Touch::kAgain>(target, values);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) target[i] = values[i];
    }
  }
}

// The first `count` of four sums to element `at` of out. `wide`: four can be stored together.
ROCM_KERNELS_DEVICE void store_four(void* out, DType dtype, int64_t at, Accumulator sum, int count,
                                    bool wide) {
  if (dtype == DType::kFloat32) {
    store_four_as<float>(out, at, sum, count, wide);
  } else if (dtype == DType::kFloat16) {
    store_four_as<float16>(out, at, sum, count, wide);
  } else {
    store_four_as<bfloat16>(out, at, sum, count, wide);
  }
}
ROCM_KERNELS_DEVICE void store_four(const GemmProblem& p, int64_t at, Accumulator sum, int count) {
  store_four(p.out, p.out_dtype, at, sum, count, p.wide_stores);
}

#endif

}  // namespace rocm_kernels::cdna
