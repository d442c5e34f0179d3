"""matmul_2d, matmul_batched and matmul_grouped: as functions on every backend, and as the products
of transformers' finegrained FP8 checkpoints, which need no GPU with them."""

import ctypes
import inspect
import sys
from types import ModuleType

import load
import pytest
import torch
import transformers
from compare import assert_product_close
from project import REPO_ID
from tiny_models import randomized, tokens
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FineGrainedFP8Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.integrations import finegrained_fp8, hub_kernels
from transformers.quantizers import auto

BLOCKS = (128, 128)
EXPERTS = 5


def fp8_weight(*shape, device="cpu"):
    """As checkpoints hold it: OCP, with every code but NaN, -0 too."""
    codes = torch.randint(256, shape, dtype=torch.uint8)
    return torch.where(codes & 0x7F == 0x7F, 0x80, codes).view(torch.float8_e4m3fn).to(device)


def scales_of(whole, device, *shape):
    *experts, n, k = shape
    blocks = (1, 1) if whole else (-(-n // 128), -(-k // 128))
    return (torch.rand(*experts, *blocks) + 0.5).to(device)


def check(package, dialect, actual, x, w, scale_w, static=None, whole=False):
    """Against the float64 product of what the reference makes of the operands in the dialect."""
    reference = package.reference
    x, w, scale_w, actual = x.cpu(), w.cpu(), scale_w.cpu(), actual.cpu()
    w, scale_w = reference.to_native_fp8(w, scale_w, fp8_dtype=dialect)
    if static is not None:
        static = static.cpu() * (2 if dialect == torch.float8_e4m3fnuz else 1)
    group_size = None if whole or static is not None else 128
    rows = x.reshape(-1, x.shape[-1])
    q, scale = reference.quantize_fp8(rows, scale=static, group_size=group_size, fp8_dtype=dialect)
    operands = reference.dequantize(q, scale, 1), reference.dequantize(w, scale_w, 128)
    assert actual.shape == (*x.shape[:-1], w.shape[0])
    assert_product_close(actual.flatten(0, -2), operands[0] @ operands[1].t(), operands)


# ---- the functions -------------------------------------------------------------------------------


@pytest.mark.parametrize("n, k", [(200, 384), (256, 100), (96, 64)])
@pytest.mark.parametrize("scheme", ["blocks", "static blocks", "whole", "static whole"])
@pytest.mark.parametrize("rows", [3, 70])
def test_matmul_2d(backend, package, rows, scheme, n, k):
    device, whole = backend.device, "whole" in scheme
    x = torch.randn(1, rows, k, device=device)
    w, scale_w = fp8_weight(n, k, device=device), scales_of(whole, device, n, k)
    static = torch.tensor(0.01, device=device) if "static" in scheme else None
    if whole:
        scale_w = scale_w.reshape(())
    given, block_size = (w.clone(), scale_w.clone()), None if whole else BLOCKS
    out = backend.ops.matmul_2d(x, *given, block_size, activation_scale=static)
    assert out.dtype == x.dtype and given[0].dtype == w.dtype
    assert torch.equal(given[0].float(), w.float()) and torch.equal(given[1], scale_w)
    check(package, backend.fp8_dtype, out, x, w, scale_w, static, whole)


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
@pytest.mark.parametrize("name", ["matmul_batched", "matmul_grouped"])
def test_experts(backend, package, name, whole):
    """Some experts have no rows, one has many, and some rows belong to none of them."""
    device, n, k = backend.device, 256, 384
    ids = torch.tensor([1] * 70 + [3] * 2 + [4] + [EXPERTS] * 3 + [EXPERTS + 2])
    if name == "matmul_batched":
        ids = torch.cat([ids, torch.tensor([-1, -1, -(2**40), 2**40, 2**32 + 3])])
        ids = ids[torch.randperm(len(ids))]
    x = torch.randn(len(ids), k, device=device)
    w = fp8_weight(EXPERTS, n, k, device=device)
    scale_w = scales_of(whole, device, EXPERTS, n, k)
    if whole:  # gate's and up's
        scale_w = torch.rand(EXPERTS, 2, 1, device=device) + 0.5
    block_size = (n, k) if whole else BLOCKS
    if name == "matmul_batched":
        out = backend.ops.matmul_batched(x, w, scale_w, ids.to(device), block_size=block_size)
    else:
        counts = torch.bincount(ids, minlength=EXPERTS)[:EXPERTS]
        out = backend.ops.matmul_grouped(
            x, w, scale_w, offsets=counts.cumsum(0, dtype=torch.int32).to(device),
            tokens_per_expert=counts.float().to(device), block_size=block_size,
        )  # fmt: skip
    elsewhere = ((ids < 0) | (ids >= EXPERTS)).to(device)
    assert out.shape == (len(ids), n) and not out[elsewhere].any()
    for expert in (1, 3, 4):
        rows = (ids == expert).to(device)
        scale = scale_w[expert]
        scale = scale.repeat_interleave(n // 2, 0) if whole else scale
        check(package, backend.fp8_dtype, out[rows], x[rows], w[expert], scale, whole=whole)


@pytest.mark.parametrize("ends", [[-1, 2, 2], [2, -3, -1], [9, 9, 9], [0, 0, 0]])
def test_offsets_out_of_range(package, ends):
    """As grouped_gemm takes them; what no expert has is zeros."""
    x, w, scale_w = torch.randn(6, 128), fp8_weight(3, 128, 128), torch.ones(3, 1, 1)
    nearest = []
    for end in ends:
        nearest.append(max(*nearest[-1:], 0, min(end, 6)))
    found, expected = (
        package.matmul_grouped(x, w, scale_w, torch.tensor(given).int(), None, BLOCKS)
        for given in (ends, nearest)
    )
    assert torch.equal(found, expected) and not found[nearest[-1] :].any()
    assert found[: nearest[-1]].any() == (nearest[-1] > 0)


def test_ids_and_offsets_that_are_no_integers_are_refused(package):
    x, w, scale_w = torch.randn(3, 128), fp8_weight(3, 128, 128), torch.ones(3, 1, 1)
    for dtype in (torch.float32, torch.bool):
        with pytest.raises(ValueError, match="expert_ids must be integers, got"):
            package.matmul_batched(x, w, scale_w, torch.zeros(3).to(dtype), BLOCKS)
    with pytest.raises(
        ValueError, match=r"expert_ids must be \[S\] for an A of \[S, K\], got \(2,\)"
    ):
        package.matmul_batched(x, w, scale_w, torch.zeros(2).int(), BLOCKS)
    for dtype in (torch.float32, torch.bool, torch.int64):
        with pytest.raises(RuntimeError, match="offsets must be int32, got"):
            package.matmul_grouped(x, w, scale_w, torch.zeros(3).to(dtype), None, BLOCKS)


def test_outputs_have_the_dtype_that_is_asked_for(backend):
    device = backend.device
    x = torch.randn(2, 128, device=device).half()
    w, scale_w = fp8_weight(128, 128, device=device), torch.ones(1, 1, device=device)
    assert backend.ops.matmul_2d(x, w, scale_w, BLOCKS).dtype == torch.float16
    out = backend.ops.matmul_2d(x, w, scale_w, BLOCKS, torch.bfloat16)
    assert out.dtype == torch.bfloat16


def test_scales_may_be_powers_of_two(package):
    x, w = torch.randn(4, 256), fp8_weight(256, 256)
    exponents = torch.randint(120, 134, (2, 2), dtype=torch.uint8)
    powers = exponents.view(torch.float8_e8m0fnu)
    expected = package.matmul_2d(x, w, powers.float(), BLOCKS)
    assert torch.equal(package.matmul_2d(x, w, powers, BLOCKS), expected)


@pytest.mark.parametrize("name", ["matmul_2d", "matmul_batched", "matmul_grouped"])
def test_parameters_are_those_that_transformers_names(package, name):
    """It passes some by position and some by name."""
    first = ["A", "B", "Bs"]
    rest = {
        "matmul_2d": ["block_size", "output_dtype", "activation_scale"],
        "matmul_batched": ["expert_ids", "block_size", "output_dtype"],
        "matmul_grouped": ["offsets", "tokens_per_expert", "block_size", "output_dtype"],
    }
    assert list(inspect.signature(getattr(package, name)).parameters) == [*first, *rest[name]]


def test_what_has_no_kernel_is_refused(package):
    x, w, scale_w = torch.randn(2, 256), fp8_weight(256, 256), torch.ones(8, 8)
    with pytest.raises(ValueError, match=r"block_size must be \(128, 128\), None or \(N, K\), got"):
        package.matmul_2d(x, w, scale_w, (32, 32))
    with pytest.raises(ValueError, match=r"FP4 has no kernel here"):
        package.matmul_2d(x, w.view(torch.int8), scale_w, BLOCKS)
    with pytest.raises(ValueError, match=r"A must be \[S, K\] and B \[E, N, K\], got"):
        package.matmul_batched(x, w, scale_w, torch.zeros(2, dtype=torch.long), BLOCKS)


def test_compiles(package):
    x, w, scale_w = torch.randn(6, 256), fp8_weight(3, 128, 256), torch.rand(3, 1, 2)
    ids = torch.tensor([2, 0, 0, 3, 1, 2])

    def both(x):
        y = package.matmul_batched(x, w, scale_w, ids, BLOCKS)
        return y + package.matmul_2d(x, w[0], scale_w[0], BLOCKS)

    torch._dynamo.reset()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), both(x))


# ---- OCP weights on an FNUZ device --------------------------------------------------------------


@pytest.fixture
def dialect(package, monkeypatch):
    """The module that converts, told that the CPU is an FNUZ device."""
    module = sys.modules[package.functional.finegrained.native_weight.__module__]
    monkeypatch.setattr(module, "native_fp8_dtype", lambda device: torch.float8_e4m3fnuz)
    return module


def test_fnuz_weights_are_read_in_place(package, dialect):
    """By views of them, as the eager experts make them with each call."""
    w, scale_w, x = fp8_weight(3, 256, 128), torch.rand(3, 2, 1) + 0.5, torch.randn(4, 128)
    original, place = w.clone(), w.data_ptr()
    for expert in (0, 1, 2, 1):
        view, _ = dialect.native_weight(w[expert], scale_w[expert])
        assert view.data_ptr() == place + expert * 256 * 128
        out = package.matmul_2d(x, w[expert], scale_w[expert], BLOCKS)
        check(package, torch.float8_e4m3fnuz, out, x, original[expert], scale_w[expert])
    assert w.dtype == original.dtype and torch.equal(w.float(), original.float())


NEW_WEIGHTS = {
    "copy_": lambda old, new: old.copy_(new),
    "data.copy_": lambda old, new: old.data.copy_(new),
    "a row by data.copy_": lambda old, new: old.data[..., 3, :].copy_(new[..., 3, :]),
    "a view's": lambda old, new: old.detach().view(torch.uint8).copy_(new.view(torch.uint8)),
    "data": lambda old, new: setattr(old, "data", new),
    "data_ptr": lambda old, new: ctypes.memmove(old.data_ptr(), new.data_ptr(), new.nbytes),
}


@pytest.mark.parametrize("way", NEW_WEIGHTS)
def test_fnuz_weights_may_change(package, dialect, way):
    """Reinforcement learning writes into a model that runs, in ways that bump no version."""
    x, ids = torch.randn(4, 128), torch.tensor([2, 0, 1, 2])
    w = torch.nn.Parameter(fp8_weight(3, 256, 128), requires_grad=False)
    scale_w = torch.nn.Parameter(torch.rand(3, 2, 1) + 0.5, requires_grad=False)
    package.matmul_batched(x, w, scale_w, ids, BLOCKS)
    NEW_WEIGHTS[way](w, fp8_weight(3, 256, 128))
    if "row" not in way:
        NEW_WEIGHTS[way](scale_w, torch.rand(3, 2, 1) + 0.5)
    expected = w.detach().clone()
    out = package.matmul_batched(x, w, scale_w, ids, BLOCKS)
    for row, expert in enumerate(ids):
        part = slice(row, row + 1)
        check(package, torch.float8_e4m3fnuz, out[part], x[part], expected[expert], scale_w[expert])


def test_fnuz_weights_compile(package, dialect):
    x, w, scale_w = torch.randn(2, 256), fp8_weight(128, 256), torch.rand(1, 2) + 0.5
    torch._dynamo.reset()
    product = lambda x: package.matmul_2d(x, w, scale_w, BLOCKS)  # noqa: E731
    out = torch.compile(product, fullgraph=True, backend="aot_eager")(x)
    check(package, torch.float8_e4m3fnuz, out, x, w, scale_w)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_nan_has_no_place_in_fnuz(package, dialect, code):
    """Where its codes are numbers: whatever comes of its matrix is NaN, and nothing else is."""
    w, scale_w, x = fp8_weight(2, 128, 128), torch.ones(2, 1, 1), torch.randn(4, 128)
    w.view(torch.uint8)[1, 3, 5] = code
    out = package.matmul_batched(x, w, scale_w, torch.tensor([0, 1, 1, 0]), BLOCKS)
    assert out[1:3].isnan().all() and out[[0, 3]].isfinite().all()
    assert package.matmul_2d(x, w[1], scale_w[1], BLOCKS).isnan().all()


# ---- checkpoints ---------------------------------------------------------------------------------

COMMON = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 2, "vocab_size": 160}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MOE = {"moe_intermediate_size": 128, "num_experts_per_tok": 2}
MLA = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 128,  # transformers quantises whole blocks alone, 128 + 128 rows here
    "v_head_dim": 64,
}
GROUPS = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
CONFIGS = {
    "Qwen3": lambda: Qwen3Config(**COMMON, **HEADS),
    "Qwen3-MoE": lambda: Qwen3MoeConfig(**COMMON, **HEADS, **MOE, num_experts=8),
    "DeepSeek-V3": lambda: DeepseekV3Config(**COMMON, **MOE, **MLA, **GROUPS),
}


