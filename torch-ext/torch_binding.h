// The package's torch ops. Each checks its tensors, fills the launcher's struct and launches on the
// current stream (GPU) or torch's thread pool (CPU). All raise RuntimeError before anything is
// written when an argument is not as required.
//
// config: a text of <op>_configs; empty: the one in force, or the backend's choice.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

// out is written: exchanges with the ranks of a group, as all_reduce/all_reduce.h says. x and out
// are contiguous, of one dtype; out may be x. memory, memory_bytes: where this rank's lies, which a
// Communicator owns; not a tensor, since torch.compile works on copies of tensors that are written.
// timeout: seconds.
void all_reduce(torch::stable::Tensor& out, const torch::stable::Tensor& x, int64_t memory,
                int64_t memory_bytes, int64_t rank, int64_t ranks, double timeout);
void reduce_scatter(torch::stable::Tensor& out, const torch::stable::Tensor& x, int64_t memory,
                    int64_t memory_bytes, int64_t rank, int64_t ranks, double timeout);
void all_gather(torch::stable::Tensor& out, const torch::stable::Tensor& x, int64_t memory,
                int64_t memory_bytes, int64_t rank, int64_t ranks, double timeout);

// As rmsnorm_fp8 below, of all_reduce's result; x is contiguous.
void all_reduce_rmsnorm_fp8(torch::stable::Tensor& out, std::optional<torch::stable::Tensor> scales,
                            const torch::stable::Tensor& x,
                            std::optional<torch::stable::Tensor> residual,
                            const torch::stable::Tensor& weight,
                            std::optional<torch::stable::Tensor> scale, double eps,
                            int64_t group_size, double scale_ub, bool ue8m0, double weight_offset,
                            std::optional<torch::stable::Tensor> addend, int64_t memory,
                            int64_t memory_bytes, int64_t rank, int64_t ranks, double timeout);

// out is written: the sum of the ranks' gemm, below, of these operands; contiguous.
void linear_all_reduce(torch::stable::Tensor& out, const torch::stable::Tensor& a,
                       const torch::stable::Tensor& w, std::optional<torch::stable::Tensor> scale_a,
                       std::optional<torch::stable::Tensor> scale_w,
                       std::optional<torch::stable::Tensor> bias, int64_t memory,
                       int64_t memory_bytes, int64_t rank, int64_t ranks, double timeout);

// How it runs for these operands: "sent" by a product that sends its tiles to the ranks while
// others are computed, and a kernel that adds them up; or "apart", as gemm and all_reduce.
std::string linear_all_reduce_configs(const torch::stable::Tensor& out,
                                      const torch::stable::Tensor& a,
                                      const torch::stable::Tensor& w,
                                      std::optional<torch::stable::Tensor> scale_a,
                                      std::optional<torch::stable::Tensor> scale_w, int64_t memory,
                                      int64_t memory_bytes, int64_t rank, int64_t ranks);

// out and lse are written. q and out: [sequences, rows, heads, elements], or [rows, heads,
// elements] with cu_seqlens_q; k and v likewise with cu_seqlens_k, or pages of a cache by
// block_table
// (../attention/attention.h). A window of -1 has no bound.
void attention(torch::stable::Tensor& out, std::optional<torch::stable::Tensor> lse,
               const torch::stable::Tensor& q, const torch::stable::Tensor& k,
               const torch::stable::Tensor& v, std::optional<torch::stable::Tensor> cu_seqlens_q,
               std::optional<torch::stable::Tensor> cu_seqlens_k,
               std::optional<torch::stable::Tensor> seqused_k,
               std::optional<torch::stable::Tensor> leftpad_k,
               std::optional<torch::stable::Tensor> block_table,
               std::optional<torch::stable::Tensor> k_descale,
               std::optional<torch::stable::Tensor> v_descale,
               std::optional<torch::stable::Tensor> sinks, int64_t max_seqlen_q,
               int64_t max_seqlen_k, double scale, int64_t window_left, int64_t window_right,
               double softcap, std::string config);

