"""Asks a model, by short runs of its own, whether its decode steps may use a cache that stays in
place (growing_cache.py): one with more rows than it has tokens, which the mask alone tells apart.

    a prompt, padded on the left, and a step, with their cache   what is computed
    the same with a new cache of ours                            must be the same
    the same again, the cache's rows full of random numbers      must be the same

All that again without padding and without a mask.
What a model has of its own beside the mask (biases by distance as long as the cache, a window that
only its own cache makes) shows there, before anything is changed.
"""

import functools
import importlib
import inspect
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import torch
from torch import nn

from .attention import ATTENTION, noted_masks
from .hooks import is_called
from .model_state import states_kept
from .recorded_step import Looks, first_line
from .step_storage import NAMES_OF_CACHE


def tokens_to_ask(config: Any) -> List[Tuple[int, ...]]:
    """Four tokens each, the first ones and some from all over the vocabulary. Special tokens, and
    now and then others, make numbers so large that a rounding more changes all that follows: a
    model of quantised inputs then says something else with any cache. What is wrong shows with all.

    config: of the decoder.
    """
    vocabulary = config.vocab_size
    step = max(1, vocabulary // 17)
    spread = [[(1 + 4 * n + i) * step % vocabulary for i in range(4)] for n in range(4)]
    return [(0, 1, 2, 3), *map(tuple, spread)]


def is_alike(one: List[torch.Tensor], other: List[torch.Tensor]) -> bool:
    """Whether logits are, but for roundings, which may choose other experts: what is wrong is far
    off."""
    return not any(
        float((x - y).float().norm()) > 0.5 * float(x.float().norm()) for x, y in zip(one, other)
    )


def why_not_in_place(
    model: nn.Module,
    forward: Callable[..., Any],
    make: Callable[..., Any],
    pads_masks: bool = False,
) -> Optional[str]:
    """Why a model's steps cannot use the caches that ``make(room)`` makes; None: they can, or the
    model cannot be asked, since it needs more than tokens, trains, or is watched by hooks.

    pads_masks: ``forward`` gives masks a column for each row of such a cache.
    """
    if not can_be_asked(model):
        return None
    # Some make what they add to scores of the mask alone, and others where they are given none.
    whys = (_why_not_in_place(model, forward, make, pads, pads_masks) for pads in (True, False))
    return next(filter(None, whys), None)


def _why_not_in_place(
    model: nn.Module,
    forward: Callable[..., Any],
    make: Callable[..., Any],
    has_mask: bool,
    pads_masks: bool,
) -> Optional[str]:
    """has_mask: of prompts that are padded on the left; without padding they have none."""
    config = model.config.get_text_config(decoder=True)
    cache_utils = importlib.import_module("transformers.cache_utils")
    run = functools.partial(_run, model, forward, has_mask)
    first_tokens, *other_tokens = tokens_to_ask(config)
    with torch.no_grad():
        ends = [3, 4]  # of a prompt, and of a step
        while ends:
            try:
                calls = _cut(first_tokens, ends)
                theirs = run(cache_utils.DynamicCache(config=config), calls)
                break
            except Exception:
                del ends[-1]  # of some models generate makes a step of another kind
        else:
            return None
        try:
            cache = make(16)
            with noted_masks() as masks:
                first = run(cache, calls)
            if not any(layer.is_initialized for layer in cache.layers):
                return "it does not write keys and values to its cache"
            kinds, _ = cache_utils.get_layer_types_and_kwargs(config)
            has_windows = "sliding_attention" in kinds and config._attn_implementation == ATTENTION
            if has_windows and not any(mask.window for mask in masks):
                return "its windows are its cache's alone: it makes no mask of them"
            most = cache.room if pads_masks else sum(map(len, calls))
            if any((mask.columns or 0) > most for mask in masks):
                return "it makes a mask of more than its tokens"
            cache.reset()
            _fill(cache)
            second = run(cache, calls)
            for one, other in zip(first, second):
                if not torch.allclose(one.float(), other.float(), rtol=0.1, atol=0.1):
                    return "it reads rows of its cache that hold nothing yet"
            while not is_alike(theirs, first):
                if not other_tokens:
                    return "with such a cache it says something else"
                calls = _cut(other_tokens.pop(0), ends)
                theirs = run(cache_utils.DynamicCache(config=config), calls)
                cache.reset()
                first = run(cache, calls)
        except Exception as error:  # of many kinds: the code is the model's
            return f"with such a cache it stops: {first_line(error)}"
    return None


def buffers_made_anew(
    model: nn.Module, forward: Callable[..., Any], make: Callable[..., Any]
) -> List[Tuple[nn.Module, str]]:
    """The buffers that are no states: each call puts other tensors in their places, and reads those
    alone, as long rotations do (Phi-3's "longrope"). A model that cannot be asked has none."""
    if not can_be_asked(model):
        return []
    calls: List[Set[Tuple[nn.Module, str]]] = []

    def watched(**kwargs: Any) -> Any:
        before = _unsaved_buffers(model)
        with Looks() as looks:
            said = forward(**kwargs)
        after = _unsaved_buffers(model)
        calls.append({
            key for key, old in before.items()
            if key in after and after[key] is not old and id(old) not in looks.seen
        })  # fmt: skip
        return said

    first_tokens, *_ = tokens_to_ask(model.config.get_text_config(decoder=True))
    with torch.no_grad():
        try:
            _run(model, watched, True, make(16), _cut(first_tokens, [3, 4]))
        except Exception:  # of many kinds: the code is the model's
            return []
    return list(set.intersection(*calls))


def _unsaved_buffers(model: nn.Module) -> Dict[Tuple[nn.Module, str], torch.Tensor]:
    """Nobody keeps what is in them, or looks for it there."""
    return {
        (module, name): module._buffers[name]
        for module in model.modules()
        for name in module._non_persistent_buffers_set
        if module._buffers.get(name) is not None
    }


def _cut(tokens: Tuple[int, ...], ends: List[int]) -> List[Tuple[int, ...]]:
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends)]


