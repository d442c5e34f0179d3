"""What emulators of gfx942 are known to get wrong of memory, arguments and control: one test or
more for each. test_traps.py has vector instructions."""

import numpy as np
import pytest
from hipcc import device

import simulator

f32, f16, u32, u64, u8 = np.float32, np.float16, np.uint32, np.uint64, np.uint8

SOURCE = """
#define AS(n) __attribute__((address_space(n)))
GLOBAL void flat_lds(u32* o, const u32* a, int which) {
  SHARED u32 x[64]; u32 y[4] = {a[TID], 1, 2, 3};
  x[TID] = a[TID] + 1; sync();
  u32* p = which == 0 ? (u32*)x + TID : which == 1 ? y + (TID & 3) : o + 64 + TID;
  asm volatile("" : "+v"(p));
  o[TID] = *p;
}
GLOBAL void lanes_off(u32* o, const u32* a, int n) {
  u32 r = 7;
  if (TID < n) r = *(const volatile u32*)(a + TID);
  o[TID] = r;
}
GLOBAL void buffer_bytes(u32* o, const unsigned char* a, int n) {
  auto r = __builtin_amdgcn_make_buffer_rsrc((void*)a, 0, n, 0x27000);
  u32 b = __builtin_amdgcn_raw_buffer_load_b8(r, TID, 0, 0);
  u32 s = __builtin_amdgcn_raw_buffer_load_b16(r, TID * 2, 0, 0);
  u32 w = __builtin_amdgcn_raw_buffer_load_b32(r, TID * 4, 0, 0);
  o[TID * 3] = b; o[TID * 3 + 1] = s; o[TID * 3 + 2] = w;
}
GLOBAL void buffer_store(u32* o, int n) {
  auto r = __builtin_amdgcn_make_buffer_rsrc(o, 0, n, 0x27000);
  __builtin_amdgcn_raw_buffer_store_b32(TID + 1, r, TID * 4, 0, 0);
}
GLOBAL void atomic_returns(u32* o, u32* counter) {
  o[TID] = __scoped_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}
GLOBAL void atomic_silent(u32* o, u32* counter) {
  u32 r = 0xabcd, one = 2; u64 p = (u64)counter;
  asm volatile("global_atomic_add %1, %2, off\\n"
     "s_waitcnt vmcnt(0)" : "+v"(r) : "v"(p), "v"(one) : "memory");
  o[TID] = r;
}
GLOBAL void atomic_packed(half* sum, float* total) {
  typedef half h2 __attribute__((ext_vector_type(2)));
  h2 x = {(half)1, (half)2};
  __builtin_amdgcn_global_atomic_fadd_v2f16((AS(1) h2*)sum, x);
  __builtin_amdgcn_global_atomic_fadd_f32((AS(1) float*)total, 0.5f);
}
GLOBAL void fences(u32* o) {
  o[TID] = TID;
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent");
  o[TID] += 1;
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "");
}
GLOBAL void scratch(u32* o, const u32* a) {
  volatile u32 x[32];
  for (int n = 0; n < 32; ++n) x[n] = a[n] + TID + BID * 1000;
  o[BID * 256 + TID] = x[a[TID] & 31];
}
extern SHARED u32 dynamic[];
GLOBAL void dynamic_lds(u32* o, int n) {
  for (int i = TID; i < n; i += 64) dynamic[i] = i * 3;
  sync();
  o[TID] = dynamic[n - 1 - TID];
}
GLOBAL void hidden(u32* o) {
  const AS(4) u32* counts = (const AS(4) u32*)__builtin_amdgcn_implicitarg_ptr();
  const AS(4) unsigned short* sizes = (const AS(4) unsigned short*)(counts + 3);
  if (TID == 0)
    for (int n = 0; n < 3; ++n) { o[n] = counts[n]; o[3 + n] = sizes[n]; o[6 + n] = sizes[3 + n]; }
}
GLOBAL void lds_to_accumulators(u32* o, const u32* a) {
  SHARED u32 x[64]; u32 r, value = a[TID], at = (u32)(u64)(AS(3) u32*)&x[TID];
  asm volatile("v_accvgpr_write_b32 a0, %1\\n s_nop 4\\n ds_write_b32 %2, a0\\n"
     "s_waitcnt lgkmcnt(0)\\n"
               "ds_read_b32 a1, %2\\n s_waitcnt lgkmcnt(0)\\n v_accvgpr_read_b32 %0, a1"
               : "=v"(r) : "v"(value), "v"(at) : "a0", "a1", "memory");
  o[TID] = r;
}
// control
DEVICE __attribute__((noinline)) u32 called(u32 x) { asm volatile("" : "+v"(x)); return x * 3 + 1; }
GLOBAL void calls(u32* o, const u32* a) { o[TID] = called(a[TID]) + called(a[TID] + 1); }
GLOBAL void clock(u64* o) {
  u64 a = __builtin_readcyclecounter(); __builtin_amdgcn_s_sleep(2);
  o[TID] = __builtin_readcyclecounter() - a;
}
GLOBAL void grid_wait(u32* count, u32* o, int n) {
  if (TID == 0) {
    __scoped_atomic_fetch_add(count, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
    while (__scoped_atomic_load_n(count, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE) < n)
      __builtin_amdgcn_s_sleep(1);
  }
  __builtin_amdgcn_s_barrier();
  o[BID * 64 + TID] = BID;
}
GLOBAL void stride(u32* o, u64 a, u32 b, half c, int d) {
  if (TID == 0) { o[0] = (u32)a; o[1] = (u32)(a >> 32); o[2] = b; o[3] = (u32)(float)c; o[4] = d; }
}
"""
LANE = np.arange(64)


