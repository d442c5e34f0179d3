// Attributes and built-in functions that compilers spell differently.
#pragma once

#if defined(__HIP__)
#include <hip/hip_runtime.h>  // memcpy of the device
#endif

// For functions that hosts and devices both call.
#if defined(__HIPCC__) || defined(__CUDACC__) || defined(__HIP__)
#define ROCM_KERNELS_HOST_DEVICE __host__ __device__
#else
#define ROCM_KERNELS_HOST_DEVICE
#endif

// The value at a pointer, which nobody writes while the kernel runs: NVIDIA's read-only path.
#if defined(__CUDA_ARCH__)
#define ROCM_KERNELS_LOAD_CONSTANT(pointer) __ldg(pointer)
#else
#define ROCM_KERNELS_LOAD_CONSTANT(pointer) (*(pointer))
#endif
