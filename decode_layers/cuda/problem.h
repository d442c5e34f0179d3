// What decode_layers' CUDA kernel and its launcher know: four products a layer, one after the
// other, and for each layer what is its own. A sequence has one token: "tokens" counts sequences.
#pragma once

#include <cstdint>

#include "../../common/core/compiler.h"
#include "../../common/gpu/device.h"
#include "../layer.h"

namespace rocm_kernels::cuda::decode {

constexpr int kGroups = 2;  // warpgroups: a power of two
constexpr int kGroupWarps = 4;
constexpr int kGroupThreads = kGroupWarps * 32;
constexpr int kWarps = kGroups * kGroupWarps;
constexpr int kThreads = kWarps * 32;
constexpr int kFetchers = 2;                             // warps that fetch for a warpgroup
constexpr int kBlockThreads = kThreads + kGroupThreads;  // and a warpgroup that fetches
static_assert(kGroups * kFetchers == kGroupWarps);
constexpr int kProducts = kLayerProducts;
constexpr int kMostLayers = 64;  // of a launch: its arguments have room for no more
constexpr int kLeastColumns = 512;
constexpr int kMostHidden = 8192;
constexpr int kMostTokens = 4;  // of a call

constexpr int kMostBlocks = 256;
constexpr int kMostRows = 512;   // of w that a block has of a product
constexpr int kMostAdded = 128;  // of o and down; of these for all tokens kMostRows
constexpr int kTileRows = 8;     // of w, which a warpgroup multiplies at once
constexpr int kStepBytes = 256;  // of each, by one instruction
constexpr int kSteps = 8;        // of a stage
constexpr int kPartBytes = kSteps * kStepBytes;
constexpr int kStageBytes = kTileRows * kPartBytes;
constexpr int kMostStages = 8;  // of a warpgroup

// What a block takes of keys at once: a KV head of 128, or two neighbours of 64.
constexpr int kUnitDim = 128;
constexpr int kHalfDim = kUnitDim / 2;
constexpr int kUnitHeads = 8;                 // query heads that a block takes at most
constexpr int kTileKeys = 16;                 // that a warp attends to at once
constexpr int kPartialFloats = kUnitDim + 4;  // of a head: values, greatest score, sum of weights

// Of which there are kernels.
ROCM_KERNELS_HOST_DEVICE constexpr int template_tokens(int tokens) {
  return tokens <= 2 ? tokens : kMostTokens;
}

// What a product's sums become: see decode_layers.cu.
enum class End : int32_t { kAdded, kGated, kBiased };

// Of a piece of a token's row: the greatest, for a norm times the norm's weight; and the sum of
// squares. On 8 bytes.
struct Left {
  float greatest, squares;
};

// What a product is in every layer. A unit of its rows stays together: a row, or one of the gate
// with the one of up that meets it.
template <typename T>
struct Product {
  int32_t k;
  int32_t units;
  int32_t unit_shift;  // of its rows: 0 or 1
  int32_t second;      // from a unit's first row to its second
  int32_t parts;       // of a row, a stage each; the last may have less
  int32_t normalizes;  // the row is a norm of x, else x as it is
  int32_t is_bfloat;   // x is bfloat16, else T
  End end;
  const void* x;     // [tokens, K]
  const Left* left;  // [tokens, left_count]: of pieces of x
  int32_t left_count;
  const T* addends;  // [tokens, N], or nullptr: of kAdded
  void* out;         // [tokens, N]: T; of kGated bfloat16, half as many

  // Of a row's codes in shared memory: with zeros up to a whole part.
  ROCM_KERNELS_HOST_DEVICE int row_bytes() const { return parts * kPartBytes; }
  ROCM_KERNELS_HOST_DEVICE int tile_units() const { return kTileRows >> unit_shift; }
  // Row i of those from `unit` on.
  ROCM_KERNELS_HOST_DEVICE int row(int unit, int i) const {
    return unit + (i >> unit_shift) + (unit_shift ? i & 1 : 0) * second;
  }
  ROCM_KERNELS_HOST_DEVICE int bytes_of(int part) const {
    const int left = k - part * kPartBytes;
    return left < kPartBytes ? left : kPartBytes;
  }
};

// The attention that each layer begins with; see attend.cuh.
template <typename T>
struct Attention {
  int64_t row_stride, unit_stride, batch_stride;  // elements
  int64_t half_gap;                               // between a unit's halves, where they lie apart
  int32_t k_scale_stride, v_scale_stride;         // from head to head: 0 or 1
  const T *cos, *sin;                     // [tokens, rotary_dim]; or [rotary_dim], by the stride
  int32_t rows;                           // that a cache has room for
  const int32_t* position;                // [tokens] or [1]: rows that it has
  const int32_t *keys, *first_key;        // likewise, or nullptr: see DecodeAttention
  int32_t angle_stride, position_stride;  // from token to token; 0: one for all
  int32_t keys_stride, first_key_stride;
  int32_t window_left;
  int32_t head_dim;  // 128 or 64
  int32_t rotary_dim;
  int32_t interleaved;
  int32_t heads, kv_heads;
  int32_t units;      // of KV heads: each of 128, or two of 64
  int32_t parts;      // of a unit's query heads, kUnitHeads each
  int32_t splits;     // blocks that each of them may have
  float scale_log2;   // of scores, for powers of two
  float* partials;    // [tokens][heads][splits][kPartialFloats]
  uint32_t* arrived;  // [tokens * units * parts]: blocks that have published theirs
  T* attended;        // [tokens, heads, head_dim]
  Left* left;         // [tokens, heads * head_dim / 64]: of heads of 64, or of halves
};

template <typename T>
struct StackProblem {
  Attention<T> attention;
  Product<T> products[kProducts];
  int32_t tokens;
  int32_t count;       // layers
  int32_t of_last;     // products of the last layer: 3, or 4 with a qkv behind it
  int32_t num_stages;  // of a warpgroup
  int32_t clears;      // whether some row of w ends within a part
  int32_t row_bytes;   // of shared memory for the rows' codes, or the attention's scratch
  float eps, weight_offset;
  T* qkv;                // [tokens, Q]: of the layer, then of the next one
  Left *of_y, *of_sums;  // [tokens, blocks]: of gate and up; of o and down
  uint32_t* meetings;
  Layer<T> layers[kMostLayers];

  ROCM_KERNELS_HOST_DEVICE int products_of(int layer) const {
    return layer + 1 < count ? kProducts : of_last;
  }
};
static_assert(sizeof(StackProblem<uint16_t>) <= 32764, "the arguments of a kernel");

}  // namespace rocm_kernels::cuda::decode
