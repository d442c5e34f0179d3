// A layer as the kernels of decode_layers take it, for both families of GPUs; and what is asked of
// its arguments.
#pragma once

#include "decode_layers.h"

namespace rocm_kernels {

constexpr int kLayerProducts = 4;  // o, gate and up, down, qkv

// Of a product in one layer.
template <typename T>
struct ProductWeight {
  const uint8_t* w;
  const float* scales;
  int64_t scale_stride;  // 0: one for all rows
  const T* norm;         // [K]: of a row that is normalised
  const T* bias;         // [N], or nullptr
};

template <typename T>
struct Layer {
  ProductWeight<T> products[kLayerProducts];
  void *k_cache, *v_cache;
  const float *k_scale, *v_scale;  // of FP8 caches; nullptr: 1
  const T *q_norm, *k_norm;        // [D], or nullptr
};

template <typename T>
Layer<T> make_layer(const DecodeLayer& layer) {
  const auto weight = [](const DecodeWeight& from, const void* norm, const void* bias = nullptr) {
    const bool rows = from.scale.kind == ScaleView::Kind::kRow;
    return ProductWeight<T>{static_cast<const uint8_t*>(from.w), from.scale.data,
                            rows ? from.scale.row_stride : 0, static_cast<const T*>(norm),
                            static_cast<const T*>(bias)};
  };
  return {{weight(layer.o, nullptr), weight(layer.gate_up, layer.norm_weight),
           weight(layer.down, nullptr), weight(layer.qkv, layer.next_norm_weight, layer.qkv_bias)},
          layer.k_cache,
          layer.v_cache,
          layer.k_scale,
          layer.v_scale,
          static_cast<const T*>(layer.q_norm_weight),
          static_cast<const T*>(layer.k_norm_weight)};
}

// Of all rows: those of a norm that is quantised, and of what is multiplied.
inline bool is_layer_k(int64_t columns, int64_t least, int64_t most) {
  return columns % 128 == 0 && columns >= least && columns <= most;
}

// Beside what a kernel asks of its own. last: of the call.
inline Status check_layer(const DecodeLayersArgs& args, const DecodeLayer& layer, bool last) {
  if (layer.qkv.w == nullptr && !last) return "all layers but the last must have a qkv";
  if (args.attention.qkv != nullptr && (layer.k_cache == nullptr || layer.v_cache == nullptr)) {
    return "all layers must have caches for the attention";
  }
  const bool has_norms = args.layers[0].q_norm_weight != nullptr;
  if ((layer.q_norm_weight != nullptr) != has_norms ||
      (layer.k_norm_weight != nullptr) != has_norms) {
    return "all layers must have norms of q and of k, or none";
  }
  for (const DecodeWeight* weight : {&layer.o, &layer.gate_up, &layer.down, &layer.qkv}) {
    const ScaleView::Kind kind = weight->scale.kind;
    if (weight->w != nullptr && kind != ScaleView::Kind::kTensor && kind != ScaleView::Kind::kRow) {
      return "scales of weights must be one a tensor or one a row";
    }
  }
  return nullptr;
}

}  // namespace rocm_kernels
