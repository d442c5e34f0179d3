// decode_layers on the CPU: the ops that it stands for, one by one.
#pragma once

#include <algorithm>
#include <vector>

#include "../../attention/attention.h"
#include "../../blocks/layers/decode_args.h"
#include "../../rmsnorm_fp8/rmsnorm_fp8.h"
#include "../../rope_and_cache/rope_and_cache.h"
#include "../../swiglu_fp8/swiglu_fp8.h"
#include "launch.h"
#include "product.h"

namespace rocm_kernels {

// Rows of FP8 codes and their scales.
struct QuantizedRows {
  QuantizedRows(int64_t rows, int64_t its_columns)
      : columns(its_columns),
        codes(static_cast<size_t>(rows * its_columns)),
        scales(static_cast<size_t>(rows)) {}
  const int64_t columns;
  std::vector<uint8_t> codes;
  std::vector<float> scales;
};

class LayersByOps {
 public:
  LayersByOps(const DecodeLayersArgs& args, const Tensor& like, const Context& context)
      : args_(args),
        like_(like),
        context_(context),
        attended_(static_cast<size_t>(args.tokens * args.attended_columns)),
        x_(static_cast<size_t>(args.tokens * args.hidden)),
        gate_up_(static_cast<size_t>(args.tokens * 2 * args.intermediate)),
        of_hidden_(args.tokens, args.hidden),
        of_attended_(args.tokens, args.attended_columns),
        of_intermediate_(args.tokens, args.intermediate) {}

  Status run() {
    for (int64_t i = 0; i < args_.count; ++i) {
      if (const Status error = run_layer(args_.layers[i])) return error;
    }
    return nullptr;
  }

 private:
  Status run_layer(const DecodeLayer& layer) {
    if (const Status error = attend(layer)) return error;
    if (const Status error = quantize(attended_.data(), nullptr, of_attended_)) return error;
    product(of_attended_, layer.o, args_.hidden, x_.data());
    if (const Status error = norm(x_.data(), args_.out, layer.norm_weight)) return error;
    product(of_hidden_, layer.gate_up, 2 * args_.intermediate, gate_up_.data());
    const uint16_t* const up = gate_up_.data() + args_.intermediate;
    if (const Status error = quantize(gate_up_.data(), up, of_intermediate_)) return error;
    product(of_intermediate_, layer.down, args_.hidden, x_.data());
    // Where there is no qkv the sum alone counts.
    if (layer.qkv.w == nullptr) return norm(x_.data(), args_.out, layer.norm_weight);
    if (const Status error = norm(x_.data(), args_.out, layer.next_norm_weight)) return error;
    product(of_hidden_, layer.qkv, args_.qkv_columns, args_.qkv, layer.qkv_bias);
    return nullptr;
  }

