// The names of activations.
#pragma once

#include <string>

#include "../../common/core/dtype.h"
#include "checks.h"

namespace rocm_kernels {

inline Activation parse_activation(const std::string& name) {
  if (name == "silu") return Activation::kSilu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_tanh") return Activation::kGeluTanh;
  if (name == "identity") return Activation::kIdentity;
  fail("activation must be silu, gelu, gelu_tanh or identity, got ", name);
}

}  // namespace rocm_kernels
