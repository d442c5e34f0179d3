// A consumer warpgroup of prefill.cuh: 64 rows of S, softmax, O, and their end.
#pragma once

#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/swizzle.h"
#include "../../common/cuda/wgmma.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "prefill_shape.cuh"

namespace rocm_kernels {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The running maximum and sum of a thread's two rows, on the scale of log2.
struct PrefillRows {
  float maximum[2] = {-kInfinity, -kInfinity};
  float sum[2] = {0, 0};  // of this thread's columns
  float factor[2];        // that S is multiplied by
  KeyRange sees[2];
};

// P of a tile from its S, which is overwritten by exp2(S - maximum). Returns whether O must be
// multiplied by `by` first: where a maximum of the warp has grown by 2^8 since it was last set.
template <int kColumnTiles>
__device__ __forceinline__ bool softmax_tile(float (&scores)[kColumnTiles][4], PrefillRows& rows,
                                             int first_key, bool all_seen, float cap,
                                             float (&by)[2]) {
  const int quad = static_cast<int>(threadIdx.x) % 4;
  float factor[2] = {rows.factor[0], rows.factor[1]};
  if (cap > 0) {
    // cap * tanh(x), of 2^(2 x log2 e).
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float power = fast_exp2(scores[t][i] * factor[i / 2]);
        scores[t][i] = cap - 2 * cap * fast_reciprocal(power + 1);
      }
    }
    factor[0] = factor[1] = 1;
  } else if (factor[0] < 0) {
    factor[0] = -factor[0], factor[1] = -factor[1];
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) scores[t][i] = -scores[t][i];
    }
  }
  factor[0] = fmaxf(factor[0], 1e-30f);  // not 0 * -inf
  factor[1] = fmaxf(factor[1], 1e-30f);
  if (!all_seen) {
#pragma unroll
    for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int key = first_key + 8 * t + 2 * quad + i % 2;
        if (key < rows.sees[i / 2].begin || key >= rows.sees[i / 2].end) {
          scores[t][i] = -kInfinity;
        }
      }
    }
  }
  float most[2] = {-kInfinity, -kInfinity};
#pragma unroll
  for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) most[i / 2] = fmaxf(most[i / 2], scores[t][i]);
  }
  const bool grows =
      most[0] * factor[0] > rows.maximum[0] + 8 || most[1] * factor[1] > rows.maximum[1] + 8;
  const bool rescale = __any_sync(~0u, grows);
  if (rescale) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float all = most[r];
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 1));
      all = fmaxf(all, __shfl_xor_sync(~0u, all, 2));
      all = fmaxf(all * factor[r], rows.maximum[r]);
      by[r] = all == -kInfinity ? 1.0f : fast_exp2(rows.maximum[r] - all);
      rows.maximum[r] = all;
      rows.sum[r] *= by[r];
    }
  }
  // A row that has seen nothing yet: of -inf - -inf.
  const float from[2] = {fmaxf(rows.maximum[0], -3e38f), fmaxf(rows.maximum[1], -3e38f)};
#pragma unroll
  for (int t = 0; t < kColumnTiles; ++t) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[t][i] = fast_exp2(fmaf(scores[t][i], factor[i / 2], -from[i / 2]));
      rows.sum[i / 2] += scores[t][i];
    }
  }
  return rescale;
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

// The consumer's rows of out, through its own share of Q's place in shared memory, so that each
// row's vectors are stored side by side.
template <class Shape>
__device__ __forceinline__ void store_rows(const AttentionArgs& args, const PrefillGrid& grid,
                                           const PrefillWork& work, uint32_t q, int warp_row,
                                           float (&out)[Shape::kDV / 8][4], PrefillRows& rows) {
  using Q = typename Shape::Q;
  const int lane = static_cast<int>(threadIdx.x) % 32, group = lane / 4, quad = lane % 4;
  const float v_descale = v_descale_of(args, work.b, work.head);
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
#pragma unroll
    for (int t = 0; t < Shape::kDV / 8; ++t) {
      // Not 0 * value, which is a NaN where the row sees nothing and another one an infinite value.
      const float low = by == 0 ? 0 : out[t][2 * r] * by,
                  high = by == 0 ? 0 : out[t][2 * r + 1] * by;
      const uint32_t pair = pack<Q>(low, high);
      const uint32_t to = q + t / 8 * Shape::kRows * kChunkBytes +
                          static_cast<uint32_t>(swizzled(warp_row + group + 8 * r, 0, 1, t % 8)) +
                          quad * 4;
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(pair) : "memory");
    }
  }
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

template <class Shape>
__device__ __forceinline__ void consume(const AttentionArgs& args, const PrefillGrid& grid,
                                        const PrefillWork& work,
                                        const PrefillMemory<Shape>& memory) {
  const int consumer = static_cast<int>(threadIdx.x) / 128 - 1;
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
  const uint64_t q = wgmma_operand(memory.q + consumer * 64 * kChunkBytes);
  const uint64_t k = wgmma_operand(memory.k);
  const uint64_t v = wgmma_transposed_operand(memory.v, Shape::kKeys * kChunkBytes);
  const auto all_seen = [&](int first) {
    return first >= work.all.begin && first + Shape::kKeys <= work.all.end;
  };
  const auto release = [&](int of_v, int stage) {
    if (thread % 32 == 0) mbarrier_arrive(memory.empty(of_v, stage));
  };

  int first = work.keys.begin / Shape::kKeys * Shape::kKeys;
  if (first < work.keys.end) {
    PipelineState state{0, 0};
    mbarrier_wait(memory.q_full(), 0);
    if constexpr (Shape::kScaledQ) {
      const uint32_t factors = memory.factors() + (warp_row + thread % 32 / 4) * 4;
      rows.factor[0] *= load_shared_float(factors);
      rows.factor[1] *= load_shared_float(factors + 8 * 4);
    }
    mbarrier_wait(memory.full(0, 0), 0);
    fence_async_proxy();
    wgmma_fence();
    multiply_keys<Shape>(scores, q, k);
    wgmma_commit();
    wgmma_wait<0>(scores);
    release(0, 0);
    softmax_tile(scores, rows, first, all_seen(first), cap, by);
    pack_rows<Shape>(p, scores);

#pragma unroll 1
    for (first += Shape::kKeys; first < work.keys.end; first += Shape::kKeys) {
      const PipelineState before = state;
      state.advance(Shape::kStages);
      mbarrier_wait(memory.full(0, state.stage), state.parity);
      mbarrier_wait(memory.full(1, before.stage), before.parity);
      fence_async_proxy();
      wgmma_fence();
      multiply_keys<Shape>(scores, q, k + wgmma_offset(state.stage * Shape::kKBytes));
      wgmma_commit();
      multiply_values<Shape>(out, p, v + wgmma_offset(before.stage * Shape::kVBytes));
      wgmma_commit();
      wgmma_wait<1>(scores);
      release(0, state.stage);
      const bool rescale = softmax_tile(scores, rows, first, all_seen(first), cap, by);
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
    fence_async_proxy();
    wgmma_fence();
    multiply_values<Shape>(out, p, v + wgmma_offset(state.stage * Shape::kVBytes));
    wgmma_commit();
    wgmma_wait<0>(out);
  } else {
    mbarrier_wait(memory.q_full(), 0);
  }
  allow_next_kernel();
  if (grid.outer > 1) {
    store_partial<Shape>(args, grid, work, warp_row, out, rows);
  } else {
    store_rows<Shape>(args, grid, work, memory.q, warp_row, out, rows);
  }
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
