// decode_layers for sm_90: a block a multiprocessor, from the attention (attend.cuh) to the next
// one's qkv, layer after layer.
//
// All bytes that matter are the weights'. So four warps of a block do nothing but fetch them, in
// the order in which they are wanted, into stages that take nearly all of shared memory: 190 KB, or
// 6 us of an H200's memory. While the grid meets, a row is made, or heads attend, the next weights
// arrive, stage by stage lest they hold up the rest. Two warpgroups do all else.
//
// Timeline of a layer; || is a meeting of the grid (grid_barrier.cuh).
//
//   fetch      weights of o, gate and up, down, qkv, of the next layer's o ... (weights.cuh)
//   multiply   attention || row, o || row, gate and up || row, down || row, qkv || attention ...
//
//   product     its rows, made by every block (rows.cuh)  its end
//   o           fp8(attended)                             h = residual + x
//   gate, up    fp8(norm(h))                              y = SiLU(gate) * up, its greatest
//   down        fp8(y)                                    residual = h + its sum
//   qkv         fp8(norm(residual))                       qkv
//
// Of up to four sequences, a token each: what is said of a row is so of each.
//
// What it gains over launches that overlap is what lies between their products: a launch's blocks
// cannot fetch before they have room, and have room for few weights before they are wanted.
#include <algorithm>

#include "../../blocks/grid/cuda/grid_barrier.cuh"
#include "../../blocks/rows/gpu/activation.h"
#include "../../common/gpu/launch.h"
#include "attend.cuh"
#include "weights.cuh"

