"""Attention on the CPU beside torch's SDPA, in one run on this machine.

    python benchmarks/attention_cpu.py [--threads N] [--save]

Candidates take turns, and the median is shown (cpu.py has the clock). Prompts: SDPA takes the same
call, with enable_gqa. Decode steps: one query a sequence, caches that no cache of the machine
holds, contiguous and in pages of 16 rows in any order; the floor is the time of their bytes at the
read bandwidth measured in the same run. SDPA has no pages and no FP8.

--save writes results/tables/attention_cpu.csv.
"""

from __future__ import annotations

import argparse
import itertools
import sys

import cpu
import kernels
import tables
import torch
import torch.nn.functional as F

BF16, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
# sequences, tokens, query heads, KV heads, head size, causal
PROMPTS = (
    (1, 128, 9, 3, 64, True), (1, 1024, 9, 3, 64, True), (1, 512, 32, 8, 128, True),
    (1, 1024, 32, 8, 128, False), (1, 2048, 8, 2, 128, True), (4, 256, 32, 8, 64, True),
    (1, 512, 16, 16, 96, False), (1, 512, 8, 8, 256, True), (1, 64, 32, 32, 128, True),
    (1, 16, 32, 8, 128, True),
)  # fmt: skip
# sequences, keys, query heads, KV heads, head size
STEPS = (
    (1, 2048, 9, 3, 64), (1, 8192, 32, 8, 128), (8, 2048, 32, 8, 128), (4, 4096, 8, 1, 256),
    (1, 4096, 32, 32, 128),
)  # fmt: skip
HEADER = ["call", "rocm-kernels, us", "SDPA, us", "SDPA / ours", "of the floor"]


def sdpa(q, k, v, causal=False):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)


def prompt_row(package, seconds, batch, tokens, heads, kv_heads, size, causal, dtype) -> list[str]:
    shapes = [(batch, tokens, h, size) for h in (heads, kv_heads, kv_heads)]
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    times = cpu.medians_us(
        {
            "ours": lambda: package.flash_attn_func(q, k, v, causal=causal),
            "SDPA": lambda: sdpa(q, k, v, causal),
        },
        seconds,
    )
    kind = "causal" if causal else "full"
    call = f"{batch} x {tokens:,} tokens, {kind}, {heads}/{kv_heads} heads of {size}, "
    ours, theirs = times["ours"], times["SDPA"]
    return [call + str(dtype)[6:], f"{ours:,.0f}", f"{theirs:,.0f}", f"{theirs / ours:.2f}", ""]


def step_rows(package, seconds, bandwidth, batch, keys, heads, kv_heads, size) -> list[list[str]]:
    rows = []
    for dtype, name in ((BF16, "bfloat16"), (E4M3, "FP8")):
        moved = 2 * batch * keys * kv_heads * size * dtype.itemsize
        count = max(2, cpu.ROTATED_BYTES // moved + 1)
        caches = [
            [torch.randn(batch, keys, kv_heads, size).to(dtype) for _ in range(2)]
            for _ in range(count)
        ]
        turn = itertools.cycle(caches)
        q = torch.randn(batch, 1, heads, size).to(BF16)
        order = torch.randperm(batch * keys // 16).int().view(batch, -1)

        def paged(q=q, turn=turn, order=order, kv_heads=kv_heads, size=size):
            k, v = (t.view(-1, 16, kv_heads, size) for t in next(turn))
            return package.flash_attn_with_kvcache(q, k, v, block_table=order)

        calls = {
            "": lambda q=q, turn=turn: package.flash_attn_func(q, *next(turn)),
            ", pages of 16": paged,
        }
        if dtype == BF16:
            calls["SDPA"] = lambda q=q, turn=turn: sdpa(q, *next(turn))
        times = cpu.medians_us(calls, seconds)
        theirs = times.pop("SDPA", None)
        for layout, ours in times.items():
            call = f"{batch} x {keys:,} keys, {heads}/{kv_heads} heads of {size}, {name}{layout}"
            beside = ["", ""] if theirs is None else [f"{theirs:,.0f}", f"{theirs / ours:.2f}"]
            of_floor = f"{moved / bandwidth * 1e6 / ours:.0%}"
            rows.append([call, f"{ours:,.0f}", *beside, of_floor])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--seconds", type=float, default=4.0, help="for each row")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    package = kernels.get_local_kernel(cpu.ROOT)
    bandwidth = cpu.read_bandwidth()
    machine = f"{cpu.processor()}, {cpu.threads_used()}, read bandwidth {bandwidth / 1e9:.1f} GB/s"
    print(machine)
    found = []
    with torch.inference_mode():
        for shape, dtype in itertools.product(PROMPTS, (BF16, F32)):
            found.append(prompt_row(package, options.seconds, *shape, dtype))
            print(*found[-1], sep="\t", flush=True)
        for shape in STEPS:
            rows = step_rows(package, options.seconds, bandwidth, *shape)
            found += rows
            for row in rows:
                print(*row, sep="\t", flush=True)
    if options.save:
        source = f"python benchmarks/attention_cpu.py --save\n{machine}, torch {torch.__version__}"
        tables.save_printed("attention_cpu", source, HEADER, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
