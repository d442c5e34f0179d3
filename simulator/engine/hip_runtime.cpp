// A stand-in for the HIP runtime library: the artifact's own host code launches into the simulator.
//
// Chosen by library path. Everything is synchronous. Behaviour is set by the environment:
//   SIMULATOR_TARGET      gfx942 (default) or gfx950: the device that is there
//   SIMULATOR_SEED        order of waves and workgroups (default 0)
//   SIMULATOR_CHECKS      0 turns the adversarial modes and checkers off
//   SIMULATOR_REPORT_DIR  writes a JSON file for every launch
//   SIMULATOR_FAIL        1: a launch with findings returns hipErrorLaunchFailure
// and by the sim_* functions below, for harnesses that load it with dlopen or ctypes.
#include <hip/hip_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "capi.h"

namespace {

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
  std::string target = "gfx942", lastReport, findingsText, reportDir;
  SimOptions options{1, 1, 1, 1, 1, 0, 0, 200'000'000};
  uint64_t launches = 0, findings = 0;
  bool fail = false;
  int device = 0;

  Runtime() {
    auto text = [](const char* name, const char* otherwise) {
      const char* value = std::getenv(name);
      return std::string(value ? value : otherwise);
    };
    target = text("SIMULATOR_TARGET", "gfx942");
    reportDir = text("SIMULATOR_REPORT_DIR", "");
    fail = text("SIMULATOR_FAIL", "0") == "1";
    options.seed = std::strtoull(text("SIMULATOR_SEED", "0").c_str(), nullptr, 0);
    if (text("SIMULATOR_CHECKS", "1") == "0") options.late = options.race = options.uninit = 0;
  }
  bool gfx950() const { return target == "gfx950"; }
};

Runtime& runtime() {
  static Runtime* instance = new Runtime;  // host code may call in from its own destructors
  return *instance;
}

thread_local hipError_t lastError = hipSuccess;
struct Configuration {
  dim3 grid, block;
  size_t lds;
  hipStream_t stream;
};
thread_local std::vector<Configuration> configurations;

hipError_t result(hipError_t error) {
  if (error != hipSuccess) lastError = error;
  return error;
}

using Lock = std::lock_guard<std::recursive_mutex>;

// Red zones keep allocations apart: a small overrun never lands in a neighbour.
constexpr size_t kRedZone = 4096;

char* allocate(size_t bytes) {
  Runtime& r = runtime();
  Lock guard(r.lock);
  Allocation a;
  a.storage.reset(new (std::nothrow) char[bytes + 2 * kRedZone + 256]);
  if (!a.storage) return nullptr;
  uintptr_t start = reinterpret_cast<uintptr_t>(a.storage.get()) + kRedZone;
  a.data = reinterpret_cast<char*>((start + 255) / 256 * 256);
  a.bytes = bytes;
  a.name = "a hipMalloc of " + std::to_string(bytes) + " bytes";
  a.written.assign(bytes, 0);
  std::memset(a.data, 0xd1, bytes);
  char* data = a.data;
  r.allocations[data] = std::move(a);
  return data;
}

Allocation* owner(const void* p) {
  Runtime& r = runtime();
  char* at = static_cast<char*>(const_cast<void*>(p));
  auto it = r.allocations.upper_bound(at);
  if (it == r.allocations.begin()) return nullptr;
  --it;
  return at < it->second.data + it->second.bytes ? &it->second : nullptr;
}

// Marks bytes as written by the host; false when the range leaves its allocation.
bool hostWrites(void* p, size_t bytes) {
  Allocation* a = owner(p);
  if (!a) return true;  // host memory
  size_t offset = static_cast<char*>(p) - a->data;
  if (offset + bytes > a->bytes) return false;
  if (!a->written.empty()) std::memset(a->written.data() + offset, 1, bytes);
  return true;
}

bool readable(const void* p, size_t bytes) {
  Allocation* a = owner(p);
  return !a || static_cast<const char*>(p) - a->data + bytes <= a->bytes;
}

hipError_t copy(void* to, const void* from, size_t bytes) {
  Lock guard(runtime().lock);
  if (bytes == 0) return hipSuccess;
  if (!to || !from || !readable(from, bytes) || !hostWrites(to, bytes)) {
    return result(hipErrorInvalidValue);
  }
  std::memmove(to, from, bytes);
  return hipSuccess;
}

