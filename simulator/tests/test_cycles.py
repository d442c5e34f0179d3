"""The cycle model: instructions whose time is published, counted one by one, and where it says that
the cycles went."""

import dataclasses
import itertools

import numpy as np
import pytest
from hipcc import device

from simulator import machine_for

u32 = np.uint32

# Each kernel repeats one thing; what stands around it is the same in `nothing`.
SOURCE = """
#define TIMES64(x) x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x \\
                   x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x
GLOBAL void nothing(u32* o) { asm volatile("" ::: "v40"); }
GLOBAL void vector(u32* o) {
  asm volatile(TIMES64("v_add_u32 v40, v40, v41\\n") ::: "v40", "v41");
}
GLOBAL void transcendental(u32* o) {
  asm volatile(TIMES64("v_exp_f32 v40, v41\\n") ::: "v40", "v41");
}
GLOBAL void scalar(u32* o) { asm volatile(TIMES64("s_add_u32 s40, s40, s41\\n") ::: "s40", "s41"); }
GLOBAL void matrix16(u32* o) {
  asm volatile(TIMES64("v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[40:41], v[42:43], a[0:3]\\n")
               ::: "a0", "a1", "a2", "a3", "v40", "v41", "v42", "v43");
}
GLOBAL void matrix32(u32* o) {
  asm volatile(TIMES64("v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[40:41], v[42:43], a[0:15]\\n")
               ::: "a15", "v40", "v41", "v42", "v43");
}
GLOBAL void hidden(u32* o) {  // three vector instructions fit under each MFMA of 16 cycles
  asm volatile(TIMES64("v_mfma_f32_16x16x32_fp8_fp8 a[0:3], v[40:41], v[42:43], a[0:3]\\n"
                       "v_add_u32 v50, v50, v51\\n v_add_u32 v52, v52, v53\\n"
                       "v_add_u32 v54, v54, v55\\n")
               ::: "a0", "a1", "a2", "a3", "v40", "v41", "v42", "v43", "v50", "v52", "v54");
}
GLOBAL void shared_reads(u32* o, int stride) {
  SHARED u32 x[64 * 64];
  u32 at = TID % 64 * stride * 4;
  x[TID % 64 * stride] = TID;
  asm volatile("s_waitcnt lgkmcnt(0)\\n" TIMES64("ds_read_b32 v40, %0\\n") "s_waitcnt lgkmcnt(0)"
               :: "v"(at) : "v40");
  o[TID] = x[0];
}
GLOBAL void chase(u64* o, int turns) {  // each load's address is the last one's result
  u64 p = (u64)(o + TID % 64);
  for (int n = 0; n < turns; ++n) {
    asm volatile("global_load_dwordx2 %0, %0, off sc1\\n s_waitcnt vmcnt(0)" : "+v"(p));
  }
  o[TID + 64] = p;
}
GLOBAL void uneven(u32* o) {  // wave 0 works, the others wait at the barrier
  if (__builtin_amdgcn_readfirstlane(TID) < 64) {
    asm volatile(TIMES64("v_exp_f32 v40, v41\\n") ::: "v40", "v41");
  }
  __builtin_amdgcn_s_barrier();
}
#define WORK for (int n = 0; n < 64; ++n) \\
  asm volatile(TIMES64("v_exp_f32 v40, v41\\n") ::: "v40", "v41")
#define FLAG(p) __scoped_atomic_load_n(p, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE)
GLOBAL void hand_over(u32* o) {  // the second works when the first has
  if (BID == 0) {
    WORK;
    __scoped_atomic_store_n(o, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else {
    while (FLAG(o) == 0) __builtin_amdgcn_s_sleep(1);
    WORK;
  }
}
GLOBAL void hand_over_late(u32* o) {  // each look is asked for long before it is awaited
  if (BID == 0) {
    WORK;
    __scoped_atomic_store_n(o, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else {
    u32 seen;
    do {
      asm volatile("global_load_dword %0, %1, off sc1\\n" TIMES64("v_exp_f32 v40, v41\\n")
                   "s_waitcnt vmcnt(0)" : "=&v"(seen) : "v"(o) : "v40", "v41");
    } while (__builtin_amdgcn_readfirstlane(seen) == 0);
    WORK;
  }
}
GLOBAL void meet(u32* o) {  // all work when the fifth has
  if (BID == 4) WORK;
  __scoped_atomic_fetch_add(o, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  while (FLAG(o) < 64 * 16) __builtin_amdgcn_s_sleep(1);
  WORK;
}
GLOBAL void told_twice(u32* o) {  // the second works as soon as it is told for the first time
  if (BID == 0) {
    __scoped_atomic_store_n(o, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
    WORK;
    __scoped_atomic_store_n(o, 2u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else {
    while (FLAG(o) < 1) __builtin_amdgcn_s_sleep(1);
    WORK;
    while (FLAG(o) < 2) __builtin_amdgcn_s_sleep(1);
  }
}
GLOBAL void lanes_leave(u32* o) {  // lane 1's flag comes first here, on hardware lane 0's
  if (BID == 1) {  // few instructions, 64 * 127 * 20 cycles
    for (int n = 0; n < 20; ++n) __builtin_amdgcn_s_sleep(127);
    __scoped_atomic_store_n(o + 1, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else if (BID == 2) {
    WORK;
    WORK;
    __scoped_atomic_store_n(o, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
  } else {
    while (TID < 2 && FLAG(o + TID) == 0) {}
    WORK;
  }
}
GLOBAL void copy(u4* o, const u4* a) { o[BID * 256 + TID] = a[BID * 256 + TID]; }
GLOBAL void copy_streaming(u4* o, const u4* a) {
  __builtin_nontemporal_store(a[BID * 256 + TID], &o[BID * 256 + TID]);
}
"""

