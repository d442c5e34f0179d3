"""The vLLM plugin without vLLM: its ops against the reference, and its parts on stand-ins for
vLLM's hooks. Where parts run: tests/test_vllm_devices.py; with vLLM itself: tests/test_vllm.py."""

import importlib
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from comm_ranks import Ranks
from compare import assert_close, assert_product_close, assert_quantized_close
from project import ROOT

FP8 = torch.float8_e4m3fn


@pytest.fixture(params=[True, False], ids=["inference", "no inference"])
def inference(request):
    """vLLM's mode, in which operands go straight to ops, and another."""
    with torch.inference_mode(request.param):
        yield


@pytest.fixture
def plugin(package, monkeypatch):
    """The plugin's modules, on the package's CPU build."""
    monkeypatch.syspath_prepend(str(ROOT / "integrations" / "vllm"))
    kernels = importlib.import_module("rocm_kernels_vllm.kernels")
    monkeypatch.setattr(kernels, "package", lambda: package)
    names = ("ops", "parts")
    return SimpleNamespace(
        kernels=kernels,
        **{name: importlib.import_module(f"rocm_kernels_vllm.{name}") for name in names},
    )


def fp8(*shape):
    return torch.randn(shape).to(FP8)


# ---- the ops -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 64, 65])
@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_fp8_product(inference, plugin, package, rows, scales):
    n, k, dequantize = 192, 256, package.reference.dequantize
    a, w, bias = fp8(rows, k), fp8(n, k), torch.randn(n)
    scale_a, scale_w = {
        "tensor": (torch.rand(()), torch.rand(1)),
        "row": (torch.rand(rows, 1), torch.rand(n, 1)),
        "block": (torch.rand(rows, 2), torch.rand(2, 2)),
    }[scales]
    out = plugin.ops.fp8_product(a, w, scale_a, scale_w, bias, torch.float32)
    operands = dequantize(a, scale_a, 1), dequantize(w, scale_w, 128)
    assert_product_close(out, operands[0] @ operands[1].t() + bias.double(), operands)


@pytest.mark.parametrize("rows", [3, 64, 70])
def test_weight_only_product(inference, plugin, package, rows):
    a, w, scale_w = torch.randn(rows, 256).bfloat16(), fp8(96, 256), torch.rand(96, 1)
    operands = a.double(), package.reference.dequantize(w, scale_w, 128)
    out = plugin.ops.weight_only_product(a, w, scale_w, None)
    assert_product_close(out, operands[0] @ operands[1].t(), operands)


@pytest.mark.parametrize("rows", [5, 6, 64, 65])
def test_16_bit_products_of_few_rows(plugin, rows, monkeypatch):
    """6 to 64 rows are skinny_gemm's; vLLM's own op has the others."""
    theirs = SimpleNamespace(rocm_unquantized_gemm=lambda a, w, bias: torch.full((1,), -1.0))
    monkeypatch.setattr(torch.ops, "vllm", theirs, raising=False)
    a, w = torch.randn(rows, 256).bfloat16(), torch.randn(64, 256).bfloat16()
    out = plugin.ops.product_16bit(a, w, None)
    if 5 < rows <= 64:
        assert_product_close(out, a.double() @ w.double().t(), (a, w))
    else:
        assert out.tolist() == [-1.0]


@pytest.mark.parametrize("group_size", [0, 128])
@pytest.mark.parametrize("static", [False, True])
def test_swiglu_fp8(inference, plugin, package, group_size, static):
    x, scale = torch.randn(7, 512).bfloat16(), torch.tensor([0.02]) if static else None
    group_size = 0 if static else group_size
    ours = plugin.ops.swiglu_fp8(x, scale, group_size, FP8)
    assert_quantized_close(
        ours, package.reference.swiglu_fp8(x, scale=scale, group_size=group_size or None)
    )


