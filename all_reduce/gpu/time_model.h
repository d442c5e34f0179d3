// What an exchange between GPUs takes: the ways that each design goes, and the bytes over the
// links.
#pragma once

#include <cstdint>

namespace rocm_kernels {

enum class ExchangeDesign : int32_t {
  kOneShot,  // each rank sends its x to all others, and each adds all
  kTwoShot,  // each rank adds a part of all, and sends the sums to all others
  kScatter,  // the first half of that
  kGather,   // one shot without a sum
};

struct LinkRates {
  double start_us;      // launch, first load, last store
  double hop_us;        // a store until another GPU sees it
  double bytes_per_us;  // of one link, one direction
  bool link_a_pair;     // each pair has a link of its own; else a GPU's link carries all it sends
};

// NVLink 4, fitted to one shot on two H100 (docs/kernels/all_reduce.md): 8 KB to 2 MB are within a
// tenth.
constexpr LinkRates kNvlink{1.6, 1.0, 370e3, false};

// xGMI of MI300X: eight GPUs, a link of 64 GB/s a direction to each other one. The rate is that by
// which published sums of two GPUs grow from 256 KB to 1 MB; start and way are assumed, such that
// three ways in place of one (data, flag, answer) take what published small sums take
// (docs/kernels/all_reduce_journal.md). Nothing of it has been measured by us.
constexpr LinkRates kXgmi{4.0, 2.0, 37e3, true};

// Microseconds; modelled.
constexpr double modelled_time(ExchangeDesign design, int64_t bytes, int64_t ranks,
                               const LinkRates& links) {
  const double others = static_cast<double>(ranks - 1), part = 1.0 / static_cast<double>(ranks);
  const double on_link = static_cast<double>(bytes) * (links.link_a_pair ? 1.0 : others);
  switch (design) {
    case ExchangeDesign::kTwoShot:
      return links.start_us + 2 * (links.hop_us + on_link * part / links.bytes_per_us);
    case ExchangeDesign::kScatter:
      return links.start_us + links.hop_us + on_link * part / links.bytes_per_us;
    default:
      return links.start_us + links.hop_us + on_link / links.bytes_per_us;
  }
}

}  // namespace rocm_kernels
