// Starts the resident kernels (resident.cuh), whose instances resident.cu holds.
#pragma once

#include "../../common/gpu/launch.h"
#include "../gpu/product.h"
#include "resident.h"

namespace rocm_kernels {
namespace cuda {

struct ResidentLaunch {
  GroupedEnd end;
  const GroupedProblem& product;  // a: x, or h in float32; out: h, or the layer's
  const SlotIds& slots;
  ResidentSplit split;
  ResidentShape shape;
  int32_t num_stages;
  int32_t sm_count;
};

Status launch_resident(const ResidentLaunch& call, Stream stream);

}  // namespace cuda
}  // namespace rocm_kernels
