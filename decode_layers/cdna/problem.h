// What decode_layers' kernel and its launcher know: up to four products a layer, one after the
// other, and for each layer what is its own.
#pragma once

#include "../../blocks/grid/cdna/grid_barrier.h"
#include "../../blocks/rows/gpu/norm.h"
#include "../../common/cdna/operands.h"
#include "../../common/core/scale_view.h"
#include "../layer.h"

namespace rocm_kernels::cdna::decode {

constexpr int kHelpers = 4, kStreamers = 8;  // waves
constexpr int kLanes = 64;
constexpr int kThreads = (kHelpers + kStreamers) * kLanes;
constexpr int kHelperThreads = kHelpers * kLanes;
constexpr int kProducts = kLayerProducts;
constexpr int kMostLayers = 16;  // of a launch: its arguments have room for no more
constexpr int kLeastColumns = kStreamers * kBlockK;
constexpr int kMostWorkgroups = 512;
constexpr int kHalf = kMmaRows / 2;  // rows of a tile that lie together

// The row that a product multiplies: before its codes, and what its sums become.
enum class Row : int32_t { kQuantized, kNorm, kActivated };
enum class End : int32_t { kStored, kGated, kAdded };

// What a product is in every layer.
template <typename T>
struct Product {
  uint32_t row_bytes;
  uint32_t half_rows;  // from a tile's first 8 rows to its other 8
  uint32_t tile_rows;  // from tile to tile
  int32_t tiles, k_blocks;
  Row row;
  End end;
  const T* x;  // [K]: of kQuantized and kNorm
  T* out;      // of kStored and kAdded
};

// What a workgroup takes of keys: a KV head of 128, or two neighbours of 64.
constexpr int kUnitDim = 128;
constexpr int kHalfDim = kUnitDim / 2;
constexpr int kUnitHeads = kHelpers;  // query heads of each KV head that it takes at most
// Of a query head of each: values; of each half the greatest score and the sum of weights.
constexpr int kPartialFloats = kUnitDim + 4;
constexpr int kAttendParts = 16;  // of a workgroup, in LDS

using FloatPair = float __attribute__((ext_vector_type(2)));

// In LDS, where the codes are later.
struct alignas(16) AttendScratch {
  float values[kUnitHeads][kAttendParts][kUnitDim];
  FloatPair weights[kUnitHeads][2][kAttendParts];  // of a half: greatest score, sum of weights
};

// What launches keep from one to the next.
struct State {
  GridState grid;
  uint32_t arrived[kMostWorkgroups];  // workgroups of a query head
};
static_assert(sizeof(State) <= kDecodeLayersStateBytes);

// The attention that a layer begins with; see attend.h.
template <typename T>
struct Attention {
  const T* qkv;  // [heads + 2 kv_heads, head_dim]: of the first layer, or nullptr
  int32_t row_stride, unit_stride;         // elements
  int32_t half_gap;                        // between a unit's halves, where they lie apart
  int32_t k_scale_stride, v_scale_stride;  // from head to head: 0 or 1
  const T *cos, *sin;                      // [rotary_dim]
  int32_t rows;                            // that a cache has room for
  const int32_t* position;                 // [1]: rows that it has
  const int32_t *keys, *first_key;         // [1], or nullptr: see DecodeAttention
  int32_t window_left;
  int32_t head_dim;  // 128 or 64
  int32_t rotary_dim;
  int32_t interleaved;
  int32_t heads, kv_heads;
  int32_t units;             // of KV heads: each of 128, or two of 64
  float eps, weight_offset;  // of norms of heads
  int32_t parts;             // of its query heads, kUnitHeads each
  int32_t splits;            // workgroups that each of them may have
  float scale_log2;          // of scores, for powers of two
  float* partials;           // [heads, or half as many of 64][splits][kPartialFloats]
  uint32_t* arrived;         // likewise
  T* attended;               // [heads, head_dim]
};

template <typename T>
struct StackProblem {
  Attention<T> attention;
  RmsnormParams<T> norm;  // what all have in common, and how codes are made
  Product<T> products[kProducts];
  Layer<T> layers[kMostLayers];
  int32_t count;    // layers
  int32_t first;    // product of a layer; 0 in a stack of several
  int32_t of_last;  // products up to which the last layer goes
  int32_t intermediate;
  int32_t code_bytes;  // of LDS: the longest row
  const T* x;          // [H]: h = x + residual
  const T* residual;   // of the first layer; then out
  T* out;
  T* qkv;       // of the next layer
  float* y;     // [I]
  float* amax;  // [workgroups]: of their parts of y
  GridState* grid;
};
static_assert(sizeof(StackProblem<uint16_t>) <= 4096, "the arguments of a kernel");

// A product of a layer.
struct Turn {
  int layer, product;

  template <typename T>
  static ROCM_KERNELS_DEVICE Turn first_of(const StackProblem<T>& p) {
    return {0, p.first};
  }
  template <typename T>
  ROCM_KERNELS_DEVICE bool is_over(const StackProblem<T>& p) const {
    return layer == p.count;
  }
  template <typename T>
  ROCM_KERNELS_DEVICE void next(const StackProblem<T>& p) {
    if (++product < (layer + 1 < p.count ? kProducts : p.of_last)) return;
    product = 0, ++layer;
  }
  template <typename T>
  ROCM_KERNELS_DEVICE bool attends(const StackProblem<T>& p) const {
    return product == 0 && p.attention.qkv != nullptr;
  }
  ROCM_KERNELS_DEVICE bool operator==(Turn other) const {
    return layer == other.layer && product == other.product;
  }
};

// LDS: the row's codes; a place for each streamer; the sums of two tiles in turn.
constexpr int32_t kPlaceBytes = transpose_bytes(1, 1);
constexpr int32_t kSumBytes = 2 * kStreamers * kMmaRows * 4;
constexpr int32_t lds_bytes_of(int32_t code_bytes) {
  return code_bytes + kStreamers * kPlaceBytes + kSumBytes;
}

}  // namespace rocm_kernels::cdna::decode