@pytest.fixture(scope="module")
def code():
    return device(SOURCE)


def test_gfx950_wide_loads_to_lds_and_its_lds_size():
    code = device("""
extern SHARED u4 dynamic[];
GLOBAL void wide(u4* o, const u4* a, int at) {
  u64 from = (u64)(a + TID);
  u32 to = (u32)(u64)(__attribute__((address_space(3))) u4*)dynamic + at;
  asm volatile("s_mov_b32 m0, %1\\n s_nop 0\\n global_load_lds_dwordx4 %0, off\\n"
               "s_waitcnt vmcnt(0)" :: "v"(from), "s"(to) : "memory", "m0");
  o[TID] = dynamic[at / 16 + TID];
}""", target="gfx950")  # fmt: skip
    data = np.random.default_rng(9).integers(0, 2**31, (64, 4)).astype(u32)
    out = np.zeros((64, 4), u32)
    code.launch("wide", 1, 64, [out, data, 2048], lds=160 << 10).check()
    np.testing.assert_array_equal(out, data)
    with pytest.raises(simulator.SimulatorError, match="160 KiB"):
        code.launch("wide", 1, 64, [out, data, 0], lds=(160 << 10) + 4)


@pytest.mark.parametrize("which", range(3))
def test_flat_reaches_lds_scratch_and_memory(code, which):
    data, out = np.arange(64, dtype=u32) * 7, np.arange(128, dtype=u32)
    code.launch("flat_lds", 1, 64, [out, data, which]).check()
    want = [data + 1, np.where(LANE % 4 == 0, data, LANE % 4), 64 + LANE][which]
    np.testing.assert_array_equal(out[:64], want)


def test_lanes_that_are_off_touch_nothing(code):
    out, data = np.zeros(64, u32), np.arange(10, dtype=u32)
    code.launch("lanes_off", 1, 64, [out, data, 10]).check()
    np.testing.assert_array_equal(out, np.where(LANE < 10, LANE, 7))


def test_buffer_accesses_end_at_the_record_count(code):
    data, out = np.arange(1, 257, dtype=u8)[:255].copy(), np.zeros((64, 3), u32)
    n = 50
    code.launch("buffer_bytes", 1, 64, [out, data, n]).check()
    padded = np.concatenate([data[:n], np.zeros(512, u8)])
    np.testing.assert_array_equal(out[:, 0], padded[:64])
    np.testing.assert_array_equal(out[:, 1], padded[:128].view(np.uint16))
    want = padded[:256].view(u32).copy()
    want[12] = 0  # bytes 48 to 51 are half outside: the whole word is
    np.testing.assert_array_equal(out[:, 2], want)
    out = np.zeros(64, u32)
    code.launch("buffer_store", 1, 64, [out, 40]).check()
    np.testing.assert_array_equal(out, np.where(LANE < 10, LANE + 1, 0))


