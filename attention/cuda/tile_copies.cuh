// Keys and values on their way from where they lie, rows or pages, to a warp's shared memory.
#pragma once

#include "../../common/cuda/async_copy.cuh"
#include "../gpu/problem.h"

namespace rocm_kernels {
namespace cuda {

// One warp's tiles on their way to its shared memory.
template <class Shape>
class TileCopies {
 public:
  static constexpr int kVectors = Shape::kRowBytes / 16;  // of a row
  static constexpr int kCopies = Shape::kKeys * kVectors / 32;
  // Lanes keep their place in rows from copy to copy, which then are a number of rows apart.
  static constexpr bool kRegular = 32 % kVectors == 0 || kVectors % 32 == 0;
  static_assert(Shape::kKeys * kVectors % 32 == 0, "each lane copies as many vectors");

  __device__ TileCopies(const AttentionArgs& args, const Sequence& s, int head, KeyRange keys)
      : pages_(s.pages), keys_(keys), page_size_(static_cast<uint32_t>(args.page_size)) {
    k_row_ = args.k.row_stride * Shape::kBytes;
    v_row_ = args.v.row_stride * Shape::kBytes;
    k_page_ = args.k.batch_stride * Shape::kBytes;
    v_page_ = args.v.batch_stride * Shape::kBytes;
    k_ = static_cast<const char*>(args.k.data) + s.k_begin * k_row_ +
         (s.k_batch + head * args.k.head_stride) * Shape::kBytes;
    v_ = static_cast<const char*>(args.v.data) + s.k_begin * v_row_ +
         (s.v_batch + head * args.v.head_stride) * Shape::kBytes;
    k_bytes_ = static_cast<int>(args.head_dim) * Shape::kBytes;
    v_bytes_ = static_cast<int>(args.head_dim_v) * Shape::kBytes;
    whole_rows_ = kRegular && k_bytes_ == Shape::kRowBytes && v_bytes_ == Shape::kRowBytes;
    whole_pages_ = pages_ == nullptr || page_size_ % Shape::kKeys == 0;
  }

  // Looks up where the keys of the tile at `first` lie; before start() of the same tile.
  __device__ void look_up(int first) {
    if (pages_ == nullptr) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int key = whole_pages_ ? first : first + lane % Shape::kKeys;
    if (whole_pages_ || (key >= keys_.begin && key < keys_.end)) {
      const uint32_t page = static_cast<uint32_t>(key) / page_size_;
      page_ = pages_[page];
      row_ = static_cast<int>(static_cast<uint32_t>(key) - page * page_size_);
    }
  }

  __device__ void start(int first, uint32_t k_stage, uint32_t v_stage) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (whole_rows_ && whole_pages_ && first >= keys_.begin && first + Shape::kKeys <= keys_.end) {
      const int64_t row = (pages_ != nullptr ? row_ : first) + lane / kVectors;
      const int byte = lane % kVectors * 16;
      const char* k = k_ + row * k_row_ + byte;
      const char* v = v_ + row * v_row_ + byte;
      if (pages_ != nullptr) {
        k += page_ * k_page_;
        v += page_ * v_page_;
      }
      const uint32_t to = static_cast<uint32_t>(lane / kVectors * Shape::kPitch + byte);
      constexpr int kRowsAtOnce = kVectors < 32 ? 32 / kVectors : 1;
      constexpr int kCopiesOfRow = kVectors < 32 ? 1 : kVectors / 32;
#pragma unroll
      for (int i = 0; i < kCopies / kCopiesOfRow; ++i) {
#pragma unroll
        for (int j = 0; j < kCopiesOfRow; ++j) {
          const uint32_t at = to + i * kRowsAtOnce * Shape::kPitch + j * 512;
          copy_vector(k_stage + at, k + j * 512, 16);
          copy_vector(v_stage + at, v + j * 512, 16);
        }
        k += kRowsAtOnce * k_row_;
        v += kRowsAtOnce * v_row_;
      }
      return;
    }
    // Keys that nobody sees, and what is beyond a head, are zeros: nothing of them is read.
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int vector = i * 32 + lane;
      const int row = vector / kVectors, byte = vector % kVectors * 16;
      const int key = first + row;
      int64_t page = 0, in_page = key;
      if (pages_ != nullptr) {
        page = __shfl_sync(~0u, page_, row);
        in_page = whole_pages_ ? row_ + row : __shfl_sync(~0u, row_, row);
      }
      const bool there = key >= keys_.begin && key < keys_.end;
      const int k_left = there ? min(max(k_bytes_ - byte, 0), 16) : 0;
      const int v_left = there ? min(max(v_bytes_ - byte, 0), 16) : 0;
      const uint32_t to = static_cast<uint32_t>(row * Shape::kPitch + byte);
      copy_vector(k_stage + to, k_left > 0 ? k_ + page * k_page_ + in_page * k_row_ + byte : k_,
                  k_left);
      copy_vector(v_stage + to, v_left > 0 ? v_ + page * v_page_ + in_page * v_row_ + byte : v_,
                  v_left);
    }
  }

 private:
  const int32_t* pages_;
  KeyRange keys_;
  uint32_t page_size_;
  const char *k_, *v_;
  int64_t k_row_, v_row_, k_page_, v_page_;  // bytes
  int k_bytes_, v_bytes_;                    // of a row
  bool whole_rows_, whole_pages_;            // a tile's rows, all one after the other
  int page_ = 0, row_ = 0;                   // of the tile's first key, or of key lane % kKeys
};

}  // namespace cuda
}  // namespace rocm_kernels
