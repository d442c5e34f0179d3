"""Planted bugs are found, with kernel, line, wave and address; correct code gives no findings."""

import numpy as np
import pytest
from hipcc import device

import simulator

f32, u32 = np.float32, np.uint32

SPLIT_K = """
// Workgroups add partial sums; the last one to come reads them all.
template <bool Release> DEVICE void split(float* out, float* partial, u32* count, int n) {
  SHARED u32 last;
  partial[BID * 256 + TID] = (float)(BID + TID);
  if (Release) __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
  __builtin_amdgcn_s_barrier();
  if (TID == 0)
    last = __scoped_atomic_fetch_add(count, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE) == n - 1;
  sync();
  if (last) {
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    float sum = 0;
    for (int g = 0; g < n; ++g) sum += partial[g * 256 + TID];            // SUM OF PARTIALS
    out[TID] = sum;
  }
}
GLOBAL void split_k(float* o, float* p, u32* c, int n) { split<true>(o, p, c, n); }
GLOBAL void split_k_no_release(float* o, float* p, u32* c, int n) { split<false>(o, p, c, n); }
"""
SOURCE = """
GLOBAL void missing_wait(u32* out, const u32* in) {
  u64 address = (u64)(in + TID); u32 r;
  asm volatile("global_load_dword %0, %1, off\\n"
               "v_add_u32 %0, 1, %0" : "=&v"(r) : "v"(address));          // MISSING WAIT
  asm volatile("s_waitcnt vmcnt(0)");
  out[TID] = r;
}
GLOBAL void missing_scalar_wait(u32* out, const u32* in) {
  u32 r;
  asm volatile("s_load_dword s20, %1, 0x0\\n"
               "v_mov_b32 %0, s20\\n"                                     // MISSING SCALAR WAIT
               "s_waitcnt lgkmcnt(0)" : "=v"(r) : "s"(in) : "s20");
  out[TID] = r;
}
GLOBAL void scalar_counted_in_order(u32* out, const u32* in) {
  SHARED u32 x[64];
  x[TID] = 3 * TID;
  u32* at = x + TID; u32 r, s;
  asm volatile("s_waitcnt lgkmcnt(0)\\n s_load_dword s20, %3, 0x0\\n"
               "ds_read_b32 %0, %2\\n ds_read_b32 %1, %2\\n s_waitcnt lgkmcnt(1)\\n"
               "v_mov_b32 %0, %0\\n v_mov_b32 %1, s20\\n"                   // SCALAR IN ORDER
               "s_waitcnt lgkmcnt(0)"
               : "=&v"(r), "=&v"(s) : "v"((__attribute__((address_space(3))) u32*)at), "s"(in)
               : "s20", "memory");
  out[TID] = r;
}
GLOBAL void wait_too_weak(u32* out, const u32* in) {
  u64 address = (u64)(in + TID); u32 r, s;
  asm volatile("global_load_dword %0, %2, off\\n global_load_dword %1, %2, off offset:4\\n"
               "s_waitcnt vmcnt(1)\\n v_mov_b32 %1, %1\\n s_waitcnt vmcnt(0)"  // WAIT TOO WEAK
               : "=&v"(r), "=&v"(s) : "v"(address));
  out[TID] = r + s;
}
GLOBAL void overwritten_result(u32* out, const u32* in) {
  u64 address = (u64)(in + TID); u32 r;
  asm volatile("global_load_dword %0, %1, off\\n v_mov_b32 %0, 0\\n"        // OVERWRITTEN
               "s_waitcnt vmcnt(0)"
               : "=&v"(r) : "v"(address));
  out[TID] = r;
}
GLOBAL void lds_race(u32* out) {
  SHARED u32 x[256];
  x[TID] = TID;
  asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory");
  out[TID] = x[255 - TID];                                                // LDS RACE
}
GLOBAL void lds_no_race(u32* out) {
  SHARED u32 x[256];
  x[TID] = TID;
  sync();
  out[TID] = x[255 - TID];
  sync();
  x[TID] = 2 * TID;
  sync();
  out[TID] += x[255 - TID];
}
GLOBAL void barrier_without_wait(u32* out) {
  SHARED u32 x[256];
  x[TID] = TID;
  asm volatile("s_barrier" ::: "memory");                                 // NO WAIT BEFORE IT
  out[TID] = x[255 - TID];                                                // READS TOO EARLY
}
GLOBAL void missing_second_barrier(u32* out) {
  SHARED u32 x[256];
  for (u32 n = 0; n < 4; ++n) {
    x[TID] = TID + n;                                                     // OVERWRITES WHAT IS READ
    sync();
    out[TID] += x[255 - TID];
  }
}
GLOBAL void global_race(u32* out, u32* scratch) {
  scratch[BID * 256 + TID] = TID;
  out[BID * 256 + TID] = scratch[(BID ^ 1) * 256 + TID];                  // GLOBAL RACE
}
GLOBAL void same_word_twice(u32* out) {
  out[TID & 63] = TID;                                                    // FOUR WAVES WRITE IT
}
GLOBAL void out_of_bounds(u32* out, const u32* in, int n) {
  int i = BID * 256 + TID;
  u32 x = *(const volatile u32*)(in + i);                                 // READ OUT OF BOUNDS
  if (i < n) out[i] = x;
}
GLOBAL void store_out_of_bounds(u32* out) {
  out[BID * 256 + TID] = 1;                                               // STORE OUT OF BOUNDS
}
GLOBAL void lds_out_of_bounds(u32* out, int at) {
  SHARED u32 x[64];
  x[TID] = TID;
  sync();
  out[TID] = x[TID + at];                                                 // LDS OUT OF BOUNDS
}
GLOBAL void uninitialised(u32* out, const u32* in) {
  out[TID] = in[TID];                                                     // NOBODY WROTE IT
}
GLOBAL void uninitialised_lds(u32* out, int n) {
  SHARED u32 x[256];
  if (TID < n) x[TID] = TID;
  sync();
  out[TID] = x[TID];                                                      // NOBODY WROTE THE REST
}
GLOBAL void unknown(u32* out) {
  asm volatile("v_screen_partition_4se_b32 v0, v0" ::: "v0");             // UNKNOWN
  out[TID] = 1;
}
GLOBAL void dma_without_wait(u32* out, const u32* in) {
  SHARED u32 x[64];
  __builtin_amdgcn_global_load_lds((__attribute__((address_space(1))) u32*)in + TID,
      (__attribute__((address_space(3))) u32*)x, 4, 0, 0);
  u32 r, at = TID * 4;
  asm volatile("ds_read_b32 %0, %1\\n s_waitcnt lgkmcnt(0)" : "=v"(r) : "v"(at) : "memory");  // DMA
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
  out[TID] = r;
}
GLOBAL void dma_with_wait(u32* out, const u32* in) {
  SHARED u32 x[64];
  __builtin_amdgcn_global_load_lds((__attribute__((address_space(1))) u32*)in + TID,
      (__attribute__((address_space(3))) u32*)x, 4, 0, 0);
  u32 r, at = TID * 4;
  asm volatile("s_waitcnt vmcnt(0)\\n ds_read_b32 %0, %1\\n s_waitcnt lgkmcnt(0)"
               : "=v"(r) : "v"(at) : "memory");
  out[TID] = r;
}
// Wave 0 produces through LDS, the others poll a flag.
template <bool Wait> DEVICE void handover(u32* out, const u32* in) {
  SHARED u32 data[64]; SHARED u32 flag;
  if (TID == 0) flag = 0;
  sync();
  if (TID < 64) {
    // In assembly, because the compiler would put the wait in by itself.
    u32 to = (u32)(u64)(__attribute__((address_space(3))) u32*)data; u64 from = (u64)(in + TID);
    asm volatile("s_mov_b32 m0, %1\\n s_nop 0\\n global_load_lds_dword %0, off"
                 :: "v"(from), "s"(to) : "memory", "m0");
    if (Wait) asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
    __scoped_atomic_store_n(&flag, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
  } else {
    while (__scoped_atomic_load_n(&flag, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP) == 0)
      __builtin_amdgcn_s_sleep(1);
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    out[TID] = data[TID & 63];                                            // AFTER THE FLAG
  }
}
GLOBAL void flag_after_wait(u32* out, const u32* in) { handover<true>(out, in); }
GLOBAL void flag_without_wait(u32* out, const u32* in) { handover<false>(out, in); }
"""
SOURCE += SPLIT_K


