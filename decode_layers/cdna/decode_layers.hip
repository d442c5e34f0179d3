// decode_layers for CDNA3 and CDNA4: a workgroup a compute unit, from the attention (attend.h) to
// the next one's qkv, layer after layer.
//
// All bytes that matter are the weights'. So eight waves of a workgroup do nothing but stream them,
// tile after tile; while the grid meets between two products, the first weights of the second are
// on their way. Four waves, the helpers, do all the rest, since on AMD a wave's loads return in
// order: one that waits for a flag must have no weights on their way.
//
// Timeline of a product; four a layer follow one another. | is a barrier of the workgroup, || a
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

// C: of caches, T or FP8 codes. kVectors: of 16 bytes that a helper holds of a row of T.
template <typename T, typename C, int kVectors>
__global__ void __launch_bounds__(kThreads, 3)
    decode_layers_kernel([[maybe_unused]] const StackProblem<T> p) {
#if ROCM_KERNELS_CDNA
  extern __shared__ __attribute__((aligned(16))) uint8_t lds[];
  __shared__ Meeting meeting;
  const int wave = __builtin_amdgcn_readfirstlane(threadIdx.x / kLanes);
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  uint8_t* const places = lds + p.code_bytes;
  float* const sums = reinterpret_cast<float*>(places + kStreamers * kPlaceBytes);
  if (wave < kHelpers) {
    help<T, C, kVectors>(p, wave, lane, lds, sums, meeting);
  } else {
    const int streamer = wave - kHelpers;
    stream(p, streamer, lane, lds, places + streamer * kPlaceBytes, sums);
  }
#endif
}

// ---- Launcher ---------------------------------------------------------------------------------

Status check(const DecodeLayersArgs& args, const Target& target) {
  if (!target.matrix_instructions || target.compute_units > kMostWorkgroups) {
    return "decode_layers needs a gfx942 or a gfx950, of at most 512 compute units";
  }
  if (args.count < 1) return "decode_layers needs a layer";
  if (args.tokens != 1) {
    return "decode_layers takes one sequence on this GPU; run the ops one by one";
  }
  if (args.dtype != DType::kBFloat16 && args.dtype != DType::kFloat16) {
    return "rows must be bfloat16 or float16";
  }
  if (args.fp8_dtype != target.fp8) return "weights must be of the FP8 dialect of this GPU";
  if (!is_layer_k(args.hidden, kLeastColumns, 8192))
    return "hidden must be a multiple of 128, from 1024 to 8192";
  if (!is_layer_k(args.intermediate, kLeastColumns, INT32_MAX)) {
    return "intermediate must be a multiple of 128, from 1024 on";
  }
  const bool has_o = args.layers[0].o.w != nullptr;
  if (has_o && !is_layer_k(args.attended_columns, kLeastColumns, 8192)) {
    return "attended must have a multiple of 128 columns, from 1024 to 8192";
  }
  const DecodeAttention& attention = args.attention;
  if (attention.qkv != nullptr) {
    const int64_t heads = attention.heads, kv_heads = attention.kv_heads;
    const int64_t dim = attention.head_dim, rotary_dim = attention.rotary_dim;
    if (dim != kUnitDim && (dim != kHalfDim || kv_heads % 2 != 0)) {
      return "heads must be of 128, or of 64 and their number of KV heads even; run the ops one by "
             "one";
    }
    if (rotary_dim < 16 || rotary_dim % 16 != 0 || rotary_dim > dim) {
      return "rotary_dim must be a multiple of 16, from 16 to a head's size; run the ops one by "
             "one";
    }
    if (kv_heads < 1 || heads % kv_heads != 0 || heads > target.compute_units || !has_o ||
        args.attended_columns != heads * dim) {
      return "an attention must have query heads for each KV head, of 128, and an o that takes "
             "them";
    }
    const DType cache = attention.cache_dtype;
    if (cache != args.dtype && cache != target.fp8) {
      return "caches must be of the rows' dtype, or of the FP8 dialect of this GPU";
    }
    const int64_t row = attention.row_stride, head = attention.head_stride;
    if (row * size_of(cache) % 4 != 0 || head * size_of(cache) % 4 != 0 || row > INT32_MAX ||
        head * kv_heads > INT32_MAX) {
      return "strides of the caches must be whole words of 4 bytes, and small enough for 32 bits";
    }
    if (args.count > 1 && args.qkv_columns != (heads + 2 * kv_heads) * dim) {
      return "in a stack qkv must have the columns of its attention";
    }
  }
  for (int64_t i = 0; i < args.count; ++i) {
    const DecodeLayer& layer = args.layers[i];
    if (args.count > 1 && attention.qkv == nullptr) return "several layers must have an attention";
    if ((layer.o.w != nullptr) != has_o) return "all layers must have an o, or none";
    if (const Status error = check_layer(args, layer, i == args.count - 1)) return error;
  }
  const bool has_qkv = args.count > 1 || args.layers[0].qkv.w != nullptr;
  if (has_qkv && (args.qkv_columns < 1 || args.qkv_columns % kMmaRows != 0 || !args.qkv)) {
    return "w_qkv must have a multiple of 16 rows, and a qkv to fill";
  }
  const int64_t scratch = sizeof(AttendScratch);  // more than any other row
  const int64_t codes = args.intermediate > scratch ? args.intermediate : scratch;
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
  if (args.workspace == nullptr || args.state == nullptr) {
    return "decode_layers needs a workspace and a state";
  }
  return nullptr;
}

