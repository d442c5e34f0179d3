"""Several devices under the HIP stand-in: ranks that wait, streams, graphs, memory."""

import os
import subprocess

import hipcc
import pytest

import simulator

SOURCE = """
#include <hip/hip_runtime_api.h>
#include <cstdio>
#include <cstring>
#include <thread>
#define GLOBAL extern "C" __attribute__((global))
#define TID ((int)__builtin_amdgcn_workitem_id_x())
#define BID ((int)__builtin_amdgcn_workgroup_id_x())
#define CHECK(call) do { hipError_t error_ = (call); if (error_) { \\
  std::printf("line %d: %s\\n", __LINE__, hipGetErrorName(error_)); return 1; } } while (0)
// The core of every one-shot all-reduce: tell the other rank, wait for it, add.
GLOBAL void reduce(const float* mine, const float* theirs, int* my_flag, int* their_flag,
                   float* out, int epoch) {
  if (TID == 0) {
    __hip_atomic_store(their_flag, epoch, __ATOMIC_RELEASE, __HIP_MEMORY_SCOPE_SYSTEM);
    while (__hip_atomic_load(my_flag, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM) < epoch)
      __builtin_amdgcn_s_sleep(1);
  }
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  out[TID] = mine[TID] + theirs[TID];
}
GLOBAL void add(int* x, int n) { x[TID] += n; }
// A barrier of the whole grid.
GLOBAL void grid_sync(int* count, int* data, int* out, int groups) {
  data[BID * 64 + TID] = BID;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  __builtin_amdgcn_s_barrier();
  if (TID == 0) {
    __hip_atomic_fetch_add(count, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    while (__hip_atomic_load(count, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) < groups) {}
  }
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  out[BID * 64 + TID] = data[(groups - 1 - BID) * 64 + TID];
}
struct Ranks {
  float *in[2], *out[2];
  int* flag[2];
  hipError_t error[2];
};
static int make(Ranks& r, bool devices) {
  for (int n = 0; n < 2; ++n) {
    if (devices) CHECK(hipSetDevice(n));
    float h[64];
    for (float& x : h) x = n + 1;
    CHECK(hipMalloc((void**)&r.in[n], 256));
    CHECK(hipExtMallocWithFlags((void**)&r.flag[n], 4, hipDeviceMallocFinegrained));
    CHECK(hipMalloc((void**)&r.out[n], 256));
    CHECK(hipMemset(r.flag[n], 0, 4));
    CHECK(hipMemcpy(r.in[n], h, 256, hipMemcpyHostToDevice));
  }
  return 0;
}
static hipError_t go(Ranks& r, int n, int epoch, hipStream_t s) {
  void* args[] = {&r.in[n], &r.in[1 - n], &r.flag[n], &r.flag[1 - n], &r.out[n], &epoch};
  return hipLaunchKernel((const void*)reduce, dim3(1), dim3(64), args, 0, s);
}
static int right(Ranks& r) {
  for (int n = 0; n < 2; ++n) {
    float h[64];
    CHECK(hipMemcpy(h, r.out[n], 256, hipMemcpyDeviceToHost));
    for (float x : h) if (x != 3) return std::printf("wrong %g\\n", x), 1;
  }
  return 0;
}
static int devices() {  // one host thread
  Ranks r;
  if (make(r, true)) return 1;
  for (int epoch = 1; epoch < 4; ++epoch) {
    for (int n = 0; n < 2; ++n) { CHECK(hipSetDevice(n)); CHECK(go(r, n, epoch, nullptr)); }
    for (int n = 0; n < 2; ++n) { CHECK(hipSetDevice(n)); CHECK(hipDeviceSynchronize()); }
  }
  return right(r);
}
static int threads() {  // a host thread for each rank
  Ranks r;
  if (make(r, false)) return 1;
  auto rank = [&](int n) { r.error[n] = go(r, n, 1, nullptr); };
  std::thread a(rank, 0), b(rank, 1);
  a.join(), b.join();
  CHECK(r.error[0]); CHECK(r.error[1]);
  return right(r);
}
static int streams() {  // two streams of one device, and an event between
  Ranks r; hipStream_t s[2]; hipEvent_t e;
  if (make(r, false)) return 1;
  for (hipStream_t& x : s) CHECK(hipStreamCreate(&x));
  CHECK(hipEventCreate(&e));
  for (int n = 0; n < 2; ++n) CHECK(go(r, n, 1, s[n]));
  CHECK(hipEventRecord(e, s[0]));
  CHECK(hipStreamWaitEvent(s[1], e, 0));
  CHECK(hipStreamSynchronize(s[1]));
  CHECK(hipEventQuery(e));
  return right(r) || hipStreamDestroy(s[0]) || hipStreamDestroy(s[1]) || hipEventDestroy(e);
}
static int alone() {  // the other rank never comes
  Ranks r;
  if (make(r, true)) return 1;
  CHECK(hipSetDevice(0));
  CHECK(go(r, 0, 1, nullptr));
  return hipDeviceSynchronize() == hipErrorLaunchFailure ? 0 : 2;
}
static int graph() {
  hipStream_t s; hipGraph_t g; hipGraphExec_t x; int *p, h[64], n = 5;
  CHECK(hipMalloc((void**)&p, 256));
  CHECK(hipMemset(p, 0, 256));
  CHECK(hipStreamCreate(&s));
  CHECK(hipStreamBeginCapture(s, hipStreamCaptureModeGlobal));
  void* args[] = {&p, &n};
  CHECK(hipLaunchKernel((const void*)add, dim3(1), dim3(64), args, 0, s));
  n = 7;  // a second node with other arguments
  CHECK(hipLaunchKernel((const void*)add, dim3(1), dim3(64), args, 0, s));
  CHECK(hipStreamEndCapture(s, &g));
  CHECK(hipMemcpy(h, p, 256, hipMemcpyDeviceToHost));
  if (h[3] != 0) return 2;
  CHECK(hipGraphInstantiate(&x, g, nullptr, nullptr, 0));
  for (int i = 0; i < 3; ++i) CHECK(hipGraphLaunch(x, s));
  CHECK(hipStreamSynchronize(s));
  CHECK(hipMemcpy(h, p, 256, hipMemcpyDeviceToHost));
  CHECK(hipGraphExecDestroy(x)); CHECK(hipGraphDestroy(g));
  return h[3] == 36 && h[63] == 36 ? 0 : 3;
}
static int cooperative() {
  int *count, *data, *out, groups = 40, h[64];
  CHECK(hipMalloc((void**)&count, 4)); CHECK(hipMemset(count, 0, 4));
  CHECK(hipMalloc((void**)&data, 40 * 256)); CHECK(hipMalloc((void**)&out, 40 * 256));
  void* args[] = {&count, &data, &out, &groups};
  CHECK(hipLaunchCooperativeKernel((const void*)grid_sync, dim3(40), dim3(64), args, 0, nullptr));
  CHECK(hipMemcpy(h, out + 64, 256, hipMemcpyDeviceToHost));
  hipError_t large = hipLaunchCooperativeKernel((const void*)grid_sync, dim3(1 << 20), dim3(64),
                                                args, 0, nullptr);
  return h[5] == 38 && large == hipErrorCooperativeLaunchTooLarge ? 0 : 2;
}
extern "C" hipError_t hipGetDevicePropertiesR0600(void*, int);
static int memory() {
  int count, can, host[64], got[64]; int *a, *b; void* opened; hipIpcMemHandle_t handle;
  hipPointerAttribute_t where;
  CHECK(hipGetDeviceCount(&count));
  if (count != 8 || hipSetDevice(8) != hipErrorInvalidDevice) return 2;
  CHECK(hipDeviceCanAccessPeer(&can, 0, 1));
  CHECK(hipDeviceEnablePeerAccess(1, 0));
  CHECK(hipMalloc((void**)&a, 256));
  CHECK(hipSetDevice(1));
  CHECK(hipMalloc((void**)&b, 256));
  CHECK(hipPointerGetAttributes(&where, b + 3));
  if (!can || where.device != 1 || where.memoryType != hipMemoryTypeDevice) return 3;
  for (int i = 0; i < 64; ++i) host[i] = i;
  CHECK(hipHostRegister(host, 256, 0));
  int n = 1; void* args[] = {&opened, &n};
  CHECK(hipHostGetDevicePointer(&opened, host, 0));
  CHECK(hipLaunchKernel((const void*)add, dim3(1), dim3(64), args, 0, nullptr));
  CHECK(hipDeviceSynchronize());
  CHECK(hipHostUnregister(host));
  CHECK(hipMemcpy(a, host, 256, hipMemcpyHostToDevice));
  CHECK(hipMemcpyPeer(b, 1, a, 0, 256));
  CHECK(hipIpcGetMemHandle(&handle, b));
  CHECK(hipIpcOpenMemHandle(&opened, handle, hipIpcMemLazyEnablePeerAccess));
  CHECK(hipMemcpy(got, opened, 256, hipMemcpyDeviceToHost));
  CHECK(hipIpcCloseMemHandle(opened));
  for (int i = 0; i < 64; ++i) if (got[i] != i + 1) return 4;
  char newer[1472]; int units;
  CHECK(hipGetDevicePropertiesR0600(newer, 1));
  std::memcpy(&units, newer + 388, 4);
  return units == 304 && !std::strncmp(newer + 1160, "gfx942", 6) ? 0 : 5;
}
static int missing() {  // it links, and says what it lacks
  return hipMemAdvise(nullptr, 4, hipMemAdviseSetReadMostly, 0) == hipErrorNotSupported ? 0 : 2;
}
int main(int, char** argv) {
  struct { const char* name; int (*run)(); } all[] = {{"devices", devices}, {"threads", threads},
    {"streams", streams}, {"alone", alone}, {"graph", graph}, {"cooperative", cooperative},
    {"memory", memory}, {"missing", missing}};
  for (auto& x : all) if (!std::strcmp(x.name, argv[1])) std::printf("status %d\\n", x.run());
}
"""


