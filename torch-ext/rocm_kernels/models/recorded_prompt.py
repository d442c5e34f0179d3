"""Short prompts as graphs.

A GPU computes a prompt of some hundred tokens sooner than the host asks for its kernels, and one of
two thousand where a layer has few active weights, or the host is slow. So such a prompt is
recorded, as a step is. Few graphs serve many lengths, for tokens come behind its own:

    its tokens   t[0] ... t[n - 1]
    those run    t[0] ... t[n - 1]  0 ... 0     a multiple of 64, with those of all sequences
    logits       of row n - 1, whose number the graph reads
    cache        of n tokens; in the rows behind lies what the next tokens overwrite

No token may see one behind it: :func:`why_not_padded` asks the model by short runs of its own. All
prompts that can be recorded have such tokens, whether they are recorded yet or not, so that the
same prompt gives the same bits each time.
"""

import importlib
import inspect
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch import nn

from .hooks import is_called, is_wrapped
from .model_state import States
from .probe_step import can_be_asked, is_alike, tokens_to_ask
from .recorded_step import first_line
from .step_arguments import can_be_given
from .step_storage import NAMES_OF_CACHE

# Tokens of all sequences up to which a graph is worth its memory, by kind of device: computing more
# takes as long as a host needs, 0.4 to 0.9 ms a layer. On a CPU tokens that nobody wants cost more
# than they save.
MOST_TOKENS = {"cuda": 2048}
_ROUND = 64  # tokens of all sequences


def padded_prompt(
    kwargs: Dict[str, Any],
    cache_name: str,
    device: torch.device,
    room: int,
    as_long_as_any: bool = False,
) -> Optional[Dict[str, Any]]:
    """A prompt's arguments but for its cache, with tokens behind its own; None: it has arguments
    that say more than which tokens there are and which of the first ones are padding, or no graph
    serves so many tokens.

    Args:
        room: tokens of a sequence that the cache has room for.
        as_long_as_any: with as many behind its own as any prompt has with this cache.
    """
    tokens = kwargs.get("input_ids")
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or tokens.device != device:
        return None
    if tokens.numel() == 0:
        return None
    batch, count = tokens.shape
    step = -(-_ROUND // batch)
    padded = max(2, -(-count // step) * step)  # one token would be a step
    if as_long_as_any:
        padded = min(MOST_TOKENS.get(device.type, 0) // batch, room) // step * step
    if batch * padded > MOST_TOKENS.get(device.type, 0) or padded > room:
        return None
    keep = kwargs.get("logits_to_keep")
    if type(keep) is not int or keep != 1:
        return None
    given = {"input_ids": nn.functional.pad(tokens, (0, padded - count))}
    for name, value in kwargs.items():
        if name in ("input_ids", "logits_to_keep", cache_name):
            continue
        if name == "position_ids" and isinstance(value, torch.Tensor):
            if value.shape not in ((1, count), (batch, count)) or value.device != device:
                return None
            # No position is beyond those that the model has a table for.
            behind = value[:, -1:].expand(-1, padded - count)
            given[name] = torch.cat([value, behind], 1)
        elif name == "attention_mask" and isinstance(value, torch.Tensor):
            if value.shape != tokens.shape or value.device != device:
                return None
            if not value.all():
                given[name] = nn.functional.pad(value, (0, padded - count), value=1)
        else:
            is_simple = not isinstance(value, (torch.Tensor, dict)) and can_be_given(value, device)
            returns_more = (
                bool(value) if name.startswith("output_") else name == "return_dict" and not value
            )
            if not is_simple or returns_more:
                return None
            given[name] = value
    given["logits_to_keep"] = torch.full((1,), count - 1, dtype=torch.int64, device=device)
    return given


def who_watches(model: nn.Module) -> Optional[str]:
    """What may see what a model's modules are called with, which stays as it is then."""
    for name, module in model.named_modules():
        if module is not model and (is_called(module) or is_wrapped(module)):
            return f"{name} has a hook, or another's forward"
    return None


def says_logits_alone(said: Any) -> bool:
    """Whether nothing else in what a model says is as long as its prompt: states, or what routers
    have said, for which its configuration may ask."""
    return isinstance(said, dict) and not {
        name for name, value in said.items() if value is not None
    } - {"logits", *NAMES_OF_CACHE}


def kept_of(cache: Any, count: int) -> None:
    """Has a growing cache hold that many of the tokens that were just written to it, empty."""
    cache.length.fill_(count)
    cache.rows = count


def why_not_padded(
    model: nn.Module, forward: Callable[..., Any], make: Callable[..., Any]
) -> Optional[str]:
    """Why a prompt gets no tokens behind it, with caches that ``make(room)`` makes; "": on its kind
    of device none does. None: it may, for its logits and its cache do not depend on them, to the
    bit, are, but for roundings, those without any, and are all that it leaves. A model has been
    asked before by :func:`~.probe_step.why_not_in_place`."""
    if model.device.type not in MOST_TOKENS:
        return ""
    if not can_be_asked(model):
        return "the model trained, was watched or compiled when use_decode_step was called"
    taken = inspect.signature(model.forward).parameters
    name = next((name for name in NAMES_OF_CACHE if name in taken), None)
    if name is None or "logits_to_keep" not in taken:
        return "its forward does not take a cache and logits_to_keep"
    if not make(8).is_croppable:
        return "layers keep a state of all tokens"
    cache_utils = importlib.import_module("transformers.cache_utils")
    config = model.config.get_text_config(decoder=True)
    last = torch.tensor([2], dtype=torch.int64, device=model.device)

    def run(
        cache: Any, prompt: Tuple[int, ...], behind: Tuple[int, ...], keep: Any, padding: int
    ) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        """The logits, and the keys and values of the prompt's own tokens."""
        tokens = torch.tensor([prompt + behind], dtype=torch.int64, device=model.device)
        options = {"use_cache": True, "return_dict": True, "logits_to_keep": keep, name: cache}
        if padding:
            options["attention_mask"] = torch.ones_like(tokens)
            options["attention_mask"][:, :padding] = 0
        logits = forward(input_ids=tokens, **options).logits
        layers = cache.layers if hasattr(cache, "grow") else []
        held = [states for layer in layers for states in layer.held().values()]
        return logits, [states[:, :, : len(prompt)].contiguous() for states in held]

    states = States(model)
    try:
        with torch.no_grad():
            for padding in (0, 1) if "attention_mask" in taken else (0,):
                for tokens in tokens_to_ask(config):
                    prompt = tokens[:3]
                    alone, _ = run(cache_utils.DynamicCache(config=config), prompt, (), 1, padding)
                    one, held = run(make(16), prompt, (0, 0, 0), last, padding)
                    other, as_held = run(make(16), prompt, (2, 1, 3), last, padding)
                    if alone.shape != one.shape or not all(
                        map(torch.equal, [one, *held], [other, *as_held])
                    ):
                        return "it depends on tokens behind it"
                    if is_alike([alone], [one]):
                        break
                else:
                    return "with tokens behind it the model says something else"
        kept = next(states.changed(), None)
        return None if kept is None else f"{kept[0] or 'the model'} keeps a {kept[1]} of it"
    except Exception as error:  # of many kinds: the code is the model's
        return f"with tokens behind it the model stops: {first_line(error)}"
    finally:
        states.put_back()
