// The product of rows sorted by expert on the CPU, which fused_moe runs twice and grouped_gemm
// once.
#pragma once

#include "../../common/core/context.h"
#include "../experts.h"

namespace rocm_kernels {
namespace cpu {

// out[r, n] = sum_k(a[r, k] * w[e, n, k] * scale_a * scale_w) for the rows r of expert e, which end
// before ends[e] and begin where those of e - 1 end.
struct ExpertProduct {
  int64_t rows = 0, n = 0, k = 0;
  int32_t experts = 0;
  const void* a = nullptr;  // [rows, K], a_dtype
  int64_t a_stride = 0;
  DType a_dtype = DType::kBFloat16;
  ScaleView scale_a;
  const ExpertWeights* w = nullptr;
  void* out = nullptr;  // [rows, N], out_dtype
  int64_t out_stride = 0;
  DType out_dtype = DType::kFloat32;
  const int64_t* ends = nullptr;  // [E], ascending, within [0, rows]
  void* workspace = nullptr;      // product_workspace_bytes(*this), 64-byte aligned
};

// By rows, k and experts alone.
int64_t product_workspace_bytes(const ExpertProduct& product);

// Rows beyond the last end stay as they are.
void multiply_experts(const ExpertProduct& product, const Context& context);

}  // namespace cpu
}  // namespace rocm_kernels
