// Which unit of a streamed product is whose rows: each block sorts the ids of all slots for itself,
// in shared memory, so that no kernel needs to run before it.
//
//   unit = a tile (at most block_m slots of one expert, in the order of slots) x block_n rows of w
#pragma once

#include "../../common/gpu/device.h"
#include "../gpu/order.h"
#include "../gpu/problem.h"
#include "streamed.h"

namespace rocm_kernels {
namespace cuda {

struct StreamedProblem {
  GroupedProblem product;  // its rows are slots; tiles, tile_count and row_slots are not used
  const int32_t* ids;      // [slots]
  int32_t slots, experts;
  StreamedStage stage;
  int32_t num_stages;
  GroupedOrder order;
  bool first;  // of the layer's kernels: the ids may be the previous kernel's
};

struct StreamedTile {
  int32_t expert, begin, rows;  // slots `begin` and on of the expert's
};

class StreamedUnits {
 public:
  // `memory`: 3 * kMaxExperts words, then 16 bits for each slot, padded to whole warps. `scratch`:
  // as many for the slots, which order_slots() is done with.
  __device__ StreamedUnits(const StreamedProblem& s, uint8_t* memory, uint8_t* scratch)
      : s_(s),
        counts_(reinterpret_cast<int32_t*>(memory)),
        tile_ends_(counts_ + kMaxExperts),
        rows_(tile_ends_ + kMaxExperts),
        slots_(reinterpret_cast<int16_t*>(rows_ + kMaxExperts)),
        experts_(reinterpret_cast<int16_t*>(scratch)) {}

  // Counts; all threads of the block call it.
  __device__ void count_slots() const {
    for (int e = threadIdx.x; e < kMaxExperts; e += kStreamedThreads) counts_[e] = 0;
    __syncthreads();
    const int padded = (s_.slots + 31) / 32 * 32;
    for (int slot = threadIdx.x; slot < padded; slot += kStreamedThreads) {
      // From L2: another block's early start may have left an older line in L1.
      const int id = slot < s_.slots ? __ldcg(s_.ids + slot) : -1;
      const bool is_expert = id >= 0 && id < s_.experts;
      experts_[slot] = static_cast<int16_t>(is_expert ? id : -1);
      if (is_expert) atomicAdd(counts_ + id, 1);
    }
    __syncthreads();
    if (threadIdx.x < 32) {
      constexpr int kEach = kMaxExperts / 32;
      const int first = threadIdx.x * kEach, block_m = s_.stage.block_m;
      int tiles = 0, rows = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        tiles += (counts_[first + i] + block_m - 1) / block_m;
        rows += counts_[first + i];
      }
      int tile = tiles, row = rows;  // of the lanes before, and this one
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int tiles_before = __shfl_up_sync(~0u, tile, step);
        const int rows_before = __shfl_up_sync(~0u, row, step);
        if (static_cast<int>(threadIdx.x) >= step) tile += tiles_before, row += rows_before;
      }
      tile -= tiles, row -= rows;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int count = counts_[first + i];
        tile += (count + block_m - 1) / block_m;
        tile_ends_[first + i] = tile;
        rows_[first + i] = row;
        row += count;
      }
    }
    __syncthreads();
  }

  __device__ int tiles() const { return tile_ends_[kMaxExperts - 1]; }

  // `number`: below tiles().
  __device__ StreamedTile tile(int number) const {
    int expert = 0;  // the first whose tiles end beyond this one
#pragma unroll
    for (int step = kMaxExperts / 2; step > 0; step /= 2) {
      if (tile_ends_[expert + step - 1] <= number) expert += step;
    }
    const int first = expert == 0 ? 0 : tile_ends_[expert - 1];
    const int begin = (number - first) * s_.stage.block_m;
    return {expert, begin, min(s_.stage.block_m, counts_[expert] - begin)};
  }

  // Slots by expert, each expert's in their order: one warp's work, for itself alone.
  __device__ void order_slots() const {
    const int lane = threadIdx.x % 32;
    for (int first = 0; first < s_.slots; first += 32) {
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
    return slots_[rows_[tile.expert] - counts_[tile.expert] + tile.begin + i];
  }

 private:
  const StreamedProblem& s_;
  int32_t* counts_;     // slots of each expert
  int32_t* tile_ends_;  // tiles of all experts up to and with each
  int32_t* rows_;       // where each expert's slots begin; once they are ordered, where they end
  int16_t* slots_;      // by expert
  int16_t* experts_;    // of each slot, -1 for none
};

}  // namespace cuda
}  // namespace rocm_kernels
