// The waves that stream weights and multiply; decode_layers.hip has the timeline.
#pragma once

#include <utility>

#include "../../blocks/product/cdna/tile_loader.h"
#include "../../blocks/product/schedule.h"
#include "problem.h"

namespace rocm_kernels::cdna::decode {

#if ROCM_KERNELS_CDNA

constexpr int kStages = 10;  // K blocks of a streamer under way

// A streamer's part of a product: some K blocks of each tile of its workgroup, tile after tile.
class Walk {
 public:
  Walk() = default;
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

// Asks for a streamer's weights ahead of their use, product after product.
template <typename T>
class WeightStream {
 public:
  ROCM_KERNELS_DEVICE WeightStream(const StackProblem<T>& p, int streamer, int lane)
      : p_(p), streamer_(streamer), lane_(lane), turn_(Turn::first_of(p)) {
    enter();
    skip_empty();
  }

  ROCM_KERNELS_DEVICE bool is_in(Turn turn) const { return turn_ == turn; }

  // The next K block: 8 rows in each of two loads; zeros, which nothing fetches, behind the last
  // and where it shall not.
  ROCM_KERNELS_DEVICE void ask(Words (&block)[2], bool shall = true) {
    const uint32_t hide = shall && !walk_.is_over() ? 0 : kOutside;
    const uint32_t at = walk_.tile() * tile_bytes_ + walk_.k() * kBlockK;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      block[n] = load_words<Cache::kNonTemporal>(w_, lane_offset_ | hide, at + n * half_bytes_);
    }
    if (shall && walk_.ends_tile()) skip_empty();
  }

 private:
  // To the next product of which the workgroup has a tile, or stays over.
  ROCM_KERNELS_DEVICE void skip_empty() {
    while (walk_.is_over() && !turn_.is_over(p_)) {
      turn_.next(p_);
      if (!turn_.is_over(p_)) enter();
    }
  }
  ROCM_KERNELS_DEVICE void enter() {
    const Product<T>& product = p_.products[turn_.product];
    walk_ = Walk(product, streamer_);
    w_ = buffer_at(p_.layers[turn_.layer].products[turn_.product].w);
    lane_offset_ = load_row(0, lane_) * product.row_bytes + load_byte(0, lane_);
    half_bytes_ = product.half_rows * product.row_bytes;
    tile_bytes_ = product.tile_rows * product.row_bytes;
  }

  const StackProblem<T>& p_;
  const int streamer_, lane_;
  Turn turn_;
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

// To the helpers' barriers before a product the streamers come between their last asks: a wave that
// asks waits until the memory of its compute unit takes it.
constexpr int kAsksBeforeBarriers = 7;
// More, of an attention before the product: q, k and v are asked for in the first layer, have been
// made in all others; parts are in LDS; heads are added up.
constexpr int kBarriersToAttend = 3;

// body(number of a stage) until it returns false. Numbers are constants: stages are registers.
template <typename Body, int... kNumbers>
ROCM_KERNELS_DEVICE void for_stages(const Body& body, std::integer_sequence<int, kNumbers...>) {
  static_cast<void>((body(std::integral_constant<int, kNumbers>()) && ...));
}
template <typename Body>
ROCM_KERNELS_DEVICE void for_stages(const Body& body) {
  for_stages(body, std::make_integer_sequence<int, kStages>());
}

// While a product is multiplied nothing is asked for beyond its end, lest its last sums wait for
// asks. Before the next product all stages are filled, if it is short with what comes behind it.
template <typename T>
ROCM_KERNELS_DEVICE void stream(const StackProblem<T>& p, int streamer, int lane,
                                const uint8_t* codes, uint8_t* place, float* sums_lds) {
  WeightStream<T> ahead(p, streamer, lane);
  Words stages[kStages][2];
  int parity = 0;
  int asked = 0;  // stages that hold a block, from the first on
#pragma unroll 1
  for (Turn turn = Turn::first_of(p); !turn.is_over(p); turn.next(p)) {
    const Product<T>& product = p.products[turn.product];
    int to_come = barriers_before(product.row) + (turn.attends(p) ? kBarriersToAttend : 0);
    // Before the first product the helpers have asked for theirs first, which must not be behind so
    // many weights.
    if (turn == Turn::first_of(p)) workgroup_barrier(), --to_come;
    for_stages([&](auto s) {
      if (s < asked) return true;
      if (s >= kAsksBeforeBarriers && to_come > 0) workgroup_barrier(), --to_come;
      ahead.ask(stages[s]);
      __builtin_amdgcn_sched_barrier(0);
      return true;
    });
    for (; to_come > 0; --to_come) workgroup_barrier();

    Sums sums = {};
    int taken = 0;
    asked = kStages;
    Walk walk(product, streamer);
    while (!walk.is_over()) {
      for_stages([&](auto s) {
        multiply_add(stages[s], codes + walk.k() * kBlockK, place, lane, sums);
        keep_order(sums);
        const bool asks = ahead.is_in(turn);
        // In any case, so that what is waited for is known when this is compiled.
        ahead.ask(stages[s], asks);
        taken = s + 1;
        asked -= asks ? 0 : 1;
        __builtin_amdgcn_sched_barrier(0);
        if (!walk.ends_tile()) return true;
        // Of the equal columns the first: four rows of w in each group of lanes.
        if (lane % kMmaRows == 0) {
          float* const own = sums_lds + (parity * kStreamers + streamer) * kMmaRows;
          *reinterpret_cast<Accumulator*>(own + lane / kMmaRows * 4) = sums[0][0];
        }
        workgroup_barrier();
        sums[0][0] = Accumulator{};
        parity ^= 1;
        return !walk.is_over();
      });
    }
    if (asked == 0 || asked == kStages) continue;
    // To the first stages.
    const auto move = [&](auto step) {
      if ((taken & step) == 0) return;
      for_stages([&](auto s) {
        if constexpr (s + step < kStages) {
          stages[s][0] = stages[s + step][0], stages[s][1] = stages[s + step][1];
        }
        return true;
      });
    };
    move(std::integral_constant<int, 8>());
    move(std::integral_constant<int, 4>());
    move(std::integral_constant<int, 2>());
    move(std::integral_constant<int, 1>());
  }
}

#endif

}  // namespace rocm_kernels::cdna::decode