def can_be_asked(model: nn.Module) -> bool:
    """Whether nobody would see a short run: a model that trains, is watched or compiled, is not."""
    return not model.training and not any(
        is_called(module) or getattr(module, "_compiled_call_impl", None) is not None
        for module in model.modules()
    )


def _run(
    model: nn.Module,
    forward: Callable[..., Any],
    has_mask: bool,
    cache: Any,
    calls: List[Tuple[int, ...]],
) -> List[torch.Tensor]:
    """The logits behind the tokens of each call."""
    taken = inspect.signature(model.forward).parameters
    logits, count = [], 0
    with states_kept(model):
        for tokens in calls:
            ids = torch.tensor([tokens], dtype=torch.int64, device=model.device)
            count += len(tokens)
            mask = {}
            if has_mask and "attention_mask" in taken:
                mask = {"attention_mask": (torch.arange(count, device=ids.device) > 0)[None].long()}
            name = next((name for name in NAMES_OF_CACHE if name in taken), NAMES_OF_CACHE[0])
            said = forward(input_ids=ids, use_cache=True, return_dict=True, **mask, **{name: cache})
            logits.append(said.logits[:, -1])
            if hasattr(cache, "grow"):
                cache.tokens, cache.idle = count, True
    return logits


def _fill(cache: Any) -> None:
    """A cache's rows with numbers that would be seen, none of them NaN in FP8."""
    # Not on a default device of the caller's.
    options = {"generator": torch.Generator().manual_seed(1), "device": "cpu"}
    for layer in cache.layers:
        for states in layer.held().values():
            if states.dtype == torch.uint8:
                numbers = torch.randint(0x40, 0x58, states.shape, **options)
            else:
                numbers = 8 * torch.randn(states.shape, **options, dtype=torch.float32)
            states.copy_(numbers)
