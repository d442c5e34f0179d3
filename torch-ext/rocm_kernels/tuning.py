"""Which config :func:`skinny_gemm` runs with, and a tuner that times them all on this device.

The backend chooses a config by a model of time (AMD) or by measured thresholds (CUDA, CPU). On an
AMD GPU one can do better by trying, once for a model and a kind of GPU::

    tuning = kernels.get_kernel("org/rocm-kernels", version=1).tuning
    tuning.tune_skinny_gemm(model, output="mi300x.json")    # minutes; in force from here on
    tuning.load_tuning("mi300x.json")                       # in a later process

or from a shell, where FOLDER is the package's (``os.path.dirname(package.__file__)``)::

    python FOLDER --shape 2304,16384 --shape 13312,16384 --rows 1,8,16,32 --output mi300x.json

With the environment variable ``ROCM_KERNELS_TUNING=mi300x.json`` the package loads the file when it
is imported. A file of another device, package version or schema is refused: :func:`load_tuning`
raises, an import warns, and nothing of the file is used.

A config is chosen for a class of rows (1 to 16, 17 to 32, 33 to 64), never for one number of them,
so a row's bits stay independent of how many others there are within the class. The CPU and CUDA
backends have one config for given operands: there is nothing to choose, and files made there hold
times alone.

The file is a JSON object: ``schema``, ``package_version``, ``build``, ``device``, ``date`` (UTC),
``torch`` and ``entries``, a list of objects with ``rows`` (the last of the class), ``n``, ``k``,
``a_dtype``, ``w_dtype``, ``block_scales``; ``config``, ``default`` (the backend's choice) and
``median_us``: for both, microseconds by number of rows.
"""

import argparse
import datetime
import json
import os
import statistics
import time
import warnings
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from ._ops import add_op_namespace_prefix, ops
from .functional import FP8_DTYPES, SCALE_BLOCK, SKINNY_GEMM_MAX_ROWS, native_fp8_dtype
from .reference import dequantize

SCHEMA = "rocm-kernels tuning 1"
VARIABLE = "ROCM_KERNELS_TUNING"
CLASSES = (16, 32, 64)  # the last row of each
WORTH_IT = 0.99  # of the default's time: a win within the noise is none


@torch.library.register_fake(add_op_namespace_prefix("skinny_gemm_with_config"))
def _(out, a, w, scale_a, scale_w, bias, config):
    return None


class GemmShape(NamedTuple):
    """A product to tune: ``w [n, k]``, its dtypes, and whether its scales are of blocks."""

    n: int
    k: int
    a_dtype: torch.dtype
    w_dtype: torch.dtype
    block_scales: bool = False

    def __str__(self) -> str:
        dtypes = f"{_name(self.a_dtype)} x {_name(self.w_dtype)}"
        return f"N={self.n} K={self.k} {dtypes}{', block scales' if self.block_scales else ''}"


def skinny_gemm_config(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
) -> str:
    """The config that ``skinny_gemm(a, w, scale_a, scale_w)`` runs with, in words.

    Args:
        a: ``[M, K]``; w, scale_a, scale_w as in ``skinny_gemm``.

    Returns:
        On AMD the design and the cut, such as ``"stream rows=16 waves=4 split=2 blocks=0
        xcds=8 producers=0"``; on CUDA the kernel and its cut; on the CPU the instruction set.
    """
    return _configs(a, w, scale_a, scale_w, tuned=True)[0]


def candidates(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
) -> List[str]:
    """All configs worth timing for these operands; the backend's own choice comes first."""
    return _configs(a, w, scale_a, scale_w, tuned=False)


