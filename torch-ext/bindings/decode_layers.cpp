#include <utility>
#include <vector>

#include "../../blocks/layers/decode_args.h"
#include "../torch_binding.h"
#include "checks.h"
#include "launch.h"
#include "settled.h"
#if defined(CPU_KERNEL) && !defined(ROCM_KERNEL)
#include "decode_layers_cpu.h"
#else
#include "../../decode_layers/decode_layers.h"
#endif

using namespace rocm_kernels;

namespace {

using Tensors = std::vector<Tensor>;

// Of one layer each, all of them or all but the last.
void require_layer_count(const Tensors& tensors, const char* name, int64_t layers, bool but_last) {
  const int64_t count = static_cast<int64_t>(tensors.size());
  require(count == layers || (but_last && count == layers - 1), name,
          " must have a tensor for each layer, got ", count, " for ", layers, " layers");
}

void require_layer_row(const Tensor& row, const char* name, int64_t columns,
                       const Tensor& residual) {
  require(row.scalar_type() == residual.scalar_type(), name,
          " must have the dtype of residual, got ", name_of(row.scalar_type()), " and ",
          name_of(residual.scalar_type()));
  require_device(row, name, residual, "residual");
  require_contiguous_vector(row, name, columns);
}

// [sequences, columns]; where there are 0, [columns].
void require_layer_rows(const Tensor& rows, const char* name, int64_t sequences, int64_t columns,
                        const Tensor& residual) {
  if (sequences == 0) return require_layer_row(rows, name, columns, residual);
  require(rows.scalar_type() == residual.scalar_type(), name,
          " must have the dtype of residual, got ", name_of(rows.scalar_type()), " and ",
          name_of(residual.scalar_type()));
  require_device(rows, name, residual, "residual");
  require(rows.dim() == 2 && rows.size(0) == sequences && rows.size(1) == columns &&
              rows.is_contiguous(),
          name, " must have shape [", sequences, ", ", columns, "] and be contiguous, got ",
          shape_of(rows));
}

DecodeWeight require_layer_weight(const Tensor& w, const char* name, const Tensor& scale,
                                  const char* scale_name, int64_t rows, int64_t columns,
                                  const Tensor& first, const Tensor& residual) {
  require(w.scalar_type() == first.scalar_type() && dtype_of(w) && is_fp8(*dtype_of(w)), name,
          " must be FP8, of one dtype with w_o, got ", name_of(w.scalar_type()), " and ",
          name_of(first.scalar_type()));
  require_device(w, name, residual, "residual");
  require_shape(w, name, rows, columns);
  require(
      w.stride(0) == columns && reinterpret_cast<uintptr_t>(w.data_ptr()) % 16 == 0, name,
      " must be contiguous in its last dimension and from row to row, and begin on 16 bytes, got a "
      "row stride of ",
      w.stride(0), " for ", columns, " columns");
  require(scale.scalar_type() == ScalarType::Float, scale_name, " must be float32, got ",
          name_of(scale.scalar_type()));
  require_device(scale, scale_name, residual, "residual");
  const bool is_one = scale.numel() == 1;
  require(is_one || (scale.dim() == 2 && scale.size(0) == rows && scale.size(1) == 1), scale_name,
          " must have one value or shape [", rows, ", 1], got ", shape_of(scale));
  DecodeWeight weight;
  weight.w = w.data_ptr();
  weight.scale.data = static_cast<const float*>(scale.data_ptr());
  weight.scale.kind = is_one ? ScaleView::Kind::kTensor : ScaleView::Kind::kRow;
  weight.scale.row_stride = is_one ? 0 : scale.stride(0);
  return weight;
}

// [rows, KV heads, D], of each sequence where there are several; alike in all layers.
void require_layer_cache(const Tensor& cache, const char* name, const Tensor& first,
                         const Tensor& qkv, const Tensor& residual, const Tensor& w) {
  const ScalarType dtype = cache.scalar_type();
  require(
      dtype == first.scalar_type() && (dtype == residual.scalar_type() || dtype == w.scalar_type()),
      name, " must have the dtype of residual, or of w_o, and of k_caches[0], got ", name_of(dtype),
      ", ", name_of(residual.scalar_type()), ", ", name_of(w.scalar_type()), " and ",
      name_of(first.scalar_type()));
  require_device(cache, name, residual, "residual");
  const int64_t dims = residual.dim() + 2, rows = dims - 3, heads = dims - 2, last = dims - 1;
  require(cache.dim() == dims && (cache.size(last) == 128 || cache.size(last) == 64) &&
              (dims == 3 || cache.size(0) == residual.size(0)),
          name, " must have shape [rows, KV heads, 128 or 64], or [", residual.size(0),
          ", rows, KV heads, 128 or 64] for a residual of two dimensions, got ", shape_of(cache));
  bool alike = true;
  for (int64_t i = 0; i < dims; ++i) {
    alike = alike && cache.size(i) == first.size(i) && cache.stride(i) == first.stride(i);
  }
  const int64_t sequence = (cache.size(rows) - 1) * cache.stride(rows) +
                           (cache.size(heads) - 1) * cache.stride(heads) + cache.size(last);
  require(alike && cache.stride(last) == 1 && cache.stride(heads) >= cache.size(last) &&
              cache.stride(rows) > 0 &&
              (dims == 3 || cache.size(0) == 1 || cache.stride(0) >= sequence),
          name,
          " must be contiguous in its last dimension, of heads and of sequences that lie apart, "
          "with the shape and strides of k_caches[0], got ",
          shape_of(cache));
  require_no_overlap(cache, name, residual, "residual");
  require_no_overlap(cache, name, qkv, "qkv");
}

// Of a layer's FP8 cache: one, or one a KV head, as of all layers.
const float* require_layer_scale(const Tensors& scales, const char* name, size_t layer,
                                 int64_t kv_heads, const Tensor& cache, const Tensor& residual) {
  if (scales.empty()) return nullptr;
  const Tensor& scale = scales[layer];
  require(is_fp8(*dtype_of(cache)), name, " are for FP8 caches, but they are ",
          name_of(cache.scalar_type()));
  require(scale.scalar_type() == ScalarType::Float, name, " must be float32, got ",
          name_of(scale.scalar_type()));
  require_device(scale, name, residual, "residual");
  require(scale.dim() == 1 && (scale.size(0) == 1 || scale.size(0) == kv_heads) &&
              scale.size(0) == scales[0].size(0) && (scale.size(0) == 1 || scale.stride(0) == 1),
          name, " must have one value or shape [", kv_heads,
          "], contiguous, alike in all layers, "
          "got ",
          shape_of(scale));
  return static_cast<const float*>(scale.data_ptr());
}

// Numbers that launches read, one or one a sequence: how many rows, or the place of one. Of an
// int64 the low half, which comes first.
const int32_t* require_layer_numbers(const Tensor& tensor, const char* name, bool may_be_long,
                                     int64_t sequences, const Tensor& residual, int32_t& stride) {
  const bool is_long = tensor.scalar_type() == ScalarType::Long;
  require((tensor.scalar_type() == ScalarType::Int || (may_be_long && is_long)) &&
              (tensor.numel() == 1 || (tensor.numel() == sequences && tensor.dim() == 1)),
          name, " must be one int32", may_be_long ? " or int64" : "", ", or one for each of ",
          sequences, " sequences, got ", name_of(tensor.scalar_type()), " ", shape_of(tensor));
  require_device(tensor, name, residual, "residual");
  stride = tensor.numel() == 1 ? 0 : static_cast<int32_t>(tensor.stride(0)) * (is_long ? 2 : 1);
  return static_cast<const int32_t*>(tensor.data_ptr());
}

}  // namespace

