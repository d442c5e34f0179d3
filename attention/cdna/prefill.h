// Attention of many queries: prompts, bound by the matrix instructions.
//
//   S^T [32 keys, rows] = K Q^T         rows: queries times the heads that share a KV head
//   O^T [Dv, rows]     += V^T P^T       P^T = exp2(S^T - max), registers of S^T (fragments.h)
//
// A workgroup of four waves has one sequence, one KV head and kRows rows, kRowTiles of 16 a wave.
// A step is 32 keys; LDS holds two, as operands. Timeline of a wave; all four do the same:
//
//   load_rows                         its own rows of q stay in registers
//   each step    load                 its quarter of the next step's K, V    memory to registers
//                multiply_keys        S^T                                    operands from LDS
//                to_operand           P^T (fragments.h)                      registers
//                multiply_values      O^T                                    operands from LDS
//                store                the quarter, V^T by v_perm_b32         registers to LDS
//                a barrier of all: the next step is there, and this one has been read
//   store_rows                        its own rows of out; nothing meets
//
// Two workgroups a compute unit, so that one multiplies while the other takes exponentials or
// waits. Why operands in LDS and not rows: every wave reads each with ds_read_b128 of consecutive
// lanes, without conflicts, and V is transposed once for all.
//
// Order of workgroups: number n runs on XCD n mod 8. All blocks of rows of a KV head have one XCD,
// whose L2 then holds their keys and values; among them those with the most keys begin, lest the
// last to begin is the longest.
#pragma once

#include "../../common/cdna/sync.h"
#include "fragments.h"

namespace rocm_kernels::cdna {

struct PrefillGrid {
  Window window;
  int heads_per_kv, kv_heads;
  int row_blocks;  // of the longest sequence
  int groups;      // KV heads of all sequences
  int xcds;
  int heavy_first;
  uint32_t page_magic;
};

template <typename Type, bool kIsFp8, int kTileNumber>
struct PrefillShape {
  static constexpr PrefillTile kTile = kPrefillTiles[kTileNumber];
  using Q = Type;
  static constexpr bool kBFloat = std::is_same_v<Q, bfloat16>, kFp8 = kIsFp8;
  static constexpr bool kWideLoads = false;
  static constexpr int kD = kTile.head_dim, kDv = kTile.head_dim_v;
  static constexpr int kFragments = kD / 32;
  static constexpr int kColumns = 4, kPieces = kDv / 64, kVWords = kFp8 ? 1 : 2;
  static constexpr int kRowTiles = kTile.row_tiles;
  static constexpr bool kChainInLds = kTile.chain_in_lds;
};

#if ROCM_KERNELS_CDNA

// 8 elements of a row of k as a fragment.
template <class Shape>
ROCM_KERNELS_DEVICE Words key_fragment(const Vec<uint32_t, Shape::kFp8 ? 2 : 4>& loaded) {
  if constexpr (Shape::kFp8) {
    return detail::decode8<Shape::kBFloat>(__builtin_bit_cast(detail::Words2, loaded));
  } else {
    return __builtin_bit_cast(Words, loaded);
  }
}

// The rows of a wave: of one sequence and KV head, queries times the heads that share it. Those
// beyond the last are the last again, and go nowhere.
struct PrefillRows {
  const AttentionArgs& args;
  const PrefillGrid& grid;
  const Sequence& s;
  int b, head;     // sequence, KV head
  int all, first;  // rows of these, the wave's first

