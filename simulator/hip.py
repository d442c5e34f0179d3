"""The HIP runtime stand-in, for tests that call compiled launchers through ctypes."""

from __future__ import annotations

import ctypes
import functools
import json
import pathlib

from . import _build
from .api import Result, SimulatorError, _pointer, result_from
from .cycles import Machine


def runtime() -> pathlib.Path:
    """Path of the stand-in library; its folder belongs on LD_LIBRARY_PATH."""
    path = _build.build() / "libamdhip64.so.5"
    if not path.exists():
        raise SimulatorError(
            "the HIP headers were not found when the simulator was built: install "
            f"libamdhip64-dev or set ROCM_PATH, then remove {path.parent}"
        )
    return path


class Runtime:
    """The loaded stand-in: known buffers, options, and what the launches reported."""

    def __init__(self, library: ctypes.CDLL):
        self._library = library
        library.sim_register_buffer.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_char_p]
        library.sim_register_output.argtypes = library.sim_register_buffer.argtypes
        library.sim_unregister_buffer.argtypes = [ctypes.c_void_p]
        library.sim_set_options.argtypes = [ctypes.c_int, ctypes.c_uint64]
        library.sim_set_threads.argtypes = [ctypes.c_uint32]
        library.sim_set_cycles.argtypes = [ctypes.c_void_p]
        library.sim_launch_count.restype = ctypes.c_uint64
        library.sim_finding_count.restype = ctypes.c_uint64
        library.sim_finding_text.restype = ctypes.c_char_p
        library.sim_last_launch.restype = ctypes.c_char_p

    def register(self, buffer, output: bool = False, name: str = "a registered buffer") -> int:
        """Lets kernels touch a NumPy array or CPU tensor; returns its address.

        output: its contents are undefined, and reading them before a kernel wrote is a finding.
        """
        address, size = _pointer(buffer)
        call = self._library.sim_register_output if output else self._library.sim_register_buffer
        call(address, size, name.encode())
        return address

    def unregister(self, buffer) -> None:
        """Takes a buffer back; kernels that touch it from now on are out of bounds."""
        self._library.sim_unregister_buffer(_pointer(buffer)[0])

    def options(self, checks: bool = True, seed: int = 0) -> None:
        """Switches the adversarial modes and checkers, and picks the order of waves."""
        self._library.sim_set_options(checks, seed)

    def threads(self, count: int) -> None:
        """Host threads of every launch from now on; 0: one a core, as at first."""
        self._library.sim_set_threads(count)

    def cycles(self, machine: Machine | None) -> None:
        """Plays every launch from now on on `machine` too; None ends that."""
        played = machine.structure() if machine else None
        self._library.sim_set_cycles(ctypes.byref(played) if played else None)

    def last(self) -> Result:
        """What the last launch did. SimulatorError when there was none, or it stopped."""
        text = self._library.sim_last_launch()
        if not text:
            raise SimulatorError("no kernel was launched yet")
        return result_from(json.loads(text))

    @property
    def launches(self) -> int:
        """Launches since the library was loaded."""
        return self._library.sim_launch_count()

    @property
    def findings(self) -> int:
        """Findings of all launches since the last clear."""
        return self._library.sim_finding_count()

    def findings_text(self) -> str:
        """The same as JSON text, one array for each launch that had any."""
        return self._library.sim_finding_text().decode()

    def clear(self) -> None:
        """Forgets the findings so far, and the runtime's last error, as hipGetLastError does."""
        self._library.sim_clear_findings()
        self._library.hipGetLastError()


@functools.cache
def load_runtime() -> Runtime:
    """Loads the stand-in so that libraries opened later that are linked to it, or to its name,
    resolve HIP functions to it. Not for all of the process: its LLVM would take the place of that
    in Triton."""
    return Runtime(ctypes.CDLL(str(runtime())))
