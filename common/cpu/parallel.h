// Work on the caller's thread pool.
#pragma once

#include "../core/context.h"

namespace rocm_kernels {
namespace cpu {

// Calls work(begin, end) for disjoint chunks that cover [0, count), each at least `grain` long.
template <class Work>
void parallel_for(const Context& context, int64_t count, int64_t grain, const Work& work) {
  const auto call = [](int64_t begin, int64_t end, void* state) {
    (*static_cast<const Work*>(state))(begin, end);
  };
  context.parallel_for(count, grain, call, const_cast<Work*>(&work));
}

}  // namespace cpu
}  // namespace rocm_kernels
