// A config of the mixture-of-experts ops on GPUs: the design of the grouped products, their tile,
// the order of tiles, and how K is divided. As a struct and as text. No GPU header: tests and tools
// include it too.
#pragma once

#include "../blocks/product/choice.h"
#include "grouped_gemm.h"

namespace rocm_kernels {

struct MoeConfig {
  enum class Design : int32_t {
    kPlain,      // no matrix instructions: any types and alignment, any GPU (gpu/plain.h)
    kStreamed,   // few rows an expert: weights without a pause (cdna/streamed.h, cuda/streamed.cuh)
    kTiled,      // tiles by matrix instructions (cdna/tiled.h, cuda/tiled.cuh)
    kWarpgroup,  // many rows an expert: gemm's tiles by TMA and wgmma (cuda/grouped_tiles.cuh)
    kResident,   // few tokens in FP8: blocks keep all rows, and quantise them (cuda/resident.cuh)
    kStreamedWgmma,  // few rows an expert in FP8: streamed to wgmma (cuda/streamed_wgmma.cuh)
  };
  // In which order tiles of one part of K follow each other. Rows: all columns of a tile of rows,
  // then the next rows. Columns: all rows, whichever their expert, of a tile of columns. Grouped:
  // group_m tiles of rows of a tile of columns, all columns, then the next tiles of rows. Expert:
  // the same of one expert's tiles, up to group_m of them (warpgroup).
  enum Order : int32_t { kRow, kColumn, kGrouped, kExpert };
  Design design = Design::kPlain;
  int32_t block_m = 8, block_n = 4;  // rows of a, and of w, that a workgroup multiplies at a time
  int32_t order = kGrouped;
  int32_t group_m = 8;  // grouped, expert: tiles of rows that are walked down together
  int32_t split_k = 1;  // fused_moe's down product: workgroups that share the K of a tile
  int32_t xcds = 1;     // > 1: neighbouring tiles run on one XCD

  // Whether the gate_up product's tile, or that of two blocks, has whole groups of 128 columns of
  // h, and quantises them.
  bool ends_in_groups() const {
    return (design == Design::kTiled && block_n == 256) ||
           (design == Design::kWarpgroup && block_n == 128);
  }
  // Whether products find each expert's rows by themselves, from the ids: nothing is routed before
  // them, and a row's number is its slot's (cuda/streamed.cuh; cdna/streamed_tile.h, where a wave
  // has a lane for each slot, and an id nine bits).
  static constexpr int64_t kSlotsOfWave = 64;
  bool routes_itself(bool nvidia, int64_t slots, int64_t experts) const {
    return is_resident() || design == Design::kStreamedWgmma ||
           (design == Design::kStreamed &&
            (nvidia || (slots <= kSlotsOfWave && experts <= kFewExperts)));
  }
  // Whether products quantise their rows themselves, and down adds the slots of a token.
  bool is_resident() const { return design == Design::kResident; }
  // Whether the gate_up product takes its rows of x in the order of experts: a copy, for the copy
  // engine cannot gather.
  bool sorts_rows() const { return design == Design::kWarpgroup; }
  // Tiles of rows that are walked down before the next columns; 0: all.
  int32_t walked() const { return order == kRow ? 1 : order == kColumn ? 0 : group_m; }
  bool walks_experts() const { return order == kExpert; }

