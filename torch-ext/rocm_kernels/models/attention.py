"""transformers' attention on this package's, by name.

A model calls its attention by a name in its config, and has its mask made by a function of the same
name. Two names are ours:

``rocm_kernels``
    For ``generate`` and plain calls. Its mask function makes no mask where one of ``Pattern`` will
    do, but two numbers a sequence, its *span*: the first key that is no padding, and the end of the
    keys. Both are made on the device, so a decode step waits for nothing. The name has no "flash"
    in it, which would have transformers cut padding out with ``nonzero`` and give up whole graphs.
``rocm_kernels_flash_attention_2``
    For continuous batching. transformers asks "flash" and a 2 of a name before it hands block
    tables to ``flash_attn_with_kvcache``.

What the kernel does not compute goes where it would go without us: to SDPA, or to the model's own
eager attention where SDPA does not know soft caps and sinks. :func:`delegated_attention` says what
went there, and why.
"""

import contextlib
import functools
import importlib
import inspect
import logging
import sys
import threading
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple

import torch
from torch import nn

from ..functional import (
    FP8_DTYPES,
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from ..functional.gradients import needs_gradient
from ..functional.kvcache import rotated_by_attention
from .attention_traits import require_no_chosen_keys, theirs_for, traits_of
from .cpu_recording import is_recording
from .spans import Pattern, for_keys, marked, pattern_of, written_out

ATTENTION = "rocm_kernels"
FLASH_ATTENTION = "rocm_kernels_flash_attention_2"

_MOST_OF_A_HEAD = 512  # kMaxHeadDim of attention/attention.h
_log = logging.getLogger(__name__)


def use_attention(model: Optional[nn.Module] = None) -> None:
    """Makes this package's attention known to transformers, and has a model use it.

    From then on ``attn_implementation="rocm_kernels"`` is a name for ``from_pretrained`` and
    ``set_attn_implementation``; ``"rocm_kernels_flash_attention_2"`` is the one for continuous
    batching (``generate_batch``).

    Args:
        model: a transformers model, which gets the first name; that of transformers' own if it has
            layers that choose keys (DeepSeek V3.2). None: no model changes.

    Raises:
        ImportError: transformers is not installed, or makes masks in another way than 5.22 does.
    """
    masks = importlib.import_module("transformers.masking_utils")
    modeling = importlib.import_module("transformers.modeling_utils")
    flash = importlib.import_module("transformers.modeling_flash_attention_utils")
    known = inspect.signature(masks.sdpa_mask).parameters
    if not {"q_length", "q_offset", "kv_offset"} <= set(known) or not hasattr(
        flash, "_lazy_imports"
    ):
        raise ImportError(
            "transformers must make masks from q_offset and q_length, and look flash attention up "
            "in _lazy_imports, as 5.22 to 5.24 do; this version does not: use one of those"
        )
    functions = modeling.AttentionInterface
    functions.register(ATTENTION, attend)
    masks.AttentionMaskInterface.register(ATTENTION, make_mask)
    functions.register(FLASH_ATTENTION, functions._global_mapping["flash_attention_2"])
    masks.AttentionMaskInterface.register(FLASH_ATTENTION, _make_flash_mask)
    _serve_flash_name(flash)
    if model is not None:
        for module in model.modules():
            # GPT-OSS and its like take the implementations of a list alone, for the sake of sinks.
            taken = getattr(type(module), "_compatible_flash_implementations", None) or []
            if FLASH_ATTENTION not in taken and any("flash-attn3" in name for name in taken):
                taken.append(FLASH_ATTENTION)
        model.set_attn_implementation(theirs_for(model) or ATTENTION)


def delegated_attention() -> Dict[str, str]:
    """What was computed by transformers' own attention so far, and why: ``{class of the attention:
    reason}``. Calls inside a compiled graph are not seen."""
    return dict(_DELEGATED)


# ---- masks


_DELEGATED: Dict[str, str] = {}


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Optional[Callable] = None,
    attention_mask: Optional[torch.Tensor] = None,
    **kwargs: Any,
) -> torch.Tensor:
    """transformers' mask function: int32 spans ``[batch, pattern, 1, 2 or 3]``, or a mask
    ``[batch, 1, q_length, kv_length]`` where spans do not say it all, or the model reads it."""
    masks = sys.modules["transformers.masking_utils"]
    traits = traits_of(type(kwargs.get("config")))
    window = None if traits.reads_masks else _window_of(mask_function, masks, kwargs)
    device = torch.device(kwargs.get("device", "cpu"))
    span = None
    columns = None if attention_mask is None else attention_mask.shape[-1]
    getattr(_here, "asked", []).append(Asked(kwargs.get("local_size"), columns))
    if window is not None:
        if window == (-1, -1):
            end: Any = kv_length
        else:
            end = q_offset + (q_length - kv_offset)  # a step's on the device: one kernel
        # Behind the last token of a text that is only read, padding may be anything.
        is_read = isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length
        span = _span(
            batch_size, end, kv_offset, attention_mask, window, device,
            is_step=_is_recorded()
            or (q_length == 1 and not kwargs.get("allow_is_causal_skip", True)),
            is_read=is_read,
        )  # fmt: skip
    if span is None:
        kwargs.update(allow_is_causal_skip=False, allow_is_bidirectional_skip=False)
        written = masks.eager_mask if traits.reads_masks and traits.eager else masks.sdpa_mask
        return written(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            **kwargs,
        )  # fmt: skip
    pattern = Pattern(*window, padded=attention_mask is not None, alone=False)
    if is_read:  # by a branch: while a graph is compiled it is a symbol
        pattern = Pattern(*pattern[:3], alone=True)
    return marked(span, pattern)


