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

#include "../core/context.h"

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
  bool hopper = false;        // NVIDIA sm_90 or later: thread block clusters, dependent launch
  bool fnuz = false;          // its FP8 is FNUZ: kPreferredFnuz of the code that it runs
};

namespace detail {
inline bool ask_device_facts(int device, DeviceFacts& facts) {
#if defined(__CUDACC__)
  int major = 0;
  const auto ask = [&](int& answer, cudaDeviceAttr attribute) {
    return cudaDeviceGetAttribute(&answer, attribute, device) == cudaSuccess;
  };
  const bool answered = ask(facts.compute_units, cudaDevAttrMultiProcessorCount) &&
                        ask(facts.wave_size, cudaDevAttrWarpSize) &&
                        ask(major, cudaDevAttrComputeCapabilityMajor);
  facts.hopper = major >= 9;
  return answered;
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

// Blocks for `blocks` pieces of equal work: at most as many as the device holds at once, and no
// more than it takes for all of them to get the same number of pieces, give or take one.
inline int64_t persistent_grid(int64_t blocks, int block_threads, int resident_threads,
                               const DeviceFacts& facts) {
  const int64_t resident = int64_t{facts.compute_units} * (resident_threads / block_threads);
  const int64_t rounds = (blocks + resident - 1) / resident;
  return (blocks + rounds - 1) / rounds;
}

// Launches a kernel that calls begin_after_previous_kernel(), in clusters of `cluster` blocks. What
// goes wrong is reported by launch_status().
template <typename... Params>
void launch_kernel(void (*kernel)(Params...), int64_t grid, int block, int cluster,
                   const DeviceFacts& facts, Stream stream, const Params&... params) {
#if defined(__CUDACC__)
  if (facts.hopper) {
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
    attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(grid));
    config.blockDim = dim3(static_cast<unsigned>(block));
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = cluster > 1 ? 2 : 1;
    static_cast<void>(cudaLaunchKernelEx(&config, kernel, params...));
    return;
  }
#endif
  static_cast<void>(cluster), static_cast<void>(facts);
  kernel<<<static_cast<unsigned>(grid), static_cast<unsigned>(block), 0, stream>>>(params...);
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
