// The producer warpgroup of prefill.cuh: queries, keys and values on their way to shared memory,
// where they are boxes of 64 columns, a line of 128 bytes a row, swizzled (swizzle.h).
#pragma once

#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/swizzle.h"
#include "key_boxes.cuh"
#include "key_copies.cuh"
#include "prefill_shape.cuh"

namespace rocm_kernels {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

template <class Shape>
__device__ __forceinline__ const typename Shape::Q* row_of_q(const AttentionArgs& args,
                                                             const PrefillGrid& grid,
                                                             const PrefillWork& work, int row) {
  const int query = grid.rows.query_of(row);
  const int head = work.head * grid.rows.heads + row - query * grid.rows.heads;
  return static_cast<const typename Shape::Q*>(args.q.data) +
         (args.cu_seqlens_q == nullptr ? work.b * args.q.batch_stride : 0) +
         (work.s.q_begin + query) * args.q.row_stride + head * args.q.head_stride;
}

template <class Shape>
__device__ __forceinline__ void copy_queries(const AttentionArgs& args, const PrefillGrid& grid,
                                             const PrefillWork& work, uint32_t to, int thread) {
  const uint32_t first = RowCopies<Shape::kRows>::first_vector(thread);
#pragma unroll 2
  for (int i = 0; i < RowCopies<Shape::kRows>::kTimes; ++i) {
    const int row = work.first_row + thread / 8 + 16 * i;
    const bool there = row <= work.last_row;
    const auto* const from = row_of_q<Shape>(args, grid, work, there ? row : work.last_row);
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box) {
      const int column = box * 64 + thread % 8 * 8;
      const int left = there ? min(max(static_cast<int>(args.head_dim) - column, 0) * 2, 16) : 0;
      copy_vector(to + first + (box * Shape::kRows + i * 16) * kChunkBytes,
                  left > 0 ? from + column : from, left);
    }
  }
}

// bfloat16 queries as float16, for FP8 keys: each row divided by a power of two, so that its
// largest element lies in [2^13, 2^14). The powers go to `factors`.
template <class Shape>
__device__ __forceinline__ void convert_queries(const AttentionArgs& args, const PrefillGrid& grid,
                                                const PrefillWork& work, uint32_t to,
                                                uint32_t factors, int thread) {
  const uint32_t first = RowCopies<Shape::kRows>::first_vector(thread);
#pragma unroll 1
  for (int i = 0; i < RowCopies<Shape::kRows>::kTimes; ++i) {
    const int row = work.first_row + thread / 8 + 16 * i;
    const bool there = row <= work.last_row;
    const auto* const from = row_of_q<Shape>(args, grid, work, there ? row : work.last_row);
    uint4 vectors[Shape::kBoxes];
    __nv_bfloat162 most = __float2bfloat162_rn(0.0f);
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box) {
      const int column = box * 64 + thread % 8 * 8;
      vectors[box] = make_uint4(0, 0, 0, 0);
      if (there && column < args.head_dim) {
        vectors[box] = *reinterpret_cast<const uint4*>(from + column);
      }
    }
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box) {
      const uint32_t words[4] = {vectors[box].x, vectors[box].y, vectors[box].z, vectors[box].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        most = __hmax2(most, __habs2(*reinterpret_cast<const __nv_bfloat162*>(&words[w])));
      }
    }
    float largest = fmaxf(__low2float(most), __high2float(most));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 4));
    const uint32_t exponent = exponent_for_halves(largest);
    const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box) {
      uint32_t words[4] = {vectors[box].x, vectors[box].y, vectors[box].z, vectors[box].w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 pair = __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&words[w]));
        words[w] = pack<__half>(pair.x * inverse, pair.y * inverse);
      }
      store_shared(to + first + (box * Shape::kRows + i * 16) * kChunkBytes,
                   make_uint4(words[0], words[1], words[2], words[3]));
    }
    if (thread % 8 == 0) {
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(factors + (thread / 8 + 16 * i) * 4),
                   "r"(exponent << 23)
                   : "memory");
    }
  }
}

