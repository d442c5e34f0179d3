// A granule of a tile: how a wave asks memory for it, and how it multiplies it.
#pragma once

#include "config.h"
#include "operands.h"
#include "problem.h"

namespace rocm_kernels {

#if SKINNY_GEMM_CDNA

// 128 elements of k of some tiles of 16 rows (or of one of 8 rows of w), as a lane loads them.
template <Operands kKind, int kRowTilesA, int kRowsW, bool kBlockScaled>
struct Granule {
  static constexpr int kRowTilesW = row_tiles_of(kRowsW);
  Words w[kRowTilesW][w_loads(kKind, kRowsW)];
  Words a[kRowTilesA][a_loads(kKind)];
  float scale_w[kBlockScaled ? kRowTilesW : 1];  // of the 128 x 128 block
  float scale_a[kBlockScaled ? kRowTilesA : 1];  // of row lane % 16
};

// The rows of w and a that meet in a tile, seen from one lane.
template <Operands kKind, int kRowTilesA, int kRowsW, bool kBlockScaled>
class TileSource {
 public:
  static constexpr int kRowTilesW = row_tiles_of(kRowsW);
  static constexpr bool kHalf = kRowsW < kTile;
  using GranuleType = Granule<kKind, kRowTilesA, kRowsW, kBlockScaled>;
  using Sums = Accumulator[kRowTilesA][kRowTilesW];

