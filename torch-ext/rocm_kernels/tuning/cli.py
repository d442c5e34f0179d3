"""The tuner's command line: ``python FOLDER``."""

import argparse
from pathlib import Path
from typing import List, Optional, Sequence, Tuple

import torch

from ..functional import native_fp8_dtype
from .files import VARIABLE, device_names
from .products import GemmShape
from .tuner import tune_gemm

_OPERANDS = {  # of a and w; None: FP8 of the device's dialect
    "fp8": (None, None),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "float16": (torch.float16, torch.float16),
    "bfloat16-fp8": (torch.bfloat16, None),
    "float16-fp8": (torch.float16, None),
}


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """``python FOLDER``: see the module's text."""
    parser = argparse.ArgumentParser(
        description="Times a product's configs on this device and writes the quickest to a file."
    )
    parser.add_argument("--shape", action="append", type=_pair, required=True, metavar="N,K")
    parser.add_argument("--rows", type=_numbers, metavar="M,M,...")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--operands", choices=sorted(_OPERANDS), default="fp8", help="dtypes of a and w"
    )
    parser.add_argument("--block-scales", action="store_true", help="128 x 128 blocks")
    parser.add_argument("--device", type=_device, help="the GPU of this build, or cpu")
    given = parser.parse_args(arguments)
    device = torch.device(device_names()[0]) if given.device is None else given.device
    dtypes = [native_fp8_dtype(device) if d is None else d for d in _OPERANDS[given.operands]]
    shapes = [GemmShape(n, k, dtypes[0], dtypes[1], given.block_scales) for n, k in given.shape]
    try:
        rows = {} if given.rows is None else {"rows": given.rows}
        tune_gemm(shapes, device=device, output=given.output, progress=print, **rows)
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {given.output}; to use it, set {VARIABLE} to its path or call load_tuning")
    return 0


def _numbers(text: str) -> List[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be whole numbers, got {text!r}") from None


def _device(text: str) -> torch.device:
    names = device_names()
    if text not in names:
        raise argparse.ArgumentTypeError(f"this build runs on {', '.join(names)}, got {text!r}")
    return torch.device(text)


def _pair(text: str) -> Tuple[int, int]:
    numbers = _numbers(text)
    if len(numbers) != 2 or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be N,K with both at least 1, got {text!r}")
    return numbers[0], numbers[1]
