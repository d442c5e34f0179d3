// The instances of the resident kernels (resident.cuh), and their launch.
#include <algorithm>

#include "../../common/cuda/tensor_map.h"
#include "launches.h"
#include "resident.cuh"

namespace rocm_kernels {
namespace cuda::moe {
namespace {

using Kernel = void (*)(CUtensorMap, ResidentProblem);

template <typename T, bool kGateUp>
Kernel kernel_of(bool block_scales) {
  return block_scales ? moe_resident_kernel<T, kGateUp, true>
                      : moe_resident_kernel<T, kGateUp, false>;
}

Kernel kernel_of(GroupedEnd end, DType a, bool block_scales) {
  if (end == GroupedEnd::kDown) return kernel_of<float, false>(block_scales);
  return a == DType::kFloat16 ? kernel_of<float16, true>(block_scales)
                              : kernel_of<bfloat16, true>(block_scales);
}

}  // namespace

Status launch_resident(const ProductLaunch& call, Stream stream) {
  const GroupedProblem& p = call.product;
  const bool is_down = call.end == GroupedEnd::kDown, halves = !is_down && !p.interleaved;
  const int32_t columns_n = p.n / kResidentBlockN, sm_count = call.device.sm_count;
  const int32_t slots = call.slots.slots;
  const ResidentSplit split =
      resident_split(is_down, most_row_tiles(slots, call.slots.experts, kResidentBlockM), columns_n,
                     p.k, sm_count);
  const ResidentShape shape =
      resident_shape(is_down, slots / p.slots_of_token, slots, p.k, p.w.scale.is_blocked(), split);
  const int32_t num_stages = resident_stages(shape, call.device);
  // A box: 8 rows of w and 8 more, the ups of the same columns or the rows behind them.
  constexpr int32_t kHalf = kResidentBlockN / 2;
  const int64_t stack_rows = halves ? p.n / 2 : p.n;
  const StackOfBytes weights = {p.w.data, call.slots.experts, stack_rows,
                                p.k,      p.w.row_stride,     p.w.expert_stride};
  CUtensorMap w_map;
  if (const Status error =
          make_runs_map(w_map, weights, 2, (halves ? stack_rows : kHalf) * p.w.row_stride, kHalf,
                        kResidentRowBytes)) {
    return error;
  }
  const int32_t cluster = split.cluster, clusters = std::min(sm_count / cluster, columns_n);
  const ResidentProblem s = {p,     call.slots.ids, call.slots.weights, slots,  call.slots.experts,
                             shape, num_stages,     columns_n,          cluster};
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(is_down ? clusters * cluster : sm_count));
  launch.block = kResidentThreads;
  launch.stream = stream;
  launch.shared_bytes = resident_shared_bytes(shape, num_stages);
  launch.cluster = cluster;
  launch.early = true;
  return launch_kernel(kernel_of(call.end, p.a_dtype, shape.block_scales), launch, w_map, s);
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
