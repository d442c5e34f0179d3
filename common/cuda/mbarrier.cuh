// Barriers in shared memory (mbarrier) of sm_90 and later, which count arrivals and copied bytes;
// and a pipeline's place in its stages.
//
// A pipeline has two for each stage. Producers wait for `empty`, announce their bytes at `full` and
// start the copies, which complete it; consumers wait for `full`, read, and arrive at `empty`.
#pragma once

#include <cstdint>

namespace rocm_kernels {
namespace cuda {

constexpr int kMbarrierBytes = 8;

// The stage that comes next, and the parity of its barriers' phase. Consumers begin with parity 0;
// producers with 1, because an empty stage's first phase counts as complete.
struct PipelineState {
  int stage;
  int parity;

  __device__ __forceinline__ void advance(int num_stages) {
    if (++stage == num_stages) stage = 0, parity ^= 1;
  }
};

#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// The barriers of a pipeline of `stages`: how many arrive at each of `full`, and at each of
// `empty`.
__device__ __forceinline__ void init_pipeline(uint32_t full, uint32_t empty, int stages,
                                              uint32_t at_full, uint32_t at_empty) {
  for (int i = 0; i < stages; ++i) {
    mbarrier_init(full + i * kMbarrierBytes, at_full);
    mbarrier_init(empty + i * kMbarrierBytes, at_empty);
  }
}

// After the last mbarrier_init(), before the barrier that shows them to the block or the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same barrier, or place, of block `rank` of the cluster, which may be this one; and an arrival
// at such a barrier.
__device__ __forceinline__ uint32_t mbarrier_in_cluster(uint32_t barrier, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
  return there;
}
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces bytes that asynchronous copies will bring.
__device__ __forceinline__ void mbarrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Writes to `place` of block `rank` of the cluster, and counts as 4 bytes brought at its `barrier`.
__device__ __forceinline__ void store_async_in_cluster(uint32_t place, float value,
                                                       uint32_t barrier, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there, tells;\n"
      "mapa.shared::cluster.u32 there, %0, %3;\n"
      "mapa.shared::cluster.u32 tells, %2, %3;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], %1, [tells];\n"
      "}\n" ::"r"(place),
      "r"(__float_as_uint(value)), "r"(barrier), "r"(rank)
      : "memory");
}

// The same of 8 and of 16 bytes.
__device__ __forceinline__ void store_async_in_cluster(uint32_t place, float2 value,
                                                       uint32_t barrier, int rank) {
  const uint32_t there = mbarrier_in_cluster(place, rank);
  const uint32_t tells = mbarrier_in_cluster(barrier, rank);
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 [%0], {%1, %2}, [%3];" ::"r"(
          there),
      "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(tells)
      : "memory");
}
__device__ __forceinline__ void store_async_in_cluster(uint32_t place, float4 value,
                                                       uint32_t barrier, int rank) {
  const uint32_t there = mbarrier_in_cluster(place, rank);
  const uint32_t tells = mbarrier_in_cluster(barrier, rank);
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(there),
      "r"(__float_as_uint(value.x)), "r"(__float_as_uint(value.y)), "r"(__float_as_uint(value.z)),
      "r"(__float_as_uint(value.w)), "r"(tells)
      : "memory");
}

__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase is over; it waits for a while. What was written before is seen if so.
__device__ __forceinline__ bool mbarrier_is_over(uint32_t barrier, uint32_t parity) {
  uint32_t is_over;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}\n"
      : "=r"(is_over)
      : "r"(barrier), "r"(parity)
      : "memory");
  return is_over != 0;
}

// mbarrier_wait() where another block of the cluster has written what is waited for.
__device__ __forceinline__ void mbarrier_wait_for_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Orders this thread's accesses to shared memory before those of asynchronous copies, which go
// another way (the async proxy) and do not heed barriers alone.
__device__ __forceinline__ void fence_async_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