hipError_t fill(void* to, int value, size_t bytes) {
  Lock guard(runtime().lock);
  if (bytes == 0) return hipSuccess;
  if (!to || !hostWrites(to, bytes)) return result(hipErrorInvalidValue);
  std::memset(to, value, bytes);
  return hipSuccess;
}

// Size of a bundle in memory: the end of its last entry, as its own header says.
uint64_t bundleBytes(const char* p) {
  if (std::memcmp(p, "CCOB", 4) == 0) {
    uint16_t version;
    std::memcpy(&version, p + 4, 2);
    uint64_t bytes = 0;
    std::memcpy(&bytes, p + 8, version >= 3 ? 8 : 4);
    return bytes;
  }
  uint64_t count, end = 0;
  std::memcpy(&count, p + 24, 8);
  const char* at = p + 32;
  for (uint64_t n = 0; n < count; ++n) {
    uint64_t field[3];  // offset, size, length of the name
    std::memcpy(field, at, sizeof field);
    end = std::max(end, field[0] + field[1]);
    at += sizeof field + field[2];
  }
  return end;
}

SimObject* open(FatBinary& binary) {
  if (!binary.object) {
    const char* p = static_cast<const char*>(binary.data);
    binary.object =
        sim_open(p, bundleBytes(p), "the program's fat binary", runtime().target.c_str());
    if (!binary.object) std::fprintf(stderr, "simulator: %s\n", sim_error());
  }
  return binary.object;
}

// The engine reports JSON; a count of "kind" keys counts its findings.
uint64_t countFindings(const std::string& report, std::string& text) {
  size_t at = report.find("\"findings\":["), end = report.find("\"grid\":", at);
  std::string part = report.substr(at, end - at);
  uint64_t count = 0;
  for (size_t n = part.find("\"kind\":"); n != std::string::npos;
       n = part.find("\"kind\":", n + 1)) {
    ++count;
  }
  if (count) text += part + "\n";
  return count;
}

hipError_t launch(const Function& f, dim3 grid, dim3 block, void** args, size_t lds,
                  const void* packed, size_t packedBytes) {
  Runtime& r = runtime();
  Lock guard(r.lock);
  SimKernel kernel;
  if (!f.object || !sim_kernel(f.object, f.name.c_str(), &kernel)) {
    return result(hipErrorInvalidDeviceFunction);
  }
  uint64_t threads = uint64_t(block.x) * block.y * block.z;
  if (!threads || threads > 1024 || threads > kernel.max_workgroup || !grid.x || !grid.y ||
      !grid.z || grid.y > 65535 || grid.z > 65535) {
    return result(hipErrorInvalidConfiguration);
  }
  if (kernel.lds + lds > (r.gfx950() ? 160u : 64u) * 1024) return result(hipErrorInvalidValue);
  std::vector<char> segment(kernel.kernarg_bytes);
  if (packed) {
    std::memcpy(segment.data(), packed, std::min(packedBytes, segment.size()));
  } else {
    for (uint32_t n = 0; n < kernel.arg_count; ++n) {
      std::memcpy(segment.data() + kernel.args[n].offset, args[n], kernel.args[n].size);
    }
  }
  std::vector<SimBuffer> buffers;
  for (auto& [start, a] : r.allocations) {
    bool known = a.written.empty();
    buffers.push_back({a.data, a.bytes, known, a.name.c_str(), known ? nullptr : a.written.data()});
  }
  uint32_t g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
  const char* report = sim_launch(f.object, f.name.c_str(), g, b, lds, segment.data(),
                                  segment.size(), buffers.data(), buffers.size(), &r.options);
  if (!report) {
    std::fprintf(stderr, "simulator: %s\n", sim_error());
    return result(hipErrorLaunchFailure);
  }
  r.lastReport = report;
  std::string text;
  uint64_t count = countFindings(r.lastReport, text);
  r.findings += count;
  r.findingsText += text;
  if (count) std::fprintf(stderr, "simulator: %s", text.c_str());
  if (!r.reportDir.empty()) {
    std::string file = r.reportDir + "/launch-" + std::to_string(r.launches) + ".json";
    std::ofstream(file) << r.lastReport << "\n";
  }
  ++r.launches;
  // "error" is the key of a kernel that stopped; findings are never keys.
  bool stopped = r.lastReport.find("\"error\":\"") != std::string::npos;
  if (stopped) std::fprintf(stderr, "simulator: %s\n", r.lastReport.c_str());
  if (stopped || (r.fail && count)) return result(hipErrorLaunchFailure);
  return hipSuccess;
}

