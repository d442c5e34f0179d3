// The tiles that attention's kernels exist for on NVIDIA GPUs. Dispatch, checks and
// candidates go by this table. No CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../common/cuda/swizzle.h"

namespace rocm_kernels {
namespace cuda {

constexpr int kMaxCluster = 16;
constexpr int kMaxOuter = 64;

// Of which no multiprocessor has two: sm_90 and sm_100 have 228 KB.
constexpr int32_t kHalfSharedBytes = 114 << 10;

constexpr int32_t kDecodeKeys = 16;  // of a warp's tile: the rows of an instruction

struct DecodeTile {
  int32_t head_dim;  // that q, k and v are rounded up to
  int32_t rows;      // of q times the heads that share a KV head
};
constexpr DecodeTile kDecodeTiles[] = {
    {64, 8},   {64, 16}, {64, 32},  {96, 8},  {96, 16},  {128, 8}, {128, 16},
    {128, 32}, {192, 8}, {192, 16}, {256, 8}, {256, 16}, {512, 8},
};
constexpr size_t kDecodeTileCount = sizeof(kDecodeTiles) / sizeof(kDecodeTiles[0]);

// Whether a kernel of the tile rotates new tokens (new_token.cuh): most models' groups are no
// larger.
constexpr bool rotates_tokens(const DecodeTile& tile) {
  return tile.rows == 8 && tile.head_dim <= 256;
}

// A tile in a warp's shared memory: of each 128 bytes of a row a line, [line of a row][row]; of
// rows of 64 bytes one of 64. The 16-byte vectors of a line are swizzled (swizzle.h), so that those
// of eight rows lie on different banks. Rows further apart would do that too, but a copy (cp.async)
// whose 128 bytes do not begin at a multiple of 128 there takes longer: a cache is read at 90 % of
// memory's rate.
// `further` and `pairs_further` count on tiles that begin at multiples of 128 bytes.
constexpr int32_t line_bytes(int32_t row_bytes) { return row_bytes <= 64 ? 64 : kChunkBytes; }
constexpr int32_t tile_bytes(int32_t row_bytes, int32_t rows) {
  const int32_t line = line_bytes(row_bytes);
  return rows * ((row_bytes + line - 1) / line * line);
}

template <int kRowBytes, int kRows>
struct TileLines {
  static constexpr int kLineBytes = line_bytes(kRowBytes);
  static constexpr bool kNarrow = kLineBytes == 64;

  // Where a row's 16-byte vector is.
  ROCM_KERNELS_HOST_DEVICE static constexpr int at(int row, int vector) {
    if (kNarrow) return swizzled_narrow<64>(row, vector);
    return vector / 8 * kRows * kLineBytes + swizzled(row, 0, 1, vector % 8);
  }
  // Where the same vector is, `rows` rows further, of a place whose row has none of these bits.
  ROCM_KERNELS_HOST_DEVICE static constexpr int further(int place, int rows) {
    return (place ^ (kNarrow ? rows / 2 % 4 : rows % 8) * 16) + rows * kLineBytes;
  }
  // The address of the vector 2 * pairs further, of one that is the first or the second.
  ROCM_KERNELS_HOST_DEVICE static constexpr uint32_t pairs_further(uint32_t address, int pairs) {
    constexpr int kOfLine = kLineBytes / 32;
    return (address ^ static_cast<uint32_t>(pairs % kOfLine * 32)) +
           static_cast<uint32_t>(pairs / kOfLine * kRows * kLineBytes);
  }
};

// Of the barrier at which a block of a cluster learns that all have sent their sums: behind the
// ring of stages.
constexpr int32_t kSentBarrierBytes = 16;

// What a block of the kernel has; `bytes`: of an element of k and v.
struct DecodeBlock {
  int32_t head_dim, rows, bytes;
  bool few_stages;  // where a block can have less than 112 KB of shared memory, or than it needs

