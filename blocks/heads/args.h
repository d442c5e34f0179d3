// What heads of new tokens are made of, and where they go: of rope_and_cache, whose header has the
// maths, and of attention, which does the same to a token of its own.
#pragma once

#include "../../common/core/compiler.h"
#include "../../common/core/dtype.h"

namespace rocm_kernels {

constexpr int64_t kMaxRopeHeadDim = 512;

// [sequence, row, head, element], or pages in place of sequences: elements follow each other, the
// rest has strides in elements. data may be nullptr: not given.
struct HeadRows {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

// An integer for each [sequence, row], of 32 or 64 bits. data may be nullptr: not given.
struct TokenIntegers {
  const void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  bool wide = false;  // int64

  ROCM_KERNELS_HOST_DEVICE int64_t at(int64_t b, int64_t row) const {
    const int64_t i = b * batch_stride + row * row_stride;
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

struct RopeAndCacheArgs {
  int64_t batch = 0, rows = 0;           // tokens are [batch, rows]
  int64_t heads = 0, kv_heads = 0;       // kv_heads = 0: no keys and values
  int64_t head_dim = 0, head_dim_v = 0;  // of q and k, of v; <= kMaxRopeHeadDim

  HeadRows q, k, v;     // dtype; v may be missing where no cache takes it
  HeadRows out, k_out;  // dtype; may be q and k themselves, else share nothing with the inputs

  // Angles: rotary_dim is even and at most head_dim, 0: nothing rotates. [sequence, row, rotary_dim
  // / 2] by the token, or with `positions` by its position alone: `positions` (+ the token's row,
  // if `positions_begin`).
  int64_t rotary_dim = 0;
  bool interleaved = false;
  const void* cos = nullptr;
  const void* sin = nullptr;
  int64_t cos_batch_stride = 0, cos_row_stride = 0;
  int64_t sin_batch_stride = 0, sin_row_stride = 0;
  TokenIntegers positions;
  bool positions_begin = false;
  int64_t max_positions = 0;  // rows of cos, with positions

  const void* q_weight = nullptr;  // [head_dim], weight_dtype; nullptr: no norm
  const void* k_weight = nullptr;
  float eps = 1e-6f;
  float weight_offset = 0.0f;

  // Caches: [pages, page_size, kv_heads, elements]; a contiguous cache has a page a sequence. A
  // token's place is row `places` of the cache taken as one list of rows if there is no block
  // table and `is_slot`; else row `places` (+ the token's row, if `places_begin`) of its sequence.
  // A negative one is of no place: nothing is written.
  HeadRows k_cache, v_cache;
  int64_t pages = 0, page_size = 0;  // pages * page_size < 2^31
  TokenIntegers places;
  bool is_slot = false, places_begin = false;
  const int32_t* block_table = nullptr;  // [batch, block_table_pages]
  int64_t block_table_stride = 0, block_table_pages = 0;
  const float* k_scale = nullptr;  // [batch, kv_heads] by the strides, for FP8 caches
  const float* v_scale = nullptr;
  int64_t k_scale_batch_stride = 0, k_scale_head_stride = 0;
  int64_t v_scale_batch_stride = 0, v_scale_head_stride = 0;

  DType dtype = DType::kBFloat16;        // float32, float16 or bfloat16
  DType cache_dtype = DType::kBFloat16;  // dtype, or FP8
  DType table_dtype = DType::kFloat32;   // of cos and sin: float32, float16 or bfloat16
  DType weight_dtype = DType::kFloat32;  // likewise
};

// The row of cos and sin that is the token's, with positions.
ROCM_KERNELS_HOST_DEVICE inline int64_t position_of(const RopeAndCacheArgs& args, int64_t b,
                                                    int64_t row) {
  return args.positions.at(b, row) + (args.positions_begin ? row : 0);
}

// Where a token's keys and values go.
struct CachePlace {
  int64_t page = -1;       // -1: nowhere
  int64_t row = 0;         // of the page
  bool leads_out = false;  // of the cache, and so nowhere
};

ROCM_KERNELS_HOST_DEVICE inline CachePlace place_of(const RopeAndCacheArgs& args, int64_t b,
                                                    int64_t row) {
  CachePlace place;
  if (args.k_cache.data == nullptr) return place;
  int64_t at = args.places.at(b, row);
  if (args.places_begin) at += row;
  if (at < 0) return place;
  place.leads_out = true;
  const bool of_sequence = args.block_table == nullptr && !args.is_slot;
  const int64_t rows_of_all = of_sequence ? args.page_size
                              : args.block_table == nullptr
                                  ? args.pages * args.page_size
                                  : args.block_table_pages * args.page_size;
  if (at >= rows_of_all || at >= int64_t{1} << 31) return place;
  // 32 bits: GPUs divide 64 in a hundred instructions.
  const uint32_t size = static_cast<uint32_t>(args.page_size), in_all = static_cast<uint32_t>(at);
  int64_t page = of_sequence ? b : in_all / size;
  if (args.block_table != nullptr) page = args.block_table[b * args.block_table_stride + page];
  if (page < 0 || page >= args.pages) return place;
  place.page = page;
  place.row = of_sequence ? at : in_all % size;
  place.leads_out = false;
  return place;
}

}  // namespace rocm_kernels
