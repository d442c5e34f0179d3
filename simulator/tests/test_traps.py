"""What emulators of gfx942 are known to get wrong of vector instructions (FP8, float modes, lanes):
one test or more for each. test_traps_memory.py has the rest."""

import ml_dtypes
import numpy as np
import pytest
from hipcc import device

f32, f16, u32, u64, u8 = np.float32, np.float16, np.uint32, np.uint64, np.uint8

SOURCE = """
#define ASM1(name, text) GLOBAL void name(u32* o, const u32* a, const u32* b) { \\
    u32 r = 0, x = a[TID], y = b[TID]; asm volatile(text : "+&v"(r) : "v"(x), "v"(y) \\
    : "vcc", "s20", "s21", "s22", "s23"); o[TID] = r; }
// FP8
ASM1(pack_fp8, "v_cvt_pk_fp8_f32 %0, %1, %2")
ASM1(pack_fp8_high, "v_mov_b32 %0, 0x1234\\n v_cvt_pk_fp8_f32 %0, %1, %2 op_sel:[0,0,1]")
ASM1(pack_bf8, "v_cvt_pk_bf8_f32 %0, %1, %2")
ASM1(pack_fp8_saturating, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 1\\n"
     "v_cvt_pk_fp8_f32 %0, %1, %2\\n s_setreg_imm32_b32 hwreg(HW_REG_MODE, 23, 1), 0")
ASM1(unpack_byte2, "v_cvt_f32_fp8_sdwa %0, %1 src0_sel:BYTE_2")
ASM1(unpack_bf8, "v_cvt_f32_bf8 %0, %1")
GLOBAL void unpack_word1(f2* o, const u32* a) {
  u2 r; u32 x = a[TID];
  asm volatile("v_cvt_pk_f32_fp8_sdwa %0, %1 src0_sel:WORD_1" : "=v"(r) : "v"(x));
  o[TID] = __builtin_bit_cast(f2, r);
}
// float mode
ASM1(add_flushing, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 0\\n v_add_f32 %0, %1, %2\\n"
     "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 4, 2), 3")
ASM1(add_keeping, "v_add_f32 %0, %1, %2")
ASM1(add_toward_zero, "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 3\\n v_add_f32 %0, %1, %2\\n"
     "s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 0")
ASM1(inverse_two_pi, "v_mul_f32 %0, 0.15915494, %1")
ASM1(packed_clamp, "v_pk_add_u16 %0, %1, %2 clamp")
ASM1(packed_clamp_f16, "v_pk_add_f16 %0, %1, %2 clamp")
// the other half of a 16-bit result
#define HALF(name, instruction) ASM1(half_##name, "v_mov_b32 %0, -1\\n" instruction)
HALF(mad, "v_mad_u16 %0, %1, %2, %1")
HALF(mad_legacy, "v_mad_legacy_u16 %0, %1, %2, %1")
HALF(mad_legacy_i16, "v_mad_legacy_i16 %0, %1, %2, %1")
HALF(fma, "v_fma_f16 %0, %1, %2, %1")
HALF(fma_legacy, "v_fma_legacy_f16 %0, %1, %2, %1")
GLOBAL void fmac64(double* o, const double* a, const double* b) {
  double r = o[TID], x = a[TID], y = b[TID];
  asm volatile("v_fmac_f64 %0, %1, %2" : "+v"(r) : "v"(x), "v"(y)); o[TID] = r;
}
// lanes
#define DPP(name, control) ASM1(dpp_##name, "v_mov_b32 %0, -1\\n s_nop 1\\n" \
     "v_mov_b32_dpp %0, %1 " control)
DPP(row_shl, "row_shl:3 row_mask:0xf bank_mask:0xf")
DPP(row_shr, "row_shr:1 row_mask:0xf bank_mask:0xf")
DPP(row_shr_zero, "row_shr:1 row_mask:0xf bank_mask:0xf bound_ctrl:1")
DPP(row_ror, "row_ror:5 row_mask:0xf bank_mask:0xf")
DPP(quad, "quad_perm:[2,3,0,1] row_mask:0xf bank_mask:0xf")
DPP(mirror, "row_mirror row_mask:0xf bank_mask:0xf")
DPP(half_mirror, "row_half_mirror row_mask:0xf bank_mask:0xf")
DPP(bcast15, "row_bcast:15 row_mask:0xa bank_mask:0xf")
DPP(bcast31, "row_bcast:31 row_mask:0xc bank_mask:0xf")
DPP(newbcast, "row_newbcast:7 row_mask:0xf bank_mask:0xf")
DPP(wave_shr, "wave_shr:1 row_mask:0xf bank_mask:0xf")
DPP(banks, "row_shr:1 row_mask:0x5 bank_mask:0x6")
ASM1(dpp_in_place, "v_mov_b32 %0, %1\\n s_nop 1\\n"
     "v_add_u32_dpp %0, %0, %0 row_shr:1 row_mask:0xf bank_mask:0xf")
ASM1(dpp_masked_source, "v_mov_b32 %0, -1\\n s_mov_b64 s[20:21], exec\\n"
     "s_mov_b32 exec_lo, 0x55555555\\n"
     "s_mov_b32 exec_hi, 0x55555555\\n s_nop 4\\n"
     "v_mov_b32_dpp %0, %1 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf\\n"
     "s_mov_b64 exec, s[20:21]")
ASM1(sdwa_neg_abs, "v_add_f16_sdwa %0, -|%1|, %2 dst_sel:WORD_1 dst_unused:UNUSED_PRESERVE "
     "src0_sel:WORD_1 src1_sel:WORD_0")
ASM1(sdwa_byte_sext, "v_add_u32_sdwa %0, sext(%1), %2 dst_sel:DWORD dst_unused:UNUSED_PAD "
     "src0_sel:BYTE_3 src1_sel:WORD_1")
ASM1(sdwa_carry_in_place, "v_mov_b32 %0, %1\\n s_mov_b64 vcc, -1\\n s_nop 4\\n"
     "v_addc_co_u32_sdwa %0, vcc, %0, %2, vcc dst_sel:DWORD dst_unused:UNUSED_PAD "
     "src0_sel:WORD_0 src1_sel:DWORD\\n"
     "v_cndmask_b32 %0, %0, -1, vcc")
ASM1(swizzle_quad, "ds_swizzle_b32 %0, %1 offset:swizzle(QUAD_PERM,3,2,1,0)\\n"
     "s_waitcnt lgkmcnt(0)")
ASM1(swizzle_swap, "ds_swizzle_b32 %0, %1 offset:swizzle(SWAP,16)\\n s_waitcnt lgkmcnt(0)")
ASM1(swizzle_broadcast, "ds_swizzle_b32 %0, %1 offset:swizzle(BROADCAST,8,3)\\n"
     "s_waitcnt lgkmcnt(0)")
ASM1(swizzle_mask, "ds_swizzle_b32 %0, %1 offset:swizzle(BITMASK_PERM,\\"0pi1p\\")\\n"
     "s_waitcnt lgkmcnt(0)")
ASM1(bpermute, "ds_bpermute_b32 %0, %2, %1\\n s_waitcnt lgkmcnt(0)")
ASM1(permute, "ds_permute_b32 %0, %2, %1\\n s_waitcnt lgkmcnt(0)")
ASM1(first_lane_of_none, "s_mov_b64 s[20:21], exec\\n s_mov_b64 exec, 0\\n s_nop 4\\n"
     "v_readfirstlane_b32 s22, %1\\n s_mov_b64 exec, s[20:21]\\n s_nop 4\\n v_mov_b32 %0, s22")
ASM1(counting, "v_mbcnt_lo_u32_b32 %0, -1, 0\\n v_mbcnt_hi_u32_b32 %0, -1, %0")
"""
FP8, BF8 = ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz
LANE = np.arange(64)


