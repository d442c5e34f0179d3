// The one config of an op on the CPU: its instruction set.
#pragma once

#include <cstring>

#include "../core/context.h"
#include "isa.h"

namespace rocm_kernels {
namespace cpu {

// `by_tiles`: AMX's registers serve it where they are.
static inline const char* config_name(bool by_tiles) {
  constexpr const char* kNames[] = {"portable", "neon", "avx2", "avx512", "amx"};
  return kNames[static_cast<int>(isa() == Isa::kAmx && !by_tiles ? Isa::kAvx512 : isa())];
}

// nullptr, or why the text is not that of the config.
static inline Status check_config(const char* config, bool by_tiles) {
  if (config == nullptr || std::strcmp(config, config_name(by_tiles)) == 0) return nullptr;
  return "config: the CPU has one, and it bears the name of its instruction set";
}

}  // namespace cpu
}  // namespace rocm_kernels
