// What the MoE launchers share: the weights of all experts of one product, and limits.
#pragma once

#include "../common/core/dtype.h"
#include "../common/core/scale_view.h"

namespace rocm_kernels {

constexpr int64_t kMaxExperts = 2048;
constexpr int64_t kMaxTopk = 32;  // slots a token
// Up to so many, which is what models have, GPU kernels count with a thread for each expert and an
// id has nine bits; beyond them they have instances of their own.
constexpr int64_t kFewExperts = 512;
constexpr int64_t kMxScaleBlock = 32;  // elements of K that share an MXFP4 scale

// Bytes of a row of w of `k` elements.
inline int64_t w_row_bytes(DType w, int64_t k) {
  return w == DType::kFloat4E2M1x2 ? k / 2 : k * size_of(w);
}

// w [E, N, K], one matrix an expert, row-major as checkpoints hold it; real value = stored * scale.
struct ExpertWeights {
  const void* data = nullptr;
  int64_t expert_stride = 0;  // elements of dtype between experts, and between rows
  int64_t row_stride = 0;
  DType dtype = DType::kFloat8E4M3FN;

  // FP8: the scales of expert 0; those of expert e lie `scale_expert_stride` * e values further.
  // kTensor: [E]; kRow: [E, N, 1]; kBlock: [E, ceil(N / 128), ceil(K / 128)]. Else kNone.
  ScaleView scale;
  int64_t scale_expert_stride = 0;

  // MXFP4 (dtype kFloat4E2M1x2: data is [E, N, K / 2] bytes, the even k in the low half): E8M0
  // scales [E, N, K / 32], contiguous along K. Else nullptr.
  const uint8_t* mx_scales = nullptr;
  int64_t mx_expert_stride = 0;
  int64_t mx_row_stride = 0;

  const void* bias = nullptr;  // [E, N], contiguous along N; nullptr: none
  int64_t bias_expert_stride = 0;
  DType bias_dtype = DType::kBFloat16;  // float32, float16 or bfloat16

  ROCM_KERNELS_HOST_DEVICE ScaleView scale_of(int64_t expert) const {
    ScaleView result = scale;
    if (result.kind != ScaleView::Kind::kNone) result.data += expert * scale_expert_stride;
    return result;
  }
};

}  // namespace rocm_kernels
