"""Counters of kernels whose traffic is known, occupancy, and the modelled time."""

import numpy as np
import pytest
from hipcc import device

import simulator
from simulator.timing import HARDWARE, modelled_time, occupancy

u32 = np.uint32

SOURCE = """
GLOBAL void copy(u4* o, const u4* a) { o[BID * 256 + TID] = a[BID * 256 + TID]; }
GLOBAL void strided(u32* o, const u32* a) { o[BID * 64 + TID] = a[(BID * 64 + TID) * 32]; }
GLOBAL void again(u32* o, const u32* a, int turns) {
  u32 sum = 0, r; u64 p = (u64)(a + TID);
  for (int n = 0; n < turns; ++n) {  // a volatile load would go past L1
    asm volatile("global_load_dword %0, %1, off\\n s_waitcnt vmcnt(0)" : "=v"(r) : "v"(p));
    sum += r;
  }
  o[BID * 64 + TID] = sum;
}
GLOBAL void banks(u32* o, int stride) {
  SHARED u32 x[64 * 33];
  x[TID * stride] = TID;
  sync();
  o[TID] = x[TID * stride];
}
"""


@pytest.fixture(scope="module")
def code():
    return device(SOURCE)


def test_a_copy_moves_its_bytes_once(code):
    groups = 64
    size = groups * 256 * 16
    data = np.random.default_rng(0).integers(0, 2**32, size // 4, dtype=u32)
    out = np.zeros_like(data)
    c = code.launch("copy", groups, 256, [simulator.Out(out), data]).check().counters
    np.testing.assert_array_equal(out, data)
    assert c["global_read_bytes"] == c["global_written_bytes"] == size
    # Buffers need not start on a line, so one more may be touched by each workgroup.
    assert 2 * size // 128 <= c["lines_128"] <= 2 * size // 128 + 16 * groups
    assert size <= c["memory_read_bytes"] <= size + 128 * (groups + 1)
    assert size <= c["memory_written_bytes"] <= size + 128 * (groups + 1)
    assert c["l1_hits"] <= 4 * groups
    assert c["by_class"]["vmem"] == 2 * 4 * groups and c["workgroups"] == groups


def test_strided_reads_touch_a_line_each(code):
    data, out = np.zeros(64 * 32 * 4, u32), np.zeros(64 * 4, u32)
    c = code.launch("strided", 4, 64, [out, data]).check().counters
    assert c["global_read_bytes"] == 4 * 64 * 4
    assert c["memory_read_bytes"] >= 4 * 64 * 128


def test_caches_answer_the_second_time(code):
    data, out = np.zeros(64, u32), np.zeros(64 * 8, u32)
    one = code.launch("again", 8, 64, [out, data, 1]).check().counters
    many = code.launch("again", 8, 64, [out, data, 10]).check().counters
    assert many["global_read_bytes"] == 10 * one["global_read_bytes"]
    assert many["memory_read_bytes"] == one["memory_read_bytes"] <= 8 * 3 * 128
    assert many["l1_hits"] >= 8 * 9 * 2
    # Eight workgroups lie on eight XCDs, whose L2 caches each miss; the Infinity Cache then hits.
    assert one["l2_misses"] >= 8 * 2 and one["infinity_hits"] >= 7 * 2


@pytest.mark.parametrize("stride,worst", [(1, 1), (2, 2), (32, 32), (33, 1)])
def test_bank_conflicts(code, stride, worst):
    out = np.zeros(64, u32)
    c = code.launch("banks", 1, 64, [out, stride]).check().counters
    # One write and one read, each in two halves of 32 lanes.
    assert c["lds_cycles"] == 4 * worst and c["lds_conflict_cycles"] == 4 * (worst - 1)
    assert c["lds_bytes"] == 512


def test_occupancy_by_registers_slots_and_lds():
    hw = HARDWARE["gfx942"]
    resources = {"vgprs": 64, "lds": 0}
    assert occupancy(resources, 4, 0, hw) == (8, 8)
    assert occupancy({**resources, "vgprs": 65}, 4, 0, hw)[0] == 7
    assert occupancy({**resources, "vgprs": 256}, 4, 0, hw) == (2, 2)
    assert occupancy({**resources, "vgprs": 512}, 4, 0, hw) == (1, 1)
    assert occupancy(resources, 4, 32768, hw) == (2, 2)
    assert occupancy({**resources, "lds": 65536}, 16, 0, hw) == (4, 1)


def test_time_is_bound_by_what_there_is_most_of(code):
    groups = 2048
    data = np.zeros(groups * 256 * 4, u32)
    result = code.launch("copy", groups, 256, [np.zeros_like(data), data], checks=False)
    t = result.time
    assert t.bound == "memory"
    assert t.total == pytest.approx(t.memory + t.latency + t.launch)
    ticketed = {**result.raw, "counters": {**result.counters, "tickets": 1}}
    assert modelled_time(ticketed).total == pytest.approx(t.total + t.handoff + 2e-6)
    floor = 2 * data.nbytes / HARDWARE["gfx942"].memory_bytes_per_s
    assert floor <= t.memory <= 1.2 * floor
    busier = {**result.raw, "counters": {**result.counters, "matrix_cycles": 10**12}}
    assert modelled_time(busier).bound == "matrix"
