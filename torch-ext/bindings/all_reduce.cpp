#include "../../all_reduce/all_reduce.h"

#include "../../blocks/peers/memory.h"
#include "../../rmsnorm_fp8/rmsnorm_fp8.h"
#include "../torch_binding.h"
#include "checks.h"
#include "launch.h"
#include "norm.h"
#include "product.h"
#include "tuning.h"

using namespace rocm_kernels;

namespace {

void require_contiguous(const Tensor& tensor, const char* name) {
  require(tensor.is_contiguous(), name, " must be contiguous; call .contiguous() first");
}

void require_group(ExchangeArgs& args, int64_t memory, int64_t memory_bytes, int64_t rank,
                   int64_t ranks, double timeout) {
  require(ranks >= 2 && ranks <= kMostRanks, "ranks must be 2 to 8, got ", ranks);
  require(rank >= 0 && rank < ranks, "rank must be below ranks, got ", rank, " of ", ranks);
  require(memory > 0 && memory % 64 == 0, "memory must be the address of a Communicator's, got ",
          memory);
  args.memory = reinterpret_cast<void*>(memory);
  args.data_bytes = memory_bytes - kPeerHeaderBytes;
  args.rank = static_cast<int32_t>(rank);
  args.ranks = static_cast<int32_t>(ranks);
  args.timeout = timeout;
}

ExchangeArgs describe_exchange(Exchanged what, const Tensor& out, const Tensor& x, int64_t memory,
                               int64_t memory_bytes, int64_t rank, int64_t ranks, double timeout) {
  ExchangeArgs args;
  args.what = what;
  args.dtype = require_float(x, "x");
  args.elements = x.numel();
  require(out.scalar_type() == x.scalar_type(), "out must have the dtype of x, got ",
          name_of(out.scalar_type()), " and ", name_of(x.scalar_type()));
  require_device(out, "out", x, "x");
  require_contiguous(x, "x");
  require_contiguous(out, "out");
  require_group(args, memory, memory_bytes, rank, ranks, timeout);
  const int64_t x_parts = what == Exchanged::kAllGather ? ranks : 1;
  const int64_t out_parts = what == Exchanged::kReduceScatter ? ranks : 1;
  require(out.numel() * out_parts == args.elements * x_parts, "out must have ", x_parts,
          " elements for ", out_parts, " of x on ", ranks, " ranks, got ", out.numel(), " and ",
          args.elements);
  if (out.data_ptr() != x.data_ptr() || out.numel() != x.numel()) {
    require_no_overlap(out, "out", x, "x");
  }
  args.x = x.data_ptr();
  args.out = out.data_ptr();
  return args;
}

void launch(const ExchangeArgs& args, const Tensor& x, const char* op) {
  if (args.elements == 0) return;
  run_or_record(
      x, [args, op](const Context& context) { check_status(launch_exchange(args, context), op); });
}

// A product of this rank's share of K, and the sum of the ranks' products in its place.
struct SummedProduct {
  GemmArgs product;
  ExchangeArgs sum;
  TunedConfig tuned;

  // Whether the product sends its tiles itself, and to which group.
  bool sends(const Context& context, Group& group, const char* op) {
    product.config = usable_config(tuned, product, context);
    bool by_size = false, by_product = false;
    check_status(ask_whether_to_send(sum, context, group, by_size), op);
    if (by_size) check_status(ask_gemm_to_peers(product, context, by_product), op);
    return by_product;
  }
};

SummedProduct describe_summed_product(const Tensor& out, const Tensor& a, const Tensor& w,
                                      const std::optional<Tensor>& scale_a,
                                      const std::optional<Tensor>& scale_w,
                                      const std::optional<Tensor>& bias, int64_t memory,
                                      int64_t memory_bytes, int64_t rank, int64_t ranks,
                                      double timeout) {
  const GemmArgs product = describe_product(out, a, w, scale_a, scale_w, bias);
  require_contiguous(out, "out");
  ExchangeArgs sum;
  sum.what = Exchanged::kAllReduce;
  sum.dtype = product.out_dtype;
  sum.elements = product.m * product.n;
  sum.x = sum.out = product.out;
  require_group(sum, memory, memory_bytes, rank, ranks, timeout);
  return {product, sum, TunedConfig(product_key(a.get_device_index(), product))};
}

}  // namespace

