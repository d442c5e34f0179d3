// The tiles that the warpgroup kernel is compiled for. Dispatch (launch_tiles.cuh), checks,
// candidates and the times of time_model.h go by these tables. No CUDA header.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../../blocks/product/args.h"
#include "../../blocks/product/cuda/shape.h"

namespace rocm_kernels {
namespace cuda {

struct GemmTile {
  int32_t block_m, block_n;
  bool swap_ab;  // w is the 64-row operand

  constexpr int32_t rows() const { return swap_ab ? block_n : block_m; }
  constexpr int32_t columns() const { return swap_ab ? block_m : block_n; }
};

// Kinds of operands, each with tiles of its own.
enum class TileKind : int32_t { kFp8, kFp8Block, k16Bit, kWidened, kWidenedBlock };

constexpr GemmTile kFp8Tiles[] = {
    {256, 128, false}, {256, 64, false},  {256, 96, false},  {128, 192, false}, {128, 96, false},
    {128, 64, false},  {128, 128, false}, {128, 160, false}, {128, 128, true},  {96, 128, true},
    {64, 128, true},   {64, 256, true},   {32, 128, true}};
constexpr GemmTile kFp8BlockTiles[] = {
    {256, 128, false}, {256, 64, false},  {256, 96, false}, {128, 192, false}, {128, 96, false},
    {128, 128, false}, {128, 160, false}, {128, 64, false}, {128, 128, true},  {96, 128, true},
    {64, 128, true},   {64, 256, true},   {32, 128, true}};
constexpr GemmTile k16BitTiles[] = {
    {256, 128, false}, {256, 64, false},  {128, 192, false}, {128, 96, false}, {128, 128, false},
    {128, 160, false}, {128, 256, false}, {128, 64, false},  {256, 128, true}, {128, 128, true},
    {96, 128, true},   {64, 128, true},   {32, 128, true}};
// FP8 weights of a 16-bit a: chunks of 64 elements. Never in clusters along m, which would share w.
constexpr GemmTile kWidenedTiles[] = {
    {256, 128, false}, {128, 128, false}, {128, 128, true}, {64, 128, true}, {32, 128, true}};
constexpr GemmTile kWidenedBlockTiles[] = {
    {128, 128, false}, {128, 128, true}, {64, 128, true}, {32, 128, true}};

struct GemmTiles {
  const GemmTile* tiles;
  size_t count;
};
constexpr GemmTiles tiles_of(TileKind kind) {
  const auto all = [](const auto& tiles) {
    return GemmTiles{tiles, sizeof(tiles) / sizeof(tiles[0])};
  };
  switch (kind) {
    case TileKind::kFp8:
      return all(kFp8Tiles);
    case TileKind::kFp8Block:
      return all(kFp8BlockTiles);
    case TileKind::k16Bit:
      return all(k16BitTiles);
    case TileKind::kWidened:
      return all(kWidenedTiles);
    case TileKind::kWidenedBlock:
      break;
  }
  return all(kWidenedBlockTiles);
}

inline TileKind tile_kind_of(const GemmArgs& args) {
  const bool blocks = is_block_scaled(args);
  if (is_widened(args)) return blocks ? TileKind::kWidenedBlock : TileKind::kWidened;
  if (!is_fp8(args.a_dtype)) return TileKind::k16Bit;
  return blocks ? TileKind::kFp8Block : TileKind::kFp8;
}

// Some are left out for outputs that are seldom: FP8 to float16, 16 bits to float32.
constexpr bool is_compiled(TileKind kind, DType out, const GemmTile& tile) {
  if (kind == TileKind::kFp8 || kind == TileKind::kFp8Block) {
    return out != DType::kFloat16 ||
           (tile.swap_ab ? tile.rows() == 128 && tile.columns() <= 64 : tile.columns() == 128);
  }
  return kind != TileKind::k16Bit || out != DType::kFloat32 ||
         (tile.rows() == 128 && tile.columns() == (tile.swap_ab ? 32 : 128));
}

// The tile's number in its kind's table, or -1: none is compiled for these operands.
inline int find_tile(const GemmArgs& args, int32_t block_m, int32_t block_n, bool swap_ab) {
  const TileKind kind = tile_kind_of(args);
  const GemmTiles all = tiles_of(kind);
  for (size_t i = 0; i < all.count; ++i) {
    const GemmTile& tile = all.tiles[i];
    if (tile.block_m == block_m && tile.block_n == block_n && tile.swap_ab == swap_ab) {
      return is_compiled(kind, args.out_dtype, tile) ? static_cast<int>(i) : -1;
    }
  }
  return -1;
}

constexpr Status kNoTile =
    "gemm config: no kernel has this tile; gemm_configs lists those that are";

}  // namespace cuda
}  // namespace rocm_kernels
