// How a warp has heads where they rotate: a lane has four elements, of a head of 128 or of one of
// two neighbours of 64.
//
//   halves (NeoX)  x[i] = x[i] * cos[i] -/+ x[i +/- rotary_dim / 2] * sin[i]
//   interleaved    x[i] = x[i] * cos[i / 2] -/+ x[i +/- 1] * sin[i / 2]
//
// of i below rotary_dim; - in the first half, or where i is even.
#pragma once

#include "../../common/gpu/reduce.h"
#include "../../common/gpu/vector.h"
#include "problem.h"

namespace rocm_kernels::cuda::decode {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <typename T>
class Rotation {
 public:
  using Four = uint2;

  __device__ __forceinline__ Rotation(const Attention<T>& a, int lane) : a_(a), lane_(lane) {}

  // Of the lane's elements: which of a unit's heads has them, and from where on.
  __device__ __forceinline__ int head() const { return 4 * lane_ >= a_.head_dim; }
  __device__ __forceinline__ int dim() const { return 4 * lane_ & (a_.head_dim - 1); }

  __device__ __forceinline__ void ask(int token) {
    if (dim() >= a_.rotary_dim) return;
    cosines_ = angles_of(a_.cos + token * a_.angle_stride);
    sines_ = angles_of(a_.sin + token * a_.angle_stride);
  }

  // By all lanes.
  __device__ __forceinline__ void rotate(float (&x)[4]) const {
    const int half = a_.rotary_dim / 2;
    const bool is_first = dim() < half;
    const int partner = lane_ + (is_first ? half : -half) / 4;
    float y[4], cosine[4], sine[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool negated = a_.interleaved ? i % 2 == 0 : is_first;
      const float other = __shfl_sync(0xFFFFFFFFu, x[i], partner);
      y[i] = a_.interleaved ? x[i ^ 1] : other;
      y[i] = negated ? -y[i] : y[i];
    }
    if (dim() >= a_.rotary_dim) return;
    unpack(cosines_, cosine), unpack(sines_, sine);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = fmaf(x[i], cosine[i], y[i] * sine[i]);
  }

  static __device__ __forceinline__ void unpack(const Four& four, float (&x)[4]) {
    Word<T>::unpack(four.x, x), Word<T>::unpack(four.y, x + 2);
  }

  // Of x, the sum over its head.
  __device__ __forceinline__ float sum_of_head(float x) const {
    x = reduce_lanes<16>(x, Sum{});
    return a_.head_dim == kUnitDim ? x + __shfl_xor_sync(0xFFFFFFFFu, x, 16) : x;
  }

 private:
  __device__ __forceinline__ Four angles_of(const T* table) const {
    if (!a_.interleaved) return *reinterpret_cast<const Four*>(table + dim());
    const uint32_t two = *reinterpret_cast<const uint32_t*>(table + dim() / 2);  // a pair each
    return make_uint2(__byte_perm(two, 0, 0x1010), __byte_perm(two, 0, 0x3232));
  }

  const Attention<T>& a_;
  const int lane_;
  Four cosines_, sines_;
};

#endif

}  // namespace rocm_kernels::cuda::decode
