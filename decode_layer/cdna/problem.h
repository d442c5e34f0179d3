// What decode_layer's kernel and its launcher know of a layer: up to four products, one after the
// other.
#pragma once

#include "../../blocks/grid/cdna/grid_barrier.h"
#include "../../blocks/rows/gpu/norm.h"
#include "../../common/cdna/operands.h"
#include "../../common/core/scale_view.h"
#include "../decode_layer.h"

namespace rocm_kernels::cdna::decode {

constexpr int kHelpers = 4, kStreamers = 8;  // waves
constexpr int kLanes = 64;
constexpr int kThreads = (kHelpers + kStreamers) * kLanes;
constexpr int kHelperThreads = kHelpers * kLanes;
constexpr int kMostProducts = 4;
constexpr int kMostWorkgroups = 512;
constexpr int kHalf = kMmaRows / 2;  // rows of a tile that lie together
static_assert(sizeof(GridState) <= kDecodeLayerStateBytes);

// The row that a product multiplies: before its codes, and what its sums become.
enum class Row : int32_t { kQuantized, kNorm, kActivated };
enum class End : int32_t { kStored, kGated, kAdded };

template <typename T>
struct Product {
  const uint8_t* w;
  ScaleView scale;
  uint32_t row_bytes;
  uint32_t half_rows;  // from a tile's first 8 rows to its other 8
  uint32_t tile_rows;  // from tile to tile
  int32_t tiles, k_blocks;
  Row row;
  End end;
  const T* x;       // [K]: of kQuantized and kNorm
  const T* addend;  // [K] or nullptr: kNorm is of x + addend
  const T* weight;  // [K]: of kNorm
  T* out;           // of kStored and kAdded
};

constexpr int kHeadDim = 128;
constexpr int kUnitHeads = 4;                 // query heads of a KV head that a unit takes
constexpr int kPartialFloats = kHeadDim + 4;  // of a unit: values, greatest score, sum of weights

// The attention before the first product; see attend.h.
template <typename T>
struct Attention {
  const T* qkv;  // [heads + 2 kv_heads, 128]; nullptr: there is none
  T *k_cache, *v_cache;
  int64_t row_stride, head_stride;  // elements
  const T *cos, *sin;               // [128]
  const int32_t* position;          // [1]: rows that the cache has
  int32_t heads, kv_heads;
  int32_t parts;     // of a KV head's query heads, kUnitHeads each
  int32_t splits;    // workgroups that each of them may have
  float scale_log2;  // of scores, for powers of two
  float* partials;   // [heads][units][kPartialFloats]
  T* attended;       // [heads, 128]
};

template <typename T>
struct LayerProblem {
  Attention<T> attention;
  RmsnormParams<T> norm;  // what both have in common, and how codes are made
  Product<T> products[kMostProducts];
  int32_t count;
  int32_t intermediate;
  int32_t code_bytes;  // of LDS: the longest row
  const T* x;          // [H]: h = x + residual
  const T* residual;
  float* y;     // [I]
  float* amax;  // [workgroups]: of their parts of y
  GridState* grid;
};

// LDS: the row's codes; a place for each streamer; the sums of two tiles in turn.
constexpr int32_t kPlaceBytes = transpose_bytes(1, 1);
constexpr int32_t kSumBytes = 2 * kStreamers * kMmaRows * 4;
constexpr int32_t lds_bytes_of(int32_t code_bytes) {
  return code_bytes + kStreamers * kPlaceBytes + kSumBytes;
}

}  // namespace rocm_kernels::cdna::decode
