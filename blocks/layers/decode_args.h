// What decoder layers of a token of each sequence take; decode_layers/decode_layers.h has the
// maths.
#pragma once

#include "../../common/core/dtype.h"
#include "../../common/core/scale_view.h"

namespace rocm_kernels {

// [N, K] of fp8_dtype, contiguous, on 16 bytes; scales of the tensor or of a row.
struct DecodeWeight {
  const void* w = nullptr;
  ScaleView scale;
};

// What a layer has for itself.
struct DecodeLayer {
  DecodeWeight o;                          // [H, A]; none: the layer begins with its norm
  const void* norm_weight = nullptr;       // [H], dtype
  DecodeWeight gate_up;                    // [2 I, H]
  DecodeWeight down;                       // [H, I]
  const void* next_norm_weight = nullptr;  // [H], dtype; with qkv
  DecodeWeight qkv;                        // [Q, H], of the next layer; the last may have none
  const void* qkv_bias = nullptr;          // [Q], dtype; of the next layer, too
  const void* q_norm_weight = nullptr;     // [D], dtype: norms of heads; all layers have, or none
  const void* k_norm_weight = nullptr;
  void* k_cache = nullptr;  // [B, rows, kv_heads, D], cache_dtype; the new rows are written
  void* v_cache = nullptr;
  const float* k_scale = nullptr;  // of FP8 caches: [1] or [kv_heads], see the strides; nullptr: 1
  const float* v_scale = nullptr;
};

// Where layers begin with the attention of the tokens: heads of D elements, caches in dtype or in
// FP8, which hold k and v divided by their scales.
struct DecodeAttention {
  const void* qkv = nullptr;  // [B, heads + 2 kv_heads, D], dtype; nullptr: `attended` is given
  int32_t head_dim = 128;     // D: 128 or 64
  int64_t row_stride = 0;     // elements, even; of all caches
  int64_t head_stride = 0;
  int64_t batch_stride = 0;
  int32_t k_scale_stride = 0;  // from head to head: 0 or 1; of all layers
  int32_t v_scale_stride = 0;
  // Strides from sequence to sequence; 0: the same for all.
  const void* cos = nullptr;  // [rotary_dim], dtype; the second half as the first
  const void* sin = nullptr;
  int32_t angle_stride = 0;
  int32_t rotary_dim = 128;           // a head's first, which rotate: a multiple of 8, AMD: of 16
  bool interleaved = false;           // neighbours rotate, else elements half of rotary_dim apart
  int32_t rows = 0;                   // that a cache has room for
  const int32_t* position = nullptr;  // rows that it has; the new one's place, if there is room
  int32_t position_stride = 0;
  int32_t heads = 0, kv_heads = 0;
  DType cache_dtype = DType::kBFloat16;  // dtype or fp8_dtype
  float scale = 0.0f;
  // Rows from first_key on and before `keys`, of these the last window_left + 1, are seen: one at
  // least, none behind the new one.
  const int32_t* keys = nullptr;       // nullptr: with the new one all
  const int32_t* first_key = nullptr;  // nullptr: 0
  int32_t keys_stride = 0, first_key_stride = 0;
  int32_t window_left = -1;  // -1: all
};

// All of K are multiples of 128, from 1024 on, on NVIDIA from 512.
struct DecodeLayersArgs {
  int32_t tokens = 1;            // B: sequences, a token each; AMD's kernel takes one
  int64_t hidden = 0;            // H, up to 8192
  int64_t intermediate = 0;      // I, as far as LDS reaches
  int64_t attended_columns = 0;  // A, up to 8192
  int64_t qkv_columns = 0;       // Q, a multiple of 16

  // Several have an attention, an o, and all but the last a qkv.
  const DecodeLayer* layers = nullptr;
  int64_t count = 1;
  DecodeAttention attention;
  const void* attended = nullptr;  // [B, A], dtype; without an attention
  const void* x = nullptr;         // [B, H], dtype; where there is no o
  const void* residual = nullptr;  // [B, H], dtype
  void* out = nullptr;             // [B, H], dtype; may be residual
  void* qkv = nullptr;             // [B, Q], dtype; may be the attention's; all layers write it

  float eps = 1e-6f;
  float weight_offset = 0.0f;                // of all norms
  DType dtype = DType::kBFloat16;            // or float16
  DType fp8_dtype = DType::kFloat8E4M3FNUZ;  // the target's own dialect

  void* workspace = nullptr;  // decode_layers_workspace_bytes(), on 16 bytes, contents undefined
  // kDecodeLayersStateBytes on 128 bytes, zero before the first launch that uses them; launches
  // that share them follow one another.
  void* state = nullptr;
};

}  // namespace rocm_kernels
