// The arguments that every matrix product takes: skinny_gemm and gemm.
#pragma once

#include <optional>

#include "../../gemm/gemm.h"
#include "checks.h"

namespace rocm_kernels {

// Checks out [M, N], a [M, K], w [N, K] and what goes with them, and describes them.
GemmArgs describe_product(const Tensor& out, const Tensor& a, const Tensor& w,
                          const std::optional<Tensor>& scale_a,
                          const std::optional<Tensor>& scale_w, const std::optional<Tensor>& bias);

}  // namespace rocm_kernels
