// A consumer warpgroup of prefill.cuh: 64 rows of S, softmax, O, and their end.
#pragma once

#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/swizzle.h"
#include "../../common/cuda/wgmma.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "prefill_shape.cuh"
#include "prefill_softmax.cuh"

namespace rocm_kernels {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// Two consumers take turns at the tensor cores: each multiplies while the other takes exponentials.
__device__ __forceinline__ void take_turn(int consumer) { named_barrier(1 + consumer, 256); }
__device__ __forceinline__ void give_turn(int consumer) { named_barrier_arrive(2 - consumer, 256); }

// S of a warp's rows once more, by a warp's own instructions: what wgmma left is overwritten.
template <class Shape>
__device__ __forceinline__ void multiply_keys_again(float (&scores)[Shape::kKeys / 8][4],
                                                    uint32_t q, uint32_t k, int warp_row) {
  const int lane = static_cast<int>(threadIdx.x) % 32, in_matrix = lane % 8, matrix = lane / 8;
#pragma unroll
  for (int t = 0; t < Shape::kKeys / 8; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) scores[t][i] = 0;
  }
#pragma unroll 1
  for (int step = 0; step < Shape::kD / 16; ++step) {
    const int box = step / 4, vector = step % 4 * 2;
    uint32_t rows[4];
    load_matrices(rows,
                  q + box * Shape::kRows * kChunkBytes +
                      swizzled(warp_row + in_matrix + matrix % 2 * 8, 0, 1, vector + matrix / 2));
#pragma unroll
    for (int t = 0; t < Shape::kKeys / 8; t += 2) {
      uint32_t keys[4];
      load_matrices(keys,
                    k + box * Shape::kKeys * kChunkBytes +
                        swizzled((t + matrix / 2) * 8 + in_matrix, 0, 1, vector + matrix % 2));
      multiply_16x8<typename Shape::Mma>(scores[t], rows, keys[0], keys[1]);
      multiply_16x8<typename Shape::Mma>(scores[t + 1], rows, keys[2], keys[3]);
    }
  }
}

// The consumer's 64 rows of S of a stage of keys: issued, not awaited.
template <class Shape>
__device__ __forceinline__ void multiply_keys(float (&scores)[Shape::kKeys / 8][4], uint64_t q,
                                              uint64_t k) {
#pragma unroll
  for (int step = 0; step < Shape::kD / 16; ++step) {
    const int box = step / 4, at = step % 4 * 32;
    wgmma<Shape::kType>(scores, q + wgmma_offset(box * Shape::kRows * kChunkBytes + at),
                        k + wgmma_offset(box * Shape::kKeys * kChunkBytes + at), step > 0);
  }
}

// O += P V of a stage of values: issued, not awaited.
template <class Shape>
__device__ __forceinline__ void multiply_values(float (&out)[Shape::kDV / 8][4],
                                                const uint32_t (&p)[Shape::kKeys / 16][4],
                                                uint64_t v) {
#pragma unroll
  for (int step = 0; step < Shape::kKeys / 16; ++step) {
    wgmma<Shape::kType>(out, p[step], v + wgmma_offset(step * 16 * kChunkBytes));
  }
}

template <class Shape>
__device__ __forceinline__ void pack_rows(uint32_t (&p)[Shape::kKeys / 16][4],
                                          const float (&scores)[Shape::kKeys / 8][4]) {
#pragma unroll
  for (int step = 0; step < Shape::kKeys / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&of)[4] = scores[2 * step + i / 2];
      p[step][i] = pack<typename Shape::Mma>(of[i % 2 * 2], of[i % 2 * 2 + 1]);
    }
  }
}

