// MXFP4 weights on AMD: four bits times a power of two, which bfloat16 holds exactly; and the
// loaders that the tiled and the streamed design take for them.
#pragma once

#include "../../blocks/product/cdna/main_loop.h"
#include "../../blocks/product/cdna/tile_loader.h"
#include "rows.h"
#include "tiles.h"

namespace rocm_kernels::cdna::moe {

#if ROCM_KERNELS_CDNA

// 2^(exponent - 127), NaN for 255: an E8M0 byte.
ROCM_KERNELS_DEVICE float e8m0_scale(uint32_t exponent) {
  const uint32_t bits = exponent == 255 ? 0x7FC00000u
                        : exponent == 0 ? 0x00400000u
                                        : exponent << 23;
  return __builtin_bit_cast(float, bits);
}

// Eight codes, the first in the low bits, times e8m0_scale(), as bfloat16.
ROCM_KERNELS_DEVICE Words decode_mxfp4(uint32_t codes, float scale) {
  Words words;
#if defined(__gfx950__)
  // The instruction goes by the scale's exponent alone, so NaN is put in afterwards.
  const uint32_t nan = scale != scale ? 0x7FC07FC0u : 0;
  words[0] =
      __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 0));
  words[1] =
      __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 1));
  words[2] =
      __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 2));
  words[3] =
      __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_scalef32_pk_bf16_fp4(codes, scale, 3));
  return words | Words{nan, nan, nan, nan};
#else
  // A code's low three bits look up the upper byte of its magnitude in float16, whose lower byte
  // is 0 for each: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
  constexpr uint32_t kFirst = 0x3E3C3800u, kLast = 0x46444240u;
  const uint32_t even =
      __builtin_amdgcn_perm(kLast, kFirst, codes & 0x07070707u) | (codes << 4 & 0x80808080u);
  const uint32_t odd =
      __builtin_amdgcn_perm(kLast, kFirst, codes >> 4 & 0x07070707u) | (codes & 0x80808080u);
  using Half2 = _Float16 __attribute__((ext_vector_type(2)));
#pragma unroll
  for (int pair = 0; pair < 4; ++pair) {
    const uint32_t select = 0x040C000Cu + pair * 0x01000100u;  // 0x0C: a byte of zeros
    const auto halves = __builtin_bit_cast(Half2, __builtin_amdgcn_perm(odd, even, select));
    // float16 to float32 and the product in one instruction, which is a multiply-add.
    const float low = __builtin_fmaf(static_cast<float>(halves[0]), scale, 0.0f);
    const float high = __builtin_fmaf(static_cast<float>(halves[1]), scale, 0.0f);
    words[pair] = __builtin_amdgcn_perm(__builtin_bit_cast(uint32_t, high),
                                        __builtin_bit_cast(uint32_t, low), 0x07060302u);
  }
  return words;
#endif
}

// Lines of MXFP4 weights on their way to LDS, where they are bfloat16.
//
// A line is 64 elements, 32 bytes of a row; a thread brings 8 of them and the byte of their scale.
template <int kRows, int kThreads>
class Mxfp4Loader {
 public:
  static constexpr int kRowsAtOnce = kThreads / 8;
  static constexpr int kRowLoads = kRows / kRowsAtOnce;
  static constexpr int kLoads = 1, kStages = 1;  // of a line: all of it at once
  static_assert(kRows % kRowsAtOnce == 0, "Mxfp4Loader: the workgroup must cover whole rows");

  template <class Rows>
  explicit ROCM_KERNELS_DEVICE Mxfp4Loader(const Rows& rows)
      : buffer_(buffer_at(rows.base())), exponents_(buffer_at(rows.exponents)) {
    const int thread = static_cast<int>(threadIdx.x), chunk = thread % 8;
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
      row_[i] = rows.offset(i * kRowsAtOnce + thread / 8) + chunk * 4;
      exponent_row_[i] = rows.exponent_offset(i * kRowsAtOnce + thread / 8) + chunk / 4;
    }
    place_ = thread / 8 * kLine + (chunk ^ thread / 8 % 8) * 16;
  }

  // Asks for a line, for the last one where there is none: nobody multiplies it.
  ROCM_KERNELS_DEVICE void load(int, const LineAhead& line, int) {
    load_line(line.index < line.last ? line.index : line.last - 1, 0);
  }

  ROCM_KERNELS_DEVICE void store(int, uint8_t* lds) const {
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
      *reinterpret_cast<Words*>(lds + place_ + i * kRowsAtOnce * kLine) =
          decode_mxfp4(codes_[i], e8m0_scale(exponent_[i]));
    }
  }

  // The line that K cuts: zeros beyond K, of which a chunk of 8 has all or none. `row_bytes`: of
  // bfloat16.
  ROCM_KERNELS_DEVICE void copy_cut(int index, int row_bytes, uint8_t* lds) {
    const int element = index * (kLine / 2) + static_cast<int>(threadIdx.x % 8) * 8;
    load_line(index, element * 2 < row_bytes ? 0 : kOutside);
    store(0, lds);
  }

 private:
  ROCM_KERNELS_DEVICE void load_line(int index, uint32_t hide) {
#pragma unroll
    for (int i = 0; i < kRowLoads; ++i) {
      codes_[i] = __builtin_amdgcn_raw_buffer_load_b32(buffer_, row_[i] | hide, index * 32, 0);
      exponent_[i] =
          __builtin_amdgcn_raw_buffer_load_b8(exponents_, exponent_row_[i] | hide, index * 2, 0);
    }
  }

  Buffer buffer_, exponents_;
  int place_;
  uint32_t row_[kRowLoads], exponent_row_[kRowLoads];  // bytes to what the thread loads
  uint32_t codes_[kRowLoads], exponent_[kRowLoads];
};

// A K block of MXFP4 rows of w and bfloat16 rows of a that meet in a streamed tile, as TileLoader
// has those of other operands. A K block is a line of w: 256 elements, with eight scales a row.
//
//   w   128 bytes a row, through LDS; lane 16 * g + i then has elements 32 * g .. 32 * g + 31 of
//       each half of row i, which share a scale, and decodes them in registers
//   a   512 bytes a row, half by half through LDS, in the same order of k
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

}  // namespace rocm_kernels::cdna::moe