// Queries of an item.
template <class Shape>
__device__ __forceinline__ void bring_queries(const AttentionArgs& args, const PrefillGrid& grid,
                                              const PrefillWork& work,
                                              const PrefillMemory<Shape>& memory,
                                              const PipelineState& at, int thread) {
  const uint32_t to = memory.q(at.stage), full = memory.q_full(at.stage);
  mbarrier_wait(memory.q_empty(at.stage), at.parity);
  if constexpr (Shape::kScaledQ) {
    convert_queries<Shape>(args, grid, work, to, memory.factors(), thread);
    fence_async_proxy();
    mbarrier_arrive(full);
  } else {
    copy_queries<Shape>(args, grid, work, to, thread);
    mbarrier_arrive_after_copies(full);
  }
}

// Queries, and keys and values that are widened on their way.
template <class Shape>
__device__ __forceinline__ void bring_codes(const AttentionArgs& args, const PrefillGrid& grid,
                                            const PrefillWork& work,
                                            const PrefillMemory<Shape>& memory,
                                            const PipelineState& q_at, PipelineState& state,
                                            int thread) {
  WidenedKeys<Shape> keys(args, grid.page_size, work.s, work.head, work.keys, thread,
                          memory.slots());
  for (int i = 0; i < Shape::kSlots; ++i) keys.copy_next();
  bring_queries<Shape>(args, grid, work, memory, q_at, thread);
  int first = work.keys.begin / Shape::kKeys * Shape::kKeys;
#pragma unroll 1
  for (; first < work.keys.end; first += Shape::kKeys) {
    mbarrier_wait(memory.empty(0, state.stage), state.parity);
    keys.template widen<Shape::kBoxes>(memory.k + state.stage * Shape::kKBytes);
    fence_async_proxy();
    mbarrier_arrive(memory.full(0, state.stage));
    keys.copy_next();
    mbarrier_wait(memory.empty(1, state.stage), state.parity);
    keys.template widen<Shape::kBoxesV>(memory.v + state.stage * Shape::kVBytes);
    fence_async_proxy();
    mbarrier_arrive(memory.full(1, state.stage));
    keys.copy_next();
    state.advance(Shape::kStages);
  }
}

// Queries, and keys and values as they are, from rows or pages.
template <class Shape>
__device__ __forceinline__ void bring_keys(const AttentionArgs& args, const PrefillGrid& grid,
                                           const PrefillWork& work,
                                           const PrefillMemory<Shape>& memory,
                                           const PipelineState& q_at, PipelineState& state,
                                           int thread) {
  bring_queries<Shape>(args, grid, work, memory, q_at, thread);
  int first = work.keys.begin / Shape::kKeys * Shape::kKeys;
  KeyCopies<Shape> copies(args, grid.page_size, work.s, work.head, work.keys, first, thread);
#pragma unroll 1
  for (; first < work.keys.end; first += Shape::kKeys) {
    mbarrier_wait(memory.empty(0, state.stage), state.parity);
    copies.copy_k(first, memory.k + state.stage * Shape::kKBytes);
    mbarrier_arrive_after_copies(memory.full(0, state.stage));
    mbarrier_wait(memory.empty(1, state.stage), state.parity);
    copies.copy_v(first, memory.v + state.stage * Shape::kVBytes);
    mbarrier_arrive_after_copies(memory.full(1, state.stage));
    copies.next_tile(first);
    state.advance(Shape::kStages);
  }
}

