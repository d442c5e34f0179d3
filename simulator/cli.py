"""`cdna-simulator` or `python -m simulator`: runs and profiles kernels from the shell."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys

import numpy as np

from . import __version__, hip
from .api import Out, Result, SimulatorError, load
from .compiling import compile_file
from .cycles import cycles_text, machine_for
from .page import html_page
from .trace import chrome_trace

_SCALARS = {"i8": np.int8, "u8": np.uint8, "i16": np.int16, "u16": np.uint16, "i32": np.int32,
            "u32": np.uint32, "i64": np.int64, "u64": np.uint64, "f16": np.float16,
            "f32": np.float32, "f64": np.float64}  # fmt: skip
_POISON = 0xD1
_TRACED = 4  # compute units in a trace: more of them look the same
_FORMS = "i32:5, f32:1.5, in:FILE.npy, inout:FILE.npy or out:FILE.npy:SHAPE:DTYPE"


class _Arguments:
    """Kernel arguments of the command line, and the files to write when the kernel has run."""

    def __init__(self, texts: list[str]):
        self.values: list = []
        self._files: list[tuple[str, np.ndarray]] = []
        for text in texts:
            self.values.append(self._parse(text))

    def _parse(self, text: str):
        kind, _, rest = text.partition(":")
        if not rest:
            raise ValueError(f"argument '{text}': required {_FORMS}")
        if kind in _SCALARS:
            dtype = _SCALARS[kind]
            return dtype(float(rest) if kind.startswith("f") else int(rest, 0))
        if kind == "in":
            return np.ascontiguousarray(np.load(rest))
        if kind == "inout":
            array = np.ascontiguousarray(np.load(rest))
            self._files.append((rest, array))
            return array
        if kind == "out":
            name, _, form = rest.partition(".npy:")
            shape, _, dtype = form.rpartition(":")
            if not shape:
                raise ValueError(f"argument '{text}': required out:FILE.npy:SHAPE:DTYPE, as in "
                                 "out:y.npy:8,1024:float32")  # fmt: skip
            array = np.empty([int(n) for n in shape.replace("x", ",").split(",")], dtype)
            array.view(np.uint8).fill(_POISON)
            self._files.append((name + ".npy", array))
            return Out(array)
        raise ValueError(f"argument '{text}': there is no kind '{kind}', required {_FORMS}")

    def write(self) -> None:
        for name, array in self._files:
            np.save(name, array)


def _dims(text: str) -> tuple[int, ...]:
    dims = tuple(int(n) for n in text.split(","))
    if not 1 <= len(dims) <= 3 or min(dims) < 1:
        raise argparse.ArgumentTypeError(f"required X[,Y[,Z]] of at least 1, got {text}")
    return dims


def _table(result: Result) -> str:
    c, t = result.counters, result.time
    us = lambda seconds: f"{seconds * 1e6:10.2f} us"  # noqa: E731
    rows = [
        ("instructions", f"{c['instructions']:,}"),
        *((f"  {k}", f"{n:,}") for k, n in sorted(c["by_class"].items()) if n),
        ("global bytes read", f"{c['global_read_bytes']:,}"),
        ("global bytes written", f"{c['global_written_bytes']:,}"),
        ("lines of 64 / 128 bytes touched", f"{c['lines_64']:,} / {c['lines_128']:,}"),
        ("L1 hits", f"{c['l1_hits']:,}"),
        ("L2 hits / misses", f"{c['l2_hits']:,} / {c['l2_misses']:,}"),
        ("Infinity Cache hits", f"{c['infinity_hits']:,}"),
        ("memory bytes read", f"{c['memory_read_bytes']:,}"),
        ("memory bytes written", f"{c['memory_written_bytes']:,}"),
        ("LDS cycles (of them conflicts)",
         f"{c['lds_cycles']:,} ({c['lds_conflict_cycles']:,})"),
        ("matrix cycles", f"{c['matrix_cycles']:,}"),
    ]  # fmt: skip
    if t is not None:
        rows += [
            ("waves a SIMD", str(t.waves_per_simd)),
            ("modelled time", us(t.total) + f", bound by {t.bound}"),
        ]
        parts = ("memory", "issue", "matrix", "lds", "latency", "launch")
        rows += [(f"  {part}", us(getattr(t, part))) for part in parts]
    return "\n".join(f"{name:34}{value:>24}" for name, value in rows)


def _hot_lines(result: Result, count: int = 20) -> str:
    lines = sorted(result.lines, key=lambda x: -x["instructions"])[:count]
    total = max(1, result.counters["instructions"])
    out = ["", f"{'instructions':>14} {'share':>6} {'matrix cycles':>14}  source line"]
    for x in lines:
        out.append(f"{x['instructions']:14,} {x['instructions'] / total:6.1%} "
                   f"{x['matrix_cycles']:14,}  {_quoted(x['source'])}")  # fmt: skip
    return "\n".join(out)


def _quoted(source: str) -> str:
    """The place and, where the file is at hand, the text of the line."""
    path, _, line = source.rpartition(":")
    try:
        text = pathlib.Path(path).read_text().splitlines()[int(line) - 1].strip()
    except (OSError, ValueError, IndexError):
        return source
    return f"{pathlib.Path(path).name}:{line}: {text}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="cdna-simulator", description=__doc__)
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (("run", "runs a kernel; exit status 1 when there are findings"),
                       ("profile", "the same, with a table and the hot source lines")):  # fmt: skip
        p = commands.add_parser(
            name,
            help=text,
            usage=f"%(prog)s FILE KERNEL --grid X --block X [...] ARG...\nARG: {_FORMS}",
        )
        p.add_argument("file", help="code object, offload bundle, or host file with a fat binary")
        p.add_argument("kernel")
        p.add_argument("--grid", type=_dims, required=True, help="workgroups: X[,Y,Z]")
        p.add_argument("--block", type=_dims, required=True, help="threads: X[,Y,Z]")
        p.add_argument("--lds", type=int, default=0, help="bytes of dynamic LDS")
        p.add_argument("--target", help="which code to take from a fat binary, as gfx950")
        p.add_argument("--seed", type=int, default=0, help="order of waves and workgroups")
        p.add_argument("--no-checks", action="store_true", help="fast, without the checkers")
        p.add_argument(
            "--cycles",
            action="store_true",
            help="plays it on the cycle model too: where each SIMD's cycles went",
        )
        p.add_argument(
            "--level",
            choices=("error", "suspicious"),
            default="error",
            help="findings from which on the exit status is 1 (default: error)",
        )
        p.add_argument(
            "--suppress",
            action="append",
            default=[],
            metavar="KIND[@FILE[:LINE]]",
            help="findings that are known; may be repeated, wildcards are allowed",
        )
        p.add_argument("--json", action="store_true", help="counters and findings as JSON")
        if name == "profile":
            p.add_argument(
                "--html",
                metavar="FILE",
                type=pathlib.Path,
                help="writes a page: cycles by SIMD, source line and memory level",
            )
            p.add_argument(
                "--trace",
                metavar="FILE",
                type=pathlib.Path,
                help=f"writes a timeline of {_TRACED} compute units for Perfetto",
            )
    compiled = commands.add_parser(
        "compile",
        help="compiles a HIP file to a code object, without ROCm",
        usage="%(prog)s FILE.hip [-o FILE.co] [--target gfx942] [FLAG...]",
    )
    compiled.add_argument("file")
    compiled.add_argument("-o", dest="output", help="the code object, FILE.co if not said")
    compiled.add_argument("--target", default="gfx942", help="gfx942, gfx950, gfx90a, ...")
    kernels = commands.add_parser("kernels", help="lists the kernels of a file")
    kernels.add_argument("file")
    kernels.add_argument("--target")
    commands.add_parser("runtime", help="prints the folder of the HIP runtime stand-in")
    return parser


def _list(options) -> int:
    code = load(options.file, options.target)
    for name, k in sorted(code.kernels.items()):
        args = ", ".join(f"{a['name'] or '?'}:{a['size']}" for a in k["args"]
                         if not a["kind"].startswith("hidden"))  # fmt: skip
        print(
            f"{name}({args})  vgprs {k['vgprs']} sgprs {k['sgprs']} lds {k['lds']} "
            f"scratch {k['scratch']}"
        )
    if code.unknown:
        print("instructions that the simulator does not know:", ", ".join(code.unknown))
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns the exit status: 0, 1 with findings, 2 for an error."""
    # Kernel arguments may stand before, between and after the options.
    options, extra = _parser().parse_known_args(arguments)
    takes = options.command in ("run", "profile")
    unknown = [a for a in extra if a.startswith("-") or not takes]
    if options.command == "compile":
        unknown = []  # they are clang's
    if unknown:
        _parser().error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        if options.command == "runtime":
            print(hip.runtime().parent)
            return 0
        if options.command == "kernels":
            return _list(options)
        if options.command == "compile":
            print(compile_file(options.file, options.output, options.target, extra))
            return 0
        args = _Arguments(extra)
        code = load(options.file, options.target)
        draws = options.command == "profile" and (options.html or options.trace)
        cycles = machine_for(code.target, traced=_TRACED) if draws else options.cycles
        result = code.launch(
            options.kernel, options.grid, options.block, args.values, options.lds,
            checks=not options.no_checks, seed=options.seed,
            cycles=cycles)  # fmt: skip
        args.write()
        if draws and options.html:
            options.html.write_text(html_page(result))
        if draws and options.trace:
            options.trace.write_text(chrome_trace(result))
    except (SimulatorError, ValueError, TypeError, OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = result.select("suspicious", options.suppress)
    failed = any(options.level in (f.level, "suspicious") for f in found)
    if options.json:
        report = {key: result.raw[key] for key in ("kernel", "counters")}
        report["findings"] = [vars(f) for f in found]
        report["time"] = result.time and vars(result.time)
        if result.cycles:
            report["cycles"] = result.cycles.raw
        print(json.dumps(report, indent=1))
    else:
        if options.command == "profile":
            print(_table(result))
            print(_hot_lines(result))
            if result.cycles:
                print(cycles_text(result.cycles))
        for finding in found:
            print(finding)
    return 1 if failed else 0
