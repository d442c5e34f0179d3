// The instances of the streamed_wgmma kernel (streamed_wgmma.cuh), and their launch.
#include "../../common/cuda/tensor_map.h"
#include "launches.h"
#include "streamed_wgmma.cuh"

namespace rocm_kernels {
namespace cuda::moe {
namespace {

using Kernel = void (*)(CUtensorMap, StreamedWgmmaProblem);

template <int kBlockM>
Kernel kernel_of(bool is_gate_up, bool block_scales) {
  if (is_gate_up) {
    return block_scales ? moe_streamed_wgmma_kernel<kBlockM, true, true>
                        : moe_streamed_wgmma_kernel<kBlockM, true, false>;
  }
  return block_scales ? moe_streamed_wgmma_kernel<kBlockM, false, true>
                      : moe_streamed_wgmma_kernel<kBlockM, false, false>;
}

Kernel kernel_of(const StreamedWgmmaStage& stage, bool is_gate_up) {
  if (stage.block_m == 8) return kernel_of<8>(is_gate_up, stage.block_scales);
  if (stage.block_m == 16) return kernel_of<16>(is_gate_up, stage.block_scales);
  return kernel_of<kStreamedMaxM>(is_gate_up, stage.block_scales);
}

}  // namespace

Status launch_streamed_wgmma(const ProductLaunch& call, Stream stream) {
  const GroupedProblem& p = call.product;
  const StreamedWgmmaStage stage = {call.config.block_m, p.w.scale.is_blocked()};
  const int32_t num_stages = streamed_wgmma_stages(stage, call.slots.slots, call.device);
  const bool is_gate_up = call.end == GroupedEnd::kGateUp;
  const bool beside = is_gate_up && p.interleaved;
  const int parts = is_gate_up ? 2 : 1;
  const int64_t row = p.w.row_stride, rows = p.n / parts;
  const StackOfBytes weights = {p.w.data, call.slots.experts,     rows,
                                p.k,      beside ? 2 * row : row, p.w.expert_stride};
  CUtensorMap w_map;
  if (const Status error = make_groups_map(w_map, weights, parts, beside ? row : rows * row,
                                           kStreamedWgmmaN / kPatternLines / parts)) {
    return error;
  }
  const int32_t tiles_n = (p.n + kStreamedWgmmaN - 1) / kStreamedWgmmaN;
  const StreamedWgmmaProblem s = {
      p,
      {call.slots.ids, call.slots.slots, call.slots.experts, stage.block_m},
      num_stages,
      tiles_n,
      call.config.walked(),
      call.slots.first,
      call.slots.taken};
  const int64_t most =
      most_row_tiles(call.slots.slots, call.slots.experts, stage.block_m) * tiles_n;
  const int64_t blocks = int64_t{call.device.sm_count} * kStreamedWgmmaBlocksPerSm;
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(most < blocks ? most : blocks));
  launch.block = kStreamedWgmmaThreads;
  launch.stream = stream;
  launch.shared_bytes = streamed_wgmma_shared_bytes(stage, num_stages, call.slots.slots);
  launch.early = true;
  return launch_kernel(kernel_of(stage, is_gate_up), launch, w_map, s);
}

}  // namespace cuda::moe
}  // namespace rocm_kernels
