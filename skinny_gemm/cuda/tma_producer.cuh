// The shared-memory pipeline of tma_pipeline.cuh and warpgroup.cuh: where its parts lie, and the
// two warps that fill it, one with boxes of w and one with boxes of a.
#pragma once

#include "../../blocks/product/cuda/ahead.cuh"
#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/tensor_map.h"
#include "../../common/cuda/tma.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "config.h"

namespace rocm_kernels {
namespace cuda::skinny {

// Two barriers a stage, and the stages.
struct Pipeline {
  uint32_t full, empty;  // the first stage's barriers
  uint32_t stages;
  int num_stages, stage_bytes;

  __device__ __forceinline__ uint32_t full_of(int stage) const {
    return full + stage * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t empty_of(int stage) const {
    return empty + stage * kMbarrierBytes;
  }
  __device__ __forceinline__ uint32_t data_of(int stage) const {
    return stages + stage * stage_bytes;
  }

#if __CUDA_ARCH__ >= 900
  // One thread's work; a barrier of the block must follow. `readers`: consumer warps of a stage,
  // `writers`: producers.
  __device__ __forceinline__ void init(int readers, int writers = kProducers) const {
    for (int stage = 0; stage < num_stages; ++stage) {
      mbarrier_init(full_of(stage), writers);
      mbarrier_init(empty_of(stage), readers);
    }
    fence_mbarrier_init();
  }
#endif
};

#if __CUDA_ARCH__ >= 900
// The boxes of one operand that a block multiplies: box i holds `chunks` chunks of K from
// first_chunk + i * chunks on, of the rows from `row` on.
template <BoxOrder kOrder>
struct Boxes {
  int row, first_chunk, chunks, count;

  // If `wanted`, brings the first boxes to L2. Weights may come before the previous kernel is done,
  // though not be read: L2 is where that one's stores land.
  __device__ __forceinline__ void prefetch(const CUtensorMap& map, bool wanted,
                                           int prefetched) const {
    for (int i = 0; wanted && i < count && i < prefetched; ++i) {
      const int chunk = first_chunk + i * chunks;
      if constexpr (kOrder == BoxOrder::kRowsOfChunks) {
        prefetch_box(map, chunk, row);
      } else {
        prefetch_box(map, row, chunk);
      }
    }
  }

  // Fills the stages with them, `offset` bytes into each; one thread's work. `bytes`: of a box. If
  // there is a second run of rows, it begins `second_row` rows on, and lies `second_bytes` on.
  __device__ __forceinline__ void produce(const CUtensorMap& map, const Pipeline& pipeline,
                                          uint32_t offset, int bytes, uint64_t policy,
                                          int second_row = 0, int second_bytes = 0) const {
    const uint32_t to = pipeline.stages + offset;
    PipelineState state{0, 1};
    for (int i = 0; i < count; ++i) {
      const int chunk = first_chunk + i * chunks;
      const uint32_t full = pipeline.full_of(state.stage);
      mbarrier_wait(pipeline.empty_of(state.stage), state.parity);
      mbarrier_arrive_expect(full, bytes);
      if constexpr (kOrder == BoxOrder::kRowsOfChunks) {
        const uint32_t place = to + state.stage * pipeline.stage_bytes;
        load_box(map, chunk, row, place, full, policy);
        if (second_row > 0) {
          load_box(map, chunk, row + second_row, place + second_bytes, full, policy);
        }
      } else {
        load_box(map, row, chunk, to + state.stage * pipeline.stage_bytes, full, policy);
      }
      state.advance(pipeline.num_stages);
    }
  }
};

// What L2 does with an operand: w is read once, a by every block.
__device__ __forceinline__ uint64_t policy_of(bool is_w) {
  return l2_policy(is_w ? L2Policy::kEvictFirst : L2Policy::kEvictLast);
}
#endif

}  // namespace cuda::skinny
}  // namespace rocm_kernels
