"""transformers' own generate with and without use_decode_step: tokens a second, and the step.

    python benchmarks/generate.py [--model llama-8b] [--batches 1,8,32] [--contexts 512,8192]
                                  [--kv auto,fp8] [--lm-head] [--save] [--kernels] [--timeline]

Weights are random, prompts too. tokens_per_s is of the whole loop of generate, greedy, between its
17th and its 112th token. step_ms is of one call of the model, with the device waited for, host_ms
of what the call takes the host. floor_ms is the time of the bytes that a step reads of weights and
cache, at the rate at which this device reads 4 GiB. --kernels counts the kernels of a step by the
profiler, --timeline tells a layer's, each with the time from the end of the one before to its own:
kernels overlap, and wait for one another. A model of two narrow layers runs where there is no GPU:
to see that it works.
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

import end_to_end
import tables
import torch

FIRST, LAST, STEPS = 16, 112, 48


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


def loop_seconds(model, ids: torch.Tensor, count: int, **options) -> float:
    synchronize()
    start = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
        do_sample=False, pad_token_id=0, **options,
    )  # fmt: skip
    synchronize()
    return time.perf_counter() - start


def short(name: str) -> str:
    """A kernel's name, without its namespaces and types."""
    return re.sub(r"[<(].*", "", name.replace("void ", "").replace("(anonymous namespace)::", ""))


def layer_of(kernels: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """Finds the kernels of one layer in the middle of a step's, which are in the order of their
    ends: each with the microseconds since the one before has ended."""
    middle = len(kernels) // 2
    names, ends = zip(*kernels, strict=True)
    period = next(p for p in range(2, middle // 2)
                  if names[middle : middle + p] == names[middle + p : middle + 2 * p])  # fmt: skip
    return [(names[i], ends[i] - ends[i - 1]) for i in range(middle, middle + period)]


def kernels_of(step: Callable[[], None]) -> list[tuple[str, float]]:
    """Profiles three steps: the kernels of the second in the order of their ends, in us."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            step()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    kernels = sorted((event["ts"] + event["dur"], short(event["name"]))
                     for event in events if event.get("cat") == "kernel")  # fmt: skip
    count = len(kernels) // 3
    return [(name, end) for end, name in kernels[count : 2 * count]]


def step_seconds(
    model, ids: torch.Tensor, kernels: bool, timeline: bool
) -> tuple[float, float, dict, list]:
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


@torch.inference_mode()
def measure(options: argparse.Namespace) -> list[dict]:
    device = end_to_end.load.choose().device
    package = end_to_end.load.load(end_to_end.load.choose())
    shape = dict(end_to_end.MODELS[options.model].shape)
    if device.type != "cuda":
        shape.update(end_to_end.TINY, num_hidden_layers=2)
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    torch.manual_seed(0)
    model = end_to_end.with_kernels(
        end_to_end.make_model(options.model, shape, device), False, options.lm_head
    )
    model.generation_config.eos_token_id = None
    rate = read_rate(device)
    weights = sum(p.nbytes for p in model.parameters()) - model.get_input_embeddings().weight.nbytes
    config = model.config
    rows = []
    for batch in map(int, options.batches.split(",")):
        for context in map(int, options.contexts.split(",")):
            ids = torch.randint(5, config.vocab_size, (batch, context), device=device)
            for side in ["without", *options.kv.split(",")]:
                if side == "without":
                    if context > 1024:
                        continue
                    package.models.stop_decode_step(model)
                    package.models.use_attention(model)
                else:
                    package.models.use_decode_step(model, kv_cache_dtype=side)
                size = 1 if side == "fp8" else 2
                head = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
                cache = 2 * config.num_key_value_heads * head * size * batch * context
                floor = (weights + config.num_hidden_layers * cache) / rate
                try:
                    start = time.perf_counter()
                    loop_seconds(model, ids, FIRST)
                    ready = time.perf_counter() - start
                    least = min(loop_seconds(model, ids, FIRST) for _ in range(2))
                    most = min(loop_seconds(model, ids, LAST) for _ in range(2))
                    step, host, names, layer = step_seconds(
                        model, ids, options.kernels, options.timeline
                    )
                except torch.OutOfMemoryError:
                    print(batch, context, side, "out of memory", flush=True)
                    continue
                row = {
                    "model": options.model, "batch": batch, "context": context, "side": side,
                    "tokens_per_s": batch * (LAST - FIRST) / (most - least), "step_ms": step * 1e3,
                    "host_ms": host * 1e3, "floor_ms": floor * 1e3, "ready_s": ready,
                    "lm_head": options.lm_head,
                }  # fmt: skip
                print(json.dumps({k: round(v, 3) if isinstance(v, float) else v
                                  for k, v in row.items()}), flush=True)  # fmt: skip
                if side != "without":
                    print("   ", package.models.decode_steps(model), flush=True)
                for name, (count, us) in sorted(names.items(), key=lambda item: -item[1][1])[:24]:
                    print(f"    {us:8.1f} us {count:6.1f}  {name}", flush=True)
                for name, us in layer:
                    print(f"    {us:8.2f} us  {name}", flush=True)
                rows.append(row)
    return rows


def save(rows: list[dict], device: str) -> None:
    """Writes this device's rows into the table, and keeps those of other devices."""
    mine = []
    for row in rows:
        what = {"without": "as it was", "auto": "use_decode_step"}.get(
            row["side"], "use_decode_step, FP8 cache"
        )
        head = ", FP8 head" if row["lm_head"] else ""
        case = f"{row['model']}, batch {row['batch']}, context {row['context']:,}"
        numbers = f"{row['tokens_per_s']:,.0f}", f"{row['step_ms']:.2f}", f"{row['host_ms']:.2f}"
        mine.append(
            [f"{device}, measured: {case}: {what}{head}", *numbers, f"{row['floor_ms']:.2f}"]
        )
    header = ["", "tokens/s of generate", "a step, ms", "the host's part", "floor, ms"]
    source = f"python benchmarks/generate.py --save\n{device}, torch {torch.__version__}"
    tables.save_beside("generate", source, header, mine, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b", choices=end_to_end.MODELS)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--kv", default="auto,fp8")
    parser.add_argument("--lm-head", action="store_true", help="the output embedding in FP8 too")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--timeline", action="store_true")
    parser.add_argument("--save", action="store_true", help="to results/tables")
    options = parser.parse_args()
    rows = measure(options)
    if options.save:
        save(rows, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
