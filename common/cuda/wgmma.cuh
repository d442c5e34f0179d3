// The warpgroup's matrix instructions (wgmma) of sm_90a: 64 rows x 8 to 256 columns of FP8,
// bfloat16 or float16, both operands in shared memory, sums in registers.
//
//   sum[t][0..1]  row lane / 4 of the warp's 16, columns 8 * t + 2 * (lane % 4) and the next
//   sum[t][2..3]  the row 8 further
#pragma once

#include <cstdint>

#include "../core/dtype.h"
#include "swizzle.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kWgmmaRows = 64;
constexpr int kWgmmaKBytes = 32;  // K bytes of one instruction

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
// An operand in shared memory: lines of 128 bytes of K, swizzled (swizzle.h). Its description's
// high word is the same for all, so a kernel that has no registers to spare keeps the low one
// alone.
constexpr uint64_t kWgmmaLayout = uint64_t{kPatternBytes >> 4} << 32 | uint64_t{1} << 62;
__device__ __forceinline__ uint32_t wgmma_operand_low(uint32_t address) {
  return ((address & 0x3FFFF) >> 4) | 1u << 16;
}
__device__ __forceinline__ uint64_t wgmma_operand(uint32_t address) {
  return wgmma_operand_low(address) | kWgmmaLayout;
}
// What to add for an operand so much further on; it never carries beyond the low word.
__device__ constexpr uint64_t wgmma_offset(int bytes) { return bytes >> 4; }

#define ROCM_KERNELS_SUMS_4(i) "+f"(sum[i][0]), "+f"(sum[i][1]), "+f"(sum[i][2]), "+f"(sum[i][3])
#define ROCM_KERNELS_SUMS_8(i) ROCM_KERNELS_SUMS_4(i), ROCM_KERNELS_SUMS_4(i + 1)
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
      : "l"(rows), "l"(columns), "r"(add))
#define ROCM_KERNELS_WGMMA_WIDTH(N, REGISTERS, AT_ROWS, AT_COLUMNS, AT_ADD, ...)                  \
  template <DType kType>                                                                          \
  __device__ __forceinline__ void wgmma(float (&sum)[N / 8][4], uint64_t rows, uint64_t columns,  \
                                        int add) {                                                \
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

ROCM_KERNELS_WGMMA_WIDTH(8, "%0, %1, %2, %3", "%4", "%5", "%6", ROCM_KERNELS_SUMS_4(0))
ROCM_KERNELS_WGMMA_WIDTH(16, "%0, %1, %2, %3, %4, %5, %6, %7", "%8", "%9", "%10",
                         ROCM_KERNELS_SUMS_8(0))
ROCM_KERNELS_WGMMA_WIDTH(32, "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15",
                         "%16", "%17", "%18", ROCM_KERNELS_SUMS_16(0))
ROCM_KERNELS_WGMMA_WIDTH(
    48,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23",
    "%24", "%25", "%26", ROCM_KERNELS_SUMS_16(0), ROCM_KERNELS_SUMS_8(4))
ROCM_KERNELS_WGMMA_WIDTH(
    64,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
    "%32", "%33", "%34", ROCM_KERNELS_SUMS_32(0))
ROCM_KERNELS_WGMMA_WIDTH(
    80,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
    "%34, %35, %36, %37, %38, %39",
    "%40", "%41", "%42", ROCM_KERNELS_SUMS_32(0), ROCM_KERNELS_SUMS_8(8))
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
    160,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
    "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
    "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
    "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "
    "%77, %78, %79",
    "%80", "%81", "%82", ROCM_KERNELS_SUMS_64(0), ROCM_KERNELS_SUMS_16(16))
