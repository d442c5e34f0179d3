// A K block of the rows of w and a of a tile: the loads that a wave issues for it, and its matrix
// instructions.
#pragma once

#include "../../../common/cdna/lds_transpose.h"
#include "../../../common/cdna/mfma_sparse.h"
#include "rows.h"

namespace rocm_kernels::cdna {

#if ROCM_KERNELS_CDNA

// Loads of 16 bytes that a lane makes for 16 rows of w, or for 8: half as many.
constexpr int w_loads(MmaKind kind, int block_n) {
  return (block_n < kMmaRows ? 1 : 2) * w_bytes(kind);
}

// A K block of a tile, as a lane loads it.
template <MmaKind kKind, int kBlockM, int kBlockN, bool kBlockScaled>
struct LoadedKBlock {
  static constexpr int kTilesM = mma_tiles_of(kBlockM), kTilesN = mma_tiles_of(kBlockN);
  Words w[kTilesN][w_loads(kKind, kBlockN)];
  Words a[kTilesM][Mma<kKind>::kRowsA / 8 * a_bytes(kKind)];
  float scale_w[kBlockScaled ? kTilesN : 1];  // of the 128 x 128 block
  float scale_a[kBlockScaled ? kTilesM : 1];  // of row lane % 16
};

// The rows of w and a that meet in a tile, seen from one lane.
template <MmaKind kKind, int kBlockM, int kBlockN, bool kBlockScaled>
class TileLoader {
 public:
  static constexpr int kTilesM = mma_tiles_of(kBlockM), kTilesN = mma_tiles_of(kBlockN);
  static constexpr bool kHalf = kBlockN < kMmaRows;
  using KBlock = LoadedKBlock<kKind, kBlockM, kBlockN, kBlockScaled>;
  using MmaType = Mma<kKind>;
  using Sums = Accumulator[kTilesM][kTilesN];

  // RowsA, RowsW: see rows.h.
  template <class RowsA, class RowsW>
  ROCM_KERNELS_DEVICE TileLoader(const RowsA& a, const RowsW& w, int k, int lane)
      : w_(buffer_at(w.base())),
        a_(buffer_at(a.base())),
        scales_w_(buffer_at(w.scales())),
        scales_a_(buffer_at(a.scales())),
        k_(k),
        lane_(lane),
        blocks_w_(w.scale.is_blocked()),
        blocks_a_(a.scale.is_blocked()),
        scale_w_step_(static_cast<uint32_t>(w.scale.block_stride * 4)),
        scale_a_step_(static_cast<uint32_t>(a.scale.block_stride * 4)) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        w_row_[j][half] = w.offset(j * kMmaRows + load_row(half, lane));
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        a_row_[i][half] = a.offset(i * kMmaRows + load_row(half, lane));
      }
    }
    if constexpr (kBlockScaled) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        // Of the rows whose sums the lane has.
        const int row = j * kMmaRows + lane / kMmaRows * 4;
        scale_w_tile_[j] = blocks_w_ ? w.scale_offset(row) : kOutside;
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        scale_a_lane_[i] = blocks_a_ ? a.scale_offset(i * kMmaRows + lane % kMmaRows) : kOutside;
      }
    }
  }

  // From here on load() gives zeros for K blocks from `end` on, and for a last one that is not
  // whole.
  ROCM_KERNELS_DEVICE void end_at(int end) {
    const int whole = k_ / kBlockK;
    end_ = end < whole ? end : whole;
  }

  // Asks for K block `index`.
  ROCM_KERNELS_DEVICE void load(KBlock& block, int index) const {
    const uint32_t hide = index < end_ ? 0 : kOutside;
#pragma unroll
    for (int n = 0; n < kLoadsW; ++n) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        block.w[j][n] = load_words<Cache::kNonTemporal>(
            w_, (w_row_[j][row_half(n)] + load_byte(0, lane_)) | hide,
            index * kBytesW + load_byte<kHalf>(n, 0));
      }
    }
