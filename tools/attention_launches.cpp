// Prints how the configs of the AMD attention launch its kernels, for tools/resources.py: a line
// "kernel, waves, bytes of LDS beside what it declares, waves a SIMD that the choice of a config
// assumes", with tabs between.
#include <cstdio>
#include <initializer_list>

#include "../attention/cdna/tiles.h"

using namespace rocm_kernels::cdna;

int main() {
  for (const char* const type : {"std::bfloat16_t", "_Float16"}) {
    for (const char* const fp8 : {"false", "true"}) {
      for (size_t i = 0; i < kDecodeTileCount; ++i) {
        std::printf("attention_decode<DecodeShape<%s, %s, %zu> >\t%d\t0\t%d\n", type, fp8, i,
                    kDecodeWaves, kDecodeTiles[i].waves);
      }
      for (size_t i = 0; i < kPrefillTileCount; ++i) {
        std::printf("attention_prefill<PrefillShape<%s, %s, %zu> >\t%d\t%d\t%d\n", type, fp8, i,
                    kPrefillWaves, kPrefillTiles[i].lds_bytes(), kPrefillTiles[i].waves);
      }
    }
  }
}
