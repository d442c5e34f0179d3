"""A representative launch of every CUDA kernel design, to run under compute-sanitizer.

    compute-sanitizer --tool memcheck python tests/sanitized.py [--planted]

Every tensor is a cudaMalloc of its own, so what lies beside it is not mapped. The results are
compared with the reference. ``--planted`` reads 4 KB behind a tensor: memcheck has to say so.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from types import SimpleNamespace

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"

import kernels
import torch
from compare import assert_product_close, assert_quantized_close
from project import REPO_ID, ROOT
from test_moe import Experts, allowed_error, random_routing
from test_moe_every_config import configs_of, in_every_order

os.environ.setdefault("LOCAL_KERNELS", f"{REPO_ID}={ROOT}")

MODES = ({}, {"group_size": 128}, {"scale": 0.05})
# Whole vectors and odd tails; short rows, rows of one block, rows that a block passes twice.
ROW_SHAPES = [(1, 16384), (3, 770), (130, 512), (2, 40000)]
# (N, K): the ring with even and uneven shares of rows; beyond 16 tokens warpgroups, in a cluster,
# with K dealt, or neither; the stream for odd K, the plain kernel.
GEMM_SHAPES = [(2304, 1024), (8200, 384), (17501, 128), (200, 4096), (136, 1000), (33, 70)]
GEMM_ROWS = (1, 8, 16, 24, 32, 48, 64)


class Beyond:
    """4 KB more than a tensor has, by the interface through which arrays are shared."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.owner = tensor
        self.__cuda_array_interface__ = {
            "shape": (tensor.numel() + 1024,),
            "typestr": "<f4",
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }


def check_rows(package, _) -> None:
    reference, half = package.reference, {"device": "cuda", "dtype": torch.bfloat16}
    for rows, columns in ROW_SHAPES:
        for mode in MODES:
            mode = {k: torch.full((1,), v, device="cuda") if k == "scale" else v
                    for k, v in mode.items()}  # fmt: skip
            x, weight = torch.randn(rows, columns, **half), torch.randn(columns, **half)
            residuals = [x.flip(1).clone() for _ in range(2)]
            actual = package.rmsnorm_fp8(x, weight, residual=residuals[0], **mode)
            expected = reference.rmsnorm_fp8(x, weight, residual=residuals[1], **mode)
            assert_quantized_close(actual, expected)
            assert torch.equal(*residuals)
            assert_quantized_close(package.swiglu_fp8(x, **mode), reference.swiglu_fp8(x, **mode))
        package.rmsnorm(x, weight)
        package.swiglu(x)


