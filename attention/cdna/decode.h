// Attention of few queries: what a decode step asks for, bound by the bytes of keys and values.
//
//   S^T [32 keys, rows] = K Q^T         rows: the queries that share a KV head, q_len * group
//   O^T [D, rows]      += V^T P^T       P^T = exp2(S^T - max), registers of S^T (fragments.h)
//
// A workgroup of four waves has one sequence, one KV head, 16 or 32 rows and a part of the keys.
// Each wave is alone until the end, with every fourth step of 32 keys:
//
//   all waves   K, V of the next step under way from memory to registers: rows of pages, or of a
//               contiguous cache; no LDS, no barrier
//   at the end  the waves' sums meet in LDS; parts of the keys in memory, where the last workgroup
//               to arrive adds them up in their order
//
// Why keys are the rows of the instruction: S^T is then an operand of the next one as it is, and
// 16 bytes of a row of K or V are what a lane loads.
#pragma once

#include "../../blocks/product/cdna/partial_sums.h"
#include "../../common/cdna/sync.h"
#include "fragments.h"

namespace rocm_kernels::cdna {

struct DecodeGrid {
  Window window;
  int heads_per_kv;
  int row_blocks;
  int parts;
  uint32_t page_magic;
  float* partials;  // [item][part][rows][kD + 4]
  uint64_t* tickets;
  uint64_t launch;
};

template <typename T, bool kIsFp8, int kTileNumber>
struct DecodeShape : HeadShape<T, kIsFp8, kDecodeTiles[kTileNumber].head_dim> {
  static constexpr int kRows = kDecodeTiles[kTileNumber].rows, kRowTiles = kRows / 16;
  static constexpr int kWaves = kDecodeTiles[kTileNumber].waves;  // a SIMD
  // Whether registers hold the next step's keys and values beside those that are multiplied.
  static constexpr bool kAhead = kDecodeTiles[kTileNumber].head_dim <= 256;
};

// Grid: parts x (KV heads x blocks of rows) x sequences.
template <class Shape>
__global__ void __launch_bounds__(kDecodeWaves * 64, Shape::kWaves)
    attention_decode([[maybe_unused]] const AttentionArgs args,
                     [[maybe_unused]] const DecodeGrid grid) {
#if ROCM_KERNELS_CDNA
  constexpr int kD = Shape::kD, kColumns = Shape::kColumns, kRowTiles = Shape::kRowTiles;
  constexpr int kSums = kD / 16;
  __shared__ float sums[kDecodeWaves][16][kSumsPitch];
  __shared__ float maxima[kDecodeWaves][16], totals[kDecodeWaves][16];

  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / 64);
  const int lane = static_cast<int>(threadIdx.x) % 64, group = lane / 16, i = lane % 16;
  const int part = static_cast<int>(blockIdx.x), b = static_cast<int>(blockIdx.z);
  const int head = static_cast<int>(blockIdx.y) / grid.row_blocks;
  const int first_row = static_cast<int>(blockIdx.y) % grid.row_blocks * Shape::kRows;
  const Sequence s = sequence_of(args, b);
  const int here = min(s.q_count * grid.heads_per_kv - first_row, Shape::kRows);
  if (here <= 0) return;
  const KeyRange keys = grid.window.seen(s, first_row / grid.heads_per_kv,
                                         (first_row + here - 1) / grid.heads_per_kv);
  const int first_step = keys.begin / kStepKeys;
  const int all_steps =
      keys.end > keys.begin ? (keys.end + kStepKeys - 1) / kStepKeys - first_step : 0;
  const int parts = max(min(grid.parts, all_steps), 1);  // that have a step
  if (part >= parts) return;
  const int begin = first_step + static_cast<int>(int64_t{all_steps} * part / parts);
  const int end = first_step + static_cast<int>(int64_t{all_steps} * (part + 1) / parts);

