// Where keys lie that are in pages.
#pragma once

#include "../gpu/problem.h"

namespace rocm_kernels {
namespace cuda {

// Rows of a page, any number of them. The keys of an aligned run of 2^run_shift lie in one page,
// one after the other.
struct PageSize {
  uint32_t rows = 1, magic = 0;  // a key's page is key * magic / 2^shift, for keys below 2^31
  int shift = 0, run_shift = 0;

  static constexpr int kMostRunShift = 4;

  static PageSize of(const AttentionArgs& args) {
    PageSize size;
    if (args.block_table == nullptr) return size;
    size.rows = static_cast<uint32_t>(args.page_size);
    int log = 0;  // of rows, rounded up
    while (log < 32 && uint64_t{size.rows} > uint64_t{1} << log) ++log;
    size.shift = 31 + log;
    size.magic = static_cast<uint32_t>((uint64_t{1} << size.shift) / size.rows + 1);
    while (size.run_shift < kMostRunShift && (size.rows >> size.run_shift) % 2 == 0) {
      ++size.run_shift;
    }
    return size;
  }

  ROCM_KERNELS_DEVICE int page_of(int key) const {
    return static_cast<int>(uint64_t{static_cast<uint32_t>(key)} * magic >> shift);
  }
  ROCM_KERNELS_DEVICE int row_of(int key) const {
    return key - page_of(key) * static_cast<int>(rows);
  }
};

// A key's page, and its row there.
struct PageRow {
  int page, row;
};

// Of the tiles of a warp, each kApart behind the one before: where the runs of keys lie that they
// are made of. Each lane looks one run up; those of the next tiles are asked for before they are
// needed, since a copy cannot begin without: 32 runs ahead, 512 keys where pages are whole runs of
// 16. Pages alone are kept, for blocks of many rows have no registers to spare.
template <int kKeys, int kApart>
class TilePages {
 public:
  static_assert(kKeys == 16 || kKeys == 32, "a tile has no more runs than a warp lanes");

  __device__ __forceinline__ TilePages(const Sequence& s, const PageSize& size, int keys_end,
                                       int first_tile)
      : table_(s.pages), size_(size), keys_end_(keys_end) {
    if (table_ == nullptr) return;
    now_ = page_of_run(first_tile);
    ahead_ = page_of_run(first_tile + tiles_at_once());
  }

  __device__ __forceinline__ bool any() const { return table_ != nullptr; }
  __device__ __forceinline__ bool longest_runs() const {
    return size_.run_shift == PageSize::kMostRunShift;
  }

  // Of row `row` of the tile whose keys begin at `first`; all lanes ask at once, each for its own.
  __device__ __forceinline__ PageRow of(int first, int row) const {
    return {__shfl_sync(~0u, now_, run_ + (row >> size_.run_shift)), size_.row_of(first + row)};
  }

  // Moves on from the tile whose keys begin at `first`.
  __device__ __forceinline__ void next_tile(int first) {
    if (table_ == nullptr) return;
    run_ += kKeys >> size_.run_shift;
    if (run_ < 32) return;
    run_ = 0;
    now_ = ahead_;
    ahead_ = page_of_run(first / kKeys + kApart + tiles_at_once());
  }

 private:
  __device__ __forceinline__ int runs_shift() const {  // of a tile
    return (kKeys == 16 ? 4 : 5) - size_.run_shift;
  }
  __device__ __forceinline__ int tiles_at_once() const { return (32 >> runs_shift()) * kApart; }

  // Of the lane's run, from that tile on.
  __device__ __forceinline__ int page_of_run(int tile) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, shift = runs_shift();
    const int key = (tile + (lane >> shift) * kApart) * kKeys +
                    ((lane & ((1 << shift) - 1)) << size_.run_shift);
    return key < keys_end_ ? table_[size_.page_of(key)] : 0;
  }

  const int32_t* table_;
  PageSize size_;
  int keys_end_, run_ = 0, now_ = 0, ahead_ = 0;
};

// Of the rows of a tile of kKeys keys that a warp has, its lane's: kRows that follow each other, of
// each kApart from `row` / kRows * kRows on. The page of the next tile's is asked for before it is
// needed; only that is kept, for producers have few registers.
template <int kKeys, int kRows, int kApart>
class RowPages {
 public:
  __device__ __forceinline__ RowPages(const Sequence& s, const PageSize& size, KeyRange keys)
      : table_(s.pages), size_(size), keys_(keys) {}

  __device__ __forceinline__ bool any() const { return table_ != nullptr; }

  // Moves on to the tile that was asked for last, and asks for the one behind it, whose keys begin
  // at `first`. `row`: the thread's first of a tile.
  __device__ __forceinline__ void ask(int first, int row) {
    if (table_ == nullptr) return;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int key = first + row / kRows * kRows + lane % kRows + lane / kRows * kApart;
    now_ = {ahead_, size_.row_of(key - kKeys)};
    ahead_ = key >= keys_.begin && key < keys_.end ? table_[size_.page_of(key)] : 0;
  }

  // Of row `in_rows` of the time-th kRows; all lanes ask at once, each for its own.
  __device__ __forceinline__ PageRow of(int time, int in_rows) const {
    const int lane = time * kRows + in_rows;
    return {__shfl_sync(~0u, now_.page, lane), __shfl_sync(~0u, now_.row, lane)};
  }

 private:
  const int32_t* table_;
  PageSize size_;
  KeyRange keys_;
  PageRow now_ = {0, 0};
  int ahead_ = 0;
};

}  // namespace cuda
}  // namespace rocm_kernels
