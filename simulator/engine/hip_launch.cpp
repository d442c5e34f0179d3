// A stand-in for the HIP runtime library: the artifact's own host code launches into the simulator.
//
// Chosen by library path. Streams and devices: hip_queue.cpp. Behaviour is set by the environment:
//   SIMULATOR_TARGET      gfx942 (default), gfx950 or gfx90a: the device that is there
//   SIMULATOR_SEED        order of waves and workgroups (default 0)
//   SIMULATOR_CHECKS      0 turns the adversarial modes and checkers off
//   SIMULATOR_REPORT_DIR  writes a JSON file for every launch
//   SIMULATOR_FAIL        1: a launch with findings that are errors returns hipErrorLaunchFailure
//   SIMULATOR_DEVICES     how many devices there are (default 8)
// and by the sim_* functions below, for harnesses that load it with dlopen or ctypes.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "hip_state.h"
#include "occupancy.h"

namespace sim::hip {

Runtime::Runtime() {
  auto text = [](const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return std::string(value ? value : otherwise);
  };
  std::string target = text("SIMULATOR_TARGET", "gfx942");
  gpu = findGpu(target);
  if (!gpu) {
    std::fprintf(stderr, "simulator: SIMULATOR_TARGET is %s, required one of %s\n", target.c_str(),
                 knownTargets().c_str());
    std::abort();
  }
  reportDir = text("SIMULATOR_REPORT_DIR", "");
  fail = text("SIMULATOR_FAIL", "0") == "1";
  devices = std::max(1, std::atoi(text("SIMULATOR_DEVICES", "8").c_str()));
  sim_expect_others(1);
  options.seed = std::strtoull(text("SIMULATOR_SEED", "0").c_str(), nullptr, 0);
  if (text("SIMULATOR_CHECKS", "1") == "0") options.late = options.race = options.uninit = 0;
}

Runtime& runtime() {
  static Runtime* instance = new Runtime;  // host code may call in from its own destructors
  return *instance;
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
    binary.object = sim_open(p, bundleBytes(p), "the program's fat binary", runtime().gpu->target);
    if (!binary.object) std::fprintf(stderr, "simulator: %s\n", sim_error());
  }
  return binary.object;
}

namespace {

struct Configuration {
  dim3 grid, block;
  size_t lds;
  hipStream_t stream;
};
thread_local std::vector<Configuration> configurations;

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

}  // namespace

std::vector<SimBuffer> knownBuffers() {
  Lock guard(runtime().lock);
  std::vector<SimBuffer> buffers;
  for (auto& [start, a] : runtime().allocations) {
    bool known = a.written.empty();
    buffers.push_back(
        {a.data, a.bytes, known, a.name.c_str(), known ? nullptr : a.written.data(), 0});
  }
  return buffers;
}

// Not under the lock, so that others may run beside it.
hipError_t runAlone(const KernelCall& call) {
  std::vector<SimBuffer> buffers = knownBuffers();
  SimOptions options;
  {
    Lock guard(runtime().lock);
    options = runtime().options;
  }
  const dim3 &grid = call.grid, &block = call.block;
  uint32_t g[3] = {grid.x, grid.y, grid.z}, b[3] = {block.x, block.y, block.z};
  return keepResult(sim_launch(call.function.object, call.function.name.c_str(), g, b, call.lds,
                               call.segment.data(), call.segment.size(), buffers.data(),
                               buffers.size(), &options));
}

hipError_t keepResult(const char* report) {
  Runtime& r = runtime();
  Lock guard(r.lock);
  if (!report) {
    std::fprintf(stderr, "simulator: %s\n", sim_error());
    return hipErrorLaunchFailure;
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
  bool sure = text.find("\"level\":\"error\"") != std::string::npos;
  return stopped || (r.fail && sure) ? hipErrorLaunchFailure : hipSuccess;
}

namespace {

hipError_t launch(const Function& f, dim3 grid, dim3 block, void** args, size_t lds,
                  const void* packed, size_t packedBytes, hipStream_t stream) {
  Runtime& r = runtime();
  KernelCall call{f, grid, block, lds, {}};
  {
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
    if (kernel.lds + lds > r.gpu->ldsKib * 1024) return result(hipErrorInvalidValue);
    std::vector<char>& segment = call.segment;
    segment.resize(kernel.kernarg_bytes);
    if (packed) {
      std::memcpy(segment.data(), packed, std::min(packedBytes, segment.size()));
    } else {
      for (uint32_t n = 0; n < kernel.arg_count; ++n) {
        std::memcpy(segment.data() + kernel.args[n].offset, args[n], kernel.args[n].size);
      }
    }
  }
  return submit(stream, std::move(call));
}

Function functionOf(const void* host) {
  Runtime& r = runtime();
  Lock guard(r.lock);
  auto it = r.kernels.find(host);
  if (it == r.kernels.end()) return {};
  return {open(*it->second.first), it->second.second};
}

hipError_t occupancy(int* blocks, const Function& f, int threads, size_t lds) {
  SimKernel k;
  if (!f.object || !sim_kernel(f.object, f.name.c_str(), &k)) {
    return result(hipErrorInvalidDeviceFunction);
  }
  uint32_t bytes = k.lds + static_cast<uint32_t>(lds), size = static_cast<uint32_t>(threads);
  *blocks = workgroupsPerCu(*runtime().gpu, {k.vgprs, k.sgprs, bytes, size});
  return hipSuccess;
}

}  // namespace
}  // namespace sim::hip

