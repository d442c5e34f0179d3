// The producer warpgroup of prefill.cuh: queries, keys and values on their way to shared memory,
// where they are boxes of 64 columns, a line of 128 bytes a row, swizzled (swizzle.h).
#pragma once

#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/swizzle.h"
#include "../../common/cuda/widen.cuh"
#include "prefill_shape.cuh"

namespace rocm_kernels {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The producer warpgroup's copies of rows of 16-byte vectors to boxes of 64 columns, a line of 128
// bytes a row, swizzled (swizzle.h). Eight threads share a row, sixteen rows are copied at once.
template <int kRows>
struct RowCopies {
  static constexpr int kRowsAtOnce = 16, kTimes = kRows / kRowsAtOnce;

  // Row `thread / 8` of the first sixteen, vector thread % 8 of its line.
  static __device__ __forceinline__ uint32_t first_vector(int thread) {
    return static_cast<uint32_t>(swizzled(thread / 8, 0, 1, thread % 8));
  }
};

template <class Shape>
class KeyCopies {
 public:
  static constexpr int kTimes = RowCopies<Shape::kKeys>::kTimes;

  __device__ KeyCopies(const AttentionArgs& args, const Sequence& s, int head, KeyRange keys,
                       int thread)
      : pages_(s.pages), keys_(keys), page_size_(static_cast<uint32_t>(args.page_size)) {
    k_row_ = args.k.row_stride * 2;
    v_row_ = args.v.row_stride * 2;
    k_page_ = args.k.batch_stride * 2;
    v_page_ = args.v.batch_stride * 2;
    byte_ = thread % 8 * 16;
    row_ = thread / 8;
    k_ = static_cast<const char*>(args.k.data) + s.k_begin * k_row_ +
         (s.k_batch + head * args.k.head_stride) * 2;
    v_ = static_cast<const char*>(args.v.data) + s.k_begin * v_row_ +
         (s.v_batch + head * args.v.head_stride) * 2;
    k_bytes_ = static_cast<int>(args.head_dim) * 2;
    v_bytes_ = static_cast<int>(args.head_dim_v) * 2;
    to_ = RowCopies<Shape::kKeys>::first_vector(thread);
  }

  // Looks up in which pages the keys from `first` on lie; before the copies of the same tile. A
  // lane has one of its warp's rows.
  __device__ __forceinline__ void look_up(int first) {
    if (pages_ == nullptr) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int key = first + row_ / 4 * 4 + lane % 4 + lane / 4 * 16;
    if (key >= keys_.begin && key < keys_.end) {
      const uint32_t page = static_cast<uint32_t>(key) / page_size_;
      page_ = pages_[page];
      in_page_ = static_cast<int>(static_cast<uint32_t>(key) - page * page_size_);
    }
  }

  __device__ __forceinline__ void copy_k(int first, uint32_t stage) const {
    copy<Shape::kBoxes, Shape::kD>(first, stage, k_, k_row_, k_page_, k_bytes_);
  }
  __device__ __forceinline__ void copy_v(int first, uint32_t stage) const {
    copy<Shape::kBoxesV, Shape::kDV>(first, stage, v_, v_row_, v_page_, v_bytes_);
  }

 private:
  template <int kBoxes, int kColumns>
  __device__ __forceinline__ void copy(int first, uint32_t stage, const char* base, int64_t row,
                                       int64_t page, int bytes) const {
    const uint32_t to = stage + to_;
    if (bytes == kColumns * 2 && kColumns % 64 == 0 && first >= keys_.begin &&
        first + Shape::kKeys <= keys_.end) {
      const char* from = base + byte_ + (pages_ == nullptr ? (first + row_) * row : 0);
#pragma unroll
      for (int i = 0; i < kTimes; ++i) {
        const char* const of_row = pages_ == nullptr ? from : from + in_pages(i, row, page);
#pragma unroll
        for (int box = 0; box < kBoxes; ++box) {
          copy_vector(to + (box * Shape::kKeys + i * 16) * kChunkBytes, of_row + box * kChunkBytes,
                      16);
        }
        if (pages_ == nullptr) from += 16 * row;
      }
      return;
    }
    // Keys that nobody sees, and columns beyond a head, are zeros: nothing of them is read.
#pragma unroll 1
    for (int i = 0; i < kTimes; ++i) {
      const int key = first + row_ + 16 * i;
      const bool there = key >= keys_.begin && key < keys_.end;
      const int64_t before = pages_ == nullptr ? key * row : in_pages(i, row, page);
      const char* const from = base + (there ? before : 0);
#pragma unroll 1
      for (int box = 0; box < kBoxes; ++box) {
        const int at = box * kChunkBytes + byte_;
        if (at >= kColumns * 2) break;
        const int left = there ? min(max(bytes - at, 0), 16) : 0;
        copy_vector(to + (box * Shape::kKeys + i * 16) * kChunkBytes, left > 0 ? from + at : base,
                    left);
      }
    }
  }

