"""Makes the tables of results in the pages from what the benchmarks have saved.

Each of TABLES makes one from results/*.json; all others are results/tables/NAME.csv, as they were
printed, under lines that say by what, where and when. pages.py puts them into the pages.

Longer than 500 lines, because each table is some lines of its own.
"""

from __future__ import annotations

import csv
import functools
import json
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "benchmarks"))

import gemm_schedules  # noqa: E402
import moe_configs  # noqa: E402
import serving  # noqa: E402
from gpu_report import Case, read_cases  # noqa: E402

import gemm  # noqa: E402
import moe  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
CALIBRATION = ROOT / "simulator" / "calibration"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns of numbers are set right."""
    columns = zip(*rows, strict=True)
    right = [all(is_number(cell) for cell in column if cell) for column in columns]
    rule = ["---:" if number else "---" for number in right]
    lines = [[f"| {cell}" if cell else "|" for cell in line] for line in [header, rule, *rows]]
    return "".join(f"{' '.join(line)} |\n" for line in lines)


def is_number(cell: str) -> bool:
    """Whether a cell begins with one; a dash stands for what was not measured."""
    return re.match(r"[+-]?\d|-$", cell) is not None


@functools.cache
def saved(name: str) -> dict:
    return json.loads((RESULTS / f"{name}.json").read_text())


def printed(name: str) -> tuple[list[str], list[list[str]]]:
    """Header and rows of results/tables/NAME.csv."""
    lines = (RESULTS / "tables" / f"{name}.csv").read_text().splitlines()
    header, *rows = csv.reader(line for line in lines if not line.startswith("#"))
    return header, rows


def save_printed(name: str, source: str, header: Sequence[str], rows: Sequence) -> None:
    """Writes results/tables/NAME.csv. source: what printed it, where and when."""
    with open(RESULTS / "tables" / f"{name}.csv", "w", newline="") as file:
        file.writelines(f"# {line}\n" for line in source.splitlines())
        csv.writer(file, lineterminator="\n").writerows([header, *rows])


def save_beside(name: str, source: str, header: Sequence[str], rows: Sequence, device: str) -> None:
    """Saves a table as :func:`save_printed` does, and keeps the rows and sources of other devices.
    A row begins with its device."""
    path, others, sources = RESULTS / "tables" / f"{name}.csv", [], []
    if path.exists():
        sources = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
        sources = [line for line in sources if not line.startswith((device, "python "))]
        others = [row for row in printed(name)[1] if not row[0].startswith(device)]
    save_printed(name, "\n".join([*source.splitlines(), *sources]), header, [*others, *rows])


def begin_alike(one: str, other: str) -> int:
    """Letters."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))


def save_rows(name: str, source: str, header: Sequence[str], rows: Sequence) -> None:
    """Saves rows in the place of those of the same names, a new one behind those whose names begin
    most alike, and keeps all others."""
    path, kept, sources = RESULTS / "tables" / f"{name}.csv", [], []
    if path.exists():
        sources = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
        kept = printed(name)[1]
    for row in rows:
        names = [other[0] for other in kept]
        if row[0] in names:
            kept[names.index(row[0])] = row
        else:
            alike = [begin_alike(row[0], other) for other in names]
            kept.insert(max(range(len(kept)), key=lambda i: (alike[i], i), default=-1) + 1, row)
    lines = dict.fromkeys([*sources, *source.splitlines()])
    save_printed(name, "\n".join(lines), header, kept)


# ---- Tables that are made of results


def decode_table(model: str, names: dict[str, str]) -> str:
    """Tokens per second of each candidate by batch, and milliseconds of a prompt."""
    results = saved(model)
    rows = []
    for candidate, title in names.items():
        by_batch = results["candidates"][candidate]
        speeds = [f"{by_batch[str(b)]['tokens_per_second']:,.0f}" for b in results["batches"]]
        rows.append([title, *speeds, f"{by_batch['1']['prefill_ms']:.1f}"])
    return markdown(["", *(f"batch {b}" for b in results["batches"]), "prompt"], rows)