// The consumer's rows of out, to its own share of Q's place in shared memory: from there the copy
// engine stores them, or lanes do, each row's vectors side by side.
template <class Shape>
__device__ __forceinline__ void store_rows(const AttentionArgs& args, const PrefillGrid& grid,
                                           const PrefillWork& work, uint32_t q, int warp_row,
                                           float (&out)[Shape::kDV / 8][4], PrefillRows& rows) {
  using Q = typename Shape::Q;
  const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / 4, quad = lane % 4;
  const float v_descale = v_descale_of(args, work.b, work.head);
  float factor[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = rows.sum[r];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int row = work.first_row + warp_row + group + 8 * r;
    float by = 0;
    if (row <= work.last_row) {
      const int query = grid.rows.query_of(row);
      by = finish_row(args, work.b, work.s.q_begin, query,
                      work.head * grid.rows.heads + row - query * grid.rows.heads, quad == 0,
                      rows.maximum[r], total, v_descale);
    }
    factor[r] = by;
  }
  // Four 8 x 8 matrices at once: these rows, and those 8 further, of 16 columns.
  const int of_matrix = warp_row + lane % 16;
  const uint32_t to = q + static_cast<uint32_t>(swizzled(of_matrix, 0, 1, lane / 16));
#pragma unroll
  for (int t = 0; t < Shape::kDV / 8; t += 2) {
    uint32_t pairs[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float by = factor[i % 2];
      const float* const of = &out[t + i / 2][i % 2 * 2];
      // Not 0 * value, which is a NaN where the row sees nothing and another one an infinite value.
      pairs[i] = by == 0 ? 0 : pack<Q>(of[0] * by, of[1] * by);
    }
    store_matrices<false>(t / 8 * Shape::kRows * kChunkBytes + (to ^ (t % 8 * 16)), pairs[0],
                          pairs[1], pairs[2], pairs[3]);
  }
  if (Shape::kBoxed && stored_in_boxes(args, grid, work)) return;
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int at = warp_row + i * 4 + lane / 8, row = work.first_row + at;
    if (row > work.last_row) break;
    const int query = grid.rows.query_of(row);
    const int head = work.head * grid.rows.heads + row - query * grid.rows.heads;
    Q* const to = static_cast<Q*>(args.out) +
                  (args.cu_seqlens_q == nullptr ? work.b * args.out_batch_stride : 0) +
                  (work.s.q_begin + query) * args.out_row_stride + head * args.out_head_stride;
#pragma unroll
    for (int box = 0; box < Shape::kBoxesV; ++box) {
      const int column = box * 64 + lane % 8 * 8;
      if (column >= args.head_dim_v) break;
      *reinterpret_cast<uint4*>(to + column) =
          load_shared(q + box * Shape::kRows * kChunkBytes +
                      static_cast<uint32_t>(swizzled(at, 0, 1, lane % 8)));
    }
  }
}

// The same where other parts of the keys are other blocks'.
template <class Shape>
__device__ __forceinline__ void store_partial(const AttentionArgs& args, const PrefillGrid& grid,
                                              const PrefillWork& work, int warp_row,
                                              const float (&out)[Shape::kDV / 8][4],
                                              const PrefillRows& rows) {
  const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / 4, quad = lane % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float total = rows.sum[r];
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    const int row = work.first_row + warp_row + group + 8 * r;
    if (row > work.last_row) continue;
    const int query = grid.rows.query_of(row);
    const int head = work.head * grid.rows.heads + row - query * grid.rows.heads;
    const int64_t before = args.cu_seqlens_q == nullptr ? work.b * args.max_seqlen_q : 0;
    float* const to =
        grid.partial +
        (((before + work.s.q_begin + query) * args.heads + head) * grid.outer + work.part) *
            (Shape::kDV + 2);
#pragma unroll
    for (int t = 0; t < Shape::kDV / 8; ++t) {
      *reinterpret_cast<float2*>(to + 8 * t + 2 * quad) =
          make_float2(out[t][2 * r], out[t][2 * r + 1]);
    }
    if (quad == 0) {
      to[Shape::kDV] = rows.maximum[r];
      to[Shape::kDV + 1] = total;
    }
  }
}

// A consumer's rows of an item. `state` is that of the first tile, which all consumers share.
template <class Shape>
__device__ __forceinline__ void consume_item(const AttentionArgs& args, const PrefillGrid& grid,
                                             const PrefillWork& work,
                                             const PrefillMemory<Shape>& memory, int consumer,
                                             const PipelineState& q_at, PipelineState& state) {
  const int thread = static_cast<int>(threadIdx.x) % 128;
  const int warp_row = consumer * 64 + thread / 32 * 16;

  PrefillRows rows;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = min(work.first_row + warp_row + thread % 32 / 4 + 8 * r, work.last_row);
    const int query = grid.rows.query_of(row);
    rows.sees[r] = grid.window.seen(work.s, query, query);
  }
  const float k_descale = k_descale_of(args, work.b, work.head);
  const float cap = args.softcap * kLog2E;
  rows.factor[0] = rows.factor[1] =
      k_descale * args.scale * kLog2E * (args.softcap > 0 ? 2.0f / args.softcap : 1.0f);

  float out[Shape::kDV / 8][4];