#pragma unroll
    for (int n = 0; n < kLoadsA; ++n) {
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        block.a[i][n] = load_words<Cache::kKeep>(
            a_, (a_row_[i][n % 2] + load_byte(0, lane_)) | hide, index * kBytesA + load_byte(n, 0));
      }
    }
    load_scales(block, index, hide);
  }

  // Whether K ends within a K block: load() gives zeros for that one.
  ROCM_KERNELS_DEVICE bool has_tail() const { return k_ % kBlockK != 0; }

  // The K block that K ends within.
  ROCM_KERNELS_DEVICE void load_tail_block(KBlock& block) const {
    const int index = k_ / kBlockK;
#pragma unroll
    for (int n = 0; n < kLoadsW; ++n) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        block.w[j][n] =
            load_tail(w_, w_row_[j][row_half(n)], index * kBytesW + load_byte<kHalf>(n, lane_),
                      k_ * w_bytes(kKind));
      }
    }
#pragma unroll
    for (int n = 0; n < kLoadsA; ++n) {
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        block.a[i][n] = load_tail(a_, a_row_[i][n % 2], index * kBytesA + load_byte(n, lane_),
                                  k_ * a_bytes(kKind));
      }
    }
    load_scales(block, index, 0);
  }

  // The K block's tiles, all of them, as a lane's fragments.
  struct Fragments {
    Words w[kTilesN][MmaType::kFragmentsW];
    Words a[kTilesM][MmaType::kFragmentsA];
  };
  static constexpr int kTileBytes = transpose_bytes(a_bytes(kKind), w_bytes(kKind));

  // Writes the K block to LDS, one tile after the other, those of a first.
  ROCM_KERNELS_DEVICE void write(const KBlock& block, uint8_t* place) const {
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      LdsTranspose<a_bytes(kKind)>(place + i * kTileBytes, lane_).write(block.a[i]);
    }
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      LdsTranspose<w_bytes(kKind)>(place + (kTilesM + j) * kTileBytes, lane_)
          .template write<kHalf>(block.w[j]);
    }
  }
  // Reads what write() wrote, in this wave or in another.
  ROCM_KERNELS_DEVICE void read(Fragments& fragments, uint8_t* place) const {
    const int row = lane_ % kMmaRows;
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      LdsTranspose<a_bytes(kKind)>(place + i * kTileBytes, lane_)
          .template read<a_bytes(kKind) / w_bytes(kKind)>(fragments.a[i], MmaType::a_row(row));
    }
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      LdsTranspose<w_bytes(kKind)>(place + (kTilesM + j) * kTileBytes, lane_)
          .template read<1>(fragments.w[j], w_row(row));
    }
  }
  ROCM_KERNELS_DEVICE void multiply_add(const Fragments& fragments, Sums& sums) const {
    static_assert(!kBlockScaled, "fragments carry no scales");
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        sums[i][j] = MmaType::multiply_add(fragments.w[j], fragments.a[i], lane_, sums[i][j]);
      }
    }
  }

  // sums += the K block's product. `place`: transpose_bytes() of LDS, this wave's own.
  ROCM_KERNELS_DEVICE void multiply_add(const KBlock& block, uint8_t* place, Sums& sums) const {
    const LdsTranspose<w_bytes(kKind)> transpose_w(place, lane_);
    const LdsTranspose<a_bytes(kKind)> transpose_a(place, lane_);
    const int row = lane_ % kMmaRows;
    Words a[kTilesM][MmaType::kFragmentsA];
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) {
      transpose_a.write(block.a[i]);
      // FP8 w with 16-bit a: the 16 elements of a lane are two chunks of a, side by side.
      transpose_a.template read<a_bytes(kKind) / w_bytes(kKind)>(a[i], MmaType::a_row(row));
    }
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) {
      Words w[MmaType::kFragmentsW];
      transpose_w.template write<kHalf>(block.w[j]);
      transpose_w.template read<1>(w, w_row(row));
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        if constexpr (kBlockScaled) {
          const Accumulator part = MmaType::multiply_add(w, a[i], lane_, Accumulator{});
          sums[i][j] += part * ((blocks_a_ ? block.scale_a[i] : 1.0f) *
                                (blocks_w_ ? block.scale_w[j] : 1.0f));
        } else {
          sums[i][j] = MmaType::multiply_add(w, a[i], lane_, sums[i][j]);
        }
      }
    }
  }

 private:
  static constexpr int kLoadsW = w_loads(kKind, kBlockN);
  static constexpr int kLoadsA = MmaType::kRowsA / 8 * a_bytes(kKind);
  static constexpr int kBytesW = kBlockK * w_bytes(kKind), kBytesA = kBlockK * a_bytes(kKind);

  // Which eight rows of a tile of w load `n` takes.
  static ROCM_KERNELS_DEVICE constexpr int row_half(int n) { return kHalf ? 0 : n % 2; }
  // Row of the tile of w that a lane reads as its row `row`: a tile of 8 rows is seen twice, and
  // the sums of the second are dropped.
  static ROCM_KERNELS_DEVICE constexpr int w_row(int row) { return kHalf ? row % 8 : row; }

  ROCM_KERNELS_DEVICE void load_scales(KBlock& block, int index, uint32_t hide) const {
    if constexpr (kBlockScaled) {
#pragma unroll
      for (int j = 0; j < kTilesN; ++j) {
        block.scale_w[j] = load_float(scales_w_, scale_w_tile_[j] | hide, index * scale_w_step_);
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i) {
        block.scale_a[i] = load_float(scales_a_, scale_a_lane_[i] | hide, index * scale_a_step_);
      }
    }
  }

  Buffer w_, a_, scales_w_, scales_a_;
  int k_, lane_, end_ = 0;
  bool blocks_w_, blocks_a_;
  uint32_t w_row_[kTilesN][2], a_row_[kTilesM][2];  // bytes to the rows that the lane loads
  uint32_t scale_w_tile_[kTilesN], scale_a_lane_[kTilesM];
  uint32_t scale_w_step_, scale_a_step_;  // bytes between blocks of K
};

