// Checks, struct filling and registration of the ops. No arithmetic on data happens here.
#include "torch_binding.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#if !defined(CPU_KERNEL)
#include <torch/csrc/stable/accelerator.h>
#endif

#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "../rmsnorm_fp8/rmsnorm_fp8.h"
#include "../skinny_gemm/skinny_gemm.h"
#include "../swiglu_fp8/swiglu_fp8.h"
#if defined(CPU_KERNEL)
#include "../common/cpu_isa.h"
#include "../skinny_gemm/gemm_cpu.h"
#endif
#include "registration.h"
#include "tensor_checks.h"

#if !defined(CPU_KERNEL)
// libtorch exports it on ROCm too, but its header declares it for USE_CUDA alone.
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace rocm_kernels {
namespace {

constexpr int64_t kGroupSize = 128;

#if defined(CPU_KERNEL)
void torch_parallel_for_adapter(int64_t count, int64_t grain, void (*body)(int64_t, int64_t, void*),
                                void* state) {
  torch::stable::parallel_for(
      0, count, grain, [body, state](int64_t begin, int64_t end) { body(begin, end, state); });
}

// Runs `launch` with torch's thread pool.
template <typename Launch>
Status with_context(const Tensor&, const Launch& launch) {
  cpu_isa();  // refuses a wrong ROCM_KERNELS_CPU_ISA here, not in a thread of the pool
  Context context;
  context.parallel_for = torch_parallel_for_adapter;
  context.num_threads = static_cast<int32_t>(torch::stable::get_num_threads());
  return launch(context);
}
#else
// Runs `launch` on the tensor's device and that device's current stream.
template <typename Launch>
Status with_context(const Tensor& tensor, const Launch& launch) {
  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  Context context;
  const int32_t error =
      aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &context.stream);
  require(error == 0, "torch has no current stream for device ", tensor.get_device_index());
  return launch(context);
}
#endif

void check_status(Status status, const char* op) {
  if (status != nullptr) fail(op, ": ", status);
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The quantisation arguments that rmsnorm_fp8 and swiglu_fp8 have in common.
struct Quantization {
  Scaling scaling = Scaling::kNone;
  const float* static_scale = nullptr;
  float* scales = nullptr;
};

Quantization check_quantization(const Tensor& out, DType out_dtype, DType in_dtype,
                                const std::optional<Tensor>& scale,
                                const std::optional<Tensor>& scales, int64_t group_size,
                                double scale_ub, const Tensor& first, const char* first_name) {
  const int64_t rows = out.size(0), columns = out.size(1);
  Quantization result;
  require(scale_ub >= 0.0, "scale_ub must not be negative, got ", scale_ub);
  if (!is_fp8(out_dtype)) {
    require(out_dtype == in_dtype, "out must be FP8 or have the dtype of ", first_name, ", got ",
            name_of(out.scalar_type()), " and ", name_of(first.scalar_type()));
    require(!scale && !scales, "scales are for FP8 outputs, but out is ",
            name_of(out.scalar_type()));
    return result;
  }
  require(scale.has_value() != scales.has_value(),
          "an FP8 output takes either scale (given) or scales (computed), got ",
          scale ? "both" : "neither");
  require(group_size == 0 || group_size == kGroupSize, "group_size must be 0 or ", kGroupSize,
          ", got ", group_size);
  if (scale) {
    require(group_size == 0, "scale is one value for the tensor; group_size must be 0, got ",
            group_size);
    require_device(*scale, "scale", first, first_name);
    require_no_overlap(out, "out", *scale, "scale");
    result.static_scale = require_static_scale(*scale);
    result.scaling = Scaling::kStatic;
    return result;
  }
  require_device(*scales, "scales", first, first_name);
  require(scales->scalar_type() == ScalarType::Float, "scales must be float32, got ",
          name_of(scales->scalar_type()));
  require_shape(*scales, "scales", rows, group_size ? ceil_div(columns, group_size) : 1);
  require(scales->is_contiguous(), "scales must be contiguous");
  require_no_overlap(*scales, "scales", out, "out");
  require_no_overlap(*scales, "scales", first, first_name);
  result.scales = static_cast<float*>(scales->data_ptr());
  result.scaling = group_size ? Scaling::kPerGroup : Scaling::kPerToken;
  return result;
}

int64_t row_stride(const Tensor& tensor) {
  return tensor.size(0) > 1 ? tensor.stride(0) : tensor.size(1);
}

Activation parse_activation(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "identity") return Activation::kIdentity;
  fail("activation must be silu, gelu, gelu_tanh or identity, got ", name);
}

// Tells the granularity of a GEMM scale by its shape. `rows` is M or N; `row_block` is how many of
// these rows a block spans: 1 for a, 128 for w.
GemmScale parse_gemm_scale(const std::optional<Tensor>& scale, const char* name, int64_t rows,
                           int64_t row_block, int64_t k, const Tensor& a) {
  GemmScale result;
  if (!scale) return result;
  require_device(*scale, name, a, "a");
  require(scale->scalar_type() == ScalarType::Float, name, " must be float32, got ",
          name_of(scale->scalar_type()));
  result.data = static_cast<const float*>(scale->data_ptr());
  const int64_t dim = scale->dim();
  const int64_t size0 = dim > 0 ? scale->size(0) : 1, size1 = dim > 1 ? scale->size(1) : 1;
  const int64_t blocks0 = ceil_div(rows, row_block), blocks1 = ceil_div(k, kScaleBlock);
  if (scale->numel() == 1 && dim <= 2) {
    result.kind = GemmScale::Kind::kTensor;
  } else if (dim <= 2 && size0 == rows && size1 == 1) {
    result.kind = GemmScale::Kind::kRow;
    result.row_stride = scale->stride(0);
  } else if (dim == 2 && size0 == blocks0 && size1 == blocks1) {
    result.kind = GemmScale::Kind::kBlock;
    result.row_stride = scale->stride(0);
    result.block_stride = scale->stride(1);
  } else {
    fail(name, " must have shape [1], [", rows, ", 1] or [", blocks0, ", ", blocks1, "], got ",
         shape_of(*scale));
  }
  return result;
}

}  // namespace
}  // namespace rocm_kernels

