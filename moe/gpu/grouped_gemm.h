// grouped_gemm on GPUs: the plan of its tiles, then the product. Host code of both families, which
// one source of each includes.
#pragma once

#include "product.h"

namespace rocm_kernels {

inline MoeShape shape_of(const GroupedGemmArgs& args) {
  return {static_cast<int32_t>(args.rows),
          args.experts,
          static_cast<int32_t>(args.n),
          static_cast<int32_t>(args.k),
          false,
          static_cast<int32_t>(args.a_dtype),
          static_cast<int32_t>(args.w.dtype),
          args.scale_a.is_blocked() || args.w.scale.is_blocked(),
          has_aligned_rows(args.w, args.k) &&
              has_aligned_rows(args.a, args.a_stride, args.a_dtype) &&
              (args.rows == 1 || args.a_stride >= args.k),
          is_compact(args.w, args.n) && args.a_stride < 1 << 22,
          false,
          static_cast<int32_t>(args.out_dtype),
          0,
          false};
}

inline Status check_sizes(const GroupedGemmArgs& args) {
  constexpr int64_t kMost = int64_t{1} << 30;
  if (args.rows > kMost || args.n > kMost || args.k > kMost) {
    return "rows, N and K must be at most 2^30";
  }
  return nullptr;
}

struct GroupedGemmMemory {
  RowTile* tiles;
  int32_t* tile_count;
  TileGroup* groups = nullptr;

  GroupedGemmMemory(WorkspacePieces& workspace, const MoeTiling& config, int64_t most_tiles)
      : tiles(workspace.take<RowTile>(most_tiles)), tile_count(workspace.take<int32_t>(2)) {
    if (config.walks_experts()) groups = workspace.take<TileGroup>(most_tiles);
  }
};

template <typename MoeConfig>
int64_t grouped_gemm_workspace_bytes(const GroupedGemmArgs& args) {
  MoeConfig config;
  // What is wrong, the launch will say.
  if (check_sizes(args) || config_of(args.config, shape_of(args), config)) return 0;
  WorkspacePieces workspace(nullptr);
  GroupedGemmMemory(workspace, config, most_row_tiles(args.rows, args.experts, config.block_m));
  return workspace.bytes();
}

template <typename MoeConfig>
Status launch_grouped_gemm(const GroupedGemmArgs& args, const Context& context) {
  DeviceFacts facts;
  MoeConfig config;
  if (const Status error = check_sizes(args)) return error;
  if (const Status error = current_device(facts)) return error;
  if (const Status error = config_of(args.config, shape_of(args), config)) return error;
  const int64_t most_tiles = most_row_tiles(args.rows, args.experts, config.block_m);
  WorkspacePieces workspace(args.workspace);
  const GroupedGemmMemory memory(workspace, config, most_tiles);

  RoutingProblem plan = {};
  plan.offsets = args.offsets;
  plan.slots = args.rows;
  plan.experts = args.experts;
  plan.block_m = config.block_m;
  plan.tiles = memory.tiles;
  plan.tile_count = memory.tile_count;
  plan.groups = memory.groups;
  plan.group_m = config.group_m;
  if (const Status error = launch_routing(plan, facts, stream_of(context))) return error;

  GroupedProblem p = {};
  p.a = args.a;
  p.a_stride = args.a_stride;
  p.a_dtype = args.a_dtype;
  p.scale_a = args.scale_a;
  p.w = args.w;
  p.n = static_cast<int32_t>(args.n);
  p.k = static_cast<int32_t>(args.k);
  p.tiles = memory.tiles;
  p.tile_count = memory.tile_count;
  p.groups = memory.groups;
  p.out = args.out;
  p.out_stride = args.out_stride;
  p.out_dtype = args.out_dtype;
  p.wide_stores = has_wide_stores(p.out, p.out_stride, p.out_dtype);
  p.split_k = 1;
  const SlotIds slots = {nullptr, static_cast<int32_t>(args.rows), args.experts, false};
  return launch_product(GroupedEnd::kGrouped, p, config, most_tiles, slots, facts,
                        stream_of(context));
}

template <typename MoeConfig>
Status visit_grouped_gemm_configs(const GroupedGemmArgs& args,
                                  void (*visit)(const char* config, void* state), void* state) {
  if (const Status error = check_sizes(args)) return error;
  return tell_configs<MoeConfig>(args.config, shape_of(args), visit, state);
}

}  // namespace rocm_kernels
