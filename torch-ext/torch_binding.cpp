// The schemas of the ops, and under which key each is registered. bindings/ defines them, one file
// an op.
#include "torch_binding.h"

#include <torch/csrc/stable/library.h>

#include "registration.h"

STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "all_reduce(Tensor(a!) out, Tensor x, int memory, int memory_bytes, int rank, int ranks, "
      "float timeout) -> ()");
  ops.def(
      "reduce_scatter(Tensor(a!) out, Tensor x, int memory, int memory_bytes, int rank, int ranks, "
      "float timeout) -> "
      "()");
  ops.def(
      "all_gather(Tensor(a!) out, Tensor x, int memory, int memory_bytes, int rank, int ranks, "
      "float timeout) -> ()");
  ops.def(
      "all_reduce_rmsnorm_fp8(Tensor(a!) out, Tensor(b!)? scales, Tensor x, Tensor(c!)? residual, "
      "Tensor weight, Tensor? scale, float eps, int group_size, float scale_ub, bool ue8m0, "
      "float weight_offset, Tensor? addend, int memory, int memory_bytes, int rank, int ranks, "
      "float timeout) -> ()");
  ops.def(
      "linear_all_reduce(Tensor(a!) out, Tensor a, Tensor w, Tensor? scale_a, Tensor? scale_w, "
      "Tensor? bias, int memory, int memory_bytes, int rank, int ranks, float timeout) -> ()");
  ops.def(
      "linear_all_reduce_configs(Tensor out, Tensor a, Tensor w, Tensor? scale_a, Tensor? scale_w, "
      "int memory, int memory_bytes, int rank, int ranks) -> str");
  ops.def(
      "attention(Tensor(a!) out, Tensor(b!)? lse, Tensor q, Tensor k, Tensor v, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? leftpad_k, Tensor? "
      "block_table, "
      "Tensor? k_descale, Tensor? v_descale, Tensor? sinks, int max_seqlen_q, int max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap, str config=\"\") -> ()");
  ops.def(
      "attention_configs(Tensor out, Tensor? lse, Tensor q, Tensor k, Tensor v, "
      "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, Tensor? leftpad_k, Tensor? "
      "block_table, "
      "Tensor? k_descale, Tensor? v_descale, Tensor? sinks, int max_seqlen_q, int max_seqlen_k, "
      "float scale, int window_left, int window_right, float softcap) -> str");
  ops.def(
      "rope_and_cache(Tensor(a!) out, Tensor(b!)? k_out, Tensor(c!)? k_cache, Tensor(d!)? v_cache, "
      "Tensor q, Tensor? k, Tensor? v, Tensor? cos, Tensor? sin, Tensor? positions, Tensor? "
      "q_weight, Tensor? k_weight, Tensor? places, Tensor? block_table, Tensor? k_scale, Tensor? "
      "v_scale, str places_are, int rotary_dim, bool interleaved, float eps, float weight_offset) "
      "-> ()");
  ops.def("hold_rotation(bool next) -> ()");
  ops.def(
      "rmsnorm_fp8(Tensor(a!) out, Tensor(b!)? scales, Tensor x, Tensor(c!)? residual, "
      "Tensor weight, Tensor? scale, float eps, int group_size, float scale_ub, bool ue8m0, "
      "float weight_offset=0.0, Tensor? addend=None) -> ()");
  ops.def(
      "swiglu_fp8(Tensor(a!) out, Tensor(b!)? scales, Tensor gate, Tensor? up, Tensor? scale, "
      "str activation, int group_size, float scale_ub, bool ue8m0) -> ()");
  ops.def(
      "gemm(Tensor(a!) out, Tensor a, Tensor w, Tensor? scale_a, Tensor? scale_w, "
      "Tensor? bias, str config=\"\") -> ()");
  ops.def(
      "gemm_configs(Tensor out, Tensor a, Tensor w, Tensor? scale_a, Tensor? scale_w, "
      "bool tuned) -> str");
  ops.def(
      "tune_gemm(int device, int rows, int n, int k, str a_dtype, str w_dtype, "
      "bool block_scales, str config) -> ()");
  ops.def(
      "quantized_gemm(Tensor(a!) out, Tensor a, Tensor w, Tensor? scale_w, Tensor? bias) -> ()");
  ops.def(
      "gated_gemm(Tensor(a!) out, Tensor a, Tensor w, Tensor? scale_a, Tensor? scale_w, Tensor? "
      "bias, str activation, str rounded) -> ()");
  ops.def("settle_weights(int address) -> ()");
  ops.def("ask_ahead(Tensor? places) -> str");
  ops.def("linear_limits(int device, int n, int k, str scales) -> (int, int, int, int)");
  ops.def(
      "topk(Tensor(a!) weights, Tensor(b!) ids, Tensor logits, Tensor? bias, str scoring, int "
      "groups, int groups_kept, bool renormalize, float scale) -> ()");
  ops.def(
      "fused_moe(Tensor(a!) out, Tensor x, Tensor w_gate_up, Tensor w_down, Tensor "
      "topk_weights, Tensor topk_ids, Tensor? scale_gate_up, Tensor? scale_down, Tensor? "
      "bias_gate_up, Tensor? bias_down, str activation, float limit, bool interleaved, bool "
      "quantize_input, bool ue8m0, str config=\"\") -> ()");
  ops.def(
      "fused_moe_configs(Tensor out, Tensor x, Tensor w_gate_up, Tensor w_down, Tensor "
      "topk_weights, Tensor topk_ids, Tensor? scale_gate_up, Tensor? scale_down, Tensor? "
      "bias_gate_up, Tensor? bias_down, str activation, float limit, bool interleaved, bool "
      "quantize_input, bool ue8m0) -> str");
  ops.def(
      "grouped_gemm(Tensor(a!) out, Tensor a, Tensor w, Tensor offsets, Tensor? scale_a, "
      "Tensor? scale_w, str config=\"\") -> ()");
  ops.def(
      "grouped_gemm_configs(Tensor out, Tensor a, Tensor w, Tensor offsets, Tensor? scale_a, "
      "Tensor? scale_w) -> str");
  ops.def(
      "decode_layers(Tensor(a!) residual, Tensor(b!) qkv, Tensor(c!)[] k_caches, Tensor(d!)[] "
      "v_caches, Tensor[] norm_weights, Tensor[] w_o, Tensor[] scale_o, Tensor[] w_gate_up, "
      "Tensor[] scale_gate_up, Tensor[] w_down, Tensor[] scale_down, Tensor[] next_norm_weights, "
      "Tensor[] w_qkv, Tensor[] scale_qkv, Tensor[] bias_qkv, Tensor[] q_norm_weights, Tensor[] "
      "k_norm_weights, Tensor[] k_scales, Tensor[] v_scales, Tensor cos, Tensor "
      "sin, Tensor position, int rotary_dim, bool interleaved, float eps, float weight_offset, "
      "float "
      "scale, Tensor? seqused_k=None, Tensor? leftpad_k=None, int window_left=-1) -> ()");
  ops.def(
      "layer_attention(Tensor(a!) out, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor x, Tensor "
      "norm_weight, Tensor w_qkv, Tensor? scale_qkv, Tensor? bias_qkv, Tensor? input_scale_qkv, "
      "Tensor w_o, Tensor? scale_o, Tensor? bias_o, Tensor? input_scale_o, Tensor? cos, Tensor? "
      "sin, Tensor? q_norm_weight, Tensor? k_norm_weight, Tensor cache_positions, Tensor? k_scale, "
      "Tensor? v_scale, Tensor seqused_k, Tensor? leftpad_k, Tensor? k_descale, Tensor? v_descale, "
      "Tensor? sinks, int rotary_dim, bool interleaved, float head_eps, float head_weight_offset, "
      "float scale, int window_left, int window_right, float softcap, float eps, float "
      "weight_offset, bool quantizes, int group_size, float scale_ub, bool ue8m0) -> ()");
  ops.def(
      "layer_mlp(Tensor(a!) out, Tensor(b!) sum, Tensor x, Tensor attended, Tensor norm_weight, "
      "Tensor w_gate_up, Tensor? scale_gate_up, Tensor? bias_gate_up, Tensor? input_scale_gate_up, "
      "Tensor w_down, Tensor? scale_down, Tensor? bias_down, Tensor? input_scale_down, str "
      "activation, float eps, float weight_offset, bool quantizes, int group_size, float scale_ub, "
      "bool ue8m0, bool adds=False) -> bool");
  ops.def("record_program(int program, str what) -> int");
  ops.def("run_program(int program, int begin, int end) -> ()");
}

