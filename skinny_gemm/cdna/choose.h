// Which config for few rows serves a shape on a device with matrix instructions, and which are
// worth timing: pure functions of the two.
#pragma once

#include "../../blocks/product/choice.h"
#include "time_model.h"

namespace rocm_kernels::cdna::skinny {

// Calls visit(config) for the configs of a design that can serve the shape and are worth a try.
template <typename Visit>
void for_each_config_of(SkinnyGemmConfig::Design design, const GemmShape& shape,
                        const Target& target, const Visit& visit) {
  const bool specialised = design == SkinnyGemmConfig::Design::kSpecialisedWaves;
  const auto consider = [&](SkinnyGemmConfig candidate) {
    // The contributors of a tile on one XCD: their partial sums meet in its L2.
    const int32_t workgroups = schedule_of(shape, candidate).workgroups();
    if (candidate.split_k != 1) candidate.xcds = std::min(workgroups, target.xcds);
    if (check_config(shape, candidate) == nullptr) visit(candidate);
  };
  for (const SkinnyTile& tile : kSkinnyTiles) {
    if (tile.block_m != block_m_of(shape.m)) continue;
    for (int32_t waves = specialised ? 8 : 4; waves <= 8; waves *= 2) {
      SkinnyGemmConfig candidate;
      candidate.design = design;
      candidate.producers = specialised ? 4 : 0;
      candidate.block_n = tile.block_n;
      candidate.waves = waves;
      for (int32_t split_k = 1; split_k <= 16; ++split_k) {
        candidate.split_k = split_k;
        consider(candidate);
      }
      // Stream-K: as many workgroups as run at once.
      candidate.split_k = kStreamKSplit;
      for (int32_t at_once = 1; at_once <= 4; ++at_once) {
        candidate.workgroups = at_once * target.compute_units;
        consider(candidate);
      }
    }
  }
}

// Chooses by modelled time, for the shape's class.
inline SkinnyGemmConfig choose_config(const GemmShape& shape, const Target& target) {
  const GemmShape judged = class_of(shape);
  Quickest<SkinnyGemmConfig> quickest;
  const auto weigh = [&](const SkinnyGemmConfig& config) {
    // Where memory bounds several alike, the one whose CUs have most to spare: some of their time
    // counts.
    const SkinnyGemmTime parts = modelled_time(judged, config, target);
    quickest.offer(config, parts.total() + parts.unit / 10);
  };
  for_each_config_of(SkinnyGemmConfig::Design::kRegisterPipeline, judged, target, weigh);
  return quickest.config();
}

// Calls visit(config) for every config that is worth timing on the device: the choice looks at the
// register pipeline alone, whose time is modelled.
template <typename Visit>
void for_each_config(const GemmShape& shape, const Target& target, const Visit& visit) {
  using Design = SkinnyGemmConfig::Design;
  for (const Design design : {Design::kRegisterPipeline, Design::kSpecialisedWaves}) {
    for_each_config_of(design, class_of(shape), target, visit);
  }
}

}  // namespace rocm_kernels::cdna::skinny
