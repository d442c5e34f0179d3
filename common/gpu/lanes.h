// Exchanges between the lanes of a wave. All lanes must be active.
#pragma once

#include "device.h"

namespace rocm_kernels {

// A bit for each lane.
#if defined(__CUDA_ARCH__) || defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
using LaneMask = uint32_t;
#else
using LaneMask = uint64_t;
#endif

ROCM_KERNELS_DEVICE LaneMask ballot(bool value) {
#if defined(__CUDACC__)
  return __ballot_sync(0xFFFFFFFFu, value);
#elif defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
  return __builtin_amdgcn_ballot_w32(value);
#else
  return __builtin_amdgcn_ballot_w64(value);
#endif
}

// Set bits of the mask, which may be the lane's own, and those of them below the lane's.
ROCM_KERNELS_DEVICE int bits_of(LaneMask mask) {
#if defined(__CUDACC__)
  return __popc(mask);
#else
  return sizeof(mask) == 4 ? __builtin_popcount(static_cast<uint32_t>(mask))
                           : __builtin_popcountll(mask);
#endif
}
// The lowest lane of a mask that has one.
ROCM_KERNELS_DEVICE int lowest_lane(LaneMask mask) {
#if defined(__CUDACC__)
  return __ffs(mask) - 1;
#else
  return sizeof(mask) == 4 ? __builtin_ctz(static_cast<uint32_t>(mask)) : __builtin_ctzll(mask);
#endif
}
ROCM_KERNELS_DEVICE int bits_below(LaneMask mask) {
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
  return bits_of(mask & ((LaneMask{1} << lane) - 1));
}

// `value` of another lane.
ROCM_KERNELS_DEVICE int of_lane(int value, int lane) {
#if defined(__CUDACC__)
  return __shfl_sync(0xFFFFFFFFu, value, lane);
#else
  return __builtin_amdgcn_ds_bpermute(lane * 4, value);
#endif
}

// `value` of one lane, the same for all who ask.
ROCM_KERNELS_DEVICE float of_one_lane(float value, int lane) {
#if defined(__CUDACC__)
  return __shfl_sync(0xFFFFFFFFu, value, lane);
#else
  return __builtin_bit_cast(float, __builtin_amdgcn_readlane(__builtin_bit_cast(int, value), lane));
#endif
}

ROCM_KERNELS_DEVICE int of_one_lane(int value, int lane) {
#if defined(__CUDACC__)
  return __shfl_sync(0xFFFFFFFFu, value, lane);
#else
  return __builtin_amdgcn_readlane(value, lane);
#endif
}

// The lanes whose `value`, of kBits bits, is this one's.
template <int kBits>
ROCM_KERNELS_DEVICE LaneMask same_lanes(int value) {
  LaneMask others = 0;
#pragma unroll
  for (int bit = 0; bit < kBits; ++bit) {
    const int set = static_cast<int>(static_cast<uint32_t>(value) << (31 - bit)) >> 31;
    others |= ballot(set != 0) ^ static_cast<LaneMask>(static_cast<int64_t>(set));
  }
  return ~others;
}

// The sum of `value` over this lane and those below it.
ROCM_KERNELS_DEVICE int sum_to_lane(int value) {
  const int lane = static_cast<int>(threadIdx.x) % kWaveSize;
#pragma unroll
  for (int step = 1; step < kWaveSize; step *= 2) {
    const int below = of_lane(value, lane - step);
    value += lane >= step ? below : 0;
  }
  return value;
}

}  // namespace rocm_kernels
