// Which instruction set the CPU kernels run on, and how one source is compiled for several.
//
// All sources of a build section share one set of compiler flags, and the package must run on any
// x86-64 or aarch64 machine, so a kernel's body is compiled once for each instruction set in one
// translation unit and chosen at run time. A launcher says
//
//   #define ROCM_KERNELS_CPU_BODY "../../kernel/cpu/body.h"   // as seen from common/cpu/
//   #include "each_isa.h"
//
// and each_isa.h includes the body inside rocm_kernels::cpu::portable, cpu::avx2, ... in turn,
// with the instruction set switched on. The launcher picks one of the copies:
//
//   ROCM_KERNELS_CPU_SELECT(run_rows)(args, begin, end);
//
// Traps that a body must avoid: it has no include guard, nor has what it includes; it calls no
// inline function or template of the standard library (the linker may keep the AVX-512 copy for all
// callers); it has no lambdas (they do not inherit the instruction set everywhere).
#pragma once

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

// Whether the compiler knows AMX's tiles in bfloat16 (GCC has them in the first header, clang in
// the second); the system that lends them must be Linux.
#if defined(__x86_64__) && defined(__linux__) && \
    (__has_include(<amxbf16intrin.h>) || __has_include(<amxintrin.h>))
#define ROCM_KERNELS_CPU_HAS_AMX 1
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define ROCM_KERNELS_CPU_HAS_AMX 0
#endif

namespace rocm_kernels {
namespace cpu {

// kAvx2 means AVX2, FMA, F16C and BMI2; kAvx512 means these and AVX-512 F, BW, DQ, VL, BF16 and
// VBMI (Zen 4, Sapphire Rapids and later); kAmx these and AMX's tiles in bfloat16, lent by Linux.
enum class Isa { kPortable, kNeon, kAvx2, kAvx512, kAmx };

#if ROCM_KERNELS_CPU_HAS_AMX
// Whether the processor has tiles, the system saves their state, and lends them to this process:
// Linux does so on request, because a thread that uses them has 8 KiB more to save.
static inline bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  if ((edx & kBf16) == 0 || (edx & kTile) == 0) return false;
  uint32_t low, high;  // AVX-512 was found, so XGETBV is there
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr uint32_t kTileConfig = 1u << 17, kTileData = 1u << 18;
  if ((low & kTileConfig) == 0 || (low & kTileData) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileDataFeature = 18;  // ARCH_REQ_XCOMP_PERM
  return syscall(SYS_arch_prctl, kRequestPermission, kTileDataFeature) == 0;
}
#else
static inline bool has_amx() { return false; }
#endif

static inline Isa best_isa() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c") || !__builtin_cpu_supports("bmi2")) {
    return Isa::kPortable;
  }
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  if (!avx512) return Isa::kAvx2;
  return has_amx() ? Isa::kAmx : Isa::kAvx512;
#elif defined(__aarch64__) && defined(__ARM_NEON)
  return Isa::kNeon;
#else
  return Isa::kPortable;
#endif
}

static inline Isa chosen_isa() {
  const Isa best = best_isa();
  const char* const wanted = std::getenv("ROCM_KERNELS_CPU_ISA");
  if (wanted == nullptr || wanted[0] == '\0' || std::strcmp(wanted, "amx") == 0) return best;
  if (std::strcmp(wanted, "portable") == 0) return Isa::kPortable;
  if (std::strcmp(wanted, "avx2") == 0) return best > Isa::kAvx2 ? Isa::kAvx2 : best;
  if (std::strcmp(wanted, "avx512") == 0) return best > Isa::kAvx512 ? Isa::kAvx512 : best;
  throw std::runtime_error(
      std::string("ROCM_KERNELS_CPU_ISA must be portable, avx2, avx512 or amx, or not set, got ") +
      wanted);
}

// The best instruction set that this machine has. The environment variable ROCM_KERNELS_CPU_ISA
// (portable, avx2, avx512 or amx) lowers it, never raises it, so that one machine can test every
// path; another value throws std::runtime_error. Read once, at the first call.
static inline Isa isa() {
  // Internal linkage: two versions of this package in one process must not share the variable.
  static const Isa chosen = chosen_isa();
  return chosen;
}

}  // namespace cpu
}  // namespace rocm_kernels

// `name` as the body compiled for this machine defines it; all copies have one type. What is done
// in tiles has a source of its own (each_isa.h), so beside it AMX means AVX-512.
#if defined(__x86_64__)
#define ROCM_KERNELS_CPU_SELECT(name)                              \
  (::rocm_kernels::cpu::isa() >= ::rocm_kernels::cpu::Isa::kAvx512 \
       ? &::rocm_kernels::cpu::avx512::name                        \
   : ::rocm_kernels::cpu::isa() == ::rocm_kernels::cpu::Isa::kAvx2 \
       ? &::rocm_kernels::cpu::avx2::name                          \
       : &::rocm_kernels::cpu::portable::name)
#elif defined(__aarch64__) && defined(__ARM_NEON)
#define ROCM_KERNELS_CPU_SELECT(name)                            \
  (::rocm_kernels::cpu::isa() == ::rocm_kernels::cpu::Isa::kNeon \
       ? &::rocm_kernels::cpu::neon::name                        \
       : &::rocm_kernels::cpu::portable::name)
#else
#define ROCM_KERNELS_CPU_SELECT(name) (&::rocm_kernels::cpu::portable::name)
#endif
