// What the files of the HIP stand-in share: its memory, its functions, its options.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "capi.h"
#include "gpu.h"

namespace sim::hip {

// Pages that other processes have too, by a file in memory.
struct SharedPages {
  char* base = nullptr;
  size_t bytes = 0;
  int file = -1;
  bool ours = false;  // the allocation's own pages, which are an array's again afterwards
  ~SharedPages();
};

struct Allocation {
  char* data = nullptr;
  size_t bytes = 0;
  std::string name;
  std::vector<uint8_t> written;
  std::unique_ptr<char[]> storage;
  std::unique_ptr<SharedPages> shared;  // goes before the storage
  int device = 0;
  bool host = false;
};

struct Function {
  SimObject* object = nullptr;
  std::string name;
};

struct FatBinary {
  const void* data = nullptr;
  SimObject* object = nullptr;  // opened at the first use, so that unused targets cost nothing
};

struct Variable {
  FatBinary* binary = nullptr;
  std::string name;
};

struct Runtime {
  std::recursive_mutex lock;
  std::map<char*, Allocation> allocations;
  std::map<const void*, std::pair<FatBinary*, std::string>> kernels;
  std::map<const void*, Variable> variables;
  const Gpu* gpu;  // the device that is there
  std::string lastReport, findingsText, reportDir;
  SimOptions options{1, 1, 1, 1, 1, 0, 0, 200'000'000, nullptr};
  SimCycles cycles{};  // what options.cycles points to
  uint64_t launches = 0, findings = 0;
  bool fail = false;
  int devices = 8;
  bool several = false;  // the program has gone to a device other than the first

  Runtime();  // reads the environment
};

Runtime& runtime();
using Lock = std::lock_guard<std::recursive_mutex>;

// The device that this host thread has chosen.
int& currentDevice();

// Work of streams (hip_queue.cpp). A program that stays on one device and on the null stream has
// everything done at once. Else one thread does the work of all streams: their kernels beside each
// other, in the order of the seed, as they may wait for one another.
using Work = std::function<hipError_t()>;
struct KernelCall {
  Function function;
  dim3 grid, block;
  size_t lds = 0;
  std::vector<char> segment;  // its arguments
};
hipError_t submit(hipStream_t stream, Work work);
hipError_t submit(hipStream_t stream, KernelCall call);
// Waits for a stream; for what a synchronous call of this thread waits for; for a device.
hipError_t drain(hipStream_t stream);
hipError_t drainOwn();
hipError_t drainDevice(int device);

// Runs a kernel by itself, on all cores (hip_launch.cpp).
hipError_t runAlone(const KernelCall& call);
// What kernels may touch now. Takes the result of one, or null when it could not run.
std::vector<SimBuffer> knownBuffers();
hipError_t keepResult(const char* result);

// Keeps an error for hipGetLastError, and returns it.
hipError_t result(hipError_t error);

// Code for the device that is there; null, with a line on stderr, when the binary has none.
SimObject* open(FatBinary& binary);

}  // namespace sim::hip