  // Rotation, the new rows of the caches, and the attention to all rows.
  Status attend(const DecodeLayer& layer) {
    const DecodeAttention& a = args_.attention;
    const int64_t head_dim = a.head_dim;
    uint16_t* const qkv = static_cast<uint16_t*>(args_.qkv);
    const auto heads_at = [&](int64_t head) {
      return HeadRows{qkv + head * head_dim, args_.qkv_columns, 0, head_dim};
    };
    const HeadRows attended{attended_.data(), args_.attended_columns, 0, head_dim};
    RopeAndCacheArgs rope;
    rope.batch = args_.tokens, rope.rows = 1;
    rope.heads = a.heads, rope.kv_heads = a.kv_heads;
    rope.head_dim = rope.head_dim_v = head_dim;
    rope.rotary_dim = a.rotary_dim, rope.interleaved = a.interleaved;
    rope.q = heads_at(0), rope.k = heads_at(a.heads), rope.v = heads_at(a.heads + a.kv_heads);
    rope.out = attended;
    rope.cos = a.cos, rope.sin = a.sin;
    rope.cos_batch_stride = rope.sin_batch_stride = a.angle_stride;
    rope.k_cache = {layer.k_cache, a.batch_stride, a.row_stride, a.head_stride};
    rope.v_cache = {layer.v_cache, a.batch_stride, a.row_stride, a.head_stride};
    rope.pages = args_.tokens, rope.page_size = args_.attention.rows;
    rope.places.data = a.position, rope.places.batch_stride = a.position_stride;
    rope.k_scale = layer.k_scale, rope.k_scale_head_stride = a.k_scale_stride;
    rope.v_scale = layer.v_scale, rope.v_scale_head_stride = a.v_scale_stride;
    rope.dtype = rope.table_dtype = args_.dtype;
    rope.cache_dtype = a.cache_dtype;
    rope.q_weight = layer.q_norm_weight, rope.k_weight = layer.k_norm_weight;
    rope.weight_dtype = args_.dtype;
    rope.eps = args_.eps, rope.weight_offset = args_.weight_offset;
    if (const Status error = launch_rope_and_cache(rope, context_)) return error;

    const size_t count = static_cast<size_t>(args_.tokens);
    std::vector<int32_t> keys(count), first_key(count, 0);
    for (size_t t = 0; t < count; ++t) {
      const int32_t token = static_cast<int32_t>(t);
      keys[t] = a.keys == nullptr ? a.position[token * a.position_stride] + 1
                                  : a.keys[token * a.keys_stride];
      if (a.first_key != nullptr) first_key[t] = a.first_key[token * a.first_key_stride];
    }
    AttentionArgs attention;
    attention.batch = attention.total_q = args_.tokens, attention.max_seqlen_q = 1;
    attention.heads = a.heads, attention.kv_heads = a.kv_heads;
    attention.head_dim = attention.head_dim_v = head_dim;
    attention.q = {attended_.data(), args_.attended_columns, 0, head_dim};
    attention.k = {layer.k_cache, a.batch_stride, a.row_stride, a.head_stride};
    attention.v = {layer.v_cache, a.batch_stride, a.row_stride, a.head_stride};
    attention.seqused_k = keys.data();
    attention.leftpad_k = a.first_key == nullptr ? nullptr : first_key.data();
    attention.window_left = a.window_left;
    attention.max_seqlen_k = *std::max_element(keys.begin(), keys.end());
    std::vector<uint16_t> out(attended_.size());
    attention.out = out.data();
    attention.out_batch_stride = args_.attended_columns, attention.out_head_stride = head_dim;
    attention.scale = a.scale;
    attention.k_descale = layer.k_scale, attention.k_descale_head_stride = a.k_scale_stride;
    attention.v_descale = layer.v_scale, attention.v_descale_head_stride = a.v_scale_stride;
    attention.q_dtype = args_.dtype;
    attention.kv_dtype = a.cache_dtype;
    Workspace workspace;
    attention.workspace = workspace.allocate(attention_workspace_bytes(attention, context_), like_);
    const Status error = launch_attention(attention, context_);
    attended_.swap(out);
    return error;
  }

  // Of x, or of silu(x) * up, which lie side by side.
  Status quantize(const void* x, const void* up, QuantizedRows& rows) {
    SwigluFp8Args args;
    args.rows = args_.tokens;
    args.columns = args.out_stride = rows.columns;
    args.gate = x;
    args.up = up;
    args.gate_stride = args.up_stride = rows.columns * (up == nullptr ? 1 : 2);
    args.out = rows.codes.data();
    args.scales = rows.scales.data();
    args.in_dtype = args_.dtype;
    args.out_dtype = args_.fp8_dtype;
    args.scaling = Scaling::kPerToken;
    args.activation = up == nullptr ? Activation::kIdentity : Activation::kSilu;
    return launch_swiglu_fp8(args, context_);
  }

  // residual += x, and its norm to of_hidden_.
  Status norm(const void* x, void* residual, const void* weight) {
    RmsnormFp8Args args;
    args.rows = args_.tokens;
    args.hidden = args.x_stride = args.residual_stride = args.out_stride = args_.hidden;
    args.x = x;
    args.residual = residual;
    args.weight = weight;
    args.out = of_hidden_.codes.data();
    args.scales = of_hidden_.scales.data();
    args.eps = args_.eps;
    args.weight_offset = args_.weight_offset;
    args.x_dtype = args.weight_dtype = args_.dtype;
    args.out_dtype = args_.fp8_dtype;
    args.scaling = Scaling::kPerToken;
    return launch_rmsnorm_fp8(args, context_);
  }

  void product(const QuantizedRows& a, const DecodeWeight& weight, int64_t n, void* out,
               const void* bias = nullptr) {
    GemmArgs args;
    args.m = args_.tokens, args.n = n, args.k = a.columns;
    args.a = a.codes.data();
    args.a_stride = args.w_stride = args.k;
    args.w = weight.w;
    args.out = out;
    args.out_stride = n;
    args.scale_a = {a.scales.data(), 1, 0, ScaleView::Kind::kRow};
    args.scale_w = weight.scale;
    args.a_dtype = args.w_dtype = args_.fp8_dtype;
    args.out_dtype = args.bias_dtype = args_.dtype;
    args.bias = bias;
    launch_product(args, like_, context_);
  }

  const DecodeLayersArgs& args_;
  const Tensor& like_;
  const Context& context_;
  std::vector<uint16_t> attended_, x_, gate_up_;
  QuantizedRows of_hidden_, of_attended_, of_intermediate_;
};

// args.out is args.residual.
inline Status decode_layers_by_ops(const DecodeLayersArgs& args, const Tensor& like,
                                   const Context& context) {
  return LayersByOps(args, like, context).run();
}

}  // namespace rocm_kernels
