// The device that the HIP stand-in shows, its streams and events, and errors.
#include <cstring>

#include "hip_state.h"

namespace sim::hip {
namespace {
thread_local hipError_t lastError = hipSuccess;
thread_local int chosen = 0;
}  // namespace

int& currentDevice() { return chosen; }

hipError_t result(hipError_t error) {
  if (error != hipSuccess) lastError = error;
  return error;
}

}  // namespace sim::hip

using namespace sim::hip;

extern "C" {

// ---- devices ------------------------------------------------------------------------------------

hipError_t hipInit(unsigned) { return hipSuccess; }
hipError_t hipGetDeviceCount(int* count) {
  *count = runtime().devices;
  return hipSuccess;
}
hipError_t hipGetDevice(int* device) {
  *device = currentDevice();
  return hipSuccess;
}
hipError_t hipSetDevice(int device) {
  if (device < 0 || device >= runtime().devices) return result(hipErrorInvalidDevice);
  currentDevice() = device;
  if (device) runtime().several = true;
  return hipSuccess;
}
hipError_t hipDeviceSynchronize(void) { return drainDevice(currentDevice()); }
hipError_t hipDeviceReset(void) { return drainDevice(currentDevice()); }
hipError_t hipDeviceCanAccessPeer(int* can, int device, int peer) {
  int count = runtime().devices;
  if (device < 0 || peer < 0 || device >= count || peer >= count) {
    return result(hipErrorInvalidDevice);
  }
  *can = device != peer;
  return hipSuccess;
}
hipError_t hipDeviceEnablePeerAccess(int peer, unsigned) {
  bool right = peer >= 0 && peer < runtime().devices && peer != currentDevice();
  return right ? hipSuccess : result(hipErrorInvalidDevice);
}
hipError_t hipDeviceDisablePeerAccess(int peer) { return hipDeviceEnablePeerAccess(peer, 0); }
hipError_t hipDeviceGetPCIBusId(char* id, int bytes, int device) {
  if (device < 0 || device >= runtime().devices) return result(hipErrorInvalidDevice);
  std::snprintf(id, bytes, "0000:%02x:00.0", device + 1);
  return hipSuccess;
}
hipError_t hipRuntimeGetVersion(int* version) {
  *version = HIP_VERSION;
  return hipSuccess;
}
hipError_t hipDriverGetVersion(int* version) { return hipRuntimeGetVersion(version); }

hipError_t hipGetDeviceProperties(hipDeviceProp_t* p, int device) {
  if (device < 0 || device >= runtime().devices) return result(hipErrorInvalidDevice);
  const sim::Gpu& gpu = *runtime().gpu;
  std::memset(p, 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "%s", gpu.product);
  std::snprintf(p->gcnArchName, sizeof p->gcnArchName, "%s:sramecc+:xnack-", gpu.target);
  p->totalGlobalMem = uint64_t(gpu.memoryGib) << 30;
  p->sharedMemPerBlock = gpu.ldsKib << 10;
  p->maxSharedMemoryPerMultiProcessor = p->sharedMemPerBlock;
  p->regsPerBlock = 65536;
  p->warpSize = 64;
  p->maxThreadsPerBlock = 1024;
  for (int d = 0; d < 3; ++d) {
    p->maxThreadsDim[d] = 1024;
    p->maxGridSize[d] = d ? 65536 : 0x7fffffff;
  }
  p->clockRate = gpu.clockMhz * 1000;
  p->memoryClockRate = gpu.memoryClockMhz * 1000;
  p->memoryBusWidth = gpu.busBits;
  p->totalConstMem = 0x7fffffff;
  p->major = gpu.major;
  p->minor = gpu.minor;
  p->multiProcessorCount = gpu.computeUnits;
  p->l2CacheSize = gpu.l2Mib << 20;
  p->maxThreadsPerMultiProcessor = 2048;
  p->clockInstructionRate = 100000;
  p->concurrentKernels = 1;
  p->cooperativeLaunch = 1;
  p->canMapHostMemory = 1;
  return hipSuccess;
}

// What programs of ROCm 6 and 7 call for the same: their structure has other places.
hipError_t hipGetDevicePropertiesR0600(void* out, int device) {
  hipDeviceProp_t old;
  if (hipError_t error = hipGetDeviceProperties(&old, device)) return error;
  constexpr size_t kBytes = 1472;
  char* p = static_cast<char*>(out);
  std::memset(p, 0, kBytes);
  auto put = [&](size_t at, auto value) { std::memcpy(p + at, &value, sizeof value); };
  std::memcpy(p, old.name, sizeof old.name);
  put(288, uint64_t{old.totalGlobalMem});
  put(296, uint64_t{old.sharedMemPerBlock});
  put(304, old.regsPerBlock);
  put(308, old.warpSize);
  put(320, old.maxThreadsPerBlock);
  for (int d = 0; d < 3; ++d) {
    put(324 + 4 * d, old.maxThreadsDim[d]);
    put(336 + 4 * d, old.maxGridSize[d]);
  }
  put(348, old.clockRate);
  put(352, uint64_t{old.totalConstMem});
  put(360, old.major);
  put(364, old.minor);
  put(388, old.multiProcessorCount);
  put(400, old.canMapHostMemory);
  put(576, old.concurrentKernels);
  put(584, device + 1);  // of the PCI bus
  put(604, 1);           // addresses mean the same to host and devices
  put(608, old.memoryClockRate);
  put(612, old.memoryBusWidth);
  put(616, old.l2CacheSize);
  put(624, old.maxThreadsPerMultiProcessor);
  put(640, uint64_t{old.maxSharedMemoryPerMultiProcessor});
  put(648, old.regsPerBlock);
  put(688, old.cooperativeLaunch);
  put(696, uint64_t{old.sharedMemPerBlock});
  put(728, 1);  // hipHostRegister is there
  std::memcpy(p + 1160, old.gcnArchName, sizeof old.gcnArchName);
  put(1416, uint64_t{old.maxSharedMemoryPerMultiProcessor});
  put(1424, old.clockInstructionRate);
  return hipSuccess;
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute, int device) {
  hipDeviceProp_t p;
  if (hipError_t error = hipGetDeviceProperties(&p, device)) return error;
  switch (attribute) {
    case hipDeviceAttributeMultiprocessorCount:
      *value = p.multiProcessorCount;
      break;
    case hipDeviceAttributeWarpSize:
      *value = p.warpSize;
      break;
    case hipDeviceAttributeMaxThreadsPerBlock:
      *value = p.maxThreadsPerBlock;
      break;
    case hipDeviceAttributeMaxThreadsPerMultiProcessor:
      *value = p.maxThreadsPerMultiProcessor;
      break;
    case hipDeviceAttributeMaxSharedMemoryPerBlock:
      *value = p.sharedMemPerBlock;
      break;
    case hipDeviceAttributeMaxSharedMemoryPerMultiprocessor:
      *value = p.sharedMemPerBlock;
      break;
    case hipDeviceAttributeMaxRegistersPerBlock:
      *value = p.regsPerBlock;
      break;
    case hipDeviceAttributeMaxBlockDimX:
      *value = p.maxThreadsDim[0];
      break;
    case hipDeviceAttributeMaxBlockDimY:
      *value = p.maxThreadsDim[1];
      break;
    case hipDeviceAttributeMaxBlockDimZ:
      *value = p.maxThreadsDim[2];
      break;
    case hipDeviceAttributeMaxGridDimX:
      *value = p.maxGridSize[0];
      break;
    case hipDeviceAttributeMaxGridDimY:
      *value = p.maxGridSize[1];
      break;
    case hipDeviceAttributeMaxGridDimZ:
      *value = p.maxGridSize[2];
      break;
    case hipDeviceAttributeClockRate:
      *value = p.clockRate;
      break;
    case hipDeviceAttributeMemoryClockRate:
      *value = p.memoryClockRate;
      break;
    case hipDeviceAttributeMemoryBusWidth:
      *value = p.memoryBusWidth;
      break;
    case hipDeviceAttributeL2CacheSize:
      *value = p.l2CacheSize;
      break;
    case hipDeviceAttributeComputeCapabilityMajor:
      *value = p.major;
      break;
    case hipDeviceAttributeComputeCapabilityMinor:
      *value = p.minor;
      break;
    case hipDeviceAttributeCooperativeLaunch:
      *value = p.cooperativeLaunch;
      break;
    default:
      return result(hipErrorInvalidValue);
  }
  return hipSuccess;
}

// ---- errors -------------------------------------------------------------------------------------

hipError_t hipGetLastError(void) {
  hipError_t error = lastError;
  lastError = hipSuccess;
  return error;
}
hipError_t hipPeekAtLastError(void) { return lastError; }
const char* hipGetErrorName(hipError_t error) {
  switch (error) {
    case hipSuccess:
      return "hipSuccess";
    case hipErrorInvalidValue:
      return "hipErrorInvalidValue";
    case hipErrorOutOfMemory:
      return "hipErrorOutOfMemory";
    case hipErrorInvalidConfiguration:
      return "hipErrorInvalidConfiguration";
    case hipErrorInvalidSymbol:
      return "hipErrorInvalidSymbol";
    case hipErrorInvalidDeviceFunction:
      return "hipErrorInvalidDeviceFunction";
    case hipErrorInvalidDevice:
      return "hipErrorInvalidDevice";
    case hipErrorNoBinaryForGpu:
      return "hipErrorNoBinaryForGpu";
    case hipErrorNotFound:
      return "hipErrorNotFound";
    case hipErrorNotReady:
      return "hipErrorNotReady";
    case hipErrorCooperativeLaunchTooLarge:
      return "hipErrorCooperativeLaunchTooLarge";
    case hipErrorInvalidHandle:
      return "hipErrorInvalidHandle";
    case hipErrorLaunchFailure:
      return "hipErrorLaunchFailure";
    case hipErrorNotSupported:
      return "hipErrorNotSupported";
    case hipErrorFileNotFound:
      return "hipErrorFileNotFound";
    default:
      return "hipErrorUnknown";
  }
}
const char* hipGetErrorString(hipError_t error) { return hipGetErrorName(error); }

}  // extern "C"
