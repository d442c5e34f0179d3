// How a product's work is divided among workgroups, for the host and the device alike.
//
// The output is cut into tiles, and the sum over K of each tile into K blocks. One K block of one
// tile is a unit of work; units are numbered tile after tile: unit = tile * k_blocks + K block.
// Each worker has a range of consecutive units (in the hybrid, one for each round and a last one):
//
//   data-parallel   split_k = 1: a worker has one whole tile
//   split-K         each tile's K blocks are divided evenly among split_k workers
//   stream-K        split_k = kStreamKSplit: all units are divided evenly among a given number of
//                   workers, wherever tiles begin
//   hybrid          stream-K after `whole_rounds` in which each worker has one whole tile: only the
//                   tiles that would not fill the device are divided
//
// Workers that have parts of one tile are its contributors. Each leaves its partial sums in a slot
// of the workspace, and the last to arrive adds them in the order of k: the bits do not depend on
// which one that is.
//
// What a tile's number means is the product's business: a skinny product has tiles along N alone; a
// grouped one numbers the tiles of all its groups, which have the same K, one group after the
// other.
#pragma once

#include <cstdint>

#include "../../common/core/compiler.h"
#include "even_split.h"

namespace rocm_kernels {

struct Range {
  int32_t begin, end;
};

// The order of a full product's tiles: down groups of `group_m` tiles of M, then on to the next
// tile of N, so that workgroups that run together share rows of both operands in L2.
struct TileOrder {
  int32_t tiles_m, tiles_n, group_m;

  struct Place {
    int32_t m, n;
  };
  ROCM_KERNELS_HOST_DEVICE Place place_of(int32_t tile) const {
    const int32_t group_tiles = group_m * tiles_n;
    const int32_t group = tile / group_tiles, first_m = group * group_m;
    const int32_t height = tiles_m - first_m < group_m ? tiles_m - first_m : group_m;
    const int32_t within = tile - group * group_tiles;
    return {first_m + within % height, within / height};
  }
};

// A part of a tile: K blocks [k_begin, k_end), and the unit that follows it.
struct WorkTile {
  int32_t tile, k_begin, k_end, next_unit;
};

using EvenSplit = EvenSplitOf<int32_t>;

// The workers that have parts of a tile, in the order of k, and the slots of their partial sums.
struct Contributors {
  int32_t first, count;
  int32_t first_slot;  // of the first worker
  int32_t slot_step;   // worker > first has slot worker * slot_step
  ROCM_KERNELS_HOST_DEVICE int32_t slot(int32_t worker) const {
    return worker == first ? first_slot : worker * slot_step;
  }
};

struct Schedule {
  int32_t tiles;
  int32_t k_blocks;      // of a tile
  int32_t split_k;       // workers a tile, or kStreamKSplit
  EvenSplit cut;         // of a tile's K blocks among split_k workers; stream-K: of the units left
  EvenSplit by_xcd;      // of the workers among XCDs; parts = 1: worker = workgroup
  int32_t whole_rounds;  // hybrid: whole tiles of a worker, before its range of the units left

  // `workers` and `whole_rounds`: stream-K only.
  static Schedule make(int32_t tiles, int32_t k_blocks, int32_t split_k, int32_t workers,
                       int32_t xcds, int32_t whole_rounds = 0) {
    const bool streamed = split_k == kStreamKSplit;
    const int32_t count = streamed ? workers : tiles * split_k;
    const int32_t left = tiles - whole_rounds * workers;
    return {tiles,
            k_blocks,
            split_k,
            streamed ? EvenSplit::of(left * k_blocks, workers) : EvenSplit::of(k_blocks, split_k),
            EvenSplit::of(count, xcds),
            streamed ? whole_rounds : 0};
  }

  ROCM_KERNELS_HOST_DEVICE bool streamed() const { return split_k == kStreamKSplit; }

  // Workgroups to launch: one a worker.
  ROCM_KERNELS_HOST_DEVICE int32_t workgroups() const {
    return streamed() ? cut.parts : tiles * split_k;
  }

  // The hardware runs workgroup b on XCD b % 8. Giving each XCD consecutive workers lets
  // neighbours, who share tiles, share its L2.
  ROCM_KERNELS_HOST_DEVICE int32_t worker_of(int32_t workgroup) const {
    if (by_xcd.parts == 1) return workgroup;
    return by_xcd.begin_of(workgroup % by_xcd.parts) + workgroup / by_xcd.parts;
  }

  // Round `whole_rounds` is the last, and the only one but in the hybrid.
  ROCM_KERNELS_HOST_DEVICE Range units_of(int32_t worker, int32_t round) const {
    if (round == whole_rounds) return units_of(worker);
    const int32_t first = (round * cut.parts + worker) * k_blocks;
    return {first, first + k_blocks};
  }

  // The range of the last round.
  ROCM_KERNELS_HOST_DEVICE Range units_of(int32_t worker) const {
    const int32_t tile = streamed() ? 0 : worker / split_k;
    const int32_t part = streamed() ? worker : worker - tile * split_k;
    const int32_t base = (tile + whole_tiles()) * k_blocks;
    return {base + cut.begin_of(part), base + cut.begin_of(part + 1)};
  }

  // The tile that `unit` is in, and its part up to `end`.
  ROCM_KERNELS_HOST_DEVICE WorkTile work_at(int32_t unit, int32_t end) const {
    const int32_t tile = unit / k_blocks, first = tile * k_blocks;
    const int32_t next = end < first + k_blocks ? end : first + k_blocks;
    return {tile, unit - first, next - first, next};
  }

  ROCM_KERNELS_HOST_DEVICE Contributors contributors_of(int32_t tile) const {
    if (!streamed()) return {tile * split_k, split_k, tile * split_k, 1};
    // A worker shares at most two tiles with others: the one that its range begins in (its even
    // slot) and the one that it ends in (its odd slot).
    const int32_t begin = (tile - whole_tiles()) * k_blocks;
    if (begin < 0) return {0, 1, 0, 0};
    const int32_t first = cut.part_of(begin), last = cut.part_of(begin + k_blocks - 1);
    return {first, last - first + 1, 2 * first + (cut.begin_of(first) < begin ? 1 : 0), 2};
  }

  // Tiles of the rounds before the last.
  ROCM_KERNELS_HOST_DEVICE int32_t whole_tiles() const { return whole_rounds * cut.parts; }

  // Slots of partial sums that the workspace must hold.
  ROCM_KERNELS_HOST_DEVICE int32_t slots() const {
    return split_k == 1 ? 0 : streamed() ? 2 * workgroups() : workgroups();
  }
};

}  // namespace rocm_kernels