@pytest.mark.parametrize("weights", ["16-bit", "tensor", "channel", "block"])
@pytest.mark.parametrize("mapped", [False, True], ids=["all experts", "a rank's experts"])
def test_fused_moe(plugin, package, weights, mapped):
    """A rank has every other expert; slots below 0 are nobody's."""
    tokens, h, i, everywhere = 9, 256, 128, 6
    experts = everywhere // 2 if mapped else everywhere
    x = torch.randn(tokens, h).bfloat16()
    gate_up, down = torch.randn(experts, 2 * i, h) / 16, torch.randn(experts, h, i) / 16
    scales = {
        "16-bit": (None, None),
        "tensor": (torch.rand(experts), torch.rand(experts)),
        "channel": (torch.rand(experts, 2 * i, 1), torch.rand(experts, h, 1)),
        "block": (torch.rand(experts, 2, 2), torch.rand(experts, 2, 1)),
    }[weights]
    dtype = torch.bfloat16 if weights == "16-bit" else FP8
    gate_up, down = gate_up.to(dtype), down.to(dtype)
    ids = torch.stack([torch.randperm(everywhere)[:3] for _ in range(tokens)])
    ids[2, 1] = -1
    weights_of_slots = torch.rand(tokens, 3)
    expert_map = torch.tensor([-1, 0, -1, 1, -1, 2], dtype=torch.int32) if mapped else None
    out = torch.full((tokens, h), float("nan")).bfloat16()
    plugin.ops.fused_moe(
        out, x, gate_up, down, weights_of_slots, ids.int(), expert_map, *scales, None, None, "silu",
        None, False,
    )  # fmt: skip
    if mapped:
        ids = torch.tensor([[expert_map[e] if e >= 0 else -1 for e in row] for row in ids])
    expected = package.reference.fused_moe(
        x, gate_up, down, weights_of_slots, ids, scale_gate_up=scales[0], scale_down=scales[1]
    )
    assert (out - expected).double().norm() < 5e-3 * expected.double().norm()


@pytest.mark.parametrize("transposed", [False, True])
def test_ops_in_the_place_of_vllms(inference, plugin, package, transposed):
    ops, reference = plugin.ops, package.reference
    x, weight = torch.randn(5, 256).bfloat16(), torch.rand(256).bfloat16() + 0.5
    residual, scale = torch.randn(5, 256).bfloat16(), torch.tensor([0.03])

    def new():
        return torch.full((5, 256), 0.25).to(FP8)

    q = new()
    ops.rms_norm_static_fp8_quant(q, x, weight, scale, 1e-5)
    assert_close(q, reference.rmsnorm_fp8(x, weight, 1e-5, scale=scale)[0])
    q, ours, theirs = new(), residual.clone(), residual.clone()
    ops.fused_add_rms_norm_static_fp8_quant(q, x, ours, weight, scale, 1e-5)
    assert_close(q, reference.rmsnorm_fp8(x, weight, 1e-5, theirs, scale=scale)[0])
    assert torch.equal(ours, theirs)
    q, scales, ours = new(), torch.empty(5, 1), residual.clone()
    ops.rms_norm_dynamic_per_token_quant(q, x, weight, scales, 1e-5, None, ours)
    expected = reference.rmsnorm_fp8(x, weight, 1e-5, residual.clone())
    assert_quantized_close((q, scales), expected)
    scales = torch.empty(2, 5).t() if transposed else torch.empty(5, 2)
    q, ours = new(), residual.clone()
    ops.rms_norm_per_block_quant(q, x, weight, scales, 1e-5, None, ours, 128, transposed)
    expected = reference.rmsnorm_fp8(x, weight, 1e-5, residual.clone(), group_size=128)
    assert_quantized_close((q, scales), expected)
    gate_up = torch.randn(5, 512).bfloat16()
    q = new()
    ops.silu_and_mul_quant(q, gate_up, scale)
    assert_close(q, reference.swiglu_fp8(gate_up, scale=scale)[0])
    q = new()
    ops.silu_and_mul_per_block_quant(q, gate_up, scales, 128, None, transposed)
    assert_quantized_close((q, scales), reference.swiglu_fp8(gate_up, group_size=128))
    with pytest.raises(ValueError, match="scale_ub must be None"):
        ops.rms_norm_dynamic_per_token_quant(q, x, weight, scales, 1e-5, scale, None)


