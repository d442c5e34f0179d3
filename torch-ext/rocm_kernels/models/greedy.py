"""A greedy answer whose steps choose their tokens themselves.

    transformers' loop   graph ─▶ copy of the logits ─▶ in float32 ─▶ argmax ─▶ padding where ended
                         ─▶ has it ended ─▶ inputs, positions and mask of the next step ─▶ graph
    this one             graph, with all of that but the look at its end ─▶ graph

Some twenty kernels of transformers' run between two steps, of a few microseconds each, and as many
calls of the host. Where nobody asks for logits or looks at tokens on the way, a recorded step ends
with its choice, which it leaves where it reads its input: nothing is between two steps. What is
asked for beyond that is transformers' loop's.
"""

import functools
import importlib
from typing import Any, Dict, List, Optional

import torch

from . import late_stop
from .hooks import is_called
from .step_storage import name_of_cache

_OWN = (
    "_prefill", "_optimize_model_for_decode", "prepare_inputs_for_generation",
    "_update_model_kwargs_for_generation",
)  # fmt: skip
_RULES = ("unfinished", "ends", "pad")


def answers(
    step: Any,
    input_ids: torch.Tensor,
    logits_processor: List[Any],
    stopping_criteria: List[Any],
    config: Any,
    model_kwargs: Dict[str, Any],
) -> bool:
    """Whether an answer is greedy, and asks for nothing but its tokens."""
    utils = importlib.import_module("transformers.generation.utils")
    model, mixin = step.model, utils.GenerationMixin
    ends = [c for c in stopping_criteria if type(c) is utils.EosTokenCriteria]
    limits = [c for c in stopping_criteria if type(c) is utils.MaxLengthCriteria]
    return (
        hasattr(utils, "DeferredStopCheck")
        and all(getattr(type(model), name, None) is vars(mixin).get(name) for name in _OWN)
        and not any(name in vars(model) for name in _OWN)
        and not is_called(model)
        and getattr(model, "_compiled_call_impl", None) is None
        and not config.do_sample
        and not config.return_dict_in_generate
        and not config.is_assistant
        and not logits_processor
        and len(limits) == 1
        and len(ends) + 1 == len(stopping_criteria)
        and (not ends or config._pad_token_tensor is not None)
        and limits[0].max_length <= (limits[0].max_position_embeddings or limits[0].max_length)
        and model_kwargs.get("use_cache", False)
        and model_kwargs.get("inputs_embeds") is None
        and input_ids.device == model.device
        and step.serves(model_kwargs)
    )


def answer(
    step: Any,
    input_ids: torch.Tensor,
    stopping_criteria: List[Any],
    config: Any,
    streamer: Any,
    model_kwargs: Dict[str, Any],
) -> torch.Tensor:
    """What transformers' loop gives."""
    utils = importlib.import_module("transformers.generation.utils")
    model, device = step.model, input_ids.device
    batch, length = input_ids.shape
    most = next(c.max_length for c in stopping_criteria if hasattr(c, "max_length"))
    ends = [c.eos_token_id.to(device) for c in stopping_criteria if hasattr(c, "eos_token_id")]
    pad = config._pad_token_tensor
    rules = {
        "unfinished": torch.ones(batch, dtype=torch.bool, device=device),
        "ends": torch.cat(ends) if ends else None,
        "pad": pad.to(device) if ends else None,
    }

    cache = model_kwargs[name_of_cache(model_kwargs)]
    outputs = model._prefill(input_ids, config, model_kwargs, is_first_iteration=True)
    model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs)
    token = _choose(outputs.logits, **rules)
    del outputs
    kept = getattr(cache, "_is_user_defined", False)
    if late_stop.runs_ahead(device) and (cache.is_croppable or not kept):
        check = utils.DeferredStopCheck(input_ids, most, cache, kept, streamer)
    else:
        check = utils.StopCheck(streamer)

    said = input_ids.long()  # as what is chosen, whatever a prompt's tokens are
    state = None
    with model._optimize_model_for_decode():
        while True:
            if length == said.shape[1]:
                more = min(most - length, length + 512)
                said = torch.cat([said, said.new_empty(batch, more)], 1)
            said[:, length] = token
            length += 1
            # A streamer may keep what it gets; where the next step writes its choice, it changes.
            shown = token if streamer is None else said[:, length - 1]
            if check(rules["unfinished"], shown, length) or length >= most:
                break
            if state is None:
                inputs = model.prepare_inputs_for_generation(
                    said[:, :length], next_sequence_length=1, **model_kwargs
                )
                state = {**inputs, **rules, "return_dict": True}
            state = step.choose(state)
            rules["unfinished"], token = state["unfinished"], state["input_ids"][:, 0]
    length -= check.finish()
    if streamer is not None:
        streamer.end()
    return said[:, :length].clone()


def choose_in_place(inner: Any, kwargs: Dict[str, Any], length: torch.Tensor) -> None:
    """Runs a step; its choice, and the next step's positions and mask, take the place of its own
    inputs. ``length`` is how many tokens are in the cache then; the mask is as long as that has
    room."""
    rules = {name: kwargs[name] for name in _RULES}
    token = _choose(inner(**{n: v for n, v in kwargs.items() if n not in _RULES}).logits, **rules)
    kwargs["input_ids"].copy_(token[:, None])
    if kwargs.get("position_ids") is not None:
        kwargs["position_ids"].add_(1)
    mask = kwargs.get("attention_mask")
    if mask is not None:
        # In a full cache nothing comes behind the last: then the mask moves to a larger place.
        mask.index_fill_(1, length.clamp(max=mask.shape[1] - 1)[None], 1)


def with_room(mask: torch.Tensor, room: int, tokens: int) -> torch.Tensor:
    """A mask with a column for each token that a cache has room for, and ones up to the next."""
    if mask.shape[1] == room:
        return mask
    larger = mask.new_zeros(mask.shape[0], room)
    larger[:, : mask.shape[1]] = mask
    larger[:, tokens] = 1
    return larger


def _choose(
    logits: torch.Tensor,
    unfinished: torch.Tensor,
    ends: Optional[torch.Tensor],
    pad: Optional[torch.Tensor],
) -> torch.Tensor:
    """The next token of each sequence; of those that have ended, padding. Who ends is noted."""
    token = most_likely(logits[:, -1])
    if ends is not None:
        token = torch.where(unfinished, token, pad)
        goes_on = token != ends if len(ends) == 1 else (token[:, None] != ends).all(-1)
        unfinished.logical_and_(goes_on)
    return token


def most_likely(logits: torch.Tensor) -> torch.Tensor:
    """``logits.argmax(-1)``, of several the first. Of a GPU one block reads a row of torch's, and a
    row of a vocabulary is long: so parts of it go first, then their largest."""
    part = _part(logits.shape[1])
    if logits.device.type != "cuda" or part is None:
        return logits.argmax(-1)
    return most_likely_by_parts(logits, part)


def most_likely_by_parts(logits: torch.Tensor, part: int) -> torch.Tensor:
    values, within = logits.reshape(logits.shape[0], -1, part).max(-1)
    which = values.argmax(-1)
    return torch.add(within.gather(1, which[:, None])[:, 0], which, alpha=part)


@functools.cache
def _part(columns: int) -> Optional[int]:
    """Columns of a part: a divisor near the root, so that neither the parts nor their number is
    large. None: there is none, or a row is short."""
    divisors = [n for n in range(64, 2049) if columns % n == 0 and columns // n >= 32]
    return min(divisors, key=lambda n: abs(n - columns**0.5), default=None)
