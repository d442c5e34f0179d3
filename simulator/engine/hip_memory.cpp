// Memory of the HIP stand-in: what kernels may touch, and which of its bytes somebody wrote.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>

#include "hip_state.h"

using namespace sim::hip;

namespace {

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
  a.device = currentDevice();
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

// Memory that the host writes by itself: nobody knows which of its bytes.
Allocation& hostMayWrite(void* p, const char* what) {
  Lock guard(runtime().lock);
  Allocation& a = *owner(p);
  a.written.clear();
  a.name = std::string("a ") + what + " of " + std::to_string(a.bytes) + " bytes";
  return a;
}

// What a handle of hipIpc holds.
struct Handle {
  int process, file;
  size_t fileBytes;
  char* data;
  size_t offset, bytes;  // in the file; of the allocation
};
static_assert(sizeof(Handle) <= sizeof(hipIpcMemHandle_t));

constexpr int kOtherProcesses = 20;  // seconds that a launch waits for one of another process

// Puts a file in memory under the pages of an allocation. Its red zones hold what else is there.
bool share(Allocation& a) {
  if (!a.storage) return false;
  static_assert(kRedZone >= 4096);
  auto pages = std::make_unique<SharedPages>();
  uintptr_t begin = reinterpret_cast<uintptr_t>(a.data) / 4096 * 4096;
  uintptr_t end = (reinterpret_cast<uintptr_t>(a.data) + a.bytes + 4095) / 4096 * 4096;
  char* base = reinterpret_cast<char*>(begin);
  pages->file = memfd_create("simulator", MFD_CLOEXEC);
  if (pages->file < 0) return false;
  for (size_t at = 0; at < end - begin;) {
    ssize_t wrote = pwrite(pages->file, base + at, end - begin - at, at);
    if (wrote <= 0) return false;
    at += wrote;
  }
  void* mapped =
      mmap(base, end - begin, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages->file, 0);
  if (mapped == MAP_FAILED) return false;
  pages->base = base;
  pages->bytes = end - begin;
  pages->ours = true;
  std::fill(a.written.begin(), a.written.end(), 1);  // who else writes it is not seen
  a.shared = std::move(pages);
  sim_expect_others(kOtherProcesses);
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

// What a synchronous call waits for: this thread's device, and those that own the memory.
hipError_t drainFor(const void* to, const void* from) {
  if (hipError_t error = drainOwn()) return error;
  for (const void* p : {to, from}) {
    int device = currentDevice();
    {
      Lock guard(runtime().lock);
      if (Allocation* a = owner(p)) device = a->device;
    }
    int own = currentDevice();
    if (device == own) continue;
    currentDevice() = device;
    hipError_t error = drainOwn();
    currentDevice() = own;
    if (error) return error;
  }
  return hipSuccess;
}

}  // namespace

sim::hip::SharedPages::~SharedPages() {
  if (base && ours) {
    mmap(base, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
  } else if (base) {
    munmap(base, bytes);
  }
  if (file >= 0) close(file);
}

extern "C" {

// Makes host memory known, so that kernels may touch it. Its contents count as initialised.
void sim_register_buffer(void* p, uint64_t bytes, const char* name) {
  Runtime& r = runtime();
  Lock guard(r.lock);
  Allocation a;
  a.data = static_cast<char*>(p);
  a.bytes = bytes;
  a.name = name ? name : "a registered buffer";
  a.device = currentDevice();
  a.host = true;
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
hipError_t hipMalloc(void** p, size_t bytes) {
  *p = bytes ? allocate(bytes) : nullptr;
  return *p || !bytes ? hipSuccess : result(hipErrorOutOfMemory);
}
hipError_t hipMallocAsync(void** p, size_t bytes, hipStream_t) { return hipMalloc(p, bytes); }
hipError_t hipHostMalloc(void** p, size_t bytes, unsigned) {
  hipError_t error = hipMalloc(p, bytes);
  if (*p) hostMayWrite(*p, "hipHostMalloc").host = true;
  return error;
}
// Fine-grained and uncached memory is memory like any other here.
hipError_t hipExtMallocWithFlags(void** p, size_t bytes, unsigned) { return hipMalloc(p, bytes); }
hipError_t hipMallocManaged(void** p, size_t bytes, unsigned) {
  hipError_t error = hipMalloc(p, bytes);
  if (*p) hostMayWrite(*p, "hipMallocManaged");
  return error;
}
hipError_t hipHostRegister(void* p, size_t bytes, unsigned) {
  sim_register_buffer(p, bytes, "registered host memory");
  return hipSuccess;
}
hipError_t hipHostUnregister(void* p) {
  (void)drainOwn();
  sim_unregister_buffer(p);
  return hipSuccess;
}
hipError_t hipHostGetDevicePointer(void** device, void* host, unsigned) {
  Lock guard(runtime().lock);
  if (!owner(host)) return result(hipErrorInvalidValue);
  *device = host;
  return hipSuccess;
}
hipError_t hipPointerGetAttributes(hipPointerAttribute_t* out, const void* p) {
  Lock guard(runtime().lock);
  Allocation* a = owner(p);
  if (!a) return result(hipErrorInvalidValue);
  std::memset(out, 0, sizeof *out);
  out->memoryType = a->host ? hipMemoryTypeHost : hipMemoryTypeDevice;
  out->device = a->device;
  out->devicePointer = out->hostPointer = const_cast<void*>(p);
  return hipSuccess;
}
// From the first handle on, memory lies in a file that other processes can map.
hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* p) {
  if (hipError_t error = drainFor(p, nullptr)) return error;
  Lock guard(runtime().lock);
  Allocation* a = owner(p);
  if (!a || (!a->shared && !share(*a))) return result(hipErrorInvalidValue);
  const SharedPages& pages = *a->shared;
  Handle h{getpid(), pages.file, pages.bytes, a->data, static_cast<size_t>(a->data - pages.base),
           a->bytes};
  std::memset(handle, 0, sizeof *handle);
  std::memcpy(handle, &h, sizeof h);
  return hipSuccess;
}
hipError_t hipIpcOpenMemHandle(void** p, hipIpcMemHandle_t handle, unsigned) {
  Handle h;
  std::memcpy(&h, &handle, sizeof h);
  Lock guard(runtime().lock);
  if (h.process == getpid()) {
    *p = h.data;
    return owner(*p) ? hipSuccess : result(hipErrorInvalidValue);
  }
  std::string path = "/proc/" + std::to_string(h.process) + "/fd/" + std::to_string(h.file);
  auto pages = std::make_unique<SharedPages>();
  pages->file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  void* base = pages->file < 0
                   ? MAP_FAILED
                   : mmap(nullptr, h.fileBytes, PROT_READ | PROT_WRITE, MAP_SHARED, pages->file, 0);
  if (base == MAP_FAILED) {
    std::fprintf(stderr,
                 "simulator: hipIpcOpenMemHandle cannot open %s (%s): the process that gave the "
                 "handle must be there, and of the same user\n",
                 path.c_str(), std::strerror(errno));
    return result(hipErrorInvalidValue);
  }
  pages->base = static_cast<char*>(base);
  pages->bytes = h.fileBytes;
  Allocation a;
  a.data = pages->base + h.offset;
  a.bytes = h.bytes;
  a.name =
      "memory of process " + std::to_string(h.process) + ", " + std::to_string(h.bytes) + " bytes";
  a.device = currentDevice();
  a.shared = std::move(pages);
  *p = a.data;
  sim_expect_others(kOtherProcesses);
  runtime().allocations[a.data] = std::move(a);
  return hipSuccess;
}
hipError_t hipIpcCloseMemHandle(void* p) {
  if (hipError_t error = drainOwn()) return error;
  Lock guard(runtime().lock);
  auto it = runtime().allocations.find(static_cast<char*>(p));
  bool opened = it != runtime().allocations.end() && it->second.shared && !it->second.shared->ours;
  if (opened) runtime().allocations.erase(it);
  return hipSuccess;
}
hipError_t hipFree(void* p) {
  if (hipError_t error = drainOwn()) return error;
  Lock guard(runtime().lock);
  if (!p) return hipSuccess;
  return runtime().allocations.erase(static_cast<char*>(p)) ? hipSuccess
                                                            : result(hipErrorInvalidValue);
}
hipError_t hipFreeAsync(void* p, hipStream_t s) {
  hipError_t error = drain(s);
  return error ? error : hipFree(p);
}
hipError_t hipHostFree(void* p) { return hipFree(p); }
hipError_t hipMemcpy(void* to, const void* from, size_t bytes, hipMemcpyKind) {
  hipError_t error = drainFor(to, from);
  return error ? error : copy(to, from, bytes);
}
hipError_t hipMemcpyAsync(void* to, const void* from, size_t bytes, hipMemcpyKind, hipStream_t s) {
  return submit(s, [=] { return copy(to, from, bytes); });
}
hipError_t hipMemcpyWithStream(void* to, const void* from, size_t bytes, hipMemcpyKind kind,
                               hipStream_t s) {
  hipError_t error = hipMemcpyAsync(to, from, bytes, kind, s);
  return error ? error : drain(s);
}
hipError_t hipMemcpyPeer(void* to, int, const void* from, int, size_t bytes) {
  return hipMemcpy(to, from, bytes, hipMemcpyDeviceToDevice);
}
hipError_t hipMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, hipStream_t s) {
  return hipMemcpyAsync(to, from, bytes, hipMemcpyDeviceToDevice, s);
}
hipError_t hipMemcpyDtoD(hipDeviceptr_t to, hipDeviceptr_t from, size_t bytes) {
  return hipMemcpy(to, from, bytes, hipMemcpyDeviceToDevice);
}
hipError_t hipMemset(void* to, int value, size_t bytes) {
  hipError_t error = drainFor(to, nullptr);
  return error ? error : fill(to, value, bytes);
}
hipError_t hipMemsetAsync(void* to, int value, size_t bytes, hipStream_t s) {
  return submit(s, [=] { return fill(to, value, bytes); });
}
hipError_t hipMemGetInfo(size_t* unused, size_t* total) {
  hipDeviceProp_t p;
  if (hipError_t error = hipGetDeviceProperties(&p, 0)) return error;
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
hipError_t hipGetSymbolSize(size_t* bytes, const void* symbol) {
  Runtime& r = runtime();
  Lock guard(r.lock);
  auto it = r.variables.find(symbol);
  if (it == r.variables.end()) return result(hipErrorInvalidSymbol);
  uint64_t size;
  if (!sim_variable(open(*it->second.binary), it->second.name.c_str(), &size)) {
    return result(hipErrorInvalidSymbol);
  }
  *bytes = size;
  return hipSuccess;
}
hipError_t hipMemcpyToSymbol(const void* symbol, const void* from, size_t bytes, size_t offset,
                             hipMemcpyKind) {
  void* p;
  if (hipError_t error = hipGetSymbolAddress(&p, symbol)) return error;
  return hipMemcpy(static_cast<char*>(p) + offset, from, bytes, hipMemcpyHostToDevice);
}
hipError_t hipMemcpyFromSymbol(void* to, const void* symbol, size_t bytes, size_t offset,
                               hipMemcpyKind) {
  void* p;
  if (hipError_t error = hipGetSymbolAddress(&p, symbol)) return error;
  return hipMemcpy(to, static_cast<char*>(p) + offset, bytes, hipMemcpyDeviceToHost);
}

}  // extern "C"
