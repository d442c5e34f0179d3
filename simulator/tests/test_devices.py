"""Several devices under the HIP stand-in: ranks that wait, streams, graphs, memory."""

import json
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
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
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
// The same with shares that the kernel itself writes: how 0 is right, 1 releases at agent scope,
// 2 acquires at agent scope, 3 has flags of agent scope, 4 takes one buffer for all rounds.
GLOBAL void exchange(float* mine, const float* theirs, int* my_flag, int* their_flag, float* out,
                     int epoch, int how) {
  int at = (how == 4 ? 0 : epoch % 2) * 64 + TID;
  mine[at] = 10 * epoch + TID;                                                           // SHARE
  if (how == 1) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  else __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");  // clang 22 drops it
  if (TID == 0 && how == 3) {
    __hip_atomic_store(their_flag, epoch, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);   // FLAG
    while (__hip_atomic_load(my_flag, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT) < epoch) {}
  } else if (TID == 0) {
    __hip_atomic_store(their_flag, epoch, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
    while (__hip_atomic_load(my_flag, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM) < epoch) {}
  }
  __builtin_amdgcn_s_barrier();
  if (how == 2) __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
  else __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
  out[TID] = mine[at] + theirs[at];                                                      // READ
}
GLOBAL void await(int* flag) {
  while (!__hip_atomic_load(flag, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT)) {}
}
GLOBAL void tell(int* flag) {
  if (TID == 0) __hip_atomic_store(flag, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
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
static int exchanges(int how) {  // rounds of two devices, all given before the host waits
  Ranks r; float *share[2], h[64];
  if (make(r, true)) return 1;
  for (int n = 0; n < 2; ++n) CHECK(hipMalloc((void**)&share[n], 512));
  for (int epoch = 1; epoch < 4; ++epoch) {
    for (int n = 0; n < 2; ++n) {
      void* args[] = {&share[n], &share[1 - n], &r.flag[n], &r.flag[1 - n], &r.out[n], &epoch,
                      &how};
      CHECK(hipSetDevice(n));
      CHECK(hipLaunchKernel((const void*)exchange, dim3(1), dim3(64), args, 0, nullptr));
    }
  }
  for (int n = 0; n < 2; ++n) { CHECK(hipSetDevice(n)); CHECK(hipDeviceSynchronize()); }
  for (int n = 0; n < 2; ++n) {
    CHECK(hipMemcpy(h, r.out[n], 256, hipMemcpyDeviceToHost));
    for (int i = 0; i < 64; ++i) if (h[i] != 60 + 2 * i) return std::printf("wrong %g\\n", h[i]), 3;
  }
  return 0;
}
// One stream writes, another reads behind it: by an event, by a host that waits while a third
// stream is under way, or by nothing.
static int handed(int how) {
  int *x, *flag, n = 1; hipStream_t s[3]; hipEvent_t e;
  CHECK(hipMalloc((void**)&x, 256)); CHECK(hipMemset(x, 0, 256));
  CHECK(hipMalloc((void**)&flag, 4)); CHECK(hipMemset(flag, 0, 4));
  CHECK(hipEventCreate(&e));
  for (hipStream_t& y : s) CHECK(hipStreamCreate(&y));
  void *args[] = {&x, &n}, *flags[] = {&flag};
  if (how < 3) CHECK(hipLaunchKernel((const void*)await, dim3(1), dim3(64), flags, 0, s[2]));
  CHECK(hipLaunchKernel((const void*)add, dim3(1), dim3(64), args, 0, s[0]));
  CHECK(hipEventRecord(e, s[0]));
  if (how == 0) CHECK(hipStreamWaitEvent(s[1], e, 0));
  if (how == 1) CHECK(hipStreamSynchronize(s[0]));
  if (how == 3) usleep(5000);  // nothing starts meanwhile
  CHECK(hipLaunchKernel((const void*)add, dim3(1), dim3(64), args, 0, s[1]));
  CHECK(hipLaunchKernel((const void*)tell, dim3(1), dim3(64), flags, 0, s[1]));
  CHECK(hipDeviceSynchronize());
  int h[64];
  CHECK(hipMemcpy(h, x, 256, hipMemcpyDeviceToHost));
  return how < 2 && h[63] != 2;
}
// On a device that is not the first: a stream, the null stream, the stream, and nothing between.
static int null_stream(int how) {
  int *x, n = 1, h[64]; hipStream_t s;
  CHECK(hipSetDevice(1));
  CHECK(hipMalloc((void**)&x, 256)); CHECK(hipMemset(x, 0, 256));
  CHECK(hipStreamCreateWithFlags(&s, how ? hipStreamNonBlocking : hipStreamDefault));
  void* args[] = {&x, &n};
  for (hipStream_t y : {s, (hipStream_t)nullptr, s})
    CHECK(hipLaunchKernel((const void*)add, dim3(1), dim3(64), args, 0, y));
  CHECK(hipDeviceSynchronize());
  CHECK(hipMemcpy(h, x, 256, hipMemcpyDeviceToHost));
  return !how && h[63] != 3;
}
// The host asks for an event while a kernel waits for what the host does then.
static int asks() {
  int *flag, *x, n = 1; hipStream_t s[2]; hipEvent_t e;
  CHECK(hipHostMalloc((void**)&flag, 4, 0)); *flag = 0;
  CHECK(hipMalloc((void**)&x, 256)); CHECK(hipMemset(x, 0, 256));
  CHECK(hipEventCreate(&e));
  for (hipStream_t& y : s) CHECK(hipStreamCreate(&y));
  void *args[] = {&x, &n}, *flags[] = {&flag};
  CHECK(hipLaunchKernel((const void*)await, dim3(1), dim3(64), flags, 0, s[0]));
  CHECK(hipLaunchKernel((const void*)add, dim3(1), dim3(64), args, 0, s[1]));
  CHECK(hipEventRecord(e, s[1]));
  while (hipEventQuery(e) == hipErrorNotReady) std::this_thread::yield();
  if (hipStreamQuery(s[0]) != hipErrorNotReady) return 2;
  __atomic_store_n(flag, 1, __ATOMIC_RELEASE);
  return hipDeviceSynchronize();
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
  return hipMallocArray(nullptr, nullptr, 0, 0, 0) == hipErrorNotSupported ? 0 : 2;
}
static void counts(void* seen) { ++*(int*)seen; }
static void calls(hipStream_t, hipError_t error, void* seen) { *(int*)seen += error ? 0 : 10; }
static int more() {  // pools, rows, words, host functions in a stream
  int *x, seen = 0, n = 4, back[2][64], reuse = 0; hipStream_t s; hipMemPool_t pool, used;
  size_t pitch;
  uint64_t keep = 1ull << 40, kept = 0; char name[64];
  CHECK(hipDeviceGetDefaultMemPool(&pool, 0)); CHECK(hipDeviceGetMemPool(&used, 0));
  CHECK(hipMemPoolSetAttribute(pool, hipMemPoolAttrReleaseThreshold, &keep));
  CHECK(hipMemPoolGetAttribute(used, hipMemPoolAttrReleaseThreshold, &kept));
  CHECK(hipMemPoolSetAttribute(pool, hipMemPoolReuseFollowEventDependencies, &reuse));
  if (kept != keep) return 2;
  CHECK(hipStreamCreate(&s));
  CHECK(hipMallocFromPoolAsync((void**)&x, 256, pool, s));
  CHECK(hipMemsetD32Async(x, -7, 64, s));
  void* args[] = {&x, &n};
  CHECK(hipLaunchHostFunc(s, counts, &seen));
  CHECK(hipLaunchKernel((const void*)add, dim3(1), dim3(64), args, 0, s));
  CHECK(hipStreamAddCallback(s, calls, &seen, 0));
  CHECK(hipMemcpyDtoHAsync(back[0], x, 256, s));
  CHECK(hipStreamSynchronize(s));
  if (seen != 11 || back[0][0] != -3 || back[0][63] != -3) return 3;
  CHECK(hipFreeAsync(x, s));
  CHECK(hipMallocPitch((void**)&x, &pitch, 200, 2)); CHECK(hipMemset2D(x, pitch, 3, 200, 2));
  CHECK(hipMemcpy2D(back, 256, x, pitch, 200, 2, hipMemcpyDeviceToHost));
  if (back[0][49] != 0x03030303 || back[1][0] != 0x03030303 || back[0][50] != -3) return 4;
  if (hipMemcpy2D(back, 100, x, pitch, 200, 2, hipMemcpyDeviceToHost) != hipErrorInvalidPitchValue)
    return 5;
  CHECK(hipMallocManaged((void**)&x, 256, hipMemAttachGlobal));
  for (int i = 0; i < 64; ++i) x[i] = i;  // the host writes it, and no call says so
  CHECK(hipLaunchKernel((const void*)add, dim3(1), dim3(64), args, 0, nullptr));
  CHECK(hipDeviceSynchronize());
  for (int i = 0; i < 64; ++i) if (x[i] != i + 4) return 7;
  CHECK(hipDeviceGetName(name, 8, 0));
  return std::strlen(name) == 7 ? 0 : 6;
}
static int processes() {  // a rank each, and memory by handles
  struct Shared { hipIpcMemHandle_t in[2], flag[2]; int made[2], over[2]; };
  auto* shared = (Shared*)mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                               MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  auto meet = [](int* both, int rank) {
    __atomic_store_n(&both[rank], 1, __ATOMIC_RELEASE);
    while (!__atomic_load_n(&both[1 - rank], __ATOMIC_ACQUIRE)) usleep(100);
  };
  pid_t child = fork();
  int rank = child ? 0 : 1;
  auto work = [&] {
    float *in, *theirs, *out, h[64]; int *flag, *their_flag;
    CHECK(hipSetDevice(rank));
    CHECK(hipMalloc((void**)&in, 10000)); CHECK(hipMalloc((void**)&out, 256));
    CHECK(hipMalloc((void**)&flag, 4)); CHECK(hipMemset(flag, 0, 4));
    for (float& x : h) x = rank + 1;
    CHECK(hipMemcpy(in, h, 256, hipMemcpyHostToDevice));
    CHECK(hipIpcGetMemHandle(&shared->in[rank], in + 5));
    CHECK(hipIpcGetMemHandle(&shared->flag[rank], flag));
    meet(shared->made, rank);
    CHECK(hipIpcOpenMemHandle((void**)&theirs, shared->in[1 - rank], 1));
    CHECK(hipIpcOpenMemHandle((void**)&their_flag, shared->flag[1 - rank], 1));
    if (rank) usleep(1500000);  // longer than a launch waits for one of its own process
    for (int epoch = 1; epoch < 4; ++epoch) {
      void* args[] = {&in, &theirs, &flag, &their_flag, &out, &epoch};
      CHECK(hipLaunchKernel((const void*)reduce, dim3(1), dim3(64), args, 0, nullptr));
    }
    CHECK(hipDeviceSynchronize());
    CHECK(hipMemcpy(h, out, 256, hipMemcpyDeviceToHost));
    for (float x : h) if (x != 3) return std::printf("wrong %g\\n", x), 2;
    meet(shared->over, rank);
    CHECK(hipIpcCloseMemHandle(theirs)); CHECK(hipIpcCloseMemHandle(their_flag));
    CHECK(hipFree(in)); CHECK(hipFree(flag));
    return 0;
  };
  int mine = work(), its = 1;
  if (!child) std::fflush(stdout), _exit(mine);
  waitpid(child, &its, 0);
  return mine ? mine : its;
}
int main(int, char** argv) {
  struct { const char* name; int (*run)(); } all[] = {{"devices", devices}, {"threads", threads},
    {"streams", streams}, {"alone", alone}, {"graph", graph}, {"cooperative", cooperative},
    {"memory", memory}, {"missing", missing}, {"asks", asks}, {"more", more},
    {"processes", processes}};
  if (!std::strcmp("exchanges", argv[1])) std::printf("status %d\\n", exchanges(argv[2][0] - '0'));
  if (!std::strcmp("handed", argv[1])) std::printf("status %d\\n", handed(argv[2][0] - '0'));
  if (!std::strcmp("null", argv[1])) std::printf("status %d\\n", null_stream(argv[2][0] - '0'));
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
    return subprocess.run([str(program), *what.split()], capture_output=True, text=True,
                          env=environment, timeout=120)  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("what", ["devices", "threads", "streams"])
def test_ranks_that_wait_for_one_another(program, what, seed):
    done = run(program, what, SIMULATOR_SEED=str(seed))
    assert done.stdout == "status 0\n", done.stderr


def test_a_rank_that_never_comes_is_a_hang(program):
    done = run(program, "alone")
    assert done.stdout == "status 0\n", done.stderr
    assert "every wave waits for something that never comes" in done.stderr


def judged(program, what: str, folder, seeds=range(6)):
    """Findings of several orders of a program's launches, and what its launches executed."""
    findings, executed = [], []
    for seed in seeds:
        reports = folder / f"{what} {seed} {len(list(folder.iterdir()))}"
        reports.mkdir()
        done = run(program, what, SIMULATOR_SEED=str(seed), SIMULATOR_REPORT_DIR=str(reports))
        assert done.returncode == 0 and "status" in done.stdout, done.stderr
        launches = [json.loads(path.read_text()) for path in sorted(reports.iterdir())]
        findings += [f for launch in launches for f in launch["findings"] if f["level"] == "error"]
        executed.append([launch["counters"]["instructions"] for launch in launches])
        if not findings:
            assert done.stdout == "status 0\n", done.stdout + done.stderr
    return findings, executed


def test_exchanges_of_two_devices_are_judged_together(program, tmp_path):
    findings, executed = judged(program, "exchanges 0", tmp_path)
    assert not findings, findings
    assert judged(program, "exchanges 0", tmp_path)[1] == executed, "a seed is one order"
    assert len({str(e) for e in executed}) > 1, "seeds are several"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("exchanges 1", "release at system scope"),
        ("exchanges 2", "acquire at system scope"),
        ("exchanges 3", "system scope"),
        ("exchanges 4", "of device 1"),
        ("handed 2", "of device 0"),
        ("null 1", "of device 1"),
    ],
)
def test_what_devices_and_streams_lack_is_told(program, tmp_path, what, words):
    findings, _ = judged(program, what, tmp_path)
    assert any(f["kind"] == "global-race" and words in f["message"] for f in findings), findings


def test_nothing_starts_while_the_host_still_launches(program, tmp_path):
    for seed in range(4):
        findings, _ = judged(program, "handed 3", tmp_path, [seed])
        assert any(f["kind"] == "global-race" for f in findings), seed


@pytest.mark.parametrize("what", ["handed 0", "handed 1", "null 0"])
def test_events_and_the_host_order_streams(program, tmp_path, what):
    findings, _ = judged(program, what, tmp_path, range(3))
    assert not findings, findings


def test_a_host_that_asks_and_then_lets_a_kernel_go(program):
    done = run(program, "asks")
    assert done.stdout == "status 0\n", done.stdout + done.stderr


@pytest.mark.parametrize("what", ["graph", "cooperative", "memory", "more", "processes"])
def test_graphs_cooperative_launches_and_memory(program, what):
    done = run(program, what)
    assert done.stdout == "status 0\n" and not done.stderr, done.stderr


def test_a_missing_function_is_a_sentence_and_no_link_error(program):
    done = run(program, "missing")
    assert done.stdout == "status 0\n"
    assert "the program calls hipMallocArray, which the HIP stand-in does not have" in done.stderr