using namespace rocm_kernels;

void rmsnorm_fp8(Tensor& out, std::optional<Tensor> scales, const Tensor& x,
                 std::optional<Tensor> residual, const Tensor& weight, std::optional<Tensor> scale,
                 double eps, int64_t group_size, double scale_ub) {
  RmsNormFp8Args args;
  require_matrix(x, "x");
  args.rows = x.size(0);
  args.hidden = x.size(1);
  args.x_dtype = require_float(x, "x");
  args.out_dtype = require_float_or_fp8(out, "out");
  args.weight_dtype = require_float(weight, "weight");
  require(args.weight_dtype == args.x_dtype || args.weight_dtype == DType::kFloat32,
          "weight must be float32 or have the dtype of x, got ", name_of(weight.scalar_type()),
          " and ", name_of(x.scalar_type()));
  require_device(out, "out", x, "x");
  require_device(weight, "weight", x, "x");
  require_shape(out, "out", args.rows, args.hidden);
  require_writable(out, "out");
  require_contiguous_vector(weight, "weight", args.hidden);
  require_no_overlap(out, "out", x, "x");
  require_no_overlap(out, "out", weight, "weight");
  if (residual) {
    require(residual->scalar_type() == x.scalar_type(), "residual must have the dtype of x, got ",
            name_of(residual->scalar_type()), " and ", name_of(x.scalar_type()));
    require_device(*residual, "residual", x, "x");
    require_shape(*residual, "residual", args.rows, args.hidden);
    require_writable(*residual, "residual");
    require_no_overlap(*residual, "residual", x, "x");
    require_no_overlap(*residual, "residual", out, "out");
    require_no_overlap(*residual, "residual", weight, "weight");
    args.residual = residual->data_ptr();
    args.residual_stride = row_stride(*residual);
  }
  const Quantization quantization = check_quantization(out, args.out_dtype, args.x_dtype, scale,
                                                       scales, group_size, scale_ub, x, "x");
  if (scales) require_no_overlap(*scales, "scales", weight, "weight");
  if (scales && residual) require_no_overlap(*scales, "scales", *residual, "residual");
  if (scale && residual) require_no_overlap(*residual, "residual", *scale, "scale");
  if (args.hidden == 0 && scales) torch::stable::fill_(*scales, kMinScale);
  if (args.rows == 0 || args.hidden == 0) return;

  args.x = x.data_ptr();
  args.x_stride = row_stride(x);
  args.weight = weight.data_ptr();
  args.out = out.data_ptr();
  args.out_stride = row_stride(out);
  args.scaling = quantization.scaling;
  args.static_scale = quantization.static_scale;
  args.scales = quantization.scales;
  args.eps = static_cast<float>(eps);
  args.scale_ub = static_cast<float>(scale_ub);
  args.group_size = static_cast<int32_t>(group_size);
  check_status(
      with_context(x, [&](const Context& context) { return launch_rmsnorm_fp8(args, context); }),
      "rmsnorm_fp8");
}

