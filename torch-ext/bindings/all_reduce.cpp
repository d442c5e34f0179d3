#include "../../all_reduce/all_reduce.h"

#include "../../blocks/peers/memory.h"
#include "../torch_binding.h"
#include "checks.h"
#include "launch.h"

using namespace rocm_kernels;

namespace {

void require_contiguous(const Tensor& tensor, const char* name) {
  require(tensor.is_contiguous(), name, " must be contiguous; call .contiguous() first");
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
  require(ranks >= 2 && ranks <= kMostRanks, "ranks must be 2 to 8, got ", ranks);
  require(rank >= 0 && rank < ranks, "rank must be below ranks, got ", rank, " of ", ranks);
  const int64_t x_parts = what == Exchanged::kAllGather ? ranks : 1;
  const int64_t out_parts = what == Exchanged::kReduceScatter ? ranks : 1;
  require(out.numel() * out_parts == args.elements * x_parts, "out must have ", x_parts,
          " elements for ", out_parts, " of x on ", ranks, " ranks, got ", out.numel(), " and ",
          args.elements);
  require(memory > 0 && memory % 64 == 0, "memory must be the address of a Communicator's, got ",
          memory);
  if (out.data_ptr() != x.data_ptr() || out.numel() != x.numel()) {
    require_no_overlap(out, "out", x, "x");
  }
  args.x = x.data_ptr();
  args.out = out.data_ptr();
  args.memory = reinterpret_cast<void*>(memory);
  args.data_bytes = memory_bytes - kPeerHeaderBytes;
  args.rank = static_cast<int32_t>(rank);
  args.ranks = static_cast<int32_t>(ranks);
  args.timeout = timeout;
  return args;
}

void launch(const ExchangeArgs& args, const Tensor& x, const char* op) {
  if (args.elements == 0) return;
  check_status(
      with_context(x, [&](const Context& context) { return launch_exchange(args, context); }), op);
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
