"""Attention of decode steps and of prompts beside torch's SDPA, on this GPU.

    python benchmarks/attention.py [--save]

Decode: one query a sequence, 32 query and 8 KV heads of 128, every key in use. Prompts: causal,
PROMPTS below. Times are medians of
CUDA-graph replays (gpu.py has the clock), microseconds, over caches that L2 does not hold. SDPA's
backends are cuDNN's and flash, with enable_gqa, so that no head is copied; neither takes FP8. The
floor is the time of the cache's bytes at the read rate measured in the same run.

--save writes results/tables/attention_numbers.csv and attention_prompts.csv.
"""

from __future__ import annotations

import argparse
import sys

import gpu
import tables
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

HEADS, KV_HEADS, SIZE = 32, 8, 128
SHAPES = ((1, 1024), (1, 8192), (1, 65536), (8, 8192), (32, 2048), (64, 8192))
PROMPTS = (  # sequences, tokens, query heads, KV heads, head size
    (1, 512, 32, 8, 128), (1, 2048, 32, 8, 128), (1, 8192, 32, 8, 128), (4, 2048, 32, 8, 128),
    (1, 16384, 64, 8, 128), (1, 4096, 32, 32, 64), (2, 4096, 16, 16, 192), (1, 4096, 16, 8, 256),
)  # fmt: skip
COLD_BYTES = 300e6
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


def inputs_of(batch: int, keys: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
    cache_bytes = 2 * batch * keys * KV_HEADS * SIZE * dtype.itemsize
    result = []
    for _ in range(max(2, int(COLD_BYTES / cache_bytes) + 1)):
        q = torch.randn(batch, 1, HEADS, SIZE, device="cuda").bfloat16()
        k, v = (
            torch.randn(batch, keys, KV_HEADS, SIZE, device="cuda", dtype=torch.bfloat16).to(dtype)
            for _ in range(2)
        )
        result.append((q, k, v))
    return result


def their_time(package, backend: SDPBackend, inputs: list, causal: bool = False) -> float:
    def call(qkv):
        q, k, v = qkv
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal,
                enable_gqa=True,
            )  # fmt: skip

    return gpu.measure(package, call, inputs).median


def prompts(package) -> list[list[str]]:
    """TFLOP/s of causal prompts, of half the products: 2 * batch * heads * tokens^2 * size."""
    rows = []
    for batch, tokens, heads, kv_heads, size in PROMPTS:
        inputs = []
        for _ in range(2):
            shapes = [(batch, tokens, h, size) for h in (heads, kv_heads, kv_heads)]
            inputs.append(tuple(torch.randn(s, device="cuda").bfloat16() for s in shapes))

        def ours(qkv):
            return package.flash_attn_func(*qkv, causal=True)

        fp8 = [(q, *(t.to(torch.float8_e4m3fn) for t in kv)) for q, *kv in inputs]
        times = [
            gpu.measure(package, ours, inputs).median,
            *(their_time(package, b, inputs, causal=True) for b in BACKENDS.values()),
            gpu.measure(package, ours, fp8).median,
        ]
        products = 2 * batch * heads * tokens**2 * size
        label = f"{batch} x {tokens:,}, {heads}/{kv_heads} heads of {size}"
        rows.append([label, *(f"{t:.1f} ({products / t / 1e6:.0f})" for t in times)])
        print(*rows[-1], sep="\t", flush=True)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    package = gpu.load_package()
    rate = gpu.read_rate(package)
    rows = []
    for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float8_e4m3fn, "FP8")):
        for batch, keys in SHAPES:
            inputs = inputs_of(batch, keys, dtype)
            ours = gpu.measure(package, lambda qkv: package.flash_attn_func(*qkv), inputs).median
            theirs = {}
            if dtype == torch.bfloat16:
                theirs = {n: their_time(package, b, inputs) for n, b in BACKENDS.items()}
            best = min(theirs, key=theirs.get, default=None)
            floor = 2 * batch * keys * KV_HEADS * SIZE * dtype.itemsize / rate * 1e6
            beside = f"{theirs[best]:.1f} {best}" if best else ""
            rows.append([f"{name}, {batch} x {keys:,}", f"{ours:.1f}", beside, f"{floor:.1f}"])
            print(*rows[-1], sep="\t", flush=True)
            del inputs
    rows_of_prompts = prompts(package)
    if options.save:
        source = f"python benchmarks/attention.py --save\n{gpu.machine()}"
        first = f"{torch.cuda.get_device_name()}, measured: cache, sequences x keys"
        header = [first, "us", "quickest SDPA", "floor, us"]
        tables.save_printed("attention_numbers", source, header, rows)
        first = f"{torch.cuda.get_device_name()}, measured: causal prompts, us (TFLOP/s)"
        header = [first, "bfloat16", *BACKENDS, "FP8 keys and values"]
        tables.save_printed("attention_prompts", source, header, rows_of_prompts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
