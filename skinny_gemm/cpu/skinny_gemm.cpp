// skinny_gemm for the CPU: see skinny_gemm.h. blocks/product/cpu/few_rows.h tells the mapping;
// where the processor has tiles, blocks/product/cpu/amx.h that of more than one row.
#include "../skinny_gemm.h"

#include "../../blocks/product/cpu/amx.h"
#include "../../blocks/product/cpu/few_rows.h"

#define ROCM_KERNELS_CPU_BODY "../../blocks/product/cpu/few_rows_body.h"
#include "../../common/cpu/each_isa.h"

namespace rocm_kernels {

static_assert(kSkinnyGemmMaxRows == cpu::kFewRows, "the kernel's arrays end there");

int64_t skinny_gemm_workspace_bytes(const GemmArgs& args, const Context&) {
  return cpu::packed_bytes(args);
}

Status visit_skinny_gemm_configs(const GemmArgs& args, const Context&,
                                 void (*visit)(const char* config, void* state), void* state) {
  const bool by_tiles = cpu::amx_serves(args.a_dtype, args.w_dtype);
  if (const Status error = cpu::check_config(args.config, by_tiles)) return error;
  visit(cpu::config_name(by_tiles), state);
  return nullptr;
}

Status launch_skinny_gemm(const GemmArgs& args, const Context& context) {
  if (args.m == 0 || args.n == 0) return nullptr;
  if (args.m > kSkinnyGemmMaxRows) return "skinny_gemm takes at most 64 rows";
  const bool by_tiles = cpu::amx_serves(args.a_dtype, args.w_dtype);
  if (const Status error = cpu::check_config(args.config, by_tiles)) return error;
  if (by_tiles && args.m >= cpu::kAmxMinRows) {
    cpu::launch_amx(args, context);
    return nullptr;
  }
  const cpu::GemmJob job(args, cpu::kPanelDepth, cpu::kFewRows);
  const auto pack = ROCM_KERNELS_CPU_SELECT(pack);
  const auto multiply = ROCM_KERNELS_CPU_SELECT(multiply);
  cpu::parallel_for(context, job.panel_rows(), 128,
                    [&](int64_t begin, int64_t end) { pack(job, begin, end); });
  cpu::parallel_for(context, ceil_div(args.n, cpu::kUnit),
                    ceil_div(cpu::kGrainBytes, cpu::unit_bytes(args)),
                    [&](int64_t begin, int64_t end) { multiply(job, begin, end); });
  return nullptr;
}

}  // namespace rocm_kernels
