"""The functional API over launchers that are called through ctypes, without the torch extension.

The package's own functional API runs on top of ops registered here; each fills the launcher's
struct as the binding does and calls the C++ function by its mangled name. It serves where the
extension cannot be loaded: device code that runs in the simulator.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from types import ModuleType

import torch

ROOT = Path(__file__).resolve().parent.parent
DTYPES = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e4m3fnuz: 4,
}
ACTIVATIONS = {"identity": 0, "silu": 1, "gelu": 2, "gelu_tanh": 3}
SCALE_BLOCK = 128
Tensors = list[torch.Tensor]


class Context(ctypes.Structure):
    _fields_ = [("stream", c_void_p), ("parallel_for", c_void_p), ("num_threads", c_int32)]


class RmsNormFp8Args(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64),
        ("hidden", c_int64),
        ("x", c_void_p),
        ("x_stride", c_int64),
        ("residual", c_void_p),
        ("residual_stride", c_int64),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("static_scale", c_void_p),
        ("scales", c_void_p),
        ("eps", c_float),
        ("scale_ub", c_float),
        ("group_size", c_int32),
        ("x_dtype", c_int32),
        ("weight_dtype", c_int32),
        ("out_dtype", c_int32),
        ("scaling", c_int32),
    ]


class SwigluFp8Args(ctypes.Structure):
    _fields_ = [
        ("rows", c_int64),
        ("columns", c_int64),
        ("gate", c_void_p),
        ("gate_stride", c_int64),
        ("up", c_void_p),
        ("up_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("static_scale", c_void_p),
        ("scales", c_void_p),
        ("scale_ub", c_float),
        ("group_size", c_int32),
        ("in_dtype", c_int32),
        ("out_dtype", c_int32),
        ("scaling", c_int32),
        ("activation", c_int32),
    ]


class ScaleView(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("row_stride", c_int64),
        ("block_stride", c_int64),
        ("kind", c_int32),
    ]


class GemmArgs(ctypes.Structure):
    _fields_ = [
        ("m", c_int64),
        ("n", c_int64),
        ("k", c_int64),
        ("a", c_void_p),
        ("a_stride", c_int64),
        ("w", c_void_p),
        ("w_stride", c_int64),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("bias", c_void_p),
        ("scale_a", ScaleView),
        ("scale_w", ScaleView),
        ("a_dtype", c_int32),
        ("w_dtype", c_int32),
        ("out_dtype", c_int32),
        ("bias_dtype", c_int32),
        ("workspace", c_void_p),
        ("config", c_char_p),
    ]


class Launchers:
    """The launchers of a shared library; each call raises RuntimeError with the status it returns.

    Args:
        library: has the launchers' symbols.
        stream: gives the stream of a call.
        around: gets the tensors that a call only writes and those that it reads, and gives a
            context to make the call in.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        stream: Callable[[], int | None] = lambda: None,
        around: Callable[[Tensors, Tensors], AbstractContextManager] = (
            lambda written, read: nullcontext()
        ),
    ) -> None:
        self.library, self.stream, self.around = library, stream, around

    def launch(self, name: str, args: ctypes.Structure, written: list, read: list) -> None:
        """`written` and `read` hold the tensors that the struct points to; None is skipped."""
        struct = type(args).__name__
        symbol = f"_ZN12rocm_kernels{len(f'launch_{name}')}launch_{name}"
        symbol += f"ERKNS_{len(struct)}{struct}ERKNS_7ContextE"
        function = getattr(self.library, symbol)
        function.restype = ctypes.c_char_p
        context = Context(stream=self.stream(), num_threads=1)
        present = [[t for t in tensors if t is not None] for tensors in (written, read)]
        with self.around(*present):
            status = function(ctypes.byref(args), ctypes.byref(context))
        if status:
            raise RuntimeError(f"{name}: {status.decode()}")

    def rms_norm_fp8(self, out, scales, x, residual, weight, scale, eps, group_size, scale_ub):
        if x.numel() == 0:
            return _fill_empty(scales)
        args = RmsNormFp8Args(
            rows=x.shape[0], hidden=x.shape[1], x=x.data_ptr(), x_stride=x.stride(0),
            residual=_pointer(residual),
            residual_stride=0 if residual is None else residual.stride(0),
            weight=weight.data_ptr(), out=out.data_ptr(), out_stride=out.stride(0),
            static_scale=_pointer(scale), scales=_pointer(scales), eps=eps, scale_ub=scale_ub,
            group_size=group_size, x_dtype=DTYPES[x.dtype], weight_dtype=DTYPES[weight.dtype],
            out_dtype=DTYPES[out.dtype], scaling=_scaling(scale, scales, group_size),
        )  # fmt: skip
        self.launch("rms_norm_fp8", args, [out, scales], [x, residual, weight, scale])

    def swiglu_fp8(self, out, scales, gate, up, scale, activation, group_size, scale_ub):
        if gate.numel() == 0:
            return _fill_empty(scales)
        args = SwigluFp8Args(
            rows=gate.shape[0], columns=gate.shape[1], gate=gate.data_ptr(),
            gate_stride=gate.stride(0), up=_pointer(up),
            up_stride=0 if up is None else up.stride(0), out=out.data_ptr(),
            out_stride=out.stride(0), static_scale=_pointer(scale), scales=_pointer(scales),
            scale_ub=scale_ub, group_size=group_size, in_dtype=DTYPES[gate.dtype],
            out_dtype=DTYPES[out.dtype], scaling=_scaling(scale, scales, group_size),
            activation=ACTIVATIONS[activation],
        )  # fmt: skip
        self.launch("swiglu_fp8", args, [out, scales], [gate, up, scale])

    def skinny_gemm(self, out, a, w, scale_a, scale_w, bias):
        args = GemmArgs(
            m=a.shape[0], n=w.shape[0], k=a.shape[1], a=a.data_ptr(), a_stride=a.stride(0),
            w=w.data_ptr(), w_stride=w.stride(0), out=out.data_ptr(), out_stride=out.stride(0),
            bias=_pointer(bias), scale_a=_gemm_scale(scale_a, a.shape[0], 1, a.shape[1]),
            scale_w=_gemm_scale(scale_w, w.shape[0], SCALE_BLOCK, a.shape[1]),
            a_dtype=DTYPES[a.dtype], w_dtype=DTYPES[w.dtype], out_dtype=DTYPES[out.dtype],
            bias_dtype=DTYPES[out.dtype if bias is None else bias.dtype],
        )  # fmt: skip
        symbol = "_ZN12rocm_kernels27skinny_gemm_workspace_bytesERKNS_14GemmArgsERKNS_7ContextE"
        size = getattr(self.library, symbol)
        size.restype = c_int64
        context = Context(stream=self.stream(), num_threads=1)
        count = size(ctypes.byref(args), ctypes.byref(context))
        # Undefined contents are random here, not unwritten: the tickets of the AMD kernels live on
        # memory that nobody zeroed, and are read as they are.
        workspace = torch.randint(256, (count + 256,), dtype=torch.uint8, device=a.device)
        args.workspace = (workspace.data_ptr() + 255) // 256 * 256
        self.launch("skinny_gemm", args, [out], [workspace, a, w, scale_a, scale_w, bias])


