#include "../../all_reduce/all_reduce.h"

#include "../../blocks/peers/memory.h"
#include "../../rmsnorm_fp8/rmsnorm_fp8.h"
#include "../torch_binding.h"
#include "checks.h"
#include "launch.h"
#include "norm.h"

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
