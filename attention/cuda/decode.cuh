// Attention of few queries: what a decode step asks for, bound by the bytes of keys and values.
//
//   S^T [keys, rows] = K [keys, D] Q^T          rows: the queries that share a KV head, q_len *
//   group O^T [D, rows]   += V^T [D, keys] P^T        P^T = exp2(S^T - max)
//
// A block of four warps has one sequence, one KV head, up to 8 * kTiles rows and a part of the
// keys. Each warp is alone until the end:
//
//   all warps   copy their own tiles of kKeys keys and values to stages of their own, some ahead
//               (cp.async, no barrier), multiply, keep a running maximum and sum
//   at the end  the four warps' sums meet in shared memory, then those of the blocks of a cluster,
//               which have the other parts of the keys: each block finishes a share of the outputs
//               from the shared memory of all. Where there are more parts than a cluster has
//               blocks, they meet in memory, and a second kernel joins them.
//
// Why keys are the 16 rows of mma.m16n8k16: a decode step has 4 or 8 rows of queries, which are
// then its 8 columns, and a warp's O^T takes half the registers.
//
// FP8 keys and values are widened to float16, exactly, between shared memory and the instruction:
// an 8 x 8 matrix of 16-bit words is one of 8 x 16 codes. The queries then are float16 too, each
// row times a power of two that keeps it in range.
#pragma once

#include <type_traits>

#include "../../common/cuda/async_copy.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/cuda/widen.cuh"
#include "../../common/gpu/cluster.h"
#include "../../common/gpu/dependent_launch.h"
#include "../gpu/problem.h"
#include "matrix.cuh"
#include "row_groups.cuh"
#include "tile_copies.cuh"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

// T: of q and out. kTile: of kDecodeTiles.
template <typename T, bool kFp8KV, int kTile>
struct DecodeShape {
  using Q = T;
  using Mma = std::conditional_t<kFp8KV, __half, T>;  // that are multiplied
  static constexpr bool kFp8 = kFp8KV;
  static constexpr DecodeBlock kBlock = {kDecodeTiles[kTile].head_dim, kDecodeTiles[kTile].rows,
                                         kFp8 ? 1 : 2, false};
  static constexpr int kD = kBlock.head_dim, kRows = kBlock.rows, kTiles = kRows / 8;
  static constexpr int kBytes = kBlock.bytes, kRowBytes = kBlock.row_bytes();
  static constexpr int kPitch = row_pitch(kRowBytes);
  static constexpr int kKeys = kBlock.keys(), kTileBytes = kBlock.tile_bytes();
  static constexpr int kWarps = kBlock.warps(), kThreads = 32 * kWarps;
  static constexpr int kOutPitch = kBlock.out_pitch();
};

// How the work is divided.
struct DecodeGrid {
  Window window;
  RowGroups rows;
  int parts;               // of the keys: cluster * outer
  int cluster;             // that meet in shared memory
  int row_blocks;          // of kRows rows
  int stages, ring_bytes;  // of DecodeBlock
  float* partial;  // [row of q, head][outer][D + 2], where outer > 1: sums, maximum (log2), sum
};

