// What tests/decode_mlp.py calls: launch_decode_mlp with its arguments one by one. Returns nullptr,
// or why not.
#include "../../decode_layer/decode_mlp.h"

using namespace rocm_kernels;

extern "C" int64_t decode_mlp_workspace(int64_t intermediate) {
  DecodeMlpArgs args;
  args.intermediate = intermediate;
  int64_t bytes = 0;
  return decode_mlp_workspace_bytes(args, bytes) == nullptr ? bytes : -1;
}

extern "C" const char* decode_mlp(int64_t hidden, int64_t intermediate, const void* x,
                                  const void* residual, void* out, const void* norm_weight,
                                  float eps, float weight_offset, const void* w_gate_up,
                                  const float* scale_gate_up, const void* w_down,
                                  const float* scale_down, int scales_of_rows, int is_bfloat16,
                                  void* workspace, void* state) {
  DecodeMlpArgs args;
  args.hidden = hidden;
  args.intermediate = intermediate;
  args.x = x;
  args.residual = residual;
  args.out = out;
  args.norm_weight = norm_weight;
  args.eps = eps;
  args.weight_offset = weight_offset;
  const auto kind = scales_of_rows ? ScaleView::Kind::kRow : ScaleView::Kind::kTensor;
  args.w_gate_up = w_gate_up;
  args.scale_gate_up = {scale_gate_up, 1, 0, kind};
  args.w_down = w_down;
  args.scale_down = {scale_down, 1, 0, kind};
  args.dtype = is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  args.fp8_dtype = FNUZ ? DType::kFloat8E4M3FNUZ : DType::kFloat8E4M3FN;
  args.workspace = workspace;
  args.state = state;
  return launch_decode_mlp(args, Context{});
}
