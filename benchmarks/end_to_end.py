"""A Llama of 8 billion random weights decodes: PyTorch eager, torch.compile, and these kernels.

    python benchmarks/end_to_end.py [--save]

Each candidate and batch size is a process of its own. Those of one wave get ready (weights,
compilation, graph capture) side by side, since that is the work of the CPU; then they are timed one
at a time, with nothing else on the GPU. A step is one forward pass with transformers' static cache
of 512 positions, of which the first 128 hold a prompt, and the choice of the most likely token. The
attention is transformers' own everywhere. After the timing the profiler counts each kernel's time
over a few steps.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import queue
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))
import load  # noqa: E402

# Llama-3.1-8B's config.json, as far as it gives shapes.
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
PROMPT, CACHE = 128, 512
WARM_UP, STEPS, PROFILED = 8, 96, 4
DESCRIPTION = (
    f"Static cache of {CACHE} positions, {PROMPT} of them filled by a prompt; median of "
    f"{STEPS} decode steps, greedy. Weights are random, FP8 weights have a scale for each\n"
    "output channel and inputs one for each token, but where it says per tensor; the output "
    "embedding stays bfloat16. Attention is transformers' SDPA in every row."
)

# Those whose getting ready takes long first; each wave fits into 139 GiB of GPU memory.
WAVES = [
    ["bfloat16, torch.compile", "FP8 _scaled_mm per token, torch.compile"],
    ["FP8 _scaled_mm per tensor, torch.compile", "rocm-kernels, torch.compile"],
    ["bfloat16, eager", "bfloat16, CUDA graph"],
    ["rocm-kernels, eager", "rocm-kernels, CUDA graph"],
]
ORDER = [
    "bfloat16, eager",
    "bfloat16, CUDA graph",
    "bfloat16, torch.compile",
    "FP8 _scaled_mm per token, torch.compile",
    "FP8 _scaled_mm per tensor, torch.compile",
    "rocm-kernels, eager",
    "rocm-kernels, CUDA graph",
    "rocm-kernels, torch.compile",
]


class ScaledMMLinear(nn.Module):
    """What PyTorch alone offers for FP8: inputs quantised as they come, and ``torch._scaled_mm``.

    Scales are for each token and output channel, as ours are, or for whole tensors: coarser, and
    quicker in the library.
    """

    def __init__(self, linear: nn.Linear, per_token: bool) -> None:
        super().__init__()
        self.per_token = per_token
        scale = self.amax(linear.weight) / 448
        weight = (linear.weight.float() / scale).to(torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(scale.t().contiguous(), requires_grad=False)

    def amax(self, rows: torch.Tensor) -> torch.Tensor:
        magnitudes = rows.abs()
        largest = magnitudes.amax(1, keepdim=True) if self.per_token else magnitudes.amax()
        return largest.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        scale = self.amax(rows).clamp(min=1e-12) / 448
        q = (rows.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        out = torch._scaled_mm(
            q, self.weight.t(), scale, self.scale, out_dtype=x.dtype, use_fast_accum=True
        )
        return out.view(*x.shape[:-1], -1)


def make_model(shape: dict, device: torch.device):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    return model.eval().requires_grad_(False)


def with_scaled_mm(model: nn.Module, per_token: bool) -> nn.Module:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                setattr(parent, name, ScaledMMLinear(child, per_token))
    return model


def with_kernels(model: nn.Module, compiled: bool) -> nn.Module:
    from kernels import Mode, kernelize, register_kernel_mapping

    package = load.load(load.choose())
    register_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False)
    package.models.quantize_model_(model)
    mode = Mode.INFERENCE | Mode.TORCH_COMPILE if compiled else Mode.INFERENCE
    model = kernelize(model, mode=mode)
    count = sum(package.models.kernelized_layers(model).values())
    if not count:
        raise RuntimeError("kernelize replaced no layer")
    return model


class Decoder:
    """A model with a prompt in its cache, and a step that decodes one more token a sequence."""

    def __init__(self, candidate: str, batch: int, shape: dict, device: torch.device) -> None:
        from transformers import StaticCache

        family, how = candidate.split(", ")
        model = make_model(shape, device)
        if family.startswith("FP8"):
            model = with_scaled_mm(model, "per token" in family)
        elif family == "rocm-kernels":
            model = with_kernels(model, how == "torch.compile")
        if device.type == "cuda":
            torch.cuda.empty_cache()  # there are others on this GPU
        self.device, self.model = device, model
        self.cache = StaticCache(config=model.config, max_cache_len=CACHE)
        prompt = torch.randint(0, shape["vocab_size"], (batch, PROMPT), device=device)
        logits = model(prompt, past_key_values=self.cache, logits_to_keep=1).logits
        self.tokens = logits[:, -1:].argmax(-1)
        torch._dynamo.mark_static_address(self.tokens)

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            return model(tokens, past_key_values=self.cache).logits[:, -1:].argmax(-1)

        if how == "torch.compile":
            forward = torch.compile(forward, mode="reduce-overhead", fullgraph=True)
        self.forward = forward
        self.step: Callable[[], None] = self.eager_step
        for _ in range(3):
            self.step()
        if how == "CUDA graph":
            self.step = self.captured()
        self.rewind()

    def eager_step(self) -> None:
        self.tokens.copy_(self.forward(self.tokens))

    def captured(self) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.eager_step()
        return graph.replay

    def rewind(self) -> None:
        """Forgets what was decoded behind the prompt."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(PROMPT)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self) -> list[float]:
        """Of each step, the wait for its tokens included: the caller wants to see them."""
        self.rewind()
        for _ in range(WARM_UP):
            self.step()
        times = []
        for _ in range(STEPS):
            self.synchronize()
            start = time.perf_counter()
            self.step()
            self.synchronize()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    def kernels_us(self) -> dict[str, float]:
        """Each kernel's share of a step, by its name."""
        from torch.profiler import ProfilerActivity, profile

        self.rewind()
        self.step()
        self.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            for _ in range(PROFILED):
                self.step()
            self.synchronize()
        launches = [
            (event.time_range.start, event.time_range.end, event.name[:120])
            for event in profiler.events()
            if event.device_type == torch.autograd.DeviceType.CUDA
        ]
        return {name: time / PROFILED for name, time in time_by_name(launches).items()}


