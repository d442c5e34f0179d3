"""Any call that attention's functions take, against the definition in float64: hypothesis draws the
layout, the strides and everything that a query may be kept from seeing. On every backend of
--device, with fewer keys where machine code is executed instruction by instruction.

What no query may see is NaN, page numbers past a sequence's last lead nowhere, out lies among guard
values.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_attention import FP8, MOST, NOWHERE

pytestmark = pytest.mark.not_on("reference")
GUARD = 1.5  # exact in every type

SETTINGS = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
STYLES = ("plain", "heads first", "part of wider heads", "odd part", "apart", "every other row")


@dataclass
class Call:
    """What is drawn of one call."""

    api: str  # func, varlen, varlen in pages, cache, cache in pages
    heads: tuple  # KV heads, query heads to each
    size: int
    size_v: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    keys: list  # of each sequence
    rows: list
    most: object  # what a ragged call names for its longest sequences, if not their own lengths
    page: int
    styles: tuple  # of q, k, v, out
    causal: bool
    window: tuple
    softcap: float
    scale: object
    sinks: object  # a dtype, or None
    leftpad: bool
    descales: tuple  # shapes
    new: int  # keys of each sequence that the call appends
    new_in_fp8: bool
    gives_out: bool
    seed: int


@st.composite
def calls(draw, short=False):
    of = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    api = of("func", "varlen", "varlen in pages", "cache", "cache in pages")
    dtype = of(torch.float32, torch.float16, torch.bfloat16, torch.bfloat16)
    batch = of(0, 1, 1, 2, 3)
    counts = (0, 1, 2, 5, 17, 33) if short else (0, 1, 2, 5, 17, 40, 64, 65, 130, 600)
    count = lambda: of(*counts)  # noqa: E731
    queries = lambda: of(1, 1, 2, 3, 4, 8, *([] if short else [7, 20, 70]))  # noqa: E731
    if api == "func":
        keys, rows = [count()] * batch, [queries()] * batch
    elif "cache" in api:
        keys, rows = [count() for _ in range(batch)], [queries()] * batch
    else:
        keys = [count() for _ in range(batch)]
        rows = [of(0, queries(), queries()) for _ in range(batch)]
    window = lambda: of(-1, -1, 0, 1, 7, 50, 2**31, 2**63 - 1)  # noqa: E731
    descale = lambda: of(None, "number", (), (1,), "heads", "all")  # noqa: E731
    return Call(
        api=api, heads=(of(1, 2, 3), of(1, 2, 4, 5, 9)), size=of(8, 33, 64, 64, 80, 128, 192),
        size_v=of(None, None, 17, 64, 128), dtype=dtype, kv_dtype=of(dtype, dtype, *FP8),
        keys=keys, rows=rows, most=of("own", "own", None, 100_000, 2**29),
        page=of(1, 3, 16, 48, 256),
        styles=tuple(of("plain", *STYLES) for _ in range(4)), causal=of(True, False),
        window=(window(), window()), softcap=of(0.0, 0.0, 2.0, 30.0),
        scale=of(None, None, 1e-9, -0.2, 0.7), sinks=of(None, None, torch.float32, dtype),
        leftpad=of(False, False, "cache" in api), descales=(descale(), descale()),
        new=of(0, 0, 1, 2, 5) if "cache" in api else 0, new_in_fp8=of(True, False, False),
        gives_out=of(True, False), seed=draw(st.integers(0, 2**31)),
    )  # fmt: skip


def filled(shape, value, dtype):
    return torch.full(shape, value).to(dtype)


def laid_out(tensor, style, device, fill=math.nan):
    """``[..., rows, heads, D]`` in memory of that style, among ``fill``: (the view, its memory)."""
    *front, rows, heads, size = tensor.shape
    if style == "heads first":
        memory = filled((*front, heads, rows + 1, size), fill, tensor.dtype).to(device)
        view = memory.transpose(-3, -2)[..., :rows, :, :]
    elif style in ("part of wider heads", "odd part"):
        first = 1 if style == "odd part" else 8
        memory = filled((*front, rows, heads, size + 16), fill, tensor.dtype).to(device)
        view = memory[..., first : first + size]
    elif style == "apart":
        memory = filled((*front, rows, heads, size, 2), fill, tensor.dtype).to(device)
        view = memory[..., 0]
    elif style == "every other row":
        memory = filled((*front, rows + 1, 2, heads, size), fill, tensor.dtype).to(device)
        view = memory[..., :rows, 1, :, :]
    else:
        memory = filled((*front, rows + 1, heads, size), fill, tensor.dtype).to(device)
        view = memory[..., :rows, :, :]
    view.copy_(tensor.to(device))
    return view, memory


class Made:
    """A call's tensors, and what the definition says of them."""

    def __init__(self, call, device):
        self.call, self.device = call, device
        torch.manual_seed(call.seed)
        kv_heads, group = call.heads
        self.batch, self.paged = len(call.keys), call.api.endswith("in pages")
        self.heads, self.size_v = kv_heads * group, call.size_v or call.size
        self.q = [torch.randn(n, self.heads, call.size).to(call.dtype) for n in call.rows]
        self.k, self.v = (
            [torch.randn(n + call.new, kv_heads, size).to(call.kv_dtype) for n in call.keys]
            for size in (call.size, self.size_v)
        )
        self.sinks = None if call.sinks is None else torch.randn(self.heads).to(call.sinks)
        self.leftpad = None
        if call.leftpad and self.batch:
            self.leftpad = torch.tensor([int(torch.randint(n + 2, ())) for n in call.keys]).int()
        self.descales, self.given_descales = zip(*map(self.descale, call.descales), strict=True)

    def descale(self, kind):
        """By sequence and KV head, and as it is given."""
        kv_heads = self.call.heads[0]
        if kind is None or self.call.kv_dtype not in FP8:
            return torch.ones(self.batch, kv_heads), None
        if kind == "number":
            return torch.full((self.batch, kv_heads), 0.75), 0.75
        shape = {"heads": (kv_heads,), "all": (self.batch, kv_heads)}.get(kind, kind)
        given = torch.rand(shape) + 0.5
        return given.expand(self.batch, kv_heads), given.to(self.device)

    def expected(self, reference, b):
        """Out and lse of a sequence."""
        call = self.call
        return reference.attention(
            self.q[b].double(), self.k[b].double(), self.v[b].double(), call.scale, call.causal,
            call.window, call.softcap, None if self.sinks is None else self.sinks.double(),
            self.descales[0][b].double(), self.descales[1][b].double(),
            0 if self.leftpad is None else int(self.leftpad[b]),
        )  # fmt: skip

    # ---- where keys and values lie

    def unseen(self, b):
        """Keys at the beginning that no query of the sequence sees, and may hold anything."""
        return min(int(self.leftpad[b]), self.call.keys[b]) if self.leftpad is not None else 0

    def contents(self, states, b):
        """A sequence's rows as the cache has them before the call."""
        rows = states[b].clone()
        rows[: self.unseen(b)] = filled((), math.nan, rows.dtype)
        rows[len(rows) - self.call.new :] = filled((), math.nan, rows.dtype)
        return rows

    def in_cache(self, states, size, style):
        room = max([*(len(t) for t in states), 1]) + 2
        full = filled((self.batch, room, self.call.heads[0], size), math.nan, self.call.kv_dtype)
        for b in range(self.batch):
            full[b, : len(states[b])] = self.contents(states, b)
        return laid_out(full, style, self.device)[0]

    def table(self):
        """Pages of each sequence, whose numbers exceed 16 bits where pages are small."""
        page = self.call.page
        counts = [-(-len(t) // page) for t in self.k]
        first = 2**16 + 5 if page == 1 else 3
        order = (torch.randperm(sum(counts)) + first).int()
        table = filled((self.batch, max([*counts, 1]) + 3), NOWHERE, torch.int32)
        for b, part in enumerate(order.split(counts)):
            table[b, : counts[b]] = part
        return table, first + sum(counts) + 1

    def in_pages(self, states, size, table, pages, style):
        page, heads = self.call.page, self.call.heads[0]
        full = filled((pages, page, heads, size), math.nan, self.call.kv_dtype)
        for b in range(self.batch):
            for at, row in enumerate(self.contents(states, b)):
                full[table[b, at // page], at % page] = row
        return laid_out(full, style, self.device)[0]

    def joined(self, states, size):
        return torch.cat([*states, torch.empty(0, self.call.heads[0], size).to(self.call.kv_dtype)])

    # ---- the call

    def run(self, ops):
        call = self.call
        to = lambda t: t.to(self.device) if torch.is_tensor(t) else t  # noqa: E731
        ragged = call.api.startswith("varlen")
        q = torch.cat([*self.q, torch.empty(0, self.heads, call.size).to(call.dtype)])
        if not ragged:
            rows = call.rows[0] if call.rows else 1
            q = q.view(self.batch, rows, self.heads, call.size)
        q, _ = laid_out(q, call.styles[0], self.device)
        self.out = self.memory = None
        if call.gives_out:
            # Written in place: its heads' elements lie side by side.
            style = "plain" if call.styles[3] == "apart" else call.styles[3]
            out = filled((*q.shape[:-1], self.size_v), GUARD, call.dtype)
            self.out, self.memory = laid_out(out, style, self.device, GUARD)
        options = {
            "softmax_scale": call.scale, "causal": call.causal, "window_size": call.window,
            "softcap": call.softcap, "s_aux": to(self.sinks), "return_lse": True, "out": self.out,
            "k_descale": self.given_descales[0], "v_descale": self.given_descales[1],
        }  # fmt: skip
        lengths = torch.tensor(call.keys, dtype=torch.int32)
        ends = lambda counts: to(torch.tensor([0, *counts]).cumsum(0).int())  # noqa: E731
        table = None
        both = ((self.k, call.size, call.styles[1]), (self.v, self.size_v, call.styles[2]))
        if self.paged:
            table, pages = self.table()
            caches = [self.in_pages(t, size, table, pages, style) for t, size, style in both]
        elif call.api != "varlen":
            caches = [self.in_cache(*of_states) for of_states in both]
        if call.api == "func":
            used = call.keys[0] if call.keys else 1
            return ops.flash_attn_func(q, *(c[:, :used] for c in caches), **options)
        own = max([*call.rows, 0]), max([*call.keys, 0])
        most = own if call.most == "own" else (call.most, call.most)
        if call.api == "varlen":
            k, v = (
                laid_out(self.joined(t, size), style, self.device)[0] for t, size, style in both
            )
            return ops.flash_attn_varlen_func(
                q, k, v, ends(call.rows), ends(call.keys), *most, **options
            )
        if ragged:
            return ops.flash_attn_varlen_func(
                q, *caches, ends(call.rows), None, most[0], seqused_k=to(lengths),
                block_table=to(table), **options,
            )  # fmt: skip
        new = self.new()
        result = ops.flash_attn_with_kvcache(
            q, *caches, *map(to, new), cache_seqlens=to(lengths), block_table=to(table),
            cache_leftpad=to(self.leftpad), **options,
        )  # fmt: skip
        self.take_appended(new, caches, table)
        return result

    def new(self):
        """What is appended: FP8 as it is to be, or the numbers that are rounded to it."""
        call = self.call
        if not call.new:
            return None, None
        found = []
        for states, size, descales in zip(
            (self.k, self.v), (call.size, self.size_v), self.descales, strict=True
        ):
            new = self.joined([t[len(t) - call.new :] for t in states], size)
            new = new.view(self.batch, call.new, call.heads[0], size)
            if call.kv_dtype in FP8 and not call.new_in_fp8:
                new = (new.float() * descales[:, None, :, None]).to(call.dtype)
            found.append(new)
        return found

    def take_appended(self, new, caches, table):
        """What the caches have got counts, where it is what was given, up to a rounding."""
        call = self.call
        for states, descales, cache, added in zip(
            (self.k, self.v), self.descales, caches, new, strict=True
        ):
            for b, rows in enumerate(states):
                for at in range(len(rows) - call.new, len(rows)):
                    page, row = (b, at) if table is None else divmod(at, call.page)
                    found = cache[page if table is None else int(table[b, page]), row].cpu()
                    if call.kv_dtype in FP8 and not call.new_in_fp8:
                        told = added[b, at - len(rows) + call.new].float() / descales[b, :, None]
                        error = (found.float() - told).abs()
                        assert (error <= told.abs() * 2**-3 + 2**-9).all()
                    else:
                        assert torch.equal(found.float(), rows[at].float())
                    rows[at] = found

    def check(self, reference, out, lse):
        call = self.call
        ragged, start = call.api.startswith("varlen"), 0
        for b, rows in enumerate(call.rows):
            expected, sums = self.expected(reference, b)
            found = out[start : start + rows] if ragged else out[b]
            told = (lse[:, start : start + rows] if ragged else lse[b]).cpu().double()
            start += rows
            error = (found.cpu().double() - expected).norm()
            assert error <= 1.25 * MOST[call.dtype] * expected.norm(), f"{error / expected.norm()}"
            unseen = sums.isneginf()
            assert torch.equal(told.isneginf(), unseen)
            torch.testing.assert_close(told[~unseen], sums[~unseen], rtol=3e-5, atol=6e-5)
            if self.sinks is None:
                assert (found.cpu()[unseen.transpose(0, 1)] == 0).all()
        if self.out is not None:
            assert out is self.out
            self.out.fill_(GUARD)
            assert (self.memory == GUARD).all(), "written beside out"


def check(backend, package, call):
    made = Made(call, backend.device)
    made.check(package.reference, *made.run(backend.ops))


@pytest.mark.not_on("simulator")
@settings(SETTINGS, max_examples=150)
@given(calls())
def test_any_call(backend, package, call):
    check(backend, package, call)


@pytest.mark.not_on("cpu", "cuda", "rocm")
@settings(SETTINGS, max_examples=20)
@given(calls(short=True))
def test_any_short_call(backend, package, call):
    check(backend, package, call)


@pytest.mark.slow
@pytest.mark.not_on("simulator")
@settings(SETTINGS, max_examples=3000)
@given(calls())
def test_many_calls(backend, package, call):
    check(backend, package, call)


@pytest.mark.slow
@pytest.mark.not_on("cpu", "cuda", "rocm")
@settings(SETTINGS, max_examples=1000)
@given(calls(short=True))
def test_many_short_calls(backend, package, call):
    check(backend, package, call)
