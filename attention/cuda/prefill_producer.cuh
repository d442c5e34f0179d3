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

template <class Shape, int kThreads>
__device__ __forceinline__ void copy_queries(const AttentionArgs& args, const PrefillGrid& grid,
                                             const PrefillWork& work, uint32_t to, int thread) {
#pragma unroll 2
  for (int at = thread / 8; at < Shape::kRows; at += kThreads / 8) {
    const int row = work.first_row + at;
    const bool there = row <= work.last_row;
    const auto* const from = row_of_q<Shape>(args, grid, work, there ? row : work.last_row);
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box) {
      const int column = box * 64 + thread % 8 * 8;
      const int left = there ? min(max(static_cast<int>(args.head_dim) - column, 0) * 2, 16) : 0;
      copy_vector(to + box * Shape::kRows * kChunkBytes +
                      static_cast<uint32_t>(swizzled(at, 0, 1, thread % 8)),
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

// Queries of an item, by kThreads threads.
template <class Shape, int kThreads>
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
    copy_queries<Shape, kThreads>(args, grid, work, to, thread);
    mbarrier_arrive_after_copies(full);
  }
}

// The same by TMA. Rows behind an item's last are zeros, or other sequences'.
template <class Shape>
__device__ __forceinline__ void bring_query_boxes(const AttentionArgs& args,
                                                  const PrefillGrid& grid, const PrefillMaps& maps,
                                                  const PrefillWork& work,
                                                  const PrefillMemory<Shape>& memory,
                                                  const PipelineState& at) {
  const uint32_t to = memory.q(at.stage), full = memory.q_full(at.stage);
  mbarrier_wait(memory.q_empty(at.stage), at.parity);
  mbarrier_arrive_expect(full, Shape::kBoxes * grid.item_rows * kChunkBytes);
  const int query = work.s.q_begin + grid.rows.query_of(work.first_row);
  for (int box = 0; box < Shape::kBoxes; ++box) {
    load_head_group_box(maps.q, box * 64, query, work.head,
                        args.cu_seqlens_q == nullptr ? work.b : 0,
                        to + box * Shape::kRows * kChunkBytes, full);
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
  bring_queries<Shape, 128>(args, grid, work, memory, q_at, thread);
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
  bring_queries<Shape, 128>(args, grid, work, memory, q_at, thread);
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

// Keys and values of an item by TMA, from rows; and queries, where threads bring them.
template <class Shape>
__device__ __forceinline__ void bring_boxes(const AttentionArgs& args, const PrefillGrid& grid,
                                            const PrefillMaps& maps, const PrefillWork& work,
                                            const PrefillMemory<Shape>& memory,
                                            const PipelineState& q_at, PipelineState& state,
                                            int thread) {
  constexpr int kThreads = 32 * Shape::kKeyWarps;
  const KeyRange whole = keys_in_boxes(args, grid.window, work.s);
  int first = work.keys.begin / Shape::kKeys * Shape::kKeys;
  const auto bring = [&](int of_v) {
    const uint32_t full = memory.full(of_v, state.stage);
    const uint32_t to =
        of_v ? memory.v + state.stage * Shape::kVBytes : memory.k + state.stage * Shape::kKBytes;
    const int boxes = of_v ? Shape::kBoxesV : Shape::kBoxes;
    mbarrier_wait(memory.empty(of_v, state.stage), state.parity);
    __syncwarp();
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
      copy_end_of_keys<Shape::kKeys, kThreads>(
          from, rows.row_stride * 2, static_cast<int>(of_v ? args.head_dim_v : args.head_dim) * 2,
          boxes, work.keys, first, to, thread);
      copies_wait_all();
      fence_async_proxy();
      __syncwarp();
    }
    if (thread % 32 == 0) mbarrier_arrive(full);
  };
  // The next item is taken before this one's end, so that its queries are there in time; but late,
  // lest blocks that are done before find none. With two stages the last tile is asked for late:
  // there the next item is taken before it.
  bool wants = true;
  const auto want = [&] {
    if (wants && thread == 0) mbarrier_arrive(memory.wanted());
    wants = false;
  };
  bool has_queries = grid.q_in_boxes;
  const auto bring_own_queries = [&] {
    if (!has_queries) bring_queries<Shape, kThreads>(args, grid, work, memory, q_at, thread);
    has_queries = true;
  };
  if (first >= work.keys.end) bring_own_queries();
#pragma unroll 1
  for (const int start = first; first < work.keys.end; first += Shape::kKeys) {
    if (Shape::kStages == 2 && first > start + Shape::kKeys &&
        first + Shape::kKeys >= work.keys.end) {
      want();
    }
    bring(0);
    // Behind the first keys, whose stage is empty before the consumers have left their queries.
    bring_own_queries();
    bring(1);
    state.advance(Shape::kStages);
  }
  want();
}

// A warp: zeros in the places of queries behind an item's rows, where nothing is brought. Outputs
// that pass these places are zeros there, too.
template <class Shape>
__device__ __forceinline__ void clear_idle_rows(const PrefillGrid& grid,
                                                const PrefillMemory<Shape>& memory, int lane) {
  for (int place = 0; place < Shape::kQPlaces; ++place) {
    for (int box = 0; box < Shape::kBoxes; ++box) {
      for (int at = grid.item_rows * 8 + lane; at < Shape::kRows * 8; at += 32) {
        store_shared(memory.q(place) + box * Shape::kRows * kChunkBytes + at * 16, uint4{});
      }
    }
  }
  fence_async_proxy();
  __syncwarp();
}

// The item warp: takes items, tells the others what is to be done, and brings queries.
template <class Shape>
__device__ __forceinline__ void hand_out_items(const AttentionArgs& args, const PrefillGrid& grid,
                                               const PrefillMaps& maps,
                                               const PrefillMemory<Shape>& memory,
                                               const PrefillWork& first, int lane) {
  PipelineState q_at{0, 1};
  uint32_t wanted = 0, parity = 1;
  if (grid.q_in_boxes) clear_idle_rows(grid, memory, lane);
  if (grid.taken.any() && blockIdx.x == 0 && lane == 0) grid.taken.begin();
  PrefillWork work = first;
  int item = 0;
#pragma unroll 1
  for (;;) {
    if (work.any()) {
      if (grid.q_in_boxes && lane == 0) {
        bring_query_boxes<Shape>(args, grid, maps, work, memory, q_at);
      }
      __syncwarp();
      q_at.advance(Shape::kQPlaces);
      if (!grid.taken.any()) return;
      mbarrier_wait(memory.wanted(), wanted);
      __syncwarp();
      wanted ^= 1;
    }
    if (!grid.taken.any()) return;
    // Of the last ones none is taken before all warps have begun this one: other blocks may be done
    // with theirs earlier.
    if (grid.taken.items - item < 2 * grid.taken.blocks) {
      mbarrier_wait(memory.work_empty(), parity);
      __syncwarp();
    }
    if (lane == 0) item = grid.taken.take();
    item = of_warp(item);
    if (item < grid.taken.items) {
      work = work_at<Shape>(args, grid, place_of<Shape>(args, grid, item));
      if (!work.any()) continue;
    } else {
      work.last_row = work.first_row - 1;
    }
    mbarrier_wait(memory.work_empty(), parity);
    __syncwarp();
    parity ^= 1;
    if (lane == 0) hand_out(memory, work);
    if (!work.any()) return;
  }
}

// The store warp: when consumers are done with a place of queries, it has the outputs stored that
// they have left there for TMA, and empties the place.
template <class Shape>
__device__ __forceinline__ void store_items(const AttentionArgs& args, const PrefillGrid& grid,
                                            const PrefillMaps& maps,
                                            const PrefillMemory<Shape>& memory,
                                            const PrefillWork& first, int lane) {
  // Allowed at once: the next kernel's blocks find room where this one's are done.
  allow_next_kernel();
  PipelineState q_at{0, 0};
  for_each_item(args, grid, memory, first, [&](const PrefillWork& work) {
    mbarrier_wait(memory.out_full(q_at.stage), q_at.parity);
    __syncwarp();
    if (lane == 0) {
      if (stored_in_boxes(args, grid, work)) {
        const int query = work.s.q_begin + grid.rows.query_of(work.first_row);
        for (int box = 0; box < Shape::kBoxesV; ++box) {
          store_head_group_box(maps.out, box * 64, query, work.head,
                               args.cu_seqlens_q == nullptr ? work.b : 0,
                               memory.q(q_at.stage) + box * Shape::kRows * kChunkBytes);
        }
        commit_stores();
        wait_for_reads_of_stores<0>();
      }
      mbarrier_arrive(memory.q_empty(q_at.stage));
    }
    __syncwarp();
    q_at.advance(Shape::kQPlaces);
  });
}

template <class Shape>
__device__ __forceinline__ void produce(const AttentionArgs& args, const PrefillGrid& grid,
                                        const PrefillMaps& maps, const PrefillMemory<Shape>& memory,
                                        const PrefillWork& first) {
  const int thread = static_cast<int>(threadIdx.x);
  PipelineState state{0, 1}, q_at{0, 1};
  if constexpr (!Shape::kBoxed) {
    if (!first.any()) return;
    if constexpr (Shape::kFp8) {
      bring_codes<Shape>(args, grid, first, memory, q_at, state, thread);
    } else {
      bring_keys<Shape>(args, grid, first, memory, q_at, state, thread);
    }
  } else {
    const int warp = of_warp(thread / 32);
    if (warp == Shape::kItemWarp) {
      hand_out_items<Shape>(args, grid, maps, memory, first, thread % 32);
    } else if (warp == Shape::kStoreWarp) {
      store_items<Shape>(args, grid, maps, memory, first, thread % 32);
    } else {
      for_each_item(args, grid, memory, first, [&](const PrefillWork& work) {
        state = of_warp(state), q_at = of_warp(q_at);
        bring_boxes<Shape>(args, grid, maps, work, memory, q_at, state, thread);
        q_at.advance(Shape::kQPlaces);
      });
    }
  }
  copies_wait_all();
}

#endif

}  // namespace cuda
}  // namespace rocm_kernels