WIDE = """
GLOBAL void wide(u4* o, int turns) {
  SHARED u4 x[256];
  x[TID] = u4{1, 2, 3, 4};
  u32 at = TID * 16; u4 r;
  for (int n = 0; n < turns; ++n) {
    asm volatile(".rept 16\\n ds_read_b128 %0, %1\\n .endr\\n s_waitcnt lgkmcnt(0)"
                 : "=v"(r) : "v"(at));
  }
  o[TID] = r;
}
"""

WIDE_MATRIX = """
#define TIMES64(x) x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x \\
                   x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x x
#define KERNEL(name, text) GLOBAL void name(u32* o) { \\
  asm volatile(TIMES64(text "\\n") ::: "a15", "v64", "v32"); }
KERNEL(nothing, "")
KERNEL(f16, "v_mfma_f32_16x16x32_f16 a[0:3], v[32:35], v[36:39], a[0:3]")
KERNEL(bf16, "v_mfma_f32_32x32x16_bf16 a[0:15], v[32:35], v[36:39], a[0:15]")
KERNEL(i8, "v_mfma_i32_16x16x64_i8 a[0:3], v[32:35], v[36:39], a[0:3]")
KERNEL(fp8, "v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[32:39], v[40:47], a[0:3]")
KERNEL(fp4, "v_mfma_f32_16x16x128_f8f6f4 a[0:3], v[32:35], v[40:43], a[0:3] cbsz:4 blgp:4")
KERNEL(sparse, "v_smfmac_f32_16x16x64_f16 a[0:3], v[32:35], v[40:47], v48")
"""

# One unit that does everything at once apart from what is counted.
QUICK = machine_for("gfx942", launch_s=0, dispatch_cycles=0, sampled=1)


@pytest.fixture(scope="module")
def code():
    return device(SOURCE)


def run(code, name, threads, *args, groups=1, machine=QUICK, **options):
    args = args or (np.zeros(4096, u32),)
    return code.launch(name, groups, threads, list(args), checks=False, cycles=machine, **options)


