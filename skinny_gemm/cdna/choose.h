// Which config serves a shape on a device, and which are worth timing: pure functions of the two.
#pragma once

#include "time_model.h"

namespace rocm_kernels::cdna {

// Calls visit(config) for the configs of a design that can serve the shape and are worth a try.
template <typename Visit>
void for_each_config_of(SkinnyGemmConfig::Design design, const SkinnyGemmShape& shape,
                        const SkinnyGemmDevice& device, const Visit& visit) {
  const bool specialised = design == SkinnyGemmConfig::Design::kSpecialisedWaves;
  const auto consider = [&](SkinnyGemmConfig candidate) {
    // The contributors of a tile on one XCD: their partial sums meet in its L2.
    const int32_t workgroups = schedule_of(shape, candidate).workgroups();
    if (candidate.split_k != 1) candidate.xcds = std::min(workgroups, device.xcds);
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
      candidate.split_k = 0;
      for (int32_t at_once = 1; at_once <= 4; ++at_once) {
        candidate.workgroups = at_once * device.compute_units;
        consider(candidate);
      }
    }
  }
}

// Chooses by modelled time, for the shape's class.
inline SkinnyGemmConfig choose_config(const SkinnyGemmShape& shape,
                                      const SkinnyGemmDevice& device) {
  using Design = SkinnyGemmConfig::Design;
  SkinnyGemmConfig best;
  if (!device.matrix_instructions) {
    best.design = Design::kPortable;
    return best;
  }
  const SkinnyGemmShape judged = class_of(shape);
  float best_time = 0;
  const auto weigh = [&](const SkinnyGemmConfig& candidate) {
    // Where memory bounds several alike, the one whose CUs have most to spare: some of their time
    // counts.
    const SkinnyGemmTime parts = modelled_time(judged, candidate, device);
    const float time = parts.total() + parts.unit / 10;
    if (best_time == 0 || time < best_time) best = candidate, best_time = time;
  };
  for_each_config_of(Design::kRegisterPipeline, judged, device, weigh);
  return best;
}

// choose_config(), which weighs some 100 configs in 7 us of a host thread, kept for the shapes of a
// model's layers.
inline SkinnyGemmConfig cached_choice(const SkinnyGemmShape& shape,
                                      const SkinnyGemmDevice& device) {
  struct Choice {
    SkinnyGemmShape shape = {};
    int32_t compute_units = 0;
    SkinnyGemmConfig config;
  };
  constexpr size_t kChoices = 64;
  thread_local Choice choices[kChoices];
  const SkinnyGemmShape judged = class_of(shape);
  Choice& choice = choices[hash_fields(kShapeFields, judged) % kChoices];
  if (choice.compute_units != device.compute_units ||
      !equal_fields(kShapeFields, choice.shape, judged)) {
    choice = {judged, device.compute_units, choose_config(judged, device)};
  }
  return choice.config;
}

// Calls visit(config) for every config that is worth timing on the device: the choice looks at the
// register pipeline alone, whose time is modelled.
template <typename Visit>
void for_each_config(const SkinnyGemmShape& shape, const SkinnyGemmDevice& device,
                     const Visit& visit) {
  using Design = SkinnyGemmConfig::Design;
  if (!device.matrix_instructions) return visit(choose_config(shape, device));
  for (const Design design : {Design::kRegisterPipeline, Design::kSpecialisedWaves}) {
    for_each_config_of(design, class_of(shape), device, visit);
  }
}

}  // namespace rocm_kernels::cdna