LLAMA = {
    "bfloat16, eager": "bfloat16, eager",
    "bfloat16, torch.compile": "bfloat16, torch.compile",
    "FP8 _scaled_mm per token, torch.compile":
        "FP8 by `torch._scaled_mm`, scales per token, torch.compile",
    "FP8 _scaled_mm per tensor, torch.compile":
        "FP8 by `torch._scaled_mm`, scales per tensor, torch.compile",
    "rocm-kernels, eager": "these kernels, eager",
    "rocm-kernels, CUDA graph": "these kernels, the step captured in a CUDA graph",
    "rocm-kernels, torch.compile": "these kernels, torch.compile",
}  # fmt: skip
QWEN3_MOE = {
    "bfloat16, CUDA graph": "bfloat16, transformers' `grouped_mm`",
    "FP8 _scaled_mm per token, CUDA graph":
        "FP8 by `torch._scaled_mm` and `_scaled_grouped_mm`, quantising compiled",
    "rocm-kernels, CUDA graph": "these kernels",
}  # fmt: skip


def speed(model: str, candidate: str, batch: int) -> str:
    return f"{saved(model)['candidates'][candidate][str(batch)]['tokens_per_second']:,.0f}"


def case(op: str, m: int, n: int = 0) -> Case:
    """Finds a case among the H200's results."""
    found = [c for c in read_cases(saved("h200")) if (c.op, c.m, c.n) == (op, m, n)]
    return found[0]


def microseconds(us: float) -> str:
    """Writes a time with three figures."""
    digits = 2 if us < 10 else 1 if us < 100 else 0
    return f"{us:,.{digits}f} us"


def milliseconds(us: float) -> str:
    return f"{us / 1e3:.2f} ms" if us < 1e4 else f"{us / 1e3:.1f} ms"


def experts_us(tokens: int, name: str, model: str = "Qwen3-30B-A3B") -> float:
    cells = saved("h200_moe")["cells"]
    return next(c["us"][name] for c in cells if (c["model"], c["tokens"]) == (model, tokens))


def gemm_cell(m: int, n: int, k: int, kind: str) -> dict:
    cells = saved("h200_gemm")["cells"]
    return next(c for c in cells if (c["m"], c["n"], c["k"], c["kind"]) == (m, n, k, kind))


def cpu_us(name: str, candidate: str) -> float:
    return next(row["times_us"][candidate] for row in saved("cpu")["rows"] if row["case"] == name)


