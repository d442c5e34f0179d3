// A config of attention on AMD GPUs: which kernel, into how many parts the keys are divided, and
// the order of workgroups. No HIP header.
#pragma once

#include <algorithm>

#include "../../blocks/product/cdna/shape.h"
#include "../../blocks/product/config_fields.h"
#include "../attention.h"
#include "tiles.h"

namespace rocm_kernels::cdna {

struct AttentionConfig {
  enum class Design : int32_t {
    kPlain,    // any types and sizes, a row a wave (gpu/plain.h)
    kDecode,   // few rows a sequence: bound by the bytes of keys and values (decode.h)
    kPrefill,  // many: bound by the matrix instructions (prefill.h)
  };
  Design design = Design::kPlain;
  int32_t rows = 16;  // of a workgroup
  int32_t parts = 1;  // kDecode: of the keys, whose sums the last to arrive adds up
  // kPrefill:
  int32_t xcds = 1;         // > 1: the blocks of rows of a KV head run on one XCD
  int32_t heavy_first = 0;  // 1: those with the most keys begin
  int32_t chain = 0;        // what P meets V from: 0: the registers of S; 1: LDS

  static constexpr const char* kDesigns[] = {"plain", "decode", "prefill"};
  static constexpr const char* kChains[] = {"registers", "lds"};
  static constexpr ConfigField<AttentionConfig> kFields[] = {
      {"rows", &AttentionConfig::rows},
      {"parts", &AttentionConfig::parts},
      {"xcds", &AttentionConfig::xcds},
      {"heavy_first", &AttentionConfig::heavy_first},
      {"chain", &AttentionConfig::chain, kChains, 2},
  };
  static constexpr Status kMustRead =
      "attention config: it must read like 'decode rows=16 parts=8 xcds=1 heavy_first=0 "
      "chain=registers'";
};

// The number in kDecodeTiles of the tile that serves the heads by that many rows, or -1.
inline int find_decode_tile(const AttentionArgs& args, int32_t rows) {
  const int64_t size = std::max(args.head_dim, args.head_dim_v);
  for (size_t i = 0; i < kDecodeTileCount; ++i) {
    if (kDecodeTiles[i].rows == rows && kDecodeTiles[i].head_dim >= size) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// The same in kPrefillTiles.
inline int find_prefill_tile(const AttentionArgs& args, const AttentionConfig& c) {
  const PrefillTile* smallest = nullptr;  // that holds the heads
  for (size_t i = 0; i < kPrefillTileCount; ++i) {
    const PrefillTile& tile = kPrefillTiles[i];
    if (tile.head_dim < args.head_dim || tile.head_dim_v < args.head_dim_v) continue;
    if (smallest == nullptr) smallest = &tile;
    if (tile.head_dim == smallest->head_dim && tile.rows() == c.rows &&
        tile.chain_in_lds == (c.chain == 1)) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

// Rows of the longest sequence that share a KV head.
inline int64_t rows_of_kv_head(const AttentionArgs& args) {
  return args.max_seqlen_q * (args.heads / args.kv_heads);
}
inline int64_t row_blocks(const AttentionArgs& args, const AttentionConfig& c) {
  return (rows_of_kv_head(args) + c.rows - 1) / c.rows;
}

// A key's page is key * magic / 2^32; 0 for pages of one key.
inline uint64_t page_magic(int64_t page_size) {
  return page_size <= 1 ? 0 : ((uint64_t{1} << 32) + page_size - 1) / page_size;
}
inline bool has_page_magic(const AttentionArgs& args) {
  if (args.block_table == nullptr || args.page_size <= 1) return true;
  const uint64_t over = page_magic(args.page_size) * args.page_size - (uint64_t{1} << 32);
  return static_cast<uint64_t>(args.max_seqlen_k) * over < uint64_t{1} << 32;
}

// Scratch of the parts' sums: tickets, then [item][part][rows][head_dim + 4] floats.
inline int64_t decode_items(const AttentionArgs& args, const AttentionConfig& c) {
  return args.batch * args.kv_heads * row_blocks(args, c);
}
inline int64_t decode_ticket_bytes(const AttentionArgs& args, const AttentionConfig& c) {
  return (decode_items(args, c) * 8 + 255) / 256 * 256;
}
inline int64_t decode_workspace_bytes(const AttentionArgs& args, const AttentionConfig& c) {
  if (c.design != AttentionConfig::Design::kDecode || c.parts == 1) return 0;
  const int64_t pitch = kDecodeTiles[find_decode_tile(args, c.rows)].head_dim + 4;
  return decode_ticket_bytes(args, c) +
         decode_items(args, c) * c.parts * c.rows * pitch * int64_t{sizeof(float)};
}

inline int64_t prefill_workgroups(const AttentionArgs& args, const AttentionConfig& c) {
  const int64_t groups = args.batch * args.kv_heads;
  return (groups + c.xcds - 1) / c.xcds * c.xcds * row_blocks(args, c);
}

// Whether the config can serve args on the device: nullptr, or why not.
inline Status check_config(const AttentionArgs& args, const AttentionConfig& c,
                           const Target& target) {
  if (c.design == AttentionConfig::Design::kPlain) {
    return equal_configs(c, AttentionConfig{})
               ? nullptr
               : "attention config: the plain design takes its default fields";
  }
  const bool decode = c.design == AttentionConfig::Design::kDecode;
  if (!target.matrix_instructions) {
    return "attention config: decode and prefill need gfx942 or gfx950";
  }
  if (args.q_dtype == DType::kFloat32) {
    return "attention config: decode and prefill take float16 and bfloat16";
  }
  if (is_fp8(args.kv_dtype) && args.kv_dtype != target.fp8) {
    return "attention config: only the plain design takes another FP8 dialect than the device's";
  }
  if (args.head_dim % (decode && is_fp8(args.kv_dtype) ? 16 : 8) != 0 || args.head_dim_v % 8 != 0) {
    return "attention config: heads must have whole 8 elements, for decode with FP8 keys whole 16";
  }
  if ((decode ? find_decode_tile(args, c.rows) : find_prefill_tile(args, c)) < 0) {
    return "attention config: there is no tile of so many rows for heads of that size";
  }
  if (!has_page_magic(args)) {
    return "attention config: only the plain design takes pages of other than 2^n keys where "
           "max_seqlen_k times page_size exceeds 2^32";
  }
  if (decode) {
    if (c.parts < 1 || c.parts * c.rows > kMostParts) {
      return "attention config: parts must be 1 to 128, and parts times rows at most 2,048";
    }
    if (c.xcds != 1 || c.heavy_first != 0 || c.chain != 0) {
      return "attention config: decode takes xcds=1 heavy_first=0 chain=registers";
    }
    if (args.kv_heads * row_blocks(args, c) > 65535 || args.batch > 65535) {
      return "attention config: decode takes at most 65,535 sequences, and blocks of rows a "
             "sequence";
    }
    return nullptr;
  }
  if (c.parts != 1) return "attention config: prefill takes parts=1";
  if (c.xcds < 1 || c.xcds > 8) return "attention config: xcds must be 1 to 8";
  if (c.heavy_first < 0 || c.heavy_first > 1) return "attention config: heavy_first must be 0 or 1";
  if (prefill_workgroups(args, c) >= int64_t{1} << 31) {
    return "attention config: prefill takes fewer than 2^31 blocks of rows";
  }
  return nullptr;
}

}  // namespace rocm_kernels::cdna
