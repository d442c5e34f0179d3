// The instances of the resident kernels (resident.cuh), and their launch.
#include "../../common/cuda/tensor_map.h"
#include "launch_resident.h"
#include "resident.cuh"

namespace rocm_kernels {
namespace cuda {
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

Status launch_resident(const ResidentLaunch& call, Stream stream) {
  const GroupedProblem& p = call.product;
  const ResidentShape& shape = call.shape;
  const StackOfBytes weights = {p.w.data, call.slots.experts, p.n,
                                p.k,      p.w.row_stride,     p.w.expert_stride};
  CUtensorMap w_map;
  if (const Status error = make_stack_map(w_map, weights, shape.block_n / 2, shape.row_bytes())) {
    return error;
  }
  const int32_t tiles_n = (p.n + shape.block_n - 1) / shape.block_n;
  const int64_t most_tiles = most_row_tiles(call.slots.slots, call.slots.experts, kResidentBlockM);
  const int64_t most_blocks = 2 * int64_t{call.sm_count};
  const bool is_down = call.end == GroupedEnd::kDown;
  const int32_t cluster = is_down ? resident_cluster(most_tiles, tiles_n, call.sm_count) : 1;
  const int64_t blocks = tiles_n * (is_down ? cluster : most_tiles);
  const bool aligned = rows_aligned(p.a, p.a_stride, size_of(p.a_dtype), 16);
  const ResidentProblem s = {p,
                             call.slots.ids,
                             call.slots.weights,
                             call.slots.slots,
                             call.slots.experts,
                             shape,
                             call.num_stages,
                             tiles_n,
                             call.walked,
                             cluster,
                             aligned};
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(blocks < most_blocks ? blocks : most_blocks));
  launch.block = kResidentThreads;
  launch.stream = stream;
  launch.shared_bytes = call.num_stages * shape.stage_bytes() + shape.other_bytes();
  launch.cluster = cluster;
  launch.early = true;
  return launch_kernel(kernel_of(call.end, p.a_dtype, shape.block_scales), launch, w_map, s);
}

}  // namespace cuda
}  // namespace rocm_kernels
