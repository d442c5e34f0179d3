// fused_moe on GPUs: the launches of a layer. Host code of both families, which one source of each
// includes, and the kernels of rows.h.
//
//   ids --route--> rows, tiles        x --quantise--> FP8                  (quantize_input alone)
//   gate_up: rows of x, gathered --> h = act(gate, up)                     [rows, I]
//   h --quantise--> FP8                (quantize_input; where gate_up's end does not do it)
//   down: h --> parts                                                      [split_k][slots][H]
//   combine: weights . parts --> out                                       [T, H]
//
// Timeline: these are launches of one stream, and each reads what those before it wrote. On Hopper
// a kernel starts while the one before ends, and waits for it before it reads or stores anything
// that a kernel may have written (common/gpu/dependent_launch.h). Where there is no route, the
// first kernel of a layer is a gate: what is older than it may be read before that wait, as the
// combine does with ids and weights.
//
// A backend's MoeConfig may change these launches, by functions of these names:
//   routes_itself   products find each expert's rows by themselves, from the ids: there is no
//                   route, and h has a row for each slot, in the order of slots
//   sorts_rows      the second launch copies the rows of x to the order of experts, and quantises
//                   them if they are to be quantised
//   is_resident     the two products alone: they route, quantise and combine
//   takes_units     blocks of a product take units of it as they get there, and count them
//   ends_in_groups  the gate_up product's tile, or that of two blocks, has whole groups of 128
//                   columns of h, and quantises them
//
// Each part of a sum has a place of its own in memory and is added in order, so none is awaited or
// cleared, and no bit depends on the order in which workgroups run.
#pragma once

#include "product.h"
#include "rows.h"

namespace rocm_kernels {

// Tokens go by in slices that are as equal as can be, so that no index of the kernels leaves 31
// bits and the parts of a slice take at most 1 GiB.
struct MoeSlices {
  int64_t count, tokens;

  static MoeSlices of(const FusedMoeArgs& args) {
    constexpr int64_t kMostPartBytes = int64_t{1} << 30, kMostBytes = (int64_t{1} << 31) - 4096;
    const int64_t slot_bytes = args.hidden * 4 + args.intermediate * 5;
    const int64_t row_bytes = args.x_stride * size_of(args.x_dtype);
    int64_t most = kMostPartBytes / (slot_bytes * args.k);
    if (row_bytes > 0 && kMostBytes / row_bytes < most) most = kMostBytes / row_bytes;
    if (most < 1) most = 1;
    const int64_t count = (args.tokens + most - 1) / most;
    return {count, (args.tokens + count - 1) / count};
  }
};

inline bool is_quantized(const FusedMoeArgs& args) { return args.quantize_input; }

inline MoeShape shape_of(const FusedMoeArgs& args) {
  const DType a = is_quantized(args) ? args.gate_up.dtype : args.x_dtype;
  const bool x_aligned =
      is_quantized(args) ? args.hidden % 16 == 0 : has_aligned_rows(args.x, args.x_stride, a);
  return {static_cast<int32_t>(MoeSlices::of(args).tokens * args.k),
          args.experts,
          static_cast<int32_t>(2 * args.intermediate),
          static_cast<int32_t>(args.hidden),
          true,
          static_cast<int32_t>(a),
          static_cast<int32_t>(args.gate_up.dtype),
          args.gate_up.scale.is_blocked() + 2 * args.down.scale.is_blocked(),
          has_aligned_rows(args.gate_up, args.hidden) &&
              has_aligned_rows(args.down, args.intermediate) && x_aligned &&
              args.intermediate * size_of(a) % 16 == 0,
          is_compact(args.gate_up, 2 * args.intermediate) && is_compact(args.down, args.hidden),
          args.interleaved,
          static_cast<int32_t>(args.out_dtype),
          static_cast<int32_t>(MoeSlices::of(args).tokens),
          has_aligned_rows(args.x, args.x_stride, args.x_dtype)};
}

inline Status check_sizes(const FusedMoeArgs& args) {
  constexpr int64_t kMost = int64_t{1} << 24;
  if (args.hidden > kMost || args.intermediate > kMost) return "H and I must be at most 2^24";
  return nullptr;
}

// What lies between the launches of a slice.
struct FusedMoeMemory {
  int32_t *counts = nullptr, *row_slots = nullptr, *slot_rows = nullptr, *tile_count = nullptr;
  RowTile* tiles = nullptr;
  TileGroup* tile_groups = nullptr;
  int32_t* taken = nullptr;            // units of gate_up, and of down
  uint8_t *x = nullptr, *h = nullptr;  // FP8; x sorted: what gate_up multiplies
  float *x_scales = nullptr, *h_scales = nullptr;
  void* wide_h = nullptr;  // before it is quantised: float32; not quantised: x's type
  float* parts = nullptr;

