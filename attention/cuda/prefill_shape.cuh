// What the roles of prefill.cuh share: sizes, how the work is divided, places in shared memory.
#pragma once

#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/gpu/device.h"
#include "../gpu/problem.h"
#include "matrix.cuh"
#include "pages.cuh"
#include "row_groups.cuh"
#include "taken_items.cuh"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

// T: of q and out. kFp8KV: of k and v, which are T otherwise. kTile: of kPrefillTiles. kConsumers:
// warpgroups, of 64 rows each. kInBoxes: TMA brings k and v, blocks take items one by
// one, which the producer's last warp hands out, and tiles' maxima are not looked for. Else threads
// copy, and an item has a block: such producers were up to a quarter slower where the compiler saw
// a loop over items around them, and wait for stages that are free later.
template <typename T, bool kFp8KV, int kTile, int kConsumers, bool kInBoxes>
struct PrefillShape {
  static_assert(!(kFp8KV && kInBoxes) && (kConsumers < 3 || kInBoxes), "");
  static constexpr bool kBoxed = kInBoxes;
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
  static constexpr int kQPlaces = kOf.q_places(kRows, kBoxed);
  static constexpr int kStages = kOf.stages(kRows, kBoxed), kSlots = kOf.slots(kRows);
  // The producer's warps: those that bring keys, one that stores, one that hands out items.
  static constexpr int kKeyWarps = 2, kStoreWarp = 2, kItemWarp = 3;
  static constexpr int kWarps = 4 * kConsumers;  // of consumers
  // Two consumers take turns at the tensor cores. Of three, some see nothing of the last tiles of
  // causal rows.
  static constexpr bool kTurns = kConsumers == 2 && kBoxed, kOwnKeys = kConsumers == 3;
  static constexpr bool kFewForProducers = kConsumers == 2 && !kFp8 && !kBoxed;
  // Of 168 a thread of three warpgroups, 128 of four; two have more than they need.
  static constexpr int kProducerRegisters = kConsumers == 3 ? 32 : kFewForProducers ? 40 : 72;
  static constexpr int kConsumerRegisters = kConsumers == 3                       ? 160
                                            : kConsumers == 1 || kFewForProducers ? 232
                                                                                  : 216;
  static constexpr int kQBytes = kOf.q_bytes(kRows);
  static constexpr int kKBytes = kOf.k_bytes(), kVBytes = kOf.v_bytes();  // of a stage
};

// An item is a sequence, a KV head, rows of a block and a part of the keys.

// How the work is divided.
struct PrefillGrid {
  Window window;
  RowGroups rows;
  PageSize page_size;
  int row_blocks;      // of item_rows, of the longest sequence
  int pairs;           // of a sequence and a KV head
  int pairs_together;  // whose items are begun one after the other, those of the most keys first
  int outer;           // parts of the keys, whose sums meet in memory (join.cuh)
  float* partial;  // [row of q, head][outer][DV + 2], where outer > 1: sums, maximum (log2), sum
  TakenItems taken;
  int item_rows;      // up to those of a block
  bool q_in_boxes;    // TMA brings queries too,
  bool out_in_boxes;  // and stores outputs
};

// Places in shared memory, and the barriers.
template <class Shape>
struct PrefillMemory {
  uint32_t start, k, v, barriers;
  // The ring's behind the others, then `work`.
  static constexpr int kRingAt = 80, kWorkAt = kRingAt + 4 * 8 * 4, kWorkBytes = 64;
  static_assert(Shape::kStages <= 4 && kWorkAt + kWorkBytes <= kPrefillBarrierBytes, "");

  __device__ explicit PrefillMemory(uint32_t at)
      : start(at),
        k(at + Shape::kQPlaces * Shape::kQBytes),
        v(k + Shape::kStages * Shape::kKBytes),
        barriers(v + Shape::kStages * Shape::kVBytes) {}

