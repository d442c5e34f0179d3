// The product of 1 to 64 rows on the CPU, which skinny_gemm and the products of experts run, where
// the processor has tiles for one row alone (amx.h): what their launchers must know.
// few_rows_body.h has the kernels.
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
#pragma once

#include "job.h"

namespace rocm_kernels {
namespace cpu {
namespace {

constexpr int64_t kFewRows = 64;
constexpr int64_t kPanelDepth = 1024;  // of K; a multiple of kScaleBlock
constexpr int kGroup = 16;             // columns of out that are worked on together
constexpr int64_t kUnit = 4;           // columns that a thread takes at least, or it wastes a tile

// Waking a thread costs about 3 us; decoding this much w takes 4 us.
constexpr int64_t kGrainBytes = 128 * 1024;

// The work of a unit, as if it were bytes of w. It grows with M too, by less than M / 2.
inline int64_t unit_bytes(const GemmArgs& args) {
  return kUnit * (args.k + 1) * size_of(args.w_dtype) * (args.m + 1) / 2;
}

}  // namespace
}  // namespace cpu
}  // namespace rocm_kernels
