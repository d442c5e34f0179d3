"""Checksums of the ops' outputs over a seeded grid of shapes and modes: what a change of structure
must leave as it is, to the bit.

    python tests/checksums.py --device cpu,simulator > before.txt      # then the change, and again
    python tests/checksums.py --device cuda --root ../old-checkout

One line an op and mode: the SHA-256 of all its outputs. They hold for one version of torch, one
device and one instruction set (ROCM_KERNELS_CPU_ISA).
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ROWS = (1, 3, 33, 130)
WIDTHS = (64, 333, 576, 4096, 16384)
SCALINGS = ("static", "token", "group")
PRODUCT_ROWS = (1, 2, 8, 9, 16, 17, 32, 33, 64)
PRODUCT_SHAPES = ((48, 256), (130, 640), (100, 333), (576, 1536), (2304, 4096))
MANY_ROWS = (65, 130, 300)
EXPERTS = ((8, 256, 128, 2), (32, 512, 384, 4))  # experts, hidden, intermediate, slots a token
TOKENS = (1, 7, 40, 300)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--device", default="cpu", help="of cpu, simulator, cuda, rocm")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    return parser.parse_args()


def load_ops(name: str, root: Path):
    """The functional API, the tensors' device and the device's FP8 dialect."""
    if name == "simulator":
        sys.path[:0] = [str(root / "tests"), str(root / "tools"), str(root)]
        import simulated

        return simulated.functional(), torch.device("cpu"), simulated.NATIVE
    import kernels

    device = torch.device("cpu" if name == "cpu" else "cuda")
    # On a GPU the client finds the variant by itself; older ones take no backend.
    chosen = {"backend": "cpu"} if name == "cpu" else {}
    package = kernels.get_local_kernel(root / "build", **chosen)
    return package, device, package.native_fp8_dtype(device)


class Data:
    """Zero-centred tensors, the same in every run."""

    def __init__(self, device: torch.device, fp8: torch.dtype) -> None:
        self.device, self.fp8 = device, fp8

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        generator = torch.Generator().manual_seed(hash(shape) % 2**31)
        values = torch.randn(*shape, generator=generator)
        if dtype.itemsize == 1:
            values = values * 8
        return values.to(dtype).to(self.device)

    def scale(self, *shape: int) -> torch.Tensor:
        return (self(*shape).abs() + 0.1) * 0.01


def quantising(data: Data, scaling: str) -> dict:
    if scaling == "static":
        return {"scale": data.scale(1)}
    return {"group_size": 128} if scaling == "group" else {}


def row_ops(ops, data: Data, widths) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for rows, width, dtype in itertools.product(ROWS, widths, FLOATS):
        x, weight = data(rows, width, dtype=dtype), data(width, dtype=dtype)
        for with_residual in (False, True):
            residual = data(rows, width + 1, dtype=dtype)[:, 1:] if with_residual else None
            y = ops.rmsnorm(x, weight, residual=residual)
            yield "rmsnorm", [y, residual if with_residual else y]
            for scaling in SCALINGS:
                q = ops.rmsnorm_fp8(x, weight, residual=residual, **quantising(data, scaling))
                yield f"rmsnorm_fp8 {scaling}", list(q)
        both = data(rows, 2 * width, dtype=dtype)
        for activation in ("silu", "gelu", "gelu_tanh"):
            yield f"swiglu {activation}", [ops.swiglu(both, activation=activation)]
        for scaling in SCALINGS:
            yield f"swiglu_fp8 {scaling}", list(ops.swiglu_fp8(both, **quantising(data, scaling)))
            yield f"quantize_fp8 {scaling}", list(ops.quantize_fp8(x, **quantising(data, scaling)))


def product_scales(data: Data, m: int, n: int, k: int) -> dict[str, tuple]:
    blocks = -(-k // 128)
    return {
        "tensor": (data.scale(1), data.scale(1)),
        "row": (data.scale(m, 1), data.scale(n, 1)),
        "block": (data.scale(m, blocks), data.scale(-(-n // 128), blocks)),
        "row x block": (data.scale(m, 1), data.scale(-(-n // 128), blocks)),
    }


def products(ops, data: Data, shapes) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for (n, k), m in itertools.product(shapes, PRODUCT_ROWS):
        bias = data(n, dtype=torch.bfloat16) if m % 2 else None
        a, w = data(m, k, dtype=data.fp8), data(n, k, dtype=data.fp8)
        for name, (scale_a, scale_w) in product_scales(data, m, n, k).items():
            out = ops.skinny_gemm(a, w, scale_a, scale_w, bias=bias)
            yield f"skinny_gemm fp8 {name}", [out]
        for dtype in (torch.float16, torch.bfloat16):
            wide = data(m, k, dtype=dtype)
            name = str(dtype).removeprefix("torch.")
            out = ops.skinny_gemm(wide, data(n, k, dtype=dtype), out_dtype=torch.float32)
            yield f"skinny_gemm {name}", [out]
            out = ops.skinny_gemm(wide, w, None, data.scale(n, 1))
            yield f"skinny_gemm {name} x fp8", [out]
    for (n, k), m in itertools.product(shapes, MANY_ROWS):
        x, w = data(m, k, dtype=torch.bfloat16), data(n, k, dtype=data.fp8)
        for name, (_, scale_w) in product_scales(data, m, n, k).items():
            yield f"fp8_linear {name}", [ops.fp8_linear(x, w, scale_w)]


def experts(ops, data: Data, shapes, tokens) -> Iterator[tuple[str, list[torch.Tensor]]]:
    for (n, h, i, k), t in itertools.product(shapes, tokens):
        weights, ids = ops.topk_softmax(data(t, n), k)
        yield "topk_softmax", [weights, ids]
        bias = data(n) * 0.1
        routed = ops.topk_sigmoid(data(t, n), k, bias=bias, groups=4, groups_kept=2, scale=2.5)
        yield "topk_sigmoid", list(routed)
        x = data(t, h, dtype=torch.bfloat16)
        gate_up, down = data(n, 2 * i, h, dtype=data.fp8), data(n, h, i, dtype=data.fp8)
        scales = {
            "row": (data.scale(n, 2 * i, 1), data.scale(n, h, 1)),
            "block": (data.scale(n, 2 * i // 128, h // 128), data.scale(n, h // 128, i // 128)),
        }
        counts = torch.bincount(ids.flatten().cpu().long(), minlength=n)
        offsets = counts.cumsum(0, dtype=torch.int32).to(x.device)
        rows = data(t * k, h, dtype=data.fp8)
        for name, (scale_gate_up, scale_down) in scales.items():
            for quantize in (True, False):
                out = ops.fused_moe(
                    x, gate_up, down, weights, ids, scale_gate_up=scale_gate_up,
                    scale_down=scale_down, quantize_input=quantize,
                )  # fmt: skip
                yield f"fused_moe {name}{'' if quantize else ', 16-bit x'}", [out]
            width = h // 128 if name == "block" else 1
            scale_a = data.scale(t * k, width)
            out = ops.grouped_gemm(rows, gate_up, offsets, scale_a, scale_gate_up)
            yield f"grouped_gemm {name}", [out]
        wide = (data(n, 2 * i, h, dtype=torch.bfloat16), data(n, h, i, dtype=torch.bfloat16))
        yield "fused_moe bfloat16", [ops.fused_moe(x, *wide, weights, ids)]


def main() -> None:
    arguments = parse_arguments()
    for name in arguments.device.split(","):
        ops, device, fp8 = load_ops(name, arguments.root.resolve())
        data, small = Data(device, fp8), name == "simulator"
        digests: dict[str, hashlib._Hash] = {}
        cases = itertools.chain(
            row_ops(ops, data, WIDTHS[:3] if small else WIDTHS),
            products(ops, data, PRODUCT_SHAPES[:3] if small else PRODUCT_SHAPES),
            experts(ops, data, EXPERTS[:1] if small else EXPERTS, TOKENS[:3] if small else TOKENS),
        )
        for case, outputs in cases:
            digest = digests.setdefault(case, hashlib.sha256())
            for output in outputs:
                digest.update(output.contiguous().view(torch.uint8).cpu().numpy().tobytes())
        for case, digest in digests.items():
            print(f"{name:9}  {case:32}  {digest.hexdigest()[:32]}")


if __name__ == "__main__":
    main()
