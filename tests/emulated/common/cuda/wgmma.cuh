// wgmma of FP8, of 64 rows and some eights of columns, of operands without swizzle, by the threads
// of a warpgroup each for what it gets. What it reads is read as late as the instruction may: when
// it is waited for.
#pragma once

#include <cstring>
#include <functional>
#include <vector>

#include "common/core/dtype.h"
#include "common/core/fp8.h"
#include "common/cuda/shared_memory.cuh"

inline thread_local int emulated_thread = 0;  // of the warpgroup
inline thread_local std::vector<std::vector<std::function<void()>>> emulated_groups(1);
inline thread_local std::function<void()> emulated_convergence;  // of the warp's lanes

namespace rocm_kernels {
namespace cuda {

constexpr int kWgmmaRows = 64;

constexpr uint64_t wgmma_offset(int bytes) { return bytes >> 4; }

template <DType kType, size_t kEights>
void wgmma(float (&sum)[kEights][4], uint64_t rows, uint64_t columns, int add) {
  static_assert(kType == DType::kFloat8E4M3FN, "wgmma: FP8 alone is emulated");
  emulated_groups.back().push_back([&sum, rows, columns, add] {
    const auto code = [](uint64_t operand, int row, int k) {
      const auto field = [&](int shift) {
        return static_cast<int>(operand >> shift & 0x3FFF) * 16;
      };
      const int at = field(0) + row / 8 * field(32) + row % 8 * 16 + k / 16 * field(16) + k % 16;
      return fp8_to_float<false>(emulated_shared[at]);
    };
    const int lane = emulated_thread % 32;
    for (size_t i = 0; i < 4 * kEights; ++i) {
      const int eight = static_cast<int>(i / 4), j = static_cast<int>(i % 4);
      const int row = emulated_thread / 32 * 16 + lane / 4 + j / 2 * 8;
      const int column = eight * 8 + lane % 4 * 2 + j % 2;
      float found = add ? sum[eight][j] : 0.0f;
      for (int k = 0; k < 32; ++k) found += code(rows, row, k) * code(columns, column, k);
      sum[eight][j] = found;
    }
  });
}

inline void wgmma_fence() {}
inline void wgmma_commit() { emulated_groups.emplace_back(); }
template <int kPending>
void wgmma_wait() {
  while (static_cast<int>(emulated_groups.size()) > kPending + 1) {
    for (const auto& instruction : emulated_groups.front()) instruction();
    emulated_groups.erase(emulated_groups.begin());
  }
  emulated_convergence();
}
template <int kTiles>
void wgmma_pin(float (&)[kTiles][4]) {}

}  // namespace cuda
}  // namespace rocm_kernels
