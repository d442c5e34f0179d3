"""Plants faults one at a time, and says which of them the tests notice.

    python tools/mutants.py [WORD ...]          # those listed whose list, file or reason has a WORD
    python tools/mutants.py --python models/hooks.py --sample 20 [--seed 3] [--tests "..."]

tests/mutants/*.toml list faults that change what can be seen, each with the tests that must fail
with it. ``--python`` lets cosmic-ray think of faults in a file of the package instead; some of
those change nothing, so somebody must look at what survives: a real one gets a test and a place in
a list. Which tests go with which file is in tests/mutants/python/tests.toml.

Faults are planted in a clone, build/mutants/tree, of what git tracks here with its uncommitted
changes (`git add` new files first). The tests must pass there without a fault. After each fault the
clone's build/ is put back as it was. The exit code is 1 if a fault survives or a list is wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LISTS = ROOT / "tests" / "mutants"
PACKAGE = "torch-ext/rocm_kernels"
WORK = ROOT / "build" / "mutants"
# Lists of faults in what tests build themselves: the package for the CPU stays as it is. The
# simulator's own tests do not even need it.
BUILT_BY_TESTS, WITHOUT_PACKAGE = ("amd", "simulator"), ("simulator",)
TREE, CLEAN, TOOL = WORK / "tree", WORK / "clean", WORK / "cosmic-ray"


@dataclass(frozen=True)
class Mutant:
    """A fault: ``find`` stands once in ``file``, and ``tests`` fail when it is ``replace``."""

    area: str
    file: str
    find: str
    replace: str
    tests: str  # arguments of pytest
    why: str  # what it breaks

    def planted(self, text: str) -> str:
        """The file's text with the fault in it.

        Raises:
            ValueError: ``find`` does not stand in it exactly once, or the fault changes nothing.
        """
        if (count := text.count(self.find)) != 1:
            raise ValueError(f"{self.find!r} must stand once in {self.file}, stands {count} times")
        if self.find == self.replace:
            raise ValueError(f"{self.find!r} in {self.file} is replaced by itself")
        return text.replace(self.find, self.replace)

    def __str__(self) -> str:
        return f"{self.area}: {self.file}: {self.why}"


def listed(folder: Path = LISTS) -> list[Mutant]:
    """All entries of all lists, in their order."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["mutant"]:
            try:
                mutants.append(Mutant(area=path.stem, **entry))
            except TypeError as error:
                raise ValueError(f"{path.name}: {error} in the entry {entry}") from None
    return mutants


# ---- What cosmic-ray thinks of


def thought_of(file: str, tests: str) -> Iterator[Mutant]:
    """Lists every fault that cosmic-ray plants in a file of the package, each once."""
    sys.path.append(str(TOOL))
    try:
        from cosmic_ray import mutating, plugins
    except ImportError as error:
        raise SystemExit(f"error: {error}; `make mutants` installs cosmic-ray first") from None
    text = (ROOT / file).read_text()
    seen = {text}
    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        if operator.arguments():
            continue
        occurrence = 0
        while (mutated := mutating.mutate_code(text, operator(), occurrence)) is not None:
            occurrence += 1
            if mutated not in seen:
                seen.add(mutated)
                yield Mutant("python", file, text, mutated, tests, difference(text, mutated))


def difference(old: str, new: str) -> str:
    """The first line that differs, before and after."""
    pairs = zip(old.splitlines(), new.splitlines(), strict=False)
    number, (before, after) = next((n, pair) for n, pair in enumerate(pairs, 1) if len({*pair}) > 1)
    return f"line {number}: {before.strip()}  ->  {after.strip()}"


def sample(files: list[str], tests: str | None, count: int, seed: int) -> list[Mutant]:
    """``count`` faults of each file, drawn by ``seed``."""
    chosen = []
    for name in files:
        file = name if (ROOT / name).is_file() else f"{PACKAGE}/{name}"
        if not (ROOT / file).is_file():
            raise SystemExit(f"error: there is no file {file}")
        all_of_it = list(thought_of(file, tests or fitting_tests(file)))
        drawn = random.Random(seed).sample(all_of_it, min(count, len(all_of_it)))
        chosen += sorted(drawn, key=all_of_it.index)
    return chosen


def fitting_tests(file: str) -> str:
    """The arguments of pytest that tests/mutants/python/tests.toml gives for a file."""
    table = tomllib.loads((LISTS / "python" / "tests.toml").read_text())
    for prefix in (file.removeprefix(f"{PACKAGE}/"), Path(file).parent.name):
        if prefix in table:
            return table[prefix]
    raise SystemExit(f"error: tests/mutants/python/tests.toml has no tests for {file}: use --tests")


