"""Whatever config gemm can run on this machine's best backend, at sizes that its tiles divide and
at such that they do not.

test_gemm.py has the cases of the config that is chosen, test_gemm_configs.py AMD's, simulated.
"""

import pytest
import torch
from compare import Guarded, assert_product_close
from test_skinny_gemm import random_scale

KINDS = ["tensor", "row", "block", "fp8 to float16", "blocks to float16", "bfloat16", "float16",
         "bfloat16 to float32", "weights alone", "weights alone, float16",
         "weights alone in blocks"]  # fmt: skip
FLOAT16, BFLOAT16 = torch.float16, torch.bfloat16


def operands_of(kind, m, n, k, fp8, device):
    """a, w, their scales and the type of out."""
    blocks = "block" in kind
    wide = FLOAT16 if kind in ("float16", "weights alone, float16") else BFLOAT16
    a, w = (torch.randn(rows, k, device=device) for rows in (m, n))
    if "float16" in kind and "to float16" not in kind and "weights" not in kind:
        return a.to(wide), w.to(wide), None, None, torch.float32 if "float32" in kind else wide
    scale = "tensor" if kind == "tensor" else "block" if blocks else "row"
    scale_w = random_scale(scale, n, k, device, 128)
    if kind.startswith("weights alone"):
        return a.to(wide), w.to(fp8), None, scale_w, wide
    out_dtype = FLOAT16 if "to float16" in kind else BFLOAT16
    return a.to(fp8), w.to(fp8), random_scale(scale, m, k, device, 1), scale_w, out_dtype


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "m, n, k",
    [
        (33, 136, 512),  # fewer rows than any tile
        (100, 264, 1168),  # K cuts a chunk
        (200, 392, 2048),  # the last tiles of M and N hold part of one
        (258, 1032, 640),  # a row or a column of vectors in the last
        (400, 97, 768),  # an out whose rows are not vectors
        (512, 512, 4096),  # whole tiles, little enough to be shared
    ],
)
def test_every_config(best_package, device, kind, m, n, k):
    a, w, scale_a, scale_w, dtype = operands_of(
        kind, m, n, k, best_package.native_fp8_dtype(device), device
    )
    bias = torch.randn(n, device=device)
    ops, dequantize = best_package.functional.ops, best_package.reference.dequantize
    wide = dequantize(a, scale_a, 1), dequantize(w, scale_w, 128)
    exact = wide[0] @ wide[1].t() + bias.double()
    listed = ops.gemm_configs(torch.empty_like(exact, dtype=dtype), a, w, scale_a, scale_w, False)
    for config in listed.splitlines():
        out, again = (Guarded(m, n, dtype, device) for _ in range(2))
        ops.gemm(out.view, a, w, scale_a, scale_w, bias, config)
        out.assert_guards_intact()
        ops.gemm(again.view, a, w, scale_a, scale_w, bias, config)
        assert torch.equal(out.view, again.view), f"{config}: not the same bits"
        try:
            assert_product_close(out.view, exact, wide)
        except AssertionError as error:
            raise AssertionError(f"{config}: {error}") from None
