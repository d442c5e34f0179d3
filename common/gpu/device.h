// What device code of both GPU families is written in: element types, 16-byte memory access, FP8
// conversion. One source serves clang (HIP) and nvcc (CUDA); where they differ, they differ here.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#else
#include <hip/hip_runtime.h>
#endif

#include "../core/fp8.h"

#define ROCM_KERNELS_DEVICE __device__ __forceinline__

// Bounds the registers of a kernel so that blocks of `threads` fill a compute unit with `resident`
// threads. HIP's second argument counts waves a SIMD (4 SIMDs of 64 lanes), CUDA's blocks an SM.
#if defined(__CUDACC__)
#define ROCM_KERNELS_LAUNCH_BOUNDS(threads, resident) \
  __launch_bounds__(threads, (resident) / (threads))
#else
#define ROCM_KERNELS_LAUNCH_BOUNDS(threads, resident) __launch_bounds__(threads, (resident) / 256)
#endif

// FP8 dialects that the target being compiled converts in hardware. Device passes only: on the host
// both are 0, so nothing that the host sees may depend on them.
#if defined(__gfx940__) || defined(__gfx941__) || defined(__gfx942__)
#define ROCM_KERNELS_NATIVE_FNUZ 1
#else
#define ROCM_KERNELS_NATIVE_FNUZ 0
#endif
#if defined(__gfx950__) || defined(__GFX12__) || (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890)
#define ROCM_KERNELS_NATIVE_OCP 1
#else
#define ROCM_KERNELS_NATIVE_OCP 0
#endif

namespace rocm_kernels {

#if defined(__CUDACC__)
constexpr bool kNvidia = true;
#else
constexpr bool kNvidia = false;
#endif

// The dialect that matrix instructions of the target take, and thus what models ask for on it.
__device__ constexpr bool kPreferredFnuz = ROCM_KERNELS_NATIVE_FNUZ;

// ---- Lanes ------------------------------------------------------------------------------------

// Lanes of a wave (a warp on CUDA) on the target being compiled. __device__ only, on purpose: in
// the host pass the target's macros are missing and the answer would be wrong. Hosts ask
// current_device() in launch.h.
#if defined(__CUDA_ARCH__) || defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
__device__ constexpr int kWaveSize = 32;
#else
__device__ constexpr int kWaveSize = 64;
#endif

// ---- Element types ----------------------------------------------------------------------------

#if defined(__CUDACC__)
using float16 = __half;
using bfloat16 = __nv_bfloat16;
#else
// clang's own types: HIP's fp16 and bf16 headers tie the source to a ROCm release.
using float16 = _Float16;
using bfloat16 = __bf16;
#endif

template <typename T>
ROCM_KERNELS_DEVICE float to_float(T value) {
  return static_cast<float>(value);
}

// Rounds to nearest even.
template <typename T>
ROCM_KERNELS_DEVICE T from_float(float value) {
  return static_cast<T>(value);
}

// ---- Memory -----------------------------------------------------------------------------------

// `kCount` elements that travel together. T is trivially copyable.
template <typename T, int kCount>
struct alignas(sizeof(T) * kCount) Vec {
  static_assert((kCount & (kCount - 1)) == 0, "Vec: count must be a power of two");
  T data[kCount];
  ROCM_KERNELS_DEVICE T& operator[](int i) { return data[i]; }
  ROCM_KERNELS_DEVICE const T& operator[](int i) const { return data[i]; }
};

// How a line that is touched is to be treated by the caches.
enum class Touch {
  kOnce,   // streamed: do not keep it, so that what is used again stays
  kAgain,  // other blocks read it too (weights, scales)
};

namespace detail {
#if defined(__CUDACC__)
template <int kBytes>
struct RawOf;
template <>
struct RawOf<4> {
  using type = uint32_t;
};
template <>
struct RawOf<8> {
  using type = uint2;
};
template <>
struct RawOf<16> {
  using type = uint4;
};
#else
// clang's non-temporal builtins take vectors, not structs.
template <int kBytes>
struct RawOf {
  typedef uint32_t type __attribute__((ext_vector_type(kBytes / 4)));
};
template <>
struct RawOf<4> {
  using type = uint32_t;
};
// gfx9 and later load 16 bytes from any element-aligned address in one instruction.
template <int kBytes>
struct UnalignedRawOf {
  typedef typename RawOf<kBytes>::type type __attribute__((aligned(1)));
};
#endif
}  // namespace detail

// Vector accesses need their natural alignment on NVIDIA only. Elements are always aligned.
constexpr bool kNeedsAlignedVectors = kNvidia;

// Loads 4, 8 or 16 bytes.
template <Touch kTouch, typename V>
ROCM_KERNELS_DEVICE V load(const void* address) {
  using Raw = typename detail::RawOf<sizeof(V)>::type;
  Raw raw;
#if defined(__CUDACC__)
  // Not through the read-only path (ld.global.nc): residuals are read and written by one kernel.
  if constexpr (kTouch == Touch::kOnce && sizeof(V) == 16) {
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "l"(address));
  } else {
    raw = *static_cast<const Raw*>(address);
  }
#else
  using Source = typename detail::UnalignedRawOf<sizeof(V)>::type;
  if constexpr (kTouch == Touch::kOnce) {
    raw = __builtin_nontemporal_load(static_cast<const Source*>(address));
  } else {
    raw = *static_cast<const Source*>(address);
  }
#endif
  V result;
  __builtin_memcpy(&result, &raw, sizeof(V));
  return result;
}

