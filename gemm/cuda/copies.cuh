// Copies to shared memory that gemm needs beside common/cuda/tma.cuh: two-dimensional boxes, boxes
// for a whole cluster, and small pieces by cp.async; and the registers of a warpgroup.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "../../common/cuda/mbarrier.cuh"
#include "../../common/cuda/shared_memory.cuh"

namespace rocm_kernels {
namespace cuda {

// What becomes of a line in L2: nothing special, gone first (read once), kept longest.
enum class L2Use : int32_t { kNormal, kStream, kKeep };

// A barrier among `threads` of the block, whose number is not a constant; 0 is __syncthreads().
__device__ __forceinline__ void block_part_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The first `bytes` of 16 bytes to shared memory, and zeros behind them. Asynchronous.
__device__ __forceinline__ void copy_vector(uint32_t to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
// Ends a group of copies; waits until at most kPending groups are under way.
__device__ __forceinline__ void copies_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

#if __CUDA_ARCH__ >= 900
// Arrives at the same barrier of another block of the cluster.
__device__ __forceinline__ void mbarrier_arrive_in_cluster(uint32_t barrier, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(there) : "memory");
}

// Arrives once this thread's earlier copies of words and vectors have landed.
__device__ __forceinline__ void mbarrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Four bytes to shared memory; zero where `there` is false. Asynchronous.
__device__ __forceinline__ void copy_word(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(there ? 4 : 0)
               : "memory");
}

__device__ __forceinline__ uint64_t l2_policy_of(L2Use use) {
  uint64_t policy;
  if (use == L2Use::kStream) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else if (use == L2Use::kKeep) {
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  } else {
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

// A box of a matrix of bytes: `x` bytes along a row, row `y`.
__device__ __forceinline__ void load_box_2d(const CUtensorMap& map, int x, int y, uint32_t to,
                                            uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}

// The same to this place in every block of the cluster that `mask` names, at each one's barrier.
__device__ __forceinline__ void load_box_2d_in_cluster(const CUtensorMap& map, int x, int y,
                                                       uint32_t to, uint32_t barrier, uint16_t mask,
                                                       uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(mask), "l"(policy)
      : "memory");
}

__device__ __forceinline__ void prefetch_box_2d(const CUtensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(x),
               "r"(y)
               : "memory");
}

// Registers a thread of this warpgroup may have from here on.
template <int kCount>
__device__ __forceinline__ void raise_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void drop_registers() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
