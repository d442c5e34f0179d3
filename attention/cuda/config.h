// A config of attention on NVIDIA GPUs: which kernel, and into how many parts the keys are divided.
// No CUDA header.
#pragma once

#include <algorithm>

#include "../../blocks/product/config_fields.h"
#include "../../common/core/math.h"
#include "../../common/cuda/memory_rates.h"
#include "../attention.h"
#include "../gpu/shape.h"
#include "tiles.h"

namespace rocm_kernels {
namespace cuda {

struct AttentionDevice {
  int32_t id = 0;
  int32_t sm_count = 0;
  int32_t compute_capability = 0;      // 90 for sm_90
  int64_t shared_bytes_per_block = 0;  // most that a block can ask for
  int32_t most_cluster = 1;            // blocks, each with a multiprocessor of its own
  MemoryRates memory;
};

struct AttentionConfig {
  enum class Design : int32_t {
    kPlain,     // any types and sizes, a row a warp (gpu/plain.h)
    kDecode,    // few rows a sequence: bound by the bytes of keys and values (decode.cuh)
    kPrefill,   // many rows: bound by the tensor cores (prefill.cuh)
    kGathered,  // prefill, behind a kernel that brings keys to rows of 16 bits (gather_keys.cuh)
  };
  Design design = Design::kPlain;
  int32_t rows = 8;     // of a block
  int32_t cluster = 1;  // parts of the keys whose sums meet in shared memory
  int32_t outer = 1;    // parts whose sums meet in memory, each of `cluster`

