// Host: the description of a matrix from which TMA fetches boxes (tma.cuh).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "../core/context.h"
#include "swizzle.h"

namespace rocm_kernels {
namespace cuda {

// How the 128-byte lines of a box follow each other in shared memory, and with it the order of the
// map's second and third dimension, fastest first.
enum class BoxOrder {
  kRowsOfChunks,  // [row][chunk]: load_box(map, chunk, row, ...)
  kChunksOfRows,  // [chunk][row]: load_box(map, row, chunk, ...)
};

struct MatrixOfBytes {
  const void* data;
  int64_t rows, row_bytes, stride_bytes;
};

namespace detail {
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

// The driver's encoder, asked for at run time so that nothing links against libcuda.
inline EncodeTiled find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                       cudaEnableDefault, &result) != cudaSuccess) {
    return nullptr;
  }
  return reinterpret_cast<EncodeTiled>(function);
}

// Describes kRank dimensions, the innermost first, and boxes of them; `strides`, in bytes, are of
// all but the innermost. What lies outside reads as zero. `failed` is said where that cannot be.
template <int kRank>
Status describe(CUtensorMap& map, CUtensorMapDataType type, const void* data,
                const cuuint64_t (&sizes)[kRank], const cuuint64_t (&strides)[kRank - 1],
                const cuuint32_t (&box)[kRank], CUtensorMapSwizzle swizzle,
                CUtensorMapL2promotion promotion, const char* failed) {
  static const EncodeTiled encode = find_encoder();
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  const bool ok =
      encode != nullptr && encode(&map, type, kRank, const_cast<void*>(data), sizes, strides, box,
                                  steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, promotion,
                                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
  return ok ? nullptr : failed;
}
}  // namespace detail

// Describes a matrix as boxes of box_rows rows x box_chunks chunks of 128 bytes, swizzled; rows and
// chunks outside of it read as zero. Rows start at multiples of 16 bytes and do not overlap; a row
// is a whole number of chunks.
inline Status make_tensor_map(CUtensorMap& map, const MatrixOfBytes& matrix, int box_rows,
                              int box_chunks, BoxOrder order) {
  cuuint64_t sizes[3] = {kChunkBytes, static_cast<cuuint64_t>(matrix.row_bytes / kChunkBytes),
                         static_cast<cuuint64_t>(matrix.rows)};
  // The stride of a lone row may be anything.
  const int64_t stride = matrix.rows == 1 ? matrix.row_bytes : matrix.stride_bytes;
  cuuint64_t strides[2] = {kChunkBytes, static_cast<cuuint64_t>(stride)};
  cuuint32_t box[3] = {kChunkBytes, static_cast<cuuint32_t>(box_chunks),
                       static_cast<cuuint32_t>(box_rows)};
  if (order == BoxOrder::kChunksOfRows) {
    std::swap(sizes[1], sizes[2]);
    std::swap(strides[0], strides[1]);
    std::swap(box[1], box[2]);
  }
  return detail::describe(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, matrix.data, sizes, strides, box,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                          "the driver could not describe the operands to TMA");
}

// Matrices of the same shape: `count` of them, the first row of each `stride_bytes` after that of
// the one before; rows start at multiples of 16 bytes.
struct StackOfBytes {
  const void* data;
  int64_t count, rows, row_bytes, row_stride_bytes, stride_bytes;
};

// Describes a stack as boxes of box_rows rows x box_bytes of one matrix, row after row without a
// swizzle: load_box_3d(map, word of the row, row, matrix, ...). What lies outside of the matrix
// reads as zero. Rows are whole numbers of 16 bytes, boxes of 32-bit words up to 256.
inline Status make_stack_map(CUtensorMap& map, const StackOfBytes& stack, int box_rows,
                             int box_bytes) {
  constexpr int kWord = 4;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(stack.row_bytes / kWord),
                               static_cast<cuuint64_t>(stack.rows),
                               static_cast<cuuint64_t>(stack.count)};
  // The stride of a lone row, or matrix, may be anything.
  const int64_t row_stride = stack.rows == 1 ? stack.row_bytes : stack.row_stride_bytes;
  const int64_t stride = stack.count == 1 ? row_stride * stack.rows : stack.stride_bytes;
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride),
                                 static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_bytes / kWord),
                             static_cast<cuuint32_t>(box_rows), 1};
  return detail::describe(map, CU_TENSOR_MAP_DATA_TYPE_UINT32, stack.data, sizes, strides, box,
                          CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                          "the driver could not describe the weights to TMA");
}

// Rows of 16-bit elements of heads of sequences; rows start at multiples of 16 bytes.
struct StackOfHeads {
  const void* data;
  int64_t sequences, heads, rows, columns;
  int64_t sequence_stride_bytes, head_stride_bytes, row_stride_bytes;
};

// Describes them by boxes of 64 columns of box_rows rows of a head, a line of 128 bytes a row,
// swizzled: load_box_4d(map, column, row, head, sequence, ...). What lies outside reads as zero.
inline Status make_heads_map(CUtensorMap& map, const StackOfHeads& stack, int box_rows) {
  const cuuint64_t sizes[4] = {
      static_cast<cuuint64_t>(stack.columns), static_cast<cuuint64_t>(stack.rows),
      static_cast<cuuint64_t>(stack.heads), static_cast<cuuint64_t>(stack.sequences)};
  // The stride of a lone one may be anything.
  const auto stride = [](int64_t count, int64_t bytes) {
    return static_cast<cuuint64_t>(count == 1 ? 16 : bytes);
  };
  const cuuint64_t strides[3] = {stride(stack.rows, stack.row_stride_bytes),
                                 stride(stack.heads, stack.head_stride_bytes),
                                 stride(stack.sequences, stack.sequence_stride_bytes)};
  const cuuint32_t box[4] = {kChunkBytes / 2, static_cast<cuuint32_t>(box_rows), 1, 1};
  return detail::describe(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, stack.data, sizes, strides, box,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          "the driver could not describe the keys to TMA");
}

