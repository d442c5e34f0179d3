// Host: the launch of a decode kernel.
#pragma once

#include "../../common/gpu/launch.h"
#include "../../common/gpu/launch_name.h"
#include "decode.cuh"
#include "decode.h"

namespace rocm_kernels {
namespace cuda {

// Clusters of 16. The same for all launches of the kernel: another thread may set it at the same
// time.
template <typename Kernel>
Status allow_large_clusters(Kernel* kernel) {
  const Status error =
      status_of(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  if (error) static_cast<void>(cudaGetLastError());
  return error;
}

// The most blocks of a cluster that the device holds. 1 where it says of no cluster that it does.
template <typename Kernel>
int32_t most_cluster(Kernel* kernel, int threads, int64_t shared_bytes) {
  Launch launch;
  launch.block = threads;
  launch.shared_bytes = shared_bytes;
  const bool is_told = allow_shared_memory(reinterpret_cast<const void*>(kernel)) == cudaSuccess;
  launch.cluster = allow_large_clusters(kernel) == nullptr ? kMaxCluster : 8;
  for (; is_told && launch.cluster > 1; launch.cluster /= 2) {
    launch.grid = dim3(static_cast<unsigned>(launch.cluster));
    const LaunchConfig asked(launch);
    int held = 0;
    if (cudaOccupancyMaxActiveClusters(&held, kernel, &asked.config) == cudaSuccess && held > 0) {
      return launch.cluster;
    }
    static_cast<void>(cudaGetLastError());
  }
  return 1;
}

template <class Shape>
Status launch_decode_tile(const AttentionArgs& args, const AttentionConfig& config,
                          const AttentionDevice& device, void* words, void* stream) {
  const DecodeBlock block = decode_block(args, config, device);
  DecodeGrid grid = {};
  grid.window = Window::of(args);
  grid.rows = RowGroups::of(args.heads / args.kv_heads);
  grid.page_size = PageSize::of(args);
  grid.cluster = config.cluster;
  grid.parts = config.cluster * config.outer;
  grid.row_blocks = static_cast<int>(row_blocks(args, config));
  grid.stages = block.stages();
  grid.sent_at = block.sent_at(config.cluster);
  grid.queries_at = block.queries_at(config.cluster);
  grid.words = static_cast<DecodeWord*>(words);
  if (config.outer > 1) grid.launch = next_launch_name();
  Launch launch;
  const unsigned of_part = static_cast<unsigned>(args.kv_heads * grid.row_blocks);
  launch.grid = dim3(grid.parts == 1 ? of_part : static_cast<unsigned>(grid.parts),
                     grid.parts == 1 ? 1 : of_part, static_cast<unsigned>(args.batch));
  launch.block = Shape::kThreads;
  launch.stream = static_cast<Stream>(stream);
  launch.shared_bytes = decode_shared_bytes(args, config, device);
  launch.cluster = config.cluster;
  launch.early = device.compute_capability >= 90;
  if (config.cluster > 8) {
    if (const Status error = allow_large_clusters(attention_decode<Shape>)) return error;
  }
  if constexpr (Shape::kHasNew) {
    return launch_kernel(attention_decode<Shape>, launch, args, grid, *args.fresh);
  } else {
    return launch_kernel(attention_decode<Shape>, launch, args, grid, NoTokens{});
  }
}

// Whether a kernel of its own serves keys in rows: where a warp copies whole rows.
constexpr bool has_row_copies(int tile, bool fp8) {
  const int vectors = kDecodeTiles[tile].head_dim / (fp8 ? 16 : 8);
  return 32 % vectors == 0 || vectors % 32 == 0;
}

template <typename T, bool kFp8, int kTile, bool kNew>
Status launch_decode_layout(const AttentionArgs& args, const AttentionConfig& config,
                            const AttentionDevice& device, void* words, void* stream) {
  auto launch = launch_decode_tile<DecodeShape<T, kFp8, kTile, false, kNew>>;
  if constexpr (has_row_copies(kTile, kFp8)) {
    constexpr int kSize = kDecodeTiles[kTile].head_dim;
    if (args.block_table == nullptr && args.head_dim == kSize && args.head_dim_v == kSize) {
      launch = launch_decode_tile<DecodeShape<T, kFp8, kTile, true, kNew>>;
    }
  }
  return launch(args, config, device, words, stream);
}

template <typename T, bool kFp8, int kTile = 0>
Status launch_decode(const AttentionArgs& args, const AttentionConfig& config,
                     const AttentionDevice& device, void* words, void* stream) {
  if (find_decode_tile(args, config.rows) == kTile) {
    auto launch = launch_decode_layout<T, kFp8, kTile, false>;
    if constexpr (rotates_tokens(kDecodeTiles[kTile])) {
      if (args.fresh != nullptr) launch = launch_decode_layout<T, kFp8, kTile, true>;
    }
    return launch(args, config, device, words, stream);
  }
  if constexpr (kTile + 1 < static_cast<int>(kDecodeTileCount)) {
    return launch_decode<T, kFp8, kTile + 1>(args, config, device, words, stream);
  }
  return "attention config: decode has no tile of so many rows for heads of that size";
}

}  // namespace cuda
}  // namespace rocm_kernels
