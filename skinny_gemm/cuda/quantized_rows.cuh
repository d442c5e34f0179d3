// Where a block of the TMA pipeline has its rows of a from: boxes that TMA brings, or
// 16-bit or float32 rows that the block quantises itself.
//
// A product behind a kernel that only quantises waits for two kernels to end, one behind the other,
// and each costs more than the few KB that it moves. So each block reads the rows of x (from L2; a
// block of an H200 has its first boxes of w by then), and does alone what that kernel did for all:
// the largest magnitude of a row, its scale, its codes. The same operations, so the same bits.
#pragma once

#include "../../blocks/rows/gpu/quantize.h"
#include "../../common/cuda/shared_memory.cuh"
#include "config.h"

namespace rocm_kernels {
namespace cuda::skinny {

// FP8 or 16-bit rows as they are, in the stages beside w.
struct FetchedRows {
  static constexpr bool kFetched = true;
  struct Shared {};

  __device__ __forceinline__ FetchedRows(const GemmArgs&, Shared&, uint32_t,
                                         const SkinnyGemmConfig&) {}
  __device__ __forceinline__ void make(float*) const {}
};

// Rows of T, of which each block makes FP8 codes with a scale a row, as swiglu_fp8 does without a
// gate. They lie in shared memory as long as the block does.
template <typename T>
class QuantizedRows {
 public:
  static constexpr bool kFetched = false;
  struct Shared {
    float amax[2][kQuantizers];  // of the warps, for rows in turn
  };

  // `codes`: where they are to lie in shared memory.
  __device__ __forceinline__ QuantizedRows(const GemmArgs& args, Shared& shared, uint32_t codes,
                                           const SkinnyGemmConfig& config)
      : args_(args),
        shared_(shared),
        codes_(codes),
        row_bytes_(quantized_row_bytes(config, args.k)) {}

  // By kQuantizers warps, once the previous kernel is done. Writes the rows' scales too.
  __device__ __forceinline__ void make(float* scales) const {
    constexpr int kThreads = kQuantizers * 32;
    constexpr int kLoads = kQuantizedVector / kVectorElements<T>;  // of 16 bytes
    const Output output = this->output();
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int vectors = static_cast<int>(args_.k) / kQuantizedVector;
    const int vectors_of_boxes = row_bytes_ / kQuantizedVector;
    for (int m = 0; m < args_.m; ++m) {
      const T* const row = static_cast<const T*>(args_.a) + m * args_.a_stride;
      Vector loaded[kQuantizedHeld][kLoads];
#pragma unroll
      for (int v = 0; v < kQuantizedHeld; ++v) {
        const int vector = v * kThreads + thread;
#pragma unroll
        for (int i = 0; i < kLoads; ++i) {
          loaded[v][i] = load_if<Touch::kOnce, Vector>(
              vector < vectors, at(row, (vector * kLoads + i) * static_cast<int>(sizeof(Vector))));
        }
      }
      float amax = 0.0f;
#pragma unroll
      for (int v = 0; v < kQuantizedHeld; ++v) {
        if (v * kThreads < vectors) {
          float y[kQuantizedVector];
          unpack_all(loaded[v], y);
          amax = amax_of(y, amax);
        }
      }
      amax = __uint_as_float(greatest_of_wave(__float_as_uint(amax)));
      if (lane == 0) shared_.amax[m % 2][warp] = amax;
      named_barrier<1, kThreads>();
      amax = shared_.amax[m % 2][lane % kQuantizers];
      amax = __uint_as_float(greatest_of_wave(__float_as_uint(amax)));
      const float scale = scale_of_amax(amax, output);
      if (thread == 0) scales[m] = scale;
      const float inverse = opaque(1.0f / scale);
#pragma unroll
      for (int v = 0; v < kQuantizedHeld; ++v) {
        // Behind K come zeros: where a box of w ends beyond it, that has zeros, which a NaN in a
        // would spoil.
        const int vector = v * kThreads + thread;
        if (vector < vectors_of_boxes) {
          float y[kQuantizedVector];
          unpack_all(loaded[v], y);
          uint32_t codes[kQuantizedVector / 4];
          fp8_codes<Fit::kWhole>(y, inverse, output, codes);
          store_codes(place(m, vector * kQuantizedVector), codes);
        }
      }
    }
    named_barrier<1, kThreads>();
  }

  // Where 16 bytes of a row's codes lie. Beyond the last row is the first: sums of no output.
  __device__ __forceinline__ uint32_t place_of(int m, int byte) const {
    return place(m < args_.m ? m : 0, byte);
  }

 private:
  // The vectors of a chunk in an order by the row, lest rows fall on the same banks.
  __device__ __forceinline__ uint32_t place(int m, int byte) const {
    const int vector = byte % kChunkBytes / 16;
    return codes_ + m * row_bytes_ + byte / kChunkBytes * kChunkBytes + (vector ^ (m & 7)) * 16 +
           byte % 16;
  }
  __device__ __forceinline__ static void unpack_all(
      const Vector (&vectors)[kQuantizedVector / kVectorElements<T>],
      float (&y)[kQuantizedVector]) {
#pragma unroll
    for (int i = 0; i < kQuantizedVector / kVectorElements<T>; ++i) {
      float part[kVectorElements<T>];
      unpack<T>(vectors[i], part);
#pragma unroll
      for (int j = 0; j < kVectorElements<T>; ++j) y[i * kVectorElements<T> + j] = part[j];
    }
  }
  __device__ __forceinline__ static void store_codes(uint32_t to, const uint32_t (&codes)[2]) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(codes[0]), "r"(codes[1])
                 : "memory");
  }
  __device__ __forceinline__ static Output output() {
    Output output{};
    output.fp8_max = kLargest;
    output.amax_bound = FLT_MAX;
    output.scale_rounding = kNoRounding;
    return output;
  }

  static constexpr float kLargest = fp8_max(DType::kFloat8E4M3FN);
  static constexpr ScaleRounding kNoRounding = ScaleRounding::of(false);

  const GemmArgs& args_;
  Shared& shared_;
  const uint32_t codes_;
  const int row_bytes_;
};

}  // namespace cuda::skinny
}  // namespace rocm_kernels
