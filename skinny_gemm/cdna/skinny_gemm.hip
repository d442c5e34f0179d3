// AMD backend of the designs for few rows: checks and the launch.
#include "../../blocks/product/cdna/partial_sums.h"
#include "../../blocks/product/cdna/target.h"
#include "kernels.h"
#include "skinny_gemm.h"

namespace rocm_kernels::cdna::skinny {
namespace {

// The loops compute offsets within a tile, and within a, in 31 bits.
Status check_offsets(const GemmArgs& args) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  constexpr int64_t kLargestBlockN = 64;
  const auto reach = [](int64_t rows, int64_t stride, int64_t last) {
    return (rows - 1) * stride + last;
  };
  if (args.k >= (1 << 29)) return "K must be below 2^29";
  if (args.n >= (1 << 30)) return "N must be below 2^30";
  if (reach(args.m, args.a_stride, args.k) * size_of(args.a_dtype) + 4096 >= kLimit) {
    return "a must span less than 2 GiB; make it contiguous";
  }
  if (reach(kLargestBlockN, args.w_stride, args.k) * size_of(args.w_dtype) + 4096 >= kLimit) {
    return "64 rows of w must span less than 2 GiB; make w contiguous";
  }
  const auto scale_reach = [&](const ScaleView& scale, int64_t rows) {
    if (scale.kind == ScaleView::Kind::kRow) return 4 * reach(rows, scale.row_stride, 1);
    if (!scale.is_blocked()) return int64_t{0};
    const int64_t columns = (args.k + kScaleBlock - 1) / kScaleBlock;
    return 4 * (reach(rows, scale.row_stride, 0) + columns * scale.block_stride);
  };
  const int64_t w_scale_rows =
      args.scale_w.is_blocked() ? (args.n + kScaleBlock - 1) / kScaleBlock : args.n;
  if (scale_reach(args.scale_a, args.m) >= kLimit ||
      scale_reach(args.scale_w, w_scale_rows) >= kLimit) {
    return "scales must span less than 2 GiB; make them contiguous";
  }
  return nullptr;
}

}  // namespace

int64_t workspace_bytes(const GemmArgs& args, const SkinnyGemmConfig& config) {
  const Schedule schedule = schedule_of(shape_of(args), config);
  if (schedule.slots() == 0) return 0;
  return ticket_bytes(schedule) +
         static_cast<int64_t>(schedule.slots()) * args.m * config.block_n * 4;
}

Status launch(const GemmArgs& args, const SkinnyGemmConfig& config, const Target&,
              const Context& context) {
  if (Status error = check_offsets(args)) return error;
  const GemmShape shape = shape_of(args);
  GemmProblem p = make_problem(args);
  const SkinnyKernel kernel = skinny_kernel(
      config.sparse ? MmaKind::kFp8Sparse : mma_kind_of(args),
      config.design == SkinnyGemmConfig::Design::kSpecialisedWaves, shape.block_scaled,
      find_tile(block_m_of(shape.m), config.block_n, shape.a_bytes));
  if (kernel == nullptr) return "no kernel was built for this config; report a defect";
  p.waves = config.waves;
  p.producers = config.producers;
  p.num_stages = num_lds_stages(shape, config);
  p.schedule = schedule_of(shape, config);
  p.tickets = static_cast<uint64_t*>(args.workspace);
  if (p.schedule.slots() != 0) {
    if (args.workspace == nullptr) return "this config needs a workspace";
    p.partials =
        reinterpret_cast<float*>(static_cast<uint8_t*>(args.workspace) + ticket_bytes(p.schedule));
    p.launch = next_ticket_name();
  }
  const Launch launch{dim3(p.schedule.workgroups()), config.waves * 64, stream_of(context),
                      lds_bytes_of(shape, config)};
  return launch_kernel(kernel, launch, p);
}

}  // namespace rocm_kernels::cdna::skinny
