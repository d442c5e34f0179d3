// Partial sums of workgroups that share a tile: left in memory, counted by a ticket, added by the
// last to arrive, in the order of k. No float atomics: every order of arrival gives the same bits.
#pragma once

#include "../../../common/cdna/mfma.h"
#include "../../../common/gpu/launch_name.h"

namespace rocm_kernels::cdna {

// Host: a launch's name for tickets, whose low 8 bits count: see arrives_last().
inline uint64_t next_ticket_name() { return next_launch_name() >> 8; }

#if ROCM_KERNELS_CDNA

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
// Every wave calls it between its stores and the barrier before one thread counts the workgroup's
// arrival. That thread's release waits for the stores of its own wave; the barrier waits for none,
// for within a workgroup their order is enough.
ROCM_KERNELS_DEVICE void await_published() { __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent"); }
// After the barrier behind which all know that theirs is the last workgroup. It needs no fence: the
// counting thread has acquired, and no cache is asked.
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
  // The expected value is first taken to be what the last arrival finds: the others wait for that
  // one, which so needs a single exchange.
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

}  // namespace rocm_kernels::cdna
