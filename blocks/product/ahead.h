// What a product asks L2 for once its own weight is on its way: the beginning of the weight that
// the next product reads. Until that one's blocks find room, memory would idle.
#pragma once

#include <cstdint>

namespace rocm_kernels {

// `pieces` of `bytes` each, `stride` bytes apart; all but `pieces` multiples of 16. It lies in the
// device's memory, since a product is launched before the next one is known; zeros ask for nothing.
struct WeightAhead {
  const void* data;
  int64_t stride;
  int64_t pieces;
  int64_t bytes;
};

}  // namespace rocm_kernels
