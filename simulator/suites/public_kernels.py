"""The judge on programs that others published: they run under the stand-in for the HIP runtime.

    make public-kernels                    clones into build/calibration, and writes the table
    make public-kernels ARGS="--clones FOLDER"   takes the clones that lie in FOLDER, by their names
    python simulator/suites/public_kernels.py [--write] [--only NAME]

A program is right when it ends with 0, which it does when its own comparison holds, and the checks
find no error. Where a barrier is needed it is taken out of a copy: the checks must tell that.
A repository that cannot be cloned, and a program that this compiler and these headers do not take,
are named and not counted.
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
    # Of a program: by default most have sizes for a GPU.
    arguments: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)


REPOSITORIES = [
    Repository("rocm-examples", "https://github.com/ROCm/rocm-examples.git",
               ("HIP-Basic/*/main.hip", "Applications/*/main.hip", "Tutorials/*/example/*.hip"),
               ("Common",),
               {"HIP-Basic/matrix_multiplication": (1, 2)}),
    Repository("amd-lab-notes", "https://github.com/amd/amd-lab-notes.git",
               ("*/src/*.cpp", "*/examples/*.cpp", "*/codes/*.cpp"),
               ("matrix-cores/include",)),
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


def run(folder: pathlib.Path, arguments, seconds: int) -> tuple[str, dict[str, str]]:
    """How the program ended (nothing: well), and by the kinds of the errors found a first one."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(simulator.runtime().parent),
                   "SIMULATOR_REPORT_DIR": str(folder), "SIMULATOR_TARGET": TARGET}  # fmt: skip
    ended = ""
    try:
        done = subprocess.run([folder / "program", *arguments], cwd=folder, env=environment,
                              text=True, errors="replace", capture_output=True,
                              timeout=seconds)  # fmt: skip
        if done.returncode:
            ended = f"ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"not over after {seconds} s"
    kinds: dict[str, str] = {}
    for report in folder.glob("launch-*.json"):
        launch = json.loads(report.read_text())
        for f in launch["findings"]:
            if f["level"] == "error":
                kinds.setdefault(f["kind"], f"{launch['kernel']}, {f['source']}: {f['message']}")
        if "error" in launch:
            kinds.setdefault("stopped", launch["error"])
    return ended, kinds


def judged(repository: Repository, folder: pathlib.Path, only: str, seconds: int):
    """A row for each program, and for each with a planted bug; lines for what is left out."""
    rows, left = [], []
    flags = [*repository.flags, *(f"-I{folder / part}" for part in repository.include)]
    with tempfile.TemporaryDirectory() as scratch:
        objects = []
        for pattern in repository.sources:
            for source in sorted(folder.glob(pattern)):
                objects.append(pathlib.Path(scratch) / f"{len(objects)}.o")
                if why := compiled(source, objects[-1], flags):
                    return [], [f"{repository.name}: {source.name} does not compile here: {why}"]
        sources = sorted({p for pattern in repository.programs for p in folder.glob(pattern)})
        for source in sources:
            if "main(" in source.read_text(errors="replace"):
                its, why = judged_program(repository, folder, source, flags, objects, only, seconds)
                rows += its
                left += [f"{repository.name}: {line}" for line in why]
    return rows, left


def judged_program(repository, folder, source, flags, objects, only, seconds):
    where = source.relative_to(folder)
    place = (where.parent if where.stem == "main" else where.with_suffix("")).as_posix()
    name = f"{repository.name}: {place}"
    rows = []
    for barrier in (0, *repository.planted.get(place, ())):
        title = f"{name}, its barrier {barrier} taken out" if barrier else name
        if only not in title:
            continue
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
            ended, kinds = run(there, repository.arguments.get(place, ()), seconds)
        if not barrier and ended.startswith("not over"):
            return rows, [f"{place}: {ended}"]
        said = ", ".join([*([ended] if ended else []), *sorted(kinds)])
        passed = bool(kinds) if barrier else not said
        rows.append(suite_table.Row(title, TARGET, bool(barrier), said or ("nothing" if barrier
                    else "clean"), passed))  # fmt: skip
        print(rows[-1].words(), flush=True)
        for kind, where in kinds.items():
            print(f"      {kind}: {where}")
    return rows, []


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
    for line in left:
        print(f"left out  {line}")
    print(suite_table.summary(rows))
    if chosen.write and rows:
        suite_table.write("public", f"Programs as published, {', '.join(judged_at)}", rows, left)
    return int(not rows or not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