template <class Shape>
__global__ void __launch_bounds__(Shape::kThreads, Shape::kBlock.at_once())
    attention_decode(const __grid_constant__ AttentionArgs args, const DecodeGrid grid) {
  using Mma = typename Shape::Mma;
  using Q = typename Shape::Q;
  constexpr int kD = Shape::kD, kTiles = Shape::kTiles, kRows = Shape::kRows;
  constexpr int kKeys = Shape::kKeys, kSteps = kD / 16;
  constexpr int kPitch = Shape::kPitch;

  extern __shared__ __align__(16) char shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int group = lane / 4, quad = lane % 4;

  // ---- Which work is this block's: part, KV head and rows, sequence
  const int part = static_cast<int>(blockIdx.x), b = static_cast<int>(blockIdx.z);
  int head = static_cast<int>(blockIdx.y), row_block = 0;
  if (grid.row_blocks > 1) {
    row_block = grid.row_blocks - 1 - head / static_cast<int>(args.kv_heads);
    head %= static_cast<int>(args.kv_heads);
  }
  const int heads_per_kv = grid.rows.heads;
  const int first_row = row_block * kRows;
  if (grid.cluster > 1) cluster_arrive();  // awaited before anything is sent to another block
  wait_for_previous_kernel();
  const Sequence s = sequence_of(args, b);
  const int row_count = s.q_count * heads_per_kv;  // of the sequence's rows for this KV head
  // Blocks of a cluster are alike in this.
  if (first_row >= row_count) {
    if (grid.cluster > 1) cluster_wait();
    return;
  }
  const int last_row = min(first_row + kRows, row_count) - 1;
  const KeyRange first_sees =
      grid.window.seen(s, grid.rows.query_of(first_row), grid.rows.query_of(first_row));
  const KeyRange last_sees =
      grid.window.seen(s, grid.rows.query_of(last_row), grid.rows.query_of(last_row));
  const KeyRange keys = {min(first_sees.begin, last_sees.end), last_sees.end};

  // ---- Q^T as columns, of row first_row + 8 t + group what this lane multiplies; and scales.
  // Asked for now, needed when the first keys are there.
  uint32_t q[kTiles][kSteps][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    const int row = min(first_row + 8 * t + group, last_row), query = grid.rows.query_of(row);
    const Q* const from = static_cast<const Q*>(args.q.data) +
                          (args.cu_seqlens_q == nullptr ? b * args.q.batch_stride : 0) +
                          (s.q_begin + query) * args.q.row_stride +
                          (head * heads_per_kv + row - query * heads_per_kv) * args.q.head_stride;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      // FP8: four codes that follow each other are a lane's share of both halves of K.
      const int at0 = step * 16 + (Shape::kFp8 ? 4 * quad : 2 * quad);
      const int at1 = Shape::kFp8 ? at0 + 2 : at0 + 8;
      q[t][step][0] = at0 < args.head_dim ? *reinterpret_cast<const uint32_t*>(from + at0) : 0;
      q[t][step][1] = at1 < args.head_dim ? *reinterpret_cast<const uint32_t*>(from + at1) : 0;
    }
  }
  const float k_descale = k_descale_of(args, b, head);
  const float v_descale = v_descale_of(args, b, head);

  // ---- The block's part of the keys, in whole tiles from the first that is seen on.
  const int tiles_begin = keys.begin / kKeys, tiles_end = (keys.end + kKeys - 1) / kKeys;
  const int tiles = max(tiles_end - tiles_begin, 0);
  const int tiles_a_part = (tiles + grid.parts - 1) / grid.parts;
  const int begin = tiles_begin + min(part * tiles_a_part, tiles);
  const int end = tiles_begin + min((part + 1) * tiles_a_part, tiles);

  const int stages = grid.stages;
  const uint32_t ring = pinned_address(shared) + warp * stages * 2 * Shape::kTileBytes;
  TileCopies<Shape> copies(args, s, head, keys);

  // ---- First tiles on their way
  int next = begin + warp;
