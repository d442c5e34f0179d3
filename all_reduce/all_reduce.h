// Exchanges between the ranks of a group, r = 0 .. ranks - 1, each with an x of its own:
//
//   all_reduce       out[i] = sum_r x_r[i]                    the same bits on every rank
//   reduce_scatter   out[i] = sum_r x_r[rank * count + i]     count: elements of out
//   all_gather       out[r * count + i] = x_r[i]              count: elements of x
//
// A sum begins with 0 and adds the ranks' elements in their order, in float32; it is rounded once,
// to x's type. So a sum is never -0, and whether a rank's zeros have a sign does not matter.
//
// Each backend defines launch_exchange once: cpu/all_reduce.cpp, and gpu/exchange.h for
// cuda/all_reduce.cu and cdna/all_reduce.hip.
#pragma once

#include "../blocks/peers/memory.h"
#include "../blocks/rows/norm_args.h"
#include "../common/core/context.h"
#include "../common/core/dtype.h"

namespace rocm_kernels {

enum class Exchanged : int32_t { kAllReduce, kReduceScatter, kAllGather };

struct ExchangeArgs {
  Exchanged what = Exchanged::kAllReduce;
  int64_t elements = 0;            // of x
  const void* x = nullptr;         // [elements], contiguous; nullptr: a product has sent it
  void* out = nullptr;             // contiguous; may be x where they have as many elements
  DType dtype = DType::kBFloat16;  // float32, float16 or bfloat16

  void* memory = nullptr;  // this rank's, see blocks/peers/memory.h
  int64_t data_bytes = 0;  // of it, behind the header
  int32_t rank = 0;
  int32_t ranks = 0;
  double timeout = 0.0;  // seconds after which a rank that did not come is given up
};

// Caller's duty: elements > 0, a whole number of `ranks` for kReduceScatter; 2 to 8 ranks, all of
// which make the same calls of one memory in the same order, one after the other.
Status launch_exchange(const ExchangeArgs& args, const Context& context);

// Whether a product may send its result itself, to the mailboxes of this group, its own too, where
// launch_exchange() of no x then sums (launch_gemm_to_peers, gemm/gemm.h): if all_reduce of an x of
// this size is one shot on all ranks. A rank that does not send has the same done by
// launch_exchange() of its x; the others do not see which it was.
Status ask_whether_to_send(const ExchangeArgs& args, const Context& context, Group& group,
                           bool& sends);

// out = rmsnorm_fp8 of all_reduce's result, to the bit (blocks/rows/norm_args.h; norm.x is
// exchange.x, whose out is not used), if that is one kernel here: `fused` says so. If not nothing
// has been launched, and the caller launches one after the other.
Status launch_all_reduce_rmsnorm_fp8(const ExchangeArgs& exchange, const RmsnormFp8Args& norm,
                                     const Context& context, bool& fused);

}  // namespace rocm_kernels
