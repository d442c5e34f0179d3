"""A model of random weights decodes: PyTorch eager, torch.compile, its FP8, and these kernels.

    python benchmarks/end_to_end.py [--model qwen3-30b-a3b] [--save]
    python benchmarks/end_to_end.py --generate [options of generate.py]

The second decodes through transformers' own generate, by batch and context (generate.py). Of the
first:

Each candidate and batch size is a process of its own. Those of one wave get ready (weights,
compilation, graph capture) side by side, since that is the work of the CPU; then they are timed one
at a time, with nothing else on the GPU. Of a model too large for that a candidate is a process, and
its batches follow each other. A step is one forward pass with transformers' static cache of 512
positions, of which the first 128 hold a prompt, and the choice of the most likely token. The
attention is transformers' own everywhere. With a batch of one a prompt of 2,048 tokens is timed
too, without a cache. After the timing the profiler counts each kernel's time over a few steps.
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
from dataclasses import dataclass
from pathlib import Path

import torch
from result_text import result_text
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import load  # noqa: E402


@dataclass
class Model:
    """A config.json of transformers, as far as it gives shapes."""

    classes: tuple[str, str]
    shape: dict
    saved: str  # what results and pictures end with
    one_at_a_time: bool = False  # two do not fit into 139 GiB


MODELS = {
    "llama-8b": Model(
        ("LlamaConfig", "LlamaForCausalLM"),
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
         "max_position_embeddings": 131072, "tie_word_embeddings": False},
        "model",
    ),
    "qwen3-30b-a3b": Model(
        ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
        {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
         "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
         "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
         "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960,
         "tie_word_embeddings": False, "experts_implementation": "grouped_mm"},
        "experts_model",
        one_at_a_time=True,
    ),
}  # fmt: skip
TINY = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
        "vocab_size": 512}  # fmt: skip
PROMPT, CACHE, LONG_PROMPT = 128, 512, 2048
WARM_UP, STEPS, PROFILED, PREFILLS = 8, 96, 4, 12
DESCRIPTION = (
    f"Static cache of {CACHE} positions, {PROMPT} of them filled by a prompt; median of "
    f"{STEPS} decode steps, greedy. Weights are random, FP8 weights have a scale for each\n"
    "output channel and inputs one for each token, but where it says per tensor; the output "
    "embedding stays bfloat16. Attention is transformers' SDPA in every row. Prompt: the time to "
    f"the first token of {LONG_PROMPT:,} tokens, without a cache."
)

# Those whose getting ready takes long first; each wave fits into 139 GiB of GPU memory.
WAVES = [
    ["bfloat16, torch.compile", "FP8 _scaled_mm per token, torch.compile"],
    ["FP8 _scaled_mm per tensor, torch.compile", "rocm-kernels, torch.compile"],
    ["bfloat16, eager", "bfloat16, CUDA graph"],
    ["FP8 _scaled_mm per token, CUDA graph"],
    ["rocm-kernels, eager", "rocm-kernels, CUDA graph"],
]
ORDER = [
    "bfloat16, eager",
    "bfloat16, CUDA graph",
    "bfloat16, torch.compile",
    "FP8 _scaled_mm per token, CUDA graph",
    "FP8 _scaled_mm per token, torch.compile",
    "FP8 _scaled_mm per tensor, torch.compile",
    "rocm-kernels, eager",
    "rocm-kernels, CUDA graph",
    "rocm-kernels, torch.compile",
]


def make_model(name: str, shape: dict, device: torch.device) -> nn.Module:
    import transformers

    torch.set_default_dtype(torch.bfloat16)
    config, causal_lm = (getattr(transformers, kind) for kind in MODELS[name].classes)
    with device:
        model = causal_lm(config(**shape))
    return model.eval().requires_grad_(False)


def candidate_model(candidate: str, name: str, shape: dict, device: torch.device) -> nn.Module:
    """Makes the model that a candidate times, with the linears that the candidate's name says."""
    family, how = candidate.split(", ")
    model = make_model(name, shape, device)
    if family.startswith("FP8"):
        import torch_fp8

        model = torch_fp8.with_scaled_products(model, "per token" in family)
    elif family == "rocm-kernels":
        model = with_kernels(model, how == "torch.compile")
    if device.type == "cuda":
        torch.cuda.empty_cache()  # there may be others on this GPU
    return model


