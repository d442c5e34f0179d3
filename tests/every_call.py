"""A call of every public function that computes: the rules that all keep are tested on these.

A new function without a call here fails tests/test_gradients.py, so it cannot be forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

T, H, N, E = 5, 256, 128, 4  # tokens, columns, columns of a result, experts

# Those of the API that compute nothing, or nothing but what torch differentiates.
OTHERS = {
    "attention_config": "tells a config",
    "attention_configs": "tells configs",
    "fp8_linear_path": "tells a path",
    "gemm_config": "tells a config",
    "kvcache_append_path": "tells a path",
    "native_fp8_dtype": "tells a dtype",
    "to_native_fp8": "torch's own ops, on bits and on the scale",
    "tuning.GemmShape": "a shape",
    "tuning.clear_tuning": "of a table",
    "tuning.gemm_candidates": "tells configs",
    "tuning.load_tuning": "of a table",
    "tuning.main": "a command",
    "tuning.shapes_of": "tells shapes",
    "tuning.tune_gemm": "times calls of gemm's op",
}

# Taken so that flash-attn's callers may pass None: any tensor is refused.
REFUSED = {"alibi_slopes"}


@dataclass(frozen=True)
class Call:
    """``name(**arguments)``.

    Attributes:
        written: arguments, as their paths say, that the call writes.
    """

    name: str
    arguments: dict[str, Any]
    written: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(self.arguments)})"

    def tensors(self) -> dict[str, torch.Tensor]:
        """By path: ``x``, or ``out.0`` of a pair or a list."""
        found = {}
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                found[name] = value
            elif isinstance(value, list) or (name == "out" and isinstance(value, tuple)):
                found |= {f"{name}.{i}": part for i, part in enumerate(value)}
        return found

    def with_tensor(self, path: str, tensor: torch.Tensor) -> Call:
        name, _, place = path.partition(".")
        if place:
            several = self.arguments[name]
            kind, several = type(several), [*several]
            several[int(place)] = tensor
            tensor = kind(several)
        return replace(self, arguments={**self.arguments, name: tensor})

    def fresh(self) -> Call:
        """With clones of what is written."""
        call = self
        for path in self.written:
            call = call.with_tensor(path, self.tensors()[path].clone())
        return call

    def run(self, package: Any) -> tuple[torch.Tensor, ...]:
        """All that came of it: what it returned, and what it wrote."""
        result = function(package, self.name)(**self.arguments)
        result = result if isinstance(result, tuple) else (result,)
        written = tuple(self.tensors()[path] for path in self.written)
        return (*(part for part in result if part is not None), *written)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit."""
    a, b = a.detach().contiguous(), b.detach().contiguous()
    return a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Bit by bit on the CPU. On a GPU inputs of another layout may take another kernel, whose sums
    have another order: then by the norm of the difference."""
    if a.device.type == "cpu" or not a.dtype.is_floating_point:
        return same(a, b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.float(), b.float()
    return bool((a - b).norm() <= 0.02 * b.norm())


def function(package: Any, name: str) -> Callable:
    """Of the package, of a module that it lists, or of ``functional``."""
    owner, _, own = name.rpartition(".")
    owner = getattr(package, owner) if owner else package
    return getattr(owner, own) if hasattr(owner, own) else getattr(package.functional, own)


def public_functions(package: ModuleType) -> set[str]:
    """Of the package, and of the modules that it lists but for layers and models."""
    names = {*package.__all__, *package.functional.__all__}
    names |= {f"tuning.{name}" for name in package.tuning.__all__}
    return {name for name in names if callable(function(package, name))}


def attention_calls(device: torch.device) -> Iterator[Call]:
    """Of sequences of one length, of any, and of a cache in both layouts."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def integers(*values: int) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    rest = {"causal": True, "s_aux": randn(4)}
    for name in ("k_descale", "v_descale"):
        rest[name] = torch.rand(2, 2, device=device) + 0.5
    equal = {"q": randn(2, 3, 4, 64), "k": randn(2, 5, 2, 64), "v": randn(2, 5, 2, 64), **rest}
    yield Call("flash_attn_func", {**equal, "return_lse": True})
    yield Call("flash_attn_func", {**equal, "out": randn(2, 3, 4, 64)}, ("out",))
    ends = {"cu_seqlens_q": integers(0, 2, 6), "cu_seqlens_k": integers(0, 3, 10)}
    ragged = {"q": randn(6, 4, 64), **ends, "out": randn(6, 4, 64), **rest}
    rows = {"k": randn(10, 2, 64), "v": randn(10, 2, 64), "seqused_k": integers(3, 7)}
    yield Call("flash_attn_varlen_func", {**ragged, **rows}, ("out",))
    table = torch.arange(4, device=device, dtype=torch.int32).flip(0).view(2, 2)
    pages = {"k": randn(4, 4, 2, 64), "v": randn(4, 4, 2, 64), "block_table": table}
    yield Call("flash_attn_varlen_func", {**ragged, **pages}, ("out",))
    caches = ("k_cache", "v_cache")
    new = {"q": randn(2, 3, 4, 64), "k": randn(2, 3, 2, 64), "v": randn(2, 3, 2, 64), **rest}
    lengths = {"cache_seqlens": integers(2, 5), "cache_leftpad": integers(1, 0)}
    for more, written in (
        ({name: randn(2, 8, 2, 64) for name in caches}, caches),
        ({name: randn(4, 4, 2, 64) for name in caches} | {"block_table": table}, caches),
        (
            {name: randn(4, 4, 2, 64) for name in caches}
            | {"page_table": table, "out": randn(2, 3, 4, 64)},
            (*caches, "out"),
        ),
        (
            {name: randn(2, 8, 2, 64) for name in caches}
            | {f"rotary_{name}": randn(9, 16) for name in ("cos", "sin")},
            caches,
        ),
        (
            {name: randn(3, 8, 2, 64) for name in caches} | {"cache_batch_idx": integers(2, 0)},
            caches,
        ),
    ):
        yield Call("flash_attn_with_kvcache", {**new, **lengths, **more}, written)
    ragged = {"q": randn(6, 4, 64), "cu_seqlens_q": integers(0, 2, 6), "max_seqlen_q": 4, **rest}
    stored = {name: randn(2, 8, 2, 64) for name in caches} | {"out": randn(6, 4, 64)}
    ragged |= {"cache_seqlens": integers(3, 7), **stored}
    yield Call("flash_attn_with_kvcache", ragged, ("out",))