ROCM_KERNELS_WGMMA_WIDTH(
    192,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
    "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
    "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
    "%62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, "
    "%77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "
    "%92, %93, %94, %95",
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
// The same of 16-bit types with the rows in registers, and columns whose K lies across lines: in
// shared memory boxes of 64 columns, a line of 128 bytes for each k, `box_bytes` apart.
//
//   rows[0], rows[1]  row lane / 4 of the warp's 16, and the row 8 further: k 2 * (lane % 4) and
//                     the next
//   rows[2], rows[3]  the same, k 8 further
__device__ __forceinline__ uint64_t wgmma_transposed_operand(uint32_t address, int box_bytes) {
  return kWgmmaLayout | uint64_t{static_cast<uint32_t>(box_bytes) >> 4} << 16 |
         ((address & 0x3FFFF) >> 4);
}
#define ROCM_KERNELS_WGMMA_ROWS(N, REGISTERS, A0, A1, A2, A3, AT_COLUMNS, ...)                    \
  template <DType kType>                                                                          \
  __device__ __forceinline__ void wgmma(float (&sum)[N / 8][4], const uint32_t (&rows)[4],        \
                                        uint64_t columns) {                                       \
    if constexpr (kType == DType::kBFloat16) {                                                    \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" REGISTERS         \
                   "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " AT_COLUMNS ", 1, 1, 1, 1;"             \
                   : __VA_ARGS__                                                                  \
                   : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(columns));       \
    } else {                                                                                      \
      asm volatile("wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, {" A0 \
                   ", " A1 ", " A2 ", " A3 "}, " AT_COLUMNS ", 1, 1, 1, 1;"                       \
                   : __VA_ARGS__                                                                  \
                   : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "l"(columns));       \
    }                                                                                             \
  }
ROCM_KERNELS_WGMMA_ROWS(
    64,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31",
    "%32", "%33", "%34", "%35", "%36", ROCM_KERNELS_SUMS_32(0))
ROCM_KERNELS_WGMMA_ROWS(
    96,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47",
    "%48", "%49", "%50", "%51", "%52", ROCM_KERNELS_SUMS_32(0), ROCM_KERNELS_SUMS_16(8))
ROCM_KERNELS_WGMMA_ROWS(
    128,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63",
    "%64", "%65", "%66", "%67", "%68", ROCM_KERNELS_SUMS_64(0))
ROCM_KERNELS_WGMMA_ROWS(
    192,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95",
    "%96", "%97", "%98", "%99", "%100", ROCM_KERNELS_SUMS_64(0), ROCM_KERNELS_SUMS_32(16))
ROCM_KERNELS_WGMMA_ROWS(
    256,
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, "
    "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, "
    "%34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, "
    "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, "
    "%66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, "
    "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, "
    "%98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, "
    "%125, %126, %127",
    "%128", "%129", "%130", "%131", "%132", ROCM_KERNELS_SUMS_64(0), ROCM_KERNELS_SUMS_64(16))
#undef ROCM_KERNELS_WGMMA_ROWS
#undef ROCM_KERNELS_WGMMA
#undef ROCM_KERNELS_WGMMA_WIDTH
#undef ROCM_KERNELS_LIST
#undef ROCM_KERNELS_SUMS_4
#undef ROCM_KERNELS_SUMS_8
#undef ROCM_KERNELS_SUMS_16
#undef ROCM_KERNELS_SUMS_32
#undef ROCM_KERNELS_SUMS_64

// The same, of operands that are kept as their low words.
template <DType kType, int kTiles>
__device__ __forceinline__ void wgmma_by_low_words(float (&sum)[kTiles][4], uint32_t rows,
                                                   uint32_t columns, int add) {
  wgmma<kType>(sum, kWgmmaLayout | rows, kWgmmaLayout | columns, add);
}

// Before registers that an instruction will write are handed to it; and after the last of a group.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// Waits until at most kPending groups are under way.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
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

// Both, for the sums of a group that is not under way any more.
template <int kPending, int kTiles>
__device__ __forceinline__ void wgmma_wait(float (&sum)[kTiles][4]) {
  wgmma_wait<kPending>();
  wgmma_pin(sum);
}

// Registers a thread of this warpgroup may have from here on.
template <int kCount>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void drop_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