  template <typename MoeConfig>
  FusedMoeMemory(WorkspacePieces& workspace, const FusedMoeArgs& args, const MoeConfig& config,
                 int64_t tokens) {
    const int64_t slots = tokens * args.k;
    const bool quantized = is_quantized(args);
    if (config.is_resident()) {
      wide_h = workspace.take<float>(slots * args.intermediate);
      return;
    }
    counts = workspace.take<int32_t>(chunks(slots) * args.experts);
    row_slots = workspace.take<int32_t>(slots);
    slot_rows = workspace.take<int32_t>(config.sorts_rows() ? slots : 0);
    tile_count = workspace.take<int32_t>(2);
    const int64_t most_tiles = most_row_tiles(slots, args.experts, config.block_m);
    tiles = workspace.take<RowTile>(most_tiles);
    if (config.walks_experts()) tile_groups = workspace.take<TileGroup>(most_tiles);
    if (config.takes_units()) taken = workspace.take<int32_t>(kCleared);
    const int64_t x_rows = config.sorts_rows() ? slots : quantized ? tokens : 0;
    x = workspace.take<uint8_t>(x_rows * args.hidden * (quantized ? 1 : size_of(args.x_dtype)));
    x_scales = workspace.take<float>(quantized ? x_rows * groups(args.hidden) : 0);
    h = workspace.take<uint8_t>(quantized ? slots * args.intermediate : 0);
    h_scales = workspace.take<float>(quantized ? slots * groups(args.intermediate) : 0);
    const int64_t wide = quantized ? ends_quantized(args, config) ? 0 : 4 : size_of(args.x_dtype);
    wide_h = workspace.take<uint8_t>(slots * args.intermediate * wide);
    parts = workspace.take<float>(config.split_k * slots * args.hidden);
  }

  static int64_t chunks(int64_t slots) { return (slots + kSlotsPerChunk - 1) / kSlotsPerChunk; }
  static int64_t groups(int64_t columns) { return (columns + kScaleBlock - 1) / kScaleBlock; }
  // Whether the end of the gate_up product writes FP8.
  template <typename MoeConfig>
  static bool ends_quantized(const FusedMoeArgs& args, const MoeConfig& config) {
    return is_quantized(args) && args.down.scale.is_blocked() && config.ends_in_groups();
  }
};

template <typename MoeConfig>
int64_t fused_moe_workspace_bytes(const FusedMoeArgs& args) {
  MoeConfig config;
  // What is wrong, the launch will say.
  if (check_sizes(args) || config_of(args.config, shape_of(args), config)) return 0;
  WorkspacePieces workspace(nullptr);
  FusedMoeMemory(workspace, args, config, MoeSlices::of(args).tokens);
  return workspace.bytes();
}

// The launches of one slice.
template <typename MoeConfig>
class FusedMoeLayer {
 public:
  FusedMoeLayer(const FusedMoeArgs& args, const MoeConfig& config, const FusedMoeMemory& memory,
                const DeviceFacts& facts, Stream stream)
      : args_(args),
        config_(config),
        memory_(memory),
        facts_(facts),
        stream_(stream),
        routes_itself_(config.routes_itself(args.tokens * args.k, args.experts)),
        slots_(args.tokens * args.k),
        most_tiles_(most_row_tiles(slots_, args.experts, config.block_m)) {}

  Status launch() const {
    if (!routes_itself_) {
      if (const Status error = route()) return error;
    }
    if (args_.intermediate > 0) {
      if (has_quantized_rows() || config_.sorts_rows()) {
        if (const Status error = quantize_x()) return error;
      }
      if (const Status error = gate_up()) return error;
      if (has_quantized_rows() && !FusedMoeMemory::ends_quantized(args_, config_)) {
        if (const Status error = quantize_h()) return error;
      }
    }
    if (const Status error = down()) return error;
    return config_.is_resident() ? nullptr : combine();
  }

 private:
  Launch launch_of(int64_t blocks, int threads) const {
    Launch launch;
    launch.grid = dim3(static_cast<unsigned>(blocks));
    launch.block = threads;
    launch.stream = stream_;
    launch.early = facts_.is_hopper_or_later();
    return launch;
  }

