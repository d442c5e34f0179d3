// CUDA launcher of gemm: picks a kernel, describes the operands to it, starts it.
//
//   warpgroup.cuh  sm_90a: TMA and wgmma; FP8 x FP8, 16-bit x the same or FP8
//   mma.cuh        sm_80 and later: any types of e4m3fn and 16 bits, any alignment
//   plain.cu       e4m3fnuz, no K, few rows that are not aligned
//   skinny_gemm/   the designs for few rows
#include <cuda_runtime.h>

#include "../../blocks/product/cuda/warpgroup.cuh"
#include "../../common/gpu/launch.h"
#include "../../common/gpu/launch_name.h"
#include "../../skinny_gemm/cuda/skinny_gemm.h"
#include "choose.h"
#include "instances.h"
#include "plain.h"

namespace rocm_kernels {
namespace cuda {
namespace {

Status ask_gemm_device(int id, GemmDevice& device) {
  DeviceFacts facts;
  if (const Status error = current_device(facts)) return error;
  device.id = id;
  device.sm_count = facts.compute_units;
  device.compute_capability = facts.compute_capability;
  int bytes = 0;
  const Status error =
      status_of(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id));
  device.shared_bytes_per_block = bytes;
  device.memory = memory_rates(facts);
  if (error != nullptr || device.compute_capability != 90) return error;
  return skinny::ask_clusters(device.sm_count, device.clusters);
}

Status ask_device(GemmDevice& device) { return ask_once<ask_gemm_device>(device); }

Status config_of(const GemmArgs& args, const GemmDevice& device, Config& config) {
  if (args.config == nullptr) {
    config = cached_choice(args, device);
    return nullptr;
  }
  if (const Status status = read_config(args.config, config)) return status;
  return std::visit([&](const auto& family) { return check_config(args, family, device); }, config);
}

// Whether rows of out are aligned vectors of 16 bytes, of 16-bit elements.
bool has_wide_rows(const GemmArgs& args) {
  return reinterpret_cast<uintptr_t>(args.out) % 16 == 0 && args.out_stride % 8 == 0 &&
         args.n % 8 == 0 && args.out_dtype != DType::kFloat32;
}

Status launch_warpgroup(const GemmArgs& args, const GemmConfig& config, const GemmDevice& device,
                        void* stream, bool adds = false) {
  WarpgroupProblem p;
  const bool swap_ab = config.swap_ab != 0;
  p.schedule = cut_product(config, args.m, args.n, args.k * size_of(args.a_dtype), device.sm_count);
  p.cluster = config.cluster_m * config.cluster_n;
  p.share_rows = config.cluster_c() == 2;
  p.rows = static_cast<int32_t>(swap_ab ? args.n : args.m);
  p.columns = static_cast<int32_t>(swap_ab ? args.m : args.n);
  p.tiles_r = static_cast<int32_t>(ceil_div(p.rows, config.block_r() * config.cluster_r()));
  p.tiles_c = static_cast<int32_t>(ceil_div(p.columns, config.block_c() * config.cluster_c()));
  p.rows_box = box_rows(p.rows, config.block_r(), config.cluster_c());
  p.columns_box = box_rows(p.columns, config.block_c(), config.cluster_r());
  p.group_m = config.group_m;
  p.num_stages = config.num_stages;
  p.narrow_stages = narrow_stages_of(args, config, device);
  // A weight that meets one tile of tokens is read once, and the tokens again and again.
  if (args.m <= config.block_m * config.cluster_m) {
    (swap_ab ? p.rows_policy : p.columns_policy) = L2Policy::kEvictFirst;
    (swap_ab ? p.columns_policy : p.rows_policy) = L2Policy::kEvictLast;
  }
  p.out = args.out;
  p.out_stride = args.out_stride;
  p.out_dtype = args.out_dtype;
  p.wide_stores = has_wide_rows(args);
  p.adds = adds;
  p.bias = args.bias;
  p.bias_dtype = args.bias_dtype;
  p.scale_a = args.scale_a;
  p.scale_w = args.scale_w;
  p.launch = next_launch_name();
  p.flags = static_cast<uint64_t*>(args.workspace);
  p.partials = reinterpret_cast<float*>(static_cast<uint8_t*>(args.workspace) +
                                        flag_bytes(p.schedule, p.cluster));
  const bool is_bf16 = args.a_dtype == DType::kBFloat16;
  if (is_widened(args)) {
    return is_bf16 ? launch_warpgroup_bf16_fp8(args, config, p, stream)
                   : launch_warpgroup_fp16_fp8(args, config, p, stream);
  }
  if (is_bf16) return launch_warpgroup_bf16(args, config, p, stream);
  if (args.a_dtype == DType::kFloat16) return launch_warpgroup_fp16(args, config, p, stream);
  return is_block_scaled(args) ? launch_warpgroup_fp8_block(args, config, p, stream)
                               : launch_warpgroup_fp8(args, config, p, stream);
}

// The warpgroup kernel's config where that adds its results to out; nullptr: it does not.
const GemmConfig* adding_config(const GemmArgs& args, const Config& config) {
  const auto* const tiles = std::get_if<GemmConfig>(&config);
  const bool adds = tiles != nullptr && tiles->design == GemmConfig::Design::kWarpgroup;
  return adds && has_wide_rows(args) ? tiles : nullptr;
}

}  // namespace

// Beside skinny_gemm.h's, for either family of configs.
static int64_t workspace_bytes(const GemmArgs& args, const GemmConfig& config,
                               const GemmDevice& device) {
  if (config.design != GemmConfig::Design::kWarpgroup) return 0;
  return workspace_bytes(
      config, cut_product(config, args.m, args.n, args.k * size_of(args.a_dtype), device.sm_count));
}

static Status launch(const GemmArgs& args, const GemmConfig& config, const GemmDevice& device,
                     void* stream) {
  using Design = GemmConfig::Design;
  if (config.design == Design::kWarpgroup) return launch_warpgroup(args, config, device, stream);
  return config.design == Design::kMma
             ? launch_mma(args, device, stream)
             : launch_plain(args, device.compute_capability >= 90, stream);
}

}  // namespace cuda

