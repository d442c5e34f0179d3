// Attention on NVIDIA GPUs: which kernel, how many parts, and its launch.
#include "../attention.h"

#include <algorithm>

#include "../../common/gpu/launch.h"
#include "decode.cuh"

namespace rocm_kernels {
namespace cuda {
namespace {
int early = 0;

template <class Shape>
Status launch_decode_as(const AttentionArgs& args, DecodeGrid grid, const Context& context) {
  const int64_t heads_per_kv = args.heads / args.kv_heads;
  constexpr int64_t kAll = 1 << 30;
  grid.window.left = static_cast<int>(args.window_left < 0 ? kAll : std::min(args.window_left, kAll));
  grid.window.right = static_cast<int>(args.window_right < 0 ? kAll - 1 : std::min(args.window_right, kAll - 1));
  grid.heads_per_kv = static_cast<int>(heads_per_kv);
  grid.heads_magic = static_cast<uint32_t>((uint64_t{1} << 32) / heads_per_kv + ((uint64_t{1} << 32) % heads_per_kv != 0));
  grid.row_blocks =
      static_cast<int>((args.max_seqlen_q * heads_per_kv + Shape::kRows - 1) / Shape::kRows);
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(grid.parts),
                     static_cast<unsigned>(args.kv_heads * grid.row_blocks),
                     static_cast<unsigned>(args.batch));
  launch.block = Shape::kThreads;
  launch.stream = stream_of(context);
  launch.shared_bytes = Shape::kSharedBytes;
  if (early & 2) launch.shared_bytes = std::max<int64_t>(launch.shared_bytes, 120 << 10);
  launch.cluster = grid.cluster;
  launch.early = early & 1;
  if (grid.cluster > 8) {
    const Status error = status_of(cudaFuncSetAttribute(
        attention_decode<Shape>, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
    if (error) return error;
  }
  return launch_kernel(attention_decode<Shape>, launch, args, grid);
}
template <typename T, bool kFp8>
Status launch_of_type(const AttentionArgs& args, const DecodeGrid& grid, const Context& context) {
  const int64_t d = std::max(args.head_dim, args.head_dim_v);
  const int64_t rows = args.max_seqlen_q * (args.heads / args.kv_heads);
#ifdef STUDY
  if (d <= 64) return rows <= 8 ? launch_decode_as<DecodeShape<T, kFp8, 64, 1>>(args, grid, context) : launch_decode_as<DecodeShape<T, kFp8, 64, 4>>(args, grid, context);
  if (d <= 128) {
    if (rows <= 8) return launch_decode_as<DecodeShape<T, kFp8, 128, 1>>(args, grid, context);
    if (rows <= 16) return launch_decode_as<DecodeShape<T, kFp8, 128, 2>>(args, grid, context);
    return launch_decode_as<DecodeShape<T, kFp8, 128, 4>>(args, grid, context);
  }
  if (d <= 256) return launch_decode_as<DecodeShape<T, kFp8, 256, 2>>(args, grid, context);
  return launch_decode_as<DecodeShape<T, kFp8, 512, 1>>(args, grid, context);
#endif
}

}  // namespace
}  // namespace cuda

extern "C" const char* attention_run(const AttentionArgs* args, int pdl, int cluster, int outer, float* partial, int64_t rows, void* stream) {
  cuda::early = pdl;
  cuda::DecodeGrid grid{};
  grid.parts = cluster * outer;
  grid.cluster = cluster;
  grid.partial = partial;
  Context context; context.stream = stream;
  const bool fp8 = is_fp8(args->kv_dtype);
  Status s = nullptr;
  if (args->q_dtype == DType::kBFloat16) s = fp8 ? cuda::launch_of_type<__nv_bfloat16, true>(*args, grid, context) : cuda::launch_of_type<__nv_bfloat16, false>(*args, grid, context);
  else s = fp8 ? cuda::launch_of_type<__half, true>(*args, grid, context) : cuda::launch_of_type<__half, false>(*args, grid, context);
  if (s || outer == 1) return s;
  const int64_t d = std::max(args->head_dim, args->head_dim_v);
  int cols = d <= 64 ? 64 : d <= 128 ? 128 : d <= 256 ? 256 : 512;
  Launch launch; launch.early = false; launch.grid = dim3((rows * args->heads + 3) / 4); launch.block = 128; launch.stream = (cudaStream_t)stream; launch.early = true;
  if (args->q_dtype == DType::kBFloat16) return launch_kernel(cuda::attention_join<__nv_bfloat16>, launch, *args, (const float*)partial, outer, cols, rows);
  return launch_kernel(cuda::attention_join<__half>, launch, *args, (const float*)partial, outer, cols, rows);
}
}  // namespace rocm_kernels
