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
  // `memory`: 2 * kMaxExperts words, then 16 bits for each slot, padded to whole warps.
  __device__ StreamedUnits(const StreamedProblem& s, uint8_t* memory)
      : s_(s),
        counts_(reinterpret_cast<int32_t*>(memory)),
        tile_ends_(counts_ + kMaxExperts),
        experts_(reinterpret_cast<int16_t*>(tile_ends_ + kMaxExperts)) {}

  // All threads of the block call it.
  __device__ void sort() const {
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
      int ends[kEach], sum = 0;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        sum += (counts_[first + i] + block_m - 1) / block_m;
        ends[i] = sum;
      }
      int all = sum;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int before = __shfl_up_sync(~0u, all, step);
        if (static_cast<int>(threadIdx.x) >= step) all += before;
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i) tile_ends_[first + i] = all - sum + ends[i];
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

  // The tile's slots, by all lanes of a warp.
  __device__ void find_slots(const StreamedTile& tile, int32_t* slots) const {
    const int lane = threadIdx.x % 32;
    for (int first = 0, before = 0; before < tile.begin + tile.rows; first += 32) {
      const bool mine = experts_[first + lane] == tile.expert;
      const unsigned found = __ballot_sync(~0u, mine);
      const int row = before + __popc(found & ((1u << lane) - 1)) - tile.begin;
      if (mine && row >= 0 && row < tile.rows) slots[row] = first + lane;
      before += __popc(found);
    }
    __syncwarp();
  }

 private:
  const StreamedProblem& s_;
  int32_t* counts_;     // slots of each expert
  int32_t* tile_ends_;  // tiles of all experts up to and with each
  int16_t* experts_;    // of each slot, -1 for none
};

}  // namespace cuda
}  // namespace rocm_kernels
