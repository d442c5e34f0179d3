"""Every design and schedule of the AMD skinny_gemm, on its gfx942 machine code in the simulator.

The simulator's adversarial modes are on: loads complete as late as the waits allow, waves run in
seeded random orders; races, reads of memory nobody wrote and accesses out of bounds fail a test.
"""

import random
import re
import subprocess
from dataclasses import dataclass

import pytest
import torch
from compare import Guarded, assert_product_close, bits
from project import ROOT

FNUZ = torch.float8_e4m3fnuz


def register_pipeline(block_n=16, waves=4, split_k=1, workgroups=0, xcds=1, sparse=0):
    return _config("register_pipeline", block_n, waves, split_k, workgroups, xcds, 0, sparse)


def specialised_waves(block_n=16, split_k=1, workgroups=0, xcds=1, sparse=0, producers=4):
    return _config("specialised_waves", block_n, 8, split_k, workgroups, xcds, producers, sparse)


def _config(design, block_n, waves, split_k, workgroups, xcds, producers, sparse) -> str:
    """A SkinnyGemmConfig as skinny_gemm/cdna/config.h writes it."""
    return (
        f"{design} block_n={block_n} waves={waves} split_k={split_k} workgroups={workgroups} "
        f"xcds={xcds} producers={producers} sparse={sparse}"
    )


@dataclass
class Problem:
    """Zero-centred random operands with gaps between rows, and a guarded output."""

    m: int
    n: int
    k: int
    out_dtype: torch.dtype = torch.float32
    dtype: torch.dtype = FNUZ
    gap: int = 16

    def __post_init__(self):
        self.a = torch.randn(self.m, self.k + self.gap).to(self.dtype)[:, : self.k]
        self.w = torch.randn(self.n, self.k + self.gap).to(self.dtype)[:, : self.k]
        self.scale_a = torch.rand(self.m, 1) + 0.5
        self.scale_w = torch.rand(self.n, 1) + 0.5
        self.out = Guarded(self.m, self.n, self.out_dtype, torch.device("cpu"))

    def check(self, columns=slice(None)):
        operands = self.a.float() * self.scale_a, self.w[columns].float() * self.scale_w[columns]
        exact = operands[0].double() @ operands[1].double().t()
        assert_product_close(self.out.view[:, columns], exact, operands)
        assert self.out.view.isfinite().all()
        self.out.assert_guards_intact()


class Device:
    """skinny_gemm with and without a config."""

    def __init__(self, simulated, simulator):
        simulated.functional()
        self.ops, self.hip = simulated.ops, simulator.load_runtime()

    def configs(self, p: Problem, config: str | None = None) -> list[str]:
        """What runs, `config` or the backend's choice, then the other candidates."""
        dtype = str(p.dtype).rpartition(".")[2]
        key = (-1, p.m, p.n, p.k, dtype, dtype, False)
        self.ops.tune_gemm(*key, config or "")
        try:
            operands = (p.out.view, p.a, p.w, p.scale_a, p.scale_w)
            return self.ops.gemm_configs(*operands, True).splitlines()
        finally:
            self.ops.tune_gemm(*key, "")

    def choose(self, p: Problem) -> str:
        return self.configs(p)[0]

    def run(self, p: Problem, config: str | None = None, seed: int | None = None):
        """Launches; returns what the simulator reports. RuntimeError for a config refused."""
        call = (p.out.view, p.a, p.w, p.scale_a, p.scale_w, None)
        if config is None:
            self.ops.gemm(*call, seed=seed)
        else:
            self.ops.gemm(*call, config, seed=seed)
        return self.hip.last()


@pytest.fixture(scope="module")
def device(on_the_simulator) -> Device:
    import simulated

    import simulator

    return Device(simulated, simulator)


CONFIGS = [
    register_pipeline(),
    register_pipeline(waves=8, split_k=3),
    register_pipeline(block_n=32, split_k=5, xcds=8),
    register_pipeline(split_k=0, workgroups=7),
    register_pipeline(block_n=8),
    register_pipeline(block_n=8, waves=8, split_k=3, xcds=4),
    register_pipeline(block_n=32, split_k=0, workgroups=23, xcds=8),
    specialised_waves(),
    specialised_waves(block_n=32, split_k=3),
    specialised_waves(split_k=0, workgroups=11, xcds=4),
]
SPARSE = [
    register_pipeline(sparse=1),
    register_pipeline(block_n=8, split_k=2, sparse=1),
    register_pipeline(block_n=32, waves=8, split_k=4, sparse=1),
    specialised_waves(block_n=32, sparse=1),
    specialised_waves(split_k=0, workgroups=9, sparse=1),
]
SHAPES = [(130, 1536), (97, 1000), (257, 2049)]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_design_and_schedule(device, config, shape):
    for m in (1, 11, 16, 31) if "block_n=8 " in config else (1, 11, 16, 31, 64):
        p = Problem(m, *shape)
        device.run(p, config, seed=m)
        p.check()


