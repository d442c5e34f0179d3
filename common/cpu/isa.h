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

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

namespace rocm_kernels {
namespace cpu {

// kAvx2 means AVX2, FMA, F16C and BMI2; kAvx512 means these and AVX-512 F, BW, DQ, VL, BF16 and
// VBMI (Zen 4, Sapphire Rapids and later).
enum class Isa { kPortable, kNeon, kAvx2, kAvx512 };

static inline Isa best_isa() {
#if defined(__x86_64__)
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c") || !__builtin_cpu_supports("bmi2")) {
    return Isa::kPortable;
  }
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
  return avx512 ? Isa::kAvx512 : Isa::kAvx2;
#elif defined(__aarch64__) && defined(__ARM_NEON)
  return Isa::kNeon;
#else
  return Isa::kPortable;
#endif
}

static inline Isa chosen_isa() {
  const Isa best = best_isa();
  const char* const wanted = std::getenv("ROCM_KERNELS_CPU_ISA");
  if (wanted == nullptr || wanted[0] == '\0' || std::strcmp(wanted, "avx512") == 0) return best;
  if (std::strcmp(wanted, "portable") == 0) return Isa::kPortable;
  if (std::strcmp(wanted, "avx2") == 0) return best == Isa::kAvx512 ? Isa::kAvx2 : best;
  throw std::runtime_error(
      std::string("ROCM_KERNELS_CPU_ISA must be portable, avx2 or avx512, or not set, got ") +
      wanted);
}

// The best instruction set that this machine has. The environment variable ROCM_KERNELS_CPU_ISA
// (portable, avx2 or avx512) lowers it, never raises it, so that one machine can test every path;
// another value throws std::runtime_error. Read once, at the first call.
static inline Isa isa() {
  // Internal linkage: two versions of this package in one process must not share the variable.
  static const Isa chosen = chosen_isa();
  return chosen;
}

}  // namespace cpu
}  // namespace rocm_kernels

// `name` as the body compiled for this machine defines it; all copies have one type.
#if defined(__x86_64__)
#define ROCM_KERNELS_CPU_SELECT(name)                              \
  (::rocm_kernels::cpu::isa() == ::rocm_kernels::cpu::Isa::kAvx512 \
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