void swiglu_fp8(Tensor& out, std::optional<Tensor> scales, const Tensor& gate,
                std::optional<Tensor> up, std::optional<Tensor> scale, std::string activation,
                int64_t group_size, double scale_ub) {
  SwigluFp8Args args;
  args.activation = parse_activation(activation);
  // As quantize_fp8, and as swiglu with both halves in one tensor, call it.
  const char* const gate_name = up ? "gate" : "x";
  require_matrix(gate, gate_name);
  args.rows = gate.size(0);
  args.columns = gate.size(1);
  args.in_dtype = require_float(gate, gate_name);
  args.out_dtype = require_float_or_fp8(out, "out");
  require_device(out, "out", gate, "gate");
  require_shape(out, "out", args.rows, args.columns);
  require_writable(out, "out");
  require_no_overlap(out, "out", gate, "gate");
  if (up) {
    require(up->scalar_type() == gate.scalar_type(), "up must have the dtype of gate, got ",
            name_of(up->scalar_type()), " and ", name_of(gate.scalar_type()));
    require_device(*up, "up", gate, "gate");
    require_shape(*up, "up", args.rows, args.columns);
    require_no_overlap(out, "out", *up, "up");
    args.up = up->data_ptr();
    args.up_stride = row_stride(*up);
  }
  const Quantization quantization = check_quantization(out, args.out_dtype, args.in_dtype, scale,
                                                       scales, group_size, scale_ub, gate, "gate");
  if (scales && up) require_no_overlap(*scales, "scales", *up, "up");
  if (args.columns == 0 && scales) torch::stable::fill_(*scales, kMinScale);
  if (args.rows == 0 || args.columns == 0) return;

  args.gate = gate.data_ptr();
  args.gate_stride = row_stride(gate);
  args.out = out.data_ptr();
  args.out_stride = row_stride(out);
  args.scaling = quantization.scaling;
  args.static_scale = quantization.static_scale;
  args.scales = quantization.scales;
  args.scale_ub = static_cast<float>(scale_ub);
  args.group_size = static_cast<int32_t>(group_size);
  check_status(
      with_context(gate, [&](const Context& context) { return launch_swiglu_fp8(args, context); }),
      "swiglu_fp8");
}

