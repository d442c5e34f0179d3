"""Compiles every kernel for every AMD target and checks its registers, LDS and scratch.

    python tools/resources.py [--target gfx942 ...] [--kernel rmsnorm_fp8 ...] [--all]

The figures are those of the code objects' own metadata, and of the launches that the kernels' own
configs ask for: LDS given at launch counts. A kernel that uses scratch memory or spills vector
registers fails, and so does one above the budget of tools/resources.toml. By default one line a
source and target is printed, for its most demanding kernel; --all prints every kernel.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import rocm

ROOT = rocm.ROOT


@dataclass(frozen=True)
class Kernel:
    """Resources of one kernel for one target."""

    name: str
    target: str
    threads: int  # of a workgroup, at most
    vgprs: int  # architectural and accumulation registers together, a lane
    sgprs: int
    lds: int  # bytes of a workgroup, those given at launch too
    scratch: int  # bytes a lane
    vgpr_spills: int
    sgpr_spills: int  # to lanes of vector registers
    waves: int  # a SIMD that registers and LDS allow
    limit: int  # waves a SIMD that the hardware allows
    waves_assumed: int = 0  # a SIMD, that the choice of a config takes the registers to allow


@dataclass(frozen=True)
class Launch:
    """How a config launches a kernel, as the project's own headers say."""

    waves: int  # of a workgroup
    lds: int  # bytes given at launch
    waves_assumed: int  # a SIMD, that the choice of a config takes the registers to allow


# Registers a lane of a SIMD, their granule, waves a SIMD and LDS bytes: from the ISA documents. On
# wave32 targets: of a SIMD of a workgroup processor in CU mode.
def _machine(target: str) -> tuple[int, int, int, int]:
    if target.startswith("gfx9"):
        return 512, 8, 8, (160 if target == "gfx950" else 64) * 1024
    return 1536, 24, 16, 64 * 1024


def kernels_of(source: Path, target: str) -> list[Kernel]:
    """Compiles `source` for `target` and reads the metadata of the code object."""
    toolchain = rocm.find_toolchain()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "code"
        subprocess.run(toolchain.device_command(source, output, target), check=True)
        notes = subprocess.run(
            [toolchain.readelf, "--notes", str(output)], check=True, capture_output=True, text=True
        ).stdout
    found = []
    for block in re.split(r"\n  - (?=\.)", notes)[1:]:
        fields = dict(re.findall(r"^\s*\.(\w+):\s+(\S+)$", block, re.MULTILINE))
        if "symbol" not in fields:
            continue
        found.append(_kernel(fields, target))
    names = subprocess.run(
        ["c++filt", "-p"], input="\n".join(k.name for k in found), capture_output=True, text=True
    ).stdout.splitlines()
    return [
        Kernel(**{**vars(kernel), "name": _short(name)})
        for kernel, name in zip(found, names, strict=True)
    ]


