// What tests/simulated_layers.py calls: launch_decode_layers with what its arguments point to, in
// the order of the struct. Returns nullptr, or why not.
#include <vector>

#include "../../decode_layers/decode_layers.h"

using namespace rocm_kernels;

namespace {

struct Layer {
  const void* o;
  const float* scale_o;
  const void *norm_weight, *gate_up;
  const float* scale_gate_up;
  const void* down;
  const float* scale_down;
  const void *next_norm_weight, *w_qkv;
  const float* scale_qkv;
  void *k_cache, *v_cache;
  const float *k_scale, *v_scale;
  const void *q_norm, *k_norm, *qkv_bias;
};

struct Call {
  int64_t count, hidden, intermediate, attended_columns, qkv_columns;
  int64_t row_stride, head_stride;
  const Layer* layers;
  const void *attention_qkv, *cos, *sin;
  const int32_t* position;
  const void *attended, *x, *residual;
  void *out, *qkv, *workspace, *state;
  float eps, weight_offset;
  float scale;
  int32_t scales_of_rows, is_bfloat16, heads, kv_heads, fp8_caches, k_scale_stride, v_scale_stride;
};

struct Described {
  std::vector<DecodeLayer> layers;
  DecodeLayersArgs args;
};

Described described(const Call& call) {
  const auto kind = call.scales_of_rows ? ScaleView::Kind::kRow : ScaleView::Kind::kTensor;
  Described result;
  for (int64_t i = 0; i < call.count; ++i) {
    const Layer& given = call.layers[i];
    DecodeLayer layer;
    layer.o = {given.o, {given.scale_o, 1, 0, kind}};
    layer.norm_weight = given.norm_weight;
    layer.gate_up = {given.gate_up, {given.scale_gate_up, 1, 0, kind}};
    layer.down = {given.down, {given.scale_down, 1, 0, kind}};
    layer.next_norm_weight = given.next_norm_weight;
    layer.qkv = {given.w_qkv, {given.scale_qkv, 1, 0, kind}};
    layer.k_cache = given.k_cache;
    layer.v_cache = given.v_cache;
    layer.k_scale = given.k_scale;
    layer.v_scale = given.v_scale;
    layer.q_norm_weight = given.q_norm;
    layer.k_norm_weight = given.k_norm;
    layer.qkv_bias = given.qkv_bias;
    result.layers.push_back(layer);
  }
  DecodeLayersArgs& args = result.args;
  args.hidden = call.hidden;
  args.intermediate = call.intermediate;
  args.attended_columns = call.attended_columns;
  args.qkv_columns = call.qkv_columns;
  args.layers = result.layers.data();
  args.count = call.count;
  args.dtype = call.is_bfloat16 ? DType::kBFloat16 : DType::kFloat16;
  args.fp8_dtype = FNUZ ? DType::kFloat8E4M3FNUZ : DType::kFloat8E4M3FN;
  DecodeAttention& attention = args.attention;
  attention.qkv = call.attention_qkv;
  attention.row_stride = call.row_stride;
  attention.head_stride = call.head_stride;
  attention.k_scale_stride = call.k_scale_stride;
  attention.v_scale_stride = call.v_scale_stride;
  attention.cos = call.cos;
  attention.sin = call.sin;
  attention.rows = 1 << 30;  // of the caches: the tests see to it
  attention.position = call.position;
  attention.heads = call.heads;
  attention.kv_heads = call.kv_heads;
  attention.cache_dtype = call.fp8_caches ? args.fp8_dtype : args.dtype;
  attention.scale = call.scale;
  args.attended = call.attended;
  args.x = call.x;
  args.residual = call.residual;
  args.out = call.out;
  args.qkv = call.qkv;
  args.eps = call.eps;
  args.weight_offset = call.weight_offset;
  args.workspace = call.workspace;
  args.state = call.state;
  return result;
}

}  // namespace

extern "C" int64_t decode_layers_workspace(const Call* call) {
  return decode_layers_workspace_bytes(described(*call).args);
}

extern "C" const char* decode_layers(const Call* call) {
  return launch_decode_layers(described(*call).args, Context{});
}

// Recorded in a graph, which is launched once.
extern "C" const char* decode_layers_recorded(const Call* call) {
  hipStream_t stream;
  hipGraph_t graph;
  hipGraphExec_t executable;
  Context context;
  if (hipStreamCreate(&stream) != hipSuccess ||
      hipStreamBeginCapture(stream, hipStreamCaptureModeThreadLocal) != hipSuccess) {
    return "no graph can be recorded";
  }
  context.stream = stream;
  const Status said = launch_decode_layers(described(*call).args, context);
  const bool launched =
      hipStreamEndCapture(stream, &graph) == hipSuccess && said == nullptr &&
      hipGraphInstantiate(&executable, graph, nullptr, nullptr, 0) == hipSuccess &&
      hipGraphLaunch(executable, stream) == hipSuccess &&
      hipStreamSynchronize(stream) == hipSuccess;
  return said != nullptr || launched ? said : "no graph was launched";
}