_here = threading.local()


class Asked(NamedTuple):
    """Of a mask that a model has asked for: the size of its window, and how many tokens its padding
    is of."""

    window: Optional[int]
    columns: Optional[int]


@contextlib.contextmanager
def noted_masks() -> Iterator[List[Asked]]:
    """The masks that are asked for within, in this thread."""
    _here.asked = []
    try:
        yield _here.asked
    finally:
        del _here.asked


def _make_flash_mask(*args: Any, config: Any = None, **kwargs: Any) -> Optional[torch.Tensor]:
    """transformers' own mask function for flash attention, for models that it has one for."""
    if config is not None and not traits_of(type(config)).flash:
        raise ValueError(
            f"a model whose masks flash attention can do without is required for "
            f"{FLASH_ATTENTION!r}, got one with {type(config).__name__}, which transformers does "
            f"not run on flash attention either: take {ATTENTION!r}"
        )
    theirs = sys.modules["transformers.masking_utils"].AttentionMaskInterface._global_mapping
    return theirs["flash_attention_2"](*args, config=config, **kwargs)


def _window_of(
    mask_function: Optional[Callable], masks: Any, kwargs: Dict[str, Any]
) -> Optional[Tuple[int, int]]:
    """The ``window_size`` that a mask function means; None if it is none of those known here."""
    if mask_function is None or mask_function is masks.causal_mask_function:
        return (-1, 0)
    if mask_function is masks.bidirectional_mask_function:
        return (-1, -1)
    size = kwargs.get("local_size")
    if size is None or kwargs.get("use_vmap"):
        return None
    causal = masks.sliding_window_causal_mask_function(size)
    if torch.compiler.is_compiling():
        # What a function closes over is not to be had. The same code with this size may also mean
        # chunks, which models have that have no window.
        config = kwargs.get("config")
        chunked = getattr(config, "attention_chunk_size", None) is not None
        is_window = getattr(config, "sliding_window", None) == size and not chunked
        is_causal = getattr(config, "is_causal", True)
        same = mask_function.__code__ is causal.__code__
        return (size - 1, 0) if same and is_window and is_causal else None
    if _is_same(mask_function, causal):
        return (size - 1, 0)
    if _is_same(mask_function, masks.sliding_window_bidirectional_mask_function(size)):
        return (size, size)
    return None


