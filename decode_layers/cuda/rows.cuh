// The row that a product multiplies, which every block makes for itself in shared memory: FP8 codes
// and their scale.
//
//   of gate, up; qkv  codes of norm(row)
//   of o; of down     codes of what heads attended to; of y, rounded to bfloat16. Who made a part
//                     of it has left the greatest of that
//
// What other blocks have left is loaded from L2.
#pragma once

#include <type_traits>

#include "../../blocks/rows/gpu/norm.h"
#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "problem.h"

namespace rocm_kernels::cuda::decode {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// All warps that multiply meet.
__device__ __forceinline__ void meet() { named_barrier<1, kThreads>(); }

// Of these warps. Two places in turn: whoever writes one again has passed the barrier
// in between.
struct Reductions {
  float parts[2][kWarps];
};
template <typename Op>
__device__ __forceinline__ float reduce_all(float value, Op op, Reductions& shared, int& place,
                                            int warp, int lane) {
  value = reduce_lanes<32>(value, op);
  if (lane == 0) shared.parts[place][warp] = value;
  meet();
  value = reduce_lanes<kWarps>(shared.parts[place][lane % kWarps], op);
  place ^= 1;
  return value;
}

__device__ __forceinline__ Vector load_from_l2(const void* from) {
  const uint4 raw = __ldcg(static_cast<const uint4*>(from));
  return Vector{{raw.x, raw.y, raw.z, raw.w}};
}

template <typename T>
__device__ __forceinline__ T load_l2(const T* from) {
  static_assert(sizeof(T) == 2);
  const unsigned short raw = __ldcg(reinterpret_cast<const unsigned short*>(from));
  T value;
  __builtin_memcpy(&value, &raw, sizeof(value));
  return value;
}

// Codes of rows, in shared memory, and their scales. Returned when all codes are there.
class RowMaker {
 public:
  __device__ __forceinline__ RowMaker(Reductions& shared, uint32_t codes, int warp, int lane)
      : shared_(shared), codes_(codes), warp_(warp), lane_(lane) {}

  // The greatest of all warps' values, which are not negative.
  __device__ __forceinline__ float greatest(float value) {
    return reduce_all(value, MaxMagnitude{}, shared_, place_, warp_, lane_);
  }

  // Of a row of kVectors vectors a thread at most; `weight`: of the norm, as ask() has it.
  template <typename T, int kVectors>
  __device__ __forceinline__ void ask(const T* row, int columns,
                                      Vector (&vectors)[kVectors]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      vectors[v] = column(v) < columns ? load_from_l2(row + column(v)) : Vector{};
    }
  }
  template <typename T, int kVectors>
  __device__ __forceinline__ float normalize(const T* row, const Vector (&weight)[kVectors],
                                             int columns, float eps, float offset) {
    Vector x[kVectors];
    ask(row, columns, x);
    float squares = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) squares += sum_of_squares<T>(x[v], 0, columns);
    const float sum = reduce_all(squares, Sum{}, shared_, place_, warp_, lane_);
    const float rstd = reciprocal_sqrt(sum * (1.0f / static_cast<float>(columns)) + eps);
    float y[kVectors][8], amax = 0.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float scaled[8];
      rocm_kernels::normalize<T>(x[v], rstd, scaled);
      apply_weight<T>(weight[v], offset, scaled, y[v]);
      amax = amax_of(y[v], amax);
    }
    const float scale = scale_of(greatest(amax));
    const float inverse = opaque(1.0f / scale);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) store(column(v), columns, y[v], inverse);
    show();
    return scale;
  }

  // Of a row as it is. amaxs: [count], of which the greatest is the row's.
  template <typename T>
  __device__ __forceinline__ float quantize(const void* row, bool is_bfloat, int columns,
                                            const float* amaxs, int count) {
    constexpr int kAtOnce = 8;
    float found[kMostBlocks / 32];
#pragma unroll
    for (int i = 0; i < kMostBlocks / 32; ++i) {
      found[i] = 32 * i + lane_ < count ? __ldcg(amaxs + 32 * i + lane_) : 0.0f;
    }
    float inverse = 0.0f, scale = 0.0f;
#pragma unroll 1
    for (int first = 0; first < columns; first += kAtOnce * kThreads * 8) {
      Vector x[kAtOnce];
      ask(static_cast<const T*>(row) + first, columns - first, x);
      if (first == 0) {
        float amax = 0.0f;
#pragma unroll
        for (int i = 0; i < kMostBlocks / 32; ++i) amax = fmaxf(amax, found[i]);
        scale = scale_of(__uint_as_float(greatest_of_wave(__float_as_uint(amax))));
        inverse = opaque(1.0f / scale);
      }
#pragma unroll
      for (int v = 0; v < kAtOnce; ++v) {
        float y[8];
        if (std::is_same_v<T, bfloat16> || is_bfloat) {
          unpack<bfloat16>(x[v], y);
        } else {
          unpack<T>(x[v], y);
        }
        store(first + column(v), columns, y, inverse);
      }
    }
    show();
    return scale;
  }

 private:
  __device__ __forceinline__ int column(int v) const {
    return (v * kThreads + warp_ * 32 + lane_) * 8;
  }
  // For instructions that read shared memory another way, too.
  static __device__ __forceinline__ void show() {
    fence_async_proxy();
    meet();
  }
  static __device__ __forceinline__ Output output() {
    Output output{};
    output.fp8_max = kLargest;
    output.amax_bound = FLT_MAX;
    output.scale_rounding = kNoRounding;
    return output;
  }
  static __device__ __forceinline__ float scale_of(float amax) {
    return scale_of_amax(amax, output());
  }
  __device__ __forceinline__ void store(int column, int columns, const float (&y)[8],
                                        float inverse) const {
    uint32_t codes[2];
    fp8_codes<Fit::kWhole>(y, inverse, output(), codes);
    // With zeros up to a whole part, where stages have what was there before.
    if (column < (columns + kPartBytes - 1) / kPartBytes * kPartBytes) {
      store_shared(codes_ + column, make_uint2(codes[0], codes[1]));
    }
  }

  static constexpr float kLargest = fp8_max(DType::kFloat8E4M3FN);
  static constexpr ScaleRounding kNoRounding = ScaleRounding::of(false);

  Reductions& shared_;
  const uint32_t codes_;
  const int warp_, lane_;
  int place_ = 0;
};

#endif

}  // namespace rocm_kernels::cuda::decode
