"""The CUDA or ROCm kernels beside their peers, in one run on this GPU.

    python benchmarks/gpu.py [--peers FOLDER] [--save]

Every candidate is captured into a CUDA graph of many launches and the graph is replayed: the time
is the median over replays, for each launch; the spread is that from the tenth to the ninetieth
percentile. Weights and inputs rotate over more than 512 MB, so that none is still in a cache, but
over 256 buffers at most: what is smaller than 2 MB is partly cached for all candidates alike. The
floor is the time that the bytes take at the read rate measured in the same run.

Peers: PyTorch eager, torch.compile, cuBLASLt (hipBLASLt) through torch._scaled_mm with fast
accumulation, F.linear in 16 bits, and the public kernels that peers.py finds. A peer whose result
is not that of PyTorch eager is not measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import gpu_report
import peers
import torch
import torch.nn.functional as F
from eager import rmsnorm_fp8_eager, swiglu_fp8_eager
from gpu_report import OURS, WEIGHT_ONLY, Case, Measured
from peers import EPS
from result_text import result_text

ROOT = Path(__file__).resolve().parent.parent

ROTATED_BYTES = 600 << 20
MAX_BUFFERS = 256
MIN_LAUNCHES = 24
REPLAYS = 15

# (N, K): Llama-3.1-405B under 8-way tensor parallelism, 8B on one device, 70B under 8-way.
GEMM_SHAPES = {
    "405B TP8": [(2304, 16384), (13312, 16384), (16384, 6656)],
    "8B": [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)],
    "70B TP8": [(1280, 8192), (8192, 1024), (7168, 8192), (8192, 3584)],
}
GEMM_ROWS = [1, 2, 4, 8, 16, 24, 32, 48, 64]
GEMV_SHAPES = [(128, 128), (1024, 128), (4096, 128), (1024, 1024), (2048, 2048), (4096, 4096)]
COLUMNS = 16384
ROW_COUNTS = [1, 8, 32, 128, 512, 2048]


def load_package():
    """The built kernel, from its folder: `kernels` need not be installed."""
    if not torch.cuda.is_available():
        sys.exit(f"error: needs a GPU, and torch {torch.__version__} finds none here")
    platform = "rocm" if torch.version.hip else "cu"
    variants = sorted((ROOT / "build").glob(f"torch-stable-abi*-{platform}*"))
    if not variants:
        sys.exit(f"no build/*-{platform}* found: run make build with BACKEND=cuda or rocm")
    spec = importlib.util.spec_from_file_location(
        "rocm_kernels_built",
        variants[0] / "__init__.py",
        submodule_search_locations=[str(variants[0])],
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def measure(
    package, call: Callable, inputs: list, launches: int = MIN_LAUNCHES, replays: int = REPLAYS
) -> Measured:
    """Captures a call for each input, `launches` or more in all, and replays the graph."""
    inputs = inputs * -(-launches // len(inputs))
    times = package.tuning.timing.graph_us(call, inputs, replays)
    deciles = statistics.quantiles(times, n=10)
    return Measured(statistics.median(times), deciles[0], deciles[-1])


def in_turns_us(package, calls: list[Callable], inputs: list, budget_us: float) -> list[float]:
    """Median microseconds of each call; replays take turns, so that the clock of the GPU is the
    same for all, and follow each other without a pause."""
    timing = package.tuning.timing
    graphs = [timing.captured(call, inputs) for call in calls]
    rounds: list[list] = []
    warm, most = 2, 15
    while len(rounds) < warm + most:
        rounds.append([timing.replayed(graph) for graph in graphs])
        if len(rounds) == warm:
            torch.cuda.synchronize()
            took = sum(start.elapsed_time(end) for start, end in rounds[-1]) * 1e3
            most = int(min(most, max(3, budget_us / took)))
    torch.cuda.synchronize()
    return [
        statistics.median(start.elapsed_time(end) for start, end in turns) * 1e3 / len(inputs)
        for turns in zip(*rounds[warm:], strict=True)
    ]


def buffers(bytes_each: int) -> int:
    return max(2, min(MAX_BUFFERS, ROTATED_BYTES // bytes_each + 1))


def read_rate(package) -> float:
    """Bytes a second of summing 2 GiB."""
    data = torch.ones(1 << 29, device="cuda")
    return data.nbytes / (measure(package, torch.sum, [data] * 4).median * 1e-6)


def fp8_weights(n: int, k: int) -> list[torch.Tensor]:
    values = torch.randn(n * k, device="cuda", dtype=torch.float16).to(torch.float8_e4m3fn)
    return [values.view(n, k).clone() for _ in range(buffers(n * k))]


def gemm_times(package, m: int, weights: list[torch.Tensor], wide: list[torch.Tensor]):
    n, k = weights[0].shape
    one = torch.ones(1, device="cuda")
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    a = x.to(torch.float8_e4m3fn)
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def library(w):
        return torch._scaled_mm(
            a, w.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )

    return {
        OURS: measure(package, lambda w: package.skinny_gemm(a, w, one, one, out=out), weights),
        "cuBLASLt FP8": measure(package, library, weights),
        "F.linear bf16": measure(package, lambda w: F.linear(x, w), wide),
        WEIGHT_ONLY: measure(
            package, lambda w: package.skinny_gemm(x, w, None, one, out=out), weights
        ),
    }


def gemm_cases(package, models: dict[str, list], rows: list[int]) -> list[Case]:
    cases = []
    for model, shapes in models.items():
        for n, k in shapes:
            weights = fp8_weights(n, k)
            wide = [w.to(torch.bfloat16) for w in weights[: buffers(2 * n * k)]]
            for m in rows:
                times = gemm_times(package, m, weights, wide)
                cases.append(Case("skinny_gemm", model, m, n, k, n * k + m * k + 2 * m * n, times))
    return cases


def gemv_case(package, n: int, k: int) -> Case:
    half = {"device": "cuda", "dtype": torch.float16}
    weights = [torch.randn(n, k, **half) for _ in range(buffers(2 * n * k))]
    a = torch.randn(1, k, **half)
    times = {
        OURS: measure(package, lambda w: package.skinny_gemm(a, w), weights),
        "cuBLAS fp16": measure(package, lambda w: F.linear(a, w), weights),
    }
    return Case("gemv_fp16", "", 1, n, k, 2 * (n * k + k + n), times)


def rmsnorm_eager(x, residual, weight, scale):
    residual.add_(x)
    return F.rms_norm(residual, weight.shape, weight, EPS)


def swiglu_eager(x, scale):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


EAGER = {
    "rmsnorm_fp8": rmsnorm_fp8_eager,
    "swiglu_fp8": swiglu_fp8_eager,
    "rmsnorm": rmsnorm_eager,
    "swiglu": swiglu_eager,
}


def rowwise_candidates(package, found: peers.Peers) -> dict[str, dict[str, Callable]]:
    """Collects for each op the calls to compare: all take the arguments of the eager one."""
    ours = {
        "rmsnorm_fp8": lambda x, r, w, s: package.rmsnorm_fp8(x, w, EPS, r, scale=s)[0],
        "swiglu_fp8": lambda x, s: package.swiglu_fp8(x, scale=s)[0],
        "rmsnorm": lambda x, r, w, s: package.rmsnorm(x, w, EPS, r),
        "swiglu": lambda x, s: package.swiglu(x),
    }
    return {
        op: {
            OURS: ours[op],
            "torch.compile": torch.compile(eager, fullgraph=True, dynamic=False),
            "eager": eager,
            **found.calls[op],
        }
        for op, eager in EAGER.items()
    }


def agrees(call: Callable, eager: Callable, inputs: tuple) -> str:
    """Compares a call's result with eager's: an empty text, or what is wrong with it."""
    try:
        actual, expected = (f(*(t.clone() for t in inputs)).float() for f in (call, eager))
        torch.cuda.synchronize()
    except Exception as error:  # of a foreign package
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    error = (actual - expected).abs().mean() / expected.abs().mean()
    return "" if error < 0.02 else f"differs from PyTorch eager by {error:.1%}"


def rowwise_cases(package, candidates: dict, found: peers.Peers, rows: int) -> list[Case]:
    half = {"device": "cuda", "dtype": torch.float16}
    weight, scale = torch.randn(COLUMNS, **half), torch.full((1,), 0.05, device="cuda")
    elements = rows * COLUMNS
    pairs = [torch.randn(2, rows, COLUMNS, **half) for _ in range(buffers(4 * elements))]
    cases = []
    for op, calls in candidates.items():
        quantised = op.endswith("fp8")
        if op.startswith("rmsnorm"):
            items = [(*pair, weight, scale) for pair in pairs]
            moved = elements * (7 if quantised else 8)
        else:
            items = [(x, scale) for pair in pairs for x in pair]
            moved = elements * 2 + elements // 2 * (1 if quantised else 2)
        times = {}
        for name, call in calls.items():
            if wrong := agrees(call, EAGER[op], items[0]):
                found.missing[f"{name}, {op}, {rows} rows"] = wrong
                continue
            # Eager allocates float32 copies: fewer inputs are then more bytes than enough.
            chosen = items[:32] if name == "eager" else items
            times[name] = measure(package, lambda item, call=call: call(*item), chosen)
        # What one op left in its inputs is no input for the next.
        for pair in pairs:
            pair.normal_()
        cases.append(Case(op, "", rows, 0, COLUMNS, moved, times))
    return cases


def device_name() -> str:
    """Returns the device's name as results and pages are named: h200."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return re.sub(r"[^a-z0-9]+", "_", name.lower().removeprefix("nvidia ")).strip("_")