def _pointer(tensor: torch.Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _fill_empty(scales: torch.Tensor | None) -> None:
    if scales is not None:
        scales.fill_(torch.finfo(torch.float32).tiny)


def _scaling(scale, scales, group_size: int) -> int:
    if scale is not None:
        return 1
    return 0 if scales is None else 3 if group_size else 2


def _gemm_scale(scale: torch.Tensor | None, rows: int, block: int, k: int) -> ScaleView:
    if scale is None:
        return ScaleView()
    if scale.numel() == 1:
        return ScaleView(data=scale.data_ptr(), kind=1)
    if scale.shape[0] == rows and (scale.dim() == 1 or scale.shape[1] == 1):
        return ScaleView(data=scale.data_ptr(), row_stride=scale.stride(0), kind=2)
    assert scale.shape == (-(-rows // block), -(-k // SCALE_BLOCK)), scale.shape
    return ScaleView(scale.data_ptr(), scale.stride(0), scale.stride(1), 3)


SCHEMAS = (
    "rms_norm_fp8(Tensor(a!) out, Tensor(b!)? scales, Tensor x, Tensor(c!)? residual, "
    "Tensor weight, Tensor? scale, float eps, int group_size, float scale_ub) -> ()",
    "swiglu_fp8(Tensor(a!) out, Tensor(b!)? scales, Tensor gate, Tensor? up, Tensor? scale, "
    "str activation, int group_size, float scale_ub) -> ()",
    "skinny_gemm(Tensor(a!) out, Tensor a, Tensor w, Tensor? scale_a, Tensor? scale_w, "
    "Tensor? bias) -> ()",
)


def functional_api(name: str, launchers: Launchers, native_fp8_dtype: torch.dtype) -> ModuleType:
    """The package's functional module over `launchers`, registered with torch under `name`."""
    definitions = torch.library.Library(name, "DEF")
    for schema in SCHEMAS:
        op = schema.partition("(")[0]
        definitions.define(schema)
        definitions.impl(op, getattr(launchers, op), "CompositeExplicitAutograd")

    package, ops = types.ModuleType(name), types.ModuleType(f"{name}._ops")
    package.__path__ = [str(ROOT / "torch-ext" / "rocm_kernels")]
    ops.ops = getattr(torch.ops, name)
    ops.add_op_namespace_prefix = lambda op: f"{name}::{op}"
    sys.modules |= {name: package, ops.__name__: ops}
    functional = importlib.import_module(f"{name}.functional")
    for module in (functional, functional.fp8):
        module.native_fp8_dtype = lambda device: native_fp8_dtype
    functional.library = definitions  # ops go with their library
    return functional
