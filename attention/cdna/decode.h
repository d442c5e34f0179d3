// Attention of few queries: what a decode step asks for, bound by the bytes of keys and values.
//
//   S^T [32 keys, rows] = K Q^T         rows: the queries that share a KV head, q_len * group
//   O^T [D, rows]      += V^T P^T       P^T = exp2(S^T - max), registers of S^T (fragments.h)
//
// A workgroup of four waves has one sequence, one KV head, 16 or 32 rows and a part of the keys.
// Timeline. Each wave is alone until the end, with every fourth step of 32 keys:
//
//   each wave, step by step   asks for K and V of its next step: rows of pages, or of a contiguous
//                             cache, from memory to registers; S^T, P^T, O^T of this step. No LDS,
//                             no barrier
//   all waves, at the end     meet_waves: their sums, in LDS, a barrier on each side
//   the last workgroup to     meet_parts: sums of the parts of the keys, from memory, in their
//   arrive (a ticket)         order
//
// Why keys are the rows of the instruction: S^T is then an operand of the next one as it is, and
// 16 bytes of a row of K or V are what a lane loads.
#pragma once

#include "decode_end.h"

namespace rocm_kernels::cdna {

// Grid: parts x (KV heads x blocks of rows) x sequences.
template <class Shape>
__global__ void __launch_bounds__(kDecodeWaves * 64, Shape::kWaves)
    attention_decode([[maybe_unused]] const AttentionArgs args,
                     [[maybe_unused]] const DecodeGrid grid) {
#if ROCM_KERNELS_CDNA
  constexpr int kD = Shape::kD, kColumns = Shape::kColumns, kRowTiles = Shape::kRowTiles;
  constexpr int kSums = kD / 16;
  __shared__ DecodeLds lds;

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
  const KeyRange seen_by_all = grid.window.seen_by_all(s, query_of(0), query_of(here - 1));
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

    Words p[kRowTiles];
    to_operand<Shape>(scores, rows, out, score_scale, step * kStepKeys, seen_by_all, lane, p);
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

  // ---- The sums of waves, then of parts
  const int64_t item = int64_t{blockIdx.z} * gridDim.y + blockIdx.y;
  float* const slots =
      parts == 1
          ? nullptr
          : grid.partials + item * grid.parts * (Shape::kRows * DecodeOutputs<Shape>::kPitch);
  const DecodeOutputs<Shape> outputs = {args, grid, s,     b,   head,  first_row,
                                        here, part, parts, lds, slots, v_descale_of(args, b, head)};
  outputs.meet_waves(rows, out, wave, lane);
  if (parts == 1) return;
  __shared__ bool last;
  await_published();
  workgroup_barrier();
  if (threadIdx.x == 0) last = arrives_last(grid.tickets + item, grid.launch, parts);
  workgroup_barrier();
  if (last) outputs.meet_parts();
#endif
}

}  // namespace rocm_kernels::cdna
