// The GPUs whose code runs here, and how they differ.
#pragma once

#include <cstdint>
#include <string>

namespace sim {

struct Gpu {
  const char *target, *product;
  uint32_t ldsKib;  // of a compute unit
  bool fnuz;        // the dialect of its FP8 instructions; gfx90a has none
  // Compute units lie on several dies with an L2 each: what one die stored, the others see after a
  // write-back.
  bool manyDies;
  bool flatScratch;  // scratch has instructions of its own; gfx90a takes swizzled buffers
  bool modelled;     // caches and time are
  uint32_t computeUnits, clockMhz, memoryClockMhz, busBits, memoryGib, l2Mib, major, minor;
};

constexpr Gpu kGpus[] = {
    {"gfx942", "AMD Instinct MI300X", 64, true, true, true, true, 304, 2100, 1300, 8192, 192, 4, 9,
     4},
    {"gfx950", "AMD Instinct MI355X", 160, false, true, true, true, 256, 2400, 1300, 8192, 288, 4,
     9, 5},
    // One of the two devices that such a card is.
    {"gfx90a", "AMD Instinct MI250X", 64, false, false, false, false, 110, 1700, 1600, 4096, 64, 8,
     9, 0},
};

inline const Gpu* findGpu(const std::string& target) {
  for (const Gpu& gpu : kGpus) {
    if (target == gpu.target) return &gpu;
  }
  // Code for all of the family runs on its first member.
  return target == "gfx9-4-generic" ? &kGpus[0] : nullptr;
}

// gfx942, gfx950, ...
inline std::string knownTargets() {
  std::string all;
  for (const Gpu& gpu : kGpus) all += (all.empty() ? "" : ", ") + std::string(gpu.target);
  return all;
}

}  // namespace sim
