// The second half of a decoder layer for one token, as one kernel: what rmsnorm_fp8, a product,
// swiglu_fp8, a product and a sum do in five launches.
//
//   h        = x + residual                                           rounded to their type
//   a, s     = fp8(rmsnorm(h) * (norm_weight + weight_offset))        a scale a row, as rmsnorm_fp8
//   g        = a . w_gate_up^T * s * scale_gate_up                    [2 I], rounded
//   b, t     = fp8(silu(g[:I]) * g[I:])                               a scale a row, as swiglu_fp8
//   out      = h + b . w_down^T * t * scale_down                      product and sum rounded
//
// AMD alone, where launches are dear: cdna/decode_mlp.hip.
#pragma once

#include "../common/core/context.h"
#include "../common/core/dtype.h"
#include "../common/core/scale_view.h"

namespace rocm_kernels {

struct DecodeMlpArgs {
  int64_t hidden = 0;        // H: a multiple of 128, 1024 to 8192
  int64_t intermediate = 0;  // I: a multiple of 128 from 1024 on, as far as LDS reaches

  const void* x = nullptr;            // [H], dtype
  const void* residual = nullptr;     // [H], dtype
  void* out = nullptr;                // [H], dtype; may be residual
  const void* norm_weight = nullptr;  // [H], dtype
  float eps = 1e-6f;
  float weight_offset = 0.0f;

  const void* w_gate_up = nullptr;  // [2 I, H], fp8_dtype, contiguous, on 16 bytes
  ScaleView scale_gate_up;          // of the tensor or of a row
  const void* w_down = nullptr;     // [H, I], likewise
  ScaleView scale_down;

  DType dtype = DType::kBFloat16;            // or float16
  DType fp8_dtype = DType::kFloat8E4M3FNUZ;  // the target's own dialect

  void* workspace = nullptr;  // decode_mlp_workspace_bytes(), on 16 bytes, contents undefined
  // kDecodeMlpStateBytes on 128 bytes, zero before the first launch that uses them; launches that
  // share them follow one another.
  void* state = nullptr;
};

constexpr int64_t kDecodeMlpStateBytes = 2048;

Status decode_mlp_workspace_bytes(const DecodeMlpArgs& args, int64_t& bytes);

// Refuses what it cannot do before anything is written: all of its workgroups must run at once.
Status launch_decode_mlp(const DecodeMlpArgs& args, const Context& context);

}  // namespace rocm_kernels