def readme_measured() -> str:
    """README's choice of what was measured."""
    rows = []

    def add(title: str, count: int | str, ours: str, beside: str) -> None:
        rows.append(["" if any(row[0] == title for row in rows) else title, str(count), ours,
                     beside])  # fmt: skip

    generated = {row[0]: row[1] for row in printed("generate")[1]}
    for batch in (1, 32):
        ours, bf16, before = (
            generated[f"NVIDIA H200, measured: llama-8b, batch {batch}, context 512: {side}"]
            for side in ("use_decode_step, FP8 cache", "bfloat16, CUDA graph", "as it was")
        )
        beside = f"bfloat16 in a CUDA graph {bf16}; without `use_decode_step` {before}"
        title = "a Llama of 8 billion parameters decodes by `generate`, FP8 cache, H200"
        add(title, batch, f"{ours} tokens/s", beside)
    prompts = {row[0]: row[1] for row in printed("prompt")[1]}
    for tokens in ("512", "2,048"):
        ours, bf16, before = (
            prompts[f"NVIDIA H200, measured: llama-8b, 1 x {tokens}: {side}"]
            for side in ("use_decode_step", "bfloat16, eager", "as it was")
        )
        beside = f"bfloat16, eager {bf16} ms; without `use_decode_step` {before} ms"
        add("that Llama's prompt, to the first token of an answer", tokens, f"{ours} ms", beside)
    for batch in (1, 64):
        bf16, fp8, _ = (speed("h200_experts_model", name, batch) for name in QWEN3_MOE)
        where = f"qwen3-30b-a3b, batch {batch}, context 512"
        ours = generated[f"NVIDIA H200, measured: {where}: use_decode_step, FP8 cache"]
        title = "a Qwen3-MoE of 30 billion parameters decodes by `generate`, FP8 cache, H200"
        beside = f"CUDA graph, context 128: bfloat16 {bf16}, FP8 {fp8}"
        add(title, batch, f"{ours} tokens/s", beside)
    for tokens in (1, 64, 4096):
        of = functools.partial(experts_us, tokens)
        vllm = min(of("vLLM FP8"), of("vLLM FP8 blocks"))
        wide = f", bfloat16 {microseconds(of('vLLM bf16'))}" if of("vLLM bf16") < vllm else ""
        torchs = microseconds(of("FP8 _scaled_grouped_mm"))
        add("`fused_moe` FP8, a layer of Qwen3-30B-A3B, H200", tokens, microseconds(of("FP8")),
            f"vLLM's Triton experts: FP8 {microseconds(vllm)}{wide}; "
            f"torch's grouped products: FP8 {torchs}")  # fmt: skip
    demo = {row[0]: f"{float(row[1]):.0f}" for row in printed("demo")[1]}
    bf16, step = demo["bfloat16, transformers' eager"], demo["`dynamic` with `use_decode_step`"]
    add("SmolLM2-135M decodes, CPU (`make demo`)", 1, f"{step} tokens/s", f"bfloat16, eager {bf16}")
    norm = "`rmsnorm_fp8`, 16384 columns, H200"
    product = "`skinny_gemm` FP8, {} x 16384, H200"
    for op, count, n, title, peers in [
        ("rmsnorm_fp8", 1, 0, norm, ["FlashInfer", "torch.compile"]),
        ("rmsnorm_fp8", 2048, 0, norm, ["FlashInfer", "torch.compile"]),
        ("swiglu_fp8", 2048, 0, "`swiglu_fp8`, 16384 to 8192 columns, H200",
         ["torch.compile", "vLLM"]),
        ("skinny_gemm", 8, 2304, product, ["cuBLASLt FP8"]),
        ("skinny_gemm", 8, 13312, product, ["cuBLASLt FP8"]),
        ("skinny_gemm", 64, 13312, product, ["cuBLASLt FP8"]),
    ]:  # fmt: skip
        times = case(op, count, n).times
        add(title.format(n), count, microseconds(times["rocm-kernels"].median),
            ", ".join(f"{peer} {microseconds(times[peer].median)}" for peer in peers))  # fmt: skip
    cell = gemm_cell(128, 4096, 7168, "row")
    add("`gemm` FP8, scales per row, 4096 x 7168, H200", 128, microseconds(cell["ours"]),
        f"`torch._scaled_mm` {microseconds(cell['library'])}")  # fmt: skip
    linear = "F.linear bf16"
    for title, count, name, ours, peer, peer_title in [
        ("`rmsnorm_fp8`, 2048 x 4096, CPU", 2048, "residual + RMSNorm + FP8, 2048 x 4096",
         "rocm-kernels", "torch.compile", "torch.compile"),
        ("`skinny_gemm` FP8, 16384 x 6656, CPU", 1, "M 1, N 16384, K 6656",
         "rocm-kernels FP8", linear, "bfloat16 `F.linear`"),
        ("`skinny_gemm` FP8, 16384 x 6656, CPU", 64, "M 64, N 16384, K 6656",
         "rocm-kernels FP8", linear, "bfloat16 `F.linear`"),
        ("`gemm` FP8, 4096 x 4096, CPU", 128, "M 128, N 4096, K 4096: gemm",
         "gemm", linear, "bfloat16 `F.linear`"),
    ]:  # fmt: skip
        add(title, count, milliseconds(cpu_us(name, ours)),
            f"{peer_title} {milliseconds(cpu_us(name, peer))}")  # fmt: skip
    return markdown(["", "rows", "rocm-kernels", "beside it"], rows)


def calibrated() -> dict[str, float]:
    """What the cycle model says of each case of the calibration's times."""
    with open(CALIBRATION / "points.csv", newline="") as file:
        found = csv.DictReader(file)
        return {r["case"]: float(r["modelled"]) for r in found if r["quantity"] == "time, us"}


