// The tiles that attention's decode kernel exists for on NVIDIA GPUs. Dispatch, checks and
// candidates go by this table. No CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rocm_kernels {
namespace cuda {

constexpr int kMaxCluster = 16;

struct DecodeTile {
  int32_t head_dim;  // that q, k and v are rounded up to
  int32_t rows;      // of q times the heads that share a KV head
};
constexpr DecodeTile kDecodeTiles[] = {
    {64, 8},   {64, 16}, {64, 32},  {96, 8},  {96, 16},  {128, 8}, {128, 16},
    {128, 32}, {192, 8}, {192, 16}, {256, 8}, {256, 16}, {512, 8},
};
constexpr size_t kDecodeTileCount = sizeof(kDecodeTiles) / sizeof(kDecodeTiles[0]);

// Bytes between rows in shared memory: an odd number of 16 bytes, so that eight rows' vectors lie
// on different banks.
constexpr int32_t row_pitch(int32_t bytes) { return bytes / 16 % 2 == 0 ? bytes + 16 : bytes; }

// What a block of the kernel has; `bytes`: of an element of k and v.
struct DecodeBlock {
  int32_t head_dim, rows, bytes;
  bool few_stages;  // where a block can have less than 112 KB of shared memory

  constexpr int32_t row_bytes() const { return head_dim * bytes; }
  constexpr int32_t warps() const { return head_dim <= 256 ? 4 : 2; }
  constexpr int32_t keys() const { return row_bytes() <= 128 ? 32 : 16; }  // of a warp's tile
  constexpr int32_t tile_bytes() const { return keys() * row_pitch(row_bytes()); }  // of k, or of v
  constexpr int32_t stage_bytes() const { return 2 * tile_bytes() * warps(); }
  // Two tiles under way beside the one that is multiplied; one where two blocks then fit, and else
  // would not.
  constexpr int32_t stages() const {
    constexpr int32_t kHalf = 111 << 10;
    if (few_stages) return 2;
    return 3 * stage_bytes() <= kHalf || 2 * stage_bytes() > kHalf ? 3 : 2;
  }
  constexpr int32_t warp_bytes() const { return 2 * stages() * tile_bytes(); }
  constexpr int32_t out_pitch() const { return head_dim + 4; }  // floats
  constexpr int32_t sums_bytes() const { return warps() * rows * (out_pitch() + 2) * 4; }
  // The ring of stages, in whose place the warps' sums come.
  constexpr int32_t ring_bytes() const {
    return warps() * warp_bytes() > sums_bytes() ? warps() * warp_bytes() : sums_bytes();
  }
  // Behind it what the blocks of a cluster send each other.
  constexpr int32_t shared_bytes() const {
    return ring_bytes() + 4 * (rows * head_dim + 2 * kMaxCluster * rows);
  }
  constexpr int32_t at_once() const { return shared_bytes() <= 113 << 10 ? 2 : 1; }  // of an SM
};

}  // namespace cuda
}  // namespace rocm_kernels