def test_the_path_follows_the_rows_of_each_call(plugin, package, monkeypatch):
    """A graph that was traced with many rows, as vLLM traces a prompt, serves few: up to 64 here,
    beyond which the library's product is quicker."""
    seen, multiply = [], plugin.ops._multiply
    library = SimpleNamespace(
        fp8_linear=lambda a, w, *_, out_dtype, **__: (
            seen.append(("library", len(a))) or a.new_zeros(len(a), len(w), dtype=out_dtype)
        )
    )
    package = SimpleNamespace(**{**vars(package), **vars(library)})
    monkeypatch.setattr(plugin.kernels, "package", lambda: package)
    monkeypatch.setattr(
        plugin.ops, "_multiply",
        lambda package, a, *x: seen.append(("gemm", len(a))) or multiply(package, a, *x),
    )  # fmt: skip
    limits = SimpleNamespace(rows_of_gemm=lambda *_, weight_only: (1, 64))
    package.functional = SimpleNamespace(product=limits)
    monkeypatch.setattr(plugin.ops, "_most_rows", {})
    w, scale_w = fp8(64, 128), torch.rand(64, 1)
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def product(a, scale_a):
        return plugin.ops.fp8_product(a, w, scale_a, scale_w, None, torch.bfloat16)

    with torch.inference_mode():
        for rows in (100, 2, 64, 65):
            assert product(fp8(rows, 128), torch.rand(rows, 1)).shape == (rows, 64)
    assert seen == [("library", 100), ("gemm", 2), ("gemm", 64), ("library", 65)]


@pytest.mark.parametrize("rows, path", [(64, "gemm"), (65, "library")])
def test_weights_alone_go_to_the_library_where_it_is_quicker(
    plugin, package, monkeypatch, rows, path
):
    """By the package's rule, which asks for 16-bit rows."""
    asked, product = [], package.functional.product
    monkeypatch.setattr(
        product, "rows_of_gemm", lambda *_, weight_only: asked.append(weight_only) or (1, 64)
    )
    monkeypatch.setattr(
        product, "weight_only_linear", lambda a, w, *_: a.new_full((len(a), len(w)), 7)
    )
    monkeypatch.setattr(plugin.ops, "_most_rows", {})
    with torch.inference_mode():
        out = plugin.ops.weight_only_product(
            torch.zeros(rows, 256).bfloat16(), fp8(96, 256), torch.rand(96, 1), None
        )
    assert asked == [True] and (out == (7 if path == "library" else 0)).all()


