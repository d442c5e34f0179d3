// Grouped products by tiles, on AMD's matrix instructions: gemm's main loop over gathered rows.
//
//   sums[row, n] = sum_k a[row of x, or of h, k] * w[expert, n, k]       of one tile
//   out = what GroupedTileSink makes of them: h = act(gate, up), perhaps FP8; or sums as they are
//
// clang-format off
// Timeline of a workgroup, whose waves all do the same. | is a barrier of all.
//
//   its place in the order; none: leave            rows that its tile gathers
//   ask for the first line of K of a and w
//   each line:    store it to LDS | multiply it, and ask for another | ...           (main_loop.h)
//   the Sink:     read the arguments again, factors to LDS | scale, activate, store
//                 of whole groups: each row's greatest to LDS | quantise, store      (tile_sink.h)
// clang-format on
//
// A workgroup takes a tile of rows of one expert (gpu/product.h), a tile of columns, and a part of
// K: worker_of() says which, in the config's order. There are as many workgroups as there can be
// tiles; those that the routing leaves without one leave at once.
#pragma once

#include "../../blocks/product/cdna/main_loop.h"
#include "../../common/cdna/arguments.h"
#include "../gpu/order.h"
#include "mxfp4.h"
#include "tile_sink.h"

namespace rocm_kernels::cdna::moe {

#if ROCM_KERNELS_CDNA

template <MmaKind kKind, int kTile, bool kFp4>
struct GroupedLoaderW {
  using Type = LineLoaderW<kKind, MoeTileAt<kTile>>;
};
template <MmaKind kKind, int kTile>
struct GroupedLoaderW<kKind, kTile, true> {
  using Type = Mxfp4Loader<kMoeTiles[kTile].block_n, kMoeTiles[kTile].threads()>;
};

#endif

// LDS: a line of the tile's rows. kFp4: w is MXFP4, and bfloat16 in LDS.
template <MmaKind kKind, int kTile, bool kBlockScales, bool kFp4, bool kGateUp>
__global__ void __launch_bounds__(kMoeTiles[kTile].threads(), 2)
    moe_tiled([[maybe_unused]] const GroupedProblem p, [[maybe_unused]] const GroupedOrder order) {
#if ROCM_KERNELS_CDNA
  constexpr GemmTile kShape = kMoeTiles[kTile];
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kWaveSize);
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  const GroupedOrder::Place place = order.place_of(blockIdx.x, *p.tile_count);
  if (place.m < 0) return;
  const RowTile tile = p.tiles[place.m];

  using LoaderW = typename GroupedLoaderW<kKind, kTile, kFp4>::Type;
  using Product = TileProduct<kKind, MoeTileAt<kTile>, kBlockScales, LoaderW>;
  using Sink = GroupedTileSink<kTile, kGateUp>;
  static_assert(kIsSinkOf<Sink, typename Product::Sums&>, "");
  typename Sink::Sums sums = {};
  {
    constexpr int kBytesW = kFp4 ? 1 : w_bytes(kKind);
    const ExpertRows<kGateUp, kPart> rows_w(p, tile.expert, place.n * kShape.block_n, kBytesW);
    Product product(rows_of_a<kGateUp>(p, tile, a_bytes(kKind)), rows_w, p.k, wave, lane);
    const int lines = (p.k + line_elements(kKind) - 1) / line_elements(kKind);
    const EvenSplit parts = EvenSplit::of(lines, order.split_k);
    product.run(parts.begin_of(place.part), parts.begin_of(place.part + 1), lds, sums);
  }
  Sink(reread_problem<GroupedProblem>(), tile, place.n * kShape.block_n, place.part, wave, lane,
       lds)
      .finish(sums);
#endif
}

}  // namespace rocm_kernels::cdna::moe
