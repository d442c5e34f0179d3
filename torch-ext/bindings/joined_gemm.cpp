// Products with neighbours in them: by one kernel where one joins them, else by the launches that
// it stands for, with the same bits.
#include "../../common/core/half.h"
#include "../../swiglu_fp8/swiglu_fp8.h"
#include "../torch_binding.h"
#include "activation.h"
#include "launch.h"
#include "product.h"
#include "tuning.h"

using namespace rocm_kernels;

namespace {

bool joins(const JoinedGemmArgs& args, const Context& context, const char* op) {
  bool answer = false;
  check_status(ask_joined_gemm(args, context, answer), op);
  return answer;
}

// The product alone, of rows [M, K] that are quantised to w's type, with a scale each.
GemmArgs of_codes(const GemmArgs& args) {
  GemmArgs product = args;
  product.a_dtype = args.w_dtype;
  product.a_stride = args.k;
  product.scale_a.kind = ScaleView::Kind::kRow;
  product.scale_a.row_stride = 1;
  return product;
}

void quantize_apart(const JoinedGemmArgs& args, const TunedConfig& tuned, const Tensor& x,
                    const Context& context) {
  Workspace workspace;
  const int64_t scale_bytes = ceil_div(args.m * int64_t{sizeof(float)}, 256) * 256;
  char* const at = static_cast<char*>(workspace.allocate(scale_bytes + args.m * args.k, x));
  SwigluFp8Args codes;
  codes.rows = args.m;
  codes.columns = args.k;
  codes.gate = args.a;
  codes.gate_stride = args.a_stride;
  codes.in_dtype = args.a_dtype;
  codes.out = at + scale_bytes;
  codes.out_stride = args.k;
  codes.out_dtype = args.w_dtype;
  codes.scales = reinterpret_cast<float*>(at);
  codes.scaling = Scaling::kPerToken;
  codes.activation = Activation::kIdentity;
  GemmArgs product = of_codes(args);
  product.a = codes.out;
  product.scale_a.data = codes.scales;
  if (args.k > 0) {
    check_status(launch_swiglu_fp8(codes, context), "quantized_gemm");
  } else {
    product.scale_a = ScaleView();
  }
  product.config = usable_config(tuned, product, context);
  launch_product(product, x, context);
}

#if defined(CPU_KERNEL)
void gate_apart(const JoinedGemmArgs& args, const Tensor& a, const Context& context) {
  Workspace workspace, widened;
  GemmArgs product = args;
  product.out = workspace.allocate(args.m * args.n * size_of(args.out_dtype), a);
  product.out_stride = args.n;
  launch_product(product, a, context);
  float* const both =
      static_cast<float*>(widened.allocate(args.m * args.n * int64_t{sizeof(float)}, a));
  const auto* const bits = static_cast<const uint16_t*>(product.out);
  for (int64_t i = 0; i < args.m * args.n; ++i) {
    both[i] = args.out_dtype == DType::kFloat16 ? to_float(Float16{bits[i]})
                                                : to_float(BFloat16{bits[i]});
  }
  SwigluFp8Args gated;
  gated.rows = args.m;
  gated.columns = args.n / 2;
  gated.gate = both;
  gated.up = both + gated.columns;
  gated.gate_stride = gated.up_stride = args.n;
  gated.out = args.out;
  gated.out_stride = args.out_stride;
  gated.in_dtype = gated.out_dtype = DType::kFloat32;
  gated.activation = args.activation;
  check_status(launch_swiglu_fp8(gated, context), "gated_gemm");
}
#else
void gate_apart(const JoinedGemmArgs& args, const Tensor&, const Context&) {
  fail("gated_gemm: no kernel gates a product of M = ", args.m, ", N = ", args.n, ", K = ", args.k,
       "; linear_limits tells up to how many rows one does");
}
#endif

}  // namespace

namespace rocm_kernels {

bool add_gemm(Tensor& out, const Tensor& a, const Tensor& w, const std::optional<Tensor>& scale_a,
              const std::optional<Tensor>& scale_w, const std::optional<Tensor>& bias) {
  JoinedGemmArgs args;
  static_cast<GemmArgs&>(args) = describe_product(out, a, w, scale_a, scale_w, bias);
  args.adds = true;
  const TunedConfig tuned(product_key(a.get_device_index(), args));
  return with_context(a, [&](const Context& context) {
    args.config = usable_config(tuned, args, context);
    if (args.m == 0 || args.n == 0 || !joins(args, context, "gemm")) return false;
    args.ahead = Order::of_thread().place_of(args);
    Workspace workspace;
    args.workspace = workspace.allocate(gemm_workspace_bytes(args, context), a);
    check_status(launch_joined_gemm(args, context), "gemm");
    return true;
  });
}

}  // namespace rocm_kernels

void quantized_gemm(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_w,
                    std::optional<Tensor> bias) {
  JoinedGemmArgs args = describe_quantized(out, a, w, scale_w, bias);
  if (args.m == 0 || args.n == 0) return;
  args.ahead = Order::of_thread().place_of(args);
  const TunedConfig tuned(product_key(a.get_device_index(), of_codes(args)));
  run_or_record(a, [args, a, tuned](const Context& context) {
    const bool joined = tuned.text() == nullptr && joins(args, context, "quantized_gemm");
    if (!joined) return quantize_apart(args, tuned, a, context);
    check_status(launch_joined_gemm(args, context), "quantized_gemm");
  });
}

void gated_gemm(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_a,
                std::optional<Tensor> scale_w, std::optional<Tensor> bias, std::string activation,
                std::string rounded) {
  require(rounded == "float16" || rounded == "bfloat16",
          "rounded must be float16 or bfloat16, got ", rounded);
  const DType to = rounded == "float16" ? DType::kFloat16 : DType::kBFloat16;
  JoinedGemmArgs args = describe_gated(out, a, w, scale_a, scale_w, bias, to);
  args.activation = parse_activation(activation);
  require(args.gates(), "activation must be silu, gelu or gelu_tanh, got identity");
  if (args.m == 0 || args.n == 0) return;
  args.ahead = Order::of_thread().place_of(args, 2);
  run_or_record(a, [args, a](const Context& context) {
    if (!joins(args, context, "gated_gemm")) return gate_apart(args, a, context);
    check_status(launch_joined_gemm(args, context), "gated_gemm");
  });
}