def rope_calls(device: torch.device) -> Iterator[Call]:
    """With each way to say where tokens go and what turns them."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def integers(*values: Any) -> torch.Tensor:
        return torch.tensor(values, device=device, dtype=torch.int32)

    fp8 = torch.float8_e4m3fn
    new = {"q": randn(2, 3, 4, 64), "k": randn(2, 3, 2, 64), "v": randn(2, 3, 2, 64)}
    norms = {"q_weight": randn(64), "k_weight": randn(64)}
    turn = {"cos": randn(2, 3, 64), "sin": randn(2, 3, 64)}
    caches = {"k_cache": randn(2, 8, 2, 64), "v_cache": randn(2, 8, 2, 64)}
    given = {"out": randn(2, 3, 4, 64), "k_out": randn(2, 3, 2, 64)}
    lengths = {"cache_seqlens": integers(2, 5)}
    yield Call("rope_and_cache", {**new, **norms, **turn, **caches, **lengths}, (*caches,))
    places = {"cache_positions": integers([1, 0, 7], [2, -1, 3])}
    call = {**new, **turn, **caches, **given, **places}
    yield Call("rope_and_cache", call, (*caches, *given))
    pages = {name: randn(4, 4, 2, 64).to(fp8) for name in caches}
    table = torch.arange(4, device=device, dtype=torch.int32).flip(0).view(2, 2)
    scales = {name: torch.rand(2, device=device) + 0.5 for name in ("k_scale", "v_scale")}
    call = {**new, **turn, **pages, **lengths, "block_table": table, **scales}
    yield Call("rope_and_cache", call, (*caches,))
    one = {name: value[:1] for name, value in new.items()}
    positions = {"cos": randn(9, 64), "positions": integers([8, 0, 2])}
    slots = {"slot_mapping": integers([15, -1, 4])}
    yield Call("rope_and_cache", {**one, **positions, **pages, **slots, **scales}, (*caches,))
    whole = {"q": randn(1, 3, 8, 64), "num_kv_heads": 2, **positions}
    yield Call("rope_and_cache", {**whole, **pages, **slots, **scales}, (*caches,))


def layer_calls(fp8: torch.dtype, device: torch.device) -> Iterator[Call]:
    """Two layers, of which the last is a model's last."""

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).bfloat16()

    def integer(value: int) -> torch.Tensor:
        return torch.tensor([value], device=device, dtype=torch.int32)

    def weights(count: int, name: str, rows: int, columns: int) -> dict[str, Any]:
        scales = [torch.rand(rows, 1, device=device) / columns for _ in range(count)]
        w = [torch.randn(rows, columns, device=device).to(fp8) for _ in range(count)]
        return {f"w_{name}": w, f"scale_{name}": scales}

    caches = {
        name: [randn(6, 1, 128).to(fp8) for _ in range(2)] for name in ("k_caches", "v_caches")
    }
    scales = {
        name: [torch.rand(1, device=device) + 0.5 for _ in range(2)]
        for name in ("k_scales", "v_scales")
    }
    arguments = {
        "residual": randn(H), "qkv": randn(4 * 128), "cos": randn(128), "sin": randn(128),
        "position": integer(3), "seqused_k": integer(4), "leftpad_k": integer(1), **caches,
        **scales, **{f"{name}_norm_weights": [randn(128) for _ in range(2)] for name in "qk"},
        "bias_qkv": [randn(4 * 128)],
        "norm_weights": [randn(H) for _ in range(2)], **weights(2, "o", H, 2 * 128),
        **weights(2, "gate_up", 2 * N, H), **weights(2, "down", H, N),
        "next_norm_weights": [randn(H)], **weights(1, "qkv", 4 * 128, H),
    }  # fmt: skip
    of_caches = [f"{name}.{i}" for name in caches for i in range(2)]
    yield Call("decode_layers", arguments, ("residual", "qkv", *of_caches))


