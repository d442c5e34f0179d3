// Host: the launch of the kernel that a config names.
#pragma once

#include "../../common/gpu/launch.h"
#include "decode.h"
#include "kernels.h"

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

template <typename T, bool kFp8, int kTile = 0>
Status launch_tile(const AttentionArgs& args, const AttentionConfig& config,
                   const Context& context) {
  if (find_decode_tile(args, config.rows) == kTile) {
    return launch_decode_tile<DecodeShape<T, kFp8, kTile>>(args, config, context);
  }
  if constexpr (kTile + 1 < static_cast<int>(kDecodeTileCount)) {
    return launch_tile<T, kFp8, kTile + 1>(args, config, context);
  }
  return "no kernel was built for this config; report a defect";
}

}  // namespace rocm_kernels::cdna