void all_reduce(Tensor& out, const Tensor& x, int64_t memory, int64_t memory_bytes, int64_t rank,
                int64_t ranks, double timeout) {
  launch(
      describe_exchange(Exchanged::kAllReduce, out, x, memory, memory_bytes, rank, ranks, timeout),
      x, "all_reduce");
}

void reduce_scatter(Tensor& out, const Tensor& x, int64_t memory, int64_t memory_bytes,
                    int64_t rank, int64_t ranks, double timeout) {
  launch(describe_exchange(Exchanged::kReduceScatter, out, x, memory, memory_bytes, rank, ranks,
                           timeout),
         x, "reduce_scatter");
}

void all_gather(Tensor& out, const Tensor& x, int64_t memory, int64_t memory_bytes, int64_t rank,
                int64_t ranks, double timeout) {
  launch(
      describe_exchange(Exchanged::kAllGather, out, x, memory, memory_bytes, rank, ranks, timeout),
      x, "all_gather");
}

void all_reduce_rmsnorm_fp8(Tensor& out, std::optional<Tensor> scales, const Tensor& x,
                            std::optional<Tensor> residual, const Tensor& weight,
                            std::optional<Tensor> scale, double eps, int64_t group_size,
                            double scale_ub, bool ue8m0, double weight_offset,
                            std::optional<Tensor> addend, int64_t memory, int64_t memory_bytes,
                            int64_t rank, int64_t ranks, double timeout) {
  const char* const op = "all_reduce_rmsnorm_fp8";
  RmsnormFp8Args norm = describe_norm(out, scales, x, residual, weight, scale, eps, group_size,
                                      scale_ub, ue8m0, weight_offset, addend);
  require_contiguous(x, "x");
  ExchangeArgs exchange;
  exchange.what = Exchanged::kAllReduce;
  exchange.dtype = norm.x_dtype;
  exchange.elements = norm.rows * norm.hidden;
  exchange.x = norm.x;
  require_group(exchange, memory, memory_bytes, rank, ranks, timeout);
  if (is_empty(norm, scales)) return;

  run_or_record(x, [exchange, norm, x, op](const Context& context) {
    bool fused = false;
    check_status(launch_all_reduce_rmsnorm_fp8(exchange, norm, context, fused), op);
    if (fused) return;
    Workspace workspace;
    ExchangeArgs sum = exchange;
    sum.out = workspace.allocate(sum.elements * size_of(sum.dtype), x);
    check_status(launch_exchange(sum, context), op);
    RmsnormFp8Args of_sum = norm;
    of_sum.x = sum.out;
    of_sum.x_stride = of_sum.hidden;
    check_status(launch_rmsnorm_fp8(of_sum, context), op);
  });
}

void linear_all_reduce(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_a,
                       std::optional<Tensor> scale_w, std::optional<Tensor> bias, int64_t memory,
                       int64_t memory_bytes, int64_t rank, int64_t ranks, double timeout) {
  const char* const op = "linear_all_reduce";
  const SummedProduct described = describe_summed_product(out, a, w, scale_a, scale_w, bias, memory,
                                                          memory_bytes, rank, ranks, timeout);
  if (described.sum.elements == 0) return;
  run_or_record(a, [described, a, op](const Context& context) {
    SummedProduct call = described;
    Group group{};
    if (call.sends(context, group, op)) {
      check_status(launch_gemm_to_peers(call.product, group, context), op);
      call.sum.x = nullptr;
    } else {
      launch_product(call.product, a, context);
    }
    check_status(launch_exchange(call.sum, context), op);
  });
}

std::string linear_all_reduce_configs(const Tensor& out, const Tensor& a, const Tensor& w,
                                      std::optional<Tensor> scale_a, std::optional<Tensor> scale_w,
                                      int64_t memory, int64_t memory_bytes, int64_t rank,
                                      int64_t ranks) {
  SummedProduct call = describe_summed_product(out, a, w, scale_a, scale_w, std::nullopt, memory,
                                               memory_bytes, rank, ranks, 0.0);
  if (call.sum.elements == 0) return "apart";
  return with_context(a, [&](const Context& context) {
    Group group{};
    return call.sends(context, group, "linear_all_reduce") ? "sent" : "apart";
  });
}