  constexpr int32_t row_bytes() const { return head_dim * bytes; }
  // Eight warps, if their stages leave room for a second block; four do not keep up.
  constexpr int32_t warps() const {
    if (head_dim > 256) return 2;
    return row_bytes() <= 128 ? 8 : 4;
  }
  // Of a warp's tile of k, or of v.
  constexpr int32_t warp_tile_bytes() const { return tile_bytes(row_bytes(), kDecodeKeys); }
  constexpr int32_t stage_bytes() const { return 2 * warp_tile_bytes() * warps(); }
  // Two tiles under way beside the one that is multiplied; one where two blocks then fit, and else
  // would not.
  constexpr int32_t stages() const {
    constexpr int32_t kHalf = 111 << 10;
    if (few_stages) return 2;
    return 3 * stage_bytes() <= kHalf || 2 * stage_bytes() > kHalf ? 3 : 2;
  }
  constexpr int32_t warp_bytes() const { return 2 * stages() * warp_tile_bytes(); }
  constexpr int32_t out_pitch() const { return head_dim + 4; }  // floats
  constexpr int32_t sums_bytes() const { return warps() * rows * (out_pitch() + 2) * 4; }
  // The ring of stages, in whose place the warps' sums come, and the barrier.
  constexpr int32_t ring_bytes() const {
    return (warps() * warp_bytes() > sums_bytes() ? warps() * warp_bytes() : sums_bytes()) +
           kSentBarrierBytes;
  }
  // Where the warps' sums are added up: behind them; where other blocks of a cluster send theirs,
  // which may come while the ring is still read, behind that.
  constexpr int32_t sent_at(int32_t cluster) const {
    return cluster == 1 ? sums_bytes() : ring_bytes();
  }
  // Queries that leave a warp's registers no room for the rest are the block's: behind all that, as
  // float16 operands, and a scale for each row.
  constexpr bool shares_queries() const { return bytes == 1 && rows * head_dim > 16 * 128; }
  constexpr int32_t queries_at(int32_t cluster) const {
    const int32_t end = sent_at(cluster) + 4 * (rows * head_dim + 2 * kMaxCluster * rows);
    return end > ring_bytes() ? end : ring_bytes();
  }
  constexpr int32_t shared_bytes(int32_t cluster) const {
    return queries_at(cluster) + (shares_queries() ? rows * (2 * head_dim + 4) : 0);
  }
  // Blocks that an SM has at once.
  constexpr int32_t at_once(int32_t cluster) const {
    const bool has_registers = warps() < 8 || rows * head_dim <= 8 * 128;
    return has_registers && shared_bytes(cluster) <= 113 << 10 ? 2 : 1;
  }
};

// ---- Many queries: prefill.cuh

constexpr int32_t kMaxPrefillRows = 192;  // of a block: 64 for each consumer warpgroup

constexpr int32_t kPrefillBarrierBytes = 384;                 // behind the stages,
constexpr int32_t kPrefillFactorBytes = 4 * kMaxPrefillRows;  // and a factor for each row

struct PrefillTile {
  int32_t head_dim, head_dim_v;  // that q and k, and v, are rounded up to
  int32_t keys;                  // of a stage
  bool fp8 = false;              // keys and values, that are widened in shared memory

  // The tile for the same heads with keys and values of FP8.
  constexpr PrefillTile of(bool is_fp8) const {
    return {head_dim, head_dim_v, is_fp8 && head_dim > 128 ? 64 : keys, is_fp8};
  }
  // Three consumers have registers for heads of 64, and where nothing is widened.
  constexpr int32_t most_rows() const { return head_dim <= 64 && !fp8 ? 192 : 128; }

  // Boxes of 64 columns, in lines of 128 bytes.
  static constexpr int32_t boxes(int32_t columns) { return (columns + 63) / 64; }
  constexpr int32_t q_bytes(int32_t rows) const { return boxes(head_dim) * rows * 128; }
  constexpr int32_t k_bytes() const { return boxes(head_dim) * keys * 128; }
  constexpr int32_t v_bytes() const { return boxes(head_dim_v) * keys * 128; }
  constexpr int32_t slot_bytes() const { return fp8 ? k_bytes() / 2 : 0; }
  constexpr int32_t bytes_with(int32_t rows, int32_t q_places, int32_t stages,
                               int32_t slots) const {
    return q_places * q_bytes(rows) + stages * (k_bytes() + v_bytes()) + slots * slot_bytes() +
           kPrefillBarrierBytes + kPrefillFactorBytes;
  }
  static constexpr int32_t kMost = 227 << 10;
  // Places for queries: of items that follow each other (`in_boxes`, prefill_shape.cuh) those of
  // the next come while this one's are multiplied, where two stages leave room.
  constexpr int32_t q_places(int32_t rows, bool in_boxes) const {
    return in_boxes && bytes_with(rows, 2, 2, 0) <= kMost ? 2 : 1;
  }
  // Stages of keys, and of values: as many as fit, up to four, and two where FP8 codes need slots
  // before; of those as many as fit, up to eight.
  constexpr int32_t stages(int32_t rows, bool in_boxes) const {
    const int32_t places = q_places(rows, in_boxes);
    if (fp8 || bytes_with(rows, places, 3, 0) > kMost) return 2;
    return bytes_with(rows, places, 4, 0) <= kMost ? 4 : 3;
  }
  constexpr int32_t slots(int32_t rows) const {
    if (!fp8) return 0;
    return bytes_with(rows, 1, 2, 8) <= kMost ? 8 : bytes_with(rows, 1, 2, 4) <= kMost ? 4 : 2;
  }
  constexpr int32_t shared_bytes(int32_t rows, bool in_boxes) const {
    return bytes_with(rows, q_places(rows, in_boxes), stages(rows, in_boxes), slots(rows));
  }
  constexpr int32_t most_shared_bytes(int32_t rows) const {
    const int32_t boxed = fp8 ? 0 : shared_bytes(rows, true), other = shared_bytes(rows, false);
    return boxed > other ? boxed : other;
  }
};
constexpr PrefillTile kPrefillTiles[] = {
    {64, 64, 128}, {96, 96, 128}, {128, 128, 128}, {192, 128, 128}, {192, 192, 96}, {256, 256, 80},
};
constexpr size_t kPrefillTileCount = sizeof(kPrefillTiles) / sizeof(kPrefillTiles[0]);

}  // namespace cuda
}  // namespace rocm_kernels
