// Rows of a sequence for a KV head: its queries, each with the query heads that share the KV head.
#pragma once

#include <cstdint>

namespace rocm_kernels {
namespace cuda {

struct RowGroups {
  int heads;           // query heads of a KV head
  uint32_t magic = 0;  // ceil(2^32 / heads), for quotients of up to 2^32 / heads

  static RowGroups of(int64_t heads) {
    constexpr uint64_t kOne = uint64_t{1} << 32;
    return {static_cast<int>(heads), static_cast<uint32_t>((kOne + heads - 1) / heads)};
  }

  // Of a row, its query; the rest is the head among those of the KV head.
  __device__ __forceinline__ int query_of(int row) const {
    return heads == 1 ? row : static_cast<int>(__umulhi(static_cast<uint32_t>(row), magic));
  }
};

}  // namespace cuda
}  // namespace rocm_kernels
