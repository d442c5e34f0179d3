// Attention of many queries: what a prompt asks for, bound by the tensor cores. sm_90a.
//
//   S [rows, keys] = Q [rows, D] K^T      rows: the queries that share a KV head, q_len * group
//   O [rows, D]   += P V [keys, D]        P = exp2(S - max)
//
// An item has one sequence, one KV head, up to 64, 128 or 192 rows, and all of the keys that these
// see, or a part of them. Where there are more items than multiprocessors, a block each takes items
// until none is left. Its warpgroups are
//
//   producer       brings Q, then tile after tile of K and of V to a ring of stages, then those of
//                  the next item. Where keys are in rows, its warps have a role each: two bring
//                  boxes of keys by TMA; one takes the next item while the last tiles
//                  of this one are multiplied, tells the others, and brings its queries; one has
//                  outputs stored. Tiles that hold keys that nobody sees, which become zeros, and
//                  pages of any size are threads' copies (cp.async). FP8 keys and values pass
//                  registers, where they are widened. (Prompts' are in rows by then:
//                  gather_keys.cuh)
//   consumers      one to three, 64 rows each. Of tile j:   S_j = Q K_j^T   softmax   O += P_j V_j
//
//                       issued      S1 O0         S2 O1         S3 O2
//                       registers      | softmax 1   | softmax 2   | ...
//
// The product with V of tile j is issued behind that with K of tile j + 1: it runs while the
// softmax of tile j + 1 begins, and so does whatever the other consumers have issued.
//
// Between them stand, for each stage of K and of V, `full` (all of it has landed) and `empty` (all
// consumers have read it), and the same for Q, in whose place outputs stand until they are stored.
//
// P never leaves the registers: the lanes that hold S of 64 x 16 as sums of the first product hold
// P of the same as rows of the second.
#pragma once

#include "../../common/cuda/mbarrier.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "prefill_consumer.cuh"
#include "prefill_producer.cuh"

namespace rocm_kernels {
namespace cuda {

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    attention_prefill(const __grid_constant__ AttentionArgs args, const PrefillGrid grid,
                      const __grid_constant__ PrefillMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  const PrefillMemory<Shape> memory(pinned_address(shared));
  if (threadIdx.x == 0) {
    const int at_q = !Shape::kBoxed ? 128 : grid.q_in_boxes ? 1 : 32 * Shape::kKeyWarps;
    init_pipeline(memory.q_full(0), memory.q_empty(0), Shape::kQPlaces, at_q, 1);
    for (int i = 0; i < Shape::kQPlaces; ++i) mbarrier_init(memory.out_full(i), Shape::kWarps);
    init_pipeline(memory.work_full(), memory.work_empty(), 1, 1,
                  Shape::kKeyWarps + 1 + Shape::kWarps);
    mbarrier_init(memory.wanted(), 1);
    for (int of_v = 0; of_v < 2; ++of_v) {
      init_pipeline(memory.full(of_v, 0), memory.empty(of_v, 0), Shape::kStages,
                    Shape::kBoxed ? Shape::kKeyWarps : 128, Shape::kWarps);
    }
    fence_mbarrier_init();
  }
  if (Shape::kBoxed && threadIdx.x == 32 * Shape::kItemWarp) {
    if (grid.q_in_boxes) prefetch_tensor_map(maps.q);
    prefetch_tensor_map(maps.k);
    prefetch_tensor_map(maps.v);
    if (grid.out_in_boxes) prefetch_tensor_map(maps.out);
  }
  // Lengths may be what the kernel before writes.
  const bool lengths_are_read = has_lengths(args);
  if (lengths_are_read) wait_for_previous_kernel();
  const PrefillWork first =
      work_at<Shape>(args, grid, place_of<Shape>(args, grid, static_cast<int>(blockIdx.x)));
  if (!lengths_are_read) wait_for_previous_kernel();
  __syncthreads();
  if (threadIdx.x < 128) {
    drop_registers<Shape::kProducerRegisters>();
    produce<Shape>(args, grid, maps, memory, first);
  } else {
    raise_registers<Shape::kConsumerRegisters>();
    consume<Shape>(args, grid, memory, first);
  }
#endif
}

}  // namespace cuda
}  // namespace rocm_kernels