  Status route() const {
    RoutingProblem p = {};
    p.ids = args_.topk_ids;
    p.slots = slots_;
    p.experts = args_.experts;
    p.block_m = config_.block_m;
    p.chunks = static_cast<int32_t>(FusedMoeMemory::chunks(slots_));
    p.counts = memory_.counts;
    p.row_slots = memory_.row_slots;
    p.slot_rows = config_.sorts_rows() ? memory_.slot_rows : nullptr;
    p.tiles = memory_.tiles;
    p.tile_count = memory_.tile_count;
    p.groups = memory_.tile_groups;
    p.group_m = config_.group_m;
    return launch_routing(p, facts_, stream_);
  }

  enum class Rows { kTokens, kOfExperts };
  // `data`'s rows to what a product with `w` multiplies: FP8 by the scales that it asks for, or as
  // they are.
  Status quantize(const void* data, DType dtype, int64_t stride, Rows kind, int64_t columns,
                  const ExpertWeights& w, uint8_t* out, float* scales) const {
    const int64_t rows = kind == Rows::kTokens ? args_.tokens : slots_;
    const bool quantized = is_quantized(args_);
    const OutputArgs to = {out,
                           columns,
                           quantized ? w.dtype : dtype,
                           !quantized             ? Scaling::kNone
                           : w.scale.is_blocked() ? Scaling::kPerGroup
                                                  : Scaling::kPerToken,
                           scales,
                           static_cast<int32_t>(kScaleBlock),
                           args_.ue8m0};
    QuantizeProblem p = {};
    p.rows = data;
    p.stride = stride;
    p.row_count = static_cast<int32_t>(rows);
    p.columns = static_cast<int32_t>(columns);
    p.aligned = !kNeedsAlignedVectors || rows_aligned(data, stride, size_of(dtype), 16);
    const bool sorts = kind == Rows::kTokens && config_.sorts_rows();
    p.slot_rows = sorts ? memory_.slot_rows : nullptr;
    p.copies = sorts ? args_.k : 1;
    if (routes_itself_) {
      p.ids = kind == Rows::kOfExperts ? args_.topk_ids : nullptr;
      p.experts = args_.experts;
      p.is_gate = kind == Rows::kTokens;
      if (p.is_gate) p.cleared = memory_.taken;
    } else {
      p.rows_there = kind == Rows::kOfExperts ? memory_.tile_count + 1 : nullptr;
    }
    p.output = make_output(to, columns, static_cast<int32_t>(16 / size_of(dtype)));
    if (dtype == DType::kFloat32) return launch_quantize<float>(p);
    return dtype == DType::kFloat16 ? launch_quantize<float16>(p) : launch_quantize<bfloat16>(p);
  }
  // Short rows share a block where there are many.
  static constexpr int kTogether = kRowThreads / kFewThreads, kShort = 32 * kFewThreads;
  bool share_blocks(const QuantizeProblem& p) const {
    return p.columns <= kShort && p.row_count >= kTogether * facts_.compute_units;
  }
  template <typename T>
  Status launch_quantize(QuantizeProblem& p) const {
    if constexpr (!kNvidia) {
      if (p.columns % kVectorElements<T> == 0 && fits(p.output, facts_)) {
        return p.output.scaling == Scaling::kPerGroup
                   ? launch_quantize_whole<T, Scaling::kPerGroup>(p)
                   : launch_quantize_whole<T, Scaling::kPerToken>(p);
      }
    }
    if (share_blocks(p)) {
      return launch_kernel(moe_quantize_kernel<T, kFewThreads>,
                           launch_of((p.row_count + kTogether - 1) / kTogether, kRowThreads), p);
    }
    return launch_kernel(moe_quantize_kernel<T, kRowThreads>, launch_of(p.row_count, kRowThreads),
                         p);
  }
  template <typename T, Scaling kScaling>
  Status launch_quantize_whole(QuantizeProblem& p) const {
    constexpr int kStep = kRowThreads * kVectorElements<T>, kManyThreads = 1024;
    if (p.ids == nullptr) p.ids = args_.topk_ids, p.experts = 0;  // none is left out
    p.block_columns = p.columns;
    if (share_blocks(p)) {
      return launch_kernel(moe_quantize_whole_kernel<T, kFewThreads, kScaling>,
                           launch_of((p.row_count + kTogether - 1) / kTogether, kRowThreads), p);
    }
    // A compute unit has few lines on their way: where rows are few, several share one, or at least
    // more waves ask for it.
    const bool few = p.row_count < facts_.compute_units;
    Launch launch = launch_of(p.row_count, kRowThreads);
    if constexpr (kScaling == Scaling::kPerGroup) {
      if (few) p.block_columns = kStep;
      launch.grid.y = static_cast<unsigned>((p.columns + p.block_columns - 1) / p.block_columns);
    } else if (few && p.columns > 4 * kStep) {
      launch.block = kManyThreads;
      return launch_kernel(moe_quantize_whole_kernel<T, kManyThreads, kScaling>, launch, p);
    }
    return launch_kernel(moe_quantize_whole_kernel<T, kRowThreads, kScaling>, launch, p);
  }
  Status quantize_x() const {
    return quantize(args_.x, args_.x_dtype, args_.x_stride, Rows::kTokens, args_.hidden,
                    args_.gate_up, memory_.x, memory_.x_scales);
  }
  Status quantize_h() const {
    return quantize(memory_.wide_h, DType::kFloat32, args_.intermediate, Rows::kOfExperts,
                    args_.intermediate, args_.down, memory_.h, memory_.h_scales);
  }

