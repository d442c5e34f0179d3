// The end of a block of the decode kernel (decode.cuh): the sums of its warps meet in shared
// memory, then those of the blocks of a cluster, which have the other parts of the keys, then in
// memory those of other clusters that have parts of the same keys.
#pragma once

#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"
#include "../../common/gpu/cluster.h"
#include "decode_shape.cuh"

namespace rocm_kernels {
namespace cuda {

template <int kCount>
__device__ __forceinline__ void load_floats(const float* from, float (&values)[kCount]) {
  static_assert(kCount == 2 || kCount == 4, "");
  if constexpr (kCount == 2) {
    const float2 both = *reinterpret_cast<const float2*>(from);
    values[0] = both.x, values[1] = both.y;
  } else {
    const float4 all = *reinterpret_cast<const float4*>(from);
    values[0] = all.x, values[1] = all.y, values[2] = all.z, values[3] = all.w;
  }
}
// To block `rank` of the cluster, which learns of it at `barrier`.
template <int kCount>
__device__ __forceinline__ void send_floats(const float* place, const float (&values)[kCount],
                                            uint32_t barrier, int rank) {
  static_assert(kCount == 2 || kCount == 4, "");
#if __CUDA_ARCH__ >= 900
  if constexpr (kCount == 2) {
    store_async_in_cluster(shared_address(place), make_float2(values[0], values[1]), barrier, rank);
  } else {
    store_async_in_cluster(shared_address(place),
                           make_float4(values[0], values[1], values[2], values[3]), barrier, rank);
  }
#endif
}

// Sums of kValues columns of a row over some keys: of P and P V, on the scale of `most` (log2).
template <int kValues>
struct JoinedSums {
  float most = -kInfinity, total = 0, values[kValues] = {};

  // Takes in those over other keys, in their order. Where there are no keys all else is 0.
  template <int kCount>
  __device__ __forceinline__ void add(const float (&its_most)[kCount],
                                      const float (&its_total)[kCount],
                                      const float (&its_values)[kCount][kValues]) {
    float all = most;
#pragma unroll
    for (int i = 0; i < kCount; ++i) all = fmaxf(all, its_most[i]);
    const float from = fmaxf(all, -3e38f);  // not -inf - -inf
    const float by = fast_exp2(most - from);
    total *= by;
#pragma unroll
    for (int j = 0; j < kValues; ++j) values[j] *= by;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const float its_by = fast_exp2(its_most[i] - from);
      total += its_by * its_total[i];
#pragma unroll
      for (int j = 0; j < kValues; ++j) values[j] += its_by * its_values[i][j];
    }
    most = all;
  }
};

__device__ __forceinline__ void leave_word(DecodeWord* to, float first, float second,
                                           uint64_t launch) {
  const uint64_t pair =
      static_cast<uint64_t>(__float_as_uint(second)) << 32 | __float_as_uint(first);
  asm volatile(
      "{\n"
      ".reg .b128 word;\n"
      "mov.b128 word, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], word;\n"
      "}\n" ::"l"(to),
      "l"(pair), "l"(launch)
      : "memory");
}

// Waits for `count` words, kStep apart, that this launch has left; the rest of kCount are 0.
template <int kCount>
__device__ __forceinline__ void await_words(const DecodeWord* from, int step, int count,
                                            uint64_t launch, float (&first)[kCount],
                                            float (&second)[kCount]) {
  for (bool there = false; !there;) {
    there = true;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      uint64_t pair = 0, found = launch;
      if (i < count) {
        asm volatile(
            "{\n"
            ".reg .b128 word;\n"
            "ld.relaxed.gpu.global.b128 word, [%2];\n"
            "mov.b128 {%0, %1}, word;\n"
            "}\n"
            : "=l"(pair), "=l"(found)
            : "l"(from + i * step)
            : "memory");
      }
      there = there && found == launch;
      first[i] = __uint_as_float(static_cast<uint32_t>(pair));
      second[i] = __uint_as_float(static_cast<uint32_t>(pair >> 32));
    }
  }
}

