// The Sink (blocks/product/sink.h) of the streamed kernel's units (streamed.cuh): the warps that
// share K leave their sums in shared memory; then each adds up some, in the order of K, with
// scales, bias and the activation, and stores what becomes of them.
#pragma once

#include "../../common/cuda/mma.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "streamed_units.cuh"

namespace rocm_kernels {
namespace cuda::moe {

// A warp's share of a stage: 64 bytes of K of 32 rows of w.
struct StreamedShare {
  int slices, row_groups, slice, row_group;
  __device__ __forceinline__ StreamedShare(int row_bytes, int warp)
      : slices(row_bytes / kStreamedSliceBytes),
        row_groups(kStreamedWarps / slices),
        slice(warp % slices),
        row_group(warp / slices) {}
};

#if __CUDA_ARCH__ >= 900

template <int kBlockM, bool kGateUp>
class StreamedSink {
 public:
  static constexpr int kMTiles = kBlockM / kMmaM;
  static constexpr int kHalf = 2;  // instructions' rows of w of a warp
  using Sums = float[kHalf][kMTiles][4];

  __device__ __forceinline__ StreamedSink(const GroupedProblem& p, const StreamedStage& shape,
                                          const StreamedShare& share, uint32_t partials, int warp,
                                          int lane)
      : p_(p), shape_(shape), share_(share), partials_(partials), warp_(warp), lane_(lane) {}

  // `rows`: of a, that the unit has; `count`: of the block's units before.
  __device__ __forceinline__ void finish(const StreamedUnit& info,
                                         const StreamedRows<kGateUp>& rows_w, int rows, int count,
                                         const Sums& sums) const {
    const int group = lane_ / 4, quad = lane_ % 4;
    const int slices = share_.slices, row_groups = share_.row_groups;
    const int slice = share_.slice, row_group = share_.row_group;
    const auto consumers_barrier = [] { named_barrier<1, kStreamedWarps * 32>(); };
    // [slice][row group][instruction][tile of a][lane_]
    const int m_tiles = shape_.block_m / kMmaM;
    const int slice_bytes = row_groups * kHalf * m_tiles * 512;
    const auto partial_of = [&](int of_group, int i, int j) {
      return partials_ + (((of_group * kHalf + i) * m_tiles + j) * 32 + lane_) * 16;
    };
    const auto sum_of = [&](int of_group, int i, int j) {
      float4 sum = {};
#pragma unroll 4
      for (int of = 0; of < slices; ++of) {
        const uint4 bits = load_shared(partial_of(of_group, i, j) + of * slice_bytes);
        sum.x += __uint_as_float(bits.x), sum.y += __uint_as_float(bits.y);
        sum.z += __uint_as_float(bits.z), sum.w += __uint_as_float(bits.w);
      }
      return sum;
    };
    consumers_barrier();  // the last unit's have been read
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
#pragma unroll
      for (int j = 0; j < kMTiles; ++j) {
        if (j * kMmaM >= rows) continue;
        const float (&sum)[4] = sums[i][j];
        store_shared(partial_of(row_group, i, j) + slice * slice_bytes,
                     float4{sum[0], sum[1], sum[2], sum[3]});
      }
    }
    consumers_barrier();
    const int tiles = (rows + kMmaM - 1) / kMmaM;
    const int items = row_groups * tiles * (kGateUp ? 1 : kHalf);
    for (int item = (warp_ + count) % kStreamedWarps; item < items; item += kStreamedWarps) {
      const int j = item % tiles;
      const int i = kGateUp ? 0 : item / tiles % kHalf;
      const int of_group = kGateUp ? item / tiles : item / tiles / kHalf;
      const auto finish = [&](const float4& sum, int instruction, float (&values)[4]) {
        const float from[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int place = rows_w.place_of(of_group, instruction, e / 2 * 8 + group);
          const int m = j * kMmaM + quad * 2 + e % 2;
          values[e] = from[e] * info.a_factor[m] * info.w_factor[place] + info.bias[place];
        }
      };
      float values[4];
      finish(sum_of(of_group, i, j), i, values);
      if constexpr (kGateUp) {
        float ups[4];
        finish(sum_of(of_group, 1, j), 1, ups);
#pragma unroll
        for (int e = 0; e < 4; ++e) values[e] = gated(p_.activation, p_.limit, values[e], ups[e]);
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int m = j * kMmaM + quad * 2 + e % 2, row = e / 2 * 8 + group;
        const int column = kGateUp ? info.first_n / 2 + of_group * kMmaN + row
                                   : info.first_n + rows_w.place_of(of_group, i, row);
        if (m < rows && column < (kGateUp ? p_.n / 2 : p_.n)) {
          store_element(p_.out, p_.out_dtype, info.slots[m] * p_.out_stride + column, values[e]);
        }
      }
    }
  }

 private:
  const GroupedProblem& p_;
  const StreamedStage& shape_;
  const StreamedShare& share_;
  const uint32_t partials_;
  const int warp_, lane_;
};

#endif

}  // namespace cuda::moe
}  // namespace rocm_kernels
