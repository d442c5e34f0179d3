// Attention of few queries: what a decode step asks for, bound by the bytes of keys and values.
//
//   S^T [keys, rows] = K [keys, D] Q^T             rows: q_len * group queries that share a KV head
//   O^T [D, rows]   += V^T [D, keys] P^T           P^T = exp2(S^T - max)
//
// A block of two, four or eight warps has one sequence, one KV head, up to 8 * kTiles rows and a
// part of the keys. Timeline; each warp is alone until it leaves its sums:
//
//   who           waits for                  does
//   each warp                                part_of; asks for its first tiles to be in L2, or if
//                                            they are settled orders them, but that of the last key
//   each warp     the kernel before          load_queries; part_of again where lengths are not what
//                                            they were; orders its first tiles of kKeys keys and
//                                            values to stages of its own (cp.async)
//   each warp,    its token                  rotates its queries; one makes its key and value
//   if it is new
//   each warp,    all warps                  leaves 8 of the rows' queries for all (kSharesQueries)
//   if rows are many
//   each warp,    its oldest tile's copies   orders a tile; multiply_keys, softmax
//   tile by tile                             (running maximum, sum), multiply_values
//   each warp                                leave_sums: in shared memory
//   the block     all its warps              send_sums: sums of all warps, to the block of the
//                                            cluster that owns the column
//   the block     all blocks of the cluster  finish_outputs: of its columns; where there are more
//                                            parts than a cluster has blocks, all clusters but the
//                                            last leave them in memory
//   the last      their words in memory      adds them up
//   cluster
//
// A short step is its start and its end. Of 3.7 us for one sequence of 512 keys, whose blocks have
// 32 KB each, an SM takes 0.5 to take them in (32 bytes a cycle); the rest is waits, one behind the
// other.
//
// Why keys are the 16 rows of mma.m16n8k16: a decode step has 4 or 8 rows of queries, which are
// then its 8 columns, and a warp's O^T takes half the registers.
//
// FP8 keys and values are widened to float16, exactly, between shared memory and the instruction:
// an 8 x 8 matrix of 16-bit words is one of 8 x 16 codes. The queries then are float16 too, each
// row times a power of two that keeps it in range.
#pragma once

#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/gpu/cluster.h"
#include "../../common/gpu/dependent_launch.h"
#include "decode_end.cuh"
#include "new_token.cuh"