// All rows of a weight in order, or the gate's beside those of up.
template <typename T>
Product<T> make_product(int64_t n, int64_t k, Row row, End end, const T* x, T* out) {
  Product<T> p{};
  const bool gated = end == End::kGated;
  p.row_bytes = static_cast<uint32_t>(k);
  p.half_rows = static_cast<uint32_t>(gated ? n / 2 : kHalf);
  p.tile_rows = gated ? kHalf : kMmaRows;
  p.tiles = static_cast<int32_t>(n / kMmaRows);
  p.k_blocks = static_cast<int32_t>(k / kBlockK);
  p.row = row;
  p.end = end;
  p.x = x;
  p.out = out;
  return p;
}

// Workspace: y, the greatest of each workgroup's part of it, x, attended, partials of the
// attention.
int64_t x_offset(const DecodeLayersArgs& args) { return 4 * (args.intermediate + kMostWorkgroups); }
int64_t attended_offset(const DecodeLayersArgs& args) { return x_offset(args) + 2 * args.hidden; }
int64_t partials_offset(const DecodeLayersArgs& args) {
  return attended_offset(args) + 2 * args.attended_columns;
}
int64_t partials_bytes(const DecodeLayersArgs& args) {
  const DecodeAttention& a = args.attention;
  if (a.qkv == nullptr) return 0;
  return int64_t{4} * kPartialFloats * a.heads * (kMostWorkgroups / a.kv_heads);
}