// Checks the tensors of a matrix product and describes them.
static SkinnyGemmArgs describe_product(const Tensor& out, const Tensor& a, const Tensor& w,
                                       const std::optional<Tensor>& scale_a,
                                       const std::optional<Tensor>& scale_w,
                                       const std::optional<Tensor>& bias) {
  SkinnyGemmArgs args;
  require_matrix(a, "a");
  require_matrix(w, "w");
  args.m = a.size(0);
  args.k = a.size(1);
  args.n = w.size(0);
  require(w.size(1) == args.k, "w must have shape [N, K] with the K of a, got ", shape_of(w),
          " for an a of ", shape_of(a));
  args.a_dtype = require_float_or_fp8(a, "a");
  args.w_dtype = require_float_or_fp8(w, "w");
  args.out_dtype = require_float(out, "out");
  require(args.a_dtype != DType::kFloat32 && args.w_dtype != DType::kFloat32,
          "a and w must be FP8, float16 or bfloat16, got ", name_of(a.scalar_type()), " and ",
          name_of(w.scalar_type()));
  const bool weight_only = !is_fp8(args.a_dtype) && is_fp8(args.w_dtype);
  require(args.a_dtype == args.w_dtype || weight_only,
          "a and w must have one dtype, or a 16 bits and w FP8, got ", name_of(a.scalar_type()),
          " and ", name_of(w.scalar_type()));
  require(is_fp8(args.w_dtype) || (!scale_a && !scale_w), "scales are for FP8 operands, but w is ",
          name_of(w.scalar_type()));
  require(!weight_only || !scale_a, "scale_a is for an FP8 a, but a is ", name_of(a.scalar_type()));
  require_device(w, "w", a, "a");
  require_device(out, "out", a, "a");
  require_shape(out, "out", args.m, args.n);
  require_writable(out, "out");
  require_no_overlap(out, "out", a, "a");
  require_no_overlap(out, "out", w, "w");
  args.scale_a = parse_gemm_scale(scale_a, "scale_a", args.m, 1, args.k, a);
  args.scale_w = parse_gemm_scale(scale_w, "scale_w", args.n, kScaleBlock, args.k, a);
  if (scale_a) require_no_overlap(out, "out", *scale_a, "scale_a");
  if (scale_w) require_no_overlap(out, "out", *scale_w, "scale_w");
  if (bias) {
    args.bias_dtype = require_float(*bias, "bias");
    require(args.bias_dtype == args.out_dtype || args.bias_dtype == DType::kFloat32,
            "bias must be float32 or have the dtype of out, got ", name_of(bias->scalar_type()),
            " and ", name_of(out.scalar_type()));
    require_device(*bias, "bias", a, "a");
    require_contiguous_vector(*bias, "bias", args.n);
    require_no_overlap(out, "out", *bias, "bias");
    args.bias = bias->data_ptr();
  }
  args.a = a.data_ptr();
  args.a_stride = row_stride(a);
  args.w = w.data_ptr();
  args.w_stride = row_stride(w);
  args.out = out.data_ptr();
  args.out_stride = row_stride(out);
  return args;
}

// Scratch for one call.
class Workspace {
 public:
  void* allocate(int64_t bytes, const Tensor& like) {
    if (bytes == 0) return nullptr;
#if defined(CPU_KERNEL)
    // An allocation through torch costs a fifth of a product of one row.
    if (bytes <= static_cast<int64_t>(sizeof(small_))) return small_;
#endif
    large_ = torch::stable::new_empty(like, {bytes}, ScalarType::Byte);
    return large_->data_ptr();
  }

 private:
#if defined(CPU_KERNEL)
  alignas(256) char small_[32 * 1024];
#endif
  std::optional<Tensor> large_;
};

static SkinnyGemmArgs describe_skinny_product(const Tensor& out, const Tensor& a, const Tensor& w,
                                              const std::optional<Tensor>& scale_a,
                                              const std::optional<Tensor>& scale_w,
                                              const std::optional<Tensor>& bias) {
  const SkinnyGemmArgs args = describe_product(out, a, w, scale_a, scale_w, bias);
  require(args.m <= kSkinnyGemmMaxRows, "skinny_gemm takes at most ", kSkinnyGemmMaxRows,
          " rows, got ", args.m, "; fp8_linear takes any number");
  return args;
}

namespace {

// Configs that stand in for the backend's own choice.
class Tuning {
 public:
  // Device index, last row of M's class, N, K, dtypes of a and w, whether scales are of blocks.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, DType, DType, bool>;
  using Entries = std::map<Key, std::string>;