// One config a line: what attention runs for these operands, then what else is worth timing.
std::string attention_configs(
    const torch::stable::Tensor& out, std::optional<torch::stable::Tensor> lse,
    const torch::stable::Tensor& q, const torch::stable::Tensor& k, const torch::stable::Tensor& v,
    std::optional<torch::stable::Tensor> cu_seqlens_q,
    std::optional<torch::stable::Tensor> cu_seqlens_k,
    std::optional<torch::stable::Tensor> seqused_k, std::optional<torch::stable::Tensor> leftpad_k,
    std::optional<torch::stable::Tensor> block_table,
    std::optional<torch::stable::Tensor> k_descale, std::optional<torch::stable::Tensor> v_descale,
    std::optional<torch::stable::Tensor> sinks, int64_t max_seqlen_q, int64_t max_seqlen_k,
    double scale, int64_t window_left, int64_t window_right, double softcap);

// out, k_out and caches are written, as rope_and_cache/rope_and_cache.h says. q, k, v, out and
// k_out are [sequences, rows, heads, elements], caches [pages, rows, heads, elements]. places_are:
// the name of the argument that `places` is to users: slot_mapping, cache_seqlens or
// cache_positions, [1 or sequences, rows]. positions likewise, or [sequences]: of their first rows.
// out may be q, and k_out k.
void rope_and_cache(
    torch::stable::Tensor& out, std::optional<torch::stable::Tensor> k_out,
    std::optional<torch::stable::Tensor> k_cache, std::optional<torch::stable::Tensor> v_cache,
    const torch::stable::Tensor& q, std::optional<torch::stable::Tensor> k,
    std::optional<torch::stable::Tensor> v, std::optional<torch::stable::Tensor> cos,
    std::optional<torch::stable::Tensor> sin, std::optional<torch::stable::Tensor> positions,
    std::optional<torch::stable::Tensor> q_weight, std::optional<torch::stable::Tensor> k_weight,
    std::optional<torch::stable::Tensor> places, std::optional<torch::stable::Tensor> block_table,
    std::optional<torch::stable::Tensor> k_scale, std::optional<torch::stable::Tensor> v_scale,
    std::string places_are, int64_t rotary_dim, bool interleaved, double eps, double weight_offset);

// The next rope_and_cache of this thread, if `next`, runs with its next attention, which must come
// before anything reads what the first writes. Where their queries and caches are one, and
// attention's kernel turns new tokens itself (rotates_new_tokens), `out` is never written. False:
// nothing waits, and what does is forgotten.
void hold_rotation(bool next);

// out, scales and residual are written. Rows are dim 0; the last dim has stride 1. With an addend,
// residual is written only: x + addend.
// out: x's dtype (no quantisation) or FP8. With FP8, exactly one of `scale` ([1]: static) and
// `scales` (written: [rows, 1] when group_size is 0, else [rows, ceil(hidden / group_size)]) is
// given. ue8m0: those written are powers of two.
void rmsnorm_fp8(torch::stable::Tensor& out, std::optional<torch::stable::Tensor> scales,
                 const torch::stable::Tensor& x, std::optional<torch::stable::Tensor> residual,
                 const torch::stable::Tensor& weight, std::optional<torch::stable::Tensor> scale,
                 double eps, int64_t group_size, double scale_ub, bool ue8m0, double weight_offset,
                 std::optional<torch::stable::Tensor> addend);

// As above. Without `up` the activation alone; with activation "identity" plain quantisation.
void swiglu_fp8(torch::stable::Tensor& out, std::optional<torch::stable::Tensor> scales,
                const torch::stable::Tensor& gate, std::optional<torch::stable::Tensor> up,
                std::optional<torch::stable::Tensor> scale, std::string activation,
                int64_t group_size, double scale_ub, bool ue8m0);

// out [M, N] = a [M, K] x w [N, K]^T. A scale is [1], [M, 1] or [M, ceil(K / 128)] for a; [1],
// [N, 1] or [ceil(N / 128), ceil(K / 128)] for w.
void gemm(torch::stable::Tensor& out, const torch::stable::Tensor& a,
          const torch::stable::Tensor& w, std::optional<torch::stable::Tensor> scale_a,
          std::optional<torch::stable::Tensor> scale_w, std::optional<torch::stable::Tensor> bias,
          std::string config);

