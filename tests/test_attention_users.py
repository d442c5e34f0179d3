"""Attention by the shapes that published models and their servers have, on every backend of
--device: heads, windows, caps and sinks of one model together, decode steps, drafts and prompts, in
16-bit and FP8 pages; and operands as they lie in such programs' memory."""

import math
import random

import pytest
import torch
from test_attention import FP8, MOST, NOWHERE, Case, lengths_for

pytestmark = pytest.mark.not_on("reference")

# Query and KV heads of a rank, size of heads, and what else a layer asks for.
MODELS = {
    "Llama 3.1 8B": {"heads": (32, 8), "size": 128},
    "Llama 3.1 405B, 8 ranks": {"heads": (16, 1), "size": 128},
    "Llama 3.2 1B": {"heads": (32, 8), "size": 64},
    "Mixtral, 4 ranks": {"heads": (8, 2), "size": 128, "window_size": (30, -1)},
    "Qwen 2.5 7B": {"heads": (28, 4), "size": 128},
    "Qwen 3 30B": {"heads": (32, 4), "size": 128},
    "GLM 4 9B": {"heads": (32, 2), "size": 128},
    "Phi 2": {"heads": (4, 4), "size": 80},
    "Phi 3 mini": {"heads": (4, 4), "size": 96, "window_size": (46, -1)},
    "Falcon 7B": {"heads": (71, 1), "size": 64},
    "Gemma 2 9B": {
        "heads": (16, 8), "size": 256, "softcap": 50.0, "softmax_scale": 0.0625,
        "window_size": (40, -1),
    },
    "Gemma 3 1B": {"heads": (4, 1), "size": 256, "window_size": (20, -1)},
    "heads of 512": {"heads": (8, 1), "size": 512},
    "GPT-OSS 20B": {"heads": (64, 8), "size": 64, "s_aux": True, "window_size": (12, -1)},
    "DeepSeek V3 prompt": {"heads": (4, 4), "size": 192, "size_v": 128},
}  # fmt: skip


def case_of(backend, model, lengths, **more):
    options = {"causal": True, **MODELS[model], **more}
    if options.get("s_aux"):
        options["s_aux"] = torch.randn(options["heads"][0]).to(torch.bfloat16)
    if options.get("kv_dtype") == "fp8":
        options["kv_dtype"] = backend.fp8_dtype
    if backend.name == "simulator" and options["heads"][1] > 2:  # heads are alike
        by = options["heads"][1] // 2
        options["heads"] = options["heads"][0] // by, 2
        if "s_aux" in options:
            options["s_aux"] = options["s_aux"][: options["heads"][0]].contiguous()
    return Case(backend, lengths_for(backend, *lengths), **options)


@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_steps(backend, model, kv_dtype):
    case = case_of(backend, model, [190, 66, 1], page=16, kv_dtype=kv_dtype)
    case.check(*case.run())


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rows", [5, 6])
def test_drafts(backend, model, rows):
    """A number of queries whose rows fill no tile."""
    case = case_of(backend, model, [90, 33, rows], rows=rows, dtype=torch.float16)
    case.check(*case.run())


@pytest.mark.not_on("simulator")
@pytest.mark.parametrize("kv_dtype", [None, "fp8"])
@pytest.mark.parametrize("model", MODELS)
def test_chunks_of_prompts(backend, model, kv_dtype):
    case = case_of(backend, model, [130, 70], rows=70, page=48, kv_dtype=kv_dtype)
    case.check(*case.run())


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("pages", [40, 5000])
def test_tables_longer_than_what_they_hold(backend, rows, pages):
    """A server's table has room for the longest sequence that it takes; what is behind a sequence's
    pages leads nowhere. The room decides how the work is divided."""
    case = Case(backend, [50, 17], rows=rows, heads=(4, 2), causal=True)
    table = torch.full((2, pages), NOWHERE, dtype=torch.int32)
    table[0, :4], table[1, :2] = torch.tensor([5, 0, 3, 1]), torch.tensor([2, 6])
    caches = [torch.full((7, 16, 2, 64), math.nan).bfloat16() for _ in range(2)]
    for cache, full in zip(caches, (case.k, case.v), strict=True):
        for b, length in enumerate(case.lengths.tolist()):
            for row in range(length):
                cache[table[b, row // 16], row % 16] = full[b, row]
    to = case.on_device
    found = backend.ops.flash_attn_with_kvcache(
        to(case.q), *map(to, caches), cache_seqlens=to(case.lengths), block_table=to(table),
        causal=True, return_lse=True,
    )  # fmt: skip
    case.check(*found)


@pytest.mark.parametrize("size", [64, 80, 128])
@pytest.mark.parametrize("ragged", [False, True])
def test_slices_of_one_product(backend, package, size, ragged):
    """q, k and v side by side in a row of qkv, and out among other columns."""
    heads, kv_heads, rows = 4, 2, 9
    qkv = torch.randn(2, rows, heads + 2 * kv_heads, size).bfloat16()
    wide = torch.full((2, rows, heads + 3, size), 7.0).bfloat16().to(backend.device)
    there, parts = qkv.to(backend.device), (heads, kv_heads, kv_heads)
    if ragged:
        ends = torch.tensor([0, rows, 2 * rows], dtype=torch.int32, device=backend.device)
        out, there = wide.view(2 * rows, -1, size)[:, 2:-1], there.flatten(0, 1)
        found = backend.ops.flash_attn_varlen_func(
            *there.split(parts, -2), ends, ends, rows, rows, causal=True, out=out
        )
    else:
        out = wide[:, :, 2:-1]
        found = backend.ops.flash_attn_func(*there.split(parts, -2), causal=True, out=out)
    assert found is out
    for b in range(2):
        expected, _ = package.reference.attention(
            *(t.double() for t in qkv[b].split(parts, -2)), causal=True
        )
        error = (wide[b, :, 2:-1].cpu().double() - expected).norm() / expected.norm()
        assert error < MOST[torch.bfloat16]
    assert (wide[:, :, :2] == 7).all() and (wide[:, :, -1] == 7).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, FP8[0]])
