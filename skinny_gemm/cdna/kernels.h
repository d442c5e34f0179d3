// Tables of the compiled kernels, by kind of operands and number of the tile (tiles.h).
#pragma once

#include <utility>

#include "register_pipeline.h"
#include "specialised_waves.h"
#include "tiles.h"

namespace rocm_kernels::cdna::skinny {

using SkinnyKernel = void (*)(GemmProblem);

namespace detail {

template <MmaKind kKind, bool kBlockScaled, size_t kTile>
constexpr SkinnyKernel register_pipeline() {
  constexpr SkinnyTile kIs = kSkinnyTiles[kTile];
  if constexpr (has_register_pipeline(kIs, kKind, kBlockScaled)) {
    return skinny_gemm_register_pipeline<
        kKind, kIs.block_m, kIs.block_n,
        register_stages(kIs.block_m, kIs.block_n, a_bytes(kKind), w_bytes(kKind)), kBlockScaled>;
  } else {
    return nullptr;
  }
}

template <MmaKind kKind, size_t kTile>
constexpr SkinnyKernel specialised_waves() {
  constexpr SkinnyTile kIs = kSkinnyTiles[kTile];
  if constexpr (has_specialised_waves(kIs, kKind)) {
    return skinny_gemm_specialised_waves<kKind, kIs.block_m, kIs.block_n,
                                         register_stages(kIs.block_m, kIs.block_n, 1, 1)>;
  } else {
    return nullptr;
  }
}

template <MmaKind kKind, size_t... kTiles>
SkinnyKernel kernel_of(bool specialised, bool block_scaled, int tile,
                       std::index_sequence<kTiles...>) {
  constexpr SkinnyKernel kPlain[] = {register_pipeline<kKind, false, kTiles>()...};
  constexpr SkinnyKernel kScaled[] = {register_pipeline<kKind, true, kTiles>()...};
  constexpr SkinnyKernel kSpecialised[] = {specialised_waves<kKind, kTiles>()...};
  return specialised ? kSpecialised[tile] : block_scaled ? kScaled[tile] : kPlain[tile];
}

}  // namespace detail

// The kernel with matrix instructions, or nullptr: check_config() says what is missing.
inline SkinnyKernel skinny_kernel(MmaKind kind, bool specialised, bool block_scaled, int tile) {
  const auto of = [&](auto constant) {
    return detail::kernel_of<decltype(constant)::value>(
        specialised, block_scaled, tile, std::make_index_sequence<kSkinnyTileCount>{});
  };
  switch (kind) {
    case MmaKind::kFp8:
      return of(std::integral_constant<MmaKind, MmaKind::kFp8>{});
    case MmaKind::kFp8Sparse:
      return of(std::integral_constant<MmaKind, MmaKind::kFp8Sparse>{});
    case MmaKind::kFloat16:
      return of(std::integral_constant<MmaKind, MmaKind::kFloat16>{});
    case MmaKind::kBFloat16:
      return of(std::integral_constant<MmaKind, MmaKind::kBFloat16>{});
    case MmaKind::kFloat16Fp8:
      return of(std::integral_constant<MmaKind, MmaKind::kFloat16Fp8>{});
    case MmaKind::kBFloat16Fp8:
      return of(std::integral_constant<MmaKind, MmaKind::kBFloat16Fp8>{});
  }
  return nullptr;
}

}  // namespace rocm_kernels::cdna::skinny
