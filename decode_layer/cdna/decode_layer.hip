// decode_layer for CDNA3 and CDNA4: a workgroup a compute unit, from the attention (attend.h) to
// the next one's qkv.
//
// All bytes that matter are the weights'. So eight waves of a workgroup do nothing but stream them,
// tile after tile; while the grid meets between two products, the first weights of the second are
// on their way. Four waves, the helpers, do all the rest, since on AMD a wave's loads return in
// order: one that waits for a flag must have no weights on their way.
//
// Timeline of a product; up to four follow one another. | is a barrier of the workgroup, || a
// meeting of the grid.
//
// clang-format off
//   streamers   ask for the first K blocks, | between (kAsksBeforeBarriers)
//               multiply the row by the tiles, each wave its part of K, asking ahead; sums to LDS | next tile ...
//   helpers     || (not before the first product) | the row: loads, norm or activation, codes to LDS |
//               | add the waves' sums; scales; activation or residual; to memory | ...
//
//   product     its row, made by every workgroup for itself     its end
//   o           fp8(attended)                                   x
//   gate, up    fp8(norm(x + residual))                         y = SiLU(gate) * up, its greatest
//   down        fp8(y)                                          out = x + residual + its sum
//   qkv         fp8(norm(out))                                  qkv
// clang-format on
//
// A tile is 16 rows of w: of w_gate_up 8 of the gate and the 8 of up that meet them, of the others
// 16 neighbours. That every workgroup makes the whole row spares a meeting each: 8 KB, or 57 KB of
// y, of an 8-billion Llama, from L2. The row is broadcast to all 16 of the matrix instruction.
//
// Sums are taken in the order of skinny_gemm's register pipeline with 8 waves and no split, so the
// bits are those of the launches.
#include "../../blocks/product/cdna/target.h"
#include "helpers.h"
#include "streamers.h"

