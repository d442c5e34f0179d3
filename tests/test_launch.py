"""common/gpu/launch.h: a launch answers for itself, not for what an earlier call left behind. On
the simulator, from a kernel of one store. And CUDA's limits of shared memory, which all threads
share, on a stand-in for its runtime (tests/launches)."""

import ctypes
import re
import subprocess
import sys

import pytest
import torch
from project import ROOT

sys.path.append(str(ROOT))

import simulator

SOURCE = """\
#include "common/gpu/launch.h"

namespace {
__global__ void store(int* out, int value) { *out = value; }
}  // namespace

extern "C" const char* launch(int* out, int threads) {
  rocm_kernels::Launch launch;
  launch.grid = dim3(1);
  launch.block = threads;
  return rocm_kernels::launch_kernel(store, launch, out, 7);
}
extern "C" int leave_an_error() { return hipSetDevice(99); }
extern "C" int last_error() { return hipPeekAtLastError(); }
extern "C" int forget_errors() { return hipGetLastError(); }
"""
TOO_MANY_THREADS = 4096


@pytest.fixture(scope="module")
def library(tmp_path_factory, toolchain):
    folder = tmp_path_factory.mktemp("launch")
    source, compiled, output = folder / "launch.hip", folder / "launch.o", folder / "liblaunch.so"
    source.write_text(SOURCE)
    command = toolchain.compile_command(source, compiled, ("gfx942",), extra=(f"-I{ROOT}",))
    subprocess.run(command, check=True)
    command = toolchain.link_command([compiled], output)
    command[command.index("-lamdhip64")] = str(simulator.runtime())
    subprocess.run(command, check=True)
    simulator.load_runtime()
    loaded = ctypes.CDLL(str(output))
    loaded.launch.argtypes = [ctypes.c_void_p, ctypes.c_int]
    loaded.launch.restype = ctypes.c_char_p
    return loaded


@pytest.fixture
def out():
    """A word of memory that the simulator knows of, not yet 7."""
    word = torch.tensor([-1], dtype=torch.int32)
    hip = simulator.load_runtime()
    hip.register(word)
    yield word
    hip.unregister(word)


def test_a_good_launch_neither_reports_nor_clears_an_earlier_error(library, out):
    left = library.leave_an_error()
    assert left != 0 and library.last_error() == left
    assert library.launch(out.data_ptr(), 1) is None
    assert out.item() == 7
    assert library.last_error() == left
    library.forget_errors()


def test_a_bad_launch_reports_its_own_error_and_leaves_none(library, out):
    library.forget_errors()
    assert b"InvalidConfiguration" in library.launch(out.data_ptr(), TOO_MANY_THREADS)
    assert out.item() == -1
    assert library.last_error() == 0


def test_threads_do_not_lower_each_other_s_limit_of_shared_memory(tmp_path):
    """The runtime keeps one limit a kernel and device. It is set a few times, not with each launch:
    by each of 8 threads that first find 3 kernels on 2 devices untold, at most."""
    program = tmp_path / "limits"
    command = ["g++", "-std=c++17", "-O1", "-pthread", f"-I{ROOT}", f"-I{ROOT}/tests/launches"]
    command += [ROOT / "tests/launches/limits.cpp", "-o", program]
    subprocess.run(command, check=True)
    for _ in range(3):
        output = subprocess.run([program], check=True, capture_output=True, text=True).stdout
        told = re.fullmatch(r"launches 170000, failed 0, told (\d+) times\n", output)
        assert told and 6 <= int(told[1]) <= 8 * 3 * 2, output
