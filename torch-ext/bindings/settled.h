// Weights that no kernel writes which may still run, as this thread was told (settle_weights).
#pragma once

#include <unordered_set>

#include "checks.h"

namespace rocm_kernels {

inline std::unordered_set<int64_t>& settled_weights() {
  thread_local std::unordered_set<int64_t> addresses;
  return addresses;
}

inline bool is_settled(const Tensor& weight) {
  return settled_weights().count(reinterpret_cast<int64_t>(weight.data_ptr())) > 0;
}

}  // namespace rocm_kernels