Function functionOf(const void* host) {
  Runtime& r = runtime();
  auto it = r.kernels.find(host);
  if (it == r.kernels.end()) return {};
  return {open(*it->second.first), it->second.second};
}

hipError_t occupancy(int* blocks, const Function& f, int threads, size_t lds) {
  SimKernel k;
  if (!f.object || !sim_kernel(f.object, f.name.c_str(), &k)) {
    return result(hipErrorInvalidDeviceFunction);
  }
  uint32_t registers = std::max(8u, (k.vgprs + 7) / 8 * 8);
  uint32_t waves = std::min(8u, 512 / registers) * 4, perBlock = (threads + 63) / 64;
  uint32_t limit = waves / std::max(1u, perBlock);
  size_t used = k.lds + lds;
  if (used) limit = std::min<size_t>(limit, (runtime().gfx950() ? 163840 : 65536) / used);
  *blocks = limit;
  return hipSuccess;
}

}  // namespace

extern "C" {

// ---- for test harnesses -------------------------------------------------------------------------

// Makes host memory known, so that kernels may touch it. Its contents count as initialised.
void sim_register_buffer(void* p, uint64_t bytes, const char* name) {
  Runtime& r = runtime();
  Lock guard(r.lock);
  Allocation a;
  a.data = static_cast<char*>(p);
  a.bytes = bytes;
  a.name = name ? name : "a registered buffer";
  r.allocations[a.data] = std::move(a);
}
// The same with undefined contents: reading a byte before a kernel wrote it is a finding.
void sim_register_output(void* p, uint64_t bytes, const char* name) {
  sim_register_buffer(p, bytes, name);
  Lock guard(runtime().lock);
  runtime().allocations[static_cast<char*>(p)].written.assign(bytes, 0);
}
void sim_unregister_buffer(void* p) {
  Lock guard(runtime().lock);
  runtime().allocations.erase(static_cast<char*>(p));
}
uint64_t sim_launch_count(void) { return runtime().launches; }
uint64_t sim_finding_count(void) { return runtime().findings; }
// JSON of the findings since the last clear, one array a launch that had any.
const char* sim_finding_text(void) { return runtime().findingsText.c_str(); }
void sim_clear_findings(void) {
  runtime().findings = 0;
  runtime().findingsText.clear();
}
// JSON of the last launch: counters, findings, lines.
const char* sim_last_launch(void) { return runtime().lastReport.c_str(); }
void sim_set_options(int checks, uint64_t seed) {
  SimOptions& o = runtime().options;
  o.late = o.race = o.uninit = checks != 0;
  o.seed = seed;
}

// ---- registration, called by compiler-made constructors -----------------------------------------

void** __hipRegisterFatBinary(const void* data) {
  struct Wrapper {
    uint32_t magic, version;
    const void* binary;
    const void* unused;
  };
  auto* binary = new FatBinary;
  binary->data = static_cast<const Wrapper*>(data)->binary;
  return reinterpret_cast<void**>(binary);
}
void __hipUnregisterFatBinary(void** handle) {
  auto* binary = reinterpret_cast<FatBinary*>(handle);
  Runtime& r = runtime();
  Lock guard(r.lock);
  std::erase_if(r.kernels, [&](const auto& k) { return k.second.first == binary; });
  std::erase_if(r.variables, [&](const auto& v) { return v.second.binary == binary; });
  if (binary->object) sim_close(binary->object);
  delete binary;
}
void __hipRegisterFunction(void** handle, const void* host, char*, const char* device, unsigned,
                           void*, void*, void*, void*, int*) {
  runtime().kernels[host] = {reinterpret_cast<FatBinary*>(handle), device};
}
void __hipRegisterVar(void** handle, void* host, char*, char* device, int, size_t, int, int) {
  runtime().variables[host] = {reinterpret_cast<FatBinary*>(handle), device};
}
void __hipRegisterManagedVar(void*, void**, void*, const char*, size_t, unsigned) {
  std::fprintf(stderr, "simulator: managed variables are not implemented\n");
}
hipError_t __hipPushCallConfiguration(dim3 grid, dim3 block, size_t lds, hipStream_t stream) {
  configurations.push_back({grid, block, lds, stream});
  return hipSuccess;
}
hipError_t __hipPopCallConfiguration(dim3* grid, dim3* block, size_t* lds, hipStream_t* stream) {
  if (configurations.empty()) return hipErrorInvalidConfiguration;
  Configuration c = configurations.back();
  configurations.pop_back();
  *grid = c.grid;
  *block = c.block;
  *lds = c.lds;
  *stream = c.stream;
  return hipSuccess;
}

// ---- launches -----------------------------------------------------------------------------------

hipError_t hipLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, size_t lds,
                           hipStream_t) {
  return launch(functionOf(host), grid, block, args, lds, nullptr, 0);
}
hipError_t hipExtLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, size_t lds,
                              hipStream_t, hipEvent_t, hipEvent_t, int) {
  return launch(functionOf(host), grid, block, args, lds, nullptr, 0);
}
hipError_t hipModuleLoadData(hipModule_t* module, const void* image) {
  const char* p = static_cast<const char*>(image);
  uint64_t bytes;
  if (std::memcmp(p,
                  "\x7f"
                  "ELF",
                  4) == 0) {
    // The section header table is the end of what LLVM's linker writes.
    uint64_t table;
    uint16_t size, count;
    std::memcpy(&table, p + 40, 8);
    std::memcpy(&size, p + 58, 2);
    std::memcpy(&count, p + 60, 2);
    bytes = table + uint64_t(size) * count;
  } else {
    bytes = bundleBytes(p);
  }
  SimObject* object = sim_open(p, bytes, "a module", runtime().target.c_str());
  *module = reinterpret_cast<hipModule_t>(object);
  if (!object) std::fprintf(stderr, "simulator: %s\n", sim_error());
  return object ? hipSuccess : result(hipErrorNoBinaryForGpu);
}
hipError_t hipModuleLoad(hipModule_t* module, const char* path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return result(hipErrorFileNotFound);
  std::string data((std::istreambuf_iterator<char>(file)), {});
  return hipModuleLoadData(module, data.data());
}
hipError_t hipModuleUnload(hipModule_t module) {
  sim_close(reinterpret_cast<SimObject*>(module));
  return hipSuccess;
}
hipError_t hipModuleGetFunction(hipFunction_t* f, hipModule_t module, const char* name) {
  SimKernel kernel;
  auto* object = reinterpret_cast<SimObject*>(module);
  if (!sim_kernel(object, name, &kernel)) return result(hipErrorNotFound);
  *f = reinterpret_cast<hipFunction_t>(new Function{object, name});
  return hipSuccess;
}
hipError_t hipModuleLaunchKernel(hipFunction_t f, unsigned gx, unsigned gy, unsigned gz,
                                 unsigned bx, unsigned by, unsigned bz, unsigned lds, hipStream_t,
                                 void** params, void** extra) {
  const void* packed = nullptr;
  size_t bytes = 0;
  for (void** e = extra; e && *e != HIP_LAUNCH_PARAM_END; e += 2) {
    if (e[0] == HIP_LAUNCH_PARAM_BUFFER_POINTER) packed = e[1];
    if (e[0] == HIP_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t*>(e[1]);
  }
  return launch(*reinterpret_cast<Function*>(f), dim3(gx, gy, gz), dim3(bx, by, bz), params, lds,
                packed, bytes);
}

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
  bool wide = runtime().gfx950();
  std::memset(p, 0, sizeof *p);
  std::snprintf(p->name, sizeof p->name, "%s",
                wide ? "AMD Instinct MI355X" : "AMD Instinct MI300X");
  std::snprintf(p->gcnArchName, sizeof p->gcnArchName, "%s:sramecc+:xnack-",
                runtime().target.c_str());
  p->totalGlobalMem = (wide ? 288ull : 192ull) << 30;
  p->sharedMemPerBlock = (wide ? 160 : 64) << 10;
  p->maxSharedMemoryPerMultiProcessor = p->sharedMemPerBlock;
  p->regsPerBlock = 65536;
  p->warpSize = 64;
  p->maxThreadsPerBlock = 1024;
  for (int d = 0; d < 3; ++d) {
    p->maxThreadsDim[d] = 1024;
    p->maxGridSize[d] = d ? 65536 : 0x7fffffff;
  }
  p->clockRate = wide ? 2400000 : 2100000;
  p->memoryClockRate = 1300000;
  p->memoryBusWidth = 8192;
  p->totalConstMem = 0x7fffffff;
  p->major = 9;
  p->minor = wide ? 5 : 4;
  p->multiProcessorCount = wide ? 256 : 304;
  p->l2CacheSize = 4 << 20;
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

// ---- memory -------------------------------------------------------------------------------------

hipError_t hipMalloc(void** p, size_t bytes) {
  *p = bytes ? allocate(bytes) : nullptr;
  return *p || !bytes ? hipSuccess : result(hipErrorOutOfMemory);
}
hipError_t hipMallocAsync(void** p, size_t bytes, hipStream_t) { return hipMalloc(p, bytes); }
hipError_t hipHostMalloc(void** p, size_t bytes, unsigned) { return hipMalloc(p, bytes); }
hipError_t hipFree(void* p) {
  Lock guard(runtime().lock);
  if (!p) return hipSuccess;
  return runtime().allocations.erase(static_cast<char*>(p)) ? hipSuccess
                                                            : result(hipErrorInvalidValue);
}
hipError_t hipFreeAsync(void* p, hipStream_t) { return hipFree(p); }
hipError_t hipHostFree(void* p) { return hipFree(p); }
hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind) {
  return copy(to, from, bytes);
}
hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind, hipStream_t) {
  return copy(to, from, bytes);
}
hipError_t hipMemcpyWithStream(void* to, const void* from, size_t bytes, hipMemcpyKind,
                               hipStream_t) {
  return copy(to, from, bytes);
}
hipError_t hipMemset(void* to, int value, size_t bytes) { return fill(to, value, bytes); }
hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t) {
  return fill(to, value, bytes);
}
hipError_t hipMemGetInfo(size_t* unused, size_t* total) {
  hipDeviceProp_t p;
  hipGetDeviceProperties(&p, 0);
  *unused = *total = p.totalGlobalMem;
  return hipSuccess;
}
hipError_t hipGetSymbolAddress(void** p, const void* symbol) {
  Runtime& r = runtime();
  Lock guard(r.lock);
  auto it = r.variables.find(symbol);
  if (it == r.variables.end()) return result(hipErrorInvalidSymbol);
  uint64_t bytes;
  *p = sim_variable(open(*it->second.binary), it->second.name.c_str(), &bytes);
  return *p ? hipSuccess : result(hipErrorInvalidSymbol);
}
hipError_t hipMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset,
                             hipMemcpyKind) {
  void* p;
  if (hipError_t error = hipGetSymbolAddress(&p, symbol)) return error;
  return copy(static_cast<char*>(p) + offset, from, bytes);
}
hipError_t hipMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset,
                               hipMemcpyKind) {
  void* p;
  if (hipError_t error = hipGetSymbolAddress(&p, symbol)) return error;
  return copy(to, static_cast<char*>(p) + offset, bytes);
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

// ---- functions ----------------------------------------------------------------------------------

hipError_t hipFuncSetAttribute(const void* host, hipFuncAttribute attribute, int value) {
  Lock guard(runtime().lock);
  if (!runtime().kernels.count(host)) return result(hipErrorInvalidDeviceFunction);
  int limit = (runtime().gfx950() ? 160 : 64) << 10;
  bool tooMuch = attribute == hipFuncAttributeMaxDynamicSharedMemorySize && value > limit;
  return tooMuch ? result(hipErrorInvalidValue) : hipSuccess;
}
hipError_t hipFuncSetCacheConfig(const void*, hipFuncCache_t) { return hipSuccess; }
hipError_t hipFuncGetAttributes(hipFuncAttributes* out, const void* host) {
  Lock guard(runtime().lock);
  Function f = functionOf(host);
  SimKernel k;
  if (!f.object || !sim_kernel(f.object, f.name.c_str(), &k)) {
    return result(hipErrorInvalidDeviceFunction);
  }
  std::memset(out, 0, sizeof *out);
  out->sharedSizeBytes = k.lds;
  out->localSizeBytes = k.scratch;
  out->numRegs = k.vgprs;
  out->maxThreadsPerBlock = k.max_workgroup;
  out->maxDynamicSharedSizeBytes = ((runtime().gfx950() ? 160 : 64) << 10) - k.lds;
  return hipSuccess;
}
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* host, int threads,
                                                        size_t lds) {
  Lock guard(runtime().lock);
  return occupancy(blocks, functionOf(host), threads, lds);
}
hipError_t hipOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* host,
                                                                 int threads, size_t lds,
                                                                 unsigned) {
  return hipOccupancyMaxActiveBlocksPerMultiprocessor(blocks, host, threads, lds);
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