// Loads 16 bytes, or touches no memory and gives anything: where that matters the caller selects,
// which costs less than zeroing registers before every load.
template <Touch kTouch, typename V>
ROCM_KERNELS_DEVICE V load_if(bool condition, const void* address) {
  static_assert(sizeof(V) == 16, "load_if: V must have 16 bytes");
#if defined(__CUDACC__)
  // Predicated by hand: nvcc merges a conditional load with its zeros right after it, and so waits
  // for each load before it issues the next.
  uint4 raw;
  if constexpr (kTouch == Touch::kOnce) {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@p ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "=&r"(raw.x), "=&r"(raw.y), "=&r"(raw.z), "=&r"(raw.w)
        : "l"(address), "r"(static_cast<uint32_t>(condition)));
  } else {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "setp.ne.u32 p, %5, 0;\n"
        "mov.u32 %0, 0;\nmov.u32 %1, 0;\nmov.u32 %2, 0;\nmov.u32 %3, 0;\n"
        "@p ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n"
        "}"
        : "=&r"(raw.x), "=&r"(raw.y), "=&r"(raw.z), "=&r"(raw.w)
        : "l"(address), "r"(static_cast<uint32_t>(condition)));
  }
  V result;
  __builtin_memcpy(&result, &raw, sizeof(V));
  return result;
#else
  uint32_t word[4];
#if defined(__AMDGCN__)
  // "Defined" as whatever the registers hold.
  asm("" : "=v"(word[0]), "=v"(word[1]), "=v"(word[2]), "=v"(word[3]));
#endif
  V result;
  __builtin_memcpy(&result, word, sizeof(V));
  if (condition) result = load<kTouch, V>(address);
  return result;
#endif
}

// Stores 4, 8 or 16 bytes.
template <Touch kTouch, typename V>
ROCM_KERNELS_DEVICE void store(void* address, const V& value) {
  using Raw = typename detail::RawOf<sizeof(V)>::type;
  Raw raw;
  __builtin_memcpy(&raw, &value, sizeof(V));
#if defined(__CUDACC__)
  if constexpr (kTouch == Touch::kOnce) {
    __stcs(static_cast<Raw*>(address), raw);
  } else {
    *static_cast<Raw*>(address) = raw;
  }
#else
  using Target = typename detail::UnalignedRawOf<sizeof(V)>::type;
  if constexpr (kTouch == Touch::kOnce) {
    __builtin_nontemporal_store(raw, static_cast<Target*>(address));
  } else {
    *static_cast<Target*>(address) = raw;
  }
#endif
}

// ---- What the optimiser may not see through ---------------------------------------------------

// A value that is the same for the whole wave, as if computed right here: keeps what depends on it
// inside its loop, where a multiplication is cheaper than the registers of a running pointer.
ROCM_KERNELS_DEVICE int opaque_uniform(int value) {
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(value));
#elif defined(__AMDGCN__)
  asm volatile("" : "+s"(value));
#endif
  return value;
}

