// The warpgroup's matrix instructions (wgmma) of sm_90a: 64 rows x 32, 48 or 64 columns, both
// operands in shared memory, sums in registers.
//
//   sum[t][0..1]  row lane / 4 of the warp's 16, columns 8 * t + 2 * (lane % 4) and the next
//   sum[t][2..3]  the row 8 further
#pragma once

#include <cstdint>

#include "swizzle.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kWgmmaRows = 64;
constexpr int kWgmmaKBytes = 32;  // K bytes of one instruction

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// An operand in shared memory: lines of 128 bytes of K, swizzled (swizzle.h). What lies further
// along K within the line has a higher address.
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address) {
  constexpr uint64_t kPatternStride = uint64_t{kPatternBytes >> 4} << 32;
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62;
  return ((address & 0x3FFFF) >> 4) | (uint64_t{1} << 16) | kPatternStride | kSwizzle128;
}
__device__ constexpr uint64_t wgmma_offset(int bytes) { return bytes >> 4; }

// 64 rows times 32, 48 or 64 columns of FP8 over 32 elements of K, asynchronously; what sum holds
// is added to, or dropped.
#define ROCM_KERNELS_SUMS(i)                                                               \
  "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3]), "+f"(sum[i + 1][0]), \
      "+f"(sum[i + 1][1]), "+f"(sum[i + 1][2]), "+f"(sum[i + 1][3])
template <bool kAdd>
__device__ __forceinline__ void wgmma(float (&sum)[4][4], uint64_t rows, uint64_t columns) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %18, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
      "%16, %17, add, 1, 1;\n"
      "}"
      : ROCM_KERNELS_SUMS(0), ROCM_KERNELS_SUMS(2)
      : "l"(rows), "l"(columns), "n"(kAdd));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma(float (&sum)[6][4], uint64_t rows, uint64_t columns) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %26, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n48k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23}, "
      "%24, %25, add, 1, 1;\n"
      "}"
      : ROCM_KERNELS_SUMS(0), ROCM_KERNELS_SUMS(2), ROCM_KERNELS_SUMS(4)
      : "l"(rows), "l"(columns), "n"(kAdd));
}
template <bool kAdd>
__device__ __forceinline__ void wgmma(float (&sum)[8][4], uint64_t rows, uint64_t columns) {
  asm volatile(
      "{\n"
      ".reg .pred add;\n"
      "setp.ne.b32 add, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "%32, %33, add, 1, 1;\n"
      "}"
      : ROCM_KERNELS_SUMS(0), ROCM_KERNELS_SUMS(2), ROCM_KERNELS_SUMS(4), ROCM_KERNELS_SUMS(6)
      : "l"(rows), "l"(columns), "n"(kAdd));
}
#undef ROCM_KERNELS_SUMS

// Before registers that an instruction will write are handed to it; and after the last of a group.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups are under way; `sum` is of one that is not.
template <int kPending, int kTiles>
__device__ __forceinline__ void wgmma_wait(float (&sum)[kTiles][4]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(sum[i][j])::"memory");
  }
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