// The same by the copy engine, from rows.
template <class Shape>
__device__ __forceinline__ void bring_boxes(const AttentionArgs& args, const PrefillGrid& grid,
                                            const KeyMaps& maps, const PrefillWork& work,
                                            const PrefillMemory<Shape>& memory,
                                            const PipelineState& q_at, PipelineState& state,
                                            int thread) {
  const KeyRange whole = keys_in_boxes(args, grid.window, work.s);
  int first = work.keys.begin / Shape::kKeys * Shape::kKeys;
  const auto bring = [&](int of_v) {
    const uint32_t full = memory.full(of_v, state.stage);
    const uint32_t to =
        of_v ? memory.v + state.stage * Shape::kVBytes : memory.k + state.stage * Shape::kKBytes;
    const int boxes = of_v ? Shape::kBoxesV : Shape::kBoxes;
    mbarrier_wait(memory.empty(of_v, state.stage), state.parity);
    if (first >= whole.begin && first + Shape::kKeys <= whole.end) {
      if (thread == 0) {
        mbarrier_arrive_expect(full, of_v ? Shape::kVBytes : Shape::kKBytes);
        for (int box = 0; box < boxes; ++box) {
          load_box_4d(of_v ? maps.v : maps.k, box * 64, static_cast<int>(work.s.k_begin) + first,
                      work.head, args.cu_seqlens_k == nullptr ? work.b : 0,
                      to + box * Shape::kKeys * kChunkBytes, full, 0);
        }
        return;
      }
    } else {
      const AttentionRows& rows = of_v ? args.v : args.k;
      const char* const from = static_cast<const char*>(rows.data) +
                               ((of_v ? work.s.v_batch : work.s.k_batch) +
                                work.s.k_begin * rows.row_stride + work.head * rows.head_stride) *
                                   2;
      copy_end_of_keys<Shape::kKeys>(from, rows.row_stride * 2,
                                     static_cast<int>(of_v ? args.head_dim_v : args.head_dim) * 2,
                                     boxes, work.keys, first, to, thread);
      copies_wait_all();
      fence_async_proxy();
      __syncwarp();
    }
    if (thread % 32 == 0) mbarrier_arrive(full);
  };
  if (first >= work.keys.end) bring_queries<Shape>(args, grid, work, memory, q_at, thread);
  bool has_queries = false;
#pragma unroll 1
  for (; first < work.keys.end; first += Shape::kKeys) {
    bring(0);
    // Behind the first keys, whose stage is empty before the consumers have left their queries.
    if (!has_queries) bring_queries<Shape>(args, grid, work, memory, q_at, thread);
    has_queries = true;
    bring(1);
    state.advance(Shape::kStages);
  }
}

template <class Shape>
__device__ __forceinline__ void produce(const AttentionArgs& args, const PrefillGrid& grid,
                                        const KeyMaps& maps, const PrefillMemory<Shape>& memory,
                                        PrefillPlace place) {
  const int thread = static_cast<int>(threadIdx.x);
  PipelineState state{0, 1}, q_at{0, 1};
  if constexpr (!Shape::kBoxed) {
    const PrefillWork work = work_at<Shape>(args, grid, place);
    if (work.first_row > work.last_row) return;
    if constexpr (Shape::kFp8) {
      bring_codes<Shape>(args, grid, work, memory, q_at, state, thread);
    } else {
      bring_keys<Shape>(args, grid, work, memory, q_at, state, thread);
    }
  } else {
    uint32_t item_parity = 0;
    if (grid.taken.any() && blockIdx.x == 0 && thread == 0) grid.taken.begin();
#pragma unroll 1
    for (;;) {
      const PrefillWork work = work_at<Shape>(args, grid, place);
      state = of_warp(state), q_at = of_warp(q_at);
      if (work.first_row <= work.last_row) {
        bring_boxes<Shape>(args, grid, maps, work, memory, q_at, state, thread);
        q_at.advance(Shape::kQPlaces);
      }
      if (!grid.taken.any()) break;
      if (thread == 0) {
        // Not before all have begun this one: others may be done with theirs earlier.
        mbarrier_wait(memory.item_empty(), item_parity ^ 1);
        const int item = grid.taken.take();
        place = place_of<Shape>(args, grid, item);
        store_shared(memory.item(), make_uint4(item < grid.taken.items ? place.b : -1, place.head,
                                               place.first_row, place.part));
        mbarrier_arrive(memory.item_full());
      }
      if (!next_place(memory, item_parity, place)) break;
    }
  }
  copies_wait_all();
}

#endif

}  // namespace cuda
}  // namespace rocm_kernels
