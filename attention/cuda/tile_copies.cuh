// Keys and values on their way from where they lie, rows or pages, to a warp's shared memory.
#pragma once

#include <numeric>

#include "../../common/cuda/async_copy.cuh"
#include "pages.cuh"

namespace rocm_kernels {
namespace cuda {

// Where a KV head's keys and values of a sequence lie.
struct KeyRows {
  const char *k, *v;
  int64_t k_row, v_row;  // bytes

  __device__ KeyRows(const AttentionArgs& args, const Sequence& s, int head, int bytes)
      : k_row(args.k.row_stride * bytes), v_row(args.v.row_stride * bytes) {
    k = static_cast<const char*>(args.k.data) + s.k_begin * k_row +
        (s.k_batch + head * args.k.head_stride) * bytes;
    v = static_cast<const char*>(args.v.data) + s.k_begin * v_row +
        (s.v_batch + head * args.v.head_stride) * bytes;
  }
};

// Asks for a tile of keys and values in rows, whose keys begin at `first`, to be brought to L2; for
// none from `end` on.
template <class Shape>
__device__ __forceinline__ void bring_tile(const AttentionArgs& args, const KeyRows& at, int first,
                                           int end) {
  constexpr int kLines = (Shape::kRowBytes + 127) / 128;  // of a row
#pragma unroll
  for (int i = 0; i < Shape::kKeys * kLines; i += 32) {
    const int line = i + static_cast<int>(threadIdx.x) % 32;
    const int64_t row = first + line / kLines;
    const int byte = line % kLines * 128;
    const bool there = row < end && line < Shape::kKeys * kLines;
    if (there && byte < args.head_dim * Shape::kBytes) bring_line(at.k + row * at.k_row + byte);
    if (there && byte < args.head_dim_v * Shape::kBytes) bring_line(at.v + row * at.v_row + byte);
  }
}

// One warp's tiles on their way to its shared memory, in their order: from first_tile on, each
// Shape::kWarps behind the one before.
template <class Shape>
class TileCopies {
 public:
  using Lines = typename Shape::Lines;
  static constexpr int kVectors = Shape::kRowBytes / 16;  // of a row
  // A lane's copies come round to the same place of a row, some rows further.
  static constexpr int kCopies = kVectors / std::gcd(kVectors, 32);
  static constexpr int kRows = 32 / std::gcd(kVectors, 32);
  static_assert(Shape::kKeys % kRows == 0 && 16 % kRows == 0, "tiles and runs are whole rounds");

  __device__ TileCopies(const AttentionArgs& args, const Sequence& s, int head, KeyRange keys,
                        const PageSize& page_size, int first_tile)
      : keys_(keys), pages_(s, page_size, keys.end, first_tile), at_(args, s, head, Shape::kBytes) {
    k_page_ = args.k.batch_stride * Shape::kBytes;
    v_page_ = args.v.batch_stride * Shape::kBytes;
    k_bytes_ = static_cast<int>(args.head_dim) * Shape::kBytes;
    v_bytes_ = static_cast<int>(args.head_dim_v) * Shape::kBytes;
  }

  // Starts the copies of the next tile, whose keys begin at `first`.
  __device__ void start(int first, uint32_t k_stage, uint32_t v_stage) {
    // One path for rows and for pages of whole runs: warps wait for instructions of a longer loop.
    if (first >= keys_.begin && first + Shape::kKeys <= keys_.end && pages_.are_long()) {
      copy_run(pages_.of(first, 0), k_stage, v_stage);
    } else {
#pragma unroll 1
      for (int row = 0; row < Shape::kKeys; row += kRows) {
#pragma unroll 1
        for (int i = 0; i < kCopies; ++i) {
          const Place place(i);
          const int key = first + row + place.row;
          const uint32_t to = static_cast<uint32_t>(Lines::further(place.to, row));
          copy(key >= keys_.begin && key < keys_.end, pages_.of(first, row + place.row), place.byte,
               k_stage + to, v_stage + to);
        }
      }
    }
    pages_.next_tile(first);
  }

 private:
  // Of the lane's i-th vector of kRows rows.
  struct Place {
    int row, byte, to;

    __device__ __forceinline__ explicit Place(int i) {
      const int vector = i * 32 + static_cast<int>(threadIdx.x) % 32;
      row = vector / kVectors, byte = vector % kVectors * 16;
      to = Lines::at(row, vector % kVectors);
    }
  };

