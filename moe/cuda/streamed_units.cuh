// The units of a streamed product, and the rows of each: every block sorts the ids of all slots for
// itself, so that no kernel needs to run before it.
//
//   unit = a tile (at most block_m slots of one expert, in the order of slots) x block_n rows of w
#pragma once

#include "../../blocks/product/schedule.h"
#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/mma.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/gpu/dependent_launch.h"
#include "../gpu/problem.h"
#include "pipelines.h"

namespace rocm_kernels {
namespace cuda::moe {

// The slots that a block sorts, to tiles of block_m.
struct StreamedSlots {
  const int32_t* ids;  // [count]
  int32_t count, experts, block_m;
};

struct StreamedProblem {
  GroupedProblem product;  // its rows are slots; tiles, tile_count and row_slots are not used
  StreamedSlots slots;
  StreamedStage stage;
  int32_t num_stages;
  int32_t tiles_n;
  int32_t walked;  // tiles of rows that are walked down before the next columns; 0: all
  bool first;      // of the layer's kernels: the ids may be the previous kernel's
};

// A unit as the multiplying warps need it.
struct StreamedUnit {
  int32_t rows;     // of a
  int32_t first_n;  // of w, counted as a tile has them
  int32_t expert;
  int32_t slots[kStreamedMaxM];
  int32_t a_rows[kStreamedMaxM];
  float a_factor[kStreamedMaxM];  // of whole rows
  float w_factor[kStreamedMaxN];  // in the order in which they lie in a stage
  float bias[kStreamedMaxN];
};

// The rows of w of a unit, as they lie in a stage: the gates and then the ups of its columns, or
// each gate beside its up where w has them so, or one after the other.
template <bool kGateUp>
struct StreamedRows {
  int32_t first_n, block_n, n;
  bool interleaved;

  __device__ bool halves() const { return kGateUp && !interleaved; }
  // Row of w where the box of a half begins.
  __device__ int box_row(int half) const {
    return halves() ? half * (n / 2) + first_n / 2 : first_n + half * (block_n / 2);
  }
  // Row of w of a place of the stage, -1 for none.
  __device__ int w_row(int place) const {
    if (!halves()) return first_n + place < n ? first_n + place : -1;
    const int half = place >= block_n / 2, column = first_n / 2 + place - half * (block_n / 2);
    return column < n / 2 ? half * (n / 2) + column : -1;
  }
  // Place of row `row` of 16 of an instruction's: `instruction` 0 has gates, 1 ups.
  __device__ int place_of(int group, int instruction, int row) const {
    if constexpr (!kGateUp) return group * kStreamedRows + instruction * kMmaN + row;
    return interleaved ? 2 * (group * kMmaN + row) + instruction
                       : instruction * (block_n / 2) + group * kMmaN + row;
  }
};

// Copies number `i` of 8 of the scales of w that a stage has: [gates or ups, or the first rows and
// the others][block of 128 of K]; zeros beyond K.
template <bool kGateUp>
__device__ __forceinline__ void copy_block_scale(const GroupedProblem& p,
                                                 const StreamedRows<kGateUp>& rows, int expert,
                                                 int step, int i, uint32_t to) {
  const int blocks = kStreamedBoxBytes / rows.block_n / static_cast<int>(kScaleBlock);
  const int all_blocks = (p.k + static_cast<int>(kScaleBlock) - 1) / static_cast<int>(kScaleBlock);
  const int block = step * blocks + i % 4;
  const int row = rows.w_row(rows.place_of(0, i / 4, 0));
  const bool is_there = i % 4 < blocks && block < all_blocks && row >= 0;
  const ScaleView scale = p.w.scale_of(expert);
  const float* const from =
      scale.data +
      (is_there ? row / kScaleBlock * scale.row_stride + block * scale.block_stride : 0);
  copy_word(to + i * 4, from, is_there);
}

// A factor of a whole row, on its way past the registers: nobody waits for it here.
__device__ __forceinline__ void copy_factor(float& to, const ScaleView& scale, int row) {
  if (scale.kind == ScaleView::Kind::kTensor || scale.kind == ScaleView::Kind::kRow) {
    copy_word(shared_address(&to), row < 0 ? scale.data : scale.outer_address(row), row >= 0);
  } else {
    to = 1.0f;
  }
}

// Place of a unit, in the order of the config: `walked` tiles of rows before the next columns; 0:
// all.
__device__ __forceinline__ TileOrder::Place place_of_unit(int unit, int tiles_m, int tiles_n,
                                                          int walked) {
  const int height = walked == 0 || walked > tiles_m ? tiles_m : walked;
  return TileOrder{tiles_m, tiles_n, height}.place_of(unit);
}

// The id of slot `slot`, -1 for none.
__device__ __forceinline__ int expert_of_slot(const int32_t* ids, int slot, int slots,
                                              int experts) {
  const int id = slot < slots ? load_older(ids + slot) : -1;
  return id >= 0 && id < experts ? id : -1;
}

// The number of the `i`-th set bit of `mask`, from 0 on.
__device__ __forceinline__ int set_bit(unsigned mask, int i) {
  for (; i > 0; --i) mask &= mask - 1;
  return __ffs(mask) - 1;
}

// Up to 32 slots, one in each lane of a warp: tiles are found by ballots, and nobody waits for
// another warp. All lanes call all of it.
struct FewSlots {
  int expert;  // of the lane's slot, -1 for none
  int tile;    // that the slot is in, -1 for none
  int tiles;

