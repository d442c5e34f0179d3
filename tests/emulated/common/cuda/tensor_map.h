// What a map says, for copies by the host.
#pragma once

#include <cstdint>

#include "common/core/context.h"
#include "common/cuda/tma.cuh"

namespace rocm_kernels {
namespace cuda {

struct StackOfHeads {
  const void* data;
  int64_t sequences, heads, rows, columns;
  int64_t sequence_stride_bytes, head_stride_bytes, row_stride_bytes;
};
struct StackOfGroups {
  const void* data;
  int64_t sequences, groups, heads, rows, columns;
  int64_t sequence_stride_bytes, head_stride_bytes, row_stride_bytes;
};
inline Status make_heads_map(CUtensorMap& map, const StackOfHeads& stack, int box_rows) {
  map = {static_cast<uint8_t*>(const_cast<void*>(stack.data)),
         {stack.columns, 1, stack.rows, stack.heads, stack.sequences},
         {0, stack.row_stride_bytes, stack.head_stride_bytes, stack.sequence_stride_bytes},
         box_rows};
  return nullptr;
}
inline Status make_head_groups_map(CUtensorMap& map, const StackOfGroups& stack, int box_rows) {
  map = {static_cast<uint8_t*>(const_cast<void*>(stack.data)),
         {stack.columns, stack.heads, stack.rows, stack.groups, stack.sequences},
         {stack.head_stride_bytes, stack.row_stride_bytes, stack.head_stride_bytes * stack.heads,
          stack.sequence_stride_bytes},
         box_rows};
  return nullptr;
}

}  // namespace cuda
}  // namespace rocm_kernels