@pytest.fixture(scope="module")
def code():
    return device(SOURCE)


def run(code, name, a, b=None):
    out = np.zeros(64, u32)
    b = np.zeros(64, u32) if b is None else b
    code.launch(name, 1, 64, [out, np.ascontiguousarray(a), np.ascontiguousarray(b)]).check()
    return out


def fp8_inputs():
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((64, 64)) * np.exp2(rng.integers(-14, 10, (64, 64)))).astype(f32)
    x[0, :12] = [240, 248, 247.9, 256, -240, np.inf, -np.inf, np.nan, 0, -0.0, 2**-11, 2**-10 * 1.5]
    return x


@pytest.mark.parametrize("name,dtype", [("pack_fp8", FP8), ("pack_bf8", BF8)])
def test_fp8_rounding_subnormals_overflow(code, name, dtype):
    for row in fp8_inputs():
        got = run(code, name, row, row[::-1])
        with np.errstate(all="ignore"):
            want = row.astype(dtype).view(u8).astype(u32), row[::-1].astype(dtype).view(u8)
        np.testing.assert_array_equal(got & u32(255), want[0])
        np.testing.assert_array_equal(got >> u32(8), want[1])


def test_fp8_high_half_keeps_the_low_one(code):
    row = fp8_inputs()[3]
    got = run(code, "pack_fp8_high", row, row)
    assert (got & u32(0xFFFF) == 0x1234).all()
    np.testing.assert_array_equal((got >> u32(16)) & u32(255), row.astype(FP8).view(u8))


