"""Calls of decode_layers' op: two layers, of which the last may lack a qkv; for the CPU alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS = 256, 128, 2, 1
QKV = (HEADS + 2 * KV_HEADS) * 128


def drawn(maker: Any, *shape: int, chance: torch.Generator | None = None) -> torch.Tensor:
    """On the default device, of the CPU's numbers."""
    return maker(shape, generator=chance, device="cpu").to(torch.get_default_device())


def half(*shape: int, chance: torch.Generator | None = None) -> torch.Tensor:
    return drawn(torch.randn, *shape, chance=chance).bfloat16()


def right_calls(fp8: torch.dtype = torch.float8_e4m3fn) -> Iterator[dict[str, Any]]:
    """With a scale for each row of a weight and FP8 caches, with one for all, and this of two
    sequences; the same ones each time."""
    chance = torch.Generator().manual_seed(1)

    def some(*shape: int) -> torch.Tensor:
        return half(*shape, chance=chance)

    def weights(name: str, count: int, rows: int, columns: int) -> dict[str, Any]:
        w = [drawn(torch.randn, rows, columns, chance=chance).to(fp8) for _ in range(count)]
        scales = [
            drawn(torch.rand, rows if of_rows else 1, 1, chance=chance) / columns
            for _ in range(count)
        ]
        return {f"w_{name}": w, f"scale_{name}": scales}

    for of_rows in (True, False):
        count = 2 if of_rows else 1
        of_caches = fp8 if of_rows else torch.bfloat16
        caches = {name: [some(4, KV_HEADS, 128).to(of_caches) for _ in range(2)]
                  for name in ("k_caches", "v_caches")}  # fmt: skip
        scales = {
            name: [drawn(torch.rand, 1, chance=chance) + 0.5 for _ in range(2 if of_rows else 0)]
            for name in ("k_scales", "v_scales")
        }
        more = {f"{name}_norm_weights": [some(128) for _ in range(2 if of_rows else 0)]
                for name in "qk"}  # fmt: skip
        call = {
            "residual": some(HIDDEN), "qkv": some(QKV), **caches,
            "norm_weights": [some(HIDDEN) for _ in range(2)],
            **weights("o", 2, HIDDEN, HEADS * 128),
            **weights("gate_up", 2, 2 * INTERMEDIATE, HIDDEN),
            **weights("down", 2, HIDDEN, INTERMEDIATE),
            "next_norm_weights": [some(HIDDEN) for _ in range(count)],
            **weights("qkv", count, QKV, HIDDEN),
            "bias_qkv": [some(QKV) for _ in range(count if of_rows else 0)], **more, **scales,
            "cos": some(128), "sin": some(128), "position": torch.tensor([2]).int(),
            "rotary_dim": 128, "interleaved": False,
            "eps": 1e-6, "weight_offset": 0.0, "scale": 0.1,
            "seqused_k": torch.tensor([3]).int() if of_rows else None,
            "leftpad_k": torch.tensor([1]).int() if of_rows else None, "window_left": -1,
        }  # fmt: skip
        yield call
    yield of_two(call, some)


def of_two(call: dict[str, Any], some: Any) -> dict[str, Any]:
    """The call with two sequences, each of its own place."""
    caches = {
        name: [some(2, *cache.shape) for cache in call[name]] for name in ("k_caches", "v_caches")
    }
    rows = {name: some(2, *call[name].shape) for name in ("residual", "qkv", "cos", "sin")}
    numbers = {
        "position": torch.tensor([2, 3]),
        "seqused_k": torch.tensor([3, 4]).int(),
        "leftpad_k": torch.tensor([0, 1]).int(),
    }
    return {**call, **rows, **caches, **numbers}


def wrong_calls(call: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Wrong calls, whose caches lie in what else is written, or have other heads; a window that is
    none, or a rotation."""
    yield {**call, "window_left": -2}
    yield {**call, "rotary_dim": 100}
    for name in ("q_norm_weights", "k_norm_weights", "bias_qkv"):
        yield {**call, name: [half(128)]}
    for name in ("k_scales", "v_scales"):
        for scales in ([torch.ones(1)], [torch.ones(1).double()] * 2, [torch.ones(3)] * 2):
            yield {**call, name: scales}
    memory, of_caches = half(1 << 12), call["k_caches"][0].dtype
    caches = [memory.view(of_caches)[:512].view(4, KV_HEADS, 128)] * 2
    yield {**call, "v_caches": caches, "k_caches": caches}
    for name in ("k_caches", "v_caches"):
        yield {**call, name: caches, "residual": memory[:HIDDEN]}
        yield {**call, name: caches, "qkv": memory[:QKV]}
    two = of_two(
        {**call, **{name: [half(4, KV_HEADS, 128)] * 2 for name in ("k_caches", "v_caches")}}, half
    )
    yield {**two, "qkv": half(2, QKV + 1)}
    yield {**two, "qkv": half(QKV, 2).t()}
    yield {**two, "k_caches": [half(1, 4, KV_HEADS, 128).expand(2, -1, -1, -1)] * 2}
    three = [torch.randn(HIDDEN, 3 * 128).to(call["w_o"][0].dtype)] * 2
    yield {**call, "w_o": three, "k_caches": [half(4, 2, 128).to(of_caches)] * 2}
