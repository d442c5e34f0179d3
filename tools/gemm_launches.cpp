// Prints how the configs of the AMD gemm launch its kernels, for tools/resources.py: a line
// "kernel, waves, bytes of LDS, waves a SIMD that the choice of a config assumes", with tabs
// between.
#include <cstdio>
#include <initializer_list>

#include "../gemm/cdna/tiles.h"

using namespace rocm_kernels::cdna;

int main() {
  for (size_t i = 0; i < kGemmTileCount; ++i) {
    const GemmTile& tile = kGemmTiles[i];
    for (const MmaKind kind : {MmaKind::kFp8, MmaKind::kFloat16, MmaKind::kBFloat16,
                               MmaKind::kFloat16Fp8, MmaKind::kBFloat16Fp8}) {
      for (const bool block_scaled : {false, true}) {
        if (block_scaled && (!tile.block_scales || w_bytes(kind) != 1)) continue;
        std::printf("gemm_tiled<%d, %zu, %s>\t%d\t%d\t%d\n", static_cast<int>(kind), i,
                    block_scaled ? "true" : "false", tile.waves(), tile.lds_bytes(),
                    512 / tile.vgprs);
      }
    }
  }
}
