"""decode_layer on the simulator: its launcher, called with tensors. It is no op of the package."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from dataclasses import dataclass

import torch
from project import ROOT
from simulated import NATIVE, TARGET, build_launchers, checked, rocm

import simulator

STATE_BYTES = 2048
POINTERS = [
    "attention_qkv", "k_cache", "v_cache", "cos", "sin", "position",
    "attended", "o", "scale_o", "x", "residual", "norm", "gate_up", "scale_gate_up", "down",
    "scale_down", "out", "next_norm", "qkv_weight", "scale_qkv", "qkv", "workspace", "state",
]  # fmt: skip


class Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("hidden", "intermediate", "attended_columns",
                                              "qkv_columns", "row_stride", "head_stride")),
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("eps", ctypes.c_float), ("weight_offset", ctypes.c_float),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("scales_of_rows", "is_bfloat16", "heads",
                                              "kv_heads")),
    ]  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    launchers, toolchain = build_launchers(), rocm.find_toolchain()
    folder = launchers.parent / "devices"
    folder.mkdir(exist_ok=True)
    compiled, library = folder / "decode_layer.o", folder / "decode_layer.so"
    fnuz = f"-DFNUZ={int(TARGET == 'gfx942')}"
    source = ROOT / "tests" / "devices" / "decode_layer.hip"
    command = toolchain.compile_command(source, compiled, (TARGET,), extra=(fnuz,))
    subprocess.run(command, check=True)
    linked = [str(compiled), str(launchers), str(simulator.runtime())]
    paths = [f"-Wl,-rpath,{launchers.parent}"]
    command = [toolchain.compiler, "--hip-link", "-shared", *linked, *paths, "-o", str(library)]
    subprocess.run(command, check=True)
    simulator.load_runtime()
    loaded = ctypes.CDLL(str(library))
    loaded.decode_layer.restype = ctypes.c_char_p
    loaded.decode_layer_workspace.restype = ctypes.c_int64
    return loaded


@dataclass
class Weight:
    """FP8, with a scale for all or a scale a row."""

    w: torch.Tensor
    scale: torch.Tensor


@dataclass
class Attention:
    """Of one token: caches ``[rows, KV heads, 128]``, cosines and sines of its place."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    position: torch.Tensor
    heads: int


@dataclass
class Layer:
    """A layer from its attention to the next one's qkv; without o and qkv, its MLP."""

    norm: torch.Tensor
    gate_up: Weight
    down: Weight
    o: Weight | None = None
    next_norm: torch.Tensor | None = None
    qkv: Weight | None = None
    attention: Attention | None = None
    eps: float = 1e-5
    weight_offset: float = 0.0

    def state(self) -> torch.Tensor:
        """What launches keep from one to the next."""
        return aligned_bytes(STATE_BYTES).zero_()

    def launch(
        self, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, state: torch.Tensor,
        qkv: torch.Tensor | None = None, seed: int | None = None,
    ) -> None:  # fmt: skip
        """x: the attention's qkv; without one, what it gave, where there is an o. Raises
        RuntimeError with what the launcher says. What nobody wrote of workspace and out may not be
        read."""
        call = Call(self.down.w.shape[0], self.down.w.shape[1], eps=self.eps,
                    weight_offset=self.weight_offset,
                    scales_of_rows=self.down.scale.numel() > 1,
                    is_bfloat16=x.dtype == torch.bfloat16)  # fmt: skip
        written, read = [] if out is residual else [out], []

        def put(name: str, tensor: torch.Tensor) -> None:
            setattr(call, name, tensor.data_ptr())
            if name not in ("out", "qkv", "workspace"):
                read.append(tensor)

        def put_weight(name: str, scale: str, weight: Weight) -> None:
            put(name, weight.w)
            put(scale, weight.scale)

        put("residual", residual)
        put("out", out)
        put("norm", self.norm)
        put("state", state)
        if self.attention is not None:
            a = self.attention
            call.heads, call.kv_heads = a.heads, a.k_cache.shape[1]
            call.row_stride, call.head_stride = a.k_cache.stride()[:2]
            call.scale = 128**-0.5
            for name in ("k_cache", "v_cache", "cos", "sin", "position"):
                put(name, getattr(a, name))
            put("attention_qkv", x)
        else:
            put("x" if self.o is None else "attended", x)
        put_weight("gate_up", "scale_gate_up", self.gate_up)
        put_weight("down", "scale_down", self.down)
        if self.o is not None:
            call.attended_columns = self.o.w.shape[1]
            put_weight("o", "scale_o", self.o)
        if self.qkv is not None:
            call.qkv_columns = self.qkv.w.shape[0]
            put_weight("qkv_weight", "scale_qkv", self.qkv)
            put("next_norm", self.next_norm)
            put("qkv", qkv)
            written.append(qkv)
        library = _library()
        workspace = aligned_bytes(library.decode_layer_workspace(ctypes.byref(call)))
        put("workspace", workspace.random_(256))
        with checked([workspace, *written], read, seed):
            said = library.decode_layer(ctypes.byref(call))
        if said is not None:
            raise RuntimeError(said.decode())


def aligned_bytes(count: int) -> torch.Tensor:
    storage = torch.empty(count + 128, dtype=torch.uint8)
    begin = -storage.data_ptr() % 128
    return storage[begin : begin + count]


def random_weight(rows: int, columns: int, scale_a_row: bool) -> Weight:
    w = (torch.randn(rows, columns) * 30).to(NATIVE)
    return Weight(w, (torch.rand(rows if scale_a_row else 1) + 0.5) / (30 * columns**0.5))


def random_layer(
    hidden: int, intermediate: int, dtype: torch.dtype, scale_a_row: bool = True,
    attended: int = 0, qkv: int = 0, **options: float,
) -> Layer:  # fmt: skip
    layer = Layer(
        torch.randn(hidden).to(dtype),
        random_weight(2 * intermediate, hidden, scale_a_row),
        random_weight(hidden, intermediate, scale_a_row),
        **options,
    )
    if attended:
        layer.o = random_weight(hidden, attended, scale_a_row)
    if qkv:
        layer.next_norm = torch.randn(hidden).to(dtype)
        layer.qkv = random_weight(qkv, hidden, scale_a_row)
    return layer
