// Starts an instance of the warpgroup kernel. Included by the files that hold the instances.
#pragma once

#include "../../../common/cuda/tensor_map.h"
#include "../../../common/gpu/launch.h"
#include "warpgroup.cuh"

namespace rocm_kernels {
namespace cuda {

// Describes a matrix as boxes of box_rows x line_bytes, swizzled; what lies outside reads as zero.
// Rows start at multiples of 16 bytes; K may end anywhere, unlike make_tensor_map()'s.
inline Status make_box_map(CUtensorMap& map, const MatrixOfBytes& matrix, int box_rows,
                           int line_bytes = kChunkBytes) {
  static const detail::EncodeTiled encode = detail::find_encoder();
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.row_bytes),
                               static_cast<cuuint64_t>(matrix.rows)};
  // The stride of a lone row may be anything.
  const int64_t stride =
      matrix.rows == 1 ? ceil_div(matrix.row_bytes, 16) * 16 : matrix.stride_bytes;
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(line_bytes),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const bool ok =
      encode != nullptr &&
      encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 2, const_cast<void*>(matrix.data), sizes, strides,
             box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(line_bytes),
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  return ok ? nullptr : "gemm: the driver could not describe the matrices to the copy engine";
}

template <class Tile>
Status launch_tile(const GemmArgs& args, const GemmConfig& config, WarpgroupProblem problem,
                   void* stream) {
  const int64_t bytes_a = size_of(args.a_dtype), bytes_w = size_of(args.w_dtype);
  CUtensorMap a_map, w_map;
  if (const Status error =
          make_box_map(a_map, {args.a, args.m, args.k * bytes_a, args.a_stride * bytes_a},
                       Tile::kSwapped ? problem.columns_box : problem.rows_box)) {
    return error;
  }
  if (const Status error =
          make_box_map(w_map, {args.w, args.n, args.k * bytes_w, args.w_stride * bytes_w},
                       Tile::kSwapped ? problem.rows_box : problem.columns_box, Tile::kWRowBytes)) {
    return error;
  }
  if (!Tile::kSwapped && problem.wide_stores) {
    const MatrixOfBytes out = {args.out, args.m, args.n * 2, args.out_stride * 2};
    if (const Status error =
            make_box_map(problem.out_map, out, kStagedRows, staged_columns(Tile::kColumns) * 2)) {
      return error;
    }
  }
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(problem.schedule.workers * problem.cluster));
  launch.block = Tile::kThreads;
  launch.stream = static_cast<Stream>(stream);
  launch.shared_bytes =
      warpgroup_shared_bytes(args, config) + problem.narrow_stages * Tile::kNarrowBytes;
  launch.cluster = problem.cluster;
  launch.early = true;
  return launch_kernel(gemm_warpgroup_kernel<Tile, DenseTiles<Tile>>, launch,
                       Tile::kSwapped ? w_map : a_map, Tile::kSwapped ? a_map : w_map, problem);
}

// The tiles that have kernels. Each type is compiled in a file of its own, which calls one of
// these.
#define ROCM_KERNELS_TILE(TYPE, ROWS_ARE_W, WAVES, COLUMNS, BLOCKS, CHAIN)              \
  if (config.rows_are_w() == ROWS_ARE_W && config.block_r() == WAVES * 128 &&           \
      config.block_c() == COLUMNS) {                                                    \
    return launch_tile<WarpgroupTile<TYPE, ROWS_ARE_W, WAVES, COLUMNS, BLOCKS, CHAIN>>( \
        args, config, problem, stream);                                                 \
  }