def cycles(code, name, threads, *args):
    """Cycles of one workgroup without those of an empty kernel."""
    took = run(code, name, threads, *args).cycles.raw["cycles"]
    return took - run(code, "nothing", threads).cycles.raw["cycles"]


@pytest.mark.parametrize("name,each", [("vector", 4), ("transcendental", 16), ("matrix16", 16),
                                       ("matrix32", 32), ("hidden", 16)])  # fmt: skip
@pytest.mark.parametrize("waves,deep", [(1, 1), (4, 1), (8, 2), (16, 4)])
def test_pipes_take_their_published_cycles(code, name, each, waves, deep):
    # Four waves lie on four SIMDs; from there on they share them.
    took = cycles(code, name, 64 * waves)
    assert 64 * each * deep - each <= took <= 64 * each * deep + 4 * waves


@pytest.mark.parametrize(
    "name,flops,peak",
    [
        ("f16", 2 * 16 * 16 * 32, 2.5e15),
        ("bf16", 2 * 32 * 32 * 16, 2.5e15),
        ("i8", 2 * 16 * 16 * 64, 5.0e15),
        ("fp8", 2 * 16 * 16 * 128, 5.0e15),
        ("fp4", 2 * 16 * 16 * 128, 10.0e15),
        ("sparse", 2 * 16 * 16 * 64, 5.0e15),
    ],
)
def test_wide_matrix_instructions_reach_the_peak_of_an_mi355x(name, flops, peak):
    """Operations a second as published, of 256 compute units at 2.4 GHz."""
    code = device(WIDE_MATRIX, target="gfx950")
    machine = machine_for("gfx950", launch_s=0, dispatch_cycles=0, sampled=1)
    few, many = (
        run(code, kernel, 256, machine=machine).cycles.raw["cycles"] for kernel in ("nothing", name)
    )
    assert (many - few) / 64 == pytest.approx(flops * 256 * 4 * 2.4e9 / peak, rel=0.03)


def test_matrix_pipes_that_power_cannot_feed_slow_the_clock(code):
    """The published sustained rate is a bound on time, not on what a pipe does in a cycle."""
    free = dataclasses.replace(QUICK, matrix_share_fp8=1)
    for kernel, busy in (("matrix32", True), ("vector", False)):
        groups = 38 * 16  # all compute units of the die that is played
        held, alone = (run(code, kernel, 256, groups=groups, machine=m).cycles
                       for m in (QUICK, free))  # fmt: skip
        cycles = held.raw["cycles"]
        assert alone.raw["cycles"] == cycles == pytest.approx(alone.seconds * QUICK.clock_hz)
        matrix = held.raw["issued"]["matrix"] * 32 / (38 * 4) / cycles
        slowed = held.seconds / alone.seconds
        assert slowed == pytest.approx(matrix / QUICK.matrix_share_fp8 if busy else 1)
        assert (slowed > 1.5) == busy
        assert held.raw["machine"]["clock_hz"] == pytest.approx(QUICK.clock_hz / slowed)


LOOPS = """
#define KERNEL(name, text) GLOBAL void name(u32* o, int turns) { \\
  for (int n = 0; n < turns; ++n) asm volatile(".rept 64\\n" text "\\n.endr" ::: "a15", "v48"); }
KERNEL(fp8, "v_mfma_f32_32x32x16_fp8_fp8 a[0:15], v[32:33], v[36:37], a[0:15]")
KERNEL(int8, "v_mfma_i32_32x32x16_i8 a[0:15], v[32:33], v[36:37], a[0:15]")
KERNEL(bf16, "v_mfma_f32_32x32x8_bf16 a[0:15], v[32:33], v[36:37], a[0:15]")
KERNEL(f16, "v_mfma_f32_32x32x8_f16 a[0:15], v[32:33], v[36:37], a[0:15]")
KERNEL(f64, "v_mfma_f64_16x16x4_f64 a[0:7], v[32:33], v[36:37], a[0:7]")
KERNEL(f32, "v_mfma_f32_32x32x2_f32 a[0:15], v32, v36, a[0:15]")
"""


