"""The stream-K experiment: three schedules of gemm and its choice, over more than 4,000 products.

    python benchmarks/gemm_schedules.py [--target gfx942|gfx950|sm_90] [--save]
    python benchmarks/gemm_schedules.py --simulate 64 [--save]       on the simulator
    python benchmarks/gemm_schedules.py --measure [--save]           on a GPU, with CUDA's build

For each product of a grid of M, N and K: the best config of data-parallel, of split-K and of
stream-K (all streamed, or the hybrid), and the choice, by the time model that chooses configs
(gemm_schedules.cpp asks the project's own headers). --measure times these four on this GPU, each as
a CUDA graph of calls whose weights rotate; replays of the four take turns. --simulate runs a sample
on the simulated GPU, each result held against float64, and times it by the cycle model. What is
modelled is called so everywhere. Sums are float32 in all schedules, and none uses float atomics.

--save adds the run to results/<gpu>_gemm_schedules.json.gz, and writes docs/<gpu>_gemm_schedules.md
and its two charts from all that is known of that GPU.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import gzip
import itertools
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from gpu_report import DOCS, RESULTS, markdown

ROOT = Path(__file__).resolve().parent.parent
SCHEDULES = ["data_parallel", "split_k", "stream_k"]
NAMES = {"gfx942": "mi300x", "gfx950": "mi355x", "sm_90": "h200"}
UNITS = {"gfx942": 304, "gfx950": 256, "sm_90": 132}  # compute units, or SMs

# 4,096 products a kind of operands. Sizes of models, and some that no tile divides.
ROWS = [72, 96, 128, 200, 256, 384, 512, 768, 1000, 1024, 1536, 2048, 3072, 4096, 6144, 8192]
COLUMNS = [512, 768, 1024, 1280, 1536, 2048, 2112, 3072, 4096, 4608, 5120, 6144, 7168, 8192,
           12288, 16384]  # fmt: skip
DEPTHS = [256, 512, 768, 1024, 1536, 2048, 2304, 3072, 4096, 5120, 6144, 7168, 8192, 11008, 14336,
          16384]  # fmt: skip
KINDS = ["row", "bf16"]  # FP8 with scales of rows; bfloat16
SIMULATED_PRODUCTS = 6e8  # multiply-adds at most, so that one takes seconds
POOL_ELEMENTS = 1 << 30  # of a, and of the weights that rotate
ROTATED_BYTES = 150 << 20  # more than L2 holds
LEAST_LAUNCHES, MOST_LAUNCHES = 4, 48
BUDGET_US = 3000  # of launches for a product
SLOWER = 1.03  # the choice is not to be further behind the best of the three
EVEN = 0.005  # times closer than this are the same


@dataclass(frozen=True)
class Product:
    m: int
    n: int
    k: int
    kind: str

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k} {self.kind}"


def grid(kinds: Iterable[str] = KINDS) -> list[Product]:
    return [Product(*sizes) for sizes in itertools.product(ROWS, COLUMNS, DEPTHS, kinds)]


def sample(count: int, products: list[Product]) -> list[Product]:
    """`count` of those that the simulator runs in seconds, the same in every run."""
    small = [p for p in products if p.m * p.n * p.k <= SIMULATED_PRODUCTS]
    return random.Random(0).sample(small, count)


# ---- What the models say


@functools.cache
def program(name: str = "gemm_schedules") -> Path:
    """<name>.cpp beside this file, compiled."""
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        sys.exit("error: needs a C++ compiler (c++, g++ or clang++) on the PATH")
    folder = Path(tempfile.mkdtemp(prefix=name))
    source = Path(__file__).with_name(f"{name}.cpp")
    subprocess.run(
        [compiler, "-std=c++17", "-O2", "-Wall", "-Werror", source, "-o", folder / "program"],
        check=True,
    )
    return folder / "program"


def modelled(target: str, products: list[Product], *card: str) -> list[dict]:
    """For each product: schedule, or "choice" -> (modelled us, config). `card` is that of sm_90: an
    H200, or h100."""
    asked = "".join(f"{p.m} {p.n} {p.k} {p.kind}\n" for p in products)
    done = subprocess.run(
        [program(), target, *card], input=asked, capture_output=True, text=True, check=True
    )
    answers = [line.split("\t") for line in done.stdout.splitlines()]
    step = len(SCHEDULES) + 1
    return [
        {name: (float(us), config) for name, us, config in answers[i : i + step]}
        for i in range(0, len(answers), step)
    ]


# ---- What is run


def timed(
    product: Product, best: dict, times_us: Callable[[Product, list[str]], list[float]]
) -> dict:
    """The product's row of the results; a config that two schedules share is timed once."""
    configs = list(dict.fromkeys(config for _, config in best.values()))
    us = dict(zip(configs, times_us(product, configs), strict=True))
    return {**asdict(product), **{name: round(us[config], 2) for name, (_, config) in best.items()}}


