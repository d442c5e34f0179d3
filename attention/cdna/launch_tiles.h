// Host: the launch of the kernel that a config names.
#pragma once

#include "../../common/gpu/launch.h"
#include "decode.h"
#include "kernels.h"
#include "prefill.h"

namespace rocm_kernels::cdna {

template <class Shape>
Status launch_decode_tile(const AttentionArgs& args, const AttentionConfig& config,
                          const Context& context) {
  DecodeGrid grid = {};
  grid.window = Window::of(args);
  grid.heads_per_kv = static_cast<int>(args.heads / args.kv_heads);
  grid.row_blocks = static_cast<int>(row_blocks(args, config));
  grid.parts = config.parts;
  grid.page_magic = static_cast<uint32_t>(page_magic(args.page_size));
  if (config.parts > 1) {
    if (args.workspace == nullptr) return "this config needs a workspace";
    grid.tickets = static_cast<uint64_t*>(args.workspace);
    grid.partials = reinterpret_cast<float*>(static_cast<uint8_t*>(args.workspace) +
                                             decode_ticket_bytes(args, config));
    grid.launch = next_ticket_name();
  }
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(config.parts),
                     static_cast<unsigned>(args.kv_heads * grid.row_blocks),
                     static_cast<unsigned>(args.batch));
  launch.block = kDecodeWaves * 64;
  launch.stream = stream_of(context);
  return launch_kernel(attention_decode<Shape>, launch, args, grid);
}

template <class Shape>
Status launch_prefill_tile(const AttentionArgs& args, const AttentionConfig& config,
                           const Context& context) {
  PrefillGrid grid = {};
  grid.window = Window::of(args);
  grid.heads_per_kv = static_cast<int>(args.heads / args.kv_heads);
  grid.kv_heads = static_cast<int>(args.kv_heads);
  grid.row_blocks = static_cast<int>(row_blocks(args, config));
  grid.groups = static_cast<int>(args.batch * args.kv_heads);
  grid.xcds = config.xcds;
  grid.heavy_first = config.heavy_first;
  grid.page_magic = static_cast<uint32_t>(page_magic(args.page_size));
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(prefill_workgroups(args, config)));
  launch.block = kPrefillWaves * 64;
  launch.stream = stream_of(context);
  launch.shared_bytes = Shape::kTile.lds_bytes();
  return launch_kernel(attention_prefill<Shape>, launch, args, grid);
}

constexpr Status kNotBuilt = "no kernel was built for this config; report a defect";

template <typename T, bool kFp8, int kTile = 0>
Status launch_decode(const AttentionArgs& args, const AttentionConfig& config,
                     const Context& context) {
  if (find_decode_tile(args, config.rows) == kTile) {
    return launch_decode_tile<DecodeShape<T, kFp8, kTile>>(args, config, context);
  }
  if constexpr (kTile + 1 < static_cast<int>(kDecodeTileCount)) {
    return launch_decode<T, kFp8, kTile + 1>(args, config, context);
  }
  return kNotBuilt;
}

template <typename T, bool kFp8, int kTile = 0>
Status launch_prefill(const AttentionArgs& args, const AttentionConfig& config,
                      const Context& context) {
  if (find_prefill_tile(args, config) == kTile) {
    return launch_prefill_tile<PrefillShape<T, kFp8, kTile>>(args, config, context);
  }
  if constexpr (kTile + 1 < static_cast<int>(kPrefillTileCount)) {
    return launch_prefill<T, kFp8, kTile + 1>(args, config, context);
  }
  return kNotBuilt;
}

template <typename T, bool kFp8>
Status launch_tile(const AttentionArgs& args, const AttentionConfig& config,
                   const Context& context) {
  return config.design == AttentionConfig::Design::kPrefill
             ? launch_prefill<T, kFp8>(args, config, context)
             : launch_decode<T, kFp8>(args, config, context);
}

}  // namespace rocm_kernels::cdna
