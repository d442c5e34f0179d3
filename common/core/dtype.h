// Element types, scale modes and activations: the vocabulary that the launchers of every backend
// share. Plain C++17, included by host and device code alike; it knows nothing of torch.
#pragma once

#include <cstdint>

namespace rocm_kernels {

enum class DType : int32_t {
  kFloat32,
  kFloat16,
  kBFloat16,
  kFloat8E4M3FN,
  kFloat8E4M3FNUZ,
  kFloat4E2M1x2,  // two to a byte, which counts as the element: MXFP4 weights, see moe/experts.h
};

constexpr bool is_fp8(DType dtype) {
  return dtype == DType::kFloat8E4M3FN || dtype == DType::kFloat8E4M3FNUZ;
}

constexpr int64_t size_of(DType dtype) {
  if (dtype == DType::kFloat32) return 4;
  return is_fp8(dtype) || dtype == DType::kFloat4E2M1x2 ? 1 : 2;
}

// Largest finite magnitude of an FP8 dialect: 448 for OCP, 240 for FNUZ, whose exponent bias is one
// higher. Taking 448 for FNUZ makes scales 1.87 times too small and saturates.
constexpr float fp8_max(DType dtype) { return dtype == DType::kFloat8E4M3FNUZ ? 240.0f : 448.0f; }

// How an output is quantised. A scale always dequantises: real value = FP8 value * scale.
enum class Scaling : int32_t {
  kNone,      // no quantisation: the output has the input's type
  kStatic,    // one scale for the tensor, given by the caller
  kPerToken,  // one scale a row, computed
  kPerGroup,  // one scale for each `group_size` columns of a row, computed
};

enum class Activation : int32_t { kIdentity, kSilu, kGelu, kGeluTanh };

// Smallest scale that dynamic quantisation yields. Its reciprocal is finite, so an all-zero row
// quantises to zeros; only rows below 448 * 2^-126 = 5.3e-36 meet it.
constexpr float kMinScale = 1.17549435e-38f;

}  // namespace rocm_kernels
