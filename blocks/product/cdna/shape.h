// What the choice of a config depends on, for products: the shape and the device. No
// HIP header: tests and tools include it too.
#pragma once

#include "../../../common/cdna/operands.h"
#include "../args.h"
#include "../config_fields.h"

namespace rocm_kernels::cdna {

struct GemmShape {
  int32_t m, n, k;
  int32_t a_bytes, w_bytes;  // of an element
  int32_t block_scaled;      // 0 or 1
};
constexpr ConfigField<GemmShape> kGemmShapeFields[] = {
    {"m", &GemmShape::m},
    {"n", &GemmShape::n},
    {"k", &GemmShape::k},
    {"a_bytes", &GemmShape::a_bytes},
    {"w_bytes", &GemmShape::w_bytes},
    {"block_scaled", &GemmShape::block_scaled},
};

inline GemmShape shape_of(const GemmArgs& args) {
  return {static_cast<int32_t>(args.m),
          static_cast<int32_t>(args.n),
          static_cast<int32_t>(args.k),
          static_cast<int32_t>(size_of(args.a_dtype)),
          static_cast<int32_t>(size_of(args.w_dtype)),
          is_block_scaled(args)};
}

// The device; an MI300X unless said otherwise.
struct Target {
  int32_t compute_units = 304;
  int32_t lds_bytes = 65536;  // a CU
  int32_t xcds = 8;
  int32_t wave_size = 64;
  bool matrix_instructions = true;  // gfx942, gfx950
  bool gfx950 = false;
  DType fp8 = DType::kFloat8E4M3FNUZ;  // the dialect of its matrix instructions
  float terabytes_per_s = 4.2f;        // that people measure from its memory, of 5.3
  float gigahertz = 2.1f;
  int32_t id = 0;  // among the GPUs of the host
};

inline Target mi355x() {
  Target target;
  target.compute_units = 256;
  target.lds_bytes = 160 << 10;
  target.gfx950 = true;
  target.fp8 = DType::kFloat8E4M3FN;
  target.terabytes_per_s = 6.1f;
  target.gigahertz = 2.4f;
  return target;
}

}  // namespace rocm_kernels::cdna
