"""The judge on programs that others published: they run under the stand-in for the HIP runtime.

    make public-kernels                    clones into build/calibration, and writes the table
    make public-kernels ARGS="--clones FOLDER"   takes the clones that lie in FOLDER, by their names
    python simulator/suites/public_kernels.py [--write] [--only NAME]

A program is right when it ends with 0, which it does when its own comparison holds, and the checks
find no error. Where a barrier is needed it is taken out of a copy: the checks must tell that.
A repository that cannot be cloned, and programs that do not compile with this compiler and these
headers, end before their first kernel or take too long, are named and not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).parent)]

import suite_table  # noqa: E402

import simulator  # noqa: E402
from simulator import compiling  # noqa: E402

CHECKOUTS = ROOT / "build" / "calibration"
TARGET = "gfx942"
BARRIER = re.compile(r"__syncthreads\(\)\s*;")
ONLY_FOR_CODE_OBJECTS = ("--offload-device-only", "--no-gpu-bundle-output")


@dataclasses.dataclass(frozen=True)
class Repository:
    name: str
    url: str
    programs: tuple[str, ...]  # patterns of files that have a main
    include: tuple[str, ...] = ()
    # Of programs: which of their barriers, from 1, are needed and taken out for a planted bug.
    planted: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    flags: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()  # patterns of files that each program is linked with
    headers: tuple[str, ...] = ()  # that its own build makes: empty ones do
    # Of a program: by default most have sizes for a GPU.
    arguments: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    wrong: str = "FAILED|[Ff]ailed"  # what a program prints of a wrong result, whatever it returns


REPOSITORIES = [
    Repository("rocm-examples", "https://github.com/ROCm/rocm-examples.git",
               ("HIP-Basic/*/main.hip", "Applications/*/main.hip"), ("Common",),
               {"HIP-Basic/matrix_multiplication": (1, 2),
                "Applications/histogram": (1, 2), "Applications/prefix_sum": (1, 2, 3)},
               arguments={"Applications/convolution": ("-x", "128", "-y", "64", "-i", "1"),
                          "HIP-Basic/matrix_multiplication":
                          ("-A_rows", "64", "-A_cols", "128", "-B_cols", "64")}),
    Repository("amd-lab-notes", "https://github.com/amd/amd-lab-notes.git",
               ("*/src/*.cpp", "*/examples/*.cpp", "*/codes/*.cpp"),
               ("matrix-cores/include",),
               arguments={"finite-difference/examples/laplacian": ("64", "8", "8", "64")}),
    Repository("composable_kernel", "https://github.com/ROCm/composable_kernel.git",
               ("example/01_gemm/gemm_xdl_fp16.cpp", "example/50_put_element/*.cpp",
                "example/19_binary_elementwise/elementwise_add_1d.cpp",
                "example/19_binary_elementwise/broadcast_add_2d_amn_bn.cpp"),
               ("include", "library/include"),
               flags=("-w", "-DCK_USE_XDL", *(f"-DCK_ENABLE_{kind}" for kind in
                      ("INT8", "FP8", "BF8", "FP16", "BF16", "FP32", "FP64"))),
               sources=("library/src/utility/*.cpp",),
               headers=("ck/config.h", "ck/version.h"),
               # Verified, numbers of method 2, not timed; m, n, k and the three leading dimensions.
               arguments={"example/01_gemm/gemm_xdl_fp16":
                          ("1", "2", "0", "256", "256", "128", "128", "256", "256")}),
    Repository("radeonflow", "https://github.com/RadeonFlow/RadeonFlow_Kernels.git",
               ("playground/*.cpp",), ("../composable_kernel/include",), flags=("-w",),
               headers=("ck/config.h", "ck/version.h")),
    Repository("hipkittens", "https://github.com/HazyResearch/HipKittens.git",
               ("kernels/gemm/fp8fp32/FP8_8wave/8_wave.cu", "tests/unit/unit_tests.cu"),
               ("include", "tests/unit/testing_commons"), flags=("-std=c++20", "-w")),
]  # fmt: skip


def checkout(repository: Repository, clones: pathlib.Path) -> pathlib.Path | None:
    """The folder of the clone; None, with git's words on stderr, when there is none."""
    folder = clones / repository.name
    if folder.exists():
        return folder
    clones.mkdir(parents=True, exist_ok=True)
    command = ["git", "clone", "--quiet", "--depth", "1", repository.url, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})  # fmt: skip
    if done.returncode == 0:
        return folder
    print(f"{repository.name}: git could not clone {repository.url}: {done.stderr.strip()}",
          file=sys.stderr)  # fmt: skip
    return None


