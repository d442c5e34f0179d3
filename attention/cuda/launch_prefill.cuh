// Host: the launch of a prefill kernel.
#pragma once

#include "../../common/gpu/launch.h"
#include "join.cuh"
#include "prefill.cuh"
#include "prefill.h"

namespace rocm_kernels {
namespace cuda {

template <class Shape>
Status launch_prefill_tile(const AttentionArgs& args, const AttentionConfig& config,
                           const AttentionDevice& device, float* partial, void* stream) {
  PrefillGrid grid = {};
  grid.window = Window::of(args);
  grid.rows = RowGroups::of(args.heads / args.kv_heads);
  grid.page_size = PageSize::of(args);
  grid.row_blocks = static_cast<int>(row_blocks(args, config));
  grid.pairs = static_cast<int>(args.batch * args.kv_heads);
  // Half of L2 for keys and values that blocks share, at once.
  const double of_pair = 2.0 * static_cast<double>(args.max_seqlen_k) *
                         static_cast<double>(args.head_dim + args.head_dim_v);
  grid.pairs_together = static_cast<int>(
      std::min(std::max(device.memory.l2_bytes / 2 / of_pair, 1.0), double{1 << 20}));
  grid.pairs_together = std::min(grid.pairs_together, grid.pairs);
  grid.outer = config.outer;
  grid.partial = partial;
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(grid.row_blocks * grid.pairs * grid.outer));
  launch.block = Shape::kThreads;
  launch.stream = static_cast<Stream>(stream);
  launch.shared_bytes = Shape::kOf.shared_bytes(Shape::kRows);
  launch.early = true;
  const Status error = launch_kernel(attention_prefill<Shape>, launch, args, grid);
  if (error || config.outer == 1) return error;
  return launch_join<typename Shape::Q>(args, partial, config.outer, Shape::kDV, launch.early,
                                        launch.stream);
}

template <typename T, bool kFp8, int kTile = 0>
Status launch_prefill(const AttentionArgs& args, const AttentionConfig& config,
                      const AttentionDevice& device, float* partial, void* stream) {
  if (find_prefill_tile(args) == kTile) {
    const auto launch = config.rows == 64 ? launch_prefill_tile<PrefillShape<T, kFp8, kTile, 1>>
                                          : launch_prefill_tile<PrefillShape<T, kFp8, kTile, 2>>;
    return launch(args, config, device, partial, stream);
  }
  if constexpr (kTile + 1 < static_cast<int>(kPrefillTileCount)) {
    return launch_prefill<T, kFp8, kTile + 1>(args, config, device, partial, stream);
  }
  return "attention config: prefill has no tile for heads of that size";
}

}  // namespace cuda
}  // namespace rocm_kernels
