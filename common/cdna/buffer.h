// Memory through buffer resources on CDNA3 and CDNA4: loads of 16 bytes whose bounds the hardware
// checks, so that loops over ragged shapes have no branches.
#pragma once

#include "../gpu/device.h"

// The targets whose matrix instructions the kernels under cdna/ are written for. Device passes
// only.
#if defined(__gfx942__) || defined(__gfx950__)
#define ROCM_KERNELS_CDNA 1
#else
#define ROCM_KERNELS_CDNA 0
#endif

namespace rocm_kernels::cdna {

using Words = uint32_t __attribute__((ext_vector_type(4)));  // 16 bytes of one row

#if ROCM_KERNELS_CDNA

// A buffer, and the offset that is outside of every buffer: a load from there yields zeros and
// fetches nothing. It stands for rows beyond M and N, and for K blocks that are not the wave's.
// Offsets within a tile stay below it (the launcher checks).
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

#endif

}  // namespace rocm_kernels::cdna
