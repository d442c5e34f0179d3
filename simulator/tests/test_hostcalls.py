"""What device code asks of the host: printf prints, an assert names its line, malloc is missing."""

import pathlib
import sys

import hipcc
import numpy as np
import pytest

import simulator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tools"))
import rocm

SOURCE = """
#include <hip/hip_runtime.h>
#include <cassert>
#include <cstdio>
extern "C" __global__ void say(int* o, int n) {
  if ((int)threadIdx.x < n)
    printf("lane %3d of %s: %-6.2f|%lx|%5s|%c%%\\n", (int)threadIdx.x, "a long name of something",
           1.5 * threadIdx.x, 0x123456789abcul, "ab", 'x');
  o[blockIdx.x * blockDim.x + threadIdx.x] = 1;
}
extern "C" __global__ void claim(int* o, int n) {
  assert(n != 1);                                                          // THE FIRST
  assert(n != 2);                                                          // THE SECOND
  o[threadIdx.x] = n;
}
extern "C" __global__ void heap(int* o, int n) {
  int* p = (int*)malloc(n);
  *p = 1; o[threadIdx.x] = *p;
  free(p);
}
"""
TRAPS = """
GLOBAL void traps(u32* o, int a) {
  if (a == 1) __builtin_trap();                                            // TRAP ONE
  if (o[TID] == 5) __builtin_trap();                                       // TRAP FIVE
  o[TID] = a;
}
"""


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def code(request):
    try:
        tools = rocm.find_toolchain()
    except rocm.ToolchainMissing as missing:
        pytest.skip(str(missing))
    flags = [f for f in tools.flags if f != "-Werror"]
    command = [tools.compiler, "-x", "hip", *flags, "-O3", f"--offload-arch={request.param}",
               "--offload-device-only", "--no-gpu-bundle-output", "-c", "-g", "-w"]  # fmt: skip
    return simulator.load(hipcc._cached(SOURCE, ".hip", command, ".co"))


def line_of(source, text):
    return next(n + 1 for n, line in enumerate(source.splitlines()) if text in line)


def test_printf_prints(code, capfd):
    out = np.zeros(256, np.int32)
    code.launch("say", 2, 128, [out, 70]).check()
    assert (out == 1).all()
    want = [f"lane {t:3d} of a long name of something: {1.5 * t:<6.2f}|123456789abc|   ab|x%"
            for t in range(70)]  # fmt: skip
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(want * 2)


@pytest.mark.parametrize("n,text", [(1, "THE FIRST"), (2, "THE SECOND")])
def test_an_assert_names_its_line(code, n, text, capfd):
    out = np.zeros(64, np.int32)
    code.launch("claim", 1, 64, [out, 0]).check()
    with pytest.raises(simulator.SimulatorError) as error:
        code.launch("claim", 1, 64, [out, n])
    assert f":{line_of(SOURCE, text)}: " in str(error.value)
    assert f"assertion `n != {n}' failed" in str(error.value)
    assert capfd.readouterr().err.count("assertion") == 64


def test_device_malloc_says_that_it_is_missing(code):
    with pytest.raises(simulator.SimulatorError, match="device malloc, free and new are not impl"):
        code.launch("heap", 1, 64, [np.zeros(64, np.int32), 16])


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_traps_that_the_compiler_merged(target):
    traps = hipcc.device(TRAPS, target=target)
    source = hipcc.PRELUDE + TRAPS
    out = np.zeros(64, np.uint32)
    traps.launch("traps", 1, 64, [out, 0]).check()
    for before, a, text in ((0, 1, "TRAP ONE"), (5, 0, "TRAP FIVE")):
        with pytest.raises(simulator.SimulatorError, match="the kernel trapped") as error:
            traps.launch("traps", 1, 64, [np.full(64, before, np.uint32), a])
        assert f":{line_of(source, text)}" in str(error.value)
