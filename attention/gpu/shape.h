// What a choice of attention's config depends on, to keep the choice by: a call asks twice, for the
// scratch and for the launch. No HIP or CUDA header.
#pragma once

#include <algorithm>

#include "../../blocks/product/config_fields.h"
#include "../attention.h"

namespace rocm_kernels {

// Of a page of keys; 0 where they are not in pages. A table without a size is none.
inline int64_t size_of_pages(const AttentionArgs& args) {
  return args.block_table == nullptr ? 0 : args.page_size;
}

struct AttentionShape {
  int32_t batch, heads, kv_heads, head_dim, head_dim_v;
  int32_t max_seqlen_q, max_seqlen_k, total_q;
  int32_t total_k;  // 0 but of ragged keys
  int32_t window_left, window_right;
  int32_t q_dtype, kv_dtype;
  int32_t page_size;  // 0: keys are not in pages
  int32_t alignment;  // what the backend asks of addresses and strides, a bit each

  static AttentionShape of(const AttentionArgs& args, int32_t alignment) {
    // What does not fit is beyond all that a config's check allows.
    const auto fit = [](int64_t value) {
      return static_cast<int32_t>(std::min(value, (int64_t{1} << 31) - 1));
    };
    return {fit(args.batch),
            fit(args.heads),
            fit(args.kv_heads),
            fit(args.head_dim),
            fit(args.head_dim_v),
            fit(args.max_seqlen_q),
            fit(args.max_seqlen_k),
            fit(args.total_q),
            fit(args.total_k),
            fit(args.window_left),
            fit(args.window_right),
            static_cast<int32_t>(args.q_dtype),
            static_cast<int32_t>(args.kv_dtype),
            fit(size_of_pages(args)),
            alignment};
  }
};

constexpr ConfigField<AttentionShape> kAttentionShapeFields[] = {
    {"batch", &AttentionShape::batch},
    {"heads", &AttentionShape::heads},
    {"kv_heads", &AttentionShape::kv_heads},
    {"head_dim", &AttentionShape::head_dim},
    {"head_dim_v", &AttentionShape::head_dim_v},
    {"max_seqlen_q", &AttentionShape::max_seqlen_q},
    {"max_seqlen_k", &AttentionShape::max_seqlen_k},
    {"total_q", &AttentionShape::total_q},
    {"total_k", &AttentionShape::total_k},
    {"window_left", &AttentionShape::window_left},
    {"window_right", &AttentionShape::window_right},
    {"q_dtype", &AttentionShape::q_dtype},
    {"kv_dtype", &AttentionShape::kv_dtype},
    {"page_size", &AttentionShape::page_size},
    {"alignment", &AttentionShape::alignment},
};

}  // namespace rocm_kernels
