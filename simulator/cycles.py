"""The cycle model's GPUs, and what it finds.

The engine plays what the waves executed on compute units, caches and memory that take time
(engine/cycles.h). Here is the one table of its numbers; docs/simulator.md says which are
published, assumed, or fitted to a part of what calibration/calibrate.py compares.
"""

from __future__ import annotations

import ctypes
import dataclasses

from .timing import HARDWARE

_DOUBLES = """
clock_hz launch_cycles l1_latency l2_latency infinity_latency memory_latency scalar_latency
lds_latency l1_bytes l2_bytes fabric_bytes write_bytes memory_bytes dispatch_cycles barrier_cycles
matrix_share matrix_share_fp8 flag_cycles
"""
_INTEGERS = """
dies units simds waves registers register_granule lds_bytes l1_size l1_line l1_ways l1_outstanding
address_queue lds_queue l2_size l2_ways l2_channels infinity_size infinity_ways memory_channels
scalar_size scalar_sharers transcendental_cycles conversion_cycles sampled warm traced
"""


class Structure(ctypes.Structure):
    """SimCycles of engine/capi.h."""

    _fields_ = [
        *((name, ctypes.c_double) for name in _DOUBLES.split()),
        *((name, ctypes.c_uint32) for name in _INTEGERS.split()),
    ]


@dataclasses.dataclass(frozen=True)
class Machine:
    """A GPU, and how to play a launch on it.

    Latencies are cycles from issue to result of one access with nothing else under way. Rates are
    sustained. sampled: dies to play, the rest is taken to be like them; warm: the Infinity Cache
    holds what fits of the launch's data before it starts, as in a benchmark that repeats it;
    traced: compute units of the first die whose waves are listed one by one.
    """

    clock_hz: float
    launch_s: float  # from one kernel's end to the next one's first wave
    l1_latency: float
    l2_latency: float
    infinity_latency: float
    memory_latency: float
    scalar_latency: float
    lds_latency: float
    l2_bytes: float  # a cycle and channel
    fabric_bytes_per_s: float  # of the device, between L2 and what lies behind
    write_bytes_per_s: float  # the same for what L2 writes back
    memory_bytes_per_s: float
    dies: int
    units: int  # a die
    lds_bytes: int
    l1_size: int
    l1_line: int
    l2_size: int  # a die
    l2_channels: int
    infinity_kib: int
    memory_channels: int
    l1_bytes: float = 64  # a cycle and compute unit
    dispatch_cycles: float = 1  # a wave and die
    barrier_cycles: float = 8
    # Of their cycles that matrix pipes may be busy before the clock falls: with 16-bit operands,
    # with 8-bit ones. Of f32 and f64 nobody published a limit.
    matrix_share: float = 1
    matrix_share_fp8: float = 1
    simds: int = 4
    waves: int = 8
    registers: int = 512
    register_granule: int = 8
    l1_ways: int = 64
    l1_outstanding: int = 96  # lines
    address_queue: int = 8  # vector memory instructions of a unit that wait for their addresses
    lds_queue: int = 64  # cycles of LDS work that may wait
    l2_ways: int = 16
    infinity_ways: int = 16
    scalar_size: int = 16 << 10
    scalar_sharers: int = 2
    transcendental_cycles: int = 16
    conversion_cycles: int = 4
    # From the moment at which a flag is in its L2 until another workgroup's poll has found it. 0:
    # polls wait for nothing, and there are as many as in the functional run.
    flag_s: float = 0
    sampled: int = 0  # 0: all
    warm: bool = False
    traced: int = 0

    def structure(self) -> Structure:
        """The same for the engine."""
        if not 0 <= self.sampled <= self.dies:
            raise ValueError(f"sampled: required 0 (all) to {self.dies} dies, got {self.sampled}")
        s = Structure()
        for name, _ in Structure._fields_:
            if hasattr(self, name):
                setattr(s, name, type(getattr(s, name))(getattr(self, name)))
        s.launch_cycles = self.launch_s * self.clock_hz
        s.flag_cycles = self.flag_s * self.clock_hz
        s.fabric_bytes = self.fabric_bytes_per_s / self.clock_hz / self.dies
        s.write_bytes = self.write_bytes_per_s / self.clock_hz / self.dies
        s.memory_bytes = self.memory_bytes_per_s / self.clock_hz
        s.infinity_size = self.infinity_kib
        s.sampled = self.sampled or self.dies
        return s


DIES = 8  # of an MI300X and an MI355X


def _published(target: str) -> dict:
    """The fields of `target` that the quick bound knows too."""
    hardware = HARDWARE[target]
    return {
        "clock_hz": hardware.clock_hz,
        "fabric_bytes_per_s": hardware.infinity_bytes_per_s,
        "memory_bytes_per_s": hardware.memory_bytes_per_s,
        "units": hardware.compute_units // DIES,
        "lds_bytes": hardware.lds_bytes,
        "l1_bytes": hardware.l1_bytes_per_cycle,
        "simds": hardware.simds,
        "waves": hardware.waves_per_simd,
        "registers": hardware.vgprs_per_lane,
        "register_granule": hardware.vgpr_granule,
    }


