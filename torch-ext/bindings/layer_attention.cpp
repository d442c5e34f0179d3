#include "linear.h"

using namespace rocm_kernels;

void layer_attention(Tensor& out, Tensor& k_cache, Tensor& v_cache, const Tensor& x,
                     const Tensor& norm_weight, const Tensor& w_qkv,
                     std::optional<Tensor> scale_qkv, std::optional<Tensor> bias_qkv,
                     std::optional<Tensor> input_scale_qkv, const Tensor& w_o,
                     std::optional<Tensor> scale_o, std::optional<Tensor> bias_o,
                     std::optional<Tensor> input_scale_o, std::optional<Tensor> cos,
                     std::optional<Tensor> sin, std::optional<Tensor> q_norm_weight,
                     std::optional<Tensor> k_norm_weight, const Tensor& cache_positions,
                     std::optional<Tensor> k_scale, std::optional<Tensor> v_scale,
                     const Tensor& seqused_k, std::optional<Tensor> leftpad_k,
                     std::optional<Tensor> k_descale, std::optional<Tensor> v_descale,
                     std::optional<Tensor> sinks, int64_t rotary_dim, bool interleaved,
                     double head_eps, double head_weight_offset, double scale, int64_t window_left,
                     int64_t window_right, double softcap, double eps, double weight_offset,
                     bool quantizes, int64_t group_size, double scale_ub, bool ue8m0) {
  require_matrix(x, "x");
  require_matrix(w_qkv, "w_qkv");
  require_matrix(w_o, "w_o");
  require(k_cache.dim() == 4 && v_cache.dim() == 4 && k_cache.size(0) > 0 &&
              x.size(0) % k_cache.size(0) == 0,
          "caches must be [sequences, rows, KV heads, elements], and x have as many rows for each "
          "sequence, got ",
          shape_of(k_cache), ", ", shape_of(v_cache), " and ", shape_of(x));
  const int64_t batch = k_cache.size(0), rows = x.size(0) / batch;
  const int64_t kv_heads = k_cache.size(2), head_dim = k_cache.size(3);
  const int64_t head_dim_v = v_cache.size(3), columns = w_qkv.size(0);
  const int64_t of_q = columns - kv_heads * (head_dim + head_dim_v);
  require(head_dim > 0 && of_q > 0 && of_q % head_dim == 0 &&
              w_o.size(1) == of_q / head_dim * head_dim_v,
          "w_qkv must have rows for q's heads and for the caches' ", kv_heads, " of ", head_dim,
          " and ", head_dim_v, " elements, and w_o columns for q's heads of v's elements, got ",
          shape_of(w_qkv), " and ", shape_of(w_o));
  Operands given;
  given.add(out, "out");
  given.add(k_cache, "k_cache");
  given.add(v_cache, "v_cache");
  given.add(x, "x");
  given.add(norm_weight, "norm_weight");
  given.add(w_qkv, "w_qkv");
  given.add(scale_qkv, "scale_qkv");
  given.add(bias_qkv, "bias_qkv");
  given.add(input_scale_qkv, "input_scale_qkv");
  given.add(w_o, "w_o");
  given.add(scale_o, "scale_o");
  given.add(bias_o, "bias_o");
  given.add(input_scale_o, "input_scale_o");
  given.add(cos, "cos");
  given.add(sin, "sin");
  given.add(q_norm_weight, "q_norm_weight");
  given.add(k_norm_weight, "k_norm_weight");
  given.add(cache_positions, "cache_positions");
  given.add(k_scale, "k_scale");
  given.add(v_scale, "v_scale");
  given.add(seqused_k, "seqused_k");
  given.add(leftpad_k, "leftpad_k");
  given.add(k_descale, "k_descale");
  given.add(v_descale, "v_descale");
  given.add(sinks, "sinks");
  given.require_apart(3);

  const Linear qkv{w_qkv, scale_qkv, bias_qkv, input_scale_qkv};
  const Linear o{w_o, scale_o, bias_o, input_scale_o};
  const Rounding rounding{quantizes, group_size, scale_ub, ue8m0};
  LinearInput normed = empty_input(qkv, rounding, x, x.size(0));
  rmsnorm_fp8(normed.rows, normed.scales, x, std::nullopt, norm_weight,
              quantizes ? input_scale_qkv : std::nullopt, eps, group_size, scale_ub, ue8m0,
              weight_offset, std::nullopt);
  Tensor projected = torch::stable::new_empty(x, {x.size(0), columns});
  multiply(projected, normed, qkv);
  const auto heads_at = [&](int64_t first, int64_t heads, int64_t elements) {
    return heads_of(projected, {batch, rows, heads, elements},
                    {rows * columns, columns, elements, 1}, first);
  };
  Tensor q = heads_at(0, of_q / head_dim, head_dim);
  const Tensor k = heads_at(of_q, kv_heads, head_dim);
  const Tensor v = heads_at(of_q + kv_heads * head_dim, kv_heads, head_dim_v);
  rope_and_cache(q, std::nullopt, k_cache, v_cache, q, k, v, cos, sin, std::nullopt, q_norm_weight,
                 k_norm_weight, cache_positions, std::nullopt, k_scale, v_scale, "cache_positions",
                 rotary_dim, interleaved, head_eps, head_weight_offset);
  Tensor attended = torch::stable::new_empty(x, {x.size(0), w_o.size(1)});
  Tensor attended_heads = heads_of(attended, {batch, rows, q.size(2), head_dim_v},
                                   {rows * w_o.size(1), w_o.size(1), head_dim_v, 1}, 0);
  attention(attended_heads, std::nullopt, q, k_cache, v_cache, std::nullopt, std::nullopt,
            seqused_k, leftpad_k, std::nullopt, k_descale, v_descale, sinks, rows, k_cache.size(1),
            scale, window_left, window_right, softcap, "");
  LinearInput heads{attended, std::nullopt};
  if (quantizes) {
    heads = empty_input(o, rounding, x, x.size(0));
    swiglu_fp8(heads.rows, heads.scales, attended, std::nullopt, input_scale_o, "identity",
               group_size, scale_ub, ue8m0);
  }
  multiply(out, heads, o);
  keep_in_program(normed.rows, normed.scales, projected, attended, heads.rows, heads.scales);
}