  ROCM_KERNELS_DEVICE int query_of(int row) const { return row / grid.heads_per_kv; }
  ROCM_KERNELS_DEVICE int head_of(int row, int query) const {
    return head * grid.heads_per_kv + row - query * grid.heads_per_kv;
  }
  ROCM_KERNELS_DEVICE int64_t own_batch() const { return args.cu_seqlens_q == nullptr ? b : 0; }
  // The last of `count` rows from `row` on.
  ROCM_KERNELS_DEVICE int last_of(int row, int count) const { return min(row + count, all) - 1; }
};

// ---- Q: a wave's rows as operands, and the keys that they see -----------------------------------

template <class Shape>
ROCM_KERNELS_DEVICE void load_rows(const PrefillRows& its, int lane,
                                   Words (&q)[Shape::kRowTiles][Shape::kFragments],
                                   RowState (&rows)[Shape::kRowTiles]) {
  const AttentionArgs& args = its.args;
#pragma unroll
  for (int n = 0; n < Shape::kRowTiles; ++n) {
    const int row = min(its.first + 16 * n + lane % 16, its.all - 1), query = its.query_of(row);
    load_query<Shape>(q[n],
                      static_cast<const typename Shape::Q*>(args.q.data) +
                          its.own_batch() * args.q.batch_stride +
                          (its.s.q_begin + query) * args.q.row_stride +
                          its.head_of(row, query) * args.q.head_stride,
                      static_cast<int>(args.head_dim), lane / 16);
    rows[n].sees = its.grid.window.seen(its.s, query, query);
  }
}

// ---- K and V: a wave's quarter of a step, 16 keys and every second piece of their columns -------

template <class Shape>
struct PrefillQuarter {
  static constexpr int kBytes = Shape::kFp8 ? 1 : 2, kFragments = Shape::kFragments;
  static constexpr int kOwnFragments = kFragments / 2, kOwnPieces = (Shape::kPieces + 1) / 2;
  static constexpr int kVAt = 2 * kFragments * 1024;  // where V^T lies in a step's LDS, behind K
  using KeyLoad = Vec<uint32_t, Shape::kFp8 ? 2 : 4>;

  const uint8_t *k, *v;  // of the sequence and KV head
  int k_bytes, v_bytes;  // of a row
  int tile, half;        // of the keys, of their columns
  int lane;
  KeyLoad keys[kOwnFragments];
  ValueTile<Shape> values[kOwnPieces];

  ROCM_KERNELS_DEVICE PrefillQuarter(const AttentionArgs& args, const Sequence& s, int head,
                                     int wave, int its_lane)
      : k(static_cast<const uint8_t*>(args.k.data) +
          (s.k_batch + head * args.k.head_stride) * kBytes),
        v(static_cast<const uint8_t*>(args.v.data) +
          (s.v_batch + head * args.v.head_stride) * kBytes),
        k_bytes(static_cast<int>(args.head_dim) * kBytes),
        v_bytes(static_cast<int>(args.head_dim_v) * kBytes),
        tile(wave / 2),
        half(wave % 2),
        lane(its_lane) {}

  // Asks memory for it.
  ROCM_KERNELS_DEVICE void load(const StepPlaces& places) {
    const int group = lane / 16, i = lane % 16;
    const int64_t k_offset = places.k_offset(), v_offset = places.v_offset();
    const uint8_t* const row = k + of_lane64(k_offset, 16 * tile + i) * kBytes;
#pragma unroll
    for (int f = 0; f < kOwnFragments; ++f) {
      const int at = (32 * (half * kOwnFragments + f) + 8 * group) * kBytes;
      keys[f] = rocm_kernels::load<Touch::kAgain, KeyLoad>(row + min(at, k_bytes - 8 * kBytes));
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const uint8_t* const v_row = v + of_lane64(v_offset, 16 * tile + 4 * group + r) * kBytes;
#pragma unroll
      for (int p = 0; p < kOwnPieces; ++p) {
        values[p].load(v_row, r, v_bytes, min(2 * p + half, Shape::kPieces - 1), i);
      }
    }
  }

  // Waits for it, and puts it into a step's LDS as operands.
  ROCM_KERNELS_DEVICE void store(uint8_t* stage) const {
#pragma unroll
    for (int f = 0; f < kOwnFragments; ++f) {
      *reinterpret_cast<Words*>(stage + (tile * kFragments + half * kOwnFragments + f) * 1024 +
                                lane * 16) = key_fragment<Shape>(keys[f]);
    }
#pragma unroll
    for (int p = 0; p < kOwnPieces; ++p) {
      const int piece = 2 * p + half;
      if (piece >= Shape::kPieces) break;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        *reinterpret_cast<detail::Words2*>(stage + kVAt + ((piece * 4 + c) * 2 + tile) * 512 +
                                           lane * 8) = values[p].column(c);
      }
    }
  }
};