  static constexpr const char* kDesigns[] = {"plain", "decode", "prefill", "gathered"};
  static constexpr ConfigField<AttentionConfig> kFields[] = {
      {"rows", &AttentionConfig::rows},
      {"cluster", &AttentionConfig::cluster},
      {"outer", &AttentionConfig::outer},
  };
  static constexpr Status kMustRead =
      "attention config: it must read like 'decode rows=8 cluster=8 outer=1'";
};

// The number in kDecodeTiles of the tile that serves the heads by that many rows, or -1.
inline int find_decode_tile(const AttentionArgs& args, int32_t rows) {
  const int64_t size = std::max(args.head_dim, args.head_dim_v);
  for (size_t i = 0; i < kDecodeTileCount; ++i) {
    if (kDecodeTiles[i].rows == rows && kDecodeTiles[i].head_dim >= size)
      return static_cast<int>(i);
  }
  return -1;
}

// The number in kPrefillTiles of the tile that serves the heads, or -1.
inline int find_prefill_tile(const AttentionArgs& args) {
  for (size_t i = 0; i < kPrefillTileCount; ++i) {
    if (kPrefillTiles[i].head_dim >= args.head_dim &&
        kPrefillTiles[i].head_dim_v >= args.head_dim_v) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

inline PrefillTile prefill_tile(const AttentionArgs& args) {
  return kPrefillTiles[find_prefill_tile(args)].of(is_fp8(args.kv_dtype));
}

inline DecodeBlock decode_block(const AttentionArgs& args, const AttentionConfig& c,
                                const AttentionDevice& device) {
  const DecodeTile& tile = kDecodeTiles[find_decode_tile(args, c.rows)];
  DecodeBlock block = {tile.head_dim, tile.rows, static_cast<int32_t>(size_of(args.kv_dtype)),
                       device.shared_bytes_per_block < 112 << 10};
  if (block.shared_bytes(1) > device.shared_bytes_per_block) block.few_stages = true;
  return block;
}

// Rows of the longest sequence that share a KV head.
inline int64_t rows_of_kv_head(const AttentionArgs& args) {
  return args.max_seqlen_q * (args.heads / args.kv_heads);
}
inline int64_t row_blocks(const AttentionArgs& args, const AttentionConfig& c) {
  return (rows_of_kv_head(args) + c.rows - 1) / c.rows;
}

inline int64_t decode_blocks(const AttentionArgs& args, const AttentionConfig& c) {
  return args.batch * args.kv_heads * row_blocks(args, c) * c.cluster * c.outer;
}

// Whether a decode block is to have a multiprocessor of its own: where there are as many, and no
// fewer than half. The kernel before still holds places when this one's are given out, so that some
// would have two blocks, and take twice as long. Larger clusters would not find room.
inline bool is_alone(const AttentionArgs& args, const AttentionConfig& c,
                     const AttentionDevice& device) {
  const int64_t blocks = decode_blocks(args, c);
  return c.cluster <= 2 && 2 * blocks > device.sm_count && blocks <= device.sm_count &&
         device.shared_bytes_per_block >= kHalfSharedBytes;
}

// That a decode block asks for.
inline int32_t decode_shared_bytes(const AttentionArgs& args, const AttentionConfig& c,
                                   const AttentionDevice& device) {
  const int32_t bytes = decode_block(args, c, device).shared_bytes(c.cluster);
  return is_alone(args, c, device) ? std::max(bytes, kHalfSharedBytes) : bytes;
}

// Whether every row of every head is whole vectors of 16 bytes.
inline bool has_vectors(const AttentionRows& rows, DType dtype, int64_t head_dim) {
  const int64_t elements = 16 / size_of(dtype);
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && rows.batch_stride % elements == 0 &&
         rows.row_stride % elements == 0 && rows.head_stride % elements == 0 &&
         head_dim % elements == 0;
}

// Whether decode can load every row of every head.
inline bool has_aligned_heads(const AttentionArgs& args) {
  return has_vectors(args.k, args.kv_dtype, args.head_dim) &&
         has_vectors(args.v, args.kv_dtype, args.head_dim_v) &&
         reinterpret_cast<uintptr_t>(args.q.data) % 4 == 0 && args.q.batch_stride % 2 == 0 &&
         args.q.row_stride % 2 == 0 && args.q.head_stride % 2 == 0;
}

// Whether prefill can.
inline bool has_vector_heads(const AttentionArgs& args) {
  const AttentionRows out = {args.out, args.out_batch_stride, args.out_row_stride,
                             args.out_head_stride};
  return has_vectors(args.q, args.q_dtype, args.head_dim) &&
         has_vectors(args.k, args.kv_dtype, args.head_dim) &&
         has_vectors(args.v, args.kv_dtype, args.head_dim_v) &&
         has_vectors(out, args.q_dtype, args.head_dim_v);
}

constexpr int64_t kTakenBytes = 256;  // of the word that counts items, before what parts leave

// Keys and values, FP8 or in pages, that are gathered in rows of each KV head and of the queries'
// type: at most so many bytes, and the call of prefill that is left then. `to`: where they are.
constexpr int64_t kMostGatheredBytes = int64_t{1} << 28;
inline int64_t gathered_bytes(const AttentionArgs& args) {
  const int64_t rows = args.cu_seqlens_k != nullptr ? args.total_k : args.batch * args.max_seqlen_k;
  return rows * args.kv_heads * (args.head_dim + args.head_dim_v) * size_of(args.q_dtype);
}
// Of a workspace, before prefill's.
inline int64_t gathered_room(const AttentionArgs& args) {
  return ceil_div(gathered_bytes(args), kTakenBytes) * kTakenBytes;
}
inline AttentionArgs gathered_args(const AttentionArgs& args, void* to) {
  const bool ragged = args.cu_seqlens_k != nullptr;
  const int64_t rows = ragged ? args.total_k : args.max_seqlen_k;
  const int64_t k_elements = (ragged ? 1 : args.batch) * args.kv_heads * rows * args.head_dim;
  const auto place = [&](char* at, int64_t size) {
    return AttentionRows{at, ragged ? 0 : args.kv_heads * rows * size, size, rows * size};
  };
  char* const k = static_cast<char*>(to);
  AttentionArgs gathered = args;
  gathered.kv_dtype = args.q_dtype;
  gathered.block_table = nullptr;
  gathered.k = place(k, args.head_dim);
  gathered.v = place(to == nullptr ? k : k + k_elements * size_of(args.q_dtype), args.head_dim_v);
  return gathered;
}
constexpr int kGatherKeys = 32;  // of a block, which has one KV head
inline int64_t gathered_blocks(const AttentionArgs& args) {
  return args.batch * args.kv_heads * ceil_div(args.max_seqlen_k, kGatherKeys);
}
inline AttentionConfig behind_gathering(AttentionConfig c) {
  c.design = AttentionConfig::Design::kPrefill;
  return c;
}
// A choice may have been made for fewer keys than the call has room for (usual_seqlen_k): where so
// many are not gathered, prefill takes them as they are.
inline AttentionConfig within_most_gathered(const AttentionArgs& args, AttentionConfig c) {
  if (c.design != AttentionConfig::Design::kGathered) return c;
  if (gathered_bytes(args) <= kMostGatheredBytes) return c;
  c.rows = std::min(c.rows, 128);
  return behind_gathering(c);
}

// Prefill's items (prefill.cuh), and the most that a word counts (taken_items.cuh).
inline int64_t prefill_items(const AttentionArgs& args, const AttentionConfig& c) {
  return row_blocks(args, c) * c.outer * args.kv_heads * args.batch;
}
constexpr int64_t kMostTaken = int64_t{1} << 23;

// Rows of an item whose queries TMA brings: those of whole queries, unless more than a
// 32nd of the rows would be idle then, or of the time. Else c.rows: threads copy them, if a query's
// heads do not divide these.
inline int64_t rows_in_boxes(const AttentionArgs& args, const AttentionConfig& c,
                             const AttentionDevice& device) {
  const int64_t heads = args.heads / args.kv_heads;
  AttentionConfig whole = c;
  whole.rows = static_cast<int>(c.rows / heads * heads);
  if (whole.rows * 32 < c.rows * 31) return c.rows;
  const auto rounds = [&](const AttentionConfig& of) {
    return ceil_div(prefill_items(args, of), device.sm_count);
  };
  return rounds(whole) * 32 > rounds(c) * 33 ? c.rows : whole.rows;
}

// Bytes of what parts of the keys leave in memory. Prefill: the word that counts items and, where
// outer > 1, head_dim_v + 2 floats for each part, row and head (join.cuh). Decode, where outer > 1:
// for each part but the last and each row of a block, words of 16 bytes, one for each two columns
// and one for each block of the cluster (decode_end.cuh).
inline int64_t partial_bytes(const AttentionArgs& args, const AttentionConfig& c) {
  if (c.design == AttentionConfig::Design::kPrefill) {
    const int64_t floats = c.outer == 1 ? 0 : prefill_tile(args).head_dim_v + 2;
    return kTakenBytes +
           args.total_q * args.heads * c.outer * floats * static_cast<int64_t>(sizeof(float));
  }
  if (c.design == AttentionConfig::Design::kGathered) {
    return gathered_room(args) + partial_bytes(gathered_args(args, nullptr), behind_gathering(c));
  }
  if (c.outer == 1) return 0;
  const int64_t rows = args.batch * args.kv_heads * row_blocks(args, c) * c.rows;
  const int64_t words = kDecodeTiles[find_decode_tile(args, c.rows)].head_dim / 2 + c.cluster;
  return rows * (c.outer - 1) * words * 16;
}

inline Status check_prefill(const AttentionArgs& args, const AttentionConfig& c,
                            const AttentionDevice& device) {
  if (c.rows != 64 && c.rows != 128 && c.rows != 192) {
    return "attention config: prefill takes 64, 128 or 192 rows";
  }
  if (c.cluster != 1) return "attention config: prefill has no clusters";
  if (c.outer < 1 || c.outer > kMaxOuter) return "attention config: outer must be 1 to 64";
  if (device.compute_capability != 90) return "attention config: prefill needs sm_90";
  if (args.q_dtype == DType::kFloat32) {
    return "attention config: prefill takes float16 and bfloat16";
  }
  if (args.kv_dtype == DType::kFloat8E4M3FNUZ) {
    return "attention config: only the plain design takes float8_e4m3fnuz here";
  }
  if (!has_vector_heads(args)) {
    return "attention config: prefill takes rows that begin at multiples of 16 bytes, and heads of "
           "whole 16 bytes";
  }
  const int tile = find_prefill_tile(args);
  if (tile < 0) return "attention config: prefill has no tile for heads of that size";
  if (c.rows > prefill_tile(args).most_rows() || (c.rows == 192 && args.block_table != nullptr)) {
    return "attention config: prefill takes 192 rows of heads of up to 64 alone, without FP8 and "
           "without pages";
  }
  if (prefill_tile(args).most_shared_bytes(c.rows) > device.shared_bytes_per_block) {
    return "attention config: a block of that tile needs more shared memory than the device has";
  }
  constexpr int64_t kMost = (int64_t{1} << 31) - 1;
  if (prefill_items(args, c) > kMost / 2 ||
      rows_of_kv_head(args) * (args.heads / args.kv_heads) > kMost) {
    return "attention config: prefill takes fewer than 2^30 blocks, and 2^31 rows a sequence";
  }
  return nullptr;
}

inline Status check_gathered(const AttentionArgs& args, const AttentionConfig& c,
                             const AttentionDevice& device) {
  const bool fp8 = args.kv_dtype == DType::kFloat8E4M3FN;
  if (!fp8 && (args.kv_dtype != args.q_dtype || args.block_table == nullptr)) {
    return "attention config: gathered takes keys of float8_e4m3fn, or in pages";
  }
  if (!has_vector_heads(args)) {
    return "attention config: gathered takes rows that begin at multiples of 16 bytes, and whole "
           "16 bytes";
  }
  if (gathered_blocks(args) >= int64_t{1} << 31) {
    return "attention config: gathered takes fewer than 2^31 blocks";
  }
  return check_prefill(gathered_args(args, nullptr), behind_gathering(c), device);
}

// Whether the config can serve args on the device: nullptr, or why not.
inline Status check_config(const AttentionArgs& args, const AttentionConfig& c,
                           const AttentionDevice& device) {
  if (c.design == AttentionConfig::Design::kPlain) {
    return equal_configs(c, AttentionConfig{})
               ? nullptr
               : "attention config: the plain design takes its default fields";
  }
  if (c.design == AttentionConfig::Design::kPrefill) return check_prefill(args, c, device);
  if (c.design == AttentionConfig::Design::kGathered) return check_gathered(args, c, device);
  if (device.compute_capability < 80) return "attention config: decode needs sm_80 or later";
  if (args.q_dtype == DType::kFloat32) return "attention config: decode takes float16 and bfloat16";
  if (args.kv_dtype == DType::kFloat8E4M3FNUZ) {
    return "attention config: only the plain design takes float8_e4m3fnuz here";
  }
  if (!has_aligned_heads(args)) {
    return "attention config: decode takes rows of k and v that begin at multiples of 16 bytes, "
           "and heads of whole 16 bytes";
  }
  if (find_decode_tile(args, c.rows) < 0) {
    return "attention config: decode has no tile of so many rows for heads of that size";
  }
  if (c.cluster < 1 || c.cluster > kMaxCluster || (c.cluster & (c.cluster - 1)) != 0) {
    return "attention config: cluster must be 1, 2, 4, 8 or 16";
  }
  if (c.cluster > 1 && device.compute_capability < 90) {
    return "attention config: clusters need sm_90 or later";
  }
  if (c.cluster > device.most_cluster) {
    return "attention config: the device holds no cluster of so many blocks";
  }
  if (c.outer < 1 || c.outer > kMaxOuter) return "attention config: outer must be 1 to 64";
  if (decode_block(args, c, device).shared_bytes(c.cluster) > device.shared_bytes_per_block) {
    return "attention config: a block of that tile needs more shared memory than the device has";
  }
  constexpr int64_t kMostRows = (int64_t{1} << 31) - 1;
  if (rows_of_kv_head(args) * (args.heads / args.kv_heads) > kMostRows) {
    return "attention config: decode takes fewer than 2^31 rows a sequence";
  }
  const int64_t most = c.cluster * c.outer == 1 ? kMostRows : 65535;
  if (args.kv_heads * row_blocks(args, c) > most || args.batch > 65535) {
    return "attention config: decode takes at most 65,535 sequences, and in parts as many blocks "
           "of rows a sequence";
  }
  return nullptr;
}

}  // namespace cuda
}  // namespace rocm_kernels
