"""The simulator as a package by itself: installed by pip, and its three uses."""

import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import simulator

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "simulator" / "examples"


def run(*command, cwd, **environment) -> str:
    env = {**os.environ, **environment}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def example(name: str, folder: pathlib.Path, *arguments: str) -> str:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return run(sys.executable, EXAMPLES / name, *arguments, cwd=folder, PYTHONPATH=path)


def check_own_kernel(printed: str) -> None:
    wrong, right = printed.split("with barriers: ")
    assert re.search(r"lds-race in sums at \S+sums.hip:9", wrong)
    assert right.startswith("sums right: True") and "lds-race" not in right


def test_own_kernel(tmp_path):
    check_own_kernel(example("own_kernel.py", tmp_path))


@pytest.mark.slow
def test_torch_extension(tmp_path):
    if not pathlib.Path("/usr/include/hip/hip_runtime.h").exists():
        pytest.skip("needs the HIP headers of libamdhip64-dev")
    assert example("torch_extension.py", tmp_path).startswith("right: True")


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_triton(tmp_path, target):
    pytest.importorskip("triton", reason="pip install triton")
    printed = example("triton_matmul.py", tmp_path, "--target", target)
    error = re.search(rf"{target}: largest error (\S+), (\d+) MFMA", printed)
    # Sums of 384 products of unit variance reach 100, where neighbouring halves lie 1/16 apart.
    assert float(error[1]) <= 1 / 32 and int(error[2]) > 0


@pytest.mark.slow
def test_pip_installs_module_command_and_version(tmp_path, fetching):
    """The engine is compiled on first use, into the user's cache and not beside the module."""
    environment, cache = tmp_path / "venv", tmp_path / "cache"
    run(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    python, command = environment / "bin" / "python", environment / "bin" / "cdna-simulator"
    with fetching:
        run(python, "-m", "pip", "install", "--quiet", ROOT / "simulator", cwd=tmp_path)
    assert run(command, "--version", cwd=tmp_path).split()[-1] == simulator.__version__
    where = run(python, "-c", "import simulator; print(simulator.__file__)", cwd=tmp_path)
    assert pathlib.Path(where.strip()).is_relative_to(environment)
    used = {"XDG_CACHE_HOME": str(cache)}
    printed = run(python, EXAMPLES / "own_kernel.py", "--html", "page.html", cwd=tmp_path, **used)
    check_own_kernel(printed)
    assert "Where the cycles went" in (tmp_path / "page.html").read_text()
    assert list((cache / "cdna-simulator").glob("*/libsimulator.so"))
    assert not list(pathlib.Path(where.strip()).parent.rglob("*.so"))


def test_the_readme_s_saxpy_runs_as_pasted(tmp_path):
    text = (ROOT / "simulator" / "README.md").read_text()
    section = text[text.index("## A kernel by itself") :]
    shell = re.search(r"```sh\n(.*?)```", section, re.S)[1]
    program = re.search(r"```python\n(.*?)```", section, re.S)[1]
    command = tmp_path / "cdna-simulator"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m simulator "$@"\n')
    command.chmod(0o755)
    path = {"PYTHONPATH": str(ROOT), "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    assert run("sh", "-ec", shell, cwd=tmp_path, **path).strip() == "saxpy.co"
    printed = run(sys.executable, "-c", program, cwd=tmp_path, **path)
    assert int(printed.split()[0]) == 4096, "what it prints first is the bytes it read"


HEADERS = """
#include <hip/hip_runtime.h>
#include <cooperative_groups.h>
#include <hip/hip_bf16.h>
#include <hip/hip_fp16.h>
namespace cg = cooperative_groups;
extern "C" __global__ void k(__hip_bfloat16* a, __half* b, float* c, unsigned* wraps) {
  auto block = cg::this_thread_block();
  unsigned i = block.thread_rank();
  a[i] = __hadd(a[i], __float2bfloat16(1.0f));
  b[i] = __hadd(b[i], __float2half(2.0f));
  __syncthreads();
  c[i] = expf(c[i]) + __shfl_xor(c[i], 1);
  atomicInc(wraps, 9u);
  atomicDec(wraps + 1, 9u);
}
"""


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_hip_s_headers_compile_and_run(tmp_path, target):
    source = tmp_path / "headers.hip"
    source.write_text(HEADERS)
    code = simulator.load(simulator.compile_file(source, target=target))
    a = (np.arange(64, dtype=np.float32).view(np.uint32) >> 16).astype(np.uint16)
    b, c = np.arange(64, dtype=np.float16), np.linspace(-1, 1, 64, dtype=np.float32)
    old = c.copy()
    wraps = np.zeros(2, np.uint32)
    code.launch("k", 1, 64, [a, b, c, wraps]).check("suspicious")
    assert wraps.tolist() == [4, 6], "64 steps up and down, of 10 values"
    got = (a.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_array_equal(got, np.arange(1, 65))
    np.testing.assert_array_equal(b, np.arange(2, 66))
    np.testing.assert_allclose(c, np.exp(old) + old[np.arange(64) ^ 1], rtol=1e-6)


def test_what_does_not_compile_is_told_in_the_compiler_s_words(tmp_path):
    (tmp_path / "wrong.hip").write_text("__global__ void k(int* o) { o[0] = nothing; }")
    with pytest.raises(RuntimeError, match="undeclared identifier 'nothing'"):
        simulator.compile_file(tmp_path / "wrong.hip")


GRID = """
#include <hip/hip_runtime.h>
#include <cooperative_groups.h>
extern "C" __global__ void rounds(int* data, int* out, int* early) {
  auto grid = cooperative_groups::this_grid();
  int me = grid.thread_rank(), other = (gridDim.x - 1 - blockIdx.x) * blockDim.x + threadIdx.x;
  int sum = 0;
  for (int n = 0; n < 3; ++n) {
    data[me] = blockIdx.x + n;
    grid.sync();
    sum += data[other];
    grid.sync();
  }
  out[me] = sum;
}
extern "C" __global__ void without(int* data, int* out, int* early) {
  int me = blockIdx.x * blockDim.x + threadIdx.x;
  data[me] = blockIdx.x;
  cooperative_groups::this_grid().sync();
  out[me] = data[(gridDim.x - 1 - blockIdx.x) * blockDim.x + threadIdx.x];
  data[me] = 0;  // others may not have read it yet
}
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    source = tmp_path_factory.mktemp("grid") / "grid.hip"
    source.write_text(GRID)
    return simulator.load(simulator.compile_file(source))


def test_the_grid_s_barrier_of_cooperative_groups(grid):
    groups, threads = 40, 128
    for seed in range(3):
        data, out = np.zeros(groups * threads, np.int32), np.zeros((groups, threads), np.int32)
        args = [data, out, data[:1]]
        grid.launch("rounds", groups, threads, args, seed=seed).check("suspicious")
        assert (out == 3 * np.arange(groups)[::-1, None] + 3).all()
        found = grid.launch("without", groups, threads, args, seed=seed).findings
        assert {f.kind for f in found} == {"global-race"}


def test_a_grid_s_barrier_with_too_many_workgroups_hangs(grid):
    data = np.zeros(305 * 64, np.int32)
    with pytest.raises(simulator.SimulatorError, match="the launch hangs on hardware"):
        grid.launch("without", 305, 64, [data, data.copy(), data[:1]], 65536, race=False,
                    caches=False)  # fmt: skip
