// What the configs of the mixture-of-experts ops have in common on all GPUs: the tile of the
// grouped products, the order of tiles, and how K is divided. A backend's MoeConfig adds its
// designs (moe/cdna/config.h, moe/cuda/config.h). No GPU header: tests and tools include it too.
#pragma once

#include "../blocks/product/choice.h"
#include "grouped_gemm.h"

namespace rocm_kernels {

struct MoeTiling {
  // In which order tiles of one part of K follow each other. Rows: all columns of a tile of rows,
  // then the next rows. Columns: all rows, whichever their expert, of a tile of columns. Grouped:
  // group_m tiles of rows of a tile of columns, all columns, then the next tiles of rows. Expert:
  // the same of one expert's tiles, up to group_m of them (warpgroup).
  enum Order : int32_t { kRow, kColumn, kGrouped, kExpert };
  int32_t block_m = 8, block_n = 4;  // rows of a, and of w, that a workgroup multiplies at a time
  int32_t order = kGrouped;
  int32_t group_m = 8;  // grouped, expert: tiles of rows that are walked down together
  int32_t split_k = 1;  // fused_moe's down product: workgroups that share the K of a tile
  int32_t xcds = 1;     // > 1: neighbouring tiles run on one XCD

  // Tiles of rows that are walked down before the next columns; 0: all.
  int32_t walked() const { return order == kRow ? 1 : order == kColumn ? 0 : group_m; }
  bool walks_experts() const { return order == kExpert; }

  static constexpr const char* kOrders[] = {"row", "column", "grouped", "expert"};
  static constexpr ConfigField<MoeTiling> kFields[] = {
      {"block_m", &MoeTiling::block_m},         {"block_n", &MoeTiling::block_n},
      {"order", &MoeTiling::order, kOrders, 4}, {"group_m", &MoeTiling::group_m},
      {"split_k", &MoeTiling::split_k},         {"xcds", &MoeTiling::xcds}};
  static constexpr Status kMustRead =
      "moe config: it must read like 'tiled block_m=64 block_n=128 order=grouped group_m=8 "
      "split_k=1 xcds=8'";
};

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

// ---- Host ---------------------------------------------------------------------------------------
// Beside its MoeConfig a backend declares, and defines in its products' source (launches.h):
//
//   choose_config(shape, config)          the config of least modelled time; pure but for what the
//                                         current device is
//   check_config(shape, config)           whether it can serve the shape on the current device:
//                                         nullptr, or why not
//   visit_configs(shape, visit, state)    calls visit(config, state) for those that can serve the
//                                         shape and are worth timing

// The config that `text` names, or the chosen one.
template <typename MoeConfig>
Status config_of(const char* text, const MoeShape& shape, MoeConfig& config) {
  if (text == nullptr) return choose_config(shape, config);
  if (const Status error = read_config(text, config)) return error;
  return check_config(shape, config);
}

// visit_<op>_configs() of both ops: the one that is taken first, then the others.
template <typename MoeConfig>
Status tell_configs(const char* text, const MoeShape& shape,
                    void (*visit)(const char* config, void* state), void* state) {
  MoeConfig first;
  if (const Status error = config_of(text, shape, first)) return error;
  Status error = nullptr;
  const auto for_each = [&](const auto& tell) {
    using Tell = std::remove_reference_t<decltype(tell)>;
    const Tell* told = &tell;
    void (*const tell_one)(const MoeConfig&, void*) = [](const MoeConfig& config, void* data) {
      (**static_cast<const Tell**>(data))(config);
    };
    error = visit_configs(shape, tell_one, &told);
  };
  visit_texts(first, for_each, visit, state);
  return error;
}

}  // namespace rocm_kernels
