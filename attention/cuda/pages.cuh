// Where keys lie that are in pages.
#pragma once

#include "../gpu/problem.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

// Rows of a page, any number of them. The keys of an aligned run of 2^run_shift lie in one page,
// one after the other.
struct PageSize {
  uint32_t rows = 1, magic = 0;  // a key's page is key * magic / 2^shift, for keys below 2^31
  int shift = 0, run_shift = 0;

  static constexpr int kMostRunShift = 4;
  static_assert(1 << kMostRunShift == kDecodeKeys, "a tile of a warp is one such run");

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

// Pages of runs of keys that a warp needs one after the other, 32 at a time, a lane each; the next
// 32 are asked for before they are needed. Two registers take turns: to move a number is to wait
// for it.
struct PagesAhead {
  int even = 0, odd = 0;
  int run = 0;  // the next, of 64

  // All lanes ask at once, each for its own.
  __device__ __forceinline__ int of(int from_next) const {
    const int lane = run + from_next;  // modulo 32
    return run < 32 ? __shfl_sync(~0u, even, lane) : __shfl_sync(~0u, odd, lane);
  }
  // Moves on to the 32 that were asked for; ask() is for those behind them.
  template <typename Ask>
  __device__ __forceinline__ void turn(const Ask& ask) {
    if (run < 32) {
      even = ask();
    } else {
      odd = ask();
    }
    run = run < 32 ? 32 : 0;
  }
};

// Of the tiles of a warp, each kApart behind the one before: where the runs of keys lie that they
// are made of. A copy cannot begin without, and a page's number comes no sooner than the copies
// that were asked for before it: 32 runs ahead, 512 keys where pages are whole runs of 16.
template <int kApart>
class TilePages {
 public:
  __device__ __forceinline__ TilePages(const Sequence& s, const PageSize& size, int keys_end,
                                       int first_tile)
      : table_(s.pages), size_(size), keys_end_(keys_end) {
    if (table_ == nullptr) return;
    pages_.even = page_of_run(first_tile);
    pages_.odd = page_of_run(first_tile + tiles_at_once());
  }

  // Whether 16 rows from a multiple of 16 on lie one after the other.
  __device__ __forceinline__ bool are_long() const {
    return table_ == nullptr || size_.run_shift == PageSize::kMostRunShift;
  }

  // Of row `row` of the tile whose keys begin at `first`: of page 0 where there are none. All lanes
  // ask at once, each for its own.
  __device__ __forceinline__ PageRow of(int first, int row) const {
    PageRow at = {0, first + row};
    if (table_ != nullptr) at = {pages_.of(row >> size_.run_shift), size_.row_of(first + row)};
    return at;
  }

  // Moves on from the tile whose keys begin at `first`.
  __device__ __forceinline__ void next_tile(int first) {
    if (table_ == nullptr) return;
    const int runs = kDecodeKeys >> size_.run_shift;
    if ((pages_.run & 31) + runs < 32) {
      pages_.run += runs;
    } else {
      pages_.turn([&] { return page_of_run(first / kDecodeKeys + kApart + tiles_at_once()); });
    }
  }

 private:
  __device__ __forceinline__ int runs_shift() const {  // of a tile
    return PageSize::kMostRunShift - size_.run_shift;
  }
  __device__ __forceinline__ int tiles_at_once() const { return (32 >> runs_shift()) * kApart; }

  // Of the lane's run, from that tile on.
  __device__ __forceinline__ int page_of_run(int tile) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, shift = runs_shift();
    const int key = (tile + (lane >> shift) * kApart) * kDecodeKeys +
                    ((lane & ((1 << shift) - 1)) << size_.run_shift);
    return key < keys_end_ ? table_[size_.page_of(key)] : 0;
  }

  const int32_t* table_;
  PageSize size_;
  int keys_end_;
  PagesAhead pages_;
};

// The same for a warp of several that share tiles of kKeys keys, one behind the other: it has kRows
// rows that follow each other, of each kApart of a tile. Where pages are whole runs of 16, each
// lane looks one run up, of several tiles; and else one of the warp's rows of a tile.
template <int kKeys, int kRows, int kApart>
class RowPages {
 public:
  static_assert(kKeys % 16 == 0 && 16 % kRows == 0 && kKeys / kApart * kRows <= 32, "");

  // `first`: the first tile's first key. `row`: the thread's first of a tile.
  __device__ __forceinline__ RowPages(const Sequence& s, const PageSize& size, KeyRange keys,
                                      int first, int row)
      : table_(s.pages), size_(size), keys_(keys) {
    if (table_ == nullptr) return;
    pages_.even = page_of_lane(first, row);
    pages_.odd = page_of_lane(first + keys_at_once(), row);
  }

  __device__ __forceinline__ bool any() const { return table_ != nullptr; }

  // Of row `row` of the tile whose keys begin at `first`, the lane's time-th; all lanes ask at
  // once.
  __device__ __forceinline__ PageRow of(int first, int time, int row) const {
    return {pages_.of(are_long() ? row / 16 : time * kRows + row % kRows),
            size_.row_of(first + row)};
  }

  // Moves on from the tile whose keys begin at `first`.
  __device__ __forceinline__ void next_tile(int first, int row) {
    if (table_ == nullptr) return;
    if (are_long() && (pages_.run & 31) + 2 * kRuns <= 32) {
      pages_.run += kRuns;
    } else {
      pages_.turn([&] { return page_of_lane(first + kKeys + keys_at_once(), row); });
    }
  }

 private:
  static constexpr int kRuns = kKeys / 16;  // of a tile

  __device__ __forceinline__ bool are_long() const {
    return size_.run_shift == PageSize::kMostRunShift;
  }
  __device__ __forceinline__ int keys_at_once() const {
    return are_long() ? 32 / kRuns * kKeys : kKeys;
  }
  // Of the lane's run, or row, from the tile on whose keys begin at `first`; 0 where nobody sees
  // it.
  __device__ __forceinline__ int page_of_lane(int first, int row) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int key =
        first +
        (are_long() ? lane * 16 : row / kRows * kRows + lane % kRows + lane / kRows * kApart);
    const int last = key + (are_long() ? 15 : 0);
    return last >= keys_.begin && key < keys_.end ? table_[size_.page_of(key)] : 0;
  }

  const int32_t* table_;
  PageSize size_;
  KeyRange keys_;
  PagesAhead pages_;
};

}  // namespace cuda
}  // namespace rocm_kernels