def machine() -> str:
    """Device, driver and the versions that matter."""
    if not torch.cuda.is_available():
        return f"no GPU, torch {torch.__version__}"
    parts = [torch.cuda.get_device_name()]
    if torch.version.cuda:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True).stdout.split()
        parts += [f"driver {driver[0]}"] if driver else []
        parts.append(f"CUDA {torch.version.cuda}")
    else:
        parts.append(f"ROCm {torch.version.hip}")
    return ", ".join([*parts, f"torch {torch.__version__}"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, help="folder that peers.py has built")
    parser.add_argument("--save", action="store_true", help="write the JSON, tables and plots too")
    parser.add_argument("--quick", action="store_true", help="a few shapes, to see that it works")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    package = load_package()
    found = peers.find(arguments.peers)
    rate = read_rate(package)
    models, rows, gemv, counts = GEMM_SHAPES, GEMM_ROWS, GEMV_SHAPES, ROW_COUNTS
    if arguments.quick:
        models, rows, gemv, counts = {"8B": [(4096, 4096)]}, [1, 32], gemv[-1:], [1, 128]
    cases = gemm_cases(package, models, rows)
    cases += [gemv_case(package, n, k) for n, k in gemv]
    candidates = rowwise_candidates(package, found)
    for count in counts:
        cases += rowwise_cases(package, candidates, found, count)
    saved = {
        "machine": machine(),
        "date": str(datetime.date.today()),
        "read_rate": rate,
        "peers": found.versions,
        "missing": found.missing,
        "cases": [asdict(case) for case in cases],
    }
    print(gpu_report.document(saved, "gpu"))
    if arguments.save:
        name = device_name()
        gpu_report.RESULTS.mkdir(exist_ok=True)
        (gpu_report.RESULTS / f"{name}.json").write_text(result_text(saved))
        gpu_report.write(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
