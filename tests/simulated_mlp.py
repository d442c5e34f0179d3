"""decode_mlp on the simulator: its launcher, called with tensors. It is no op of the package."""

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


@functools.cache
def _library() -> ctypes.CDLL:
    launchers, toolchain = build_launchers(), rocm.find_toolchain()
    folder = launchers.parent / "devices"
    folder.mkdir(exist_ok=True)
    compiled, library = folder / "decode_mlp.o", folder / "decode_mlp.so"
    fnuz = f"-DFNUZ={int(TARGET == 'gfx942')}"
    source = ROOT / "tests" / "devices" / "decode_mlp.hip"
    subprocess.run(
        toolchain.compile_command(source, compiled, (TARGET,), extra=(fnuz,)), check=True
    )
    linked = [str(compiled), str(launchers), str(simulator.runtime())]
    paths = [f"-Wl,-rpath,{launchers.parent}"]
    command = [toolchain.compiler, "--hip-link", "-shared", *linked, *paths, "-o", str(library)]
    subprocess.run(command, check=True)
    simulator.load_runtime()
    loaded = ctypes.CDLL(str(library))
    loaded.decode_mlp.restype = ctypes.c_char_p
    loaded.decode_mlp_workspace.restype = ctypes.c_int64
    return loaded


@dataclass
class Mlp:
    """Its weights, with one scale each or a scale a row."""

    norm: torch.Tensor
    gate_up: torch.Tensor
    scale_gate_up: torch.Tensor
    down: torch.Tensor
    scale_down: torch.Tensor
    eps: float = 1e-5
    weight_offset: float = 0.0

    def state(self) -> torch.Tensor:
        """What launches keep from one to the next."""
        return aligned_bytes(STATE_BYTES).zero_()

    def launch(
        self, x: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, state: torch.Tensor,
        seed: int | None = None,
    ) -> None:  # fmt: skip
        """Raises RuntimeError with what the launcher says. Workspace and out are poisoned by the
        checker: what nobody wrote may not be read."""
        library = _library()
        hidden, intermediate = self.down.shape
        workspace = aligned_bytes(library.decode_mlp_workspace(ctypes.c_int64(intermediate)))
        workspace.random_(256)
        read = [x, residual, self.norm, self.gate_up, self.scale_gate_up, self.down,
                self.scale_down, state]  # fmt: skip
        written = [workspace] + ([] if out is residual else [out])

        def at(tensor: torch.Tensor) -> ctypes.c_void_p:
            return ctypes.c_void_p(tensor.data_ptr())

        with checked(written, read, seed):
            said = library.decode_mlp(
                ctypes.c_int64(hidden), ctypes.c_int64(intermediate), at(x), at(residual), at(out),
                at(self.norm), ctypes.c_float(self.eps), ctypes.c_float(self.weight_offset),
                at(self.gate_up), at(self.scale_gate_up), at(self.down), at(self.scale_down),
                int(self.scale_down.numel() > 1), int(x.dtype == torch.bfloat16), at(workspace),
                at(state),
            )  # fmt: skip
        if said is not None:
            raise RuntimeError(said.decode())


def aligned_bytes(count: int) -> torch.Tensor:
    storage = torch.empty(count + 128, dtype=torch.uint8)
    begin = -storage.data_ptr() % 128
    return storage[begin : begin + count]


def random_mlp(
    hidden: int, intermediate: int, dtype: torch.dtype, scale_a_row: bool, **options: float
) -> Mlp:
    def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        w = (torch.randn(rows, columns) * 30).to(NATIVE)
        scale = torch.rand(rows if scale_a_row else 1) + 0.5
        return w, scale / (30 * columns**0.5)

    gate_up, down = weight(2 * intermediate, hidden), weight(hidden, intermediate)
    return Mlp(torch.randn(hidden).to(dtype), *gate_up, *down, **options)
