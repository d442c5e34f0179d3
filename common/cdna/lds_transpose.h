// From the order in which memory is best read to the one that matrix instructions want, through
// LDS.
//
// A tile is 16 rows by one K block: 128 or 256 bytes of each row. It is loaded line by line, eight
// lanes to a 128-byte line, and so written to LDS; from there lane l = 16 * g + i reads 16
// contiguous bytes of row i, for the matrix instructions want each lane to hold one row. They also
// want 4, 8 or 16 elements of k in a lane in an order of their own; but the product does not care
// how k is permuted as long as a and w are permuted alike, so the registers go in as they were
// read.
#pragma once

#include "buffer.h"
#include "operands.h"

namespace rocm_kernels::cdna {

constexpr int kLineBytes = 128;  // that eight lanes load together

// Load `n` of a lane: row load_row(n, lane) of the tile, at byte load_byte(n, lane) of the K block.
// A tile of 8 rows has the first half of the rows of each line.
ROCM_KERNELS_DEVICE constexpr int load_row(int n, int lane) { return n % 2 * 8 + lane / 8; }
template <bool kHalf = false>
ROCM_KERNELS_DEVICE constexpr int load_byte(int n, int lane) {
  return (kHalf ? n : n / 2) * kLineBytes + lane % 8 * 16;
}

#if ROCM_KERNELS_CDNA

// A wave's place in LDS where a tile changes from the order of its loads to that of its fragments.
// One wave's LDS operations keep their order, so tile after tile passes through the same place with
// no wait but for the data. The 16-byte chunks of a line are permuted by row, so that neither the
// writes (a line in eight lanes) nor the reads (eight rows in eight lanes) meet on a bank.
template <int kBytes>  // of an element
class LdsTranspose {
 public:
  static constexpr int kRowBytes = kBlockK * kBytes;

  ROCM_KERNELS_DEVICE LdsTranspose(uint8_t* place, int lane) : place_(place), lane_(lane) {}

  template <bool kHalf = false, int kLoads>
  ROCM_KERNELS_DEVICE void write(const Words (&loads)[kLoads]) const {
    const int row = lane_ / 8, chunk = lane_ % 8 ^ row;
#pragma unroll
    for (int n = 0; n < kLoads; ++n) {
      const int first_row = kHalf ? 0 : n % 2 * 8;
      *at(row * kRowBytes + chunk * 16, first_row * kRowBytes + load_byte<kHalf>(n, 0)) = loads[n];
    }
  }

  // Fragments of row `row`, 16 elements apart from group to group: kPerGroup consecutive chunks
  // each.
  template <int kPerGroup, int kFragments>
  ROCM_KERNELS_DEVICE void read(Words (&fragments)[kFragments], int row) const {
    const int group = lane_ / kMmaRows;
#pragma unroll
    for (int n = 0; n < kFragments; ++n) {
      // Chunk of the row: (n / kPerGroup) * 4 * kPerGroup + group * kPerGroup + n % kPerGroup.
      const int in_line = kPerGroup == 1   ? n % 2 * 4 + group
                          : kPerGroup == 2 ? group * 2 + n % 2
                                           : group % 2 * 4 + n % 4;
      const int in_row = row * kRowBytes + (in_line ^ row % 8) * 16;
      if constexpr (kPerGroup == 4) {
        fragments[n] = *at(in_row + group / 2 * kLineBytes, n / 4 * 2 * kLineBytes);
      } else {
        fragments[n] = *at(in_row, n / 2 * kLineBytes);
      }
    }
  }

 private:
  ROCM_KERNELS_DEVICE Words* at(int lane_offset, int offset) const {
    return reinterpret_cast<Words*>(place_ + lane_offset + offset);
  }
  uint8_t* place_;
  int lane_;
};

#endif

}  // namespace rocm_kernels::cdna
