// swiglu_fp8 on the CPU: pieces of rows are dealt to the threads, so that a single long row keeps
// several of them busy; only a per-token scale needs whole rows. The arithmetic is in
// swiglu_fp8_cpu_body.h, the reasons and the measurements in docs/cpu.md.
#include "../common/core/fp8.h"
#include "../common/core/half.h"
#include "../common/cpu/isa.h"
#include "../common/cpu/scale.h"
#include "swiglu_fp8.h"

namespace rocm_kernels {
namespace {

struct SwigluPieces {
  int64_t columns;  // of a piece; the last one of a row may be short
  int64_t per_row;
  int64_t group;  // columns that share a scale
  int64_t scales_per_row;
};

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr int64_t kPieceColumns = 4096;

// Columns worth a thread of their own, 6 us of work: waking it costs 3.
constexpr int64_t kColumnsPerThread = 16384;

SwigluPieces pieces_of(const SwigluFp8Args& args) {
  SwigluPieces pieces{};
  pieces.group = args.scaling == Scaling::kPerGroup ? args.group_size : args.columns;
  pieces.scales_per_row = divide_up(args.columns, pieces.group);
  pieces.columns = kPieceColumns;
  if (args.scaling == Scaling::kPerToken) pieces.columns = args.columns;
  if (args.scaling == Scaling::kPerGroup) {
    pieces.columns = divide_up(kPieceColumns, pieces.group) * pieces.group;
  }
  pieces.per_row = divide_up(args.columns, pieces.columns);
  return pieces;
}

}  // namespace
}  // namespace rocm_kernels

#define ROCM_KERNELS_CPU_BODY "../../swiglu_fp8/swiglu_fp8_cpu_body.h"
#include "../common/cpu/each_isa.h"

namespace rocm_kernels {
namespace {

struct Work {
  const SwigluFp8Args* args;
  SwigluPieces pieces;
  void (*run_pieces)(const SwigluFp8Args& args, const SwigluPieces& pieces, int64_t begin,
                     int64_t end);

  static void run(int64_t begin, int64_t end, void* state) {
    const Work& work = *static_cast<const Work*>(state);
    work.run_pieces(*work.args, work.pieces, begin, end);
  }
};

}  // namespace

Status launch_swiglu_fp8(const SwigluFp8Args& args, const Context& context) {
  if (args.rows == 0 || args.columns == 0) return nullptr;
  Work work{&args, pieces_of(args), ROCM_KERNELS_CPU_SELECT(swiglu_fp8_pieces)};
  const int64_t piece = work.pieces.columns < args.columns ? work.pieces.columns : args.columns;
  const int64_t grain = divide_up(kColumnsPerThread, piece);
  context.parallel_for(args.rows * work.pieces.per_row, grain, &Work::run, &work);
  return nullptr;
}

}  // namespace rocm_kernels
