// Stand-ins for what hf-rocm-kernels includes, so that its row kernels compile by themselves: FP16,
// FP8 conversion with saturation as ROCm's header does it, and hipCUB's sum over a workgroup. The
// kernels come from a checkout of the project (calibrate.py), nothing of which is kept here.
#include "old_libraries.h"

typedef __half half;
typedef half half2 __attribute__((ext_vector_type(2)));
typedef half2 __half2;
typedef unsigned char __hip_fp8_storage_t;
typedef unsigned short __hip_fp8x2_storage_t;
enum { __HIP_SATFINITE, __HIP_E4M3_FNUZ };

__device__ inline float2 __half22float2(half2 v) { return {(float)v.x, (float)v.y}; }

// NaN and infinity pass; the rest is held to the largest number.
__device__ inline float saturated(float v) {
  bool finite = (__builtin_bit_cast(unsigned, v) & 0x7f800000) != 0x7f800000;
  return finite ? __builtin_amdgcn_fmed3f(v, 240.0f, -240.0f) : v;
}
__device__ inline __hip_fp8x2_storage_t __hip_cvt_float2_to_fp8x2(float2 v, int, int) {
  return __builtin_amdgcn_cvt_pk_fp8_f32(saturated(v.x), saturated(v.y), 0, false);
}

namespace hipcub {
struct Sum {};
template <class T, int kThreads>
struct BlockReduce {
  struct TempStorage {
    T partial[kThreads / 64];
  };
  TempStorage& storage;
  __device__ BlockReduce(TempStorage& s) : storage(s) {}
  template <int kControl, int kRows = 0xf>
  __device__ static T moved(T value) {
    return __builtin_bit_cast(T, __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(int, value),
                                                             kControl, kRows, 0xf, false));
  }
  // Lane 63 has the sum of the wave, as with the library's moves between lanes.
  __device__ static T wave_sum(T value) {
    value += moved<0x111>(value);
    value += moved<0x112>(value);
    value += moved<0x114>(value);
    value += moved<0x118>(value);
    value += moved<0x142, 0xa>(value);
    value += moved<0x143, 0xc>(value);
    return value;
  }
  // The result is the first wave's.
  __device__ T Reduce(T value, Sum, int threads) {
    value = wave_sum(value);
    if (threadIdx.x % 64 == 63) storage.partial[threadIdx.x / 64] = value;
    __syncthreads();
    int waves = (threads + 63) / 64;
    T mine = threadIdx.x < waves ? storage.partial[threadIdx.x] : T(0);
    mine = wave_sum(mine);
    return __builtin_bit_cast(T, __builtin_amdgcn_readlane(__builtin_bit_cast(int, mine), 63));
  }
};
}  // namespace hipcub

#include "csrc/op_src/swiglu/swiglu_vectorized.cu"

#define initialize_buffer_vectorized another_initialize_buffer
#include "csrc/op_src/residual_rms/residual_rms_vectorized.cu"

template __global__ void _residual_rms_vectorized<__hip_fp8x2_storage_t, false>(
    const half*, half*, const half*, const float*, __hip_fp8x2_storage_t*, half*, float, int, int);
