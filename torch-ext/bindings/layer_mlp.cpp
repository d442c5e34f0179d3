#include "linear.h"

using namespace rocm_kernels;

bool layer_mlp(Tensor& out, Tensor& sum, const Tensor& x, const Tensor& attended,
               const Tensor& norm_weight, const Tensor& w_gate_up,
               std::optional<Tensor> scale_gate_up, std::optional<Tensor> bias_gate_up,
               std::optional<Tensor> input_scale_gate_up, const Tensor& w_down,
               std::optional<Tensor> scale_down, std::optional<Tensor> bias_down,
               std::optional<Tensor> input_scale_down, std::string activation, double eps,
               double weight_offset, bool quantizes, int64_t group_size, double scale_ub,
               bool ue8m0, bool adds) {
  require_matrix(x, "x");
  require_matrix(w_gate_up, "w_gate_up");
  require_matrix(w_down, "w_down");
  require(w_gate_up.size(0) == 2 * w_down.size(1),
          "w_gate_up must have twice as many rows as w_down has columns, got ", shape_of(w_gate_up),
          " and ", shape_of(w_down));
  Operands given;
  given.add(out, "out");
  given.add(sum, "sum");
  given.add(x, "x");
  given.add(attended, "attended");
  given.add(norm_weight, "norm_weight");
  given.add(w_gate_up, "w_gate_up");
  given.add(scale_gate_up, "scale_gate_up");
  given.add(bias_gate_up, "bias_gate_up");
  given.add(input_scale_gate_up, "input_scale_gate_up");
  given.add(w_down, "w_down");
  given.add(scale_down, "scale_down");
  given.add(bias_down, "bias_down");
  given.add(input_scale_down, "input_scale_down");
  given.require_apart(2);

  const Linear gate_up{w_gate_up, scale_gate_up, bias_gate_up, input_scale_gate_up};
  const Linear down{w_down, scale_down, bias_down, input_scale_down};
  const Rounding rounding{quantizes, group_size, scale_ub, ue8m0};
  const int64_t rows = x.size(0), columns = w_down.size(1);
  LinearInput normed = empty_input(gate_up, rounding, x, rows);
  rmsnorm_fp8(normed.rows, normed.scales, x, sum, norm_weight,
              quantizes ? input_scale_gate_up : std::nullopt, eps, group_size, scale_ub, ue8m0,
              weight_offset, attended);
  Tensor both = torch::stable::new_empty(x, {rows, 2 * columns});
  multiply(both, normed, gate_up);
  const Tensor gate = torch::stable::narrow(both, 1, 0, columns);
  const Tensor up = torch::stable::narrow(both, 1, columns, columns);
  LinearInput hidden = empty_input(down, rounding, x, rows);
  swiglu_fp8(hidden.rows, hidden.scales, gate, up, quantizes ? input_scale_down : std::nullopt,
             activation, group_size, scale_ub, ue8m0);
  const bool added = adds && add_product(sum, hidden, down);
  if (!added) multiply(out, hidden, down);
  keep_in_program(normed.rows, normed.scales, both, hidden.rows, hidden.scales);
  return added;
}
