// What headers need of TMA's to be read; and what tensor_map.h says, for copies.
#pragma once

#include <cstdint>

// Of 16-bit elements [sequence][group][row][head][column], strides in bytes.
struct CUtensorMap {
  uint8_t* data;
  int64_t sizes[5], strides[4];  // the fastest first; of all but columns
  int box_rows;
};

namespace rocm_kernels {
namespace cuda {

enum class L2Policy : int { kNoHint, kEvictFirst, kEvictLast };

}  // namespace cuda
}  // namespace rocm_kernels
