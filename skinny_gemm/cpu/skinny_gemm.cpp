// The product of few rows on the CPU, by vectors. blocks/product/cpu/few_rows.h tells the mapping.
#include "skinny_gemm.h"

#include "../../blocks/product/cpu/few_rows.h"
#include "../../gemm/gemm.h"

#define ROCM_KERNELS_CPU_BODY "../../blocks/product/cpu/few_rows_body.h"
#include "../../common/cpu/each_isa.h"

namespace rocm_kernels {

static_assert(kSkinnyGemmMaxRows == cpu::kFewRows, "the kernel's arrays end there");

void cpu::launch_few_rows(const GemmArgs& args, const Context& context) {
  const GemmJob job(args, kPanelDepth, kFewRows);
  const auto pack = ROCM_KERNELS_CPU_SELECT(pack);
  const auto multiply = ROCM_KERNELS_CPU_SELECT(multiply);
  parallel_for(context, job.panel_rows(), 128,
               [&](int64_t begin, int64_t end) { pack(job, begin, end); });
  parallel_for(context, ceil_div(args.n, kUnit), ceil_div(kGrainBytes, unit_bytes(args)),
               [&](int64_t begin, int64_t end) { multiply(job, begin, end); });
}

}  // namespace rocm_kernels