#pragma unroll 1
  for (int stage = 0; stage < stages - 1; ++stage) {
    if (next < end) {
      const uint32_t at = ring + stage * 2 * Shape::kTileBytes;
      copies.look_up(next * kKeys);
      copies.start(next * kKeys, at, at + Shape::kTileBytes);
    }
    next += Shape::kWarps;
    copies_commit();
  }
  if (next < end) copies.look_up(next * kKeys);

  // ---- Of FP8 keys, queries as float16: each row divided by a power of two, its largest element
  // then lies in [2^13, 2^14)
  const bool capped = args.softcap > 0;
  const float factor = k_descale * args.scale * (capped ? 1.0f / args.softcap : kLog2E);
  float row_scale[kTiles];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    row_scale[t] = factor;
    if constexpr (Shape::kFp8 && !std::is_same<Q, __half>::value) {
      __nv_bfloat162 most = __float2bfloat162_rn(0.0f);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          most =
              __hmax2(most, __habs2(*reinterpret_cast<const __nv_bfloat162*>(&q[t][step][half])));
        }
      }
      float largest = fmaxf(__low2float(most), __high2float(most));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
      largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
      const uint32_t exponent = exponent_for_halves(largest);
      const float inverse = __uint_as_float((254 - exponent) << 23);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 pair =
              __bfloat1622float2(*reinterpret_cast<const __nv_bfloat162*>(&q[t][step][half]));
          q[t][step][half] = pack<__half>(pair.x * inverse, pair.y * inverse);
        }
      }
      row_scale[t] *= __uint_as_float(exponent << 23);
    }
  }

  // ---- The lane's columns of S^T: rows first_row + 8 t + 2 quad + {0, 1}, and what they see
  float scale[kTiles][2];
  KeyRange sees[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      scale[t][c] = __shfl_sync(~0u, row_scale[t], (2 * quad + c) * 4);
      const int query = grid.rows.query_of(min(first_row + 8 * t + 2 * quad + c, last_row));
      sees[t][c] = grid.window.seen(s, query, query);
    }
  }
  const int all_begin = last_sees.begin, all_end = first_sees.end;  // that every row sees
  const float cap = args.softcap * kLog2E;

  float maximum[kTiles][2], sum[kTiles][2];
  float out[kTiles][kSteps][4];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
    maximum[t][0] = maximum[t][1] = -kInfinity;
    sum[t][0] = sum[t][1] = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) out[t][i][j] = 0;
    }
  }

  // A lane's row and vector for ldmatrix: matrices of keys 0-7 and 8-15, then the next 16 bytes.
  const uint32_t k_lane = static_cast<uint32_t>((lane % 16) * kPitch + lane / 16 * 16);
  // Transposed: of 16-bit values keys 0-7 of two vectors, then keys 8-15; of FP8 as K.
  const uint32_t v_lane =
      Shape::kFp8 ? k_lane
                  : static_cast<uint32_t>((lane / 16 * 8 + lane % 8) * kPitch + lane / 8 % 2 * 16);

  int stage = 0, filled = stages - 1;
  for (int tile = begin + warp; tile < end; tile += Shape::kWarps) {
    if (stages == 2) {
      copies_wait<0>();
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
    if (next < end) copies.look_up(next * kKeys);
    filled = filled + 1 == stages ? 0 : filled + 1;
    const uint32_t k_at = ring + stage * 2 * Shape::kTileBytes + k_lane;
    const uint32_t v_at = ring + stage * 2 * Shape::kTileBytes + Shape::kTileBytes + v_lane;
    stage = stage + 1 == stages ? 0 : stage + 1;

#pragma unroll
    for (int half = 0; half < kKeys / 16; ++half) {
      // ---- S^T of 16 keys, in two sums: an instruction waits for the one that it adds to
      float scores[kTiles][4] = {}, others[kTiles][4] = {};
      constexpr int kLoads = Shape::kRowBytes / 32;
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        uint32_t words[4];
        load_matrices(words, k_at + half * 16 * kPitch + load * 32);
        if constexpr (Shape::kFp8) {
          uint32_t a[2][4];
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            halves_from_fp8(words[2 * i], a[i][0], a[i][2]);
            halves_from_fp8(words[2 * i + 1], a[i][1], a[i][3]);
          }
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            multiply_16x8<Mma>(scores[t], a[0], q[t][2 * load][0], q[t][2 * load][1]);
            multiply_16x8<Mma>(others[t], a[1], q[t][2 * load + 1][0], q[t][2 * load + 1][1]);
          }
        } else {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            multiply_16x8<Mma>(load % 2 == 0 ? scores[t] : others[t], words, q[t][load][0],
                               q[t][load][1]);
          }
        }
      }

      // ---- P^T = exp2(S^T - maximum). Sums are moved to a new maximum only where one has grown by
      // 2^8 since, so that most tiles ask each other nothing but that.
      const int first_key = tile * kKeys + half * 16;
      const bool all_seen = first_key >= all_begin && first_key + 16 <= all_end;
      uint32_t p[kTiles][2];
      bool grows = false;
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int c = i % 2, at = first_key + group + i / 2 * 8;
          float score = (scores[t][i] + others[t][i]) * scale[t][c];
          if (capped) score = cap * tanhf(score);
          if (!all_seen && (at < sees[t][c].begin || at >= sees[t][c].end)) score = -kInfinity;
          scores[t][i] = score;
          grows = grows || score > maximum[t][c] + 8;
        }
      }
      if (__any_sync(~0u, grows)) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          float by[2];
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            float most = fmaxf(scores[t][c], scores[t][c + 2]);
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 4));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 8));
            most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
            most = fmaxf(most, maximum[t][c]);
            by[c] = most == -kInfinity ? 1.0f : fast_exp2(maximum[t][c] - most);
            maximum[t][c] = most;
            sum[t][c] *= by[c];
          }
