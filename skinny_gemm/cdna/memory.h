// How the skinny GEMM of CDNA3 and CDNA4 reaches memory: bounded buffer loads, the block's barrier,
// sums that cross XCDs and the ticket that counts them.
#pragma once

#include "../../common/gpu/device.h"

// The targets whose matrix instructions these kernels are written for. Device passes only.
#if defined(__gfx942__) || defined(__gfx950__)
#define SKINNY_GEMM_CDNA 1
#else
#define SKINNY_GEMM_CDNA 0
#endif

namespace rocm_kernels {

using Words = uint32_t __attribute__((ext_vector_type(4)));     // 16 bytes of one row
using Accumulator = float __attribute__((ext_vector_type(4)));  // a lane's part of a 16 x 16 tile

#if SKINNY_GEMM_CDNA

// A buffer, and the offset that is outside of every buffer: a load from there yields zeros and
// fetches nothing. It stands for rows beyond M and N, steps beyond K and granules beyond a wave's
// part, so that the loops have no branches. Offsets within a tile stay below it (the launcher
// checks).
using Buffer = __amdgpu_buffer_rsrc_t;
constexpr uint32_t kOutside = 0x80000000u;
ROCM_KERNELS_DEVICE Buffer buffer_at(const void* base) {
  constexpr int kBytes = 0x7FFFFFF0;
  constexpr int kRaw = 0x00020000;  // 32-bit data, no stride, no swizzle
  return __builtin_amdgcn_make_buffer_rsrc(const_cast<void*>(base), 0, kBytes, kRaw);
}

enum class Cache : int { kKeep = 0, kNonTemporal = 2 };
template <Cache kCache>
ROCM_KERNELS_DEVICE Words load_words(Buffer buffer, uint32_t lane_offset, uint32_t wave_offset) {
  return __builtin_amdgcn_raw_buffer_load_b128(buffer, lane_offset, wave_offset,
                                               static_cast<int>(kCache));
}
ROCM_KERNELS_DEVICE float load_float(Buffer buffer, uint32_t lane_offset, uint32_t wave_offset) {
  return __builtin_bit_cast(
      float, __builtin_amdgcn_raw_buffer_load_b32(buffer, lane_offset, wave_offset, 0));
}

// The 16 bytes at `byte` of a row that has `row_bytes`, zeros beyond: the last lane inside looks at
// the row's last 16 bytes and shifts off what is not its own.
ROCM_KERNELS_DEVICE Words load_tail(Buffer buffer, uint32_t row_offset, int byte, int row_bytes) {
  if (row_bytes < 16) {
    Words words = {};
#pragma unroll
    for (int i = 0; i < 15; ++i) {
      const uint32_t offset = i < row_bytes && byte == 0 ? row_offset + i : kOutside;
      words[i / 4] |=
          static_cast<uint32_t>(__builtin_amdgcn_raw_buffer_load_b8(buffer, offset, 0, 0))
          << (i % 4 * 8);
    }
    return words;
  }
  const int last = row_bytes - 16;
  const int shift = byte > last ? (byte - last) * 8 : 0;  // bits; more than 120: nothing is left
  const uint32_t offset = shift < 128 ? row_offset + (byte < last ? byte : last) : kOutside;
  const Words words = load_words<Cache::kKeep>(buffer, offset, 0);
  uint64_t low = static_cast<uint64_t>(words.y) << 32 | words.x;
  uint64_t high = static_cast<uint64_t>(words.w) << 32 | words.z;
  if (shift >= 64) {
    low = high >> (shift & 63);
    high = 0;
  } else if (shift > 0) {
    low = low >> shift | high << (64 - shift);
    high >>= shift;
  }
  return Words{static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
               static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32)};
}

// All waves of the block are here, and see what each other wrote to LDS. (The barrier of older HIP
// headers is a function that is not inlined: a call would spill scalar registers.)
ROCM_KERNELS_DEVICE void block_barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

// Partial sums cross XCDs, whose L2s do not see each other's lines: they are written through and
// read past them, which is what agent scope asks of a relaxed atomic.
ROCM_KERNELS_DEVICE void publish(float* target, Accumulator sum) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float first = sum[2 * half], second = sum[2 * half + 1];
    const uint64_t pair = static_cast<uint64_t>(__builtin_bit_cast(uint32_t, second)) << 32 |
                          __builtin_bit_cast(uint32_t, first);
    __hip_atomic_store(reinterpret_cast<uint64_t*>(target) + half, pair, __ATOMIC_RELAXED,
                       __HIP_MEMORY_SCOPE_AGENT);
  }
}
ROCM_KERNELS_DEVICE Accumulator collect(float* source) {
  Accumulator sum;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint64_t pair = __hip_atomic_load(reinterpret_cast<uint64_t*>(source) + half,
                                            __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    sum[2 * half] = __builtin_bit_cast(float, static_cast<uint32_t>(pair));
    sum[2 * half + 1] = __builtin_bit_cast(float, static_cast<uint32_t>(pair >> 32));
  }
  return sum;
}

// Counts an arrival; true for the last of `expected` <= 255. The ticket's memory need not be
// zeroed: a word that does not bear this launch's name (upper 56 bits) counts as none arrived, and
// the last arrival leaves 0. Names are drawn at random, so a false start needs 56 chance bits; a
// graph that replays one name finds the zeros of the replay before.
ROCM_KERNELS_DEVICE bool arrives_last(uint64_t* ticket, uint64_t launch, int expected) {
  // A guess that is right for the last, whose one trip to memory everyone waits for.
  uint64_t seen = (launch << 8) + expected - 1, next;
  do {
    next = (seen >> 8 == launch ? seen : launch << 8) + 1;
  } while (!__hip_atomic_compare_exchange_strong(ticket, &seen, next, __ATOMIC_ACQ_REL,
                                                 __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT));
  if ((next & 0xFF) != static_cast<uint64_t>(expected)) return false;
  __hip_atomic_store(ticket, 0, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  return true;
}

#endif

}  // namespace rocm_kernels
