// Functions of the HIP stand-in that others of it make up: copies in two dimensions, host functions
// in a stream, memory pools, hints, and the names that older and newer programs have for the same.
#include <algorithm>
#include <cstdio>
#include <map>

#include "hip_state.h"

using namespace sim::hip;

namespace {

// A pool gives memory as hipMalloc does, and keeps none: its attributes are only remembered.
struct Pool {
  std::map<int, uint64_t> attributes;
};
Pool* poolOf(hipMemPool_t pool) { return reinterpret_cast<Pool*>(pool); }

std::map<int, hipMemPool_t>& poolsInUse() {
  static auto* pools = new std::map<int, hipMemPool_t>;
  return *pools;
}

hipMemPool_t defaultPool(int device) {
  static auto* pools = new std::map<int, Pool>;
  return reinterpret_cast<hipMemPool_t>(&(*pools)[device]);
}

bool isDevice(int device) { return device >= 0 && device < runtime().devices; }

// The reuse policies are 32-bit integers, the rest are 64-bit.
bool isNarrow(hipMemPoolAttr attribute) {
  return attribute <= hipMemPoolReuseAllowInternalDependencies;
}

char* at(const void* p, size_t offset) { return static_cast<char*>(const_cast<void*>(p)) + offset; }

}  // namespace

