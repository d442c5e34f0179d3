// What a choice of a config asks of an NVIDIA GPU's memory.
#pragma once

#include <cstdint>

namespace rocm_kernels {
namespace cuda {

// Those of an H200, where nobody has asked a device.
struct MemoryRates {
  double bytes_per_us = 4.917e6;  // that the memory could read, by its clock and the bus
  double l2_bytes = 62.9e6;  // its rate follows its size: it has a slice for each part of memory
};

inline MemoryRates h100_memory() { return {3.352e6, 52.4e6}; }

// By a device's facts (common/gpu/launch.h), where the driver tells them.
template <typename Facts>
MemoryRates memory_rates(const Facts& facts) {
  if (facts.memory_bytes_per_us <= 0 || facts.l2_bytes <= 0) return {};
  return {facts.memory_bytes_per_us, facts.l2_bytes};
}

}  // namespace cuda
}  // namespace rocm_kernels