def readme_modelled() -> str:
    """README's choice of what was modelled for an MI300X, beside published times."""

    def of_rows(op: str) -> tuple[str, str, str]:
        row = next(row for row in printed(f"{op}_mi300x")[1] if row[0] == "2048")
        return row[7].split()[0], row[9], row[11]

    rows = []
    products = {(r[0], r[1]): r for r in printed("skinny_gemm_mi300x")[1]}
    for shape in ("2304 x 16384", "13312 x 16384"):
        row = products["8", shape]
        played = calibrated().get(f"FP8 product 8 x {shape}, ours")
        rows.append([f"`skinny_gemm` FP8, {shape}", "8", f"{row[7]} us",
                     f"{played:.1f} us" if played else "", f"{row[9]} us"])  # fmt: skip
    for op, title, note in [
        ("rmsnorm_fp8", "`rmsnorm_fp8`, 16384 columns", ""),
        ("swiglu_fp8", "`swiglu_fp8`, 16384 to 8192 columns",
         ", [from cache](docs/results/swiglu_fp8.md#mi300x-counted-and-modelled)"),
    ]:  # fmt: skip
        quick, cycles, published = of_rows(op)
        rows.append([title, "2048", f"{float(quick):.1f} us", f"{float(cycles):.1f} us",
                     f"{published} us{note}"])  # fmt: skip
    header = ["", "rows", "rocm-kernels, quick bound", "cycle model", "hf-rocm-kernels, published"]
    return markdown(header, rows)


GENERATE = {
    "bfloat16, CUDA graph": "bfloat16, CUDA graph",
    "as it was": "as it was",
    "use_decode_step": "use_decode_step",
    "use_decode_step, FP8 cache": "and FP8 cache",
    "use_decode_step, FP8 cache, FP8 head": "and FP8 head",
}


def by_case(name: str, device: str) -> dict[str, dict[str, list[str]]]:
    """Rows of results/tables/NAME.csv by case and way; a row begins with "device: case: way"."""
    cases: dict[str, dict[str, list[str]]] = {}
    for what, *cells in printed(name)[1]:
        measured_on, case, way = what.split(": ")
        if measured_on == device:
            cases.setdefault(case, {})[way] = cells
    return cases


def generate_h200() -> str:
    """Tokens per second of each way to decode, and the step of the last of them."""
    rows = []
    for case, ways in by_case("generate", "NVIDIA H200, measured").items():
        speeds = [ways[way][0] if way in ways else "" for way in GENERATE]
        last = [way for way in GENERATE if way in ways][-1]
        step, _, floor = ways[last][1:]
        rows.append([case, *speeds, step, floor])
    header = ["NVIDIA H200, measured, tokens/s", *GENERATE.values(), "its step, ms", "floor, ms"]
    return markdown(header, rows)


VLLM_STEP = {
    "vLLM": "vLLM",
    "with the plugin": "with the plugin",
    "with the plugin and its attention": "and its attention",
    "vLLM, FP8 cache": "vLLM, FP8 cache",
    "with the plugin, FP8 cache": "plugin, FP8 cache",
    "with the plugin and its attention, FP8 cache": "plugin, attention, FP8 cache",
}


def vllm_step_h200() -> str:
    """Milliseconds of a step of vLLM, with the plugin and without; of them the GPU's."""

    def cell(ms: str = "", least: str = "", greatest: str = "", busy: str = "") -> str:
        return f"{ms} ({busy})" if busy else ms

    found = by_case("vllm_step", "NVIDIA H200, measured").items()
    rows = [[case, *(cell(*ways.get(way, ())) for way in VLLM_STEP)] for case, ways in found]
    header = ["NVIDIA H200, measured, ms (the GPU busy)", *VLLM_STEP.values()]
    return markdown(header, rows)


