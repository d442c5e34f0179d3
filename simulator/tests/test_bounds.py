"""What leaves its array: scratch, arguments that lie side by side; scratch that nobody wrote."""

import numpy as np
import pytest
from hipcc import device

import simulator

u32 = np.uint32
SOURCE = """
GLOBAL void array(u32* out, const u32* in, int write, int read) {
  volatile u32 x[32], y[32];
  for (int n = 0; n < write; ++n) { x[n] = in[n]; y[n] = in[n] + 100; }
  out[TID] = x[(TID + read) & 63] + y[TID & 7];
}
GLOBAL void store_past(u32* out, const u32* in, int at) {
  volatile u32 x[40];
  for (int n = 0; n < 40; ++n) x[n] = in[n];
  x[TID + at] = 7;
  out[TID] = x[TID & 31];
}
// Many values that live across a call: registers of lanes that are off are spilled as well.
GLOBAL __attribute__((amdgpu_num_vgpr(24))) void spills(float* out, const float* in, int n) {
  float v[40];
  for (int k = 0; k < 40; ++k) v[k] = in[TID + 64 * k];
  if (TID & 1) {
    for (int r = 0; r < n; ++r)
      for (int k = 0; k < 40; ++k) v[k] = v[k] * v[(k * 7 + 3) % 40] + (float)r;
  }
  float s = 0;
  for (int k = 0; k < 40; ++k) s += v[k] * (float)(k + 1);
  out[TID] = s;
}
struct Pair { char a; double b; };
GLOBAL void padded(double* out, const double* in, int at) {
  Pair p[8];
  for (int n = 0; n < 8; ++n) { p[n].a = (char)n; p[n].b = in[n]; }
  asm volatile("" :: "v"(p) : "memory");
  Pair q = p[(TID + at) & 7];
  out[TID] = q.b + q.a;
}
GLOBAL void copy_past(u32* out, const u32* in, int shift) { out[TID] = in[TID + shift]; }
GLOBAL void store_far(u32* a, u32* b, int shift) { a[TID + shift] = 5; b[TID] = 6; }
GLOBAL void backwards(u32* out, const u32* in, int n) {
  const u32* p = in + n;
  for (int k = 0; k < n; ++k) out[(TID + k) % n] = *--p;
}
GLOBAL void buffered(u32* a, u32* b, int shift) {
  auto r = __builtin_amdgcn_make_buffer_rsrc(a, 0, 4096, 0x27000);
  __builtin_amdgcn_raw_buffer_store_b32(9, r, (TID + shift) * 4, 0, 0);
  b[TID + 64] = 1;
}
"""


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def code(request):
    return device(SOURCE, target=request.param)


def kinds(result):
    return sorted({f.kind for f in result.findings})


def test_scratch_that_the_lane_never_wrote(code):
    data, out = np.arange(2560, dtype=u32), np.zeros(64, u32)
    assert code.kernels["array"]["scratch"] >= 256
    result = code.launch("array", 1, 16, [out, data, 32, 0]).check()
    np.testing.assert_array_equal(out[:16], np.arange(16) + 100 + (np.arange(16) & 7))
    result = code.launch("array", 1, 16, [out, data, 16, 8])
    assert kinds(result) == ["uninitialised"] and "scratch" in result.findings[0].message
    assert {f.count for f in result.findings} == {8}, "lanes 8 to 15 read elements 16 to 23"


def test_one_past_the_end_of_an_array_in_scratch(code):
    data, out = np.arange(2560, dtype=u32), np.zeros(64, u32)
    code.launch("store_past", 1, 8, [out, data, 32]).check()
    finding = code.launch("store_past", 1, 8, [out, data, 33]).findings[0]
    assert finding.kind == "out-of-bounds" and finding.count == 1 and finding.lane == 7
    assert "x, has 160 bytes" in finding.message
    far = code.launch("store_past", 1, 8, [out, data, 100000]).findings[0]
    assert far.kind == "out-of-bounds" and "a lane has" in far.message


def test_spilled_registers_and_padding_are_no_findings(code):
    assert code.kernels["spills"]["spills"] > 0
    rng = np.random.default_rng(1)
    out, data = np.zeros(64, np.float32), rng.standard_normal(2560).astype(np.float32)
    code.launch("spills", 1, 64, [out, data, 2]).check()
    out, data = np.zeros(64), rng.standard_normal(8)
    code.launch("padded", 1, 64, [out, data, 3]).check()
    n = (np.arange(64) + 3) & 7
    np.testing.assert_array_equal(out, data[n] + n)


@pytest.mark.parametrize("kernel", ["store_far", "buffered"])
def test_an_overrun_into_the_next_argument(code, kernel):
    whole = np.zeros(512, u32)
    a, b = whole[:128], whole[128:256]
    code.launch(kernel, 1, 64, [a, b, 64]).check()
    found = code.launch(kernel, 1, 64, [a, b, 65]).findings
    assert "out-of-bounds" in {f.kind for f in found}
    finding = next(f for f in found if f.kind == "out-of-bounds")
    assert finding.count == 1 and finding.lane == 63
    assert "past the end" in finding.message and finding.address == b.ctypes.data
    assert not whole[256:].any()


def test_a_read_past_the_end_of_a_slice(code):
    whole = np.arange(512, dtype=u32)
    out, data = whole[256:320], whole[:256]
    code.launch("copy_past", 1, 64, [out, data, 192]).check()
    found = code.launch("copy_past", 1, 64, [out, data, 193]).findings
    assert [f.kind for f in found] == ["out-of-bounds"] and found[0].count == 1


def test_pointers_that_walk_backwards_are_fine(code):
    whole = np.arange(512, dtype=u32)
    data, out = whole[:64], whole[64:128]
    code.launch("backwards", 1, 1, [simulator.Out(out), data, 64], race=False).check()
    np.testing.assert_array_equal(out, np.arange(64)[::-1])
