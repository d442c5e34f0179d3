// The sum of the ranks' elements on a CPU; compiled once for each instruction set
// (common/cpu/isa.h). Every element is read once and written once: memory decides.

#include "../../blocks/rows/cpu/block.h"

template <class T>
void sum_elements(const void* const* inputs, int ranks, void* result, int64_t begin, int64_t end) {
  T* const out = static_cast<T*>(result);
  int64_t i = begin;
  for (; i + kBlock <= end; i += kBlock) {
    Block total = all(0.0f);
    for (int r = 0; r < ranks; ++r) {
      total = total + load_block<T>(static_cast<const T*>(inputs[r]) + i);
    }
    store_block<T>(out + i, total);
  }
  if (i == end) return;
  const int n = static_cast<int>(end - i);
  Block total = all(0.0f);
  for (int r = 0; r < ranks; ++r) {
    total = total + load_block<T>(static_cast<const T*>(inputs[r]) + i, n);
  }
  store_block<T>(out + i, total, n);
}

// Elements [begin, end) of `result`: the sum of those of the inputs, in their order, from 0 on.
inline void sum_of_ranks(DType dtype, const void* const* inputs, int ranks, void* result,
                         int64_t begin, int64_t end) {
  if (dtype == DType::kFloat32) return sum_elements<float>(inputs, ranks, result, begin, end);
  if (dtype == DType::kFloat16) return sum_elements<Float16>(inputs, ranks, result, begin, end);
  return sum_elements<BFloat16>(inputs, ranks, result, begin, end);
}
