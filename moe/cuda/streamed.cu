// The instances of the streamed kernel (streamed.cuh), and their launch.
#include "../../common/cuda/tensor_map.h"
#include "launches.h"
#include "streamed.cuh"

namespace rocm_kernels {
namespace cuda::moe {
namespace {

using Kernel = void (*)(CUtensorMap, StreamedProblem);

template <class Types, int kBlockM, bool kBlockScales>
Kernel kernel_of(GroupedEnd end) {
  return end == GroupedEnd::kGateUp ? moe_streamed_kernel<Types, kBlockM, true, kBlockScales>
                                    : moe_streamed_kernel<Types, kBlockM, false, kBlockScales>;
}

// Up to 16 rows one kernel serves, which skips the tiles of 8 that have none.
template <class Types, bool kBlockScales>
Kernel kernel_of(GroupedEnd end, int block_m) {
  return block_m <= 16 ? kernel_of<Types, 16, kBlockScales>(end)
                       : kernel_of<Types, kStreamedMaxM, kBlockScales>(end);
}

template <DType kA>
Kernel kernel_of_fp8(GroupedEnd end, int block_m, bool block_scales) {
  using Types = GroupedTypes<kA, DType::kFloat8E4M3FN>;
  return block_scales ? kernel_of<Types, true>(end, block_m)
                      : kernel_of<Types, false>(end, block_m);
}

Kernel kernel_of(GroupedEnd end, const GroupedProblem& p, int block_m, bool block_scales) {
  constexpr DType kHalf = DType::kFloat16, kBrain = DType::kBFloat16;
  if (p.w.dtype == DType::kFloat4E2M1x2) return kernel_of<Mxfp4Types, false>(end, block_m);
  if (p.a_dtype == DType::kFloat8E4M3FN) {
    return kernel_of_fp8<DType::kFloat8E4M3FN>(end, block_m, block_scales);
  }
  if (p.a_dtype == kHalf) {
    return is_fp8(p.w.dtype) ? kernel_of_fp8<kHalf>(end, block_m, block_scales)
                             : kernel_of<GroupedTypes<kHalf, kHalf>, false>(end, block_m);
  }
  return is_fp8(p.w.dtype) ? kernel_of_fp8<kBrain>(end, block_m, block_scales)
                           : kernel_of<GroupedTypes<kBrain, kBrain>, false>(end, block_m);
}

}  // namespace

Status launch_streamed(const ProductLaunch& call, Stream stream) {
  const GroupedProblem& p = call.product;
  const SlotIds& slots = call.slots;
  const StreamedStage stage =
      streamed_stage(call.config, p.a_dtype, p.w.dtype, p.k, p.w.scale.is_blocked());
  const int32_t num_stages = streamed_stages(stage, slots.slots, call.device);
  const int64_t packed = p.w.dtype == DType::kFloat4E2M1x2 ? 2 : 1;
  const int64_t bytes = size_of(p.w.dtype);
  const StackOfBytes weights = {p.w.data,
                                slots.experts,
                                p.n,
                                p.k / packed * bytes,
                                p.w.row_stride * bytes,
                                p.w.expert_stride * bytes};
  CUtensorMap w_map;
  if (const Status error = make_stack_map(w_map, weights, stage.block_n / 2, stage.row_bytes())) {
    return error;
  }
  const int32_t tiles_n = (p.n + stage.block_n - 1) / stage.block_n;
  const StreamedProblem s = {p,          {slots.ids, slots.slots, slots.experts, stage.block_m},
                             stage,      num_stages,
                             tiles_n,    call.config.walked(),
                             slots.first};
  const int64_t most = most_row_tiles(slots.slots, slots.experts, stage.block_m) * tiles_n;
  const int64_t blocks = int64_t{call.device.sm_count} * streamed_blocks_per_sm(stage.block_m);
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(most < blocks ? most : blocks));
  launch.block = kStreamedThreads;
  launch.stream = stream;
  launch.shared_bytes = streamed_shared_bytes(stage, num_stages, slots.slots);
  launch.early = true;
  return launch_kernel(kernel_of(call.end, p, stage.block_m, stage.block_scales), launch, w_map, s);
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
