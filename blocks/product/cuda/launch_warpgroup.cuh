// Host: the tensor map of an operand of the warpgroup kernel, for the files that hold its
// instances.
#pragma once

#include "../../../common/cuda/tensor_map.h"
#include "../../../common/gpu/launch.h"
#include "warpgroup.cuh"

namespace rocm_kernels {
namespace cuda {

// Describes a matrix as boxes of box_rows x line_bytes, swizzled; what lies outside reads as zero.
// Rows start at multiples of 16 bytes; K may end anywhere, unlike make_tensor_map()'s.
// `element`: whose numbers TMA adds; kFloat8E4M3FN: bytes, which it only moves.
inline Status make_box_map(CUtensorMap& map, const MatrixOfBytes& matrix, int box_rows,
                           int line_bytes = kChunkBytes, DType element = DType::kFloat8E4M3FN) {
  static const detail::EncodeTiled encode = detail::find_encoder();
  const auto type = element == DType::kBFloat16  ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                    : element == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  const int bytes = static_cast<int>(size_of(element));
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(matrix.row_bytes / bytes),
                               static_cast<cuuint64_t>(matrix.rows)};
  // The stride of a lone row may be anything.
  const int64_t stride =
      matrix.rows == 1 ? ceil_div(matrix.row_bytes, 16) * 16 : matrix.stride_bytes;
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(line_bytes / bytes),
                             static_cast<cuuint32_t>(box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const bool ok =
      encode != nullptr &&
      encode(&map, type, 2, const_cast<void*>(matrix.data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle_of(line_bytes),
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  return ok ? nullptr : "gemm: the driver could not describe the matrices to TMA";
}

}  // namespace cuda
}  // namespace rocm_kernels