def test_fp8_saturates_when_the_mode_says_so(code):
    row = fp8_inputs()[0]
    got = (run(code, "pack_fp8_saturating", row, row) & u32(255)).astype(u8).view(FP8)
    want = np.clip(row, -240, 240).astype(FP8)
    np.testing.assert_array_equal(got.astype(f32), want.astype(f32))


def test_fp8_decoding(code):
    for first in range(0, 256, 64):
        byte = np.arange(first, first + 64, dtype=u32)
        got = run(code, "unpack_byte2", byte << u32(16) | u32(0x55)).view(f32)
        np.testing.assert_array_equal(got, byte.astype(u8).view(FP8).astype(f32))
        got = run(code, "unpack_bf8", byte | u32(0x5500)).view(f32)
        np.testing.assert_array_equal(got, byte.astype(u8).view(BF8).astype(f32))
        pair = np.zeros((64, 2), f32)
        code.launch(
            "unpack_word1", 1, 64, [pair, byte << u32(16) | (255 - byte) << u32(24)]
        ).check()
        np.testing.assert_array_equal(pair[:, 0], byte.astype(u8).view(FP8).astype(f32))
        np.testing.assert_array_equal(pair[:, 1], (255 - byte).astype(u8).view(FP8).astype(f32))


def test_fp8_dialect_follows_the_target():
    code = device(
        """GLOBAL void pack(u32* o, const float* a) {
        o[TID] = __builtin_amdgcn_cvt_pk_fp8_f32(a[TID], a[TID], 0, false); }""",
        target="gfx950",
    )
    row, out = fp8_inputs()[1], np.zeros(64, u32)
    row[:4] = [448, 464, 1e9, -0.0]
    code.launch("pack", 1, 64, [out, row]).check()
    with np.errstate(all="ignore"):
        want = row.astype(ml_dtypes.float8_e4m3fn).view(u8)
    np.testing.assert_array_equal(out & u32(255), want)


def test_subnormals_follow_the_mode(code):
    a = np.full(64, 1e-39, f32)
    np.testing.assert_array_equal(run(code, "add_keeping", a, a).view(f32), a + a)
    assert not run(code, "add_flushing", a, a).any()


