// Memory that several GPUs access while their kernels run: accesses that neither a cache holds back
// nor the compiler, and a clock to wait by. Single words of 4 bytes arrive whole; nothing is said
// of their order.
#pragma once

#include "vector.h"

namespace rocm_kernels {

// Stores a vector to memory of another GPU.
ROCM_KERNELS_DEVICE void store_to_peer(void* address, const Vector& v) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
               "r"(v.word[0]), "r"(v.word[1]), "r"(v.word[2]), "r"(v.word[3])
               : "memory");
#else
  uint64_t halves[2];
  __builtin_memcpy(halves, v.word, sizeof(halves));
  uint64_t* const to = static_cast<uint64_t*>(address);
  __hip_atomic_store(to, halves[0], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
  __hip_atomic_store(to + 1, halves[1], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
}

// Loads a vector that another GPU may be storing.
ROCM_KERNELS_DEVICE Vector load_from_peer(const void* address) {
  Vector v;
#if defined(__CUDACC__)
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.word[0]), "=r"(v.word[1]), "=r"(v.word[2]), "=r"(v.word[3])
               : "l"(address)
               : "memory");
#else
  const uint64_t* const from = static_cast<const uint64_t*>(address);
  const uint64_t halves[2] = {
      __hip_atomic_load(from, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM),
      __hip_atomic_load(from + 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM)};
  __builtin_memcpy(v.word, halves, sizeof(halves));
#endif
  return v;
}

// Tells the host a number.
ROCM_KERNELS_DEVICE void store_to_host(uint64_t* address, uint64_t value) {
#if defined(__CUDACC__)
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(address), "l"(value) : "memory");
#else
  __hip_atomic_store(address, value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
}

// A number that others may be storing.
ROCM_KERNELS_DEVICE uint64_t load_number(const uint64_t* address) {
  uint64_t value;
#if defined(__CUDACC__)
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(address) : "memory");
#else
  value = __hip_atomic_load(address, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
  return value;
}

// Puts a number there in place of 0; false: another was quicker.
ROCM_KERNELS_DEVICE bool claim_number(uint64_t* address, uint64_t value) {
#if defined(__CUDACC__)
  auto* const words = reinterpret_cast<unsigned long long*>(address);
  return atomicCAS_system(words, 0ull, static_cast<unsigned long long>(value)) == 0;
#else
  uint64_t expected = 0;
  return __hip_atomic_compare_exchange_strong(address, &expected, value, __ATOMIC_RELAXED,
                                              __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
#endif
}

// A clock of constant rate.
constexpr double kTicksPerSecond = kNvidia ? 1e9 : 1e8;
ROCM_KERNELS_DEVICE uint64_t ticks() {
#if defined(__CUDA_ARCH__)
  uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
#elif defined(__AMDGCN__)
  return __builtin_readsteadycounter();
#else
  return 0;
#endif
}

// Leaves the compute unit to others for a moment.
ROCM_KERNELS_DEVICE void pause() {
#if defined(__AMDGCN__)
  __builtin_amdgcn_s_sleep(1);
#endif
}

}  // namespace rocm_kernels
