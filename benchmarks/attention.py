"""Attention of decode steps and of prompts beside that of other packages, on this GPU.

    python benchmarks/attention.py [--parts decode,prompts,configs,drawn,queries] [--quick] [--save]

Decode: one query a sequence, 32 query and 8 KV heads of 128, every key in use; ours also from pages
of 16 keys in any order. Prompts: PROMPTS below; TFLOP/s count half the products of causal ones.
Configs: for the calls of CONFIGS, other heads and short prompts among them, what the choice takes
beside the quickest of all configs. Drawn: the same for calls of chance; queries: for others, of 9
to 32 rows a KV head. Times are medians of CUDA-graph replays (gpu.py has the clock), microseconds,
over caches that L2 does not hold.

Peers: SDPA's backends cuDNN and flash, with enable_gqa, so that no head is copied; FlashAttention 3
and FlashInfer where they import (attention_peers.py). A peer whose result is not ours within 2 % is
not timed, and of its ways the quickest counts. The floor is the time of the cache's bytes at the
read rate measured in the same run.

--save writes results/tables/attention_numbers.csv and attention_prompts.csv, row by row, and of
configs all times to results/attention_configs.json, by which tests check the choice.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import sys
from collections.abc import Sequence

import attention_peers
import gpu
import tables
import torch
from result_text import result_text

HEADS, KV_HEADS, SIZE = 32, 8, 128
SHAPES = (
    (1, 512), (1, 1024), (1, 4096), (1, 8192), (1, 16384), (1, 65536), (8, 8192), (32, 2048),
    (64, 8192),
)  # fmt: skip
E4M3 = torch.float8_e4m3fn
PROMPTS = (  # sequences, tokens, query heads, KV heads, head size, causal
    *((1, 2**n, 32, 8, 128, c) for c in (True, False) for n in (10, 11, 12, 13, 14)),
    (1, 512, 32, 8, 128, True), (4, 2048, 32, 8, 128, True), (1, 16384, 64, 8, 128, True),
    *((1, 2**n, 32, 32, 64, c) for c in (True, False) for n in (10, 12, 14)),
    (2, 4096, 16, 16, 192, True), (1, 4096, 16, 8, 256, True),
)  # fmt: skip
STEPS = (  # sequences, keys
    *SHAPES, (2, 8192), (4, 2048), (4, 32768), (8, 512), (8, 1024), (8, 2048), (16, 4096),
    (32, 512), (32, 8192), (128, 1024),
)  # fmt: skip
CONFIGS = (  # sequences, queries, keys, query heads, KV heads, head size, of v, keys of a page or 0
    *((b, 1, keys, 32, 8, 128, 128, page) for page in (0, 16) for b, keys in STEPS),
    *((8, 1, 8192, 32, 8, 128, 128, page) for page in (1, 8, 24)),
    *((b, q, keys, 32, 8, 128, 128, 0)
      for b, keys in ((1, 8192), (8, 8192), (32, 2048)) for q in (2, 4, 8)),
    (1, 2, 65536, 32, 8, 128, 128, 0), (8, 2, 8192, 64, 8, 128, 128, 0),
    (32, 3, 1024, 28, 4, 128, 128, 0), (4, 1, 4096, 128, 8, 128, 128, 0),
    *((b, 1, keys, *heads, 0)
      for heads in ((8, 1, 128, 128), (28, 4, 128, 128), (40, 8, 128, 128), (32, 32, 64, 64),
                    (64, 8, 64, 64), (16, 8, 256, 256), (16, 16, 192, 128), (8, 1, 512, 512))
      for b, keys in ((1, 4096), (8, 4096), (32, 2048))),
    (1, 512, 512, 32, 8, 128, 128, 0), (8, 256, 256, 32, 8, 128, 128, 0),
    (32, 128, 128, 32, 8, 128, 128, 0), (1, 512, 4096, 32, 8, 128, 128, 0),
    (1, 512, 512, 16, 8, 256, 256, 0), (8, 256, 256, 16, 8, 256, 256, 0),
    (1, 512, 512, 16, 16, 192, 128, 0), (32, 128, 128, 16, 16, 192, 128, 0),
    (1, 512, 512, 8, 1, 512, 512, 0), (4, 1024, 1024, 8, 1, 512, 512, 0),
)  # fmt: skip
COLD_BYTES = 300e6
DRAWN_STEPS, DRAWN_PROMPTS = 48, 24


def drawn_calls() -> list[tuple]:
    """Calls as CONFIGS has them, of heads, lengths and pages by chance, the same each time: a rule
    must choose well for what nobody has listed."""
    chance = random.Random(0)

    def some(least: int, most: int) -> int:
        return round(least * (most / least) ** chance.random())

    calls: list[tuple] = []
    while len(calls) < DRAWN_STEPS + DRAWN_PROMPTS:
        size = chance.choice((64, 80, 96, 112, 128, 128, 160, 192, 256))
        kv_heads, group = chance.choice((1, 2, 3, 4, 5, 8, 10, 16, 32)), some(1, 16)
        if len(calls) < DRAWN_STEPS:
            batch, rows, keys = some(1, 100), chance.choice((1, 1, 1, 2, 3, 4, 8)), some(300, 40000)
            page = chance.choice((0, 0, 0, 16, 64))
        else:
            batch, rows, page = some(1, 32), some(20, 2000), 0
            keys = rows + chance.choice((0, 0, some(100, 8000)))
        fits = batch * keys * kv_heads * size < 2**28 and batch * rows * keys * kv_heads < 2**31
        if fits and kv_heads * group <= 96:
            calls.append((batch, rows, keys, kv_heads * group, kv_heads, size, size, page))
    return calls


def drawn_queries() -> list[tuple]:
    """The same of several queries a sequence, or many heads a KV head: what decode's larger tiles
    are for."""
    calls: list[tuple] = []
    for seed, count in ((5, 60), (11, 100)):
        chance = random.Random(seed)

        def some(least: int, most: int, chance=chance) -> int:
            return round(least * (most / least) ** chance.random())

        while len(calls) < count:
            size = chance.choice((64, 80, 96, 128, 128, 128, 256))
            kv_heads, group = chance.choice((1, 2, 4, 5, 8, 8, 16)), some(1, 16)
            rows, batch = chance.choice((1, 2, 3, 4, 5, 8)), some(1, 100)
            keys, page = some(300, 40000), chance.choice((0, 0, 16, 64))
            if 9 <= rows * group <= 32 and batch * keys * kv_heads * size < 2**28:
                calls.append((batch, rows, keys, kv_heads * group, kv_heads, size, size, page))
    return calls


def inputs_of(batch, rows, keys, heads, kv_heads, size, size_v=None, dtype=torch.bfloat16) -> list:
    """(q, k, v), as many as L2 does not hold."""
    size_v = size_v or size
    cache_bytes = batch * keys * kv_heads * (size + size_v) * dtype.itemsize
    result = []
    for _ in range(max(2, min(200, int(COLD_BYTES / cache_bytes) + 1))):
        q = torch.randn(batch, rows, heads, size, device="cuda").bfloat16()
        k, v = (
            torch.randn(batch, keys, kv_heads, n, device="cuda", dtype=torch.bfloat16).to(dtype)
            for n in (size, size_v)
        )
        result.append((q, k, v))
    return result


class Table:
    """Rows of a table that is printed, and saved with ``--save``. Columns of peers that are not
    here stay as a run on the same card has left them."""

    def __init__(self, name: str, header: list[str], saved: bool, said: dict[str, str]):
        self.name, self.header, self.saved, self.rows = name, header, saved, []
        self.kept: dict[str, dict[str, str]] = {}
        versions = [f"{peer} {text}" for peer, text in said.items()]
        if saved and (tables.RESULTS / "tables" / f"{name}.csv").exists():
            before, rows = tables.printed(name)
            if before[0] == header[0]:
                self.header = [*before, *(column for column in header if column not in before)]
                self.kept = {row[0]: dict(zip(before, row, strict=True)) for row in rows}
                missing = [column for column in before if column not in header]
                versions += [f"of an earlier run: {', '.join(missing)}"] if missing else []
        self.measured = header
        self.source = "\n".join(["python benchmarks/attention.py --save", gpu.machine(), *versions])
        print(*header, sep="\t", flush=True)

    def add(self, *cells: str) -> None:
        print(*cells, sep="\t", flush=True)
        row = self.kept.get(cells[0], {}) | dict(zip(self.measured, cells, strict=True))
        self.rows.append([row.get(column, "") for column in self.header])
        if self.saved:
            tables.save_printed(self.name, self.source, self.header, self.rows)


class Peers:
    """The others' times of the same call."""

    def __init__(self, package):
        self.package = package
        self.makers, self.said = attention_peers.find()
        for name, text in self.said.items():
            print(f"{name}: {text}", flush=True)

    def us(self, name: str, inputs: list, causal: bool, expected: torch.Tensor, long: bool):
        """Microseconds of the quickest of a peer's ways, or None."""
        times = []
        for make in self.makers[name]:
            try:
                call = make(*inputs[0], causal)
                error = (call(inputs[0]).float() - expected).norm() / expected.norm()
                if not error < 0.02:
                    print(f"{name} differs from ours by {error:.1%}", flush=True)
                    continue
                times.append(microseconds(self.package, call, inputs, long))
            except attention_peers.NotServed:
                pass
            except Exception as error:  # a foreign package's
                text = f"{name}: {type(error).__name__}: {error}"
                print(text.splitlines()[0][:160], flush=True)
        return min(times, default=None)


