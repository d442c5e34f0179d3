// Operand kinds of the skinny GEMM on CDNA3 and CDNA4: how a tile lies in memory, in LDS and in the
// lanes that feed the matrix instructions.
//
// A tile is 16 rows by one *granule* of 128 elements of K: 128 or 256 bytes of each row. It is
// loaded line by line, eight lanes to a 128-byte line, and so written to LDS; from there lane
// l = 16 * g + i reads 16 contiguous bytes of row i, for the matrix instructions want each lane to
// hold one row. They also want 4, 8 or 16 elements of k in a lane in an order of their own; but the
// product does not care how k is permuted as long as a and w are permuted alike, so the registers
// go in as they were read.
#pragma once

#include "memory.h"

namespace rocm_kernels {

enum class Operands : int32_t {
  kFp8,        // FP8 x FP8, the target's dialect
  kFp8Sparse,  // the same for M <= 8: a is the 4:2 sparse operand
  kFloat16,    // float16 x float16
  kBFloat16,
  kFloat16Fp8,  // float16 a, FP8 w decoded in registers
  kBFloat16Fp8,
};

constexpr int kTile = 16;      // rows of w, and of a, that a matrix instruction takes
constexpr int kGranule = 128;  // elements of K that are loaded, scaled and multiplied together
constexpr int kLine = 128;     // bytes that eight lanes load together

// Bytes of an element.
constexpr int w_bytes(Operands kind) {
  return kind == Operands::kFloat16 || kind == Operands::kBFloat16 ? 2 : 1;
}
constexpr int a_bytes(Operands kind) {
  return kind == Operands::kFp8 || kind == Operands::kFp8Sparse ? 1 : 2;
}

// Loads of 16 bytes that a lane makes for a tile of 16 rows of w, or of 8: half as many. The sparse
// operand holds 8 rows.
constexpr int w_loads(Operands kind, int rows) { return (rows < kTile ? 1 : 2) * w_bytes(kind); }
constexpr int a_loads(Operands kind) {
  return kind == Operands::kFp8Sparse ? 1 : 2 * a_bytes(kind);
}
// Fragments of 16 bytes that a lane then reads.
constexpr int w_fragments(Operands kind) { return 2 * w_bytes(kind); }
constexpr int a_fragments(Operands kind) { return 2 * a_bytes(kind); }

// Load `n` of a lane: row load_row(n, lane) of the tile, at byte load_byte(n, lane) of the granule.
// A tile of 8 rows has the first half of the rows of each line.
ROCM_KERNELS_DEVICE constexpr int load_row(int n, int lane) { return n % 2 * 8 + lane / 8; }
template <bool kHalf = false>
ROCM_KERNELS_DEVICE constexpr int load_byte(int n, int lane) {
  return (kHalf ? n : n / 2) * kLine + lane % 8 * 16;
}

#if SKINNY_GEMM_CDNA

namespace detail {

using Words2 = uint32_t __attribute__((ext_vector_type(2)));
using Words8 = uint32_t __attribute__((ext_vector_type(8)));
using Half4 = _Float16 __attribute__((ext_vector_type(4)));
using Half8 = _Float16 __attribute__((ext_vector_type(8)));
using Short4 = short __attribute__((ext_vector_type(4)));
using BFloat8 = __bf16 __attribute__((ext_vector_type(8)));

ROCM_KERNELS_DEVICE Words2 low(Words v) { return __builtin_shufflevector(v, v, 0, 1); }
ROCM_KERNELS_DEVICE Words2 high(Words v) { return __builtin_shufflevector(v, v, 2, 3); }

ROCM_KERNELS_DEVICE Accumulator mfma_fp8(Words2 x, Words2 y, Accumulator sum) {
  return __builtin_amdgcn_mfma_f32_16x16x32_fp8_fp8(__builtin_bit_cast(long, x),
                                                    __builtin_bit_cast(long, y), sum, 0, 0, 0);
}

// 16 bytes a lane of two 16-bit operands.
template <bool kBFloat>
ROCM_KERNELS_DEVICE Accumulator mfma_16bit(Words x, Words y, Accumulator sum) {
#if defined(__gfx950__)
  if constexpr (kBFloat) {
    return __builtin_amdgcn_mfma_f32_16x16x32_bf16(__builtin_bit_cast(BFloat8, x),
                                                   __builtin_bit_cast(BFloat8, y), sum, 0, 0, 0);
  } else {
    return __builtin_amdgcn_mfma_f32_16x16x32_f16(__builtin_bit_cast(Half8, x),
                                                  __builtin_bit_cast(Half8, y), sum, 0, 0, 0);
  }
#else
  const auto multiply = [](Words2 p, Words2 q, Accumulator partial) {
    if constexpr (kBFloat) {
      return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
          __builtin_bit_cast(Short4, p), __builtin_bit_cast(Short4, q), partial, 0, 0, 0);
    } else {
      return __builtin_amdgcn_mfma_f32_16x16x16f16(__builtin_bit_cast(Half4, p),
                                                   __builtin_bit_cast(Half4, q), partial, 0, 0, 0);
    }
  };
  return multiply(high(x), high(y), multiply(low(x), low(y), sum));
#endif
}

// Four FP8 codes to four 16-bit floats: exact, since both 16-bit formats hold every FP8 value.
template <bool kBFloat>
ROCM_KERNELS_DEVICE Words2 decode(uint32_t codes) {
  const auto first = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(codes), false);
  const auto second = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(codes), true);
  const float f0 = first[0], f1 = first[1], f2 = second[0], f3 = second[1];
  if constexpr (kBFloat) {
    // The upper halves of two floats, packed: v_perm_b32 picks bytes 2, 3 of each.
    const auto pack = [](float x, float y) {
      return __builtin_amdgcn_perm(__builtin_bit_cast(uint32_t, y), __builtin_bit_cast(uint32_t, x),
                                   0x07060302u);
    };
    return Words2{pack(f0, f1), pack(f2, f3)};
  } else {
    return Words2{__builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(f0, f1)),
                  __builtin_bit_cast(uint32_t, __builtin_amdgcn_cvt_pkrtz(f2, f3))};
  }
}

