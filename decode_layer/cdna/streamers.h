// The waves that stream weights and multiply; decode_layer.hip has the timeline.
#pragma once

#include "../../blocks/product/cdna/tile_loader.h"
#include "../../blocks/product/schedule.h"
#include "problem.h"

namespace rocm_kernels::cdna::decode {

#if ROCM_KERNELS_CDNA

constexpr int kStages = 8;  // K blocks of a streamer under way

// The K blocks of a streamer, in the order in which it takes them: its part of each tile of its
// workgroup, tile after tile.
class Walk {
 public:
  template <typename T>
  ROCM_KERNELS_DEVICE Walk(const Product<T>& p, int streamer) : tiles_(p.tiles) {
    const EvenSplit parts = EvenSplit::of(p.k_blocks, kStreamers);
    begin_ = parts.begin_of(streamer), end_ = parts.begin_of(streamer + 1);
    tile_ = blockIdx.x, k_ = begin_;
  }
  ROCM_KERNELS_DEVICE bool is_over() const { return tile_ >= tiles_; }
  ROCM_KERNELS_DEVICE int tile() const { return tile_; }
  ROCM_KERNELS_DEVICE int k() const { return k_; }

  // One K block on; whether that ends the tile.
  ROCM_KERNELS_DEVICE bool ends_tile() {
    if (++k_ < end_) return false;
    k_ = begin_;
    tile_ += gridDim.x;
    return true;
  }

 private:
  int tiles_, tile_, k_, begin_, end_;
};

// Asks for a streamer's weights of a product, ahead of their use.
class WeightStream {
 public:
  template <typename T>
  ROCM_KERNELS_DEVICE WeightStream(const Product<T>& p, int streamer, int lane)
      : walk_(p, streamer),
        w_(buffer_at(p.w)),
        lane_offset_(load_row(0, lane) * p.row_bytes + load_byte(0, lane)),
        half_bytes_(p.half_rows * p.row_bytes),
        tile_bytes_(p.tile_rows * p.row_bytes) {}

  // The next K block: 8 rows in each of two loads; zeros, which nothing fetches, behind the last.
  ROCM_KERNELS_DEVICE void ask(Words (&block)[2]) {
    const uint32_t hide = walk_.is_over() ? kOutside : 0;
    const uint32_t at = walk_.tile() * tile_bytes_ + walk_.k() * kBlockK;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      block[n] = load_words<Cache::kNonTemporal>(w_, lane_offset_ | hide, at + n * half_bytes_);
    }
    walk_.ends_tile();
  }

 private:
  Walk walk_;
  Buffer w_;
  uint32_t lane_offset_, half_bytes_, tile_bytes_;
};

using Sums = Accumulator[1][1];

// sums += the K block's product with `codes`, the row of a from this K block on.
ROCM_KERNELS_DEVICE void multiply_add(const Words (&block)[2], const uint8_t* codes, uint8_t* place,
                                      int lane, Sums& sums) {
  const LdsTranspose<1> transpose(place, lane);
  Words w[2], a[2];
  transpose.write(block);
  transpose.template read<1>(w, lane % kMmaRows);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    // The elements of k that LdsTranspose gives a lane for its row of w.
    a[n] = *reinterpret_cast<const Words*>(codes + n * (kBlockK / 2) + lane / kMmaRows * 16);
  }
  sums[0][0] = Mma<MmaKind::kFp8>::multiply_add(w, a, lane, sums[0][0]);
}

// How many barriers the helpers' work before a product has: x is asked for, or the grid has met; a
// norm's sum; a greatest magnitude; the row is in LDS.
ROCM_KERNELS_DEVICE constexpr int barriers_before(Row row) {
  return row == Row::kNorm ? 4 : row == Row::kQuantized ? 3 : 2;
}

// To the helpers' barriers before a product the streamers come between their first asks: a wave
// that asks waits until the memory of its compute unit takes it. Before the first product the
// helpers have asked for theirs first, which must not be behind so many weights.
constexpr int kAsksBeforeBarriers = 5;
// Of an attention before the first product: q, k and v are asked for, published, and the grid has
// met.
constexpr int kBarriersToAttend = 3;

template <typename T>
ROCM_KERNELS_DEVICE void stream(const LayerProblem<T>& problem, int streamer, int lane,
                                const uint8_t* codes, uint8_t* place, float* sums_lds) {
  int parity = 0;
#pragma unroll 1
  for (int product = 0; product < problem.count; ++product) {
    const Product<T>& p = problem.products[product];
    WeightStream ahead(p, streamer, lane);
    Words stages[kStages][2];
    const bool attends = product == 0 && problem.attention.qkv != nullptr;
    const bool first = product == 0 && !attends;
    int to_come = barriers_before(p.row) + (attends ? kBarriersToAttend : 0);
#pragma unroll
    for (int s = 0; s < kStages; ++s) {
      if ((first || s >= kAsksBeforeBarriers || (s == 0 && attends)) && to_come > 0) {
        workgroup_barrier();
        --to_come;
      }
      ahead.ask(stages[s]);
      __builtin_amdgcn_sched_barrier(0);
    }
    for (; to_come > 0; --to_come) workgroup_barrier();

    Sums sums = {};
    Walk walk(p, streamer);
    while (!walk.is_over()) {
#pragma unroll
      for (int s = 0; s < kStages; ++s) {
        if (walk.is_over()) break;
        multiply_add(stages[s], codes + walk.k() * kBlockK, place, lane, sums);
        keep_order(sums);
        ahead.ask(stages[s]);
        __builtin_amdgcn_sched_barrier(0);
        if (!walk.ends_tile()) continue;
        // Of the equal columns the first: four rows of w in each group of lanes.
        if (lane % kMmaRows == 0) {
          float* const own = sums_lds + (parity * kStreamers + streamer) * kMmaRows;
          *reinterpret_cast<Accumulator*>(own + lane / kMmaRows * 4) = sums[0][0];
        }
        workgroup_barrier();
        sums[0][0] = Accumulator{};
        parity ^= 1;
      }
    }
  }
}

#endif

}  // namespace rocm_kernels::cdna::decode
