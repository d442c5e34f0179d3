"""What a prompt takes: the time to the first token of transformers' generate, and what of it is the
host's and the kernels'.

    python benchmarks/prompt.py [--model llama-8b] [--prompts 1x128,1x512,1x2048,8x512]
                                [--sides bfloat16,without,auto,fp8] [--kernels] [--layer] [--save]

Weights are random, prompts too. first_ms is the time from where generate has the prompt to its
first token, the median of several later answers; host_ms is how long one call of the model keeps
the host, kernel_ms what its kernels take in sum, by the profiler; --layer tells those of one layer,
each with the time since the end of the one before. The sides are generate.py's, the output
embedding is in FP8. With --save, on a GPU, the rows go to results/tables/prompt.csv. A model
of two narrow layers runs where there is no GPU: to see that it works.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import subprocess
import sys
import time

import end_to_end
import generate
import tables
import torch

ANSWERS = 8


def call_of(model, ids: torch.Tensor) -> None:
    cache = importlib.import_module("transformers").DynamicCache(config=model.config)
    model(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, use_cache=True,
        logits_to_keep=1,
    )  # fmt: skip


def host_seconds(model, ids: torch.Tensor) -> float:
    generate.synchronize()
    start = time.perf_counter()
    call_of(model, ids)
    return time.perf_counter() - start


def kernel_seconds(model, ids: torch.Tensor) -> float:
    """Of a call's kernels and copies, which run one behind the other."""
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(3):
            call_of(model, ids)
        generate.synchronize()
    return sum(event.device_time_total for event in profile.key_averages()) / 3e6


def layer_times(model, ids: torch.Tensor) -> list[tuple[str, float]]:
    """A middle layer's kernels: microseconds from the end of the one before to theirs."""
    before, times = 0.0, []
    for name, _, end in generate.layer_of(generate.kernels_of(lambda: call_of(model, ids))):
        times.append((name, end - before))
        before = end
    return times


def measure_cell(model, batch: int, tokens: int, kernels: bool, layer: bool) -> dict:
    """kernels: their time, layer: a layer's, and nothing else."""
    ids = torch.randint(5, model.config.vocab_size, (batch, tokens), device=model.device)
    for _ in range(2):
        generate.answer_times(model, ids, 4)
    if layer:
        return {"layer": layer_times(model, ids)}
    if kernels:
        return {"kernel_ms": 1e3 * kernel_seconds(model, ids)}
    answers = [generate.answer_times(model, ids, 1) for _ in range(ANSWERS)]
    return {
        "first_ms": 1e3 * statistics.median(first - begin for begin, first in answers),
        "host_ms": 1e3 * statistics.median(host_seconds(model, ids) for _ in range(ANSWERS)),
    }


@torch.inference_mode()
def measure(options: argparse.Namespace) -> list[dict]:
    model = generate.model_here(options.model)
    package = end_to_end.load.load(end_to_end.load.choose())
    rows: list[dict] = []
    sides = options.sides.split(",")
    for side in [side for side in generate.SIDES if side in sides]:
        if side != "bfloat16" and not generate.rows_of_ours(rows):
            model = end_to_end.with_kernels(model, False, True)
        package.models.stop_decode_step(model)
        if side == "without":
            package.models.use_attention(model)
        elif side != "bfloat16":
            package.models.use_decode_step(model, kv_cache_dtype=side)
        for cell in options.prompts.split(","):
            batch, tokens = map(int, cell.split("x"))
            row = {"model": options.model, "batch": batch, "tokens": tokens, "side": side}
            row |= measure_cell(model, batch, tokens, options.kernels, options.layer)
            for name, microseconds in row.pop("layer", ()):
                print(f"{microseconds:8.1f} us  {name}")
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


COLUMNS = {
    "first_ms": "to the first token, ms",
    "host_ms": "the host's part",
    "kernel_ms": "the kernels', in sum",
}


def with_kernels(rows: list[dict], arguments: list[str]) -> list[dict]:
    """The rows with the times of their kernels, from a process of its own: where torch has profiled
    once, launches may take the host longer."""
    command = [sys.executable, __file__, *arguments, "--kernels"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return [row | kernels for row, kernels in zip(rows, found, strict=True)]


NAMES = {**generate.SIDES, "bfloat16": "bfloat16, eager"}


def table_rows(rows: list[dict], device: str) -> list[list[str]]:
    """As the table has them: the sides of a prompt together."""
    cells = list(dict.fromkeys((row["batch"], row["tokens"]) for row in rows))
    return [
        [
            f"{device}, measured: {row['model']}, {row['batch']} x {row['tokens']:,}: "
            f"{NAMES[row['side']]}",
            *(f"{row[name]:.1f}" if name in row else "" for name in COLUMNS),
        ]
        for row in sorted(rows, key=lambda row: cells.index((row["batch"], row["tokens"])))
    ]


def save(rows: list[dict], device: str) -> None:
    """Writes the rows into the table, in the place of those of the same cases."""
    source = f"python benchmarks/prompt.py --save\n{device}, torch {torch.__version__}"
    tables.save_rows("prompt", source, ["", *COLUMNS.values()], table_rows(rows, device))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama-8b", choices=end_to_end.MODELS)
    parser.add_argument("--prompts", default="1x128,1x512,1x2048,8x512")
    parser.add_argument("--sides", default=",".join(generate.SIDES))
    parser.add_argument("--save", action="store_true", help="to results/tables")
    parser.add_argument("--kernels", action="store_true", help="their time alone, on a GPU")
    parser.add_argument("--layer", action="store_true", help="a layer's kernels alone, on a GPU")
    options = parser.parse_args(arguments)
    rows = measure(options)
    if options.save and torch.cuda.is_available():
        given = [f"--{name}={getattr(options, name)}" for name in ("model", "prompts", "sides")]
        save(with_kernels(rows, given), torch.cuda.get_device_name())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