namespace rocm_kernels {
namespace cuda {

// What is the block's.
template <class Shape>
__device__ __forceinline__ DecodePart part_of(const AttentionArgs& args, const DecodeGrid& grid,
                                              const Lengths& lengths, int b, int head,
                                              int first_row, int part) {
  DecodePart its;
  const Sequence s = sequence_of(args, b, lengths);
  its.row_count = s.q_count * grid.rows.heads;
  const int last_row = min(first_row + Shape::kRows, its.row_count) - 1;
  its.rows = {s, b, head, first_row, last_row};
  const int first_query = grid.rows.query_of(first_row), last_query = grid.rows.query_of(last_row);
  its.keys = grid.window.seen(s, first_query, last_query);
  its.all = grid.window.seen_by_all(s, first_query, last_query);
  // In whole tiles from the first that is seen on.
  const int first_tile = its.keys.begin / Shape::kKeys;
  const int tiles = max((its.keys.end + Shape::kKeys - 1) / Shape::kKeys - first_tile, 0);
  const int of_part = (tiles + grid.parts - 1) / grid.parts;
  its.begin = first_tile + min(part * of_part, tiles);
  its.end = first_tile + min((part + 1) * of_part, tiles);
  return its;
}

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlock.at_once(1))
    attention_decode(const __grid_constant__ AttentionArgs args, const DecodeGrid grid,
                     const __grid_constant__ typename Shape::NewTokens fresh) {
  using Q = typename Shape::Q;
  constexpr int kTiles = Shape::kTiles, kSteps = Shape::kSteps, kRows = Shape::kRows;
  constexpr int kKeys = Shape::kKeys;
  using Lines = typename Shape::Lines;

  extern __shared__ __align__(128) char shared[];  // TileLines
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4, quad = lane % 4;

  // ---- Which work is this block's: part, KV head and rows, sequence
  const bool one_part = grid.parts == 1;  // whose blocks lie along x, which has room for more
  const int part = one_part ? 0 : static_cast<int>(blockIdx.x), b = static_cast<int>(blockIdx.z);
  int head = static_cast<int>(one_part ? blockIdx.x : blockIdx.y), row_block = 0;
  if (grid.row_blocks > 1) {
    row_block = grid.row_blocks - 1 - head / static_cast<int>(args.kv_heads);
    head %= static_cast<int>(args.kv_heads);
  }
  const int first_row = row_block * kRows, stages = grid.stages;
  if (grid.cluster > 1 && threadIdx.x == 0) {
    DecodeMeeting<Shape>::init_barrier(shared, grid.sent_at);
  }
  if (grid.cluster > 1) cluster_arrive();  // awaited before anything is sent to another block

  // ---- Before the kernel before is done: first keys and values to L2, or to the stages, by what
  // lengths are now; it may still write them. Behind the wait lengths and queries are asked for at
  // once: most often lengths have stayed.
  const bool is_apart = args.cu_seqlens_q == nullptr && args.cu_seqlens_k == nullptr;
  if (!is_apart) wait_for_previous_kernel();
  Lengths lengths = lengths_of(args, b);
  DecodePart its;
  uint32_t q[Shape::kHeld][kSteps][2];
  const uint32_t ring = pinned_address(shared) + warp * stages * 2 * Shape::kTileBytes;
  int started = 0;  // tiles of the warp
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    its = part_of<Shape>(args, grid, lengths, b, head, first_row, part);
    // Blocks of a cluster are alike in this.
    if (first_row >= its.row_count) {
      if (grid.cluster > 1) cluster_wait();
      return;
    }
    if (is_first) {
      if (Shape::kInRows && !Shape::kHasNew && args.keys_are_settled && grid.cluster > 1) {
        const int last_tile = (its.keys.end - 1) / kKeys;  // has the key that is not settled
        typename Shape::Copies copies(args, its.rows.s, head, its.keys, grid.page_size, its.begin);
        for (int tile = its.begin + warp; tile < min(its.end, last_tile) && started < stages - 1;
             tile += Shape::kWarps) {
          const uint32_t at = ring + started++ * 2 * Shape::kTileBytes;
          copies.start(tile * kKeys, at, at + Shape::kTileBytes);
          copies_commit();
        }
      } else if (args.block_table == nullptr && is_apart) {
        const KeyRows at(args, its.rows.s, head, Shape::kBytes);
        const int most = min(its.end, its.begin + stages * Shape::kWarps);
#pragma unroll 1
        for (int tile = its.begin + warp; tile < most; tile += Shape::kWarps) {
          bring_tile<Shape>(args, at, tile * kKeys, its.keys.end);
        }
      }
      wait_for_previous_kernel();
    }
    const Lengths now = lengths_of(args, b);
    if constexpr (Shape::kHasNew) {  // whose own loads would spill here
      if (!is_first) break;
    } else {
      load_queries<Shape>(args, grid.rows, its.rows, Shape::kSharesQueries ? warp % kTiles : 0,
                          group, quad, q);
      if (now == lengths) break;
    }
    lengths = now;
    copies_wait_all();
    __syncwarp();
    started = 0;
  }
  const DecodeRows& rows = its.rows;
  const int last_row = rows.last, end = its.end;
  NewToken<Shape> token(fresh);
  if constexpr (Shape::kHasNew) token.ask(rows);
  const float k_descale = k_descale_of(args, b, head);
  const float v_descale = v_descale_of(args, b, head);

  // ---- First tiles on their way
  int next = its.begin + warp + started * Shape::kWarps;
  typename Shape::Copies copies(args, rows.s, head, its.keys, grid.page_size, next);
#pragma unroll 1
  for (int stage = started; stage < stages - 1; ++stage) {
    if (next < end) {
      const uint32_t at = ring + stage * 2 * Shape::kTileBytes;
      copies.start(next * kKeys, at, at + Shape::kTileBytes);
    }
    next += Shape::kWarps;
    copies_commit();
  }

  // ---- A new token, beside the copies
  int token_tile = -1;
  if constexpr (Shape::kHasNew) {
    char* const unfilled = shared + (warp * stages + stages - 1) * 2 * Shape::kTileBytes;
    token.rotate_queries(rows, unfilled);
    token.load_rotated(grid, rows, unfilled, group, quad, q);
    token_tile = token.make(grid, its, part, row_block);
  }

