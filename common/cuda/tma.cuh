// TMA of sm_90 and later, device side: boxes of a matrix from memory to shared
// memory. tensor_map.h describes the matrix.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace rocm_kernels {
namespace cuda {

// What L2 does with the lines that a copy brings. Requests with a hint are not joined: on an H200
// SMs that ask for the same lines at about the same time are given them by one read of L2, but only
// if their requests have no hint, whatever it says (docs/kernels/gemm_journal.md).
enum class L2Policy : int32_t {
  kNoHint,
  kEvictFirst,  // read once: weights that meet one tile of tokens
  kEvictLast,   // those tokens, which every block reads
};

#if __CUDA_ARCH__ >= 900
// What the copies below take; 0 for no hint.
__device__ __forceinline__ uint64_t l2_policy(L2Policy kind) {
  uint64_t policy = 0;
  if (kind == L2Policy::kEvictFirst) {
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  } else if (kind == L2Policy::kEvictLast) {
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  }
  return policy;
}

// The box at (0, y, z) of a three-dimensional map, to shared memory at `to`; its bytes count at
// `barrier`. One thread's work.
__device__ __forceinline__ void load_box(const CUtensorMap& map, int y, int z, uint32_t to,
                                         uint32_t barrier, uint64_t policy) {
  if (policy == 0) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {0, %2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(y), "r"(z), "r"(barrier)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {0, %2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

// The box at (x, y) of a two-dimensional map of bytes: `x` bytes along a row, row `y`.
__device__ __forceinline__ void load_box_2d(const CUtensorMap& map, int x, int y, uint32_t to,
                                            uint32_t barrier, uint64_t policy) {
  if (policy == 0) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "l"(policy)
      : "memory");
}

// The box at (x, y, z) of a three-dimensional map: `x` elements along row y of matrix z.
__device__ __forceinline__ void load_box_3d(const CUtensorMap& map, int x, int y, int z,
                                            uint32_t to, uint32_t barrier, uint64_t policy) {
  if (policy == 0) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}

// The box at (x, y, z, w) of a four-dimensional map.
__device__ __forceinline__ void load_box_4d(const CUtensorMap& map, int x, int y, int z, int w,
                                            uint32_t to, uint32_t barrier, uint64_t policy) {
  if (policy == 0) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier), "l"(policy)
      : "memory");
}

// A box of make_groups_map()'s: from byte `x` of the rows of group `group` of matrix `matrix` on.
__device__ __forceinline__ void load_group_box(const CUtensorMap& map, int x, int group, int matrix,
                                               uint32_t to, uint32_t barrier, uint64_t policy) {
  if (policy == 0) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, 0, 0, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(x), "r"(group), "r"(matrix), "r"(barrier)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, 0, 0, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(group), "r"(matrix), "r"(barrier), "l"(policy)
      : "memory");
}

// The box at (x, y, z, w) of a map of make_head_groups_map().
__device__ __forceinline__ void load_head_group_box(const CUtensorMap& map, int x, int y, int z,
                                                    int w, uint32_t to, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, 0, %3, %4, %5}], [%6];" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
      : "memory");
}

// The two-dimensional box to this place in every block of the cluster that `mask` names, at each
// one's barrier.
__device__ __forceinline__ void load_box_2d_in_cluster(const CUtensorMap& map, int x, int y,
                                                       uint32_t to, uint32_t barrier, uint16_t mask,
                                                       uint64_t policy) {
  if (policy == 0) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(mask)
        : "memory");
    return;
  }
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(mask), "l"(policy)
      : "memory");
}

// `bytes` from memory to shared memory, both at multiples of 16 bytes and a whole number of them;
// they count at `barrier`.
__device__ __forceinline__ void load_bulk(const void* from, uint32_t to, int bytes,
                                          uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// `bytes` from shared memory to memory, both at multiples of 16 bytes and a whole number of them.
// The copies of a thread since its last commit_stores() are one group.
__device__ __forceinline__ void store_bulk(void* to, uint32_t from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
// The box at (x, y) of a two-dimensional map of bytes, from shared memory; what lies outside of the
// matrix is not stored.
__device__ __forceinline__ void store_box_2d(const CUtensorMap& map, int x, int y, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
      "r"(x), "r"(y), "r"(from)
      : "memory");
}
// The box at (x, y, z, w) of a map of make_head_groups_map().
__device__ __forceinline__ void store_head_group_box(const CUtensorMap& map, int x, int y, int z,
                                                     int w, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%1, 0, %2, %3, %4}], "
      "[%5];" ::"l"(&map),
      "r"(x), "r"(y), "r"(z), "r"(w), "r"(from)
      : "memory");
}
// Adds a box to what lies there: elements of the map's type, each sum rounded to it.
__device__ __forceinline__ void add_box_2d(const CUtensorMap& map, int x, int y, uint32_t from) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [%0, {%1, %2}], "
      "[%3];" ::"l"(&map),
      "r"(x), "r"(y), "r"(from)
      : "memory");
}
__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until all but the last kPending groups of this thread have been read from shared memory.
template <int kPending>
__device__ __forceinline__ void wait_for_reads_of_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

// Brings `bytes` to L2, a multiple of 16 from one on.
__device__ __forceinline__ void prefetch_bytes(const void* from, uint32_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
// Bring the same boxes to L2 only.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {0, %1, %2}];" ::"l"(&map), "r"(y),
               "r"(z)
               : "memory");
}
__device__ __forceinline__ void prefetch_box_2d(const CUtensorMap& map, int x, int y) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(x),
               "r"(y)
               : "memory");
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
#endif

}  // namespace cuda
}  // namespace rocm_kernels
