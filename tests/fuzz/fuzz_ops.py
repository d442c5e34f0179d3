"""Feeds the registered ops with tensors of random shapes, strides, dtypes and aliasing.

    python tests/fuzz/fuzz_ops.py --seconds 60 --seed 1
    python tests/fuzz/fuzz_ops.py --case 123456        # one case again

Many cases are wrong in some way. An op must either raise and leave every byte of every tensor as it
was, or give what the reference gives, whatever the tensors share, and write nothing else.
`run.py` runs this with a build that AddressSanitizer and UBSan watch.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import kernels
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from compare import assert_close

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
OTHERS = (torch.float64, torch.int8, torch.int64, torch.uint8, torch.float8_e5m2, torch.bool)
COLUMNS = (0, 1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 300, 513)
ROWS = (0, 1, 1, 2, 3, 4, 5, 7, 8, 16, 17, 63, 64, 65, 130)
POISON = 0x5A


@dataclass
class Case:
    """The tensors of one call, each a view of one of a few byte buffers."""

    random: random.Random
    wrong: float  # how likely each choice is an odd one
    buffers: list[torch.Tensor]

    def odd(self) -> bool:
        return self.random.random() < self.wrong

    def dtype(self, usual: tuple[torch.dtype, ...]) -> torch.dtype:
        return self.random.choice((*OTHERS, *FP8, *FLOATS) if self.odd() else usual)

    def matrix(
        self, rows: int, columns: int, dtype: torch.dtype, fill: bool = True
    ) -> torch.Tensor:
        if self.odd():
            rows = max(rows + self.random.choice((-1, 0, 1)), 0)
            columns = max(columns + self.random.choice((-1, 1)), 0)
        layouts = ("plain", "plain", "padded", "shifted")
        if self.odd():
            layouts = ("transposed", "expanded", "cube", "vector", "stepped")
        layout = self.random.choice(layouts)
        size = torch.empty(0, dtype=dtype).element_size()
        step = 2 if layout == "stepped" else 1
        stride = columns * step + (self.random.choice((1, 3, 16)) if layout == "padded" else 0)
        offset = 0 if layout == "plain" else self.random.choice((0, 1, 2, 5))
        needed = offset + max(rows, 1) * max(stride, 1) + 8  # elements
        buffer = None
        if self.buffers and self.odd():
            # A view of another tensor's memory, at any place of it.
            buffer = self.random.choice(self.buffers)
            offset += (place := self.random.randint(0, 64))
            if buffer.numel() // 8 * 8 < (needed + place) * size:
                buffer = None
        if buffer is None:
            bytes_needed = (offset + needed) * size // 8 * 8 + 64
            buffer = torch.full((bytes_needed,), POISON, dtype=torch.uint8)
            self.buffers.append(buffer)
        flat = buffer[: buffer.numel() // 8 * 8].view(dtype)
        view = flat.as_strided((rows, columns), (stride, step), offset)
        if fill and view.numel():
            self.fill(view)
        if layout == "transposed":
            return view.t()
        if layout == "expanded" and rows:
            return view[:1].expand(rows, columns)
        if layout == "cube":
            return view.unsqueeze(0)
        if layout == "vector" and rows:
            return view[0]
        return view

    def vector(self, length: int, dtype: torch.dtype, fill: bool = True) -> torch.Tensor:
        matrix = self.matrix(1, length, dtype, fill)
        return matrix[0] if matrix.dim() == 2 and matrix.shape[0] else matrix

    def fill(self, view: torch.Tensor) -> None:
        values = torch.randn(view.shape, generator=self.generator())
        special = self.random.random()
        if special < 0.1:
            values.view(-1)[:: max(values.numel() // 3, 1)] = self.random.choice(
                (math.nan, math.inf, -math.inf, 0.0, 3e38, 1e-40)
            )
        elif special < 0.15:
            values.zero_()
        if view.dtype in (torch.int8, torch.int64, torch.uint8, torch.bool):
            values = values.nan_to_num(0, 0, 0).clamp(0, 1)
        view.copy_(values.to(view.dtype))

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.random.getrandbits(32))

    def scale(self, *shapes: tuple[int, ...]) -> torch.Tensor:
        shape = self.random.choice(shapes)
        if self.odd():
            shape = self.random.choice(((), (1,), (2,), (0,), (1, 1, 1), (3, 2), shape[::-1]))
        dtype = self.random.choice((torch.float16, torch.float64)) if self.odd() else torch.float32
        values = torch.rand(shape, generator=self.generator(), dtype=torch.float32) + 0.01
        if len(shape) == 2 and self.random.random() < 0.2:
            return values.to(dtype).t().contiguous().t()
        return values.to(dtype)


def quantization(case: Case, rows: int, columns: int, in_dtype: torch.dtype, out: torch.Tensor):
    """Scales for a call, as (scales, scale, group_size, scale_ub, ue8m0)."""
    mode = case.random.choice(("none", "token", "group", "static"))
    if (out.dtype in FP8) == (mode == "none") and not case.odd():
        mode = case.random.choice(("token", "group", "static")) if out.dtype in FP8 else "none"
    group = 128 if mode == "group" else 0
    group = case.random.choice((-1, 1, 64, 127, 1 << 40)) if case.odd() else group
    scales = scale = None
    if mode in ("token", "group") or case.odd():
        count = -(-columns // 128) if mode == "group" else 1
        scales = case.matrix(rows, count, torch.float32, fill=False)
    if mode == "static" or case.odd():
        scale = case.scale((1,), (1, 1), ())
    bound = case.random.choice((0.0, 0.0, 0.5, 1200.0, -1.0 if case.odd() else 0.0))
    ue8m0 = case.random.random() < 0.3 and (scales is not None or case.odd())
    return scales, scale, group, bound, ue8m0


def reference_quantization(scales, scale, group, bound, ue8m0, out) -> dict:
    return {
        "scale": scale,
        "group_size": group or None,
        "scale_ub": bound or None,
        "scale_fmt": "ue8m0" if ue8m0 else None,
        "fp8_dtype": out.dtype,
    }


def fuzz_rmsnorm(case: Case, ops, reference) -> tuple:
    rows, hidden = case.random.choice(ROWS), case.random.choice(COLUMNS)
    dtype = case.dtype(FLOATS)
    x = case.matrix(rows, hidden, dtype)
    weight = case.vector(hidden, case.dtype((dtype, torch.float32)))
    residual, addend = None, None
    if case.random.random() < 0.5:
        residual = case.matrix(rows, hidden, case.dtype((dtype,)))
    if (residual is not None and case.random.random() < 0.5) or case.odd():
        addend = case.matrix(rows, hidden, case.dtype((dtype,)))
    out = case.matrix(rows, hidden, case.dtype((dtype, *FP8)), fill=False)
    scales, scale, group, bound, ue8m0 = quantization(case, rows, hidden, dtype, out)
    eps = case.random.choice((1e-6, 1e-5, 0.0 if case.odd() else 1e-6))
    offset = case.random.choice((0.0, 1.0))

    def call():
        ops.rmsnorm_fp8(
            out, scales, x, residual, weight, scale, eps, group, bound, ue8m0, offset, addend
        )  # fmt: skip

    def expect(copy):
        h = copy(residual)
        added = h if addend is None else copy(addend)
        options = {"weight_offset": offset, "residual_out": h}
        if out.dtype in FP8:
            quantizing = reference_quantization(copy(scales), copy(scale), group, bound, ue8m0, out)
            result = reference.rmsnorm_fp8(
                copy(x), copy(weight), eps, added, **options, **quantizing
            )
        else:
            result = reference.rmsnorm(copy(x), copy(weight), eps, added, **options), None
        return [
            (out, result[0]),
            (scales, result[1] if scales is not None else None),
            (residual, h),
        ]

    return call, expect, (out, scales, residual), (x, weight, scale, addend)


def fuzz_swiglu(case: Case, ops, reference) -> tuple:
    rows, columns = case.random.choice(ROWS), case.random.choice(COLUMNS)
    dtype = case.dtype(FLOATS)
    gate = case.matrix(rows, columns, dtype)
    up = case.matrix(rows, columns, case.dtype((dtype,))) if case.random.random() < 0.7 else None
    names = ("silu", "gelu", "gelu_tanh") if up is not None else ("identity",)
    activation = case.random.choice(("relu", "", "SILU", "identity") if case.odd() else names)
    out = case.matrix(rows, columns, case.dtype((dtype, *FP8)), fill=False)
    scales, scale, group, bound, ue8m0 = quantization(case, rows, columns, dtype, out)

    def call():
        ops.swiglu_fp8(out, scales, gate, up, scale, activation, group, bound, ue8m0)

    def expect(copy):
        if (activation == "identity") != (up is None):
            return None  # allowed at the op, never asked for by the API
        options = reference_quantization(copy(scales), copy(scale), group, bound, ue8m0, out)
        if up is None:
            if out.dtype not in FP8:
                return [(out, copy(gate).clone())]
            result = reference.quantize_fp8(copy(gate), **options)
        elif out.dtype in FP8:
            result = reference.swiglu_fp8(copy(gate), copy(up), activation=activation, **options)
        else:
            result = reference.swiglu(copy(gate), copy(up), activation=activation), None
        return [(out, result[0]), (scales, result[1] if scales is not None else None)]

    return call, expect, (out, scales), (gate, up, scale)


def fuzz_gemm(case: Case, ops, reference) -> tuple:
    m, n, k = (case.random.choice(choices) for choices in (ROWS, COLUMNS, COLUMNS))
    if case.random.random() < 0.5:
        m = min(m, 64)
    wide, narrow = case.random.choice(FLOATS[1:]), case.random.choice(FP8)
    kind = case.random.choice(("fp8", "weight only", "16-bit"))
    a = case.matrix(m, k, case.dtype((narrow if kind == "fp8" else wide,)))
    w = case.matrix(n, k, case.dtype((wide if kind == "16-bit" else narrow,)))
    out = case.matrix(m, n, case.dtype(FLOATS), fill=False)
    blocks = -(-k // 128)
    scale_a = scale_w = bias = None
    if kind == "fp8" or case.odd():
        scale_a = case.scale((1,), (m, 1), (m, blocks))
    if kind != "16-bit" or case.odd():
        scale_w = case.scale((1,), (n,), (n, 1), (-(-n // 128), blocks))
    if case.random.random() < 0.4:
        bias = case.vector(n, case.dtype((out.dtype, torch.float32)))

    def call():
        ops.gemm(out, a, w, scale_a, scale_w, bias)

    def expect(copy):
        operands = [copy(tensor) for tensor in (a, w, scale_a, scale_w)]
        x = reference.dequantize(operands[0], operands[2], 1)
        y = reference.dequantize(operands[1], operands[3], 128)
        exact = x.double() @ y.double().t()
        largest = x.double().abs() @ y.double().abs().t()
        if bias is not None:
            exact, largest = exact + copy(bias).double(), largest + copy(bias).double().abs()
        if not largest.numel() or not float(largest.max()) < 0.9 * torch.finfo(out.dtype).max:
            return None  # what overflows when is the sum's affair; that nothing else moves is not
        unscaled = operands[0].double().abs() @ operands[1].double().abs().t()
        if not float(unscaled.max()) < 1e38:
            return None
        # Where the CPU has VDPBF16PS, it takes bfloat16 subnormals for zero.
        lost = subnormals(operands[0]) @ y.double().abs().t()
        lost += x.double().abs() @ subnormals(operands[1]).t()
        return [(out, (exact, largest, lost))]

    return call, expect, (out,), (a, w, scale_a, scale_w, bias)


def subnormals(operand: torch.Tensor) -> torch.Tensor:
    """The sizes of a bfloat16 operand's subnormal values, zero elsewhere."""
    sizes = operand.double().abs()
    kept = (sizes < torch.finfo(torch.bfloat16).tiny) & (operand.dtype == torch.bfloat16)
    return sizes.where(kept, torch.zeros_like(sizes))


