"""The HIP runtime stand-in: a compiled launcher runs its own device code under it."""

import ctypes
import os
import pathlib
import subprocess

import hipcc
import numpy as np
import pytest

import simulator

SOURCE = """
#include <hip/hip_runtime_api.h>
#include <cstdio>
#define GLOBAL extern "C" __attribute__((global))
#define TID ((int)__builtin_amdgcn_workitem_id_x())
#define BID ((int)__builtin_amdgcn_workgroup_id_x())
__attribute__((device)) int offset = 3;
extern __attribute__((shared)) int dynamic[];
GLOBAL void add(int* y, const int* x, int n) {
  int t = BID * 256 + TID;
  if (t < n) y[t] = x[t] + offset;
}
GLOBAL void reverse(int* y, int n) {
  dynamic[TID] = TID;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup"); __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  y[TID] = dynamic[n - 1 - TID];
}
extern "C" int launch_add(int* y, const int* x, int n, hipStream_t stream) {
  void* args[] = {&y, &x, &n};
  return hipLaunchKernel((const void*)add, dim3((n + 255) / 256), dim3(256), args, 0, stream);
}
extern "C" int launch_reverse(int* y, int n, int lds) {
  void* args[] = {&y, &n};
  hipError_t error = hipLaunchKernel((const void*)reverse, dim3(1), dim3(n), args, lds, nullptr);
  return error ? error : hipGetLastError();
}
extern "C" int facts(int* out) {
  hipDeviceProp_t p;
  int error = hipGetDeviceProperties(&p, 0);
  out[0] = p.multiProcessorCount; out[1] = p.warpSize; out[2] = p.sharedMemPerBlock;
  error |= hipDeviceGetAttribute(&out[3], hipDeviceAttributeMultiprocessorCount, 0);
  error |= hipGetDeviceCount(&out[4]);
  error |= hipOccupancyMaxActiveBlocksPerMultiprocessor(&out[5], (const void*)add, 256, 0);
  return error;
}
extern "C" int whole_program() {
  int host[300], *x, *y, n = 300, seven = 7;
  hipStream_t stream;
  if (hipMalloc((void**)&x, sizeof host) || hipMalloc((void**)&y, sizeof host)) return 1;
  if (hipStreamCreate(&stream)) return 2;
  for (int i = 0; i < n; ++i) host[i] = i;
  if (hipMemcpyAsync(x, host, sizeof host, hipMemcpyHostToDevice, stream)) return 3;
  if (hipMemcpyToSymbol((const void*)&offset, &seven, 4, 0, hipMemcpyHostToDevice)) return 4;
  if (launch_add(y, x, n, stream)) return 5;
  if (hipMemcpy(host, y, sizeof host, hipMemcpyDeviceToHost)) return 6;
  for (int i = 0; i < n; ++i) if (host[i] != i + 7) return 7;
  if (hipMemcpy(host, y, sizeof host + 4, hipMemcpyDeviceToHost) != hipErrorInvalidValue) return 8;
  int three = 3;
  if (hipMemcpyToSymbol((const void*)&offset, &three, 4, 0, hipMemcpyHostToDevice)) return 9;
  size_t size;
  if (hipGetSymbolSize(&size, (const void*)&offset) || size != 4) return 10;
  int grid, block;
  uint32_t mask[11];
  if (hipOccupancyMaxPotentialBlockSize(&grid, &block, (const void*)add, 0, 0)) return 11;
  if (block != 1024 || grid != 2 * 304) return 12;
  if (hipExtStreamGetCUMask(nullptr, 11, mask)) return 13;
  if (mask[0] != ~0u || mask[9] != (1u << 16) - 1 || mask[10]) return 14;
  return hipFree(x) || hipFree(y) || hipStreamDestroy(stream) || hipDeviceSynchronize();
}
extern "C" int unwritten() {
  int *x, *y;
  if (hipMalloc((void**)&x, 1024) || hipMalloc((void**)&y, 1024)) return 1;
  int error = launch_add(y, x, 256, nullptr);
  return (hipFree(x) || hipFree(y) || error) ? 1 : 0;
}
int main(int count, char**) {
  int status = count > 1 ? unwritten() : whole_program();
  std::printf("status %d\\n", status);
  return 0;
}
"""