  static Key key(int64_t device, const SkinnyGemmArgs& args) {
    const bool blocks = args.scale_a.kind == GemmScale::Kind::kBlock ||
                        args.scale_w.kind == GemmScale::Kind::kBlock;
    return {device, last_row_of_class(args.m), args.n, args.k, args.a_dtype, args.w_dtype, blocks};
  }

  // As they are now. A call keeps them until it has launched: its workspace and its launch go by
  // one config, whatever other threads set meanwhile.
  std::shared_ptr<const Entries> entries() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return entries_;
  }

  // An empty config: forgets the entry.
  void set(const Key& key, const std::string& config) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto changed = std::make_shared<Entries>(entries_ ? *entries_ : Entries{});
    changed->erase(key);
    if (!config.empty()) changed->emplace(key, config);
    entries_ = changed->empty() ? nullptr : std::move(changed);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Entries> entries_;  // never changed, only replaced
};

Tuning& tuning() {
  static Tuning instance;
  return instance;
}

const char* tuned_config(const Tuning::Entries* entries, const Tensor& a,
                         const SkinnyGemmArgs& args) {
  if (entries == nullptr) return nullptr;
  const auto found = entries->find(Tuning::key(a.get_device_index(), args));
  return found == entries->end() ? nullptr : found->second.c_str();
}

void check_config_status(Status status, const SkinnyGemmArgs& args) {
  if (status == nullptr || args.config == nullptr) return check_status(status, "skinny_gemm");
  fail("skinny_gemm: ", status, "; got '", args.config, "' for M = ", args.m, ", N = ", args.n,
       ", K = ", args.k, "; tuning.candidates tells what these operands take");
}

void multiply(const Tensor& a, SkinnyGemmArgs& args) {
  if (args.m == 0 || args.n == 0) return;
  const auto launch = [&](const Context& context) {
    Workspace workspace;
    args.workspace = workspace.allocate(skinny_gemm_workspace_bytes(args, context), a);
    return launch_skinny_gemm(args, context);
  };
  check_config_status(with_context(a, launch), args);
}

DType parse_gemm_dtype(const std::string& name) {
  constexpr std::pair<ScalarType, DType> kTypes[] = {
      {ScalarType::Half, DType::kFloat16},
      {ScalarType::BFloat16, DType::kBFloat16},
      {ScalarType::Float8_e4m3fn, DType::kFloat8E4M3FN},
      {ScalarType::Float8_e4m3fnuz, DType::kFloat8E4M3FNUZ}};
  for (const auto& [type, dtype] : kTypes) {
    if (name == name_of(type)) return dtype;
  }
  fail("a dtype must be float16, bfloat16, float8_e4m3fn or float8_e4m3fnuz, got ", name);
}

}  // namespace

void skinny_gemm(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_a,
                 std::optional<Tensor> scale_w, std::optional<Tensor> bias) {
  SkinnyGemmArgs args = describe_skinny_product(out, a, w, scale_a, scale_w, bias);
  const auto entries = tuning().entries();
  args.config = tuned_config(entries.get(), a, args);
  multiply(a, args);
}

void skinny_gemm_with_config(Tensor& out, const Tensor& a, const Tensor& w,
                             std::optional<Tensor> scale_a, std::optional<Tensor> scale_w,
                             std::optional<Tensor> bias, std::string config) {
  SkinnyGemmArgs args = describe_skinny_product(out, a, w, scale_a, scale_w, bias);
  args.config = config.c_str();
  multiply(a, args);
}

std::string skinny_gemm_configs(const Tensor& out, const Tensor& a, const Tensor& w,
                                std::optional<Tensor> scale_a, std::optional<Tensor> scale_w,
                                bool tuned) {
  SkinnyGemmArgs args = describe_skinny_product(out, a, w, scale_a, scale_w, std::nullopt);
  const auto entries = tuning().entries();
  if (tuned) args.config = tuned_config(entries.get(), a, args);
  std::string lines;
  const auto add_line = [](const char* config, void* text) {
    static_cast<std::string*>(text)->append(config).append("\n");
  };
  const auto visit = [&](const Context& context) {
    return visit_skinny_gemm_configs(args, context, add_line, &lines);
  };
  check_config_status(with_context(a, visit), args);
  return lines;
}

