// What the AMD backend offers beside skinny_gemm.h: the choice of a config, and a launch with a
// given one, for autotuners and tests.
#pragma once

#include "config.h"
#include "skinny_gemm.h"

namespace rocm_kernels {

// The config that launch_skinny_gemm would use on the current device.
Status choose_skinny_gemm_config(const SkinnyGemmArgs& args, SkinnyGemmConfig& config);

// Bytes of workspace that a launch with this config needs.
int64_t skinny_gemm_workspace_bytes(const SkinnyGemmArgs& args, const SkinnyGemmConfig& config);

Status launch_skinny_gemm(const SkinnyGemmArgs& args, const Context& context,
                          const SkinnyGemmConfig& config);

}  // namespace rocm_kernels
