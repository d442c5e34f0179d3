// Starts the streamed_wgmma kernel (streamed_wgmma.cuh), whose instances streamed_wgmma.cu holds.
#pragma once

#include "../../common/gpu/launch.h"
#include "../gpu/problem.h"
#include "../gpu/product.h"
#include "streamed_wgmma.h"

namespace rocm_kernels {
namespace cuda {

struct StreamedWgmmaLaunch {
  GroupedEnd end;
  const GroupedProblem& product;
  const SlotIds& slots;
  StreamedWgmmaStage stage;
  int32_t num_stages;
  int32_t walked;  // tiles of rows before the next columns; 0: all
  int32_t sm_count;
};

Status launch_streamed_wgmma(const StreamedWgmmaLaunch& call, Stream stream);

}  // namespace cuda
}  // namespace rocm_kernels
