"""Fuzzes the CPU variant with sanitizers: the launchers through libFuzzer, the ops through Python.

    python tests/fuzz/run.py --seconds 60        # for each of the three fuzzers; `make fuzz`

* `launchers-address`, `launchers-thread`: fuzz_launchers.cpp under AddressSanitizer with UBSan, and
  under ThreadSanitizer. They start from `corpus/` and keep what they find in build/fuzz/corpus/.
* `ops`: fuzz_ops.py, with an extension built by tools/build.py's rules plus AddressSanitizer and
  UBSan. torch itself is not instrumented, but its allocations are watched.

Needs clang with compiler-rt (Debian: clang-22, libclang-rt-22-dev) and GCC's libasan.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import ninja
from ninja import ninja_syntax

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = Path(__file__).resolve().parent
WORK = ROOT / "build" / "fuzz"
SOURCES = [
    "tests/fuzz/fuzz_launchers.cpp",
    "rmsnorm_fp8/rmsnorm_fp8_cpu.cpp",
    "swiglu_fp8/swiglu_fp8_cpu.cpp",
    "skinny_gemm/cpu/skinny_gemm.cpp",
    "blocks/product/cpu/amx.cpp",
    "gemm/cpu/gemm.cpp",
]
SANITIZERS = {"address": "address,undefined", "thread": "thread"}
VARIANT = "torch-stable-abi211-cpu-x86_64-linux"
FUZZERS = ("launchers-address", "launchers-thread", "ops")

sys.path.insert(0, str(ROOT / "tools"))


def clang() -> str | None:
    """A clang that can link libFuzzer."""
    for name in ("clang++-22", "clang++"):
        if found := shutil.which(name):
            query = [found, "--print-file-name=libclang_rt.fuzzer-x86_64.a"]
            path = subprocess.run(query, capture_output=True, text=True).stdout.strip()
            if Path(path).is_file():
                return found
    return None


def build_launchers(sanitizer: str) -> Path:
    """Compiles through ninja, so only what changed is built again."""
    work = WORK / sanitizer
    work.mkdir(parents=True, exist_ok=True)
    flags = f"-std=c++17 -O1 -g -fno-omit-frame-pointer -fsanitize=fuzzer,{SANITIZERS[sanitizer]}"
    flags += " -fno-sanitize-recover=all -pthread"
    with open(work / "build.ninja", "w") as file:
        writer = ninja_syntax.Writer(file)
        command = f"{clang()} {flags} -MD -MF $out.d -c $in -o $out"
        writer.rule("compile", command=command, depfile="$out.d", deps="gcc")
        writer.rule("link", command=f"{clang()} {flags} $in -o $out")
        objects = [f"{Path(source).stem}.o" for source in SOURCES]
        for source, output in zip(SOURCES, objects, strict=True):
            writer.build(output, "compile", str(ROOT / source))
        writer.build("fuzzer", "link", objects)
    ninja_program = str(Path(ninja.BIN_DIR) / "ninja")
    subprocess.run([ninja_program, "-C", str(work), "--quiet"], check=True)
    return work / "fuzzer"


def build_ops() -> Path:
    """The CPU variant with AddressSanitizer and UBSan; returns what LOCAL_KERNELS takes."""
    build = importlib.import_module("build")
    package = build.read_package(ROOT, "cpu")
    toolchain = build.cpu_toolchain(package, WORK / "ops")
    watched = ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    build.CXX_FLAGS += watched
    toolchain.link_flags += watched
    toolchain.variant = f"fuzz/variants/{VARIANT}"
    (WORK / "ops").mkdir(parents=True, exist_ok=True)
    (WORK / "variants").mkdir(exist_ok=True)
    ops_name = f"_{package.python_name}_cpu_fuzz_{package.unique_id()}"
    extension = build.write_ninja(package, toolchain, ops_name, WORK / "ops")
    ninja_program = str(Path(ninja.BIN_DIR) / "ninja")
    subprocess.run([ninja_program, "-C", str(WORK / "ops"), "--quiet"], check=True)
    return build.assemble(package, toolchain, "cpu", extension).parent


def processor_seconds() -> float:
    """What the programs started from here have taken, all threads together."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def run_launchers(sanitizer: str, seconds: int, seed: int, isa: str) -> int:
    program = build_launchers(sanitizer)
    begin = processor_seconds()
    grown = WORK / "corpus"
    grown.mkdir(parents=True, exist_ok=True)
    command = [str(program), f"-max_total_time={seconds}", "-max_len=64", f"-seed={seed}"]
    command += ["-print_final_stats=1", f"-artifact_prefix={WORK}/"]
    command += [str(grown), str(FOLDER / "corpus")]
    environment = {**os.environ, "ROCM_KERNELS_CPU_ISA": isa}
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    if result.returncode:
        print(result.stderr[-6000:])
    runs = [line for line in result.stderr.splitlines() if "number_of_executed_units" in line]
    count = runs[-1].split()[-1] if runs else 0
    used = f"{processor_seconds() - begin:.0f} s of processor time"
    print(f"launchers-{sanitizer} ({isa or 'best'}): {count} runs, {used}")
    return result.returncode


def run_ops(seconds: int, seed: int, isa: str) -> int:
    variants = build_ops()
    compiler = importlib.import_module("build").require_tool("g++", "c++")
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        query = [compiler, f"--print-file-name={name}"]
        libraries.append(subprocess.run(query, capture_output=True, text=True).stdout.strip())
    environment = {
        **os.environ,
        "LD_PRELOAD": ":".join(libraries),
        # Python and torch leak by design; the interpreter's own handlers stay.
        "ASAN_OPTIONS": "detect_leaks=0:handle_segv=0:alloc_dealloc_mismatch=0",
        "LOCAL_KERNELS": f"org/rocm-kernels={variants}",
        "ROCM_KERNELS_CPU_ISA": isa,
    }
    command = [sys.executable, str(FOLDER / "fuzz_ops.py")]
    command += ["--seconds", str(seconds), "--seed", str(seed)]
    begin = processor_seconds()
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    print("\n".join(result.stdout.splitlines()[-25:]))
    print(f"ops: {processor_seconds() - begin:.0f} s of processor time")
    if result.returncode:
        print(result.stderr[-6000:])
    return result.returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=int, default=60, help="for each fuzzer")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--fuzzers", default=",".join(FUZZERS), help="comma-separated")
    parser.add_argument("--isa", default="", help="ROCM_KERNELS_CPU_ISA: portable, avx2, avx512")
    arguments = parser.parse_args()
    failed = 0
    for fuzzer in arguments.fuzzers.split(","):
        if fuzzer not in FUZZERS:
            parser.error(f"--fuzzers takes {', '.join(FUZZERS)}, got {fuzzer!r}")
        kind, _, sanitizer = fuzzer.partition("-")
        seconds, seed = arguments.seconds, arguments.seed
        if kind == "ops":
            failed += bool(run_ops(seconds, seed, arguments.isa))
        elif clang() is None:
            print(f"{fuzzer}: no clang with libFuzzer (Debian: clang-22 libclang-rt-22-dev)")
            failed += 1
        else:
            failed += bool(run_launchers(sanitizer, seconds, seed, arguments.isa))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
