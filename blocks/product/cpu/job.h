// What a launcher of a CPU product tells its body (few_rows_body.h, body.h), and what the launchers
// do alike.
#pragma once

#include "../../../common/core/fp8.h"
#include "../../../common/core/half.h"
#include "../../../common/core/math.h"
#include "../../../common/cpu/config.h"
#include "../../../common/cpu/isa.h"
#include "../../../common/cpu/parallel.h"
#include "../args.h"

namespace rocm_kernels {
namespace cpu {
namespace {

struct GemmJob {
  GemmArgs args;
  int64_t panel_depth;  // of K: a is converted and laid out in panels of it
  int64_t step;         // of K, after which partial sums are scaled and added to the totals
  int64_t row_blocks;   // of nearly equal size, which the rows of a are cut into

  GemmJob(const GemmArgs& args, int64_t panel_depth, int64_t max_block_rows)
      : args(args),
        panel_depth(panel_depth),
        step(is_block_scaled(args) ? kScaleBlock : panel_depth),
        row_blocks(ceil_div(args.m, max_block_rows)) {}

  // A panel's rows, which `pack` converts one by one.
  int64_t panel_rows() const { return args.m * ceil_div(args.k, panel_depth); }
};

// Room for a in float32; rows of panels end at multiples of a chunk, which divides kScaleBlock.
inline int64_t packed_bytes(const GemmArgs& args) {
  const int64_t columns = ceil_div(args.k, kScaleBlock) * kScaleBlock;
  return args.m * columns * static_cast<int64_t>(sizeof(float));
}

inline float as_float(float value) { return value; }
template <class Half>
inline float as_float(Half value) {
  return to_float(value);
}

}  // namespace
}  // namespace cpu
}  // namespace rocm_kernels
