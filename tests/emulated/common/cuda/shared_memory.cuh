// The block's shared memory as an array; addresses are its indices.
#pragma once

#include <vector_functions.h>

#include <cstdint>
#include <cstring>

inline uint8_t emulated_shared[1 << 20];

namespace rocm_kernels {
namespace cuda {

inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(static_cast<const uint8_t*>(pointer) - emulated_shared);
}
inline int load_shared_int(uint32_t address) {
  int value;
  std::memcpy(&value, emulated_shared + address, sizeof value);
  return value;
}
inline uint4 load_shared(uint32_t address) {
  uint4 value;
  std::memcpy(&value, emulated_shared + address, sizeof value);
  return value;
}
inline void store_shared(uint32_t address, const uint4& value) {
  std::memcpy(emulated_shared + address, &value, sizeof value);
}

}  // namespace cuda
}  // namespace rocm_kernels
