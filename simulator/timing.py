"""A time for a launch, modelled from its counters and the published rates of the hardware.

The model is a roofline with parts: each resource's time is what it would take alone and at full
use; the largest is the floor, because the parts overlap, and latency and launch come on top.
It knows nothing of clocks under load, of how waves of different workgroups interleave, or of DRAM
pages. A modelled time is a means to compare two versions of a kernel, not a measurement.
"""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Rates of one GPU, per second or per cycle as said."""

    compute_units: int
    simds: int  # per compute unit
    clock_hz: float
    waves_per_simd: int
    vgprs_per_lane: int  # of a SIMD, shared by its waves
    vgpr_granule: int
    lds_bytes: int  # per compute unit
    memory_bytes_per_s: float  # sustained
    infinity_bytes_per_s: float
    l2_bytes_per_s: float
    l1_bytes_per_cycle: int  # per compute unit
    memory_latency_s: float
    handoff_s: float
    launch_s: float


# Sustained rates as measured and published for these GPUs. Published kernels that move next to
# nothing take 1.9 us on an MI300X: that is the launch and one trip to memory. A handoff is what a
# workgroup does that adds up what others left in memory: store and release at agent scope (0.72 us
# on one XCD, 0.98 on eight, as measured by others on an MI300X with ROCm 7.2), an atomic past L2
# (0.26 to 0.6), load and acquire (0.79).
_MI300X = Hardware(
    compute_units=304,
    simds=4,
    clock_hz=2.1e9,
    waves_per_simd=8,
    vgprs_per_lane=512,
    vgpr_granule=8,
    lds_bytes=64 << 10,
    memory_bytes_per_s=4.2e12,
    infinity_bytes_per_s=11.9e12,
    l2_bytes_per_s=25e12,
    l1_bytes_per_cycle=64,
    memory_latency_s=0.8e-6,
    handoff_s=2.0e-6,
    launch_s=1.1e-6,
)
HARDWARE = {
    "gfx942": _MI300X,
    "gfx950": dataclasses.replace(
        _MI300X,
        compute_units=256,
        clock_hz=2.4e9,
        lds_bytes=160 << 10,
        memory_bytes_per_s=6.1e12,
        infinity_bytes_per_s=14e12,
        l2_bytes_per_s=30e12,
    ),
}


@dataclasses.dataclass(frozen=True)
class Time:
    """Modelled seconds of a launch and of its parts."""

    total: float
    memory: float
    issue: float
    matrix: float
    lds: float
    latency: float
    handoff: float
    launch: float
    bound: str  # the part that sets the floor
    waves_per_simd: int  # occupancy
    rounds: int  # how often the GPU is filled


def occupancy_of(vgprs: int, most: int, registers: int, granule: int) -> int:
    """Waves a SIMD of `registers` a lane that a kernel's VGPRs allow, at most `most`."""
    return min(most, registers // max(granule, math.ceil(vgprs / granule) * granule))


def occupancy(
    resources: dict, waves_per_workgroup: int, dynamic_lds: int, hardware: Hardware
) -> tuple[int, int]:
    """Waves a SIMD and workgroups a compute unit that registers, LDS and wave slots allow."""
    waves = occupancy_of(
        resources["vgprs"], hardware.waves_per_simd, hardware.vgprs_per_lane, hardware.vgpr_granule
    )
    groups = max(1, waves * hardware.simds // waves_per_workgroup)
    lds = resources["lds"] + dynamic_lds
    if lds:
        groups = min(groups, max(1, hardware.lds_bytes // lds))
    return min(waves, math.ceil(groups * waves_per_workgroup / hardware.simds)), groups


def modelled_time(raw: dict) -> Time | None:
    """Time of a launch from the engine's report `raw` (target, counters, resources).

    None for a target without rates here: gfx90a runs for its results.
    """
    hw = HARDWARE.get(raw["target"])
    if hw is None:
        return None
    c = raw["counters"]
    by_class = c["by_class"]
    waves = c["waves_per_workgroup"]
    per_simd, per_unit = occupancy(raw["resources"], waves, raw["dynamic_lds"], hw)
    # Units that have work; the last round may fill only some of them.
    used = min(hw.compute_units, c["workgroups"])
    rounds = math.ceil(c["workgroups"] / (hw.compute_units * per_unit))
    share = hw.clock_hz * used

    line = 128
    memory_bytes = c["memory_read_bytes"] + c["memory_written_bytes"]
    infinity_bytes = (c["l2_misses"] + c["l2_write_backs"]) * line
    l2_bytes = (c["l2_hits"] + c["l2_misses"]) * line
    l1_bytes = c["lines_64"] * 64
    memory = max(
        memory_bytes / hw.memory_bytes_per_s,
        infinity_bytes / hw.infinity_bytes_per_s,
        l2_bytes / hw.l2_bytes_per_s,
        l1_bytes / (hw.l1_bytes_per_cycle * share),
    )
    # A SIMD starts a wave's vector instruction over 4 cycles, a transcendental one over 16; the
    # scalar unit, memory and branches issue beside them, one a cycle.
    vector = 4 * by_class["valu"] + 16 * by_class["trans"]
    scalar = sum(by_class[k] for k in ("salu", "smem", "branch", "wait", "barrier", "other"))
    transfers = 4 * sum(by_class[k] for k in ("vmem", "flat", "lds", "scratch"))
    issue = max(vector, scalar, transfers) / (hw.simds * share)
    matrix = c["matrix_cycles"] / (hw.simds * share)
    lds = c["lds_cycles"] / share
    # Each round pays the first access in full; later ones hide behind other waves' work.
    latency = rounds * hw.memory_latency_s
    parts = {"memory": memory, "issue": issue, "matrix": matrix, "lds": lds}
    bound = max(parts, key=parts.get)
    handoff = hw.handoff_s if c["tickets"] else 0.0
    total = parts[bound] + latency + handoff + hw.launch_s
    return Time(
        total, memory, issue, matrix, lds, latency, handoff, hw.launch_s, bound, per_simd, rounds
    )