// One config a line: what gemm runs for these operands, then what else is worth timing. Not
// `tuned`: entries of tune_gemm count as not set.
std::string gemm_configs(const torch::stable::Tensor& out, const torch::stable::Tensor& a,
                         const torch::stable::Tensor& w,
                         std::optional<torch::stable::Tensor> scale_a,
                         std::optional<torch::stable::Tensor> scale_w, bool tuned);

// gemm of a [M, K], float32 or 16 bits, quantised to w's FP8 type with a scale a row, as
// swiglu_fp8's identity does: the same bits, by one kernel where there is one (linear_limits).
void quantized_gemm(torch::stable::Tensor& out, const torch::stable::Tensor& a,
                    const torch::stable::Tensor& w, std::optional<torch::stable::Tensor> scale_w,
                    std::optional<torch::stable::Tensor> bias);

// out [M, N / 2], float32, = act(gate) * up of gemm's results, rounded to `rounded` (a dtype of 16
// bits): w has the rows of gate, then those of up. By one kernel where there is one
// (linear_limits); where there is none, CPU alone.
void gated_gemm(torch::stable::Tensor& out, const torch::stable::Tensor& a,
                const torch::stable::Tensor& w, std::optional<torch::stable::Tensor> scale_a,
                std::optional<torch::stable::Tensor> scale_w,
                std::optional<torch::stable::Tensor> bias, std::string activation,
                std::string rounded);

// From now on gemm takes `config` for such operands where it can serve them: on this device (its
// index; -1: the CPU), with M of the class of `rows`, these N, K and dtypes, block scales or not.
// An empty config: the backend's own choice again.
void tune_gemm(int64_t device, int64_t rows, int64_t n, int64_t k, std::string a_dtype,
               std::string w_dtype, bool block_scales, std::string config);

// Products that this thread launches may read the w at this address before the previous kernel is
// done: no kernel that may still run writes it. 0: forgets all addresses.
void settle_weights(int64_t address);

// From now on each product of this thread with a settled w asks L2 for what its row of places
// [products, 4] says (blocks/product/ahead.h); without places none does. Returns what products
// there were since the last call: a line each, of w's address, rows, bytes of a row, bytes from row
// to row, runs of rows of each of which a block has some, and the bytes that other ops have read
// before it.
std::string ask_ahead(std::optional<torch::stable::Tensor> places);

// The most rows for which gemm is the quickest way through a linear layer with a w of [n, k], for
// an FP8 a and for one of 16 bits: beyond it is torch's own product. device: as in tune_gemm;
// scales: "tensor", "row" or "block", the finest of a's and w's. Then the most rows that one kernel
// quantises and multiplies (quantized_gemm), or multiplies and gates (gated_gemm); 0: none does.
std::tuple<int64_t, int64_t, int64_t, int64_t> linear_limits(int64_t device, int64_t n, int64_t k,
                                                             std::string scales);

// weights [T, k] float32 and ids [T, k] int32 are written: the k experts of each row of logits
// [T, E], as moe/topk.h says. scoring: "softmax" or "sigmoid"; bias [E] float32, groups and scale
// belong to the latter.
void topk(torch::stable::Tensor& weights, torch::stable::Tensor& ids,
          const torch::stable::Tensor& logits, std::optional<torch::stable::Tensor> bias,
          std::string scoring, int64_t groups, int64_t groups_kept, bool renormalize, double scale);

