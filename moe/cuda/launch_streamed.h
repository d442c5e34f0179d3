// Starts the streamed kernel (streamed.cuh), whose instances streamed.cu holds.
#pragma once

#include "../../common/gpu/launch.h"
#include "../gpu/problem.h"
#include "../gpu/routing.h"
#include "streamed.h"

namespace rocm_kernels {
namespace cuda {

struct StreamedLaunch {
  GroupedEnd end;
  const GroupedProblem& product;
  const int32_t* ids;  // [slots]
  int32_t slots, experts;
  StreamedStage stage;
  int32_t num_stages;
  int32_t walked;  // tiles of rows before the next columns; 0: all
  bool first;      // of the layer's kernels
  int32_t sm_count;
};

Status launch_streamed(const StreamedLaunch& call, Stream stream);

}  // namespace cuda
}  // namespace rocm_kernels