template <DType kType>
Status launch_16_bit_tile(const GemmArgs& args, const GemmConfig& config,
                          const WarpgroupProblem& problem, void* stream) {
  if (args.out_dtype == DType::kFloat32) {
    ROCM_KERNELS_TILE(kType, false, 1, 128, false, 4)
    ROCM_KERNELS_TILE(kType, true, 1, 32, false, 4)
    return kNoTile;
  }
  ROCM_KERNELS_TILE(kType, false, 1, 256, false, 0)
  ROCM_KERNELS_TILE(kType, false, 2, 128, false, 0)
  ROCM_KERNELS_TILE(kType, false, 1, 192, false, 0)
  ROCM_KERNELS_TILE(kType, false, 1, 160, false, 0)
  ROCM_KERNELS_TILE(kType, false, 1, 128, false, 0)
  ROCM_KERNELS_TILE(kType, false, 2, 64, false, 0)
  ROCM_KERNELS_TILE(kType, false, 1, 96, false, 0)
  ROCM_KERNELS_TILE(kType, false, 1, 64, false, 0)
  ROCM_KERNELS_TILE(kType, true, 1, 32, false, 0)
  ROCM_KERNELS_TILE(kType, true, 1, 64, false, 0)
  ROCM_KERNELS_TILE(kType, true, 1, 96, false, 0)
  ROCM_KERNELS_TILE(kType, true, 1, 128, false, 0)
  ROCM_KERNELS_TILE(kType, true, 1, 256, false, 0)
  return kNoTile;
}

template <bool kBlocks>
Status launch_fp8_tile(const GemmArgs& args, const GemmConfig& config,
                       const WarpgroupProblem& problem, void* stream) {
  constexpr DType kType = DType::kFloat8E4M3FN;
  if (args.out_dtype == DType::kFloat16) {
    // float16 shows what the tensor core's sums of 128 products lack; of 64 it does not.
    ROCM_KERNELS_TILE(kType, false, 2, 128, kBlocks, 2)
    ROCM_KERNELS_TILE(kType, false, 1, 128, kBlocks, 2)
    ROCM_KERNELS_TILE(kType, true, 1, 32, kBlocks, 2)
    ROCM_KERNELS_TILE(kType, true, 1, 64, kBlocks, 2)
    return kNoTile;
  }
  ROCM_KERNELS_TILE(kType, false, 2, 128, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, false, 1, 192, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, false, 1, 160, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, false, 1, 128, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, false, 2, 96, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, false, 2, 64, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, false, 1, 96, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, false, 1, 64, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 32, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 64, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 96, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, true, 1, 128, kBlocks, 4)
  ROCM_KERNELS_TILE(kType, true, 2, 64, kBlocks, 4)
  return kNoTile;
}

#undef ROCM_KERNELS_TILE
#define ROCM_KERNELS_TILE(ROWS_ARE_W, WAVES, COLUMNS)                                              \
  if (config.rows_are_w() == ROWS_ARE_W && config.block_r() == WAVES * 128 &&                      \
      config.block_c() == COLUMNS) {                                                               \
    return launch_tile<WarpgroupTile<kType, ROWS_ARE_W, WAVES, COLUMNS, kBlocks, kBlocks ? 4 : 0,  \
                                     false, DType::kFloat8E4M3FN>>(args, config, problem, stream); \
  }

// 16-bit a, FP8 weights.
template <DType kType, bool kBlocks>
Status launch_widened_tile(const GemmArgs& args, const GemmConfig& config,
                           const WarpgroupProblem& problem, void* stream) {
  if constexpr (!kBlocks) {
    ROCM_KERNELS_TILE(false, 2, 128)
  }
  ROCM_KERNELS_TILE(false, 1, 128)
  ROCM_KERNELS_TILE(true, 1, 32)
  ROCM_KERNELS_TILE(true, 1, 64)
  ROCM_KERNELS_TILE(true, 1, 128)
  return kNoTile;
}
template <DType kType>
Status launch_widened_tile(const GemmArgs& args, const GemmConfig& config,
                           const WarpgroupProblem& problem, void* stream) {
  return is_block_scaled(args) ? launch_widened_tile<kType, true>(args, config, problem, stream)
                               : launch_widened_tile<kType, false>(args, config, problem, stream);
}

#undef ROCM_KERNELS_TILE

}  // namespace cuda
}  // namespace rocm_kernels