// out [T, H] = the weighted sums of x's experts, as moe/fused_moe.h says. w_gate_up [E, 2I, H] and
// w_down [E, H, I] are 16-bit, FP8 or uint8: MXFP4, two elements of K a byte, with uint8 scales
// [E, N, K / 32]. FP8 scales: [E], [E, N, 1] or [E, ceil(N / 128), ceil(K / 128)]. limit: infinity
// for none.
void fused_moe(torch::stable::Tensor& out, const torch::stable::Tensor& x,
               const torch::stable::Tensor& w_gate_up, const torch::stable::Tensor& w_down,
               const torch::stable::Tensor& topk_weights, const torch::stable::Tensor& topk_ids,
               std::optional<torch::stable::Tensor> scale_gate_up,
               std::optional<torch::stable::Tensor> scale_down,
               std::optional<torch::stable::Tensor> bias_gate_up,
               std::optional<torch::stable::Tensor> bias_down, std::string activation, double limit,
               bool interleaved, bool quantize_input, bool ue8m0, std::string config);

// One config a line: what fused_moe runs for these operands, then what else is worth timing.
std::string fused_moe_configs(const torch::stable::Tensor& out, const torch::stable::Tensor& x,
                              const torch::stable::Tensor& w_gate_up,
                              const torch::stable::Tensor& w_down,
                              const torch::stable::Tensor& topk_weights,
                              const torch::stable::Tensor& topk_ids,
                              std::optional<torch::stable::Tensor> scale_gate_up,
                              std::optional<torch::stable::Tensor> scale_down,
                              std::optional<torch::stable::Tensor> bias_gate_up,
                              std::optional<torch::stable::Tensor> bias_down,
                              std::string activation, double limit, bool interleaved,
                              bool quantize_input, bool ue8m0);

// out [R, N]: rows of a [R, K], sorted by expert, times their experts' w [E, N, K], as
// moe/grouped_gemm.h says. offsets [E] int32; scale_a as in gemm, w and scale_w as in fused_moe.
void grouped_gemm(torch::stable::Tensor& out, const torch::stable::Tensor& a,
                  const torch::stable::Tensor& w, const torch::stable::Tensor& offsets,
                  std::optional<torch::stable::Tensor> scale_a,
                  std::optional<torch::stable::Tensor> scale_w, std::string config);

// One config a line: what grouped_gemm runs for these operands, then what else is worth timing.
std::string grouped_gemm_configs(const torch::stable::Tensor& out, const torch::stable::Tensor& a,
                                 const torch::stable::Tensor& w,
                                 const torch::stable::Tensor& offsets,
                                 std::optional<torch::stable::Tensor> scale_a,
                                 std::optional<torch::stable::Tensor> scale_w);

// residual, qkv and caches are written: decoder layers for a token of each sequence, as
// decode_layers/decode_layers.h says. A list has a tensor for each layer, the last three may lack
// the last one. qkv is the first layer's, then that of the layer behind the last, where its w_qkv
// is given. Caches are [B, rows, KV heads, D] of residual's dtype or of w_o's, k_scales and
// v_scales of those [1] or [KV heads], or none are given; scales of weights [1] or [N, 1], cos and
// sin [rotary_dim] or [B, rotary_dim], position [1] or [B] int32 or int64, seqused_k and leftpad_k
// [1] or [B] int32. A residual of one dimension has one sequence, and nothing a dimension B.
void decode_layers(
    torch::stable::Tensor& residual, torch::stable::Tensor& qkv,
    std::vector<torch::stable::Tensor> k_caches, std::vector<torch::stable::Tensor> v_caches,
    std::vector<torch::stable::Tensor> norm_weights, std::vector<torch::stable::Tensor> w_o,
    std::vector<torch::stable::Tensor> scale_o, std::vector<torch::stable::Tensor> w_gate_up,
    std::vector<torch::stable::Tensor> scale_gate_up, std::vector<torch::stable::Tensor> w_down,
    std::vector<torch::stable::Tensor> scale_down,
    std::vector<torch::stable::Tensor> next_norm_weights, std::vector<torch::stable::Tensor> w_qkv,
    std::vector<torch::stable::Tensor> scale_qkv, std::vector<torch::stable::Tensor> bias_qkv,
    std::vector<torch::stable::Tensor> q_norm_weights,
    std::vector<torch::stable::Tensor> k_norm_weights, std::vector<torch::stable::Tensor> k_scales,
    std::vector<torch::stable::Tensor> v_scales, const torch::stable::Tensor& cos,
    const torch::stable::Tensor& sin, const torch::stable::Tensor& position, int64_t rotary_dim,
    bool interleaved, double eps, double weight_offset, double scale,
    std::optional<torch::stable::Tensor> seqused_k, std::optional<torch::stable::Tensor> leftpad_k,
    int64_t window_left);

