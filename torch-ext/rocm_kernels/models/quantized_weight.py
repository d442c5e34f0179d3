"""Quantises weights by this package's own op, or by its definition where the op has no kernel."""

from typing import Optional, Tuple

import torch

from .. import functional, reference

# Of a weight that the definition quantises at a time: it holds several copies in float32.
_ELEMENTS = 2**20


def quantize_weight(
    weight: torch.Tensor, fp8_dtype: torch.dtype, *, scale: Optional[torch.Tensor] = None
) -> Tuple[torch.Tensor, torch.Tensor]:
    """``weight [N, K]``, float32 or 16-bit, in FP8 and its scales: ``[N, 1]`` float32, computed for
    each row, or ``scale [1]``. Op and definition give the same bits, but for NaN's sign."""
    weight = weight.detach()
    try:
        return functional.quantize_fp8(weight, scale=scale, fp8_dtype=fp8_dtype)
    except NotImplementedError:  # torch's: a CUDA build, and a model that is still on the CPU
        pass
    rows = max(_ELEMENTS // max(weight.shape[1], 1), 1)
    parts = [
        reference.quantize_fp8(part, scale=scale, fp8_dtype=fp8_dtype)
        for part in weight.split(rows)
    ]
    q, scales = zip(*parts)
    return torch.cat(q), torch.cat(scales) if scale is None else scale
