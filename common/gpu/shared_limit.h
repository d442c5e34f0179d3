// Host: how much dynamic shared memory a kernel may be launched with.
//
// Beyond 48 KB a kernel must be told that it may. The runtime keeps one limit a kernel and device,
// for all threads. A limit of one launch's bytes would be lowered by another thread's smaller
// launch before that launch happens, and fail it. So each kernel gets all that a block of the
// device can have: whoever sets the limit sets the same number.
#pragma once

#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace rocm_kernels {
namespace cuda {

// Pairs of a kernel and a device that have been told. Without locks: a pair that finds no place is
// told again before each launch, which costs time and changes nothing.
class ToldKernels {
 public:
  bool has(const void* kernel, int device) const {
    if (device >= kDevices) return false;
    for (size_t i = 0; i < kProbes; ++i) {
      const Place& place = places_[place_of(kernel, i)];
      if (place.kernel.load(std::memory_order_acquire) != kernel) continue;
      return place.devices.load(std::memory_order_acquire) >> device & 1;
    }
    return false;
  }

  void add(const void* kernel, int device) {
    if (device >= kDevices) return;
    for (size_t i = 0; i < kProbes; ++i) {
      Place& place = places_[place_of(kernel, i)];
      const void* there = nullptr;
      if (place.kernel.compare_exchange_strong(there, kernel) || there == kernel) {
        place.devices.fetch_or(uint64_t{1} << device, std::memory_order_release);
        return;
      }
    }
  }

 private:
  static constexpr int kDevices = 64;
  static constexpr size_t kPlaces = 2048, kProbes = 16;
  struct Place {
    std::atomic<const void*> kernel{nullptr};  // never another, once it is there
    std::atomic<uint64_t> devices{0};
  };
  static size_t place_of(const void* kernel, size_t probe) {
    const uint64_t hash = reinterpret_cast<uintptr_t>(kernel) * 0x9E3779B97F4A7C15ull;
    return ((hash >> 32) + probe) % kPlaces;
  }
  Place places_[kPlaces];
};
inline ToldKernels told_kernels;

// Lets `kernel` be launched on the current device with all the dynamic shared memory that a block
// can have there.
inline cudaError_t allow_shared_memory(const void* kernel) {
  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess || told_kernels.has(kernel, device)) return error;
  int most = 0;
  error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  cudaFuncAttributes attributes;
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(attributes.sharedSizeBytes));
  }
  if (error == cudaSuccess) told_kernels.add(kernel, device);
  return error;
}

}  // namespace cuda
}  // namespace rocm_kernels
