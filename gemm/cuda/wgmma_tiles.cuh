// The warpgroup's matrix instructions of more widths and types than common/cuda/wgmma.cuh has: 64
// rows x 16 to 256 columns of FP8, bfloat16 or float16; operands and sums as there.
#pragma once

#include <cstdint>

#include "../../common/core/dtype.h"
#include "../../common/cuda/wgmma.cuh"

namespace rocm_kernels {
namespace cuda {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// The low word of an operand's description (wgmma_operand()). Offsets add up: they never carry.
__device__ __forceinline__ uint32_t wgmma_operand_low(uint32_t address) {
  return ((address & 0x3FFFF) >> 4) | 1u << 16;
}
// The high word: patterns are 1024 bytes apart, 128-byte swizzle.
constexpr uint64_t kWgmmaLayout = uint64_t{1024 >> 4 | 1 << 30} << 32;

// Waits until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait_all() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from reading sums before the wait that stands above.
template <int kTiles>
__device__ __forceinline__ void wgmma_pin(float (&sum)[kTiles][4]) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(sum[i][j])::"memory");
  }
}

#define ROCM_KERNELS_SUMS_8(i)                                                             \
  "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3]), "+f"(sum[i + 1][0]), \
      "+f"(sum[i + 1][1]), "+f"(sum[i + 1][2]), "+f"(sum[i + 1][3])
#define ROCM_KERNELS_SUMS_16(i) ROCM_KERNELS_SUMS_8(i), ROCM_KERNELS_SUMS_8(i + 2)
#define ROCM_KERNELS_SUMS_32(i) ROCM_KERNELS_SUMS_16(i), ROCM_KERNELS_SUMS_16(i + 4)
#define ROCM_KERNELS_SUMS_64(i) ROCM_KERNELS_SUMS_32(i), ROCM_KERNELS_SUMS_32(i + 8)

// The sums of `rows` x `columns` over 32 bytes of K, asynchronously; if not `add`, what sum holds
// is dropped. SHAPE and TYPES are the instruction's, REGISTERS its list, LAST what follows the
// flags.
#define ROCM_KERNELS_WGMMA(N, SHAPE, TYPES, REGISTERS, LAST, AT_ROWS, AT_COLUMNS, AT_ADD, SUMS) \
  asm volatile(                                                                                 \
      "{\n"                                                                                     \
      ".reg .pred add;\n"                                                                       \
      "setp.ne.b32 add, " AT_ADD                                                                \
      ", 0;\n"                                                                                  \
      "wgmma.mma_async.sync.aligned.m64n" #N SHAPE ".f32." TYPES " {" REGISTERS "}, " AT_ROWS   \
      ", " AT_COLUMNS ", add, 1, 1" LAST                                                        \
      ";\n"                                                                                     \
      "}"                                                                                       \
      : SUMS                                                                                    \
      : "l"(kWgmmaLayout | rows), "l"(kWgmmaLayout | columns), "r"(add))
#define ROCM_KERNELS_WGMMA_WIDTH(N, REGISTERS, AT_ROWS, AT_COLUMNS, AT_ADD, ...)                  \
  template <DType kType>                                                                          \
  __device__ __forceinline__ void wgmma_tile(float (&sum)[N / 8][4], uint32_t rows,               \
                                             uint32_t columns, int add) {                         \
    if constexpr (kType == DType::kFloat8E4M3FN) {                                                \
      ROCM_KERNELS_WGMMA(N, "k32", "e4m3.e4m3", REGISTERS, "", AT_ROWS, AT_COLUMNS, AT_ADD,       \
                         ROCM_KERNELS_LIST(__VA_ARGS__));                                         \
    } else if constexpr (kType == DType::kBFloat16) {                                             \
      ROCM_KERNELS_WGMMA(N, "k16", "bf16.bf16", REGISTERS, ", 0, 0", AT_ROWS, AT_COLUMNS, AT_ADD, \
                         ROCM_KERNELS_LIST(__VA_ARGS__));                                         \
    } else {                                                                                      \
      ROCM_KERNELS_WGMMA(N, "k16", "f16.f16", REGISTERS, ", 0, 0", AT_ROWS, AT_COLUMNS, AT_ADD,   \
                         ROCM_KERNELS_LIST(__VA_ARGS__));                                         \
    }                                                                                             \
  }
#define ROCM_KERNELS_LIST(...) __VA_ARGS__

ROCM_KERNELS_WGMMA_WIDTH(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10",
                         ROCM_KERNELS_SUMS_8(0))
ROCM_KERNELS_WGMMA_WIDTH(32, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                         "%16", "%17", "%18", ROCM_KERNELS_SUMS_16(0))
ROCM_KERNELS_WGMMA_WIDTH(
    64,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
    "%32", "%33", "%34", ROCM_KERNELS_SUMS_32(0))
ROCM_KERNELS_WGMMA_WIDTH(
    96,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
    "%48", "%49", "%50", ROCM_KERNELS_SUMS_32(0), ROCM_KERNELS_SUMS_16(8))
ROCM_KERNELS_WGMMA_WIDTH(
    128,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
    "%64", "%65", "%66", ROCM_KERNELS_SUMS_64(0))
ROCM_KERNELS_WGMMA_WIDTH(
    192,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95",
    "%96", "%97", "%98", ROCM_KERNELS_SUMS_64(0), ROCM_KERNELS_SUMS_32(16))
ROCM_KERNELS_WGMMA_WIDTH(
    256,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, "
    "%126, %127",
    "%128", "%129", "%130", ROCM_KERNELS_SUMS_64(0), ROCM_KERNELS_SUMS_64(16))
#undef ROCM_KERNELS_WGMMA
#undef ROCM_KERNELS_WGMMA_WIDTH
#undef ROCM_KERNELS_LIST
#undef ROCM_KERNELS_SUMS_8
#undef ROCM_KERNELS_SUMS_16
#undef ROCM_KERNELS_SUMS_32
#undef ROCM_KERNELS_SUMS_64
#endif

}  // namespace cuda
}  // namespace rocm_kernels