def test_operands_that_the_ops_do_not_take_as_they_are(inference, plugin, package):
    """Strides, other dimensions, scales and biases to convert: the same bits as of usual ones."""
    ops = plugin.ops
    a, w, bias = fp8(6, 256), fp8(64, 256), torch.randn(64).bfloat16()
    scale_a, scale_w = torch.rand(6, 1), 2.0 ** torch.randint(-3, 3, (64, 1))

    def product(a=a, scale_w=scale_w, bias=bias):
        return ops.fp8_product(a, w, scale_a, scale_w, bias, torch.bfloat16)

    turned = a.t().contiguous().t()
    spread = torch.stack([bias, bias], 1)[:, 0]
    assert torch.equal(product(), product(turned))
    assert torch.equal(product(), product(scale_w=scale_w.to(torch.float8_e8m0fnu)))
    assert torch.equal(product(), product(bias=spread))
    assert torch.equal(product(), product(bias=bias.float()))
    x = torch.randn(6, 256).bfloat16()
    wide, turned = torch.cat([x, x], 1)[:, :256], x.t().contiguous().t()
    only = [ops.weight_only_product(rows, w, scale_w, bias) for rows in (x, wide, turned)]
    assert torch.equal(*only[:2]) and torch.equal(*only[1:])
    folded = [ops.swiglu_fp8(rows, None, 128, FP8) for rows in (x, x.view(2, 3, 256))]
    for one, other in zip(*folded, strict=True):
        assert torch.equal(one.view(other.shape).float(), other.float())
    weight, found = torch.rand(256).bfloat16(), []
    for rows in (x, wide, turned, x.view(2, 3, 256)):
        q, scales = torch.full(rows.shape, 0.25).to(FP8), torch.empty(*rows.shape[:-1], 1)
        residual = torch.ones(rows.shape).bfloat16()
        ops.rms_norm_dynamic_per_token_quant(q, rows, weight, scales, 1e-5, None, residual)
        found.append([each.float().reshape(6, -1) for each in (q, scales, residual)])
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_gradients_are_refused(plugin):
    """Not computed as if there were none."""
    x = torch.randn(3, 256).bfloat16().requires_grad_()
    with pytest.raises(RuntimeError, match="has no gradient"):
        plugin.ops.swiglu_fp8(x, None, 0, FP8)
    with pytest.raises(RuntimeError, match="has no gradient"):
        plugin.ops.weight_only_product(x, fp8(64, 256), torch.rand(64, 1), None)
    q, scales = torch.empty(3, 256).to(FP8), torch.empty(3, 1)
    with pytest.raises(RuntimeError, match="has no gradient"):
        plugin.ops.rms_norm_dynamic_per_token_quant(
            q, x, torch.ones(256).bfloat16(), scales, 1e-5, None, None
        )


def test_an_odd_number_of_columns_is_refused(inference, plugin):
    with pytest.raises(ValueError, match="even number of columns"):
        plugin.ops.swiglu_fp8(torch.randn(3, 255).bfloat16(), None, 0, FP8)


def test_what_is_written_is_marked(plugin):
    """Outside of inference mode autograd may have saved a residual."""
    x, residual = torch.randn(3, 256).bfloat16(), torch.randn(3, 256).bfloat16()
    q, scales, version = torch.empty(3, 256).to(FP8), torch.empty(3, 1), residual._version
    with torch.no_grad():
        plugin.ops.rms_norm_dynamic_per_token_quant(
            q, x, torch.ones(256).bfloat16(), scales, 1e-5, None, residual
        )
    assert residual._version > version


def test_experts_are_an_op_in_a_traced_model_alone(plugin, monkeypatch):
    """vLLM's layer of experts is an op itself where it is not traced."""
    called = []
    monkeypatch.setattr(plugin.ops, "_fused_moe", lambda out, *_: called.append("op"))
    monkeypatch.setattr(plugin.ops, "_fused_moe_now", lambda out, *_: called.append("call"))

    def layer(x):
        plugin.ops.fused_moe(x)
        return x + 1

    layer(torch.ones(2))
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    layer(torch.ones(2))
    assert called == ["call", "op"]


def test_whether_there_are_kernels_is_known_as_a_model_is_traced(plugin):
    plugin.kernels._why_not.cache_clear()
    torch._dynamo.reset()
    double = torch.compile(
        lambda x: x if plugin.kernels.why_not() else 2 * x, fullgraph=True, backend="aot_eager"
    )
    assert double(torch.ones(2)).tolist() == [2, 2]


# ---- the parts -----------------------------------------------------------------------------------


