"""The judge on programs that others published: they run under the stand-in for the HIP runtime.

    make public-kernels                    clones into build/calibration, and writes the table
    python simulator/suites/public_kernels.py [--write] [--only NAME]

A program is right when it ends with 0, which it does when its own comparison holds, and the checks
find no error. In programs of PLANTED the first barrier is taken out: the checks must tell it.
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


@dataclasses.dataclass(frozen=True)
class Repository:
    name: str
    url: str
    programs: tuple[str, ...]  # patterns of files that have a main
    include: tuple[str, ...] = ()
    planted: tuple[str, ...] = ()  # folders of programs whose first barrier is needed


REPOSITORIES = [
    Repository("rocm-examples", "https://github.com/ROCm/rocm-examples.git",
               ("HIP-Basic/*/main.hip", "Applications/*/main.hip"), ("Common",),
               ("HIP-Basic/dynamic_shared", "HIP-Basic/matrix_multiplication",
                "HIP-Basic/static_shared_memory")),
    Repository("amd-lab-notes", "https://github.com/amd/amd-lab-notes.git",
               ("*/src/*.hip", "*/*/*.hip")),
]  # fmt: skip


def checkout(repository: Repository) -> pathlib.Path | None:
    """The folder of the clone; None, with git's words on stderr, when there is none."""
    folder = CHECKOUTS / repository.name
    if folder.exists():
        return folder
    CHECKOUTS.mkdir(parents=True, exist_ok=True)
    command = ["git", "clone", "--quiet", "--depth", "1", repository.url, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600,
                          env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})  # fmt: skip
    if done.returncode == 0:
        return folder
    print(f"{repository.name}: git could not clone {repository.url}: {done.stderr.strip()}",
          file=sys.stderr)  # fmt: skip
    return None


def built(source: pathlib.Path, include: list[pathlib.Path], folder: pathlib.Path) -> str:
    """Compiles a program to folder/program; returns the compiler's first error, else nothing."""
    words = compiling.command(source, folder / "program.o", TARGET, [f"-I{x}" for x in include])
    words = [w for w in words if w not in ("--offload-device-only", "--no-gpu-bundle-output")]
    link = [words[0], "--hip-link", str(folder / "program.o"), str(simulator.runtime()), "-pthread",
            "-o", str(folder / "program")]  # fmt: skip
    for command in (words, link):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error:" in line]
            return (errors or done.stderr.splitlines() or ["no word"])[0].partition("error: ")[2]
    return ""


def run(folder: pathlib.Path, seconds: int) -> tuple[str, set[str]]:
    """How the program ended (nothing: well), and the kinds of the errors that the checks found."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(simulator.runtime().parent),
                   "SIMULATOR_REPORT_DIR": str(folder), "SIMULATOR_TARGET": TARGET}  # fmt: skip
    ended = ""
    try:
        done = subprocess.run([folder / "program"], cwd=folder, env=environment, text=True,
                              capture_output=True, timeout=seconds)  # fmt: skip
        if done.returncode:
            ended = f"ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        ended = f"not over after {seconds} s"
    kinds = set()
    for report in folder.glob("launch-*.json"):
        launch = json.loads(report.read_text())
        kinds |= {f["kind"] for f in launch["findings"] if f["level"] == "error"}
        if "error" in launch:
            kinds.add("stopped")
    return ended, kinds


def judged(repository: Repository, folder: pathlib.Path, only: str, seconds: int):
    """A row for each program, and for each with a planted bug; lines for what is left out."""
    rows, left = [], []
    sources = sorted({p for pattern in repository.programs for p in folder.glob(pattern)})
    for source in sources:
        place = source.relative_to(folder).parent.as_posix()
        name = f"{repository.name}: {place}"
        text = source.read_text(errors="replace")
        if only not in name or "main(" not in text:
            continue
        include = [source.parent, *(folder / part for part in repository.include)]
        for planted in (False, True):
            if planted and place not in repository.planted:
                continue
            if planted and not BARRIER.search(text):
                left.append(f"{name}: it has no barrier to take out")
                continue
            with tempfile.TemporaryDirectory() as scratch:
                changed = pathlib.Path(scratch) / source.name
                changed.write_text(BARRIER.sub("", text, count=1) if planted else text)
                complaint = built(changed, include, pathlib.Path(scratch))
                if complaint:
                    left.append(f"{name}: does not compile here: {complaint}")
                    break
                ended, kinds = run(pathlib.Path(scratch), seconds)
            if not planted and ended.startswith("not over"):
                left.append(f"{name}: {ended}")
                break
            said = ", ".join([*([ended] if ended else []), *sorted(kinds)])
            passed = bool(kinds) if planted else not said
            title = f"{name}, its first barrier taken out" if planted else name
            rows.append(suite_table.Row(title, TARGET, planted, said or ("nothing" if planted else
                        "clean"), passed))  # fmt: skip
            print(rows[-1].words(), flush=True)
    return rows, left


def main(arguments=None, repositories=REPOSITORIES) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=int, default=120, help="for each program")
    parser.add_argument("--write", action="store_true", help="the table into simulator/docs")
    chosen = parser.parse_args(arguments)
    rows, left = [], []
    for repository in repositories:
        folder = checkout(repository)
        if folder is None:
            left.append(f"{repository.name}: {repository.url} could not be cloned")
            continue
        its, missing = judged(repository, folder, chosen.only, chosen.seconds)
        rows += its
        left += missing
    for line in left:
        print(f"left out  {line}")
    print(suite_table.summary(rows))
    if chosen.write and rows:
        suite_table.write("public", "Programs as published", rows, left)
    return int(not rows or not all(row.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
