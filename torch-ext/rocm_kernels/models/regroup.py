"""Changes FP8 weights with scales of small blocks, such as MXFP8's, to the scales that products
take, where no value changes."""

from typing import Optional, Tuple

import torch

from ..functional import SCALE_BLOCK


def decoded(scale: torch.Tensor) -> torch.Tensor:
    """Scales in float32; uint8 are E8M0: exponents, biased by 127."""
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    return scale.detach().float()


def regrouped(
    weight: torch.Tensor, scale: torch.Tensor, block: Tuple[int, int]
) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    """Changes scales of other blocks, and keeps every value: to blocks of 128 x 128, ``[ceil(N /
    128), ceil(K / 128)]``, or to one for each row, ``[N, 1]``; None where FP8's range is too small
    for what scales of one block differ by.

    Args:
        weight: FP8, ``[N, K]``.
        scale: float32, ``[ceil(N / rows), ceil(K / columns)]`` of ``block``, rows and columns.
    """
    for rows, columns in ((SCALE_BLOCK, SCALE_BLOCK), (1, weight.shape[1])):
        parts = []
        for start in range(0, weight.shape[0], SCALE_BLOCK):
            stop = min(start + SCALE_BLOCK, weight.shape[0])
            values = weight[start:stop].double() * _spread(scale, block, start, stop, weight)
            parts.append(_requantized(values, rows, columns, weight.dtype))
            if parts[-1] is None:
                break
        else:
            weights, scales = zip(*parts)
            return torch.cat(weights), torch.cat(scales)
    return None


def _spread(
    scale: torch.Tensor, block: Tuple[int, int], start: int, stop: int, weight: torch.Tensor
) -> torch.Tensor:
    """Scales of rows ``start`` to ``stop`` of a weight, one for each value."""
    rows = torch.arange(start, stop, device=weight.device) // block[0]
    columns = torch.arange(weight.shape[1], device=weight.device) // block[1]
    return scale.double()[rows][:, columns]


def _requantized(
    values: torch.Tensor, rows: int, columns: int, dtype: torch.dtype
) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    n, k = values.shape
    padding = (0, -k % columns, 0, -n % rows)
    blocks = torch.nn.functional.pad(values, padding).unflatten(1, (-1, columns))
    blocks = blocks.unflatten(0, (-1, rows))  # [N / rows, rows, K / columns, columns]
    # The least power of two with which the largest value is no more than FP8's.
    mantissa, exponent = (blocks.abs().amax((1, 3)) / torch.finfo(dtype).max).frexp()
    scale = torch.ldexp(torch.ones_like(mantissa), exponent - (mantissa == 0.5).int())
    wanted = blocks / scale[:, None, :, None]
    q = wanted.to(torch.float32).to(dtype)
    if not torch.equal(q.double(), wanted):
        return None
    return q.flatten(2).flatten(0, 1)[:n, :k].contiguous(), scale.float()
