"""Times the configs of an op and keeps the quickest whose result is right."""

import json
import os
import statistics
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Optional, Protocol, Sequence, Tuple, Union

import torch
from torch import nn

from ..functional import native_fp8_dtype
from . import gemm
from .files import device_names, document_of, force
from .products import GemmShape, ProductCase, Weights, shapes_of
from .timing import median_us

WORTH_IT = 0.99  # of the default's time: a win within the noise is none

What = Union[nn.Module, Iterable[Union[GemmShape, Tuple[int, int]]]]


def tune_gemm(
    what: What,
    *,
    rows: Sequence[int] = (1, 8, 16, 32, 128, 256, 512, 1024, 2048, 4096),
    device: Optional[torch.device] = None,
    output: Union[str, "os.PathLike[str]", None] = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Dict[str, Any]:
    """Times every config for some products, keeps the quickest and puts it in force.

    A candidate must first give results within the contract (at most twice the error of a float32
    product, both rounded once to bfloat16), on random data, for every number of rows. Times are
    medians of replays of a captured graph, over copies of the weight that no cache holds; the
    quickest four are timed again beside the default, and one wins only if it is at least 1 %
    quicker. A call that a tuned config cannot serve, by its addresses, strides or the output's
    dtype, takes the backend's own choice; ``gemm_config`` tells what runs.

    Args:
        what: a model (see :func:`shapes_of`), or shapes; a pair ``(n, k)`` is FP8 x FP8 in the
            device's dialect.
        rows: numbers of rows to time; those of one class get one config, the one with the least
            mean of times relative to the default's. The class of 16,384 has what is beyond too.
        device: None: the model's; for shapes the current GPU, or the CPU without one.
        output: a file to write for :func:`load_tuning`.
        progress: gets a line for each result.

    Returns:
        What the file holds.

    Raises:
        ValueError: a number of rows is below 1, or the output cannot be written.
    """
    if not rows or min(rows) < 1:
        raise ValueError(f"rows must be at least 1, got {tuple(rows)}")
    if device is None and isinstance(what, nn.Module):
        device = next(what.parameters()).device
    device = torch.device(device_names()[0] if device is None else device)
    if output is not None:
        _require_writable(Path(output))
    shapes = shapes_of(what) if isinstance(what, nn.Module) else [_shape(s, device) for s in what]
    classes: Dict[int, List[int]] = {}
    for m in sorted(set(rows)):
        classes.setdefault(gemm.OP.last_row_of_class(m), []).append(m)
    entries = []
    for shape in shapes:
        weights = Weights(shape, device)
        for members in classes.values():
            entries.append(choose(ProductCase(gemm.OP, shape, members, weights), progress))
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    document = document_of(entries, device)
    for entry in entries:
        force(-1 if index is None else index, entry, entry["config"])
    if output is not None:
        Path(output).write_text(json.dumps(document, indent=1) + "\n")
    return document


class Case(Protocol):
    """What an op gives the tuner: one product, and the values of M that share a config.

    Attributes:
        members: the values of M to time.
        key: what the op's own choice depends on, as a tuning file writes it; its "op" is the name.
        inputs: what a call takes, so many that no cache holds them all.
    """

    members: List[int]
    key: Dict[str, Any]
    inputs: List[torch.Tensor]

    def configs(self) -> List[str]:
        """The op's own choice first."""

    def within_contract(self, config: str) -> bool:
        """Whether its results are right, for every M."""

    def call(self, config: str, m: int) -> Callable[[torch.Tensor], None]:
        """Calls the op with one of the inputs."""


def choose(case: Case, progress: Callable[[str], None]) -> Dict[str, Any]:
    """The entry of a case: its quickest config, or the default where none is worth it."""
    configs = case.configs()
    default, tried, wrong = configs[0], {}, []

    def times(config: str, replays: int) -> Dict[int, float]:
        return {m: median_us(case.call(config, m), case.inputs, replays) for m in case.members}

    def slowness(config: str) -> float:
        return statistics.mean(tried[config][m] / tried[default][m] for m in case.members)

    for config in configs:
        if case.within_contract(config):
            tried[config] = times(config, replays=5)
        elif config == default:
            raise RuntimeError(f"{case}: the default config '{config}' gives wrong results")
        else:
            wrong.append(config)
    best = sorted((config for config in tried if config != default), key=slowness)[:4]
    for config in [default, *best]:
        tried[config] = times(config, replays=30)
    winner = min([default, *best], key=slowness)
    if slowness(winner) > WORTH_IT:
        winner = default
    measured = {config: tried[config] for config in (winner, default)}
    for m in case.members:
        progress(
            f"{case} M={m}: {measured[winner][m]:.2f} us with '{winner}', "
            f"{measured[default][m]:.2f} with '{default}'"
            f" ({len(configs)} candidate{'s' if len(configs) > 1 else ''})"
        )
    for config in wrong:
        progress(f"{case}: '{config}' gives wrong results; please report it")
    median = {c: {str(m): round(us, 3) for m, us in by.items()} for c, by in measured.items()}
    return {**case.key, "config": winner, "default": default, "median_us": median}


def _shape(shape: Union[GemmShape, Tuple[int, int]], device: torch.device) -> GemmShape:
    if isinstance(shape, GemmShape):
        return shape
    dtype = native_fp8_dtype(device)
    return GemmShape(shape[0], shape[1], dtype, dtype)


def _require_writable(path: Path) -> None:
    """Requires that a file can be written, before the work, which takes minutes."""
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"output cannot be written: {path}: {error.strerror}") from None
    if not existed:
        path.unlink()