  // Bytes before this thread's row of the i-th sixteen.
  __device__ __forceinline__ int64_t in_pages(int i, int64_t row, int64_t page) const {
    const int lane = 4 * i + static_cast<int>(threadIdx.x) % 32 / 8;
    return __shfl_sync(~0u, page_, lane) * page + __shfl_sync(~0u, in_page_, lane) * row;
  }

  const int32_t* pages_;
  KeyRange keys_;
  uint32_t page_size_, to_;
  const char *k_, *v_;
  int64_t k_row_, v_row_, k_page_, v_page_;  // bytes
  int k_bytes_, v_bytes_;                    // of a row
  int byte_, row_;
  int page_ = 0, in_page_ = 0;  // of the lane's row
};

// FP8 keys and values: each producer copies codes to slots of its own, some half tiles (keys,
// values, keys, ...) ahead, then widens them to the type of the queries, exactly, on their way to
// the boxes. Four threads share a row of a box, 16 codes each; 32 rows are one time.
template <class Shape>
class WidenedKeys {
 public:
  static constexpr int kTimes = Shape::kKeys / 32, kSlots = Shape::kSlots;
  static constexpr int kSlotBytes = kTimes * Shape::kBoxes * 128 * 16;
  static_assert(Shape::kKeys % 32 == 0 && Shape::kBoxesV <= Shape::kBoxes, "");

  __device__ WidenedKeys(const AttentionArgs& args, const Sequence& s, int head, KeyRange keys,
                         int thread, uint32_t slots)
      : pages_(s.pages),
        keys_(keys),
        page_size_(static_cast<uint32_t>(args.page_size)),
        slots_(slots + thread * 16) {
    k_row_ = args.k.row_stride;
    v_row_ = args.v.row_stride;
    k_page_ = args.k.batch_stride;
    v_page_ = args.v.batch_stride;
    row_ = thread / 4;
    code_ = thread % 4 * 16;
    to_ = static_cast<uint32_t>(swizzled(row_, 0, 1, code_ / 8));
    k_ = static_cast<const char*>(args.k.data) + s.k_begin * k_row_ + s.k_batch +
         head * args.k.head_stride;
    v_ = static_cast<const char*>(args.v.data) + s.k_begin * v_row_ + s.v_batch +
         head * args.v.head_stride;
    k_codes_ = static_cast<int>(args.head_dim);
    v_codes_ = static_cast<int>(args.head_dim_v);
    next_ = keys.begin / Shape::kKeys * Shape::kKeys;
    look_up();
  }

  // Starts the copies of the next half tile, or of nothing behind the last.
  __device__ __forceinline__ void copy_next() {
    if (next_ < keys_.end) {
      if (!of_values_) {
        copy<Shape::kBoxes>(k_, k_row_, k_page_, k_codes_);
      } else {
        copy<Shape::kBoxesV>(v_, v_row_, v_page_, v_codes_);
        next_ += Shape::kKeys;
        look_up();
      }
      of_values_ = !of_values_;
      to_slot_ = to_slot_ + 1 == kSlots ? 0 : to_slot_ + 1;
    }
    copies_commit();
  }

