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
//   product     its row, made by every block (rows.cuh)   its end
//   o           fp8(attended)                             h = residual + x
//   gate, up    fp8(norm(h))                              y = SiLU(gate) * up, its greatest
//   down        fp8(y)                                    residual = h + its sum
//   qkv         fp8(norm(residual))                       qkv
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
template <typename T, typename C, int kVectors>
__device__ __forceinline__ void compute(const StackProblem<T>& p, const Ring& ring,
                                        const Share (&shares)[kProducts], int warp, int lane,
                                        uint8_t* row_memory, Reductions& reductions, RowEnd* ends,
                                        int& is_last) {
  const int thread = warp * 32 + lane, group = warp / kGroupWarps;
  const uint32_t codes = pinned_address(row_memory);
  AttendScratch& scratch = *reinterpret_cast<AttendScratch*>(row_memory);
  GridBarrier<1, kThreads> grid(p.meetings);
  RowMaker rows(reductions, codes, warp, lane);
  const Seen seen = Seen::of(p.attention);
  const Heads heads(p.attention, seen.end - seen.begin);
  PipelineState state{0, 0};
  int turn = 0;
#pragma unroll 1
  for (int l = 0; l < p.count; ++l) {
    const Layer<T>& layer = p.layers[l];
    {
      Attend<T, C> attend(p, layer, seen, heads, warp, lane, scratch, is_last);
      if (l > 0) grid.arrive();
      attend.ask();
      if (l > 0) grid.wait();
      attend.attend(p.qkv);
    }
#pragma unroll 1
    for (int i = 0; i < p.products_of(l); ++i) {
      const Product<T>& product = p.products[i];
      const ProductWeight<T>& weight = layer.products[i];
      const bool gated = product.end == End::kGated;
      grid.arrive();
      const Tiles tiles(product, shares[i], group, turn);
      const T* const addends = product.end == End::kBiased ? weight.bias : product.addends;
      const RowEnds its_ends(product, shares[i], thread, [&](int row) {
        return RowEnd{__ldg(weight.scales + row * weight.scale_stride),
                      addends == nullptr ? 0.0f : to_float(load_l2(addends + row))};
      });
      Vector norm[kVectors];
      if (product.normalizes) rows.ask(weight.norm, product.k, norm);
      grid.wait();
      its_ends.put(ends);
      const float scale = product.normalizes
                              ? rows.normalize(static_cast<const T*>(product.x), norm, product.k,
                                               p.eps, p.weight_offset)
                              : rows.template quantize<T>(product.x, i == 2, product.k,
                                                          product.amaxs, product.amax_count);
      if (gated && l + 1 < p.count) {
        Attend<T, C>::prefetch(p.attention, p.layers[l + 1], seen, heads, warp, lane);
      }
      float amax = 0.0f;
      multiply(product, ring, state, tiles, shares[i].first, codes, warp % kGroupWarps, lane, ends,
               [&](int row, bool there, float sum, const RowEnd& end) {
                 float value = sum * scale * end.scale;
                 if (product.end != End::kBiased) value = to_float(from_float<T>(value));
                 if (gated) {
                   const float up = __shfl_xor_sync(0xFFFFFFFFu, value, 16);
                   const bfloat16 y = from_float<bfloat16>(silu(value) * up);
                   if (there && lane == 0) {
                     static_cast<bfloat16*>(product.out)[row] = y;
                     amax = fmaxf(amax, fabsf(to_float(y)));
                   }
                 } else if (there && lane % 16 == 0) {
                   static_cast<T*>(product.out)[row] = from_float<T>(value + end.addend);
                 }
               });
      if (gated) {
        amax = rows.greatest(amax);
        if (thread == 0) p.amax[blockIdx.x] = amax;
      }
    }
  }
}

#endif

template <typename T, typename C, int kVectors>
__global__ void __launch_bounds__(kBlockThreads, 1)
    decode_layers_kernel(const __grid_constant__ StackProblem<T> p) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  __shared__ uint64_t full[kGroups * kMostStages], empty[kGroups * kMostStages];
  __shared__ Reductions reductions;
  __shared__ RowEnd ends[kMostRows];
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
    compute<T, C, kVectors>(p, ring, shares, warp, lane, dynamic_shared, reductions, ends, is_last);
  }
