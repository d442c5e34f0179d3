#include "../../gemm/gemm.h"

#include <algorithm>

#include "../../skinny_gemm/skinny_gemm.h"
#include "../torch_binding.h"
#include "launch.h"
#include "product.h"

using namespace rocm_kernels;

namespace {

#if defined(ROCM_KERNEL) || defined(CUDA_KERNEL)
const void* skip_rows(const void* data, int64_t rows, int64_t stride, DType dtype) {
  return static_cast<const char*>(data) + rows * stride * size_of(dtype);
}

// The product of rows [begin, end) of a.
GemmArgs rows_of(GemmArgs args, int64_t begin, int64_t end) {
  args.m = end - begin;
  args.a = skip_rows(args.a, begin, args.a_stride, args.a_dtype);
  args.out = const_cast<void*>(skip_rows(args.out, begin, args.out_stride, args.out_dtype));
  args.scale_a.data += begin * args.scale_a.row_stride;  // 0 where there is one scale, or none
  return args;
}

// The GPU backends have no kernel for many rows: skinny_gemm multiplies them slice by slice.
void run_gemm(const Tensor& a, const GemmArgs& args) {
  for (int64_t begin = 0; begin < args.m; begin += kSkinnyGemmMaxRows) {
    run_skinny_gemm(a, rows_of(args, begin, std::min(begin + kSkinnyGemmMaxRows, args.m)));
  }
}
#else
void run_gemm(const Tensor& a, GemmArgs args) {
  if (args.m == 0 || args.n == 0) return;
  const auto launch = [&](const Context& context) {
    Workspace workspace;
    args.workspace = workspace.allocate(gemm_workspace_bytes(args, context), a);
    return launch_gemm(args, context);
  };
  check_status(with_context(a, launch), "gemm");
}
#endif

}  // namespace

void gemm(Tensor& out, const Tensor& a, const Tensor& w, std::optional<Tensor> scale_a,
          std::optional<Tensor> scale_w, std::optional<Tensor> bias) {
  run_gemm(a, describe_product(out, a, w, scale_a, scale_w, bias));
}

std::tuple<int64_t, int64_t> linear_limits(int64_t device, int64_t n, int64_t k,
                                           bool block_scales) {
  GemmArgs args;
  args.n = n;
  args.k = k;
  if (block_scales) args.scale_w.kind = ScaleView::Kind::kBlock;
  LinearLimits limits;
  check_status(on_device(device, [&] { return choose_linear_limits(args, limits); }),
               "linear_limits");
  return {limits.skinny_gemm, limits.gemm};
}