  // Widens the oldest half tile to the boxes of a stage.
  template <int kBoxes>
  __device__ __forceinline__ void widen(uint32_t stage) {
    copies_wait<kSlots - 1>();
    // All of them before the first is stored: one that waits for each has no other to work on.
    uint4 codes[kTimes][kBoxes];
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        codes[i][box] = load_shared(slots_ + from_slot_ * kSlotBytes + place(i, box));
      }
    }
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const uint32_t words[4] = {codes[i][box].x, codes[i][box].y, codes[i][box].z,
                                   codes[i][box].w};
        uint32_t pairs[8];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          halves_from_fp8(words[w], pairs[2 * w], pairs[2 * w + 1]);
        }
        const uint32_t to = stage + to_ + (box * Shape::kKeys + 32 * i) * kChunkBytes;
        store_shared(to, make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
        store_shared(to ^ 16, make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]));
      }
    }
    from_slot_ = from_slot_ + 1 == kSlots ? 0 : from_slot_ + 1;
  }

 private:
  static __device__ __forceinline__ constexpr int place(int i, int box) {
    return (i * Shape::kBoxes + box) * 128 * 16;
  }

  // In which pages the next tile's keys lie. A lane has one of its warp's rows.
  __device__ __forceinline__ void look_up() {
    if (pages_ == nullptr) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int key = next_ + row_ / 8 * 8 + lane % 8 + lane / 8 * 32;
    if (key >= keys_.begin && key < keys_.end) {
      const uint32_t page = static_cast<uint32_t>(key) / page_size_;
      page_ = pages_[page];
      in_page_ = static_cast<int>(static_cast<uint32_t>(key) - page * page_size_);
    }
  }

  // Keys that nobody sees, and columns beyond a head, are zeros: nothing of them is read.
  template <int kBoxes>
  __device__ __forceinline__ void copy(const char* base, int64_t row, int64_t page,
                                       int count) const {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const int key = next_ + row_ + 32 * i;
      const bool there = key >= keys_.begin && key < keys_.end;
      int64_t before = key * row;
      if (pages_ != nullptr) {
        const int lane = 8 * i + static_cast<int>(threadIdx.x) % 32 / 4;
        before = __shfl_sync(~0u, page_, lane) * page + __shfl_sync(~0u, in_page_, lane) * row;
      }
      const char* const from = base + (there ? before + code_ : 0);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const bool counts = there && box * 64 + code_ < count;
        copy_vector(slots_ + to_slot_ * kSlotBytes + place(i, box), counts ? from + box * 64 : base,
                    counts ? 16 : 0);
      }
    }
  }

  const int32_t* pages_;
  KeyRange keys_;
  uint32_t page_size_, slots_, to_;
  const char *k_, *v_;
  int64_t k_row_, v_row_, k_page_, v_page_;
  int k_codes_, v_codes_;  // of a row
  int row_, code_;
  int next_;                // first key of the tile of which copies start next
  bool of_values_ = false;  // and which half
  int to_slot_ = 0, from_slot_ = 0;
  int page_ = 0, in_page_ = 0;  // of the lane's row
};

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

template <class Shape>
__device__ __forceinline__ void produce(const AttentionArgs& args, const PrefillGrid& grid,
                                        const PrefillWork& work,
                                        const PrefillMemory<Shape>& memory) {
  const int thread = static_cast<int>(threadIdx.x);
  PipelineState state{0, 1};
  int first = work.keys.begin / Shape::kKeys * Shape::kKeys;
  if constexpr (Shape::kFp8) {
    WidenedKeys<Shape> keys(args, work.s, work.head, work.keys, thread, memory.slots());
    for (int i = 0; i < Shape::kSlots; ++i) keys.copy_next();
    if constexpr (Shape::kScaledQ) {
      convert_queries<Shape>(args, grid, work, memory.q, memory.factors(), thread);
    } else {
      copy_queries<Shape>(args, grid, work, memory.q, thread);
      copies_wait<0>();
    }
    fence_async_proxy();
    mbarrier_arrive(memory.q_full());
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
  } else {
    copy_queries<Shape>(args, grid, work, memory.q, thread);
    mbarrier_arrive_after_copies(memory.q_full());
    KeyCopies<Shape> copies(args, work.s, work.head, work.keys, thread);
    copies.look_up(first);
#pragma unroll 1
    for (; first < work.keys.end; first += Shape::kKeys) {
      mbarrier_wait(memory.empty(0, state.stage), state.parity);
      copies.copy_k(first, memory.k + state.stage * Shape::kKBytes);
      mbarrier_arrive_after_copies(memory.full(0, state.stage));
      mbarrier_wait(memory.empty(1, state.stage), state.parity);
      copies.copy_v(first, memory.v + state.stage * Shape::kVBytes);
      mbarrier_arrive_after_copies(memory.full(1, state.stage));
      copies.look_up(first + Shape::kKeys);
      state.advance(Shape::kStages);
    }
  }
  copies_wait<0>();
}

#endif

}  // namespace cuda
}  // namespace rocm_kernels