@pytest.fixture(scope="module")
def code():
    return device(SOURCE)


def line_of(text: str) -> int:
    """Line of `text` in the compiled file: the prelude comes before."""
    import hipcc

    lines = (hipcc.PRELUDE + SOURCE).splitlines()
    return next(n + 1 for n, line in enumerate(lines) if text in line)


def found(result, kind, text, address=None):
    matching = [f for f in result.findings if f.kind == kind]
    assert matching, f"no {kind} among {[str(f) for f in result.findings]}"
    at_line = [f for f in matching if f.source.endswith(f":{line_of(text)}")]
    assert at_line, f"{kind} is reported at {[f.source for f in matching]}"
    finding = at_line[0]
    if address is not None:
        assert address[0] <= finding.address < address[1], str(finding)
    assert finding.instruction and finding.count > 0
    return finding


def span(array):
    return array.ctypes.data, array.ctypes.data + array.nbytes


def buffers(groups=1):
    return np.zeros(256 * groups, u32), np.arange(256 * groups + 1, dtype=u32)


def test_missing_wait(code):
    out, data = buffers()
    result = code.launch("missing_wait", 1, 256, [out, data])
    finding = found(result, "missing-wait", "global_load_dword %0, %1, off", span(data))
    assert finding.kernel == "missing_wait" and finding.wave < 4
    assert "vmcnt" in finding.message
    assert not np.array_equal(out, data[:256] + 1), "the poison must show in the result"


