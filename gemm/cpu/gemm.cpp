// The product of many rows on the CPU: out[m, n] = sum_k(a[m, k] * w[n, k]), scales and bias as in
// gemm.h. From about 16 rows on arithmetic decides, not reading w:
//   * A lane of a sum belongs to one column of out, so nothing is added up across lanes, which for
//     a small K costs as much as the products. w is decoded and transposed for that, panel by panel
//     of kPanelDepth x kGroup, once for each block of up to kMaxBlockRows rows.
//   * a is converted once into the multiplier's type, in panels of kPanelDepth along K. Its values
//     (pairs of them in bfloat16, as VDPBF16PS takes them) are broadcast from the cache.
//   * Tiles of up to kMaxTileRows rows x kGroup columns stay in registers through a panel, then are
//     added to totals in the second level cache, scaled where there are block scales. Sums restart
//     there, which keeps rounding errors small.
#include "../gemm.h"

#include "../../blocks/product/cpu/amx.h"
#include "../../blocks/product/cpu/job.h"
#include "../../skinny_gemm/cpu/skinny_gemm.h"

namespace rocm_kernels {
namespace cpu {
namespace {

constexpr int64_t kPanelDepth = 256;    // of K; a multiple of kScaleBlock
constexpr int64_t kMaxBlockRows = 256;  // of a: 128 KiB of a panel in the second level cache
constexpr int64_t kMaxGroups = 4;       // of columns, that a block's panel of a is used for in turn

}  // namespace
}  // namespace cpu
}  // namespace rocm_kernels

#define ROCM_KERNELS_CPU_BODY "../../gemm/cpu/body.h"
#include "../../common/cpu/each_isa.h"

namespace rocm_kernels {

int64_t gemm_workspace_bytes(const GemmArgs& args, const Context&) {
  return cpu::packed_bytes(args);
}

// torch._scaled_mm is slow on a CPU.
Status choose_linear_limit(const GemmArgs&, int64_t& rows) {
  rows = kAnyRows;
  return nullptr;
}

Status check_gemm_config(const GemmArgs& args, const Context&) {
  return cpu::check_config(args.config, cpu::amx_serves(args.a_dtype, args.w_dtype));
}

Status visit_gemm_configs(const GemmArgs& args, const Context&,
                          void (*visit)(const char* config, void* state), void* state) {
  const bool by_tiles = cpu::amx_serves(args.a_dtype, args.w_dtype);
  if (const Status error = cpu::check_config(args.config, by_tiles)) return error;
  visit(cpu::config_name(by_tiles), state);
  return nullptr;
}

// Ranks on the CPU read each other's results where these were stored.
Status ask_gemm_to_peers(const GemmArgs&, const Context&, bool& sends) {
  sends = false;
  return nullptr;
}

Status launch_gemm_to_peers(const GemmArgs&, const Group&, const Context&) {
  return "a product on the CPU does not send its results";
}

// Nor is there a launch to be spared.
Status ask_joined_gemm(const JoinedGemmArgs&, const Context&, bool& joins) {
  joins = false;
  return nullptr;
}

Status launch_joined_gemm(const JoinedGemmArgs&, const Context&) {
  return "a product on the CPU does nothing else";
}

Status launch_gemm(const GemmArgs& args, const Context& context) {
  if (args.m == 0 || args.n == 0) return nullptr;
  const bool by_tiles = cpu::amx_serves(args.a_dtype, args.w_dtype);
  if (const Status error = cpu::check_config(args.config, by_tiles)) return error;
  // Rows that vectors along K serve sooner; docs/cpu_benchmarks.md has the times.
  const int64_t few = by_tiles ? cpu::kAmxMinRows - 1 : args.k <= 2048 ? 32 : kSkinnyGemmMaxRows;
  if (args.m <= few) {
    cpu::launch_few_rows(args, context);
    return nullptr;
  }
  if (by_tiles) {
    cpu::launch_amx(args, context);
    return nullptr;
  }
  const cpu::GemmJob job(args, cpu::kPanelDepth, cpu::kMaxBlockRows);
  const auto pack = ROCM_KERNELS_CPU_SELECT(pack);
  const auto multiply = ROCM_KERNELS_CPU_SELECT(multiply);
  const int64_t groups = ceil_div(args.n, ROCM_KERNELS_CPU_SELECT(group_columns)());
  // Waking a thread costs about 3 us, in which one packs 512 panels' rows or multiplies a group.
  cpu::parallel_for(context, job.panel_rows(), 512,
                    [&](int64_t begin, int64_t end) { pack(job, begin, end); });
  cpu::parallel_for(context, job.row_blocks * groups, 1,
                    [&](int64_t begin, int64_t end) { multiply(job, begin, end); });
  return nullptr;
}

}  // namespace rocm_kernels
