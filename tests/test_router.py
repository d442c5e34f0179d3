"""Routers of transformers' models on topk: what is known by a run of its own code, what that layer
gives beside the module's own forward, and what keeps that."""

import contextlib
import copy
import importlib
import io

import pytest
import torch
from kernels import Mode
from test_moe_models import DEEPSEEK, FAMILIES, experts_of, tiny
from tiny_models import randomized, tokens
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

ROUTED = {
    k: v for k, v in DEEPSEEK.items() if "kv" not in k and "head" not in k and "lora" not in k
}
KNOWN = {
    "mixtral": {},
    "qwen2_moe": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_oss": {},
    "deepseek_v2": {"topk_method": "greedy", "routed_scaling_factor": 1.0},
    "deepseek_v3": {"routed_scaling_factor": 2.5},
    "glm4_moe": {"norm_topk_prob": False, "head_dim": 16},
    # Its logits go from 16 bits to float32, and its block holds the bias for choosing.
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "minimax_m2": {},
}


def model_of(family):
    base = FAMILIES.get(family, ROUTED)
    config = AutoConfig.for_model(
        family,
        **{
            "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 160,
            "num_attention_heads": 4, "num_key_value_heads": 2, **base, **KNOWN[family],
        },
    )  # fmt: skip
    model = randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    for name, buffer in model.named_buffers():
        if name.endswith("correction_bias"):
            buffer.normal_(0, 0.25)
    return model


def routers_of(model):
    return [module for module in model.modules() if hasattr(module, "kernel_router")]


def by_expert(weights, ids, experts):
    zeros = torch.zeros(len(ids), experts, device=ids.device)
    return zeros.scatter(1, ids.long(), weights.float())


@pytest.fixture
def package(best_package):
    return best_package


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", KNOWN)
@torch.no_grad()
def test_a_family(package, run_kernelized, device, family, dtype):
    model = model_of(family).to(device, dtype)
    package.models.quantize_model_(model)
    run_kernelized(model, Mode.INFERENCE)
    routers = routers_of(model)
    assert len(routers) == len(experts_of(model, package.models.Experts))
    router = routers[-1]
    given = (torch.randn(8, device=device) / 4,) if family == "minimax_m2" else ()
    layer = "TopKRouterGivenBias" if given else "TopKRouter"
    assert package.models.kernelized_layers(model)[type(router).__name__, layer] == len(routers)
    in_float32 = router.kernel_router.logits == "float32"
    unit = torch.finfo(torch.float32 if in_float32 else dtype).eps
    for rows in (1, 7, 70):
        x = torch.randn(rows, 96, device=device).to(dtype)
        logits, weights, ids = router(x, *given)
        theirs = type(router).forward(router, x, *given)
        assert logits.dtype == theirs[0].dtype
        assert (weights.dtype, ids.dtype) == (torch.float32, torch.int32)
        # Sums in another order, of float32, then rounded or not.
        torch.testing.assert_close(
            logits, theirs[0], rtol=max(unit, 1e-5), atol=8 * max(unit, 1e-6)
        )
        # The choice alone, of logits that are the same: not their order, for slots are a sum.
        own = copy.deepcopy(router)
        with torch.no_grad():
            own.weight.copy_(torch.eye(*own.weight.shape))
            if router.kernel_router.bias is not None:
                own.bias.zero_()
        spread = (torch.rand(rows, 8, device=device).argsort(-1) / 2 - 1.75).to(dtype)
        x = nn.functional.pad(spread, (0, 88))
        ours, theirs = own(x, *given), type(own).forward(own, x, *given)
        assert torch.equal(ours[0], theirs[0])
        tolerance = 1e-5 if theirs[1].dtype == torch.float32 else unit  # theirs are rounded
        torch.testing.assert_close(
            by_expert(*ours[1:], 8), by_expert(*theirs[1:], 8), rtol=tolerance, atol=1e-6
        )


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
@torch.no_grad()
def test_the_model_says_what_it_did(package, run_kernelized, device, family):
    """Bar codes of FP8 that a sum in another order rounds the other way, as on CPUs with AVX2."""
    model = model_of(family).to(device)
    package.models.quantize_model_(
        model, skip=[n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    )
    run_kernelized(model, Mode.INFERENCE)
    ids = tokens(2, 9, device)
    ours = model(ids).logits
    for router in routers_of(model):
        router.forward = type(router).forward.__get__(router)
    theirs = model(ids).logits
    assert (ours - theirs).norm() < 2e-3 * theirs.norm()


def answer(model, device):
    ids = torch.arange(10, device=device).view(2, 5)
    return model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False)


