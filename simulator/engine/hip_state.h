// What the files of the HIP stand-in share: its memory, its functions, its options.
#pragma once

#include <hip/hip_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "capi.h"
#include "gpu.h"

namespace sim::hip {

struct Allocation {
  char* data = nullptr;
  size_t bytes = 0;
  std::string name;
  std::vector<uint8_t> written;
  std::unique_ptr<char[]> storage;
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
  int device = 0;

  Runtime();  // reads the environment
};

Runtime& runtime();
using Lock = std::lock_guard<std::recursive_mutex>;

// Keeps an error for hipGetLastError, and returns it.
hipError_t result(hipError_t error);

// Code for the device that is there; null, with a line on stderr, when the binary has none.
SimObject* open(FatBinary& binary);

}  // namespace sim::hip
