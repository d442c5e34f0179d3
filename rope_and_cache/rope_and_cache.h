// What lies between the projection of queries, keys and values and attention: norms of q and k,
// rotary embedding, and new keys and values rounded to their places in a cache.
//
// For each token and head, with n = head_dim and half = rotary_dim / 2, in float32:
//
//   y[j]   = x[j] * rsqrt(mean_j(x[j]^2) + eps) * (weight[j] + weight_offset)     q and k, where
//            they have a weight; else, and for v, y = x
//   z[a_i] = y[a_i] * cos[i] - y[b_i] * sin[i]                                    i < half, q and k
//   z[b_i] = y[b_i] * cos[i] + y[a_i] * sin[i]
//            (a_i, b_i) = (i, i + half), or (2 i, 2 i + 1) if interleaved; z = y elsewhere
//   out    = z rounded once to x's type: q to `out`, k to `k_out`
//   cache  = z rounded once to the cache's type, FP8 as z * (1 / scale), saturated: k and v
//
// Each backend defines launch_rope_and_cache once.
#pragma once

#include "../blocks/heads/args.h"
#include "../common/core/context.h"

namespace rocm_kernels {

// Caller's duty: sizes and dtypes as above. On the CPU a place or position that leads out is an
// error before anything is written. On GPUs nothing is written to such a place, and such a position
// gives NaN.
Status launch_rope_and_cache(const RopeAndCacheArgs& args, const Context& context);

}  // namespace rocm_kernels
