// skinny_gemm for any number of rows, on the CPU alone: where fp8_linear goes when there are many.
#pragma once

#include "skinny_gemm.h"

namespace rocm_kernels {

// Bytes of scratch that launch_gemm needs for these sizes.
int64_t gemm_workspace_bytes(const SkinnyGemmArgs& args);

// As launch_skinny_gemm, without its limit on m.
Status launch_gemm(const SkinnyGemmArgs& args, const Context& context);

}  // namespace rocm_kernels