  // ---- The lane's columns of S^T, and what they see
  DecodeColumns<Shape> columns = {grid, rows, first_row + 2 * quad};
  columns.capped = args.softcap > 0;
  const float factor = k_descale * args.scale * (columns.capped ? 1.0f / args.softcap : kLog2E);
  float row_scale[Shape::kHeld];
#pragma unroll
  for (int t = 0; t < Shape::kHeld; ++t) {
    row_scale[t] = factor;
    if constexpr (Shape::kFp8 && !std::is_same<Q, __half>::value) {
      row_scale[t] *= queries_to_halves<Shape>(q[t]);
    }
  }
  const uint32_t q_at = shared_address(shared + grid.queries_at) + lane * 16;
  if constexpr (Shape::kSharesQueries) {
    float* const scales =
        reinterpret_cast<float*>(shared + grid.queries_at + kRows * 2 * Shape::kD);
    const int t = warp % kTiles;
#pragma unroll
    for (int pair = 0; pair < kSteps / 2; ++pair) {
      store_shared(q_at + shared_queries<Shape>(t, pair),
                   make_uint4(q[0][2 * pair][0], q[0][2 * pair][1], q[0][2 * pair + 1][0],
                              q[0][2 * pair + 1][1]));
    }
    if (quad == 0) scales[8 * t + group] = row_scale[0];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      columns.scale[i / 2][i % 2] = scales[8 * (i / 2) + 2 * quad + i % 2];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      columns.scale[i / 2][i % 2] = __shfl_sync(~0u, row_scale[i / 2], (2 * quad + i % 2) * 4);
    }
  }
#pragma unroll
  for (int i = 0; i < 2 * kTiles; ++i) {
    float& scale = columns.scale[i / 2][i % 2];
    if (scale == 0) scale = 1.2e-38f;  // no subnormal
  }
  columns.all_begin = its.all.begin, columns.all_end = its.all.end;
  columns.cap = args.softcap * kLog2E;

  DecodeSums<Shape> sums;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    sums.maximum[t][0] = sums.maximum[t][1] = kLeastScore;
    sums.sum[t][0] = sums.sum[t][1] = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums.out[t][i][j] = 0;
    }
  }

  // A lane's row and vector for ldmatrix: matrices of keys 0-7 and 8-15, then the next 16 bytes.
  const uint32_t k_lane = static_cast<uint32_t>(Lines::at(lane % 16, lane / 16));
  // Transposed: of 16-bit values keys 0-7 of two vectors, then keys 8-15; of FP8 as K.
  const uint32_t v_lane =
      Shape::kFp8 ? k_lane
                  : static_cast<uint32_t>(Lines::at(lane / 16 * 8 + lane % 8, lane / 8 % 2));

  int stage = 0, filled = stages - 1;
  for (int tile = its.begin + warp; tile < end; tile += Shape::kWarps) {
    if (stages == 2) {
      copies_wait_all();
    } else {
      copies_wait<1>();
    }
    __syncwarp();
    if (next < end) {
      const uint32_t at = ring + filled * 2 * Shape::kTileBytes;
      copies.start(next * kKeys, at, at + Shape::kTileBytes);
    }
    copies_commit();
    next += Shape::kWarps;
    // Not before: blocks of the next kernel that wait for this one would take places of its own.
    if (next >= end) allow_next_kernel();
    filled = filled + 1 == stages ? 0 : filled + 1;
    if constexpr (Shape::kHasNew) {
      if (tile == token_tile) {
        const uint32_t at = ring + stage * 2 * Shape::kTileBytes;
        token.put(at, at + Shape::kTileBytes);
      }
    }
    const uint32_t k_at = ring + stage * 2 * Shape::kTileBytes + k_lane;
    const uint32_t v_at = ring + stage * 2 * Shape::kTileBytes + Shape::kTileBytes + v_lane;
    stage = stage + 1 == stages ? 0 : stage + 1;

    float products[kTiles][4] = {};
    multiply_keys<Shape>(k_at, q, q_at, products);
    uint32_t p[kTiles][2];
    softmax<Shape>(columns, tile * kKeys, group, products, sums, p);
    multiply_values<Shape>(v_at, p, sums.out);
  }

  allow_next_kernel();

  // ---- The warps' sums meet, then the blocks'. A block owns kD / cluster columns: it sends every
  // other its sums of their columns, finishes its own, and may leave once all have sent.
  const DecodeMeeting<Shape> meeting(shared, grid.sent_at, grid.cluster, last_row - first_row + 1);
  copies_wait_all();
  if (grid.cluster > 1 && threadIdx.x == 0) meeting.expect_sums();
  __syncthreads();
  meeting.leave_sums(sums, warp, group, quad);
  __syncthreads();
  if (grid.cluster > 1) cluster_wait();
  meeting.send_sums();
  if (grid.cluster > 1) {
    meeting.await_sums();
  } else {
    __syncthreads();
  }
  meeting.finish_outputs(args, grid, rows, part, v_descale);
}

}  // namespace cuda
}  // namespace rocm_kernels