// The same for a value of each lane. Waits for the load that brings it, so place it where the value
// is needed: without it, a conversion of loaded data moves up to the load and waits there.
template <typename T>
ROCM_KERNELS_DEVICE T opaque(T value) {
  static_assert(sizeof(T) == 4, "opaque: T must be one register");
#if defined(__CUDA_ARCH__) || defined(__AMDGCN__)
  uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
#if defined(__CUDA_ARCH__)
  asm volatile("" : "+r"(bits));
#else
  asm volatile("" : "+v"(bits));
#endif
  __builtin_memcpy(&value, &bits, sizeof(bits));
#endif
  return value;
}

// Has an argument of the kernel loaded here, with those that are used here: each 64 bytes of them
// are else a load from memory of their own, awaited at their first use. Does nothing on NVIDIA.
template <typename T>
ROCM_KERNELS_DEVICE void ask_for(T argument) {
#if defined(__AMDGCN__)
  asm volatile("" ::"s"(argument));
#endif
}

// On AMD no instruction moves across: loads before it are all under way when what follows begins.
// clang else spreads them among what uses them, which spares registers and waits for each in turn.
ROCM_KERNELS_DEVICE void keep_order() {
#if defined(__AMDGCN__)
  __builtin_amdgcn_sched_barrier(0);
#endif
}

// ---- FP8 --------------------------------------------------------------------------------------

// Four floats to four FP8 codes, the first in the low byte: round to nearest even, saturate at the
// largest finite value (infinities too), NaN stays NaN.
template <bool kFnuz>
ROCM_KERNELS_DEVICE uint32_t fp8x4_from_float(float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && ROCM_KERNELS_NATIVE_OCP
  if constexpr (!kFnuz) {
    uint32_t codes;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}"
        : "=r"(codes)
        : "f"(a), "f"(b), "f"(c), "f"(d));
    return codes;
  }
#elif ROCM_KERNELS_NATIVE_FNUZ || ROCM_KERNELS_NATIVE_OCP
  if constexpr (kFnuz ? ROCM_KERNELS_NATIVE_FNUZ : ROCM_KERNELS_NATIVE_OCP) {
    // The instruction turns what is out of range into NaN, so clamp first; but v_med3_f32, as
    // v_min and v_max, turns NaN into a bound, so put NaN back.
    constexpr float kLargest = kFnuz ? 240.0f : 448.0f;
    float v[4] = {a, b, c, d};
    const bool nan = __builtin_isunordered(a, b) || __builtin_isunordered(c, d);
    for (float& x : v) x = __builtin_amdgcn_fmed3f(x, kLargest, -kLargest);
    if (__builtin_expect(nan, 0)) {
      const float given[4] = {a, b, c, d};
      for (int i = 0; i < 4; ++i) v[i] = __builtin_isnan(given[i]) ? given[i] : v[i];
    }
    int codes = __builtin_amdgcn_cvt_pk_fp8_f32(v[0], v[1], 0, false);
    codes = __builtin_amdgcn_cvt_pk_fp8_f32(v[2], v[3], codes, true);
    return static_cast<uint32_t>(codes);
  }
#endif
  return fp8_from_float<kFnuz>(a) | fp8_from_float<kFnuz>(b) << 8 | fp8_from_float<kFnuz>(c) << 16 |
         static_cast<uint32_t>(fp8_from_float<kFnuz>(d)) << 24;
}

// The reverse: exact.
template <bool kFnuz>
ROCM_KERNELS_DEVICE void fp8x4_to_float(uint32_t codes, float (&values)[4]) {
#if ROCM_KERNELS_NATIVE_FNUZ || (ROCM_KERNELS_NATIVE_OCP && !defined(__CUDA_ARCH__))
  if constexpr (kFnuz ? ROCM_KERNELS_NATIVE_FNUZ : ROCM_KERNELS_NATIVE_OCP) {
    const auto low = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(codes), false);
    const auto high = __builtin_amdgcn_cvt_pk_f32_fp8(static_cast<int>(codes), true);
    values[0] = low[0], values[1] = low[1], values[2] = high[0], values[3] = high[1];
    return;
  }
#endif
  for (int i = 0; i < 4; ++i) {
    values[i] = fp8_to_float<kFnuz>(static_cast<uint8_t>(codes >> (8 * i)));
  }
}

}  // namespace rocm_kernels
