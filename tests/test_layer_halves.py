"""The halves of a decoder layer (torch-ext/bindings/layer_attention.cpp, layer_mlp.cpp) give the
bits of the ops that they run, on every device."""

import pytest
import torch
from compare import bits

HIDDEN, HEADS, KV_HEADS, SIZE, WIDE = 256, 4, 2, 64, 384
KINDS = ("rows", "static", "blocks", "powers of two", "weights alone")


@pytest.fixture
def chance():
    return torch.Generator().manual_seed(11)


class Random:
    def __init__(self, backend, chance):
        self.backend, self.chance = backend, chance

    def rows(self, *size, dtype=torch.bfloat16):
        return torch.randn(size, generator=self.chance).to(self.backend.device).to(dtype)

    def scales(self, *size):
        return (torch.rand(size, generator=self.chance) * 0.05 + 0.01).to(self.backend.device)

    def linear(self, n, k, kind, bias=False):
        """A weight, its scales, a bias and a static scale of the rows that it takes."""
        blocks = -(-n // 128), -(-k // 128)
        return (
            self.rows(n, k, dtype=self.backend.fp8_dtype),
            self.scales(*blocks) if kind == "blocks" else self.scales(n, 1),
            self.rows(n) if bias else None,
            self.scales(1) if kind == "static" else None,
        )


def rounding(kind):
    return (kind != "weights alone", 128 * (kind == "blocks"), 0.0, kind == "powers of two")


def poisoned(like, *size):
    return torch.full(size, float("nan"), dtype=torch.bfloat16, device=like.device)


def quantised(backend, rows, linear, kind, make):
    """make(out, scales, static scale, rounding) of rows for a linear; and the linear's product."""
    w, scale_w, bias, static = linear
    quantizes, *how = rounding(kind)
    if not quantizes:
        q, scales = poisoned(rows, *rows.shape), None
        make(q, None, None, (0, 0.0, False))
    else:
        q = torch.empty(rows.shape, dtype=w.dtype, device=rows.device)
        groups = -(-rows.shape[1] // 128) if how[0] else 1
        scales = None if static is not None else poisoned(rows, len(rows), groups).float()
        make(q, scales, static, how)
    out = poisoned(rows, len(rows), len(w))
    of_rows = static if scales is None else scales
    backend.ops.functional.ops.gemm(out, q, w, of_rows if quantizes else None, scale_w, bias)
    return out


def mlp_by_ops(backend, x, attended, weight, gate_up, down, kind):
    ops, total = backend.ops.functional.ops, poisoned(x, *x.shape)
    both = quantised(
        backend, x, gate_up, kind,
        lambda q, scales, static, how: ops.rmsnorm_fp8(
            q, scales, x, total, weight, static, 1e-5, *how, 0.5, attended
        ),
    )  # fmt: skip
    gate, up = both.chunk(2, -1)
    return total, quantised(
        backend, gate, down, kind,
        lambda q, scales, static, how: ops.swiglu_fp8(q, scales, gate, up, static, "silu", *how),
    )  # fmt: skip


@pytest.mark.not_on("reference")
@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp_half_is_its_ops(backend, chance, kind):
    random = Random(backend, chance)
    for rows, bias in ((3, False), (21, True)):
        x, attended, weight = (
            random.rows(rows, HIDDEN),
            random.rows(rows, HIDDEN),
            random.rows(HIDDEN),
        )
        gate_up = random.linear(2 * WIDE, HIDDEN, kind, bias)
        down = random.linear(HIDDEN, WIDE, kind, bias)
        expected_sum, expected = mlp_by_ops(backend, x, attended, weight, gate_up, down, kind)
        both = poisoned(x, 4, rows, HIDDEN)
        out, total = both[1], both[2]
        backend.ops.functional.ops.layer_mlp(
            out, total, x, attended, weight, *gate_up, *down, "silu", 1e-5, 0.5, *rounding(kind)
        )
        assert torch.equal(bits(total), bits(expected_sum))
        assert torch.equal(bits(out), bits(expected)) and out.isfinite().all()
        assert both[0].isnan().all() and both[3].isnan().all()


def adds_products(backend):
    """Whether kernels for many rows add to what out holds."""
    if backend.name == "cuda":
        return torch.cuda.get_device_capability(backend.device)[0] == 9
    return backend.name in ("rocm", "simulator")


# rows, the layer's columns, those of its MLP: sums of one worker, of several, and cut tiles.
ADDED = [(3, 256, 384), (70, 272, 384), (300, 256, 4096), (517, 1040, 512), (70, 260, 384)]


@pytest.mark.not_on("reference")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, hidden, wide", ADDED)
def test_an_mlp_half_adds_to_its_sum(backend, chance, kind, rows, hidden, wide):
    """With the bits of the sum apart, where a kernel does it."""
    random = Random(backend, chance)
    x, attended = random.rows(rows, hidden), random.rows(rows, hidden)
    linears = (
        *random.linear(2 * wide, hidden, kind, True), *random.linear(hidden, wide, kind, rows > 99)
    )  # fmt: skip
    given = (x, attended, random.rows(hidden), *linears, "silu", 1e-5, 0.0, *rounding(kind))
    op = backend.ops.functional.ops.layer_mlp
    apart, joined = poisoned(x, 4, rows, hidden), poisoned(x, 4, rows, hidden)
    assert op(apart[1], apart[2], *given) is False
    added = op(joined[1], joined[2], *given, True)
    in_tiles = rows > 64 and hidden % 8 == 0
    assert added == (in_tiles and adds_products(backend))
    expected = apart[2] + apart[1]
    assert expected.isfinite().all() and not torch.equal(expected, apart[2])
    if added:
        assert torch.equal(bits(joined[2]), bits(expected)) and joined[1].isnan().all()
    else:
        assert torch.equal(bits(joined[1:3]), bits(apart[1:3]))
    assert joined[0].isnan().all() and joined[3].isnan().all()


def attention_by_ops(backend, x, weight, qkv, out, kind, caches, tables, norms, at, used, scales):
    ops = backend.ops.functional.ops
    projected = quantised(
        backend, x, qkv, kind,
        lambda q, scales, static, how: ops.rmsnorm_fp8(
            q, scales, x, None, weight, static, 1e-5, *how, 0.5, None
        ),
    )  # fmt: skip
    batch = len(used)
    heads = projected.view(batch, -1, HEADS + 2 * KV_HEADS, SIZE)
    q, k, v = heads.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 2)
    ops.rope_and_cache(
        q, None, *caches, q, k, v, *tables, None, *norms, at, None, *scales, "cache_positions",
        SIZE, False, 1e-6, 0.0,
    )  # fmt: skip
    attended = poisoned(x, batch, q.shape[1], HEADS, SIZE)
    descales = [None if s is None else s.expand(batch, KV_HEADS) for s in scales]
    ops.attention(
        attended, None, q, *caches, None, None, used, None, None, *descales, None, q.shape[1],
        caches[0].shape[1], 0.125, -1, 0, 0.0,
    )  # fmt: skip
    rows = attended.view(len(x), -1)
    if not rounding(kind)[0]:
        result = poisoned(x, len(x), HIDDEN)
        ops.gemm(result, rows, out[0], None, out[1], out[2])
        return result
    return quantised(
        backend, rows, out, kind,
        lambda q, scales, static, how: ops.swiglu_fp8(
            q, scales, rows, None, static, "identity", *how
        ),
    )  # fmt: skip


@pytest.mark.not_on("reference")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fp8_cache", [False, True])
def test_an_attention_half_is_its_ops(backend, chance, kind, fp8_cache):
    random, batch, room = Random(backend, chance), 2, 23
    for rows, bias in ((2, False), (9, True)):
        x, weight = random.rows(batch * rows, HIDDEN), random.rows(HIDDEN)
        qkv = random.linear((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN, kind, bias)
        out = random.linear(HIDDEN, HEADS * SIZE, kind, bias)
        dtype = backend.fp8_dtype if fp8_cache else torch.bfloat16
        caches = [random.rows(batch, room, KV_HEADS, SIZE).to(dtype) for _ in range(2)]
        mine = [cache.clone() for cache in caches]
        tables = [random.rows(1, rows, SIZE) for _ in range(2)]
        norms = [random.rows(SIZE), random.rows(SIZE)] if bias else [None, None]
        at = torch.arange(3, 3 + rows, device=x.device)[None]
        used = torch.tensor([3 + rows] * batch, dtype=torch.int32, device=x.device)
        scales = [random.scales(1) if fp8_cache else None for _ in range(2)]
        expected = attention_by_ops(
            backend, x, weight, qkv, out, kind, caches, tables, norms, at, used, scales
        )
        descales = [None if s is None else s.expand(batch, KV_HEADS) for s in scales]
        guarded = poisoned(x, 3, batch * rows, HIDDEN)
        backend.ops.functional.ops.layer_attention(
            guarded[1], *mine, x, weight, *qkv, *out, *tables, *norms, at, *scales, used, None,
            *descales, None, SIZE, False, 1e-6, 0.0, 0.125, -1, 0, 0.0, 1e-5, 0.5, *rounding(kind),
        )  # fmt: skip
        assert torch.equal(bits(guarded[1]), bits(expected)) and guarded[1].isfinite().all()
        assert guarded[0].isnan().all() and guarded[2].isnan().all()
        for one, other in zip(mine, caches, strict=True):
            assert torch.equal(bits(one), bits(other))


def test_a_recorded_half_keeps_its_scratch(cpu_package, chance):
    """Its launches run again with memory that nobody else has got since."""
    backend = type("Cpu", (), {"device": torch.device("cpu"), "fp8_dtype": torch.float8_e4m3fn})
    backend.ops = cpu_package
    random, rows = Random(backend, chance), 5
    x, attended, weight = random.rows(rows, HIDDEN), random.rows(rows, HIDDEN), random.rows(HIDDEN)
    gate_up, down = random.linear(2 * WIDE, HIDDEN, "rows"), random.linear(HIDDEN, WIDE, "rows")
    out, total = poisoned(x, rows, HIDDEN), poisoned(x, rows, HIDDEN)
    graph = cpu_package.models.cpu_recording.CpuGraph(
        lambda: cpu_package.functional.ops.layer_mlp(
            out, total, x, attended, weight, *gate_up, *down, "silu", 1e-5, 0.5, *rounding("rows")
        )
    )
    others = [torch.full_like(x, float("nan")) for _ in range(200)]
    x.copy_(random.rows(rows, HIDDEN))
    graph.replay()
    assert all(other.isnan().all() for other in others)
    expected_sum, expected = mlp_by_ops(backend, x, attended, weight, gate_up, down, "rows")
    assert torch.equal(bits(total), bits(expected_sum)) and torch.equal(bits(out), bits(expected))
