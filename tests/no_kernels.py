"""A mode in which nothing computes, and a case of comm_ranks.py in it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from comm_ranks import Here


class NoKernels(TorchDispatchMode):
    """Refuses every op but those that allocate, view or tell."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        name = op.overloadpacket.__name__
        allowed = op.is_view or "empty" in name or name.endswith(("_configs", "_limits"))
        assert allowed, f"{op} runs for an answer"
        return op(*args, **(kwargs or {}))


def telling(here: Here, ranks: int) -> None:
    """linear_all_reduce_config of all kinds of operands, the library's product among them."""
    communicator = here.shared(ranks)
    if communicator is None:
        return
    quantize, tell = here.package.quantize_fp8, communicator.linear_all_reduce_config
    x = torch.randn(5, 2, 512, device=here.device).bfloat16().transpose(0, 1)
    w, scale = quantize(torch.randn(4096, 512, device=here.device))
    blocks = w[:, ::2].contiguous(), torch.rand(32, 2, device=here.device)
    one, of_rows = torch.ones(1, device=here.device), torch.rand(5, 2, 1, device=here.device)
    for operands, options in (
        ((x, w, scale), {"out_dtype": torch.float16}),
        ((x, w, scale), {"scale_fmt": "ue8m0"}),
        ((x, w, scale), {"scale_x": one}),
        ((quantize(x)[0], w, scale), {"scale_x": of_rows.transpose(0, 1)}),
        ((x[..., ::2], *blocks), {}),
    ):
        with NoKernels():
            assert tell(*operands, **options) in ("sent", "apart")
    product = importlib.import_module(f"{here.package.__name__}.functional.product")
    path, product.fp8_linear_path = product.fp8_linear_path, lambda *_, **__: "scaled_mm"
    with NoKernels():
        assert tell(x, w, scale) == "apart"
    product.fp8_linear_path = path
