// A rotation that waits for the attention behind it (hold_rotation), whose kernel may do both.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "../../blocks/heads/args.h"
#include "checks.h"

namespace rocm_kernels {

// Of this thread, from hold_rotation(true) to its next attention.
struct HeldRotation {
  bool is_next = false;  // the next rope_and_cache is to wait
  std::optional<RopeAndCacheArgs> args;
  std::vector<Tensor> tensors;  // that live as long

  static HeldRotation& of_thread() {
    thread_local HeldRotation held;
    return held;
  }

  // The one that waits, if any, which waits no longer.
  static HeldRotation take() { return std::exchange(of_thread(), {}); }
};

}  // namespace rocm_kernels