  // The tile's rows of w begin at row_begin.
  ROCM_KERNELS_DEVICE TileSource(const SkinnyGemmProblem& p, int row_begin, int lane)
      : w_(buffer_at(p.w + row_begin * p.w_stride)),
        a_(buffer_at(p.a)),
        scales_w_(buffer_at(p.scale_w.data)),
        scales_a_(buffer_at(p.scale_a.data)),
        k_(p.k),
        lane_(lane),
        blocks_w_(p.scale_w.kind == ScaleView::Kind::kBlock),
        blocks_a_(p.scale_a.kind == ScaleView::Kind::kBlock),
        scale_w_step_(static_cast<uint32_t>(p.scale_w.block_stride * 4)),
        scale_a_step_(static_cast<uint32_t>(p.scale_a.block_stride * 4)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kRowTilesW; ++j) {
        const int row = j * kTile + load_row(half, lane);
        w_row_[j][half] =
            row_begin + row < p.n ? static_cast<uint32_t>(row * p.w_stride) : kOutside;
      }
#pragma unroll
      for (int i = 0; i < kRowTilesA; ++i) {
        const int row = i * kTile + load_row(half, lane);
        a_row_[i][half] = row < p.m ? static_cast<uint32_t>(row * p.a_stride) : kOutside;
      }
    }
    if constexpr (kBlockScaled) {
#pragma unroll
      for (int j = 0; j < kRowTilesW; ++j) {
        const int row = row_begin + j * kTile, block = row / static_cast<int>(kScaleBlock);
        scale_w_tile_[j] = blocks_w_ && row < p.n
                               ? static_cast<uint32_t>(block * p.scale_w.row_stride * 4)
                               : kOutside;
      }
#pragma unroll
      for (int i = 0; i < kRowTilesA; ++i) {
        const int row = i * kTile + lane % kTile;
        scale_a_lane_[i] = blocks_a_ && row < p.m
                               ? static_cast<uint32_t>(row * p.scale_a.row_stride * 4)
                               : kOutside;
      }
    }
  }

  // From here on load() gives zeros for granules from `end` on, and for one that K cuts.
  ROCM_KERNELS_DEVICE void end_at(int end) {
    const int whole = k_ / kGranule;
    end_ = end < whole ? end : whole;
  }

  // Asks for granule `index` of K.
  ROCM_KERNELS_DEVICE void load(GranuleType& granule, int index) const {
    const uint32_t hide = index < end_ ? 0 : kOutside;
#pragma unroll
    for (int n = 0; n < kLoadsW; ++n) {
#pragma unroll
      for (int j = 0; j < kRowTilesW; ++j) {
        granule.w[j][n] = load_words<Cache::kNonTemporal>(
            w_, (w_row_[j][row_half(n)] + load_byte(0, lane_)) | hide,
            index * kBytesW + load_byte<kHalf>(n, 0));
      }
    }
#pragma unroll
    for (int n = 0; n < kLoadsA; ++n) {
#pragma unroll
      for (int i = 0; i < kRowTilesA; ++i) {
        granule.a[i][n] = load_words<Cache::kKeep>(
            a_, (a_row_[i][n % 2] + load_byte(0, lane_)) | hide, index * kBytesA + load_byte(n, 0));
      }
    }
    load_scales(granule, index, hide);
  }

  // Whether K cuts a granule: load() gives zeros for that one.
  ROCM_KERNELS_DEVICE bool has_tail() const { return k_ % kGranule != 0; }

  // The granule that K cuts.
  ROCM_KERNELS_DEVICE void load_cut_granule(GranuleType& granule) const {
    const int index = k_ / kGranule;
#pragma unroll
    for (int n = 0; n < kLoadsW; ++n) {
#pragma unroll
      for (int j = 0; j < kRowTilesW; ++j) {
        granule.w[j][n] =
            load_tail(w_, w_row_[j][row_half(n)], index * kBytesW + load_byte<kHalf>(n, lane_),
                      k_ * w_bytes(kKind));
      }
    }
#pragma unroll
    for (int n = 0; n < kLoadsA; ++n) {
#pragma unroll
      for (int i = 0; i < kRowTilesA; ++i) {
        granule.a[i][n] = load_tail(a_, a_row_[i][n % 2], index * kBytesA + load_byte(n, lane_),
                                    k_ * a_bytes(kKind));
      }
    }
    load_scales(granule, index, 0);
  }

  // The granule's tiles, all of them, as a lane's fragments.
  struct Fragments {
    Words w[kRowTilesW][w_fragments(kKind)];
    Words a[kRowTilesA][a_fragments(kKind)];
  };
  static constexpr int kTileBytes = turn_bytes(a_bytes(kKind), w_bytes(kKind));

  // Writes the granule to LDS, one tile after the other, those of a first.
  ROCM_KERNELS_DEVICE void turn(const GranuleType& granule, uint8_t* place) const {
#pragma unroll
    for (int i = 0; i < kRowTilesA; ++i) {
      Turntable<a_bytes(kKind)>(place + i * kTileBytes, lane_).write(granule.a[i]);
    }
#pragma unroll
    for (int j = 0; j < kRowTilesW; ++j) {
      Turntable<w_bytes(kKind)>(place + (kRowTilesA + j) * kTileBytes, lane_)
          .template write<kHalf>(granule.w[j]);
    }
  }
  // Reads what turn() wrote, in this wave or in another.
  ROCM_KERNELS_DEVICE void read(Fragments& fragments, uint8_t* place) const {
    const int row = lane_ % kTile;
#pragma unroll
    for (int i = 0; i < kRowTilesA; ++i) {
      Turntable<a_bytes(kKind)>(place + i * kTileBytes, lane_)
          .template read<a_bytes(kKind) / w_bytes(kKind)>(fragments.a[i], a_row<kKind>(row));
    }
#pragma unroll
    for (int j = 0; j < kRowTilesW; ++j) {
      Turntable<w_bytes(kKind)>(place + (kRowTilesA + j) * kTileBytes, lane_)
          .template read<1>(fragments.w[j], w_row(row));
    }
  }
  ROCM_KERNELS_DEVICE void multiply_add(const Fragments& fragments, Sums& sums) const {
    static_assert(!kBlockScaled, "fragments carry no scales");
#pragma unroll
    for (int j = 0; j < kRowTilesW; ++j) {
#pragma unroll
      for (int i = 0; i < kRowTilesA; ++i) {
        sums[i][j] = multiply<kKind>(fragments.w[j], fragments.a[i], lane_, sums[i][j]);
      }
    }
  }

  // sums += the granule's product. `place`: LDS of this wave, turn_bytes() in config.h.
  ROCM_KERNELS_DEVICE void multiply_add(const GranuleType& granule, uint8_t* place,
                                        Sums& sums) const {
    const Turntable<w_bytes(kKind)> turn_w(place, lane_);
    const Turntable<a_bytes(kKind)> turn_a(place, lane_);
    const int row = lane_ % kTile;
    Words a[kRowTilesA][a_fragments(kKind)];
#pragma unroll
    for (int i = 0; i < kRowTilesA; ++i) {
      turn_a.write(granule.a[i]);
      // FP8 w with 16-bit a: the 16 elements of a lane are two chunks of a, side by side.
      turn_a.template read<a_bytes(kKind) / w_bytes(kKind)>(a[i], a_row<kKind>(row));
    }
#pragma unroll
    for (int j = 0; j < kRowTilesW; ++j) {
      Words w[w_fragments(kKind)];
      turn_w.template write<kHalf>(granule.w[j]);
      turn_w.template read<1>(w, w_row(row));
#pragma unroll
      for (int i = 0; i < kRowTilesA; ++i) {
        if constexpr (kBlockScaled) {
          const Accumulator part = multiply<kKind>(w, a[i], lane_, Accumulator{});
          sums[i][j] += part * ((blocks_a_ ? granule.scale_a[i] : 1.0f) *
                                (blocks_w_ ? granule.scale_w[j] : 1.0f));
        } else {
          sums[i][j] = multiply<kKind>(w, a[i], lane_, sums[i][j]);
        }
      }
    }
  }

 private:
  static constexpr int kLoadsW = w_loads(kKind, kRowsW), kLoadsA = a_loads(kKind);
  static constexpr int kBytesW = kGranule * w_bytes(kKind), kBytesA = kGranule * a_bytes(kKind);

  // Which eight rows of a tile of w load `n` takes.
  static ROCM_KERNELS_DEVICE constexpr int row_half(int n) { return kHalf ? 0 : n % 2; }
  // Row of the tile of w that a lane reads as its row `row`: a tile of 8 rows is seen twice, and
  // the sums of the second are dropped.
  static ROCM_KERNELS_DEVICE constexpr int w_row(int row) { return kHalf ? row % 8 : row; }

  ROCM_KERNELS_DEVICE void load_scales(GranuleType& granule, int index, uint32_t hide) const {
    if constexpr (kBlockScaled) {
#pragma unroll
      for (int j = 0; j < kRowTilesW; ++j) {
        granule.scale_w[j] = load_float(scales_w_, scale_w_tile_[j] | hide, index * scale_w_step_);
      }
#pragma unroll
      for (int i = 0; i < kRowTilesA; ++i) {
        granule.scale_a[i] = load_float(scales_a_, scale_a_lane_[i] | hide, index * scale_a_step_);
      }
    }
  }

  Buffer w_, a_, scales_w_, scales_a_;
  int k_, lane_, end_ = 0;
  bool blocks_w_, blocks_a_;
  uint32_t w_row_[kRowTilesW][2], a_row_[kRowTilesA][2];  // bytes to the rows that the lane loads
  uint32_t scale_w_tile_[kRowTilesW], scale_a_lane_[kRowTilesA];
  uint32_t scale_w_step_, scale_a_step_;  // bytes between blocks of K
};

// Everything that made these sums comes before it, and every request after it. Left alone, the
// compiler asks for a granule before the last use of the one whose registers it is to take: then
// the two need different registers, and copies between them that wait for all that is in flight.
template <int kRowTilesA, int kRowTilesW>
ROCM_KERNELS_DEVICE void keep_order(Accumulator (&sums)[kRowTilesA][kRowTilesW]) {
#pragma unroll
  for (int i = 0; i < kRowTilesA; ++i) {
#pragma unroll
    for (int j = 0; j < kRowTilesW; ++j) asm volatile("" : "+v"(sums[i][j])::"memory");
  }
  __builtin_amdgcn_sched_barrier(0);
}

// The kernel's one argument, from memory again: what only the end needs would otherwise sit in
// scalar registers through the loop, or be spilled.
ROCM_KERNELS_DEVICE const SkinnyGemmProblem& reread_arguments() {
  auto arguments = __builtin_amdgcn_kernarg_segment_ptr();
  asm volatile("" : "+s"(arguments));
  return *(const SkinnyGemmProblem*)arguments;
}

#endif

}  // namespace rocm_kernels
