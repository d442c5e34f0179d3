"""flash_attn_with_kvcache appends: against the definition in float64, on every backend of --device.

Caches lie among guard values, rows that nobody wrote are NaN, and all that a call should leave
alone is compared bit by bit.
"""

import math

import pytest
import torch
from test_attention import FP8, MOST, NOWHERE
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.not_on("reference")
GUARD = 1.5  # exact in every type
STEP = {torch.float16: 2**-10, torch.bfloat16: 2**-7}


def rotated(x, cos, sin, positions, interleaved):
    """x in float64, ``[batch, rows, heads, D]``, by flash-attn's tables at ``[batch, rows]``."""
    half = cos.shape[1]
    cos, sin = (t.double()[positions][:, :, None] for t in (cos, sin))
    x = x.double()
    turning, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (
        (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.split(half, -1)
    )  # fmt: skip
    pairs = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    return torch.cat([turned, rest], -1)


class Case:
    """A cache with ``lengths`` keys a sequence, and ``new`` ones."""

    def __init__(
        self, backend, lengths, rows=2, new=None, heads=(4, 2), size=64, size_v=None,
        dtype=torch.bfloat16, kv_dtype=None, page=None, rotary=None, layout=None, **options,
    ):  # fmt: skip
        self.backend, self.dtype, self.options = backend, dtype, options
        self.kv_dtype = kv_dtype = kv_dtype or dtype
        batch, kv_heads = len(lengths), heads[1]
        self.new = new = new or rows
        self.lengths = torch.tensor(lengths, dtype=torch.int32)
        room = max(lengths) + new + 3
        self.q = torch.randn(batch, rows, heads[0], size).to(dtype)
        self.given = [
            torch.randn(batch, new, kv_heads, n).to(dtype) for n in (size, size_v or size)
        ]
        if kv_dtype in FP8:
            for name in ("k_descale", "v_descale"):
                options.setdefault(name, torch.rand(batch, kv_heads) + 0.5)
        if rotary is not None:
            angles = torch.rand(room, rotary // 2) * 2 * math.pi
            options["rotary_cos"], options["rotary_sin"] = (
                angles.cos().to(dtype),
                angles.sin().to(dtype),
            )

        # Rows of sequences, by (page, row).
        if page is None:
            self.table, pages, page = None, batch, room
            self.places = [(b, row) for b in range(batch) for row in range(room)]
        else:
            of_sequence = -(-room // page)
            pages = batch * of_sequence + 2
            self.table = torch.randperm(pages)[: batch * of_sequence].view(batch, -1).int()
            self.places = [
                (int(self.table[b, row // page]), row % page)
                for b in range(batch) for row in range(room)
            ]  # fmt: skip
            for b, length in enumerate(lengths):
                self.table[b, -(-(length + new) // page) :] = NOWHERE
        self.buffers, self.caches = [], []
        for n in (size, size_v or size):
            buffer = torch.full((pages + 2, page, kv_heads, n), GUARD).to(kv_dtype)
            if layout == "heads first":
                buffer = buffer.transpose(1, 2).contiguous().transpose(1, 2)
            for at, (in_page, row) in enumerate(self.places):
                b, place = divmod(at, room)
                fill = torch.randn(kv_heads, n) if place < lengths[b] else torch.full((), math.nan)
                buffer[1 + in_page, row] = fill.to(kv_dtype)
            if layout == "apart":
                buffer = buffer[..., None].repeat_interleave(2, -1)[..., 0]
            self.buffers.append(buffer.to(backend.device))
        self.room, self.before = room, [b.clone() for b in self.buffers]

    def turns(self, count):
        return self.lengths[:, None].long() + torch.arange(count)

    def run(self, **more):
        to = lambda t: t.to(self.backend.device) if torch.is_tensor(t) else t  # noqa: E731
        out = torch.full((*self.q.shape[:-1], self.given[1].shape[-1]), math.nan).to(self.dtype)
        options = {name: to(value) for name, value in {**self.options, **more}.items()}
        k, v = (t.clone() for t in self.given)
        return self.backend.ops.flash_attn_with_kvcache(
            to(self.q), *(b[1:-1] for b in self.buffers), to(k), to(v),
            cache_seqlens=to(self.lengths), block_table=to(self.table), out=to(out),
            return_lse=True, **options,
        )  # fmt: skip

    def check(self, package):
        options = dict(self.options)
        tables = [options.pop(name, None) for name in ("rotary_cos", "rotary_sin")]
        interleaved = options.pop("rotary_interleaved", True)
        out, lse = (t.cpu() for t in self.run())
        q, (k, v) = self.q.double(), (t.double() for t in self.given)
        if tables[0] is not None:
            sees_all = not options.get("causal") and options.get("window_size", (-1, -1)) == (
                -1,
                -1,
            )
            of_q = self.turns(1 if sees_all else q.shape[1]).expand(q.shape[:2])
            q = rotated(q, *tables, of_q, interleaved).to(self.dtype).double()
            k = rotated(k, *tables, self.turns(self.new), interleaved)
        seen = []
        for name, buffer, before, added in zip(
            ("k_descale", "v_descale"), self.buffers, self.before, (k, v), strict=True
        ):
            buffer, before = buffer.cpu(), before.cpu()
            if self.kv_dtype in FP8:
                descale = torch.as_tensor(options[name]).double()
                descale = descale.expand(len(self.lengths), added.shape[2])[:, None, :, None]
                largest = torch.finfo(self.kv_dtype).max
                added = (added / descale).clamp(-largest, largest)
            added = added.float().to(self.kv_dtype)
            rows = torch.stack([buffer[1 + p, r] for p, r in self.places])
            rows = rows.view(len(self.lengths), self.room, *rows.shape[1:])
            seen.append(rows)
            for b, length in enumerate(self.lengths.tolist()):
                self.check_written(rows[b, length : length + self.new], added[b])
            # All that is left alone, by its bits.
            bits = torch.uint8 if self.kv_dtype in FP8 else torch.int16
            left, found = (t.contiguous().view(bits).clone() for t in (before, buffer))
            for at, (page, row) in enumerate(self.places):
                b, place = divmod(at, self.room)
                if self.lengths[b] <= place < self.lengths[b] + self.new:
                    left[1 + page, row] = found[1 + page, row] = 0
            assert torch.equal(left, found)
        wide = {n: t.double() if torch.is_tensor(t) else t for n, t in options.items()}
        for name in {"k_descale", "v_descale"} & {*wide}:
            scale = torch.as_tensor(wide[name]).double()
            wide[name] = scale.expand(len(self.lengths), k.shape[2])
        expected, sums = package.reference.flash_attn_func(
            q, *(t.float().double() for t in seen), seqused_k=self.lengths + self.new, **wide
        )
        error = (out.double() - expected).norm() / expected.norm()
        assert error < MOST[self.dtype], f"off by {error:.2e} of the norm"
        torch.testing.assert_close(lse.double(), sums, rtol=2**-8, atol=2**-8)

    def check_written(self, found, expected):
        """One rounding apart at most."""
        if self.kv_dtype in FP8:
            codes = [t.contiguous().view(torch.uint8).int() for t in (found, expected)]
            ordered = [torch.where(c > 127, -(c & 127), c) for c in codes]
            steps = (ordered[0] - ordered[1]).abs()
            assert steps.max() <= 1 and (steps > 0).sum() <= 2 + steps.numel() / 200
        else:
            size = expected.float().abs().amax(-1, keepdim=True).clamp(min=1)
            assert ((found.float() - expected.float()).abs() / size).max() <= STEP[self.kv_dtype]


@pytest.mark.parametrize("page", [None, 1, 16, 48])
@pytest.mark.parametrize("kv_dtype", [None, *FP8])
@pytest.mark.parametrize("rotary", [None, 64])
def test_caches_and_scales(backend, package, page, kv_dtype, rotary):
    case = Case(
        backend, [5, 0, 17], page=page, kv_dtype=kv_dtype, rotary=rotary, causal=True
    )  # fmt: skip
    case.check(package)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    "rows, new, causal", [(1, 1, False), (3, 3, False), (1, 3, True), (4, 2, True)]
)
def test_rotations(backend, package, interleaved, rows, new, causal):
    """A part of the head; all queries as the first where they see all keys, as flash-attn does."""
    case = Case(
        backend, [4, 9], rows=rows, new=new, rotary=32, rotary_interleaved=interleaved,
        causal=causal, dtype=torch.float16,
    )  # fmt: skip
    case.check(package)


def test_a_window_gives_queries_positions_of_their_own(backend, package):
    Case(backend, [9, 3], rows=3, rotary=64, window_size=(4, 0)).check(package)


@pytest.mark.parametrize("size, size_v", [(192, 128), (80, 80), (33, 17)])
def test_sizes_of_heads(backend, package, size, size_v):
    case = Case(backend, [6, 2], size=size, size_v=size_v, rotary=size // 4 * 2, page=16)
    case.options["causal"] = True
    case.check(package)


@pytest.mark.parametrize("scale", [0.37, torch.tensor([0.37]), torch.tensor([0.2, 3.0])])
def test_shapes_of_scales(backend, package, scale):
    options = {"k_descale": scale, "v_descale": 1.7, "causal": True}
    Case(backend, [6, 2, 3], kv_dtype=FP8[0], page=16, **options).check(package)


@pytest.mark.parametrize("kv_dtype", [None, FP8[0]])
@pytest.mark.parametrize("rotary", [None, 32])
def test_by_index(backend, package, kv_dtype, rotary):
    """Caches whose elements lie apart are no rows for the op."""
    case = Case(
        backend, [6, 2], kv_dtype=kv_dtype, rotary=rotary, page=16, layout="apart", causal=True
    )
    case.given[0] *= 1e4 if kv_dtype else 1.0  # beyond FP8's range
    case.check(package)


@pytest.mark.parametrize("page", [None, 16])
def test_heads_before_rows(backend, package, page):
    Case(backend, [6, 2], page=page, layout="heads first", causal=True).check(package)


@pytest.mark.parametrize("heads_first", [False, True])
def test_keys_and_values_side_by_side(backend, package, heads_first):
    """As vLLM keeps them: a page's keys and values in one tensor."""
    shape = (3, 2, 16, 128) if heads_first else (3, 16, 2, 128)
    both = torch.randn(shape).bfloat16().to(backend.device)
    both = both.transpose(1, 2) if heads_first else both
    table = torch.tensor([[2], [0]], dtype=torch.int32, device=backend.device)
    q, k, v = (torch.randn(2, 1, n, 64).bfloat16().to(backend.device) for n in (4, 2, 2))
    lengths = torch.tensor([3, 9], dtype=torch.int32, device=backend.device)
    caches = both[..., :64], both[..., 64:]
    assert package.kvcache_append_path(*caches, k, v) == "rope_and_cache"
    backend.ops.flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, block_table=table)
    for cache, new in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[2, 3], new[0, 0]) and torch.equal(cache[0, 9], new[1, 0])


@pytest.mark.not_on("simulator")  # whose buffers are apart
def test_pages_of_one_memory(backend, package):
    """As transformers' continuous batching has them: the layers' keys and values are pages of one
    memory, and each cache is seen from its first page to the end of all."""
    memory = torch.full((12, 8, 2, 64), GUARD).bfloat16().to(backend.device)
    caches = memory[:9], memory[2:11]
    table = torch.tensor([[4, -1], [8, 0]], dtype=torch.int32, device=backend.device)
    q, k, v = (torch.randn(2, 1, n, 64).bfloat16().to(backend.device) for n in (4, 2, 2))
    lengths = torch.tensor([0, 8], dtype=torch.int32, device=backend.device)
    memory[8] = memory[10] = torch.randn(8, 2, 64).bfloat16().to(backend.device)
    before = memory.clone()
    assert package.kvcache_append_path(*caches, k, v) == "rope_and_cache"
    out = backend.ops.flash_attn_with_kvcache(
        q, *caches, k, v, cache_seqlens=lengths, block_table=table
    )
    for page, new in ((4, k[0, 0]), (6, v[0, 0]), (0, k[1, 0]), (2, v[1, 0])):
        assert torch.equal(memory[page, 0], new)
        before[page, 0] = new
    assert torch.equal(memory, before)
    expected = v[0].repeat_interleave(2, 1)  # one key: its value
    assert torch.equal(out[0], expected)


class Launches(TorchDispatchMode):
    """The names of the ops of a call."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name().split("::")[-1])
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("options, path, launches", [
    ({}, "rope_and_cache", 1),
    ({"page": 16, "rotary": 32, "causal": True}, "rope_and_cache", 1),
    ({"page": 16, "kv_dtype": FP8[0], "rotary": 32, "rows": 1}, "rope_and_cache", 1),
    ({"kv_dtype": FP8[1], "new": 3}, "rope_and_cache", 1),
    ({"rotary": 32}, "rope_and_cache", 2),  # queries at one position
    ({"rotary": 32, "new": 3, "causal": True}, "rope_and_cache", 2),
    ({"layout": "apart"}, "torch", 0),
    ({"layout": "apart", "rotary": 32}, "torch", 2),
    ({"kv_dtype": torch.float16}, "torch", 0),
])  # fmt: skip
def test_the_path_that_is_told_is_taken(package, options, path, launches):
    from types import SimpleNamespace

    backend = SimpleNamespace(name="cpu", ops=package, device=torch.device("cpu"))
    case = Case(backend, [4, 9], **options)
    if options.get("kv_dtype") is torch.float16:  # q and the cache are, k and v are not
        case.q, case.dtype = case.q.half(), torch.float16
    assert package.kvcache_append_path(*(b[1:-1] for b in case.buffers), *case.given) == path
    with Launches() as seen:
        case.run()
    assert seen.names.count("rope_and_cache") == launches and seen.names.count("attention") == 1
    assert any("index_put" in name for name in seen.names) == (path == "torch")


@pytest.mark.parametrize("change, message", [
    ({"rotary_sin": None}, "must both be"),
    ({"rotary_cos": torch.randn(2, 9, 16)}, "must both be"),
    ({"k": None, "v": None}, "rotates new keys"),
    ({"rotary_cos": torch.randn(9, 48), "rotary_sin": torch.randn(9, 48)}, "rotary_dim must"),
    ({"rotary_cos": torch.randn(5, 16), "rotary_sin": torch.randn(5, 16)}, "positions must be"),
])  # fmt: skip
def test_wrong_rotations_append_nothing(package, change, message):
    caches = torch.randn(2, 2, 9, 2, 64).bfloat16()
    before = caches.clone()
    call = {
        "q": torch.randn(2, 3, 4, 64).bfloat16(), "k_cache": caches[0], "v_cache": caches[1],
        "k": torch.randn(2, 3, 2, 64).bfloat16(), "v": torch.randn(2, 3, 2, 64).bfloat16(),
        "cache_seqlens": torch.tensor([4, 2], dtype=torch.int32), "causal": True,
        "rotary_cos": torch.randn(9, 16), "rotary_sin": torch.randn(9, 16), **change,
    }  # fmt: skip
    with pytest.raises((RuntimeError, ValueError), match=message):
        package.flash_attn_with_kvcache(**call)
    assert torch.equal(caches, before)
