// The device that the HIP stand-in shows, its streams and events, and errors.
#include <chrono>
#include <cstring>

#include "hip_state.h"

namespace sim::hip {
namespace {
thread_local hipError_t lastError = hipSuccess;
}

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
  *count = 1;
  return hipSuccess;
}
hipError_t hipGetDevice(int* device) {
  *device = runtime().device;
  return hipSuccess;
}
hipError_t hipSetDevice(int device) {
  return device == 0 ? hipSuccess : result(hipErrorInvalidDevice);
}
hipError_t hipDeviceSynchronize(void) { return hipSuccess; }
hipError_t hipDeviceReset(void) { return hipSuccess; }
hipError_t hipRuntimeGetVersion(int* version) {
  *version = HIP_VERSION;
  return hipSuccess;
}
hipError_t hipDriverGetVersion(int* version) { return hipRuntimeGetVersion(version); }

hipError_t hipGetDeviceProperties(hipDeviceProp_t* p, int device) {
  if (device != 0) return result(hipErrorInvalidDevice);
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

// ---- streams and events -------------------------------------------------------------------------

hipError_t hipStreamCreate(hipStream_t* s) {
  *s = reinterpret_cast<hipStream_t>(new char);
  return hipSuccess;
}
hipError_t hipStreamCreateWithFlags(hipStream_t* s, unsigned) { return hipStreamCreate(s); }
hipError_t hipStreamCreateWithPriority(hipStream_t* s, unsigned, int) { return hipStreamCreate(s); }
hipError_t hipStreamDestroy(hipStream_t s) {
  delete reinterpret_cast<char*>(s);
  return hipSuccess;
}
hipError_t hipStreamSynchronize(hipStream_t) { return hipSuccess; }
hipError_t hipStreamQuery(hipStream_t) { return hipSuccess; }
hipError_t hipStreamWaitEvent(hipStream_t, hipEvent_t, unsigned) { return hipSuccess; }
using Clock = std::chrono::steady_clock;
hipError_t hipEventCreate(hipEvent_t* e) {
  *e = reinterpret_cast<hipEvent_t>(new Clock::time_point);
  return hipSuccess;
}
hipError_t hipEventCreateWithFlags(hipEvent_t* e, unsigned) { return hipEventCreate(e); }
hipError_t hipEventDestroy(hipEvent_t e) {
  delete reinterpret_cast<Clock::time_point*>(e);
  return hipSuccess;
}
hipError_t hipEventRecord(hipEvent_t e, hipStream_t) {
  *reinterpret_cast<Clock::time_point*>(e) = Clock::now();
  return hipSuccess;
}
hipError_t hipEventSynchronize(hipEvent_t) { return hipSuccess; }
hipError_t hipEventQuery(hipEvent_t) { return hipSuccess; }
hipError_t hipEventElapsedTime(float* ms, hipEvent_t a, hipEvent_t b) {
  auto elapsed =
      *reinterpret_cast<Clock::time_point*>(b) - *reinterpret_cast<Clock::time_point*>(a);
  *ms = std::chrono::duration<float, std::milli>(elapsed).count();
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
    case hipErrorLaunchFailure:
      return "hipErrorLaunchFailure";
    default:
      return "hipErrorUnknown";
  }
}
const char* hipGetErrorString(hipError_t error) { return hipGetErrorName(error); }

}  // extern "C"
