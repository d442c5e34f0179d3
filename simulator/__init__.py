"""Runs code objects for gfx942, gfx950 and gfx90a on the CPU, and judges them.

kernel = simulator.load("kernel.co")
result = kernel.launch("name", grid=8, block=256, args=[out, x, 5])
result.counters, result.findings, result.time
"""

from .api import CodeObject, Finding, Out, Result, SimulatorError, load, result_from
from .compiling import compile_file
from .cycles import Cycles, Machine, machine_for
from .hip import Runtime, load_runtime, runtime
from .page import html_page
from .timing import Time, modelled_time
from .together import Call, launch_together
from .trace import chrome_trace

__version__ = "1.0.0"

__all__ = [
    "Call",
    "CodeObject",
    "Cycles",
    "Finding",
    "Machine",
    "Out",
    "Result",
    "Runtime",
    "SimulatorError",
    "Time",
    "chrome_trace",
    "compile_file",
    "html_page",
    "launch_together",
    "load",
    "load_runtime",
    "machine_for",
    "modelled_time",
    "result_from",
    "runtime",
]
