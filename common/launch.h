// Host side of a launcher: what the device is, and whether a launch went well.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

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
  bool fnuz = false;          // its FP8 is FNUZ: kPreferredFnuz of the code that it runs
};

namespace detail {
inline bool ask_device_facts(int device, DeviceFacts& facts) {
#if defined(__CUDACC__)
  return cudaDeviceGetAttribute(&facts.compute_units, cudaDevAttrMultiProcessorCount, device) ==
             cudaSuccess &&
         cudaDeviceGetAttribute(&facts.wave_size, cudaDevAttrWarpSize, device) == cudaSuccess;
#else
  hipDeviceProp_t properties;
  if (hipGetDeviceProperties(&properties, device) != hipSuccess) return false;
  facts.compute_units = properties.multiProcessorCount;
  facts.wave_size = properties.warpSize;
  facts.fnuz = std::strncmp(properties.gcnArchName, "gfx94", 5) == 0;
  return true;
#endif
}
}  // namespace detail

// Facts of the current device, asked of the runtime once a device. False if the runtime fails.
inline bool device_facts(DeviceFacts& facts) {
  constexpr int kDevices = 64;
  static DeviceFacts known[kDevices];
  static std::atomic<bool> asked[kDevices];
  static std::mutex asking;
  int device = 0;
#if defined(__CUDACC__)
  if (cudaGetDevice(&device) != cudaSuccess) return false;
#else
  if (hipGetDevice(&device) != hipSuccess) return false;
#endif
  if (device >= kDevices) return detail::ask_device_facts(device, facts);
  if (!asked[device].load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(asking);
    if (!detail::ask_device_facts(device, known[device])) return false;
    asked[device].store(true, std::memory_order_release);
  }
  facts = known[device];
  return true;
}

// Blocks to launch so that `blocks` of them are done by as many as the device holds at once.
inline unsigned persistent_grid(int64_t blocks, int block_threads, int resident_threads,
                                const DeviceFacts& facts) {
  const int64_t resident = int64_t{facts.compute_units} * (resident_threads / block_threads);
  return static_cast<unsigned>(blocks < resident ? blocks : resident);
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