@pytest.mark.parametrize("name,flops,published", [
    ("fp8", 32768, 1273), ("int8", 32768, 1273), ("bf16", 16384, 708), ("f16", 16384, 708),
    ("f64", 2048, 163.4), ("f32", 4096, 163.4),
])  # fmt: skip
def test_a_loop_of_products_alone_runs_at_the_published_sustained_rate(name, flops, published):
    """An MI300X: what was measured and published where power is the limit, else the peak."""
    found = run(device(LOOPS), name, 256, np.zeros(64, u32), 4, groups=38 * 8 * 2).cycles
    rate = 8 * found.raw["issued"]["matrix"] * flops / found.seconds
    assert 0.94 * published < rate * 1e-12 < 1.005 * published


SUM = """
GLOBAL void add(f4* o, const f4* a, const f4* b) {
  o[BID * 256 + TID] = a[BID * 256 + TID] + b[BID * 256 + TID];
}
GLOBAL void search(f4* o, const f4* a, const f4* b) {
  f4 s = a[BID * 256 + TID] + b[BID * 256 + TID];
  if (s.x == 7) o[0] = s;
}
"""


def test_what_stays_dirty_in_the_infinity_cache_is_told():
    """A vector add of 96 MB asks memory for two thirds of it in its time: its bytes over `seconds`
    are more than memory moves. With the rest they are not, nor are those that memory moved."""
    a, b, out = (np.zeros(1 << 23, np.float32) for _ in range(3))
    found = run(device(SUM), "add", 256, out, a, b, groups=8192, machine=QUICK, caches=False).cycles
    memory, moved = found.raw["memory"], 3 * out.nbytes
    assert 4.2e12 < moved / found.seconds < 4.2e12 * 3 / 2
    assert 0.9 * 4.2e12 < moved / found.settled_seconds < 1.001 * 4.2e12
    # Lines that L2 wrote back half are dirty in both.
    assert memory["dirty_bytes"] * 8 == pytest.approx(out.nbytes, rel=0.05)
    assert not memory["memory_written_bytes"]
    assert 8 * memory["memory_read_bytes"] / found.seconds < 1.001 * 4.2e12


def test_a_loop_over_data_that_the_infinity_cache_holds():
    """`warm` is such a loop: next to nothing comes from memory, the cache's rate is the limit."""
    a, b, out = (np.zeros(1 << 23, np.float32) for _ in range(3))
    cold, warm = (
        run(device(SUM), "search", 256, out, a, b, groups=8192, caches=False,
            machine=dataclasses.replace(QUICK, warm=warm)).cycles
        for warm in (False, True)
    )  # fmt: skip
    read = [c.raw["memory"]["memory_read_bytes"] for c in (cold, warm)]
    assert read[1] < read[0] / 100, "but for sets that are too full"
    assert warm.seconds < 0.7 * cold.seconds
    assert 2 * out.nbytes / warm.seconds < QUICK.fabric_bytes_per_s


def test_scalar_instructions_of_four_simds_share_nothing(code):
    assert cycles(code, "scalar", 64) == pytest.approx(64 * 4, abs=4)
    assert cycles(code, "scalar", 256) == pytest.approx(64 * 4, abs=8)


def test_a_simd_issues_to_its_pipes_side_by_side(code):
    """Vector instructions of one wave run while the matrix pipe works for another."""
    alone = run(code, "matrix16", 512).cycles
    assert alone.raw["issued"]["matrix"] == 8 * 64
    both = run(code, "hidden", 512).cycles
    assert both.raw["cycles"] <= alone.raw["cycles"] + 32
    assert both.raw["issued"]["valu"] >= 3 * 8 * 64


