// The sums of parts of the keys that met in memory (decode.cuh, `outer`), joined and finished.
#pragma once

#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/launch.h"
#include "../gpu/problem.h"

namespace rocm_kernels {
namespace cuda {

// Joins the parts that met in memory: a warp a row of q and a head.
template <typename Q>
__global__ void __launch_bounds__(128)
    attention_join(const __grid_constant__ AttentionArgs args, const float* partial, int outer,
                   int columns) {
  allow_next_kernel();
  wait_for_previous_kernel();
  const int64_t item = int64_t{blockIdx.x} * 4 + threadIdx.x / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  if (item >= args.total_q * args.heads) return;
  const int64_t row = item / args.heads;
  const int head = static_cast<int>(item % args.heads);
  int b = 0, q_begin = 0, q_row = 0;
  if (args.cu_seqlens_q == nullptr) {
    b = static_cast<int>(row / args.max_seqlen_q);
    q_row = static_cast<int>(row % args.max_seqlen_q);
  } else {
    if (row >= args.cu_seqlens_q[args.batch]) return;
    while (row >= args.cu_seqlens_q[b + 1]) ++b;
    q_begin = args.cu_seqlens_q[b];
    q_row = static_cast<int>(row - q_begin);
  }
  const int kv_head = head / static_cast<int>(args.heads / args.kv_heads);
  const float v_descale = v_descale_of(args, b, kv_head);
  const float* const from = partial + item * outer * (columns + 2);
  float most = -kInfinity;
  for (int part = 0; part < outer; ++part) most = fmaxf(most, from[part * (columns + 2) + columns]);
  for (int column = lane; column < args.head_dim_v; column += 32) {
    float total = 0, value = 0;
    if (most > -kInfinity) {
      for (int part = 0; part < outer; ++part) {
        const float* const its = from + part * (columns + 2);
        const float by = fast_exp2(its[columns] - most);
        total += by * its[columns + 1];
        value += by * its[column];
      }
    }
    finish_element<Q>(args, b, q_begin, q_row, head, column, most, total, value, v_descale);
  }
}

// Host: its launch, behind the kernel that left `outer` parts of so many columns.
template <typename Q>
Status launch_join(const AttentionArgs& args, const float* partial, int32_t outer, int32_t columns,
                   bool early, Stream stream) {
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>((args.total_q * args.heads + 3) / 4));
  launch.block = 128;
  launch.stream = stream;
  launch.early = early;
  return launch_kernel(attention_join<Q>, launch, args, partial, outer, columns);
}

}  // namespace cuda
}  // namespace rocm_kernels
