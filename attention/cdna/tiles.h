// The tiles that attention's kernels exist for on AMD GPUs. Dispatch, checks and candidates go by
// this table. No HIP header.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rocm_kernels::cdna {

constexpr int kStepKeys = 32;  // keys of a step of a wave: two matrix instructions high

struct DecodeTile {
  int32_t head_dim;  // that q, k and v are rounded up to
  int32_t rows;      // of q times the heads that share a KV head
  int32_t waves;     // a SIMD, that the registers allow: of a workgroup, one a SIMD
};
constexpr DecodeTile kDecodeTiles[] = {
    {64, 16, 3}, {64, 32, 3}, {128, 16, 2}, {128, 32, 2}, {192, 16, 2}, {256, 16, 1}, {512, 16, 1},
};
constexpr size_t kDecodeTileCount = sizeof(kDecodeTiles) / sizeof(kDecodeTiles[0]);
constexpr int kDecodeWaves = 4;  // of a workgroup

// Parts whose sums the last workgroup asks for together, of those that are left. A compute unit
// takes in some 20 KB a us, so the last few bring none more than twice.
constexpr int parts_at_once(int left) { return left > 8 ? 16 : left > 4 ? 8 : 4; }
constexpr int parts_brought(int parts) {  // in all
  return parts / 16 * 16 + (parts % 16 == 0 ? 0 : parts_at_once(parts % 16));
}

// LDS in which the waves' sums meet: 16 rows by 64 columns of each, with maxima and totals.
constexpr int kSumsPitch = 64 + 4;  // floats; rows on different banks
constexpr int kMostParts = 2048;    // times rows: whose maxima and totals have the same place later
static_assert(2 * kMostParts <= kDecodeWaves * 16 * kSumsPitch);

struct PrefillTile {
  int32_t head_dim, head_dim_v;  // that q and k, and v, are rounded up to
  int32_t row_tiles;             // of 16 rows, of a wave
  int32_t waves;                 // a SIMD, that the registers allow
  bool chain_in_lds;             // P goes through LDS, to see what that costs

  constexpr int32_t rows() const;  // of a workgroup
  // LDS of a step's keys and values, as 16-bit operands.
  constexpr int32_t stage_bytes() const { return kStepKeys * (head_dim + head_dim_v) * 2; }
  constexpr int32_t lds_bytes() const {
    return 2 * stage_bytes() + (chain_in_lds ? rows() * kStepKeys * 2 : 0);
  }
};
constexpr int kPrefillWaves = 4;  // of a workgroup
constexpr int32_t PrefillTile::rows() const { return kPrefillWaves * 16 * row_tiles; }
// By size of heads; those of fewer rows, for prompts that have too few blocks of many, at the end.
constexpr PrefillTile kPrefillTiles[] = {
    {64, 64, 4, 2, false},   {128, 128, 3, 2, false}, {128, 128, 3, 2, true},
    {192, 128, 2, 2, false}, {256, 256, 2, 1, false}, {64, 64, 2, 2, false},
    {128, 128, 2, 2, false},
};
constexpr size_t kPrefillTileCount = sizeof(kPrefillTiles) / sizeof(kPrefillTiles[0]);

}  // namespace rocm_kernels::cdna
