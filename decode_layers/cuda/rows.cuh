// The rows that a product multiplies, one a token, which every block makes for itself in shared
// memory: FP8 codes and their scales.
//
//   of gate, up; qkv  codes of norm(row)
//   of o; of down     codes of what heads attended to; of y, rounded to bfloat16
//
// Who made a piece of a row has left the greatest of it, and for a norm the sum of its squares and
// the greatest of it times the norm's weight: so each element is looked at once. A norm's scale is
// that of values which are not rounded to T before the weight, half a step of T off at most.
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

// What these warps share of rows.
struct RowShared {
  Left left[kMostTokens * kWarps];  // of warps
  float scales[kMostTokens];
};

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

// Makes codes of rows in shared memory, and their scales: there, for all instructions, when a
// function returns. A row is the work of kWarps / kTokens warps, which take it a vector each in
// turn: kVectors of a row of a norm, were it all warps' work.
template <typename T, int kVectors, int kTokens>
class RowMaker {
 public:
  __device__ __forceinline__ RowMaker(RowShared& shared, uint32_t codes, int tokens, int warp,
                                      int lane)
      : shared_(shared),
        codes_(codes),
        tokens_(tokens),
        warp_(warp),
        lane_(lane),
        token_(warp / kRowWarps),
        row_(min(token_, tokens - 1)) {}

  // For the weight of a norm, which no kernel writes.
  __device__ __forceinline__ void ask_weight(const T* weight, int columns) {
    ask(weight, 0, columns, weight_);
  }
  __device__ __forceinline__ void normalize(const Product<T>& product, float eps, float offset) {
    Vector x[kHeld];
    ask(row_of(product), 0, product.k, x);
    const Left left = look(product);
    const float inverse_columns = 1.0f / static_cast<float>(product.k);
    const float rstd = reciprocal_sqrt(left.squares * inverse_columns + eps);
    const float inverse = inverse_scale(left.greatest * rstd);
#pragma unroll
    for (int v = 0; v < kHeld; ++v) {
      float scaled[8], y[8];
      rocm_kernels::normalize<T>(x[v], rstd, scaled);
      apply_weight<T>(weight_[v], offset, scaled, y);
      store(product, column(v), y, inverse);
    }
    show();
  }
  __device__ __forceinline__ void quantize(const Product<T>& product) {
    constexpr int kAtOnce = 8;
    float inverse = 0.0f;
#pragma unroll 1
    for (int first = 0; first < product.k; first += kAtOnce * kRowThreads * 8) {
      Vector x[kAtOnce];
      ask(row_of(product), first, product.k, x);
      if (first == 0) inverse = inverse_scale(look(product).greatest);
#pragma unroll
      for (int v = 0; v < kAtOnce; ++v) {
        float y[8];
        if (std::is_same_v<T, bfloat16> || product.is_bfloat) {
          unpack<bfloat16>(x[v], y);
        } else {
          unpack<T>(x[v], y);
        }
        store(product, first + column(v), y, inverse);
      }
    }
    show();
  }
  __device__ __forceinline__ float scale(int token) const { return shared_.scales[token]; }

  // What the block has of each token, to its place among those of all blocks. `leads`: of the lanes
  // that have a token's, one.
  __device__ __forceinline__ void leave(Left own, int token, bool leads, Left* left) {
    if (leads) shared_.left[token * kWarps + warp_] = own;
    meet();
    const int at = 32 * warp_ + lane_;
    if (32 * warp_ >= kTokens * kWarps) return;
    own = reduced<kWarps>(shared_.left[at]);
    if (at % kWarps == 0 && at / kWarps < tokens_) {
      left[at / kWarps * gridDim.x + blockIdx.x] = own;
    }
  }

 private:
  static constexpr int kRowWarps = kWarps / kTokens, kRowThreads = kRowWarps * 32;
  static constexpr int kHeld = kVectors * kTokens;

  // Of a thread's vector v.
  __device__ __forceinline__ int column(int v) const {
    return (v * kRowThreads + warp_ % kRowWarps * 32 + lane_) * 8;
  }
  __device__ __forceinline__ const T* row_of(const Product<T>& product) const {
    return static_cast<const T*>(product.x) + row_ * product.k;
  }
  // Nothing beyond the row: its end again, by all blocks, would keep a line of L2 busy for 2000
  // cycles.
  template <int kCount>
  __device__ __forceinline__ void ask(const T* row, int first, int columns,
                                      Vector (&vectors)[kCount]) const {
#pragma unroll
    for (int v = 0; v < kCount; ++v) {
      const int at = first + column(v);
      vectors[v] = at < columns ? load_from_l2(row + at) : Vector{};
    }
  }

  template <int kLanes>
  static __device__ __forceinline__ Left reduced(const Left& own) {
    return {reduce_lanes<kLanes>(own.greatest, MaxMagnitude{}),
            reduce_lanes<kLanes>(own.squares, Sum{})};
  }
  // Of the token's row, by what all have left: a row's threads take some each, lest all blocks'
  // warps ask the same few lines of L2.
  __device__ __forceinline__ Left look(const Product<T>& product) {
    constexpr int kLoads = (kMostBlocks + kRowThreads - 1) / kRowThreads;
    const int count = product.left_count, thread = warp_ % kRowWarps * 32 + lane_;
    float2 found[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int at = i * kRowThreads + thread;
      const float2* const place = reinterpret_cast<const float2*>(product.left + row_ * count + at);
      found[i] = at < count ? __ldcg(place) : make_float2(0.0f, 0.0f);
    }
    Left own{0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      own.greatest = fmaxf(own.greatest, found[i].x);
      own.squares += found[i].y;
    }
    own = reduced<32>(own);
    if constexpr (kRowWarps > 1) {
      if (lane_ == 0) shared_.left[warp_] = own;
      meet();
      own = reduced<kRowWarps>(shared_.left[token_ * kRowWarps + lane_ % kRowWarps]);
    }
    return own;
  }

  // And leaves the scale.
  __device__ __forceinline__ float inverse_scale(float amax) {
    const float scale = scale_of_amax(amax, output());
    if (warp_ % kRowWarps == 0 && lane_ == 0) shared_.scales[token_] = scale;
    return opaque(1.0f / scale);
  }
  static __device__ __forceinline__ Output output() {
    Output output{};
    output.fp8_max = kLargest;
    output.amax_bound = FLT_MAX;
    output.scale_rounding = kNoRounding;
    return output;
  }
  __device__ __forceinline__ void store(const Product<T>& product, int column, const float (&y)[8],
                                        float inverse) const {
    uint32_t codes[2];
    fp8_codes<Fit::kWhole>(y, inverse, output(), codes);
    // With zeros up to a whole part, where stages have what was there before.
    const uint2 stored = column < product.k ? make_uint2(codes[0], codes[1]) : make_uint2(0, 0);
    if (token_ < tokens_ && column < product.row_bytes()) {
      store_shared(codes_ + token_ * product.row_bytes() + column, stored);
    }
  }
  // For instructions that read shared memory another way, too.
  static __device__ __forceinline__ void show() {
    fence_async_proxy();
    meet();
  }

  static constexpr float kLargest = fp8_max(DType::kFloat8E4M3FN);
  static constexpr ScaleRounding kNoRounding = ScaleRounding::of(false);

  RowShared& shared_;
  const uint32_t codes_;
  const int tokens_, warp_, lane_, token_;
  const int row_;  // that there is
  Vector weight_[kHeld];
};

#endif

}  // namespace rocm_kernels::cuda::decode