# ---- Planting


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def prepare() -> None:
    """Brings the clone to what git tracks here, uncommitted changes included."""
    WORK.mkdir(parents=True, exist_ok=True)
    if not (TREE / ".git").exists():
        git(ROOT, "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(TREE))
    someone = ("-c", "user.name=mutants", "-c", "user.email=mutants@localhost")
    state = git(ROOT, *someone, "stash", "create") or git(ROOT, "rev-parse", "HEAD")
    git(TREE, "checkout", "--quiet", "--force", "--detach", state)
    git(TREE, "clean", "-dfq")


def run(command: list[str], limit: float) -> tuple[int | None, str]:
    """Exit code (None: stopped at ``limit`` seconds) and output of a command in the clone."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("LOCAL_KERNELS", None)
    process = subprocess.Popen(
        command,
        cwd=TREE,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]


# tools/build.py for the CPU, whose variant keeps its name: by another, which any fault makes, all
# bindings would be compiled anew.
BUILD_PY = """
import sys
sys.path.insert(0, "tools")
import build
build.Package.unique_id = lambda package: "mutants"
sys.exit(build.main())
"""


def build(limit: float = 1800) -> tuple[int | None, str]:
    return run([sys.executable, "-c", BUILD_PY], limit)


def pytest(arguments: str, limit: float) -> tuple[int | None, str]:
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--slow", "-p", "no:cacheprovider"]
    return run([*command, *shlex.split(arguments)], limit)


def times_without_a_fault(mutants: list[Mutant]) -> dict[str, float]:
    """Measures the seconds of each of the tests that pass, and tells which do not."""
    if any(mutant.area not in WITHOUT_PACKAGE for mutant in mutants):
        code, output = build()
        if code != 0:
            raise SystemExit(f"{output}error: the clone does not build")
    seconds = {}
    for arguments in sorted({mutant.tests for mutant in mutants}):
        start = time.monotonic()
        code, output = pytest(arguments, 3600)
        if code == 0 and " passed" in output:
            seconds[arguments] = time.monotonic() - start
        else:
            print(f"{output[-3000:]}\nwithout a fault, these do not pass: {arguments}", flush=True)
    shutil.rmtree(CLEAN, ignore_errors=True)
    shutil.copytree(TREE / "build", CLEAN, symlinks=True)
    return seconds


def patience(seconds: float) -> float:
    """How long to wait, with a fault, for tests that take ``seconds`` without: some never end."""
    return 120 + 5 * seconds


def outcome(mutant: Mutant, seconds: float) -> str:
    """What the tests say of a planted fault: "noticed", "survived", or why it cannot be told."""
    path = TREE / mutant.file
    text, times = path.read_text(), path.stat()
    path.write_text(mutant.planted(text))
    try:
        code, output = (0, "") if mutant.area in BUILT_BY_TESTS else build()
        if code != 0:
            return "noticed" if mutant.area == "python" else f"does not build:\n{output[-2000:]}"
        code, output = pytest(mutant.tests, patience(seconds))
    finally:
        shutil.rmtree(TREE / "build", ignore_errors=True)
        shutil.copytree(CLEAN, TREE / "build", symlinks=True)
        path.write_text(text)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    if code == 0:
        return "survived"
    # An error outside of a test, say a module that cannot be imported, is no test that noticed.
    # A test that dies of a signal, as threads in each other's memory do, has noticed.
    died = code is None or code < 0
    if died or mutant.area == "python" or (code == 1 and " failed" in output):
        return "noticed"
    return f"pytest ends with {code}, and no test has failed:\n{output[-2000:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("words", nargs="*", metavar="WORD", help="default: all that are listed")
    parser.add_argument("--list", action="store_true", help="say which, and plant none")
    parser.add_argument("--python", nargs="+", metavar="FILE", default=[], help="of the package")
    parser.add_argument("--sample", type=int, default=20, help="faults of each FILE (20)")
    parser.add_argument("--seed", type=int, default=random.randrange(1000), help="of the sample")
    parser.add_argument("--tests", help="arguments of pytest that go with every FILE")
    arguments = parser.parse_args()
    if arguments.python:
        print(f"sample with --seed {arguments.seed}")
        mutants = sample(arguments.python, arguments.tests, arguments.sample, arguments.seed)
    else:
        mutants = [m for m in listed() if all(word in str(m) for word in arguments.words)]
    if arguments.list or not mutants:
        print(*mutants, sep="\n")
        return 0 if mutants else 1

    prepare()
    seconds = times_without_a_fault(mutants)
    outcomes: dict[str, list[str]] = {}
    for mutant in mutants:
        found = "its tests do not pass without it"
        if mutant.tests in seconds:
            found = outcome(mutant, seconds[mutant.tests])
        outcomes.setdefault(f"{mutant.area}, {mutant.file}", []).append(found)
        print(f"{found:9} {mutant}", flush=True)
    print()
    for area, found in outcomes.items():
        print(f"{found.count('noticed'):4} of {len(found):3} noticed: {area}")
    noticed = sum(found.count("noticed") for found in outcomes.values())
    print(f"{noticed} of {len(mutants)} faults noticed ({noticed / len(mutants):.0%})")
    return 0 if noticed == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main())
