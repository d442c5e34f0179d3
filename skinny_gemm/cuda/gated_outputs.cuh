// Outputs of a product of gate and up that go through the gated activation on their way: a block
// has the same rows of both, and stores act(gate) * up, in float32, of the two rounded to 16 bits
// as they would be stored. What quantises them then has the bits that it would have of these.
#pragma once

#include "../../blocks/rows/gpu/activation.h"
#include "epilogue.cuh"

namespace rocm_kernels {
namespace cuda::skinny {

template <Activation kActivation>
class GatedOutputs {
 public:
  static constexpr bool kSends = false, kGates = true;
  using Args = JoinedGemmArgs;
  struct Shared {};

  __device__ __forceinline__ GatedOutputs(const Args& args, Shared&, void*, int, int)
      : args_(args) {}
  __device__ __forceinline__ void begin_next() const {}
  __device__ __forceinline__ void put_gated(int m, int64_t n, float gate, float up) const {
    const bool half = args_.out_dtype == DType::kFloat16;
    const auto rounded = [&](float value) {
      return half ? __half2float(__float2half_rn(value))
                  : __bfloat162float(__float2bfloat16_rn(value));
    };
    gate = rounded(gate);
    const float y = kActivation == Activation::kSilu   ? silu(gate)
                    : kActivation == Activation::kGelu ? gelu(gate)
                                                       : gelu_tanh(gate);
    static_cast<float*>(args_.out)[m * args_.out_stride + n] = y * rounded(up);
  }
  __device__ __forceinline__ void send() const {}

 private:
  const Args& args_;
};

}  // namespace cuda::skinny
}  // namespace rocm_kernels
