"""Targets beside gfx942: gfx90a runs for its results, gfx950 has more, others are refused."""

import shutil
import subprocess

import numpy as np
import pytest
from hipcc import device, device_file
from test_findings import SPLIT_K

import simulator

f32, u32 = np.float32, np.uint32

SOURCE = """
GLOBAL void tickets(u32* out, u32* count) {
  out[BID * 64 + TID] =
      __scoped_atomic_fetch_add(count, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}
GLOBAL void products(double* out, const double* a, f2* small) {
  out[TID] = __builtin_fma(a[TID], a[TID], out[TID]);
  small[TID] *= small[TID];  // one packed instruction
}
GLOBAL void array(u32* out, int at) {
  volatile u32 x[64];
  x[at & 63] = TID;
  out[TID] = x[at & 63];
}
"""


@pytest.fixture(scope="module")
def gfx90a():
    code = device(SOURCE + SPLIT_K, target="gfx90a")
    assert code.target == "gfx90a" and not code.unknown
    return code


def test_atomics_return_with_glc(gfx90a):
    out, count = np.zeros(640, u32), np.zeros(1, u32)
    result = gfx90a.launch("tickets", 10, 64, [simulator.Out(out), count]).check()
    assert sorted(out) == list(range(640))
    assert result.time is None and result.counters["memory_read_bytes"] == 0


@pytest.mark.parametrize("seed", range(4))
def test_one_l2_needs_no_write_back(gfx90a, seed):
    groups = 24
    for kernel, clean in (("split_k", True), ("split_k_no_release", False)):
        out, partial = np.zeros(256, f32), np.zeros(256 * groups, f32)
        args = [out, partial, np.zeros(1, u32), groups]
        findings = gfx90a.launch(kernel, groups, 256, args, seed=seed).findings
        # Waves that share a line of memory may each be told; which do depends on where arrays lie.
        assert {f.kind for f in findings} == (set() if clean else {"global-race"}), kernel
        if clean:
            np.testing.assert_array_equal(out, sum(range(groups)) + groups * np.arange(256))


def test_newer_compilers_name_targets_otherwise(tmp_path):
    """LLVM 23, as in Triton 3.9, writes amdgpu9.42-amd-amdhsa-unknown-gfx942 into its files."""
    data = device_file(SOURCE).read_bytes()
    assert data.count(b"amdgcn-amd-amdhsa--gfx942") == 1
    renamed = tmp_path / "renamed.co"
    renamed.write_bytes(data.replace(b"amdgcn-amd-amdhsa--gfx942", b"amdgpu9-amd-amdhsa-gfx942"))
    assert simulator.load(renamed).target == "gfx942"


def test_doubles_and_packed_floats(gfx90a):
    rng = np.random.default_rng(1)
    out, a = rng.normal(size=64), rng.normal(size=64)
    small = rng.normal(size=(64, 2)).astype(f32)
    want = (out.astype(np.longdouble) + a.astype(np.longdouble) * a).astype(np.float64)
    squares = small * small
    gfx90a.launch("products", 1, 64, [out, a, small]).check()
    np.testing.assert_allclose(out, want, rtol=1e-15)
    np.testing.assert_array_equal(small, squares)


FLAT_SCRATCH = ["-Xclang", "-target-feature", "-Xclang", "+enable-flat-scratch"]


def test_scratch_of_gfx90a_through_buffers_is_refused(gfx90a):
    with pytest.raises(simulator.SimulatorError, match="through buffers, which is not implemented"):
        gfx90a.launch("array", 1, 64, [np.zeros(64, u32), 3])


def test_scratch_of_gfx90a_through_its_own_instructions():
    code = device(SOURCE, *FLAT_SCRATCH, target="gfx90a")
    out = np.zeros(64, u32)
    code.launch("array", 1, 64, [simulator.Out(out), 67]).check()
    np.testing.assert_array_equal(out, np.arange(64))
    assert code.kernels["array"]["scratch"] >= 256


def test_other_targets_are_refused():
    path = device_file("GLOBAL void k(u32* o) { o[TID] = 1; }", target="gfx1100")
    with pytest.raises(
        simulator.SimulatorError, match=r"is for gfx1100; .* gfx942, gfx950, gfx90a"
    ):
        simulator.load(path)


GFX950 = """
typedef half h2 __attribute__((ext_vector_type(2)));
GLOBAL void lowest(float* out, const float* a, const float* b) {
  out[TID] = __builtin_elementwise_minimum(a[TID], b[TID]);
}
GLOBAL void highest(float* out, const float* a, const float* b) {
  out[TID] = __builtin_elementwise_maximum(a[TID], b[TID]);
}
GLOBAL void lowest_pair(h2* out, const h2* a, const h2* b) {
  out[TID] = __builtin_elementwise_minimum(a[TID], b[TID]);
}
GLOBAL void bits(unsigned short* out, const unsigned short* a, const unsigned short* b) {
  out[TID] = (a[TID] & b[TID]) ^ ~(a[TID + 64] | b[TID]);
}
DEVICE static int clip(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
GLOBAL void bytes(unsigned short* out, const int* a, const int* b) {
  out[TID] = clip(a[TID] >> 3, 0, 255) | clip(b[TID] >> 3, 0, 255) << 8;
}
"""


@pytest.fixture(scope="module")
def gfx950():
    code = device(GFX950, target="gfx950")
    path = device_file(GFX950, target="gfx950")
    assert not code.unknown
    listing = subprocess.run(
        [shutil.which("llvm-objdump-22") or "llvm-objdump", "-d", path],
        capture_output=True, text=True, check=True).stdout  # fmt: skip
    for name in ("v_minimum3_f32", "v_maximum3_f32", "v_pk_minimum3_f16", "v_bitop3_b16",
                 "v_ashr_pk_u8_i32"):  # fmt: skip
        assert name in listing, f"the compiler made no {name}"
    return code


@pytest.mark.parametrize("kernel", ["lowest", "highest", "lowest_pair"])
def test_nan_wins_in_minimum3_and_maximum3(gfx950, kernel):
    dtype = np.float16 if kernel == "lowest_pair" else f32
    some = np.array([1, -2, 0.0, -0.0, np.inf, -np.inf, np.nan, 3], dtype)
    count = 128 if kernel == "lowest_pair" else 64
    a, b = (x.ravel()[:64].astype(dtype) for x in np.meshgrid(some, some))
    a, b = np.resize(a, count), np.resize(b, count)
    out = np.zeros(count, dtype)
    gfx950.launch(kernel, 1, 64, [out, a, b]).check()
    want = (np.maximum if kernel == "highest" else np.minimum)(a, b)
    np.testing.assert_array_equal(out, want)
    zero = (a == 0) & (b == 0)
    sign = np.signbit(a) & np.signbit(b) if kernel == "highest" else np.signbit(a) | np.signbit(b)
    np.testing.assert_array_equal(np.signbit(out[zero]), sign[zero])


def test_bits_and_saturated_bytes_of_gfx950(gfx950):
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 2**16, 128, dtype=np.uint16) for _ in range(2))
    out = np.zeros(64, np.uint16)
    gfx950.launch("bits", 1, 64, [out, a, b]).check()
    np.testing.assert_array_equal(out, (a[:64] & b[:64]) ^ ~(a[64:] | b[:64]))
    a, b = (rng.integers(-3000, 5000, 64, dtype=np.int32) for _ in range(2))
    gfx950.launch("bytes", 1, 64, [out, a, b]).check()
    np.testing.assert_array_equal(out, np.clip(a >> 3, 0, 255) | np.clip(b >> 3, 0, 255) << 8)
