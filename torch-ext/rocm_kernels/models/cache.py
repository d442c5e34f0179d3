"""A static cache of keys and values in FP8, for ``generate`` with this package's attention.

A layer of it keeps ``key / k_scale`` and ``value / v_scale``, rounded; the attention multiplies by
the scales again (``k_descale``, ``v_descale``). They are the checkpoint's where it has some, which
:func:`place_cache_scales` has loaded into the attention modules, as buffers ``k_scale`` and
``v_scale``; else 1.
"""

import functools
import importlib
from typing import Any, List, Mapping, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..functional import native_fp8_dtype
from .attention import ATTENTION
from .attention_traits import theirs_for

_Scales = Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]


def fp8_static_cache(model: nn.Module, max_cache_len: int) -> Any:
    """A transformers ``StaticCache`` that holds keys and values in FP8, in half the bytes.

        use_attention(model)
        cache = fp8_static_cache(model, max_cache_len=4096)
        model.generate(**inputs, past_key_values=cache)

    Args:
        model: a decoder of transformers whose attention is this package's.
        max_cache_len: tokens of a sequence, prompt and answer.
    """
    config = model.config.get_text_config(decoder=True)
    transformers = importlib.import_module("transformers.cache_utils")
    _require_attention(model)
    cache = transformers.StaticCache(config=config, max_cache_len=max_cache_len)
    hold_in_fp8(cache, model)
    return cache


def hold_in_fp8(cache: Any, model: nn.Module) -> None:
    """Has the layers of an empty cache hold FP8, by the scales of the model's attentions."""
    _require_attention(model)
    transformers = importlib.import_module("transformers.cache_utils")
    scales = {module.layer_idx: _take_scales(module) for module in _attentions(model)}
    for i, layer in enumerate(cache.layers):
        # Layers of other kinds, such as linear attention's states, stay as they are.
        static = type(layer) in (transformers.StaticLayer, transformers.StaticSlidingWindowLayer)
        if static or getattr(layer, "grows", False):
            layer.__class__ = _in_fp8(type(layer))
            layer.scales = scales.get(i, (None, None))


def _require_attention(model: nn.Module) -> None:
    config = model.config.get_text_config(decoder=True)
    if config.is_encoder_decoder or config._attn_implementation != ATTENTION:
        raise ValueError(
            f"model must be a decoder with the attention {ATTENTION!r}, which reads FP8, got "
            f"{type(model).__name__} with {config._attn_implementation!r}"
            + ("" if theirs_for(model) else ": call use_attention")
        )


def _attentions(model: nn.Module) -> List[nn.Module]:
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "layer_idx", None), int) and hasattr(module, "is_causal")
    ]


def _take_scales(module: nn.Module) -> _Scales:
    """An attention module's scales, in its device's dialect, kept where ``attend`` finds them."""
    found = []
    for name in ("k_scale", "v_scale"):
        scale = module._buffers.get(name)
        if scale is not None:
            scale = scale.float().flatten()
            # Checkpoints mean OCP's range, twice that of FNUZ and a little less.
            if native_fp8_dtype(scale.device) == torch.float8_e4m3fnuz:
                scale = scale * 2
        found.append(scale)
    module.cache_scales = tuple(found)
    return module.cache_scales


@functools.cache
def _in_fp8(base: type) -> type:
    class FP8Layer(base):
        """Its tensors are bytes to transformers, which moves, rolls and copies them."""

        scales: _Scales = (None, None)

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            self.fp8_dtype = native_fp8_dtype(key_states.device)
            states = (s.new_empty(s.shape, dtype=torch.uint8) for s in (key_states, value_states))
            super().lazy_initialization(*states)

        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
        ) -> Tuple[torch.Tensor, torch.Tensor]:
            if not self.is_initialized:
                self.lazy_initialization(key_states, value_states)
            states = zip((key_states, value_states), self.scales)
            rounded = [_rounded(s, scale, self.fp8_dtype) for s, scale in states]
            keys, values = super().update(*rounded, *args, **kwargs)
            return keys.view(self.fp8_dtype), values.view(self.fp8_dtype)

    FP8Layer.__name__ = FP8Layer.__qualname__ = f"FP8{base.__name__}"
    return FP8Layer


def _rounded(
    states: torch.Tensor, scale: Optional[torch.Tensor], fp8_dtype: torch.dtype
) -> torch.Tensor:
    """``[batch, KV heads, rows, D]`` divided by the scales of a tensor or of heads, as bytes."""
    states = states.float()
    if scale is not None:
        states = states / scale[:, None, None]
    largest = torch.finfo(fp8_dtype).max
    return states.clamp(-largest, largest).to(fp8_dtype).view(torch.uint8)


class Place(NamedTuple):
    """Where a layer's new keys and values go: ``[batch, KV heads, room, D]``, rows ``positions`` of
    it, divided by ``scales`` in FP8."""

    keys: torch.Tensor
    values: torch.Tensor
    positions: torch.Tensor
    scales: _Scales

    @classmethod
    def of(cls, layer: Any, positions: torch.Tensor) -> "Place":
        keys, values = layer.keys, layer.values
        if hasattr(layer, "fp8_dtype"):
            keys, values = keys.view(layer.fp8_dtype), values.view(layer.fp8_dtype)
        return cls(keys, values, positions, getattr(layer, "scales", (None, None)))


# ---- scales of checkpoints


def place_cache_scales(model: nn.Module, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Makes buffers for the scales that files have, which are sorted ``by_module``."""
    for name, headers in files.items():
        owner, _, projection = name.rpartition(".")
        for stored, header in headers.items():
            last = stored.rpartition(".")[2]
            for kind in "kv":
                # In the attention itself (compressed-tensors), with its projections (ModelOpt), or
                # as what those give (Quark).
                inside = projection == f"{kind}_proj"
                if last != f"{kind}_scale" and not (inside and last == "output_scale"):
                    continue
                attention = model.get_submodule(owner if inside else name)
                if hasattr(attention, "is_causal") and not hasattr(attention, f"{kind}_scale"):
                    empty = torch.empty(header.shape, dtype=torch.float32, device="meta")
                    attention.register_buffer(f"{kind}_scale", empty)


def renamings_of_cache_scales() -> List[Any]:
    """Makes the renamings of caches' scales, from names in files to the model's buffers."""
    core = importlib.import_module("transformers.core_model_loading")
    return [
        core.WeightRenaming(rf"\.{kind}_proj\.({kind}|output)_scale$", f".{kind}_scale")
        for kind in "kv"
    ]
