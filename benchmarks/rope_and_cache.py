"""rope_and_cache beside torch's own operations for the same work, on one CPU thread or a GPU.

    python benchmarks/rope_and_cache.py [--gpu] [--save]

Heads of 128, 32 of queries and 8 of keys and values, bfloat16, in one product; pages of 16 rows.
Beside it stands what transformers does, with the rows copied into the pages by their slots. On the
CPU the processor time of one thread counts (cpu.py has the clock), on a GPU CUDA graphs (gpu.py).
The floor is the time of the bytes, read once and written once, at the read rate of the same run.

--save puts the rows of this kind of machine into results/tables/rope_and_cache_numbers.csv.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable

import torch

HEADS, KV_HEADS, SIZE, PAGE = 32, 8, 128, 16
FP8 = torch.float8_e4m3fn
# Tokens, whether q and k have norms, the dtype of the cache.
CASES = (
    (1, False, torch.bfloat16), (1, True, torch.bfloat16), (32, False, FP8),
    (2048, False, torch.bfloat16), (2048, True, torch.bfloat16), (2048, True, FP8),
)  # fmt: skip
TABLE = "rope_and_cache_numbers"


def inputs_of(tokens: int, norms: bool, cache_dtype: torch.dtype, device: str) -> dict:
    slots = torch.randperm(4096, device=device)[:tokens]
    angle = torch.rand(tokens, SIZE // 2, device=device).repeat(1, 2) * 6
    weights = torch.rand(2, SIZE, device=device).bfloat16()
    caches = torch.zeros(2, 4096 // PAGE, PAGE, KV_HEADS, SIZE, device=device).to(cache_dtype)
    return {
        "qkv": torch.randn(tokens, HEADS + 2 * KV_HEADS, SIZE, device=device).bfloat16(),
        "cos": angle.cos().bfloat16(), "sin": angle.sin().bfloat16(), "slots": slots,
        "weights": weights.unbind() if norms else (None, None), "caches": caches.unbind(),
        "scale": torch.full((1,), 0.05, device=device) if cache_dtype == FP8 else None,
    }  # fmt: skip


def ours(package) -> Callable[[dict], torch.Tensor]:
    def call(given: dict) -> torch.Tensor:
        q_weight, k_weight = given["weights"]
        k_cache, v_cache = given["caches"]
        return package.rope_and_cache(
            given["qkv"], None, None, given["cos"], given["sin"], num_kv_heads=KV_HEADS,
            q_weight=q_weight, k_weight=k_weight, k_cache=k_cache, v_cache=v_cache,
            slot_mapping=given["slots"], k_scale=given["scale"], v_scale=given["scale"],
        )  # fmt: skip

    return call


def eager(given: dict) -> torch.Tensor:
    """Turns q and k as transformers does, and places k and v in the cache as vLLM's reference
    does."""
    q, k, v = given["qkv"].split((HEADS, KV_HEADS, KV_HEADS), 1)
    cos, sin = given["cos"][:, None], given["sin"][:, None]

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            h = x.float()
            x = weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    q, k = turned(q, given["weights"][0]), turned(k, given["weights"][1])
    for cache, rows in zip(given["caches"], (k, v), strict=True):
        flat = cache.view(-1, KV_HEADS, SIZE)
        if given["scale"] is None:
            flat[given["slots"]] = rows
        else:
            codes = (rows.float() / given["scale"]).clamp(-448, 448).to(FP8)
            flat.view(torch.uint8)[given["slots"]] = codes.view(torch.uint8)
    return q


def moved_bytes(tokens: int, cache_dtype: torch.dtype) -> int:
    read = (HEADS + 2 * KV_HEADS) * SIZE * 2 + 2 * SIZE * 2
    return tokens * (read + HEADS * SIZE * 2 + 2 * KV_HEADS * SIZE * cache_dtype.itemsize)


def times_on_cpu(tokens: int, norms: bool, cache_dtype: torch.dtype) -> dict[str, float]:
    import cpu

    given = inputs_of(tokens, norms, cache_dtype, "cpu")
    calls = {"ours": ours(loaded(False)), "torch": eager}
    return cpu.medians_us({name: lambda c=c: c(given) for name, c in calls.items()}, 3.0)


def times_on_gpu(tokens: int, norms: bool, cache_dtype: torch.dtype) -> dict[str, float]:
    import gpu

    package = loaded(True)
    count = gpu.buffers(moved_bytes(tokens, cache_dtype))
    inputs = [inputs_of(tokens, norms, cache_dtype, "cuda") for _ in range(count)]
    calls = {"ours": ours(package), "torch": eager}
    return {name: gpu.measure(package, call, inputs).median for name, call in calls.items()}


@functools.cache
def loaded(on_gpu: bool):
    """The built package."""
    if on_gpu:
        import gpu

        return gpu.load_package()
    import cpu
    import kernels

    return kernels.get_local_kernel(cpu.ROOT, backend="cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    if options.gpu:
        import gpu

        rate, machine = gpu.read_rate(loaded(True)), gpu.machine()
        kind = f"{torch.cuda.get_device_name()}, measured"
    else:
        import cpu

        torch.set_num_threads(1)
        rate, machine = cpu.read_bandwidth(), f"{cpu.processor()}, torch {torch.__version__}"
        kind = "CPU, one thread, measured"
    rows = []
    for tokens, norms, dtype in CASES:
        times = (times_on_gpu if options.gpu else times_on_cpu)(tokens, norms, dtype)
        floor = moved_bytes(tokens, dtype) / rate * 1e6
        what = f"{'norms, ' if norms else ''}{'FP8' if dtype == FP8 else 'bfloat16'} cache"
        case = f"{kind}: {tokens:,} token{'s' * (tokens > 1)}, {what}"
        rows.append([case, *(f"{us:,.1f}" for us in (*times.values(), floor))])
        print(*rows[-1], sep="\t", flush=True)
    if options.save:
        import tables

        others, source = [], f"python benchmarks/rope_and_cache.py --save\n{machine}"
        if (tables.RESULTS / "tables" / f"{TABLE}.csv").exists():
            is_cpu = kind.startswith("CPU")
            others = [row for row in tables.printed(TABLE)[1] if row[0].startswith("CPU") != is_cpu]
        header = ["", "us", "torch's operations", "floor, us"]
        tables.save_printed(TABLE, source, header, others + rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