def calls(package: ModuleType, device: torch.device) -> Iterator[Call]:
    """Each function in each of its forms that has arguments of its own."""

    def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(shape, device=device) + 0.5

    fp8 = package.native_fp8_dtype(device)
    half = torch.bfloat16
    x, weight = randn(T, H), positive(H)
    q_out = torch.empty(T, H, device=device, dtype=fp8)
    for out in ({}, {"out": randn(T, H)}):
        norm = {"x": x, "weight": weight, "residual": randn(T, H), **out}
        yield Call("rmsnorm", norm, ("residual", *out))
        yield Call("rmsnorm", {**norm, "residual_out": randn(T, H)}, ("residual_out", *out))
        yield Call("swiglu", {"x": x, "up": randn(T, H), **out}, (*out,))
        wide = {"x": randn(T, 2 * H), **out}
        yield Call("swiglu", wide, (*out,))
    for name in ("silu_and_mul", "mul_and_silu", "gelu_and_mul", "gelu_tanh_and_mul"):
        yield Call(name, {"out": randn(T, H), "x": randn(T, 2 * H)}, ("out",))
    yield Call("apply_rms_norm", {"input": x, "weight": weight, "eps": 1e-6})
    static = {"scale": positive(1)}
    pair = {"out": (q_out, positive(T, 1))}
    groups = {"group_size": 128, "out": (q_out, positive(T, H // 128))}
    for options, written in (
        ({}, ()),
        (static, ()),
        ({**static, "out": q_out}, ("out",)),
        (pair, ("out.0", "out.1")),
        (groups, ("out.0", "out.1")),
    ):
        yield Call("quantize_fp8", {"x": x, **options}, written)
        yield Call("swiglu_fp8", {"x": x, "up": randn(T, H), **options}, written)
        arguments = {"x": x, "weight": weight, "residual": randn(T, H), **options}
        yield Call("rmsnorm_fp8", arguments, ("residual", *written))
        apart = {**arguments, "residual_out": randn(T, H)}
        yield Call("rmsnorm_fp8", apart, ("residual_out", *written))

    yield from attention_calls(device)
    yield from rope_calls(device)
    if device.type == "cpu":  # NVIDIA's refuse it
        yield from layer_calls(fp8, device)

    a, w = randn(T, H).to(fp8), randn(N, H).to(fp8)
    by_row = {"scale_a": positive(T, 1), "scale_w": positive(N, 1)}
    by_block = {"scale_a": positive(T, H // 128), "scale_w": positive(N // 128, H // 128)}
    out = {"out": randn(T, N, dtype=half)}
    for scales in (by_row, by_block):
        operands = {"a": a, "w": w, **scales, "bias": randn(N)}
        for name in ("gemm", "skinny_gemm"):
            yield Call(name, operands)
            yield Call(name, {**operands, **out}, ("out",))
        config = package.tuning.gemm_candidates(a, w, *scales.values())[0]
        yield Call("tuning.gemm_with_config", {"config": config, **operands})
        yield Call(
            "fp8_linear",
            {"x": a, "w": w, "scale_w": scales["scale_w"], "scale_x": scales["scale_a"]},
        )
        linear = {"x": randn(T, H, dtype=half), "w": w, "scale_w": scales["scale_w"]}
        yield Call("fp8_linear", {**linear, "bias": randn(N)})
    yield Call("gemm", {"a": x.to(half), "w": randn(N, H, dtype=half)})
    yield Call("skinny_gemm", {"a": x.to(half), "w": w, "scale_w": by_row["scale_w"]})
    yield Call("fp8_linear", {"x": x, "w": w, "scale_w": positive(1), "scale_x": positive(1)})

    yield Call("topk_softmax", {"logits": randn(T, 16), "k": 3})
    sigmoid = {"k": 3, "bias": randn(16), "groups": 4, "groups_kept": 2}
    yield Call("topk_sigmoid", {"logits": randn(T, 16, dtype=half), **sigmoid})

    gate_up, down = randn(E, 2 * N, H).to(fp8), randn(E, H, N).to(fp8)
    layer = {
        "topk_weights": positive(T, 2),
        "topk_ids": torch.randint(-1, E + 1, (T, 2), device=device, dtype=torch.int32),
    }
    channel = {"scale_gate_up": positive(E, 2 * N, 1), "scale_down": positive(E, H, 1)}
    blocks = {"scale_gate_up": positive(E, 2, 2), "scale_down": positive(E, 2, 1)}
    biases = {"bias_gate_up": randn(E, 2 * N), "bias_down": randn(E, H)}
    for scales in (channel, blocks):
        of_fp8 = {"w_gate_up": gate_up, "w_down": down, **layer, **scales}
        yield Call("fused_moe", {"x": randn(T, H, dtype=half), **of_fp8, **biases})
        given = {"x": x, **of_fp8, "out": randn(T, H)}
        yield Call("fused_moe", given, ("out",))
    wide = {"w_gate_up": randn(E, 2 * N, H, dtype=half), "w_down": randn(E, H, N, dtype=half)}
    yield Call("fused_moe", {"x": x.to(half), **wide, **layer})
    mx = {
        "w_gate_up": torch.randint(256, (E, 2 * N, H // 2), device=device, dtype=torch.uint8),
        "w_down": torch.randint(256, (E, H, N // 2), device=device, dtype=torch.uint8),
        "scale_gate_up": torch.randint(
            120, 134, (E, 2 * N, H // 32), device=device, dtype=torch.uint8
        ),
        "scale_down": torch.randint(120, 134, (E, H, N // 32), device=device, dtype=torch.uint8),
    }
    yield Call("fused_moe", {"x": x.to(half), **mx, **layer})

    offsets = torch.tensor([1, 1, 3, T], device=device, dtype=torch.int32)
    for scales in (
        {"scale_a": positive(T, 1), "scale_w": positive(E, 2 * N, 1)},
        {"scale_a": positive(T, 2), "scale_w": positive(E, 2, 2)},
    ):
        grouped = {"a": a, "w": gate_up, "offsets": offsets, **scales}
        yield Call("grouped_gemm", grouped)
        yield Call("grouped_gemm", {**grouped, "out": randn(T, 2 * N, dtype=half)}, ("out",))
    finegrained = {"A": x, "Bs": positive(1, 2), "block_size": (128, 128)}
    yield Call("matmul_2d", {**finegrained, "B": w})
    whole = {"B": w, "Bs": positive(1), "block_size": None, "activation_scale": positive(1)}
    yield Call("matmul_2d", {**finegrained, **whole})
    experts = {**finegrained, "B": gate_up, "Bs": positive(E, 2, 2)}
    ids = torch.tensor([3, -1, 0, E, 0], device=device)
    yield Call("matmul_batched", {**experts, "expert_ids": ids})
    counts = {"offsets": offsets, "tokens_per_expert": torch.ones(E, device=device).int()}
    yield Call("matmul_grouped", {**experts, **counts})
