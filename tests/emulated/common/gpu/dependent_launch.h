#pragma once

namespace rocm_kernels {

inline void wait_for_previous_kernel() {}
inline void allow_next_kernel() {}
template <typename T>
T load_older(const T* from) {
  return *from;
}

}  // namespace rocm_kernels
