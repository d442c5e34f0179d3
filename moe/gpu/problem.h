// A grouped product as the device code of both GPU families sees it, and where its results go.
//
//   gate_up   rows of a are tokens, gathered; the end of a tile applies the activation
//   down      rows of a are the ones that gate_up left; sums go to the slot's row, one for each
//             part of K, and the combine kernel (rows.h) adds them
//   grouped   grouped_gemm: rows as they lie, rounded once
//
// A row is a slot (token * k + slot of the token) in the order of experts (route_kernels.h). Its
// sums never depend on its place, only on its own values.
#pragma once

#include <type_traits>

#include "../../blocks/rows/gpu/activation.h"
#include "../../common/core/scale_rounding.h"
#include "../../common/gpu/element.h"
#include "../fused_moe.h"
#include "../grouped_gemm.h"
#include "order.h"

namespace rocm_kernels {

// block_m rows at most, of one expert: what one workgroup multiplies at a time.
struct RowTile {
  int32_t expert, begin, end, unused;
};

enum class GroupedEnd : int32_t { kGateUp, kDown, kGrouped };

struct GroupedProblem {
  const void* a;
  int64_t a_stride;          // elements
  const int32_t* row_slots;  // [rows]; nullptr: grouped
  int32_t slots_of_token;    // gate_up: row r of a is token row_slots[r] / slots_of_token; else 0,
                             // but for a down product that adds a token's slots itself
  DType a_dtype;
  ScaleView scale_a;  // by rows of a
  ExpertWeights w;
  int32_t n, k;
  const RowTile* tiles;
  const int32_t* tile_count;
  const TileGroup* groups;  // [tiles]: the group of each; nullptr: not by experts

  GatedActivation activation;  // gate_up
  float limit;
  bool interleaved;

  void* out;           // gate_up: [rows, n / 2]; down: float32 [split_k][slots][n]; else [rows, n]
  int64_t out_stride;  // elements
  DType out_dtype;     // gate_up: float32, a 16-bit type, or FP8 with a scale for each 128 columns
  float* out_scales;   // gate_up to FP8: [rows, ceil(n / 2 / 128)]
  ScaleRounding scale_rounding;  // of scales that the product computes
  bool wide_stores;              // four neighbours of out can be stored together
  int64_t slots;                 // down
  int32_t split_k;               // down: parts of K

  // The row of a that `row` multiplies.
  ROCM_KERNELS_DEVICE int64_t a_row(int row) const {
    return slots_of_token != 0 ? row_slots[row] / slots_of_token : row;
  }
  // bias[expert, column], 0 where there is none.
  ROCM_KERNELS_DEVICE float bias(int expert, int column) const {
    if (w.bias == nullptr) return 0.0f;
    return load_element(w.bias, w.bias_dtype, expert * w.bias_expert_stride + column);
  }
  // Element of out where `row`'s results begin.
  ROCM_KERNELS_DEVICE int64_t out_row(int row, int part) const {
    const int64_t place = slots != 0 ? part * slots + row_slots[row] : row;
    return place * out_stride;
  }
};

// The row of w [n, K] that row `row` of a tile of columns from `begin` on is, or -1: one after the
// other, or paired: kRun gates, then the ups of the same columns of h, and so on.
template <bool kPaired, int kRun>
ROCM_KERNELS_DEVICE int w_row_of(int begin, int row, int n, bool interleaved) {
  if constexpr (!kPaired) return begin + row < n ? begin + row : -1;
  const int column = begin / 2 + row / (2 * kRun) * kRun + row % kRun, up = row / kRun % 2;
  if (column >= n / 2) return -1;
  return column * (interleaved ? 2 : 1) + up * (interleaved ? 1 : n / 2);  // without a branch
}

// Calls use(activation) with the activation as a constant, so that what `use` does for many
// elements asks once which it is.
template <class Use>
ROCM_KERNELS_DEVICE auto with_activation(GatedActivation activation, const Use& use) {
  using Activation = GatedActivation;
  switch (activation) {
    case Activation::kSilu:
      return use(std::integral_constant<Activation, Activation::kSilu>());
    case Activation::kGelu:
      return use(std::integral_constant<Activation, Activation::kGelu>());
    case Activation::kGeluTanh:
      return use(std::integral_constant<Activation, Activation::kGeluTanh>());
    case Activation::kSwigluOai:
      return use(std::integral_constant<Activation, Activation::kSwigluOai>());
  }
  return decltype(use(std::integral_constant<Activation, Activation::kSilu>()))();
}

// What the activation makes of a gate and an up. A NaN stays one.
ROCM_KERNELS_DEVICE float gated(GatedActivation activation, float limit, float gate, float up) {
  gate = gate > limit ? limit : gate;
  up = up > limit ? limit : up < -limit ? -limit : up;
  return with_activation(activation, [=](auto known) {
    constexpr GatedActivation kIs = decltype(known)::value;
    if constexpr (kIs == GatedActivation::kSilu) return silu(gate) * up;
    if constexpr (kIs == GatedActivation::kGelu) return gelu(gate) * up;
    if constexpr (kIs == GatedActivation::kGeluTanh) return gelu_tanh(gate) * up;
    return times_sigmoid(gate, kSwigluOaiSlope * gate) * (up + 1.0f);
  });
}

}  // namespace rocm_kernels