void decode_layers(Tensor& residual, Tensor& qkv, Tensors k_caches, Tensors v_caches,
                   Tensors norm_weights, Tensors w_o, Tensors scale_o, Tensors w_gate_up,
                   Tensors scale_gate_up, Tensors w_down, Tensors scale_down,
                   Tensors next_norm_weights, Tensors w_qkv, Tensors scale_qkv, Tensors bias_qkv,
                   Tensors q_norm_weights, Tensors k_norm_weights, Tensors k_scales,
                   Tensors v_scales, const Tensor& cos, const Tensor& sin, const Tensor& position,
                   int64_t rotary_dim, bool interleaved, double eps, double weight_offset,
                   double scale, std::optional<Tensor> seqused_k, std::optional<Tensor> leftpad_k,
                   int64_t window_left) {
  require(
      residual.scalar_type() == ScalarType::BFloat16 || residual.scalar_type() == ScalarType::Half,
      "residual must be float16 or bfloat16, got ", name_of(residual.scalar_type()));
  const bool several = residual.dim() == 2;
  require((residual.dim() == 1 || (several && residual.size(0) > 0)) && residual.is_contiguous(),
          "residual must have shape [H], or [sequences, H], and be contiguous, got ",
          shape_of(residual));
  const int64_t count = static_cast<int64_t>(k_caches.size());
  require(count > 0, "k_caches must have a tensor for each layer, of which there must be one");
  for (const auto& [tensors, name] : {std::pair<const Tensors&, const char*>{v_caches, "v_caches"},
                                      {norm_weights, "norm_weights"},
                                      {w_o, "w_o"},
                                      {scale_o, "scale_o"},
                                      {w_gate_up, "w_gate_up"},
                                      {scale_gate_up, "scale_gate_up"},
                                      {w_down, "w_down"},
                                      {scale_down, "scale_down"}}) {
    require_layer_count(tensors, name, count, false);
  }
  require_layer_count(next_norm_weights, "next_norm_weights", count, true);
  for (const auto& [tensors, name] :
       {std::pair<const Tensors&, const char*>{q_norm_weights, "q_norm_weights"},
        {k_norm_weights, "k_norm_weights"},
        {k_scales, "k_scales"},
        {v_scales, "v_scales"}}) {
    if (!tensors.empty()) require_layer_count(tensors, name, count, false);
  }
  require(q_norm_weights.empty() == k_norm_weights.empty(),
          "q_norm_weights and k_norm_weights come together, got one of them");
  require(bias_qkv.empty() || bias_qkv.size() == w_qkv.size(),
          "bias_qkv must have as many tensors as w_qkv, or none, got ", bias_qkv.size(), " and ",
          w_qkv.size());
  require(w_qkv.size() == next_norm_weights.size() && scale_qkv.size() == w_qkv.size(),
          "w_qkv and scale_qkv must have as many tensors as next_norm_weights, got ", w_qkv.size(),
          ", ", scale_qkv.size(), " and ", next_norm_weights.size());
  const int64_t head_dim = k_caches[0].dim() == residual.dim() + 2 ? k_caches[0].size(-1) : 0;
  require(
      head_dim > 0 && w_o[0].dim() == 2 && w_o[0].size(1) % head_dim == 0 && w_down[0].dim() == 2,
      "w_o and w_down must have two dimensions, w_o's columns heads of k_caches' size, and "
      "k_caches two more than residual, got ",
      shape_of(w_o[0]), ", ", shape_of(w_down[0]), " and ", shape_of(k_caches[0]));

  const int64_t sequences = several ? residual.size(0) : 1;
  const int64_t hidden = residual.size(several), intermediate = w_down[0].size(1);
  const int64_t columns = w_o[0].size(1), heads = columns / head_dim;
  const int64_t kv_heads = k_caches[0].size(several + 1);
  const int64_t qkv_columns = (heads + 2 * kv_heads) * head_dim;
  require(kv_heads > 0 && heads > 0 && heads % kv_heads == 0,
          "there must be equally many query heads for each KV head, got ", heads, " and ",
          kv_heads);
  const int64_t angles = cos.dim() == 1 ? 0 : sequences;
  require(rotary_dim > 0 && rotary_dim % 8 == 0 && rotary_dim <= head_dim,
          "rotary_dim must be a multiple of 8, from 8 to ", head_dim, ", got ", rotary_dim);
  require_layer_rows(qkv, "qkv", several ? sequences : 0, qkv_columns, residual);
  require_layer_rows(cos, "cos", angles, rotary_dim, residual);
  require_layer_rows(sin, "sin", angles, rotary_dim, residual);
  require(window_left >= -1 && window_left < (int64_t{1} << 31),
          "window_left must be -1 or a number of rows, got ", window_left);
  require_no_overlap(residual, "residual", qkv, "qkv");
  for (const auto& [written, name] :
       {std::pair<const Tensor&, const char*>{residual, "residual"}, {qkv, "qkv"}}) {
    require_no_overlap(written, name, cos, "cos");
    require_no_overlap(written, name, sin, "sin");
    require_no_overlap(written, name, position, "position");
    if (seqused_k) require_no_overlap(written, name, *seqused_k, "seqused_k");
    if (leftpad_k) require_no_overlap(written, name, *leftpad_k, "leftpad_k");
  }

  std::vector<DecodeLayer> layers;
  for (int64_t i = 0; i < count; ++i) {
    const auto weight = [&](const Tensors& w, const char* name, const Tensors& scales,
                            const char* scale_name, int64_t n, int64_t k) {
      return require_layer_weight(w[i], name, scales[i], scale_name, n, k, w_o[0], residual);
    };
    DecodeLayer layer;
    require_layer_cache(k_caches[i], "k_caches", k_caches[0], qkv, residual, w_o[0]);
    require_layer_cache(v_caches[i], "v_caches", k_caches[0], qkv, residual, w_o[0]);
    require_no_overlap(k_caches[i], "k_caches", v_caches[i], "v_caches");
    require_layer_row(norm_weights[i], "norm_weights", hidden, residual);
    layer.k_cache = k_caches[i].data_ptr();
    layer.v_cache = v_caches[i].data_ptr();
    const auto cache_scale = [&](const Tensors& scales, const char* name) {
      return require_layer_scale(scales, name, static_cast<size_t>(i), kv_heads, k_caches[0],
                                 residual);
    };
    layer.k_scale = cache_scale(k_scales, "k_scales");
    layer.v_scale = cache_scale(v_scales, "v_scales");
    if (!q_norm_weights.empty()) {
      require_layer_row(q_norm_weights[i], "q_norm_weights", head_dim, residual);
      require_layer_row(k_norm_weights[i], "k_norm_weights", head_dim, residual);
      layer.q_norm_weight = q_norm_weights[i].data_ptr();
      layer.k_norm_weight = k_norm_weights[i].data_ptr();
    }
    layer.norm_weight = norm_weights[i].data_ptr();
    layer.o = weight(w_o, "w_o", scale_o, "scale_o", hidden, columns);
    layer.gate_up =
        weight(w_gate_up, "w_gate_up", scale_gate_up, "scale_gate_up", 2 * intermediate, hidden);
    layer.down = weight(w_down, "w_down", scale_down, "scale_down", hidden, intermediate);
    if (i < static_cast<int64_t>(w_qkv.size())) {
      require_layer_row(next_norm_weights[i], "next_norm_weights", hidden, residual);
      layer.next_norm_weight = next_norm_weights[i].data_ptr();
      if (!bias_qkv.empty()) {
        require_layer_row(bias_qkv[i], "bias_qkv", qkv_columns, residual);
        layer.qkv_bias = bias_qkv[i].data_ptr();
      }
      layer.qkv = weight(w_qkv, "w_qkv", scale_qkv, "scale_qkv", qkv_columns, hidden);
    }
    layers.push_back(layer);
  }

  DecodeLayersArgs args;
  args.tokens = static_cast<int32_t>(sequences);
  args.hidden = hidden;
  args.intermediate = intermediate;
  args.attended_columns = columns;
  args.qkv_columns = qkv_columns;
  args.count = count;
  args.attention.qkv = qkv.data_ptr();
  args.attention.head_dim = static_cast<int32_t>(head_dim);
  args.attention.row_stride = k_caches[0].stride(several);
  args.attention.head_stride = k_caches[0].stride(several + 1);
  args.attention.batch_stride = several ? k_caches[0].stride(0) : 0;
  args.attention.k_scale_stride = !k_scales.empty() && k_scales[0].size(0) > 1;
  args.attention.v_scale_stride = !v_scales.empty() && v_scales[0].size(0) > 1;
  args.attention.rows = static_cast<int32_t>(k_caches[0].size(several));
  args.attention.cache_dtype = *dtype_of(k_caches[0]);
  args.attention.cos = cos.data_ptr();
  args.attention.sin = sin.data_ptr();
  args.attention.angle_stride = cos.dim() == 1 ? 0 : static_cast<int32_t>(rotary_dim);
  args.attention.rotary_dim = static_cast<int32_t>(rotary_dim);
  args.attention.interleaved = interleaved;
  args.attention.position = require_layer_numbers(position, "position", true, sequences, residual,
                                                  args.attention.position_stride);
  if (seqused_k) {
    args.attention.keys = require_layer_numbers(*seqused_k, "seqused_k", false, sequences, residual,
                                                args.attention.keys_stride);
  }
  if (leftpad_k) {
    args.attention.first_key = require_layer_numbers(*leftpad_k, "leftpad_k", false, sequences,
                                                     residual, args.attention.first_key_stride);
  }
  args.attention.window_left = static_cast<int32_t>(window_left);
  args.attention.heads = static_cast<int32_t>(heads);
  args.attention.kv_heads = static_cast<int32_t>(kv_heads);
  args.attention.scale = static_cast<float>(scale);
  args.residual = args.out = residual.data_ptr();
  args.qkv = qkv.data_ptr();
  args.eps = static_cast<float>(eps);
  args.weight_offset = static_cast<float>(weight_offset);
  args.dtype = *dtype_of(residual);
  args.fp8_dtype = *dtype_of(w_o[0]);
#if defined(CPU_KERNEL) && !defined(ROCM_KERNEL)
  run_or_record(residual, [args, layers, residual](const Context& context) mutable {
    args.layers = layers.data();
    check_status(decode_layers_by_ops(args, residual, context), "decode_layers");
  });
#else
  Workspace scratch;
  args.layers = layers.data();
  args.workspace = scratch.allocate(decode_layers_workspace_bytes(args), residual);
  // Zeroed for each call: what a call that failed left there would let the next one hang.
  Tensor state = torch::stable::new_empty(residual, {kDecodeLayersStateBytes}, ScalarType::Byte);
  torch::stable::fill_(state, 0.0);
  args.state = state.data_ptr();
  // Whatever was asked for ahead of it is not there any more.
  Order::of_thread().pass(int64_t{1} << 40);
  with_context(residual, [&](const Context& context) {
    check_status(launch_decode_layers(args, context), "decode_layers");
  });
#endif
}