  __device__ __forceinline__ uint32_t q(int place) const { return start + place * Shape::kQBytes; }
  __device__ __forceinline__ uint32_t q_full(int place) const { return barriers + place * 8; }
  __device__ __forceinline__ uint32_t q_empty(int place) const {
    return q_full(Shape::kQPlaces + place);
  }
  // Consumers are done with the place, and may have left outputs there.
  __device__ __forceinline__ uint32_t out_full(int place) const {
    return barriers + 32 + place * 8;
  }
  // Of `work`, where the block learns what it does next; `wanted`: the next may be taken.
  __device__ __forceinline__ uint32_t work_full() const { return barriers + 48; }
  __device__ __forceinline__ uint32_t work_empty() const { return barriers + 56; }
  __device__ __forceinline__ uint32_t wanted() const { return barriers + 64; }
  __device__ __forceinline__ uint32_t work() const { return barriers + kWorkAt; }
  __device__ __forceinline__ uint32_t full(int of_v, int stage) const {
    return barriers + kRingAt + (of_v * Shape::kStages + stage) * 8;
  }
  __device__ __forceinline__ uint32_t empty(int of_v, int stage) const {
    return full(2 + of_v, stage);
  }
  __device__ __forceinline__ uint32_t factors() const { return barriers + kPrefillBarrierBytes; }
  __device__ __forceinline__ uint32_t slots() const { return factors() + kPrefillFactorBytes; }
};

// Where an item is.
struct PrefillPlace {
  int b, head;    // KV head
  int first_row;  // of the sequence's rows for the KV head
  int part;       // of the keys
};

// What is to be done there: nothing where last_row < first_row.
struct PrefillWork {
  Sequence s;
  int b, head;              // KV head
  int first_row, last_row;  // of the sequence's rows for the KV head
  int part;                 // of the keys
  KeyRange keys;            // of the part, that some row sees
  KeyRange all;             // that every row sees

  __device__ __forceinline__ bool any() const { return first_row <= last_row; }
};

// Whether TMA may store an item's rows: where others follow, it would overwrite them.
__device__ __forceinline__ bool stored_in_boxes(const AttentionArgs& args, const PrefillGrid& grid,
                                                const PrefillWork& work) {
  return grid.out_in_boxes &&
         (args.cu_seqlens_q == nullptr || work.last_row - work.first_row + 1 == grid.item_rows);
}

// Items of the most keys first, among those of pairs whose keys L2 holds together.
template <class Shape>
__device__ __forceinline__ PrefillPlace place_of(const AttentionArgs& args, const PrefillGrid& grid,
                                                 int number) {
  const int item = number / grid.outer;
  const int together = grid.pairs_together * grid.row_blocks;
  const int first_pair = item / together * grid.pairs_together;
  const int here = min(grid.pairs_together, grid.pairs - first_pair);
  const int of_group = item % together;
  const int pair = first_pair + of_group % here;
  const int kv_heads = static_cast<int>(args.kv_heads);
  return {pair / kv_heads, pair % kv_heads,
          (grid.row_blocks - 1 - of_group / here) * grid.item_rows, number % grid.outer};
}

// What all lanes of a warp have. The compiler does not know of what is loaded, nor of what a loop
// leaves that ends by it, and would take all code behind for one that lanes may run apart.
__device__ __forceinline__ int of_warp(int value) { return __shfl_sync(~0u, value, 0); }
__device__ __forceinline__ PipelineState of_warp(const PipelineState& state) {
  return {of_warp(state.stage), of_warp(state.parity)};
}