@pytest.mark.parametrize("stride,each", [(1, 2), (2, 4), (4, 8), (32, 64)])
def test_bank_conflicts_take_cycles_of_the_whole_unit(code, stride, each):
    arrays = np.zeros(4096, u32)
    one, four = (
        run(code, "shared_reads", n, arrays, stride).cycles.raw["cycles"] for n in (64, 256)
    )
    # 64 reads of each wave go through one LDS; a wave by itself issues one every fourth cycle.
    assert four - one == pytest.approx(64 * (4 * each - max(each, 4)), rel=0.1, abs=40)


def chase(code, machine, turns):
    links = np.zeros(128, np.uint64)
    links[:64] = links.ctypes.data + 8 * np.arange(64, dtype=np.uint64)
    return code.launch("chase", 1, 64, [links, turns], checks=False, cycles=machine).cycles


def test_a_chain_of_loads_takes_the_latency_each_time(code):
    short, long = (chase(code, QUICK, n).raw["cycles"] for n in (10, 110))
    # And 8 cycles of the address unit for 512 bytes, and the loop, whose jump takes 16.
    assert (long - short) / 100 == pytest.approx(QUICK.l2_latency + 8 + 16 + 4 * 4, abs=8)
    result = chase(code, QUICK, 110)
    loads = max(result.raw["code"], key=lambda i: i["awaited"])
    assert loads["text"].startswith("global_load_dwordx2")
    busiest = max(
        result.raw["simds"], key=lambda row: row[result.raw["spent_names"].index("scalar")]
    )
    waits = busiest[result.raw["spent_names"].index("wait_memory")]
    assert waits == max(busiest) and waits >= 0.8 * 110 * QUICK.l2_latency


def test_waiting_at_a_barrier_is_said(code):
    result = run(code, "uneven", 256).cycles
    rows = result.raw["simds"][:4]
    at = result.raw["spent_names"].index("barrier")
    assert sorted(row[at] > 900 for row in rows) == [False, True, True, True]
    assert max(row[result.raw["spent_names"].index("valu")] for row in rows) >= 64 * 16


def test_every_cycle_of_every_simd_is_put_down_once(code):
    groups = 64
    data = np.zeros(groups * 256 * 4, u32)
    result = run(code, "copy", 256, np.zeros_like(data), data, groups=groups).cycles
    end = result.raw["cycles"] - result.raw["launch_cycles"] - result.raw["drain_cycles"]
    for row in result.raw["simds"]:
        assert sum(row) == pytest.approx(end, abs=20)
    assert result.raw["waves"] == 4 * groups // 8  # one die of eight was played


def test_memory_sets_the_pace_of_a_copy(code):
    groups = 4096
    data = np.zeros(groups * 256 * 4, u32)
    machine = machine_for("gfx942")
    result = run(code, "copy", 256, np.zeros_like(data), data, groups=groups, machine=machine)
    # What is written stays in the Infinity Cache, but the way there is the narrower one.
    floor = data.nbytes / min(machine.memory_bytes_per_s, machine.write_bytes_per_s)
    assert floor <= result.cycles.seconds - machine.launch_s <= 1.1 * floor + 2e-6
    assert data.nbytes <= result.cycles.fetch_bytes <= 1.05 * data.nbytes
    assert data.nbytes <= result.cycles.write_bytes <= 1.05 * data.nbytes
    warm = run(code, "copy", 256, np.zeros_like(data), data, groups=groups,
               machine=machine_for("gfx942", warm=True))  # fmt: skip
    assert warm.cycles.seconds <= result.cycles.seconds
    assert warm.cycles.raw["memory"]["memory_read_bytes"] == 0


def test_a_sample_of_the_dies_stands_for_all(code):
    groups = 2048
    data = np.zeros(groups * 256 * 4, u32)
    whole, part = (
        run(code, "copy", 256, np.zeros_like(data), data, groups=groups,
            machine=machine_for("gfx942", sampled=n)).cycles.seconds
        for n in (8, 2)
    )  # fmt: skip
    assert part == pytest.approx(whole, rel=0.1)