def gemm_cpu() -> str:
    """F.linear's time over gemm's and fp8_linear's, by M: least, median and most."""
    by_m: dict[str, list[dict]] = {}
    for row in saved("cpu")["rows"]:
        if "fp8_linear" in row["times_us"]:
            by_m.setdefault(row["case"].split(",")[0].removeprefix("M "), []).append(
                row["times_us"]
            )
    rows = []
    for m, times in by_m.items():
        line = [m]
        for name in ("gemm", "fp8_linear"):
            found = [t["F.linear bf16"] / t[name] for t in times]
            line.append(f"{min(found):.2f}, {statistics.median(found):.2f}, {max(found):.2f}")
        rows.append(line)
    return markdown(["M", "`gemm`", "`fp8_linear`"], rows)


def gemm_schedules_measured() -> str:
    rows = []
    for title, found in gemm_schedules.groups(gemm_schedules.saved("h200")).items():
        for line in gemm_schedules.summary(title, found)[:2]:
            name = line[1].replace("split-k", "split-K").replace("stream-k", "stream-K")
            rows.append([f"{name}, {title.split(': ')[1]}", line[3].replace("%", " %"), *line[5:8]])
    header = ["", "quicker than data-parallel", "median gain", "most", "worst"]
    return markdown(header, rows)


def moe_prompts() -> str:
    """What the steps of prompts take at least, and what was measured."""
    header, rows = printed("moe_prompts")
    measured = (f"{experts_us(4096, 'FP8', row[0]):,.0f}" for row in rows)
    rows = [[*row, us] for row, us in zip(rows, measured, strict=True)]
    return markdown([*header, "measured"], rows)


# ---- The few numbers at the head of a kernel's page


def numbers(rows: Sequence[Sequence[str]]) -> str:
    """What, our time, the quickest of others with its name, the floor."""
    return markdown(["", "us", "quickest other", "floor, us"], rows)


def short(us: float) -> str:
    """Microseconds to three figures, without their unit."""
    return microseconds(us).removesuffix(" us")


def quickest(times: dict[str, float]) -> str:
    name = min(times, key=lambda name: times[name])
    return f"{short(times[name])} {name}"


def h200_numbers(op: str, title: str, m: int, n: int = 0) -> list[str]:
    found = case(op, m, n)
    others = {k: t.median for k, t in found.times.items() if not k.startswith("rocm-kernels")}
    floor = found.bytes / saved("h200")["read_rate"] * 1e6
    ours = found.times["rocm-kernels"].median
    return [f"H200, measured: {title}", short(ours), quickest(others), short(floor)]


def cpu_numbers(title: str, name: str, ours: str, others: Sequence[str]) -> list[str]:
    """A dash where ours is quicker than memory: the floor says nothing of data in a cache."""
    row = next(row for row in saved("cpu")["rows"] if row["case"] == name)
    times, floor = row["times_us"], row["bytes"] / saved("cpu")["bandwidth"] * 1e6
    return [f"CPU with AMX, two threads, measured: {title}", short(times[ours]),
            quickest({other: times[other] for other in others}),
            short(floor) if floor < times[ours] else "-"]  # fmt: skip


def row_kernel_numbers(op: str, title: str, cpu: str) -> str:
    rows = [h200_numbers(op, f"{m} x {title}", m) for m in (1, 2048)]
    for row in printed(f"{op}_mi300x")[1]:
        if row[0] in ("1", "2048"):
            floor = float(row[7].split()[0]) / float(row[8])
            rows.append([f"MI300X, modelled (quick bound): {row[0]} x {title}", row[7].split()[0],
                         f"{row[11]} hf-rocm-kernels, published", short(floor)])  # fmt: skip
    rows.append(cpu_numbers(cpu, cpu, "rocm-kernels", ("eager", "torch.compile")))
    return numbers(rows)


def skinny_gemm_numbers() -> str:
    rows = [
        h200_numbers("skinny_gemm", f"{m} x {n} x 16384", m, n)
        for n in (2304, 13312)
        for m in (1, 8, 64)
    ]
    for row in printed("skinny_gemm_mi300x")[1]:
        if row[0] == "8" and "x 16384" in row[1]:
            rows.append([f"MI300X, modelled (quick bound): 8 x {row[1]}", row[7],
                         f"{row[9]} hf-rocm-kernels, published",
                         short(float(row[7]) / float(row[8]))])  # fmt: skip
    rows += [
        cpu_numbers(f"{m} x 16384 x 6656", f"M {m}, N 16384, K 6656", "rocm-kernels FP8",
                    ["F.linear bf16"])
        for m in (1, 64)
    ]  # fmt: skip
    return numbers(rows)


