"""decode_layers on the simulator: its launcher, called with tensors."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from dataclasses import dataclass

import torch
from project import ROOT
from simulated import NATIVE, TARGET, build_launchers, checked, rocm

import simulator

STATE_BYTES = 4096
OF_A_LAYER = [
    "o", "scale_o", "norm", "gate_up", "scale_gate_up", "down", "scale_down", "next_norm",
    "qkv", "scale_qkv", "k_cache", "v_cache", "k_scale", "v_scale",
    "q_norm", "k_norm", "qkv_bias",
]  # fmt: skip
POINTERS = [
    "layers", "attention_qkv", "cos", "sin", "position", "attended", "x", "residual", "out", "qkv",
    "workspace", "state",
]  # fmt: skip


class LayerCall(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in OF_A_LAYER]


class Call(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("count", "hidden", "intermediate", "attended_columns",
                                              "qkv_columns", "row_stride", "head_stride")),
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("eps", ctypes.c_float), ("weight_offset", ctypes.c_float),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("scales_of_rows", "is_bfloat16", "heads", "kv_heads",
                                              "fp8_caches", "k_scale_stride", "v_scale_stride")),
    ]  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    launchers, toolchain = build_launchers(), rocm.find_toolchain()
    folder = launchers.parent / "devices"
    folder.mkdir(exist_ok=True)
    compiled, library = folder / "decode_layers.o", folder / "decode_layers.so"
    fnuz = f"-DFNUZ={int(TARGET == 'gfx942')}"
    source = ROOT / "tests" / "devices" / "decode_layers.hip"
    command = toolchain.compile_command(source, compiled, (TARGET,), extra=(fnuz,))
    subprocess.run(command, check=True)
    linked = [str(compiled), str(launchers), str(simulator.runtime())]
    paths = [f"-Wl,-rpath,{launchers.parent}"]
    command = [toolchain.compiler, "--hip-link", "-shared", *linked, *paths, "-o", str(library)]
    subprocess.run(command, check=True)
    simulator.load_runtime()
    loaded = ctypes.CDLL(str(library))
    loaded.decode_layers.restype = loaded.decode_layers_recorded.restype = ctypes.c_char_p
    loaded.decode_layers_workspace.restype = ctypes.c_int64
    return loaded


@dataclass
class Weight:
    """FP8, with a scale for all or a scale a row."""

    w: torch.Tensor
    scale: torch.Tensor


@dataclass
class Attention:
    """Of one token: cosines and sines of its place, which is how many rows the caches have."""

    cos: torch.Tensor
    sin: torch.Tensor
    position: torch.Tensor
    heads: int


@dataclass
class Layer:
    """A layer from its attention to the next one's qkv; without o and qkv, its MLP. Caches are
    ``[rows, KV heads, 128]``, in FP8 of scales of one element or a head."""

    norm: torch.Tensor
    gate_up: Weight
    down: Weight
    o: Weight | None = None
    next_norm: torch.Tensor | None = None
    qkv: Weight | None = None
    k_cache: torch.Tensor | None = None
    v_cache: torch.Tensor | None = None
    k_scale: torch.Tensor | None = None
    v_scale: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # weights of norms of heads
    k_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None


@dataclass
class Stack:
    layers: list[Layer]
    attention: Attention | None = None
    eps: float = 1e-5
    weight_offset: float = 0.0

    def state(self) -> torch.Tensor:
        """What launches keep from one to the next."""
        return aligned_bytes(STATE_BYTES).zero_()

    def launch(
        self, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, state: torch.Tensor,
        qkv: torch.Tensor | None = None, seed: int | None = None, recorded: bool = False,
    ) -> None:  # fmt: skip
        """x: the attention's qkv; without one, what it gave, where there is an o. ``recorded``: by
        a graph. Raises RuntimeError with what the launcher says. What nobody wrote of workspace,
        out and qkv may not be read."""
        first = self.layers[0]
        call = Call(len(self.layers), first.down.w.shape[0], first.down.w.shape[1], eps=self.eps,
                    weight_offset=self.weight_offset,
                    scales_of_rows=first.down.scale.numel() > 1,
                    is_bfloat16=x.dtype == torch.bfloat16)  # fmt: skip
        written = [] if out is residual else [out]
        read = [residual, state]
        calls = (LayerCall * len(self.layers))()
        for layer, of_layer in zip(self.layers, calls, strict=True):
            for name in ("o", "gate_up", "down", "qkv"):
                if (weight := getattr(layer, name)) is not None:
                    setattr(of_layer, name, weight.w.data_ptr())
                    setattr(of_layer, f"scale_{name}", weight.scale.data_ptr())
                    read += [weight.w, weight.scale]
            for name in OF_A_LAYER:
                if name.removeprefix("scale_") in ("o", "gate_up", "down", "qkv"):
                    continue
                if (tensor := getattr(layer, name)) is not None:
                    setattr(of_layer, name, tensor.data_ptr())
                    read.append(tensor)
        call.layers = ctypes.addressof(calls)

        def put(name: str, tensor: torch.Tensor) -> None:
            setattr(call, name, tensor.data_ptr())

        put("residual", residual)
        put("out", out)
        put("state", state)
        if first.o is not None:
            call.attended_columns = first.o.w.shape[1]
        if self.attention is not None:
            a = self.attention
            call.heads, call.kv_heads = a.heads, first.k_cache.shape[1]
            call.row_stride, call.head_stride = first.k_cache.stride()[:2]
            call.fp8_caches = first.k_cache.dtype == NATIVE
            for name in ("k_scale", "v_scale"):
                if (scale := getattr(first, name)) is not None:
                    setattr(call, f"{name}_stride", int(scale.numel() > 1))
            call.scale = 128**-0.5
            for name in ("cos", "sin", "position"):
                put(name, getattr(a, name))
                read.append(getattr(a, name))
            put("attention_qkv", x)
        else:
            put("x" if first.o is None else "attended", x)
        if first.qkv is not None:
            call.qkv_columns = first.qkv.w.shape[0]
            put("qkv", qkv)
        read.append(x)
        written += [] if qkv is None or qkv is x else [qkv]
        library = _library()
        workspace = aligned_bytes(library.decode_layers_workspace(ctypes.byref(call)))
        put("workspace", workspace.random_(256))
        with checked([workspace, *written], read, seed):
            launch = library.decode_layers_recorded if recorded else library.decode_layers
            said = launch(ctypes.byref(call))
        if said is not None:
            raise RuntimeError(said.decode())


def aligned_bytes(count: int) -> torch.Tensor:
    storage = torch.empty(count + 128, dtype=torch.uint8)
    begin = -storage.data_ptr() % 128
    return storage[begin : begin + count]


def random_weight(rows: int, columns: int, scale_a_row: bool) -> Weight:
    w = (torch.randn(rows, columns) * 30).to(NATIVE)
    return Weight(w, (torch.rand(rows if scale_a_row else 1) + 0.5) / (30 * columns**0.5))


def random_stack(
    hidden: int, intermediate: int, dtype: torch.dtype, scale_a_row: bool = True,
    attended: int = 0, qkv: int = 0, layers: int = 1, **options: float,
) -> Stack:  # fmt: skip
    def random_layer(has_qkv: bool) -> Layer:
        layer = Layer(
            torch.randn(hidden).to(dtype),
            random_weight(2 * intermediate, hidden, scale_a_row),
            random_weight(hidden, intermediate, scale_a_row),
        )
        if attended:
            layer.o = random_weight(hidden, attended, scale_a_row)
        if has_qkv:
            layer.next_norm = torch.randn(hidden).to(dtype)
            layer.qkv = random_weight(qkv, hidden, scale_a_row)
        return layer

    return Stack([random_layer(qkv > 0) for _ in range(layers)], **options)
