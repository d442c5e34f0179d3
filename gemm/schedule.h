// Who multiplies what: the line of work and its cuts.
//
// Lay the tiles of w (some rows of w x all of K) end to end, each cut into granules of K, and the
// whole product is one line of tiles x granules. A block owns an interval of it:
//
//   split-K    every tile is cut into `split` intervals of equal length: blocks = tiles x split
//   stream-K   the line is cut into `blocks` intervals of equal length, wherever tiles begin
//
// Where a tile has several owners, each leaves partial sums in a slot of the workspace, and the one
// that arrives last adds them up in the order of k: the bits do not depend on who that is.
#pragma once

#include <cstdint>

#include "../common/core/compiler.h"

namespace rocm_kernels {

struct Interval {
  int32_t begin, end;
  ROCM_KERNELS_HOST_DEVICE int32_t length() const { return end - begin; }
};

// A length cut into parts as equal as whole numbers allow: the first `longer` parts have one more.
struct Cut {
  int32_t parts, length, longer;

  static ROCM_KERNELS_HOST_DEVICE Cut of(int32_t total, int32_t parts) {
    return {parts, total / parts, total % parts};
  }
  ROCM_KERNELS_HOST_DEVICE int32_t begin_of(int32_t part) const {
    return part * length + (part < longer ? part : longer);
  }
  // The part that holds a point.
  ROCM_KERNELS_HOST_DEVICE int32_t part_at(int32_t point) const {
    const int32_t edge = longer * (length + 1);
    return point < edge ? point / (length + 1) : longer + (point - edge) / length;
  }
};

// The intervals that own parts of a tile, first to last in the order of k, and their slots.
struct Owners {
  int32_t first, count;
  int32_t first_slot;  // of the first owner
  int32_t slot_step;   // owner first + i > first has slot (first + i) * slot_step
  ROCM_KERNELS_HOST_DEVICE int32_t slot(int32_t owner) const {
    return owner == first ? first_slot : owner * slot_step;
  }
};

struct Schedule {
  int32_t tiles;     // tiles of w
  int32_t granules;  // granules of K in a tile
  int32_t split;     // blocks a tile; 0: stream-K
  Cut cut;           // of a tile's granules into `split` parts; of the whole line for stream-K
  Cut stretches;     // of the intervals into one stretch for each XCD; parts = 1: as they come

  static Schedule make(int32_t tiles, int32_t granules, int32_t split, int32_t blocks,
                       int32_t xcds) {
    const int32_t count = split != 0 ? tiles * split : blocks;
    return {tiles, granules, split,
            split != 0 ? Cut::of(granules, split) : Cut::of(tiles * granules, blocks),
            Cut::of(count, xcds)};
  }

  ROCM_KERNELS_HOST_DEVICE int32_t blocks() const { return split != 0 ? tiles * split : cut.parts; }

  // The interval of a block. The hardware deals block b to XCD b % 8; giving each XCD one stretch
  // of the line lets neighbours, who share tiles, share its L2.
  ROCM_KERNELS_HOST_DEVICE int32_t interval_of(int32_t block) const {
    if (stretches.parts == 1) return block;
    return stretches.begin_of(block % stretches.parts) + block / stretches.parts;
  }

  ROCM_KERNELS_HOST_DEVICE Interval work_of(int32_t interval) const {
    const int32_t tile = split != 0 ? interval / split : 0;
    const int32_t part = split != 0 ? interval - tile * split : interval;
    const int32_t base = tile * granules;
    return {base + cut.begin_of(part), base + cut.begin_of(part + 1)};
  }

  ROCM_KERNELS_HOST_DEVICE Owners owners_of(int32_t tile) const {
    if (split != 0) return {tile * split, split, tile * split, 1};
    // An interval shares at most two tiles with others: the one that it begins in (its even slot)
    // and the one that it ends in (its odd slot).
    const int32_t begin = tile * granules;
    const int32_t first = cut.part_at(begin), last = cut.part_at(begin + granules - 1);
    return {first, last - first + 1, 2 * first + (cut.begin_of(first) < begin ? 1 : 0), 2};
  }

  // Slots of partial sums that the workspace must hold.
  ROCM_KERNELS_HOST_DEVICE int32_t slots() const {
    return split == 1 ? 0 : split != 0 ? blocks() : 2 * blocks();
  }
};

}  // namespace rocm_kernels