def gemm_numbers() -> str:
    results = saved("h200_gemm")
    rows = []
    for kind, title in (("row", "scales per row"), ("block", "blocks"), ("bf16", "bfloat16")):
        for m in (128, 4096):
            cell = gemm_cell(m, 4096, 7168, kind)
            floor = gemm.floor_us(cell, results["read_rate"], results["tflops"])
            rows.append([f"H200, measured: {m} x 4096 x 7168, {title}", short(cell["ours"]),
                         f"{short(cell['library'])} torch, the same scales",
                         short(floor)])  # fmt: skip
    for row in printed("gemm_mi300x")[1]:
        if row[0] in ("1024 x 4608 x 7168, blocks", "4096^3, per row", "4096^3, bf16"):
            rows.append([f"MI300X, modelled (cycle model): {row[0]}", row[2], "", ""])
    rows.append(cpu_numbers("128 x 4096 x 4096", "M 128, N 4096, K 4096: gemm", "gemm",
                            ["F.linear bf16"]))  # fmt: skip
    return numbers(rows)


def moe_numbers() -> str:
    results = saved("h200_moe")
    rows = []
    for cell in results["cells"]:
        if cell["model"] in ("Qwen3-30B-A3B", "DeepSeek-V3 TP8") and cell["tokens"] in (
            1,
            64,
            4096,
        ):
            others = {name: us for name, us in cell["us"].items() if name in moe.THEIRS}
            floor = moe.floor_us(cell, results["read_rate"], results["tflops"])
            rows.append([f"H200, measured: {cell['model']}, {cell['tokens']} tokens",
                         short(cell["us"]["FP8"]), quickest(others), short(floor)])  # fmt: skip
    for row in printed("moe_mi300x")[1]:
        if row[0] in ("Qwen3-30B-A3B, 1, FP8", "Qwen3-30B-A3B, 64, FP8"):
            rows.append([f"MI300X, modelled (cycle model): {row[0]}", row[3], "", row[2]])
    for row in printed("moe_cpu")[1]:
        if row[0] in ("1", "64"):
            rows.append([f"CPU with AMX, one thread, measured: Qwen3-30B-A3B, {row[0]} tokens",
                         row[1], f"{row[6]} grouped_mm", row[8]])  # fmt: skip
    return numbers(rows)


TABLES: dict[str, Callable[[], str]] = {
    "rmsnorm_fp8_numbers": lambda: row_kernel_numbers(
        "rmsnorm_fp8", "16384", "residual + RMSNorm + FP8, 2048 x 4096"
    ),
    "swiglu_fp8_numbers": lambda: row_kernel_numbers(
        "swiglu_fp8", "16384", "SwiGLU + FP8, 2048 x 4096 -> 2048"
    ),
    "skinny_gemm_numbers": skinny_gemm_numbers,
    "gemm_numbers": gemm_numbers,
    "moe_numbers": moe_numbers,
    "readme_measured": readme_measured,
    "readme_modelled": readme_modelled,
    "decode_llama": lambda: decode_table("h200_model", LLAMA),
    "decode_qwen3_moe": lambda: decode_table("h200_experts_model", QWEN3_MOE),
    "generate_h200": generate_h200,
    "vllm_step_h200": vllm_step_h200,
    "serving": lambda: serving.tables(saved("h200_serving")),
    "gemm_summary": lambda: gemm.summary(saved("h200_gemm")),
    "gemm_aims": lambda: gemm.aims(saved("h200_gemm")),
    "gemm_cpu": gemm_cpu,
    "gemm_schedules": gemm_schedules_measured,
    "moe_orders": lambda: moe_configs.orders_table(saved("h200_moe_orders")),
    "moe_prompts": moe_prompts,
}
