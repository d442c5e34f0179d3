// The package's torch ops. Each checks its tensors, fills the launcher's struct and launches on the
// current stream (GPU) or torch's thread pool (CPU). All raise RuntimeError before anything is
// written when an argument is not as required.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>

// out, scales and residual are written. Rows are dim 0; the last dim has stride 1.
// out: x's dtype (no quantisation) or FP8. With FP8, exactly one of `scale` ([1]: static) and
// `scales` (written: [rows, 1] when group_size is 0, else [rows, ceil(hidden / group_size)]) is
// given.
void rmsnorm_fp8(torch::stable::Tensor& out, std::optional<torch::stable::Tensor> scales,
                 const torch::stable::Tensor& x, std::optional<torch::stable::Tensor> residual,
                 const torch::stable::Tensor& weight, std::optional<torch::stable::Tensor> scale,
                 double eps, int64_t group_size, double scale_ub);

// As above. Without `up` the activation alone; with activation "identity" plain quantisation.
void swiglu_fp8(torch::stable::Tensor& out, std::optional<torch::stable::Tensor> scales,
                const torch::stable::Tensor& gate, std::optional<torch::stable::Tensor> up,
                std::optional<torch::stable::Tensor> scale, std::string activation,
                int64_t group_size, double scale_ub);

// out [M, N] = a [M, K] x w [N, K]^T, 1 <= M <= 64. A scale is [1], [M, 1] or [M, ceil(K / 128)]
// for a; [1], [N, 1] or [ceil(N / 128), ceil(K / 128)] for w.
void skinny_gemm(torch::stable::Tensor& out, const torch::stable::Tensor& a,
                 const torch::stable::Tensor& w, std::optional<torch::stable::Tensor> scale_a,
                 std::optional<torch::stable::Tensor> scale_w,
                 std::optional<torch::stable::Tensor> bias);

#if defined(CPU_KERNEL)
// skinny_gemm for any M.
void gemm(torch::stable::Tensor& out, const torch::stable::Tensor& a,
          const torch::stable::Tensor& w, std::optional<torch::stable::Tensor> scale_a,
          std::optional<torch::stable::Tensor> scale_w, std::optional<torch::stable::Tensor> bias);
#endif
