// The arguments of the matrix-product kernels for CDNA3 and CDNA4: GemmArgs with strides in bytes
// and 32-bit sizes, and how the work is divided.
#pragma once

#include "../args.h"
#include "../schedule.h"

namespace rocm_kernels::cdna {

struct GemmProblem {
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
  int32_t waves;                  // of a workgroup
  int32_t producers, num_stages;  // specialised waves
  bool wide_stores;               // four neighbours of out can be stored together
  bool vector_rows;               // out is 16-bit, its rows vectors of 16 bytes
  bool adds;                      // to what such rows hold, rounded once more
  Schedule schedule;
  TileOrder order;    // full products
  uint64_t* tickets;  // [tiles]
  float* partials;    // [slots][rows of a tile][block_n]
  uint64_t launch;    // names this launch in the tickets, 56 bits
};

// Host: all that args alone say.
inline GemmProblem make_problem(const GemmArgs& args) {
  GemmProblem p = {};
  p.a = static_cast<const uint8_t*>(args.a);
  p.w = static_cast<const uint8_t*>(args.w);
  p.out = args.out;
  p.bias = args.bias;
  p.a_stride = args.a_stride * size_of(args.a_dtype);
  p.w_stride = args.w_stride * size_of(args.w_dtype);
  p.out_stride = args.out_stride;
  p.scale_a = args.scale_a;
  p.scale_w = args.scale_w;
  p.m = static_cast<int32_t>(args.m);
  p.n = static_cast<int32_t>(args.n);
  p.k = static_cast<int32_t>(args.k);
  p.out_dtype = args.out_dtype;
  p.bias_dtype = args.bias_dtype;
  const int64_t four = 4 * size_of(args.out_dtype);
  p.wide_stores = reinterpret_cast<uintptr_t>(args.out) % four == 0 && args.out_stride % 4 == 0;
  p.vector_rows = args.out_dtype != DType::kFloat32 && args.n % 8 == 0 &&
                  args.out_stride % 8 == 0 && reinterpret_cast<uintptr_t>(args.out) % 16 == 0;
  return p;
}

// Workspace: tickets first, one for each tile, then the slots of partial sums.
inline int64_t ticket_bytes(const Schedule& schedule) {
  return (schedule.tiles * static_cast<int64_t>(sizeof(uint64_t)) + 255) / 256 * 256;
}

}  // namespace rocm_kernels::cdna
