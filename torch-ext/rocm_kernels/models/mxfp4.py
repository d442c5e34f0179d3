"""Encodes 16-bit weights as MXFP4 if they were dequantised from it, without a change in value."""

from typing import Optional, Tuple

import torch

BLOCK = 32  # elements of K that share a scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7; 8 to 15 are negative


def encode_mxfp4(w: torch.Tensor) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    """``w [E, N, K]`` as MXFP4, if every value of it is one: then it was dequantised from there.

    Returns:
        ``(codes [E, N, K / 2] uint8, scales [E, N, K / 32] uint8)``, or None. A scale need not be
        the one that the checkpoint had, for 3 * 2^0 is 6 * 2^-1 too; the values are the same.
    """
    if w.shape[2] % BLOCK or w.device.type == "meta":
        return None
    # Other weights fail at the first row: an expert's float32 copies would take longer than FP8.
    if w.numel() and _encode(w[0, :1]) is None:
        return None
    codes = w.new_empty(*w.shape[:2], w.shape[2] // 2, dtype=torch.uint8)
    scales = w.new_empty(*w.shape[:2], w.shape[2] // BLOCK, dtype=torch.uint8)
    for expert in range(w.shape[0]):
        encoded = _encode(w[expert])
        if encoded is None:
            return None
        codes[expert], scales[expert] = encoded
    return codes, scales


def _encode(w: torch.Tensor) -> Optional[Tuple[torch.Tensor, torch.Tensor]]:
    blocks = w.float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    # The greatest magnitude of a block lies in [4, 8) * 2^exponent: it must be 4 or 6 of these.
    exponents = torch.frexp(amax).exponent.int() - 3
    exponents = torch.where(amax == 0, 0, exponents)
    if not amax.isfinite().all() or exponents.min() < -127 or exponents.max() > 127:
        return None
    values = torch.ldexp(blocks, -exponents[..., None])
    magnitudes = torch.tensor(_MAGNITUDES, dtype=values.dtype, device=w.device)
    found = torch.searchsorted(magnitudes, values.abs().contiguous()).clamp(max=7)
    if not torch.equal(magnitudes[found], values.abs()):
        return None
    codes = (found + 8 * (values < 0)).to(torch.uint8).flatten(-2)
    return codes[..., ::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)
