// Which rows of which expert a workgroup of the streamed design has.
//
// Up to 64 slots no kernel routes before the products: each wave finds its tile among the ids, a
// lane a slot. Beyond them tiles are listed (gpu/route_kernels.h).
#pragma once

#include "../../common/gpu/lanes.h"
#include "../gpu/order.h"
#include "rows.h"

namespace rocm_kernels::cdna::moe {

// What a workgroup of the streamed design goes by, beside its problem.
struct StreamedWork {
  GroupedOrder order;
  bool by_grid;        // place: blockIdx.x columns, y part of K, z tile of rows; else by `order`
  const int32_t* ids;  // [slots], at most a wave's lanes; nullptr: tiles are listed
  int32_t slots, experts;
  EvenSplit parts;            // of K's blocks: p.split_k. Divisions are the host's
  int32_t waves, log2_waves;  // of a workgroup
};

#if ROCM_KERNELS_CDNA

// Asks for all that a workgroup's beginning needs of the kernel's arguments at once. Left to where
// they are used, each line of 64 bytes would be a load from memory of its own, one after the other,
// and each use a load from the scalar cache.
ROCM_KERNELS_DEVICE void ask_for_arguments(const GroupedProblem& p, const StreamedWork& work) {
  asm volatile("" ::"s"(work.ids), "s"(work.slots), "s"(work.experts), "s"(p.w.data),
               "s"(p.w.expert_stride), "s"(p.w.row_stride), "s"(p.n),
               "s"(static_cast<int>(p.interleaved)));
  asm volatile("" ::"s"(p.a), "s"(p.a_stride), "s"(p.slots_of_token), "s"(p.k), "s"(p.slots),
               "s"(p.out_scales), "s"(work.parts.length), "s"(work.waves));
}

struct StreamedTile {
  int expert;          // -1: there is no such tile
  int rows;            // up to kBlockM
  int a_row, out_row;  // lane r: of row r

  template <bool kGateUp, int kBlockM>
  static ROCM_KERNELS_DEVICE StreamedTile of(const GroupedProblem& p, const StreamedWork& work,
                                             int lane, int& n, int& part) {
    n = static_cast<int>(blockIdx.x), part = static_cast<int>(blockIdx.y);
    const int m = static_cast<int>(blockIdx.z);
    StreamedTile tile;
    int row, slot;  // lane r: of row r
    if (work.ids != nullptr) {
      tile.find<kBlockM>(work, m, lane, slot);
      row = slot;  // a row of h for each slot
    } else {
      tile.look_up(p, work, m, lane, n, part, row, slot);
    }
    if constexpr (kGateUp) {
      tile.a_row =
          static_cast<int>(static_cast<uint32_t>(slot) / static_cast<uint32_t>(p.slots_of_token));
      tile.out_row = row;
    } else {
      tile.a_row = row;
      tile.out_row = p.slots != 0 ? slot : row;
    }
    return tile;
  }

  ROCM_KERNELS_DEVICE int first_row() const { return __builtin_amdgcn_readfirstlane(a_row); }
  // From the tile's first row on, so that offsets are small.
  ROCM_KERNELS_DEVICE ScaleView scales_of_a(const GroupedProblem& p) const {
    ScaleView scale = p.scale_a;
    if (scale.kind != ScaleView::Kind::kNone) scale.data += first_row() * scale.row_stride;
    return scale;
  }

 private:
  // The m-th of the tiles that begin where a multiple of kBlockM slots of the same expert lie
  // before a slot.
  template <int kBlockM>
  ROCM_KERNELS_DEVICE void find(const StreamedWork& work, int m, int lane, int& slot) {
    const int id = lane < work.slots ? work.ids[lane] : -1;
    const bool routed = id >= 0 && id < work.experts;
    static_assert(kFewExperts <= 512, "StreamedTile: an id has nine bits");
    const LaneMask same = same_lanes<9>(id) & ballot(routed);  // slots of the lane's expert
    const int rank = bits_below(same);
    const bool begins = routed && rank % kBlockM == 0;
    const LaneMask beginnings = ballot(begins);
    const LaneMask chosen = ballot(begins && bits_below(beginnings) == m);
    // Without a branch, so that what the workgroup does next may begin.
    const int first = chosen != 0 ? __builtin_ctzll(chosen) : 0;
    const int its_expert = __builtin_amdgcn_readlane(id, first);
    expert = chosen != 0 ? its_expert : -1;
    const int row = rank - __builtin_amdgcn_readlane(rank, first);
    const bool member = routed && id == expert && row >= 0 && row < kBlockM;
    rows = bits_of(ballot(member));
    // Each member tells the lane of its row; what the last lane is told nobody asks for.
    slot = __builtin_amdgcn_ds_permute((member ? row : kWaveSize - 1) * 4, lane);
    slot = lane < rows ? slot : 0;
  }

  ROCM_KERNELS_DEVICE void look_up(const GroupedProblem& p, const StreamedWork& work, int m,
                                   int lane, int& n, int& part, int& row, int& slot) {
    expert = -1;
    const int count = __builtin_amdgcn_readfirstlane(*p.tile_count);
    if (!work.by_grid) {
      const GroupedOrder::Place place = work.order.place_of(static_cast<int>(blockIdx.x), count);
      m = place.m, n = place.n, part = place.part;
      if (m < 0) return;
    }
    // By the grid, m is known at once, and both loads are under way together: what all lanes take
    // part in stays before the branch. There is memory for as many tiles as workgroups.
    const RowTile listed = p.tiles[m];
    const int its_expert = __builtin_amdgcn_readfirstlane(listed.expert);
    const int begin = __builtin_amdgcn_readfirstlane(listed.begin);
    const int end = __builtin_amdgcn_readfirstlane(listed.end);
    if (m >= count) return;
    expert = its_expert;
    rows = end - begin;
    row = begin + (lane < rows ? lane : 0);
    slot = p.row_slots != nullptr ? p.row_slots[row] : row;
  }
};

// A tile's rows of a, as blocks/product/cdna/rows.h has those of a product.
struct TileRowsOfA {
  const uint8_t* matrix;  // where the tile's first row begins; it spans less than 2 GiB
  int64_t stride;         // bytes
  int rows, row;          // lane r: how far row r lies behind the first
  ScaleView scale;        // from the first row on

  ROCM_KERNELS_DEVICE TileRowsOfA(const GroupedProblem& p, const StreamedTile& tile, int bytes)
      : matrix(static_cast<const uint8_t*>(p.a) + tile.first_row() * p.a_stride * bytes),
        stride(p.a_stride * bytes),
        rows(tile.rows),
        row(tile.a_row - tile.first_row()),
        scale(tile.scales_of_a(p)) {}

  ROCM_KERNELS_DEVICE const uint8_t* base() const { return matrix; }
  ROCM_KERNELS_DEVICE uint32_t offset(int at) const {
    const int from = of_lane(row, at);
    return at < rows ? static_cast<uint32_t>(from * stride) : kOutside;
  }
  ROCM_KERNELS_DEVICE const float* scales() const { return scale.data; }
  ROCM_KERNELS_DEVICE uint32_t scale_offset(int at) const {
    return static_cast<uint32_t>(of_lane(row, at < rows ? at : 0) * scale.row_stride * 4);
  }
};

#endif

}  // namespace rocm_kernels::cdna::moe
