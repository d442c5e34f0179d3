"""The tile times by which gemm chooses on NVIDIA (gemm/cuda/time_model.h): measured, and fitted.

    python benchmarks/gemm_tiles.py measure [--seconds 400]     # on a GPU of sm_90
    python benchmarks/gemm_tiles.py fit                         # prints the table and its regret
    python benchmarks/gemm_tiles.py judge [--device h100]       # the regret of time_model.h
    python benchmarks/gemm_tiles.py measure --kinds weights,weights_block
    python benchmarks/gemm_tiles.py fit --kinds weights,weights_block

measure times every config that gemm_configs lists for products in random order, until the time is
up, then the best of each schedule by the model for gemm_schedules.py's 8,192 products, and writes
results/<device>_gemm_tiles.csv.gz. A config is timed by itself, by its quickest replay, and in
turns with all others, when the GPU runs without a pause and its clock falls: some tiles lose more
by that, and the geometric mean of the two counts. Weights rotate over 150 MB, more than L2 holds.
"apart" are the times of gemm_schedules.py, in turns alone. (Of "weights" the saved times are of
configs by themselves alone.)

fit takes the results of all CARDS together. Memory's rate is a share of what the card could read,
and L2's follows its size, for a card has as many slices of it as it has memory for. It finds, for
each tile and cluster, the times of a chunk of K and of a tile's end, and the constants of the model
in time_model.h. It minimises the regret: how much longer the pick takes than the best config that
was measured. Of either kind of times a tenth of the products, kept out of the fit, judges.

--kinds: of these operands alone ("weights" are FP8 of a 16-bit a). Their times take the place of
those that are saved; only their tiles are fitted, by the constants as they are.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import random
import re
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).resolve().parent / "results"
SHAPES = [(4096, 7168), (28672, 4096), (7168, 2048), (8192, 8192), (5000, 4208), (2112, 7168),
          (24576, 1536), (7168, 18432), (6144, 4096), (1280, 8192), (3072, 3072),
          (11008, 2560)]  # fmt: skip
ROWS = [33, 64, 96, 128, 192, 256, 400, 512, 1024, 2048, 4096]
KINDS = ("row", "block", "bf16")
WIDENED = ("weights", "weights_block")  # FP8 weights of a bfloat16 a
COLUMNS = ("kind", "m", "n", "k", "us", "block_m", "block_n", "swap_ab", "cluster_m", "cluster_n",
           "schedule", "split_k", "apart")  # fmt: skip
BUDGET_US = 700  # of launches for one time

# What a card could read, by its memory's clock and bus, megabytes a microsecond; megabytes of L2.
CARDS = {"h200": (4.917, 62.9), "h100": (3.352, 52.4)}
# Of the model in time_model.h: microseconds; shares of these rates.
START = {"launch": 1.2, "memory": 0.85, "l2": 0.15, "combine": 2.0, "kilobyte": 0.045,
         "streamed": 2.4, "idle": 0.14, "unaligned_l2": 0.6, "unaligned_fp8": 0.09, "missed": 0.8,
         "l2_holds": 1.4, "apart": 1.0, "l2_power": 0.9, "contributor": 0.15,
         "heat": 0.02}  # fmt: skip
FITTED = {
    "launch": 1.741,
    "memory": 0.8043,
    "l2": 0.1356,
    "combine": 0.8441,
    "kilobyte": 0.04261,
    "streamed": 2.759,
    "idle": 0.2684,
    "unaligned_l2": 0.5829,
    "unaligned_fp8": 0.1712,
    "missed": 0.8769,
    "l2_holds": 1.644,
    "apart": 1.165,
    "l2_power": 0.7672,
    "contributor": 0.1257,
    "heat": 0.02121,
}  # time_model.h has
NORM = 4  # how products, L2 and memory are joined: what nearly weighs as much adds to it
OF_STREAMED = ("missed", "l2_holds")  # few products tell them: by the regret alone
CHUNKS = np.exp(np.linspace(np.log(0.12), np.log(1.3), 48))
ENDS = np.array([0, 0.5, 1, 1.5, 2, 2.7, 3.5, 4.5, 6])
CLUSTERS = (("1", "1"), ("2", "1"), ("1", "2"))  # of blocks along m, along n
SMS = 132


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ---- measuring -----------------------------------------------------------------------------------


def fields(config: str) -> dict[str, str] | None:
    """Reads a config of the warpgroup kernel: name of a field -> value; None for any other
    design."""
    design, *rest = config.split()
    return dict(field.split("=") for field in rest) if design == "warpgroup" else None


def saved_rows(device: str) -> list[dict]:
    path = RESULTS / f"{device}_gemm_tiles.csv.gz"
    if not path.exists():
        return []
    with gzip.open(path, "rt", newline="") as file:
        return [{**row, "card": device} for row in csv.DictReader(file)]


def measure(seconds: float, kinds: list[str]) -> None:
    import gemm_schedules
    import gpu

    device = gpu.device_name()
    kept = [row for row in saved_rows(device) if row["kind"] not in kinds] if kinds else []
    with gzip.open(RESULTS / f"{device}_gemm_tiles.csv.gz", "wt", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(kept)

        def tell(product, config: str, us: float, apart: int = 1) -> None:
            if found := fields(config):
                row = {**vars(product), "us": f"{us:.2f}", "apart": apart, **found}
                writer.writerow(row)

        measure_all_configs(seconds, kinds or KINDS + WIDENED, lambda *row: tell(*row, apart=0))
        both = [kind for kind in gemm_schedules.KINDS if not kinds or kind in kinds]
        if both:
            gemm_schedules.measured(gemm_schedules.grid(both), "sm_90", 30, tell)


def measure_all_configs(seconds: float, kinds: list[str], tell: Callable) -> None:
    import gemm_schedules
    import gpu
    import torch

    import gemm

    package = gpu.load_package()
    ops = package._ops.ops
    products = [(kind, m, n, k) for n, k in SHAPES for m in ROWS for kind in kinds]
    random.Random(1).shuffle(products)
    until = time.monotonic() + seconds
    for kind, m, n, k in products:
        of = {"weights": "row", "weights_block": "block"}.get(kind, kind)
        a, weights, scale_a, scale_w = gemm.operands(of, m, n, k)
        if kind in WIDENED:
            a, scale_a = a.bfloat16(), None
        weights = weights[: max(1, ceil_div(gemm_schedules.ROTATED_BYTES, weights[0].nbytes))]
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        listed = ops.gemm_configs(out, a, weights[0], scale_a, scale_w, False).splitlines()
        configs = [config for config in listed if fields(config)]

        def call(config, out=out, a=a, scales=(scale_a, scale_w)):
            return lambda w: ops.gemm(out, a, w, *scales, None, config)

        calls = [call(config) for config in configs]
        cool = [min(package.tuning.timing.graph_us(call, weights, 3)) for call in calls]
        hot = gpu.in_turns_us(package, calls, weights, BUDGET_US * len(calls))
        for config, *both in zip(configs, cool, hot, strict=True):
            us = statistics.geometric_mean(both)
            tell(gemm_schedules.Product(m, n, k, kind), config, us)
        print(kind, m, n, k, flush=True)
        if time.monotonic() > until:
            return


# ---- the model of time_model.h -------------------------------------------------------------------


def geometry(row: dict) -> tuple:
    """Chunks of the busiest worker, tiles that it ends, megabytes of memory, those of a and of w
    that tiles ask L2 for, and how many tiles ask for the same; megabytes that streamed tiles ask
    of memory again, kilobytes of a tile's sums, its contributors, how tiles are shared (0, 1 split,
    2 streamed), the share of busy SMs, whether K ends in a line of 128 bytes, whether
    gemm_schedules.py timed it; the card's memory rate and L2."""
    m, n, k = (int(row[name]) for name in ("m", "n", "k"))
    block_m, block_n, cluster_m, cluster_n, split = (
        int(row[name]) for name in ("block_m", "block_n", "cluster_m", "cluster_n", "split_k")
    )
    k_bytes = k * (1 if row["kind"] in ("row", "block") else 2)
    w_bytes = 0.5 if row["kind"] in WIDENED else 1  # of an element, for one of a's
    chunks = ceil_div(k_bytes, 128)
    workers = SMS // (cluster_m * cluster_n)
    tiles = ceil_div(m, block_m * cluster_m) * ceil_div(n, block_n * cluster_n)
    megabytes = ((m + n * w_bytes) * k_bytes + m * n * 2) / 1e6
    of_a = tiles * cluster_m * min(block_m, m) * k_bytes / 1e6
    of_w = tiles * cluster_n * min(block_n, n) * w_bytes * k_bytes / 1e6
    asked = (of_a, ceil_div(n, block_n * cluster_n), of_w, ceil_div(m, block_m * cluster_m))
    unaligned = float(k_bytes % 128 != 0)
    kilobytes = block_m * block_n * 4 / 1000
    of_product = (unaligned, float(row["apart"]), *CARDS[row["card"]])
    if row["schedule"] == "hybrid" and tiles % workers != 0:
        whole = max(0, tiles // workers - 1) * workers
        taking_part = min(workers, (tiles - whole) * min(chunks, 30))
        busiest = np.ceil(whole / workers * chunks + (tiles - whole) * chunks / taking_part)
        busy = 1.0 if whole else min(1.0, taking_part / workers)
        ends = np.ceil(whole / workers) + 1
        again = (of_a + of_w) * (tiles - whole) / tiles
        return (busiest, ends, megabytes, *asked, again, kilobytes, 0, 2, busy, *of_product)
    units = tiles * split
    ends = ceil_div(units, workers)
    shared = 1 if split > 1 else 0
    busy = min(1.0, units / workers)
    busiest = ends * ceil_div(chunks, split)
    return (busiest, ends, megabytes, *asked, 0.0, kilobytes, split, shared, busy, *of_product)


class Fit:
    def __init__(self, rows: list[dict]) -> None:
        self.rows = rows
        self.facts = np.array([geometry(row) for row in rows])
        self.us = np.array([float(row["us"]) for row in rows])
        self.kinds = np.array([row["kind"] for row in rows])
        self.tiles = self._groups("kind", "block_m", "block_n", "swap_ab", "cluster_m", "cluster_n")
        self.fitted: dict[str, np.ndarray] = {}  # by "apart": configs of a product, -1 behind them
        self.judged: dict[str, np.ndarray] = {}
        # Configs near the best of their product are those whose times matter.
        self.weight = np.zeros(len(rows))
        products = self._groups("apart", "card", "kind", "m", "n", "k")
        for apart, share in (("0", 1.0), ("1", 0.3)):
            names = sorted(name for name in products if name[0] == apart)
            if not names:
                continue
            random.Random(2).shuffle(names)
            held = len(names) // 10
            self.judged[apart] = padded([products[name] for name in names[:held]])
            self.fitted[apart] = padded([products[name] for name in names[held:]])
            for name in names[held:]:
                group = products[name]
                self.weight[group] = share * np.exp(
                    -3 * (self.us[group] / self.us[group].min() - 1)
                )

    def _groups(self, *names: str) -> dict[tuple, np.ndarray]:
        found: dict[tuple, list[int]] = {}
        for i, row in enumerate(self.rows):
            found.setdefault(tuple(str(row[name]) for name in names), []).append(i)
        return {key: np.array(group) for key, group in found.items()}

    def times(self, group: np.ndarray, p: dict, chunk, end):
        """`chunk` and `end` are numbers, or grids along further axes."""
        shape = (-1, *(1,) * np.ndim(chunk))
        facts = (column.reshape(shape) for column in self.facts[group].T)
        (busiest, ends, megabytes, of_a, ask_a, of_w, ask_w, again, kilobytes, split, shared, busy,
         unaligned, apart, memory, l2) = facts  # fmt: skip
        slower = p["unaligned_fp8"] * np.isin(self.kinds[group], ("row", "block"))
        chunk = chunk * (1 + unaligned * slower.reshape(shape)) * (busiest / 64) ** p["heat"]
        combine = p["combine"] + kilobytes * p["kilobyte"] + split * p["contributor"]
        streamed = (p["combine"] + 1.5 * kilobytes * p["kilobyte"]) * p["streamed"]
        extra = np.where(shared == 1, combine, np.where(shared == 2, streamed, 0.0))
        # Workers are at different places of K, so that L2 has an operand for one of them alone.
        beyond = np.clip(megabytes / (p["l2_holds"] * l2) - 1, 0, 1)
        # What several SMs ask for at about the same time is partly served by one read.
        once = p["l2_power"] - 1
        l2_megabytes = of_a * ask_a**once + of_w * ask_w**once
        terms = (
            busiest * chunk * (1 - p["idle"] * (1 - busy)),
            (megabytes + again * beyond * p["missed"]) / (p["memory"] * memory),
            l2_megabytes * (1 + unaligned * p["unaligned_l2"]) / (p["l2"] * l2),
        )
        fed = sum(term**NORM for term in terms) ** (1 / NORM)
        launch = p["launch"] + apart * p["apart"]
        return (launch + fed + ends * end + extra).squeeze()

    def solve(self, p: dict) -> dict[tuple, tuple[float, float]]:
        """The best times of a chunk and of an end for each tile."""
        found = {}
        chunk, end = np.meshgrid(CHUNKS, ENDS, indexing="ij")
        for tile, group in self.tiles.items():
            predicted = self.times(group, p, chunk, end).reshape(len(group), *chunk.shape)
            error = np.abs(np.log(predicted / self.us[group][:, None, None]))
            cost = (np.minimum(error, 0.6) * self.weight[group][:, None, None]).sum(0)
            best = np.unravel_index(cost.argmin(), cost.shape)
            found[tile] = (float(chunk[best]), float(end[best]))
        return found

    def predict(self, p: dict, tiles: dict) -> np.ndarray:
        predicted = np.zeros(len(self.rows))
        for tile, group in self.tiles.items():
            predicted[group] = self.times(group, p, *tiles[tile])
        return predicted

    def regret(self, predicted: np.ndarray, products: np.ndarray) -> np.ndarray:
        there = products >= 0
        pick = np.where(there, predicted[products], np.inf).argmin(1)
        us = np.where(there, self.us[products], np.inf)
        return us[np.arange(len(us)), pick] / us.min(1)

    def cost(self, predicted: np.ndarray) -> float:
        error = np.average(np.abs(np.log(predicted / self.us)), weights=self.weight)
        cost = 0.15 * error
        for products in self.fitted.values():
            over = self.regret(predicted, products) - 1
            cost += over.mean() + 0.2 * np.sqrt((over**2).mean())
        return cost

    def constants(self, seconds: float, p: dict) -> dict:
        """Fits the constants by trial: nudges one at a time from `p`, and solves each tile's times
        anew."""
        chance = random.Random(3)

        def cost(tried: dict) -> float:
            predicted = self.predict(tried, self.solve(tried))
            error = np.minimum(np.abs(np.log(predicted / self.us)), 0.6)
            return np.average(error, weights=self.weight) + 0.5 * self.cost(predicted)

        best, step = cost(p), dict.fromkeys(p, 0.25)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            name = chance.choice([name for name in p if name not in OF_STREAMED])
            factor = float(np.exp(chance.choice((-1, 1)) * step[name] * chance.uniform(0.3, 1)))
            tried = {**p, name: p[name] * factor}
            if (now := cost(tried)) < best:
                best, p = now, tried
                step[name] = min(0.5, step[name] * 1.3)
            else:
                step[name] = max(0.03, step[name] * 0.85)
        return p

    def run(self, seconds: float, start: dict = START, fixed: bool = False) -> tuple[dict, dict]:
        """Fits constants and tiles' times from `start`: first the constants by the error, then both
        by how much slower the choice is than the best config; with `fixed` the tiles' times
        alone."""
        chance = random.Random(7)
        p = dict(start) if fixed else self.constants(seconds / 2, dict(start))
        tiles = self.solve(p)
        predicted = self.predict(p, tiles)
        best = self.cost(predicted)
        until = time.monotonic() + (seconds if fixed else seconds / 2)
        while time.monotonic() < until:
            tried, moved = p, tiles
            if not fixed and chance.random() < 0.15:
                tried = dict(p)
                for name in chance.sample(list(p), chance.choice((1, 1, 2))):
                    tried[name] *= float(np.exp(chance.gauss(0, 0.1)))
                tried["idle"] = min(tried["idle"], 0.8)
                tried["missed"] = min(tried["missed"], 1.0)
                again = self.predict(tried, tiles)
            else:
                tile = chance.choice(list(tiles))
                chunk, end = tiles[tile]
                chunk *= float(np.exp(chance.gauss(0, 0.06)))
                moved = {**tiles, tile: (chunk, max(0, end + chance.gauss(0, 0.4)))}
                again = predicted.copy()
                again[self.tiles[tile]] = self.times(self.tiles[tile], p, *moved[tile])
            if (cost := self.cost(again)) <= best:
                best, predicted, p, tiles = cost, again, tried, moved
        return p, tiles


def padded(groups: list[np.ndarray]) -> np.ndarray:
    found = np.full((len(groups), max(map(len, groups))), -1)
    for line, group in zip(found, groups, strict=True):
        line[: len(group)] = group
    return found


def kept_tiles() -> dict[tuple, tuple[float, float]]:
    """The times of a chunk and of an end that time_model.h has for the tiles of tiles.h, by kind,
    tile and cluster."""
    tables = {"row": "Fp8", "block": "Fp8Block", "bf16": "16Bit", "weights": "Widened",
              "weights_block": "WidenedBlock"}  # fmt: skip
    folder = RESULTS.parent.parent / "gemm" / "cuda"
    tiles, times = ((folder / name).read_text() for name in ("tiles.h", "time_model.h"))

    def entries(source: str, table: str, entry: str) -> list[tuple[str, ...]]:
        return re.findall(entry, re.search(table + r"\[\] = \{(.*?)\};", source, re.DOTALL)[1])

    found = {}
    for kind, name in tables.items():
        both = zip(
            entries(tiles, f"k{name}Tiles", r"\{(\d+), (\d+), (\w+)\}"),
            entries(times, f"k{name}Times", r"\{\{([^{]*?)\}, \{(.*?)\}\}"),
            strict=True,
        )
        for (block_m, block_n, swapped), (chunks, ends) in both:
            tile = kind, block_m, block_n, str(int(swapped == "true"))
            for cluster, *us in zip(CLUSTERS, chunks.split(","), ends.split(","), strict=True):
                found[(*tile, *cluster)] = tuple(map(float, us))
    return found


def report(fit: Fit, p: dict, tiles: dict) -> str:
    lines = [", ".join(f"{name} {value:.4g}" for name, value in p.items())]
    for kind in dict.fromkeys(fit.kinds):
        lines.append(f"{kind}:")
        for tile in dict.fromkeys(tile[:4] for tile in kept_tiles() if tile[0] == kind):
            both = [tiles.get((*tile, *cluster), (0.0, 0.0)) for cluster in CLUSTERS]
            chunks, ends = (", ".join(f"{pair[i]:.{4 - i}f}" for pair in both) for i in (0, 1))
            name = f"{tile[1]} x {tile[2]}{', swapped' if tile[3] == '1' else ''}"
            lines.append(f"    {{{{{chunks}}}, {{{ends}}}}},  // {name}")
    return "\n".join([*lines, judgement(fit, fit.predict(p, tiles))])


def judgement(fit: Fit, predicted: np.ndarray) -> str:
    lines = []
    for name, by_kind in (("fitted", fit.fitted), ("judged", fit.judged)):
        for apart, products in by_kind.items():
            regret = fit.regret(predicted, products)
            of = "the best of each schedule" if apart == "1" else "every config"
            lines.append(
                f"{name}, {of}: {len(products)} products, the pick takes {regret.mean():.3f} of "
                f"the best on average, at most {np.quantile(regret, 0.95):.3f} in 95 %, "
                f"{regret.max():.2f} at worst"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("measure", "fit", "judge"))
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--device", help=f"whose results count, of {', '.join(CARDS)}; all")
    parser.add_argument("--kinds", help=f"of {', '.join(KINDS + WIDENED)}, with commas between")
    arguments = parser.parse_args()
    kinds = arguments.kinds.split(",") if arguments.kinds else []
    if arguments.step == "measure":
        measure(arguments.seconds, kinds)
        return 0
    cards = [arguments.device] if arguments.device else list(CARDS)
    rows = [row for card in cards for row in saved_rows(card) if row["kind"] in (kinds or KINDS)]
    fit = Fit(rows)
    if arguments.step == "judge":
        tiles = kept_tiles()
        print(judgement(fit, fit.predict(FITTED, {name: tiles[name] for name in fit.tiles})))
        return 0
    print(report(fit, *fit.run(arguments.seconds, FITTED if kinds else START, bool(kinds))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