namespace rocm_kernels::cdna::decode {
namespace {

// kVectors: of 16 bytes that a helper holds of a row of T.
template <typename T, int kVectors>
__global__ void __launch_bounds__(kThreads, 3)
    decode_layer_kernel([[maybe_unused]] const LayerProblem<T> p) {
#if ROCM_KERNELS_CDNA
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  __shared__ Meeting meeting;
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kLanes);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  uint8_t* const places = lds + p.code_bytes;
  float* const sums = reinterpret_cast<float*>(places + kStreamers * kPlaceBytes);
  if (wave < kHelpers) {
    help<T, kVectors>(p, wave, lane, lds, sums, meeting);
  } else {
    const int streamer = wave - kHelpers;
    stream(p, streamer, lane, lds, places + streamer * kPlaceBytes, sums);
  }
#endif
}

// ---- Launcher ---------------------------------------------------------------------------------

bool is_k(int64_t columns, int64_t most) {
  return columns % kBlockK == 0 && columns >= 1024 && columns <= most;
}

Status check(const DecodeLayerArgs& args, const Target& target) {
  if (!target.matrix_instructions || target.compute_units > kMostWorkgroups) {
    return "decode_layer needs a gfx942 or a gfx950, of at most 512 compute units";
  }
  if (args.dtype != DType::kBFloat16 && args.dtype != DType::kFloat16) {
    return "rows must be bfloat16 or float16";
  }
  if (args.fp8_dtype != target.fp8) return "weights must be of the FP8 dialect of this GPU";
  if (!is_k(args.hidden, 8192)) return "hidden must be a multiple of 128, from 1024 to 8192";
  if (!is_k(args.intermediate, INT32_MAX)) {
    return "intermediate must be a multiple of 128, from 1024 on";
  }
  if (args.o.w != nullptr && !is_k(args.attended_columns, 8192)) {
    return "attended must have a multiple of 128 columns, from 1024 to 8192";
  }
  const DecodeAttention& attention = args.attention;
  if (attention.qkv != nullptr) {
    const int64_t heads = attention.heads, kv_heads = attention.kv_heads;
    if (kv_heads < 1 || heads % kv_heads != 0 || heads > target.compute_units ||
        args.o.w == nullptr || args.attended_columns != heads * kHeadDim) {
      return "an attention must have query heads for each KV head, of 128, and an o that takes "
             "them";
    }
    if (attention.row_stride % 2 != 0 || attention.head_stride % 2 != 0) {
      return "strides of the cache must be even";
    }
  }
  if (args.w_qkv.w != nullptr && (args.qkv_columns < 1 || args.qkv_columns % kMmaRows != 0)) {
    return "w_qkv must have a multiple of 16 rows";
  }
  const int64_t codes = args.intermediate > 8192 ? args.intermediate : 8192;
  if (codes > target.lds_bytes ||
      lds_bytes_of(static_cast<int32_t>(codes)) + int64_t{sizeof(TeamScratch)} + 64 >
          target.lds_bytes) {
    return "intermediate exceeds what LDS holds of it; run the ops one by one";
  }
  constexpr int64_t kReach = int64_t{1} << 31;
  if (2 * args.intermediate * args.hidden >= kReach ||
      args.attended_columns * args.hidden >= kReach || args.qkv_columns * args.hidden >= kReach) {
    return "a weight must have less than 2 GiB";
  }
  for (const DecodeWeight* weight : {&args.o, &args.gate_up, &args.down, &args.w_qkv}) {
    if (weight->scale.is_blocked()) return "scales of weights must be one a tensor or one a row";
  }
  if (args.workspace == nullptr || args.state == nullptr) {
    return "decode_layer needs a workspace and a state";
  }
  return nullptr;
}

// All rows of a weight in order, or the gate's beside those of up.
template <typename T>
Product<T> make_product(const DecodeWeight& weight, int64_t n, int64_t k, Row row, End end) {
  Product<T> p{};
  const bool gated = end == End::kGated;
  p.w = static_cast<const uint8_t*>(weight.w);
  p.scale = weight.scale;
  p.row_bytes = static_cast<uint32_t>(k);
  p.half_rows = static_cast<uint32_t>(gated ? n / 2 : kHalf);
  p.tile_rows = gated ? kHalf : kMmaRows;
  p.tiles = static_cast<int32_t>(n / kMmaRows);
  p.k_blocks = static_cast<int32_t>(k / kBlockK);
  p.row = row;
  p.end = end;
  return p;
}

// Workspace: y, the greatest of each workgroup's part of it, x, attended, partials of the
// attention.
int64_t x_offset(const DecodeLayerArgs& args) { return 4 * (args.intermediate + kMostWorkgroups); }
int64_t attended_offset(const DecodeLayerArgs& args) { return x_offset(args) + 2 * args.hidden; }
int64_t partials_offset(const DecodeLayerArgs& args) {
  return attended_offset(args) + 2 * kHeadDim * args.attention.heads;
}
int64_t partials_bytes(const DecodeLayerArgs& args) {
  const DecodeAttention& a = args.attention;
  if (a.qkv == nullptr) return 0;
  return int64_t{4} * kPartialFloats * a.heads * kHelpers * (kMostWorkgroups / a.kv_heads);
}

template <typename T>
LayerProblem<T> make_layer_problem(const DecodeLayerArgs& args, const Target& target) {
  LayerProblem<T> p{};
  char* const workspace = static_cast<char*>(args.workspace);
  const T* attended = static_cast<const T*>(args.attended);
  if (const DecodeAttention& a = args.attention; a.qkv != nullptr) {
    Attention<T>& attention = p.attention;
    attention.qkv = static_cast<const T*>(a.qkv);
    attention.k_cache = static_cast<T*>(a.k_cache);
    attention.v_cache = static_cast<T*>(a.v_cache);
    attention.row_stride = a.row_stride;
    attention.head_stride = a.head_stride;
    attention.cos = static_cast<const T*>(a.cos);
    attention.sin = static_cast<const T*>(a.sin);
    attention.position = a.position;
    attention.heads = a.heads;
    attention.kv_heads = a.kv_heads;
    attention.parts = (a.heads / a.kv_heads + kUnitHeads - 1) / kUnitHeads;
    attention.splits = target.compute_units / (a.kv_heads * attention.parts);
    attention.scale_log2 = a.scale * 1.44269504f;
    attention.partials = reinterpret_cast<float*>(workspace + partials_offset(args));
    attention.attended = reinterpret_cast<T*>(workspace + attended_offset(args));
    attended = attention.attended;
  }
  RmsnormFp8Args norm;
  norm.rows = 1;
  norm.hidden = args.hidden;
  norm.eps = args.eps;
  norm.weight_offset = args.weight_offset;
  norm.x_dtype = norm.weight_dtype = args.dtype;
  norm.out_dtype = args.fp8_dtype;
  norm.scaling = Scaling::kPerToken;
  p.norm = make_norm_params<T>(norm);
  p.intermediate = static_cast<int32_t>(args.intermediate);
  p.y = static_cast<float*>(args.workspace);
  p.amax = p.y + args.intermediate;
  p.grid = static_cast<GridState*>(args.state);
  p.residual = static_cast<const T*>(args.residual);
  p.x = static_cast<const T*>(args.x);
  T* const out = static_cast<T*>(args.out);
  const auto add = [&](const Product<T>& product) {
    const int32_t k = product.k_blocks * kBlockK;
    if (k > p.code_bytes) p.code_bytes = k;
    p.products[p.count++] = product;
  };
  if (args.o.w != nullptr) {
    T* const x = reinterpret_cast<T*>(workspace + x_offset(args));
    Product<T> o =
        make_product<T>(args.o, args.hidden, args.attended_columns, Row::kQuantized, End::kStored);
    o.x = attended;
    o.out = x;
    p.x = x;
    add(o);
  }
  Product<T> gate_up =
      make_product<T>(args.gate_up, 2 * args.intermediate, args.hidden, Row::kNorm, End::kGated);
  gate_up.x = p.x;
  gate_up.addend = p.residual;
  gate_up.weight = static_cast<const T*>(args.norm_weight);
  add(gate_up);
  Product<T> down =
      make_product<T>(args.down, args.hidden, args.intermediate, Row::kActivated, End::kAdded);
  down.out = out;
  add(down);
  if (args.w_qkv.w != nullptr) {
    Product<T> qkv =
        make_product<T>(args.w_qkv, args.qkv_columns, args.hidden, Row::kNorm, End::kStored);
    qkv.x = out;
    qkv.weight = static_cast<const T*>(args.next_norm_weight);
    qkv.out = static_cast<T*>(args.qkv);
    add(qkv);
  }
  return p;
}

template <typename T, int kVectors>
Status launch_with(const DecodeLayerArgs& args, const Target& target, const Context& context) {
  const auto kernel = decode_layer_kernel<T, kVectors>;
  LayerProblem<T> p = make_layer_problem<T>(args, target);
  void* pointers[] = {&p};
  // Refused where not all workgroups would run at once: they wait for each other.
  const hipError_t error = hipLaunchCooperativeKernel(
      reinterpret_cast<const void*>(kernel), dim3(target.compute_units), dim3(kThreads), pointers,
      static_cast<unsigned>(lds_bytes_of(p.code_bytes)), stream_of(context));
  if (error != hipSuccess) static_cast<void>(hipGetLastError());
  if (error == hipErrorCooperativeLaunchTooLarge) {
    return "decode_layer needs a workgroup on every compute unit at once, and the device does not "
           "hold them; run the ops one by one";
  }
  return status_of(error);
}

}  // namespace
}  // namespace rocm_kernels::cdna::decode

namespace rocm_kernels {

int64_t decode_layer_workspace_bytes(const DecodeLayerArgs& args) {
  return cdna::decode::partials_offset(args) + cdna::decode::partials_bytes(args);
}

Status launch_decode_layer(const DecodeLayerArgs& args, const Context& context) {
  cdna::Target target;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  if (const Status error = cdna::decode::check(args, target)) return error;
  constexpr int64_t kTwoVectors = 2 * cdna::decode::kHelperThreads * 8;
  const bool two = args.hidden <= kTwoVectors && args.attended_columns <= kTwoVectors;
  if (args.dtype == DType::kBFloat16) {
    return two ? cdna::decode::launch_with<bfloat16, 2>(args, target, context)
               : cdna::decode::launch_with<bfloat16, 4>(args, target, context);
  }
  return two ? cdna::decode::launch_with<float16, 2>(args, target, context)
             : cdna::decode::launch_with<float16, 4>(args, target, context);
}

}  // namespace rocm_kernels
