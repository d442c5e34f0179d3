// Products that no tensor core takes: e4m3fnuz operands, no K at all, and few rows that are not
// aligned to 16 bytes. A warp has one row of w and eight of a, loads single elements, and learns
// their types at run time.
#include <algorithm>

#include "../../blocks/product/cuda/output.cuh"
#include "../../common/core/math.h"
#include "../../common/gpu/dependent_launch.h"
#include "../../common/gpu/launch.h"
#include "plain.h"

namespace rocm_kernels {
namespace cuda {

namespace {

constexpr int kPlainWarps = 8;   // rows of w
constexpr int kPlainBlockM = 8;  // rows of a

// Grid: ceil(M / kPlainBlockM) x up to 65535 blocks, which take rows of w in turn.
__global__ void __launch_bounds__(kPlainWarps * 32) gemm_plain_kernel(GemmArgs args) {
  const int lane = threadIdx.x % 32;
  const int64_t first_m = static_cast<int64_t>(blockIdx.x) * kPlainBlockM;
  begin_after_previous_kernel();
  for (int64_t n = static_cast<int64_t>(blockIdx.y) * kPlainWarps + threadIdx.x / 32; n < args.n;
       n += static_cast<int64_t>(gridDim.y) * kPlainWarps) {
    float sum[kPlainBlockM] = {};
    for (int64_t k = lane; k < args.k; k += 32) {
      const int64_t block = k / kScaleBlock;
      const float w = load_float(args.w, args.w_dtype, n * args.w_stride + k) *
                      args.scale_w.block(n / kScaleBlock, block);
#pragma unroll
      for (int i = 0; i < kPlainBlockM; ++i) {
        const int64_t m = first_m + i;
        if (m < args.m) {
          const float a = load_float(args.a, args.a_dtype, m * args.a_stride + k);
          sum[i] = fmaf(a * args.scale_a.block(m, block), w, sum[i]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kPlainBlockM; ++i) {
      for (int offset = 16; offset > 0; offset /= 2) {
        sum[i] += __shfl_xor_sync(~0u, sum[i], offset);
      }
      if (lane == i && first_m + i < args.m) finish_output(args, first_m + i, n, sum[i]);
    }
  }
}

}  // namespace

Status launch_plain(const GemmArgs& args, bool early, void* stream) {
  constexpr int64_t kMostBlocks = 65535;  // along y
  Launch launch;
  launch.grid = dim3(static_cast<unsigned>(ceil_div(args.m, kPlainBlockM)),
                     static_cast<unsigned>(std::min(ceil_div(args.n, kPlainWarps), kMostBlocks)));
  launch.block = kPlainWarps * 32;
  launch.stream = static_cast<Stream>(stream);
  launch.early = early;
  return launch_kernel(gemm_plain_kernel, launch, args);
}

}  // namespace cuda
}  // namespace rocm_kernels
