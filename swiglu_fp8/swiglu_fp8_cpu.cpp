// swiglu_fp8 on the CPU: a thread takes pieces of rows, so that a single long row keeps several of
// them busy; only a per-token scale needs whole rows. The arithmetic is in
// swiglu_fp8_cpu_body.h, the reasons and the measurements in docs/kernels/swiglu_fp8.md.
#include "../blocks/rows/cpu/scale.h"
#include "../common/core/fp8.h"
#include "../common/core/half.h"
#include "../common/core/math.h"
#include "../common/cpu/isa.h"
#include "../common/cpu/parallel.h"
#include "swiglu_fp8.h"

namespace rocm_kernels {
namespace cpu {
namespace {

struct Pieces {
  int64_t columns;  // of a piece; the last one of a row may be short
  int64_t per_row;
  int64_t group;  // columns that share a scale
  int64_t scales_per_row;
};

constexpr int64_t kPieceColumns = 4096;

Pieces pieces_of(const SwigluFp8Args& args) {
  Pieces pieces{};
  pieces.group = args.scaling == Scaling::kPerGroup ? args.group_size : args.columns;
  pieces.scales_per_row = ceil_div(args.columns, pieces.group);
  pieces.columns = kPieceColumns;
  if (args.scaling == Scaling::kPerToken) pieces.columns = args.columns;
  if (args.scaling == Scaling::kPerGroup) {
    pieces.columns = ceil_div(kPieceColumns, pieces.group) * pieces.group;
  }
  pieces.per_row = ceil_div(args.columns, pieces.columns);
  return pieces;
}

}  // namespace
}  // namespace cpu
}  // namespace rocm_kernels

#define ROCM_KERNELS_CPU_BODY "../../swiglu_fp8/swiglu_fp8_cpu_body.h"
#include "../common/cpu/each_isa.h"

namespace rocm_kernels {

Status launch_swiglu_fp8(const SwigluFp8Args& args, const Context& context) {
  if (args.rows == 0 || args.columns == 0) return nullptr;
  const cpu::Pieces pieces = cpu::pieces_of(args);
  const int64_t piece = pieces.columns < args.columns ? pieces.columns : args.columns;
  // Columns worth a thread of their own, 6 us of work: waking it costs 3.
  constexpr int64_t kColumnsPerThread = 16384;
  const auto run = ROCM_KERNELS_CPU_SELECT(swiglu_fp8_pieces);
  cpu::parallel_for(context, args.rows * pieces.per_row, ceil_div(kColumnsPerThread, piece),
                    [&](int64_t begin, int64_t end) { run(args, pieces, begin, end); });
  return nullptr;
}

}  // namespace rocm_kernels
