#include "../../attention/attention.h"

#include <algorithm>

#include "../../rope_and_cache/rope_and_cache.h"
#include "../torch_binding.h"
#include "checks.h"
#include "held_rotation.h"
#include "launch.h"
#include "settled.h"

using namespace rocm_kernels;

namespace {

// Queries, keys, values and out are [rows, heads, elements], or have their sequences or pages in
// front; elements lie side by side.
void require_heads(const Tensor& tensor, const char* name, int64_t dimensions) {
  require(tensor.dim() == dimensions, name, " must have ", dimensions, " dimensions, got ",
          shape_of(tensor));
  require(
      tensor.size(dimensions - 1) <= 1 || tensor.numel() == 0 || tensor.stride(dimensions - 1) == 1,
      name, " must be contiguous in its last dimension, got a stride of ",
      tensor.stride(dimensions - 1), "; call .contiguous() first");
}

AttentionRows rows_of(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return {tensor.data_ptr(), last == 3 ? tensor.stride(0) : 0, tensor.stride(last - 2),
          tensor.stride(last - 1)};
}

const int32_t* require_integers(const Tensor& tensor, const char* name, const Tensor& q,
                                int64_t length) {
  require(tensor.scalar_type() == ScalarType::Int, name, " must be int32, got ",
          name_of(tensor.scalar_type()));
  require_device(tensor, name, q, "q");
  require_contiguous_vector(tensor, name, length);
  return static_cast<const int32_t*>(tensor.data_ptr());
}

const float* require_descale(const Tensor& tensor, const char* name, const Tensor& q, int64_t batch,
                             int64_t heads) {
  require(tensor.scalar_type() == ScalarType::Float, name, " must be float32, got ",
          name_of(tensor.scalar_type()));
  require_device(tensor, name, q, "q");
  require(tensor.dim() == 2 && tensor.size(0) == batch && tensor.size(1) == heads, name,
          " must have shape [", batch, ", ", heads, "], got ", shape_of(tensor));
  return static_cast<const float*>(tensor.data_ptr());
}

// The launcher's struct, of tensors that are as required.
AttentionArgs describe_attention(
    const Tensor& out, const std::optional<Tensor>& lse, const Tensor& q, const Tensor& k,
    const Tensor& v, const std::optional<Tensor>& cu_seqlens_q,
    const std::optional<Tensor>& cu_seqlens_k, const std::optional<Tensor>& seqused_k,
    const std::optional<Tensor>& leftpad_k, const std::optional<Tensor>& block_table,
    const std::optional<Tensor>& k_descale, const std::optional<Tensor>& v_descale,
    const std::optional<Tensor>& sinks, int64_t max_seqlen_q, int64_t max_seqlen_k, double scale,
    int64_t window_left, int64_t window_right, double softcap) {
  AttentionArgs args;
  const int64_t q_dims = cu_seqlens_q ? 3 : 4, k_dims = cu_seqlens_k ? 3 : 4;
  require_heads(q, "q", q_dims);
  require_heads(k, "k", k_dims);
  require_heads(v, "v", k_dims);
  require_heads(out, "out", q_dims);
  args.q_dtype = require_float(q, "q");
  args.kv_dtype = require_float_or_fp8(k, "k");
  require(args.kv_dtype == args.q_dtype || is_fp8(args.kv_dtype),
          "k must have the dtype of q, or be FP8, got ", name_of(k.scalar_type()), " and ",
          name_of(q.scalar_type()));
  require(v.scalar_type() == k.scalar_type(), "v must have the dtype of k, got ",
          name_of(v.scalar_type()), " and ", name_of(k.scalar_type()));
  require(out.scalar_type() == q.scalar_type(), "out must have the dtype of q, got ",
          name_of(out.scalar_type()), " and ", name_of(q.scalar_type()));
  require_device(out, "out", q, "q");
  require_device(k, "k", q, "q");
  require_device(v, "v", q, "q");

  args.heads = q.size(q_dims - 2);
  args.head_dim = q.size(q_dims - 1);
  args.kv_heads = k.size(k_dims - 2);
  args.head_dim_v = v.size(k_dims - 1);
  require(args.kv_heads > 0 && args.heads > 0 && args.heads % args.kv_heads == 0,
          "the heads of q must be a multiple of those of k, got ", args.heads, " and ",
          args.kv_heads);
  require(k.size(k_dims - 1) == args.head_dim, "k must have heads of ", args.head_dim,
          " elements, as q, got ", shape_of(k));
  require(1 <= args.head_dim && args.head_dim <= kMaxHeadDim && 1 <= args.head_dim_v &&
              args.head_dim_v <= kMaxHeadDim,
          "heads must have 1 to ", kMaxHeadDim, " elements, got ", args.head_dim, " of q and ",
          args.head_dim_v, " of v");
  for (int64_t i = 0; i + 1 < k_dims; ++i) {
    require(v.size(i) == k.size(i), "v must have k's sequences, rows and heads, got ", shape_of(v),
            " and ", shape_of(k));
  }
  for (int64_t i = 0; i < q_dims; ++i) {
    require(out.size(i) == (i + 1 < q_dims ? q.size(i) : args.head_dim_v),
            "out must have q's shape, with heads of v's ", args.head_dim_v, " elements, got ",
            shape_of(out), " and ", shape_of(q));
  }

  // Sequences
  args.batch = cu_seqlens_q ? cu_seqlens_q->numel() - 1 : q.size(0);
  require(args.batch >= 0, "cu_seqlens_q must have a first and a last, got ",
          cu_seqlens_q ? cu_seqlens_q->numel() : 0, " elements");
  require(!(cu_seqlens_k && block_table),
          "keys lie in pages or follow each other: give "
          "cu_seqlens_k or block_table, got both");
  if (cu_seqlens_q) {
    args.cu_seqlens_q = require_integers(*cu_seqlens_q, "cu_seqlens_q", q, args.batch + 1);
  }
  if (cu_seqlens_k) {
    args.cu_seqlens_k = require_integers(*cu_seqlens_k, "cu_seqlens_k", q, args.batch + 1);
  }
  if (seqused_k) {
    args.seqused_k = require_integers(*seqused_k, "seqused_k", q, args.batch);
  }
  if (leftpad_k) {
    args.leftpad_k = require_integers(*leftpad_k, "leftpad_k", q, args.batch);
  }
  // A caller may name the most that a server takes: no sequence has more rows than all together.
  args.max_seqlen_q = cu_seqlens_q ? std::min(max_seqlen_q, q.size(0)) : q.size(1);
  args.max_seqlen_k = cu_seqlens_k ? std::min(max_seqlen_k, k.size(0)) : max_seqlen_k;
  require(max_seqlen_q >= 0 && max_seqlen_k >= 0 && max_seqlen_k < (int64_t{1} << 30),
          "max_seqlen_q and max_seqlen_k must be at least 0 and less than 2^30, got ", max_seqlen_q,
          " and ", max_seqlen_k);
  if (block_table) {
    args.block_table = require_block_table(*block_table, args.batch, q);
    args.block_table_stride = block_table->stride(0);
    args.page_size = k.size(1);
    args.pages = k.size(0);
    require(args.page_size > 0, "pages must have rows, got k of shape ", shape_of(k));
    args.max_seqlen_k = std::min(max_seqlen_k, block_table->size(1) * args.page_size);
  } else if (!cu_seqlens_k) {
    require(k.size(0) == args.batch, "k must have q's ", args.batch, " sequences, got ",
            shape_of(k));
    require(max_seqlen_k <= k.size(1), "max_seqlen_k must be at most k's ", k.size(1),
            " rows, got ", max_seqlen_k);
  }

  // What is written
  const auto require_apart = [&](const Tensor& written, const char* name) {
    const auto apart = [&](const std::optional<Tensor>& other, const char* other_name) {
      if (other) require_no_overlap(written, name, *other, other_name);
    };
    apart(cu_seqlens_q, "cu_seqlens_q");
    apart(cu_seqlens_k, "cu_seqlens_k");
    apart(seqused_k, "seqused_k");
    apart(leftpad_k, "leftpad_k");
    apart(block_table, "block_table");
    apart(k_descale, "k_descale");
    apart(v_descale, "v_descale");
    apart(sinks, "sinks");
  };
  for (int64_t i = 0; i + 1 < q_dims; ++i) {
    require(out.size(i) <= 1 || out.stride(i) >= args.head_dim_v,
            "out is written, so its heads must not overlap, got a stride of ", out.stride(i),
            " for ", args.head_dim_v, " elements");
  }
  require_no_overlap(out, "out", q, "q");
  require_no_overlap(out, "out", k, "k");
  require_no_overlap(out, "out", v, "v");
  require_apart(out, "out");
  if (lse) {
    require(lse->scalar_type() == ScalarType::Float, "lse must be float32, got ",
            name_of(lse->scalar_type()));
    require_device(*lse, "lse", q, "q");
    const int64_t last = lse->dim() - 1;
    require(last == q_dims - 2 && (q_dims == 3 || lse->size(0) == args.batch) &&
                lse->size(last - 1) == args.heads && lse->size(last) == q.size(q_dims - 3) &&
                (lse->size(last) <= 1 || lse->stride(last) == 1),
            "lse must be [", q_dims == 3 ? "" : "batch, ",
            "heads, rows] of q, contiguous in its "
            "last dimension, got ",
            shape_of(*lse), " for ", shape_of(q));
    for (int64_t i = 0; i < last; ++i) {
      require(lse->size(i) <= 1 || lse->stride(i) >= lse->size(last),
              "lse is written, so its heads must not overlap, got a stride of ", lse->stride(i),
              " for ", lse->size(last), " rows");
    }
    require_no_overlap(*lse, "lse", q, "q");
    require_no_overlap(*lse, "lse", k, "k");
    require_no_overlap(*lse, "lse", v, "v");
    require_no_overlap(*lse, "lse", out, "out");
    require_apart(*lse, "lse");
    args.lse = static_cast<float*>(lse->data_ptr());
    args.lse_batch_stride = q_dims == 3 ? 0 : lse->stride(0);
    args.lse_head_stride = lse->stride(last - 1);
  }

  // Scales and sinks
  if (k_descale) {
    args.k_descale = require_descale(*k_descale, "k_descale", q, args.batch, args.kv_heads);
    args.k_descale_batch_stride = k_descale->stride(0);
    args.k_descale_head_stride = k_descale->stride(1);
  }
  if (v_descale) {
    args.v_descale = require_descale(*v_descale, "v_descale", q, args.batch, args.kv_heads);
    args.v_descale_batch_stride = v_descale->stride(0);
    args.v_descale_head_stride = v_descale->stride(1);
  }
  if (sinks) {
    args.sink_dtype = require_float(*sinks, "sinks");
    require_device(*sinks, "sinks", q, "q");
    require_contiguous_vector(*sinks, "sinks", args.heads);
    args.sinks = sinks->data_ptr();
  }
  require(softcap >= 0, "softcap must be positive, or 0 for none, got ", softcap);

  args.q = rows_of(q);
  args.k = rows_of(k);
  args.v = rows_of(v);
  args.out = out.data_ptr();
  const AttentionRows of_out = rows_of(out);
  args.out_batch_stride = of_out.batch_stride;
  args.out_row_stride = of_out.row_stride;
  args.out_head_stride = of_out.head_stride;
  args.scale = static_cast<float>(scale);
  args.softcap = static_cast<float>(softcap);
  // More keys than lie between any two positions are all: their sums with positions would overflow.
  constexpr int64_t kAllKeys = int64_t{1} << 31;
  args.window_left = window_left < 0 || window_left >= kAllKeys ? -1 : window_left;
  args.window_right = window_right < 0 || window_right >= kAllKeys ? -1 : window_right;
  args.total_k = cu_seqlens_k ? k.size(0) : 0;
  args.total_q = cu_seqlens_q ? q.size(0) : args.batch * args.max_seqlen_q;
  return args;
}

// Whether a rotation's results are this attention's queries and caches, a token a sequence.
bool is_in_front(const RopeAndCacheArgs& fresh, const AttentionArgs& args) {
  const auto same = [](const HeadRows& a, const AttentionRows& b) {
    return a.data == b.data && a.batch_stride == b.batch_stride && a.row_stride == b.row_stride &&
           a.head_stride == b.head_stride;
  };
  return fresh.rows == 1 && fresh.batch == args.batch && fresh.heads == args.heads &&
         fresh.kv_heads == args.kv_heads && fresh.head_dim == args.head_dim &&
         fresh.head_dim_v == args.head_dim_v && fresh.dtype == args.q_dtype &&
         fresh.cache_dtype == args.kv_dtype &&
         (args.block_table == nullptr || fresh.page_size == args.page_size) &&
         same(fresh.out, args.q) && same(fresh.k_cache, args.k) && same(fresh.v_cache, args.v) &&
         fresh.block_table == args.block_table && args.cu_seqlens_q == nullptr;
}

void check_attention_status(Status status, const AttentionArgs& args) {
  if (status == nullptr || args.config == nullptr) return check_status(status, "attention");
  fail("attention: ", status, "; got '", args.config, "' for ", args.batch, " sequences of ",
       args.max_seqlen_q, " queries and ", args.max_seqlen_k, " keys, ", args.heads, " and ",
       args.kv_heads, " heads of ", args.head_dim, " and ", args.head_dim_v,
       " elements; attention_configs tells what these operands take");
}

}  // namespace

