// The warpgroup kernel's instances, compiled in files of their own.
#pragma once

#include "config.h"

namespace rocm_kernels {
namespace cuda {

struct WarpgroupProblem;

Status launch_mma(const GemmArgs& args, const GemmDevice& device, void* stream);

Status launch_warpgroup_fp8(const GemmArgs& args, const GemmConfig& config,
                            const WarpgroupProblem& problem, void* stream);
Status launch_warpgroup_fp8_block(const GemmArgs& args, const GemmConfig& config,
                                  const WarpgroupProblem& problem, void* stream);
Status launch_warpgroup_bf16(const GemmArgs& args, const GemmConfig& config,
                             const WarpgroupProblem& problem, void* stream);
Status launch_warpgroup_fp16(const GemmArgs& args, const GemmConfig& config,
                             const WarpgroupProblem& problem, void* stream);
Status launch_warpgroup_bf16_fp8(const GemmArgs& args, const GemmConfig& config,
                                 const WarpgroupProblem& problem, void* stream);
Status launch_warpgroup_fp16_fp8(const GemmArgs& args, const GemmConfig& config,
                                 const WarpgroupProblem& problem, void* stream);

}  // namespace cuda
}  // namespace rocm_kernels