  // ---- The rows of q
  const int64_t own = args.cu_seqlens_q == nullptr ? b : 0;
  const auto query_of = [&](int row) { return (first_row + row) / grid.heads_per_kv; };
  const auto head_of = [&](int row) {
    return head * grid.heads_per_kv + (first_row + row) % grid.heads_per_kv;
  };
  Words q[kRowTiles][Shape::kFragments];
  RowState rows[kRowTiles];
  Accumulator out[kRowTiles][kSums] = {};
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const int row = min(16 * n + i, here - 1);
    load_query<Shape>(
        q[n],
        static_cast<const typename Shape::Q*>(args.q.data) + own * args.q.batch_stride +
            (s.q_begin + query_of(row)) * args.q.row_stride + head_of(row) * args.q.head_stride,
        static_cast<int>(args.head_dim), group);
    rows[n].sees = grid.window.seen(s, query_of(row), query_of(row));
  }
  // Keys that all rows see.
  const KeyRange seen_by_all = {grid.window.seen(s, query_of(here - 1), query_of(here - 1)).begin,
                                grid.window.seen(s, query_of(0), query_of(0)).end};
  const ScoreScale score_scale(args.scale * k_descale_of(args, b, head), args.softcap);
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) score_scale.apply_sign(q[n]);

  // ---- The steps of this wave
  constexpr int kBytes = Shape::kFp8 ? 1 : 2;
  const int k_bytes = static_cast<int>(args.head_dim) * kBytes;
  const int v_bytes = static_cast<int>(args.head_dim_v) * kBytes;
  const uint8_t* const k =
      static_cast<const uint8_t*>(args.k.data) + (s.k_batch + head * args.k.head_stride) * kBytes;
  const uint8_t* const v =
      static_cast<const uint8_t*>(args.v.data) + (s.v_batch + head * args.v.head_stride) * kBytes;
  StepPlaces places(args, s, keys, grid.page_magic);
  KeyTile<Shape> key_tiles[2];
  ValueTile<Shape> value_tiles[2][Shape::kPieces];
  const auto load_keys = [&](int64_t offset) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      key_tiles[t].load(k + of_lane64(offset, 16 * t + i) * kBytes, k_bytes, group);
    }
  };
  const auto load_values = [&](int64_t offset) {
#pragma unroll
    for (int t = 0; t < 2; ++t) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const uint8_t* const row = v + of_lane64(offset, 16 * t + 4 * group + r) * kBytes;
#pragma unroll
        for (int p = 0; p < Shape::kPieces; ++p) value_tiles[t][p].load(row, r, v_bytes, p, i);
      }
    }
  };

  int step = begin + wave;
  if (step < end) {
    places.look_up(step * kStepKeys, lane);
    if constexpr (Shape::kAhead) {
      load_keys(places.k_offset());
      load_values(places.v_offset());
      places.look_up((step + kDecodeWaves) * kStepKeys, lane);
    }
  }
  for (; step < end; step += kDecodeWaves) {
    [[maybe_unused]] const bool more = step + kDecodeWaves < end;
    if constexpr (!Shape::kAhead) load_keys(places.k_offset());
    Accumulator scores[2][kRowTiles] = {};
#pragma unroll
    for (int f = 0; f < Shape::kFragments; ++f) {
#pragma unroll
      for (int t = 0; t < 2; ++t) {
        const Words fragment = key_tiles[t].fragment(f);
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          scores[t][n] = detail::mfma_16bit<Shape::kBFloat>(fragment, q[n][f], scores[t][n]);
        }
      }
    }
    const int64_t v_offset = places.v_offset();
    if constexpr (Shape::kAhead) {
      if (more) {
        load_keys(places.k_offset());
        places.look_up((step + 2 * kDecodeWaves) * kStepKeys, lane);
      }
    } else {
      load_values(v_offset);
      places.look_up((step + kDecodeWaves) * kStepKeys, lane);
    }

    const int first_key = step * kStepKeys;
    const bool all_seen =
        first_key >= seen_by_all.begin && first_key + kStepKeys <= seen_by_all.end;
    to_exponentials(scores, rows, out, score_scale, first_key, all_seen, lane);

    Words p[kRowTiles];
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n) {
      p[n] = join_words(round_p<Shape>(scores[0][n]), round_p<Shape>(scores[1][n]));
    }
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; ++piece) {
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        const Words values =
            join_words(value_tiles[0][piece].column(c), value_tiles[1][piece].column(c));
#pragma unroll
        for (int n = 0; n < kRowTiles; ++n) {
          Accumulator& sum = out[n][piece * kColumns + c];
          sum = detail::mfma_16bit<Shape::kBFloat>(values, p[n], sum);
        }
      }
    }
    if constexpr (Shape::kAhead) {
      if (more) load_values(v_offset);
    }
  }

  // ---- The waves' sums meet, 16 rows by 64 columns at a time; a thread has four of a row
  const float v_descale = v_descale_of(args, b, head);
  const int thread = static_cast<int>(threadIdx.x), own_row = thread / 16, own_quad = thread % 16;
  constexpr int kPitch = kD + 4;
  const int64_t item = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  float* const item_slots =
      parts == 1 ? nullptr : grid.partials + item * grid.parts * (Shape::kRows * kPitch);
  const auto slot_of = [&](int its_part, int row) {
    return item_slots + (its_part * Shape::kRows + row) * kPitch;
  };
  const auto finish = [&](int row, int column, float most, float total, Accumulator value) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (column + n < args.head_dim_v) {
        finish_element<typename Shape::Q>(args, b, s.q_begin, query_of(row), head_of(row),
                                          column + n, most, total, value[n], v_descale);
      }
    }
  };
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const float total = rows[n].total(lane);
#pragma unroll
    for (int at = 0; at < kSums; at += 4) {
      // Accumulators at .. at + 3: four neighbouring columns in each register.
      workgroup_barrier();
      if (at == 0 && group == 0) {
        maxima[wave][i] = rows[n].maximum;
        totals[wave][i] = total;
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        *reinterpret_cast<Accumulator*>(&sums[wave][i][4 * (4 * group + r)]) =
            Accumulator{out[n][at][r], out[n][at + 1][r], out[n][at + 2][r], out[n][at + 3][r]};
      }
      workgroup_barrier();
      const int row = 16 * n + own_row;
      if (row >= here) continue;
      float most = -kInfinity, all = 0;
#pragma unroll
      for (int w = 0; w < kDecodeWaves; ++w) most = fmaxf(most, maxima[w][own_row]);
      const float from = fmaxf(most, -3e38f);
      Accumulator value = {};
#pragma unroll
      for (int w = 0; w < kDecodeWaves; ++w) {
        const float by = fast_exp2(maxima[w][own_row] - from);
        all += by * totals[w][own_row];
        value += by * *reinterpret_cast<const Accumulator*>(&sums[w][own_row][4 * own_quad]);
      }
      const int column = at / kColumns * 16 * kColumns + own_quad * kColumns + at % kColumns;
      if (parts == 1) {
        finish(row, column, most, all, value);
      } else {
        publish(slot_of(part, row) + column, value);
        if (column == 0) publish(slot_of(part, row) + kD, Accumulator{most, all, 0, 0});
      }
    }
  }
  if (parts == 1) return;

  // ---- The parts' sums, added by the last to arrive
  __shared__ bool last;
  await_published();
  workgroup_barrier();
  if (thread == 0) last = arrives_last(grid.tickets + item, grid.launch, parts);
  workgroup_barrier();
  if (!last) return;
  float* const part_maxima = &sums[0][0][0];  // [here][parts]
  float* const part_totals = part_maxima + here * parts;
  for (int at = thread; at < here * parts; at += kDecodeWaves * 64) {
    const Accumulator its = collect(slot_of(at % parts, at / parts) + kD);
    part_maxima[at] = its[0];
    part_totals[at] = its[1];
  }
  workgroup_barrier();
#pragma unroll 1
  for (int at = thread; at < here * (kD / 4); at += kDecodeWaves * 64) {
    const int row = at / (kD / 4), column = at % (kD / 4) * 4;
    float most = -kInfinity, total = 0;
    for (int other = 0; other < parts; ++other) {
      most = fmaxf(most, part_maxima[row * parts + other]);
    }
    const float from = fmaxf(most, -3e38f);
    Accumulator value = {};
    constexpr int kAtOnce = 16;  // loads in flight
#pragma unroll 1
    for (int first = 0; first < parts; first += kAtOnce) {
      Accumulator its[kAtOnce];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        // Past the last part: its slot again, not added.
        its[n] = collect(slot_of(min(first + n, parts - 1), row) + column);
      }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n) {
        if (first + n < parts) {
          const float by = fast_exp2(part_maxima[row * parts + first + n] - from);
          total += by * part_totals[row * parts + first + n];
          value += by * its[n];
        }
      }
    }
    finish(row, column, most, total, value);
  }
#endif
}

}  // namespace rocm_kernels::cdna
