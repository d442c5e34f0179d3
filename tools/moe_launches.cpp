// Prints how the configs of the AMD grouped products launch their kernels, for tools/resources.py:
// a line "kernel, waves, bytes of LDS, waves a SIMD that the choice of a config assumes", with tabs
// between.
#include <cstdio>
#include <initializer_list>

#include "../moe/cdna/tiles.h"

using namespace rocm_kernels::cdna;
using namespace rocm_kernels::cdna::moe;

namespace {

struct Operands {
  MmaKind kind;
  bool block_scaled, fp4;
};
constexpr Operands kOperands[] = {
    {MmaKind::kFp8, false, false},         {MmaKind::kFp8, true, false},
    {MmaKind::kFloat16, false, false},     {MmaKind::kBFloat16, false, false},
    {MmaKind::kBFloat16Fp8, false, false}, {MmaKind::kBFloat16Fp8, true, false},
    {MmaKind::kBFloat16, false, true},
};

const char* name_of(bool value) { return value ? "true" : "false"; }

}  // namespace

int main() {
  for (const Operands& of : kOperands) {
    for (const bool gate_up : {false, true}) {
      for (size_t i = 0; i < kMoeTileCount; ++i) {
        const GemmTile& tile = kMoeTiles[i];
        std::printf("moe_tiled<%d, %zu, %s, %s, %s>\t%d\t%d\t%d\n", static_cast<int>(of.kind), i,
                    name_of(of.block_scaled), name_of(of.fp4), name_of(gate_up), tile.waves(),
                    tile.lds_bytes(), 512 / tile.vgprs);
      }
      for (const StreamedTileShape& tile : kStreamedTiles) {
        if (!(of.fp4 ? tile.fp4 : tile.others)) continue;
        std::printf("moe_streamed<%d, %d, %d, %s, %s, %s>\t%d\t%d\t%d\n", static_cast<int>(of.kind),
                    tile.block_m, tile.block_n, name_of(of.block_scaled), name_of(of.fp4),
                    name_of(gate_up), kStreamedWaves,
                    streamed_lds_bytes(of.kind, tile.block_m, tile.block_n, kStreamedWaves),
                    kStreamedAtOnce);
      }
    }
  }
}