int64_t gemm_workspace_bytes(const GemmArgs& args, const Context&) {
  cuda::GemmDevice device;
  cuda::Config config;
  if (args.m == 0 || cuda::ask_device(device) || cuda::config_of(args, device, config)) return 0;
  return std::visit([&](const auto& family) { return workspace_bytes(args, family, device); },
                    config);
}

// From measurements on an H200 (docs/kernels/gemm.md). With wgmma the library's product of scales
// per row is slower than gemm, or as quick, and that of one scale a tensor is quicker beyond 64
// rows. Without wgmma the library is quicker from 32 rows on. Weights alone: by wgmma gemm
// takes 1.0 to 1.2 times what 16-bit weights do, and unpacking them is spared.
Status choose_linear_limit(const GemmArgs& args, int64_t& rows) {
  cuda::GemmDevice device;
  if (const Status status = cuda::ask_device(device)) return status;
  const bool hopper = device.compute_capability == 90;
  rows = kAnyRows;
  if (cuda::is_widened(args)) {
    if (!hopper || args.k % 16 != 0) rows = 32;
  } else if (fits_scaled_mm(args)) {
    if (!hopper) rows = 32;
    if (hopper && args.scale_w.kind != ScaleView::Kind::kRow) rows = 64;
  }
  return nullptr;
}

Status launch_gemm(const GemmArgs& args, const Context& context) {
  if (args.m == 0 || args.n == 0) return nullptr;
  cuda::GemmDevice device;
  cuda::Config config;
  if (const Status status = cuda::ask_device(device)) return status;
  if (const Status status = cuda::config_of(args, device, config)) return status;
  return std::visit(
      [&](const auto& family) { return launch(args, family, device, context.stream); }, config);
}

Status ask_gemm_to_peers(const GemmArgs& args, const Context&, bool& sends) {
  cuda::GemmDevice device;
  cuda::Config config;
  if (const Status status = cuda::ask_device(device)) return status;
  if (const Status status = cuda::config_of(args, device, config)) return status;
  const auto* const few_rows = std::get_if<cuda::skinny::SkinnyGemmConfig>(&config);
  sends = few_rows != nullptr && cuda::skinny::sends(args, *few_rows, device);
  return nullptr;
}

Status launch_gemm_to_peers(const GemmArgs& args, const Group& group, const Context& context) {
  cuda::GemmDevice device;
  cuda::Config config;
  if (const Status status = cuda::ask_device(device)) return status;
  if (const Status status = cuda::config_of(args, device, config)) return status;
  return cuda::skinny::launch_to_peers(args, std::get<cuda::skinny::SkinnyGemmConfig>(config),
                                       group, context.stream);
}

Status ask_joined_gemm(const JoinedGemmArgs& args, const Context&, bool& joins) {
  cuda::GemmDevice device;
  if (const Status status = cuda::ask_device(device)) return status;
  if (args.adds) {
    cuda::Config config;
    if (const Status status = cuda::config_of(args, device, config)) return status;
    joins = cuda::adding_config(args, config) != nullptr;
    return nullptr;
  }
  joins = args.m > 0 && args.n > 0 && cuda::skinny::choose_joined(args, device).num_stages > 0;
  return nullptr;
}

Status launch_joined_gemm(const JoinedGemmArgs& args, const Context& context) {
  cuda::GemmDevice device;
  if (const Status status = cuda::ask_device(device)) return status;
  if (args.adds) {
    cuda::Config config;
    if (const Status status = cuda::config_of(args, device, config)) return status;
    const cuda::GemmConfig* const tiles = cuda::adding_config(args, config);
    if (tiles == nullptr) return "no kernel adds this product to what out holds";
    return cuda::launch_warpgroup(args, *tiles, device, context.stream, true);
  }
  return cuda::skinny::launch_joined(args, cuda::skinny::choose_joined(args, device),
                                     context.stream);
}

Status check_gemm_config(const GemmArgs& args, const Context&) {
  cuda::GemmDevice device;
  cuda::Config config;
  if (const Status status = cuda::ask_device(device)) return status;
  return cuda::config_of(args, device, config);
}

Status visit_gemm_configs(const GemmArgs& args, const Context&,
                          void (*visit)(const char* config, void* state), void* state) {
  cuda::GemmDevice device;
  cuda::Config first;
  if (const Status status = cuda::ask_device(device)) return status;
  if (const Status status = cuda::config_of(args, device, first)) return status;
  visit_texts(
      first, [&](const auto& tell) { cuda::for_each_config(args, device, tell); }, visit, state);
  return nullptr;
}

}  // namespace rocm_kernels
