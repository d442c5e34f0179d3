// Registers two of vLLM's ops with torch, as its own binding does. Built by benchmarks/peers.py
// together with vLLM's csrc/layernorm_quant_kernels.cu and csrc/quantization/activation_kernels.cu.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

using torch::stable::Tensor;

// Defined in vLLM's sources.
void fused_add_rms_norm_static_fp8_quant(Tensor& out, Tensor& input, Tensor& residual,
                                         Tensor& weight, Tensor& scale, double epsilon);
void silu_and_mul_quant(Tensor& out, Tensor& input, Tensor& scale);

STABLE_TORCH_LIBRARY(vllm_peer, ops) {
  ops.def(
      "add_norm_fp8(Tensor! out, Tensor input, Tensor! residual, Tensor weight, Tensor scale, "
      "float epsilon) -> ()");
  ops.def("swiglu_fp8(Tensor! out, Tensor input, Tensor scale) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(vllm_peer, CUDA, ops) {
  ops.impl("add_norm_fp8", TORCH_BOX(&fused_add_rms_norm_static_fp8_quant));
  ops.impl("swiglu_fp8", TORCH_BOX(&silu_and_mul_quant));
}