def time_by_name(launches: list[tuple[float, float, str]]) -> dict[str, float]:
    """Sums of (start, end, name); what several cover is counted once.

    A kernel may start before the one in front of it is complete, and wait (programmatic dependent
    launch). So the time belongs to the first, and the sum is the time in which any kernel runs.
    """
    sums: dict[str, float] = {}
    covered = 0.0
    for start, end, name in sorted(launches):
        sums[name] = sums.get(name, 0.0) + max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return sums


@torch.inference_mode()
def work(candidate: str, batch: int, shape: dict) -> None:
    """A process of one candidate: says when it is ready, and is timed when it is told to."""
    begin = time.perf_counter()
    torch.manual_seed(0)
    decoder = Decoder(candidate, batch, shape, load.choose().device)
    say({"ready": time.perf_counter() - begin})
    sys.stdin.readline()
    times = decoder.milliseconds()
    median = statistics.median(times)
    deciles = statistics.quantiles(times, n=10)
    result = {
        "tokens_per_second": batch / median * 1e3,
        "median_ms": median,
        "low_ms": deciles[0],
        "high_ms": deciles[-1],
    }
    with contextlib.suppress(Exception):  # the times count; a profiler may be refused
        result["kernels_us"] = decoder.kernels_us() if decoder.device.type == "cuda" else {}
    say(result)


def say(message: dict) -> None:
    print("@" + json.dumps(message), flush=True)


