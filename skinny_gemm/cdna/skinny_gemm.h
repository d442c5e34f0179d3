// The AMD launcher of the designs for few rows.
#pragma once

#include "config.h"

namespace rocm_kernels::cdna::skinny {

int64_t workspace_bytes(const GemmArgs& args, const SkinnyGemmConfig& config);
Status launch(const GemmArgs& args, const SkinnyGemmConfig& config, const Target& target,
              const Context& context);

}  // namespace rocm_kernels::cdna::skinny
