// AMD backend of skinny_gemm: checks, the choice of a kernel, the launch.
#include "../../blocks/product/cdna/partial_sums.h"
#include "../../blocks/product/cdna/portable.h"
#include "../../blocks/product/cdna/target.h"
#include "choose.h"
#include "kernels.h"

namespace rocm_kernels {
namespace cdna {
namespace {

// The loops compute offsets within a tile, and within a, in 31 bits.
Status check_offsets(const GemmArgs& args) {
  constexpr int64_t kLimit = int64_t{1} << 31;
  constexpr int64_t kLargestBlockN = 64;
  const auto reach = [](int64_t rows, int64_t stride, int64_t last) {
    return (rows - 1) * stride + last;
  };
  if (args.k >= (1 << 29)) return "skinny_gemm: K must be below 2^29";
  if (args.n >= (1 << 30)) return "skinny_gemm: N must be below 2^30";
  if (reach(args.m, args.a_stride, args.k) * size_of(args.a_dtype) + 4096 >= kLimit) {
    return "skinny_gemm: a must span less than 2 GiB; make it contiguous";
  }
  if (reach(kLargestBlockN, args.w_stride, args.k) * size_of(args.w_dtype) + 4096 >= kLimit) {
    return "skinny_gemm: 64 rows of w must span less than 2 GiB; make w contiguous";
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
    return "skinny_gemm: scales must span less than 2 GiB; make them contiguous";
  }
  return nullptr;
}

// The config of a call: the one that args name, or the chosen one.
Status config_of(const GemmArgs& args, const Target& target, SkinnyGemmConfig& config) {
  if (args.config == nullptr) {
    config = cached_choice(shape_of(args), target);
  } else {
    if (Status error = read_config(args.config, config)) return error;
    if (!target.matrix_instructions && config.design != SkinnyGemmConfig::Design::kPortable) {
      return "skinny_gemm config: only the portable design runs on this GPU";
    }
  }
  return check_config(shape_of(args), config);
}

int64_t workspace_bytes(const GemmArgs& args) {
  Target target;
  SkinnyGemmConfig config;
  // What is wrong, the launch will say.
  if (!current_target(target) || config_of(args, target, config) != nullptr) return 0;
  if (config.design == SkinnyGemmConfig::Design::kPortable) return 0;
  const Schedule schedule = schedule_of(shape_of(args), config);
  if (schedule.slots() == 0) return 0;
  return ticket_bytes(schedule) +
         static_cast<int64_t>(schedule.slots()) * args.m * config.block_n * 4;
}

Status visit_configs(const GemmArgs& args, void (*visit)(const char* config, void* state),
                     void* state) {
  Target target;
  SkinnyGemmConfig first;
  if (!current_target(target)) return kNoDevice;
  if (Status error = config_of(args, target, first)) return error;
  if (Status error = check_config(class_of(shape_of(args)), first)) return error;
  const auto tell = [&](const SkinnyGemmConfig& config) {
    char text[kConfigTextBytes];
    if (write_config(config, text)) visit(text, state);
  };
  tell(first);
  for_each_config(shape_of(args), target, [&](const SkinnyGemmConfig& config) {
    if (!equal_configs(config, first)) tell(config);
  });
  return nullptr;
}

Status launch_product(const GemmArgs& args, const Context& context) {
  Target target;
  SkinnyGemmConfig config;
  if (!current_target(target)) return kNoDevice;
  if (Status error = check_dtypes(args)) return error;
  if (Status error = check_offsets(args)) return error;
  if (Status error = config_of(args, target, config)) return error;
  if (config.design == SkinnyGemmConfig::Design::kPortable) {
    return launch_portable(args, target.wave_size, context);
  }
  const GemmShape shape = shape_of(args);
  GemmProblem p = make_problem(args);

  if (is_fp8(args.w_dtype) && args.w_dtype != target.fp8) {
    return "skinny_gemm: w's FP8 dialect is not this GPU's (float8_e4m3fnuz on gfx942, "
           "float8_e4m3fn on gfx950); convert w and its scale with to_native_fp8";
  }
  const SkinnyKernel kernel = skinny_kernel(
      config.sparse ? MmaKind::kFp8Sparse : mma_kind_of(args),
      config.design == SkinnyGemmConfig::Design::kSpecialisedWaves, shape.block_scaled,
      find_tile(block_m_of(shape.m), config.block_n, shape.a_bytes));
  if (kernel == nullptr) return "skinny_gemm: no kernel was built for this config; report a defect";
  p.waves = config.waves;
  p.producers = config.producers;
  p.num_stages = num_lds_stages(shape, config);
  p.schedule = schedule_of(shape, config);
  p.tickets = static_cast<uint64_t*>(args.workspace);
  if (p.schedule.slots() != 0) {
    if (args.workspace == nullptr) return "skinny_gemm: this config needs a workspace";
    p.partials =
        reinterpret_cast<float*>(static_cast<uint8_t*>(args.workspace) + ticket_bytes(p.schedule));
    p.launch = next_ticket_name();
  }
  const Launch launch{dim3(p.schedule.workgroups()), config.waves * 64, stream_of(context),
                      lds_bytes_of(shape, config)};
  return launch_kernel(kernel, launch, p);
}

}  // namespace
}  // namespace cdna

int64_t skinny_gemm_workspace_bytes(const GemmArgs& args, const Context&) {
  return cdna::workspace_bytes(args);
}

Status visit_skinny_gemm_configs(const GemmArgs& args, const Context&,
                                 void (*visit)(const char* config, void* state), void* state) {
  return cdna::visit_configs(args, visit, state);
}

Status launch_skinny_gemm(const GemmArgs& args, const Context& context) {
  if (args.m == 0 || args.n == 0) return nullptr;
  return cdna::launch_product(args, context);
}

}  // namespace rocm_kernels
