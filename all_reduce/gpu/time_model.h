// What an exchange between GPUs takes: the ways that each design goes, and the bytes over the
// links.
#pragma once

#include <cmath>
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
  double rank_us;       // more for each rank beyond two that a vector waits for
  double bytes_per_us;  // of one link, one direction, two GPUs
  double rank_share;    // what each rank beyond two takes of that rate
  bool link_a_pair;     // each pair has a link of its own; else a GPU's link carries all it sends
};

// NVLink 4: fitted to one shot on two H100, and to both designs on four and eight H200, 8 KB to
// 2 MB (docs/kernels/all_reduce_journal.md).
constexpr LinkRates kNvlink{1.6, 1.0, 0.12, 370e3, 0.034, false};

// xGMI of MI300X: eight GPUs, a link of 64 GB/s a direction to each other one. The rate is that by
// which published sums of two GPUs grow from 256 KB to 1 MB; start and way are assumed, such that
// three ways in place of one (data, flag, answer) take what published small sums take
// (docs/kernels/all_reduce_journal.md). Nothing of it has been measured by us.
constexpr LinkRates kXgmi{4.0, 2.0, 0.0, 37e3, 0.0, true};

// What two shots reach of a link's rate: each vector is sent, added and sent again.
constexpr double kTwoShotRate = 0.64;

// Microseconds; modelled. A vector's second way overlaps with the first of others, so of the ways
// of two shots and their bytes the longer hides a part of the shorter: the root of their squares. A
// second shot waits for ranks that have waited themselves: four times what one shot does.
inline double modelled_time(ExchangeDesign design, int64_t bytes, int64_t ranks,
                            const LinkRates& links) {
  const double others = static_cast<double>(ranks - 1), further = static_cast<double>(ranks - 2);
  const double rate = links.bytes_per_us / (1 + links.rank_share * further);
  const double bytes_us = static_cast<double>(bytes) * (links.link_a_pair ? 1.0 : others) / rate;
  const double part_us = bytes_us / static_cast<double>(ranks);
  const double wait_us = links.rank_us * further;
  switch (design) {
    case ExchangeDesign::kTwoShot:
      return links.start_us +
             std::hypot(2 * links.hop_us + 4 * wait_us, 2 * part_us / kTwoShotRate);
    case ExchangeDesign::kScatter:
      return links.start_us + links.hop_us + wait_us + part_us;
    default:
      return links.start_us + links.hop_us + wait_us + bytes_us;
  }
}

}  // namespace rocm_kernels
