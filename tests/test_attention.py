"""Attention against its definition in float64, on every backend of --device.

Keys that count lie among others that are NaN, and pages that count among page numbers that lead
nowhere: what is read beyond a sequence shows.
"""

import math

import pytest
import torch

pytestmark = pytest.mark.not_on("reference")

FLOATS = (torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
NOWHERE = 2**30  # a page number
# P is rounded to the type of the queries before it meets the values, and the result once: two
# roundings of up to half a unit in the last place. FP8 keys and values are exact in both types.
MOST = {torch.float32: 2**-20, torch.float16: 2**-11, torch.bfloat16: 2**-8}


class Case:
    """Inputs of sequences with ``lengths`` keys each, contiguous or in pages, and the expected
    ``out`` and ``lse``."""

    def __init__(
        self, backend, lengths, rows=1, heads=(8, 2), size=64, size_v=None, dtype=torch.bfloat16,
        kv_dtype=None, page=None, **options,
    ):  # fmt: skip
        self.ops, device = backend.ops, backend.device
        self.batch, self.most, kv_heads = len(lengths), max(lengths), heads[1]
        size_v, kv_dtype = size_v or size, kv_dtype or dtype
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        self.q = torch.randn(self.batch, rows, heads[0], size).to(dtype)
        self.k = (2 * torch.randn(self.batch, self.most, kv_heads, size)).to(kv_dtype)
        self.v = torch.randn(self.batch, self.most, kv_heads, size_v).to(kv_dtype)
        self.options = options
        if kv_dtype in FP8:
            for name in ("k_descale", "v_descale"):
                self.options[name] = torch.rand(self.batch, kv_heads) + 0.5
        self.expected, self.lse = self.definition()
        self.dtype, self.device, self.page, self.first_page = dtype, device, page, 0

    def definition(self):
        """In float64, of what float32 holds of the inputs."""
        import kernels
        from project import REPO_ID

        reference = kernels.get_kernel(REPO_ID, version=1, backend="cpu").reference
        wide = {
            name: t.double() if torch.is_tensor(t) and t.is_floating_point() else t
            for name, t in self.options.items()
        }
        return reference.flash_attn_func(
            self.q.double(), self.k.float().double(), self.v.float().double(),
            seqused_k=self.lengths, **wide,
        )  # fmt: skip

    def poisoned(self, tensor):
        """NaN in the rows that no sequence counts."""
        tensor = tensor.clone()
        for b, length in enumerate(self.lengths.tolist()):
            tensor[b, length:] = torch.full((), math.nan).to(tensor.dtype)
        return tensor

    def paged(self, tensor, order):
        """The rows in pages, in another order, among pages of NaN."""
        pages, rows = order.shape[1], order.shape[1] * self.page
        full = torch.full((self.batch, rows, *tensor.shape[2:]), math.nan).to(tensor.dtype)
        full[:, : self.most] = tensor
        cache = torch.full((int(order.max()) + 2, self.page, *tensor.shape[2:]), math.nan).to(
            tensor.dtype
        )
        for b in range(self.batch):
            for i in range(pages):
                cache[order[b, i]] = full[b, i * self.page : (i + 1) * self.page]
        return cache

    def on_device(self, value):
        return value.to(self.device) if torch.is_tensor(value) else value

    def run(self, **more):
        options = {name: self.on_device(value) for name, value in {**self.options, **more}.items()}
        k, v, table = self.poisoned(self.k), self.poisoned(self.v), None
        if self.page is not None:
            pages = -(-self.most // self.page)
            order = torch.randperm(self.batch * pages + 3)[: self.batch * pages] + self.first_page
            order = order.view(self.batch, pages).to(torch.int32)
            k, v = self.paged(k, order), self.paged(v, order)
            for b, length in enumerate(self.lengths.tolist()):
                order[b, -(-length // self.page) :] = NOWHERE
            table = order
        out = torch.full((*self.q.shape[:-1], self.v.shape[-1]), math.nan).to(self.dtype)
        return self.ops.flash_attn_with_kvcache(
            self.on_device(self.q), self.on_device(k), self.on_device(v),
            cache_seqlens=self.on_device(self.lengths), block_table=self.on_device(table),
            return_lse=True, out=self.on_device(out), **options,
        )  # fmt: skip

    def check(self, out, lse):
        error = (out.cpu().double() - self.expected).norm() / self.expected.norm()
        assert error < MOST[self.dtype], f"off by {error:.2e} of the norm"
        lse, unseen = lse.cpu().double(), self.lse.isneginf()
        assert torch.equal(lse.isneginf(), unseen)
        assert (lse - self.lse)[~unseen].abs().max() < 2e-5 * (1 + self.lse[~unseen].abs().max())
        assert (out.cpu()[unseen.transpose(1, 2)] == 0).all()


def lengths_for(backend, *lengths):
    """Shorter sequences where machine code is executed instruction by instruction."""
    return [min(n, 9) for n in lengths] if backend.name == "simulator" else list(lengths)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [64, 80, 96, 128, 192, 256, 512])
def test_sizes_of_heads(backend, size, dtype):
    case = Case(backend, lengths_for(backend, 300, 77), size=size, dtype=dtype, causal=True)
    case.check(*case.run())


@pytest.mark.parametrize("size, size_v", [(192, 128), (128, 64), (72, 72), (33, 17), (8, 256)])
def test_odd_sizes_and_values_of_their_own(backend, size, size_v):
    case = Case(backend, lengths_for(backend, 70, 33), size=size, size_v=size_v)
    case.check(*case.run())


@pytest.mark.parametrize("heads", [(1, 1), (8, 8), (32, 8), (20, 1), (12, 4), (64, 2)])
def test_shared_kv_heads(backend, heads):
    case = Case(backend, lengths_for(backend, 200, 31, 1), heads=heads, size=64)
    case.check(*case.run())


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 33, 130])
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_a_sequence(backend, rows, causal):
    """More rows than keys, too: causal rows before the first key see none."""
    if backend.name == "simulator" and rows > 8:
        rows = 11
    case = Case(backend, lengths_for(backend, 150, 40, 5), rows=rows, size=128, causal=causal)
    case.check(*case.run())


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func", "kvcache"])
def test_all_keys_are_seen_where_nothing_else_is_asked(backend, package, name):
    """As flash-attn: causal is off, no window, no cap, a scale of D ** -0.5."""
    q, k, v = (torch.randn(1, 5, heads, 64).bfloat16() for heads in (4, 2, 2))
    expected, lse = package.reference.attention(*(t[0].double() for t in (q, k, v)), causal=False)
    ends, given = torch.tensor([0, 5], dtype=torch.int32), (q, k, v)
    if name == "flash_attn_varlen_func":
        given = (q[0], k[0], v[0], ends, ends, 5, 5)
    given = [t.to(backend.device) if torch.is_tensor(t) else t for t in given]
    run = getattr(backend.ops, name.replace("kvcache", "flash_attn_with_kvcache"))
    out, found = run(*given, return_lse=True)
    error = (out.cpu().double().view_as(expected) - expected).norm() / expected.norm()
    assert error < MOST[torch.bfloat16]
    torch.testing.assert_close(found.cpu().double().view(4, 5), lse, rtol=2e-5, atol=2e-5)


@pytest.mark.not_on("simulator")
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_sequences_of_many_keys(backend, rows):
    """Parts of the keys are work of their own on the CPU from 512 on."""
    case = Case(backend, [1300, 513, 512, 40], rows=rows, heads=(12, 4), causal=True)
    case.check(*case.run())


@pytest.mark.not_on("simulator")
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kv_dtype", [None, FP8[0]])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_sums_over_65536_keys(backend, mean, kv_dtype, rows):
    """Values that add up, whose sum float32 would lose digits of in one level."""
    case = Case(backend, [65536], rows=rows, heads=(2, 1), kv_dtype=kv_dtype, dtype=torch.float16)
    case.v = (case.v.float() + mean).to(case.v.dtype)
    case.expected, case.lse = case.definition()
    case.check(*case.run())


@pytest.mark.parametrize("kv_dtype", [None, FP8[0]])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("dtype", FLOATS)
def test_error_is_at_most_twice_that_of_float32(backend, dtype, size, kv_dtype):
    """Of scores and sums in float32, exponentials rounded once and the result once."""
    lengths = lengths_for(backend, 700, 64)
    case = Case(backend, lengths, rows=3, size=size, dtype=dtype, kv_dtype=kv_dtype)
    out, _ = case.run()
    error = lambda found: (found.cpu().double() - case.expected).norm()  # noqa: E731
    plain = torch.empty_like(case.q)
    scales = [case.options.get(f"{name}_descale", torch.ones(case.batch, 2)) for name in "kv"]
    for b, length in enumerate(case.lengths.tolist()):
        k, v = (
            (t[b, :length].float() * scale[b, :, None]).repeat_interleave(4, 1)
            for t, scale in zip((case.k, case.v), scales, strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", case.q[b].float(), k) * size**-0.5
        p = (scores - scores.amax(-1, keepdim=True)).exp()
        sums = torch.einsum("hqk,khd->qhd", p.to(dtype).float(), v)
        plain[b] = (sums / p.sum(-1).T[..., None]).to(dtype)
    assert error(out) <= 2 * error(plain)


@pytest.mark.parametrize("page", [1, 7, 16, 32, 256])
@pytest.mark.parametrize("kv_dtype", [None, *FP8])
def test_pages(backend, page, kv_dtype):
    lengths = lengths_for(backend, 333, 1, 64)
    case = Case(backend, lengths, rows=2, size=128, page=page, kv_dtype=kv_dtype, causal=True)
    case.check(*case.run())


@pytest.mark.parametrize("rows", [1, 40])
def test_page_numbers_beyond_16_bits(backend, rows):
    case = Case(backend, [3, 5], rows=rows, heads=(2, 1), page=1)
    case.first_page = 2**16
    case.check(*case.run())


@pytest.mark.parametrize("options", [
    {"window_size": (5, -1)}, {"window_size": (40, 0), "causal": True},
    {"window_size": (3, 2)}, {"window_size": (-1, 4)}, {"window_size": (0, 0)},
    {"softcap": 3.0}, {"softcap": 30.0, "causal": True, "window_size": (20, -1)},
    {"s_aux": torch.randn(8)}, {"s_aux": torch.randn(8).to(torch.bfloat16), "causal": True},
    {"softmax_scale": 0.7}, {"softmax_scale": 1e-9}, {"softmax_scale": -0.4, "causal": True},
])  # fmt: skip
@pytest.mark.parametrize("rows, kv_dtype", [(1, None), (5, None), (5, FP8[0])])
def test_windows_caps_and_sinks(backend, rows, kv_dtype, options):
    lengths = lengths_for(backend, 170, 64, 3)
    case = Case(backend, lengths, rows=rows, size=128, kv_dtype=kv_dtype, **options)
    case.check(*case.run())


def test_empty_sequences(backend):
    case = Case(backend, [3, 0, 7], rows=2, causal=True)
    case.check(*case.run())
    case = Case(backend, [0, 0], s_aux=torch.randn(8))
    out, lse = case.run()
    assert (out == 0).all() and torch.allclose(lse.cpu()[0, :, 0], case.options["s_aux"])


class PaddedCase(Case):
    """NaN in the first keys of the first sequence and in all of the last, which no query sees."""

    def __init__(self, backend, rows, **options):
        lengths = lengths_for(backend, 120, 30, 6)
        super().__init__(backend, lengths, rows=rows, causal=True, **options)
        padding = [4, 0, 6]
        self.options["cache_leftpad"] = torch.tensor(padding, dtype=torch.int32)
        self.expected, self.lse = self.definition()
        for b, count in enumerate(padding):
            self.k[b, :count] = self.v[b, :count] = torch.full((), math.nan).to(self.k.dtype)


@pytest.mark.parametrize("kv_dtype", [None, FP8[0]])
@pytest.mark.parametrize("rows", [1, 6, 130])
def test_left_padding(backend, rows, kv_dtype):
    """Keys before a sequence's first are not seen, and may hold anything; nor are they where there
    are more queries than keys, of which the first see nothing."""
    case = PaddedCase(backend, rows, kv_dtype=kv_dtype)
    case.check(*case.run())


def test_large_scores_stay_finite(backend):
    case = Case(backend, lengths_for(backend, 100, 50), size=64, softmax_scale=40.0)
    case.check(*case.run())


@pytest.mark.not_on("simulator", "cuda", "rocm")
@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("kv_dtype", [None, FP8[0]])
def test_a_sequence_has_the_same_bits_alone_on_a_cpu(backend, rows, kv_dtype):
    """Splits are of 512 keys counted from the sequence's first, and join in their order: whatever
    else is in the batch, however much room the cache has, and whether the splits had states."""
    case = Case(
        backend, [1300, 513, 512, 40, 0], rows=rows, heads=(12, 4), causal=True, kv_dtype=kv_dtype
    )
    together = case.run()
    for b, length in enumerate(case.lengths.tolist()):
        one = slice(b, b + 1)
        scales = {n: case.options[n][one] for n in ("k_descale", "v_descale") if n in case.options}
        for room in {length, case.most} - {0}:
            alone = backend.ops.flash_attn_with_kvcache(
                case.q[one], case.k[one, :room], case.v[one, :room],
                cache_seqlens=case.lengths[one], causal=True, return_lse=True, **scales,
            )  # fmt: skip
            assert all(torch.equal(a, t[one]) for a, t in zip(alone, together, strict=True))


@pytest.mark.not_on("simulator")
@pytest.mark.parametrize("paged", [False, True])
def test_ragged(backend, package, paged):
    """Sequences of any lengths one after the other, and one that has no queries."""
    rows, keys = [3, 0, 130, 1], [40, 9, 130, 300]
    q = torch.randn(sum(rows), 8, 64).bfloat16()
    k, v = torch.randn(2, sum(keys), 2, 64).bfloat16()
    starts = lambda counts: torch.tensor([0, *counts]).cumsum(0).to(torch.int32)  # noqa: E731
    cu_q, cu_k = starts(rows), starts(keys)
    to = lambda t: t.to(backend.device)  # noqa: E731
    options = {"max_seqlen_q": max(rows), "max_seqlen_k": max(keys), "causal": True}
    if paged:
        pages = [-(-n // 16) for n in keys]
        table = torch.full((4, max(pages)), NOWHERE, dtype=torch.int32)
        cache = torch.full((2, sum(pages), 16, 2, 64), math.nan).bfloat16()
        at = 0
        for b, n in enumerate(keys):
            table[b, : pages[b]] = torch.arange(at, at + pages[b])
            for i, rows_of in enumerate((k, v)):
                cache[i].view(-1, 2, 64)[at * 16 : at * 16 + n] = rows_of[cu_k[b] : cu_k[b + 1]]
            at += pages[b]
        out, lse = backend.ops.flash_attn_varlen_func(
            to(q), to(cache[0]), to(cache[1]), to(cu_q), to(cu_k), block_table=to(table),
            return_lse=True, **options,
        )  # fmt: skip
    else:
        out, lse = backend.ops.flash_attn_varlen_func(
            to(q), to(k), to(v), to(cu_q), to(cu_k), return_lse=True, **options
        )
    assert lse.shape == (8, sum(rows))
    for b in range(4):
        of_q, of_k = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        if rows[b] == 0:
            continue
        expected, sums = package.reference.attention(
            q[of_q].double(), k[of_k].double(), v[of_k].double(), causal=True
        )
        error = (out[of_q].cpu().double() - expected).norm() / expected.norm()
        assert error < MOST[torch.bfloat16]
        torch.testing.assert_close(lse[:, of_q].cpu().double(), sums, rtol=2e-5, atol=2e-5)


def test_ragged_sequences_need_no_lengths(backend):
    """Without max_seqlen_q and max_seqlen_k all rows are looked for in each sequence: more than one
    tile has."""
    q, k, v = (torch.randn(300, heads, 64).bfloat16().to(backend.device) for heads in (2, 1, 1))
    ends = torch.tensor([0, 3, 300], dtype=torch.int32, device=backend.device)
    run = backend.ops.flash_attn_varlen_func
    found, expected = run(q, k, v, ends, ends), run(q, k, v, ends, ends, 297, 297)
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("kv_dtype", FP8)
def test_scales_of_ragged_sequences(backend, package, kv_dtype):
    rows, keys = [2, 1, 3], [5, 4, 7]
    q = torch.randn(sum(rows), 4, 64).bfloat16()
    k, v = torch.randn(2, sum(keys), 2, 64).to(kv_dtype)
    scales = {name: torch.rand(3, 2) + 0.5 for name in ("k_descale", "v_descale")}
    ends = [torch.tensor([0, *counts]).cumsum(0).int() for counts in (rows, keys)]
    to = lambda t: t.to(backend.device)  # noqa: E731
    out = backend.ops.flash_attn_varlen_func(
        *map(to, (q, k, v, *ends)), max(rows), max(keys), causal=True,
        **{name: to(scale) for name, scale in scales.items()},
    )  # fmt: skip
    for b in range(3):
        of_q, of_k = (slice(end[b], end[b + 1]) for end in ends)
        expected, _ = package.reference.flash_attn_func(
            q[None, of_q].double(), k[None, of_k].float().double(), v[None, of_k].float().double(),
            causal=True, **{name: scale[b : b + 1].double() for name, scale in scales.items()},
        )  # fmt: skip
        error = (out[of_q].cpu().double() - expected[0]).norm() / expected.norm()
        assert error < MOST[torch.bfloat16]


@pytest.mark.parametrize("kv_dtype", [None, FP8[0]])
@pytest.mark.parametrize("page", [None, 8])
def test_new_keys_are_appended(backend, package, page, kv_dtype):
    dtype = torch.bfloat16
    lengths, new, room = torch.tensor([4, 0, 9], dtype=torch.int32), 3, 16
    k, v = torch.randn(2, 3, room, 2, 64).to(kv_dtype or dtype)
    k_new, v_new = torch.randn(2, 3, new, 2, 64).to(dtype)
    q = torch.randn(3, new, 8, 64).to(dtype)
    scales = {"k_descale": 0.5, "v_descale": 0.25} if kv_dtype else {}
    full = [k.float().double(), v.float().double()]
    for i, (cache, added) in enumerate(zip(full, (k_new, v_new), strict=True)):
        factor = [*scales.values()][i] if scales else 1.0
        for b, at in enumerate(lengths.tolist()):
            rounded = (added[b].float() / factor).to(kv_dtype or dtype).float().double()
            cache[b, at : at + new] = rounded
        cache *= factor
    table = None
    if page:
        table = torch.arange(6).view(3, 2).flip(0).to(torch.int32)
        k, v = (t.view(3, 2, page, 2, 64).flip(0).reshape(6, page, 2, 64) for t in (k, v))
    to = lambda t: t if t is None else t.to(backend.device)  # noqa: E731
    k, v = to(k.clone()), to(v.clone())
    out = backend.ops.flash_attn_with_kvcache(
        to(q), k, v, to(k_new), to(v_new), cache_seqlens=to(lengths), block_table=to(table),
        causal=True, **scales,
    )  # fmt: skip
    expected, _ = package.reference.flash_attn_func(
        q.double(), *full, causal=True, seqused_k=lengths + new
    )
    assert (out.cpu().double() - expected).norm() / expected.norm() < MOST[dtype]


@pytest.mark.parametrize("kv_dtype", FP8)
def test_new_keys_saturate(backend, kv_dtype):
    k, v = (t.to(backend.device) for t in torch.randn(2, 1, 4, 2, 64).to(kv_dtype))
    new = torch.randn(1, 1, 2, 64).sign().bfloat16().to(backend.device) * 1e6
    lengths = torch.tensor([3], dtype=torch.int32, device=backend.device)
    q = torch.randn(1, 1, 4, 64).bfloat16().to(backend.device)
    backend.ops.flash_attn_with_kvcache(
        q, k, v, new, -new, cache_seqlens=lengths, k_descale=2.0, v_descale=3.0
    )
    largest = torch.finfo(kv_dtype).max * new.float().sign()[0, 0]
    assert torch.equal(k[0, 3].float(), largest) and torch.equal(v[0, 3].float(), -largest)


def test_a_sequence_does_not_depend_on_its_neighbours(backend):
    case = Case(backend, lengths_for(backend, 260, 150, 33), size=128)
    one = case.run()[0]
    case.q[1:], case.k[1:] = 9.0, -5.0
    case.lengths[1:] = torch.tensor([1, 2])
    assert torch.equal(case.run()[0][0], one[0])


@pytest.mark.not_on("simulator")
def test_strides(backend):
    """Heads before rows, as models project them; a slice of a larger cache."""
    case = Case(backend, [90, 90], rows=4, size=64, causal=True)
    turned = lambda t: case.on_device(t).transpose(1, 2).contiguous().transpose(1, 2)  # noqa: E731
    out, lse = backend.ops.flash_attn_func(
        turned(case.q), turned(case.k), turned(case.v), causal=True, return_lse=True
    )
    case.check(out, lse)
    wide = torch.full((2, 90, 2, 160), math.nan).bfloat16()
    wide[..., 8:72], wide[..., 80:144] = case.k, case.v
    wide = case.on_device(wide)
    out, lse = backend.ops.flash_attn_func(
        case.on_device(case.q), wide[..., 8:72], wide[..., 80:144], causal=True, return_lse=True
    )
    case.check(out, lse)


def test_padded_values(backend):
    """transformers pads V to the size of Q and K, and cuts the result."""
    case = Case(backend, lengths_for(backend, 60, 20), size=192, size_v=128)
    case.v = torch.nn.functional.pad(case.v, (0, 64))
    out, lse = case.run()
    case.check(out[..., :128], lse)
    assert (out[..., 128:] == 0).all()


def test_gradients_are_refused(backend):
    case = Case(backend, [5])
    case.q.requires_grad_()
    with pytest.raises(RuntimeError, match=r"flash_attn_with_kvcache has no gradient, got q"):
        case.run()


@pytest.mark.parametrize("name, other", [
    ("k", lambda k: k[:, :, :1]), ("v", lambda v: v[..., :32]), ("v", lambda v: v[:, :2]),
    ("k", lambda k: k[:, :2]),
    ("v_cache", lambda cache: cache.half()), ("cache_seqlens", lambda n: n + 6),
])  # fmt: skip
@pytest.mark.parametrize("paged", [False, True])
def test_a_refused_call_appends_nothing(package, paged, name, other):
    caches = torch.randn(2, 4, 8, 2, 64).bfloat16()
    call = {
        "q": torch.randn(2, 3, 4, 64).bfloat16(), "k_cache": caches[0], "v_cache": caches[1],
        "k": torch.randn(2, 3, 2, 64).bfloat16(), "v": torch.randn(2, 3, 2, 64).bfloat16(),
        "cache_seqlens": torch.tensor([8, 2], dtype=torch.int32),
    }  # fmt: skip
    if paged:
        call["block_table"] = torch.tensor([[0, 2], [3, 1]], dtype=torch.int32)
    else:
        caches = caches[:, :2].repeat_interleave(2, 2)[:, :, :16].clone()
        call |= {"k_cache": caches[0], "v_cache": caches[1]}
    before = caches.clone()
    package.flash_attn_with_kvcache(**{n: t.clone() for n, t in call.items()}, causal=True)
    with pytest.raises(ValueError, match="must"):
        package.flash_attn_with_kvcache(**{**call, name: other(call[name])}, causal=True)
    assert torch.equal(caches, before)


@pytest.mark.parametrize("name", ["cu_seqlens_q", "cu_seqlens_k"])
@pytest.mark.parametrize("ends", [[5, 6], [0, 7], [4, 2], [-1, 3]])
def test_ends_of_sequences_that_lead_out_are_refused_on_a_cpu(package, name, ends):
    rows = torch.randn(4, 2, 64).bfloat16()
    right = torch.tensor([0, 4], dtype=torch.int32)
    call = {"cu_seqlens_q": right, "cu_seqlens_k": right}
    package.flash_attn_varlen_func(rows, rows, rows, **call)
    with pytest.raises(RuntimeError, match="must ascend from 0"):
        call[name] = torch.tensor(ends, dtype=torch.int32)
        package.flash_attn_varlen_func(rows, rows, rows, **call)
