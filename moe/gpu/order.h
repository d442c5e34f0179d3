// Which tile of a grouped product a workgroup has, in the config's order. Host and device.
#pragma once

#include "../../blocks/product/schedule.h"

namespace rocm_kernels {

// Which tile a workgroup has.
struct GroupedOrder {
  int32_t tiles_n, split_k, xcds;
  int32_t walked;  // tiles of rows that are walked down before the next columns; 0: all

  struct Place {
    int32_t m, n, part;  // m: -1 for none
  };
  ROCM_KERNELS_HOST_DEVICE Place place_of(int workgroup, int tiles_m) const {
    const int workers = tiles_m * tiles_n * split_k;
    if (workgroup >= workers) return {-1, 0, 0};
    // AMD hardware runs workgroup b on XCD b % 8: each XCD gets neighbours, as Schedule has it.
    const int worker = EvenSplit::of(workers, xcds).begin_of(workgroup % xcds) + workgroup / xcds;
    const int tile = worker / split_k;
    const int height = walked == 0 || walked > tiles_m ? tiles_m : walked;
    const TileOrder::Place place = TileOrder{tiles_m, tiles_n, height}.place_of(tile);
    return {place.m, place.n, worker - tile * split_k};
  }
};

// order=expert: up to group_m of an expert's tiles of rows that are walked down together, and their
// rows. Kept for each of them.
struct TileGroup {
  int32_t expert;
  int32_t first, count;  // tiles, numbered through all experts
  int32_t begin, end;    // rows

  // The one that `tile` is in, of an expert's `tiles` of block_m of its `rows`.
  static ROCM_KERNELS_HOST_DEVICE TileGroup of(int32_t tile, int32_t expert, Range tiles,
                                               Range rows, int32_t block_m, int32_t group_m) {
    const int32_t before = (tile - tiles.begin) / group_m * group_m;
    const int32_t first = tiles.begin + before, left = tiles.end - first;
    const int32_t count = left < group_m ? left : group_m;
    const int32_t begin = rows.begin + before * block_m, most = begin + count * block_m;
    return {expert, first, count, begin, rows.end < most ? rows.end : most};
  }

  struct Place {
    int32_t n, begin, end;  // tile of columns; rows
  };
  // Where the product's tile `tile` lies, by the group of tile `tile / tiles_n` of rows: a group of
  // `count` has count * tiles_n tiles, one after the other.
  ROCM_KERNELS_HOST_DEVICE Place place_of(int32_t tile, int32_t tiles_n, int32_t block_m) const {
    const int32_t within = tile - first * tiles_n, n = within / count;
    const int32_t from = begin + (within - n * count) * block_m;
    return {n, from, end < from + block_m ? end : from + block_m};
  }
};

}  // namespace rocm_kernels