def _kernel(fields: dict[str, str], target: str) -> Kernel:
    wave, threads = int(fields["wavefront_size"]), int(fields["max_flat_workgroup_size"])
    vgprs, lds = int(fields["vgpr_count"]), int(fields["group_segment_fixed_size"])
    return Kernel(
        name=fields["symbol"].removesuffix(".kd"),
        target=target,
        threads=threads,
        vgprs=vgprs,
        sgprs=int(fields["sgpr_count"]),
        lds=lds,
        scratch=int(fields["private_segment_fixed_size"]),
        vgpr_spills=int(fields["vgpr_spill_count"]),
        sgpr_spills=int(fields["sgpr_spill_count"]),
        waves=_occupancy(target, vgprs, lds, -(-threads // wave)),
        limit=_machine(target)[2],
    )


def _occupancy(target: str, vgprs: int, lds: int, group_waves: int) -> int:
    """Waves a SIMD, with workgroups of `group_waves` waves."""
    registers, granule, limit, lds_bytes = _machine(target)
    waves = min(limit, registers // max(granule, -(-vgprs // granule) * granule))
    if lds:
        waves = min(waves, max(1, lds_bytes // lds * group_waves // 4))
    return waves


def launches_of(program: Path) -> dict[str, list[Launch]]:
    """Launches by kernel, printed by a host program that asks the project's headers."""
    toolchain = rocm.find_toolchain()
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "launches"
        subprocess.run(
            [toolchain.compiler, "-std=c++17", "-Wall", "-Werror", str(program), "-o", str(binary)],
            check=True,
        )
        lines = subprocess.run([str(binary)], check=True, capture_output=True, text=True).stdout
    found: dict[str, list[Launch]] = {}
    for line in lines.splitlines():
        name, *numbers = line.split("\t")
        found.setdefault(name, []).append(Launch(*map(int, numbers)))
    return found


def as_launched(kernel: Kernel, launches: list[Launch]) -> Kernel:
    """The kernel under the launch that leaves it the fewest waves."""
    under = []
    for launch in launches:
        lds = kernel.lds + launch.lds
        waves = _occupancy(kernel.target, kernel.vgprs, lds, launch.waves)
        under.append(replace(kernel, lds=lds, waves=waves, waves_assumed=launch.waves_assumed))
    return min(under, key=lambda k: (k.waves, -k.lds))


def _short(name: str) -> str:
    """Shortens a kernel's name: no namespaces, and no types of enumerators among template
    arguments."""
    return re.sub(
        r"rocm_kernels::|cdna::|skinny::|moe::|\(anonymous namespace\)::|\([\w:]+\)(?=\d)", "", name
    )


def budget_of(kernel: Kernel, table: dict) -> dict:
    """The part of a source's budget table that is for this kernel: that of its name, with its
    template arguments or without, or all."""
    whole = kernel.name.removeprefix("void ")
    return table.get(whole) or table.get(whole.partition("<")[0], table)


def listed_sources() -> dict[str, Path]:
    """The .hip files that build.toml lists, by name."""
    sections = tomllib.loads((ROOT / "build.toml").read_text())["kernel"].values()
    listed = sorted(
        {ROOT / s for section in sections for s in section["src"] if s.endswith(".hip")}
    )
    sources = {path.stem: path for path in listed}
    assert len(sources) == len(listed), f"two sources of one name: {listed}"
    return sources


def faults(kernel: Kernel, budget: dict) -> list[str]:
    """What is wrong with a kernel; `budget` has its vgprs, lds and waves."""
    found = []
    if kernel.scratch or kernel.vgpr_spills:
        found.append(f"scratch {kernel.scratch} bytes, {kernel.vgpr_spills} VGPRs spilled")
    for key, value in (("vgprs", kernel.vgprs), ("lds", kernel.lds)):
        if value > budget[key]:
            found.append(f"{key} {value} exceeds the budget of {budget[key]}")
    allowed = _occupancy(kernel.target, kernel.vgprs, 0, 4)
    if allowed < kernel.waves_assumed:
        found.append(
            f"{kernel.vgprs} VGPRs allow {allowed} waves a SIMD, the choice of a config assumes "
            f"{kernel.waves_assumed}"
        )
    if kernel.waves < budget["waves"]:
        found.append(f"{kernel.waves} waves a SIMD, the budget wants {budget['waves']}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    budgets = tomllib.loads((ROOT / "tools" / "resources.toml").read_text())
    parser.add_argument("--target", nargs="+", default=rocm.TARGETS, choices=rocm.TARGETS)
    parser.add_argument("--kernel", nargs="+", choices=sorted(budgets), help="default: all")
    parser.add_argument("--all", action="store_true", help="print every kernel")
    arguments = parser.parse_args()
    try:
        rocm.find_toolchain()
    except rocm.ToolchainMissing as missing:
        print(f"error: {missing}", file=sys.stderr)
        return 1

    found = listed_sources()
    sources = {name: found[name] for name in arguments.kernel or budgets}
    unlisted = set(found) - set(budgets)
    if unlisted:
        print(f"error: tools/resources.toml has no budget for {sorted(unlisted)}")
        return 1
    jobs = [(name, target) for name in sources for target in arguments.target]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        results = list(pool.map(lambda job: kernels_of(sources[job[0]], job[1]), jobs))
    launches = {
        name: launches_of(ROOT / budgets[name]["launches"])
        for name in sources
        if "launches" in budgets[name]
    }

    print(f"{'kernel':78} {'target':8} threads VGPR SGPR    LDS scratch spills  waves")
    failed = 0
    for (name, _), found_kernels in zip(jobs, results, strict=True):
        known = launches.get(name, {})
        kernels = [as_launched(k, known[k.name]) if k.name in known else k for k in found_kernels]
        worst = max(kernels, key=lambda k: (k.scratch, k.vgprs))
        for kernel in kernels:
            wrong = faults(kernel, budget_of(kernel, budgets[name]))
            failed += bool(wrong)
            if arguments.all or wrong or kernel is worst:
                print(
                    f"{kernel.name[:78]:78} {kernel.target:8} {kernel.threads:7} {kernel.vgprs:4} "
                    f"{kernel.sgprs:4} {kernel.lds:6} {kernel.scratch:7} {kernel.vgpr_spills:6} "
                    f"{kernel.waves:3}/{kernel.limit}"
                )
            for text in wrong:
                print(f"    FAILS: {text}")
    count = sum(map(len, results))
    print(f"{count} kernels, {failed} above budget, with scratch or with spills")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
