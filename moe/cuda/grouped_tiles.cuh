// The tiles of grouped products for gemm's warpgroup kernel (blocks/product/cuda/warpgroup.cuh),
// which asks this class where a tile lies and what its rows are. sm_90a.
//
//   a: rows in the order of experts, as route_kernels.h has them         tile: rows of one expert
//   w: one map of all experts, [K bytes, rows, 2, E] or [K bytes, rows, 1, E]
//
// gate_up: each 128 rows of w of a tile are the gates of 64 columns of h, then their ups. As
// columns they are the halves of a tile of 128; as rows, the two waves of a warpgroup. So each
// thread has the gate and the up of its columns.
#pragma once

#include "../../blocks/product/cuda/warpgroup.cuh"
#include "../../blocks/product/schedule.h"
#include "grouped_sink.cuh"

namespace rocm_kernels {
namespace cuda::moe {

struct GroupedPlace : TilePlace {
  int32_t expert;
};

template <class Tile, bool kGateUp>
class GroupedTiles {
 public:
  using Problem = GroupedTilesProblem;
  using Place = GroupedPlace;
  static constexpr bool kCountedOnDevice = true;
  using Sink = GroupedSink<Tile, kGateUp>;
  static constexpr int kTileM = Sink::kTileM;                                  // rows of a
  static constexpr int kTileN = Tile::kSwapAb ? Tile::kRows : Tile::kColumns;  // rows of w
  static constexpr int kBoxRows = Sink::kBoxRows;                              // of w
  static_assert(kTileN % kBoxRows == 0 && Tile::kPaired == kGateUp, "");

  __device__ __forceinline__ GroupedTiles(const Problem& all, int rank)
      : all_(all), p_(all.product), rank_(rank) {}

  // After wait_for_previous_kernel().
  __device__ __forceinline__ TileSchedule schedule() {
    tiles_m_ = *p_.tile_count;
    const int tiles = tiles_m_ * all_.tiles_n;
    return TileSchedule::make(tiles, all_.chunks, tiles, 1, all_.workers);
  }

  __device__ __forceinline__ Place place_of(int tile) const {
    // The last tile of an expert is less work. A worker that goes by a fixed stride through the
    // experts' tiles could have none of these, so each round starts with another worker.
    const int round = tile / all_.workers, first = round * all_.workers;
    const int of_round = min(all_.workers, tiles_m_ * all_.tiles_n - first);
    const int turned = first + (tile - first + round) % of_round;
    RowTile rows;
    int n;
    if (p_.groups != nullptr) {
      const TileGroup group = p_.groups[turned / all_.tiles_n];
      const TileGroup::Place place = group.place_of(turned, all_.tiles_n, kTileM);
      rows = {group.expert, place.begin, place.end, 0};
      n = place.n;
    } else {
      const int height = all_.walked == 0 || all_.walked > tiles_m_ ? tiles_m_ : all_.walked;
      const TileOrder::Place place = TileOrder{tiles_m_, all_.tiles_n, height}.place_of(turned);
      rows = p_.tiles[place.m];
      n = place.n;
    }
    const int first_n = (n * all_.cluster + rank_) * kTileN;
    Place found;
    found.first_row = Tile::kSwapAb ? first_n : rows.begin;
    found.first_column = Tile::kSwapAb ? rows.begin : first_n;
    found.own_row = found.first_row;
    found.own_column = found.first_column;
    found.end_row = Tile::kSwapAb ? p_.n : rows.end;
    found.end_column = Tile::kSwapAb ? rows.end : p_.n;
    found.expert = rows.expert;
    return found;
  }