  static constexpr const char* kDesigns[] = {"plain",     "streamed", "tiled",
                                             "warpgroup", "resident", "streamed_wgmma"};
  static constexpr const char* kOrders[] = {"row", "column", "grouped", "expert"};
  static constexpr ConfigField<MoeConfig> kFields[] = {
      {"block_m", &MoeConfig::block_m},         {"block_n", &MoeConfig::block_n},
      {"order", &MoeConfig::order, kOrders, 4}, {"group_m", &MoeConfig::group_m},
      {"split_k", &MoeConfig::split_k},         {"xcds", &MoeConfig::xcds}};
  static constexpr Status kMustRead =
      "moe config: it must read like 'tiled block_m=64 block_n=128 order=grouped group_m=8 "
      "split_k=1 xcds=8'";
};

inline bool operator==(const MoeConfig& a, const MoeConfig& b) { return equal_configs(a, b); }

// Tiles of block_m rows that `rows` rows can take whichever experts they belong to: each of those
// that have any has at most one that is not full.
inline int64_t most_row_tiles(int64_t rows, int64_t experts, int64_t block_m) {
  const int64_t touched = rows < experts ? rows : experts;
  return (rows - touched) / block_m + touched;
}

// What the choice of a config depends on.
struct MoeShape {
  int32_t rows;  // slots of tokens, or grouped_gemm's rows
  int32_t experts;
  int32_t n, k;            // of grouped_gemm, or of the gate_up product: 2I and H
  int32_t fused;           // a layer, whose down product has N = k and K = n / 2; else grouped_gemm
  int32_t a_type, w_type;  // DType of what is multiplied
  int32_t blocks;          // of scales: bit 0 gate_up's, bit 1 down's; grouped_gemm: its a's or w's
  int32_t aligned;         // rows of all operands begin at multiples of 16 bytes and do not overlap
  int32_t compact;         // an expert's weights, and its scales, span less than 2 GiB
  int32_t interleaved;
  int32_t out_type;   // DType of grouped_gemm's out
  int32_t tokens;     // of a layer; grouped_gemm has none
  int32_t x_aligned;  // of a layer: every row of x, before it is quantised, likewise

  DType a() const { return static_cast<DType>(a_type); }
  DType w() const { return static_cast<DType>(w_type); }
  DType out() const { return static_cast<DType>(out_type); }
};
constexpr ConfigField<MoeShape> kMoeShapeFields[] = {
    {"rows", &MoeShape::rows},
    {"experts", &MoeShape::experts},
    {"n", &MoeShape::n},
    {"k", &MoeShape::k},
    {"fused", &MoeShape::fused},
    {"a_type", &MoeShape::a_type},
    {"w_type", &MoeShape::w_type},
    {"blocks", &MoeShape::blocks},
    {"aligned", &MoeShape::aligned},
    {"compact", &MoeShape::compact},
    {"interleaved", &MoeShape::interleaved},
    {"out_type", &MoeShape::out_type},
    {"tokens", &MoeShape::tokens},
    {"x_aligned", &MoeShape::x_aligned},
};

// Host: each GPU backend defines these once, in its grouped_gemm source.

// The config of least modelled time, by a rule (bytes, tiles, compute units); pure but for what the
// current device is.
Status choose_config(const MoeShape& shape, MoeConfig& config);
// Whether the config can serve the shape on the current device: nullptr, or why not.
Status check_config(const MoeShape& shape, const MoeConfig& config);
// Calls visit(config, state) for the configs that can serve the shape and are worth timing.
Status visit_configs(const MoeShape& shape, void (*visit)(const MoeConfig& config, void* state),
                     void* state);

// The config that `text` names, or the chosen one.
inline Status config_of(const char* text, const MoeShape& shape, MoeConfig& config) {
  if (text == nullptr) return choose_config(shape, config);
  if (const Status error = read_config(text, config)) return error;
  return check_config(shape, config);
}

// visit_<op>_configs() of both ops: the one that is taken first, then the others.
inline Status tell_configs(const char* text, const MoeShape& shape,
                           void (*visit)(const char* config, void* state), void* state) {
  MoeConfig first;
  if (const Status error = config_of(text, shape, first)) return error;
  Status error = nullptr;
  const auto for_each = [&](const auto& tell) {
    using Tell = std::remove_reference_t<decltype(tell)>;
    const Tell* told = &tell;
    error = visit_configs(
        shape,
        [](const MoeConfig& config, void* data) { (**static_cast<const Tell**>(data))(config); },
        &told);
  };
  visit_texts(first, for_each, visit, state);
  return error;
}

}  // namespace rocm_kernels