template <class Shape>
__device__ __forceinline__ PrefillWork work_at(const AttentionArgs& args, const PrefillGrid& grid,
                                               const PrefillPlace& place) {
  PrefillWork work;
  work.b = place.b, work.head = place.head, work.first_row = place.first_row;
  work.part = place.part;
  Sequence& s = work.s = sequence_of(args, work.b);
  s.q_begin = of_warp(s.q_begin), s.q_count = of_warp(s.q_count);
  s.k_begin = of_warp(static_cast<int>(s.k_begin));
  s.k_first = of_warp(s.k_first), s.k_count = of_warp(s.k_count);
  work.last_row = min(work.first_row + grid.item_rows, work.s.q_count * grid.rows.heads) - 1;
  const int first_query = grid.rows.query_of(work.first_row);
  const int last_query = grid.rows.query_of(max(work.last_row, 0));
  const KeyRange keys = grid.window.seen(work.s, first_query, last_query);
  const int first_tile = keys.begin / Shape::kKeys;
  const int tiles = (keys.end + Shape::kKeys - 1) / Shape::kKeys - first_tile;
  const int of_part = (tiles + grid.outer - 1) / grid.outer;
  work.keys.begin = max((first_tile + work.part * of_part) * Shape::kKeys, keys.begin);
  work.keys.end = min((first_tile + (work.part + 1) * of_part) * Shape::kKeys, keys.end);
  work.all = grid.window.seen_by_all(work.s, first_query, last_query);
  return work;
}

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// A thread of the item warp: what the block does next, or that there is nothing.
template <class Shape>
__device__ __forceinline__ void hand_out(const PrefillMemory<Shape>& memory,
                                         const PrefillWork& work) {
  const uint32_t to = memory.work();
  store_shared(to, make_uint4(work.b, work.head, work.first_row, work.last_row));
  store_shared(to + 16, make_uint4(work.s.q_begin, work.s.q_count,
                                   static_cast<uint32_t>(work.s.k_begin), work.s.k_first));
  store_shared(to + 32, make_uint4(work.s.k_count, work.keys.begin, work.keys.end, work.part));
  store_shared(to + 48, make_uint4(work.all.begin, work.all.end, 0, 0));
  mbarrier_arrive(memory.work_full());
}

// A consumer's threads: zeros for rows behind a sequence's last in `q`, a place of queries, where a
// box brings whatever follows the sequence: what a warp decides for all of its rows must not depend
// on others'. Its rows are 64, from first_row on. Returns whether there were any.
template <class Shape, int kThreads>
__device__ __forceinline__ bool clear_rows_of_others(const PrefillGrid& grid,
                                                     const PrefillWork& work, uint32_t q,
                                                     int first_row, int thread) {
  const int rows = work.last_row - work.first_row + 1;
  if (!grid.q_in_boxes || rows == grid.item_rows) return false;
#pragma unroll 1
  for (int at = max(rows, first_row) * 8 + thread; at < (first_row + 64) * 8; at += kThreads) {
#pragma unroll
    for (int box = 0; box < Shape::kBoxes; ++box) {
      store_shared(q + box * Shape::kRows * kChunkBytes + at * 16, uint4{});
    }
  }
  return true;
}

// All warps but that one: whether there is more to do, and what.
template <class Shape>
__device__ __forceinline__ bool next_work(const AttentionArgs& args, const PrefillGrid& grid,
                                          const PrefillMemory<Shape>& memory, uint32_t& parity,
                                          PrefillWork& work) {
  if (!grid.taken.any()) return false;
  mbarrier_wait(memory.work_full(), parity);
  parity ^= 1;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int mine = load_shared_int(memory.work() + lane % 16 * 4);
  __syncwarp();
  if (lane == 0) mbarrier_arrive(memory.work_empty());
  const auto word = [&](int i) { return __shfl_sync(~0u, mine, i); };
  work.b = word(0), work.head = word(1), work.first_row = word(2), work.last_row = word(3);
  work.s.q_begin = word(4), work.s.q_count = word(5);
  work.s.k_begin = word(6), work.s.k_first = word(7), work.s.k_count = word(8);
  work.keys = {word(9), word(10)};
  work.part = word(11);
  work.all = {word(12), word(13)};
  // In rows, as keys in boxes are.
  work.s.k_batch = work.b * args.k.batch_stride, work.s.v_batch = work.b * args.v.batch_stride;
  return work.any();
}

// Does `with` the block's first item, which each warp finds by itself, and those that follow.
template <class Shape, typename Do>
__device__ __forceinline__ void for_each_item(const AttentionArgs& args, const PrefillGrid& grid,
                                              const PrefillMemory<Shape>& memory,
                                              const PrefillWork& first, const Do& with) {
  uint32_t parity = 0;
  PrefillWork work = first;
#pragma unroll 1
  for (bool more = work.any() || next_work(args, grid, memory, parity, work); more;
       more = next_work(args, grid, memory, parity, work)) {
    with(work);
  }
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