  __device__ __forceinline__ void load(const CUtensorMap& map, bool is_w, const Place& place, int x,
                                       int row, uint32_t to, uint32_t barrier,
                                       uint64_t policy) const {
#if __CUDA_ARCH__ >= 900
    if (!is_w) return load_box_2d(map, x, row, to, barrier, policy);
#pragma unroll
    for (int i = 0; i < kTileN / kBoxRows; ++i) {
      const int first = kGateUp ? row / 2 + i * (kBoxRows / 2) : row + i * kBoxRows;
      load_box_4d(map, x, first, 0, place.expert, to + i * kBoxRows * Tile::kWRowBytes, barrier,
                  policy);
    }
#endif
  }

  // An expert's last tile is half empty on average: a warpgroup without rows multiplies nothing.
  __device__ __forceinline__ bool is_beyond_end(const UnitInfo& unit, int group) const {
    return !Tile::kSwapAb && unit.first_row + group * Tile::kGroupRows >= unit.end_row;
  }
  __device__ __forceinline__ int boxes_of_pair(const Place& place, int box_rows) const {
    return place.first_row + box_rows < place.end_row ? 2 : 1;
  }

  __device__ __forceinline__ const ScaleView& scale_a() const { return p_.scale_a; }
  __device__ __forceinline__ const ScaleView& blocks_of_w() const { return p_.w.scale; }
  __device__ __forceinline__ ScaleView scale_w(const Place& place) const {
    return p_.w.scale_of(place.expert);
  }
  __device__ __forceinline__ int w_row_of_group(const Place& place, int group, int size) const {
    return w_row(place, group * size);
  }
  // To the MXFP4 scales of row i of w of the tile, from a chunk of 64 elements on.
  __device__ __forceinline__ void begin_exponents(Mxfp4Exponents& exponents, const Place& place,
                                                  int i, int chunk) const {
    const int row = w_row(place, i);
    const uint8_t* const of_row =
        row < 0 ? nullptr
                : p_.w.mx_scales + place.expert * p_.w.mx_expert_stride + row * p_.w.mx_row_stride;
    exponents.begin(of_row, 2 * chunk, p_.k / kMxScaleBlock, all_.even_exponents);
  }
  __device__ __forceinline__ float a_factor(const Place& place, int i) const {
    const int row = (Tile::kSwapAb ? place.first_column : place.first_row) + i;
    return row < (Tile::kSwapAb ? place.end_column : place.end_row) ? p_.scale_a.outer(row) : 0.0f;
  }
  __device__ __forceinline__ float w_factor(const Place& place, int i) const {
    const int row = w_row(place, i);
    return row >= 0 ? scale_w(place).outer(row) : 0.0f;
  }
  // The row of out for row i of a of the tile; -1: there is none.
  __device__ __forceinline__ int32_t place_of_row(const Place& place, int i) const {
    const int row = (Tile::kSwapAb ? place.first_column : place.first_row) + i;
    if (row >= (Tile::kSwapAb ? place.end_column : place.end_row)) return -1;
    return p_.slots != 0 ? p_.row_slots[row] : row;
  }
  __device__ __forceinline__ bool has_bias() const { return p_.w.bias != nullptr; }
  __device__ __forceinline__ float bias(const Place& place, int i) const {
    const int row = w_row(place, i);
    return row >= 0 ? p_.bias(place.expert, row) : 0.0f;
  }

 private:
  // Row of w that is row i of the tile's; -1 for none.
  __device__ __forceinline__ int w_row(const Place& place, int i) const {
    const int first = Tile::kSwapAb ? place.first_row : place.first_column;
    if constexpr (!kGateUp) return first + i < p_.n ? first + i : -1;
    const int up = i / (kBoxRows / 2) % 2;
    const int column = first / 2 + i / kBoxRows * (kBoxRows / 2) + i % (kBoxRows / 2);
    if (column >= p_.n / 2) return -1;
    return p_.interleaved ? 2 * column + up : up * (p_.n / 2) + column;
  }

  const Problem& all_;
  const GroupedProblem& p_;
  const int rank_;
  int tiles_m_ = 0;
};

}  // namespace cuda::moe
}  // namespace rocm_kernels