  FewSlots() = default;
  __device__ FewSlots(int lane_expert, int block_m) : expert(lane_expert) {
    const int lane = threadIdx.x % 32;
    const unsigned before = (1u << lane) - 1;
    const unsigned same = __match_any_sync(~0u, expert);
    const int rank = __popc(same & before);
    const unsigned heads = __ballot_sync(~0u, expert >= 0 && rank % block_m == 0);
    const int head = set_bit(same, rank - rank % block_m);
    tile = expert >= 0 ? __popc(heads & ((1u << head) - 1)) : -1;
    tiles = __popc(heads);
  }
  // The slots of a tile.
  __device__ unsigned slots_of(int number) const { return __ballot_sync(~0u, tile == number); }
  __device__ int expert_of(unsigned slots) const {
    return __shfl_sync(~0u, expert, __ffs(slots) - 1);
  }
};

constexpr int kFewSlots = 32;
constexpr int kMostTileRows = 127;  // 7 bits of a tile's entry, below

struct StreamedTile {
  int32_t expert, rows;
  int32_t begin;   // among the slots by expert
  unsigned slots;  // where there are few: which
};

class StreamedUnits {
 public:
  // `memory`: 3 * kFewExperts words, then 16 bits for each slot, padded to whole warps. `scratch`:
  // as many for the slots, which order_slots() is done with. Few slots need neither.
  __device__ StreamedUnits(const StreamedSlots& s, uint8_t* memory, uint8_t* scratch)
      : s_(s),
        counts_(reinterpret_cast<int32_t*>(memory)),
        table_(reinterpret_cast<uint32_t*>(memory)),
        rows_(counts_ + 2 * kFewExperts),
        slots_(reinterpret_cast<int16_t*>(rows_ + kFewExperts)),
        experts_(reinterpret_cast<int16_t*>(scratch)) {}

  __device__ bool are_few() const { return s_.count <= kFewSlots; }

  // Few slots: each warp finds the tiles for itself.
  __device__ void find_tiles() {
    const int lane = threadIdx.x % 32;
    few_ = FewSlots(expert_of_slot(s_.ids, lane, s_.count, s_.experts), s_.block_m);
    tiles_ = few_.tiles;
  }