#endif
}

// ---- Launcher ---------------------------------------------------------------------------------

constexpr int64_t kStaticBytes = 5120;  // of shared memory: barriers and the like, generously

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

int parts_of_group(const DecodeAttention& a) {
  return (a.heads / a.kv_heads + kUnitHeads - 1) / kUnitHeads;
}

Space space_of(const DecodeLayersArgs& args, int64_t shared_bytes) {
  Space space{};
  const int64_t row = std::max<int64_t>(
      (std::max(std::max(args.hidden, args.intermediate), args.attended_columns) + kPartBytes - 1) /
          kPartBytes * kPartBytes,
      AttendScratch::bytes_for(
          std::min(args.attention.heads / args.attention.kv_heads, kUnitHeads)));
  space.row_bytes = static_cast<int32_t>((row + 127) / 128 * 128);
  space.num_stages = static_cast<int32_t>(std::min<int64_t>(
      (shared_bytes - kStaticBytes - space.row_bytes) / (kGroups * kStageBytes), kMostStages));
  return space;
}

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
  if (args.dtype != DType::kBFloat16 && args.dtype != DType::kFloat16) {
    return "rows must be bfloat16 or float16";
  }
  if (args.fp8_dtype != DType::kFloat8E4M3FN) return "weights must be float8_e4m3fn on this GPU";
  if (!is_layer_k(args.hidden, kMostHidden)) {
    return "hidden must be a multiple of 128, from 1024 to 8192";
  }
  if (!is_layer_k(args.intermediate, INT32_MAX)) {
    return "intermediate must be a multiple of 128, from 1024 on";
  }
  if (!is_layer_k(args.attended_columns, kMostHidden)) {
    return "attended must have a multiple of 128 columns, from 1024 to 8192";
  }
  const DecodeAttention& attention = args.attention;
  const int64_t heads = attention.heads, kv_heads = attention.kv_heads;
  if (attention.qkv == nullptr || kv_heads < 1 || heads % kv_heads != 0 ||
      args.attended_columns != heads * kHeadDim) {
    return "layers must begin with an attention of query heads for each KV head, of 128";
  }
  const int64_t blocks = device.facts.compute_units;
  if (blocks > kMostBlocks || kv_heads * parts_of_group(attention) > blocks) {
    return "there must be no more KV heads than multiprocessors, and 256 of these at most";
  }
  for (const int64_t rows : {2 * args.intermediate, args.hidden, args.qkv_columns}) {
    if ((rows + blocks - 1) / blocks + 2 > kMostRows) {
      return "a weight must have fewer than 510 rows for each multiprocessor";
    }
  }
  const DType cache = attention.cache_dtype;
  if (cache != args.dtype && cache != DType::kFloat8E4M3FN) {
    return "caches must be of the rows' dtype, or float8_e4m3fn";
  }
  const int64_t size = size_of(cache);
  if (attention.row_stride * size % 16 != 0 || attention.head_stride * size % 16 != 0) {
    return "strides of the caches must be whole vectors of 16 bytes";
  }
  if (args.qkv != attention.qkv || args.qkv_columns != (heads + 2 * kv_heads) * kHeadDim) {
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

// Workspace: the greatest of each block's part of y, and of halves of heads; y, h, attended,
// partials of the attention.
constexpr int64_t amaxs_offset = 4 * kMostBlocks, y_offset = amaxs_offset + 4 * kMostBlocks;
int64_t h_offset(const DecodeLayersArgs& args) { return y_offset + 2 * args.intermediate; }
int64_t attended_offset(const DecodeLayersArgs& args) { return h_offset(args) + 2 * args.hidden; }
int64_t partials_offset(const DecodeLayersArgs& args) {
  return attended_offset(args) + 2 * args.attended_columns;
}

// State: meetings, a line a launch; and what the attention counts.
constexpr int64_t kStateLine = 128, kArrivedOffset = kDecodeLayersStateBytes / 2;

template <typename T, typename C, int kVectors>
Status launch_with(const DecodeLayersArgs& args, const Device& device, const Context& context) {
  const auto kernel = decode_layers_kernel<T, C, kVectors>;
  StackProblem<T> p{};
  const Space space = space_of(args, device.shared_bytes);
  if (space.num_stages < 2) {
    return "intermediate exceeds what shared memory holds of it; run the ops one by one";
  }
  if (args.count > kMostLayers * (kArrivedOffset / kStateLine)) return "too many layers";
  const int blocks = device.facts.compute_units;
  char* const workspace = static_cast<char*>(args.workspace);
  char* const kept = static_cast<char*>(args.state);
  const DecodeAttention& a = args.attention;
  Attention<T>& attention = p.attention;
  attention.row_stride = a.row_stride;
  attention.head_stride = a.head_stride;
  attention.k_scale_stride = a.k_scale_stride;
  attention.v_scale_stride = a.v_scale_stride;
  attention.cos = static_cast<const T*>(a.cos);
  attention.sin = static_cast<const T*>(a.sin);
  attention.position = a.position;
  attention.keys = a.keys;
  attention.first_key = a.first_key;
  attention.window_left = a.window_left;
  attention.heads = a.heads;
  attention.kv_heads = a.kv_heads;
  attention.parts = parts_of_group(a);
  attention.splits = blocks / (a.kv_heads * attention.parts);
  attention.scale_log2 = a.scale * 1.44269504f;
  attention.partials = reinterpret_cast<float*>(workspace + partials_offset(args));
  attention.arrived = reinterpret_cast<uint32_t*>(kept + kArrivedOffset);
  attention.attended = reinterpret_cast<T*>(workspace + attended_offset(args));
  attention.amaxs = reinterpret_cast<float*>(workspace + amaxs_offset);
  p.num_stages = space.num_stages;
  p.row_bytes = space.row_bytes;
  p.eps = args.eps;
  p.weight_offset = args.weight_offset == 0.0f ? -0.0f : args.weight_offset;
  p.qkv = static_cast<T*>(args.qkv);
  p.amax = reinterpret_cast<float*>(workspace);
  T* const out = static_cast<T*>(args.out);
  T* const h = reinterpret_cast<T*>(workspace + h_offset(args));
  void* const y = workspace + y_offset;
  Product<T>&o = p.products[0], &gate_up = p.products[1], &down = p.products[2],
  &qkv = p.products[3];
  o = make_product<T>(args.hidden, args.attended_columns, End::kAdded);
  o.x = attention.attended, o.addends = out, o.out = h;
  o.amaxs = attention.amaxs, o.amax_count = 2 * a.heads;
  gate_up = make_product<T>(2 * args.intermediate, args.hidden, End::kGated);
  gate_up.x = h, gate_up.out = y;
  down = make_product<T>(args.hidden, args.intermediate, End::kAdded);
  down.x = y, down.addends = h, down.out = out;
  down.amaxs = p.amax, down.amax_count = blocks;
  qkv = make_product<T>(args.qkv_columns, args.hidden, End::kBiased);
  qkv.x = out, qkv.out = p.qkv;
  gate_up.normalizes = qkv.normalizes = 1;
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

template <typename T, typename C>
Status launch_for(const DecodeLayersArgs& args, const Device& device, const Context& context) {
  constexpr int kColumns = kThreads * 8;  // of a vector for each thread
  return args.hidden <= 2 * kColumns
             ? launch_with<T, C, 2>(args, device, context)
             : launch_with<T, C, kMostHidden / kColumns>(args, device, context);
}

}  // namespace
}  // namespace rocm_kernels::cuda::decode

namespace rocm_kernels {

int64_t decode_layers_workspace_bytes(const DecodeLayersArgs& args) {
  using namespace cuda::decode;
  const DecodeAttention& a = args.attention;
  const int64_t kinds = int64_t{a.kv_heads} * parts_of_group(a);
  return partials_offset(args) + 4 * kPartialFloats * a.heads * (kMostBlocks / kinds + 1);
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
