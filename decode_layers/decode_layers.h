// Decoder layers for a token of each sequence, each from its attention to the next one's qkv, as
// one kernel: what eleven launches a layer do.
//
//   attended = softmax(rotated q . keys) . values             with an attention; else given: of
//              norms of q and k, where there are such
//   x        = fp8(attended) . w_o^T                          where there is a w_o, else x is given
//   h        = x + residual
//   out      = h + fp8(silu(g[:I]) * g[I:]) . w_down^T        g = fp8(norm(h)) . w_gate_up^T, [2 I]
//   qkv      = fp8(norm'(out)) . w_qkv^T (+ bias)             of the next layer, where w_qkv is
//
// The next layer takes out for its residual, and qkv for its attention.
// fp8() has a scale a row, as quantize_fp8, rmsnorm_fp8 and swiglu_fp8 make it; a product is
// rounded once, behind the scales of its row and of its weight; h and out are rounded sums.
//
// AMD, where launches are dear: cdna/decode_layers.hip. NVIDIA's Hopper, whose memory idles between
// launches: cuda/decode_layers.cu; there each layer has an attention and an o, the residual and qkv
// stay in place, and the product of gate and up is rounded to bfloat16 before it is fp8(). AMD's
// takes one sequence, NVIDIA's up to four.
#pragma once

#include "../blocks/layers/decode_args.h"
#include "../common/core/context.h"

namespace rocm_kernels {

constexpr int64_t kDecodeLayersStateBytes = 4096;

int64_t decode_layers_workspace_bytes(const DecodeLayersArgs& args);

// A launch for sixteen layers each, on NVIDIA for 64. Refuses what it cannot do before anything is
// written: all of its workgroups must run at once.
Status launch_decode_layers(const DecodeLayersArgs& args, const Context& context);

}  // namespace rocm_kernels
