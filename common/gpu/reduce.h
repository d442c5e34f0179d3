// Reductions over the lanes of a wave and the waves of a block, in a fixed order: the same inputs
// give the same bits. Every lane of the reduced set gets the result.
#pragma once

#include "device.h"

namespace rocm_kernels {

struct Sum {
  ROCM_KERNELS_DEVICE float operator()(float a, float b) const { return a + b; }
};

// Of values that are not NaN and not negative: their bits order as integers do, which spares the
// quieting of NaNs that v_max_f32 needs.
struct MaxMagnitude {
  ROCM_KERNELS_DEVICE float operator()(float a, float b) const {
    uint32_t x, y;
    __builtin_memcpy(&x, &a, sizeof(x));
    __builtin_memcpy(&y, &b, sizeof(y));
    const uint32_t largest = x > y ? x : y;
    float result;
    __builtin_memcpy(&result, &largest, sizeof(result));
    return result;
  }
};

// A lane that holds the other half of a group of 2 * kMask lanes, both halves reduced already: lane
// own ^ kMask, or its mirror image, which on AMD is a modifier of the operation and costs nothing.
template <int kMask>
ROCM_KERNELS_DEVICE float other_half(float value) {
#if defined(__CUDACC__)
  return __shfl_xor_sync(0xFFFFFFFFu, value, kMask);
#else
  const int bits = __builtin_bit_cast(int, value);
  int other;
  if constexpr (kMask == 1) {
    other = __builtin_amdgcn_mov_dpp(bits, 0xB1, 0xF, 0xF, true);  // quad_perm [1, 0, 3, 2]
  } else if constexpr (kMask == 2) {
    other = __builtin_amdgcn_mov_dpp(bits, 0x4E, 0xF, 0xF, true);  // quad_perm [2, 3, 0, 1]
  } else if constexpr (kMask == 4) {
    other = __builtin_amdgcn_mov_dpp(bits, 0x141, 0xF, 0xF, true);  // row_half_mirror
  } else if constexpr (kMask == 8) {
    other = __builtin_amdgcn_mov_dpp(bits, 0x140, 0xF, 0xF, true);  // row_mirror
  } else {
    static_assert(kMask == 16, "other_half: masks are powers of two up to 16");
#if defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
    other = __builtin_amdgcn_permlanex16(bits, bits, 0x76543210, 0xFEDCBA98, false, false);
#else
    other = __builtin_amdgcn_ds_swizzle(bits, 0x401F);  // lane ^ 16
#endif
  }
  return __builtin_bit_cast(float, other);
#endif
}

// Reduces over aligned groups of kLanes lanes: a power of two, at most a wave.
template <int kLanes, typename Op>
ROCM_KERNELS_DEVICE float reduce_lanes(float value, Op op) {
  static_assert(kLanes <= kWaveSize && (kLanes & (kLanes - 1)) == 0,
                "reduce_lanes: a power of two of lanes, within a wave");
  if constexpr (kLanes >= 2) value = op(value, other_half<1>(value));
  if constexpr (kLanes >= 4) value = op(value, other_half<2>(value));
  if constexpr (kLanes >= 8) value = op(value, other_half<4>(value));
  if constexpr (kLanes >= 16) value = op(value, other_half<8>(value));
  if constexpr (kLanes == 32) value = op(value, other_half<16>(value));
#if defined(__GFX9__)
  if constexpr (kLanes == 64) {
    // Down the four rows of 16 to the last lane, and from there to a scalar register; only that
    // lane's value means anything. An exchange across rows would go through the LDS crossbar.
    int bits = __builtin_bit_cast(int, value);
    bits = __builtin_amdgcn_mov_dpp(bits, 0x142, 0xF, 0xF, true);  // row_bcast:15
    value = op(value, __builtin_bit_cast(float, bits));
    bits = __builtin_bit_cast(int, value);
    bits = __builtin_amdgcn_mov_dpp(bits, 0x143, 0xF, 0xF, true);  // row_bcast:31
    value = op(value, __builtin_bit_cast(float, bits));
    bits = __builtin_amdgcn_readlane(__builtin_bit_cast(int, value), 63);
    value = __builtin_bit_cast(float, bits);
  }
#endif
  return value;
}

// The greatest integer of a wave's.
ROCM_KERNELS_DEVICE uint32_t greatest_of_wave(uint32_t value) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xFFFFFFFFu, value);
#else
  float bits;
  __builtin_memcpy(&bits, &value, sizeof(bits));
  bits = reduce_lanes<kWaveSize>(bits, MaxMagnitude{});
  __builtin_memcpy(&value, &bits, sizeof(value));
  return value;
#endif
}

}  // namespace rocm_kernels
