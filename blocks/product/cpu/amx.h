// The product by AMX's tiles, which gemm, skinny_gemm and the products of experts run where the
// processor has them: out[m, n] = sum_k(a[m, k] * w[n, k]), scales and bias as in gemm.h, any M.
// Operands are those that bfloat16 holds exactly: FP8 and bfloat16. amx_body.h has the kernels.
//
// TDPBF16PS multiplies a tile of 16 rows x 32 of K by one of 16 pairs of K x 16 columns. So
//   * w is the first operand: its rows lie along K, and what FP8 decodes to is a tile as it is.
//   * a is the second, which must have pairs of K down its rows: it is converted and transposed
//     once a call, into tiles of up to 16 rows of a.
//   * 32 rows of w x 32 rows of a are summed in four tile registers through a panel of K, then
//     added to totals in the cache, scaled where there are block scales. Totals are [n][m]; they
//     are transposed at the end, when scales and bias are applied.
//   * A panel of w is decoded while it meets the first 32 rows of a, so that for few rows decoding
//     and products overlap; the others find it in the first level cache.
//   * Panels are cut by K alone and sums run in the order of K, so an output's bits depend neither
//     on M nor on the other rows or the number of threads.
#pragma once

#include "job.h"

namespace rocm_kernels {
namespace cpu {

constexpr int64_t kAmxColumns = 32;         // of out, which a unit of work makes
constexpr int64_t kAmxMaxTileRows = 16;     // rows of a in a tile
constexpr int64_t kAmxMaxBlockRows = 512;   // rows of a that a decoded panel of w is used for
constexpr int64_t kAmxMaxPanelDepth = 256;  // of K: 16 KiB of w in bfloat16
constexpr int64_t kAmxChunk = 64;           // of K, which is decoded at once: two tiles

// One row is the time to read w, which few_rows.h does quicker; gemm, whose bits do not depend on
// M, takes tiles for it too.
constexpr int64_t kAmxMinRows = 2;

struct AmxJob {
  GemmArgs args;
  int64_t panel_depth;  // of K; a multiple of kAmxChunk, of kScaleBlock with block scales
  int64_t step;         // of K, after which sums are scaled and added to the totals
  int64_t tiles;        // of rows of a
  int64_t tile_rows;    // rows of a tile: alike, so that the last is hardly padded
  int64_t row_blocks;   // that the tiles are cut into

  explicit AmxJob(const GemmArgs& args)
      : args(args),
        tiles(ceil_div(args.m, kAmxMaxTileRows)),
        tile_rows(ceil_div(args.m, tiles)),
        row_blocks(ceil_div(args.m, kAmxMaxBlockRows)) {
    const int64_t multiple = is_block_scaled(args) ? kScaleBlock : kAmxChunk;
    const int64_t k = args.k > 0 ? args.k : 1;
    panel_depth = ceil_div(ceil_div(k, ceil_div(k, kAmxMaxPanelDepth)), multiple) * multiple;
    step = is_block_scaled(args) ? kScaleBlock : panel_depth;
  }

  int64_t pack_units() const { return tiles * ceil_div(args.k, panel_depth); }
  int64_t groups() const { return ceil_div(args.n, kAmxColumns); }
  int64_t units() const { return row_blocks * groups(); }
};

// Whether tiles are there and hold these operands.
bool amx_serves(DType a, DType w);

// Converts tiles of panels of a into the workspace, which has packed_bytes(args).
void amx_pack(const AmxJob& job, int64_t begin, int64_t end);

// Units: the groups of columns of the first block of rows, then those of the next.
void amx_multiply(const AmxJob& job, int64_t begin, int64_t end);

// The whole product. args.m and args.n are not 0.
void launch_amx(const GemmArgs& args, const Context& context);

}  // namespace cpu
}  // namespace rocm_kernels