def footprint(tensor: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Which bytes of a buffer a view covers."""
    covered = torch.zeros(buffer.numel(), dtype=torch.bool)
    if tensor is None or tensor.untyped_storage().data_ptr() != buffer.untyped_storage().data_ptr():
        return covered
    size = tensor.element_size()
    flat = covered[: buffer.numel() // 8 * 8].view(-1, size)
    if tensor.numel():
        flat.as_strided(
            (*tensor.shape, size),
            (*(s * size for s in tensor.stride()), 1),
            tensor.storage_offset() * size,
        ).fill_(True)
    return covered


def compare(actual: torch.Tensor, expected) -> None:
    if isinstance(expected, tuple):
        exact, largest, lost = expected
        # float32 sums in any order, then one rounding.
        allowed = 8 * torch.finfo(torch.float32).eps * largest + lost + 1e-30
        allowed += torch.finfo(actual.dtype).eps * exact.abs() + torch.finfo(actual.dtype).tiny
        worst = ((actual.double() - exact).abs() - allowed).max() if exact.numel() else -1
        assert worst <= 0, f"beyond the error bound by {float(worst):.3g}"
    else:
        # erf's and tanh's tails cancel.
        assert_close(actual, expected.reshape(actual.shape), rtol=2e-5, atol=1e-6)


def run_case(seed: int, package, tell: bool = False) -> str:
    """Returns "raised" or "right".

    Raises:
        AssertionError: the op did neither.
    """
    source = random.Random(seed)
    case = Case(source, source.choice((0.0, 0.0, 0.03, 0.1)), [])
    make = source.choice((fuzz_rmsnorm, fuzz_swiglu, fuzz_gemm))
    call, expect, written, read = make(case, package.functional.ops, package.reference)
    tensors = [t for t in (*written, *read) if t is not None]
    if tell:
        for t in tensors:
            print(t.dtype, tuple(t.shape), t.stride(), hex(t.data_ptr()))
    before = [buffer.clone() for buffer in case.buffers]
    copies = {id(t): t.clone() for t in tensors}

    try:
        call()
    except (RuntimeError, ValueError) as error:
        message = str(error)
        assert re.search(r" must | takes | are for | is for ", message), message
        for buffer, old in zip(case.buffers, before, strict=True):
            assert torch.equal(buffer, old), f"written although refused: {message}"
        return "raised"
    for buffer, old in zip(case.buffers, before, strict=True):
        allowed = torch.zeros(buffer.numel(), dtype=torch.bool)
        for tensor in written:
            allowed |= footprint(tensor, buffer)
        assert not ((buffer != old) & ~allowed).any(), "written outside of the outputs"
    expected = expect(lambda t: None if t is None else copies[id(t)].clone())
    for tensor, result in expected or []:
        if tensor is not None and result is not None:
            compare(tensor, result)
    return "right"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="run this one case")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent.parent
    os.environ.setdefault("LOCAL_KERNELS", f"org/rocm-kernels={root}")
    package = kernels.get_kernel("org/rocm-kernels", version=1, backend="cpu")
    if arguments.case is not None:
        print(run_case(arguments.case, package, tell=True))
        return 0
    seeds = random.Random(arguments.seed)
    counts = {"raised": 0, "right": 0}
    failures = 0
    end = time.monotonic() + arguments.seconds
    while time.monotonic() < end and failures < 20:
        seed = seeds.getrandbits(48)
        try:
            counts[run_case(seed, package)] += 1
        except Exception as error:
            failures += 1
            print(f"case {seed}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
    print(f"{counts['right']} right, {counts['raised']} refused, {failures} wrong")
    return 1 if failures or not all(counts.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