// Rows of 16-bit elements of groups of heads of sequences, `heads` next to each other in each of
// `groups`; rows start at multiples of 16 bytes.
struct StackOfGroups {
  const void* data;
  int64_t sequences, groups, heads, rows, columns;
  int64_t sequence_stride_bytes, head_stride_bytes, row_stride_bytes;
};

// Describes them by boxes of 64 columns of all heads of a group in box_rows rows, a line of 128
// bytes for each [row][head], swizzled: load_head_group_box(map, column, row, group, sequence,
// ...). What lies outside reads as zero, and is not stored.
inline Status make_head_groups_map(CUtensorMap& map, const StackOfGroups& stack, int box_rows) {
  const cuuint64_t sizes[5] = {
      static_cast<cuuint64_t>(stack.columns), static_cast<cuuint64_t>(stack.heads),
      static_cast<cuuint64_t>(stack.rows), static_cast<cuuint64_t>(stack.groups),
      static_cast<cuuint64_t>(stack.sequences)};
  // The stride of a lone one may be anything.
  const auto stride = [](int64_t count, int64_t bytes) {
    return static_cast<cuuint64_t>(count == 1 ? 16 : bytes);
  };
  const cuuint64_t strides[4] = {stride(stack.heads, stack.head_stride_bytes),
                                 stride(stack.rows, stack.row_stride_bytes),
                                 stride(stack.groups, stack.head_stride_bytes * stack.heads),
                                 stride(stack.sequences, stack.sequence_stride_bytes)};
  const cuuint32_t box[5] = {kChunkBytes / 2, static_cast<cuuint32_t>(stack.heads),
                             static_cast<cuuint32_t>(box_rows), 1, 1};
  return detail::describe(map, CU_TENSOR_MAP_DATA_TYPE_UINT16, stack.data, sizes, strides, box,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                          "the driver could not describe the heads to TMA");
}

// The swizzle of lines of 128, 64 or 32 bytes; longer ones, up to 256, have none.
constexpr CUtensorMapSwizzle swizzle_of(int line_bytes) {
  return line_bytes > kChunkBytes        ? CU_TENSOR_MAP_SWIZZLE_NONE
         : line_bytes == kChunkBytes     ? CU_TENSOR_MAP_SWIZZLE_128B
         : line_bytes == kChunkBytes / 2 ? CU_TENSOR_MAP_SWIZZLE_64B
                                         : CU_TENSOR_MAP_SWIZZLE_32B;
}

// Describes a stack by boxes of `line_bytes` of `parts` runs of box_rows rows, swizzled, a run
// after the other: load_box_4d(map, byte of the row, row of the runs, 0, matrix, ...). The runs'
// rows are row_stride_bytes apart, and `part_stride_bytes` lie between them: the gates and the ups
// of experts. What lies outside of a run's stack.rows rows reads as zero. K may end anywhere.
inline Status make_runs_map(CUtensorMap& map, const StackOfBytes& stack, int parts,
                            int64_t part_stride_bytes, int box_rows, int line_bytes) {
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(stack.row_bytes),
                               static_cast<cuuint64_t>(stack.rows), static_cast<cuuint64_t>(parts),
                               static_cast<cuuint64_t>(stack.count)};
  const cuuint64_t strides[3] = {static_cast<cuuint64_t>(stack.row_stride_bytes),
                                 static_cast<cuuint64_t>(part_stride_bytes),
                                 static_cast<cuuint64_t>(stack.stride_bytes)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(line_bytes), static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(parts), 1};
  return detail::describe(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, stack.data, sizes, strides, box,
                          swizzle_of(line_bytes), CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                          "the driver could not describe the weights to TMA");
}

// Describes a stack by boxes of a chunk of 128 bytes of `box_groups` groups of 8 rows, swizzled, as
// a wgmma operand has them: load_group_box(map, byte of the row, group, matrix, ...). A group has 8
// rows of each of `parts` runs, one after the other: the gates and the ups of 8 columns of h. The
// runs' rows are row_stride_bytes apart, and `part_stride_bytes` lie between them. stack.rows, of a
// run, is a multiple of 8; what lies outside of it reads as zero. K may end anywhere.
inline Status make_groups_map(CUtensorMap& map, const StackOfBytes& stack, int parts,
                              int64_t part_stride_bytes, int box_groups) {
  constexpr int kRows = kPatternLines;
  const cuuint64_t sizes[5] = {
      static_cast<cuuint64_t>(stack.row_bytes), kRows, static_cast<cuuint64_t>(parts),
      static_cast<cuuint64_t>(stack.rows / kRows), static_cast<cuuint64_t>(stack.count)};
  // The stride of a lone matrix may be anything.
  const int64_t stride =
      stack.count == 1 ? stack.row_stride_bytes * stack.rows * parts : stack.stride_bytes;
  const cuuint64_t strides[4] = {
      static_cast<cuuint64_t>(stack.row_stride_bytes), static_cast<cuuint64_t>(part_stride_bytes),
      static_cast<cuuint64_t>(stack.row_stride_bytes * kRows), static_cast<cuuint64_t>(stride)};
  const cuuint32_t box[5] = {kChunkBytes, kRows, static_cast<cuuint32_t>(parts),
                             static_cast<cuuint32_t>(box_groups), 1};
  return detail::describe(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, stack.data, sizes, strides, box,
                          CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                          "the driver could not describe the weights to TMA");
}

}  // namespace cuda
}  // namespace rocm_kernels
