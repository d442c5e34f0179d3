"""fused_moe beside transformers' own experts, on this GPU or, without one, on this CPU.

    python benchmarks/moe.py [--save] [--quick] [--threads N] [--peers FOLDER]

A whole layer without its router, uniform random routing, another one in every call; on a GPU the
weights of several layers in turn, too, for L2 keeps some of what one layer's calls ask for. So the
experts are cold. Times are medians, microseconds: of CUDA-graph replays (gpu.py has the clock), or
of calls that take turns (cpu.py). transformers' grouped_mm is torch's grouped product twice, its
batched_mm gathers a weight for each slot; both in bfloat16, as they come. On a GPU torch's
_scaled_grouped_mm in FP8 too (torch_fp8.py), and with --peers, of what peers.py has built, vLLM's
fused MoE (vllm_experts.py), of the same weights as ours; where its result is not ours, it is not
timed. "x" is the quickest of theirs over ours in FP8. The floor is the time of the touched experts'
FP8 bytes at the read rate measured in the same run, or of the products at --tflops.

--save writes results/<device>_moe.json, and docs/<device>_moe.md from it.
"""

from __future__ import annotations

import datetime
import itertools
import math
import statistics
import sys
from collections.abc import Callable

import cpu
import gpu
import kernels
import page
import torch
import torch_fp8
import vllm_experts
from gpu_report import markdown
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

# (H, I, E, k) of a layer.
GPU_MODELS = {
    "Mixtral-8x7B": (4096, 14336, 8, 2),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "DeepSeek-V3 TP8": (7168, 256, 256, 8),
    "GPT-OSS-120B": (2880, 2880, 128, 4),
}
CPU_MODELS = {
    "Mixtral-8x7B TP8": (4096, 1792, 8, 2),
    "Qwen3-30B-A3B": (2048, 768, 128, 8),
    "GPT-OSS-20B": (2880, 2880, 32, 4),
}
GPU_TOKENS, CPU_TOKENS = [1, 8, 64, 512, 4096], [1, 8, 64, 512, 2048]
ROUTINGS = 32
TURN_BYTES = 4e9  # of FP8 weights that take turns on a GPU: an L2 holds little of them
LONG_CALLS = {"launches": 6, "replays": 5}  # from 512 tokens on, where a call takes milliseconds
OURS = ["FP8", "FP8 blocks", "FP8, 16-bit inputs", "bf16", "MXFP4"]
# vLLM's, by ours of the same weights.
VLLM = {"vLLM FP8": "FP8", "vLLM FP8 blocks": "FP8 blocks", "vLLM bf16": "bf16"}
THEIRS = ["grouped_mm", "batched_mm", "FP8 _scaled_grouped_mm", *VLLM]
# What vLLM's may differ by, norm over norm. What stands between the products is rounded to bfloat16
# there, which moves some inputs of the second one by a step of FP8: up to 4% in trials on a CPU.
# Scales of a neighbour's, random as they are, made it 37% or more.
TOLERANCE = 0.1


def their_experts(w_gate_up: torch.Tensor, w_down: torch.Tensor) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(
        hidden_size=w_gate_up.shape[2], moe_intermediate_size=w_down.shape[2],
        num_experts=w_gate_up.shape[0],
    )  # fmt: skip
    with torch.device("meta"):
        experts = Qwen3MoeExperts(config)
    experts.gate_up_proj = torch.nn.Parameter(w_gate_up, requires_grad=False)
    experts.down_proj = torch.nn.Parameter(w_down, requires_grad=False)
    return experts