// The halves of a decoder layer, as the ops above one after the other, by one call: for a prompt a
// call of each costs the host more than its kernel the GPU. What one of them refuses it refuses
// when those before it have run. input_scale_* is a static scale of the rows that a linear takes;
// None: each row's own, or none of them where not `quantizes`.
//
// out and the caches are written: x [sequences * rows, hidden], through norm, w_qkv, rotation and
// head norms, attention, w_o. Caches are [sequences, rows, KV heads, elements]; new keys and values
// go to their rows cache_positions [1 or sequences, rows], and are seen up to seqused_k.
void layer_attention(
    torch::stable::Tensor& out, torch::stable::Tensor& k_cache, torch::stable::Tensor& v_cache,
    const torch::stable::Tensor& x, const torch::stable::Tensor& norm_weight,
    const torch::stable::Tensor& w_qkv, std::optional<torch::stable::Tensor> scale_qkv,
    std::optional<torch::stable::Tensor> bias_qkv,
    std::optional<torch::stable::Tensor> input_scale_qkv, const torch::stable::Tensor& w_o,
    std::optional<torch::stable::Tensor> scale_o, std::optional<torch::stable::Tensor> bias_o,
    std::optional<torch::stable::Tensor> input_scale_o, std::optional<torch::stable::Tensor> cos,
    std::optional<torch::stable::Tensor> sin, std::optional<torch::stable::Tensor> q_norm_weight,
    std::optional<torch::stable::Tensor> k_norm_weight,
    const torch::stable::Tensor& cache_positions, std::optional<torch::stable::Tensor> k_scale,
    std::optional<torch::stable::Tensor> v_scale, const torch::stable::Tensor& seqused_k,
    std::optional<torch::stable::Tensor> leftpad_k, std::optional<torch::stable::Tensor> k_descale,
    std::optional<torch::stable::Tensor> v_descale, std::optional<torch::stable::Tensor> sinks,
    int64_t rotary_dim, bool interleaved, double head_eps, double head_weight_offset, double scale,
    int64_t window_left, int64_t window_right, double softcap, double eps, double weight_offset,
    bool quantizes, int64_t group_size, double scale_ub, bool ue8m0);

// out and sum are written: sum = x + attended, and out of it through norm, w_gate_up, activation
// and w_down. With `adds`, where the kernel of w_down's product adds: sum += out, and out is not
// written. Returns whether it was so.
bool layer_mlp(torch::stable::Tensor& out, torch::stable::Tensor& sum,
               const torch::stable::Tensor& x, const torch::stable::Tensor& attended,
               const torch::stable::Tensor& norm_weight, const torch::stable::Tensor& w_gate_up,
               std::optional<torch::stable::Tensor> scale_gate_up,
               std::optional<torch::stable::Tensor> bias_gate_up,
               std::optional<torch::stable::Tensor> input_scale_gate_up,
               const torch::stable::Tensor& w_down, std::optional<torch::stable::Tensor> scale_down,
               std::optional<torch::stable::Tensor> bias_down,
               std::optional<torch::stable::Tensor> input_scale_down, std::string activation,
               double eps, double weight_offset, bool quantizes, int64_t group_size,
               double scale_ub, bool ue8m0, bool adds);

// A program is what ops on the CPU would run, kept to run again (bindings/program.h). what: "new",
// with any number, and the program's is returned; "on", from now on this thread's ops go to its
// end; "off"; "free", nobody runs it again. All but "new" return how many launches it has.
int64_t record_program(int64_t program, std::string what);

// Runs the launches [begin, end) of a program one after the other.
void run_program(int64_t program, int64_t begin, int64_t end);
