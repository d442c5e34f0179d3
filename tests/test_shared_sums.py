"""Sums that workgroups share on AMD: what a launch must leave for the next of the same name, as a
graph replays them, and what a wave must wait for before its workgroup says that it is done."""

import ctypes
import re
import shutil
import subprocess

import pytest
import torch
from compare import Guarded, bits
from test_gemm_configs import SCHEDULES, Problem, text
from test_skinny_gemm_configs import register_pipeline, specialised_waves

simulated = pytest.importorskip("simulated")
pytestmark = pytest.mark.usefixtures("on_the_simulator")

CPU = torch.device("cpu")
CALLS = {
    **{f"gemm {name}": ("gemm", text((64, 64), name)) for name in SCHEDULES},
    **{f"skinny_gemm {config}": ("skinny_gemm", config) for config in (
        register_pipeline(waves=8, split_k=3),
        register_pipeline(split_k=0, workgroups=7),
        specialised_waves(split_k=0, workgroups=11, xcds=4),
    )},
}  # fmt: skip


class OneWorkspace(simulated.Workspaces):
    """Scratch memory that keeps what a launch has left, as that of a graph does."""

    kept = None

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is not torch.ops.aten.new_empty.default or type(self).kept is None:
            made = super().__torch_dispatch__(function, types, args, kwargs)
            if function is torch.ops.aten.new_empty.default:
                type(self).kept = made
            return made
        assert args[1] == [type(self).kept.numel()]
        self.parts.append(type(self).kept)
        self.hip.register(self.parts[-1])
        return self.parts[-1]


@pytest.fixture
def names():
    """The word from which the launchers draw the next launch's name."""
    simulated.functional()
    library = ctypes.CDLL(str(simulated.build_launchers()))
    return ctypes.c_uint64.in_dll(library, "_ZZN12rocm_kernels16next_launch_nameEvE5names")


@pytest.mark.parametrize("call", CALLS)
def test_a_launch_of_the_same_name_finds_its_workspace_as_new(monkeypatch, names, call):
    op, config = CALLS[call]
    m = 33 if op == "skinny_gemm" else 150
    problem = Problem(m, 200, 1500)

    def run(seed):
        out = Guarded(m, 200, torch.float32, CPU)
        operands = problem.a, problem.w, problem.scale_a, problem.scale_w, problem.bias
        simulated.ops.gemm(out.view, *operands, config, seed=seed)
        out.assert_guards_intact()
        return bits(out.view)

    expected = run(0)
    monkeypatch.setattr(simulated, "Workspaces", OneWorkspace)
    monkeypatch.setattr(OneWorkspace, "kept", None)
    name = names.value
    for seed in range(1, 4):
        names.value = name
        assert torch.equal(run(seed), expected), seed
    assert (OneWorkspace.kept is None) == ("data_parallel" in call)


ATTENTION = [f"attention_{dtype}{fp8}" for dtype in ("bf16", "fp16") for fp8 in ("", "_fp8")]


@pytest.mark.parametrize("unit, least", [
    ("gemm_cdna_gemm", 20), ("skinny_gemm_cdna_skinny_gemm", 20),
    *((f"attention_cdna_{name}", 5) for name in ATTENTION),
])  # fmt: skip
def test_each_wave_awaits_its_partial_sums_before_the_barrier(tmp_path, unit, least):
    """One wave counts the workgroup's arrival, and its release waits for its own stores. A barrier
    of the workgroup waits for none, so every wave must have awaited what it stored."""
    unit_file = simulated.build_launchers().parent / f"{unit}.o"
    copy = shutil.copy(unit_file, tmp_path)
    subprocess.run(["llvm-objdump-22", "--offloading", copy], check=True, capture_output=True)
    (code,) = tmp_path.glob(f"*{simulated.TARGET}")
    listing = subprocess.run(
        ["llvm-objdump-22", "-d", "--no-show-raw-insn", code],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    tickets = 0
    for kernel in re.split(r"^[0-9a-f]+ <(?=\w+>:)", listing, flags=re.M)[1:]:
        lines = [line.strip() for line in kernel.splitlines()]
        for at, line in enumerate(lines):
            if not line.startswith("global_atomic_cmpswap_x2"):
                continue
            before = lines[:at]
            barrier = max(i for i, text in enumerate(before) if text.startswith("s_barrier"))
            waits = [i for i in range(barrier) if re.match(r"s_waitcnt .*vmcnt\(0\)", lines[i])]
            stores = [i for i in range(barrier) if lines[i].startswith("global_store")]
            assert stores and max(waits) > max(stores), lines[0]
            tickets += 1
    assert tickets > least
