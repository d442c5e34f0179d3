// How many workgroups of a kernel a compute unit holds at a time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "gpu.h"

namespace sim {

struct Footprint {
  uint32_t vgprs = 0;  // of a lane, accumulation registers included
  uint32_t sgprs = 0, ldsBytes = 0, threads = 0;
};

// Waves that a SIMD holds: 512 registers a lane in blocks of 8, and 8 waves at most.
inline uint32_t wavesPerSimd(const Footprint& f) {
  uint32_t registers = std::max(8u, (f.vgprs + 7) / 8 * 8);
  uint32_t scalar = f.sgprs > 100 ? 7 : 8;
  return std::min({8u, 512 / registers, scalar});
}

inline uint32_t workgroupsPerCu(const Gpu& gpu, const Footprint& f) {
  uint32_t waves = std::max(1u, (f.threads + 63) / 64);
  uint32_t limit = wavesPerSimd(f) * 4 / waves;
  if (f.ldsBytes) limit = std::min(limit, gpu.ldsKib * 1024 / f.ldsBytes);
  return limit;
}

}  // namespace sim
