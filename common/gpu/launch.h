// Host: facts of the current device, and the launch of a kernel, which returns what went wrong.
#pragma once

#include <atomic>
#include <cstdint>
#include <cstring>
#include <mutex>

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#include "shared_limit.h"
#else
#include <hip/hip_runtime.h>
#endif

#include "../core/context.h"

namespace rocm_kernels {

#if defined(__CUDACC__)
using Stream = cudaStream_t;
using RuntimeError = cudaError_t;
#else
using Stream = hipStream_t;
using RuntimeError = hipError_t;
#endif

inline Stream stream_of(const Context& context) { return static_cast<Stream>(context.stream); }

// nullptr, or the runtime's own words for what one of its functions answered.
inline Status status_of(RuntimeError error) {
#if defined(__CUDACC__)
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
#else
  return error == hipSuccess ? nullptr : hipGetErrorString(error);
#endif
}

// ---- The device -------------------------------------------------------------------------------

// What ask(device, facts) says of the current device: asked of the runtime once a device and kept,
// unless it failed.
template <auto ask, typename Facts>
Status ask_once(Facts& facts) {
  constexpr int kDevices = 64;
  static Facts known[kDevices];
  static std::atomic<bool> asked[kDevices];
  static std::mutex asking;
  int device = 0;
#if defined(__CUDACC__)
  if (const Status error = status_of(cudaGetDevice(&device))) return error;
#else
  if (const Status error = status_of(hipGetDevice(&device))) return error;
#endif
  if (device >= kDevices) return ask(device, facts);
  if (!asked[device].load(std::memory_order_acquire)) {
    const std::lock_guard<std::mutex> lock(asking);
    Facts answer{};
    if (const Status error = ask(device, answer)) return error;
    known[device] = answer;
    asked[device].store(true, std::memory_order_release);
  }
  facts = known[device];
  return nullptr;
}

struct DeviceFacts {
  int32_t compute_units = 0;       // CUs of an AMD GPU, SMs of an NVIDIA one
  int32_t wave_size = 0;           // lanes of a wave or warp
  int32_t compute_capability = 0;  // NVIDIA: 90 for sm_90; 0 on AMD
  bool fnuz = false;               // its FP8 is FNUZ: kPreferredFnuz of the code that it runs
  double memory_bytes_per_us = 0;  // NVIDIA: what the memory could read; 0: the driver does not say
  double l2_bytes = 0;             // NVIDIA

  // Thread block clusters, and kernels that start while the previous one ends.
  bool is_hopper_or_later() const { return compute_capability >= 90; }
};

namespace detail {
inline Status ask_device_facts(int device, DeviceFacts& facts) {
#if defined(__CUDACC__)
  int major = 0, minor = 0, memory_khz = 0, bus_bits = 0, l2_bytes = 0;
  cudaError_t error = cudaSuccess;
  const auto ask = [&](int32_t& answer, cudaDeviceAttr attribute) {
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&answer, attribute, device);
  };
  ask(facts.compute_units, cudaDevAttrMultiProcessorCount);
  ask(facts.wave_size, cudaDevAttrWarpSize);
  ask(major, cudaDevAttrComputeCapabilityMajor);
  ask(minor, cudaDevAttrComputeCapabilityMinor);
  ask(memory_khz, cudaDevAttrMemoryClockRate);
  ask(bus_bits, cudaDevAttrGlobalMemoryBusWidth);
  ask(l2_bytes, cudaDevAttrL2CacheSize);
  facts.memory_bytes_per_us = 2.0 * memory_khz * bus_bits / 8 / 1000;  // twice a clock
  facts.l2_bytes = l2_bytes;
  facts.compute_capability = major * 10 + minor;
  return status_of(error);
#else
  hipDeviceProp_t properties;
  if (const Status error = status_of(hipGetDeviceProperties(&properties, device))) return error;
  facts.compute_units = properties.multiProcessorCount;
  facts.wave_size = properties.warpSize;
  facts.fnuz = std::strncmp(properties.gcnArchName, "gfx94", 5) == 0;
  return nullptr;
#endif
}
}  // namespace detail

// Facts of the current device.
inline Status current_device(DeviceFacts& facts) {
  return ask_once<detail::ask_device_facts>(facts);
}

// ---- The launch -------------------------------------------------------------------------------

struct Launch {
  dim3 grid;
  int block = 0;  // threads
  Stream stream = nullptr;
  int64_t shared_bytes = 0;  // LDS beside what the kernel declares
  int cluster = 1;           // blocks of a cluster; more than one on sm_90 and later alone
  // The kernel may start while the previous one ends, because it calls wait_for_previous_kernel()
  // (dependent_launch.h); sm_90 and later alone.
  bool early = false;
};

#if defined(__CUDACC__)
// The same in the runtime's words. Points to itself: not to be copied.
struct LaunchConfig {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = {};

  explicit LaunchConfig(const Launch& launch) {
    config.gridDim = launch.grid;
    config.blockDim = dim3(static_cast<unsigned>(launch.block));
    config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
    config.stream = launch.stream;
    config.attrs = attributes;
    if (launch.early) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (launch.cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;
};
#endif

// Launches a kernel and returns what the runtime says of this launch. An error that an earlier call
// left behind is neither taken for this launch's nor cleared; one of this launch is returned and
// cleared, lest the next to ask takes it for its own.
template <typename... Params>
Status launch_kernel(void (*kernel)(Params...), const Launch& launch, const Params&... params) {
#if defined(__CUDACC__)
  cudaError_t error = cudaSuccess;
  if (launch.shared_bytes > 0) {
    error = cuda::allow_shared_memory(reinterpret_cast<const void*>(kernel));
  }
  if (error == cudaSuccess) {
    const LaunchConfig launched(launch);
    error = cudaLaunchKernelEx(&launched.config, kernel, params...);
  }
  if (error != cudaSuccess) static_cast<void>(cudaGetLastError());
#else
  const void* pointers[] = {static_cast<const void*>(&params)...};
  const hipError_t error = hipLaunchKernel(
      reinterpret_cast<const void*>(kernel), launch.grid, dim3(static_cast<unsigned>(launch.block)),
      const_cast<void**>(pointers), static_cast<size_t>(launch.shared_bytes), launch.stream);
  if (error != hipSuccess) static_cast<void>(hipGetLastError());
#endif
  return status_of(error);
}

}  // namespace rocm_kernels