// Where they meet: warps' sums in the place of the stages, which are read by then, and behind them
// (DecodeBlock::sent_at) what the block adds up, or the blocks of a cluster send each other.
template <class Shape>
struct DecodeMeeting {
  static constexpr int kD = Shape::kD, kTiles = Shape::kTiles, kRows = Shape::kRows;
  static constexpr int kOutPitch = Shape::kOutPitch;

  float* sums;       // [warps][kRows][kOutPitch]
  float* maxima;     // [warps][kRows]
  float* totals;     // [warps][kRows]
  float* sent;       // [cluster][kRows][own]
  float* sent_rows;  // [cluster][kRows]: maximum and sum
  int cluster, rank;
  int own;   // columns of a block of the cluster
  int here;  // rows of the block

  __device__ __forceinline__ DecodeMeeting(char* shared, int sent_at, int cluster, int here)
      : sums(reinterpret_cast<float*>(shared)),
        maxima(sums + Shape::kWarps * kRows * kOutPitch),
        totals(maxima + Shape::kWarps * kRows),
        sent(reinterpret_cast<float*>(shared + sent_at)),
        sent_rows(sent + kRows * kD),
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
          maxima[warp * kRows + row] = total == 0 ? -kInfinity : its.maximum[t][c];
          totals[warp * kRows + row] = total;
        }
