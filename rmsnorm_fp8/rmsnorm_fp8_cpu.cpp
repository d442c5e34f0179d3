// rmsnorm_fp8 on the CPU: a thread takes whole rows. The arithmetic is in rmsnorm_fp8_cpu_body.h,
// the reasons and the measurements in docs/kernels/rmsnorm_fp8.md.
#include "../blocks/rows/cpu/scale.h"
#include "../common/core/fp8.h"
#include "../common/core/half.h"
#include "../common/core/math.h"
#include "../common/cpu/isa.h"
#include "../common/cpu/parallel.h"
#include "rmsnorm_fp8.h"

#define ROCM_KERNELS_CPU_BODY "../../rmsnorm_fp8/rmsnorm_fp8_cpu_body.h"
#include "../common/cpu/each_isa.h"

namespace rocm_kernels {

Status launch_rmsnorm_fp8(const RmsnormFp8Args& args, const Context& context) {
  if (args.rows == 0 || args.hidden == 0) return nullptr;
  // Columns worth a thread of their own: below, waking it costs more than it saves.
  constexpr int64_t kColumnsPerThread = 16384;
  const auto normalise = ROCM_KERNELS_CPU_SELECT(rmsnorm_fp8_rows);
  cpu::parallel_for(context, args.rows, ceil_div(kColumnsPerThread, args.hidden),
                    [&](int64_t begin, int64_t end) { normalise(args, begin, end); });
  return nullptr;
}

}  // namespace rocm_kernels