def test_legacy_forms_clear_the_upper_half(code):
    a, b = np.arange(64, dtype=u32), np.full(64, 3, u32)
    assert (run(code, "half_mad", a, b) == 0xFFFF0000 + 4 * a).all()
    for name in ("mad_legacy", "mad_legacy_i16"):
        assert (run(code, f"half_{name}", a, b) == 4 * a).all()
    a, b = (x.astype(np.float16).view(np.uint16).astype(u32) for x in (a, b))
    want = (4 * np.arange(64)).astype(np.float16).view(np.uint16)
    assert (run(code, "half_fma", a, b) == 0xFFFF0000 + want.astype(u32)).all()
    assert (run(code, "half_fma_legacy", a, b) == want).all()


def test_rounding_follows_the_mode(code):
    a, b = np.full(64, 1, f32), np.full(64, 2.0**-24 * 1.5, f32)
    assert (run(code, "add_keeping", a, b).view(f32) == np.nextafter(f32(1), f32(2))).all()
    assert (run(code, "add_toward_zero", a, b).view(f32) == 1).all()


def test_inline_constant(code):
    assert (run(code, "inverse_two_pi", np.ones(64, f32)) == 0x3E22F983).all()


def test_packed_clamp(code):
    rng = np.random.default_rng(1)
    a, b = (rng.integers(0, 65536, (64, 2)) for _ in range(2))
    got = (
        run(
            code,
            "packed_clamp",
            a.astype(np.uint16).view(u32)[:, 0].copy(),
            b.astype(np.uint16).view(u32)[:, 0].copy(),
        )
        .view(np.uint16)
        .reshape(64, 2)
    )
    np.testing.assert_array_equal(got, np.minimum(a + b, 65535))
    x, y = (rng.standard_normal((64, 2)).astype(f16) for _ in range(2))
    got = run(code, "packed_clamp_f16", x.view(u32)[:, 0].copy(), y.view(u32)[:, 0].copy())
    np.testing.assert_array_equal(got.view(f16).reshape(64, 2), np.clip(x + y, 0, 1))


def test_fmac_f64(code):
    rng = np.random.default_rng(2)
    a, b, c = (rng.integers(-99, 99, 64).astype(np.float64) for _ in range(3))
    out = c.copy()
    code.launch("fmac64", 1, 64, [out, a, b]).check()
    np.testing.assert_array_equal(out, a * b + c)


