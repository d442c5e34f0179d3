// The CPU's product of few rows.
#pragma once

#include "../../blocks/product/args.h"

namespace rocm_kernels::cpu {

// 1 to 64 rows of a, and a workspace.
void launch_few_rows(const GemmArgs& args, const Context& context);

}  // namespace rocm_kernels::cpu
