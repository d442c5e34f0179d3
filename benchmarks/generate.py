"""transformers' own generate with and without use_decode_step: tokens a second, and the step.

    python benchmarks/generate.py [--model llama-8b] [--batches 1,8,32] [--contexts 512,8192]
                                  [--sides bfloat16,without,auto,fp8] [--lm-head] [--save]
                                  [--kernels] [--timeline] [--loop]

Weights are random, prompts too. tokens_per_s is of the whole loop of generate, greedy and streamed,
between its 17th and its 64th token; ready_s is the time to its third, whose step is the first that
is replayed; prompt_ms is the time of later answers to their first.
step_ms is of one call of the model, with the device waited for, host_ms of what the call takes the
host. floor_ms is the time of the bytes that a step reads of weights and cache, at the rate at which
this device reads 4 GiB; of experts those count that the batch's tokens meet, as routing by chance
would have it: E (1 - (1 - k / E)^batch) of E. The side bfloat16 is the model as it was before
anything, with SDPA and transformers' static cache, a step as one CUDA graph.

--kernels counts the kernels of a step by the profiler, --timeline tells a layer's at the first
batch and context, each with the time from the end of the one before to its own: kernels overlap,
and wait for one another. With --save, picture.py draws it. --loop tells for how long the device is
idle in the loop of generate, and what torch runs on it for a token, by the profiler. A model of two
narrow layers runs where there is no GPU: to see that it works.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import decode_context
import end_to_end
import tables
import torch

FIRST, LAST, STEPS = 16, 64, 48
CHUNK = 65536  # tokens of all sequences, that a prompt is computed of at once
SIDES = {
    "bfloat16": "bfloat16, CUDA graph",
    "without": "as it was",
    "auto": "use_decode_step",
    "fp8": "use_decode_step, FP8 cache",
}


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def read_rate(device: torch.device) -> float:
    """Bytes a second."""
    data = torch.ones((4 if device.type == "cuda" else 1) << 28, device=device)
    times = []
    for _ in range(8):
        synchronize()
        start = time.perf_counter()
        data.sum()
        synchronize()
        times.append(time.perf_counter() - start)
    return data.nbytes / min(times)


class Clock:
    """A streamer that notes when it has the prompt, and each token."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, tokens: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def answer_times(model, ids: torch.Tensor, count: int, **options) -> list[float]:
    """When generate had the prompt, and each token."""
    clock = Clock()
    synchronize()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, pad_token_id=0, streamer=clock, **options,
    )  # fmt: skip
    return clock.times


class Loop(NamedTuple):
    """What the device does for a token of generate, in microseconds."""

    period: float
    idle: float
    torchs: dict[str, float]  # kernels and copies of torch's own, by name


def loop_in(events: list[dict], tokens: int) -> Loop:
    """Of the last so many tokens in a trace of generate; a token is chosen by one argmax."""
    known = ("kernel", "gpu_memcpy", "gpu_memset")
    found = sorted((event["ts"], event["ts"] + event["dur"], event["name"])
                   for event in events if event.get("cat") in known)  # fmt: skip
    chosen = [begin for begin, _, name in found if "argmax" in name.lower()][-tokens - 1 :]
    first, last = chosen[0], chosen[-1]
    busy, covered = 0.0, first
    torchs: dict[str, float] = defaultdict(float)
    for begin, end, name in found:
        if first <= begin < last:
            own = max(0.0, end - max(begin, covered))
            busy, covered = busy + own, max(covered, end)
            if "at::" in name or "Mem" in name:
                torchs[short_torch(name)] += own / tokens
    return Loop((last - first) / tokens, (last - first - busy) / tokens, dict(torchs))


def short_torch(name: str) -> str:
    """A kernel of torch's: what it is called, and what it was made for."""
    names = re.findall(r"native::(?:\(anonymous namespace\)::)?(\w+)", name)
    return " ".join(dict.fromkeys(names)) or short(name)


def loop_of(model, ids: torch.Tensor, tokens: int, **options) -> Loop:
    """Profiles generate's loop, prompt and all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        answer_times(model, ids, tokens + 8, **options)
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return loop_in(events, tokens)


def short(name: str) -> str:
    """A kernel's name, without its namespaces and types."""
    return re.sub(r"[<(].*", "", name.replace("void ", "").replace("(anonymous namespace)::", ""))


class Kernel(NamedTuple):
    """When it began and ended, in microseconds; before the end of the one before nothing of it
    counts."""

    name: str
    begin: float
    end: float