// These take no tensor that would tell the device.
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CompositeExplicitAutograd, ops) {
  ops.impl("tune_gemm", TORCH_BOX(&tune_gemm));
  ops.impl("settle_weights", TORCH_BOX(&settle_weights));
  ops.impl("ask_ahead", TORCH_BOX(&ask_ahead));
  ops.impl("hold_rotation", TORCH_BOX(&hold_rotation));
  ops.impl("linear_limits", TORCH_BOX(&linear_limits));
  ops.impl("record_program", TORCH_BOX(&record_program));
  ops.impl("run_program", TORCH_BOX(&run_program));
}

#if defined(CPU_KERNEL)
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
#else  // ROCm registers under the CUDA key, as torch does.
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
#endif
  ops.impl("all_reduce", TORCH_BOX(&all_reduce));
  ops.impl("reduce_scatter", TORCH_BOX(&reduce_scatter));
  ops.impl("all_gather", TORCH_BOX(&all_gather));
  ops.impl("all_reduce_rmsnorm_fp8", TORCH_BOX(&all_reduce_rmsnorm_fp8));
  ops.impl("linear_all_reduce", TORCH_BOX(&linear_all_reduce));
  ops.impl("linear_all_reduce_configs", TORCH_BOX(&linear_all_reduce_configs));
  ops.impl("attention", TORCH_BOX(&attention));
  ops.impl("attention_configs", TORCH_BOX(&attention_configs));
  ops.impl("rope_and_cache", TORCH_BOX(&rope_and_cache));
  ops.impl("rmsnorm_fp8", TORCH_BOX(&rmsnorm_fp8));
  ops.impl("swiglu_fp8", TORCH_BOX(&swiglu_fp8));
  ops.impl("gemm", TORCH_BOX(&gemm));
  ops.impl("gemm_configs", TORCH_BOX(&gemm_configs));
  ops.impl("quantized_gemm", TORCH_BOX(&quantized_gemm));
  ops.impl("gated_gemm", TORCH_BOX(&gated_gemm));
  ops.impl("topk", TORCH_BOX(&topk));
  ops.impl("fused_moe", TORCH_BOX(&fused_moe));
  ops.impl("fused_moe_configs", TORCH_BOX(&fused_moe_configs));
  ops.impl("grouped_gemm", TORCH_BOX(&grouped_gemm));
  ops.impl("grouped_gemm_configs", TORCH_BOX(&grouped_gemm_configs));
  ops.impl("decode_layers", TORCH_BOX(&decode_layers));
  ops.impl("layer_attention", TORCH_BOX(&layer_attention));
  ops.impl("layer_mlp", TORCH_BOX(&layer_mlp));
}

REGISTER_EXTENSION(TORCH_EXTENSION_NAME)
