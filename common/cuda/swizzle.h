// The 128-byte swizzle, in which TMA writes boxes of a matrix to shared memory
// and wgmma reads them. No CUDA header: the choice of a config needs it too.
//
// A box is lines of 128 bytes, the line being one chunk of one row of the matrix. Eight lines make
// a pattern: the 16-byte vectors of line l lie in the order v ^ (l % 8), so that the same vector of
// eight neighbouring lines falls on different banks.
#pragma once

#include <cstdint>

#include "../core/compiler.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kChunkBytes = 128;
constexpr int kPatternLines = 8;
constexpr int kPatternBytes = kPatternLines * kChunkBytes;  // the alignment that a box needs

// Bytes of a box of `rows` x `chunks`: whole patterns.
ROCM_KERNELS_HOST_DEVICE constexpr int box_bytes(int rows, int chunks) {
  return (rows * chunks + kPatternLines - 1) / kPatternLines * kPatternBytes;
}

// Where a 16-byte vector of a chunk lies in a box of [row][chunk].
ROCM_KERNELS_HOST_DEVICE constexpr int swizzled(int row, int chunk, int chunks, int vector) {
  const int line = row * chunks + chunk;
  return line * kChunkBytes + ((vector ^ (line & 7)) * 16);
}

// The narrower swizzles of TMA, for lines of 64 and of 32 bytes: 128 bytes hold two
// lines, or four, and the vectors of eight neighbouring lines fall on different banks here too.
template <int kLineBytes>
ROCM_KERNELS_HOST_DEVICE constexpr int swizzled_narrow(int line, int vector) {
  static_assert(kLineBytes == 64 || kLineBytes == 32, "");
  constexpr int kVectors = kLineBytes / 16;
  return line * kLineBytes + ((vector ^ (line / (kChunkBytes / kLineBytes) % kVectors)) * 16);
}

}  // namespace cuda
}  // namespace rocm_kernels
