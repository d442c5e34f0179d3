"""tools/resources.py: a kernel beyond its budget fails; every AMD product kernel has a launch."""

import dataclasses
import re
import subprocess
import sys

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import tomllib

import resources

BUDGETS = tomllib.loads((ROOT / "tools" / "resources.toml").read_text())
PIPELINE = "void skinny_gemm_register_pipeline<0, 16, 16, 4, false>"
LEAN = resources.Kernel(
    name=PIPELINE, target="gfx942", threads=512, vgprs=106, sgprs=68, lds=16, scratch=0,
    vgpr_spills=0, sgpr_spills=0, waves=4, limit=8, waves_assumed=4,
)  # fmt: skip


pytestmark = pytest.mark.usefixtures("toolchain")


@pytest.mark.parametrize(
    "change, words",
    [
        ({}, None),
        ({"vgprs": 257, "waves_assumed": 1}, "vgprs 257 exceeds the budget of 256"),
        ({"lds": 65536}, "lds 65536 exceeds"),
        ({"waves": 0}, "0 waves a SIMD"),
        ({"vgprs": 136}, "136 VGPRs allow 3 waves a SIMD, the choice of a config assumes 4"),
        ({"scratch": 8}, "scratch 8 bytes"),
        ({"vgpr_spills": 1}, "1 VGPRs spilled"),
    ],
    ids=str,
)
def test_a_kernel_beyond_its_budget_fails(change, words):
    kernel = dataclasses.replace(LEAN, **change)
    found = resources.faults(kernel, resources.budget_of(kernel, BUDGETS["skinny_gemm"]))
    assert found == [] if words is None else words in " ".join(found)


def test_lds_given_at_launch_counts():
    launches = [resources.Launch(4, 16384, 4), resources.Launch(8, 40000, 4)]
    kernel = resources.as_launched(LEAN, launches)
    assert kernel.lds == 40016 and kernel.waves == 2  # one workgroup of 8 waves on 4 SIMDs
    assert resources.faults(kernel, {"vgprs": 256, "lds": 65536, "waves": 3})


def test_a_compiled_kernel_beyond_its_budget_fails(tmp_path):
    source = tmp_path / "probe.hip"
    source.write_text(
        "#include <hip/hip_runtime.h>\n"
        "__global__ void probe(float* out) {\n"
        "  __shared__ float held[4096];\n"
        "  held[threadIdx.x] = out[threadIdx.x];\n"
        "  __builtin_amdgcn_s_barrier();\n"
        "  out[threadIdx.x] = held[threadIdx.x ^ 1];\n"
        "}\n"
    )
    (kernel,) = resources.kernels_of(source, "gfx942")
    assert not resources.faults(kernel, {"vgprs": 128, "lds": 16384, "waves": 1})
    (fault,) = resources.faults(kernel, {"vgprs": 128, "lds": 16383, "waves": 1})
    assert "lds 16384" in fault


def test_every_source_has_a_budget():
    """make resources, which only slow tests run, checks nothing at all where one has none."""
    assert set(resources.listed_sources()) == set(BUDGETS)


@pytest.mark.parametrize(
    "name, count", [("skinny_gemm", 60), pytest.param("products", 80, marks=pytest.mark.slow)]
)
def test_every_product_kernel_has_a_launch(name, count):
    """On a target without matrix instructions, where the kernels are quickly compiled."""
    source = resources.listed_sources()[name]
    compiled = {kernel.name for kernel in resources.kernels_of(source, "gfx90a")}
    with_matrix = {name for name in compiled if not re.search("plain|moe_[a-z]+_kernel", name)}
    launches = resources.launches_of(ROOT / BUDGETS[name]["launches"])
    assert with_matrix == set(launches) and len(with_matrix) >= count


@pytest.mark.slow
def test_every_kernel_is_within_its_budget():
    command = [sys.executable, "tools/resources.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
