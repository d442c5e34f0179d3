// A K block of MXFP4 rows of w and bfloat16 rows of a that meet in a streamed tile, as TileLoader
// has those of other operands. A K block is a line of w: 256 elements, with eight scales a row.
//
//   w   128 bytes a row, through LDS; lane 16 * g + i then has elements 32 * g .. 32 * g + 31 of
//       each half of row i, which share a scale, and decodes them in registers
//   a   512 bytes a row, half by half through LDS, in the same order of k
#pragma once

#include "../../blocks/product/cdna/tile_loader.h"
#include "mxfp4.h"
#include "tiles.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

template <int kBlockM, int kBlockN>
class Mxfp4TileLoader {
  static constexpr int kTilesM = mma_tiles_of(kBlockM), kTilesN = mma_tiles_of(kBlockN);
  static constexpr bool kFewRows = kBlockM < kMmaRows;  // 8 of a: half of the loads
  static constexpr int kHalves = 2, kLoadsA = kFewRows ? 2 : 4, kLoadsW = 2;  // loads: of 16 rows
  static constexpr int kPieces = 4;  // of 8 elements, that a lane multiplies of a half
  static constexpr int kElements = kHalves * kBlockK;
  static constexpr int kBytesW = kElements / 2, kBytesA = kElements * 2;
  static constexpr int kScales = kElements / static_cast<int>(kMxScaleBlock);
  static_assert(kBlockN <= kWaveSize, "Mxfp4TileLoader: a lane has the scales of a row");

 public:
  using Sums = Accumulator[kTilesM][kTilesN];
  struct KBlock {
    Words w[kTilesN][kLoadsW];
    detail::Words2 exponents;  // of row lane % kBlockN of w
    Words a[kTilesM][kHalves][kLoadsA];
  };

  template <class RowsA, class RowsW>
  ROCM_KERNELS_DEVICE Mxfp4TileLoader(const RowsA& a, const RowsW& w, int k, int lane)
      : w_(buffer_at(w.base())),
        a_(buffer_at(a.base())),
        exponents_(buffer_at(w.exponents)),
        k_(k),
        last_exponents_(k / static_cast<int>(kMxScaleBlock) - kScales),
        lane_(lane),
        exponent_row_(w.exponent_offset(lane % kBlockN)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        w_row_[j][half] = w.offset(j * kMmaRows + load_row(half, lane)) + load_byte(0, lane);
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        a_row_[i][half] = a.offset(i * kMmaRows + load_row(half, lane)) + load_byte(0, lane);
      }
    }
  }

  // From here on load() gives zeros for K blocks from `end` on.
  ROCM_KERNELS_DEVICE void end_at(int end) { end_ = end * kElements < k_ ? end * kElements : k_; }
  // load() cuts the K block that K ends within: 16 bytes are all of K or not at all.
  ROCM_KERNELS_DEVICE bool has_tail() const { return false; }
  ROCM_KERNELS_DEVICE void load_tail_block(KBlock&) const {}

  // Asks for K block `index`.
  ROCM_KERNELS_DEVICE void load(KBlock& block, int index) const {
    const uint32_t hide_w = (index * kBytesW + load_byte(0, lane_)) * 2 < end_ ? 0 : kOutside;
#pragma unroll
    for (int n = 0; n < kLoadsW; ++n) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        block.w[j][n] = load_words<Cache::kNonTemporal>(w_, w_row_[j][n] | hide_w, index * kBytesW);
      }
    }
    // The scales of the last eight blocks of 32 rather than any beyond a row: shifted into place.
    const int first = index * kScales;
    const int from = first < last_exponents_ ? first : last_exponents_;
    const auto pair = __builtin_amdgcn_raw_buffer_load_b64(exponents_, exponent_row_, from, 0);
    block.exponents = __builtin_bit_cast(
        detail::Words2, __builtin_bit_cast(uint64_t, pair) >> ((first - from) * 8 & 63));
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
#pragma unroll
      for (int n = 0; n < kLoadsA; ++n) {
        const int byte = index * kBytesA + half * kBlockK * 2 + load_byte<kFewRows>(n, 0);
        const uint32_t hide_a = byte + load_byte(0, lane_) < end_ * 2 ? 0 : kOutside;
#pragma unroll
        for (int i = 0; i < kTilesM; ++i) {
          block.a[i][half][n] =
              load_words<Cache::kKeep>(a_, a_row_[i][kFewRows ? 0 : n % 2] | hide_a, byte);
        }
      }
    }
  }

  // sums += the K block's product. `place`: transpose_bytes(2, 1) of LDS, this wave's own.
  ROCM_KERNELS_DEVICE void multiply_add(const KBlock& block, uint8_t* place, Sums& sums) const {
    const LdsTranspose<1> transpose_w(place, lane_);
    const LdsTranspose<2> transpose_a(place, lane_);
    const int row = lane_ % kMmaRows, group = lane_ / kMmaRows;
    Words w[kTilesN][kHalves];
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      transpose_w.write(block.w[j]);
      transpose_w.template read<1>(w[j], row);
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) {
      Words a[kTilesM][kPieces];
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        transpose_a.template write<kFewRows>(block.a[i][half]);
        // 8 rows are seen twice, and the sums of the second are dropped.
        transpose_a.template read<kPieces>(a[i], kFewRows ? row % 8 : row);
      }
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        const auto four = static_cast<uint32_t>(__builtin_amdgcn_ds_bpermute(
            (j * kMmaRows + row) * 4, static_cast<int>(block.exponents[half])));
        const float scale = e8m0_scale(four >> (group * 8) & 0xFF);
#pragma unroll
        for (int n = 0; n < kPieces; ++n) {
          const Words decoded = decode_mxfp4(w[j][half][n], scale);
#pragma unroll
          for (int i = 0; i < kTilesM; ++i) {
            sums[i][j] = detail::mfma_16bit<true>(decoded, a[i][n], sums[i][j]);
          }
        }
      }
    }
  }

 private:
  Buffer w_, a_, exponents_;
  int k_, last_exponents_, lane_, end_ = 0;
  uint32_t exponent_row_;
  uint32_t w_row_[kTilesN][2], a_row_[kTilesM][2];  // bytes to what the lane loads
};

#endif

}  // namespace rocm_kernels::cdna
