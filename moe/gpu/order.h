// Which tile of a grouped product a workgroup has, in the config's order.
#pragma once

#include "../../common/gpu/device.h"
#include "../../gemm/schedule.h"

namespace rocm_kernels {

// Which tile a workgroup has.
struct GroupedOrder {
  int32_t tiles_n, split_k, xcds;
  int32_t walked;  // tiles of rows that are walked down before the next columns; 0: all

  struct Place {
    int32_t m, n, part;  // m: -1 for none
  };
  ROCM_KERNELS_DEVICE Place place_of(int workgroup, int tiles_m) const {
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

}  // namespace rocm_kernels
