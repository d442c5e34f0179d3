#include "../../rope_and_cache/rope_and_cache.h"

#include "../torch_binding.h"
#include "checks.h"
#include "held_rotation.h"
#include "launch.h"

using namespace rocm_kernels;

namespace {

// [sequences or pages, rows, heads, elements] with elements side by side.
HeadRows require_head_rows(const Tensor& tensor, const char* name) {
  require(tensor.dim() == 4, name, " must have four dimensions, got ", shape_of(tensor));
  require(tensor.size(3) <= 1 || tensor.numel() == 0 || tensor.stride(3) == 1, name,
          " must be contiguous in its last dimension, got a stride of ", tensor.stride(3),
          "; call .contiguous() first");
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void require_heads_apart(const Tensor& tensor, const char* name) {
  for (int64_t i = 0; i < 3; ++i) {
    require(tensor.size(i) <= 1 || tensor.stride(i) >= tensor.size(3), name,
            " is written, so its heads must not overlap, got a stride of ", tensor.stride(i),
            " for ", tensor.size(3), " elements");
  }
}

// Heads of the tokens that q has.
void require_tokens(const Tensor& tensor, const char* name, const RopeAndCacheArgs& args,
                    int64_t heads, int64_t elements) {
  require(tensor.size(0) == args.batch && tensor.size(1) == args.rows && tensor.size(2) == heads &&
              tensor.size(3) == elements,
          name, " must have shape [", args.batch, ", ", args.rows, ", ", heads, ", ", elements,
          "], got ", shape_of(tensor));
}

void require_dtype(const Tensor& tensor, const char* name, const Tensor& q) {
  require(tensor.scalar_type() == q.scalar_type(), name, " must have the dtype of q, got ",
          name_of(tensor.scalar_type()), " and ", name_of(q.scalar_type()));
  require_device(tensor, name, q, "q");
}

// [1 or sequences, rows] of any strides; where it `may_begin` also [sequences], for all rows.
TokenIntegers require_token_integers(const Tensor& tensor, const char* name, const Tensor& q,
                                     bool may_begin = false) {
  require(tensor.scalar_type() == ScalarType::Int || tensor.scalar_type() == ScalarType::Long, name,
          " must be int32 or int64, got ", name_of(tensor.scalar_type()));
  require_device(tensor, name, q, "q");
  const bool wide = tensor.scalar_type() == ScalarType::Long;
  if (may_begin && tensor.dim() == 1 && tensor.size(0) == q.size(0)) {
    return {tensor.data_ptr(), tensor.stride(0), 0, wide};
  }
  require(tensor.dim() == 2 && (tensor.size(0) == 1 || tensor.size(0) == q.size(0)) &&
              tensor.size(1) == q.size(1),
          name, " must be [1 or ", q.size(0), ", ", q.size(1), "], got ", shape_of(tensor));
  return {tensor.data_ptr(), tensor.size(0) == 1 ? 0 : tensor.stride(0), tensor.stride(1), wide};
}

// [1], [heads] or [sequences, heads].
const float* require_cache_scale(const Tensor& scale, const char* name, const Tensor& q,
                                 int64_t heads, int64_t& batch_stride, int64_t& head_stride) {
  require(scale.scalar_type() == ScalarType::Float, name, " must be float32, got ",
          name_of(scale.scalar_type()));
  require_device(scale, name, q, "q");
  const int64_t last = scale.dim() - 1;
  const bool of_sequences = last == 1 && scale.size(0) == q.size(0) && scale.size(1) == heads;
  require(of_sequences || (last == 0 && (scale.size(0) == 1 || scale.size(0) == heads)), name,
          " must have one element, one for each of the ", heads, " heads, or shape [", q.size(0),
          ", ", heads, "], got ", shape_of(scale));
  batch_stride = of_sequences ? scale.stride(0) : 0;
  head_stride = scale.size(last) == 1 ? 0 : scale.stride(last);
  return static_cast<const float*>(scale.data_ptr());
}

// cos or sin: [rows of positions, columns], or [1 or sequences, rows, columns] without positions.
const void* require_table(const Tensor& table, const char* name, const Tensor& q,
                          const RopeAndCacheArgs& args, bool by_position, bool whole,
                          int64_t& batch_stride, int64_t& row_stride) {
  require_device(table, name, q, "q");
  const int64_t last = table.dim() - 1, columns = args.rotary_dim;
  if (by_position) {
    require(last == 1, name, " must be [positions, columns] beside positions, got ",
            shape_of(table));
    batch_stride = 0;
  } else {
    require(last == 2 && (table.size(0) == 1 || table.size(0) == args.batch) &&
                table.size(1) == args.rows,
            name, " must be [1 or ", args.batch, ", ", args.rows, ", columns], got ",
            shape_of(table));
    batch_stride = table.size(0) == 1 ? 0 : table.stride(0);
  }
  require(table.size(last) == columns || (!whole && table.size(last) == columns / 2), name,
          " must have rotary_dim or, beside sin, rotary_dim / 2 columns, got ", shape_of(table),
          " for a rotary_dim of ", columns);
  require(table.size(last) <= 1 || table.stride(last) == 1, name,
          " must be contiguous in its last dimension, got a stride of ", table.stride(last));
  row_stride = table.stride(last - 1);
  return table.data_ptr();
}

// From the first byte of a page to its last.
Memory memory_of_page(const Tensor& cache) {
  Memory memory;
  if (cache.numel() == 0) return memory;
  int64_t last = 0;
  for (int64_t i = 1; i < 4; ++i) last += (cache.size(i) - 1) * cache.stride(i);
  memory.begin = reinterpret_cast<intptr_t>(cache.data_ptr());
  memory.rows = 1;
  memory.stride = memory.row_bytes = (last + 1) * static_cast<int64_t>(cache.element_size());
  return memory;
}

}  // namespace

void rope_and_cache(Tensor& out, std::optional<Tensor> k_out, std::optional<Tensor> k_cache,
                    std::optional<Tensor> v_cache, const Tensor& q, std::optional<Tensor> k,
                    std::optional<Tensor> v, std::optional<Tensor> cos, std::optional<Tensor> sin,
                    std::optional<Tensor> positions, std::optional<Tensor> q_weight,
                    std::optional<Tensor> k_weight, std::optional<Tensor> places,
                    std::optional<Tensor> block_table, std::optional<Tensor> k_scale,
                    std::optional<Tensor> v_scale, std::string places_are, int64_t rotary_dim,
                    bool interleaved, double eps, double weight_offset) {
  RopeAndCacheArgs args;
  args.dtype = require_float(q, "q");
  args.q = require_head_rows(q, "q");
  args.batch = q.size(0);
  args.rows = q.size(1);
  args.heads = q.size(2);
  args.head_dim = args.head_dim_v = q.size(3);
  require(1 <= args.head_dim && args.head_dim <= kMaxRopeHeadDim, "heads must have 1 to ",
          kMaxRopeHeadDim, " elements, got ", args.head_dim, " of q");
  args.out = require_head_rows(out, "out");
  require_dtype(out, "out", q);
  require_tokens(out, "out", args, args.heads, args.head_dim);
  require_heads_apart(out, "out");

  // Keys and values
  require(k || (!k_out && !k_cache && !v), "k_out, v and caches must come with k, got no k");
  require(k_cache.has_value() == v_cache.has_value(),
          "k_cache and v_cache must come together, got one of them");
  require(v.has_value() || !k_cache, "a cache must come with v, got no v");
  if (k) {
    args.k = require_head_rows(*k, "k");
    args.kv_heads = k->size(2);
    require_dtype(*k, "k", q);
    require_tokens(*k, "k", args, args.kv_heads, args.head_dim);
    require(k_out || k_cache, "k must come with k_out or caches to write it to, got neither");
  }
  if (v) {
    args.v = require_head_rows(*v, "v");
    args.head_dim_v = v->size(3);
    require_dtype(*v, "v", q);
    require_tokens(*v, "v", args, args.kv_heads, args.head_dim_v);
    require(1 <= args.head_dim_v && args.head_dim_v <= kMaxRopeHeadDim,
            "heads of v must have 1 to ", kMaxRopeHeadDim, " elements, got ", args.head_dim_v);
  }
  if (k_out) {
    args.k_out = require_head_rows(*k_out, "k_out");
    require_dtype(*k_out, "k_out", q);
    require_tokens(*k_out, "k_out", args, args.kv_heads, args.head_dim);
    require_heads_apart(*k_out, "k_out");
  }

  // Angles and norms
  require(0 <= rotary_dim && rotary_dim <= args.head_dim && rotary_dim % 2 == 0,
          "rotary_dim must be even and 0 to the ", args.head_dim, " elements of a head, got ",
          rotary_dim);
  require((rotary_dim > 0) == cos.has_value(),
          "cos must come with a rotary_dim, and not without, got a rotary_dim of ", rotary_dim,
          cos ? " and cos" : " and no cos");
  require(cos || (!sin && !positions), "sin and positions must come with cos, got no cos");
  args.rotary_dim = rotary_dim;
  args.interleaved = interleaved;
  if (positions) {
    args.positions = require_token_integers(*positions, "positions", q, true);
    args.positions_begin = positions->dim() == 1;
  }
  if (cos) {
    args.table_dtype = require_float(*cos, "cos");
    args.cos = require_table(*cos, "cos", q, args, positions.has_value(), !sin,
                             args.cos_batch_stride, args.cos_row_stride);
    args.max_positions = cos->size(0);
    // A GPU reads the first row in place of one that is not there.
    require(!positions || args.max_positions > 0 || q.numel() == 0,
            "cos must have rows for positions, got ", shape_of(*cos));
    args.sin_batch_stride = args.cos_batch_stride;
    args.sin_row_stride = args.cos_row_stride;
    args.sin = static_cast<const char*>(args.cos) + rotary_dim / 2 * size_of(args.table_dtype);
  }
  if (sin) {
    require(sin->scalar_type() == cos->scalar_type(), "sin must have the dtype of cos, got ",
            name_of(sin->scalar_type()), " and ", name_of(cos->scalar_type()));
    args.sin = require_table(*sin, "sin", q, args, positions.has_value(), false,
                             args.sin_batch_stride, args.sin_row_stride);
    require(!positions || sin->size(0) == cos->size(0), "sin must have cos's ", cos->size(0),
            " rows, got ", shape_of(*sin));
  }
  require(!k_weight || k, "k_weight must come with k, got no k");
  if (q_weight) {
    args.weight_dtype = require_float(*q_weight, "q_weight");
    require_device(*q_weight, "q_weight", q, "q");
    require_contiguous_vector(*q_weight, "q_weight", args.head_dim);
    args.q_weight = q_weight->data_ptr();
  }
  if (k_weight) {
    const DType dtype = require_float(*k_weight, "k_weight");
    require(!q_weight || dtype == args.weight_dtype,
            "k_weight must have the dtype of q_weight, got ", name_of(k_weight->scalar_type()),
            " and ", q_weight ? name_of(q_weight->scalar_type()) : "");
    require_device(*k_weight, "k_weight", q, "q");
    require_contiguous_vector(*k_weight, "k_weight", args.head_dim);
    args.weight_dtype = dtype;
    args.k_weight = k_weight->data_ptr();
  }
  args.eps = static_cast<float>(eps);
  args.weight_offset = static_cast<float>(weight_offset);

  // Caches
  require(k_cache.has_value() == places.has_value(),
          "caches must come with slot_mapping, cache_seqlens or cache_positions, and these not "
          "without, got ",
          places ? "no caches" : "caches alone");
  require(k_cache || (!block_table && !k_scale && !v_scale),
          "block_table, k_scale and v_scale must come with caches, got none");
  if (k_cache) {
    args.k_cache = require_head_rows(*k_cache, "k_cache");
    args.v_cache = require_head_rows(*v_cache, "v_cache");
    args.cache_dtype = require_float_or_fp8(*k_cache, "k_cache");
    require(args.cache_dtype == args.dtype || is_fp8(args.cache_dtype),
            "k_cache must have the dtype of k, or be FP8, got ", name_of(k_cache->scalar_type()),
            " and ", name_of(q.scalar_type()));
    require(v_cache->scalar_type() == k_cache->scalar_type(),
            "v_cache must have the dtype of k_cache, got ", name_of(v_cache->scalar_type()),
            " and ", name_of(k_cache->scalar_type()));
    require_device(*k_cache, "k_cache", q, "q");
    require_device(*v_cache, "v_cache", q, "q");
    args.pages = k_cache->size(0);
    args.page_size = k_cache->size(1);
    require(args.pages * args.page_size < int64_t{1} << 31,
            "a cache must have less than 2^31 rows, got ", shape_of(*k_cache));
    require(k_cache->size(2) == args.kv_heads && k_cache->size(3) == args.head_dim,
            "k_cache must have heads as k, ", args.kv_heads, " of ", args.head_dim,
            " elements, got ", shape_of(*k_cache));
    require(v_cache->size(0) == args.pages && v_cache->size(1) == args.page_size &&
                v_cache->size(2) == args.kv_heads && v_cache->size(3) == args.head_dim_v,
            "v_cache must have k_cache's pages and rows, and heads as v, got ", shape_of(*v_cache),
            " for ", shape_of(*k_cache));
    require_heads_apart(*k_cache, "k_cache");
    require_heads_apart(*v_cache, "v_cache");
    require(!(k_scale || v_scale) || is_fp8(args.cache_dtype),
            "k_scale and v_scale are for FP8 caches, but they are ",
            name_of(k_cache->scalar_type()));
    if (k_scale) {
      args.k_scale = require_cache_scale(*k_scale, "k_scale", q, args.kv_heads,
                                         args.k_scale_batch_stride, args.k_scale_head_stride);
    }
    if (v_scale) {
      args.v_scale = require_cache_scale(*v_scale, "v_scale", q, args.kv_heads,
                                         args.v_scale_batch_stride, args.v_scale_head_stride);
    }
    args.is_slot = places_are == "slot_mapping";
    args.places_begin = places_are == "cache_seqlens";
    require(args.is_slot || args.places_begin || places_are == "cache_positions",
            "places_are must be slot_mapping, cache_seqlens or cache_positions, got ", places_are);
    const char* const places_name = places_are.c_str();
    args.places = require_token_integers(*places, places_name, q);
    require(!args.is_slot || places->size(0) == args.batch, "slot_mapping must have the ",
            args.batch, " sequences of q, got ", shape_of(*places));
    require(!block_table || !args.is_slot,
            "a slot is a place among all pages: give slot_mapping or block_table, got both");
    require(block_table || args.is_slot || args.pages == args.batch,
            "a cache without block_table and slot_mapping must have q's ", args.batch,
            " sequences, got ", shape_of(*k_cache));
  }
  if (block_table) {
    args.block_table = require_block_table(*block_table, args.batch, q);
    args.block_table_stride = block_table->stride(0);
    args.block_table_pages = block_table->size(1);
  }

  // What is written shares no memory with what is read; q and k may be turned where they are.
  Operands given;
  given.add(out, "out");
  given.add(k_out, "k_out");
  given.add(k_cache, "k_cache");
  given.add(v_cache, "v_cache");
  const int written = given.count();
  given.add(q, "q");
  given.add(k, "k");
  given.add(v, "v");
  given.add(cos, "cos");
  given.add(sin, "sin");
  given.add(positions, "positions");
  given.add(q_weight, "q_weight");
  given.add(k_weight, "k_weight");
  given.add(places, places_are.c_str());
  given.add(block_table, "block_table");
  given.add(k_scale, "k_scale");
  given.add(v_scale, "v_scale");
  const auto in_place = [](const HeadRows& a, const HeadRows& b) {
    return a.data == b.data && a.batch_stride == b.batch_stride && a.row_stride == b.row_stride &&
           a.head_stride == b.head_stride;
  };
  // Pages of keys and of values may be those of one memory, as transformers' continuous batching
  // has them: then the table, or the slots, keep them apart.
  const bool pages_apart = k_cache && (block_table || args.is_slot) &&
                           !overlap(memory_of_page(*k_cache), memory_of_page(*v_cache));
  const bool q_in_place = in_place(args.out, args.q), k_in_place = in_place(args.k_out, args.k);
  given.require_apart(written, [&](int i, int j) {
    return (q_in_place && i == 0 && j == written) ||
           (k && k_in_place && i == 1 && j == written + 1) ||
           (pages_apart && i == written - 2 && j == written - 1);
  });
  if (q.numel() == 0 && (!k || k->numel() == 0)) return;
  HeldRotation& held = HeldRotation::of_thread();
  if (held.is_next) {
    held.is_next = false;
    held.args = args;
    held.tensors = {out, q};
    for (const std::optional<Tensor>* const tensor :
         {&k_out, &k_cache, &v_cache, &k, &v, &cos, &sin, &positions, &q_weight, &k_weight, &places,
          &block_table, &k_scale, &v_scale}) {
      if (*tensor) held.tensors.push_back(**tensor);
    }
    return;
  }

  run_or_record(q, [args](const Context& context) {
    check_status(launch_rope_and_cache(args, context), "rope_and_cache");
  });
}

void hold_rotation(bool next) { HeldRotation::of_thread() = {next, std::nullopt, {}}; }