void attention(Tensor& out, std::optional<Tensor> lse, const Tensor& q, const Tensor& k,
               const Tensor& v, std::optional<Tensor> cu_seqlens_q,
               std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> seqused_k,
               std::optional<Tensor> leftpad_k, std::optional<Tensor> block_table,
               std::optional<Tensor> k_descale, std::optional<Tensor> v_descale,
               std::optional<Tensor> sinks, int64_t max_seqlen_q, int64_t max_seqlen_k,
               double scale, int64_t window_left, int64_t window_right, double softcap,
               std::string config) {
  const HeldRotation held = HeldRotation::take();
  AttentionArgs args = describe_attention(
      out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, k_descale,
      v_descale, sinks, max_seqlen_q, max_seqlen_k, scale, window_left, window_right, softcap);
  if (out.numel() == 0 || args.batch == 0 || args.max_seqlen_q == 0) return;  // no sequence's rows
  args.keys_are_settled = max_seqlen_q == 1 && !cu_seqlens_q && !cu_seqlens_k && !block_table &&
                          is_settled(k) && is_settled(v);
  Order::of_thread().pass(args.batch * args.kv_heads * args.max_seqlen_k *
                          (args.head_dim + args.head_dim_v) * size_of(args.kv_dtype));
  run_or_record(q, [args, q, config, fresh = held.args](const Context& context) mutable {
    Workspace workspace;
    args.config = config.empty() ? nullptr : config.c_str();
    if (fresh) {
      args.fresh = &*fresh;
      if (!is_in_front(*fresh, args) || !rotates_new_tokens(args, context)) {
        args.fresh = nullptr;
        check_status(launch_rope_and_cache(*fresh, context), "rope_and_cache");
      }
    }
    args.workspace = workspace.allocate(attention_workspace_bytes(args, context), q);
    check_attention_status(launch_attention(args, context), args);
  });
}

std::string attention_configs(const Tensor& out, std::optional<Tensor> lse, const Tensor& q,
                              const Tensor& k, const Tensor& v, std::optional<Tensor> cu_seqlens_q,
                              std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> seqused_k,
                              std::optional<Tensor> leftpad_k, std::optional<Tensor> block_table,
                              std::optional<Tensor> k_descale, std::optional<Tensor> v_descale,
                              std::optional<Tensor> sinks, int64_t max_seqlen_q,
                              int64_t max_seqlen_k, double scale, int64_t window_left,
                              int64_t window_right, double softcap) {
  const AttentionArgs args = describe_attention(
      out, lse, q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, block_table, k_descale,
      v_descale, sinks, max_seqlen_q, max_seqlen_k, scale, window_left, window_right, softcap);
  std::string lines;
  const auto add_line = [](const char* config, void* text) {
    static_cast<std::string*>(text)->append(config).append("\n");
  };
  const auto visit = [&](const Context& context) {
    return visit_attention_configs(args, context, add_line, &lines);
  };
  check_attention_status(with_context(q, visit), args);
  return lines;
}
