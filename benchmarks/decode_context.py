"""A decode step of an 8-billion Llama by context: transformers' SDPA, and this package's attention
with a cache in 16 bits and in FP8.

    python benchmarks/decode_context.py [--batches 1,8,32] [--contexts 512,8192] [--save]

Weights are random; linears, MLPs and norms are this package's in every row, so that the attention
alone differs. A step is one CUDA graph (on a CPU: eager), with a static cache that holds a few
positions more than the context. Its keys and values are random numbers, not a prompt's. A model of
two narrow layers runs where there is no GPU: to see that it works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import end_to_end
import tables
import torch

WARM_UP, STEPS = 8, 64
ROOM = WARM_UP + STEPS + 16
SIDES = {"SDPA": "sdpa", "ours": "rocm_kernels", "ours, FP8 cache": "rocm_kernels"}


class Step:
    """One token more for each sequence, behind a context."""

    def __init__(self, model, package, side: str, batch: int, context: int, device) -> None:
        from transformers import StaticCache

        model.set_attn_implementation(SIDES[side])
        if "FP8" in side:
            self.cache = package.models.fp8_static_cache(model, max_cache_len=context + ROOM)
        else:
            self.cache = StaticCache(config=model.config, max_cache_len=context + ROOM)
        self.model, self.context, self.device = model, context, device
        self.tokens = torch.randint(0, model.config.vocab_size, (batch, 1), device=device)
        self.eager()  # makes the cache
        for layer in self.cache.layers:
            for states in (layer.keys, layer.values):
                if states.dtype == torch.uint8:
                    for sequence in states.view(layer.fp8_dtype):
                        sequence.copy_(torch.randn(sequence.shape, device=device))
                else:
                    states.normal_()
        self.rewind()
        self.run = self.eager
        if device.type == "cuda":
            for _ in range(3):
                self.eager()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.eager()
            self.run = graph.replay

    def eager(self) -> None:
        logits = self.model(self.tokens, past_key_values=self.cache).logits
        self.tokens.copy_(logits[:, -1:].argmax(-1))

    def rewind(self) -> None:
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.context)

    def milliseconds(self) -> float:
        self.rewind()
        times = []
        for _ in range(WARM_UP + STEPS):
            self.synchronize()
            start = time.perf_counter()
            self.run()
            self.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return statistics.median(times[WARM_UP:])

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@torch.inference_mode()
def measure(batches: list[int], contexts: list[int]) -> list[dict]:
    device = end_to_end.load.choose().device
    shape = dict(end_to_end.MODELS["llama-8b"].shape)
    if device.type != "cuda":
        shape.update(end_to_end.TINY, num_hidden_layers=2)
    torch.manual_seed(0)
    model = end_to_end.with_kernels(end_to_end.make_model("llama-8b", shape, device), False)
    package = end_to_end.load.load(end_to_end.load.choose())
    package.models.use_attention()
    rows = []
    for batch in batches:
        for context in contexts:
            for side in SIDES:
                row = {"batch": batch, "context": context, "attention": side}
                try:
                    step = Step(model, package, side, batch, context, device)
                    row["step_ms"] = step.milliseconds()
                    del step
                except torch.OutOfMemoryError:
                    row["error"] = "out of memory"
                torch.cuda.empty_cache()
                print(json.dumps(row), flush=True)
                rows.append(row)
    return rows


def save(rows: list[dict], device: str) -> None:
    """One line a batch and context; those of other devices stay."""
    cases: dict[str, dict[str, str]] = {}
    for row in rows:
        case = f"{device}, measured: batch {row['batch']}, context {row['context']:,}"
        step = f"{row['step_ms']:.2f}" if "step_ms" in row else row["error"]
        cases.setdefault(case, {})[row["attention"]] = step
    mine = [[case, *(steps.get(side, "") for side in SIDES)] for case, steps in cases.items()]
    source = f"python benchmarks/decode_context.py --save\n{device}, torch {torch.__version__}"
    tables.save_beside("decode_context", source, ["ms a step", *SIDES], mine, device)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--save", action="store_true", help="to results/tables")
    given = parser.parse_args()
    batches, contexts = (
        [int(n) for n in text.split(",")] for text in (given.batches, given.contexts)
    )
    rows = measure(batches, contexts)
    if given.save:
        save(rows, torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