extern "C" {

// ---- copies -------------------------------------------------------------------------------------

hipError_t hipMemcpy2D(void* to, size_t toPitch, const void* from, size_t fromPitch, size_t width,
                       size_t height, hipMemcpyKind kind) {
  if (width > toPitch || width > fromPitch) return result(hipErrorInvalidPitchValue);
  for (size_t row = 0; row < height; ++row) {
    hipError_t error = hipMemcpy(at(to, row * toPitch), at(from, row * fromPitch), width, kind);
    if (error) return error;
  }
  return hipSuccess;
}
hipError_t hipMemcpy2DAsync(void* to, size_t toPitch, const void* from, size_t fromPitch,
                            size_t width, size_t height, hipMemcpyKind kind, hipStream_t s) {
  if (width > toPitch || width > fromPitch) return result(hipErrorInvalidPitchValue);
  for (size_t row = 0; row < height; ++row) {
    hipError_t error =
        hipMemcpyAsync(at(to, row * toPitch), at(from, row * fromPitch), width, kind, s);
    if (error) return error;
  }
  return hipSuccess;
}
hipError_t hipMemset2DAsync(void* to, size_t pitch, int value, size_t width, size_t height,
                            hipStream_t s) {
  if (width > pitch) return result(hipErrorInvalidPitchValue);
  for (size_t row = 0; row < height; ++row) {
    if (hipError_t error = hipMemsetAsync(at(to, row * pitch), value, width, s)) return error;
  }
  return hipSuccess;
}
hipError_t hipMemset2D(void* to, size_t pitch, int value, size_t width, size_t height) {
  hipError_t error = hipMemset2DAsync(to, pitch, value, width, height, nullptr);
  return error ? error : drain(nullptr);
}
hipError_t hipMemsetD8(hipDeviceptr_t to, unsigned char value, size_t count) {
  return hipMemset(to, value, count);
}
hipError_t hipMemsetD32Async(hipDeviceptr_t to, int value, size_t count, hipStream_t s) {
  for (size_t byte = 0; byte < 4; ++byte) {  // one column of bytes after the other
    unsigned part = static_cast<unsigned>(value) >> (8 * byte) & 255;
    if (value == static_cast<int>(part * 0x01010101u)) {
      return hipMemsetAsync(to, static_cast<int>(part), 4 * count, s);
    }
    hipError_t error = hipMemset2DAsync(at(to, byte), 4, static_cast<int>(part), 1, count, s);
    if (error) return error;
  }
  return hipSuccess;
}
hipError_t hipMemsetD32(hipDeviceptr_t to, int value, size_t count) {
  hipError_t error = hipMemsetD32Async(to, value, count, nullptr);
  return error ? error : drain(nullptr);
}
hipError_t hipMemcpyDtoH(void* to, hipDeviceptr_t from, size_t bytes) {
  return hipMemcpy(to, from, bytes, hipMemcpyDeviceToHost);
}
hipError_t hipMemcpyHtoD(hipDeviceptr_t to, void* from, size_t bytes) {
  return hipMemcpy(to, from, bytes, hipMemcpyHostToDevice);
}
hipError_t hipMemcpyDtoHAsync(void* to, hipDeviceptr_t from, size_t bytes, hipStream_t s) {
  return hipMemcpyAsync(to, from, bytes, hipMemcpyDeviceToHost, s);
}
hipError_t hipMemcpyHtoDAsync(hipDeviceptr_t to, void* from, size_t bytes, hipStream_t s) {
  return hipMemcpyAsync(to, from, bytes, hipMemcpyHostToDevice, s);
}
hipError_t hipMemcpyToSymbolAsync(const void* symbol, const void* from, size_t bytes, size_t offset,
                                  hipMemcpyKind kind, hipStream_t s) {
  void* p;
  if (hipError_t error = hipGetSymbolAddress(&p, symbol)) return error;
  return hipMemcpyAsync(at(p, offset), from, bytes, kind, s);
}
hipError_t hipMemcpyFromSymbolAsync(void* to, const void* symbol, size_t bytes, size_t offset,
                                    hipMemcpyKind kind, hipStream_t s) {
  void* p;
  if (hipError_t error = hipGetSymbolAddress(&p, symbol)) return error;
  return hipMemcpyAsync(to, at(p, offset), bytes, kind, s);
}

// ---- memory -------------------------------------------------------------------------------------

hipError_t hipMallocPitch(void** p, size_t* pitch, size_t width, size_t height) {
  *pitch = (width + 255) / 256 * 256;
  return hipMalloc(p, *pitch * height);
}
hipError_t hipHostAlloc(void** p, size_t bytes, unsigned flags) {
  return hipHostMalloc(p, bytes, flags);
}
hipError_t hipMallocHost(void** p, size_t bytes) { return hipHostMalloc(p, bytes, 0); }
hipError_t hipFreeHost(void* p) { return hipHostFree(p); }
hipError_t hipMemPrefetchAsync(const void*, size_t, int, hipStream_t) { return hipSuccess; }
hipError_t hipMemAdvise(const void*, size_t, hipMemoryAdvise, int) { return hipSuccess; }

hipError_t hipDeviceGetDefaultMemPool(hipMemPool_t* pool, int device) {
  if (!isDevice(device)) return result(hipErrorInvalidDevice);
  Lock guard(runtime().lock);
  *pool = defaultPool(device);
  return hipSuccess;
}
hipError_t hipDeviceGetMemPool(hipMemPool_t* pool, int device) {
  if (!isDevice(device)) return result(hipErrorInvalidDevice);
  Lock guard(runtime().lock);
  auto it = poolsInUse().find(device);
  *pool = it == poolsInUse().end() ? defaultPool(device) : it->second;
  return hipSuccess;
}
hipError_t hipDeviceSetMemPool(int device, hipMemPool_t pool) {
  if (!isDevice(device) || !pool) return result(hipErrorInvalidValue);
  Lock guard(runtime().lock);
  poolsInUse()[device] = pool;
  return hipSuccess;
}
hipError_t hipMemPoolCreate(hipMemPool_t* pool, const hipMemPoolProps*) {
  *pool = reinterpret_cast<hipMemPool_t>(new Pool);
  return hipSuccess;
}
hipError_t hipMemPoolDestroy(hipMemPool_t pool) {
  Lock guard(runtime().lock);
  std::erase_if(poolsInUse(), [&](const auto& entry) { return entry.second == pool; });
  delete poolOf(pool);
  return hipSuccess;
}
hipError_t hipMemPoolTrimTo(hipMemPool_t, size_t) { return hipSuccess; }
hipError_t hipMemPoolSetAccess(hipMemPool_t, const hipMemAccessDesc*, size_t) { return hipSuccess; }
hipError_t hipMemPoolSetAttribute(hipMemPool_t pool, hipMemPoolAttr attribute, void* value) {
  if (!pool || !value) return result(hipErrorInvalidValue);
  Lock guard(runtime().lock);
  poolOf(pool)->attributes[attribute] =
      isNarrow(attribute) ? *static_cast<int*>(value) : *static_cast<uint64_t*>(value);
  return hipSuccess;
}
hipError_t hipMemPoolGetAttribute(hipMemPool_t pool, hipMemPoolAttr attribute, void* value) {
  if (!pool || !value) return result(hipErrorInvalidValue);
  Lock guard(runtime().lock);
  uint64_t kept = poolOf(pool)->attributes[attribute];
  if (isNarrow(attribute)) {
    *static_cast<int*>(value) = static_cast<int>(kept);
  } else {
    *static_cast<uint64_t*>(value) = kept;
  }
  return hipSuccess;
}
hipError_t hipMallocFromPoolAsync(void** p, size_t bytes, hipMemPool_t, hipStream_t s) {
  return hipMallocAsync(p, bytes, s);
}

// ---- the host's functions in a stream -----------------------------------------------------------

hipError_t hipLaunchHostFunc(hipStream_t s, hipHostFn_t function, void* data) {
  if (!function) return result(hipErrorInvalidValue);
  return submit(s, [=] {
    function(data);
    return hipSuccess;
  });
}
hipError_t hipStreamAddCallback(hipStream_t s, hipStreamCallback_t function, void* data, unsigned) {
  if (!function) return result(hipErrorInvalidValue);
  return submit(s, [=] {
    function(s, hipSuccess, data);
    return hipSuccess;
  });
}

// ---- devices ------------------------------------------------------------------------------------

hipError_t hipDeviceGet(hipDevice_t* device, int ordinal) {
  if (!isDevice(ordinal)) return result(hipErrorInvalidDevice);
  *device = ordinal;
  return hipSuccess;
}
hipError_t hipDeviceGetName(char* name, int room, hipDevice_t device) {
  hipDeviceProp_t p;
  if (hipError_t error = hipGetDeviceProperties(&p, device)) return error;
  std::snprintf(name, room, "%s", p.name);
  return hipSuccess;
}
hipError_t hipDeviceTotalMem(size_t* bytes, hipDevice_t device) {
  hipDeviceProp_t p;
  if (hipError_t error = hipGetDeviceProperties(&p, device)) return error;
  *bytes = p.totalGlobalMem;
  return hipSuccess;
}
hipError_t hipSetDeviceFlags(unsigned) { return hipSuccess; }
hipError_t hipProfilerStart() { return hipSuccess; }
hipError_t hipProfilerStop() { return hipSuccess; }

}  // extern "C"