#pragma unroll
  for (int t = 0; t < Shape::kDV / 8; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) out[t][i] = 0;
  }
  float scores[Shape::kKeys / 8][4], by[2] = {1, 1};
  uint32_t p[Shape::kKeys / 16][4];
  const uint64_t q = wgmma_operand(memory.q(q_at.stage) + consumer * 64 * kChunkBytes);
  const uint64_t k = wgmma_operand(memory.k);
  const uint64_t v = wgmma_transposed_operand(memory.v, Shape::kKeys * kChunkBytes);
  const auto all_seen = [&](int first) {
    return first >= work.all.begin && first + Shape::kKeys <= work.all.end;
  };
  const auto release = [&](int of_v, int stage) {
    if (thread % 32 == 0) mbarrier_arrive(memory.empty(of_v, stage));
  };
  // Of what threads have copied; those that widen do it themselves.
  const auto fence_copies = [&] {
    if constexpr (!Shape::kFp8 && !Shape::kBoxed) fence_async_proxy();
  };
  int first = work.keys.begin / Shape::kKeys * Shape::kKeys;
  int end = work.keys.end;
  if constexpr (Shape::kOwnKeys) {
    const int row = min(work.first_row + consumer * 64 + 63, work.last_row);
    const int query = grid.rows.query_of(row);
    end = of_warp(min(end, grid.window.seen(work.s, query, query).end));
  }
  // Of the tile at `first`, whose keys are then free.
  const auto softmax = [&] {
    if constexpr (Shape::kBoxed) {
      const bool rescale = softmax_tile(scores, rows, first, all_seen(first), cap, by, [&] {
        multiply_keys_again<Shape>(scores, memory.q(q_at.stage),
                                   memory.k + state.stage * Shape::kKBytes, warp_row);
      });
      release(0, state.stage);
      return rescale;
    } else {
      // Producers that are busy wait for the stage.
      release(0, state.stage);
      return softmax_tile(scores, rows, first, all_seen(first), cap, by);
    }
  };
  mbarrier_wait(memory.q_full(q_at.stage), q_at.parity);
  const bool cleared =
      Shape::kBoxed &&
      clear_rows_of_others<Shape, 128>(grid, work, memory.q(q_at.stage), consumer * 64, thread);
  fence_async_proxy();
  if (cleared) named_barrier(3 + consumer, 128);
  if constexpr (Shape::kScaledQ) {
    const uint32_t factors = memory.factors() + (warp_row + thread % 32 / 4) * 4;
    rows.factor[0] *= load_shared_float(factors);
    rows.factor[1] *= load_shared_float(factors + 8 * 4);
  }
  if (first < end) {
    mbarrier_wait(memory.full(0, state.stage), state.parity);
    fence_copies();
    wgmma_fence();
    multiply_keys<Shape>(scores, q, k + wgmma_offset(state.stage * Shape::kKBytes));
    wgmma_commit();
    wgmma_wait<0>(scores);
    softmax();
    pack_rows<Shape>(p, scores);

#pragma unroll 1
    for (first += Shape::kKeys; first < end; first += Shape::kKeys) {
      const PipelineState before = state;
      state.advance(Shape::kStages);
      mbarrier_wait(memory.full(0, state.stage), state.parity);
      mbarrier_wait(memory.full(1, before.stage), before.parity);
      fence_copies();
      if constexpr (Shape::kTurns) take_turn(consumer);
      wgmma_fence();
      multiply_keys<Shape>(scores, q, k + wgmma_offset(state.stage * Shape::kKBytes));
      wgmma_commit();
      multiply_values<Shape>(out, p, v + wgmma_offset(before.stage * Shape::kVBytes));
      wgmma_commit();
      if constexpr (Shape::kTurns) give_turn(consumer);
      wgmma_wait<1>(scores);
      const bool rescale = softmax();
      wgmma_wait<0>(out);
      release(1, before.stage);
      if (rescale) {
#pragma unroll
        for (int t = 0; t < Shape::kDV / 8; ++t) {
#pragma unroll
          for (int i = 0; i < 4; ++i) out[t][i] *= by[i / 2];
        }
      }
      pack_rows<Shape>(p, scores);
    }

    mbarrier_wait(memory.full(1, state.stage), state.parity);
    fence_copies();
    wgmma_fence();
    multiply_values<Shape>(out, p, v + wgmma_offset(state.stage * Shape::kVBytes));
    wgmma_commit();
    wgmma_wait<0>(out);
    release(1, state.stage);
    state.advance(Shape::kStages);
  }
  if constexpr (Shape::kOwnKeys) {
    // Tiles that other consumers alone see. An empty stage is theirs too, so each is awaited.
    for (; first < work.keys.end; first += Shape::kKeys) {
      for (int of_v = 0; of_v < 2; ++of_v) {
        mbarrier_wait(memory.full(of_v, state.stage), state.parity);
        release(of_v, state.stage);
      }
      state.advance(Shape::kStages);
    }
  }
  if constexpr (!Shape::kBoxed) allow_next_kernel();
  if (grid.outer > 1) {
    store_partial<Shape>(args, grid, work, warp_row, out, rows);
  } else {
    store_rows<Shape>(args, grid, work, memory.q(q_at.stage), warp_row, out, rows);
  }
}

template <class Shape>
__device__ __forceinline__ void consume(const AttentionArgs& args, const PrefillGrid& grid,
                                        const PrefillMemory<Shape>& memory,
                                        const PrefillWork& first) {
  const int consumer = of_warp(static_cast<int>(threadIdx.x) / 128 - 1);
  PipelineState state{0, 0}, q_at{0, 0};
  if (Shape::kTurns && consumer == 1) give_turn(consumer);
  if constexpr (!Shape::kBoxed) {
    if (first.any()) consume_item<Shape>(args, grid, first, memory, consumer, q_at, state);
  } else {
    for_each_item(args, grid, memory, first, [&](const PrefillWork& work) {
      state = of_warp(state), q_at = of_warp(q_at);
      consume_item<Shape>(args, grid, work, memory, consumer, q_at, state);
      // What stands there may be stored by TMA, and the next queries come.
      fence_async_proxy();
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(memory.out_full(q_at.stage));
      q_at.advance(Shape::kQPlaces);
    });
  }
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