void tune_skinny_gemm(int64_t device, int64_t rows, int64_t n, int64_t k, std::string a_dtype,
                      std::string w_dtype, bool block_scales, std::string config) {
  require(1 <= rows && rows <= kSkinnyGemmMaxRows, "rows must be 1 to ", kSkinnyGemmMaxRows,
          ", got ", rows);
  SkinnyGemmArgs args;
  args.m = rows;
  args.n = n;
  args.k = k;
  args.a_dtype = parse_gemm_dtype(a_dtype);
  args.w_dtype = parse_gemm_dtype(w_dtype);
  if (block_scales) args.scale_w.kind = GemmScale::Kind::kBlock;
  if (!config.empty()) {
#if !defined(CPU_KERNEL)
    const torch::stable::accelerator::DeviceGuard guard(static_cast<int32_t>(device));
#endif
    args.config = config.c_str();
    const auto ignore = [](const char*, void*) {};
    check_config_status(visit_skinny_gemm_configs(args, Context{}, ignore, nullptr), args);
  }
  tuning().set(Tuning::key(device, args), config);
}

#if defined(CPU_KERNEL)
void gemm(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_a,
          std::optional<Tensor> scale_w, std::optional<Tensor> bias) {
  SkinnyGemmArgs args = describe_product(out, a, w, scale_a, scale_w, bias);
  if (args.m == 0 || args.n == 0) return;
  Workspace workspace;
  args.workspace = workspace.allocate(gemm_workspace_bytes(args), a);
  const auto launch = [&](const Context& context) { return launch_gemm(args, context); };
  check_status(with_context(a, launch), "gemm");
}
#endif

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "rmsnorm_fp8(Tensor(a!) out, Tensor(b!)? scales, Tensor x, Tensor(c!)? residual, "
      "Tensor weight, Tensor? scale, float eps, int group_size, float scale_ub) -> ()");
  ops.def(
      "swiglu_fp8(Tensor(a!) out, Tensor(b!)? scales, Tensor gate, Tensor? up, Tensor? scale, "
      "str activation, int group_size, float scale_ub) -> ()");
  ops.def(
      "skinny_gemm(Tensor(a!) out, Tensor a, Tensor w, Tensor? scale_a, Tensor? scale_w, "
      "Tensor? bias) -> ()");
  ops.def(
      "skinny_gemm_with_config(Tensor(a!) out, Tensor a, Tensor w, Tensor? scale_a, "
      "Tensor? scale_w, Tensor? bias, str config) -> ()");
  ops.def(
      "skinny_gemm_configs(Tensor out, Tensor a, Tensor w, Tensor? scale_a, Tensor? scale_w, "
      "bool tuned) -> str");
  ops.def(
      "tune_skinny_gemm(int device, int rows, int n, int k, str a_dtype, str w_dtype, "
      "bool block_scales, str config) -> ()");
#if defined(CPU_KERNEL)
  ops.def(
      "gemm(Tensor(a!) out, Tensor a, Tensor w, Tensor? scale_a, Tensor? scale_w, "
      "Tensor? bias) -> ()");
#endif
}

// It takes no tensor that would tell the device.
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("tune_skinny_gemm", TORCH_BOX(&tune_skinny_gemm));
}

#if defined(CPU_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#else  // ROCm registers under the CUDA key, as torch does.
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#endif
  ops.impl("rmsnorm_fp8", TORCH_BOX(&rmsnorm_fp8));
  ops.impl("swiglu_fp8", TORCH_BOX(&swiglu_fp8));
  ops.impl("skinny_gemm", TORCH_BOX(&skinny_gemm));
  ops.impl("skinny_gemm_with_config", TORCH_BOX(&skinny_gemm_with_config));
  ops.impl("skinny_gemm_configs", TORCH_BOX(&skinny_gemm_configs));
#if defined(CPU_KERNEL)
  ops.impl("gemm", TORCH_BOX(&gemm));
#endif
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