using namespace sim::hip;

extern "C" {

// ---- for test harnesses -------------------------------------------------------------------------

uint64_t sim_launch_count(void) { return runtime().launches; }
uint64_t sim_finding_count(void) { return runtime().findings; }
// JSON of the findings since the last clear, one array a launch that had any.
const char* sim_finding_text(void) { return runtime().findingsText.c_str(); }
void sim_clear_findings(void) {
  runtime().findings = 0;
  runtime().findingsText.clear();
}
// JSON of the last launch: counters, findings, lines.
const char* sim_last_launch(void) {
  (void)hipDeviceSynchronize();
  return runtime().lastReport.c_str();
}
void sim_set_options(int checks, uint64_t seed) {
  SimOptions& o = runtime().options;
  o.late = o.race = o.uninit = checks != 0;
  o.seed = seed;
}

// Host threads of every launch from now on; 0: one a core.
void sim_set_threads(uint32_t threads) { runtime().options.threads = threads; }

// Plays every launch on the cycle model from now on; null: none.
void sim_set_cycles(const SimCycles* cycles) {
  Runtime& r = runtime();
  if (cycles) r.cycles = *cycles;
  r.options.cycles = cycles ? &r.cycles : nullptr;
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
                           hipStream_t stream) {
  return launch(functionOf(host), grid, block, args, lds, nullptr, 0, stream);
}
hipError_t hipExtLaunchKernel(const void* host, dim3 grid, dim3 block, void** args, size_t lds,
                              hipStream_t stream, hipEvent_t start, hipEvent_t stop, int) {
  if (start) (void)hipEventRecord(start, stream);
  hipError_t error = launch(functionOf(host), grid, block, args, lds, nullptr, 0, stream);
  if (stop) (void)hipEventRecord(stop, stream);
  return error;
}
// All workgroups of a cooperative launch must be on the device at once.
hipError_t hipLaunchCooperativeKernel(const void* host, dim3 grid, dim3 block, void** args,
                                      unsigned lds, hipStream_t stream) {
  int blocks = 0, threads = static_cast<int>(block.x * block.y * block.z);
  if (hipError_t error =
          hipOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, host, threads, lds)) {
    return error;
  }
  uint64_t holds = uint64_t(blocks) * runtime().gpu->computeUnits;
  if (uint64_t(grid.x) * grid.y * grid.z > holds) {
    return result(hipErrorCooperativeLaunchTooLarge);
  }
  return launch(functionOf(host), grid, block, args, lds, nullptr, 0, stream);
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
  SimObject* object = sim_open(p, bytes, "a module", runtime().gpu->target);
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
                                 unsigned bx, unsigned by, unsigned bz, unsigned lds,
                                 hipStream_t stream, void** params, void** extra) {
  const void* packed = nullptr;
  size_t bytes = 0;
  for (void** e = extra; e && *e != HIP_LAUNCH_PARAM_END; e += 2) {
    if (e[0] == HIP_LAUNCH_PARAM_BUFFER_POINTER) packed = e[1];
    if (e[0] == HIP_LAUNCH_PARAM_BUFFER_SIZE) bytes = *static_cast<size_t*>(e[1]);
  }
  return launch(*reinterpret_cast<Function*>(f), dim3(gx, gy, gz), dim3(bx, by, bz), params, lds,
                packed, bytes, stream);
}

// ---- functions ----------------------------------------------------------------------------------

hipError_t hipFuncSetAttribute(const void* host, hipFuncAttribute attribute, int value) {
  Lock guard(runtime().lock);
  if (!runtime().kernels.count(host)) return result(hipErrorInvalidDeviceFunction);
  int limit = runtime().gpu->ldsKib * 1024;
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
  out->maxDynamicSharedSizeBytes = runtime().gpu->ldsKib * 1024 - k.lds;
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
// The block with most waves on a compute unit, the largest of several.
hipError_t hipOccupancyMaxPotentialBlockSize(int* grid, int* block, const void* host, size_t lds,
                                             int limit) {
  Lock guard(runtime().lock);
  Function f = functionOf(host);
  SimKernel k;
  if (!f.object || !sim_kernel(f.object, f.name.c_str(), &k)) {
    return result(hipErrorInvalidDeviceFunction);
  }
  int most = static_cast<int>(k.max_workgroup);
  if (limit > 0) most = std::min(most, limit);
  *grid = *block = 0;
  int best = 0;
  for (int threads = most; threads > 0; threads = (threads - 1) / 64 * 64) {
    int blocks = 0;
    if (hipError_t error = occupancy(&blocks, f, threads, lds)) return error;
    int waves = blocks * ((threads + 63) / 64);
    if (waves <= best) continue;
    best = waves;
    *block = threads;
    *grid = blocks * static_cast<int>(runtime().gpu->computeUnits);
  }
  return hipSuccess;
}

}  // extern "C"
