// Attention of many queries: what a prompt asks for, bound by the tensor cores. sm_90a.
//
//   S [rows, keys] = Q [rows, D] K^T      rows: the queries that share a KV head, q_len * group
//   O [rows, D]   += P V [keys, D]        P = exp2(S - max)
//
// A block has one sequence, one KV head, 64 or 128 rows, and all of the keys that these see, or a
// part of them. Two or three warpgroups:
//
//   producer       copies Q once, then tile after tile of K and of V to a ring of stages
//                  (cp.async, so that pages of any size, ragged sequences and heads of any stride
//                  are one case), and zeros in the place of keys that nobody sees. FP8 keys and
//                  values pass its registers, where they are widened
//   consumers      64 rows each. Of tile j:   S_j = Q K_j^T   softmax   O += P_j V_j
//
//                       issued      S1 O0         S2 O1         S3 O2
//                       registers      | softmax 1   | softmax 2   | ...
//
// The product with V of tile j is issued behind that with K of tile j + 1: it runs while the
// softmax of tile j + 1 begins, and so does whatever the other consumer has issued. Turns at the
// tensor cores, by barriers, gained with all keys (5 %) what they lost with causal ones.
//
// Between them stand, for each stage of K and of V, `full` (the copies of all producers have
// landed) and `empty` (both consumers have read it).
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
    attention_prefill(const __grid_constant__ AttentionArgs args, const PrefillGrid grid) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char shared[];
  const PrefillMemory<Shape> memory(pinned_address(shared));
  if (threadIdx.x == 0) {
    mbarrier_init(memory.q_full(), 128);
    for (int of_v = 0; of_v < 2; ++of_v) {
      init_pipeline(memory.full(of_v, 0), memory.empty(of_v, 0), Shape::kStages, 128,
                    Shape::kWarps);
    }
    fence_mbarrier_init();
  }

  // Blocks of the most keys first, among those of pairs whose keys L2 holds together.
  const int item = static_cast<int>(blockIdx.x) / grid.outer;
  const int together = grid.pairs_together * grid.row_blocks;
  const int first_pair = item / together * grid.pairs_together;
  const int here = min(grid.pairs_together, grid.pairs - first_pair);
  const int of_group = item % together;
  const int pair = first_pair + of_group % here;
  PrefillWork work;
  work.b = pair / static_cast<int>(args.kv_heads);
  work.head = pair % static_cast<int>(args.kv_heads);
  work.first_row = (grid.row_blocks - 1 - of_group / here) * Shape::kRows;
  wait_for_previous_kernel();
  work.s = sequence_of(args, work.b);
  const int row_count = work.s.q_count * grid.rows.heads;
  if (work.first_row >= row_count) return;
  work.last_row = min(work.first_row + Shape::kRows, row_count) - 1;
  const int first_query = grid.rows.query_of(work.first_row);
  const int last_query = grid.rows.query_of(work.last_row);
  const KeyRange first_sees = grid.window.seen(work.s, first_query, first_query);
  const KeyRange last_sees = grid.window.seen(work.s, last_query, last_query);
  const KeyRange keys = {min(first_sees.begin, last_sees.end), last_sees.end};
  const int first_tile = keys.begin / Shape::kKeys;
  const int tiles = (keys.end + Shape::kKeys - 1) / Shape::kKeys - first_tile;
  const int of_part = (tiles + grid.outer - 1) / grid.outer;
  work.part = static_cast<int>(blockIdx.x) % grid.outer;
  work.keys.begin = max((first_tile + work.part * of_part) * Shape::kKeys, keys.begin);
  work.keys.end = min((first_tile + (work.part + 1) * of_part) * Shape::kKeys, keys.end);
  work.all = {last_sees.begin, first_sees.end};
  __syncthreads();
  if (threadIdx.x < 128) {
    drop_registers<Shape::kProducerRegisters>();
    produce<Shape>(args, grid, work, memory);
  } else {
    raise_registers<Shape::kConsumerRegisters>();
    consume<Shape>(args, grid, work, memory);
  }
#endif
}

}  // namespace cuda
}  // namespace rocm_kernels