def layer_of(kernels: list[Kernel]) -> list[Kernel]:
    """Finds the kernels of one layer in the middle of a step's, which are in the order of their
    ends: those that all of the middle half consists of, since a layer may repeat a part of itself.
    Time begins at the end of the kernel before."""
    middle = len(kernels) // 2
    names = [kernel.name for kernel in kernels]
    layers = names[middle // 2 : middle // 2 + middle]
    period = next(p for p in range(2, middle // 2 + 1) if layers[p:] == layers[:-p])
    start = kernels[middle - 1].end
    found, before = [], start
    for name, begin, end in kernels[middle : middle + period]:
        found.append(Kernel(name, max(begin, before) - start, end - start))
        before = end
    return found


def kernels_in(events: list[dict], steps: int) -> list[Kernel]:
    """Those of the middle one of as many steps, in the order of their ends, of a trace."""
    found = sorted((event["ts"] + event["dur"], event["ts"], short(event["name"]))
                   for event in events if event.get("cat") == "kernel")  # fmt: skip
    count = len(found) // steps
    middle = found[steps // 2 * count :][:count]
    return [Kernel(name, begin, end) for end, begin, name in middle]


def kernels_of(step: Callable[[], None]) -> list[Kernel]:
    """Profiles three steps: the kernels of the second."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    return kernels_in(events, 3)


def step_seconds(
    model, ids: torch.Tensor, kernels: bool, timeline: bool
) -> tuple[float, float, dict, list[Kernel]]:
    """Times one call behind the prompt: seconds in all, seconds of the host, kernels by name, and
    those of a layer."""
    from transformers import DynamicCache

    mask = torch.ones(ids.shape[0], ids.shape[1] + STEPS + 16, dtype=torch.int64, device=ids.device)
    length = ids.shape[1]
    out = model(
        ids, attention_mask=mask[:, :length], past_key_values=DynamicCache(config=model.config),
        use_cache=True, logits_to_keep=1,
    )  # fmt: skip
    token = out.logits[:, -1:].argmax(-1)

    def call() -> None:
        nonlocal out, length
        length += 1
        out = model(
            token, attention_mask=mask[:, :length], past_key_values=out.past_key_values,
            position_ids=torch.full_like(token, length - 1), use_cache=True, logits_to_keep=1,
        )  # fmt: skip

    both = []
    for _ in range(STEPS):
        synchronize()
        start = time.perf_counter()
        call()
        host = time.perf_counter() - start
        synchronize()
        both.append((time.perf_counter() - start, host))
    names: dict = defaultdict(lambda: [0, 0.0])
    if kernels and ids.device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(4):
                call()
            synchronize()
        for event in profile.key_averages():
            if event.device_time_total:
                name = re.sub(r"[<(].*", "", event.key.replace("void ", ""))[:70]
                names[name][0] += event.count / 4
                names[name][1] += event.device_time_total / 4
    layer = layer_of(kernels_of(call)) if timeline and ids.device.type == "cuda" else []
    seconds = (statistics.median(column[8:]) for column in zip(*both, strict=True))
    return (*seconds, dict(names), layer)


def model_here(name: str, layers: int | None = None):
    """A model of a name, whose answers do not end; a tiny one where there is no GPU."""
    device = end_to_end.load.choose().device
    shape = dict(end_to_end.MODELS[name].shape)
    if device.type != "cuda":
        shape.update(end_to_end.TINY, num_hidden_layers=2)
    if layers:
        shape["num_hidden_layers"] = layers
    torch.manual_seed(0)
    model = end_to_end.make_model(name, shape, device)
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def measure(options: argparse.Namespace) -> list[dict]:
    model = model_here(options.model, options.layers)
    device = model.device
    rate = read_rate(device)
    cells = [(int(batch), int(context)) for batch in options.batches.split(",")
             for context in options.contexts.split(",")]  # fmt: skip
    sides = options.sides.split(",")
    rows = []
    for side in [s for s in SIDES if s in sides]:
        if side != "bfloat16" and not rows_of_ours(rows):
            model = end_to_end.with_kernels(model, False, options.lm_head)
        for batch, context in cells:
            row = {"model": options.model, "batch": batch, "context": context, "side": side,
                   "lm_head": options.lm_head}  # fmt: skip
            first = (batch, context) == cells[0]
            try:
                row |= measure_cell(model, side, batch, context, rate, options, first)
            except torch.OutOfMemoryError:
                row["error"] = "out of memory"
            if device.type == "cuda":
                torch.cuda.empty_cache()
            tell(row)
            rows.append(row)
    return rows


def step_bytes(model, tokens: int) -> float:
    """Of the weights that a step of so many tokens reads: of experts, as many as routing by chance
    meets."""
    found = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    for module in model.modules():
        weight = module._parameters.get("gate_up_proj")  # of all experts of a layer
        if weight is not None:
            missed = 1 - model.config.num_experts_per_tok / weight.shape[0]
            found -= missed**tokens * sum(p.nbytes for p in module.parameters())
    return found


def rows_of_ours(rows: list[dict]) -> list[dict]:
    return [row for row in rows if row["side"] != "bfloat16"]


def measure_cell(
    model,
    side: str,
    batch: int,
    context: int,
    rate: float,
    options: argparse.Namespace,
    first: bool,
) -> dict:
    """One side at one batch and context. first: the one whose timeline is kept."""
    config, device = model.config, model.device
    weights = step_bytes(model, batch)
    head = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    token = 2 * config.num_key_value_heads * head * (1 if side == "fp8" else 2)
    floor = (weights + config.num_hidden_layers * token * batch * context) / rate
    package = end_to_end.load.load(end_to_end.load.choose())
    if side == "bfloat16":
        step = decode_context.Step(model, package, "SDPA", batch, context, device)
        ms = step.milliseconds()
        return {"tokens_per_s": batch / ms * 1e3, "step_ms": ms, "floor_ms": floor * 1e3}
    chunk = {"prefill_chunk_size": CHUNK // batch} if batch * context > CHUNK else {}
    package.models.stop_decode_step(model)
    if side == "without":
        package.models.use_attention(model)
    else:
        if options.launches:
            package.models.recorded_step.takes_stacks = lambda device: False
        # Prompts in chunks tell their length too late.
        room = context + LAST + STEPS if chunk else None
        package.models.use_decode_step(model, max_cache_len=room, kv_cache_dtype=side)
    ids = torch.randint(5, config.vocab_size, (batch, context), device=device)
    times = answer_times(model, ids, LAST, **chunk)
    later = [answer_times(model, ids, 1, **chunk) for _ in range(3)]
    step, host, names, layer = step_seconds(
        model, ids, options.kernels, options.timeline and first and side != "fp8"
    )
    row = {
        "tokens_per_s": batch * (LAST - FIRST) / (times[LAST] - times[FIRST]),
        "step_ms": step * 1e3, "host_ms": host * 1e3, "floor_ms": floor * 1e3,
        "ready_s": times[3] - times[0], "kernels": names, "layer": layer,
        "prompt_ms": statistics.median(1e3 * (first - begin) for begin, first in later),
    }  # fmt: skip
    if options.loop and device.type == "cuda":
        row["loop"] = loop_of(model, ids, 16, **chunk)
    if side != "without":
        row["steps"] = str(package.models.decode_steps(model))
    return row


def tell(row: dict) -> None:
    """Prints a row, and its kernels below it."""
    shown = {
        name: value
        for name, value in row.items()
        if name not in ("kernels", "layer", "steps", "loop")
    }
    shown = {name: round(v, 3) if isinstance(v, float) else v for name, v in shown.items()}
    print(json.dumps(shown), flush=True)
    if "steps" in row:
        print("   ", row["steps"], flush=True)
    if "loop" in row:
        loop = row["loop"]
        print(
            f"    {loop.period:8.1f} us a token of generate, {loop.idle:.1f} of them idle; torch's:"
        )
        for name, us in sorted(loop.torchs.items(), key=lambda item: -item[1])[:12]:
            print(f"    {us:8.1f} us  {name}", flush=True)
    kernels = sorted(row.get("kernels", {}).items(), key=lambda item: -item[1][1])
    for name, (count, us) in kernels[:24]:
        print(f"    {us:8.1f} us {count:6.1f}  {name}", flush=True)
    before = 0.0
    for kernel in row.get("layer", []):
        print(f"    {kernel.end - before:8.2f} us  {kernel.name}", flush=True)
        before = kernel.end


def table_rows(rows: list[dict], device: str) -> list[list[str]]:
    """As the table has them: the sides of a batch and context together."""
    cells = list(dict.fromkeys((row["batch"], row["context"]) for row in rows))
    found = []
    for row in sorted(rows, key=lambda row: cells.index((row["batch"], row["context"]))):
        where = f"batch {row['batch']}, context {row['context']:,}"
        head = ", FP8 head" if row["lm_head"] and row["side"] != "bfloat16" else ""
        name = f"{device}, measured: {row['model']}, {where}: {SIDES[row['side']]}{head}"
        if "error" in row:
            found.append([name, row["error"], "", "", ""])
            continue
        host = f"{row['host_ms']:.2f}" if "host_ms" in row else ""
        found.append([name, f"{row['tokens_per_s']:,.0f}", f"{row['step_ms']:.2f}", host,
                      f"{row['floor_ms']:.2f}"])  # fmt: skip
    return found


def save(rows: list[dict], device: str) -> None:
    """Writes the rows into the table, in the place of those of the same cases; and a layer's
    kernels, which picture.py draws."""
    header = ["", "tokens/s of generate", "a step, ms", "the host's part", "floor, ms"]
    source = f"python benchmarks/generate.py --save\n{device}, torch {torch.__version__}"
    tables.save_rows("generate", source, header, table_rows(rows, device))
    timeline = [
        [SIDES[row["side"]], kernel.name, f"{kernel.begin:.2f}", f"{kernel.end:.2f}"]
        for row in rows
        for kernel in row.get("layer", [])
    ]
    if timeline:
        row = next(row for row in rows if row.get("layer"))
        what = f"{row['model']}, batch {row['batch']}, context {row['context']:,}"
        source = f"python benchmarks/generate.py --timeline --save\n{device}, measured: {what}"
        tables.save_printed("step_timeline", source, ["", "kernel", "begin, us", "end, us"],
                            timeline)  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b", choices=end_to_end.MODELS)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--lm-head", action="store_true", help="the output embedding in FP8 too")
    parser.add_argument(
        "--launches", action="store_true", help="layers by their launches, not as one kernel"
    )
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--loop", action="store_true")
    parser.add_argument("--save", action="store_true", help="to results/tables")
    options = parser.parse_args(arguments)
    rows = measure(options)
    if options.save:
        save(rows, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
