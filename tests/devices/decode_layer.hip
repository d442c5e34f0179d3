// What tests/simulated_layer.py calls: launch_decode_layer with what its arguments point to, in the
// order of the struct. Returns nullptr, or why not.
#include "../../decode_layer/decode_layer.h"

using namespace rocm_kernels;

namespace {

struct Call {
  int64_t hidden, intermediate, attended_columns, qkv_columns;
  int64_t row_stride, head_stride;
  const void* attention_qkv;
  void *k_cache, *v_cache;
  const void *cos, *sin;
  const int32_t* position;
  const void *attended, *o;
  const float* scale_o;
  const void *x, *residual, *norm_weight, *gate_up;
  const float* scale_gate_up;
  const void* down;
  const float* scale_down;
  void* out;
  const void *next_norm_weight, *w_qkv;
  const float* scale_qkv;
  void *qkv, *workspace, *state;
  float eps, weight_offset;
  float scale;
  int32_t scales_of_rows, is_bfloat16, heads, kv_heads;
};

DecodeLayerArgs described(const Call& call) {
  const auto kind = call.scales_of_rows ? ScaleView::Kind::kRow : ScaleView::Kind::kTensor;
  DecodeLayerArgs args;
  args.hidden = call.hidden;
  args.intermediate = call.intermediate;
  args.attended_columns = call.attended_columns;
  args.qkv_columns = call.qkv_columns;
  args.attention = {call.attention_qkv, call.k_cache,  call.v_cache, call.row_stride,
                    call.head_stride,   call.cos,      call.sin,     call.position,
                    call.heads,         call.kv_heads, call.scale};
  args.attended = call.attended;
  args.o = {call.o, {call.scale_o, 1, 0, kind}};
  args.x = call.x;
  args.residual = call.residual;
  args.norm_weight = call.norm_weight;
  args.gate_up = {call.gate_up, {call.scale_gate_up, 1, 0, kind}};
  args.down = {call.down, {call.scale_down, 1, 0, kind}};
  args.out = call.out;
  args.next_norm_weight = call.next_norm_weight;
  args.w_qkv = {call.w_qkv, {call.scale_qkv, 1, 0, kind}};
  args.qkv = call.qkv;
  args.eps = call.eps;
  args.weight_offset = call.weight_offset;
  args.dtype = call.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  args.fp8_dtype = FNUZ ? DType::kFloat8E4M3FNUZ : DType::kFloat8E4M3FN;
  args.workspace = call.workspace;
  args.state = call.state;
  return args;
}

}  // namespace

extern "C" int64_t decode_layer_workspace(const Call* call) {
  return decode_layer_workspace_bytes(described(*call));
}

extern "C" const char* decode_layer(const Call* call) {
  return launch_decode_layer(described(*call), Context{});
}
