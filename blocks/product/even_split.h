// A length divided evenly: K among workers, workers among XCDs.
#pragma once

#include <cstdint>

#include "../../common/core/compiler.h"

namespace rocm_kernels {

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
