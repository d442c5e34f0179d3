"""Every config of fused_moe on this GPU: held against the reference, then timed against the floor.

    python benchmarks/moe_configs.py [--models NAME,...] [--tokens 1,8,...] [--kinds FP8,...]
                                     [--save]
    python benchmarks/moe_configs.py --unseen [--save]
    python benchmarks/moe_configs.py --orders [--save]
    python benchmarks/moe_configs.py --page      # docs/h200_moe_configs.md, without a GPU

A layer without its router, random weights, uniform random routing, another one in every call. For
each cell a table of the configs, the quickest first, and which of them the choice takes: "error" is
the norm of what a config computes less the reference in float64, over the reference's. What takes
more than three times the quickest is timed once. --minutes ends it early, the table whole.

--unseen: the same of models and numbers of tokens that no rate of the choice was fitted to.

--orders is the study of the order of tiles (docs/results/moe.md) at Mixtral's shapes: each design
in each order, with each split of the second product's K. Bytes are counted, not measured: those
that tiles ask L2 for, and those that memory must give at least. Their difference over the first is
the highest rate of hits that L2 can have.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import math
import re
import statistics
import subprocess
import sys
import time

import gpu
import torch
from gemm_schedules import program
from gpu_report import DOCS, RESULTS, markdown
from result_text import result_text

from moe import GPU_MODELS, GPU_TOKENS, floor_us, random_routings

KINDS = ["FP8", "FP8 blocks", "bf16", "MXFP4", "FP8 with 16-bit inputs",
         "FP8 blocks with 16-bit inputs"]  # fmt: skip
WEIGHT_BYTES = {kind: 1 for kind in KINDS} | {"bf16": 2, "MXFP4": 0.53125}
ORDERS = ["row group_m=1", "column group_m=1", "grouped group_m=2", "grouped group_m=8",
          "expert group_m=16"]  # fmt: skip
SLOW = 3.0  # times the quickest
NAME = "h200_moe_configs"  # of the saved results, and of their page
SAVED = RESULTS / f"{NAME}.json.gz"
SAVED_ORDERS = RESULTS / "h200_moe_orders.json"
UNSEEN_MODELS = {
    "Llama-4-Scout": (5120, 8192, 16, 1),
    "Qwen3-235B-A22B": (4096, 1536, 128, 8),
    "DeepSeek-V2-Lite": (2048, 1408, 64, 6),
    "Phi-3.5-MoE TP2": (4096, 3200, 16, 2),
    "Qwen3-Next-80B": (2048, 512, 512, 10),
}
UNSEEN_TOKENS = [6, 48, 300, 1500, 6000]
PROMPT_AIMS = {"Mixtral-8x7B": 2650, "Qwen3-30B-A3B": 450, "DeepSeek-V3 TP8": 700,
               "GPT-OSS-120B": 850}  # fmt: skip


def has_fp8_rows(kind: str) -> bool:
    return kind.startswith("FP8") and "16-bit" not in kind


def random_weights(kind: str, shape: tuple) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weights of about 1 / sqrt(K), every element its own."""
    experts, n, k = shape
    if kind == "MXFP4":
        w = torch.randint(256, (experts, n, k // 2), dtype=torch.uint8, device="cuda")
        exponent = 127 + round(math.log2(k**-0.5 / 3))
        scale = torch.randint(exponent - 1, exponent + 2, (experts, n, k // 32), device="cuda")
        return w, scale.to(torch.uint8)
    w = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    for one in w:
        one.normal_(0, k**-0.5 if kind == "bf16" else 60)
    if kind == "bf16":
        return w, None
    codes = torch.stack([one.to(torch.float8_e4m3fn) for one in w])
    size = (-(-n // 128), -(-k // 128)) if kind.startswith("FP8 blocks") else (n, 1)
    return codes, (0.5 + torch.rand(experts, *size, device="cuda")) * k**-0.5 / 60


class Layer:
    """One layer's weights, and its results by configs."""

    def __init__(self, package, kind: str, shape: tuple):
        hidden, intermediate, experts, _ = shape
        self.package, self.kind, self.shape = package, kind, shape
        both = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
        (self.gate_up, self.scale_gate_up), (self.down, self.scale_down) = (
            random_weights(kind, one) for one in both
        )

    def operands(self, x, routing):
        return (x, self.gate_up, self.down, *routing, self.scale_gate_up, self.scale_down, None,
                None, "silu", math.inf, False, "16-bit" not in self.kind, False)  # fmt: skip

    def configs(self, x, routing) -> list[str]:
        ops = self.package.functional.ops
        return ops.fused_moe_configs(torch.empty_like(x), *self.operands(x, routing)).splitlines()

    def run(self, out, x, routing, config: str) -> torch.Tensor:
        operands = self.operands(x, routing)
        self.package.functional.ops.fused_moe(out, *operands, config)
        return out

    def reference(self, x, routing) -> torch.Tensor:
        return self.package.reference.fused_moe(
            x, self.gate_up, self.down, *routing, scale_gate_up=self.scale_gate_up,
            scale_down=self.scale_down, quantize_input="16-bit" not in self.kind,
            out_dtype=torch.float32,
        ).double()  # fmt: skip

    def once_us(self, x, routing, config: str) -> float:
        out = torch.empty_like(x)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.run(out, x, routing, config)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def median_us(self, x, routings, config: str, once: float) -> float:
        """Times a config: the median of three replays of some 20 ms each."""
        out, replays = torch.empty_like(x), 3
        routings = routings[: max(4, int(20_000 / once))]
        times = self.package.tuning.timing.graph_us(
            lambda routing: self.run(out, x, routing, config), routings, replays
        )
        return statistics.median(times)


def checked(layer: Layer, x, routing, configs: list[str]) -> dict[str, float]:
    """Each config's error. All tokens run, and those that the reference has time for are compared;
    NaN where an element of out is missing."""
    exact = layer.reference(x[:256], tuple(t[:256].contiguous() for t in routing))
    found = {}
    for config in configs:
        try:
            out = torch.full(x.shape, math.nan, device="cuda")
            layer.run(out, x, routing, config)
            error = (out[:256].double() - exact).norm() / exact.norm()
            complete = out.isfinite().all().item()
            found[config] = error.item() if complete else math.nan
        except RuntimeError as reason:
            print(f"  {config}: {str(reason).splitlines()[0][:160]}")
    return found


def cell(layer: Layer, tokens: int, configs: list[str] | None, rate: float) -> dict:
    hidden, _, experts, k = layer.shape
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    routings = random_routings(tokens, experts, k, "cuda")
    listed = layer.configs(x, routings[0])
    configs = [c for c in (configs or listed) if not c.startswith("plain")]
    errors = checked(layer, x, routings[0], configs)
    once = {c: min(layer.once_us(x, routings[i], c) for i in range(3)) for c in errors}
    best = min(once.values())
    us = {c: layer.median_us(x, routings, c, t) if t < SLOW * best else t for c, t in once.items()}
    touched = statistics.mean(len(ids.unique()) for _, ids in routings)
    found = {"shape": layer.shape, "tokens": tokens, "touched": touched}
    floor = floor_us(
        found, rate / WEIGHT_BYTES[layer.kind], 1979 if has_fp8_rows(layer.kind) else 989
    )
    return {**found, "kind": layer.kind, "chosen": listed[0], "floor": floor,
            "us": {c: round(t, 2) for c, t in us.items()},
            "errors": {c: float(f"{e:.1e}") for c, e in errors.items()}}  # fmt: skip


def show(name: str, found: dict, most: int = 8) -> None:
    order = sorted(found["us"], key=found["us"].get)
    shown = [c for i, c in enumerate(order) if i < most or c == found["chosen"]]
    rows = [
        [("* " if c == found["chosen"] else "") + c, f"{found['us'][c]:,.1f}",
         f"{found['us'][c] / found['floor']:.2f}", f"{found['errors'][c]:.1e}"]
        for c in shown
    ]  # fmt: skip
    print(
        f"\n## {name}, {found['kind']}, {found['tokens']} tokens: floor {found['floor']:,.1f} us\n"
    )
    print(markdown(["config (* the choice's)", "us", "x floor", "error"], rows), flush=True)
    wrong = [c for c, e in found["errors"].items() if not e < 0.03]
    if wrong:
        print("\nWRONG:", *wrong, sep="\n  ", flush=True)


def with_order(config: str, order: str, split_k: int) -> str:
    config = re.sub(r"order=\w+ group_m=\d+", f"order={order}", config)
    return re.sub(r"split_k=\d+", f"split_k={split_k}", config)


def bytes_of(config: str, shape: tuple, counts: list[int], kind: str) -> tuple[float, float]:
    """What a layer's tiles ask L2 for, and what memory must give: both products' operands."""
    hidden, intermediate, _, _ = shape
    block_m, block_n = (int(re.search(rf"{f}=(\d+)", config)[1]) for f in ("block_m", "block_n"))
    w, a = WEIGHT_BYTES[kind], 1 if has_fp8_rows(kind) else 2
    asked = least = 0.0
    for n, k in ((2 * intermediate, hidden), (hidden, intermediate)):
        tiles = sum(-(-c // block_m) for c in counts)
        asked += k * (tiles * n * w + sum(counts) * -(-n // block_n) * a)
        least += k * (sum(c > 0 for c in counts) * n * w + sum(counts) * a)
    return asked, least


def study_orders(package, rate: float, tokens: list[int], kinds: list[str], ends: float) -> list:
    cells, model = [], "Mixtral-8x7B"
    shape = GPU_MODELS[model]
    for kind in kinds:
        layer = Layer(package, kind, shape)
        for count in tokens:
            if time.monotonic() > ends:
                return cells
            x = torch.randn(count, shape[0], device="cuda", dtype=torch.bfloat16)
            routings = random_routings(count, shape[2], shape[3], "cuda")
            bases = {}
            for config in layer.configs(x, routings[0]):
                if config.startswith("plain"):
                    continue
                base = with_order(config, ORDERS[0], 1)
                bases[base] = min(layer.once_us(x, routings[i], base) for i in range(3))
            # Of each design the quickest tile, in every order; K is divided by tiles alone.
            best = {b.split()[0]: b for b in sorted(bases, key=bases.get, reverse=True)}
            configs = [
                with_order(base, order, split)
                for design, base in best.items()
                for order in ORDERS
                for split in ((1, 2, 4) if design == "tiled" else (1,))
            ]
            found = cell(layer, count, configs, rate)
            counts = torch.bincount(routings[0][1].flatten().long(), minlength=shape[2]).tolist()
            rows = []
            for config in sorted(found["us"], key=found["us"].get):
                asked, least = bytes_of(config, shape, counts, kind)
                rows.append([config, f"{found['us'][config]:,.1f}", f"{asked / 1e9:.2f}",
                             f"{least / 1e9:.2f}", f"{1 - least / asked:.0%}",
                             f"{found['errors'][config]:.1e}"])  # fmt: skip
            print(f"\n## {model}, {kind}, {count} tokens: floor {found['floor']:,.1f} us\n")
            header = ["config", "us", "GB asked of L2", "GB of memory, least", "hits, at most",
                      "error"]  # fmt: skip
            print(markdown(header, rows), flush=True)
            cells.append(found)
    return cells


def orders_table(saved: dict) -> str:
    """Makes the study's table: us of each design in each order, without and with K divided. Bytes
    are those that the design's tiles read where all touched experts have as many rows; no order
    changes them."""
    names = [order.removesuffix(" group_m=1").replace(" group_m=", ", ") for order in ORDERS]
    lines = []
    for found in saved["cells"]:
        for design in dict.fromkeys(config.split()[0] for config in found["us"]):

            def us(order: str, split: int, found=found, design=design) -> str:
                for config, time_us in found["us"].items():
                    asked = f"order={order} ", f"split_k={split} "
                    if config.split()[0] == design and all(a in config for a in asked):
                        return f"{time_us:,.1f}"
                return "-"

            title = f"{found['kind']}, {found['tokens']}, {design}"
            splits = (us(ORDERS[0], split) for split in (2, 4))
            config = next(c for c in found["us"] if c.split()[0] == design)
            touched, slots = round(found["touched"]), found["tokens"] * found["shape"][3]
            counts = [-(-(slots - i) // touched) for i in range(touched)]
            asked, least = bytes_of(config, found["shape"], counts, found["kind"])
            lines.append([title, *(us(order, 1) for order in ORDERS), *splits,
                          f"{asked / 1e9:.2f}", f"{least / 1e9:.2f}",
                          f"{1 - least / asked:.0%}"])  # fmt: skip
    header = ["us", *names, f"{names[0]}, split_k 2", f"{names[0]}, split_k 4",
              "GB asked of L2", "GB of memory, least", "L2 hits, at most"]  # fmt: skip
    return markdown(header, lines)


# ---- The page of saved results


def saved_results() -> dict:
    return json.loads(gzip.decompress(SAVED.read_bytes()))


def choices(cells: list[dict]) -> list[str]:
    """The config that moe/cuda/choose.h takes for each cell."""
    kinds = dict(
        zip(KINDS, ("fp8", "block", "bf16", "mxfp4", "fp8_wide", "block_wide"), strict=True)
    )
    asked = "".join(
        f"{c['tokens']} {' '.join(map(str, c['shape']))} {kinds[c['kind']]}\n" for c in cells
    )
    command = [program("moe_choice")]
    done = subprocess.run(command, input=asked, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def regrets(cells: list[dict]) -> list[float]:
    """Compares the choice with the best: its config's time over that of the quickest that was
    timed."""
    return [
        c["us"][config] / min(c["us"].values())
        for c, config in zip(cells, choices(cells), strict=True)
    ]


def aim_us(model: str, tokens: int, floor: float) -> float | None:
    """Returns the time that the project wants; None between 512 tokens and 4,096, where it wants
    none."""
    if tokens > 512:
        return PROMPT_AIMS[model] if tokens == 4096 else None
    return 1.25 * floor + 8 if tokens <= 64 else 1.35 * floor + 10


def merged(saved: dict, cells: list[dict], rate: float, unseen: bool) -> dict:
    """The saved results with these cells, of today, in the place of their like."""
    key = lambda cell: (cell["model"], cell["tokens"], cell["kind"])  # noqa: E731
    today, part = str(datetime.date.today()), "unseen" if unseen else "cells"
    by_key = {key(cell): cell for cell in saved[part]}
    by_key |= {key(cell): {**cell, "date": today} for cell in cells}
    models = list(UNSEEN_MODELS if unseen else GPU_MODELS)
    ordered = sorted(
        by_key.values(),
        key=lambda c: (models.index(c["model"]), c["tokens"], KINDS.index(c["kind"])),
    )
    return {**saved, "machine": gpu.machine(), "read_rate": rate, part: ordered}


def unseen_table(cells: list[dict]) -> str:
    """us of what the choice takes, and that over the quickest of all configs."""
    found: dict[tuple, list[str]] = {}
    for c, config, regret in zip(cells, choices(cells), regrets(cells), strict=True):
        line = found.setdefault((c["model"], c["tokens"]), [f"{c['floor']:,.0f}"])
        line += [f"{c['us'][config]:,.0f}", f"{regret:.3f}"]
    rows = [[f"{model}, {tokens:,}", *line] for (model, tokens), line in found.items()]
    header = ["model, tokens", "floor"]
    for kind in KINDS[:2]:
        header += [kind, "x the quickest"]
    return markdown(header, rows)


def document(saved: dict) -> str:
    cells, rows = saved["cells"], []
    dates: dict[str, set] = {kind: set() for kind in KINDS}
    for cell in cells:
        dates[cell["kind"]].add(cell["date"])
    header = [f"{kind} ({', '.join(sorted(dates[kind]))})" for kind in KINDS]
    taken = {
        (c["model"], c["tokens"], c["kind"]): c["us"][config]
        for c, config in zip(cells, choices(cells), strict=True)
    }
    shown = lambda us: f"{us:,.1f}" if us < 100 else f"{us:,.0f}"  # noqa: E731
    for cell in cells:
        if cell["kind"] != KINDS[0]:
            continue
        name, tokens = cell["model"], cell["tokens"]
        aim = aim_us(name, tokens, cell["floor"])
        times = {kind: taken.get((name, tokens, kind)) for kind in KINDS}
        marked = [
            "-"
            if us is None
            else f"**{shown(us)}**"
            if aim is not None and us <= aim and has_fp8_rows(kind)
            else shown(us)
            for kind, us in times.items()
        ]
        rows.append([f"{name}, {tokens:,}", *marked, shown(cell["floor"]),
                     "-" if aim is None else shown(aim)])  # fmt: skip
    over, unseen = regrets(cells), regrets(saved["unseen"])
    return (
        f"# Experts on {saved['machine']}\n\n"
        "Measured, each column on its day, by `python benchmarks/moe_configs.py --kinds "
        f'"{",".join(KINDS)}" --save`;\nthis page by `--page`. us a layer without its router, '
        "medians of graph replays,\ncold experts, uniform routing, of the config that the choice "
        f"takes. Read rate {saved['read_rate'] / 1e12:.2f} TB/s. Aim: 1.25 times the\n"
        "floor of FP8's bytes + 8 us, at 512 tokens 1.35 times + 10; bold where FP8 keeps it.\n"
        "What bounds it: "
        "[kernels/moe.md](kernels/moe.md).\n\n"
        + markdown(["model, tokens", *header, "FP8 floor", "aim"], rows)
        + f"\n\nOver these {len(cells)} cells the choice's config takes "
        f"{statistics.mean(over):.3f} times the quickest of those timed on average,\n"
        f"{max(over):.2f} times at worst.\n\n"
        "## Models that no rate was fitted to\n\n"
        f"By `--unseen --save`, {saved['unseen'][0]['date']}. The choice's config takes "
        f"{statistics.mean(unseen):.3f} times the quickest on average, {max(unseen):.2f} at "
        "worst.\n\n" + unseen_table(saved["unseen"]) + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", help="names, with commas between; all")
    parser.add_argument("--tokens", help="numbers, with commas between")
    parser.add_argument("--kinds", default="FP8,FP8 blocks", help=f"of {', '.join(KINDS)}")
    parser.add_argument("--unseen", action="store_true", help="models that no rate was fitted to")
    parser.add_argument("--orders", action="store_true", help="the study of the order of tiles")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no cell after these")
    parser.add_argument("--save", action="store_true", help="put the cells into the saved results")
    parser.add_argument("--page", action="store_true", help="write the page of the saved results")
    arguments = parser.parse_args()
    if arguments.page:
        (DOCS / f"{NAME}.md").write_text(document(saved_results()))
        return 0
    torch.manual_seed(0)
    ends = time.monotonic() + 60 * arguments.minutes
    package = gpu.load_package()
    rate = gpu.read_rate(package)
    print(f"{gpu.machine()}; read rate {rate / 1e12:.2f} TB/s")
    kinds = arguments.kinds.split(",")
    shapes, tokens = (
        (UNSEEN_MODELS, UNSEEN_TOKENS) if arguments.unseen else (GPU_MODELS, GPU_TOKENS)
    )
    if arguments.tokens:
        tokens = [int(t) for t in arguments.tokens.split(",")]
    cells = []
    if arguments.orders:
        cells = study_orders(package, rate, tokens, kinds, ends)
    else:
        models = arguments.models.split(",") if arguments.models else list(shapes)
        for name in models:
            for kind in kinds:
                if time.monotonic() > ends:
                    break
                layer = Layer(package, kind, shapes[name])
                for count in tokens:
                    if time.monotonic() > ends:
                        break
                    cells.append({"model": name, **cell(layer, count, None, rate)})
                    show(name, cells[-1])
                del layer
                torch.cuda.empty_cache()
    if arguments.save and arguments.orders:
        saved = {"read_rate": rate, "cells": cells}
        SAVED_ORDERS.write_text(result_text(saved))
    elif arguments.save:
        saved = merged(saved_results(), cells, rate, arguments.unseen)
        SAVED.write_bytes(gzip.compress(json.dumps(saved).encode(), mtime=0))
    wrong = sum(not e < 0.03 for found in cells for e in found["errors"].values())
    print(f"\n{len(cells)} cells; {wrong} configs were wrong")
    return wrong > 0


if __name__ == "__main__":
    sys.exit(main())
