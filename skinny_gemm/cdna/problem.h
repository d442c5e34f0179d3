// What the AMD kernels of skinny_gemm are given: GemmArgs in bytes and 32 bits, and who does
// what.
#pragma once

#include "../../gemm/schedule.h"
#include "../skinny_gemm.h"

namespace rocm_kernels {

struct SkinnyGemmProblem {
  const uint8_t* a;    // [M, K]
  const uint8_t* w;    // [N, K]
  void* out;           // [M, N]
  const void* bias;    // [N] or nullptr
  int64_t a_stride;    // bytes
  int64_t w_stride;    // bytes
  int64_t out_stride;  // elements
  ScaleView scale_a, scale_w;
  int32_t m, n, k;
  DType out_dtype, bias_dtype;
  int32_t waves;             // of a block
  int32_t producers, slots;  // queue design
  bool wide_stores;          // four neighbours of out can be stored together
  Schedule schedule;
  uint64_t* tickets;  // [tiles]
  float* partials;    // [slots, m, tile rows]
  uint64_t launch;    // names this launch in the tickets, 56 bits
};

}  // namespace rocm_kernels
