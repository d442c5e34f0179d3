// Host: the launch of a prefill kernel.
#pragma once

#include "../../common/gpu/launch.h"
#include "../../common/gpu/launch_name.h"
#include "join.cuh"
#include "prefill.cuh"
#include "prefill.h"

namespace rocm_kernels {
namespace cuda {

// `maps`: of keys and values, where Shape has them in boxes; those of rows are made here.
template <class Shape>
Status launch_prefill_shape(const AttentionArgs& args, AttentionConfig config,
                            const AttentionDevice& device, PrefillMaps& maps, void* workspace,
                            void* stream) {
  PrefillGrid grid = {};
  grid.window = Window::of(args);
  grid.rows = RowGroups::of(args.heads / args.kv_heads);
  grid.page_size = PageSize::of(args);
  grid.pairs = static_cast<int>(args.batch * args.kv_heads);
  // Half of L2 for keys and values that blocks share, at once.
  const double of_pair = 2.0 * static_cast<double>(args.max_seqlen_k) *
                         static_cast<double>(args.head_dim + args.head_dim_v);
  grid.pairs_together = static_cast<int>(
      std::min(std::max(device.memory.l2_bytes / 2 / of_pair, 1.0), double{1 << 20}));
  grid.pairs_together = std::min(grid.pairs_together, grid.pairs);
  grid.outer = config.outer;
  grid.partial = reinterpret_cast<float*>(static_cast<char*>(workspace) + kTakenBytes);
  if (Shape::kBoxed) {
    const int64_t rows = rows_in_boxes(args, config, device);
    const AttentionRows out = {args.out, args.out_batch_stride, args.out_row_stride,
                               args.out_head_stride};
    grid.q_in_boxes = describe_rows(maps.q, args, args.q, args.head_dim, rows);
    if (grid.q_in_boxes) config.rows = static_cast<int>(rows);
    // Where each block has one item, lanes are done sooner.
    grid.out_in_boxes = grid.q_in_boxes && config.outer == 1 &&
                        prefill_items(args, config) > device.sm_count &&
                        describe_rows(maps.out, args, out, args.head_dim_v, rows);
  }
  grid.item_rows = config.rows;
  grid.row_blocks = static_cast<int>(row_blocks(args, config));
  const int64_t items = prefill_items(args, config);
  int64_t blocks = items;
  if (Shape::kBoxed && items > device.sm_count && items < kMostTaken) {
    blocks = device.sm_count;
    grid.taken = {static_cast<TakenWord*>(workspace), next_launch_name() >> kTakenBits,
                  static_cast<int>(items), static_cast<int>(blocks)};
  }
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(blocks));
  launch.block = Shape::kThreads;
  launch.stream = static_cast<Stream>(stream);
  launch.shared_bytes = Shape::kOf.shared_bytes(Shape::kRows, Shape::kBoxed);
  launch.early = true;
  const Status error = launch_kernel(attention_prefill<Shape>, launch, args, grid, maps);
  if (error || config.outer == 1) return error;
  return launch_join<typename Shape::Q>(args, grid.partial, config.outer, Shape::kDV, launch.early,
                                        launch.stream);
}

template <typename T, bool kFp8, int kTile, int kConsumers>
Status launch_prefill_tile(const AttentionArgs& args, const AttentionConfig& config,
                           const AttentionDevice& device, void* workspace, void* stream) {
  PrefillMaps maps = {};
  // Heads of 256 leave no registers for what boxed ones do: 3 to 7 % slower.
  if constexpr (!kFp8 && kPrefillTiles[kTile].head_dim_v < 256) {
    using Boxed = PrefillShape<T, kFp8, kTile, kConsumers, true>;
    if (args.block_table == nullptr &&
        describe_keys(maps.k, args, args.k, args.head_dim, Boxed::kKeys) &&
        describe_keys(maps.v, args, args.v, args.head_dim_v, Boxed::kKeys)) {
      return launch_prefill_shape<Boxed>(args, config, device, maps, workspace, stream);
    }
  }
  if constexpr (kConsumers == 3) {
    AttentionConfig fewer = config;
    fewer.rows = 128;
    return launch_prefill_tile<T, kFp8, kTile, 2>(args, fewer, device, workspace, stream);
  } else {
    return launch_prefill_shape<PrefillShape<T, kFp8, kTile, kConsumers, false>>(
        args, config, device, maps, workspace, stream);
  }
}

template <typename T, bool kFp8, int kTile = 0>
Status launch_prefill(const AttentionArgs& args, const AttentionConfig& config,
                      const AttentionDevice& device, void* workspace, void* stream) {
  if (find_prefill_tile(args) == kTile) {
    auto launch = config.rows == 64 ? launch_prefill_tile<T, kFp8, kTile, 1>
                                    : launch_prefill_tile<T, kFp8, kTile, 2>;
    if constexpr (kPrefillTiles[kTile].of(kFp8).most_rows() == 192) {
      if (config.rows == 192) launch = launch_prefill_tile<T, kFp8, kTile, 3>;
    }
    return launch(args, config, device, workspace, stream);
  }
  if constexpr (kTile + 1 < static_cast<int>(kPrefillTileCount)) {
    return launch_prefill<T, kFp8, kTile + 1>(args, config, device, workspace, stream);
  }
  return "attention config: prefill has no tile for heads of that size";
}

}  // namespace cuda
}  // namespace rocm_kernels