template <bool kBFloat>
ROCM_KERNELS_DEVICE Words decode8(Words2 codes) {
  return __builtin_shufflevector(decode<kBFloat>(codes.x), decode<kBFloat>(codes.y), 0, 1, 2, 3);
}

}  // namespace detail

// One granule of one 16 x 16 tile: sum += w[16 rows] . a[16 rows]^T over 128 elements of k.
//
// The dense kinds take w as the left operand: lane 16 * g + j holds rows 4 * g .. 4 * g + 3 of w
// for row j of a. The sparse kind takes a as the left one, see fold_sparse().
template <Operands kKind>
ROCM_KERNELS_DEVICE Accumulator multiply(const Words (&w)[w_fragments(kKind)],
                                         const Words (&a)[a_fragments(kKind)], int lane,
                                         Accumulator sum) {
  if constexpr (kKind == Operands::kFp8) {
#if defined(__gfx950__)
    // 128 elements of k in one instruction, 32 bytes a lane; unit block scales (0 means none).
    const auto join = [](Words x, Words y) {
      return __builtin_bit_cast(int __attribute__((ext_vector_type(8))),
                                __builtin_shufflevector(x, y, 0, 1, 2, 3, 4, 5, 6, 7));
    };
    sum = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(join(w[0], w[1]), join(a[0], a[1]), sum,
                                                           0, 0, 0, 0, 0, 0);
#else
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      sum = detail::mfma_fp8(detail::low(w[step]), detail::low(a[step]), sum);
      sum = detail::mfma_fp8(detail::high(w[step]), detail::high(a[step]), sum);
    }
#endif
  } else if constexpr (kKind == Operands::kFp8Sparse) {
    // Of each four k, sparse row 2r holds the first two of dense row r, sparse row 2r + 1 the last
    // two: lanes load row i / 2 and keep one half of every word.
    const bool odd = lane & 1;
    const uint32_t select = odd ? 0x07060302u : 0x05040100u;
    const int positions = odd ? static_cast<int>(0xEEEEEEEEu) : 0x44444444;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const detail::Words2 kept = {__builtin_amdgcn_perm(a[step].y, a[step].x, select),
                                   __builtin_amdgcn_perm(a[step].w, a[step].z, select)};
      sum = __builtin_amdgcn_smfmac_f32_16x16x64_fp8_fp8(
          __builtin_bit_cast(int __attribute__((ext_vector_type(2))), kept),
          __builtin_bit_cast(int __attribute__((ext_vector_type(4))), w[step]), sum, positions, 0,
          0);
    }
  } else if constexpr (kKind == Operands::kFloat16 || kKind == Operands::kBFloat16) {
#pragma unroll
    for (int load = 0; load < w_fragments(kKind); ++load) {
      sum = detail::mfma_16bit<kKind == Operands::kBFloat16>(w[load], a[load], sum);
    }
  } else {
    constexpr bool kBFloat = kKind == Operands::kBFloat16Fp8;
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      sum = detail::mfma_16bit<kBFloat>(detail::decode8<kBFloat>(detail::low(w[step])), a[2 * step],
                                        sum);
      sum = detail::mfma_16bit<kBFloat>(detail::decode8<kBFloat>(detail::high(w[step])),
                                        a[2 * step + 1], sum);
    }
  }
  return sum;
}

// Row of the tile of `a` whose fragments a lane reads as its row `row`.
template <Operands kKind>
ROCM_KERNELS_DEVICE int a_row(int row) {
  return kKind == Operands::kFp8Sparse ? row / 2 : row;
}

// A wave's place in LDS where a tile changes from the order of its loads to that of its fragments.
// One wave's LDS operations keep their order, so tile after tile passes through the same place with
// no wait but for the data. The 16-byte chunks of a line are permuted by row, so that neither the
// writes (a line in eight lanes) nor the reads (eight rows in eight lanes) meet on a bank.
template <int kBytes>  // of an element
class Turntable {
 public:
  static constexpr int kRowBytes = kGranule * kBytes;

  ROCM_KERNELS_DEVICE Turntable(uint8_t* place, int lane) : place_(place), lane_(lane) {}

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
    const int group = lane_ / kTile;
#pragma unroll
    for (int n = 0; n < kFragments; ++n) {
      // Chunk of the row: (n / kPerGroup) * 4 * kPerGroup + group * kPerGroup + n % kPerGroup.
      const int in_line = kPerGroup == 1 ? n % 2 * 4 + group : group * 2 + n % 2;
      fragments[n] = *at(row * kRowBytes + (in_line ^ row % 8) * 16, n / 2 * kLine);
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

}  // namespace rocm_kernels
