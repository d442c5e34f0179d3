"""Attention on the CPU: what its look-ups hold, and the tiles of few queries."""

import pytest
import torch
from test_attention import FP8, Case

pytestmark = pytest.mark.not_on("reference", "simulator", "cuda", "rocm")


@pytest.mark.parametrize("rows", [1, 3, 6, 20])
@pytest.mark.parametrize("kv_dtype", FP8)
def test_every_code_of_fp8(backend, kv_dtype, rows):
    """As the one value that there is, and as the one key, of which each query takes an element."""
    codes = torch.arange(256).to(torch.uint8).view(kv_dtype).expand(256, 1, 1, 256)
    q = torch.eye(256).bfloat16()[:, None, None].expand(-1, rows, 1, -1)
    plain = torch.where(codes.float().isnan(), 0, codes.float()).to(kv_dtype)
    run = lambda k, v: backend.ops.flash_attn_func(  # noqa: E731
        *(t.contiguous() for t in (q, k, v)), softmax_scale=1.0, return_lse=True
    )
    out, lse = run(plain, codes)
    expected = codes.bfloat16().expand(-1, rows, 1, -1)
    assert torch.equal(out.nan_to_num(7), expected.nan_to_num(7))
    assert torch.equal(lse[:, 0], plain[0, 0, 0].float()[:, None].expand(-1, rows))
    out, _ = run(codes, plain)
    assert out.isnan().all()


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 7, 9])
@pytest.mark.parametrize("heads, size", [(8, 128), (32, 64), (4, 256), (1, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_last_queries_of_wide_rows(backend, dtype, heads, size, rows):
    """Few keys are read at once where a row of all heads is wide, and a tile of one or two queries
    wants more of them than a tile of four: it took what lay beside them."""
    case = Case(backend, [600], rows=rows, heads=(heads, heads), size=size, dtype=dtype)
    case.check(*case.run())
