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

#include "../../common/core/fp8.h"
#include "../../common/core/half.h"
#include "../../common/cpu/isa.h"

namespace rocm_kernels {
namespace {

constexpr int64_t kPanelDepth = 256;    // of K; a multiple of kScaleBlock
constexpr int64_t kMaxBlockRows = 256;  // of a: 128 KiB of a panel in the second level cache
constexpr int64_t kMaxGroups = 4;       // that a block's panel of a is used for in turn

struct GemmJob {
  GemmArgs args;
  int64_t step;        // of K, after which partial sums are scaled and added to the totals
  int64_t row_blocks;  // which the rows are dealt to evenly
};

float as_float(float value) { return value; }
template <class Half>
float as_float(Half value) {
  return to_float(value);
}

}  // namespace
}  // namespace rocm_kernels

#define ROCM_KERNELS_CPU_BODY "../../gemm/cpu/body.h"
#include "../../common/cpu/each_isa.h"

namespace rocm_kernels {
namespace {

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void pack_units(int64_t begin, int64_t end, void* state) {
  ROCM_KERNELS_CPU_SELECT(pack)(*static_cast<const GemmJob*>(state), begin, end);
}

void multiply_units(int64_t begin, int64_t end, void* state) {
  ROCM_KERNELS_CPU_SELECT(multiply)(*static_cast<const GemmJob*>(state), begin, end);
}

}  // namespace

int64_t gemm_workspace_bytes(const GemmArgs& args, const Context&) {
  return args.m * divide_up(args.k, kScaleBlock) * kScaleBlock *
         static_cast<int64_t>(sizeof(float));
}

// torch._scaled_mm is slow on a CPU. docs/cpu_benchmarks.md has the times.
Status choose_linear_limits(const GemmArgs& args, LinearLimits& limits) {
  limits.skinny_gemm = args.k <= 2048 ? 32 : 64;
  return nullptr;
}

Status launch_gemm(const GemmArgs& args, const Context& context) {
  if (args.m == 0 || args.n == 0) return nullptr;
  const bool blocks =
      args.scale_a.kind == ScaleView::Kind::kBlock || args.scale_w.kind == ScaleView::Kind::kBlock;
  GemmJob job{args, blocks ? kScaleBlock : kPanelDepth, divide_up(args.m, kMaxBlockRows)};
  // Waking a thread costs about 3 us, in which one packs 512 panels' rows or multiplies a group.
  context.parallel_for(args.m * divide_up(args.k, kPanelDepth), 512, pack_units, &job);
  const int64_t groups = divide_up(args.n, ROCM_KERNELS_CPU_SELECT(group_columns)());
  context.parallel_for(job.row_blocks * groups, 1, multiply_units, &job);
  return nullptr;
}

}  // namespace rocm_kernels
