"""fused_moe and grouped_gemm on every backend of --device; test_moe_models.py has models."""

import math
from types import SimpleNamespace

import pytest
import torch
from compare import FP8_DTYPES, Guarded, assert_product_close, strided
from test_skinny_gemm import padded_fp8, random_scale

FP8, MX = "fp8", "mxfp4"
WEIGHTS = ["bfloat16", "float16", *(f"{FP8}-{scale}" for scale in ("tensor", "row", "block")), MX]

# ---- The layer


class Experts:
    """Random experts of a kind of WEIGHTS: what fused_moe takes after x and before the routing."""

    def __init__(self, kind, experts, hidden, intermediate, dtype, backend, biases=False):
        self.kind, self.dtype = kind, dtype
        self.scales = {}
        both = [(2 * intermediate, hidden), (hidden, intermediate)]
        self.weights = []
        for name, (n, k) in zip(("gate_up", "down"), both, strict=True):
            w, scale = random_experts(kind, experts, n, k, backend)
            self.weights.append(w)
            if scale is not None:
                self.scales[f"scale_{name}"] = scale
            if biases:
                self.scales[f"bias_{name}"] = torch.randn(experts, n, device=backend.device)


def random_experts(kind, experts, n, k, backend):
    """Weights of about 1 / sqrt(k), in views whose rows lie further apart than they are long."""
    device, spread = backend.device, 1 / math.sqrt(max(k, 1))
    if kind == MX:
        w = torch.randint(256, (experts, n, k // 2 + 16), dtype=torch.uint8, device=device)
        scale = torch.randint(-1, 2, (experts, n, k // 32), device=device)
        exponent = scale + 127 + round(math.log2(spread / 3))
        return w[..., : k // 2], exponent.to(torch.uint8)
    if kind in ("bfloat16", "float16"):
        dtype = getattr(torch, kind)
        padded = (spread * torch.randn(experts, n, k + 13, device=device)).to(dtype)
        return padded[..., 5 : 5 + k], None
    w = torch.stack([padded_fp8(n, k, backend.fp8_dtype, device) for _ in range(experts)])
    spread /= max(w.float().std().item(), 1e-3) if w.numel() > 1 else 1
    granularity = kind.split("-")[1]
    if granularity == "tensor":
        return w, spread * (0.5 + torch.rand(experts, device=device))
    scales = [random_scale(granularity, n, k, device, 128) for _ in range(experts)]
    return w, spread * torch.stack(scales)


def random_routing(tokens, experts, k, backend):
    ids = torch.stack([torch.randperm(max(experts, k))[:k] % experts for _ in range(tokens)])
    weights = torch.rand(tokens, k, device=backend.device) - 0.2
    return weights, ids.to(torch.int32).to(backend.device)


def allowed_error(narrow: bool, tokens: int, device: torch.device) -> float:
    """Of the norm of a layer's result, against float64.

    narrow: h is FP8. A float32 sum that lies at a tie rounds h to the neighbour of what float64
    gives, by up to an eighth: few do, but for NVIDIA's FP8 tensor cores, which add in some 14 bits
    (4.7e-3 seen on an H200). Of few tokens one such h weighs more.
    """
    if not narrow:
        return 1e-3 if tokens >= 8 else 2e-3
    return 3e-2 if tokens < 8 else 8e-3 if device.type == "cuda" else 4e-3


def check(backend, package, x, experts, weights, ids, out_dtype=torch.float32, **options):
    """Through poisoned outputs with guards around them, against float64."""
    tokens, hidden = x.shape
    out = Guarded(tokens, hidden, out_dtype, backend.device)
    operands = (x, *experts.weights, weights, ids)
    options = {**experts.scales, **options}
    if backend.name == "reference":
        out.view.copy_(backend.ops.fused_moe(*operands, **options, out_dtype=out_dtype))
    else:
        result = backend.ops.fused_moe(*operands, **options, out=out.view)
        assert result.data_ptr() == out.view.data_ptr()
    out.assert_guards_intact()
    exact = package.reference.fused_moe(*operands, **options, out_dtype=torch.float32).double()
    error = out.view.double() - exact
    assert error.isfinite().all(), "not every output is finite"
    narrow = experts.weights[0].dtype in FP8_DTYPES and options.get("quantize_input", True)
    allowed = allowed_error(narrow, tokens, out.view.device)
    allowed += 0 if out_dtype == torch.float32 else torch.finfo(out_dtype).eps
    assert error.norm() <= allowed * exact.norm(), (error.norm() / exact.norm()).item()
    by_row = error.norm(dim=1) - 0.1 * exact.norm(dim=1)
    assert (by_row <= 1e-4 * exact.norm()).all(), by_row


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_kinds_of_weights(backend, package, kind, tokens):
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    experts = Experts(kind, 6, 320, 192, dtype, backend)
    x = strided(tokens, 320, dtype, backend.device)
    weights, ids = random_routing(tokens, 6, 3, backend)
    check(backend, package, x, experts, weights, ids)


@pytest.mark.parametrize("hidden, intermediate", [(1, 1), (72, 40), (129, 257), (512, 128)])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8-row", "fp8-block"])
def test_shapes(backend, package, kind, hidden, intermediate):
    experts = Experts(kind, 4, hidden, intermediate, torch.bfloat16, backend)
    x = strided(17, hidden, torch.bfloat16, backend.device)
    weights, ids = random_routing(17, 4, 2, backend)
    # A sum of one product is rounded to FP8 or not at all.
    out_dtype = torch.float32 if hidden > 1 else torch.bfloat16
    check(backend, package, x, experts, weights, ids, out_dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("kind", ["bfloat16", "fp8-row", MX])
def test_activations(backend, package, kind, interleaved, activation):
    experts = Experts(kind, 4, 128, 96, torch.bfloat16, backend, biases=True)
    x = strided(20, 128, torch.bfloat16, backend.device)
    weights, ids = random_routing(20, 4, 2, backend)
    options = {"activation": activation, "interleaved": interleaved}
    check(backend, package, x, experts, weights, ids, **options)
    check(backend, package, 4 * x, experts, weights, ids, **options, limit=1.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["fp8-tensor", "fp8-row", "fp8-block"])
def test_inputs_as_they_are(backend, package, kind, dtype):
    experts = Experts(kind, 4, 256, 128, dtype, backend)
    x = strided(9, 256, dtype, backend.device)
    weights, ids = random_routing(9, 4, 2, backend)
    check(backend, package, x, experts, weights, ids, quantize_input=False)
    check(backend, package, x, experts, weights, ids, dtype, quantize_input=False)


ROUTINGS = {
    "all to one": lambda tokens, k: torch.full((tokens, k), 3),
    "none": lambda tokens, k: torch.full((tokens, k), -1),
    "other ranks'": lambda tokens, k: torch.randint(-4, 16, (tokens, k)),
    "far out": lambda tokens, k: torch.randint(-(2**31), 2**31 - 1, (tokens, k)).fill_diagonal_(1),
    "one token": lambda tokens, k: torch.full((tokens, k), 8).index_fill_(0, torch.tensor([5]), 7),
}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", ["bfloat16", "fp8-row"])
def test_any_routing(backend, package, kind, routing):
    """Ids that are not of an expert are skipped, whatever their weights."""
    experts = Experts(kind, 8, 128, 128, torch.bfloat16, backend)
    x = strided(37, 128, torch.bfloat16, backend.device)
    ids = ROUTINGS[routing](37, 4).to(torch.int32).to(backend.device)
    weights = torch.rand(37, 4, device=backend.device) - 0.2
    weights[(ids < 0) | (ids >= 8)] = math.nan
    if backend.name == "reference":
        weights = weights.nan_to_num()  # it is compared with itself
    check(backend, package, x, experts, weights, ids)


@pytest.mark.parametrize("tokens", [2, 11])  # GPUs route few slots and many by other kernels
@pytest.mark.parametrize("k", [1, 5, 16, 17, 32])
def test_slots(backend, package, k, tokens):
    experts = Experts("fp8-row", 16, 128, 64, torch.bfloat16, backend)
    x = strided(tokens, 128, torch.bfloat16, backend.device)
    check(backend, package, x, experts, *random_routing(tokens, 16, k, backend))


@pytest.mark.parametrize(
    "tokens, count, k", [(50, 512, 8), (2, 520, 6), (70, 520, 22), (9, 2048, 32)]
)
def test_many_experts(backend, package, tokens, count, k):
    experts = Experts("fp8-row", count, 64, 32, torch.bfloat16, backend)
    x = strided(tokens, 64, torch.bfloat16, backend.device)
    check(backend, package, x, experts, *random_routing(tokens, count, k, backend))


@pytest.mark.parametrize("count", [40, 600])
def test_many_slots(backend, package, count):
    """More than GPUs route in one launch."""
    experts = Experts("bfloat16", count, 32, 16, torch.bfloat16, backend)
    x = strided(1100, 32, torch.bfloat16, backend.device)
    check(backend, package, x, experts, *random_routing(1100, count, 32, backend))


def test_integer_ids_of_any_dtype(backend):
    """What is no expert's stays none, and does not wrap around to one."""
    experts = Experts("bfloat16", 6, 64, 32, torch.bfloat16, backend)
    x = strided(7, 64, torch.bfloat16, backend.device)
    weights, ids = random_routing(7, 6, 3, backend)

    def layer(ids):
        return backend.ops.fused_moe(x, *experts.weights, weights, ids)

    for dtype in (torch.int8, torch.uint8, torch.int16, torch.uint16, torch.uint32, torch.int64,
                  torch.uint64):  # fmt: skip
        limits = torch.iinfo(dtype)
        others = (6, 127, limits.min, limits.max, 2**31, 2**32 + 3, 2**63 + 2)
        for other in {n for n in others if n != 0 and limits.min <= n <= limits.max}:
            given, skipped = ids.tolist(), ids.clone()
            for row in given:
                row[1] = other
            skipped[:, 1] = -1
            given = torch.tensor(given, dtype=dtype, device=x.device)
            assert torch.equal(layer(given), layer(skipped)), (dtype, other)
    if backend.name != "reference":
        for dtype in (torch.bool, torch.float32):
            with pytest.raises(ValueError, match=r"topk_ids must be integers, got torch\."):
                layer(ids.to(dtype))


@pytest.mark.parametrize("tokens", [4096, 4097, 8200])
def test_chunks_of_tokens(best_package, device, tokens):
    """Beyond 8,192 rows the CPU takes tokens in chunks: each token as it is by itself."""
    w, scales = zip(*(random_experts("fp8-row", 4, n, k, SimpleNamespace(
        device=device, fp8_dtype=best_package.native_fp8_dtype(device)))
        for n, k in ((64, 48), (48, 32))), strict=True)  # fmt: skip
    x = torch.randn(tokens, 48, device=device).bfloat16()
    ids = torch.randint(-1, 4, (tokens, 2), dtype=torch.int32, device=device)
    weights = torch.rand(tokens, 2, device=device)
    options = dict(zip(("scale_gate_up", "scale_down"), scales, strict=True))
    whole = best_package.fused_moe(x, *w, weights, ids, **options)
    if device.type == "cpu":
        some = torch.tensor([0, 17, 4094, 4095, tokens - 1])
        part = best_package.fused_moe(x[some], *w, weights[some], ids[some], **options)
        assert torch.equal(whole[some], part)
    expected = best_package.reference.fused_moe(x, *w, weights, ids, **options).double()
    error = (whole.double() - expected).norm(dim=1)
    assert (error <= 0.1 * expected.norm(dim=1)).all()
    assert error.norm() <= 0.01 * expected.norm()


def test_rows_do_not_reach_each_other(backend):
    """A NaN stays in its token, and tokens far apart in magnitude do not share a scale."""
    experts = Experts("fp8-row", 4, 128, 64, torch.bfloat16, backend)
    x = strided(12, 128, torch.bfloat16, backend.device)
    x[3] *= 1e4
    weights, ids = random_routing(12, 4, 2, backend)
    clean = backend.ops.fused_moe(x, *experts.weights, weights, ids, **experts.scales)
    x[7, 5] = math.nan
    out = backend.ops.fused_moe(x, *experts.weights, weights, ids, **experts.scales)
    assert out[7].isnan().any()
    others = torch.arange(12, device=backend.device) != 7
    assert torch.equal(out[others], clean[others])


def test_same_bits(backend):
    experts = Experts("fp8-block", 8, 256, 256, torch.bfloat16, backend)
    x = strided(70, 256, torch.bfloat16, backend.device)
    weights, ids = random_routing(70, 8, 4, backend)
    first, second = (
        backend.ops.fused_moe(x, *experts.weights, weights, ids, **experts.scales) for _ in range(2)
    )
    assert torch.equal(first, second)


def test_leading_dimensions_and_other_dtypes_of_routing(backend, package):
    experts = Experts("bfloat16", 4, 64, 32, torch.bfloat16, backend)
    x = torch.randn(2, 5, 64, device=backend.device).bfloat16()
    weights, ids = random_routing(10, 4, 2, backend)
    flat = backend.ops.fused_moe(x.view(10, 64), *experts.weights, weights.bfloat16(), ids)
    folded = backend.ops.fused_moe(
        x, *experts.weights, weights.bfloat16().view(2, 5, 2), ids.long().view(2, 5, 2)
    )
    assert folded.dtype == torch.bfloat16 and torch.equal(folded, flat.view(2, 5, 64))


def test_no_tokens(backend):
    experts = Experts("fp8-row", 4, 64, 32, torch.bfloat16, backend)
    x = torch.empty(0, 64, device=backend.device).bfloat16()
    weights, ids = torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32)
    routing = weights.to(backend.device), ids.to(backend.device)
    assert backend.ops.fused_moe(x, *experts.weights, *routing, **experts.scales).shape == (0, 64)


# ---- Products of rows sorted by expert


def check_grouped(backend, package, a, w, offsets, scale_a, scale_w, out_dtype=torch.float32):
    out = Guarded(a.shape[0], w.shape[1], out_dtype, backend.device)
    poisoned = out.view.clone()
    if backend.name == "reference":
        result = backend.ops.grouped_gemm(a, w, offsets, scale_a, scale_w, out_dtype=out_dtype)
        out.view[: int(offsets[-1])] = result[: int(offsets[-1])]
    else:
        backend.ops.grouped_gemm(a, w, offsets, scale_a, scale_w, out=out.view)
    out.assert_guards_intact()
    begin = 0
    rows = package.reference.dequantize(a, scale_a, 1)
    for expert, end in enumerate(offsets.tolist()):
        scale = None if scale_w is None else scale_w[expert]
        operands = rows[begin:end], package.reference.dequantize_expert(w[expert], scale)
        if begin < end:
            exact = operands[0] @ operands[1].t()
            assert_product_close(out.view[begin:end], exact, operands)
        begin = end
    untouched = out.view[begin:].contiguous().view(torch.uint8)
    assert torch.equal(untouched, poisoned[begin:].contiguous().view(torch.uint8))


@pytest.mark.parametrize("ends", [[3, 3, 40, 77], [0, 0, 0, 0], [80, 80, 80, 80], [1, 2, 3, 70]])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_grouped_gemm(backend, package, kind, ends):
    dtype = torch.float16 if kind == "float16" else torch.bfloat16
    w, scale = random_experts(kind, 4, 150, 288, backend)
    offsets = torch.tensor(ends, dtype=torch.int32, device=backend.device)
    a = strided(80, 288, dtype, backend.device)
    check_grouped(backend, package, a, w, offsets, None, scale)
    if not kind.startswith(FP8):
        return
    a = padded_fp8(80, 288, backend.fp8_dtype, backend.device)
    for granularity in ("tensor", "row", "block"):
        scale_a = random_scale(granularity, 80, 288, backend.device, 1)
        check_grouped(backend, package, a, w, offsets, scale_a, scale, torch.bfloat16)


def test_mxfp4_scales_at_their_ends(backend, package):
    """2^-127 up to 2^127, and NaN, which stays in its row of w."""
    device = backend.device
    w = torch.randint(256, (1, 6, 16), dtype=torch.uint8, device=device)
    scale = torch.tensor([0, 1, 2, 253, 254, 255], dtype=torch.uint8, device=device)
    scale = scale.view(1, 6, 1)
    a = torch.randn(3, 32, device=device).bfloat16()
    offsets = torch.tensor([3], dtype=torch.int32, device=device)
    options = {"out_dtype": torch.float32}
    out = backend.ops.grouped_gemm(a, w, offsets, None, scale, **options)
    exact = package.reference.grouped_gemm(a, w, offsets, None, scale, **options)
    largest = a.float().abs() @ torch.full((32, 1), 6.0, device=device)
    assert out[:, 5].isnan().all() and not out[:, :3].isnan().any()
    # What is below float32's smallest normal number may be taken for zero.
    torch.testing.assert_close(out[:, :3], exact[:, :3], rtol=1e-5, atol=2e-36)
    powers = torch.exp2(scale.view(-1)[3:5].double() - 127)
    error = (out[:, 3:5].double() - exact[:, 3:5].double()).abs() / powers / largest.double()
    finite = exact[:, 3:5].isfinite() & out[:, 3:5].isfinite()
    assert (error[finite] < 1e-5).all()


@pytest.mark.parametrize("ends", [[7, -5, 1000], [-(2**31), 2**31 - 1, 3], [0, 9, 4], [3, 2, 1]])
@pytest.mark.parametrize("more", [0, 697])  # experts without rows
def test_offsets_out_of_range_touch_nothing_else(backend, ends, more):
    if backend.name == "reference":
        return
    w, scale = random_experts("fp8-row", 3, 64, 128, backend)
    w, scale = (torch.cat([t[:1].expand(more, -1, -1), t]) for t in (w.contiguous(), scale))
    a = padded_fp8(10, 128, backend.fp8_dtype, backend.device)
    clamped = []
    for end in ends:
        clamped.append(max(*clamped[-1:], min(end, 10), 0))

    def product(ends):
        offsets = torch.tensor([0] * more + ends, dtype=torch.int32, device=backend.device)
        out = Guarded(10, 64, torch.float32, backend.device)
        backend.ops.grouped_gemm(a, w, offsets, None, scale, out=out.view)
        out.assert_guards_intact()
        return out.view

    found, expected = product(ends), product(clamped)
    assert torch.equal(
        found.contiguous().view(torch.int32), expected.contiguous().view(torch.int32)
    )


# ---- As torch sees them, and what they refuse; on the best backend of this machine


def layer(package, device, **changes):
    """Positional and keyword arguments of a small fused_moe call."""
    w = [torch.randn(s, device=device).to(package.native_fp8_dtype(device))
         for s in ((4, 64, 96), (4, 96, 32))]  # fmt: skip
    found = {
        "x": torch.randn(3, 96, device=device).bfloat16(), "w_gate_up": w[0], "w_down": w[1],
        "topk_weights": torch.rand(3, 2, device=device),
        "topk_ids": torch.tensor([[0, 3], [1, 1], [-1, 4]], dtype=torch.int32, device=device),
        "scale_gate_up": torch.rand(4, 64, 1, device=device),
        "scale_down": torch.rand(4, device=device),
    }  # fmt: skip
    return {**found, **changes}


def test_opcheck(best_package, device):
    ops, found = best_package.functional.ops, layer(best_package, device)
    scales = [found.pop(f"scale_{name}") for name in ("gate_up", "down")]
    utils = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    out = torch.empty(3, 96, device=device)
    arguments = (out, *found.values(), *scales, None, None, "silu", math.inf, False, True, True)
    torch.library.opcheck(ops.fused_moe.default, arguments, test_utils=utils)
    weights, ids = torch.empty(3, 2, device=device), torch.empty(3, 2, device=device).int()
    logits = torch.randn(3, 8, device=device)
    arguments = (weights, ids, logits, None, "softmax", 1, 1, True, 1.0)
    torch.library.opcheck(ops.topk.default, arguments)
    offsets = torch.tensor([1, 1, 2, 3], dtype=torch.int32, device=device)
    arguments = (out[:, :64], found["x"].to(scales[0].dtype).to(found["w_down"].dtype),
                 found["w_gate_up"], offsets, None, scales[0])  # fmt: skip
    torch.library.opcheck(ops.grouped_gemm.default, arguments, test_utils=utils)


def test_compiles_without_a_graph_break(best_package, device):
    def block(logits, found):
        weights, ids = best_package.topk_softmax(logits, 2)
        return best_package.fused_moe(**{**found, "topk_weights": weights, "topk_ids": ids})

    found, logits = layer(best_package, device), torch.randn(3, 4, device=device)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(logits, found), block(logits, found))


def test_meta_tensors_have_shapes(best_package):
    x = torch.empty(2, 5, 96, dtype=torch.bfloat16, device="meta")
    found = layer(best_package, torch.device("cpu"))
    weights, ids = best_package.topk_softmax(torch.empty(2, 5, 4, device="meta"), 2)
    assert ids.shape == (2, 5, 2) and ids.dtype == torch.int32
    w = [found[name].to("meta") for name in ("w_gate_up", "w_down")]
    out = best_package.fused_moe(x, *w, weights, ids, out_dtype=torch.float32)
    assert out.shape == x.shape and out.dtype == torch.float32
    offsets = torch.empty(4, dtype=torch.int32, device="meta")
    assert best_package.grouped_gemm(x[0], w[0].bfloat16(), offsets).shape == (5, 64)


def test_a_config_can_be_asked_for(best_package, device):
    ops, found = best_package.functional.ops, layer(best_package, device)
    scales = [found.pop(f"scale_{name}") for name in ("gate_up", "down")]
    options = (*found.values(), *scales, None, None, "silu", math.inf, False, True, False)
    out, again = torch.empty(3, 96, device=device), torch.empty(3, 96, device=device)
    ops.fused_moe(out, *options)
    config = ops.fused_moe_configs(out, *options).splitlines()[0]
    ops.fused_moe(again, *options, config)
    assert torch.equal(out, again)
    with pytest.raises(RuntimeError, match="got 'nonsense' for T = 3, H = 96, I = 32, E = 4"):
        ops.fused_moe(again, *options, "nonsense")


REFUSED = {
    "x float64": ({"x": torch.randn(3, 96).double()}, "x must be .* got float64"),
    "odd rows": ({"w_gate_up": torch.empty(4, 63, 96).bfloat16()}, "an even number of rows"),
    "no matrix an expert": ({"w_gate_up": torch.empty(64, 96).bfloat16()}, "three dimensions"),
    "too many experts": ({"w_gate_up": torch.empty(2049, 2, 96).bfloat16()}, "1 to 2048 experts"),
    "another I": (
        {"w_down": torch.empty(4, 96, 33).bfloat16()},
        r"w_down must have shape \[4, 96, 32\], got \[4, 96, 33\]",
    ),
    "slots": ({"topk_ids": torch.zeros(3, 33).int()}, "topk_ids must have 1 to 32 slots a token"),
    "weights of other slots": (
        {"topk_weights": torch.rand(3, 3)},
        r"topk_weights must have shape \[3, 2\], got \[3, 3\]",
    ),
    "scale": (
        {"scale_gate_up": torch.rand(4, 64)},
        r"scale_gate_up must have shape \[4\], \[4, 64, 1\] or \[4, 1, 1\], got \[4, 64\]",
    ),
    "bias": (
        {"bias_down": torch.rand(4, 95)},
        r"bias_down must have shape \[4, 96\], got \[4, 95\]",
    ),
    "activation": ({"activation": "relu"}, "activation must be silu, .* got relu"),
    "limit": ({"limit": -1.0}, "limit must be positive, got -1"),
    "MXFP4 without scales": (
        {"w_gate_up": torch.zeros(4, 64, 48, dtype=torch.uint8), "scale_gate_up": None},
        "scale_gate_up is missing",
    ),
    "no tensor": ({"w_down": None}, "w_down must be a torch.Tensor, got None"),
    "out's dtype": ({"out": torch.empty(3, 96).half()}, "out must be float32 or have the dtype"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_errors_say_what_was_required_and_what_came(best_package, device, case):
    changes, message = REFUSED[case]
    changes = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in changes.items()}
    out = torch.full((3, 96), -7.0, device=device).bfloat16()
    with pytest.raises((RuntimeError, ValueError, TypeError), match=message):
        best_package.fused_moe(**{"out": out, **layer(best_package, device, **changes)})
    assert out.eq(-7).all()


def test_out_must_not_share_memory(best_package, device):
    found = layer(best_package, device)
    with pytest.raises(RuntimeError, match="out is written and must not share memory with x"):
        best_package.fused_moe(**found, out=found["x"])