def skinny_gemm_with_config(
    config: str,
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor] = None,
    scale_w: Optional[torch.Tensor] = None,
    *,
    bias: Optional[torch.Tensor] = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``skinny_gemm`` with this config. RuntimeError when it cannot serve the operands.

    Args:
        config: as :func:`candidates` words it.
        a: ``[M, K]``; the others as in ``skinny_gemm``.
    """
    out = torch.empty((a.shape[0], w.shape[0]), dtype=out_dtype, device=a.device)
    ops.skinny_gemm_with_config(out, a, w, scale_a, scale_w, bias, config)
    return out


def shapes_of(model: nn.Module) -> List[GemmShape]:
    """The products of a model's FP8 linears, each once.

    Knows the linears of ``quantize_model_``, and transformers' finegrained and FBGEMM ones.
    """
    shapes: Dict[GemmShape, None] = {}
    for module in model.modules():
        weight = getattr(module, "weight", None)
        scale = getattr(module, "weight_scale_inv", getattr(module, "weight_scale", None))
        fp8 = isinstance(weight, torch.Tensor) and weight.dtype in FP8_DTYPES and weight.dim() == 2
        if not fp8 or scale is None or hasattr(module, "fused"):  # a part's weight is its fused's
            continue
        wide = getattr(module, "activation_scheme", "dynamic") == "none"
        a_dtype = torch.bfloat16 if wide else weight.dtype
        blocks = scale.dim() == 2 and scale.shape[1] > 1
        shapes[GemmShape(weight.shape[0], weight.shape[1], a_dtype, weight.dtype, blocks)] = None
    return list(shapes)


def tune_skinny_gemm(
    what: Union[nn.Module, Iterable[Union[GemmShape, Tuple[int, int]]]],
    *,
    rows: Sequence[int] = (1, 8, 16, 32),
    device: Optional[torch.device] = None,
    output: Union[str, "os.PathLike[str]", None] = None,
    progress: Callable[[str], None] = lambda line: None,
) -> Dict[str, Any]:
    """Times every config for some products, keeps the quickest and puts it in force.

    A candidate must first give results within the contract (at most twice the error of a float32
    product rounded once), on random data, for every number of rows. Times are medians of replays of
    a captured graph, over copies of the weight that no cache holds; the quickest four are timed
    again beside the default, and one wins only if it is at least 1 % quicker.

    Args:
        what: a model (see :func:`shapes_of`), or shapes; a pair ``(n, k)`` is FP8 x FP8 in the
            device's dialect.
        rows: numbers of rows to time; those of one class get one config, the one with the least
            mean of times relative to the default's.
        device: None: the model's; for shapes the current GPU, or the CPU without one.
        output: a file to write for :func:`load_tuning`.
        progress: gets a line for each result.

    Returns:
        What the file holds.

    Raises:
        ValueError: rows are beyond the kernel's, or the output cannot be written.
    """
    if device is None and isinstance(what, nn.Module):
        device = next(what.parameters()).device
    device = _default_device() if device is None else torch.device(device)
    if not rows or not all(1 <= count <= SKINNY_GEMM_MAX_ROWS for count in rows):
        raise ValueError(f"rows must be of 1 to {SKINNY_GEMM_MAX_ROWS}, got {tuple(rows)}")
    if output is not None:
        _require_writable(Path(output))
    shapes = shapes_of(what) if isinstance(what, nn.Module) else [_shape(s, device) for s in what]
    entries = []
    for shape in shapes:
        weights = _Weights(shape, device)
        for last in CLASSES:
            members = sorted({count for count in rows if _class(count) == last})
            if members:
                entries.append(_tune(shape, last, members, weights, progress))
    index = device.index
    if device.type == "cuda" and index is None:
        index = torch.cuda.current_device()
    document = {
        "schema": SCHEMA,
        "package_version": _package()["version"],
        "build": _package()["id"],
        "device": _device_name(device),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "torch": torch.__version__,
        "entries": entries,
    }
    for entry in entries:
        _set(-1 if index is None else index, entry, entry["config"])
    if output is not None:
        Path(output).write_text(json.dumps(document, indent=1) + "\n")
    return document


def load_tuning(path: Union[str, "os.PathLike[str]"]) -> int:
    """Puts the configs of a file into force, on every device of the file's kind.

    Args:
        path: a file that :func:`tune_skinny_gemm` wrote.

    Returns:
        How many products now run with another config than the backend's choice.

    Raises:
        ValueError: the file is of another device, package version or schema, or names a config that
            cannot be. Nothing of it is in force then.
    """
    return _install(_read(path), path)


def clear_tuning(document: Dict[str, Any]) -> None:
    """Gives the products of what :func:`tune_skinny_gemm` returned back to the backend's choice."""
    for index, _ in _devices():
        for entry in document["entries"]:
            _set(index, entry, "")


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """``python FOLDER``: see the module's text."""
    parser = argparse.ArgumentParser(
        description="Times skinny_gemm's configs on this device and writes the quickest to a file."
    )
    parser.add_argument("--shape", action="append", type=_pair, required=True, metavar="N,K")
    parser.add_argument("--rows", type=_numbers, default=[1, 8, 16, 32], metavar="M,M,...")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--operands", choices=sorted(_OPERANDS), default="fp8", help="dtypes of a and w"
    )
    parser.add_argument("--block-scales", action="store_true", help="128 x 128 blocks")
    parser.add_argument("--device", type=_device, help="the GPU of this build, or cpu")
    given = parser.parse_args(arguments)
    device = _default_device() if given.device is None else given.device
    dtypes = [native_fp8_dtype(device) if d is None else d for d in _OPERANDS[given.operands]]
    shapes = [GemmShape(n, k, dtypes[0], dtypes[1], given.block_scales) for n, k in given.shape]
    try:
        tune_skinny_gemm(
            shapes, rows=given.rows, device=device, output=given.output, progress=print
        )
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {given.output}; to use it, set {VARIABLE} to its path or call load_tuning")
    return 0