def microseconds(package, call, inputs: list, long: bool = False) -> float:
    launches, replays = (4, 7) if long else (gpu.MIN_LAUNCHES, gpu.REPLAYS)
    return gpu.measure(package, call, inputs, launches, replays).median


def decode(package, peers: Peers, rate: float, saved: bool, quick: bool) -> None:
    """A row a shape: 16-bit caches, ours and the others', then ours and FlashInfer's in FP8."""
    machine = f"{torch.cuda.get_device_name()}, measured, us: sequences x keys"
    of_fp8 = [name for name in peers.makers if name == "FlashInfer"]
    fp8_names = ["FP8", "FP8 in pages", *(f"{name}, FP8" for name in of_fp8)]
    header = [machine, "bfloat16", "in pages", *peers.makers, "floor", *fp8_names]
    table = Table("attention_numbers", header, saved, peers.said)

    def times(batch: int, keys: int, dtype: torch.dtype, names: list[str]) -> list[float | None]:
        inputs = inputs_of(batch, 1, keys, HEADS, KV_HEADS, SIZE, dtype=dtype)
        page = attention_peers.PAGE
        order = torch.randperm(batch * keys // page, device="cuda").int().view(batch, -1)

        def paged(qkv):
            q, k, v = (qkv[0], *(attention_peers.in_pages(t, page) for t in qkv[1:]))
            return package.flash_attn_with_kvcache(q, k, v, block_table=order)

        def ours(qkv):
            return package.flash_attn_func(*qkv)

        expected = ours(inputs[0]).float()
        found = [microseconds(package, call, inputs) for call in (ours, paged)]
        return found + [peers.us(name, inputs, False, expected, False) for name in names]

    for batch, keys in SHAPES[:2] if quick else SHAPES:
        floor = 2 * batch * keys * KV_HEADS * SIZE * 2 / rate * 1e6
        row = [*times(batch, keys, torch.bfloat16, [*peers.makers]), floor]
        row += times(batch, keys, E4M3, of_fp8)
        table.add(f"{batch} x {keys:,}", *("" if t is None else f"{t:.1f}" for t in row))


def prompts(package, peers: Peers, saved: bool, quick: bool) -> None:
    first = f"{torch.cuda.get_device_name()}, measured: prompts, us (TFLOP/s)"
    header = [first, "bfloat16", *peers.makers, "FP8 keys and values"]
    table = Table("attention_prompts", header, saved, peers.said)
    for batch, tokens, heads, kv_heads, size, causal in PROMPTS[:1] if quick else PROMPTS:
        inputs = inputs_of(batch, tokens, tokens, heads, kv_heads, size)[:2]
        long = batch * heads * tokens**2 > 2**30

        def ours(qkv, causal=causal):
            return package.flash_attn_func(*qkv, causal=causal)

        expected = ours(inputs[0]).float()
        fp8 = [(q, *(t.to(E4M3) for t in kv)) for q, *kv in inputs]
        times = [
            microseconds(package, ours, inputs, long),
            *(peers.us(peer, inputs, causal, expected, long) for peer in peers.makers),
            microseconds(package, ours, fp8, long),
        ]
        products = (2 if causal else 4) * batch * heads * tokens**2 * size
        cells = ("" if t is None else f"{t:.1f} ({products / t / 1e6:.0f})" for t in times)
        kind = "causal" if causal else "full"
        table.add(f"{batch} x {tokens:,} {kind}, {heads}/{kv_heads} heads of {size}", *cells)


def configs(package, calls: Sequence[tuple], saved: bool) -> None:
    module = sys.modules[package.flash_attn_func.__module__]
    card = torch.cuda.get_device_name()
    header = [f"{card}, measured: sequences x queries x keys", "what runs", "us", "the quickest",
              "us", "it would spare"]  # fmt: skip
    table = Table("attention_configs", header, False, {})
    found = []
    for call in calls:
        batch, rows, keys, heads, kv_heads, size, size_v, page = call
        for dtype in (torch.bfloat16, E4M3):
            inputs = inputs_of(batch, rows, keys, heads, kv_heads, size, size_v, dtype)[:40]
            causal, order = rows > 1, None
            if page:
                pages = batch * -(-keys // page)
                order = torch.randperm(pages, device="cuda").int().view(batch, -1)
                inputs = [(q, *(in_pages(t, page) for t in kv)) for q, *kv in inputs]

            def run(qkv, config, causal=causal, order=order):
                operands = module._operands(
                    *qkv, None, None, None, order, None, None, None, causal, (-1, -1), 0.0, None,
                    None, None, False, None, None,
                )  # fmt: skip
                module._attention(*operands, config)

            offered = package.attention_configs(*inputs[0], causal=causal, block_table=order)
            slow = {"plain rows=8 cluster=1 outer=1"} - {offered[0]}
            tried = [c for c in offered if c not in slow]

            def time(config, launches, replays, run=run, inputs=inputs):
                call = functools.partial(run, config=config)
                return gpu.measure(package, call, inputs, launches, replays).median

            rough = {c: time(c, 2, 3) for c in tried}
            near = [c for c in tried if rough[c] < 1.6 * min(rough.values()) or c == offered[0]]
            times = {c: time(c, 12, 5) for c in near}
            best, taken = min(times, key=times.get), times[offered[0]]
            us = {config: round(value, 1) for config, value in times.items()}
            found.append({"call": [*call, dtype.itemsize], "us": us})
            if saved:
                save_configs(card, found)
            text = f"{batch} x {rows:,} x {keys:,}, {heads}/{kv_heads} heads of {size}"
            text += f" and {size_v}" if size_v != size else ""
            text += f", pages of {page}" if page else ""
            text += ", FP8" if dtype == E4M3 else ""
            table.add(text, offered[0], f"{taken:.1f}", best, f"{times[best]:.1f}",
                      f"{1 - times[best] / taken:.0%}")  # fmt: skip
            del inputs


def save_configs(card: str, found: list[dict]) -> None:
    """Into results/attention_configs.json, in the place of what it has of these calls and card."""
    file = tables.RESULTS / "attention_configs.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    again = [cell["call"] for cell in found]
    calls = [cell for cell in kept.get(card, {}).get("calls", []) if cell["call"] not in again]
    kept[card] = {"machine": gpu.machine(), "calls": calls + found}
    file.write_text(result_text(dict(sorted(kept.items()))))


def in_pages(rows: torch.Tensor, page: int) -> torch.Tensor:
    """[B, S, H, D] as pages in their order, of which the last of a sequence may be filled up."""
    missing = -rows.shape[1] % page
    padded = torch.cat((rows, rows[:, :missing]), 1) if missing else rows
    return attention_peers.in_pages(padded, page)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--parts", default="decode,prompts,configs,drawn,queries")
    parser.add_argument("--quick", action="store_true", help="a call of each, to see that it works")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    parts, saved, quick = options.parts.split(","), options.save, options.quick
    package = gpu.load_package()
    peers = Peers(package) if {"decode", "prompts"} & set(parts) else None
    if "decode" in parts:
        decode(package, peers, gpu.read_rate(package), saved, quick)
    if "prompts" in parts:
        prompts(package, peers, saved, quick)
    of_parts = (("configs", CONFIGS), ("drawn", drawn_calls()), ("queries", drawn_queries()))
    for part, calls in of_parts:
        if part in parts:
            configs(package, calls[:1] if quick else calls, saved)
    return 0


if __name__ == "__main__":
    sys.exit(main())
