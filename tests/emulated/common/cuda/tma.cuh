// What headers need of the copy engine's to be read.
#pragma once

struct CUtensorMap {};

namespace rocm_kernels {
namespace cuda {

enum class L2Policy : int { kNoHint, kEvictFirst, kEvictLast };

}  // namespace cuda
}  // namespace rocm_kernels