@pytest.fixture
def hooked(plugin, monkeypatch):
    """Stand-ins for two of the plugin's modules, whose hooks do what each test says."""
    envs = ModuleType("vllm.envs")
    envs.environment_variables = {}
    vllm = ModuleType("vllm")
    vllm.__version__ = "9.9"
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.envs", envs)
    done = []
    hooks = {name: lambda name=name: done.append(name) or True for name in plugin.parts.PARTS}
    here = {"here": lambda: "a GPU", "why_off": lambda part, device: ""}
    monkeypatch.setattr(plugin.parts, "_module", lambda _: SimpleNamespace(**hooks, **here))
    return SimpleNamespace(parts=plugin.parts, hooks=hooks, done=done, envs=envs, here=here)


def test_parts_are_hooked_in_and_the_compile_cache_knows(hooked):
    state = hooked.parts.register()
    assert hooked.done == list(hooked.parts.PARTS) == list(state.on)
    known = hooked.envs.environment_variables["ROCM_KERNELS_VLLM"]()
    assert known.endswith(",".join(hooked.parts.PARTS))


def test_vllm_knows_the_variables(hooked, monkeypatch):
    """Those it knows it copies to Ray's workers, and hashes, by what a getter returns."""
    names = ("ROCM_KERNELS_VLLM_OFF", "ROCM_KERNELS_VLLM_ON", "LOCAL_KERNELS")
    for name in names:
        monkeypatch.setenv(name, "")
    hooked.parts.register()
    for name in names:
        monkeypatch.setenv(name, f"what {name} says")
        assert hooked.envs.environment_variables[name]() == f"what {name} says"
        monkeypatch.delenv(name)
        assert hooked.envs.environment_variables[name]() is None


def test_an_unknown_name_is_said_once(hooked, monkeypatch, caplog):
    """Not once a layer, and wherever the part would run."""
    monkeypatch.setenv("ROCM_KERNELS_VLLM_ON", "expert, all")
    hooked.parts.register()
    for _ in range(3):
        hooked.parts.asked_for("experts")
    said = [record.getMessage() for record in caplog.records]
    assert [text.partition(", which")[0] for text in said] == [
        f"ROCM_KERNELS_VLLM_ON names {name!r}" for name in ("expert", "all")
    ]


def test_parts_are_turned_off(hooked, monkeypatch, caplog):
    monkeypatch.setenv("ROCM_KERNELS_VLLM_OFF", "norm, skinny,nonsense")
    state = hooked.parts.register()
    assert state.off == ("norm", "skinny") and not {"norm", "skinny"} & set(hooked.done)
    assert "ROCM_KERNELS_VLLM_OFF names 'nonsense', which is no part" in caplog.text
    assert not hooked.parts.asked_for("experts")
    monkeypatch.setenv("ROCM_KERNELS_VLLM_ON", "experts")
    assert hooked.parts.asked_for("experts")
    monkeypatch.setenv("ROCM_KERNELS_VLLM_OFF", "all")
    assert hooked.parts.register().on == ()


@pytest.mark.parametrize(
    "error", [AttributeError("no FUSED_OPS"), ImportError("no module x"), RuntimeError("not here")]
)
def test_a_moved_hook_gets_one_sentence(hooked, caplog, error):
    def moved():
        raise error

    hooked.hooks["norm"] = moved
    with caplog.at_level(logging.WARNING):
        state = hooked.parts.register()
    assert list(state.failed) == ["norm"] and len(state.on) == len(hooked.parts.PARTS) - 1
    (record,) = caplog.records
    assert "vLLM 9.9 runs its own path for residual, RMSNorm and FP8" in record.getMessage()
    assert str(error) in record.getMessage()


def settings(mode="VLLM_COMPILE", norm=False, act=False, backend=None, **kinds):
    """vLLM's, as far as parts ask them."""

    def named(name):
        return name and SimpleNamespace(name=name)

    passes = SimpleNamespace(fuse_norm_quant=norm, fuse_act_quant=act, fuse_allreduce_rms=True)
    chosen = {kind: named(name) for kind, name in kinds.items()}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(mode=named(mode), pass_config=passes),
        attention_config=SimpleNamespace(backend=named(backend), backend_per_kind=chosen),
    )