@pytest.mark.parametrize("config", SPARSE, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_eight_rows_in_a_sparse_operand(device, config, shape):
    for m in (1, 5, 8):
        p = Problem(m, *shape)
        device.run(p, config, seed=m)
        p.check()


@pytest.mark.parametrize("block_n", [16, 32, 64])
@pytest.mark.parametrize("design", [register_pipeline, specialised_waves])
def test_wide_tiles(device, design, block_n):
    p = Problem(32, 200, 1100, torch.bfloat16)
    device.run(p, design(block_n=block_n))
    p.check()


def test_random_schedules(device):
    draw = random.Random(0)
    for seed in range(30):
        n, k = draw.randint(1, 300), draw.choice([1, 15, 16, 127, 128, 129, 640, 1023, 3000])
        k_blocks, tiles = -(-k // 128), -(-n // 16)
        workgroups = draw.randint(1, min(k_blocks * tiles, 200))
        split_k = draw.randint(1, k_blocks)
        p = Problem(draw.randint(1, 64), n, k, gap=draw.choice([0, 1, 16]))
        design = draw.choice([register_pipeline, specialised_waves])
        schedule = draw.choice([{"split_k": split_k}, {"split_k": 0, "workgroups": workgroups}])
        device.run(p, design(**schedule), seed=seed)
        p.check()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_the_same_bits_in_every_order_of_waves(device, config):
    p = Problem(16, 130, 1536, torch.bfloat16)
    device.run(p, config, seed=1)
    first = p.out.view.clone()
    for seed in (2, 3):
        p.out.view.fill_(torch.nan)
        device.run(p, config, seed=seed)
        assert torch.equal(bits(first), bits(p.out.view))


@pytest.mark.parametrize("shape", [(130, 1000), (48, 8192), (9, 300)], ids=str)
@pytest.mark.parametrize(
    "last, others",
    [(16, (1, 2, 7, 8, 9, 15)), (32, (17, 24, 31)), (64, (33, 48, 63))],
    ids=["to 16", "to 32", "to 64"],
)
def test_a_row_has_the_same_bits_for_every_m_of_its_class(device, last, others, shape):
    whole = Problem(last, *shape)
    device.run(whole)
    for m in others:
        part = Problem(m, *shape)
        part.a, part.w = whole.a[:m], whole.w
        part.scale_a, part.scale_w = whole.scale_a[:m], whole.scale_w
        config = device.choose(part)
        assert config == device.choose(whole)
        device.run(part, config)
        assert torch.equal(bits(part.out.view), bits(whole.out.view[:m]))


@pytest.mark.parametrize(
    "m, config, words",
    [
        (9, register_pipeline(sparse=1), "M <= 8"),
        (1, register_pipeline(waves=3), "waves must be 4 or 8"),
        (1, register_pipeline(block_n=48), "block_n must be"),
        (1, register_pipeline(split_k=9), "K blocks"),
        (1, register_pipeline(split_k=0), "workgroups >= 1"),
        (1, register_pipeline(split_k=0, workgroups=1000), "more stream-K workgroups"),
        (1, register_pipeline(xcds=0), "xcds must be"),
        (32, register_pipeline(block_n=64, waves=8), "64 KiB of LDS"),
        (33, register_pipeline(block_n=8), "block_n must be"),
        (
            1,
            register_pipeline(block_n=8).replace("register_pipeline", "specialised_waves"),
            "specialised_waves needs",
        ),
        (1, specialised_waves(producers=2), "4 of them producers"),
        (1, "register_pipeline", "must read like"),
        (1, register_pipeline() + " ", "must read like"),
        (1, register_pipeline().replace("split_k=1", "split_k=123456789"), "must read like"),
        (1, register_pipeline().replace("split_k=1", "split_k=-1"), "must read like"),
        (1, "fast", "must read like"),
    ],
    ids=str,
)
def test_configs_that_cannot_be_are_refused(device, m, config, words):
    with pytest.raises(RuntimeError, match=words):
        device.run(Problem(m, 64, 1024), config)


@pytest.mark.parametrize("m", [1, 17, 64])
def test_candidates_are_distinct_and_read_back(device, m):
    for n, k in [(2304, 16384), (48, 100)]:
        p = Problem(m, n, k)
        candidates = device.configs(p)
        assert len(candidates) == len(set(candidates)) > 3
        designs = {text.split()[0] for text in candidates}
        assert designs == {"register_pipeline", "specialised_waves", *(["tiled"] if m > 16 else [])}
        for text in candidates:
            assert device.configs(p, text)[0] == text
            assert sorted(device.configs(p, text)) == sorted(candidates)


def test_the_default_is_the_first_candidate(device):
    p = Problem(8, 130, 1536, torch.bfloat16)
    device.run(p, device.choose(p))
    forced = p.out.view.clone()
    p.out.view.fill_(torch.nan)
    device.run(p)
    assert torch.equal(bits(forced), bits(p.out.view))


# ---- Full size ---------------------------------------------------------------------------------

LLAMA_405B_TP8 = [(2304, 16384), (13312, 16384), (16384, 6656)]
QUICK = [(1, 2304), (16, 2304)]  # under 20 seconds each; the largest take a minute
FULL_SIZE = [
    pytest.param(m, n, k, marks=() if (m, n) in QUICK else pytest.mark.slow)
    for n, k in LLAMA_405B_TP8
    for m in (1, 8, 16, 32)
]


@pytest.mark.parametrize("m, n, k", FULL_SIZE)
def test_full_size(device, m, n, k):
    p = Problem(m, n, k, torch.bfloat16, gap=0)
    report = device.run(p, device.choose(p), seed=m)
    p.check(torch.cat([torch.arange(64), torch.randint(n, (512,)), torch.arange(n - 64, n)]))

    # Every byte of w once, a once for an XCD at most, out once: nothing else crosses to memory.
    read = report.counters["memory_read_bytes"]
    assert n * k <= read <= 1.01 * (n * k + 8 * m * k), read / (n * k)
    # Nothing but memory sets the modelled time, and no block waits for another.
    time = report.time
    assert report.counters["tickets"] == 0
    assert time.bound == "memory" and time.memory <= 1.06 * n * k / 4.2e12


OTHER_DESIGNS = [
    specialised_waves(split_k=2),
    register_pipeline(split_k=2, xcds=8),
    register_pipeline(split_k=0, workgroups=304),
]


@pytest.mark.slow
@pytest.mark.parametrize("config", OTHER_DESIGNS, ids=str)
def test_full_size_of_other_designs(device, config):
    p = Problem(8, 2304, 16384, torch.bfloat16, gap=0)
    device.run(p, config)
    p.check(torch.randint(2304, (512,)))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_loops_keep_loads_in_flight(tmp_path, target):
    """A wait for everything inside a K loop would empty the pipeline once an iteration.

    It comes back easily: the compiler puts it there when a request and the last use of the
    registers that it fills overlap (keep_order in blocks/product/cdna/tile_loader.h).
    """
    import rocm

    source = ROOT / "skinny_gemm" / "cdna" / "skinny_gemm.hip"
    assembly = tmp_path / "skinny_gemm.s"
    command = rocm.find_toolchain().device_command(source, assembly, target, assembly=True)
    subprocess.run(command, check=True)
    waits = k_loop_waits(assembly.read_text())
    assert len(waits) >= 40
    drained = {name: counts for name, counts in waits.items() if min(counts) < 6}
    assert not drained


def k_loop_waits(assembly: str) -> dict[str, list[int]]:
    """The vmcnt values waited for inside the K loop of each register pipeline: the innermost one
    that loads and multiplies, and so not the loop over tiles, where a pipeline ends."""
    waits = {}
    bodies = re.finditer(r"^(\w+skinny_gemm_register_pipeline\w+):.*?\n(.*?)^\.Lfunc_end", assembly,
                         re.S | re.M)  # fmt: skip
    for name, body in (match.groups() for match in bodies):
        labels, shortest = {}, len(body)
        lines = body.split("\n")
        for number, line in enumerate(lines):
            if label := re.match(r"(\.LBB\w+):", line):
                labels[label[1]] = number
            branch = re.search(r"s_cbranch\w+\s+(\.LBB\w+)", line)
            if branch is None or branch[1] not in labels:
                continue
            loop = "\n".join(lines[labels[branch[1]] : number])
            if "mfma" in loop and "buffer_load_dwordx4" in loop and len(loop) < shortest:
                shortest = len(loop)
                waits[name] = [int(count) for count in re.findall(r"vmcnt\((\d+)\)", loop)]
    return waits