# ---- Configs ------------------------------------------------------------------------------------

_OPERANDS = {  # of a and w; None: FP8 of the device's dialect
    "fp8": (None, None),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "bfloat16-fp8": (torch.bfloat16, None),
    "float16-fp8": (torch.float16, None),
}


def _configs(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: Optional[torch.Tensor],
    scale_w: Optional[torch.Tensor],
    tuned: bool,
) -> List[str]:
    out = torch.empty((a.shape[0], w.shape[0]), dtype=torch.bfloat16, device=a.device)
    return ops.skinny_gemm_configs(out, a, w, scale_a, scale_w, tuned).splitlines()


def _set(device: int, entry: Dict[str, Any], config: str) -> None:
    """The backend's own choice needs no entry."""
    ops.tune_skinny_gemm(
        device, entry["rows"], entry["n"], entry["k"], entry["a_dtype"], entry["w_dtype"],
        entry["block_scales"], "" if config == entry["default"] else config,
    )  # fmt: skip


# ---- Files --------------------------------------------------------------------------------------


def _package() -> Dict[str, Any]:
    """``id``, ``version`` and ``backend`` of the built package."""
    return json.loads((Path(__file__).parent / "metadata.json").read_text())


def _devices() -> List[Tuple[int, str]]:
    """Index and name of each device that this build of the package runs on."""
    if _package()["backend"]["type"] == "cpu":
        return [(-1, _device_name(torch.device("cpu")))]
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [(device.index, _device_name(device)) for device in devices]


def _device_name(device: torch.device) -> str:
    """What makes two devices the same to a tuning file."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    units = properties.multi_processor_count
    if torch.version.hip is not None:
        return "{}, {} compute units".format(properties.gcnArchName.split(":")[0], units)
    return f"sm_{properties.major}{properties.minor}, {units} SMs"


def _read(path: Union[str, "os.PathLike[str]"]) -> Dict[str, Any]:
    """The file's object, its schema and version checked."""
    try:
        document = json.loads(Path(path).read_text())
        found = (document.get("schema"), document.get("package_version"))
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no tuning file: {error}") from None
    wanted = (SCHEMA, _package()["version"])
    if found != wanted:
        raise ValueError(
            f"{path} must have schema {wanted[0]!r} and package_version {wanted[1]}, got "
            f"{found[0]!r} and {found[1]}; run the tuner of this version"
        )
    return document


def _install(document: Dict[str, Any], path: Union[str, "os.PathLike[str]"]) -> int:
    devices = _devices()
    matching = [index for index, name in devices if name == document["device"]]
    if not matching:
        raise ValueError(
            f"{path} was tuned on {document['device']!r}, but here is "
            f"{sorted({name for _, name in devices})}; run the tuner on this machine"
        )
    done = []
    try:
        for index in matching:
            for entry in document["entries"]:
                _set(index, entry, entry["config"])
                done.append((index, entry))
    except (RuntimeError, KeyError, TypeError) as error:
        for index, entry in done:
            _set(index, entry, "")
        raise ValueError(f"{path} cannot be used: {error}; run the tuner again") from error
    return sum(entry["config"] != entry["default"] for entry in document["entries"])


