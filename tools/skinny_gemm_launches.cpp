// Prints how the configs of the AMD skinny_gemm launch its kernels, for tools/resources.py: a line
// "kernel, waves, bytes of LDS, waves a SIMD that the choice of a config assumes", with tabs
// between, for each kernel and number of waves, at the largest M.
#include <cstdio>
#include <initializer_list>

#include "../skinny_gemm/cdna/config.h"

using namespace rocm_kernels::cdna;
using namespace rocm_kernels::cdna::skinny;
using Design = SkinnyGemmConfig::Design;

namespace {

void print_launches(Design design, const SkinnyTile& tile, MmaKind kind, bool block_scaled) {
  const bool sparse = kind == MmaKind::kFp8Sparse;
  const GemmShape shape = {
      sparse ? 8 : tile.block_m, 1 << 20, 1 << 20, a_bytes(kind), w_bytes(kind), block_scaled};
  const int32_t stages = register_stages(tile.block_m, tile.block_n, a_bytes(kind), w_bytes(kind));
  // The choice is among register pipelines alone.
  const int32_t assumed =
      design == Design::kRegisterPipeline
          ? waves_per_simd(tile.block_m, tile.block_n, a_bytes(kind), w_bytes(kind))
          : 0;
  char name[160];
  int used = std::snprintf(name, sizeof name, "skinny_gemm_%s<%d, %d, %d, %d",
                           SkinnyGemmConfig::kDesigns[static_cast<int>(design)],
                           static_cast<int>(kind), tile.block_m, tile.block_n, stages);
  std::snprintf(name + used, sizeof name - used,
                design == Design::kSpecialisedWaves ? ">"
                : block_scaled                      ? ", true>"
                                                    : ", false>");
  for (int32_t waves = 4; waves <= 8; waves += 4) {
    SkinnyGemmConfig config;
    config.design = design;
    config.block_n = tile.block_n;
    config.waves = waves;
    config.producers = design == Design::kSpecialisedWaves ? 4 : 0;
    config.sparse = sparse;
    if (check_config(shape, config) != nullptr) continue;
    std::printf("%s\t%d\t%d\t%d\n", name, waves, lds_bytes_of(shape, config), assumed);
  }
}

}  // namespace

int main() {
  for (const SkinnyTile& tile : kSkinnyTiles) {
    for (int kind = 0; kind <= static_cast<int>(MmaKind::kBFloat16Fp8); ++kind) {
      for (const bool block_scaled : {false, true}) {
        const MmaKind mma = static_cast<MmaKind>(kind);
        if (has_register_pipeline(tile, mma, block_scaled)) {
          print_launches(Design::kRegisterPipeline, tile, mma, block_scaled);
        }
        if (has_specialised_waves(tile, mma) && !block_scaled) {
          print_launches(Design::kSpecialisedWaves, tile, mma, false);
        }
      }
    }
  }
}