def _is_same(one: Any, other: Any) -> bool:
    """Whether two functions, or what they close over, are equal in code and numbers."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_is_same, one, other))
    if inspect.isfunction(one):
        cells = tuple(cell.cell_contents for cell in one.__closure__ or ())
        others = tuple(cell.cell_contents for cell in other.__closure__ or ())
        return one.__code__ is other.__code__ and _is_same(cells, others)
    return isinstance(one, int) and one == other


def _span(
    batch: int,
    end: Any,
    kv_offset: int,
    real: Optional[torch.Tensor],
    window: Tuple[int, int],
    device: torch.device,
    is_step: bool,
    is_read: bool,
) -> Optional[torch.Tensor]:
    """int32 ``[2, batch]``: the first key that is no padding, the end of the keys; and, where a
    text's last token is padding, behind its last that is none. None if padding lies elsewhere too.
    Where there is none the first row is as the second, and means nothing.

    real: ``[batch, positions]``, False where there is padding.
    is_step: this is a decode step in a graph, or before one: nobody waits for the device.
    is_read: this is all that there is, so that padding may be behind it; an answer that begins
        there all the same begins at its last token.
    """
    bidirectional = window == (-1, -1)
    if isinstance(end, torch.Tensor):
        end = end.reshape(-1).expand(batch).to(device=device, dtype=torch.int32)
    else:
        end = torch.full((batch,), end, dtype=torch.int32, device=device)
    if real is None:
        return end.expand(2, -1)
    # The first that is real, and the one behind the last; of none that is, all are taken.
    count = real.shape[-1]
    first = real.int().argmax(-1)
    # Attention waits for these, and a recorded step for nothing that is asked behind them.
    begin = (first if kv_offset == 0 else (first - kv_offset).clamp(min=0)).to(torch.int32)
    behind = count - real.flip(-1).int().argmax(-1)
    if bidirectional:
        end = torch.minimum(end, (behind - kv_offset).to(end.dtype))
    span = torch.stack([begin, end])
    if not torch.compiler.is_compiling():
        at = torch.arange(count, device=real.device)
        # Where a GPU would stop, it is not asked.
        if window[1] == 0 and not is_read and not (is_step and device.type != "cpu"):
            behind = end if kv_offset == 0 else end + kv_offset
        fine = real | (at < first[:, None])
        if window[1] <= 0:  # where a window looks ahead, none may be behind
            fine = fine | (at >= behind[:, None])
        if is_step and (device.type != "cpu" or is_recording()) and not bidirectional:
            torch._assert_async(
                fine.all(), "attention_mask must have padding on the left alone in decode steps"
            )
        elif is_read and not bidirectional:
            is_span, is_last_real = torch.stack([fine.all(), real[:, -1].all()]).tolist()
            if not is_span:
                return None
            if not is_last_real:
                span = torch.stack([begin, end, (behind - kv_offset).to(torch.int32)])
        elif not fine.all():
            return None
    return span


def _is_recorded() -> bool:
    if torch.compiler.is_compiling():  # which cannot ask a stream
        return False
    return is_recording() or (
        torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    )


# ---- attention


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Optional[torch.Tensor] = None,
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    softcap: Optional[float] = None,
    is_causal: Optional[bool] = None,
    s_aux: Optional[torch.Tensor] = None,
    append: Optional[Callable[[], None]] = None,  # turns query, writes key and value
    **kwargs: Any,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """transformers' attention function: ``[batch, heads, rows, D]`` to ``[batch, rows, heads,
    Dv]``, and None for the probabilities, which nobody keeps."""
    require_no_chosen_keys(module, kwargs)
    pattern = pattern_of(attention_mask)
    if pattern is not None:
        attention_mask = for_keys(attention_mask, pattern, query.shape[2], key.shape[2])
    k_descale, v_descale = vars(module).get("cache_scales", (None, None))
    why = _why_not(query, key, value, attention_mask, dropout, s_aux, kwargs)
    if append is not None and (why is not None or pattern is None):
        append()
    if why is not None:
        _note(type(module).__name__, why)
        if pattern is not None:
            attention_mask = written_out(attention_mask, pattern, query.shape[2], key.shape[2])
        if key.dtype in FP8_DTYPES:
            key = widened(key, k_descale, query.dtype)
            value = widened(value, v_descale, query.dtype)
        return _delegate(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling,
            softcap=softcap, is_causal=is_causal, s_aux=s_aux, **kwargs,
        )  # fmt: skip
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    options = {"softmax_scale": scaling, "softcap": softcap or 0.0, "s_aux": s_aux}
    if key.dtype in FP8_DTYPES:
        options.update(k_descale=k_descale, v_descale=v_descale)
    if pattern is not None:
        with rotated_by_attention(q, append is not None and attention_mask.shape[-1] < 3):
            if append is not None:
                append()
            out = flash_attn_with_kvcache(
                q, k, v, cache_seqlens=attention_mask[:, 0, 0, 1],
                cache_leftpad=attention_mask[:, 0, 0, 0] if pattern.padded else None,
                window_size=(pattern.left, pattern.right), **options,
            )  # fmt: skip
        if attention_mask.shape[-1] == 3:  # which looks at the queries again
            out[:, -1:] = _at_padding(q[:, -1:], k, v, attention_mask[:, 0, 0], pattern, options)
    else:
        if is_causal is None:
            is_causal = getattr(module, "is_causal", True)
        causal = bool(is_causal) and q.shape[1] > 1
        if causal and k.shape[1] > q.shape[1]:  # as SDPA does: a static cache's empty rest
            k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        out = flash_attn_func(q, k, v, causal=causal, **options)
    return out, None


def _at_padding(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    span: torch.Tensor,
    pattern: Pattern,
    options: Dict[str, Any],
) -> torch.Tensor:
    """Of a text's last token, whether it is padding or none: it sees no padding before it either.
    An answer to a prompt with padding on the right begins with what it says."""
    first, end, behind = span.unbind(-1)
    if pattern.left >= 0:
        first = torch.maximum(first, end - 1 - pattern.left)
    return flash_attn_with_kvcache(q, k, v, cache_seqlens=behind, cache_leftpad=first, **options)


def _why_not(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    dropout: float,
    s_aux: Optional[torch.Tensor],
    kwargs: Dict[str, Any],
) -> Optional[str]:
    """Why a call is not the kernel's; None: it is."""
    if needs_gradient(query, key, value, s_aux):
        return "a gradient is wanted"
    if dropout > 0:
        return "dropout"
    if query.dtype not in (torch.float16, torch.bfloat16) and not (
        query.dtype == torch.float32 and query.device.type == "cpu"
    ):
        return f"queries are {query.dtype}"
    if key.dtype != value.dtype or key.dtype not in (query.dtype, *FP8_DTYPES):
        return f"queries are {query.dtype}, keys {key.dtype} and values {value.dtype}"
    if max(query.shape[-1], value.shape[-1]) > _MOST_OF_A_HEAD:
        return f"heads are larger than {_MOST_OF_A_HEAD}"
    if kwargs.get("position_bias") is not None:
        return "scores have a bias"
    if kwargs.get("output_attentions"):
        return "probabilities are asked for"
    if mask is not None and pattern_of(mask) is None:
        return "the mask is more than a window and padding at its ends"
    return None