// ---- A step: S^T, P^T, O^T of a wave's rows -----------------------------------------------------

template <class Shape>
ROCM_KERNELS_DEVICE void multiply_keys(const uint8_t* stage, int lane,
                                       const Words (&q)[Shape::kRowTiles][Shape::kFragments],
                                       Accumulator (&scores)[2][Shape::kRowTiles]) {
#pragma unroll
  for (int f = 0; f < Shape::kFragments; ++f) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const Words fragment =
          *reinterpret_cast<const Words*>(stage + (t * Shape::kFragments + f) * 1024 + lane * 16);
#pragma unroll
      for (int n = 0; n < Shape::kRowTiles; ++n) {
        scores[t][n] = detail::mfma_16bit<Shape::kBFloat>(fragment, q[n][f], scores[t][n]);
      }
    }
  }
}

// What the registers spare: a wave's P^T to LDS and back.
template <int kRowTiles>
ROCM_KERNELS_DEVICE void pass_through_lds(uint8_t* place, Words (&p)[kRowTiles]) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) *reinterpret_cast<Words*>(place + n * 1024) = p[n];
  asm volatile("" ::: "memory");
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) p[n] = *reinterpret_cast<const Words*>(place + n * 1024);
}

template <class Shape>
ROCM_KERNELS_DEVICE void multiply_values(const uint8_t* stage, int lane,
                                         const Words (&p)[Shape::kRowTiles],
                                         Accumulator (&out)[Shape::kRowTiles][Shape::kDv / 16]) {
#pragma unroll
  for (int at = 0; at < Shape::kDv / 16; ++at) {
    const uint8_t* const place = stage + PrefillQuarter<Shape>::kVAt + at * 1024 + lane * 8;
    const Words values = join_words(*reinterpret_cast<const detail::Words2*>(place),
                                    *reinterpret_cast<const detail::Words2*>(place + 512));
#pragma unroll
    for (int n = 0; n < Shape::kRowTiles; ++n) {
      out[n][at] = detail::mfma_16bit<Shape::kBFloat>(values, p[n], out[n][at]);
    }
  }
}

// ---- The end: rows to memory; a lane has 16 neighbouring columns of every 64 --------------------

template <class Shape>
ROCM_KERNELS_DEVICE void store_rows(const PrefillRows& its, int lane,
                                    const RowState (&rows)[Shape::kRowTiles],
                                    const Accumulator (&out)[Shape::kRowTiles][Shape::kDv / 16]) {
  using Q = typename Shape::Q;
  const AttentionArgs& args = its.args;
  const int group = lane / 16, i = lane % 16;
  const float v_descale = v_descale_of(args, its.b, its.head);
#pragma unroll
  for (int n = 0; n < Shape::kRowTiles; ++n) {
    const float total = rows[n].total(lane);
    const int row = its.first + 16 * n + i;
    if (row >= its.all) continue;
    const int query = its.query_of(row), q_head = its.head_of(row, query);
    const float factor = finish_row(args, its.b, its.s.q_begin, query, q_head, group == 0,
                                    rows[n].maximum, total, v_descale);
    Q* const to = static_cast<Q*>(args.out) + its.own_batch() * args.out_batch_stride +
                  (its.s.q_begin + query) * args.out_row_stride + q_head * args.out_head_stride;
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int column = 64 * piece + 4 * (4 * group + r);
        const Accumulator value =
            factor * Accumulator{out[n][4 * piece][r], out[n][4 * piece + 1][r],
                                 out[n][4 * piece + 2][r], out[n][4 * piece + 3][r]};
        if (column < args.head_dim_v) {
          using Four = Q __attribute__((ext_vector_type(4), aligned(2)));
          *reinterpret_cast<Four*>(to + column) = __builtin_convertvector(value, Four);
        }
      }
    }
  }
}

#endif

