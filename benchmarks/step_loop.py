"""Times decode steps of an FP8 Llama in a loop of our own, before and after these kernels, for
serving.py.

Before: transformers' modules, each linear quantising its input and multiplying by
``torch._scaled_mm``, a scale a token and a channel: what FP8 is on its first day, nothing fused.
After: ``quantize_model_`` and ``kernelize``. Both with transformers' attention and static cache,
and on a GPU the whole step as one CUDA graph.

A graph's kernels belong to no module, so they are classed in steps that run without one.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable

import end_to_end
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

SIDES = {
    "transformers, FP8": "FP8 _scaled_mm per token",
    "with rocm-kernels": "rocm-kernels",
}
PROFILED = 4
RANGE = "class: "
# By what a module's class is called: the class of what it launches that no name tells.
MODULES = (
    ("RMSNorm", "RMSNorm"),
    ("Attention", "attention"),
    ("RotaryEmbedding", "attention"),
    ("MLP", "SwiGLU"),
    ("Linear", "quantisation"),  # but for the product, whose name tells
)


def work(side: str, batches: list[int], shape: dict, class_of: Callable[[str], str]) -> list[dict]:
    """Times a model's decode steps: for each batch the median time, and a step's microseconds by
    class."""
    device = end_to_end.load.choose().device
    how = "CUDA graph" if device.type == "cuda" else "eager"
    results = []
    torch.manual_seed(0)
    model = end_to_end.candidate_model(f"{SIDES[side]}, {how}", "llama-8b", shape, device)
    for batch in batches:
        decoder = end_to_end.Decoder(model, how, batch, device)
        step_ms = statistics.median(decoder.milliseconds())
        results.append({
            "batch": batch,
            "step_ms": step_ms,
            "tokens_per_s": batch / step_ms * 1e3,
            "classes": step_by_class(decoder, class_of),
        })  # fmt: skip
        del decoder
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results


def step_by_class(decoder, class_of: Callable[[str], str]) -> dict[str, float]:
    """Microseconds of an eager step: of its kernels, or of its ops where they run on the CPU."""
    decoder.rewind()
    on_gpu = decoder.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with ranges(decoder.model), profile(activities=activities) as profiler:
        for _ in range(PROFILED):
            decoder.eager_step()
        decoder.synchronize()
    times: dict[str, float] = {}
    for name, us, module_class in launches(profiler.events(), on_gpu):
        found = class_of(name)
        found = module_class if found == "other" else found
        times[found] = times.get(found, 0.0) + us / PROFILED
    return times


def launches(events, on_gpu: bool) -> list[tuple[str, float, str]]:
    """(kernel or op, its microseconds, the class of the module that used it)."""
    on_cpu = torch.autograd.DeviceType.CPU
    ops = [e for e in events if e.device_type == on_cpu and not e.name.startswith(RANGE)]
    if not on_gpu:
        return [(e.name, e.self_cpu_time_total, module_class(e)) for e in ops]
    found = [(k.name, k.duration, module_class(e)) for e in ops for k in e.kernels]
    # Kernels that the profiler knows no op of: by their names alone.
    known: dict[str, float] = {}
    for name, us, _ in found:
        known[name] = known.get(name, 0.0) + us
    for event in events:
        if event.device_type != on_cpu and not event.name.startswith(RANGE):
            known[event.name] = known.get(event.name, 0.0) - event.time_range.elapsed_us()
    return found + [(name, -us, "other") for name, us in known.items() if us < 0]


def module_class(event) -> str:
    """Names the module that an event belongs to: the class that the innermost range around it
    names."""
    while event is not None:
        if event.name.startswith(RANGE):
            return event.name.removeprefix(RANGE)
        event = event.cpu_parent
    return "other"


class ranges:
    """Each module's forward within a range that names its class."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.hooks, self.entered = model, [], []

    def __enter__(self) -> None:
        for module in self.model.modules():
            for word, name in MODULES:
                if re.search(word, type(module).__name__):
                    self.hooks.append(module.register_forward_pre_hook(self.enter(name)))
                    self.hooks.append(module.register_forward_hook(self.leave))
                    break

    def enter(self, name: str):
        def hook(module, args):
            self.entered.append(record_function(RANGE + name))
            self.entered[-1].__enter__()

        return hook

    def leave(self, module, args, output) -> None:
        self.entered.pop().__exit__(None, None, None)

    def __exit__(self, *_) -> None:
        for hook in self.hooks:
            hook.remove()