@pytest.fixture
def served(package, monkeypatch):
    """transformers as serve_finegrained_fp8() leaves it, until the test ends."""
    monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", None)
    monkeypatch.setitem(hub_kernels._KERNEL_MODULE_MAPPING, "finegrained-fp8", None)
    monkeypatch.setattr(auto, "AUTO_QUANTIZER_MAPPING", dict(auto.AUTO_QUANTIZER_MAPPING))
    package.models.serve_finegrained_fp8()
    package.models.serve_finegrained_fp8()  # twice does what once does
    return package


def serve_by(kernel, monkeypatch):
    monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", None)
    monkeypatch.setitem(hub_kernels._KERNEL_MODULE_MAPPING, "finegrained-fp8", kernel)


def module_of_reference(package):
    """The reference in the kernel's place: the same model, every product by its definition."""
    module = ModuleType("reference")
    for name in ("matmul_2d", "matmul_batched", "matmul_grouped"):
        setattr(module, name, getattr(package.reference, name))
    return module


@pytest.mark.parametrize(
    "name, implementation",
    [
        ("Qwen3", None),
        ("Qwen3-MoE", "eager"),
        ("Qwen3-MoE", "batched_mm"),
        ("DeepSeek-V3", "grouped_mm"),
    ],
)
@torch.no_grad()
def test_checkpoints(served, monkeypatch, tmp_path, name, implementation):
    """Saved and loaded with FineGrainedFP8Config. FP8 stays FP8, and the logits are those of the
    same model whose products are the reference's."""
    config = CONFIGS[name]()
    randomized(AutoModelForCausalLM.from_config(config)).bfloat16().save_pretrained(tmp_path / "16")
    quantized, loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "16",
        quantization_config=FineGrainedFP8Config(),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    assert not loaded["missing_keys"], "scales that nobody wrote"
    quantized.save_pretrained(tmp_path / "8")
    arguments = {} if implementation is None else {"experts_implementation": implementation}
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "8", dtype=torch.float32, **arguments
    ).eval()
    fp8 = [name for name, p in model.named_parameters() if p.dtype == torch.float8_e4m3fn]
    kinds = {type(module).__name__ for module in model.modules()}
    assert len(fp8) > 10 and "FP8Linear" in kinds and (name == "Qwen3" or "FP8Experts" in kinds)
    ids = tokens(2, 9)
    ours, generated = model(ids).logits, model.generate(ids, max_new_tokens=3, do_sample=False)
    assert generated.shape == (2, 12)
    serve_by(module_of_reference(served), monkeypatch)
    expected = model(ids).logits

    def usual_error(logits):
        return ((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).median()

    # In float32 the two differ by the order of sums, which FP8 inputs then round: rarely otherwise,
    # but then a token may go to another expert, and those behind it see that.
    assert usual_error(ours) < 0.001
    wrong = ModuleType("wrong")  # a scale that is off by a sixteenth is found
    wrong.__dict__.update(vars(module_of_reference(served)))
    wrong.matmul_2d = lambda a, b, s, *args, **kw: served.reference.matmul_2d(
        a, b, s * 1.0625, *args, **kw
    )
    serve_by(wrong, monkeypatch)
    assert usual_error(model(ids).logits) > 0.02


def test_transformers_that_moved_its_hooks_is_named(package, monkeypatch):
    monkeypatch.delattr(hub_kernels, "_KERNEL_MODULE_MAPPING")
    with pytest.raises(ImportError, match=r"transformers must look up the kernel finegrained-fp8"):
        package.models.serve_finegrained_fp8()
    assert transformers.__version__


def test_naming_the_repository(package, monkeypatch):
    """Without a call of ours: transformers' own table, its own look-up, our repository."""
    if load.choose().backend == "cpu" and (torch.version.cuda or torch.version.hip):
        pytest.skip("transformers asks for the variant of torch's build, whose GPU is not here")
    serve_by(None, monkeypatch)
    entry = {"repo_id": REPO_ID, "version": 1}
    monkeypatch.setitem(hub_kernels._HUB_KERNEL_MAPPING, "finegrained-fp8", entry)
    with hub_kernels.allow_all_hub_kernels():
        kernel = finegrained_fp8.load_finegrained_fp8_kernel()
    x, w, scale_w = torch.randn(2, 128), fp8_weight(128, 128), torch.ones(1, 1)
    expected = package.matmul_2d(x, w, scale_w, BLOCKS)
    assert torch.equal(kernel.matmul(x, w, scale_w, BLOCKS, x.dtype), expected)
