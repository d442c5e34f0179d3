"""Whole layers of experts on the simulated MI300X: what the cycle model says of each launch.

    python benchmarks/simulated_moe_layers.py [--layer NAME,TOKENS,KIND ...] [--config TEXT ...]

Prints the table of docs/results/moe.md. Every token meets k different experts of all that the model
has, as likely as one another; a part of eight (EP8) holds the first eighth of them and skips the
other ids. The launchers' machine code runs in the simulator (checkers off) and the cycle model
plays each launch, caches cold: nothing here was measured on an AMD GPU. The floor is that of the
touched experts' weights at 4.2 TB/s. Weights are zeros, which take no memory here and as long as
others.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import tempfile
from pathlib import Path

REPORTS = tempfile.TemporaryDirectory()
os.environ["SIMULATOR_REPORT_DIR"] = REPORTS.name  # the stand-in reads it when it is loaded

import torch  # noqa: E402
from simulated_moe import TERABYTES  # noqa: E402
from simulated_product import aligned, arguments, print_table, simulated, start  # noqa: E402

# Of each model: H, I, E of this GPU, E of the model, k, and its activation.
OAI = {"activation": "swigluoai", "limit": 7.0, "interleaved": True}
MODELS = {
    "Mixtral-8x7B": (4096, 14336, 8, 8, 2, {}),
    "Qwen3-30B-A3B": (2048, 768, 128, 128, 8, {}),
    "DeepSeek-V3-TP8": (7168, 256, 256, 256, 8, {}),
    "DeepSeek-V3-EP8": (7168, 2048, 32, 256, 8, {}),
    # A part of eight as published measurements have it: 32 experts and the shared one, nine a
    # token, all of them here.
    "DeepSeek-V3-EP8-all": (7168, 2048, 33, 33, 9, {}),
    "GPT-OSS-120B": (2880, 2880, 128, 128, 4, OAI),
    "Routing": (64, 32, 128, 128, 8, {}),  # of a layer whose products are next to nothing
}
LAYERS = [
    "Qwen3-30B-A3B,1,row", "Qwen3-30B-A3B,8,row", "Qwen3-30B-A3B,64,row",
    "DeepSeek-V3-TP8,1,block", "GPT-OSS-120B,1,mxfp4", "Mixtral-8x7B,1,row",
    "DeepSeek-V3-EP8,64,block", "DeepSeek-V3-EP8-all,64,block",
]  # fmt: skip
STEPS = ("route", "x to FP8", "gate_up", "h to FP8", "down", "combine")


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Never written, so the host keeps no memory for it."""
    storage = torch.zeros(math.prod(shape) * dtype.itemsize + (2 << 20), dtype=torch.uint8)
    begin = -storage.data_ptr() % (2 << 20)
    count = math.prod(shape) * dtype.itemsize
    return storage[begin : begin + count].view(dtype).view(shape)


def weights(kind: str, experts: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    if kind == "bf16":
        return zeros(experts, n, k, dtype=torch.bfloat16), None
    if kind == "mxfp4":
        return (zeros(experts, n, k // 2, dtype=torch.uint8),
                zeros(experts, n, k // 32, dtype=torch.uint8))  # fmt: skip
    scales = {"row": (n, 1), "block": (-(-n // 128), -(-k // 128))}[kind]
    return zeros(experts, n, k, dtype=simulated.NATIVE), zeros(experts, *scales, dtype=torch.float)


def routed(tokens: int, experts: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, experts, generator=generator).topk(k).indices.int()
    return aligned(torch.full((tokens, k), 1 / k)), aligned(ids)


def run(name: str, tokens: int, kind: str, config: str | None) -> tuple[str, float]:
    """One call; the config that it took, and the floor of its bytes in us."""
    hidden, intermediate, experts, of_all, k, options = MODELS[name]
    x = aligned(torch.zeros(tokens, hidden, dtype=torch.bfloat16))
    gate_up, scale_gate_up = weights(kind, experts, 2 * intermediate, hidden)
    down, scale_down = weights(kind, experts, hidden, intermediate)
    biases = [zeros(experts, n, dtype=torch.bfloat16) if options else None
              for n in (2 * intermediate, hidden)]  # fmt: skip
    topk_weights, ids = routed(tokens, of_all, k)
    options = {"activation": "silu", "limit": math.inf, "interleaved": False, **options}
    quantised = kind in ("row", "block")
    given = (torch.zeros_like(x), x, gate_up, down, topk_weights, ids, scale_gate_up, scale_down,
             *biases, *options.values(), quantised, False)  # fmt: skip
    config = config or simulated.ops.fused_moe_configs(*given).splitlines()[0]
    simulated.ops.fused_moe(*given, config)
    touched = len({e for e in ids.flatten().tolist() if e < experts})
    tensors = [t for t in (gate_up, down, scale_gate_up, scale_down) if t is not None]
    return config, sum(t.nbytes for t in tensors) / experts * touched / (TERABYTES * 1e6)


def launches() -> list[dict]:
    """What the stand-in wrote of each launch since the last look, in order."""
    paths = sorted(Path(REPORTS.name).iterdir(), key=lambda p: int(re.findall(r"\d+", p.name)[-1]))
    reports = [json.loads(path.read_text()) for path in paths]
    for path in paths:
        path.unlink()
    return reports


def by_step(reports: list[dict]) -> dict[str, float]:
    """Modelled us of each step of a layer; 0 for one that was not launched."""
    times, products = dict.fromkeys(STEPS, 0.0), 0
    for report in reports:
        kernel = report["kernel"]
        if re.search("moe_(route|count|plan|place)", kernel):
            step = "route"
        elif "moe_combine" in kernel:
            step, products = "combine", 0  # the next is of another slice of tokens
        elif "moe_quantize" in kernel:
            step = "h to FP8" if products else "x to FP8"
        else:
            step, products = ("down" if products else "gate_up"), products + 1
        times[step] += report["cycles"]["seconds"] * 1e6
    return times


def row(layer: str, config: str | None) -> list[str]:
    name, tokens, kind = layer.split(",")
    launches()
    config, floor = run(name, int(tokens), kind, config)
    times = by_step(launches())
    total = sum(times.values())
    print(f"{layer} `{config}`: {total:.1f} us", file=sys.stderr, flush=True)
    return [
        f"{name}, {tokens}, {kind}",
        f"`{config}`",
        f"{floor:.1f}",
        f"{total:.1f}",
        f"{total / floor:.2f}",
        *(f"{time:.1f}" if time else "" for time in times.values()),
    ]


def main() -> None:
    summary = __doc__.partition("\n")[0]
    form = "MODEL,TOKENS,row|block|bf16|mxfp4"
    given = arguments(summary, LAYERS, form, "layer").parse_args()
    start()
    header = ["layer, tokens, weights", "config", "floor us", "modelled us", "x", *STEPS]
    print_table(header, row, given)


if __name__ == "__main__":
    main()