#pragma unroll
          for (int i = 0; i < kSteps; ++i) {
#pragma unroll
            for (int j = 0; j < 4; ++j) out[t][i][j] *= by[j % 2];
          }
        }
      }
#pragma unroll
      for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          // A row that has seen nothing yet: of -inf - -inf.
          const float most = fmaxf(maximum[t][i % 2], -3e38f);
          scores[t][i] = fast_exp2(scores[t][i] - most);
          sum[t][i % 2] += scores[t][i];
        }
        p[t][0] = transpose_matrix(pack<Mma>(scores[t][0], scores[t][1]));
        p[t][1] = transpose_matrix(pack<Mma>(scores[t][2], scores[t][3]));
      }

      // ---- O^T
#pragma unroll
      for (int load = 0; load < kLoads; ++load) {
        uint32_t words[4];
        load_transposed(words, v_at + half * 16 * kPitch + load * 32);
        if constexpr (Shape::kFp8) {
          // Words hold elements 2 group and 2 group + 1 of two keys: rows `group` and group + 8.
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            uint32_t a[4];
            halves_from_fp8(__byte_perm(words[2 * i], 0, 0x3120), a[0], a[1]);
            halves_from_fp8(__byte_perm(words[2 * i + 1], 0, 0x3120), a[2], a[3]);
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
              multiply_16x8<Mma>(out[t][2 * load + i], a, p[t][0], p[t][1]);
            }
          }
        } else {
#pragma unroll
          for (int t = 0; t < kTiles; ++t) {
            multiply_16x8<Mma>(out[t][load], words, p[t][0], p[t][1]);
          }
        }
      }
    }
  }

  // Not before: blocks of the next kernel that wait for this one would take places of its own.
  allow_next_kernel();

  // ---- The warps' sums meet
  constexpr int kOutPitch = Shape::kOutPitch;
  copies_wait<0>();
  __syncthreads();
  float* const sums = reinterpret_cast<float*>(shared);            // [warps][kRows][kOutPitch]
  float* const maxima = sums + Shape::kWarps * kRows * kOutPitch;  // [warps][kRows]
  float* const totals = maxima + Shape::kWarps * kRows;
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float total = sum[t][c];
      total += __shfl_xor_sync(~0u, total, 4);
      total += __shfl_xor_sync(~0u, total, 8);
      total += __shfl_xor_sync(~0u, total, 16);
      const int row = 8 * t + 2 * quad + c;
      if (group == 0) {
        maxima[warp * kRows + row] = maximum[t][c];
        totals[warp * kRows + row] = total;
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        float* const to = sums + (warp * kRows + row) * kOutPitch + i * 16;
        if constexpr (Shape::kFp8) {
          to[2 * group] = out[t][i][c];
          to[2 * group + 1] = out[t][i][2 + c];
        } else {
          to[group] = out[t][i][c];
          to[group + 8] = out[t][i][2 + c];
        }
      }
    }
  }
  __syncthreads();
  // ---- The blocks' sums meet: a block owns kD / cluster columns. Each sends every other its sums
  // of their columns, finishes its own, and may leave once all have sent.
  const int cluster = grid.cluster, rank = cluster > 1 ? cluster_rank() : 0;
  const int here = last_row - first_row + 1, own = kD / cluster;
  float* const sent = reinterpret_cast<float*>(shared + grid.ring_bytes);  // [cluster][rows][own]
  float* const sent_maxima = sent + kRows * kD;                            // [cluster][kRows]
  float* const sent_totals = sent_maxima + kMaxCluster * kRows;            // [cluster][kRows]
  if (cluster > 1) cluster_wait();
  constexpr int kRowsAtOnce = kD < Shape::kThreads ? Shape::kThreads / kD : 1;
  const int thread = static_cast<int>(threadIdx.x);
  for (int column = thread % (kRowsAtOnce * kD) % kD; column < kD && thread < kRowsAtOnce * kD;
       column += Shape::kThreads) {
    const int owner = column / own, its_column = column - owner * own;
    for (int row = thread / kD % kRowsAtOnce; row < here; row += kRowsAtOnce) {
      float most = -kInfinity, total = 0, value = 0;
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) most = fmaxf(most, maxima[w * kRows + row]);
      const float from = fmaxf(most, -3e38f);
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) {
        const float by = fast_exp2(maxima[w * kRows + row] - from);
        total += by * totals[w * kRows + row];
        value += by * sums[(w * kRows + row) * kOutPitch + column];
      }
      float& to = sent[(rank * kRows + row) * own + its_column];
      if (cluster == 1) {
        to = value;
        if (column == 0) {
          sent_maxima[row] = most;
          sent_totals[row] = total;
        }
      } else {
        rocm_kernels::store_in_cluster(to, value, owner);
        if (its_column == 0) {
          rocm_kernels::store_in_cluster(sent_maxima[rank * kRows + row], most, owner);
          rocm_kernels::store_in_cluster(sent_totals[rank * kRows + row], total, owner);
        }
      }
    }
  }
  if (cluster > 1) {
    cluster_arrive();
    cluster_wait();
  } else {
    __syncthreads();
  }
  const int outer = grid.parts / cluster;
  for (int at = thread; at < here * own; at += Shape::kThreads) {
    const int row = at / own, its_column = at - row * own, column = rank * own + its_column;
    float most = -kInfinity, total = 0, value = 0;
    for (int other = 0; other < cluster; ++other) {
      most = fmaxf(most, sent_maxima[other * kRows + row]);
    }
    const float from = fmaxf(most, -3e38f);
    for (int other = 0; other < cluster; ++other) {
      const float by = fast_exp2(sent_maxima[other * kRows + row] - from);
      total += by * sent_totals[other * kRows + row];
      value += by * sent[(other * kRows + row) * own + its_column];
    }
    const int q_row = grid.rows.query_of(first_row + row);
    const int q_head = head * heads_per_kv + first_row + row - q_row * heads_per_kv;
    if (outer > 1) {
      const int64_t rows = args.cu_seqlens_q == nullptr ? b * args.max_seqlen_q : 0;
      float* const to =
          grid.partial +
          (((rows + s.q_begin + q_row) * args.heads + q_head) * outer + part / cluster) * (kD + 2);
      to[column] = value;
      if (column == 0) {
        to[kD] = most;
        to[kD + 1] = total;
      }
    } else if (column < args.head_dim_v) {
      finish_element<Q>(args, b, s.q_begin, q_row, q_head, column, most, total, value, v_descale);
    }
  }
}

}  // namespace cuda
}  // namespace rocm_kernels
