// Host: a number for each launch. A kernel writes it beside what it leaves in memory, so its other
// workgroups know these words from older ones, and nobody clears the workspace.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

namespace rocm_kernels {

// A name that no earlier launch of this process has, and that older memory holds by chance alone.
// Never 0.
inline uint64_t next_launch_name() {
  static std::atomic<uint64_t> names{std::random_device{}() |
                                     static_cast<uint64_t>(std::random_device{}()) << 32};
  // Names are odd: steps of twice an odd constant go through all odd values before one repeats.
  return names.fetch_add(2 * 0x9E3779B97F4A7C15ull, std::memory_order_relaxed) | 1;
}

}  // namespace rocm_kernels
