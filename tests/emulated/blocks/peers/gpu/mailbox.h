// What a sender needs of it, in memory of the host.
#pragma once

#include <cuda_bf16.h>

#include <cstring>

#include "../memory.h"

namespace rocm_kernels {

using bfloat16 = __nv_bfloat16;
struct Vector {
  uint32_t word[4];
};
template <typename T>
constexpr int kVectorElements = 16 / static_cast<int>(sizeof(T));

inline Vector sendable(Vector v) { return v; }
inline void store_to_peer(void* address, const Vector& v) { std::memcpy(address, &v, sizeof v); }

}  // namespace rocm_kernels
