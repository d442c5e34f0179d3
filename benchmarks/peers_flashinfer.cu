// FlashInfer's norm and activation over plain pointers: what its own launchers do, without its
// binding. Built by benchmarks/peers.py with FlashInfer's headers; float16, contiguous rows.
// Programmatic dependent launch is on, as FlashInfer chooses for sm_90.

#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <flashinfer/activation.cuh>
#include <flashinfer/norm.cuh>

namespace {

constexpr unsigned kVector = 16 / sizeof(__half);

__device__ __forceinline__ float silu(const float& v) { return v / (1.0f + __expf(-v)); }

}  // namespace

// residual [rows, hidden] += x; out [rows, hidden] = fp8(RMSNorm(residual) * weight / scale).
extern "C" int flashinfer_add_norm_fp8(__half* x, __half* residual, __half* weight,
                                       __nv_fp8_e4m3* out, float* scale, float eps, unsigned rows,
                                       unsigned hidden, cudaStream_t stream) {
  return flashinfer::norm::FusedAddRMSNormQuant(x, residual, weight, out, rows, hidden, hidden,
                                                hidden, hidden, scale, eps, true, stream);
}

// The same without quantisation; the result takes x's place.
extern "C" int flashinfer_add_norm(__half* x, __half* residual, __half* weight, float eps,
                                   unsigned rows, unsigned hidden, cudaStream_t stream) {
  return flashinfer::norm::FusedAddRMSNorm(x, residual, weight, rows, hidden, hidden, hidden, eps,
                                           true, stream);
}

// out [rows, d] = silu(x[:, :d]) * x[:, d:], d a multiple of 8.
extern "C" int flashinfer_swiglu(__half* out, __half* x, unsigned rows, int d,
                                 cudaStream_t stream) {
  cudaLaunchAttribute overlap[1];
  overlap[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap[0].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = rows;
  config.blockDim = std::min<unsigned>(d / kVector, 256u);
  config.stream = stream;
  config.attrs = overlap;
  config.numAttrs = 1;
  auto kernel = flashinfer::activation::act_and_mul_kernel<__half, silu, kVector>;
  return cudaLaunchKernelEx(&config, kernel, out, static_cast<const __half*>(x), d);
}