def candidates(
    package, hidden: int, intermediate: int, experts: int, device, with_vllm: bool
) -> dict:
    """Name -> call(x, routing), of the same bfloat16 weights."""
    shapes = (experts, 2 * intermediate, hidden), (experts, hidden, intermediate)
    wide = [torch.randn(s, device=device, dtype=torch.bfloat16).mul_(s[2] ** -0.5) for s in shapes]
    theirs = their_experts(*wide)

    def fp8(shape: tuple, blocks: bool) -> tuple[torch.Tensor, torch.Tensor]:
        dialect = package.native_fp8_dtype(torch.device(device))
        codes = torch.randn(shape[2], device=device).mul_(60).to(dialect)
        w = codes.repeat(shape[0], shape[1], 1)
        size = (-(-shape[1] // 128), -(-shape[2] // 128)) if blocks else (shape[1], 1)
        return w, torch.rand(shape[0], *size, device=device) / 1000

    def mxfp4(shape: tuple) -> tuple[torch.Tensor, torch.Tensor]:
        w = torch.randint(256, (shape[2] // 2,), dtype=torch.uint8, device=device)
        scale = torch.full((*shape[:2], shape[2] // 32), 120, dtype=torch.uint8, device=device)
        return w.repeat(shape[0], shape[1], 1), scale

    def ours(pairs: list, **options) -> Callable:
        (w_gate_up, scale_gate_up), (w_down, scale_down) = pairs
        return lambda x, routing: package.fused_moe(
            x, w_gate_up, w_down, *routing, scale_gate_up=scale_gate_up, scale_down=scale_down,
            **options,
        )  # fmt: skip

    def transformers(name: str) -> Callable:
        def call(x, routing):
            theirs.config._experts_implementation = name
            return theirs(x, routing[1].long(), routing[0].bfloat16())

        return call

    rows, blocks = ([fp8(shape, of_blocks) for shape in shapes] for of_blocks in (False, True))
    named = {name: transformers(name) for name in THEIRS[:2]}
    if theirs.gate_up_proj.is_cuda:
        scaled = torch_fp8.ScaledExperts(*wide)
        named[THEIRS[2]] = lambda x, routing: scaled(x, routing[1], routing[0])
    if with_vllm:
        of_kinds = rows, blocks, [(w, None) for w in wide]
        for name, pairs, block in zip(VLLM, of_kinds, (0, 128, 0), strict=True):
            weights, scales = zip(*pairs, strict=True)
            named[name] = vllm_experts.call(*weights, scales, block)
    return {
        "FP8": ours(rows),
        "FP8 blocks": ours(blocks),
        "FP8, 16-bit inputs": ours(rows, quantize_input=False),
        "bf16": ours([(w, None) for w in wide]),
        "MXFP4": ours([mxfp4(shape) for shape in shapes]),
        **named,
    }


def random_routings(tokens: int, experts: int, k: int, device) -> list[tuple]:
    found = []
    for _ in range(ROUTINGS):
        ids = torch.rand(tokens, experts, device=device).topk(k).indices.int()
        found.append((torch.rand(tokens, k, device=device), ids))
    return found


def difference(call: Callable, reference: Callable, x: torch.Tensor, routings: list) -> float:
    """Norm over norm, of 32 results or more: weights here are one row, so that a single result is a
    single sum, which may be near nothing."""
    pairs = [(call(x, r).float(), reference(x, r).float()) for r in routings[: -(-32 // len(x))]]
    theirs, ours = (torch.cat(results) for results in zip(*pairs, strict=True))
    return ((theirs - ours).norm() / ours.norm()).item()


def in_turn(calls: list[Callable]) -> Callable:
    turn = itertools.cycle(calls)
    return lambda x, routing: next(turn)(x, routing)


def times_us(package, layers: list[dict], x: torch.Tensor, routings: list) -> tuple[dict, dict]:
    """Median of each call, and the errors of those that this device cannot run. layers: the calls
    of each, by name."""
    calls, found, errors = layers[0], {}, {}
    runnable = {}
    for name, call in calls.items():
        # batched_mm copies a weight for each slot: beyond a few tokens that is not its use.
        if name == "batched_mm" and x.shape[0] > 8:
            continue
        try:
            call(x, routings[0])
            if name in VLLM:
                over = difference(call, calls[VLLM[name]], x, routings)
                if not over < TOLERANCE:
                    raise RuntimeError(f"differs from ours by {over:.1%}")
            runnable[name] = call
        except Exception as error:  # whatever a foreign package may raise
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0][:120]
    if x.is_cuda:
        counts = LONG_CALLS if x.shape[0] >= 512 else {}
        routings = routings[: counts.get("launches")]
        for name in runnable:
            call = in_turn([layer[name] for layer in layers])
            measured = gpu.measure(package, lambda r, call=call: call(x, r), routings, **counts)
            found[name] = measured.median
        return found, errors
    turn = {name: 0 for name in runnable}

    def next_call(name: str) -> Callable:
        def call():
            turn[name] += 1
            return runnable[name](x, routings[turn[name] % len(routings)])

        return call

    return cpu.medians_us({name: next_call(name) for name in runnable}, 6.0), errors


def cell(package, model: str, shape: tuple, tokens: int, layers: list[dict], device) -> dict:
    hidden, _, experts, k = shape
    x = torch.randn(tokens, hidden, device=device, dtype=torch.bfloat16)
    routings = random_routings(tokens, experts, k, device)
    touched = statistics.mean(len(ids.unique()) for _, ids in routings)
    found, errors = times_us(package, layers, x, routings)
    return {"model": model, "shape": shape, "tokens": tokens, "touched": touched,
            "us": found, "errors": errors}  # fmt: skip


def floor_us(found: dict, rate: float, tflops: float | None) -> float:
    hidden, intermediate, _, k = found["shape"]
    moved = found["touched"] * 3 * hidden * intermediate / rate
    done = 6 * found["tokens"] * k * hidden * intermediate / (tflops * 1e12) if tflops else 0
    return max(moved, done) * 1e6


def about_vllm(saved: dict) -> str:
    """What of vLLM ran, and what did not."""
    tuned = "; ".join(
        f"{model}: {', '.join(names)}" for model, names in saved["vllm"]["tuned"].items() if names
    )
    missing: dict[str, list[str]] = {}
    for found in saved["cells"]:
        for name, error in found["errors"].items():
            if name in VLLM:
                label = f"{name}, {found['model']} ({error})"
                missing.setdefault(label, []).append(str(found["tokens"]))
    left_out = "; ".join(f"{label}, {' '.join(tokens)} tokens" for label, tokens in missing.items())
    return (
        f"vLLM {saved['vllm']['version']}, of our weights: its modular kernel without expert "
        "parallelism, its Triton kernel and its CUDA ops,\nfrom its own files, without DeepGEMM. "
        f"Its configs tuned for this GPU: {tuned or 'none'}; its default ones elsewhere.\n"
        f"Not measured: {left_out or 'none'}.\n"
    )


def document(saved: dict) -> str:
    theirs = [name for name in THEIRS if any(name in found["us"] for found in saved["cells"])]
    lines = []
    for found in saved["cells"]:
        us = found["us"]
        best = min((us[name] for name in THEIRS if name in us), default=None)
        lines.append(
            [
                f"{found['model']}, {found['tokens']}",
                *(f"{us[name]:,.1f}" if name in us else "-" for name in [*OURS, *theirs]),
                f"{floor_us(found, saved['read_rate'], saved['tflops']):,.1f}",
                "-" if best is None or "FP8" not in us else f"{best / us['FP8']:.2f}",
            ]
        )
    header = ["model, tokens", *OURS, *(f"theirs, {name}" for name in theirs), "FP8 floor", "x"]
    rate = f"{saved['read_rate'] / 1e12:.2f} TB/s" if saved["tflops"] else (
        f"{saved['read_rate'] / 1e9:.1f} GB/s"
    )  # fmt: skip
    return "\n".join(
        [
            f"# Mixtures of experts on {saved['machine']}\n",
            f"Measured {saved['date']} by `python benchmarks/moe.py --save`: us a layer without "
            "its router, medians, cold experts.\nFP8: a scale a channel; theirs: transformers' "
            f"experts in bfloat16, or torch's FP8. Floor: the touched experts' FP8 bytes at {rate}"
            + (f",\nor {saved['tflops']:.0f} TFLOP/s. " if saved["tflops"] else ".\n")
            + "What bounds it: [kernels/moe.md](kernels/moe.md)."
            + "\n",
            *([about_vllm(saved)] if saved.get("vllm") else []),
            markdown(header, lines),
            "",
        ]
    )


def tuned_names(shape: tuple) -> list[str]:
    """Which of vLLM's calls run by a config that was tuned for this GPU."""
    _, intermediate, experts, _ = shape
    kinds = zip(VLLM, (True, True, False), (0, 128, 0), strict=True)
    return [
        n for n, fp8, block in kinds if vllm_experts.is_tuned(experts, intermediate, fp8, block)
    ]


def main() -> int:
    arguments = page.arguments(__doc__, quick="one model", peers="vLLM's experts on a GPU")
    torch.manual_seed(0)
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    if on_gpu:
        package, machine = gpu.load_package(), gpu.machine()
        rate = gpu.read_rate(package)
    else:
        package = kernels.get_local_kernel(cpu.ROOT, backend="cpu")
        torch.set_num_threads(arguments.threads)
        rate = cpu.read_bandwidth()
        machine = f"{cpu.processor()}, {cpu.threads_used()}; torch {torch.__version__}"
    models, tokens = (GPU_MODELS, GPU_TOKENS) if on_gpu else (CPU_MODELS, CPU_TOKENS)
    if arguments.quick:
        models, tokens = {"Qwen3-30B-A3B": models["Qwen3-30B-A3B"]}, tokens[:2]
    vllm = None
    if on_gpu and arguments.peers:
        version = vllm_experts.load(arguments.peers, torch.device(device))
        tuned = {model: tuned_names(shape) for model, shape in models.items()}
        vllm = {"version": version, "tuned": tuned}
    cells = []
    for model, shape in models.items():
        turns = math.ceil(TURN_BYTES / (3 * math.prod(shape[:3]))) if on_gpu else 1
        layers = [candidates(package, *shape[:3], device, vllm is not None) for _ in range(turns)]
        cells += [cell(package, model, shape, count, layers, device) for count in tokens]
        del layers
    saved = {
        "machine": machine, "date": str(datetime.date.today()), "read_rate": rate,
        "tflops": arguments.tflops if on_gpu else None, "vllm": vllm, "cells": cells,
    }  # fmt: skip
    page.publish(f"{gpu.device_name()}_moe", saved, document(saved), arguments.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
