"""rope_and_cache against its definition, on every backend of --device.

Caches have values of their own first: what a call should leave alone shows.
"""

import math

import pytest
import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
# A unit in the last place, of values that are a sum of two products: its error is relative to
# them. float32 also has the error of its own arithmetic, with norms that of the mean.
STEP = {torch.float32: 2**-21, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def tables(*rows, columns, dtype=torch.float32):
    """cos and sin of angles, with the second half of columns as the first."""
    angle = torch.rand(*rows, columns // 2) * 2 * math.pi
    angle = torch.cat([angle, angle], -1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class Case:
    """A call, and its caches and outputs before it."""

    def __init__(self, backend, q, k, v, cache=None, **options):
        self.backend, self.dtype = backend, q.dtype
        self.options = {"q": q, "k": k, "v": v, **options}
        self.written = ["out"]
        if k is not None:
            self.written += ["k_out"]
            self.options.setdefault("k_out", torch.full_like(k, math.nan))
        if cache is not None:
            pages, page, dtype = cache
            for name, rows in (("k_cache", k), ("v_cache", v)):
                shape = (pages, page, *rows.shape[-2:])
                self.options[name] = torch.randn(shape).to(dtype)
                self.written.append(name)

    def results(self, device, function, with_out):
        given = {
            name: value.clone().to(device) if torch.is_tensor(value) else value
            for name, value in self.options.items()
        }
        if with_out:
            given["out"] = torch.full_like(given["q"], math.nan)
        given["out"] = function(**given)
        return {name: given[name].cpu() for name in self.written}

    def check(self, package):
        """One rounding apart at most, FP8 at most a step in one of 10,000 elements."""
        expected = self.results("cpu", package.reference.rope_and_cache, False)
        with_out = self.backend.name != "reference"
        found = self.results(self.backend.device, self.backend.ops.rope_and_cache, with_out)
        for name in self.written:
            a, b = found[name], expected[name]
            assert a.dtype == b.dtype and a.shape == b.shape
            if a.dtype in FP8:
                codes = [t.view(torch.uint8).int() for t in (a, b)]
                ordered = [torch.where(c > 127, -(c & 127), c) for c in codes]
                steps = (ordered[0] - ordered[1]).abs()
                assert steps.max() <= 1 and (steps > 0).sum() <= 2 + steps.numel() / 1000, name
            else:
                # A pair's magnitude is what its two products had.
                size = b.float().abs().amax(-1, keepdim=True).clamp(min=1)
                error = ((a.float() - b.float()).abs() / size).max()
                assert error <= STEP[a.dtype], f"{name} is off by {error:.2e}"
                assert (a == b).float().mean() > 0.97 or a.dtype == torch.float32, name
        return found


def qkv(*tokens, heads=(4, 2), size=64, size_v=None, dtype=torch.bfloat16):
    q = torch.randn(*tokens, heads[0], size).to(dtype)
    k = torch.randn(*tokens, heads[1], size).to(dtype)
    return q, k, torch.randn(*tokens, heads[1], size_v or size).to(dtype)


@pytest.mark.parametrize("size, rotary_dim", [
    (64, 64), (80, 32), (96, 96), (128, 128), (128, 64), (192, 64), (256, 256), (512, 64),
    (512, 512), (72, 20), (33, 6), (8, 2), (40, 40),
])  # fmt: skip
@pytest.mark.parametrize("interleaved", [False, True])
def test_sizes_of_heads(backend, package, size, rotary_dim, interleaved):
    cos, sin = tables(1, 5, columns=rotary_dim)
    case = Case(
        backend, *qkv(2, 5, size=size), (2, 9, torch.bfloat16), cos=cos, sin=sin,
        interleaved=interleaved, cache_seqlens=torch.tensor([3, 0]),
    )  # fmt: skip
    case.check(package)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("table_dtype", FLOATS)
@pytest.mark.parametrize("half", [False, True])
def test_dtypes_of_tables(backend, package, dtype, table_dtype, half):
    """GPT-OSS has tables of half the columns."""
    cos, sin = tables(2, 3, columns=64, dtype=table_dtype)
    if half:
        cos, sin = cos[..., :32], sin[..., :32]
    options = {"cos": cos, "sin": sin, "rotary_dim": 64 if half else None}
    Case(backend, *qkv(2, 3, dtype=dtype), **options).check(package)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size, rotary_dim", [(128, 128), (256, 64), (80, 80), (64, 0), (36, 8)])
def test_norms(backend, package, size, rotary_dim, weight_dtype, offset):
    """Of Qwen3 and Gemma 3, float32 weights too; without rotation as well."""
    weights = (torch.randn(2, size) * 0.3 + 1 - offset).to(weight_dtype)
    cos, sin = tables(7, columns=rotary_dim) if rotary_dim else (None, None)
    case = Case(
        backend, *qkv(7, size=size), (3, 4, torch.bfloat16), cos=cos, sin=sin,
        q_weight=weights[0], k_weight=weights[1], weight_offset=offset, eps=1e-5,
        slot_mapping=torch.randperm(12)[:7],
    )  # fmt: skip
    case.options["q"] *= 30
    case.check(package)


def test_a_norm_of_one_alone(backend, package):
    cos, sin = tables(3, columns=64)
    for name in ("q_weight", "k_weight"):
        Case(backend, *qkv(3), cos=cos, sin=sin, **{name: torch.rand(64)}).check(package)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, *FP8])
@pytest.mark.parametrize("page", [1, 5, 16])
@pytest.mark.parametrize("wide", [torch.int32, torch.int64])
def test_slots(backend, package, page, cache_dtype, wide):
    """vLLM's: tokens of any sequences, those of padding at -1, angles by position."""
    tokens, pages = 9, 40 // page
    cos_sin = torch.cat(tables(50, columns=64, dtype=torch.bfloat16), -1)
    cos_sin = torch.cat([cos_sin[:, :32], cos_sin[:, 64:96]], -1)
    slots = torch.randperm(pages * page)[:tokens].to(wide)
    slots[2], slots[8] = -1, -7
    scales = {"k_scale": torch.tensor([0.02]), "v_scale": torch.tensor([0.015, 0.03])}
    case = Case(
        backend, *qkv(tokens), (pages, page, cache_dtype), cos=cos_sin,
        positions=torch.randint(50, (tokens,)).to(wide), slot_mapping=slots,
        **(scales if cache_dtype in FP8 else {}),
    )  # fmt: skip
    found = case.check(package)
    left = torch.ones(pages * page, dtype=torch.bool)
    left[slots[slots >= 0].long()] = False
    for name in ("k_cache", "v_cache"):
        a, b = (t.view(torch.uint8).flatten(0, 1)[left] for t in (found[name], case.options[name]))
        assert torch.equal(a, b), "nothing else is written"


def test_page_numbers_beyond_16_bits(backend, package):
    cos, sin = tables(2, columns=64)
    slots = torch.tensor([2**16 + 3, 2**16 + 9])
    cache = 2**16 + 12, 1, torch.bfloat16
    Case(backend, *qkv(2, heads=(1, 1)), cache, cos=cos, sin=sin, slot_mapping=slots).check(package)


@pytest.mark.parametrize("cache_dtype", [torch.float16, *FP8])
@pytest.mark.parametrize("place", ["cache_seqlens", "number", "cache_positions", "row"])
@pytest.mark.parametrize("paged", [False, True])
def test_places_in_sequences(backend, package, cache_dtype, place, paged):
    cos, sin = tables(2, 3, columns=128)
    places = {
        "cache_seqlens": {"cache_seqlens": torch.tensor([4, 9]).int()},
        "number": {"cache_seqlens": 5},
        "cache_positions": {"cache_positions": torch.tensor([[3, -1, 0], [11, 2, 7]])},
        "row": {"cache_positions": torch.tensor([8, 2, 3]).int()},
    }[place]
    cache = (2, 12, cache_dtype)
    if paged:
        table = torch.tensor([[6, 2, 0], [5, 1, 3]]).int()
        places["block_table"], cache = table, (7, 4, cache_dtype)
    if cache_dtype in FP8:
        places |= {"k_scale": 0.01, "v_scale": torch.rand(2, 2) + 0.1}
    inputs = qkv(2, 3, size=128, size_v=64, dtype=torch.float16)
    Case(backend, *inputs, cache, cos=cos, sin=sin, **places).check(package)


@pytest.mark.parametrize("fp8", FP8)
@pytest.mark.parametrize("size", [64, 20])
def test_fp8_saturates_and_keeps_nan(backend, package, size, fp8):
    q, k, v = qkv(4, size=size)
    v[0, 0, :6] = torch.tensor([math.inf, -math.inf, math.nan, 1e30, -1e30, -0.0])
    k[1, 1, :3] = torch.tensor([1e30, -1e30, math.nan])
    case = Case(backend, q, k, v, (1, 4, fp8), slot_mapping=torch.arange(4))
    del case.options["k_out"]
    case.written.remove("k_out")
    found = case.results(backend.device, backend.ops.rope_and_cache, False)
    expected = case.results("cpu", package.reference.rope_and_cache, False)
    for name in ("k_cache", "v_cache"):
        a, b = found[name].float(), expected[name].float()
        assert torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("heads", [(1, 1), (32, 8), (20, 1), (5, 5), (130, 2)])
def test_numbers_of_heads(backend, package, heads):
    cos, sin = tables(2, columns=64)
    slots = torch.tensor([1, 0])
    case = Case(
        backend, *qkv(2, heads=heads), (1, 3, torch.bfloat16), cos=cos, sin=sin, slot_mapping=slots
    )
    case.check(package)


def test_queries_alone(backend, package):
    """Of layers that take another's keys and values."""
    cos, sin = tables(5, columns=64)
    q = qkv(5)[0]
    Case(backend, q, None, None, cos=cos, sin=sin).check(package)
    Case(backend, q, None, None, q_weight=torch.rand(64)).check(package)


def test_queries_and_keys_alone(backend, package):
    """Without values, which no cache takes."""
    cos, sin = tables(5, columns=64)
    q, k, _ = qkv(5)
    Case(backend, q, k, None, cos=cos, sin=sin).check(package)


def test_no_tokens(backend, package):
    cos, sin = tables(0, columns=64)
    slots = torch.zeros(0, dtype=torch.int64)
    case = Case(backend, *qkv(0), (2, 2, torch.bfloat16), cos=cos, sin=sin, slot_mapping=slots)
    found = case.results(backend.device, backend.ops.rope_and_cache, False)
    assert torch.equal(found["k_cache"], case.options["k_cache"]) and found["out"].shape[0] == 0


@pytest.mark.not_on("reference")
@pytest.mark.parametrize("size", [64, 36])
@pytest.mark.parametrize("tokens", [(6,), (2, 3)])
def test_heads_of_one_product(backend, package, tokens, size):
    """q, k and v side by side in a row, given whole or in slices, turned in place or not."""
    heads, kv_heads = 4, 2
    whole = torch.randn(*tokens, heads + 2 * kv_heads, size).bfloat16()
    parts = whole.split((heads, kv_heads, kv_heads), -2)
    cos, sin = tables(*tokens, columns=size)
    options = {"cos": cos, "sin": sin, "slot_mapping": torch.arange(6)}
    caches = torch.randn(2, 1, 6, kv_heads, size).bfloat16()
    expected = [t.clone() for t in (*parts, caches)]
    turned = package.reference.rope_and_cache(
        *expected[:3], k_cache=expected[3][0], v_cache=expected[3][1], k_out=expected[1], **options
    )
    to = lambda t: t.to(backend.device)  # noqa: E731
    options = {name: to(t) for name, t in options.items()}

    def close(a, b):
        torch.testing.assert_close(a.cpu(), b, rtol=2**-7, atol=2**-7)

    found = to(caches.clone())
    q = backend.ops.rope_and_cache(
        to(whole), num_kv_heads=kv_heads, k_cache=found[0], v_cache=found[1], **options
    )
    close(q, turned), close(found, expected[3])
    there, found = to(whole.clone()), to(caches.clone())
    q, k, v = there.split((heads, kv_heads, kv_heads), -2)
    result = backend.ops.rope_and_cache(
        q, k, v, k_cache=found[0], v_cache=found[1], out=q, k_out=k, **options
    )
    assert result is q
    close(q, turned), close(k, expected[1]), close(found, expected[3])
    assert torch.equal(v.cpu(), parts[2])


@pytest.mark.not_on("reference")
@pytest.mark.parametrize("odd", [False, True])
def test_strides(backend, package, odd):
    """Heads before rows, as models project them and static caches lie; rows that begin at no
    multiple of 16 bytes; keys and values of a page side by side."""
    dtype, size = torch.bfloat16, 64
    cos, sin = tables(2, 3, columns=size)
    case = Case(backend, *qkv(2, 3, size=size), (2, 5, dtype), cos=cos, sin=sin, cache_seqlens=2)
    expected = case.results("cpu", package.reference.rope_and_cache, False)

    def laid(tensor):
        if odd:
            wide = torch.zeros(*tensor.shape[:-1], size + 5).to(tensor.dtype)
            wide[..., 3 : 3 + size] = tensor
            return wide.to(backend.device)[..., 3 : 3 + size]
        return tensor.to(backend.device).transpose(1, 2).contiguous().transpose(1, 2)

    given = {n: laid(t) if torch.is_tensor(t) and t.dim() == 4 else t for n, t in
             case.options.items()}  # fmt: skip
    given |= {"cos": cos.to(backend.device), "sin": sin.to(backend.device)}
    pages = torch.stack([case.options["k_cache"], case.options["v_cache"]], 1).to(backend.device)
    given |= {"k_cache": pages[:, 0], "v_cache": pages[:, 1]}
    given["out"] = laid(torch.zeros(case.options["q"].shape, dtype=dtype))
    backend.ops.rope_and_cache(**given)
    for name in case.written:
        torch.testing.assert_close(given[name].cpu(), expected[name], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("with_positions", [False, True])
def test_tables_whose_columns_are_apart(backend, with_positions):
    q = torch.randn(3, 4, 64).to(backend.device)
    cos, sin = (t.to(backend.device) for t in tables(3, columns=64))
    options = {"rotary_dim": 64}
    if with_positions:
        options["positions"] = torch.tensor([2, 0, 1], device=backend.device)
    apart = [torch.stack([t, torch.full_like(t, math.nan)], -1)[..., 0] for t in (cos, sin)]
    assert apart[0].stride(-1) == 2
    run = backend.ops.rope_and_cache
    assert torch.equal(
        run(q, cos=apart[0], sin=apart[1], **options), run(q, cos=cos, sin=sin, **options)
    )


@pytest.mark.not_on("reference")
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8[0]])
def test_a_token_does_not_depend_on_its_neighbours(backend, cache_dtype):
    """Nor on their number: of many tokens, lanes of an NVIDIA GPU have two heads each."""
    many = 4096 if backend.name in ("cuda", "rocm") else 9
    cos, sin = tables(many, columns=128)
    q, k, v = qkv(many, heads=(5, 2), size=128)
    weight, slots = torch.rand(128), torch.arange(many)
    cache = torch.randn(many + 1, 1, 2, 128).to(cache_dtype)
    to = lambda t: t.to(backend.device)  # noqa: E731

    def run(n):
        written = [to(cache.clone()), to(cache.clone()), to(torch.empty_like(k[:n]))]
        out = backend.ops.rope_and_cache(
            to(q[:n]), to(k[:n]), to(v[:n]), to(cos[:n]), to(sin[:n]), q_weight=to(weight),
            k_cache=written[0], v_cache=written[1], k_out=written[2], slot_mapping=to(slots[:n]),
        )  # fmt: skip
        return [t[:2].float() for t in (out, *written)]

    assert all(torch.equal(a, b) for a, b in zip(run(many), run(2), strict=True))


