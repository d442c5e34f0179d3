// rope_and_cache on the CPU: a thread takes heads of consecutive tokens. The arithmetic is in
// rope_and_cache_body.h.
#include "../rope_and_cache.h"

#include "../../common/core/fp8.h"
#include "../../common/core/half.h"
#include "../../common/core/math.h"
#include "../../common/cpu/isa.h"
#include "../../common/cpu/parallel.h"

#define ROCM_KERNELS_CPU_BODY "../../rope_and_cache/cpu/rope_and_cache_body.h"
#include "../../common/cpu/each_isa.h"

namespace rocm_kernels {
namespace {

// Null, or what leads out. Reading a few integers a token is nothing beside its heads.
Status check_tokens(const RopeAndCacheArgs& args) {
  for (int64_t b = 0; b < args.batch; ++b) {
    for (int64_t row = 0; row < args.rows; ++row) {
      if (args.positions.data != nullptr) {
        const int64_t position = position_of(args, b, row);
        if (position < 0 || position >= args.max_positions) {
          return "positions must be among the rows of cos and sin, and one is not";
        }
      }
      if (place_of(args, b, row).leads_out) {
        return "new rows must fit the cache, and one leads out of it: by its slot, its place in "
               "the sequence, or the block table";
      }
    }
  }
  return nullptr;
}

}  // namespace

Status launch_rope_and_cache(const RopeAndCacheArgs& args, const Context& context) {
  const int64_t heads = args.heads + 2 * args.kv_heads, tokens = args.batch * args.rows;
  if (tokens * heads == 0) return nullptr;
  if (const Status error = check_tokens(args)) return error;
  // Elements worth a thread of their own: below, waking it costs more than it saves.
  constexpr int64_t kElementsPerThread = 16384;
  const auto run = ROCM_KERNELS_CPU_SELECT(rope_and_cache_heads);
  cpu::parallel_for(context, tokens * heads, ceil_div(kElementsPerThread, args.head_dim),
                    [&](int64_t begin, int64_t end) { run(args, begin, end); });
  return nullptr;
}

}  // namespace rocm_kernels
