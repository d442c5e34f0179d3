// Registers the ops of vLLM's experts under the names that its Python files call them by. Built by
// benchmarks/peers.py together with vLLM's sources of them.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>

using torch::stable::Tensor;

// Defined in vLLM's sources.
void silu_and_mul(Tensor& out, Tensor& input);
void dynamic_per_token_scaled_fp8_quant(Tensor& out, Tensor const& input, Tensor& scale,
                                        std::optional<Tensor> const& upper_bound);
void per_token_group_quant_fp8(Tensor const& input, Tensor& out, Tensor& scale, int64_t group,
                               double eps, double lowest, double highest, bool powers_of_two,
                               bool transposed, bool aligned);
void silu_and_mul_per_block_quant(Tensor& out, Tensor const& input, Tensor& scale, int64_t group,
                                  std::optional<Tensor> upper_bound, bool transposed);
void moe_sum(Tensor& input, Tensor& out, std::optional<Tensor> ids, std::optional<Tensor> map);
void moe_align_block_size(Tensor ids, int64_t experts, int64_t block, Tensor sorted_ids,
                          Tensor expert_ids, Tensor padded, std::optional<Tensor> map,
                          std::optional<Tensor> scatter);

STABLE_TORCH_LIBRARY(_C, ops) {
  ops.def("silu_and_mul(Tensor! out, Tensor input) -> ()");
  ops.def(
      "dynamic_per_token_scaled_fp8_quant(Tensor! out, Tensor input, Tensor! scale, "
      "Tensor? upper_bound) -> ()");
  ops.def(
      "per_token_group_fp8_quant(Tensor input, Tensor! out, Tensor! scale, int group, float eps, "
      "float lowest, float highest, bool powers_of_two, bool transposed, bool aligned) -> ()");
  ops.def(
      "silu_and_mul_per_block_quant(Tensor! out, Tensor input, Tensor! scale, int group, "
      "Tensor? upper_bound=None, bool transposed=False) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(_C, CUDA, ops) {
  ops.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  ops.impl("dynamic_per_token_scaled_fp8_quant", TORCH_BOX(&dynamic_per_token_scaled_fp8_quant));
  ops.impl("per_token_group_fp8_quant", TORCH_BOX(&per_token_group_quant_fp8));
  ops.impl("silu_and_mul_per_block_quant", TORCH_BOX(&silu_and_mul_per_block_quant));
}

STABLE_TORCH_LIBRARY(_moe_C, ops) {
  ops.def("moe_sum(Tensor input, Tensor! out, Tensor? ids=None, Tensor? map=None) -> ()");
  ops.def(
      "moe_align_block_size(Tensor ids, int experts, int block, Tensor! sorted_ids, "
      "Tensor! expert_ids, Tensor! padded, Tensor? map, Tensor!? scatter=None) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(_moe_C, CUDA, ops) {
  ops.impl("moe_sum", TORCH_BOX(&moe_sum));
  ops.impl("moe_align_block_size", TORCH_BOX(&moe_align_block_size));
}
