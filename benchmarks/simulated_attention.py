"""attention on the simulated MI300X: decode beside the bytes that it needs, prefill by the order of
its workgroups and by what carries P from one product to the next.

    python benchmarks/simulated_attention.py decode [--save]
    python benchmarks/simulated_attention.py choice
    python benchmarks/simulated_attention.py prefill [--tokens 8192] [--kind NAMES ...]

The launchers' machine code runs in the simulator (checkers off), and the cycle model plays it;
nothing here was measured on an AMD GPU. Decode: one query a sequence, 32 query and 8 KV heads of
128, on the whole GPU. Choice: what the launcher takes, beside the quickest of other numbers of
parts of the keys, for other shapes. Prefill: one prompt, bfloat16, 4 query heads and their KV head
of 128 on one XCD of eight, with an eighth of the memory's rates: what each XCD does with 32 query
and 8 KV heads.
--save writes results/tables, from where `python benchmarks/pages.py --write` puts them into
docs/kernels/attention_journal.md.
"""

from __future__ import annotations

import argparse
import datetime
import itertools

import tables
import torch
from simulated_product import aligned, simulated, simulator, start

from simulator import cycles

# Sequences, keys of each, FP8.
DECODE = [
    (1, 1024, False), (1, 8192, False), (8, 8192, False), (32, 2048, False),
    (8, 8192, True), (16, 8192, True),
]  # fmt: skip
READ_BYTES_PER_US = 4.2e6  # what people measure of an MI300X's memory
XCDS = 8

Played = tuple[dict, cycles.Cycles]


def attend(
    batch: int, rows: int, keys: int, heads: tuple[int, int], kv_dtype: torch.dtype,
    causal: bool = False, config: str = "",
) -> Played:  # fmt: skip
    """Counters of the launch, and what the cycle model says of it."""
    q = aligned(torch.randn(batch, rows, heads[0], 128).bfloat16())
    k, v = (aligned(torch.randn(batch, keys, heads[1], 128).to(kv_dtype)) for _ in range(2))
    out = aligned(torch.zeros_like(q))
    nothing = [None] * 8
    simulated.ops.attention(
        out, None, q, k, v, *nothing, rows, keys, 128**-0.5, -1, 0 if causal else -1, 0.0, config
    )
    last = simulator.load_runtime().last()
    return last.counters, last.cycles


DECODE_HEADER = ["modelled: cache, sequences x keys", "us", "floor, us", "us / floor"]


def decode() -> list[list[str]]:
    lines = []
    for batch, keys, fp8 in DECODE:
        kv_dtype = simulated.NATIVE if fp8 else torch.bfloat16
        _, played = attend(batch, 1, keys, (32, 8), kv_dtype)
        us = played.seconds * 1e6
        floor = 2 * batch * keys * 8 * 128 * kv_dtype.itemsize / READ_BYTES_PER_US
        name = f"{'FP8' if fp8 else 'bfloat16'}, {batch} x {keys:,}"
        lines.append([name, f"{us:.1f}", f"{floor:.1f}", f"{us / floor:.2f}"])
    return lines


# Query and KV heads, and sequences, keys of each.
CHOICE_HEADS = [(32, 8), (64, 8), (8, 8)]
CHOICE_CELLS = [(1, 300), (1, 2500), (1, 12000), (3, 5000), (6, 1000), (20, 3000), (48, 1500)]
PARTS = [1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64]
CHOICE_HEADER = ["modelled: heads, cache, sequences x keys", "choice, us", "best, us", "parts"]


def choice() -> list[list[str]]:
    lines, behind = [], []
    for heads in CHOICE_HEADS:
        for (batch, keys), fp8 in itertools.product(CHOICE_CELLS, (False, True)):
            kv_dtype = simulated.NATIVE if fp8 else torch.bfloat16
            items = batch * heads[1]
            tried = [n for n in PARTS if (items * n <= 1300 and n * 32 <= keys) or n == 1]
            configs = ["", *(f"decode rows=16 parts={n} {_REST}" for n in tried)]
            taken, *times = [
                1e6 * attend(batch, 1, keys, heads, kv_dtype, config=config)[1].seconds
                for config in configs
            ]
            best, parts = min(zip(times, tried, strict=True))
            behind.append(taken / min(taken, best) - 1)
            name = f"{heads[0]}/{heads[1]}, {'FP8' if fp8 else 'bfloat16'}, {batch} x {keys:,}"
            lines.append([name, f"{taken:.1f}", f"{best:.1f}", str(parts)])
            print(lines[-1], flush=True)
    print(f"behind the best: {sum(behind) / len(behind):.1%} on average, {max(behind):.1%} at most")
    return lines


_REST = "xcds=1 heavy_first=0 chain=registers"
PREFILL_HEADER = ["modelled: one prompt", "order", "P", "us", "TFLOP/s of 8 XCDs",
                  "SIMD cycles without a wave", "MB through LDS"]  # fmt: skip


def prefill(tokens: int, kinds: list[str]) -> list[list[str]]:
    whole = cycles.MACHINES[simulated.TARGET]
    share = ("fabric_bytes_per_s", "write_bytes_per_s", "memory_bytes_per_s")
    one_xcd = {name: getattr(whole, name) / XCDS for name in share}
    for name in ("memory_channels", "infinity_kib"):
        one_xcd[name] = getattr(whole, name) // XCDS
    machine = cycles.machine_for(simulated.TARGET, dies=1, **one_xcd)
    simulator.load_runtime().cycles(machine)
    lines = []
    for kind in kinds:
        mask, first, chain = kind.split(",")
        causal, heavy = mask == "causal", first == "heavy"
        config = f"prefill rows=192 parts=1 xcds=1 heavy_first={int(heavy)} chain={chain}"
        counters, played = attend(1, tokens, tokens, (4, 1), torch.bfloat16, causal, config)
        operations = 4 * XCDS * 4 * 128 * tokens * (tokens + 1) / (2 if causal else 1)
        lines.append([
            f"{tokens:,} tokens, {mask}", f"{first} first", chain, f"{played.seconds * 1e6:.0f}",
            f"{operations / played.seconds / 1e12:.0f}", f"{played.spent['empty']:.0%}",
            f"{counters['lds_bytes'] / 1e6:,.0f}",
        ])  # fmt: skip
        print(lines[-1], flush=True)
    return lines


KINDS = ["causal,heavy,registers", "causal,light,registers", "causal,heavy,lds",
         "full,heavy,registers"]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("step", choices=["decode", "choice", "prefill"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kind", nargs="+", default=KINDS, help="as causal,heavy,registers")
    parser.add_argument("--save", action="store_true", help="write results/tables too")
    given = parser.parse_args()
    start()
    command = f"python benchmarks/simulated_attention.py {given.step}"
    if given.step == "decode":
        header, lines = DECODE_HEADER, decode()
    elif given.step == "choice":
        header, lines = CHOICE_HEADER, choice()
    else:
        command += f" --tokens {given.tokens} --kind {' '.join(given.kind)}"
        header, lines = PREFILL_HEADER, prefill(given.tokens, given.kind)
    print(tables.markdown(header, lines))
    if given.save:
        name = f"attention_mi300x_{given.step}"
        if given.step == "prefill":
            name += f"_{given.tokens}"
        source = f"{command}, {datetime.date.today()}; modelled"
        tables.save_printed(name, source, header, lines)


if __name__ == "__main__":
    main()