// Of `count` layers from `begin` on.
template <typename T>
StackProblem<T> make_problem(const DecodeLayersArgs& args, int64_t begin, int64_t count,
                             const Target& target) {
  StackProblem<T> p{};
  char* const workspace = static_cast<char*>(args.workspace);
  const T* attended = static_cast<const T*>(args.attended);
  const bool has_o = args.layers[0].o.w != nullptr;
  p.out = static_cast<T*>(args.out);
  p.qkv = static_cast<T*>(args.qkv);
  p.residual = begin == 0 ? static_cast<const T*>(args.residual) : p.out;
  p.x = has_o ? reinterpret_cast<T*>(workspace + x_offset(args)) : static_cast<const T*>(args.x);
  if (const DecodeAttention& a = args.attention; a.qkv != nullptr) {
    Attention<T>& attention = p.attention;
    attention.qkv = begin == 0 ? static_cast<const T*>(a.qkv) : p.qkv;
    attention.row_stride = static_cast<int32_t>(a.row_stride);
    const bool is_whole = a.head_dim == kUnitDim;
    attention.unit_stride = static_cast<int32_t>(is_whole ? a.head_stride : 2 * a.head_stride);
    attention.half_gap = static_cast<int32_t>(is_whole ? 0 : a.head_stride - kHalfDim);
    attention.k_scale_stride = a.k_scale_stride;
    attention.v_scale_stride = a.v_scale_stride;
    attention.cos = static_cast<const T*>(a.cos);
    attention.sin = static_cast<const T*>(a.sin);
    attention.rows = a.rows;
    attention.position = a.position;
    attention.keys = a.keys;
    attention.first_key = a.first_key;
    attention.window_left = a.window_left;
    attention.head_dim = a.head_dim;
    attention.rotary_dim = a.rotary_dim;
    attention.interleaved = a.interleaved;
    attention.heads = a.heads;
    attention.kv_heads = a.kv_heads;
    attention.units = is_whole ? a.kv_heads : a.kv_heads / 2;
    attention.eps = args.eps;
    attention.weight_offset = args.weight_offset;
    attention.parts = (a.heads / a.kv_heads + kUnitHeads - 1) / kUnitHeads;
    attention.splits = target.compute_units / (attention.units * attention.parts);
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
  State* const state = static_cast<State*>(args.state);
  p.grid = &state->grid;
  p.attention.arrived = state->arrived;

  const int64_t h = args.hidden, i = args.intermediate;
  T* const x = const_cast<T*>(p.x);  // written where there is an o
  p.products[0] =
      make_product<T>(h, args.attended_columns, Row::kQuantized, End::kStored, attended, x);
  p.products[1] = make_product<T>(2 * i, h, Row::kNorm, End::kGated, p.x, nullptr);
  p.products[2] = make_product<T>(h, i, Row::kActivated, End::kAdded, nullptr, p.out);
  p.products[3] = make_product<T>(args.qkv_columns, h, Row::kNorm, End::kStored, p.out, p.qkv);
  p.count = static_cast<int32_t>(count);
  p.first = has_o ? 0 : 1;
  for (int64_t l = 0; l < count; ++l) p.layers[l] = make_layer<T>(args.layers[begin + l]);
  p.of_last = p.layers[count - 1].products[3].w == nullptr ? 3 : kProducts;
  for (int product = p.first; product < kProducts; ++product) {
    const int32_t k = p.products[product].k_blocks * kBlockK;
    p.code_bytes = k > p.code_bytes ? k : p.code_bytes;
  }
  if (args.attention.qkv != nullptr && p.code_bytes < int32_t{sizeof(AttendScratch)}) {
    p.code_bytes = sizeof(AttendScratch);
  }
  return p;
}

__global__ void nothing_kernel() {}

// Not all of HIP's runtimes record a cooperative launch: some run it at once, with memory that the
// graph has not filled yet. Asked with a kernel that does nothing, and a stream of its own.
bool are_recorded() {
  size_t nodes = 0;
  hipGraph_t graph;
  hipStream_t stream;
  if (hipStreamCreateWithFlags(&stream, hipStreamNonBlocking) != hipSuccess) return false;
  if (hipStreamBeginCapture(stream, hipStreamCaptureModeThreadLocal) == hipSuccess) {
    static_cast<void>(hipLaunchCooperativeKernel(reinterpret_cast<const void*>(nothing_kernel),
                                                 dim3(1), dim3(kLanes), nullptr, 0, stream));
    if (hipStreamEndCapture(stream, &graph) == hipSuccess) {
      static_cast<void>(hipGraphGetNodes(graph, nullptr, &nodes));
      static_cast<void>(hipGraphDestroy(graph));
    }
  }
  static_cast<void>(hipStreamDestroy(stream));
  static_cast<void>(hipGetLastError());
  return nodes == 1;
}

// Whether a launch would be lost from a graph, or nullptr.
Status check_recording(const Context& context) {
  static const bool recorded = are_recorded();  // at the first call of a process
  hipStreamCaptureStatus status = hipStreamCaptureStatusNone;
  const hipError_t error = hipStreamIsCapturing(stream_of(context), &status);
  if (error != hipSuccess) return status_of(error);
  if (status == hipStreamCaptureStatusNone || recorded) return nullptr;
  return "this version of HIP does not record cooperative launches in a graph; run the ops one by "
         "one";
}

template <typename T, typename C, int kVectors>
Status launch_with(const DecodeLayersArgs& args, const Target& target, const Context& context) {
  const auto kernel = decode_layers_kernel<T, C, kVectors>;
  for (int64_t begin = 0; begin < args.count; begin += kMostLayers) {
    const int64_t left = args.count - begin;
    StackProblem<T> p =
        make_problem<T>(args, begin, left < kMostLayers ? left : kMostLayers, target);
    void* pointers[] = {&p};
    // Refused where not all workgroups would run at once: they wait for each other.
    const hipError_t error = hipLaunchCooperativeKernel(
        reinterpret_cast<const void*>(kernel), dim3(target.compute_units), dim3(kThreads), pointers,
        static_cast<unsigned>(lds_bytes_of(p.code_bytes)), stream_of(context));
    if (error != hipSuccess) static_cast<void>(hipGetLastError());
    if (error == hipErrorCooperativeLaunchTooLarge) {
      return "decode_layers needs a workgroup on every compute unit at once, and the device does "
             "not hold them; run the ops one by one";
    }
    if (error != hipSuccess) return status_of(error);
  }
  return nullptr;
}

template <typename T, int kVectors>
Status launch_for(const DecodeLayersArgs& args, const Target& target, const Context& context) {
  return is_fp8(args.attention.cache_dtype)
             ? launch_with<T, uint8_t, kVectors>(args, target, context)
             : launch_with<T, T, kVectors>(args, target, context);
}

}  // namespace
}  // namespace rocm_kernels::cdna::decode

namespace rocm_kernels {

int64_t decode_layers_workspace_bytes(const DecodeLayersArgs& args) {
  return cdna::decode::partials_offset(args) + cdna::decode::partials_bytes(args);
}

Status launch_decode_layers(const DecodeLayersArgs& args, const Context& context) {
  cdna::Target target;
  if (!cdna::current_target(target)) return cdna::kNoDevice;
  if (const Status error = cdna::decode::check(args, target)) return error;
  if (const Status error = cdna::decode::check_recording(context)) return error;
  constexpr int64_t kTwoVectors = 2 * cdna::decode::kHelperThreads * 8;
  const bool two = args.hidden <= kTwoVectors && args.attended_columns <= kTwoVectors;
  if (args.dtype == DType::kBFloat16) {
    return two ? cdna::decode::launch_for<bfloat16, 2>(args, target, context)
               : cdna::decode::launch_for<bfloat16, 4>(args, target, context);
  }
  return two ? cdna::decode::launch_for<float16, 2>(args, target, context)
             : cdna::decode::launch_for<float16, 4>(args, target, context);
}

}  // namespace rocm_kernels
