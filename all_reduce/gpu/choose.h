// How an exchange runs: which design, and by how many threads.
#pragma once

#include <cstdint>

#include "../../blocks/peers/memory.h"
#include "../all_reduce.h"
#include "time_model.h"

namespace rocm_kernels {

struct ExchangeConfig {
  ExchangeDesign design = ExchangeDesign::kOneShot;
  int32_t threads = 0;  // of a block
  int32_t blocks = 0;
};

constexpr int64_t kPeerVectorBytes = 16;

// Vectors of a part: of x, or of what one rank reduces.
constexpr int64_t part_vectors(int64_t elements, int64_t element_bytes) {
  return (elements * element_bytes + kPeerVectorBytes - 1) / kPeerVectorBytes;
}

// Elements that each rank reduces in two shots: whole vectors, the last ranks' fewer or none.
constexpr int64_t two_shot_part(int64_t elements, int64_t element_bytes, int64_t ranks) {
  const int64_t in_vector = kPeerVectorBytes / element_bytes;
  const int64_t vectors = part_vectors(elements, element_bytes);
  return (vectors + ranks - 1) / ranks * in_vector;
}

// Bytes of half a rank's mailbox that a design takes.
constexpr int64_t mailbox_bytes(ExchangeDesign design, int64_t vectors, int64_t ranks) {
  return (design == ExchangeDesign::kTwoShot ? 2 : 1) * ranks * vectors * kPeerVectorBytes;
}

// The threads for `vectors` vectors, one each as long as the device holds them at once: then every
// access is under way from the start. Small blocks, so that all compute units take part.
inline void choose_threads(int64_t vectors, int64_t compute_units, ExchangeConfig& config) {
  config.threads = 128;
  while (config.threads < 512 && config.threads * compute_units < vectors) config.threads *= 2;
  const int64_t wanted = (vectors + config.threads - 1) / config.threads;
  const int64_t resident = compute_units * (1024 / config.threads);
  const int64_t most = resident < kMostPeerBlocks ? resident : kMostPeerBlocks;
  config.blocks = static_cast<int32_t>(wanted < most ? wanted : most);
}

// For all_reduce the quicker design of those that fit in half a mailbox; blocks 0: none does.
inline ExchangeConfig choose_exchange(Exchanged what, int64_t elements, int64_t element_bytes,
                                      int64_t ranks, int64_t half_bytes, int64_t compute_units,
                                      const LinkRates& links) {
  ExchangeConfig config;
  const int64_t bytes = elements * element_bytes;
  int64_t vectors = part_vectors(elements, element_bytes);
  if (what == Exchanged::kAllGather) config.design = ExchangeDesign::kGather;
  if (what == Exchanged::kReduceScatter) {
    config.design = ExchangeDesign::kScatter;
    vectors = part_vectors(elements / ranks, element_bytes);
  }
  if (what == Exchanged::kAllReduce) {
    const int64_t part = part_vectors(two_shot_part(elements, element_bytes, ranks), element_bytes);
    const bool fits = mailbox_bytes(ExchangeDesign::kOneShot, vectors, ranks) <= half_bytes;
    if (!fits || modelled_time(ExchangeDesign::kTwoShot, bytes, ranks, links) <
                     modelled_time(ExchangeDesign::kOneShot, bytes, ranks, links)) {
      config.design = ExchangeDesign::kTwoShot;
      vectors = part;
    }
  }
  if (mailbox_bytes(config.design, vectors, ranks) > half_bytes) return config;
  choose_threads(vectors, compute_units, config);
  return config;
}

}  // namespace rocm_kernels
