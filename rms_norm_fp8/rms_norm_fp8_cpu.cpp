// rms_norm_fp8 on the CPU: rows are dealt to the threads, each row to one. The arithmetic is in
// rms_norm_fp8_cpu_body.h, the reasons and the measurements in docs/cpu.md.
#include "../common/core/fp8.h"
#include "../common/core/half.h"
#include "../common/cpu/isa.h"
#include "../common/cpu/scale.h"
#include "rms_norm_fp8.h"

#define ROCM_KERNELS_CPU_BODY "../../rms_norm_fp8/rms_norm_fp8_cpu_body.h"
#include "../common/cpu/each_isa.h"

namespace rocm_kernels {
namespace {

// Columns worth a thread of their own: below, waking it costs more than it saves.
constexpr int64_t kColumnsPerThread = 16384;

struct Rows {
  const RmsNormFp8Args* args;
  void (*normalise)(const RmsNormFp8Args& args, int64_t begin, int64_t end);

  static void run(int64_t begin, int64_t end, void* state) {
    const Rows& rows = *static_cast<const Rows*>(state);
    rows.normalise(*rows.args, begin, end);
  }
};

}  // namespace

Status launch_rms_norm_fp8(const RmsNormFp8Args& args, const Context& context) {
  if (args.rows == 0 || args.hidden == 0) return nullptr;
  Rows rows{&args, ROCM_KERNELS_CPU_SELECT(rms_norm_fp8_rows)};
  const int64_t grain = (kColumnsPerThread + args.hidden - 1) / args.hidden;
  context.parallel_for(args.rows, grain, &Rows::run, &rows);
  return nullptr;
}

}  // namespace rocm_kernels
