"""A timeline of the cycle model in the trace format of chrome://tracing, which Perfetto opens too.

A compute unit is a process. Its threads are the wave slots of its SIMDs, with what each wave stood
at inside it, then a lane for the MFMA of each SIMD and one for LDS; memory operations are
asynchronous slices, because they overlap. Times are microseconds from the first wave's start.
"""

from __future__ import annotations

import json

from .api import Result

_WORDS = {
    "valu": "vector pipe busy",
    "matrix": "matrix pipe busy",
    "internal": "another wave's turn",
    "wait_memory": "wait for memory",
    "wait_lds": "wait for LDS",
    "wait_scalar": "wait for scalar load",
    "memory_queue": "memory queue full",
    "lds_queue": "LDS queue full",
    "empty": "start",
}
# Numbers of a compute unit's lanes: 100 a SIMD. Viewers take 0 for nothing, and a lane of its
# process's number for the main one.
_SIMD, _SLOTS, _MATRIX, _LDS, _MEMORY = 100, 10, 90, 1000, 1001


class _Events:
    def __init__(self, clock_hz: float):
        self.all: list[dict] = []
        self._ns = 1e9 / clock_hz

    def at(self, cycle: float) -> float:
        # Whole nanoseconds, as viewers keep them, so that what lies within a slice stays there.
        return round(cycle * self._ns) / 1000

    def name(self, kind: str, pid: int, tid: int, **args) -> None:
        self.all.append({"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args})

    def slice(self, pid: int, tid: int, name: str, begin: float, end: float, **args) -> None:
        start = self.at(begin)
        self.all.append({"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": start,
                         "dur": round(self.at(end) - start, 3), "args": args})  # fmt: skip

    def overlapping(self, pid: int, number: int, name: str, begin: float, end: float, args) -> None:
        both = {"pid": pid, "tid": _MEMORY, "cat": "memory", "id2": {"local": hex(number)},
                "name": name}  # fmt: skip
        self.all.append({"ph": "b", "ts": self.at(begin), "args": args, **both})
        self.all.append({"ph": "e", "ts": self.at(end), **both})


def chrome_trace(result: Result) -> str:
    """The timeline of a launch as JSON text.

    ValueError when the launch was not played with cycles=machine_for(target, traced=N), N compute
    units of which are then shown.
    """
    trace = result.cycles and result.cycles.raw.get("trace")
    if not trace:
        raise ValueError("required a launch with cycles=machine_for(target, traced=N), got one "
                         "without a trace")  # fmt: skip
    raw = result.cycles.raw
    code = {i["index"]: i for i in raw["code"]}

    def describe(index: int) -> dict:
        return {"instruction": code[index]["text"], "source": code[index]["source"]}

    def owner(number: int) -> dict:
        return {"workgroup": waves[number][3], "wave": waves[number][4]}

    def mnemonic(index: int) -> str:
        return code[index]["text"].split(None, 1)[0]

    waves = trace["waves"]
    events = _Events(raw["machine"]["clock_hz"])
    for unit in sorted({wave[0] for wave in waves}):
        events.name("process_name", unit + 1, 0, name="compute unit")
        events.name("process_sort_index", unit + 1, 0, sort_index=unit)
    named: set[tuple[int, int]] = set()

    def lane(number: int, tid: int, name: str) -> tuple[int, int]:
        """Process and thread of a wave's lane."""
        pid = waves[number][0] + 1
        if (pid, tid) not in named:
            named.add((pid, tid))
            events.name("thread_name", pid, tid, name=name)
            events.name("thread_sort_index", pid, tid, sort_index=tid)
        return pid, tid

    def slot_of(number: int) -> tuple[int, int]:
        _, simd, slot = waves[number][:3]
        return lane(number, _SIMD * simd + slot + _SLOTS, f"SIMD {simd} wave slot {slot}")

    for number in sorted(range(len(waves)), key=waves.__getitem__):
        *_, group, wave, begin, end = waves[number]
        events.slice(*slot_of(number), f"workgroup {group} wave {wave}", begin, end)
    for number, index, why, begin, end in trace["waits"]:
        events.slice(*slot_of(number), _WORDS.get(why, why), begin, end, **describe(index))
    for number, index, begin, end in trace["matrix"]:
        simd = waves[number][1]
        place = lane(number, _SIMD * simd + _MATRIX, f"SIMD {simd} MFMA")
        events.slice(*place, mnemonic(index), begin, end, **owner(number), **describe(index))
    for number, index, begin, end in trace["lds"]:
        place = lane(number, _LDS, "LDS")
        events.slice(*place, mnemonic(index), begin, end, **owner(number), **describe(index))
    for n, (number, index, begin, end) in enumerate(trace["memory"]):
        args = {**owner(number), **describe(index)}
        events.overlapping(waves[number][0] + 1, n, mnemonic(index), begin, end, args)
    facts = {"kernel": result.raw["readable"], "target": result.raw["target"],
             "modelled_us": result.cycles.seconds * 1e6}  # fmt: skip
    return json.dumps({"traceEvents": events.all, "displayTimeUnit": "ns", "otherData": facts})