def test_missing_scalar_wait(code):
    out, data = buffers()
    result = code.launch("missing_scalar_wait", 1, 64, [out, data])
    finding = found(result, "missing-wait", "s_load_dword s20", span(data))
    assert "s20" in finding.message and "lgkmcnt" in finding.message


def test_a_count_above_0_says_nothing_of_scalar_loads(code):
    """Those of LDS that it counts are done: the first read's result may be used."""
    out, data = buffers()
    result = code.launch("scalar_counted_in_order", 1, 64, [out, data])
    (finding,) = (f for f in result.findings if f.kind == "missing-wait")
    assert finding is found(result, "missing-wait", "s_load_dword s20, %3", span(data))
    assert "s20" in finding.message
    np.testing.assert_array_equal(out[:64], 3 * np.arange(64))


def test_wait_that_counts_too_little(code):
    out, data = buffers()
    result = code.launch("wait_too_weak", 1, 64, [out, data])
    found(result, "missing-wait", "global_load_dword %0, %2, off")


def test_overwriting_a_register_that_a_load_owes(code):
    out, data = buffers()
    result = code.launch("overwritten_result", 1, 64, [out, data])
    assert "overwrites" in found(result, "missing-wait", "// OVERWRITTEN").message


def test_lds_race(code):
    out, _ = buffers()
    finding = found(code.launch("lds_race", 1, 256, [out]), "lds-race", "// LDS RACE", (0, 1024))
    assert "wave" in finding.message and "wrote it" in finding.message


@pytest.mark.parametrize("seed", range(5))
def test_barriers_order(code, seed):
    out, _ = buffers()
    code.launch("lds_no_race", 1, 256, [out], seed=seed).check()
    np.testing.assert_array_equal(out, 3 * (255 - np.arange(256)))


def test_barrier_without_a_wait(code):
    out, _ = buffers()
    found(code.launch("barrier_without_wait", 1, 256, [out]), "lds-race", "// READS TOO EARLY")


def test_a_buffer_overwritten_too_early(code):
    kinds = set()
    for seed in range(4):
        out, _ = buffers()
        result = code.launch("missing_second_barrier", 1, 256, [out], seed=seed)
        kinds |= {f.kind for f in result.findings}
    assert "lds-race" in kinds


def test_global_race_between_workgroups(code):
    out, data = np.zeros(512, u32), np.zeros(512, u32)
    result = code.launch("global_race", 2, 256, [out, data])
    kinds = [f for f in result.findings if f.kind == "global-race"]
    assert kinds and span(data)[0] <= kinds[0].address < span(data)[1]
    assert "workgroup" in kinds[0].message


def test_waves_that_write_the_same_word(code):
    out, _ = buffers()
    found(code.launch("same_word_twice", 1, 256, [out]), "global-race", "// FOUR WAVES", span(out))


def test_read_out_of_bounds(code):
    out, data = np.zeros(300, u32), np.arange(300, dtype=u32)
    result = code.launch("out_of_bounds", 2, 256, [out, data, 300])
    finding = found(result, "out-of-bounds", "// READ OUT OF BOUNDS")
    assert finding.workgroup == (1, 0, 0) and "past the end" in finding.message
    np.testing.assert_array_equal(out, data)


def test_store_out_of_bounds_does_not_touch_memory(code):
    whole = np.zeros(600, u32)
    result = code.launch("store_out_of_bounds", 2, 256, [whole[:300]])
    found(result, "out-of-bounds", "// STORE OUT OF BOUNDS")
    assert whole[:300].all() and not whole[300:].any()


def test_lds_out_of_bounds(code):
    out, _ = buffers()
    code.launch("lds_out_of_bounds", 1, 64, [out, 0]).check()
    result = code.launch("lds_out_of_bounds", 1, 64, [out, 1])
    assert found(result, "out-of-bounds", "// LDS OUT OF BOUNDS").address == 256


def test_uninitialised_memory(code):
    out, data = buffers()
    code.launch("uninitialised", 1, 256, [simulator.Out(out), data]).check()
    result = code.launch("uninitialised", 1, 256, [out, simulator.Out(data)])
    found(result, "uninitialised", "// NOBODY WROTE IT", span(data))


