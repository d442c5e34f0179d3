"""rmsnorm_fp8 and swiglu_fp8 on the simulated MI300X: counters, and a modelled time.

    python benchmarks/simulated_rows.py [--rows 1 32 2048] [--save]

Prints the tables of docs/results/rmsnorm_fp8.md and docs/results/swiglu_fp8.md; --save writes
results/tables, from where `python benchmarks/pages.py --write` puts them there. The launchers'
machine code runs in the simulator (checkers off, they are for tests) on float16 rows of 16384
columns with a static scale. Counters are exact, of what the code does; times are modelled, by the
quick bound from them and by the cycle model with what fits already in the Infinity Cache, as it is
in a benchmark that repeats a launch. Nothing here was measured on an AMD GPU. The published times
beside them come from benchmarks/data, with their source.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]

import simulated  # noqa: E402
import tables  # noqa: E402
from simulated_product import aligned  # noqa: E402

import simulator  # noqa: E402

COLUMNS = 16384
# What a launch costs besides its longest part, launch and the first access among it: fitted to one
# published number, 1.93 us for SwiGLU of 1 row by hf-rocm-kernels, a kernel of the same mapping as
# ours (one vector a thread), whose longest part is modelled as 0.34 us. The other published SwiGLU
# times then judge the model: it is 8 to 20 % above them from 64 rows on, as
# docs/results/swiglu_fp8.md tells.
FIXED_US = 1.6
PUBLISHED = ROOT / "benchmarks" / "data" / "mi300x_published_us.csv"
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048]


@dataclass
class Simulated:
    """One launch: its counters, the modelled time, and the bytes that must move."""

    counters: dict
    time: simulator.api.Time
    played_us: float  # by the cycle model
    read_floor: int
    write_floor: int
    elements: int

    @property
    def requested(self) -> float:
        """Bytes that the code loads and stores, to those that must move."""
        moved = self.counters["global_read_bytes"] + self.counters["global_written_bytes"]
        return moved / (self.read_floor + self.write_floor)

    @property
    def memory_reads(self) -> float:
        """Bytes that HBM delivers, to those that must be read."""
        return self.counters["memory_read_bytes"] / self.read_floor

    @property
    def modelled_us(self) -> float:
        return max(self.time.memory, self.time.issue, self.time.lds) * 1e6 + FIXED_US

    @property
    def vector_instructions(self) -> float:
        """Vector instructions an element, as if each lane's counted by itself."""
        classes = self.counters["by_class"]
        return 64 * (classes["valu"] + classes["trans"]) / self.elements


def norm(rows: int) -> Simulated:
    x, residual = (aligned(torch.randn(rows, COLUMNS).half()) for _ in range(2))
    weight, scale = aligned(torch.randn(COLUMNS).half()), torch.full((1,), 0.02)
    out = aligned(torch.zeros(rows, COLUMNS).to(simulated.NATIVE))
    simulated.functional().rmsnorm_fp8(x, weight, 1e-6, residual, scale=scale, out=out)
    reads, writes = (4 * rows + 2) * COLUMNS, 3 * rows * COLUMNS
    return _last(reads, writes, rows * COLUMNS)


def activation(rows: int) -> Simulated:
    x, scale = aligned(torch.randn(rows, COLUMNS).half()), torch.full((1,), 0.02)
    out = aligned(torch.zeros(rows, COLUMNS // 2).to(simulated.NATIVE))
    simulated.functional().swiglu_fp8(x, scale=scale, out=out)
    return _last(2 * rows * COLUMNS, rows * COLUMNS // 2, rows * COLUMNS // 2)


def _last(read_floor: int, write_floor: int, elements: int) -> Simulated:
    result = simulator.load_runtime().last()
    played = result.cycles.seconds * 1e6
    return Simulated(result.counters, result.time, played, read_floor, write_floor, elements)


def published(op: str) -> dict[int, dict[str, float]]:
    lines = [line for line in PUBLISHED.read_text().splitlines() if not line.startswith("#")]
    return {
        int(row["rows"]): {name: float(row[name]) for name in ("vllm", "hf_rocm_kernels")}
        for row in csv.DictReader(lines)
        if row["op"] == op
    }


HEADER = [
    "rows", "bytes requested / floor", "HBM reads / floor", "vector instr. an element",
    "LDS conflict cycles", "waves a SIMD", "blocks", "modelled us (memory, issue)",
    "modelled / 4.2 TB/s floor", "cycle model us", "published us: vLLM", "hf-rocm-kernels",
]  # fmt: skip


def table(op: str, runs: dict[int, Simulated]) -> list[list[str]]:
    known, lines = published(op), []
    for rows, run in runs.items():
        time = run.time
        floor = (run.read_floor + run.write_floor) / 4.2e6
        reference = known.get(rows, {"vllm": float("nan"), "hf_rocm_kernels": float("nan")})
        lines.append([
            str(rows), f"{run.requested:.3f}", f"{run.memory_reads:.3f}",
            f"{run.vector_instructions:.1f}", str(run.counters["lds_conflict_cycles"]),
            str(time.waves_per_simd), str(run.counters["workgroups"]),
            f"{run.modelled_us:.2f} ({time.memory * 1e6:.2f}, {time.issue * 1e6:.2f})",
            f"{run.modelled_us / floor:.2f}", f"{run.played_us:.2f}",
            f"{reference['vllm']:.2f}", f"{reference['hf_rocm_kernels']:.2f}",
        ])  # fmt: skip
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--save", action="store_true", help="write results/tables too")
    arguments = parser.parse_args()
    if min(arguments.rows) < 1:
        parser.error(f"--rows must be at least 1, got {min(arguments.rows)}")
    simulated.functional()
    simulated.CHECKS = False
    simulator.load_runtime().cycles(simulator.machine_for(simulated.TARGET, warm=True))
    for op, launch in (("rmsnorm_fp8", norm), ("swiglu_fp8", activation)):
        lines = table(op, {rows: launch(rows) for rows in arguments.rows})
        print(f"\n### {op}, float16, rows of {COLUMNS} columns\n\n{tables.markdown(HEADER, lines)}")
        if arguments.save:
            source = f"python benchmarks/simulated_rows.py, {datetime.date.today()}; modelled"
            tables.save_printed(f"{op}_mi300x", source, HEADER, lines)


if __name__ == "__main__":
    main()