def weight_places(first: int, count: int, pool: int, copies: int) -> list[int]:
    """Where in a pool of elements `copies` weights of `count` elements begin, after `first` others:
    one behind the other while there is room, at multiples of 256."""
    begin = -(-first // 256) * 256
    room = pool - count - begin
    if room < 0:
        raise ValueError(f"{first} and {count} elements do not fit in a pool of {pool}")
    return [begin + copy * count % (room + 1) // 256 * 256 for copy in range(copies)]


def measured(
    products: list[Product],
    target: str,
    minutes: float,
    tell: Callable[[Product, str, float], object] = lambda *_: None,
) -> dict:
    """Rows of the results on this GPU, in a random order: some 8,000 products, ten milliseconds
    each, and what is left after those minutes is left out. Each config's time is told."""
    import gpu
    import torch

    package = gpu.load_package()
    ops = sys.modules[f"{package.__name__}._ops"].ops
    dtypes = {"row": torch.float8_e4m3fn, "bf16": torch.bfloat16}
    pools = {
        kind: torch.randn(POOL_ELEMENTS, device="cuda", dtype=torch.bfloat16).to(dtype)
        for kind, dtype in dtypes.items()
    }
    scales = torch.rand(2, max(ROWS + COLUMNS), 1, device="cuda") + 0.5
    outputs = torch.empty(max(ROWS) * max(COLUMNS), device="cuda", dtype=torch.bfloat16)

    def times_us(p: Product, configs: list[str]) -> list[float]:
        a, out = pools[p.kind][: p.m * p.k].view(p.m, p.k), outputs[: p.m * p.n].view(p.m, p.n)
        rotated = ROTATED_BYTES // (p.n * p.k * a.element_size()) + 1
        launches = min(max(rotated, LEAST_LAUNCHES), MOST_LAUNCHES)
        places = weight_places(p.m * p.k, p.n * p.k, POOL_ELEMENTS, launches)
        weights = [pools[p.kind][i : i + p.n * p.k].view(p.n, p.k) for i in places]
        given = (None, None) if p.kind == "bf16" else (scales[0, : p.m], scales[1, : p.n])
        calls = [
            lambda w, config=config: ops.gemm(out, a, w, *given, None, config) for config in configs
        ]
        times = gpu.in_turns_us(package, calls, weights, BUDGET_US)
        for config, us in zip(configs, times, strict=True):
            tell(p, config, us)
        return times

    products = random.Random(0).sample(products, len(products))
    rows, end = [], time.monotonic() + 60 * minutes
    for p, best in zip(products, modelled(target, products), strict=True):
        if time.monotonic() < end:
            rows.append(timed(p, best, times_us))
    return {"how": "measured", "machine": gpu.machine(), "rows": rows}


def simulated(products: list[Product], target: str) -> dict:
    """Rows of the results by the cycle model; every output is right, or this fails."""
    import simulated_gemm
    import simulated_product
    from compare import assert_product_close

    simulated_product.start()
    package = simulated_product.simulated.functional()

    def play_us(p: Product, config: str) -> float:
        (a, w, scale_a, scale_w), out, _ = simulated_gemm.run(p.m, p.n, p.k, p.kind, config)
        us = simulated_product.last_played().seconds * 1e6
        operands = [
            x.double() if scale is None else package.reference.dequantize(x, scale, block)
            for x, scale, block in ((a, scale_a, 1), (w, scale_w, 128))
        ]
        assert_product_close(out, operands[0] @ operands[1].t(), operands)
        return us

    rows = []
    for p, best in zip(products, modelled(target, products), strict=True):
        rows.append(timed(p, best, lambda p, configs: [play_us(p, config) for config in configs]))
        print(f"{len(rows)} of {len(products)}: {rows[-1]}", file=sys.stderr, flush=True)
    return {"how": "simulated", "machine": target, "rows": rows}


# ---- What comes of it


def gains(rows: list[dict], name: str) -> list[float]:
    return [row["data_parallel"] / row[name] for row in rows]


def behind(rows: list[dict]) -> list[float]:
    """The choice's time over the best of the three."""
    return [row["choice"] / min(row[name] for name in SCHEDULES) for row in rows]


def share(values: Iterable[bool]) -> str:
    values = list(values)
    return f"{sum(values) / len(values):.1%}"


SUMMARY = ["times", "schedule", "products", "quicker", "as quick", "median gain", "most", "worst",
           "at most 3 % behind the best", "furthest behind"]  # fmt: skip


def summary(title: str, rows: list[dict]) -> list[list[str]]:
    """Lines of the table: what each schedule and the choice gain over data-parallel."""
    lines, late = [], behind(rows)
    for name in [*SCHEDULES[1:], "choice"]:
        found = gains(rows, name)
        of_choice = [share(x <= SLOWER for x in late), f"{max(late):.2f}"]
        lines.append(
            [
                title, name.replace("_", "-"), str(len(found)),
                share(g > 1 + EVEN for g in found), share(g >= 1 - EVEN for g in found),
                f"{statistics.median(found):.2f}", f"{max(found):.2f}", f"{min(found):.2f}",
                *(of_choice if name == "choice" else ["", ""]),
            ]
        )  # fmt: skip
    return lines


DIPS = ["times", "M * N", "products", "stream-K: worst gain", "median", "choice: worst gain"]


def dips(title: str, rows: list[dict], count: int = 4) -> list[list[str]]:
    """The values of M * N at which stream-K alone loses most, and what the choice does there."""
    by_size: dict[int, list[dict]] = {}
    for row in rows:
        by_size.setdefault(row["m"] * row["n"], []).append(row)
    median = {size: statistics.median(gains(group, "stream_k")) for size, group in by_size.items()}
    return [
        [
            title, f"{size:,}", str(len(by_size[size])),
            f"{min(gains(by_size[size], 'stream_k')):.2f}", f"{median[size]:.2f}",
            f"{min(gains(by_size[size], 'choice')):.2f}",
        ]
        for size in sorted(median, key=median.get)[:count]
    ]  # fmt: skip


TITLES = {
    "time model": "modelled, by the choice's time model",
    "simulated": "modelled, by the simulator's cycle model",
    "measured": "measured",
}


def saved(name: str) -> list[dict]:
    path = RESULTS / f"{name}_gemm_schedules.json.gz"
    return json.loads(gzip.decompress(path.read_bytes())) if path.exists() else []


def results_of(target: str) -> list[dict]:
    """The time model over the grid, then what is saved of runs."""
    products = grid()
    rows = [
        {**asdict(p), **{name: us for name, (us, _) in best.items()}}
        for p, best in zip(products, modelled(target, products), strict=True)
    ]
    return [{"how": "time model", "machine": target, "rows": rows}, *saved(NAMES[target])]


def groups(results: list[dict]) -> dict[str, list[dict]]:
    """Title -> rows, apart for each kind of operands."""
    found = {}
    for result in results:
        for kind in KINDS:
            rows = [row for row in result["rows"] if row["kind"] == kind]
            if rows:
                operands = "bf16" if kind == "bf16" else "FP8"
                found[f"{TITLES[result['how']]}: {operands}"] = rows
    return found


def document(target: str, results: list[dict]) -> str:
    name, found = NAMES[target], groups(results)
    runs = "; ".join(f"{r['how']}: {r['machine']}, {r['date']}" for r in results if "date" in r)
    return "\n".join(
        [
            f"# gemm's schedules on {name}\n",
            "Written by `python benchmarks/gemm_schedules.py --save`, which says what is compared: "
            "over a grid of M, N and\nK the best data-parallel config, the best split-K, the best "
            "stream-K or hybrid, and what the choice takes.\nGain: data-parallel's time over the "
            f"schedule's; even: within {EVEN:.1%}. Runs: {runs or 'none'}.\nWhat is modelled is "
            "not measured. What it means: [kernels/gemm.md](kernels/gemm.md).\n",
            markdown(SUMMARY, [line for t, rows in found.items() for line in summary(t, rows)]),
            "\nThe values of M * N at which stream-K alone loses most, by its median gain there:\n",
            markdown(DIPS, [line for t, rows in found.items() for line in dips(t, rows)]),
            f"\n![distribution of the gain](plots/{name}_schedules_gain.png)\n",
            f"![gain against M * N](plots/{name}_schedules_size.png)",
            "",
        ]
    )


def draw(target: str, results: list[dict]) -> None:
    """The source's two charts, a panel for each way of timing and kind of operands."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    found = groups(results)
    for chart in ("gain", "size"):
        figure, axes = pyplot.subplots(
            -(-len(found) // 2), 2, figsize=(12, 3.4 * -(-len(found) // 2)), layout="constrained",
            squeeze=False,
        )  # fmt: skip
        for axis, (title, rows) in zip(axes.flat, found.items(), strict=False):
            for name in ("stream_k", "choice"):
                values, label = gains(rows, name), name.replace("_", "-")
                if chart == "gain":
                    axis.hist(
                        [min(max(g, 0.4), 3) for g in values], bins=65, range=(0.4, 3), alpha=0.6,
                        label=label,
                    )  # fmt: skip
                else:
                    sizes = [row["m"] * row["n"] for row in rows]
                    axis.plot(sizes, values, ".", markersize=3, alpha=0.5, label=label)
            if chart == "gain":
                axis.axvline(1, color="k", lw=0.8, ls="--")
                axis.set(xlabel="gain over data-parallel (ends: and beyond)", ylabel="products")
                axis.set_yscale("log")
            else:
                axis.axhline(1, color="k", lw=0.8, ls="--")
                axis.set(xlabel="M * N", ylabel="gain over data-parallel", xscale="log")
            axis.set_title(title, fontsize=10)
            axis.legend(fontsize=8)
        figure.savefig(DOCS / "plots" / f"{NAMES[target]}_schedules_{chart}.png", dpi=80)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=NAMES, help="default: gfx942; sm_90 with --measure")
    parser.add_argument("--measure", action="store_true", help="time the grid on this GPU")
    parser.add_argument("--minutes", type=float, default=30, help="of measuring, at most")
    parser.add_argument("--simulate", type=int, metavar="COUNT", help="run so many products")
    parser.add_argument("--save", action="store_true", help="write results, page and charts")
    parser.add_argument("--quick", action="store_true", help="64 products, to see that it works")
    given = parser.parse_args()
    target = given.target or ("sm_90" if given.measure else "gfx942")
    if given.measure and target != "sm_90":
        parser.error(f"--measure times CUDA GPUs (sm_90), not {target}")
    products, run = grid()[:: 128 if given.quick else 1], None
    if given.measure:
        run = measured(products, target, given.minutes)
    elif given.simulate:
        run = simulated(sample(given.simulate, products), target)
    results = results_of(target)
    if run:
        run["date"] = str(datetime.date.today())
        others = [r for r in saved(NAMES[target]) if r["how"] != run["how"]]
        results = [results[0], *others, run]
    page = document(target, results)
    print(page)
    if given.save:
        if run:
            path = RESULTS / f"{NAMES[target]}_gemm_schedules.json.gz"
            path.write_bytes(gzip.compress(json.dumps(results[1:]).encode(), mtime=0))
        (DOCS / f"{NAMES[target]}_gemm_schedules.md").write_text(page)
        draw(target, results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
