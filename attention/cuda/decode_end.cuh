// The end of a block of the decode kernel (decode.cuh): the sums of its warps meet in shared
// memory, then those of the blocks of a cluster, which have the other parts of the keys.
#pragma once

#include "../../common/gpu/cluster.h"
#include "decode_shape.cuh"

namespace rocm_kernels {
namespace cuda {

// Where they meet: warps' sums in the place of the stages, which are read by then, and behind them
// (DecodeBlock::sent_at) what the block adds up, or the blocks of a cluster send each other.
template <class Shape>
struct DecodeMeeting {
  static constexpr int kD = Shape::kD, kTiles = Shape::kTiles, kRows = Shape::kRows;
  static constexpr int kOutPitch = Shape::kOutPitch;

  float* sums;         // [warps][kRows][kOutPitch]
  float* maxima;       // [warps][kRows]
  float* totals;       // [warps][kRows]
  float* sent;         // [cluster][kRows][own]
  float* sent_maxima;  // [cluster][kRows]
  float* sent_totals;  // [cluster][kRows]
  int cluster, rank;
  int own;   // columns of a block of the cluster
  int here;  // rows of the block

  __device__ __forceinline__ DecodeMeeting(char* shared, int sent_at, int cluster, int here)
      : sums(reinterpret_cast<float*>(shared)),
        maxima(sums + Shape::kWarps * kRows * kOutPitch),
        totals(maxima + Shape::kWarps * kRows),
        sent(reinterpret_cast<float*>(shared + sent_at)),
        sent_maxima(sent + kRows * kD),
        sent_totals(sent_maxima + kMaxCluster * kRows),
        cluster(cluster),
        rank(cluster > 1 ? cluster_rank() : 0),
        own(kD / cluster),
        here(here) {}

  // A warp leaves its sums.
  __device__ __forceinline__ void leave_sums(const DecodeSums<Shape>& its, int warp, int group,
                                             int quad) const {
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float total = its.sum[t][c];
        total += __shfl_xor_sync(~0u, total, 4);
        total += __shfl_xor_sync(~0u, total, 8);
        total += __shfl_xor_sync(~0u, total, 16);
        const int row = 8 * t + 2 * quad + c;
        if (group == 0) {
          maxima[warp * kRows + row] = its.maximum[t][c];
          totals[warp * kRows + row] = total;
        }
#pragma unroll
        for (int i = 0; i < Shape::kSteps; ++i) {
          float* const to = sums + (warp * kRows + row) * kOutPitch + i * 16;
          if constexpr (Shape::kFp8) {
            to[2 * group] = its.out[t][i][c];
            to[2 * group + 1] = its.out[t][i][2 + c];
          } else {
            to[group] = its.out[t][i][c];
            to[group + 8] = its.out[t][i][2 + c];
          }
        }
      }
    }
  }

  // The block adds up its warps' sums, and sends each other block those of the columns that it
  // owns.
  __device__ __forceinline__ void send_sums() const {
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
          store_in_cluster(to, value, owner);
          if (its_column == 0) {
            store_in_cluster(sent_maxima[rank * kRows + row], most, owner);
            store_in_cluster(sent_totals[rank * kRows + row], total, owner);
          }
        }
      }
    }
  }

  // The block finishes its columns from what all have sent; where other clusters have parts of the
  // keys, it leaves them in memory instead (join.cuh).
  __device__ __forceinline__ void finish_outputs(const AttentionArgs& args, const DecodeGrid& grid,
                                                 const DecodeRows& rows, int part,
                                                 float v_descale) const {
    const int outer = grid.parts / cluster;
    for (int at = static_cast<int>(threadIdx.x); at < here * own; at += Shape::kThreads) {
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
      const int heads_per_kv = grid.rows.heads;
      const int q_row = grid.rows.query_of(rows.first + row);
      const int q_head = rows.head * heads_per_kv + rows.first + row - q_row * heads_per_kv;
      if (outer > 1) {
        const int64_t before = args.cu_seqlens_q == nullptr ? rows.b * args.max_seqlen_q : 0;
        float* const to =
            grid.partial +
            (((before + rows.s.q_begin + q_row) * args.heads + q_head) * outer + part / cluster) *
                (kD + 2);
        to[column] = value;
        if (column == 0) {
          to[kD] = most;
          to[kD + 1] = total;
        }
      } else if (column < args.head_dim_v) {
        finish_element<typename Shape::Q>(args, rows.b, rows.s.q_begin, q_row, q_head, column, most,
                                          total, value, v_descale);
      }
    }
  }
};

}  // namespace cuda
}  // namespace rocm_kernels
