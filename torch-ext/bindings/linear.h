// An FP8 linear behind the op that makes its input, as both halves of a decoder layer have two.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <array>

#include "../torch_binding.h"
#include "checks.h"
#include "launch.h"
#include "product.h"

namespace rocm_kernels {

// How the rows of a layer's linears are quantised; not at all where only weights are in FP8.
struct Rounding {
  bool quantizes;
  int64_t group_size;
  double scale_ub;
  bool ue8m0;
};

struct Linear {
  const Tensor& w;
  const std::optional<Tensor>&scale_w, &bias, &input_scale;
};

// Rows that a linear takes: their memory, and that of the scales that are computed with them.
struct LinearInput {
  Tensor rows;
  std::optional<Tensor> scales;
};

inline LinearInput empty_input(const Linear& linear, const Rounding& rounding, const Tensor& like,
                               int64_t rows) {
  const int64_t k = linear.w.size(1);
  if (!rounding.quantizes) return {torch::stable::new_empty(like, {rows, k}), std::nullopt};
  Tensor data = torch::stable::new_empty(like, {rows, k}, linear.w.scalar_type());
  if (linear.input_scale) return {data, std::nullopt};
  const int64_t groups = rounding.group_size == 0 ? 1 : ceil_div(k, rounding.group_size);
  return {data, torch::stable::new_empty(like, {rows, groups}, ScalarType::Float)};
}

inline void multiply(Tensor& out, const LinearInput& input, const Linear& linear) {
  gemm(out, input.rows, linear.w, linear.input_scale ? linear.input_scale : input.scales,
       linear.scale_w, linear.bias, "");
}

// Adds the product to out where the product's own kernel does; false: nothing was done.
inline bool add_product(Tensor& out, const LinearInput& input, const Linear& linear) {
  return add_gemm(out, input.rows, linear.w, linear.input_scale ? linear.input_scale : input.scales,
                  linear.scale_w, linear.bias);
}

// Scratch in a new layout.
inline Tensor heads_of(const Tensor& rows, std::array<int64_t, 4> sizes,
                       std::array<int64_t, 4> strides, int64_t offset) {
  AtenTensorHandle view = nullptr;
  const auto error =
      aoti_torch__reinterpret_tensor(rows.get(), 4, sizes.data(), strides.data(), offset, &view);
  require(error == 0, "torch made no view of a tensor");
  return Tensor(view);
}

// Has a program that is recorded hold the scratch of its launches.
template <typename... Tensors>
void keep_in_program(const Tensors&... tensors) {
#if defined(CPU_KERNEL)
  if (Program* const program = Program::recorded()) program->add([tensors...](const Context&) {});
#endif
}

}  // namespace rocm_kernels
