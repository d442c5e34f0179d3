"""``Layout``: how an FP8 linear is stored. Also matches names with the lists of a
``quantization_config``."""

import fnmatch
import re
from dataclasses import dataclass
from typing import Callable, Iterable, Optional, Tuple

from ...functional import SCALE_BLOCK

BLOCK = (SCALE_BLOCK, SCALE_BLOCK)
MX_BLOCK = (1, 32)  # of MXFP8, whose scales are E8M0


class NotServed(ValueError):
    """What a ``quantization_config`` says and nothing here computes."""


class Unknown(Exception):
    """What is another reader's, and why: integers, four bits, outputs that are quantised."""


@dataclass(frozen=True)
class Layout:
    """How an FP8 linear is stored, or experts.

    Attributes:
        weights: what has one scale: ``"tensor"``, ``"channel"`` or ``"block"``; or ``"mxfp4"``,
            which experts alone may be.
        inputs: ``"dynamic"``, ``"static"`` or ``"none"``.
        scale_ub: largest magnitude that a computed scale of the inputs covers.
        scale_fmt: of computed scales of the inputs, as ``FP8Linear`` takes it.
        block: rows and columns of a block in the file. Others than 128 x 128 become that, or a
            channel's, where no value changes.
        instead: what is done here instead of what the checkpoint says, for the report.
    """

    weights: str
    inputs: str
    scale_ub: Optional[float] = None
    scale_fmt: Optional[str] = None
    block: Tuple[int, int] = BLOCK
    instead: Optional[str] = None

    def scale_shape(self, n: int, k: int) -> Tuple[int, ...]:
        """The shape of a weight's scales: as ``FP8Linear`` has them, or, for blocks other than 128
        x 128, as the file has them."""
        rows, columns = -(-n // self.block[0]), -(-k // self.block[1])
        if self.weights == "block" and (columns > 1 or self.block != BLOCK):
            return (rows, columns)
        return (1,) if self.weights == "tensor" else (n, 1)


# Of a module, by its names, in the model and in files, and by ``classes``, the names of its class
# and of that one's bases (a linear's, if not given); None: it is not FP8.
LayoutOf = Callable[..., Optional[Layout]]

LINEAR = ("Linear",)

# What finer scales of inputs are taken instead of.
ONE_A_TENSOR = "its inputs have a scale a token, where the checkpoint says one for all tokens"
ONE_A_TOKEN = "its inputs have a scale for 128 columns, where the checkpoint says one a token"
ONE_FOR_32 = "its inputs have a scale for 128 columns, where the checkpoint says one for 32"


def matches(pattern: str, name: str) -> bool:
    """Whether a list's entry is a name, or ``re:`` and an expression of how it begins."""
    return re.match(pattern[3:], name) is not None if pattern[:3] == "re:" else pattern == name


def is_listed(patterns: Iterable[str], names: Iterable[str]) -> bool:
    """Whether a list, which may have shell patterns too, has one of the names."""
    return any(matches(p, n) or fnmatch.fnmatchcase(n, p) for p in patterns for n in names)


def is_within(entries: Iterable[str], names: Iterable[str]) -> bool:
    """Whether an entry is a name, a module around it, or its last parts."""
    return any(f".{entry}." in f".{name}." for entry in entries for name in names)
