// Keys and values on their way to the stages of prefill.cuh, from rows or pages: what a thread of
// the producer warpgroup copies, and where FP8 codes are widened.
#pragma once

#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/swizzle.h"
#include "../../common/cuda/widen.cuh"
#include "pages.cuh"

namespace rocm_kernels {
namespace cuda {

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

  __device__ KeyCopies(const AttentionArgs& args, const PageSize& page_size, const Sequence& s,
                       int head, KeyRange keys, int first, int thread)
      : keys_(keys), row_(thread / 8), pages_(s, page_size, keys, first, row_) {
    k_row_ = args.k.row_stride * 2;
    v_row_ = args.v.row_stride * 2;
    k_page_ = args.k.batch_stride * 2;
    v_page_ = args.v.batch_stride * 2;
    byte_ = thread % 8 * 16;
    k_ = static_cast<const char*>(args.k.data) + s.k_begin * k_row_ +
         (s.k_batch + head * args.k.head_stride) * 2;
    v_ = static_cast<const char*>(args.v.data) + s.k_begin * v_row_ +
         (s.v_batch + head * args.v.head_stride) * 2;
    k_bytes_ = static_cast<int>(args.head_dim) * 2;
    v_bytes_ = static_cast<int>(args.head_dim_v) * 2;
    to_ = RowCopies<Shape::kKeys>::first_vector(thread);
  }

  // Keys and values of the tiles, one behind the other from `first` on; next_tile() between them.
  __device__ __forceinline__ void next_tile(int first) { pages_.next_tile(first, row_); }

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
    if (first >= keys_.begin && first + Shape::kKeys <= keys_.end) {
      if (kColumns % 64 == 0 && bytes == kColumns * 2) {
        copy_seen<kBoxes, kColumns, true>(first, to, base, row, page, bytes);
      } else {
        copy_seen<kBoxes, kColumns, false>(first, to, base, row, page, bytes);
      }
      return;
    }
    // Keys that nobody sees, and columns beyond a head, are zeros: nothing of them is read.
#pragma unroll 1
    for (int i = 0; i < kTimes; ++i) {
      const int key = first + row_ + 16 * i;
      const bool there = key >= keys_.begin && key < keys_.end;
      const int64_t before = !pages_.any() ? key * row : in_pages(first, i, row, page);
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

  // Of a tile whose keys all count. Columns beyond a head are zeros, unless kLines: then heads are
  // whole lines.
  template <int kBoxes, int kColumns, bool kLines>
  __device__ __forceinline__ void copy_seen(int first, uint32_t to, const char* base, int64_t row,
                                            int64_t page, int bytes) const {
    const char* from = base + byte_ + (!pages_.any() ? (first + row_) * row : 0);
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const char* const of_row = !pages_.any() ? from : from + in_pages(first, i, row, page);
#pragma unroll
      for (int box = 0; box < kBoxes; ++box) {
        const int at = box * kChunkBytes + byte_;
        if (at >= kColumns * 2) continue;
        const bool counts = kLines || at < bytes;
        copy_vector(to + (box * Shape::kKeys + i * 16) * kChunkBytes,
                    counts ? of_row + box * kChunkBytes : base, counts ? 16 : 0);
      }
      if (!pages_.any()) from += 16 * row;
    }
  }

  // Bytes before this thread's row of the i-th sixteen of the tile.
  __device__ __forceinline__ int64_t in_pages(int first, int i, int64_t row, int64_t page) const {
    const PageRow at = pages_.of(first, i, row_ + 16 * i);
    return at.page * page + at.row * row;
  }

  KeyRange keys_;
  int row_;
  RowPages<Shape::kKeys, 4, RowCopies<Shape::kKeys>::kRowsAtOnce> pages_;
  uint32_t to_;
  const char *k_, *v_;
  int64_t k_row_, v_row_, k_page_, v_page_;  // bytes
  int k_bytes_, v_bytes_;                    // of a row
  int byte_;
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

  __device__ WidenedKeys(const AttentionArgs& args, const PageSize& page_size, const Sequence& s,
                         int head, KeyRange keys, int thread, uint32_t slots)
      : keys_(keys),
        row_(thread / 4),
        next_(keys.begin / Shape::kKeys * Shape::kKeys),
        pages_(s, page_size, keys, next_, row_),
        slots_(slots + thread * 16) {
    k_row_ = args.k.row_stride;
    v_row_ = args.v.row_stride;
    k_page_ = args.k.batch_stride;
    v_page_ = args.v.batch_stride;
    code_ = thread % 4 * 16;
    to_ = static_cast<uint32_t>(swizzled(row_, 0, 1, code_ / 8));
    k_ = static_cast<const char*>(args.k.data) + s.k_begin * k_row_ + s.k_batch +
         head * args.k.head_stride;
    v_ = static_cast<const char*>(args.v.data) + s.k_begin * v_row_ + s.v_batch +
         head * args.v.head_stride;
    k_codes_ = static_cast<int>(args.head_dim);
    v_codes_ = static_cast<int>(args.head_dim_v);
  }

  // Starts the copies of the next half tile, or of nothing behind the last.
  __device__ __forceinline__ void copy_next() {
    if (next_ < keys_.end) {
      if (!of_values_) {
        copy<Shape::kBoxes>(k_, k_row_, k_page_, k_codes_);
      } else {
        copy<Shape::kBoxesV>(v_, v_row_, v_page_, v_codes_);
        pages_.next_tile(next_, row_);
        next_ += Shape::kKeys;
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

  // Keys that nobody sees, and columns beyond a head, are zeros: nothing of them is read.
  template <int kBoxes>
  __device__ __forceinline__ void copy(const char* base, int64_t row, int64_t page,
                                       int count) const {
#pragma unroll
    for (int i = 0; i < kTimes; ++i) {
      const int key = next_ + row_ + 32 * i;
      const bool there = key >= keys_.begin && key < keys_.end;
      int64_t before = key * row;
      if (pages_.any()) {
        const PageRow at = pages_.of(next_, i, row_ + 32 * i);
        before = at.page * page + at.row * row;
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

  KeyRange keys_;
  int row_;
  int next_;  // first key of the tile of which copies start next
  RowPages<Shape::kKeys, 8, 32> pages_;
  uint32_t slots_, to_;
  const char *k_, *v_;
  int64_t k_row_, v_row_, k_page_, v_page_;
  int code_, k_codes_, v_codes_;  // of a row
  bool of_values_ = false;        // which half of the next tile
  int to_slot_ = 0, from_slot_ = 0;
};

}  // namespace cuda
}  // namespace rocm_kernels