_GFX942 = Machine(
    **_published("gfx942"),
    launch_s=0.45e-6,
    l1_latency=120,
    l2_latency=270,
    infinity_latency=480,
    memory_latency=750,
    scalar_latency=60,
    lds_latency=64,
    l2_bytes=128,
    write_bytes_per_s=1.75e12,
    # What bfloat16 products reach, 708 of 1307 TFLOP/s: power, not the pipes, is their limit.
    matrix_share=708 / 1307,
    matrix_share_fp8=1273 / 2615,
    dies=DIES,
    l1_size=32 << 10,
    l1_line=128,
    l2_size=4 << 20,
    l2_channels=16,
    infinity_kib=256 << 10,
    memory_channels=128,
)
MACHINES = {
    "gfx942": _GFX942,
    "gfx950": dataclasses.replace(
        _GFX942,
        **_published("gfx950"),
        write_bytes_per_s=2.6e12,
        matrix_share=1,
        matrix_share_fp8=1,
    ),
    # One of the two dies of the card.
    "gfx90a": dataclasses.replace(
        _GFX942,
        clock_hz=1.7e9,
        launch_s=5e-6,
        l2_latency=250,
        infinity_latency=0,
        memory_latency=700,
        fabric_bytes_per_s=3.2e12,
        write_bytes_per_s=3.2e12,
        memory_bytes_per_s=1.165e12,
        matrix_share=1,
        matrix_share_fp8=1,
        dies=1,
        units=110,
        l1_size=16 << 10,
        l1_line=64,
        l2_size=29 << 18,
        l2_channels=32,
        infinity_kib=0,
        memory_channels=32,
    ),
}


def machine_for(target: str, **changes) -> Machine:
    """The GPU of `target`, with fields changed, as machine_for("gfx942", warm=True)."""
    if target not in MACHINES:
        raise ValueError(f"target: required one of {', '.join(MACHINES)}, got {target}")
    return dataclasses.replace(MACHINES[target], **changes)


@dataclasses.dataclass(frozen=True)
class Cycles:
    """What the cycle model found; `raw` has all of it, see docs/simulator.md.

    seconds: modelled, with the launch; spent: share of all SIMD cycles by what they went to.
    """

    raw: dict

    @property
    def seconds(self) -> float:
        return self.raw["seconds"]

    @property
    def settled_seconds(self) -> float:
        """With the way to memory of what the launch leaves dirty in the caches: what a launch takes
        in a loop over more data than the Infinity Cache holds, where the next ones evict it."""
        return self.raw["settled_seconds"]

    @property
    def spent(self) -> dict[str, float]:
        total = sum(self.raw["spent"].values()) or 1.0
        return {name: cycles / total for name, cycles in self.raw["spent"].items()}

    @property
    def fetch_bytes(self) -> int:
        """Bytes that L2 asked for: FETCH_SIZE."""
        return self.raw["memory"]["fetch_bytes"]

    @property
    def write_bytes(self) -> int:
        """Bytes that L2 wrote back: WRITE_SIZE."""
        return self.raw["memory"]["write_bytes"]


def cycles_text(cycles: Cycles, count: int = 15) -> str:
    """Time, where the SIMDs' cycles went, memory, and what cost most, as text."""
    raw, memory = cycles.raw, cycles.raw["memory"]
    lines = ["", f"cycle model: {cycles.seconds * 1e6:.2f} us, {raw['cycles']:,.0f} cycles, "
             f"{raw['waves_per_simd']:.1f} waves a SIMD"]  # fmt: skip
    lines.append(
        ", ".join(
            f"{name} {part:.1%}"
            for name, part in sorted(cycles.spent.items(), key=lambda x: -x[1])
            if part >= 0.001
        )
    )
    rate = lambda hits, all_: f"{memory[hits] / max(1, memory[all_]):.1%}"  # noqa: E731
    lines.append(
        f"L1 hits {rate('l1_hits', 'l1_requests')}, L2 hits {rate('l2_hits', 'l2_requests')}, "
        f"fetched {memory['fetch_bytes']:,} bytes, written back {memory['write_bytes']:,}, "
        f"memory busy {memory['memory_busy']:.1%}, a load takes {memory['load_latency']:.0f} cycles"
    )
    lines += [
        "",
        f"{'SIMDs idle for it':>18} {'waves stood at it':>18} {'issued':>12}  instruction",
    ]
    for i in sorted(raw["code"], key=lambda i: -(i["awaited"] + i["stood"]))[:count]:
        lines.append(f"{i['awaited']:18,.0f} {i['stood']:18,.0f} {i['issued']:12,}  "
                     f"{i['text']}  [{i['source']}]")  # fmt: skip
    return "\n".join(lines)
