// A mixture-of-experts layer without its router: for each token t the weighted sum of its experts.
//
//   e = topk_ids[t, j], for each slot j in order; skipped unless 0 <= e < E
//   h[t, j] = act(gate, up) of  w_gate_up[e] x[t] + bias_gate_up[e]        [2I] to [I], float32
//   out[t]  = sum_j topk_weights[t, j] * (w_down[e] q(h[t, j]) + bias_down[e])    [H], float32
//
// added in the order of slots and rounded once. A token whose slots are all skipped gets zeros.
//
// gate and up are the halves of the first product's columns, or its even and odd ones
// (`interleaved`). gate is clamped to at most `limit` and up to +-limit; then
//   silu, gelu, gelu_tanh   act(gate) * up
//   swigluoai               gate * sigmoid(1.702 * gate) * (up + 1)
//
// What the products multiply: 16-bit or MXFP4 weights take x as it is and h rounded to x's type.
// FP8 weights do so too without `quantize_input`; with it x and h are quantised to the weights'
// dialect, one scale a token (for x) or a row (for h), or one for each 128 columns where that
// product's weights have block scales. scale = max(amax / largest, 2^-126), as quantize_fp8 does,
// rounded up to a power of two with `ue8m0`.
//
// Each backend defines the functions below once.
#pragma once

#include "../common/core/context.h"
#include "experts.h"

namespace rocm_kernels {

enum class GatedActivation : int32_t { kSilu, kGelu, kGeluTanh, kSwigluOai };

constexpr float kSwigluOaiSlope = 1.702f;

struct FusedMoeArgs {
  int64_t tokens = 0;        // T
  int64_t hidden = 0;        // H
  int64_t intermediate = 0;  // I, of one expert
  int32_t experts = 0;       // E, 1 to kMaxExperts
  int32_t k = 0;             // slots a token, 1 to kMaxTopk

  const void* x = nullptr;  // [T, H], x_dtype
  int64_t x_stride = 0;     // elements between rows, as all strides here
  void* out = nullptr;      // [T, H], out_dtype; need not be zeroed
  int64_t out_stride = 0;
  const float* topk_weights = nullptr;  // [T, k], contiguous
  const int32_t* topk_ids = nullptr;    // [T, k], contiguous; any values, equal ones too

  ExpertWeights gate_up;  // [E, 2I, H]
  ExpertWeights down;     // [E, H, I]; gate_up's dtype

  DType x_dtype = DType::kBFloat16;    // float16 or bfloat16; that of 16-bit weights
  DType out_dtype = DType::kBFloat16;  // x_dtype or float32
  GatedActivation activation = GatedActivation::kSilu;
  float limit = 0.0f;  // infinity: none
  bool interleaved = false;
  bool quantize_input = true;  // of FP8 weights alone; false with others
  bool ue8m0 = false;          // scales of x and h are powers of two; with quantize_input alone

  // Scratch of at least fused_moe_workspace_bytes(args), 256-byte aligned, contents undefined.
  void* workspace = nullptr;

  // Which kernels, and how the work is cut: a text that visit_fused_moe_configs() gives. nullptr:
  // the backend chooses.
  const char* config = nullptr;
};

// Bytes of scratch that launch_fused_moe needs for these sizes and types on the current device;
// pointers in args are not read, so it does not depend on the routing.
int64_t fused_moe_workspace_bytes(const FusedMoeArgs& args, const Context& context);

// Caller's duty: tokens and hidden > 0, intermediate >= 0 and dtypes as above; MXFP4: H and I are
// multiples of 32. Any stride and element alignment is served; rows of weights that are 16-byte
// aligned are quickest. The host waits for nothing and reads no ids.
Status launch_fused_moe(const FusedMoeArgs& args, const Context& context);

// Tells visit(text, state) every config that can serve args on the current device: first the one
// that launch_fused_moe(args) takes, then the others that are worth timing, each once.
Status visit_fused_moe_configs(const FusedMoeArgs& args, const Context& context,
                               void (*visit)(const char* config, void* state), void* state);

}  // namespace rocm_kernels