def _load_from_environment() -> None:
    """What an import does: loads the file that ROCM_KERNELS_TUNING names, or warns why not."""
    path = os.environ.get(VARIABLE)
    if not path:
        return

    def install() -> None:
        try:
            load_tuning(path)
        except ValueError as error:
            warnings.warn(f"{VARIABLE}: {error}", RuntimeWarning, stacklevel=2)

    if _package()["backend"]["type"] == "cpu":
        install()
    else:
        # An import must not initialise the GPU: a process may fork after it.
        torch.cuda._lazy_call(install)


# ---- Timing -------------------------------------------------------------------------------------


class _Weights:
    """Random weights of a shape, and copies of them beyond what caches hold."""

    def __init__(self, shape: GemmShape, device: torch.device) -> None:
        self.shape, self.device = shape, device
        values = torch.randn(shape.n, shape.k, device=device, dtype=torch.bfloat16)
        self.w = values.to(shape.w_dtype)
        del values
        # The Infinity Cache of an MI300X holds 256 MB.
        rotated = (512 << 20) if device.type == "cuda" else (64 << 20)
        count = max(2, min(64, rotated // max(1, self.w.numel() * self.w.element_size()) + 1))
        self.copies = [self.w] + [self.w.clone() for _ in range(count - 1)]
        self.scale = self._scale(shape.n, SCALE_BLOCK) if shape.w_dtype in FP8_DTYPES else None

    def operands(self, rows: int) -> Tuple[torch.Tensor, Optional[torch.Tensor]]:
        """``a`` and its scale."""
        values = torch.randn(rows, self.shape.k, device=self.device, dtype=torch.bfloat16)
        a = values.to(self.shape.a_dtype)
        return a, (self._scale(rows, 1) if a.dtype in FP8_DTYPES else None)

    def _scale(self, rows: int, row_block: int) -> torch.Tensor:
        size = (rows, 1)
        if self.shape.block_scales:
            size = (-(-rows // row_block), -(-self.shape.k // SCALE_BLOCK))
        return torch.rand(size, device=self.device) + 0.5


def _tune(
    shape: GemmShape,
    last: int,
    members: List[int],
    weights: _Weights,
    progress: Callable[[str], None],
) -> Dict[str, Any]:
    """The entry of one class of rows."""
    operands = {rows: weights.operands(rows) for rows in members}
    first = operands[members[0]]
    configs = candidates(first[0], weights.w, first[1], weights.scale)
    default, tried, wrong = configs[0], {}, []
    for config in configs:
        if not all(_within_contract(config, *operands[rows], weights) for rows in members):
            if config == default:
                raise RuntimeError(f"{shape}: the default config '{config}' gives wrong results")
            wrong.append(config)
            continue
        tried[config] = _times(config, operands, weights, replays=5)

    def slowness(config: str) -> float:
        times = tried[config]
        return statistics.mean(times[rows] / tried[default][rows] for rows in members)

    best = sorted((config for config in tried if config != default), key=slowness)[:4]
    for config in [default, *best]:
        tried[config] = _times(config, operands, weights, replays=30)
    winner = min([default, *best], key=slowness)
    if slowness(winner) > WORTH_IT:
        winner = default
    times = {config: tried[config] for config in (winner, default)}
    for rows in members:
        progress(
            f"{shape} M={rows}: {times[winner][rows]:.2f} us with '{winner}', "
            f"{times[default][rows]:.2f} with '{default}'"
            f" ({len(configs)} candidate{'s' if len(configs) > 1 else ''})"
        )
    for config in wrong:
        progress(f"{shape}: '{config}' gives wrong results; please report it")
    return {
        "rows": last,
        "n": shape.n,
        "k": shape.k,
        "a_dtype": _name(shape.a_dtype),
        "w_dtype": _name(shape.w_dtype),
        "block_scales": shape.block_scales,
        "config": winner,
        "default": default,
        "median_us": {c: {str(m): round(t, 3) for m, t in by.items()} for c, by in times.items()},
    }


def _within_contract(
    config: str, a: torch.Tensor, scale_a: Optional[torch.Tensor], weights: _Weights
) -> bool:
    """Whether a config's float32 result errs at most twice as much as a float32 product."""
    out = torch.full((a.shape[0], weights.shape.n), torch.nan, device=a.device)
    ops.skinny_gemm_with_config(out, a, weights.w, scale_a, weights.scale, None, config)
    wide_a, step = dequantize(a, scale_a, 1), SCALE_BLOCK * 8
    error, baseline, largest = [], [], 0.0
    for begin in range(0, weights.shape.n, step):  # float64 of all of w might not fit
        scale = weights.scale
        if scale is not None:
            block = SCALE_BLOCK if weights.shape.block_scales else 1
            scale = scale[begin // block : (begin + step) // block]
        wide_w = dequantize(weights.w[begin : begin + step], scale, SCALE_BLOCK)
        exact = wide_a @ wide_w.t()
        plain = (wide_a.float() @ wide_w.float().t()).double()
        error.append((out[:, begin : begin + step] - exact).flatten())
        baseline.append((plain - exact).flatten())
        largest = max(largest, exact.abs().max().item())
    error, baseline = torch.cat(error), torch.cat(baseline)
    unit = largest * torch.finfo(torch.float32).eps / 2  # where float32 happens to be exact
    norms = [(error.abs().max(), baseline.abs().max(), unit)]
    norms += [(error.norm(), baseline.norm(), unit * error.numel() ** 0.5)]
    return all(bool(e <= 2 * b + u) for e, b, u in norms)  # False where an error is NaN


def _times(
    config: str,
    operands: Dict[int, Tuple[torch.Tensor, Optional[torch.Tensor]]],
    weights: _Weights,
    replays: int,
) -> Dict[int, float]:
    """Microseconds of a call by number of rows."""
    times = {}
    for rows, (a, scale_a) in operands.items():
        out = torch.empty((rows, weights.shape.n), dtype=torch.bfloat16, device=a.device)

        def call(w: torch.Tensor, a=a, scale_a=scale_a, out=out) -> None:
            ops.skinny_gemm_with_config(out, a, w, scale_a, weights.scale, None, config)

        times[rows] = _median_us(call, weights.copies, replays)
    return times


def _median_us(
    call: Callable[[torch.Tensor], None], inputs: List[torch.Tensor], replays: int
) -> float:
    """Median over the replays of the mean time of a call; a replay calls with each input."""
    if inputs[0].device.type != "cuda":
        times = []
        for _ in range(replays + 1):  # the first one warms up
            begin = time.perf_counter()
            for item in inputs:
                call(item)
            times.append((time.perf_counter() - begin) * 1e6 / len(inputs))
        return statistics.median(times[1:])
    with torch.cuda.device(inputs[0].device):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call(inputs[0])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for item in inputs:
                call(item)
        for _ in range(2):
            graph.replay()
        times = []
        for _ in range(replays):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / len(inputs))
    return statistics.median(times)


# ---- Arguments ----------------------------------------------------------------------------------


def _shape(shape: Union[GemmShape, Tuple[int, int]], device: torch.device) -> GemmShape:
    if isinstance(shape, GemmShape):
        return shape
    dtype = native_fp8_dtype(device)
    return GemmShape(shape[0], shape[1], dtype, dtype)


def _default_device() -> torch.device:
    return torch.device("cpu" if _package()["backend"]["type"] == "cpu" else "cuda")


def _class(rows: int) -> int:
    return next(last for last in CLASSES if rows <= last)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).rpartition(".")[2]


def _numbers(text: str) -> List[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers, got {text!r}") from None


def _device(text: str) -> torch.device:
    names = ["cpu"]
    if _package()["backend"]["type"] != "cpu":
        names = ["cuda", *(f"cuda:{index}" for index, _ in _devices())]
    if text not in names:
        raise argparse.ArgumentTypeError(f"this build runs on {', '.join(names)}, got {text!r}")
    return torch.device(text)


def _require_writable(path: Path) -> None:
    """Asked before the work, which takes minutes."""
    existed = path.exists()
    try:
        path.open("a").close()
    except OSError as error:
        raise ValueError(f"output cannot be written: {path}: {error.strerror}") from None
    if not existed:
        path.unlink()


def _pair(text: str) -> Tuple[int, int]:
    numbers = _numbers(text)
    if len(numbers) != 2 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be N,K with both at least 1, got {text!r}")
    return numbers[0], numbers[1]