  // The scales of rows of `columns` that quantize() wrote.
  static ScaleView scales_of(const float* scales, int64_t columns, const ExpertWeights& w) {
    if (w.scale.is_blocked()) {
      return {scales, FusedMoeMemory::groups(columns), 1, ScaleView::Kind::kBlock};
    }
    return {scales, 1, 0, ScaleView::Kind::kRow};
  }

  GroupedProblem product(const ExpertWeights& w) const {
    GroupedProblem p = {};
    p.w = w;
    if (!routes_itself_) {
      p.row_slots = memory_.row_slots;
      p.tiles = memory_.tiles;
      p.tile_count = memory_.tile_count;
      p.groups = memory_.tile_groups;
    }
    p.split_k = 1;
    p.a_dtype = has_quantized_rows() ? w.dtype : args_.x_dtype;
    p.scale_rounding = ScaleRounding::of(args_.ue8m0);
    return p;
  }

  SlotIds slot_ids(bool first, int product) const {
    SlotIds slots = {args_.topk_ids, static_cast<int32_t>(slots_), args_.experts, first,
                     args_.topk_weights};
    if (config_.takes_units()) slots.taken = memory_.taken + product;
    return slots;
  }
  // Whether rows are quantised before a product, and not by it.
  bool has_quantized_rows() const { return is_quantized(args_) && !config_.is_resident(); }

  Status gate_up() const {
    GroupedProblem p = product(args_.gate_up);
    p.slots_of_token = config_.sorts_rows() ? 0 : args_.k;
    if (has_quantized_rows()) p.scale_a = scales_of(memory_.x_scales, args_.hidden, args_.gate_up);
    if (has_quantized_rows() || config_.sorts_rows()) {
      p.a = memory_.x;
      p.a_stride = args_.hidden;
    } else {
      p.a = args_.x;
      p.a_stride = args_.x_stride;
    }
    p.n = static_cast<int32_t>(2 * args_.intermediate);
    p.k = static_cast<int32_t>(args_.hidden);
    p.activation = args_.activation;
    p.limit = args_.limit;
    p.interleaved = args_.interleaved;
    p.out = memory_.wide_h;
    p.out_stride = args_.intermediate;
    p.out_dtype = is_quantized(args_) ? DType::kFloat32 : args_.x_dtype;
    if (FusedMoeMemory::ends_quantized(args_, config_)) {
      p.out = memory_.h;
      p.out_dtype = args_.down.dtype;
      p.out_scales = memory_.h_scales;
    }
    p.wide_stores = has_wide_stores(p.out, p.out_stride, p.out_dtype);
    return launch_product(GroupedEnd::kGateUp, p, config_, most_tiles_,
                          slot_ids(!has_quantized_rows(), 0), facts_, stream_);
  }

  Status down() const {
    GroupedProblem p = product(args_.down);
    p.n = static_cast<int32_t>(args_.hidden);
    p.k = static_cast<int32_t>(args_.intermediate);
    p.a_stride = args_.intermediate;
    if (has_quantized_rows()) {
      p.a = memory_.h;
      p.scale_a = scales_of(memory_.h_scales, args_.intermediate, args_.down);
    } else {
      p.a = memory_.wide_h;
    }
    p.out = memory_.parts;
    p.out_stride = args_.hidden;
    p.out_dtype = DType::kFloat32;
    if (config_.is_resident()) {
      p.a_dtype = DType::kFloat32;
      p.slots_of_token = args_.k;
      p.out = args_.out;
      p.out_stride = args_.out_stride;
      p.out_dtype = args_.out_dtype;
    }
    p.wide_stores = has_wide_stores(p.out, p.out_stride, p.out_dtype);
    p.slots = slots_;
    p.split_k = config_.split_k;
    return launch_product(GroupedEnd::kDown, p, config_, most_tiles_, slot_ids(false, 1), facts_,
                          stream_);
  }