def build(name: str, *flags: str) -> pathlib.Path:
    hipcc.CACHE.mkdir(parents=True, exist_ok=True)
    source = hipcc.CACHE / "launcher.hip"
    source.write_text(SOURCE)
    objects, output = hipcc.CACHE / f"{name}.o", hipcc.CACHE / name
    common = [hipcc.compiler(), "-Wno-everything"]
    runtime = simulator.runtime()
    for command in (
        [*common, "-x", "hip", "--offload-arch=gfx942", "-O2", "-g", "-nogpuinc", "-nogpulib",
         "-D__HIP_PLATFORM_AMD__=1", "-fPIC", "-c", str(source), "-o", str(objects)],
        [*common, "--hip-link", str(objects), str(runtime), "-o", str(output), *flags],
    ):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def library():
    try:
        simulator.load_runtime()
    except simulator.SimulatorError as error:
        pytest.skip(str(error))
    return ctypes.CDLL(str(build("liblauncher.so", "-shared")))


@pytest.fixture
def hip():
    runtime = simulator.load_runtime()
    runtime.clear()
    yield runtime
    runtime.clear()


def pointer(array):
    return ctypes.c_void_p(array.ctypes.data)


def test_a_launch_with_registered_buffers(library, hip):
    x, y = np.arange(1000, dtype=np.int32), np.zeros(1000, np.int32)
    hip.register(x), hip.register(y, output=True)
    before = hip.launches
    assert library.launch_add(pointer(y), pointer(x), 1000, None) == 0
    np.testing.assert_array_equal(y, x + 3)
    result = hip.last().check()
    assert hip.launches == before + 1 and hip.findings == 0
    assert result.raw["kernel"] == "add" and result.raw["grid"] == [4, 1, 1]
    assert result.counters["global_written_bytes"] == 4000
    hip.unregister(x), hip.unregister(y)


def test_findings_reach_the_harness(library, hip):
    x, y = np.arange(1000, dtype=np.int32), np.zeros(1000, np.int32)
    hip.register(x), hip.register(y[:500])
    assert library.launch_add(pointer(y), pointer(x), 1000, None) == 0
    assert hip.findings == 1 and "out-of-bounds" in hip.findings_text()
    assert hip.last().findings[0].source.split(":")[0].endswith("launcher.hip")
    hip.unregister(x), hip.unregister(y)


def test_unregistered_memory_is_out_of_bounds(library, hip):
    x, y = np.arange(10, dtype=np.int32), np.zeros(10, np.int32)
    hip.register(y)
    library.launch_add(pointer(y), pointer(x), 10, None)
    assert [f.kind for f in hip.last().findings] == ["out-of-bounds"]
    hip.unregister(y)


def test_dynamic_lds_and_launch_errors(library, hip):
    y = np.zeros(1024, np.int32)
    hip.register(y)
    assert library.launch_reverse(pointer(y), 256, 1024) == 0
    np.testing.assert_array_equal(y[:256], 255 - np.arange(256))
    assert library.launch_reverse(pointer(y), 2048, 8192) == 9  # hipErrorInvalidConfiguration
    assert library.launch_reverse(pointer(y), 256, 70000) == 1  # hipErrorInvalidValue
    hip.unregister(y)


def test_device_facts_and_memory(library, hip):
    out = np.zeros(6, np.int32)
    assert library.facts(pointer(out)) == 0
    assert out.tolist()[:5] == [304, 64, 65536, 304, 8] and out[5] == 8
    assert library.whole_program() == 0 and hip.findings == 0
    assert library.unwritten() == 0
    assert "uninitialised" in hip.findings_text()


def run_program(tmp_path, *arguments, **variables):
    environment = {**os.environ, "LD_LIBRARY_PATH": str(simulator.runtime().parent),
                   "SIMULATOR_REPORT_DIR": str(tmp_path), "SIMULATOR_SEED": "5",
                   **variables}  # fmt: skip
    command = [str(build("program")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


def test_a_program_by_library_path(library, tmp_path):
    done = run_program(tmp_path)
    assert (done.returncode, done.stdout) == (0, "status 0\n"), done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["launch-0.json"]


def test_findings_can_fail_a_program(library, tmp_path):
    assert run_program(tmp_path, "unwritten").stdout == "status 0\n"
    failing = run_program(tmp_path, "unwritten", SIMULATOR_FAIL="1")
    assert failing.stdout == "status 1\n" and "uninitialised" in failing.stderr
    unchecked = run_program(tmp_path, "unwritten", SIMULATOR_FAIL="1", SIMULATOR_CHECKS="0")
    assert unchecked.stdout == "status 0\n"
