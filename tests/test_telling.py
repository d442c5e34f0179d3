"""A function that tells how a call would run runs no kernel for it: what the call would convert or
compute, it describes by tensors without values."""

import json
import re

import pytest
import torch
from no_kernels import NoKernels
from project import ROOT

TELLING = re.compile(r"_(configs?|candidates|path)$")


def rows_apart(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose rows no view folds, and whose neighbours in a row are not side by side."""
    return torch.randn(*shape[:-1], 2 * shape[-1]).to(dtype).transpose(0, -2)[..., ::2]


def products() -> list[tuple]:
    fp8 = torch.float8_e4m3fn
    w = torch.randn(256, 384).to(fp8)
    exponents = torch.full((2, 3), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    return [
        (rows_apart(3, 5, 384, dtype=fp8), w, torch.rand(3, 5, 1).transpose(0, 1), None),
        (rows_apart(3, 5, 384, dtype=fp8), w, rows_apart(3, 5, 3, dtype=torch.float32), exponents),
        (torch.randn(384, 9).bfloat16().t(), w, None, torch.rand(256)),
    ]


def tell_gemm(package) -> None:
    for a, w, scale_a, scale_w in products():
        rows = a.reshape(-1, a.shape[-1])
        flat = None if scale_a is None else scale_a.reshape(len(rows), -1)
        with NoKernels():
            told = package.gemm_config(a, w, scale_a, scale_w)
        assert told == package.gemm_config(rows.contiguous(), w, flat, scale_w)


def tell_candidates(package) -> None:
    for a, w, scale_a, scale_w in products():
        with NoKernels():
            assert package.tuning.gemm_candidates(a, w, scale_a, scale_w)


def tell_fp8_linear(package) -> None:
    for _, w, scale_a, scale_w in products()[:2]:
        scale_w = torch.rand(1) if scale_w is None else scale_w
        with NoKernels():
            package.fp8_linear_path(1000, w, scale_w, scale_a)


def tell_attention(package, name: str = "attention_config") -> None:
    q, k, v = (torch.randn(64, h, 7).bfloat16().transpose(0, 2) for h in (4, 2, 2))
    starts = torch.tensor([0, 3, 7])
    with NoKernels():
        getattr(package, name)(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=4, max_seqlen_k=4
        )
    cache = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
    table, q = torch.zeros(2, 2, dtype=torch.int64).t(), torch.randn(2, 1, 4, 64).bfloat16()
    with NoKernels():
        getattr(package, name)(q, cache, cache, block_table=table)


def tell_attention_configs(package) -> None:
    tell_attention(package, "attention_configs")


def tell_append(package) -> None:
    cache, new = torch.zeros(2, 16, 2, 64), torch.randn(2, 1, 2, 64)
    with NoKernels():
        package.kvcache_append_path(cache, cache, new, new)


CASES = {
    "attention_config": tell_attention,
    "attention_configs": tell_attention_configs,
    "fp8_linear_path": tell_fp8_linear,
    "gemm_config": tell_gemm,
    "kvcache_append_path": tell_append,
    "gemm_candidates": tell_candidates,
}
ELSEWHERE = {"linear_all_reduce_config"}  # test_comm.py: it takes a group
RUNNING = {"gemm_with_config"}


def public_names(tree: dict) -> set[str]:
    found = set()
    for name, what in tree.items():
        found |= public_names(what) if isinstance(what, dict) else {name}
    return found


def test_all_functions_that_tell_are_here():
    api = json.loads((ROOT / "tools/public_api.json").read_text())
    found = {name for name in public_names(api) if TELLING.search(name)}
    assert found == {*CASES} | ELSEWHERE | RUNNING


@pytest.mark.parametrize("name", CASES)
def test_telling_runs_no_kernel(package, name):
    CASES[name](package)