  // More of them: all threads of the block call it.
  __device__ void count_slots() {
    const int threads = static_cast<int>(blockDim.x);
    for (int e = threadIdx.x; e < kFewExperts; e += threads) counts_[e] = 0;
    __syncthreads();
    const int padded = (s_.count + 31) / 32 * 32;
    for (int slot = threadIdx.x; slot < padded; slot += threads) {
      const int expert = expert_of_slot(s_.ids, slot, s_.count, s_.experts);
      experts_[slot] = static_cast<int16_t>(expert);
      if (expert >= 0) atomicAdd(counts_ + expert, 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) make_table();
    __syncthreads();
    tiles_ = rows_[-1];
  }

  // All threads of the block: the barrier behind which tiles and barriers are known to all. More
  // slots than a few are counted meanwhile. `made_barriers`: the caller is of the warp that did,
  // the first to need them, which does not wait where there is nothing else to wait for.
  template <int kThreads>
  __device__ __forceinline__ void count_or_meet(bool made_barriers) {
    if (!are_few()) {
      count_slots();
    } else if (made_barriers) {
      __syncwarp();
      named_barrier_arrive<2, kThreads>();
    } else {
      named_barrier<2, kThreads>();
    }
  }

  __device__ int tiles() const { return tiles_; }

  // `number`: below tiles(). All lanes of a warp call it.
  __device__ StreamedTile tile(int number) const {
    if (are_few()) {
      const unsigned slots = few_.slots_of(number);
      return {few_.expert_of(slots), __popc(slots), 0, slots};
    }
    const uint32_t entry = table_[number];
    return {static_cast<int32_t>(entry & 511), static_cast<int32_t>(entry >> 9 & 127),
            static_cast<int32_t>(entry >> 16), 0};
  }

  // Slots by expert, each expert's in their order: one warp's work, for itself alone.
  __device__ void order_slots() const {
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < s_.count; first += 32) {
      const int expert = experts_[first + lane];
      const unsigned same = __match_any_sync(~0u, expert);
      const int before = __popc(same & ((1u << lane) - 1));
      const int row = expert >= 0 ? rows_[expert] + before : 0;
      if (expert >= 0) slots_[row] = static_cast<int16_t>(first + lane);
      __syncwarp();
      if (expert >= 0 && before == __popc(same) - 1) rows_[expert] = row + 1;
      __syncwarp();
    }
  }
  // Slot `i` of a tile's.
  __device__ int slot_of(const StreamedTile& tile, int i) const {
    return are_few() ? set_bit(tile.slots, i) : slots_[tile.begin + i];
  }

 private:
  static constexpr int kEach = kFewExperts / 32;  // experts of a lane
  // A tile's entry: 9 bits of its expert, 7 of its rows, then where they begin. The last word
  // before rows_ holds how many tiles there are.
  static_assert(kFewExperts <= 512 && kStreamedMaxM <= kMostTileRows, "what an entry holds");
  static_assert((kStreamedMaxSlots - kFewExperts) / 8 + kFewExperts < 2 * kFewExperts,
                "the tiles' entries take the place of the counts and as much again");

  // One warp: where each expert's slots begin, and the tiles.
  __device__ void make_table() const {
    const int lane = threadIdx.x, first = lane * kEach, block_m = s_.block_m;
    int counts[kEach];
    int tiles = 0, rows = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      counts[i] = counts_[first + i];
      tiles += (counts[i] + block_m - 1) / block_m;
      rows += counts[i];
    }
    int tile = tiles, row = rows;  // of the lanes before, and this one
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int tiles_before = __shfl_up_sync(~0u, tile, step);
      const int rows_before = __shfl_up_sync(~0u, row, step);
      if (lane >= step) tile += tiles_before, row += rows_before;
    }
    if (lane == 31) rows_[-1] = tile;
    tile -= tiles, row -= rows;
    __syncwarp();  // all counts have been read
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      rows_[first + i] = row;
      for (int begin = 0; begin < counts[i]; begin += block_m, ++tile) {
        table_[tile] = (first + i) | min(block_m, counts[i] - begin) << 9 | (row + begin) << 16;
      }
      row += counts[i];
    }
  }

  const StreamedSlots& s_;
  int32_t* counts_;   // slots of each expert
  uint32_t* table_;   // the tiles, once they are counted
  int32_t* rows_;     // where each expert's slots begin; once they are ordered, where they end
  int16_t* slots_;    // by expert
  int16_t* experts_;  // of each slot, -1 for none
  FewSlots few_ = {};
  int tiles_ = 0;
};

}  // namespace cuda::moe
}  // namespace rocm_kernels