def test_waves_are_traced_on_request(code):
    groups = 304 * 20  # more than fit at once
    data = np.zeros(groups * 256 * 4, u32)
    machine = machine_for("gfx942", traced=2)
    result = run(code, "copy", 256, np.zeros_like(data), data, groups=groups, machine=machine)
    trace = result.cycles.raw["trace"]
    assert {wave[0] for wave in trace["waves"]} == {0, 1}
    assert all(begin < end for *_, begin, end in trace["waves"])
    assert len(trace["memory"]) == 2 * len(trace["waves"])  # a load and a store each
    slots = {}
    for unit, simd, slot, _, _, begin, end in trace["waves"]:
        slots.setdefault((unit, simd, slot), []).append((begin, end))
    assert all(
        before[1] <= after[0]
        for waves in map(sorted, slots.values())
        for before, after in itertools.pairwise(waves)
    ), "two waves in one slot"
    waits = [wait for wait in trace["waits"] if wait[2] == "wait_memory"]
    assert len(waits) == len(trace["waves"])  # the store waits for the load
    for wave, _, _, begin, end in waits:
        assert trace["waves"][wave][5] <= begin < end <= trace["waves"][wave][6]


def test_without_the_model_there_is_nothing(code):
    data = np.zeros(1024, u32)
    assert code.launch("copy", 1, 256, [data, data.copy()]).cycles is None
    with pytest.raises(ValueError, match="required one of gfx942"):
        machine_for("gfx1100")
    with pytest.raises(ValueError, match="to 8 dies, got 9"):
        machine_for("gfx942", sampled=9).structure()


@pytest.mark.parametrize("target,each", [("gfx942", 8), ("gfx950", 4)])
def test_gfx950_reads_wide_words_from_64_banks(target, each):
    code = device(WIDE, target=target)
    machine = machine_for(target, launch_s=0, sampled=1)
    few, many = (
        code.launch("wide", 1, 256, [np.zeros(4096, u32), n], checks=False, cycles=machine)
        for n in (4, 20)
    )
    took = many.cycles.raw["cycles"] - few.cycles.raw["cycles"]
    # 16 turns of 16 reads by four waves; at the end of each the queue runs empty once.
    floor = 16 * 16 * 4 * each
    assert floor <= took <= floor + 16 * (machine.lds_latency + 16 + 4 * 8)


@pytest.mark.parametrize("order", [{}, {"late": True, "threads": 1}], ids=["quick", "late"])
@pytest.mark.parametrize("kernel, groups, works, flags", [
    ("hand_over", 2, 2, 1), ("hand_over_late", 2, 2, 1), ("meet", 16, 2, 1),
    ("told_twice", 2, 1, 1), ("lanes_leave", 3, 1 + 20 * 127 / 1024, 1),
])  # fmt: skip
def test_polls_wait_for_what_they_find(code, kernel, groups, works, flags, order):
    """One works while the others wait for it, then they do: one after the other. Who looks late in
    the functional run is not held up by what was told since. A store that comes while a look is on
    its way counts for that look if it is what the look reads, and not otherwise. Where each lane
    waits for its own flag, all are waited for, whichever came last in the functional run."""
    machine = machine_for("gfx942", flag_s=2e-6)
    for seed in range(3):
        o = np.zeros(64, u32)
        result = code.launch(
            kernel, groups, 64, [o], checks=False, seed=seed, cycles=machine, **order
        )
        cycles = result.cycles.raw["cycles"] - machine.launch_s * machine.clock_hz
        least = works * 64 * 64 * 16 + flags * machine.flag_s * machine.clock_hz
        assert least < cycles < least + 8000
        # A look before the loop, and of its turns one, however many the functional run took.
        polls = [i for i in result.cycles.raw["code"] if "load" in i["text"] and "sc1" in i["text"]]
        assert sum(i["issued"] for i in polls) <= 4 * groups