ROW = LANE & ~15
DPP = {  # source lane of each lane, -1 where there is none, and the lanes that a mask lets through
    "row_shl": (np.where(LANE % 16 < 13, LANE + 3, -1), None),
    "row_shr": (np.where(LANE % 16 > 0, LANE - 1, -1), None),
    "row_ror": (ROW + (LANE - 5) % 16, None),
    "quad": (LANE ^ 2, None),
    "mirror": (ROW + 15 - LANE % 16, None),
    "half_mirror": ((LANE & ~7) + 7 - LANE % 8, None),
    "bcast15": (np.where(LANE >= 16, ROW - 1, -1), np.isin(LANE // 16, [1, 3])),
    "bcast31": (np.where(LANE >= 32, 31, -1), LANE >= 32),
    "newbcast": (ROW + 7, None),
    "wave_shr": (LANE - 1, None),
    "banks": (np.where(LANE % 16 > 0, LANE - 1, -1),
              np.isin(LANE // 16, [0, 2]) & np.isin(LANE // 4 % 4, [1, 2])),
}  # fmt: skip


@pytest.mark.parametrize("name", DPP)
def test_dpp(code, name):
    source, allowed = DPP[name]
    data = np.random.default_rng(3).integers(0, 2**31, 64).astype(u32)
    want = np.where(
        (source >= 0) & (True if allowed is None else allowed), data[source], u32(2**32 - 1)
    )
    np.testing.assert_array_equal(run(code, "dpp_" + name, data), want)


def test_dpp_in_place_bounds_and_masked_sources(code):
    data = np.arange(100, 164, dtype=u32)
    shifted = np.where(LANE % 16 > 0, data - 1, 0)
    np.testing.assert_array_equal(run(code, "dpp_row_shr_zero", data), shifted)
    want = np.where(LANE % 16 > 0, data + data - 1, data)
    np.testing.assert_array_equal(run(code, "dpp_in_place", data), want)
    # Even lanes are on and read odd ones, which are off: the destination stays.
    assert (run(code, "dpp_masked_source", data) == 2**32 - 1).all()


def test_sdwa(code):
    rng = np.random.default_rng(4)
    x, y = (rng.standard_normal((64, 2)).astype(f16) for _ in range(2))
    got = run(code, "sdwa_neg_abs", x.view(u32)[:, 0].copy(), y.view(u32)[:, 0].copy())
    want = (-np.abs(x[:, 1]) + y[:, 0]).view(np.uint16).astype(u32) << u32(16)
    np.testing.assert_array_equal(got, want)
    a, b = (rng.integers(0, 2**32, 64, dtype=u64).astype(u32) for _ in range(2))
    want = (a.view(np.int8).reshape(64, 4)[:, 3].astype(np.int64) + (b >> u32(16))).astype(u32)
    np.testing.assert_array_equal(run(code, "sdwa_byte_sext", a, b), want)
    total = (a & u32(65535)).astype(u64) + b + u64(1)
    want = np.where(total >> u64(32), u32(2**32 - 1), total.astype(u32))
    np.testing.assert_array_equal(run(code, "sdwa_carry_in_place", a, b), want)


SWIZZLE = {"quad": LANE ^ 3, "swap": LANE ^ 16, "broadcast": (LANE & ~7) + 3,
           "mask": (LANE & 32) | (LANE & 0b01101 ^ 0b00100) & ~0b10010 | 0b00010}  # fmt: skip


@pytest.mark.parametrize("name", SWIZZLE)
def test_swizzle(code, name):
    data = np.random.default_rng(5).integers(0, 2**31, 64).astype(u32)
    np.testing.assert_array_equal(run(code, "swizzle_" + name, data), data[SWIZZLE[name]])


def test_permutes(code):
    rng = np.random.default_rng(6)
    data, order = rng.integers(0, 2**31, 64).astype(u32), rng.permutation(64).astype(u32)
    np.testing.assert_array_equal(run(code, "bpermute", data, order * u32(4)), data[order])
    pushed = np.zeros(64, u32)
    pushed[order] = data
    np.testing.assert_array_equal(run(code, "permute", data, order * u32(4)), pushed)


def test_permlane_swaps():
    code = device(
        """
GLOBAL void swaps(u32* o, const u32* a) {
  for (int n = 0; n < 2; ++n) {
    u32 x = a[TID], y = a[64 + TID];
    if (n) asm volatile("s_nop 4\\n v_permlane16_swap_b32 %0, %1" : "+v"(x), "+v"(y));
    else asm volatile("s_nop 4\\n v_permlane32_swap_b32 %0, %1" : "+v"(x), "+v"(y));
    o[n * 128 + TID] = x; o[n * 128 + 64 + TID] = y;
  }
}""",
        target="gfx950",
    )
    data, out = np.arange(128, dtype=u32), np.zeros((2, 2, 64), u32)
    code.launch("swaps", 1, 64, [out, data]).check()
    for n, width in enumerate((32, 16)):
        x, y = data[:64].reshape(-1, width).copy(), data[64:].reshape(-1, width).copy()
        x[1::2], y[0::2] = y[0::2].copy(), x[1::2].copy()
        np.testing.assert_array_equal(out[n], [x.reshape(-1), y.reshape(-1)])


def test_first_lane_of_none_and_counting(code):
    assert (run(code, "first_lane_of_none", LANE.astype(u32) + u32(9)) == 9).all()
    np.testing.assert_array_equal(run(code, "counting", LANE.astype(u32)), LANE)
