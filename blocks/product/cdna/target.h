// Host: the current AMD device, and and which of its matrix instructions a product's types take.
#pragma once

#include "../../../common/gpu/launch.h"
#include "shape.h"

namespace rocm_kernels::cdna {

constexpr Status kNoDevice = "the device's attributes cannot be read";

inline bool current_target(Target& target) {
  DeviceFacts facts;
  int id = 0, major = 0, minor = 0, lds = 0;
  if (current_device(facts) != nullptr || hipGetDevice(&id) != hipSuccess ||
      hipDeviceGetAttribute(&major, hipDeviceAttributeComputeCapabilityMajor, id) != hipSuccess ||
      hipDeviceGetAttribute(&minor, hipDeviceAttributeComputeCapabilityMinor, id) != hipSuccess ||
      hipDeviceGetAttribute(&lds, hipDeviceAttributeMaxSharedMemoryPerBlock, id) != hipSuccess) {
    return false;
  }
  const bool gfx942 = major == 9 && minor == 4;
  if (major == 9 && minor == 5) target = mi355x();
  target.id = id;
  target.compute_units = facts.compute_units;
  target.lds_bytes = lds;
  target.matrix_instructions = gfx942 || target.gfx950;
  target.wave_size = facts.wave_size;
  target.fp8 = gfx942 ? DType::kFloat8E4M3FNUZ : DType::kFloat8E4M3FN;
  return true;
}

inline Status check_dtypes(const GemmArgs& args) {
  if (args.a_dtype == DType::kFloat32) return "a must be float16, bfloat16 or FP8";
  if (args.a_dtype != args.w_dtype && (is_fp8(args.a_dtype) || !is_fp8(args.w_dtype))) {
    return "w must have a's dtype, or be FP8 with 16-bit a";
  }
  return nullptr;
}

inline MmaKind mma_kind_of(const GemmArgs& args) {
  if (is_fp8(args.a_dtype)) return MmaKind::kFp8;
  if (args.a_dtype == DType::kFloat16) {
    return is_fp8(args.w_dtype) ? MmaKind::kFloat16Fp8 : MmaKind::kFloat16;
  }
  return is_fp8(args.w_dtype) ? MmaKind::kBFloat16Fp8 : MmaKind::kBFloat16;
}

}  // namespace rocm_kernels::cdna
