// A length divided evenly: K among workers, workers among XCDs. And split_k, which says among how
// many workers the K of a tile is divided.
#pragma once

#include <cstdint>

#include "../../common/core/compiler.h"

namespace rocm_kernels {

// The value of a schedule's or a config's split_k for which no tile has a number of workers of its
// own: stream-K, where workers divide the K of all tiles evenly, wherever tiles begin. From 1 on it
// is a number of workers a tile.
constexpr int32_t kStreamKSplit = 0;

// `total` things in `parts` ranges as equal as whole numbers allow: the first `longer` ranges have
// one more. Index: what counts the things.
template <typename Index>
struct EvenSplitOf {
  int32_t parts;
  Index length;
  int32_t longer;

  static ROCM_KERNELS_HOST_DEVICE EvenSplitOf of(Index total, int32_t parts) {
    return {parts, total / parts, static_cast<int32_t>(total % parts)};
  }
  ROCM_KERNELS_HOST_DEVICE Index begin_of(int32_t part) const {
    return part * length + (part < longer ? part : longer);
  }
  // The part that has thing `index`.
  ROCM_KERNELS_HOST_DEVICE int32_t part_of(Index index) const {
    const Index edge = longer * (length + 1);
    return static_cast<int32_t>(index < edge ? index / (length + 1)
                                             : longer + (index - edge) / length);
  }
};

}  // namespace rocm_kernels
