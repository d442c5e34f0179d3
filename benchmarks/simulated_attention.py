"""attention on the simulated MI300X: decode beside the bytes that it needs, prefill by the order of
its workgroups and by what carries P from one product to the next.

    python benchmarks/simulated_attention.py decode [--save]
    python benchmarks/simulated_attention.py prefill [--tokens 8192] [--kind NAMES ...]

The launchers' machine code runs in the simulator (checkers off), and the cycle model plays it;
nothing here was measured on an AMD GPU. Decode: one query a sequence, 32 query and 8 KV heads of
128, on the whole GPU. Prefill: one prompt, bfloat16, 4 query heads and their KV head of 128 on one
XCD of eight, with an eighth of the memory's rates: what each XCD does with 32 query and 8 KV heads.
--save writes results/tables, from where `python benchmarks/pages.py --write` puts them into
docs/kernels/attention_journal.md.
"""

from __future__ import annotations

import argparse
import datetime

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
    parser.add_argument("step", choices=["decode", "prefill"])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kind", nargs="+", default=KINDS, help="as causal,heavy,registers")
    parser.add_argument("--save", action="store_true", help="write results/tables too")
    given = parser.parse_args()
    start()
    command = f"python benchmarks/simulated_attention.py {given.step}"
    if given.step == "decode":
        header, lines = DECODE_HEADER, decode()
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
