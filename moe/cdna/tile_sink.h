// The Sink (blocks/product/sink.h) of a tile of a grouped product, whose sums lie in the registers
// of the waves that own them: scales and bias, then the activation and perhaps the quantisation of
// h, or rows to where they belong; one rounding, the store.
#pragma once

#include "../../blocks/product/cdna/mma_line.h"
#include "../../blocks/product/cdna/store.h"
#include "../../blocks/product/sink.h"
#include "../../blocks/rows/gpu/quantize.h"
#include "../../common/cdna/sync.h"
#include "rows.h"
#include "tiles.h"

namespace rocm_kernels::cdna::moe {

#if ROCM_KERNELS_CDNA

template <int kTile, bool kGateUp>
class GroupedTileSink {
 public:
  static constexpr GemmTile kShape = kMoeTiles[kTile];
  static constexpr int kPartsM = kShape.wave_m() / kPart, kPartsN = kShape.wave_n() / kPart;
  static constexpr int kQuads = kPartSums / 4;  // runs of four neighbours of a row
  static constexpr bool kWholeGroups = kShape.block_n == 2 * kScaleBlock;
  using Sums = PartSums[kPartsN][kPartsM];

  // `part`: of K.
  ROCM_KERNELS_DEVICE GroupedTileSink(const GroupedProblem& p, const RowTile& tile, int n_begin,
                                      int part, int wave, int lane, uint8_t* lds)
      : p_(p),
        tile_(tile),
        n_begin_(n_begin),
        part_(part),
        wave_n_(wave / kShape.waves_m),
        row_m_(wave % kShape.waves_m * kShape.wave_m() + lane % kPart),
        half_(lane / kPart),
        factors_(*reinterpret_cast<Factors*>(lds)) {}

  ROCM_KERNELS_DEVICE void finish(const Sums& sums) {
    fetch_factors();
    workgroup_barrier();
    if constexpr (!kGateUp) {
      store_rows(sums);
    } else if constexpr (kWholeGroups) {
      if (p_.out_scales != nullptr) {
        store_groups(sums);
      } else {
        store_h(sums);
      }
    } else {
      store_h(sums);
    }
  }

 private:
  // In LDS: what rows and columns are multiplied by, the bias; the greatest of a row's h that each
  // wave has.
  struct Factors {
    float scale_w[kShape.block_n];
    float bias[kShape.block_n];
    float scale_a[kShape.block_m];
    float greatest[kShape.waves_n][kShape.block_m];
  };
  static_assert(sizeof(Factors) <= kShape.lds_bytes(), "the factors lie where the lines were");

  ROCM_KERNELS_DEVICE void fetch_factors() const {
    const ExpertRows<kGateUp, kPart> rows(p_, tile_.expert, n_begin_, 1);
    for (int i = threadIdx.x; i < kShape.block_n; i += kShape.threads()) {
      const int row = rows.w_row(i);
      factors_.scale_w[i] = row >= 0 ? rows.scale.outer(row) : 0.0f;
      factors_.bias[i] = row >= 0 && part_ == 0 ? p_.bias(tile_.expert, row) : 0.0f;
    }
    for (int i = threadIdx.x; i < kShape.block_m; i += kShape.threads()) {
      const int row = tile_.begin + i;
      factors_.scale_a[i] = row < tile_.end ? p_.scale_a.outer(p_.a_row(row)) : 0.0f;
    }
  }

  // Four neighbours of a row: scaled, with their bias.
  ROCM_KERNELS_DEVICE Accumulator value_of(const Sums& sums, int j, int i, int quad) const {
    const int at_n = wave_n_ * kShape.wave_n() + j * kPart + quad * 8 + half_ * 4;
    const PartSums& from = sums[j][i];
    Accumulator value = {from[4 * quad], from[4 * quad + 1], from[4 * quad + 2],
                         from[4 * quad + 3]};
    value *= factors_.scale_a[row_m_ + i * kPart];
    value *= *reinterpret_cast<const Accumulator*>(factors_.scale_w + at_n);
    value += *reinterpret_cast<const Accumulator*>(factors_.bias + at_n);
    return value;
  }

  ROCM_KERNELS_DEVICE void store_four(int64_t at, Accumulator value, int count) const {
    cdna::store_four(p_.out, p_.out_dtype, at, value, count, p_.wide_stores);
  }