@pytest.mark.parametrize(
    "config, waiting",
    [
        (settings(), ["swiglu_pass", "norm", "attention"]),
        (settings(norm=True), ["swiglu_pass", "attention"]),
        (settings(norm=True, act=True, backend="CUSTOM"), []),
        (
            settings("NONE", norm=True, act=True, backend="CUSTOM"),
            ["swiglu_pass", "norm", "all_reduce_norm"],
        ),
        (settings(norm=True, act=True, backend="FLASH_ATTN"), ["attention"]),
        (settings(norm=True, act=True, sliding_window="CUSTOM"), []),
        (SimpleNamespace(), []),
        (None, []),
    ],
)
def test_the_log_says_what_vllms_settings_keep_off(hooked, monkeypatch, config, waiting):
    vllm_config = ModuleType("vllm.config")
    vllm_config.get_current_vllm_config_or_none = lambda: config
    monkeypatch.setitem(sys.modules, "vllm.config", vllm_config)
    hooked.parts.register()
    on, _, off = hooked.parts.what_runs().partition("; hooked in, and off here: ")
    assert on == "rocm-kernels: on " + ", ".join(p for p in hooked.parts.PARTS if p not in waiting)
    assert [part.partition(" (")[0] for part in off.split("), ") if part] == waiting


def test_the_log_says_what_the_device_keeps_off(hooked):
    hooked.here["why_off"] = lambda part, device: f"not on {device}" if part == "experts" else ""
    hooked.parts.register()
    assert hooked.parts.what_runs() == (
        "rocm-kernels: on " + ", ".join(part for part in hooked.parts.PARTS if part != "experts")
        + "; hooked in, and off here: experts (not on a GPU)"
    )  # fmt: skip


def test_a_module_that_vllm_has_not_got_costs_the_parts_that_need_it_alone(plugin, monkeypatch):
    """Before 0.30 there is no fused_act_quant. Norm and the passes import nothing of it."""
    for name in ("vllm", "vllm.platforms", "vllm.model_executor.layers.quantization.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.platforms"].current_platform = None
    keys = ModuleType("vllm.model_executor.layers.quantization.utils.quant_utils")
    keys.kFp8Dynamic128Sym = keys.kFp8DynamicTokenSym = keys.kFp8StaticTensorSym = None
    monkeypatch.setitem(sys.modules, keys.__name__, keys)
    for part in ("norm", "swiglu_pass"):
        module = f"rocm_kernels_vllm.{plugin.parts.PARTS[part].module}"
        monkeypatch.delitem(sys.modules, module, raising=False)
        assert callable(getattr(importlib.import_module(module), part))
        monkeypatch.delitem(sys.modules, module)
    assert plugin.parts.PARTS["swiglu"].module != plugin.parts.PARTS["norm"].module


def test_without_kernels_a_server_starts(plugin, monkeypatch, caplog):
    def missing():
        raise FileNotFoundError("no build for this torch")

    monkeypatch.setattr(plugin.kernels, "package", missing)
    plugin.kernels._why_not.cache_clear()
    assert "no build for this torch" in plugin.kernels.why_not()
    plugin.kernels.why_not()
    assert caplog.text.count("vLLM runs its own paths, no kernels here") == 1
    plugin.kernels._why_not.cache_clear()


def test_sums_with_norm_and_fp8_take_the_place_of_flashinfers(package, tmp_path):
    ranks = Ranks(2, tmp_path)
    try:
        results = ranks.run("vllm_plugin_ranks.sum_norm_quantize")
    finally:
        ranks.close()
    assert len({said["bits"] for said in results}) == 1
    for said in results:
        assert said["on"] and said["again"] and said["theirs"] == [4096, 5, 5]
        assert said["made"] == 1
        assert said["without FlashInfer"].startswith("FlashInfer, whose op it replaces")
