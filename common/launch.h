// Host side of a launcher: what the device is, and whether a launch went well.
#pragma once

#include <atomic>
#include <cstdint>

#if defined(__CUDACC__)
#include <cuda_runtime.h>
#else
#include <hip/hip_runtime.h>
#endif

#include "context.h"

namespace rocm_kernels {

#if defined(__CUDACC__)
using Stream = cudaStream_t;
#else
using Stream = hipStream_t;
#endif

inline Stream stream_of(const Context& context) { return static_cast<Stream>(context.stream); }

struct DeviceFacts {
  int32_t compute_units = 0;  // CUs of an AMD GPU, SMs of an NVIDIA one
  int32_t wave_size = 0;      // lanes of a wave or warp
};

// Facts of the current device, asked of the runtime once a device. False if the runtime fails.
inline bool device_facts(DeviceFacts& facts) {
  constexpr int kDevices = 64;
  static std::atomic<uint64_t> cache[kDevices];  // compute_units << 32 | wave_size; 0: not asked
  int device = 0, units = 0, wave = 0;
#if defined(__CUDACC__)
  if (cudaGetDevice(&device) != cudaSuccess) return false;
#else
  if (hipGetDevice(&device) != hipSuccess) return false;
#endif
  const bool cached = device < kDevices;
  if (const uint64_t known = cached ? cache[device].load(std::memory_order_relaxed) : 0) {
    facts.compute_units = static_cast<int32_t>(known >> 32);
    facts.wave_size = static_cast<int32_t>(known & 0xFFFFFFFFu);
    return true;
  }
#if defined(__CUDACC__)
  if (cudaDeviceGetAttribute(&units, cudaDevAttrMultiProcessorCount, device) != cudaSuccess ||
      cudaDeviceGetAttribute(&wave, cudaDevAttrWarpSize, device) != cudaSuccess) {
    return false;
  }
#else
  if (hipDeviceGetAttribute(&units, hipDeviceAttributeMultiprocessorCount, device) != hipSuccess ||
      hipDeviceGetAttribute(&wave, hipDeviceAttributeWarpSize, device) != hipSuccess) {
    return false;
  }
#endif
  facts.compute_units = units;
  facts.wave_size = wave;
  if (cached) {
    cache[device].store(static_cast<uint64_t>(units) << 32 | static_cast<uint32_t>(wave),
                        std::memory_order_relaxed);
  }
  return true;
}

// To be called right after a launch: nullptr, or the runtime's own words for what went wrong.
inline Status launch_status() {
#if defined(__CUDACC__)
  const cudaError_t error = cudaGetLastError();
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
#else
  const hipError_t error = hipGetLastError();
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
#endif
}

}  // namespace rocm_kernels
