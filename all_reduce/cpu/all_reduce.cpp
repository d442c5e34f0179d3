// Exchanges between processes on the CPU: each rank shows a copy of its x in memory that all share,
// then reads those of all others. blocks/peers/cpu/exchange.h says why two buffers suffice.
#include "../all_reduce.h"

#include <cstring>

#include "../../blocks/peers/cpu/exchange.h"
#include "../../common/core/fp8.h"
#include "../../common/core/half.h"
#include "../../common/core/math.h"
#include "../../common/cpu/isa.h"
#include "../../common/cpu/parallel.h"

#define ROCM_KERNELS_CPU_BODY "../../all_reduce/cpu/sum_body.h"
#include "../../common/cpu/each_isa.h"

namespace rocm_kernels {

namespace {

// Elements worth a thread of their own: below, waking it costs more than it saves.
constexpr int64_t kElementsPerThread = 32768;

void copy(void* to, const void* from, int64_t bytes, const Context& context) {
  cpu::parallel_for(context, bytes, kElementsPerThread * 4, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                static_cast<size_t>(end - begin));
  });
}

}  // namespace

Status launch_exchange(const ExchangeArgs& args, const Context& context) {
  const int64_t bytes = args.elements * size_of(args.dtype);
  cpu::Exchange exchange(args.memory, args.data_bytes, args.rank, args.ranks);
  const uint64_t call = static_cast<uint64_t>(args.elements) << 8 |
                        static_cast<uint64_t>(args.dtype) << 4 | static_cast<uint64_t>(args.what);
  if (const Status error = exchange.begin(bytes, call)) return error;
  copy(exchange.buffer(), args.x, bytes, context);
  if (const Status error = exchange.finish(args.timeout)) return error;

  if (args.what == Exchanged::kAllGather) {
    for (int r = 0; r < args.ranks; ++r) {
      copy(static_cast<char*>(args.out) + r * bytes, exchange.buffer(r), bytes, context);
    }
    return nullptr;
  }
  const bool scatters = args.what == Exchanged::kReduceScatter;
  const int64_t count = scatters ? args.elements / args.ranks : args.elements;
  const int64_t first = scatters ? args.rank * count : 0;
  const void* inputs[kMostRanks];
  for (int r = 0; r < args.ranks; ++r) {
    inputs[r] = exchange.buffer(r) + first * size_of(args.dtype);
  }
  const auto sum = ROCM_KERNELS_CPU_SELECT(sum_of_ranks);
  cpu::parallel_for(context, count, kElementsPerThread, [&](int64_t begin, int64_t end) {
    sum(args.dtype, inputs, args.ranks, args.out, begin, end);
  });
  return nullptr;
}

Status ask_whether_to_send(const ExchangeArgs&, const Context&, Group&, bool& sends) {
  sends = false;
  return nullptr;
}

// The sum of a row goes through memory in either case: all ranks' rows must be there first.
Status launch_all_reduce_rmsnorm_fp8(const ExchangeArgs&, const RmsnormFp8Args&, const Context&,
                                     bool& fused) {
  fused = false;
  return nullptr;
}

}  // namespace rocm_kernels