namespace rocm_kernels::cuda::decode {
namespace {

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

// One loop for all products: the kernel's code is read anew in each layer, and must fit in the
// caches of instructions.
template <typename T, typename C, int kVectors, int kTokens>
__device__ __forceinline__ void compute(const StackProblem<T>& p, const Ring& ring,
                                        const Share (&shares)[kProducts], int warp, int lane,
                                        uint8_t* row_memory, RowShared& row_shared, RowEnds& ends,
                                        int& is_last) {
  constexpr int kTokenShift = kTokens / 2;  // of 1, 2, 4
  const int thread = warp * 32 + lane, group = warp / kGroupWarps;
  AttendScratch& scratch = *reinterpret_cast<AttendScratch*>(row_memory);
  GridBarrier<1, kThreads> grid(p.meetings);
  const uint32_t codes = pinned_address(row_memory);
  RowMaker<T, kVectors, kTokens> rows(row_shared, codes, p.tokens, warp, lane);
  const Heads heads(p.attention, p.tokens);
  const int token = token_of_lane<kTokens>(lane);
  const bool leads = lane % (16 / kTokens) == 0 && token < p.tokens;  // the lanes of a sum
  PipelineState state{0, 0};
  int turn = 0;
#pragma unroll 1
  for (int l = 0; l < p.count; ++l) {
    const Layer<T>& layer = p.layers[l];
    {
      Attend<T, C> attend(p, layer, heads, warp, lane, scratch, is_last);
      if (l > 0) grid.arrive();
      attend.ask();
      if (l > 0) grid.wait();
      attend.attend(p.qkv);
    }
#pragma unroll 1
    for (int i = 0; i < p.products_of(l); ++i) {
      const Product<T>& product = p.products[i];
      const ProductWeight<T>& weight = layer.products[i];
      const bool gated = product.end == End::kGated, has_bias = product.end == End::kBiased;
      grid.arrive();
      const Tiles tiles(product, shares[i], group, turn);
      const T* const addends = has_bias ? weight.bias : product.addends;
      // Of o and down, whose sums are the next product's row; of the last one perhaps no product's.
      const T* const norm =
          product.end == End::kAdded ? layer.products[(i + 1) % kProducts].norm : nullptr;
      const AskedRowEnds its_ends(
          product, shares[i], product.end == End::kAdded ? kTokenShift : 0, thread,
          [&](int row) { return __ldg(weight.scales + row * weight.scale_stride); },
          [&](int row, int of) {
            if (addends == nullptr || of >= p.tokens) return 0.0f;
            return to_float(load_l2(addends + of * product.units + row));
          },
          [&](int row) {
            return norm == nullptr ? 0.0f : to_float(load_l2(norm + row)) + p.weight_offset;
          });
      if (product.normalizes) rows.ask_weight(weight.norm, product.k);
      grid.wait();
      its_ends.put(ends);
      if (product.normalizes) {
        rows.normalize(product, p.eps, p.weight_offset);
      } else {
        rows.quantize(product);
      }
      const float scale = rows.scale(token);
      if (gated && l + 1 < p.count) {
        Attend<T, C>::prefetch(p.attention, p.layers[l + 1], heads, warp, lane);
      }
      Left own{0.0f, 0.0f};
      multiply<kTokens>(product, ring, state, tiles, shares[i].first, codes, warp % kGroupWarps,
                        lane, [&](int row, bool there, float sum, int at) {
                          there = there && leads;
                          float value = sum * scale * (there ? ends.scales[at] : 0.0f);
                          if (!has_bias) value = to_float(from_float<T>(value));
                          const int64_t place = int64_t{token} * product.units + row;
                          if (gated) {
                            const float up = __shfl_xor_sync(0xFFFFFFFFu, value, 16);
                            const bfloat16 y = from_float<bfloat16>(silu(value) * up);
                            if (there && lane < 16) {
                              static_cast<bfloat16*>(product.out)[place] = y;
                              own.greatest = fmaxf(own.greatest, fabsf(to_float(y)));
                            }
                          } else if (there) {
                            const float addend =
                                ends.addends[has_bias ? at : (at << kTokenShift) + token];
                            const T out = from_float<T>(value + addend);
                            static_cast<T*>(product.out)[place] = out;
                            if (has_bias) return;
                            const float x = to_float(out);
                            own.squares = fmaf(x, x, own.squares);
                            own.greatest = fmaxf(own.greatest, fabsf(x * ends.norms[at]));
                          }
                        });
      if (!has_bias) {
        own.greatest = fmaxf(own.greatest, __shfl_xor_sync(0xFFFFFFFFu, own.greatest, 16));
        own.squares += __shfl_xor_sync(0xFFFFFFFFu, own.squares, 16);
        rows.leave(own, token, leads && lane < 16, gated ? p.of_y : p.of_sums);
      }
    }
  }
}

#endif

template <typename T, typename C, int kVectors, int kTokens>
__global__ void __launch_bounds__(kBlockThreads, 1)
    decode_layers_kernel(const __grid_constant__ StackProblem<T> p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  __shared__ uint64_t full[kGroups * kMostStages], empty[kGroups * kMostStages];
  __shared__ RowShared row_shared;
  __shared__ RowEnds ends;
  __shared__ Share shares[kProducts];
  __shared__ int is_last, begun[kGroups];
  // Told to be the same for all lanes, without which wgmma waits for each instruction.
  const int warp = __shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
  const uint32_t data = pinned_address(dynamic_shared + p.row_bytes);
  const int ring_bytes = p.num_stages * kStageBytes;
  if (threadIdx.x == 0) {
    init_pipeline(shared_address(full), shared_address(empty), kGroups * kMostStages, 1,
                  kGroupWarps);
    fence_mbarrier_init();
  }
  if (threadIdx.x < kGroups) begun[threadIdx.x] = 0;
  if (threadIdx.x < kProducts) shares[threadIdx.x] = Share::of(p.products[threadIdx.x]);
  if (p.clears) {
    for (int at = 16 * threadIdx.x; at < kGroups * ring_bytes; at += 16 * kBlockThreads) {
      store_shared(data + at, uint4{});
    }
    fence_async_proxy();
  }
  __syncthreads();
  const bool fetches = warp >= kWarps;
  const int group = fetches ? (warp - kWarps) / kFetchers : warp / kGroupWarps;
  const Ring ring{pinned_address(full + group * kMostStages),
                  pinned_address(empty + group * kMostStages), data + group * ring_bytes,
                  p.num_stages, begun + group};
  if (fetches) {
    drop_registers<56>();
    fetch_weights(p, ring, shares, group, warp % kFetchers, lane);
  } else {
    raise_registers<224>();
    compute<T, C, kVectors, kTokens>(p, ring, shares, warp, lane, dynamic_shared, row_shared, ends,
                                     is_last);
  }
#endif
}

// ---- Launcher ---------------------------------------------------------------------------------

constexpr int64_t kStaticBytes = 7168;  // of shared memory: barriers and the like, generously

// Shared memory of a launch.
struct Space {
  int32_t row_bytes, num_stages;
};

template <typename T>
Product<T> make_product(int64_t n, int64_t k, End end) {
  Product<T> product{};
  product.k = static_cast<int32_t>(k);
  product.unit_shift = end == End::kGated ? 1 : 0;
  product.units = product.second = static_cast<int32_t>(n >> product.unit_shift);
  product.parts = static_cast<int32_t>((k + kPartBytes - 1) / kPartBytes);
  product.end = end;
  return product;
}

int units_of(const DecodeAttention& a) {
  return static_cast<int>(int64_t{a.kv_heads} * a.head_dim / kUnitDim);
}
int heads_of_unit(const DecodeAttention& a) { return a.heads / units_of(a); }
int parts_of_unit(const DecodeAttention& a) {
  return (heads_of_unit(a) + kUnitHeads - 1) / kUnitHeads;
}

// Rows of w that a block has at most, of n, of which pairs stay together.
int64_t rows_of_block(int64_t n, int64_t blocks) { return 2 * (n / 2 / blocks + 1); }

Space space_of(const DecodeLayersArgs& args, int64_t shared_bytes) {
  Space space{};
  const int64_t columns = std::max(std::max(args.hidden, args.intermediate), args.attended_columns);
  const int64_t row = std::max<int64_t>(
      args.tokens * ((columns + kPartBytes - 1) / kPartBytes * kPartBytes),
      AttendScratch::bytes_for(std::min(heads_of_unit(args.attention), kUnitHeads)));
  space.row_bytes = static_cast<int32_t>((row + 127) / 128 * 128);
  space.num_stages = static_cast<int32_t>(std::min<int64_t>(
      (shared_bytes - kStaticBytes - space.row_bytes) / (kGroups * kStageBytes), kMostStages));
  return space;
}

// Columns of a vector for each thread; and how many a short row of a norm has at most.
constexpr int kColumns = kThreads * 8, kShortHidden = 2 * kColumns;

struct Device {
  DeviceFacts facts;
  int32_t shared_bytes = 0;  // of a block
  int32_t cooperative = 0;
};
Status ask_device(int device, Device& answer) {
  cudaError_t error =
      cudaDeviceGetAttribute(&answer.shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&answer.cooperative, cudaDevAttrCooperativeLaunch, device);
  }
  if (error != cudaSuccess) return status_of(error);
  return current_device(answer.facts);
}

Status check(const DecodeLayersArgs& args, const Device& device) {
  if (device.facts.compute_capability != 90 || device.cooperative == 0) {
    return "decode_layers needs an NVIDIA GPU of compute capability 9.0, and cooperative launches; "
           "run the ops one by one";
  }
  if (args.count < 1) return "decode_layers needs a layer";
  if (args.tokens < 1 || args.tokens > kMostTokens) {
    return "decode_layers takes 1 to 4 sequences on this GPU; run the ops one by one";
  }
  if (args.tokens > kMostTokens / 2 && args.hidden > kShortHidden) {
    return "hidden must be 4096 at most for more than 2 sequences; run the ops one by one";
  }
  if (args.dtype != DType::kBFloat16 && args.dtype != DType::kFloat16) {
    return "rows must be bfloat16 or float16";
  }
  if (args.fp8_dtype != DType::kFloat8E4M3FN) return "weights must be float8_e4m3fn on this GPU";
  if (!is_layer_k(args.hidden, kLeastColumns, kMostHidden)) {
    return "hidden must be a multiple of 128, from 512 to 8192";
  }
  if (!is_layer_k(args.intermediate, kLeastColumns, INT32_MAX)) {
    return "intermediate must be a multiple of 128, from 512 on";
  }
  if (!is_layer_k(args.attended_columns, kLeastColumns, kMostHidden)) {
    return "attended must have a multiple of 128 columns, from 512 to 8192";
  }
  const DecodeAttention& attention = args.attention;
  const int64_t heads = attention.heads, kv_heads = attention.kv_heads;
  const int64_t dim = attention.head_dim, rotary_dim = attention.rotary_dim;
  if (attention.qkv == nullptr || kv_heads < 1 || heads % kv_heads != 0 ||
      args.attended_columns != heads * dim) {
    return "layers must begin with an attention of query heads for each KV head";
  }
  if (dim != kUnitDim && (dim != kHalfDim || kv_heads % 2 != 0)) {
    return "heads must be of 128, or of 64 and their number of KV heads even; run the ops one by "
           "one";
  }
  if (rotary_dim < 8 || rotary_dim % 8 != 0 || rotary_dim > dim) {
    return "rotary_dim must be a multiple of 8, from 8 to a head's size";
  }
  const int64_t blocks = device.facts.compute_units;
  if (blocks > kMostBlocks ||
      args.tokens * units_of(attention) * parts_of_unit(attention) > blocks) {
    return "there must be no more KV heads, of all sequences, than multiprocessors, and 256 of "
           "these at most";
  }
  const int64_t added = rows_of_block(args.hidden, blocks);
  if (rows_of_block(2 * args.intermediate, blocks) > kMostRows ||
      rows_of_block(args.qkv_columns, blocks) > kMostRows || added > kMostAdded ||
      added * template_tokens(args.tokens) > kMostRows) {
    return "a weight must have fewer than 510 rows for each multiprocessor, and w_o and w_down 126 "
           "and, times the sequences, 510";
  }
  const DType cache = attention.cache_dtype;
  if (cache != args.dtype && cache != DType::kFloat8E4M3FN) {
    return "caches must be of the rows' dtype, or float8_e4m3fn";
  }
  const int64_t size = size_of(cache);
  if (attention.row_stride * size % 16 != 0 || attention.head_stride * size % 16 != 0 ||
      attention.batch_stride * size % 16 != 0) {
    return "strides of the caches must be whole vectors of 16 bytes";
  }
  if (args.qkv != attention.qkv || args.qkv_columns != (heads + 2 * kv_heads) * dim) {
    return "qkv must be the attention's";
  }
  if (args.out != args.residual) return "the residual must be in place";
  for (int64_t i = 0; i < args.count; ++i) {
    const DecodeLayer& layer = args.layers[i];
    if (layer.o.w == nullptr) return "all layers must have an o";
    if (const Status error = check_layer(args, layer, i == args.count - 1)) return error;
    for (const void* aligned :
         {static_cast<const void*>(layer.k_cache), static_cast<const void*>(layer.v_cache),
          layer.norm_weight, layer.next_norm_weight}) {
      if (reinterpret_cast<uintptr_t>(aligned) % 16 != 0) {
        return "caches and weights of norms must begin on 16 bytes";
      }
    }
    for (const void* aligned : {layer.q_norm_weight, layer.k_norm_weight}) {
      if (reinterpret_cast<uintptr_t>(aligned) % 8 != 0) {
        return "weights of heads' norms must begin on 8 bytes";
      }
    }
  }
  for (const void* aligned : {args.out, args.qkv}) {
    if (reinterpret_cast<uintptr_t>(aligned) % 16 != 0) {
      return "residual and qkv must begin on 16 bytes";
    }
  }
  for (const void* aligned : {attention.cos, attention.sin}) {
    if (reinterpret_cast<uintptr_t>(aligned) % 8 != 0) return "cos and sin must begin on 8 bytes";
  }
  if (args.workspace == nullptr || args.state == nullptr) {
    return "decode_layers needs a workspace and a state";
  }
  return nullptr;
}

// Workspace: of each token what blocks have left of their parts of y and of sums, and the greatest
// of halves of heads; y, h, attended, partials of the attention.
constexpr int64_t kLeftBytes = sizeof(Left) * kMostTokens * kMostBlocks;
constexpr int64_t y_offset = 3 * kLeftBytes;
int64_t h_offset(const DecodeLayersArgs& args) {
  return y_offset + 2 * args.tokens * args.intermediate;
}
int64_t attended_offset(const DecodeLayersArgs& args) {
  return h_offset(args) + 2 * args.tokens * args.hidden;
}
int64_t partials_offset(const DecodeLayersArgs& args) {
  return attended_offset(args) + 2 * args.tokens * args.attended_columns;
}

// State: meetings, a line a launch; and what the attention counts.
constexpr int64_t kStateLine = 128, kArrivedOffset = kDecodeLayersStateBytes / 2;

template <typename T, typename C, int kVectors, int kTokens>
Status launch_with(const DecodeLayersArgs& args, const Device& device, const Context& context) {
  const auto kernel = decode_layers_kernel<T, C, kVectors, kTokens>;
  StackProblem<T> p{};
  const int blocks = device.facts.compute_units;
  const Space space = space_of(args, device.shared_bytes);
  if (space.num_stages < 2) {
    return "intermediate, times the sequences, exceeds what shared memory holds of it; run the ops "
           "one by one";
  }
  if (args.count > kMostLayers * (kArrivedOffset / kStateLine)) return "too many layers";
  char* const workspace = static_cast<char*>(args.workspace);
  char* const kept = static_cast<char*>(args.state);
  const DecodeAttention& a = args.attention;
  Attention<T>& attention = p.attention;
  attention.row_stride = a.row_stride;
  attention.unit_stride = a.head_dim == kUnitDim ? a.head_stride : 2 * a.head_stride;
  attention.half_gap = a.head_dim == kUnitDim ? 0 : a.head_stride - kHalfDim;
  attention.batch_stride = a.batch_stride;
  attention.k_scale_stride = a.k_scale_stride;
  attention.v_scale_stride = a.v_scale_stride;
  attention.cos = static_cast<const T*>(a.cos);
  attention.sin = static_cast<const T*>(a.sin);
  attention.rows = a.rows;
  attention.position = a.position;
  attention.keys = a.keys;
  attention.first_key = a.first_key;
  attention.angle_stride = a.angle_stride;
  attention.position_stride = a.position_stride;
  attention.keys_stride = a.keys_stride;
  attention.first_key_stride = a.first_key_stride;
  attention.window_left = a.window_left;
  attention.head_dim = a.head_dim;
  attention.rotary_dim = a.rotary_dim;
  attention.interleaved = a.interleaved;
  attention.heads = a.heads;
  attention.kv_heads = a.kv_heads;
  attention.units = units_of(a);
  attention.parts = parts_of_unit(a);
  attention.splits = blocks / (args.tokens * attention.units * attention.parts);
  attention.scale_log2 = a.scale * 1.44269504f;
  attention.partials = reinterpret_cast<float*>(workspace + partials_offset(args));
  attention.arrived = reinterpret_cast<uint32_t*>(kept + kArrivedOffset);
  attention.attended = reinterpret_cast<T*>(workspace + attended_offset(args));
  attention.left = reinterpret_cast<Left*>(workspace + 2 * kLeftBytes);
  p.tokens = args.tokens;
  p.num_stages = space.num_stages;
  p.row_bytes = space.row_bytes;
  p.eps = args.eps;
  p.weight_offset = args.weight_offset == 0.0f ? -0.0f : args.weight_offset;
  p.qkv = static_cast<T*>(args.qkv);
  p.of_y = reinterpret_cast<Left*>(workspace);
  p.of_sums = reinterpret_cast<Left*>(workspace + kLeftBytes);
  T* const out = static_cast<T*>(args.out);
  T* const h = reinterpret_cast<T*>(workspace + h_offset(args));
  void* const y = workspace + y_offset;
  Product<T>&o = p.products[0], &gate_up = p.products[1], &down = p.products[2],
  &qkv = p.products[3];
  o = make_product<T>(args.hidden, args.attended_columns, End::kAdded);
  o.x = attention.attended, o.addends = out, o.out = h;
  o.left = attention.left, o.left_count = static_cast<int32_t>(args.attended_columns / kHalfDim);
  gate_up = make_product<T>(2 * args.intermediate, args.hidden, End::kGated);
  gate_up.x = h, gate_up.out = y;
  down = make_product<T>(args.hidden, args.intermediate, End::kAdded);
  down.x = y, down.addends = h, down.out = out;
  down.left = p.of_y, down.left_count = blocks, down.is_bfloat = 1;
  qkv = make_product<T>(args.qkv_columns, args.hidden, End::kBiased);
  qkv.x = out, qkv.out = p.qkv;
  for (Product<T>* product : {&gate_up, &qkv}) {
    product->normalizes = 1, product->left = p.of_sums, product->left_count = blocks;
  }
  for (const Product<T>& product : p.products) p.clears |= product.k % kPartBytes != 0;

  cudaError_t error = allow_shared_memory(reinterpret_cast<const void*>(kernel));
  for (int64_t begin = 0; begin < args.count && error == cudaSuccess; begin += kMostLayers) {
    p.count = static_cast<int32_t>(std::min<int64_t>(args.count - begin, kMostLayers));
    for (int64_t l = 0; l < p.count; ++l) p.layers[l] = make_layer<T>(args.layers[begin + l]);
    p.of_last = p.layers[p.count - 1].products[3].w == nullptr ? 3 : kProducts;
    p.meetings = reinterpret_cast<uint32_t*>(kept + begin / kMostLayers * kStateLine);
    void* pointers[] = {&p};
    // Refused where not all blocks would run at once: they wait for each other.
    error = cudaLaunchCooperativeKernel(
        reinterpret_cast<const void*>(kernel), dim3(static_cast<unsigned>(blocks)),
        dim3(kBlockThreads), pointers,
        static_cast<size_t>(space.row_bytes + int64_t{kGroups} * space.num_stages * kStageBytes),
        stream_of(context));
  }
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
  if (error == cudaErrorCooperativeLaunchTooLarge) {
    return "decode_layers needs a block on every multiprocessor at once, and the device does not "
           "hold them; run the ops one by one";
  }
  return status_of(error);
}

template <typename T, typename C, int kTokens>
Status launch_for_tokens(const DecodeLayersArgs& args, const Device& device,
                         const Context& context) {
  if constexpr (kTokens < kMostTokens) {  // registers hold no longer rows of so many
    if (args.hidden > kShortHidden) {
      return launch_with<T, C, kMostHidden / kColumns, kTokens>(args, device, context);
    }
  }
  return launch_with<T, C, kShortHidden / kColumns, kTokens>(args, device, context);
}

template <typename T, typename C>
Status launch_for(const DecodeLayersArgs& args, const Device& device, const Context& context) {
  switch (template_tokens(args.tokens)) {
    case 1:
      return launch_for_tokens<T, C, 1>(args, device, context);
    case 2:
      return launch_for_tokens<T, C, 2>(args, device, context);
    default:
      return launch_for_tokens<T, C, kMostTokens>(args, device, context);
  }
}

}  // namespace
}  // namespace rocm_kernels::cuda::decode

namespace rocm_kernels {

int64_t decode_layers_workspace_bytes(const DecodeLayersArgs& args) {
  using namespace cuda::decode;
  const DecodeAttention& a = args.attention;
  const int64_t units = std::max(units_of(a), 1);  // none: it is refused
  const int64_t kinds = args.tokens * units;
  return partials_offset(args) +
         4 * kPartialFloats * args.tokens * a.heads * (kMostBlocks / kinds + 1);
}

Status launch_decode_layers(const DecodeLayersArgs& args, const Context& context) {
  using namespace cuda::decode;
  Device device;
  if (const Status error = ask_once<ask_device>(device)) return error;
  if (const Status error = check(args, device)) return error;
  const bool fp8 = is_fp8(args.attention.cache_dtype);
  if (args.dtype == DType::kBFloat16) {
    return fp8 ? launch_for<bfloat16, uint8_t>(args, device, context)
               : launch_for<bfloat16, bfloat16>(args, device, context);
  }
  return fp8 ? launch_for<float16, uint8_t>(args, device, context)
             : launch_for<float16, float16>(args, device, context);
}

}  // namespace rocm_kernels