class Process:
    """One candidate in its process; its messages come through a queue, None when it is gone."""

    def __init__(self, candidate: str, batch: int, arguments: list[str]) -> None:
        self.candidate, self.batch = candidate, batch
        command = [sys.executable, __file__, "--work", candidate, "--batch", str(batch), *arguments]
        environment = {"TORCHINDUCTOR_COMPILE_THREADS": "4", **os.environ}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, env=environment,
        )  # fmt: skip
        self.messages: queue.Queue[dict | None] = queue.Queue()
        self.output: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            if line.startswith("@{"):
                self.messages.put(json.loads(line[1:]))
            else:
                self.output.append(line.rstrip())
        self.messages.put(None)

    def error(self) -> str:
        wrong = [line for line in self.output if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return (wrong or self.output or ["no output"])[-1][:300]

    def result(self, deadline: float) -> dict:
        """Times it, once it is ready."""
        try:
            ready = self.messages.get(timeout=max(1.0, deadline - time.monotonic()))
            if ready is None:
                return {"error": self.error()}
            self.process.stdin.write("go\n")
            self.process.stdin.flush()
            result = self.messages.get(timeout=60)
            return {"error": self.error()} if result is None else {**result, **ready}
        except queue.Empty:
            return {"error": "not ready in time"}

    def wait_ready(self, deadline: float) -> None:
        while self.messages.empty() and time.monotonic() < deadline:
            time.sleep(0.1)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def run_wave(candidates: list[str], batches: list[int], arguments: list[str], limit: float):
    """Yields (candidate, batch, result); all get ready first."""
    deadline = time.monotonic() + limit
    processes = [Process(c, b, arguments) for c in candidates for b in batches]
    try:
        for process in processes:
            process.wait_ready(deadline)
        for process in processes:
            if time.monotonic() >= deadline and process.messages.empty():
                yield process.candidate, process.batch, {"error": f"not ready in {limit:.0f} s"}
                continue
            yield process.candidate, process.batch, process.result(deadline)
            process.end()
    finally:
        for process in processes:
            process.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--candidates", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"])
    parser.add_argument("--tiny", action="store_true", help="a toy, to see that the script works")
    parser.add_argument("--limit", type=float, default=240, help="seconds for a wave to get ready")
    parser.add_argument("--save", action="store_true", help="write the JSON, tables and plots too")
    parser.add_argument("--work", choices=ORDER, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    shape = {**SHAPE, "num_hidden_layers": options.layers}
    if options.tiny:
        shape |= {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4,
                  "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
    if options.work:
        work(options.work, options.batch, shape)
        return 0

    choice = load.choose()
    if choice.backend == "cpu" and not options.tiny:
        print(f"error: needs a GPU, but here is the {choice}; --tiny runs a toy", file=sys.stderr)
        return 1

    import gpu
    import gpu_report
    import transformers

    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    saved = {
        "machine": gpu.machine(),
        "transformers": transformers.__version__,
        "date": str(datetime.date.today()),
        "description": DESCRIPTION,
        "parameters": sum(p.numel() for p in model.parameters()),
        "batches": options.batches,
        "candidates": {c: {} for c in ORDER if c in options.candidates},
    }
    device = gpu.device_name()
    path = gpu_report.RESULTS / f"{device}_model.json"
    arguments = ["--layers", str(options.layers), *(["--tiny"] if options.tiny else [])]
    for wave in WAVES:
        wave = [candidate for candidate in wave if candidate in options.candidates]
        for candidate, batch, result in run_wave(wave, options.batches, arguments, options.limit):
            saved["candidates"][candidate][str(batch)] = result
            shown = {key: value for key, value in result.items() if key != "kernels_us"}
            print(f"{candidate}, batch {batch}: {shown}", flush=True)
            if options.save:
                path.write_text(json.dumps(saved, indent=1) + "\n")
    print(gpu_report.model_document(saved, device))
    if options.save and (gpu_report.RESULTS / f"{device}.json").exists():
        gpu_report.write(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
