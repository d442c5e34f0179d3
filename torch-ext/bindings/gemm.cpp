#include "../../gemm/gemm.h"

#include "../torch_binding.h"
#include "launch.h"
#include "product.h"
#include "tuning.h"

using namespace rocm_kernels;

namespace {

void check_gemm_status(Status status, const GemmArgs& args) {
  if (status == nullptr || args.config == nullptr) return check_status(status, "gemm");
  fail("gemm: ", status, "; got '", args.config, "' for M = ", args.m, ", N = ", args.n,
       ", K = ", args.k, "; gemm_configs tells what these operands take");
}

}  // namespace

namespace rocm_kernels {

// By the last row of M's class, N, K, dtypes of a and w, whether scales are of blocks.
TuningKey product_key(int64_t device, const GemmArgs& args) {
  return {"gemm",
          device,
          {last_row_of_class(args.m), args.n, args.k, static_cast<int64_t>(args.a_dtype),
           static_cast<int64_t>(args.w_dtype), is_block_scaled(args)}};
}

const char* usable_config(const TunedConfig& tuned, GemmArgs args, const Context& context) {
  args.config = tuned.text();
  if (args.config == nullptr || check_gemm_config(args, context) != nullptr) return nullptr;
  return args.config;
}

void launch_product(GemmArgs args, const Tensor& a, const Context& context) {
  Workspace workspace;
  args.workspace = workspace.allocate(gemm_workspace_bytes(args, context), a);
  check_gemm_status(launch_gemm(args, context), args);
}

}  // namespace rocm_kernels

void gemm(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_a,
          std::optional<Tensor> scale_w, std::optional<Tensor> bias, std::string config) {
  GemmArgs args = describe_product(out, a, w, scale_a, scale_w, bias);
  if (args.m == 0 || args.n == 0) return;
  args.ahead = Order::of_thread().place_of(args);
  if (!config.empty()) {
    return run_or_record(a, [args, a, config](const Context& context) mutable {
      args.config = config.c_str();
      launch_product(args, a, context);
    });
  }
  const TunedConfig tuned(product_key(a.get_device_index(), args));
  run_or_record(a, [args, a, tuned](const Context& context) mutable {
    args.config = usable_config(tuned, args, context);
    launch_product(args, a, context);
  });
}

std::string gemm_configs(const Tensor& out, const Tensor& a, const Tensor& w,
                         std::optional<Tensor> scale_a, std::optional<Tensor> scale_w, bool tuned) {
  GemmArgs args = describe_product(out, a, w, scale_a, scale_w, std::nullopt);
  const TunedConfig in_force(product_key(a.get_device_index(), args));
  std::string lines;
  const auto add_line = [](const char* config, void* text) {
    static_cast<std::string*>(text)->append(config).append("\n");
  };
  const auto visit = [&](const Context& context) {
    if (tuned) args.config = usable_config(in_force, args, context);
    return visit_gemm_configs(args, context, add_line, &lines);
  };
  check_gemm_status(with_context(a, visit), args);
  return lines;
}

void tune_gemm(int64_t device, int64_t rows, int64_t n, int64_t k, std::string a_dtype,
               std::string w_dtype, bool block_scales, std::string config) {
  require(rows >= 1, "rows must be at least 1, got ", rows);
  GemmArgs args = describe_tuned_product(rows, n, k, a_dtype, w_dtype, block_scales);
  if (!config.empty()) {
    args.config = config.c_str();
    const auto check = [&] { return check_gemm_config(args, Context{}); };
    check_gemm_status(on_device(device, check), args);
  }
  set_tuned_config(product_key(device, args), config);
}

void settle_weights(int64_t address) {
  require(address >= 0, "address must be that of a weight, or 0 for none, got ", address);
  if (address == 0) return settled_weights().clear();
  settled_weights().insert(address);
}

std::string ask_ahead(std::optional<Tensor> places) {
  Order& order = Order::of_thread();
  std::string lines;
  for (const Order::Product& p : order.products) {
    for (const int64_t value : {p.data, p.rows, p.row_bytes, p.row_stride, p.runs, p.before}) {
      lines.append(std::to_string(value)).append(" ");
    }
    lines.back() = '\n';
  }
  order = Order{};
  if (!places) return lines;
  constexpr int64_t kWords = sizeof(WeightAhead) / sizeof(int64_t);
  require(places->scalar_type() == ScalarType::Long && places->dim() == 2 &&
              places->size(1) == kWords && places->is_contiguous(),
          "places must be contiguous int64 [products, ", kWords, "], got ",
          name_of(places->scalar_type()), " ", shape_of(*places));
  order.places = static_cast<const WeightAhead*>(places->data_ptr());
  order.count = places->size(0);
  return lines;
}

std::tuple<int64_t, int64_t, int64_t, int64_t> linear_limits(int64_t device, int64_t n, int64_t k,
                                                             std::string scales) {
  using Kind = ScaleView::Kind;
  require(scales == "tensor" || scales == "row" || scales == "block",
          "scales must be tensor, row or block, got ", scales);
  GemmArgs args;
  args.n = n;
  args.k = k;
  args.scale_w.kind = scales == "tensor" ? Kind::kTensor
                      : scales == "row"  ? Kind::kRow
                                         : Kind::kBlock;
  const auto limit_of = [&](DType a_dtype) {
    int64_t rows = 0;
    args.a_dtype = a_dtype;
    const auto ask = [&] { return choose_linear_limit(args, rows); };
    check_status(on_device(device, ask), "linear_limits");
    return rows;
  };
  JoinedGemmArgs joined;
  static_cast<GemmArgs&>(joined) = args;
  joined.a_stride = joined.w_stride = k;
  const auto joined_limit = [&](DType a_dtype, Activation activation) {
    joined.a_dtype = a_dtype;
    joined.activation = activation;
    bool joins = true;
    const auto ask = [&] { return ask_joined_gemm(joined, Context{}, joins); };
    for (joined.m = 1; joins && joined.m <= kSkinnyGemmMaxRows; ++joined.m) {
      check_status(on_device(device, ask), "linear_limits");
    }
    return joins ? kSkinnyGemmMaxRows : joined.m - 2;
  };
  return {limit_of(DType::kFloat8E4M3FN), limit_of(DType::kBFloat16),
          joined_limit(DType::kFloat32, Activation::kIdentity),
          joined_limit(DType::kFloat8E4M3FN, Activation::kSilu)};
}