@torch.no_grad()
def test_a_recorded_step_takes_it(package, run_kernelized, device):
    model = model_of("qwen3_moe").to(device)
    package.models.quantize_model_(model)
    run_kernelized(model, Mode.INFERENCE)
    expected = answer(model, device)
    package.models.use_decode_step(model)
    # On a GPU a rounding may choose another token: tests/test_decode_step.py has its logits.
    assert torch.equal(answer(model, device), expected) or device.type != "cpu"
    assert package.models.decode_steps(model).replayed >= 8


@torch.no_grad()
def test_all_layers_of_a_recorded_step_are_one_call_on_the_cpu(
    run_kernelized, monkeypatch, package
):
    """Nothing between our ops is torch's."""
    recording = importlib.import_module(f"{package.__name__}.models.cpu_recording")
    kinds = []
    replay = recording.CpuGraph.replay

    def noted(graph):
        kinds.append([step.function for step in graph.steps])
        replay(graph)

    monkeypatch.setattr(recording.CpuGraph, "replay", noted)
    model = model_of("qwen3_moe").bfloat16()
    package.models.quantize_model_(model)
    run_kernelized(model, Mode.INFERENCE)
    if next(model.parameters()).device.type != "cpu":
        pytest.skip("graphs of a GPU")
    package.models.use_decode_step(model)
    answer(model, "cpu")
    assert {kind.count(recording._run_program) for kind in kinds} == {1}


@torch.no_grad()
def test_compiles(package, run_kernelized, device):
    model = model_of("deepseek_v3").bfloat16().to(device)
    package.models.quantize_model_(model)
    run_kernelized(model, Mode.INFERENCE | Mode.TORCH_COMPILE)
    router = routers_of(model)[0]
    torch._dynamo.reset()
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    x = torch.randn(5, 96, device=device).bfloat16()
    for ours, eager in zip(compiled(x), router(x), strict=True):
        assert torch.equal(ours, eager)


@torch.no_grad()
def test_a_hook_gets_the_modules_own_results(package, run_kernelized, device):
    model = model_of("qwen3_moe").bfloat16().to(device)
    package.models.quantize_model_(model)
    run_kernelized(model, Mode.INFERENCE)
    seen = []
    router = routers_of(model)[0]
    hook = router.register_forward_hook(lambda module, args, out: seen.append(out))
    model(tokens(1, 3, device))
    hook.remove()
    model(tokens(1, 3, device))
    ((_, weights, ids),) = seen
    assert (weights.dtype, ids.dtype) == (torch.bfloat16, torch.int64)