@pytest.mark.parametrize("paged", [False, True])
def test_caches_beyond_2_31_elements(backend, paged, dtype):
    """Only the last rows are ever touched, so the memory before them costs a CPU nothing."""
    case = Case(backend, [21, 30], size=64, size_v=16, heads=(4, 2), kv_dtype=dtype)
    of_sequence = 2**31 // (2 * 64) + 64
    shape = (2 * of_sequence // 64, 64) if paged else (2, of_sequence)
    caches = [
        torch.empty(*shape, 2, n, dtype=torch.uint8 if dtype in FP8 else dtype).to(backend.device)
        for n in (64, 16)
    ]
    caches = [c.view(dtype) if dtype in FP8 else c for c in caches]
    table = torch.tensor([[shape[0] - 3], [shape[0] - 1]], dtype=torch.int32)
    for cache, full in zip(caches, (case.k, case.v), strict=True):
        for b, length in enumerate(case.lengths.tolist()):
            page = int(table[b, 0]) if paged else b
            cache[page, :length] = full[b, :length].to(backend.device)
    options = {"block_table": case.on_device(table)} if paged else {}
    options |= {n: case.on_device(t) for n, t in case.options.items()}
    case.check(*backend.ops.flash_attn_with_kvcache(
        case.on_device(case.q), *caches, cache_seqlens=case.on_device(case.lengths),
        return_lse=True, **options,
    ))  # fmt: skip


@pytest.mark.not_on("simulator")
@pytest.mark.parametrize("seed", range(6))
def test_what_no_table_has(backend, seed):
    """Shapes, types, pages and options drawn together: nobody has thought of their meeting. Wide
    rows of many heads whose queries fill no tile were read beside their keys, on a CPU."""
    draw = random.Random(seed)
    for _ in range(8):
        kv_heads, group = draw.choice([1, 2, 3, 8]), draw.choice([1, 1, 2, 3, 5, 8])
        size = draw.choice([33, 64, 80, 96, 128, 192, 256, 512])
        options = {
            "rows": draw.choice([1, 1, 2, 3, 5, 6, 7, 8, 19]),
            "heads": (kv_heads * group, kv_heads), "size": size,
            "size_v": draw.choice([size, size, 64, 128]),
            "dtype": draw.choice([torch.float16, torch.bfloat16]),
            "kv_dtype": draw.choice([None, None, *FP8]), "page": draw.choice([None, 1, 3, 16, 64]),
            "causal": draw.random() < 0.5, "softcap": draw.choice([0.0, 0.0, 5.0]),
            "softmax_scale": draw.choice([None, None, 0.1, -0.1]),
            "window_size": draw.choice([(-1, -1), (-1, -1), (9, 0), (0, 3), (-1, 2), (70, -1)]),
            "s_aux": draw.choice([None, None, torch.randn(kv_heads * group)]),
        }  # fmt: skip
        lengths = [draw.choice([0, 1, 2, 63, 64, 65, 520]) for _ in range(draw.randint(1, 3))]
        if max(lengths) == 0:
            lengths[0] = 1
        case = Case(backend, lengths, **options)
        if case.expected.norm() > 0:
            case.check(*case.run())