def check_products(package, _) -> None:
    reference = package.reference
    for n, k in GEMM_SHAPES:
        w16 = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
        w, scale_w = reference.quantize_fp8(w16)
        for rows in GEMM_ROWS:
            x = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16)
            a, scale_a = reference.quantize_fp8(x)
            operands = reference.dequantize(a, scale_a, 1), reference.dequantize(w, scale_w, 128)
            out = package.skinny_gemm(a, w, scale_a, scale_w)
            assert_product_close(out, operands[0] @ operands[1].t(), operands)
            operands = x.double(), w16.double()
            out = package.skinny_gemm(x, w16)
            assert_product_close(out, operands[0] @ operands[1].t(), operands)
        blocks = torch.rand(-(-n // 128), -(-k // 128), device="cuda")
        groups = torch.rand(rows, -(-k // 128), device="cuda")
        package.skinny_gemm(a, w, groups, blocks)
        package.skinny_gemm(x, w, None, scale_w)


def one_of_each(configs: list[str], without: str | None) -> list[str]:
    """One config of each design and schedule: of those that differ in numbers alone the last.
    `without`: a design that is left out."""
    kept = [config for config in configs if without is None or not config.startswith(without)]
    return list({re.sub(r"\d+", "", config): config for config in kept}.values())


def check_gemm(package, without: str | None) -> None:
    """Every kernel of gemm, and every schedule of the tiled one."""
    ops = package.functional.ops
    for rows, n, k in ((70, 392, 1024), (300, 640, 2064), (130, 200, 333)):
        x, w16 = (torch.randn(count, k, device="cuda").bfloat16() for count in (rows, n))
        (a, scale_a), (w, scale_w) = map(package.reference.quantize_fp8, (x, w16))
        groups = torch.rand(rows, -(-k // 128), device="cuda")
        blocks = torch.rand(-(-n // 128), -(-k // 128), device="cuda")
        out = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
        for operands in (
            (a, w, scale_a, scale_w), (a, w, groups, blocks), (x, w16, None, None),
            (x, w, None, scale_w),
        ):  # fmt: skip
            configs = ops.gemm_configs(out, *operands, False).splitlines()
            for config in one_of_each(configs, without):
                out.fill_(torch.nan)
                ops.gemm(out, *operands, None, config)
                dequantize = package.reference.dequantize
                wide = (
                    dequantize(operands[0], operands[2], 1),
                    dequantize(operands[1], operands[3], 128),
                )
                assert_product_close(out, wide[0] @ wide[1].t(), wide)


def check_experts(package, without: str | None) -> None:
    """Every kernel of fused_moe, the sorting and the sums included, in every order of tiles."""
    fp8_dtype = package.native_fp8_dtype(torch.device("cuda"))
    maker = SimpleNamespace(device=torch.device("cuda"), fp8_dtype=fp8_dtype)
    for kind in "fp8-row", "fp8-block", "16-bit inputs", "bfloat16", "mxfp4":
        options = {"quantize_input": kind != "16-bit inputs"}
        narrow = kind.startswith("fp8")
        kind = "fp8-row" if kind == "16-bit inputs" else kind
        experts = Experts(kind, 9, 352, 192, torch.bfloat16, maker)
        experts.weights = [w.contiguous() for w in experts.weights]
        for tokens in (2, 24, 300):
            x = torch.randn(tokens, 352, device="cuda").bfloat16()
            weights, ids = random_routing(tokens, 7, 3, maker)
            ids[0] = torch.tensor([1, -1, 9])
            exact = package.reference.fused_moe(
                x, *experts.weights, weights, ids, **experts.scales, **options,
                out_dtype=torch.float32,
            )  # fmt: skip
            listed, run = configs_of(package, x, experts, weights, ids, **options)
            for config in (
                order for one in one_of_each(listed, without) for order in in_every_order(one)
            ):
                out = torch.full((tokens, 352), torch.nan, device="cuda")
                run(out, config)
                error = (out - exact).norm() / exact.norm()
                assert error <= allowed_error(narrow, tokens, out.device), (config, error)
    for tokens, count in (1, 8), (300, 512):
        package.topk_softmax(torch.randn(tokens, count, device="cuda"), 8)
        package.topk_sigmoid(torch.randn(tokens, count, device="cuda"), 4, groups=4, groups_kept=2)


CHECKS = {
    "rows": check_rows, "products": check_products, "gemm": check_gemm, "experts": check_experts,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=CHECKS, help="one part")
    parser.add_argument("--without", help="a design of configs that is left out")
    parser.add_argument("--planted", action="store_true", help="make a mistake, to be found")
    arguments = parser.parse_args()
    package = kernels.get_kernel(REPO_ID, version=1, backend="cuda")
    torch.manual_seed(0)
    if arguments.planted:
        # A whole allocation unit of the driver, so that what follows is not mapped.
        x = torch.as_tensor(Beyond(torch.zeros(1 << 19, device="cuda")))[-2048:]
        package.rmsnorm(x.view(1, -1), torch.ones(2048, device="cuda"))
    else:
        for name, check in CHECKS.items():
            if arguments.only in (None, name):
                check(package, arguments.without)
    torch.cuda.synchronize()
    print("done")
    return 0


if __name__ == "__main__":
    sys.exit(main())