  // The 16 rows from `at` on.
  __device__ __forceinline__ void copy_run(PageRow at, uint32_t k_stage, uint32_t v_stage) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const Place place(i);
      const bool of_k = place.byte < k_bytes_, of_v = place.byte < v_bytes_;
      const char* k = at_.k + at.page * k_page_ + (at.row + place.row) * at_.k_row + place.byte;
      const char* v = at_.v + at.page * v_page_ + (at.row + place.row) * at_.v_row + place.byte;
#pragma unroll
      for (int row = 0; row < 16; row += kRows) {
        const uint32_t to = static_cast<uint32_t>(Lines::further(place.to, row));
        copy_vector(k_stage + to, k, of_k ? 16 : 0);
        copy_vector(v_stage + to, v, of_v ? 16 : 0);
        k += kRows * at_.k_row;
        v += kRows * at_.v_row;
      }
    }
  }

  // A vector of a row. Keys that nobody sees, and what is beyond a head, are zeros: nothing of them
  // is read.
  __device__ __forceinline__ void copy(bool there, PageRow at, int byte, uint32_t k_to,
                                       uint32_t v_to) const {
    const bool of_k = there && byte < k_bytes_, of_v = there && byte < v_bytes_;
    copy_vector(k_to, of_k ? at_.k + at.page * k_page_ + at.row * at_.k_row + byte : at_.k,
                of_k ? 16 : 0);
    copy_vector(v_to, of_v ? at_.v + at.page * v_page_ + at.row * at_.v_row + byte : at_.v,
                of_v ? 16 : 0);
  }

  KeyRange keys_;
  TilePages<Shape::kWarps> pages_;
  KeyRows at_;
  int64_t k_page_, v_page_;  // bytes
  int k_bytes_, v_bytes_;    // of a row: whole vectors
};

// The same of keys and values in rows, of heads as wide as the tile: steps are bound by what a warp
// does between its copies (journal).
template <class Shape>
class RowTileCopies {
 public:
  using Lines = typename Shape::Lines;
  static constexpr int kVectors = Shape::kRowBytes / 16;  // of a row
  static constexpr int kCopies = Shape::kKeys * kVectors / 32;
  static constexpr int kRowsAtOnce = kVectors < 32 ? 32 / kVectors : 1;
  static constexpr int kCopiesOfRow = kVectors < 32 ? 1 : kVectors / 32;

  __device__ RowTileCopies(const AttentionArgs& args, const Sequence& s, int head, KeyRange keys,
                           const PageSize&, int)
      : keys_(keys), at_(args, s, head, Shape::kBytes) {}

  __device__ void start(int first, uint32_t k_stage, uint32_t v_stage) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (first >= keys_.begin && first + Shape::kKeys <= keys_.end) {
      const int64_t row = first + lane / kVectors;
      const int byte = lane % kVectors * 16;
      const char* k = at_.k + row * at_.k_row + byte;
      const char* v = at_.v + row * at_.v_row + byte;
      const int to = Lines::at(lane / kVectors, lane % kVectors);
#pragma unroll
      for (int i = 0; i < kCopies / kCopiesOfRow; ++i) {
#pragma unroll
        for (int j = 0; j < kCopiesOfRow; ++j) {
          const uint32_t at = static_cast<uint32_t>(Lines::further(to, i * kRowsAtOnce) +
                                                    j * 4 * Shape::kKeys * Lines::kLineBytes);
          copy_vector(k_stage + at, k + j * 512, 16);
          copy_vector(v_stage + at, v + j * 512, 16);
        }
        k += kRowsAtOnce * at_.k_row;
        v += kRowsAtOnce * at_.v_row;
      }
      return;
    }
    // Keys that nobody sees are zeros: nothing of them is read.
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int vector = i * 32 + lane;
      const int row = vector / kVectors, byte = vector % kVectors * 16;
      const int64_t key = first + row;
      const bool there = key >= keys_.begin && key < keys_.end;
      const uint32_t to = static_cast<uint32_t>(Lines::at(row, vector % kVectors));
      copy_vector(k_stage + to, there ? at_.k + key * at_.k_row + byte : at_.k, there ? 16 : 0);
      copy_vector(v_stage + to, there ? at_.v + key * at_.v_row + byte : at_.v, there ? 16 : 0);
    }
  }

 private:
  KeyRange keys_;
  KeyRows at_;
};

}  // namespace cuda
}  // namespace rocm_kernels