@pytest.mark.not_on("reference", "cpu")
@pytest.mark.parametrize("size", [64, 20])
def test_what_leads_out_on_a_gpu(backend, package, size):
    """Nothing is written where no row is; angles that are not there are NaN."""
    cos, sin = tables(4, columns=size)
    q, k, v = qkv(6, size=size)
    positions = torch.tensor([0, 3, 4, -1, 2**31, 1])
    case = Case(
        backend, q, k, v, (2, 2, torch.bfloat16), cos=cos, sin=sin, positions=positions,
        slot_mapping=torch.tensor([3, 0, -1, 4, 2**32 + 1, 2**40]),
    )  # fmt: skip
    found = case.results(backend.device, backend.ops.rope_and_cache, True)
    wrong = torch.tensor([False, False, True, True, True, False])
    assert found["out"][wrong].isnan().all() and not found["out"][~wrong].isnan().any()
    case.options["positions"] = positions.where(~wrong, 0)
    case.options["slot_mapping"] = torch.tensor([3, 0, -1, -1, -1, -1])
    expected = case.results("cpu", package.reference.rope_and_cache, False)
    for name in ("k_cache", "v_cache"):
        torch.testing.assert_close(found[name], expected[name], rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("options, message", [
    ({"slot_mapping": torch.tensor([0, 8])}, "leads out"),
    ({"slot_mapping": torch.tensor([0, 2**40])}, "leads out"),
    ({"cache_seqlens": 3}, "leads out"),
    ({"cache_positions": torch.tensor([1, 4])}, "leads out"),
    ({"cache_seqlens": 3, "block_table": torch.tensor([[1, 2]])}, "leads out"),
    ({"slot_mapping": torch.tensor([0, 1]), "positions": torch.tensor([0, 5])}, "positions must"),
    ({"slot_mapping": torch.tensor([0, 1]), "positions": torch.tensor([-1, 0])}, "positions must"),
])  # fmt: skip
def test_what_leads_out_is_refused_on_a_cpu(package, options, message):
    """Before anything is written."""
    q, k, v = qkv(1, 2)
    cos, sin = tables(2, columns=64)
    pages = 1 if "slot_mapping" not in options and "block_table" not in options else 2
    caches = torch.randn(2, pages, 4, 2, 64).bfloat16()
    before, out = caches.clone(), torch.zeros_like(q)
    with pytest.raises(RuntimeError, match=message):
        package.rope_and_cache(
            q, k, v, cos, sin, k_cache=caches[0], v_cache=caches[1], out=out, **options
        )
    assert torch.equal(caches, before) and (out == 0).all()


@pytest.mark.parametrize("options, message", [
    ({}, "k must come with k_out or caches"),
    ({"q": torch.randn(4, 64)}, "q must be"),
    ({"num_kv_heads": 1}, "got k or v too"),
    ({"k": None, "v": None, "num_kv_heads": 2}, "queries, then num_kv_heads"),
    ({"slot_mapping": torch.arange(3), "cache_seqlens": 1}, "give one of"),
    ({"slot_mapping": torch.arange(4)}, "one for each of 3 tokens"),
    ({"cache_seqlens": torch.zeros(2)}, r"must be a number or \[1\]"),
])  # fmt: skip
def test_wrong_calls(package, options, message):
    q, k, v = qkv(3)
    cos, sin = tables(3, columns=64)
    with pytest.raises((RuntimeError, ValueError), match=message):
        package.rope_and_cache(**{"q": q, "k": k, "v": v, "cos": cos, "sin": sin, **options})


def test_transformers(package):
    """The rotations of Llama (halves), GLM (neighbours, a part of the head) and GPT-OSS."""
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as glm
    from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb as gpt_oss
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as llama

    q, k, _ = qkv(2, 5, dtype=torch.float32)
    for theirs, columns, options in (
        (llama, 64, {}), (glm, 32, {"interleaved": True}), (gpt_oss, 64, {"rotary_dim": 64}),
    ):  # fmt: skip
        cos, sin = tables(2, 5, columns=columns)
        if theirs is gpt_oss:
            cos, sin = cos[..., :32], sin[..., :32]
        k_out = torch.empty_like(k)
        found = package.rope_and_cache(q, k, None, cos, sin, k_out=k_out, **options)
        expected = theirs(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        torch.testing.assert_close(found, expected[0].transpose(1, 2))
        torch.testing.assert_close(k_out, expected[1].transpose(1, 2))


def test_attention_finds_what_was_cached(package):
    """A step of a model: the same as its own rotation and flash_attn_with_kvcache's appending."""
    q, k, v = qkv(2, 1)
    cos, sin = tables(2, 1, columns=64, dtype=torch.float32)
    caches = torch.randn(2, 4, 8, 2, 64).bfloat16()
    place = {
        "cache_seqlens": torch.tensor([9, 3]).int(),
        "block_table": torch.tensor([[2, 1], [3, 0]]).int(),
    }
    mine, own = caches.clone(), caches.clone()
    turned, k_out = (
        package.rope_and_cache(q, k, v, cos, sin, k_cache=mine[0], v_cache=mine[1], **place),
        torch.empty_like(k),
    )
    package.rope_and_cache(q, k, None, cos, sin, k_out=k_out)
    expected = package.flash_attn_with_kvcache(turned, own[0], own[1], k_out, v, **place)
    assert torch.equal(mine, own)
    place["cache_seqlens"] += 1
    assert torch.equal(package.flash_attn_with_kvcache(turned, *mine, **place), expected)


def test_compiled(package):
    """In one graph that mutates the caches, also where queries turn in place."""
    cos, sin = tables(3, columns=64)
    q, k, v = qkv(3)
    slots = torch.tensor([4, 0, -1])

    def step(q, k, v, k_cache, v_cache, in_place):
        out = package.rope_and_cache(
            q, k, v, cos, sin, k_cache=k_cache, v_cache=v_cache, slot_mapping=slots,
            out=q if in_place else None,
        )  # fmt: skip
        return out * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for in_place in (False, True):
        found, expected = (
            [t.clone() for t in (q, k, v, *torch.zeros(2, 2, 3, 2, 64).bfloat16())]
            for _ in range(2)
        )
        with torch.no_grad():
            result = compiled(*found, in_place)
        assert torch.equal(result, step(*expected, in_place))
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.slow
def test_caches_beyond_2_31_elements(package):
    """A cache of 2.2 GB whose last rows are written."""
    pages, page = 2**31 // (128 * 2 * 64) + 4, 128
    k_cache = torch.zeros(pages, page, 2, 64, dtype=torch.float8_e4m3fn)
    q, k, v = qkv(1)
    slot = torch.tensor([pages * page - 1])
    v_cache = torch.zeros(pages, page, 2, 1, dtype=torch.float8_e4m3fn)
    package.rope_and_cache(q, k, v[..., :1], k_cache=k_cache, v_cache=v_cache, slot_mapping=slot)
    assert torch.equal(k_cache[-1, -1].float(), k[0].float().to(k_cache.dtype).float())
