// What the roles of prefill.cuh share: sizes, how the work is divided, places in shared memory.
#pragma once

#include "../../common/gpu/device.h"
#include "../gpu/problem.h"
#include "matrix.cuh"
#include "pages.cuh"
#include "row_groups.cuh"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

// T: of q and out. kFp8KV: of k and v, which are T otherwise. kTile: of kPrefillTiles. kConsumers:
// warpgroups, of 64 rows each.
template <typename T, bool kFp8KV, int kTile, int kConsumers>
struct PrefillShape {
  using Q = T;
  using Mma = std::conditional_t<kFp8KV, __half, T>;  // that are multiplied
  static constexpr bool kFp8 = kFp8KV;
  static constexpr bool kScaledQ = !std::is_same<Q, Mma>::value;  // rows of q, to fit float16
  static constexpr DType kType =
      std::is_same<Mma, __half>::value ? DType::kFloat16 : DType::kBFloat16;
  static constexpr PrefillTile kOf = kPrefillTiles[kTile].of(kFp8);
  static constexpr int kD = kOf.head_dim, kDV = kOf.head_dim_v, kKeys = kOf.keys;
  static constexpr int kBoxes = kOf.boxes(kD), kBoxesV = kOf.boxes(kDV);  // of 64 columns
  static constexpr int kRows = 64 * kConsumers, kThreads = 128 * (1 + kConsumers);
  static constexpr int kStages = kOf.stages(kRows), kSlots = kOf.slots(kRows);
  static constexpr int kWarps = 4 * kConsumers;  // of consumers
  // Of 168 a thread of three warpgroups; two have more than they need.
  static constexpr int kProducerRegisters = kConsumers == 1 ? 72 : kFp8 ? 72 : 40;
  static constexpr int kConsumerRegisters = kConsumers == 1 ? 232 : kFp8 ? 216 : 232;
  static constexpr int kQBytes = kOf.q_bytes(kRows);
  static constexpr int kKBytes = kOf.k_bytes(), kVBytes = kOf.v_bytes();  // of a stage
};

// How the work is divided.
struct PrefillGrid {
  Window window;
  RowGroups rows;
  PageSize page_size;
  int row_blocks;      // of the longest sequence
  int pairs;           // of a sequence and a KV head
  int pairs_together;  // whose blocks run one after the other, those of the most keys first
  int outer;           // parts of the keys, whose sums meet in memory (join.cuh)
  float* partial;  // [row of q, head][outer][DV + 2], where outer > 1: sums, maximum (log2), sum
};

// Places in shared memory, and the barriers.
template <class Shape>
struct PrefillMemory {
  uint32_t q, k, v, barriers;

  __device__ explicit PrefillMemory(uint32_t start)
      : q(start),
        k(start + Shape::kQBytes),
        v(k + Shape::kStages * Shape::kKBytes),
        barriers(v + Shape::kStages * Shape::kVBytes) {}

  __device__ __forceinline__ uint32_t q_full() const { return barriers; }
  __device__ __forceinline__ uint32_t factors() const { return barriers + kPrefillBarrierBytes; }
  __device__ __forceinline__ uint32_t slots() const { return factors() + kPrefillFactorBytes; }
  __device__ __forceinline__ uint32_t full(int of_v, int stage) const {
    return barriers + 8 + (of_v * Shape::kStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t empty(int of_v, int stage) const {
    return full(2 + of_v, stage);
  }
};

// What is this block's.
struct PrefillWork {
  Sequence s;
  int b, head;              // KV head
  int first_row, last_row;  // of the sequence's rows for the KV head
  int part;                 // of the keys
  KeyRange keys;            // of the part, that some row sees
  KeyRange all;             // that every row sees
};

}  // namespace cuda
}  // namespace rocm_kernels
