"""Builds, tests and measures on this machine's GPU, and writes one file to send back.

    python3 tools/mi300x_report.py --output report.json      # an AMD GPU; tools/Containerfile too

Every step runs by itself with a time limit, and a step that fails does not keep the later ones
from running: a report of a failure is worth as much as one of a success. The file says what the
machine is, which tests failed and how, and what was measured. It holds no host or user name, no
environment and no path of the machine. ``--device cpu`` and ``--device simulator`` go the same way
without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BACKENDS = {"rocm": "rocm", "cuda": "cuda", "cpu": "cpu", "simulator": "cpu"}
# Llama 405B's weights on one of eight GPUs, N,K.
TUNED_SHAPES = ["2304,16384", "13312,16384", "16384,6656"]
KERNEL_TESTS = ["rmsnorm_fp8", "swiglu_fp8", "skinny_gemm"]
TAIL = 20_000  # characters of a step's output that are kept

DEVICE_FACTS = """
import json, torch
facts = {"torch": torch.__version__, "rocm": torch.version.hip, "cuda": torch.version.cuda}
if torch.cuda.is_available():
    p = torch.cuda.get_device_properties(0)
    names = ("name", "gcnArchName", "multi_processor_count", "total_memory", "clock_rate",
             "memory_clock_rate", "L2_cache_size", "warp_size")
    facts["gpu"] = {n: getattr(p, n) for n in names if hasattr(p, n)}
    facts["gpus"] = torch.cuda.device_count()
print(json.dumps(facts))
"""


def anonymous(text: str) -> str:
    """Removes from a text what tells the machine or its user: paths, host and user names."""
    for path, name in ((ROOT, "."), (Path.home(), "~"), (tempfile.gettempdir(), "TMP")):
        if str(path) != "/":
            text = text.replace(str(path), name)
    for secret in (platform.node(), os.environ.get("USER", "")):
        if len(secret) > 3:
            text = re.sub(rf"\b{re.escape(secret)}\b", "NAME", text)
    return text


def run(name: str, command: list[str], minutes: float) -> dict:
    """One step: its command, outcome, duration and the end of what it printed."""
    print(f"{name}: {' '.join(command[1:])}", flush=True)
    begin = time.monotonic()
    try:
        process = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=60 * minutes,
        )
        outcome, output = str(process.returncode), process.stdout
    except subprocess.TimeoutExpired as error:
        outcome, output = f"longer than {minutes} minutes", error.stdout or ""
        output = output.decode(errors="replace") if isinstance(output, bytes) else output
    except OSError as error:
        outcome, output = str(error), ""
    seconds = round(time.monotonic() - begin, 1)
    print(f"  {'done' if outcome == '0' else 'FAILED: ' + outcome} in {seconds} s", flush=True)
    return {
        "name": name,
        "command": anonymous(" ".join(command[1:])),
        "outcome": outcome,
        "seconds": seconds,
        "output": anonymous(output)[-TAIL:],
    }


def machine() -> dict:
    """What this machine is, as far as it matters to the numbers."""
    facts = {"python": platform.python_version(), "kernel": platform.release()}
    cpu = re.search(r"model name\s*: (.*)", _read("/proc/cpuinfo"))
    facts["cpu"] = cpu[1] if cpu else platform.machine()
    facts["cores"] = os.cpu_count()
    facts["amdgpu"] = _read("/sys/module/amdgpu/version").strip()
    step = subprocess.run([sys.executable, "-c", DEVICE_FACTS], capture_output=True, text=True)
    if step.returncode == 0:
        facts |= json.loads(step.stdout.splitlines()[-1])
    return facts


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def sources() -> dict:
    """Commit of the sources, and whether they were changed."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}


def test_results(path: Path) -> dict:
    """Counts and failures of a JUnit file."""
    if not path.exists():
        return {}
    counts = {"passed": 0, "failed": 0, "skipped": 0}
    failures = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        failed = [child for child in case if child.tag in ("failure", "error")]
        skipped = any(child.tag == "skipped" for child in case)
        counts["failed" if failed else "skipped" if skipped else "passed"] += 1
        if failed:
            name = f"{case.get('classname')}::{case.get('name')}"
            failures[name] = anonymous(failed[0].text or "")[-2000:]
    return {**counts, "failures": failures}


def tune(package: str, shapes: list[str], rows: str) -> tuple[dict, dict]:
    """Times every config of products of few rows; returns the step, and the file that the package
    reads."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "tuning.json"
        command = [sys.executable, package, "--rows", rows, "--output", str(output)]
        command += [argument for shape in shapes for argument in ("--shape", shape)]
        step = run("tuning", command, 60)
        return step, json.loads(output.read_text()) if output.exists() else {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, default=Path("report.json"))
    parser.add_argument("--device", choices=sorted(BACKENDS), default="rocm")
    parser.add_argument("--quick", action="store_true", help="the fast subset of tests alone")
    arguments = parser.parse_args()
    try:  # before hours of work
        arguments.output.open("a").close()
    except OSError as error:
        parser.error(f"--output {arguments.output} cannot be written: {error.strerror}")
    python = sys.executable
    report = {"report": 1, "device": arguments.device, "machine": machine(), "sources": sources()}
    build = [python, "tools/build.py", "--backend", BACKENDS[arguments.device]]
    steps = [run("build", build, 60)]
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "tests.xml"
        tests = [python, "-m", "pytest", "-q", "--device", f"reference,{arguments.device}"]
        tests += [f"--junit-xml={junit}", "-o", "junit_family=xunit1"]
        if arguments.quick:
            tests += ["-m", "kernels_ci"]
        tests += [f"tests/test_{kernel}.py" for kernel in KERNEL_TESTS]
        steps.append(run("tests", tests, 180))
        report["tests"] = test_results(junit)
    if not arguments.quick and arguments.device != "simulator":
        script = "cpu" if arguments.device == "cpu" else "gpu"
        steps.append(run("benchmarks", [python, f"benchmarks/{script}.py"], 60))
        if steps[0]["outcome"] == "0":
            variant = steps[0]["output"].split()[-1]
            step, report["tuning"] = tune(variant, TUNED_SHAPES, "1,8,16,32")
            steps.append(step)
    report["steps"] = steps
    arguments.output.write_text(json.dumps(report, indent=1) + "\n")

    tested = report["tests"]
    print(f"tests: {tested.get('passed', 0)} passed, {tested.get('failed', 'none ran,')} failed")
    print(f"wrote {arguments.output}: please attach it to an issue of this repository")
    return 0 if all(step["outcome"] == "0" for step in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
