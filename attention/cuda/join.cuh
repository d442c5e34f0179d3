// The sums of parts of the keys that met in memory (prefill.cuh, `outer`), joined and finished.
#pragma once

#include "../../common/core/math.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/launch.h"
#include "../gpu/problem.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kJoinThreads = 128;

// Joins the parts that met in memory. Grid: rows of q times heads, then head_dim_v / 128. A thread
// has a column; a lane knows two parts' maxima and sums, so that the loads of all parts are under
// way at once: one behind the other, 32 parts of 512 columns took 90 us.
template <typename Q>
__global__ void __launch_bounds__(kJoinThreads)
    attention_join(const __grid_constant__ AttentionArgs args, const float* partial, int outer,
                   int columns) {
  static_assert(kMaxOuter <= 64, "a lane has two parts");
  allow_next_kernel();
  wait_for_previous_kernel();
  const int64_t item = blockIdx.x;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int column = static_cast<int>(blockIdx.y) * kJoinThreads + static_cast<int>(threadIdx.x);
  const int64_t row = item / args.heads;
  const int head = static_cast<int>(item % args.heads);
  int b = 0, q_begin = 0, q_row = 0;
  if (args.cu_seqlens_q == nullptr) {
    b = static_cast<int>(row / args.max_seqlen_q);
    q_row = static_cast<int>(row % args.max_seqlen_q);
  } else {
    // Rows of no sequence: out has them as they were.
    if (row < args.cu_seqlens_q[0] || row >= args.cu_seqlens_q[args.batch]) return;
    while (row >= args.cu_seqlens_q[b + 1]) ++b;
    q_begin = args.cu_seqlens_q[b];
    q_row = static_cast<int>(row - q_begin);
  }
  const float* const from = partial + item * outer * (columns + 2);
  float its_most[2], by[2], its_total[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int part = half * 32 + lane;
    its_most[half] = part < outer ? from[part * (columns + 2) + columns] : -kInfinity;
    its_total[half] = part < outer ? from[part * (columns + 2) + columns + 1] : 0.0f;
  }
  float most = fmaxf(its_most[0], its_most[1]);
  for (int mask = 16; mask > 0; mask /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, mask));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // A part without keys counts nothing. One whose scores are all NaN has no maximum either.
    by[half] = its_total[half] == 0.0f ? 0.0f : fast_exp2(its_most[half] - most);
    its_total[half] *= by[half];
  }
  const bool exists = column < args.head_dim_v;
  float total = 0, value = 0;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int parts = min(32, outer - half * 32);
#pragma unroll 8
    for (int lane_of = 0; lane_of < parts; ++lane_of) {
      const float weight = __shfl_sync(~0u, by[half], lane_of);
      total += __shfl_sync(~0u, its_total[half], lane_of);
      if (exists && weight != 0.0f) {
        value += weight * from[(half * 32 + lane_of) * (columns + 2) + column];
      }
    }
  }
  if (!exists) return;
  const int kv_head = head / static_cast<int>(args.heads / args.kv_heads);
  finish_element<Q>(args, b, q_begin, q_row, head, column, most, total, value,
                    v_descale_of(args, b, kv_head));
}

// Host: its launch, behind the kernel that left `outer` parts of so many columns.
template <typename Q>
Status launch_join(const AttentionArgs& args, const float* partial, int32_t outer, int32_t columns,
                   bool early, Stream stream) {
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(args.total_q * args.heads),
                     static_cast<unsigned>(ceil_div(args.head_dim_v, kJoinThreads)));
  launch.block = kJoinThreads;
  launch.stream = stream;
  launch.early = early;
  return launch_kernel(attention_join<Q>, launch, args, partial, outer, columns);
}

}  // namespace cuda
}  // namespace rocm_kernels