// What made these sums stays before it, and every load after it. Left alone, the
// compiler asks for a K block before the last use of the one whose registers it is to take: then
// the two need different registers, and copies between them that wait for all that is in flight.
template <int kTilesM, int kTilesN>
ROCM_KERNELS_DEVICE void keep_order(Accumulator (&sums)[kTilesM][kTilesN]) {
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j) asm volatile("" : "+v"(sums[i][j])::"memory");
  }
  __builtin_amdgcn_sched_barrier(0);
}

// A wave's K blocks [index, last) of a tile, with kNumStages of them in flight: it waits for the
// oldest, multiplies it and asks for the next into the same registers, so the number of bytes under
// way never drops until its part ends. `k_blocks`: of the tile; `place`: transpose_bytes() of LDS,
// this wave's own; `meanwhile()`: what there is to do once the first loads are under way.
template <int kNumStages, class Loader, class Meanwhile>
ROCM_KERNELS_DEVICE void stream_k_blocks(Loader& loader, int index, int last, int k_blocks,
                                         uint8_t* place, typename Loader::Sums& sums,
                                         const Meanwhile& meanwhile) {
  const bool has_tail = index < last && last == k_blocks && loader.has_tail();
  loader.end_at(last);
  typename Loader::KBlock stages[kNumStages];
#pragma unroll
  for (int stage = 0; stage < kNumStages; ++stage) {
    loader.load(stages[stage], index + stage);
    // Stage after stage, as in the loop: its first wait must fit the loads of both.
    __builtin_amdgcn_sched_barrier(0);
  }
  meanwhile();
  for (; index + kNumStages < last; index += kNumStages) {
#pragma unroll
    for (int stage = 0; stage < kNumStages; ++stage) {
      loader.multiply_add(stages[stage], place, sums);
      keep_order(sums);
      loader.load(stages[stage], index + stage + kNumStages);
      __builtin_amdgcn_sched_barrier(0);
    }
  }
#pragma unroll
  for (int stage = 0; stage < kNumStages; ++stage) {
    loader.multiply_add(stages[stage], place, sums);
  }
  if (has_tail) {
    typename Loader::KBlock tail;
    loader.load_tail_block(tail);
    loader.multiply_add(tail, place, sums);
  }
}

template <int kNumStages, class Loader>
ROCM_KERNELS_DEVICE void stream_k_blocks(Loader& loader, int index, int last, int k_blocks,
                                         uint8_t* place, typename Loader::Sums& sums) {
  stream_k_blocks<kNumStages>(loader, index, last, k_blocks, place, sums, [] {});
}

#endif

}  // namespace rocm_kernels::cdna