def with_kernels(model: nn.Module, compiled: bool, lm_head: bool = False) -> nn.Module:
    from kernels import Mode, kernelize, register_kernel_mapping

    package = load.load(load.choose())
    register_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False)
    package.models.quantize_model_(model, lm_head=lm_head)
    mode = Mode.INFERENCE | Mode.TORCH_COMPILE if compiled else Mode.INFERENCE
    model = kernelize(model, mode=mode)
    count = sum(package.models.kernelized_layers(model).values())
    if not count:
        raise RuntimeError("kernelize replaced no layer")
    return model


class Decoder:
    """A model with a prompt in its cache, and a step that decodes one more token a sequence."""

    def __init__(self, model: nn.Module, how: str, batch: int, device: torch.device) -> None:
        from transformers import StaticCache

        self.device, self.model, self.how = device, model, how
        self.cache = StaticCache(config=model.config, max_cache_len=CACHE)
        vocabulary = model.config.vocab_size
        prompt = torch.randint(0, vocabulary, (batch, PROMPT), device=device)
        logits = model(prompt, past_key_values=self.cache, logits_to_keep=1).logits
        self.tokens = logits[:, -1:].argmax(-1)
        torch._dynamo.mark_static_address(self.tokens)

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            return model(tokens, past_key_values=self.cache).logits[:, -1:].argmax(-1)

        def prefill(tokens: torch.Tensor) -> torch.Tensor:
            return model(tokens, use_cache=False, logits_to_keep=1).logits.argmax(-1)

        self.forward = self.compiled(forward)
        self.step = self.captured(self.eager_step)
        self.prefill: Callable[[], object] | None = None
        if batch == 1:
            long = torch.randint(0, vocabulary, (1, LONG_PROMPT), device=device)
            prefill = self.compiled(prefill)
            self.prefill = self.captured(lambda: prefill(long))
        self.rewind()

    def compiled(self, function: Callable) -> Callable:
        if self.how != "torch.compile":
            return function
        return torch.compile(function, mode="reduce-overhead", fullgraph=True)

    def captured(self, function: Callable) -> Callable[[], object]:
        """Runs a function three times; then returns it, or a replay of it where the candidate uses
        a CUDA graph."""
        for _ in range(3):
            function()
        if self.how != "CUDA graph":
            return function
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
        return graph.replay

    def eager_step(self) -> None:
        self.tokens.copy_(self.forward(self.tokens))

    def rewind(self) -> None:
        """Forgets what was decoded behind the prompt."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(PROMPT)

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def milliseconds(self) -> list[float]:
        """Times each step until the host has its tokens, as whoever streams them would."""
        self.rewind()
        return self.timed(self.step, WARM_UP, STEPS)

    def prefill_milliseconds(self) -> list[float]:
        return self.timed(self.prefill, 2, PREFILLS)

    def timed(self, call: Callable, warm_up: int, calls: int) -> list[float]:
        for _ in range(warm_up):
            call()
        times = []
        for _ in range(calls):
            self.synchronize()
            start = time.perf_counter()
            call()
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
def work(candidate: str, batches: list[int], name: str, shape: dict) -> None:
    """A process of one candidate: says when it is ready, and is timed when it is told to."""
    begin = time.perf_counter()
    torch.manual_seed(0)
    device = load.choose().device
    model, how = candidate_model(candidate, name, shape, device), candidate.split(", ")[1]
    for batch in batches:
        decoder = Decoder(model, how, batch, device)
        say({"ready": time.perf_counter() - begin})
        sys.stdin.readline()
        say(measured(decoder, batch))
        del decoder
        if device.type == "cuda":
            torch.cuda.empty_cache()


def measured(decoder: Decoder, batch: int) -> dict:
    times = decoder.milliseconds()
    median = statistics.median(times)
    deciles = statistics.quantiles(times, n=10)
    result = {
        "tokens_per_second": batch / median * 1e3,
        "median_ms": median,
        "low_ms": deciles[0],
        "high_ms": deciles[-1],
    }
    if decoder.prefill is not None:
        result["prefill_ms"] = statistics.median(decoder.prefill_milliseconds())
    with contextlib.suppress(Exception):  # the times count; a profiler may be refused
        result["kernels_us"] = decoder.kernels_us() if decoder.device.type == "cuda" else {}
    return result


def say(message: dict) -> None:
    print("@" + json.dumps(message), flush=True)


class Process:
    """One candidate in its process; its messages come through a queue, None when it is gone."""

    def __init__(self, candidate: str, batches: list[int], arguments: list[str]) -> None:
        self.candidate, self.batches = candidate, batches
        command = [sys.executable, __file__, "--work", candidate, *arguments]
        command += ["--batches", *map(str, batches)]
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


def run_wave(processes: list[Process], limit: float):
    """Yields (candidate, batch, result); all get ready first."""
    try:
        deadline = time.monotonic() + limit
        for process in processes:
            process.wait_ready(deadline)
        for process in processes:
            for index, batch in enumerate(process.batches):
                # A later batch gets ready when the one before it is done.
                until = time.monotonic() + limit if index else deadline
                yield process.candidate, batch, process.result(until)
            process.end()
    finally:
        for process in processes:
            process.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--candidates", nargs="+", choices=ORDER, default=ORDER)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--tiny", action="store_true", help="a toy, to see that the script works")
    parser.add_argument("--limit", type=float, default=240, help="seconds for a wave to get ready")
    parser.add_argument("--save", action="store_true", help="write the JSON, tables and plots too")
    parser.add_argument("--work", choices=ORDER, help=argparse.SUPPRESS)
    parser.add_argument("--generate", nargs=argparse.REMAINDER, help="with its options")
    options = parser.parse_args()
    if options.generate is not None:
        import generate

        return generate.main(options.generate)
    model = MODELS[options.model]
    shape = dict(model.shape)
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    if options.tiny:
        shape |= {name: value for name, value in TINY.items() if name in shape}
    if options.work:
        work(options.work, options.batches, options.model, shape)
        return 0

    choice = load.choose()
    if choice.backend == "cpu" and not options.tiny:
        print(f"error: needs a GPU, but here is the {choice}; --tiny runs a toy", file=sys.stderr)
        return 1

    import gpu
    import gpu_report
    import transformers

    weights = make_model(options.model, shape, torch.device("meta")).parameters()
    saved = {
        "machine": gpu.machine(),
        "transformers": transformers.__version__,
        "date": str(datetime.date.today()),
        "model": options.model,
        "description": DESCRIPTION,
        "parameters": sum(p.numel() for p in weights),
        "batches": options.batches,
        "candidates": {c: {} for c in ORDER if c in options.candidates},
    }
    device = gpu.device_name()
    path = gpu_report.RESULTS / f"{device}_{model.saved}.json"
    arguments = ["--model", options.model, *(["--tiny"] if options.tiny else [])]
    arguments += ["--layers", str(options.layers)] if options.layers else []
    for wave in WAVES:
        wave = [candidate for candidate in wave if candidate in options.candidates]
        if model.one_at_a_time:
            groups = [[(candidate, options.batches)] for candidate in wave]
        else:
            groups = [[(candidate, [batch]) for candidate in wave for batch in options.batches]]
        for group in groups:
            processes = [Process(*of, arguments) for of in group]
            for candidate, batch, result in run_wave(processes, options.limit):
                saved["candidates"][candidate][str(batch)] = result
                shown = {key: value for key, value in result.items() if key != "kernels_us"}
                print(f"{candidate}, batch {batch}: {shown}", flush=True)
                if options.save:
                    path.write_text(result_text(saved))
    print(gpu_report.model_document(saved, f"{device}_{model.saved}"))
    if options.save and (gpu_report.RESULTS / f"{device}.json").exists():
        gpu_report.write(device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