  ROCM_KERNELS_DEVICE void store_rows(const Sums& sums) const {
#pragma unroll
    for (int i = 0; i < kPartsM; ++i) {
      const int row = tile_.begin + row_m_ + i * kPart;
      if (row >= tile_.end) continue;
      const int64_t start = p_.out_row(row, part_);
#pragma unroll
      for (int j = 0; j < kPartsN; ++j) {
#pragma unroll
        for (int quad = 0; quad < kQuads; ++quad) {
          const int column =
              n_begin_ + wave_n_ * kShape.wave_n() + j * kPart + quad * 8 + half_ * 4;
          if (column >= p_.n) continue;
          store_four(start + column, value_of(sums, j, i, quad), p_.n - column);
        }
      }
    }
  }

  // Four neighbours of a row of h.
  ROCM_KERNELS_DEVICE Accumulator h_of(const Sums& sums, int i, int quad) const {
    const Accumulator gate = value_of(sums, 0, i, quad), up = value_of(sums, 1, i, quad);
    Accumulator h;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float one = gate[e], other = up[e];
      h[e] = gated(p_.activation, p_.limit, one, other);
    }
    return h;
  }
  // The column of h of the first of them.
  ROCM_KERNELS_DEVICE int h_column(int quad) const {
    return n_begin_ / 2 + wave_n_ * kPart + quad * 8 + half_ * 4;
  }

  ROCM_KERNELS_DEVICE void store_h(const Sums& sums) const {
    const int columns = p_.n / 2;
#pragma unroll
    for (int i = 0; i < kPartsM; ++i) {
      const int row = tile_.begin + row_m_ + i * kPart;
      if (row >= tile_.end) continue;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int column = h_column(quad);
        if (column >= columns) continue;
        store_four(row * p_.out_stride + column, h_of(sums, i, quad), columns - column);
      }
    }
  }

  // h as FP8 of the target's dialect, with one scale for the 128 columns that the tile has of a
  // row.
  ROCM_KERNELS_DEVICE void store_groups(const Sums& sums) const {
    const int columns = p_.n / 2;
    Accumulator h[kPartsM][kQuads];
#pragma unroll
    for (int i = 0; i < kPartsM; ++i) {
      float greatest = 0.0f;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        h[i][quad] = h_of(sums, i, quad);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // 0 beyond h's columns, where scales and biases are 0 and so are gate and up.
          const float value = h[i][quad][e];
          greatest = fmaxf(greatest, fabsf(value));
        }
      }
      // The lane that has the other half of the row's columns.
      const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
      const float other = __builtin_bit_cast(
          float,
          __builtin_amdgcn_ds_bpermute((lane ^ kPart) * 4, __builtin_bit_cast(int, greatest)));
      greatest = fmaxf(greatest, other);
      if (half_ == 0) factors_.greatest[wave_n_][row_m_ + i * kPart] = greatest;
    }
    workgroup_barrier();
    const float largest = kPreferredFnuz ? 240.0f : 448.0f;
#pragma unroll
    for (int i = 0; i < kPartsM; ++i) {
      const int row = tile_.begin + row_m_ + i * kPart;
      if (row >= tile_.end) continue;
      float greatest = 0.0f;
#pragma unroll
      for (int wave = 0; wave < kShape.waves_n; ++wave) {
        greatest = fmaxf(greatest, factors_.greatest[wave][row_m_ + i * kPart]);
      }
      const float scale = p_.scale_rounding(fmaxf(fminf(greatest, FLT_MAX) / largest, kMinScale));
      const float inverse = 1.0f / scale;
      const int groups = (columns + static_cast<int>(kScaleBlock) - 1) / kScaleBlock;
      if (wave_n_ == 0 && half_ == 0) {
        p_.out_scales[static_cast<int64_t>(row) * groups + n_begin_ / (2 * kScaleBlock)] = scale;
      }
      auto* const out = static_cast<uint8_t*>(p_.out) + row * p_.out_stride;
#pragma unroll
      for (int quad = 0; quad < kQuads; ++quad) {
        const int column = h_column(quad);
        const Accumulator& v = h[i][quad];
        const uint32_t codes = fp8x4_from_float<kPreferredFnuz>(v[0] * inverse, v[1] * inverse,
                                                                v[2] * inverse, v[3] * inverse);
        if (p_.wide_stores && column + 4 <= columns) {
          *reinterpret_cast<uint32_t*>(out + column) = codes;
        } else {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            if (column + e < columns) out[column + e] = static_cast<uint8_t>(codes >> (8 * e));
          }
        }
      }
    }
  }

  const GroupedProblem& p_;
  const RowTile tile_;
  const int n_begin_, part_, wave_n_, row_m_, half_;
  Factors& factors_;
};

#endif

}  // namespace rocm_kernels::cdna::moe
