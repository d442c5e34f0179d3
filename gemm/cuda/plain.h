// Starts the kernel that takes any types and alignment (plain.cu).
#pragma once

#include "../gemm.h"

namespace rocm_kernels {
namespace cuda {

// `early`: see Launch.
Status launch_plain(const GemmArgs& args, bool early, void* stream);

}  // namespace cuda
}  // namespace rocm_kernels
