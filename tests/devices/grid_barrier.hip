// Workgroups of a wave that meet again and again (tests/test_grid_barrier.py): each publishes 64
// numbers, and adds up those of all.
#include "../../blocks/grid/cdna/grid_barrier.h"

using namespace rocm_kernels::cdna;

extern "C" __global__ void phases([[maybe_unused]] uint32_t* sums,
                                  [[maybe_unused]] uint32_t* published,
                                  [[maybe_unused]] GridState* state,
                                  [[maybe_unused]] uint32_t rounds) {
#if ROCM_KERNELS_CDNA
  const uint32_t lane = threadIdx.x, workgroups = gridDim.x;
  GridBarrier grid(state);
  for (uint32_t round = 0; round < rounds; ++round) {
    // Two halves in turn: who publishes in one again has met all that read it.
    uint32_t* const half = published + round % 2 * workgroups * 64;
    __hip_atomic_store(half + blockIdx.x * 64 + lane, round * 1000 + blockIdx.x * 64 + lane,
                       __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    grid.arrive(lane);
    grid.wait(lane);
    uint32_t sum = 0;
    for (uint32_t w = 0; w < workgroups; ++w) sum += half[w * 64 + (lane + w) % 64];
    sums[(round * workgroups + blockIdx.x) * 64 + lane] = sum;
  }
#endif
}
