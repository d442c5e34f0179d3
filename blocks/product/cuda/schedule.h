// How a product's work is divided among blocks that stay on their SMs.
//
// A worker (a block, or a cluster of two that share an operand) takes units: a tile's sum over an
// interval of chunks of K, one after another.
//
//   data-parallel  every tile is a unit; a worker takes every `workers`-th of them
//   split-K        every tile is cut into split_k units of equal length
//   stream-K       tiles x chunks laid end to end are cut into one interval for each worker,
//                  wherever tiles begin
//   hybrid         whole tiles as long as they come out even, the others streamed
//
// All four are: `whole` tiles first, then the others by split-K or streamed.
//
// Why this is not ../schedule.h, AMD's: there data-parallel and split-K start a workgroup for each
// unit, workers are numbered by XCD, and 32 bits count the units. Here workers are as many as run
// at once and take units one after another in every schedule, so that the next one's operands come
// while the last one's end is computed. The warps that fetch operands, fetch scales and look up
// ends walk through the units apart, each with its own `Units`; and 64 bits count what is streamed.
#pragma once

#include <cstdint>

#include "../../../common/core/compiler.h"
#include "../even_split.h"

namespace rocm_kernels {
namespace cuda {

// Chunks [begin, end) of K of a tile. Its contributors are numbered in the order of k.
struct Unit {
  int32_t tile = 0, begin = 0, end = 0;
  int32_t contributor = 0, contributors = 1;
  int32_t first_slot = 0;  // of the first contributor's partial sums
  bool last = false;       // of this worker
};

struct TileSchedule {
  int32_t tiles = 0;         // of the product, in the order that workers take them
  int32_t chunks = 0;        // of K in a tile
  int32_t whole = 0;         // tiles that nobody shares
  int32_t split_k = 1;       // units of each other tile, or kStreamKSplit
  int32_t workers = 1;       // at once
  EvenSplitOf<int64_t> cut;  // of a tile's chunks, or of the streamed line

  static ROCM_KERNELS_HOST_DEVICE TileSchedule make(int32_t tiles, int32_t chunks, int32_t whole,
                                                    int32_t split_k, int32_t workers) {
    TileSchedule s;
    s.tiles = tiles;
    s.chunks = chunks;
    s.whole = whole;
    s.split_k = split_k;
    s.workers = workers;
    s.cut = s.streamed()
                ? EvenSplitOf<int64_t>::of(static_cast<int64_t>(tiles - whole) * chunks, workers)
                : EvenSplitOf<int64_t>::of(chunks, split_k);
    return s;
  }

  ROCM_KERNELS_HOST_DEVICE bool streamed() const { return split_k == kStreamKSplit; }
  ROCM_KERNELS_HOST_DEVICE int32_t shared_tiles() const { return tiles - whole; }

  // Slots of partial sums that the workspace must hold.
  ROCM_KERNELS_HOST_DEVICE int64_t slots() const {
    if (shared_tiles() == 0 || split_k == 1) return 0;
    return streamed() ? int64_t{2} * workers : int64_t{shared_tiles()} * split_k;
  }

  // Where a contributor of `unit`, which is of `worker`, leaves partial sums. An interval of a
  // streamed line shares at most two tiles with others: the one that it begins in (its even slot)
  // and the one that it ends in (its odd slot).
  ROCM_KERNELS_HOST_DEVICE int32_t slot(const Unit& unit, int32_t worker, int32_t of) const {
    if (of == 0) return unit.first_slot;
    return streamed() ? 2 * (worker - unit.contributor + of) : unit.first_slot + of;
  }
  ROCM_KERNELS_HOST_DEVICE int32_t slot_step() const { return streamed() ? 2 : 1; }
};

// The units of one worker, in turn.
class Units {
 public:
  ROCM_KERNELS_HOST_DEVICE Units(const TileSchedule& schedule, int32_t worker)
      : s_(schedule), next_(worker), worker_(worker) {
    if (s_.streamed()) {
      at_ = s_.cut.begin_of(worker);
      end_ = s_.cut.begin_of(worker + 1);
    }
  }

  ROCM_KERNELS_HOST_DEVICE bool take(Unit& unit) {
    unit = Unit();
    if (next_ < s_.whole) {
      unit.tile = static_cast<int32_t>(next_);
      unit.end = s_.chunks;
      next_ += s_.workers;
      return true;
    }
    return s_.streamed() ? take_streamed(unit) : take_split(unit);
  }

 private:
  ROCM_KERNELS_HOST_DEVICE bool take_split(Unit& unit) {
    const int64_t index = next_ - s_.whole;
    if (index >= int64_t{s_.shared_tiles()} * s_.split_k) return false;
    const int32_t tile = static_cast<int32_t>(index / s_.split_k);
    unit.contributor = static_cast<int32_t>(index - int64_t{tile} * s_.split_k);
    unit.contributors = s_.split_k;
    unit.tile = s_.whole + tile;
    unit.begin = static_cast<int32_t>(s_.cut.begin_of(unit.contributor));
    unit.end = static_cast<int32_t>(s_.cut.begin_of(unit.contributor + 1));
    unit.first_slot = tile * s_.split_k;
    next_ += s_.workers;
    unit.last = next_ - s_.whole >= int64_t{s_.shared_tiles()} * s_.split_k;
    return true;
  }

  ROCM_KERNELS_HOST_DEVICE bool take_streamed(Unit& unit) {
    if (at_ >= end_) return false;
    const int32_t tile = static_cast<int32_t>(at_ / s_.chunks);
    const int64_t tile_begin = int64_t{tile} * s_.chunks;
    const int64_t tile_end = tile_begin + s_.chunks;
    const int64_t stop = end_ < tile_end ? end_ : tile_end;
    const int32_t first = s_.cut.part_of(tile_begin);
    unit.tile = s_.whole + tile;
    unit.begin = static_cast<int32_t>(at_ - tile_begin);
    unit.end = static_cast<int32_t>(stop - tile_begin);
    unit.contributor = worker_ - first;
    unit.contributors = s_.cut.part_of(tile_end - 1) - first + 1;
    unit.first_slot = 2 * first + (s_.cut.begin_of(first) < tile_begin ? 1 : 0);
    at_ = stop;
    unit.last = at_ == end_;
    return true;
  }

  const TileSchedule& s_;
  int64_t next_;
  int32_t worker_;
  int64_t at_ = 0, end_ = 0;
};

}  // namespace cuda
}  // namespace rocm_kernels