def test_atomics(code):
    out, counter = np.zeros(64, u32), np.array([5], u32)
    code.launch("atomic_returns", 1, 64, [out, counter]).check()
    assert counter[0] == 69 and sorted(out) == list(range(5, 69))
    code.launch("atomic_silent", 1, 64, [out, counter]).check()
    assert counter[0] == 197 and (out == 0xABCD).all()
    halves, total = np.zeros(2, f16), np.zeros(1, f32)
    code.launch("atomic_packed", 4, 64, [halves, total]).check()
    assert halves.tolist() == [256, 512] and total[0] == 128


def test_fences_are_executed(code):
    out = np.zeros(64, u32)
    result = code.launch("fences", 1, 64, [out]).check()
    np.testing.assert_array_equal(out, LANE + 1)
    assert result.counters["by_class"]["vmem"] > 3  # buffer_wbl2 and buffer_inv are there


def test_scratch_is_per_wave(code):
    data, out = np.random.default_rng(7).integers(0, 999, 256).astype(u32), np.zeros(512, u32)
    code.launch("scratch", 2, 256, [out, data]).check()
    t = np.arange(512)
    np.testing.assert_array_equal(out, data[data[t % 256] % 32] + t % 256 + t // 256 * 1000)


def test_dynamic_lds_comes_at_dispatch(code):
    out = np.zeros(64, u32)
    code.launch("dynamic_lds", 1, 64, [out, 1000], lds=4000).check()
    np.testing.assert_array_equal(out, 3 * (999 - LANE))
    assert code.launch("dynamic_lds", 1, 64, [out, 1000], lds=3996).findings


def test_hidden_arguments():
    # Only kernels that use them have hidden arguments.
    code = device(SOURCE)
    out = np.zeros(9, u32)
    code.launch("hidden", (2, 3, 4), (8, 4, 2), [out], race=False).check()
    assert out.tolist() == [2, 3, 4, 8, 4, 2, 0, 0, 0]


def test_kernel_arguments_of_all_sizes(code):
    out = np.zeros(5, u32)
    code.launch("stride", 1, 64, [out, 0x123456789A, 77, 2.5, -3]).check()
    assert out.tolist() == [0x3456789A, 0x12, 77, 2, 2**32 - 3]


def test_kernarg_preload():
    flags = ("-mllvm", "-amdgpu-kernarg-preload-count=6")
    code = device(
        """GLOBAL void preload(u32* o, u32 a, u32 b, u64 c) {
        o[TID] = a + 10 * b + (u32)(c >> 32) + TID; }""",
        *flags,
    )
    assert code.kernels["preload"]["kernarg_preload"] > 0
    out = np.zeros(64, u32)
    code.launch("preload", 1, 64, [out, 3, 4, 5 << 32]).check()
    np.testing.assert_array_equal(out, 48 + LANE)


def test_lds_and_accumulation_registers(code):
    data = np.random.default_rng(8).integers(0, 2**31, 64).astype(u32)
    out = np.zeros(64, u32)
    code.launch("lds_to_accumulators", 1, 64, [out, data]).check()
    np.testing.assert_array_equal(out, data)


def test_calls_and_clock(code):
    data, out = np.arange(64, dtype=u32), np.zeros(64, u32)
    code.launch("calls", 1, 64, [out, data]).check()
    np.testing.assert_array_equal(out, 3 * data + 1 + 3 * data + 4)
    ticks = np.zeros(64, u64)
    code.launch("clock", 1, 64, [ticks]).check()
    assert (ticks > 0).all() and (ticks < 10**6).all()


@pytest.mark.parametrize("seed", range(2))
def test_workgroups_that_wait_for_each_other(code, seed):
    groups = 24
    count, out = np.zeros(1, u32), np.zeros((groups, 64), u32)
    code.launch("grid_wait", groups, 64, [count, out, groups], seed=seed).check()
    assert (out == np.arange(groups)[:, None]).all()


def test_a_wait_that_never_ends_is_told(code):
    count, out = np.zeros(1, u32), np.zeros((2, 64), u32)
    with pytest.raises(simulator.SimulatorError, match="waits for something"):
        code.launch("grid_wait", 2, 64, [count, out, 3], max_instructions=20_000)


def test_partial_last_wave(code):
    out, data = np.zeros(100, u32), np.arange(100, dtype=u32)
    code.launch("calls", 1, 100, [out, data]).check()
    np.testing.assert_array_equal(out, 6 * data + 5)