// Grid: one number for each block of rows of each KV head of each sequence.
template <class Shape>
__global__ void __launch_bounds__(kPrefillWaves * 64, Shape::kTile.waves)
    attention_prefill([[maybe_unused]] const AttentionArgs args,
                      [[maybe_unused]] const PrefillGrid grid) {
#if ROCM_KERNELS_CDNA
  constexpr int kRowTiles = Shape::kRowTiles, kStage = Shape::kTile.stage_bytes();
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];

  // ---- Which rows, and which keys they see
  const int number = static_cast<int>(blockIdx.x), in_xcd = number / grid.xcds;
  const int kv_group = in_xcd / grid.row_blocks * grid.xcds + number % grid.xcds;
  if (kv_group >= grid.groups) return;
  int block = in_xcd % grid.row_blocks;
  if (grid.heavy_first) block = grid.row_blocks - 1 - block;
  const int b = kv_group / grid.kv_heads, head = kv_group % grid.kv_heads;
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / 64);
  const int lane = static_cast<int>(threadIdx.x) % 64;
  const Sequence s = sequence_of(args, b);
  const int all_rows = s.q_count * grid.heads_per_kv;
  const int block_row = block * (kPrefillWaves * 16 * kRowTiles);
  if (block_row >= all_rows) return;
  const int first_row = block_row + wave * 16 * kRowTiles;
  const PrefillRows its = {args, grid, s, b, head, all_rows, first_row};
  const KeyRange keys =
      grid.window.seen(s, its.query_of(block_row),
                       its.query_of(its.last_of(block_row, kPrefillWaves * 16 * kRowTiles)));

  Words q[kRowTiles][Shape::kFragments];
  RowState rows[kRowTiles];
  Accumulator out[kRowTiles][Shape::kDv / 16] = {};
  load_rows<Shape>(its, lane, q, rows);
  // Keys that some of the wave's rows see, and that all of them see.
  const bool has_rows = first_row < all_rows;
  const int first_query = its.query_of(min(first_row, all_rows - 1));
  const int last_query = its.query_of(its.last_of(first_row, 16 * kRowTiles));
  const KeyRange seen_by_some = grid.window.seen(s, first_query, last_query);
  const KeyRange seen_by_all = grid.window.seen_by_all(s, first_query, last_query);
  const ScoreScale score_scale(args.scale * k_descale_of(args, b, head), args.softcap);
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) score_scale.apply_sign(q[n]);

  // ---- The steps
  StepPlaces places(args, s, keys, grid.page_magic);
  PrefillQuarter<Shape> quarter(args, s, head, wave, lane);
  const int begin = keys.begin / kStepKeys;
  const int end = keys.end > keys.begin ? (keys.end + kStepKeys - 1) / kStepKeys : begin;
  if (begin < end) {
    places.look_up(begin * kStepKeys, lane);
    quarter.load(places);
    places.look_up((begin + 1) * kStepKeys, lane);
    quarter.store(lds);
    workgroup_barrier();
  }
#pragma unroll 1
  for (int step = begin; step < end; ++step) {
    const uint8_t* const stage = lds + ((step - begin) & 1) * kStage;
    const bool more = step + 1 < end;
    if (more) {
      quarter.load(places);
      places.look_up((step + 2) * kStepKeys, lane);
    }
    const int first_key = step * kStepKeys;
    if (has_rows && first_key < seen_by_some.end && first_key + kStepKeys > seen_by_some.begin) {
      Accumulator scores[2][kRowTiles] = {};
      multiply_keys<Shape>(stage, lane, q, scores);
      Words p[kRowTiles];
      to_operand<Shape>(scores, rows, out, score_scale, first_key, seen_by_all, lane, p);
      if constexpr (Shape::kChainInLds) {
        pass_through_lds(lds + 2 * kStage + wave * kRowTiles * 1024 + lane * 16, p);
      }
      multiply_values<Shape>(stage, lane, p, out);
    }
    if (more) quarter.store(lds + ((step - begin + 1) & 1) * kStage);
    // Here and not where the loop begins: there clang 22 leaves out the wait for these stores.
    workgroup_barrier();
  }
  store_rows<Shape>(its, lane, rows, out);
#endif
}

}  // namespace rocm_kernels::cdna
