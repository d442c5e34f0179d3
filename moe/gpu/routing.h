// From ids to work: which slots each expert has, in the order of slots, and the tiles of rows that
// workgroups take. All on the device; the host knows only how many there can be. The kernels:
// route_kernels.h.
#pragma once

#include "problem.h"

namespace rocm_kernels {

constexpr int kRouteThreads = kFewExperts;
constexpr int kSlotsPerChunk = 2 * kRouteThreads;

struct RoutingProblem {
  const int32_t* ids;      // [slots]; nullptr: grouped_gemm
  const int32_t* offsets;  // [experts]: grouped_gemm's ends
  int64_t slots;           // grouped_gemm: rows
  int32_t experts;
  int32_t block_m;
  int32_t chunks;
  int32_t* counts;      // [chunks][experts]: of each chunk; then the row of its first slot
  int32_t* row_slots;   // [slots]
  int32_t* slot_rows;   // [slots], the reverse: -1 for a slot without a row; nullptr: not wanted
  RowTile* tiles;       // [most_row_tiles()]
  int32_t* tile_count;  // [2]: tiles, rows
  TileGroup* groups;    // [most_row_tiles()]: of up to group_m tiles; nullptr: not wanted
  int32_t group_m;
};

}  // namespace rocm_kernels