def commit(folder: pathlib.Path) -> str:
    """What a clone holds: its commit's first letters and day."""
    command = ["git", "-C", str(folder), "log", "-1", "--abbrev=10", "--format=%h of %cs"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def compiled(source: pathlib.Path, output: pathlib.Path, flags: list[str]) -> str:
    """Compiles host and device code; returns the compiler's first error, else nothing."""
    words = compiling.command(source, output, TARGET, flags)
    return complaint([w for w in words if w not in ONLY_FOR_CODE_OBJECTS])


def linked(objects: list[pathlib.Path], program: pathlib.Path) -> str:
    compiler = compiling.command(program, program, TARGET)[0]
    return complaint([compiler, "--hip-link", *map(str, objects), str(simulator.runtime()),
                      "-pthread", "-o", str(program)])  # fmt: skip


def complaint(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return ""
    lines = done.stderr.splitlines()
    errors = [line for line in lines if re.search("error:|undefined reference", line)]
    return re.split("error: |: (?=undefined)", (errors or lines or ["no word"])[0])[-1]


def run(folder: pathlib.Path, arguments, seconds: int, wrong: str) -> tuple[str, str, dict]:
    """Why the program says nothing of the judge, how else it ended (nothing: well), and by the
    kinds of the errors found a first one."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(simulator.runtime().parent),
                   "SIMULATOR_REPORT_DIR": str(folder), "SIMULATOR_TARGET": TARGET}  # fmt: skip
    try:
        done = subprocess.run([folder / "program", *arguments], cwd=folder, env=environment,
                              text=True, errors="replace", capture_output=True,
                              timeout=seconds)  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not over after {seconds} s", "", {}
    reports = [json.loads(path.read_text()) for path in folder.glob("launch-*.json")]
    kinds: dict[str, str] = {}
    for launch in reports:
        for f in launch["findings"]:
            if f["level"] == "error":
                kinds.setdefault(f["kind"], f"{launch['kernel']}, {f['source']}: {f['message']}")
        if "error" in launch:
            kinds.setdefault("stopped", launch["error"])
    ended = f"ended with {done.returncode}" if done.returncode else ""
    if not reports:
        lacks = re.search("the program calls .*", done.stderr)
        why = f"{ended} before its first kernel" if ended else "launches no kernel"
        return why + (f": {lacks[0]}" if lacks else ""), "", {}
    if not ended and re.search(wrong, done.stdout):
        ended = "says that its result is wrong"
    return "", ended, kinds


def judged(repository: Repository, folder: pathlib.Path, only: str, seconds: int):
    """A row for each program, and for each with a planted bug; lines for what is left out."""
    rows, left = [], []
    flags = [*repository.flags, *(f"-I{folder / part}" for part in repository.include)]
    with tempfile.TemporaryDirectory() as scratch:
        flags.append(f"-I{scratch}")
        for header in repository.headers:
            (pathlib.Path(scratch) / header).parent.mkdir(parents=True, exist_ok=True)
            (pathlib.Path(scratch) / header).touch()
        programs = {p for pattern in repository.programs for p in folder.glob(pattern)}
        chosen = [p for p in sorted(programs)
                  if "main(" in p.read_text(errors="replace")
                  and only in title_of(repository, folder, p)]  # fmt: skip
        objects = []
        for source in sorted(p for pattern in repository.sources for p in folder.glob(pattern)):
            objects.append(pathlib.Path(scratch) / f"{len(objects)}.o")
            why = compiled(source, objects[-1], flags) if chosen else ""
            if why:
                return [], [f"{repository.name}: {source.name} does not compile here: {why}"]
        for source in chosen:
            its, why = judged_program(repository, folder, source, flags, objects, seconds)
            rows += its
            left += [f"{repository.name}: {line}" for line in why]
    if not programs:
        left.append(f"{repository.name}: none of its programs is there")
    return rows, left


def title_of(repository: Repository, folder: pathlib.Path, source: pathlib.Path) -> str:
    where = source.relative_to(folder)
    place = where.parent if where.stem == "main" else where.with_suffix("")
    return f"{repository.name}: {place.as_posix()}"


def judged_program(repository, folder, source, flags, objects, seconds):
    name = title_of(repository, folder, source)
    place = name.partition(": ")[2]
    rows = []
    for barrier in (0, *repository.planted.get(place, ())):
        title = f"{name}, its barrier {barrier} taken out" if barrier else name
        text = source.read_text(errors="replace")
        if barrier:
            found = list(BARRIER.finditer(text))
            if len(found) < barrier:
                return rows, [f"{place}: it has no barrier {barrier} to take out"]
            text = text[: found[barrier - 1].start()] + ";" + text[found[barrier - 1].end() :]
        with tempfile.TemporaryDirectory() as scratch:
            there = pathlib.Path(scratch)
            changed = there / source.name
            changed.write_text(text)
            why = compiled(changed, there / "program.o", [f"-I{source.parent}", *flags])
            if why := why or linked([there / "program.o", *objects], there / "program"):
                return rows, [f"{place}: does not compile here: {why}"]
            why, ended, kinds = run(there, repository.arguments.get(place, ()), seconds,
                                    repository.wrong)  # fmt: skip
        if why:
            return rows, [f"{title.partition(': ')[2]}: {why}"]
        said = ", ".join([*([ended] if ended else []), *sorted(kinds)])
        passed = bool(kinds) if barrier else not said
        rows.append(suite_table.Row(title, TARGET, bool(barrier), said or ("nothing" if barrier
                    else "clean"), passed))  # fmt: skip
        print(rows[-1].words(), flush=True)
        for kind, where in kinds.items():
            print(f"      {kind}: {where}")
    return rows, []


def by_reason(left: list[str]) -> list[str]:
    """The same with one line for all programs of a repository that have one reason."""
    programs: dict[tuple[str, str], list[str]] = {}
    for line in left:
        repository, program, *why = line.split(": ", 2)
        programs.setdefault((repository, why[0] if why else ""), []).append(program)
    return [": ".join(filter(None, (repository, ", ".join(names), why)))
            for (repository, why), names in programs.items()]  # fmt: skip


def main(arguments=None, repositories=REPOSITORIES) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=int, default=120, help="for each program")
    parser.add_argument("--clones", type=pathlib.Path, default=CHECKOUTS, metavar="FOLDER",
                        help="where clones lie, by name; what is missing is cloned")  # fmt: skip
    parser.add_argument("--write", action="store_true", help="the table into simulator/docs")
    chosen = parser.parse_args(arguments)
    rows, left, judged_at = [], [], []
    for repository in repositories:
        folder = checkout(repository, chosen.clones)
        if folder is None:
            left.append(f"{repository.name}: {repository.url} could not be cloned")
            continue
        judged_at.append(f"{repository.name} at {commit(folder)}")
        its, missing = judged(repository, folder, chosen.only, chosen.seconds)
        rows += its
        left += missing
    left = by_reason(left)
    for line in left:
        print(f"left out  {line}")
    print(suite_table.summary(rows))
    if chosen.write and rows:
        suite_table.write("public", f"Programs as published, {', '.join(judged_at)}", rows, left)
    return int(not rows or not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