@torch.no_grad()
def test_logits_are_recorded(package, run_kernelized, device):
    model = model_of("mixtral").to(device)
    package.models.quantize_model_(model)
    run_kernelized(model, Mode.INFERENCE)
    ids = tokens(2, 5, device)
    out = model(ids, output_router_logits=True)
    assert [tuple(logits.shape) for logits in out.router_logits] == [(10, 8)] * 2
    torch.testing.assert_close(out.logits, model(ids).logits, rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_a_copy_and_a_pickle_keep_it(package, run_kernelized, device):
    model = model_of("deepseek_v3")
    package.models.quantize_model_(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for twin in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        run_kernelized(twin, Mode.INFERENCE)
        router = routers_of(twin)[0]
        assert router(torch.randn(2, 96, device=device))[2].dtype == torch.int32


# ---- what is not known ---------------------------------------------------------------------------


def _limits(self, x):
    logits, weights, ids = _own(self, x)
    logits = 8 * (logits / 8).tanh()
    weights, ids = logits.softmax(-1).topk(self.top_k, -1)
    return logits, weights, ids


def _warmer(self, x):
    logits, weights, ids = _own(self, x)
    weights, ids = (logits / 1.1).softmax(-1).topk(self.top_k, -1)
    return logits, weights, ids


def _limits_what_it_chooses_by(self, x):
    logits, _, _ = _own(self, x)
    weights, ids = logits.clamp(-30, 30).softmax(-1).topk(self.top_k, -1)
    return logits, weights, ids


def _least(self, x):
    logits, _, _ = _own(self, x)
    weights, ids = logits.softmax(-1).topk(self.top_k, -1, largest=False)
    return logits, weights, ids


def _normed(self, x):
    return _own(self, x / x.norm(dim=-1, keepdim=True))


def _scaled(self, x):
    logits, weights, ids = _own(self, x)
    return logits, weights * 1.01, ids


def _adds_to_the_sum(self, x):
    logits, _, _ = _own(self, x)
    weights, ids = logits.sigmoid().topk(self.top_k, -1)
    return logits, weights / (weights.sum(-1, keepdim=True) + 1e-6), ids


def _another_id(self, x):
    logits, weights, ids = _own(self, x)
    return logits, weights, (ids + 1) % self.num_experts


def _scores(self, x):
    logits, weights, ids = _own(self, x)
    return logits.softmax(-1), weights, ids


def _two_results(self, x):
    return _own(self, x)[:2]


def _wants_more(self, x):
    raise TypeError("an argument more")


def _own(router, x):
    return type(router).__mro__[1].forward(router, x)


OTHERS = (_limits, _warmer, _limits_what_it_chooses_by, _least, _normed, _scaled, _adds_to_the_sum,
          _another_id,
          _scores, _two_results, _wants_more)  # fmt: skip


@pytest.mark.parametrize("forward", OTHERS, ids=lambda f: f.__name__)
def test_another_router_stays(package, forward):
    model = tiny("qwen3_moe")
    for layer in model.model.layers:
        gate = layer.mlp.gate
        gate.__class__ = type("Another", (type(gate),), {"forward": forward})
    package.models.quantize_model_(model)
    assert not routers_of(model)


def test_a_tensor_that_nobody_knows_keeps_it(package):
    model = tiny("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.gate.register_buffer("loads", torch.zeros(8))
        layer.mlp.gate.register_buffer("more", torch.zeros(8))
    package.models.quantize_model_(model)
    assert not routers_of(model)


def _weighs_anew(self, x):
    rows = x.view(-1, x.shape[-1])
    _, weights, ids = self.gate(rows)
    return self.experts(rows, ids, weights * 2).view(x.shape)


def _counts(self, x):
    rows = x.view(-1, x.shape[-1])
    _, weights, ids = self.gate(rows)
    self.load = nn.functional.one_hot(ids, 8).sum((0, 1))
    return self.experts(rows, ids, weights).view(x.shape)


def _turns(self, x):
    rows = x.view(-1, x.shape[-1])
    _, weights, ids = self.gate(rows.flip(0))
    return self.experts(rows, ids, weights).view(x.shape)


@pytest.mark.parametrize("forward", [_weighs_anew, _counts, _turns], ids=lambda f: f.__name__)
def test_a_block_that_looks_at_the_choice_keeps_its_router(package, forward):
    model = tiny("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.__class__ = type("Another", (type(layer.mlp),), {"forward": forward})
    package.models.quantize_model_(model)
    assert not routers_of(model)


def test_without_our_experts_it_stays(package, run_kernelized, device):
    """Transformers' own experts take ids in int64 alone."""
    model = tiny("mixtral")
    package.models.quantize_model_(model, skip=experts_of(model))
    assert not routers_of(model)
    other = tiny("mixtral")
    package.models.quantize_model_(other)  # the class is registered now
    run_kernelized(model, Mode.INFERENCE)
    with torch.no_grad():
        assert (
            model.model.layers[0].mlp.gate(torch.randn(2, 96, device=device))[2].dtype
            == torch.int64
        )


def test_a_change_after_quantising_is_seen(package, run_kernelized, device):
    model = tiny("qwen3_moe")
    package.models.quantize_model_(model)
    first, second = routers_of(model)
    first.top_k = 2
    run_kernelized(model, Mode.INFERENCE)
    layers = importlib.import_module(f"{package.__name__}.layers.router")
    assert type(second).forward is not second.forward.__func__
    assert second.forward.__func__ is layers.TopKRouter.forward
    assert getattr(first.forward, "__func__", None) is not layers.TopKRouter.forward


@pytest.mark.parametrize("around", ["bfloat16", "meta", "gradients", "inference mode"])
def test_what_is_around_changes_no_answer(package, around):
    """Models are made, and quantised, while torch makes other tensors by default."""
    contexts = {
        "meta": torch.device("meta"),
        "gradients": torch.enable_grad(),
        "inference mode": torch.inference_mode(),
    }
    model = tiny("qwen3_moe").bfloat16()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16 if around == "bfloat16" else before)
        with contexts.get(around, contextlib.nullcontext()):
            package.models.quantize_model_(model)
    finally:
        torch.set_default_dtype(before)
    plain = tiny("qwen3_moe").bfloat16()
    package.models.quantize_model_(plain)
    facts = [
        [
            sorted(name for name in vars(module) if name.startswith("kernel_"))
            for module in each.modules()
        ]
        for each in (model, plain)
    ]
    assert facts[0] == facts[1]
    assert [r.kernel_router for r in routers_of(model)] == [
        r.kernel_router for r in routers_of(plain)
    ]
