// Starts grouped products on gemm's warpgroup kernel (grouped_tiles.cuh). Each kind of operands is
// compiled in a file of its own.
#pragma once

#include "../../common/gpu/launch.h"
#include "../config.h"
#include "../gpu/problem.h"

namespace rocm_kernels {
namespace cuda {

struct GroupedTilesLaunch {
  GroupedEnd end;
  const GroupedProblem& product;
  const MoeConfig& config;
  int64_t rows;     // of a that there can be
  int32_t experts;  // of w
  int32_t sm_count;
  int64_t shared_bytes_per_block;
};

Status launch_grouped_tiles_fp8(const GroupedTilesLaunch& call, Stream stream);
Status launch_grouped_tiles_fp8_block(const GroupedTilesLaunch& call, Stream stream);
Status launch_grouped_tiles_bf16(const GroupedTilesLaunch& call, Stream stream);
Status launch_grouped_tiles_fp16(const GroupedTilesLaunch& call, Stream stream);
// 16-bit rows and narrower weights.
Status launch_grouped_tiles_bf16_fp8(const GroupedTilesLaunch& call, Stream stream);
Status launch_grouped_tiles_fp16_fp8(const GroupedTilesLaunch& call, Stream stream);
Status launch_grouped_tiles_bf16_mxfp4(const GroupedTilesLaunch& call, Stream stream);

}  // namespace cuda
}  // namespace rocm_kernels
