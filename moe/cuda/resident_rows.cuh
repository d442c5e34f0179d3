// The rows that a block of the resident design (resident.cuh) keeps: to FP8 in shared memory.
#pragma once

#include <cfloat>

#include "../../blocks/rows/gpu/quantize.h"
#include "../../common/gpu/lanes.h"
#include "pipelines.h"
#include "streamed_units.cuh"

namespace rocm_kernels {
namespace cuda::moe {

constexpr float kLargest = fp8_max(DType::kFloat8E4M3FN);

struct ResidentProblem {
  GroupedProblem product;
  const int32_t* ids;    // [slots]
  const float* weights;  // [slots]; down
  int32_t slots, experts;
  ResidentShape shape;
  int32_t num_stages;
  int32_t columns_n;  // blocks of columns
  int32_t cluster;    // down: blocks that share the tiles of a block of columns
};

// Rows of a to FP8 in shared memory, with zeros up to whole stages: the bits of
// moe_quantize_kernel. All warps' work: each has neighbouring chunks of 256 columns, counted over
// all rows, and takes kAtOnce of them at a time.
template <typename T, bool kGroups>
struct ResidentRows {
  static constexpr int kCount = 8;                          // values of a lane
  static constexpr int kVectors = kCount * sizeof(T) / 16;  // and their vectors
  static constexpr int kAtOnce = 4;
  static_assert(kCount * 32 == kResidentChunk, "a warp takes a chunk");

  const ResidentProblem& s;
  unsigned rows;           // by their numbers
  int chunks, first, end;  // of a row; the warp's
  int placed = 0;          // the first of those that are placed:
  int row[kAtOnce], column[kAtOnce];
  Vector kept[kAtOnce][kVectors];

  __device__ __forceinline__ ResidentRows(const ResidentProblem& s, unsigned rows)
      : s(s), rows(rows), chunks(s.shape.chunks()) {
    const int all = bits_of(rows) * chunks, each = (all + kResidentWarps - 1) / kResidentWarps;
    first = static_cast<int>(threadIdx.x) / 32 * each;
    end = min(all, first + each);
    place(first);
  }
  __device__ __forceinline__ void place(int begin) {
    placed = begin;
    int number = begin / chunks, chunk = begin - number * chunks;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      row[i] = begin + i < end ? set_bit(rows, number) : -1;
      column[i] = chunk * kResidentChunk + static_cast<int>(threadIdx.x) % 32 * kCount;
      if (++chunk == chunks) chunk = 0, ++number;
    }
  }
  // Asks for the chunks that are placed. Without a branch: loads on either side of one would be
  // awaited where the sides meet.
  __device__ __forceinline__ void load() {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const bool is_there = row[i] >= 0 && column[i] < s.product.k;
      const T* const from = static_cast<const T*>(s.product.a) +
                            (is_there ? row[i] * s.product.a_stride + column[i] : 0);
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        kept[i][v] = load_if<Touch::kAgain, Vector>(is_there, from + v * kVectorElements<T>);
      }
    }
  }
  __device__ __forceinline__ void values_of(int i, float (&values)[kCount]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float some[kVectorElements<T>];
      unpack<T>(kept[i][v], some);
#pragma unroll
      for (int e = 0; e < kVectorElements<T>; ++e) values[v * kVectorElements<T> + e] = some[e];
    }
  }
  template <typename Visit>
  __device__ __forceinline__ void for_each_few(const Visit& visit) {
#pragma unroll 1
    for (int begin = first; begin < end; begin += kAtOnce) {
      if (begin != placed) place(begin), load();
      visit();
    }
  }

  // After load().
  __device__ __forceinline__ void quantize(uint8_t* memory) {
    const ResidentShape& shape = s.shape;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float* const scales = reinterpret_cast<float*>(memory + shape.scales_begin());
    float* const amaxes = reinterpret_cast<float*>(memory + shape.amaxes_begin());
    Output output = {};
    output.fp8_max = kLargest;
    output.amax_bound = FLT_MAX;
    output.scale_rounding = s.product.scale_rounding;
    if constexpr (!kGroups) {
      for_each_few([&] {
        float amax[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float values[kCount];
          values_of(i, values);
          amax[i] = reduce_lanes<32>(amax_of(values, 0.0f), MaxMagnitude{});
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (lane == 0 && row[i] >= 0) {
            amaxes[row[i] * chunks + column[i] / kResidentChunk] = amax[i];
          }
        }
      });
      __syncthreads();
    }
    int row_before = -1;
    float row_inverse = 1.0f;
    for_each_few([&] {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float values[kCount], inverse = row_inverse;
        values_of(i, values);
        if constexpr (kGroups) {
          // 16 lanes have 128 columns.
          const float scale = scale_of_amax(reduce_group(amax_of(values, 0.0f), 4), output);
          if (lane % 16 == 0 && row[i] >= 0) {
            scales[row[i] * shape.row_scales() + column[i] / static_cast<int>(kScaleBlock)] = scale;
          }
          inverse = 1.0f / scale;
        } else if (row[i] >= 0 && row[i] != row_before) {
          float amax = 0.0f;
          for (int chunk = lane; chunk < chunks; chunk += 32) {
            amax = MaxMagnitude{}(amax, amaxes[row[i] * chunks + chunk]);
          }
          const float scale = scale_of_amax(reduce_lanes<32>(amax, MaxMagnitude{}), output);
          if (lane == 0) scales[row[i]] = scale;
          inverse = row_inverse = 1.0f / scale;
          row_before = row[i];
        }
        uint32_t codes[kCount / 4];
#pragma unroll
        for (int e = 0; e < kCount; e += 4) {
          codes[e / 4] = fp8x4_from_float<false>(values[e] * inverse, values[e + 1] * inverse,
                                                 values[e + 2] * inverse, values[e + 3] * inverse);
        }
        if (row[i] >= 0) {
          *reinterpret_cast<uint2*>(memory + shape.a_begin() + row[i] * shape.a_pitch() +
                                    column[i]) = make_uint2(codes[0], codes[1]);
        }
      }
    });
  }
};

}  // namespace cuda::moe
}  // namespace rocm_kernels
