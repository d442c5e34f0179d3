"""What stands in a mask's place: two numbers a sequence, and a pattern that its shape tells."""

from typing import List, NamedTuple, Optional

import torch


class Pattern(NamedTuple):
    """What queries see between the ends of a span: ``window_size``, and whether keys before it are
    padding. ``alone``: a call's own rows, the mask says, are all keys that there are."""

    left: int
    right: int
    padded: bool
    alone: bool


# A span's second dimension is as long as its pattern's place in this list, counted from 1: a shape
# is known without asking the device, and survives what happens to masks on their way to a layer.
_PATTERNS: List[Pattern] = []


def marked(span: torch.Tensor, pattern: Pattern) -> torch.Tensor:
    """``[batch, pattern, 1, 2 or 3]``, in memory ``[2 or 3, batch]``: a layer takes each row as it
    is."""
    if pattern not in _PATTERNS:
        _PATTERNS.append(pattern)
    return span.t()[:, None, None].expand(-1, 1 + _PATTERNS.index(pattern), -1, -1)


def pattern_of(mask: Optional[torch.Tensor]) -> Optional[Pattern]:
    """What a mask of :func:`make_mask` means; None: it is none of its spans."""
    is_span = mask is not None and mask.dtype == torch.int32 and mask.dim() == 4
    return _PATTERNS[mask.shape[1] - 1] if is_span else None


def for_keys(span: torch.Tensor, pattern: Pattern, rows: int, keys: int) -> torch.Tensor:
    """A span, for as many keys as there are. A cache may not count what its layers hold, as
    MiniMax's does not if its first layer keeps no rows: of a call behind others its mask says that
    it is alone. The queries are of the last keys, as they are to SDPA, which gets no mask then."""
    if not pattern.alone or pattern.right != 0 or keys <= rows:
        return span
    end = torch.full((span.shape[0],), keys, dtype=torch.int32, device=span.device)
    begin = span[:, 0, 0, 0] if pattern.padded else end
    return marked(torch.stack([begin, end]), pattern._replace(alone=False))


def written_out(
    span: torch.Tensor, pattern: Pattern, q_length: int, kv_length: int
) -> torch.Tensor:
    """A span as booleans ``[batch, 1, q_length, kv_length]``."""
    first, end = (span[:, :1, :1, i, None] for i in range(2))
    first = first if pattern.padded else torch.zeros_like(first)
    key = torch.arange(kv_length, device=span.device)
    position = torch.arange(q_length, device=span.device)[:, None] + (end - q_length)
    seen = (key >= first) & (key < span[:, :1, :1, -1, None])
    if pattern.left >= 0:
        seen = seen & (key >= position - pattern.left)
    if pattern.right >= 0:
        seen = seen & (key <= position + pattern.right)
    return seen.expand(-1, -1, q_length, -1)
