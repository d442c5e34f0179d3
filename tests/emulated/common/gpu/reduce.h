// What a host's compiler needs of the header of this name: exchanges are the program's own.
#pragma once

namespace rocm_kernels {

struct Sum {
  float operator()(float a, float b) const { return a + b; }
};

template <int kLanes, typename Op>
float reduce_lanes(float value, Op op) {
  for (int mask = 1; mask < kLanes; mask *= 2) {
    value = op(value, __shfl_xor_sync(0xFFFFFFFFu, value, mask));
  }
  return value;
}

}  // namespace rocm_kernels