def widened(
    states: torch.Tensor, scale: Optional[torch.Tensor], dtype: torch.dtype
) -> torch.Tensor:
    """FP8 keys or values ``[batch, KV heads, rows, D]`` as numbers of another type."""
    wide = states.float()
    return (wide if scale is None else wide * scale[:, None, None]).to(dtype)


def _note(name: str, why: str) -> None:
    if not torch.compiler.is_compiling() and _DELEGATED.get(name) != why:
        _DELEGATED[name] = why
        _log.info("%s is computed by transformers: %s", name, why)


def _delegate(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: Optional[torch.Tensor],
    **kwargs: Any,
) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
    """SDPA, or the model's own eager attention where SDPA does not do."""
    asked = {name: given for name, given in kwargs.items() if given is not None}
    traits = traits_of(type(getattr(module, "config", None)))
    has_own = traits.reads_masks and traits.eager
    needs = has_own or "s_aux" in asked or any(map(asked.get, ("softcap", "output_attentions")))
    if not needs:
        modeling = sys.modules["transformers.modeling_utils"]
        sdpa = modeling.AttentionInterface._global_mapping["sdpa"]
        return sdpa(module, query, key, value, mask, **asked)
    source = sys.modules[type(module).__module__]
    eager = getattr(source, "eager_attention_forward", None)
    if eager is None:
        raise NotImplementedError(
            f"{type(module).__name__} needs soft caps, sinks or probabilities, which SDPA does not "
            f"have, and {source.__name__} has no eager_attention_forward: set its attention to "
            "'eager'"
        )
    if mask is None and asked.get("is_causal", getattr(module, "is_causal", True)):
        rows, keys = query.shape[2], key.shape[2]
        mask = torch.ones(rows, keys, dtype=torch.bool, device=query.device)
        mask = mask.tril() if rows > 1 else mask
    if mask is not None and mask.dtype == torch.bool:
        least = torch.finfo(query.dtype).min
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, least)
    return eager(module, query, key, value, mask, **asked)


# ---- continuous batching


def _serve_flash_name(flash: Any) -> None:
    """transformers looks functions up by a name once, in a function that knows packages and the
    Hub. It gets to know this name too."""
    theirs = flash._lazy_imports
    if getattr(theirs, "knows_rocm_kernels", False):
        return

    @functools.wraps(theirs)
    def lazy_imports(implementation: Optional[str], *args: Any, **kwargs: Any) -> Tuple:
        if implementation != FLASH_ATTENTION:
            return theirs(implementation, *args, **kwargs)
        ours = (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)
        return (*ours, flash._pad_input, flash._unpad_input)

    lazy_imports.knows_rocm_kernels = True
    flash._lazy_imports = lazy_imports