def test_uninitialised_lds(code):
    out, _ = buffers()
    code.launch("uninitialised_lds", 1, 256, [out, 256]).check()
    result = code.launch("uninitialised_lds", 1, 256, [out, 200])
    assert found(result, "uninitialised", "// NOBODY WROTE THE REST").address >= 800


def test_unknown_instruction_stops(code):
    out, _ = buffers()
    assert "v_screen_partition_4se_b32" in code.unknown
    with pytest.raises(simulator.SimulatorError) as error:
        code.launch("unknown", 1, 64, [out])
    message = str(error.value)
    assert "v_screen_partition_4se_b32" in message and "kernel unknown" in message
    assert f":{line_of('// UNKNOWN')}" in message and "->" in message


def test_load_to_lds(code):
    out, data = buffers()
    result = code.launch("dma_without_wait", 1, 64, [out, data])
    found(result, "missing-wait", "// DMA", (0, 256))
    code.launch("dma_with_wait", 1, 64, [out, data]).check()
    np.testing.assert_array_equal(out[:64], data[:64])


@pytest.mark.parametrize("seed", range(8))
def test_flag_before_its_data(code, seed):
    out, data = buffers()
    bad = code.launch("flag_without_wait", 1, 256, [out, data], seed=seed)
    found(bad, "lds-race", "// AFTER THE FLAG")


def test_flag_in_lds_is_clean(code):
    for seed in range(8):
        out, data = buffers()
        code.launch("flag_after_wait", 1, 256, [out, data], seed=seed).check()
        np.testing.assert_array_equal(out[64:], np.tile(data[:64], 3))


@pytest.mark.parametrize("seed", range(4))
def test_split_k_counter(code, seed):
    groups = 24
    out, partial = np.zeros(256, f32), np.zeros(256 * groups, f32)
    count = np.zeros(1, u32)
    args = [simulator.Out(out), simulator.Out(partial), count, groups]
    code.launch("split_k", groups, 256, args, seed=seed).check()
    np.testing.assert_array_equal(out, sum(range(groups)) + groups * np.arange(256))


def test_split_k_without_release(code):
    groups = 24
    out, partial = np.zeros(256, f32), np.zeros(256 * groups, f32)
    args = [out, partial, np.zeros(1, u32), groups]
    result = code.launch("split_k_no_release", groups, 256, args)
    found(result, "global-race", "// SUM OF PARTIALS", span(partial))


# Two waves and one stretch of LDS, each with its own width: bytes, dwords, 8, 16 bytes a lane.
WIDTHS = """
#define LDS __attribute__((address_space(3)))
template <class T, bool Write> DEVICE void use(LDS char* at, u32* out) {
  if (Write) *(LDS volatile T*)at = T(TID); else *(T*)out = *(LDS volatile T*)at;
}
template <class A, class B, bool Write, bool Ordered>
DEVICE void meet(u32* out, int shift) {
  SHARED u4 memory[128];
  memory[TID] = u4(0);
  LDS char* stretch = (LDS char*)memory;
  sync();
  for (int round = 0; round < 2; ++round) {
    if (TID / 64 == round) use<A, true>(stretch + TID % 64 * sizeof(A), out);
    if (Ordered) sync();
    if (TID / 64 != round)
      use<B, Write>(stretch + shift + TID % 16 * sizeof(B), out + (BID * 128 + TID) * 4);
    sync();
  }
}
#define MEET(name, A, B) \\
  GLOBAL void name##_ww(u32* o, int s) { meet<A, B, true, false>(o, s); } \\
  GLOBAL void name##_wr(u32* o, int s) { meet<A, B, false, false>(o, s); } \\
  GLOBAL void name##_ordered(u32* o, int s) { meet<A, B, false, true>(o, s); }
MEET(wide_word, u4, u32) MEET(word_wide, u32, u4) MEET(pair_byte, u64, unsigned char)
MEET(byte_pair, unsigned char, u64) MEET(wide_wide, u4, u4) MEET(pair_word, u64, u32)
"""


@pytest.mark.parametrize("pair", ["wide_word", "word_wide", "pair_byte", "byte_pair", "wide_wide",
                                  "pair_word"])  # fmt: skip
@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_lds_races_between_accesses_of_any_width(target, pair):
    """Dwords that are touched together share a record; the first that is not has its own."""
    code = device(WIDTHS, target=target)
    for seed in range(3):
        for kernel in (f"{pair}_ww", f"{pair}_wr"):
            out = np.zeros(4 * 128 * 64, u32)
            got = code.launch(kernel, 3, 128, [out, 0], seed=seed)
            assert {f.kind for f in got.findings} >= {"lds-race"}, kernel
        # Many workgroups, one after the other, use the same records.
        code.launch(f"{pair}_ordered", 64, 128, [out, 0], seed=seed, threads=1).check()