@pytest.fixture(scope="module")
def program():
    try:
        runtime = simulator.runtime()
    except simulator.SimulatorError as error:
        pytest.skip(str(error))
    hipcc.CACHE.mkdir(parents=True, exist_ok=True)
    source, output = hipcc.CACHE / "devices.hip", hipcc.CACHE / "devices"
    source.write_text(SOURCE)
    common = [hipcc.compiler(), "-Wno-everything"]
    for command in (
        [*common, "-x", "hip", "-std=c++17", "--offload-arch=gfx942", "-O2", "-g", "-nogpuinc",
         "-nogpulib", "-D__HIP_PLATFORM_AMD__=1", "-c", str(source), "-o", f"{output}.o"],
        [*common, "--hip-link", f"{output}.o", str(runtime), "-pthread", "-o", str(output)],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return output


def run(program, what: str, **variables):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(simulator.runtime().parent), **variables}
    return subprocess.run([str(program), what], capture_output=True, text=True, env=environment,
                          timeout=120)  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("what", ["devices", "threads", "streams"])
def test_ranks_that_wait_for_one_another(program, what, seed):
    done = run(program, what, SIMULATOR_SEED=str(seed))
    assert done.stdout == "status 0\n", done.stderr


def test_a_rank_that_never_comes_is_a_hang(program):
    done = run(program, "alone")
    assert done.stdout == "status 0\n", done.stderr
    assert "every wave waits for something that never comes" in done.stderr


@pytest.mark.parametrize("what", ["graph", "cooperative", "memory"])
def test_graphs_cooperative_launches_and_memory(program, what):
    done = run(program, what)
    assert done.stdout == "status 0\n" and not done.stderr, done.stderr


def test_a_missing_function_is_a_sentence_and_no_link_error(program):
    done = run(program, "missing")
    assert done.stdout == "status 0\n"
    assert "the program calls hipMemAdvise, which the HIP stand-in does not have" in done.stderr
