// Which keys the attention of a step sees, which heads and keys are a block's, and what its warps
// share of memory.
#pragma once

#include "../../common/gpu/math.h"
#include "problem.h"

namespace rocm_kernels::cuda::decode {

// In shared memory, where a row's codes are later. `values`: of each warp, its heads.
struct AttendScratch {
  static constexpr int kQueryBytes = 320;  // of a row: 256, and 64 lest rows share banks

  alignas(16) uint8_t queries[kUnitHeads][kQueryBytes];
  alignas(16) uint8_t new_key[2 * kUnitDim], new_value[2 * kUnitDim];
  float query_factors[kUnitHeads];
  float2 weights[kWarps][kUnitHeads];  // the greatest score, the sum of weights
  float values[1][kUnitDim];

  static constexpr int64_t bytes_for(int heads) {
    return int64_t{sizeof(AttendScratch)} + (kWarps * heads - 1) * kUnitDim * 4;
  }
};

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// The keys that a token sees, and where the new one goes: all layers have the same.
struct Seen {
  template <typename T>
  static __device__ __forceinline__ Seen of(const Attention<T>& a, int token) {
    Seen seen{a.position[token * a.position_stride], 0, 0, false};
    seen.end = min(seen.position + 1, a.rows);
    if (a.keys != nullptr) seen.end = min(seen.end, a.keys[token * a.keys_stride]);
    if (a.first_key != nullptr) seen.begin = a.first_key[token * a.first_key_stride];
    if (a.window_left >= 0) seen.begin = max(seen.begin, seen.end - 1 - a.window_left);
    seen.has_room = static_cast<uint32_t>(seen.position) < static_cast<uint32_t>(a.rows);
    return seen;
  }

  int position, begin, end;
  bool has_room;  // for the new key
};

__device__ __forceinline__ float factor_to(float most, float greatest) {
  return fast_exp2(greatest - (most == -INFINITY ? 0.0f : most));
}

// What of the attention is this block's: query heads of one token and of one unit of KV heads.
struct Heads {
  template <typename T>
  __device__ __forceinline__ Heads(const Attention<T>& a, int tokens) {
    const int of_token = a.units * a.parts, kinds = tokens * of_token;
    kind = static_cast<int>(blockIdx.x) % kinds;
    token = kind / of_token;
    const int all = a.heads / a.units;
    of_kv_head = a.heads / a.kv_heads;
    unit = kind % of_token / a.parts, part = kind % a.parts;
    count = min(all - part * kUnitHeads, kUnitHeads);
    first = unit * all + part * kUnitHeads;
    kv_head = a.head_dim == kUnitDim ? unit : 2 * unit;
    index = static_cast<int>(blockIdx.x) / kinds;
    seen = Seen::of(a, token);
    tiles = (seen.end - seen.begin + kTileKeys - 1) / kTileKeys;
    blocks = min((tiles + kWarps - 1) / kWarps, a.splits);
  }
  __device__ __forceinline__ bool has_keys() const { return index < blocks; }
  // Which of the unit's KV heads is a query head's, of those of the block.
  __device__ __forceinline__ int half_of(int head) const {
    return part * kUnitHeads + head >= of_kv_head;
  }

  Seen seen;
  int kind, token, unit, part;
  int first, count;   // query heads
  int kv_head;        // the unit's first
  int of_kv_head;     // query heads of each
  int index, blocks;  // among those that share their keys
  int tiles;          // of keys, of all of these
};

#endif

}  // namespace rocm_kernels::cuda::decode
