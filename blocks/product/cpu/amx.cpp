// The product by AMX's tiles: see amx.h.
#include "amx.h"

#if ROCM_KERNELS_CPU_HAS_AMX

#define ROCM_KERNELS_CPU_BODY "../../blocks/product/cpu/amx_body.h"
#include "../../../common/cpu/amx_isa.h"

namespace rocm_kernels {
namespace cpu {

void amx_pack(const AmxJob& job, int64_t begin, int64_t end) { amx::pack(job, begin, end); }
void amx_multiply(const AmxJob& job, int64_t begin, int64_t end) { amx::multiply(job, begin, end); }

}  // namespace cpu
}  // namespace rocm_kernels

#else

namespace rocm_kernels {
namespace cpu {

void amx_pack(const AmxJob&, int64_t, int64_t) {}
void amx_multiply(const AmxJob&, int64_t, int64_t) {}

}  // namespace cpu
}  // namespace rocm_kernels

#endif

namespace rocm_kernels {
namespace cpu {

bool amx_serves(DType a, DType w) {
  return isa() == Isa::kAmx && a != DType::kFloat16 && w != DType::kFloat16;
}

void launch_amx(const GemmArgs& args, const Context& context) {
  const AmxJob job(args);
  // Waking a thread costs about 3 us.
  parallel_for(context, job.pack_units(), 8,
               [&](int64_t begin, int64_t end) { amx_pack(job, begin, end); });
  const int64_t bytes = kAmxColumns * (args.k + 1) * size_of(args.w_dtype) * (args.m + 64) / 64;
  parallel_for(context, job.units(), ceil_div(64 * 1024, bytes),
               [&](int64_t begin, int64_t end) { amx_multiply(job, begin, end); });
}

}  // namespace cpu
}  // namespace rocm_kernels
