// Reads a kernel's arguments a second time, late in the kernel, instead of keeping them in
// registers.
#pragma once

#include "../core/compiler.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

// The kernel's first argument, a Problem, from memory again: what only the end of a tile needs
// would otherwise sit in scalar registers through the loop, or be spilled.
template <class Problem>
ROCM_KERNELS_DEVICE const Problem& reread_problem() {
  auto arguments = __builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(arguments));
  return *(const Problem*)arguments;
}

#endif

}  // namespace rocm_kernels::cdna
