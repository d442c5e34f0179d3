// skinny_gemm for the CPU: see skinny_gemm.h.
//
// The time of M = 1 is the time to read w, so w is read once, in its own order, and everything else
// stays in the caches.
//   * Sums run along K in vector lanes: a chunk of a row of w meets the same chunk of every row of
//     a. w needs no transposition, and lanes are added up once at the end.
//   * a is converted once into the multiplier's type (bfloat16 or float32, which hold every FP8
//     value), and laid out in panels of kPanelDepth along K.
//   * Up to 4 rows, w is decoded into registers and multiplied with all rows at once. Beyond, a
//     panel of kGroup columns of w is decoded into the cache, and tiles of up to 4 columns x 6 rows
//     are multiplied out of it: decoding is paid once, and the next panel is fetched meanwhile.
//   * Each output has a vector of its own to sum in, in the order of K by whichever path: its bits
//     do not depend on M, on the other rows, nor on the number of threads.
//   * Partial sums are scaled and added to the totals every 128 of K where there are block scales,
//     else every kPanelDepth, which keeps rounding errors small. Other scales multiply the totals.
#include "../skinny_gemm.h"

#include "../../gemm/cpu/job.h"

namespace rocm_kernels {
namespace cpu {
namespace {

constexpr int64_t kPanelDepth = 1024;  // of K; a multiple of kScaleBlock
constexpr int kGroup = 16;             // columns of out that are worked on together
constexpr int64_t kUnit = 4;           // columns that a thread takes at least, or it wastes a tile

}  // namespace
}  // namespace cpu
}  // namespace rocm_kernels

#define ROCM_KERNELS_CPU_BODY "../../skinny_gemm/cpu/body.h"
#include "../../common/cpu/each_isa.h"

namespace rocm_kernels {

int64_t skinny_gemm_workspace_bytes(const GemmArgs& args, const Context&) {
  return cpu::packed_bytes(args);
}

Status visit_skinny_gemm_configs(const GemmArgs& args, const Context&,
                                 void (*visit)(const char* config, void* state), void* state) {
  if (const Status error = cpu::check_config(args)) return error;
  visit(cpu::config_name(), state);
  return nullptr;
}

Status launch_skinny_gemm(const GemmArgs& args, const Context& context) {
  if (args.m == 0 || args.n == 0) return nullptr;
  if (args.m > kSkinnyGemmMaxRows) return "skinny_gemm takes at most 64 rows";
  if (const Status error = cpu::check_config(args)) return error;
  const cpu::GemmJob job(args, cpu::kPanelDepth, kSkinnyGemmMaxRows);
  const auto pack = ROCM_KERNELS_CPU_SELECT(pack);
  const auto multiply = ROCM_KERNELS_CPU_SELECT(multiply);
  cpu::parallel_for(context, job.panel_rows(), 128,
                    [&](int64_t begin, int64_t end) { pack(job, begin, end); });
  // Waking a thread costs about 3 us; decoding this much w takes 4 us. The work grows with M too,
  // by less than M / 2.
  constexpr int64_t kGrainBytes = 128 * 1024;
  const int64_t unit_bytes = cpu::kUnit * (args.k + 1) * size_of(args.w_dtype) * (args.m + 1) / 2;
  cpu::parallel_for(context, ceil_div(args.n, cpu::kUnit), ceil_div(kGrainBytes, unit_bytes),
                    [&](int64_t begin, int64_t end) { multiply(job, begin, end); });
  return nullptr;
}

}  // namespace rocm_kernels