  Status combine() const {
    CombineProblem p = {};
    p.parts = memory_.parts;
    p.slots = slots_;
    p.weights = args_.topk_weights;
    p.ids = args_.topk_ids;
    p.split_k = config_.split_k;
    p.k = args_.k;
    p.experts = args_.experts;
    p.hidden = static_cast<int32_t>(args_.hidden);
    p.out = args_.out;
    p.out_stride = args_.out_stride;
    p.out_dtype = args_.out_dtype;
    // The first kernel of a layer that routes itself waits before it lets others begin.
    p.gated = routes_itself_;
    const bool wide = p.hidden % 4 == 0 && has_wide_stores(p.out, p.out_stride, p.out_dtype);
    if constexpr (kNvidia) {
      return wide ? launch_combine<4>(moe_combine_kernel<4>, kRowThreads, p)
                  : launch_combine<1>(moe_combine_kernel<1>, kRowThreads, p);
    } else if (args_.k <= 8) {  // all slots of a token at once
      return wide ? launch_combine_narrow<4, 8>(p) : launch_combine_narrow<1, 8>(p);
    } else {
      return wide ? launch_combine_narrow<2, 16>(p) : launch_combine_narrow<1, 16>(p);
    }
  }
  template <int kColumns, int kAtOnce>
  Status launch_combine_narrow(const CombineProblem& p) const {
    // Where the slots fit a wave, the bytes that nobody needs are few.
    return launch_combine<kColumns>(routes_itself_
                                        ? moe_combine_narrow_kernel<kColumns, kAtOnce, true>
                                        : moe_combine_narrow_kernel<kColumns, kAtOnce, false>,
                                    kCombineThreads, p);
  }
  template <int kColumns>
  Status launch_combine(void (*kernel)(CombineProblem), int threads,
                        const CombineProblem& p) const {
    Launch launch = launch_of(args_.tokens, threads);
    const int64_t step = int64_t{threads} * kColumns;
    launch.grid.y = static_cast<unsigned>((args_.hidden + step - 1) / step);
    return launch_kernel(kernel, launch, p);
  }

  const FusedMoeArgs& args_;
  const MoeConfig& config_;
  const FusedMoeMemory& memory_;
  const DeviceFacts& facts_;
  Stream stream_;
  bool routes_itself_;
  int64_t slots_, most_tiles_;
};

template <typename MoeConfig>
Status launch_fused_moe(const FusedMoeArgs& args, const Context& context) {
  DeviceFacts facts;
  MoeConfig config;
  if (const Status error = check_sizes(args)) return error;
  if (const Status error = current_device(facts)) return error;
  if (const Status error = config_of(args.config, shape_of(args), config)) return error;
  const MoeSlices slices = MoeSlices::of(args);
  WorkspacePieces workspace(args.workspace);
  const FusedMoeMemory memory(workspace, args, config, slices.tokens);
  for (int64_t begin = 0; begin < args.tokens; begin += slices.tokens) {
    FusedMoeArgs slice = args;
    slice.tokens = args.tokens - begin < slices.tokens ? args.tokens - begin : slices.tokens;
    slice.x = static_cast<const uint8_t*>(args.x) + begin * args.x_stride * size_of(args.x_dtype);
    slice.out = static_cast<uint8_t*>(args.out) + begin * args.out_stride * size_of(args.out_dtype);
    slice.topk_weights += begin * args.k;
    slice.topk_ids += begin * args.k;
    const FusedMoeLayer<MoeConfig> layer(slice, config, memory, facts, stream_of(context));
    if (const Status error = layer.launch()) return error;
  }
  return nullptr;
}

template <typename MoeConfig>
Status visit_fused_moe_configs(const FusedMoeArgs& args,
                               void (*visit)(const char* config, void* state), void* state) {
  if (const Status error = check_sizes(args)) return error;
  return tell_configs<MoeConfig>(args.config, shape_of(args), visit, state);
}

}  // namespace rocm_kernels