#pragma unroll
        for (int i = 0; i < Shape::kSteps; ++i) {
          float* const to = sums + (warp * kRows + row) * kOutPitch + i * 16;
          if constexpr (Shape::kFp8) {
            *reinterpret_cast<float2*>(to + 2 * group) =
                make_float2(its.out[t][i][c], its.out[t][i][2 + c]);
          } else {
            to[group] = its.out[t][i][c];
            to[group + 8] = its.out[t][i][2 + c];
          }
        }
      }
    }
  }

  // One thread, before it arrives at the cluster's barrier.
  static __device__ __forceinline__ void init_barrier(const char* shared, int sent_at) {
#if __CUDA_ARCH__ >= 900
    mbarrier_init(shared_address(shared + sent_at) - kSentBarrierBytes, 1);
    fence_mbarrier_init();
#endif
  }
  // One thread: what the block is to be sent. Some of it may be there already.
  __device__ __forceinline__ void expect_sums() const {
#if __CUDA_ARCH__ >= 900
    mbarrier_arrive_expect(barrier(), static_cast<uint32_t>(cluster * here * (own + 2) * 4));
#endif
  }
  __device__ __forceinline__ void await_sums() const {
#if __CUDA_ARCH__ >= 900
    mbarrier_wait_for_cluster(barrier(), 0);
#endif
  }

  // The block adds up its warps' sums, and sends each other block those of the columns that it
  // owns.
  __device__ __forceinline__ void send_sums() const {
    constexpr int kVectors = kD / kSent;
    for (int at = static_cast<int>(threadIdx.x); at < here * kVectors; at += Shape::kThreads) {
      const int row = at / kVectors, column = at % kVectors * kSent;
      float most[Shape::kWarps], total[Shape::kWarps], values[Shape::kWarps][kSent];
#pragma unroll
      for (int w = 0; w < Shape::kWarps; ++w) {
        most[w] = maxima[w * kRows + row];
        total[w] = totals[w * kRows + row];
        load_floats<kSent>(sums + (w * kRows + row) * kOutPitch + column, values[w]);
      }
      JoinedSums<kSent> joined;
      joined.add(most, total, values);
      const int owner = owner_of(column), its_column = column - owner * own;
      float* const to = sent + (rank * kRows + row) * own + its_column;
      float* const of_row = sent_rows + (rank * kRows + row) * 2;
      const float both[2] = {joined.most, joined.total};
      if (cluster == 1) {
#pragma unroll
        for (int i = 0; i < kSent; ++i) to[i] = joined.values[i];
        if (its_column == 0) of_row[0] = both[0], of_row[1] = both[1];
      } else {
        send_floats<kSent>(to, joined.values, barrier(), owner);
        if (its_column == 0) send_floats<2>(of_row, both, barrier(), owner);
      }
    }
  }

  // The block finishes its columns from what all have sent, two a thread. Where other clusters have
  // parts of the keys, all but the last leave theirs in memory, and the last waits for them: blocks
  // begin in their order.
  __device__ __forceinline__ void finish_outputs(const AttentionArgs& args, const DecodeGrid& grid,
                                                 const DecodeRows& rows, int part,
                                                 float v_descale) const {
    constexpr int kAtOnce = 8;
    const int others = grid.parts / cluster - 1, outer_part = part / cluster;
    // Of each part a word for each row, and one for each two columns of a row.
    const int of_part = kRows * (1 + own / 2);
    const int64_t item = static_cast<int64_t>(rows.b) * gridDim.y + blockIdx.y;
    DecodeWord* const words = grid.words + (item * cluster + rank) * others * of_part;
    for (int at = static_cast<int>(threadIdx.x); at < here * own / 2; at += Shape::kThreads) {
      const int row = owner_of(2 * at), its_column = 2 * at - row * own;
      JoinedSums<2> joined;
#pragma unroll 1
      for (int first = 0; first < cluster; first += kAtOnce) {
        float most[kAtOnce], total[kAtOnce], values[kAtOnce][2];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          float both[2] = {-kInfinity, 0};
          values[i][0] = values[i][1] = 0;
          if (first + i < cluster) {
            const int from = (first + i) * kRows + row;
            load_floats<2>(sent + from * own + its_column, values[i]);
            load_floats<2>(sent_rows + from * 2, both);
          }
          most[i] = both[0], total[i] = both[1];
        }
        joined.add(most, total, values);
      }
      if (others > 0) {
        const int pair = kRows + row * (own / 2) + its_column / 2;
        if (outer_part < others) {
          DecodeWord* const its = words + outer_part * of_part;
          leave_word(its + pair, joined.values[0], joined.values[1], grid.launch);
          if (its_column == 0) leave_word(its + row, joined.most, joined.total, grid.launch);
          continue;
        }
        const float most[1] = {joined.most}, total[1] = {joined.total};
        const float values[1][2] = {{joined.values[0], joined.values[1]}};
        joined = JoinedSums<2>();
#pragma unroll 1
        for (int first = 0; first < others; first += kAtOnce) {
          const DecodeWord* const from = words + first * of_part;
          const int count = min(others - first, kAtOnce);
          float its_most[kAtOnce], its_total[kAtOnce], low[kAtOnce], high[kAtOnce];
          float its_values[kAtOnce][2];
          await_words(from + pair, of_part, count, grid.launch, low, high);
          await_words(from + row, of_part, count, grid.launch, its_most, its_total);
#pragma unroll
          for (int i = 0; i < kAtOnce; ++i) {
            its_values[i][0] = low[i], its_values[i][1] = high[i];
            if (i >= count) its_most[i] = -kInfinity;
          }
          joined.add(its_most, its_total, its_values);
        }
        joined.add(most, total, values);
      }
      const int q_row = grid.rows.query_of(rows.first + row);
      const int q_head = rows.head * grid.rows.heads + rows.first + row - q_row * grid.rows.heads;
      const int column = rank * own + its_column;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (column + i < args.head_dim_v) {
          finish_element<typename Shape::Q>(args, rows.b, rows.s.q_begin, q_row, q_head, column + i,
                                            joined.most, joined.total, joined.values[i], v_descale);
        }
      }
    }
    if (outer_part < others || others == 0) return;
    // A graph's next replay has the same name.
    __syncthreads();
    const int of_here = here * (1 + own / 2);
    for (int at = static_cast<int>(threadIdx.x); at < others * of_here; at += Shape::kThreads) {
      const int other = at / of_here, word = at - other * of_here;
      words[other * of_part + (word < here ? word : kRows - here + word)].launch = 0;
    }
  }

 private:
  static constexpr int kSent = kD % 64 == 0 ? 4 : 2;  // columns that are sent at once

  __device__ __forceinline__ uint32_t barrier() const {
    return shared_address(sent) - kSentBarrierBytes;
  }
  // column / own
  __device__ __forceinline__ int owner_of(int column) const {
    return static_cast<int>(static_cast<unsigned>(column * cluster) / kD);
  }
};

}  // namespace cuda
}  // namespace rocm_kernels
