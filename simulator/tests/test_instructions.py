"""Vector instructions one by one, against their definitions in NumPy."""

import ml_dtypes
import numpy as np
import pytest
from hipcc import device

f32, f16, f64, u32, i32, u64 = (
    np.float32, np.float16, np.float64, np.uint32, np.int32, np.uint64)  # fmt: skip
LANES = 1024


def flush(x):
    return np.where(np.abs(x) < np.finfo(f32).tiny, np.copysign(f32(0), x), x)


def low(x, bits=16):
    return x & u32((1 << bits) - 1)


def half(x, high=False):
    return np.asarray((x >> u32(16 if high else 0)) & u32(0xFFFF), np.uint16).view(f16)


def from_half(x):
    return x.astype(f16).view(np.uint16).astype(u32)


def fma64(a, b, c):
    """Exact for f32 inputs: products fit f64 and the sum's second rounding is checked apart."""
    return (a.astype(np.longdouble) * b + c).astype(f32)


def signed24(x):
    return (x << u32(8)).view(i32) >> 8


def pack(lo, hi):
    return from_half(lo) | from_half(hi) << u32(16)


def minimum(a, b):
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, np.where(
        (a < b) | ((a == b) & np.signbit(a)), a, b)))  # fmt: skip


def maximum(a, b):
    return -minimum(-a, -b)


def med3(a, b, c):
    return np.sort(np.stack([a, b, c]), axis=0)[1]


def bf16(x):
    return x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(u32)


def permute_bytes(a, b, c):
    both = np.concatenate([b.view(np.uint8).reshape(-1, 4), a.view(np.uint8).reshape(-1, 4)], 1)
    out = np.zeros((len(a), 4), np.uint8)
    for n in range(4):
        select = (c >> u32(8 * n)) & u32(255)
        picked = both[np.arange(len(a)), np.minimum(select, 7)]
        sign = np.where(both[np.arange(len(a)), np.clip(2 * (select.astype(int) - 8) + 1, 1, 7)]
                        & 128, 255, 0)  # fmt: skip
        out[:, n] = np.where(select < 8, picked, np.where(select < 12, sign, np.where(
            select == 12, 0, 255)))  # fmt: skip
    return out.reshape(-1).view(u32)


# name -> (function of u32 operands, kind of the operands)
CASES = {
    # f32; kinds: F any float bits with specials, N normal numbers, I integers, H halves
    "v_add_f32": (lambda a, b: a + b, "FF"),
    "v_sub_f32": (lambda a, b: a - b, "FF"),
    "v_mul_f32": (lambda a, b: a * b, "FF"),
    "v_min_f32": (minimum, "FF"),
    "v_max_f32": (maximum, "FF"),
    "v_fma_f32": (fma64, "NNN"),
    "v_med3_f32": (med3, "NNN"),
    "v_min3_f32": (lambda a, b, c: minimum(minimum(a, b), c), "FFF"),
    "v_max3_f32": (lambda a, b, c: maximum(maximum(a, b), c), "FFF"),
    "v_floor_f32": (np.floor, "F"),
    "v_ceil_f32": (np.ceil, "F"),
    "v_trunc_f32": (np.trunc, "F"),
    "v_rndne_f32": (np.rint, "F"),
    "v_fract_f32": (lambda a: a - np.floor(a), "N"),
    "v_frexp_mant_f32": (lambda a: np.frexp(a)[0], "N"),
    # integers
    "v_add_u32": (lambda a, b: a + b, "II"),
    "v_sub_u32": (lambda a, b: a - b, "II"),
    "v_subrev_u32": (lambda a, b: b - a, "II"),
    "v_mul_lo_u32": (lambda a, b: a * b, "II"),
    "v_mul_hi_u32": (lambda a, b: (a.astype(u64) * b >> u64(32)).astype(u32), "II"),
    "v_mul_hi_i32": (
        lambda a, b: (a.view(i32).astype(np.int64) * b.view(i32) >> 32).astype(i32).view(u32),
        "II"),
    "v_mul_u32_u24": (lambda a, b: low(a, 24) * low(b, 24), "II"),
    "v_mul_i32_i24": (lambda a, b: (signed24(a) * signed24(b)).view(u32), "II"),
    "v_mul_hi_u32_u24": (
        lambda a, b: (low(a, 24).astype(u64) * low(b, 24) >> u64(32)).astype(u32), "II"),
    "v_mad_u32_u24": (lambda a, b, c: low(a, 24) * low(b, 24) + c, "III"),
    "v_mad_i32_i24": (lambda a, b, c: (signed24(a) * signed24(b)).view(u32) + c, "III"),
    "v_and_b32": (lambda a, b: a & b, "II"),
    "v_or_b32": (lambda a, b: a | b, "II"),
    "v_xor_b32": (lambda a, b: a ^ b, "II"),
    "v_xnor_b32": (lambda a, b: ~(a ^ b), "II"),
    "v_not_b32": (lambda a: ~a, "I"),
    "v_bfrev_b32": (lambda a: np.array([int(f"{x:032b}"[::-1], 2) for x in a], u32), "I"),
    "v_lshlrev_b32": (lambda a, b: b << (a & u32(31)), "II"),
    "v_lshrrev_b32": (lambda a, b: b >> (a & u32(31)), "II"),
    "v_ashrrev_i32": (lambda a, b: (b.view(i32) >> (a & u32(31)).view(i32)).view(u32), "II"),
    "v_min_u32": (np.minimum, "II"),
    "v_max_u32": (np.maximum, "II"),
    "v_min_i32": (lambda a, b: np.minimum(a.view(i32), b.view(i32)).view(u32), "II"),
    "v_max_i32": (lambda a, b: np.maximum(a.view(i32), b.view(i32)).view(u32), "II"),
    "v_min3_i32": (
        lambda a, b, c: np.minimum(np.minimum(a.view(i32), b.view(i32)), c.view(i32)).view(u32),
        "III"),
    "v_med3_u32": (lambda a, b, c: np.sort(np.stack([a, b, c]), 0)[1], "III"),
    "v_med3_i32": (
        lambda a, b, c: np.sort(np.stack([a, b, c]).view(i32), 0)[1].copy().view(u32), "III"),
    "v_bfe_u32": (
        lambda a, b, c: (a >> (b & u32(31))) & ((u32(1) << (c & u32(31))) - u32(1)), "III"),
    "v_bfi_b32": (lambda a, b, c: (a & b) | (~a & c), "III"),
    "v_bfm_b32": (lambda a, b: ((u32(1) << (a & u32(31))) - u32(1)) << (b & u32(31)), "II"),
    "v_perm_b32": (permute_bytes, "IIP"),
    "v_alignbit_b32": (
        lambda a, b, c: ((a.astype(u64) << u64(32) | b) >> (c & u32(31)).astype(u64)).astype(u32),
        "III"),
    "v_alignbyte_b32": (
        lambda a, b, c: ((a.astype(u64) << u64(32) | b) >> (u64(8) * (c & u32(3)))).astype(u32),
        "III"),
    "v_lshl_add_u32": (lambda a, b, c: (a << (b & u32(31))) + c, "III"),
    "v_add_lshl_u32": (lambda a, b, c: (a + b) << (c & u32(31)), "III"),
    "v_lshl_or_b32": (lambda a, b, c: (a << (b & u32(31))) | c, "III"),
    "v_and_or_b32": (lambda a, b, c: (a & b) | c, "III"),
    "v_or3_b32": (lambda a, b, c: a | b | c, "III"),
    "v_add3_u32": (lambda a, b, c: a + b + c, "III"),
    "v_xad_u32": (lambda a, b, c: (a ^ b) + c, "III"),
    "v_bcnt_u32_b32": (lambda a, b: np.bitwise_count(a).astype(u32) + b, "II"),
    "v_ffbh_u32": (
        lambda a: np.array([32 - int(x).bit_length() if x else 2**32 - 1 for x in a], u32), "Z"),
    "v_ffbl_b32": (
        lambda a: np.array([(int(x) & -int(x)).bit_length() - 1 if x else 2**32 - 1 for x in a],
                           u32), "Z"),
    "v_sad_u32": (lambda a, b, c: np.where(a > b, a - b, b - a) + c, "III"),
    "v_sad_u8": (
        lambda a, b, c: c + np.abs(
            a.view(np.uint8).astype(i32) - b.view(np.uint8)).reshape(-1, 4).sum(1).astype(u32),
        "III"),
    "v_add_u16": (lambda a, b: low(a + b), "II"),
    "v_mul_lo_u16": (lambda a, b: low(low(a) * low(b)), "II"),
    "v_ashrrev_i16": (
        lambda a, b: (low(b).astype(np.uint16).view(np.int16) >> (a & u32(15)).astype(np.int16))
        .view(np.uint16).astype(u32), "II"),
    # f16
    "v_add_f16": (lambda a, b: from_half(half(a) + half(b)), "HH"),
    "v_mul_f16": (lambda a, b: from_half(half(a) * half(b)), "HH"),
    "v_max_f16": (lambda a, b: from_half(maximum(half(a), half(b))), "HH"),
    "v_rcp_f16": (lambda a: from_half(1 / half(a).astype(f32)), "H"),
    "v_sqrt_f16": (lambda a: from_half(np.sqrt(half(a).astype(f32))), "G"),
    "v_floor_f16": (lambda a: from_half(np.floor(half(a))), "H"),
    "v_rndne_f16": (lambda a: from_half(np.rint(half(a))), "H"),
    "v_pk_add_f16": (
        lambda a, b: pack(half(a) + half(b), half(a, True) + half(b, True)), "HH"),
    "v_pk_mul_f16": (
        lambda a, b: pack(half(a) * half(b), half(a, True) * half(b, True)), "HH"),
    "v_pk_fma_f16": (
        lambda a, b, c: pack(*[(half(a, h).astype(f64) * half(b, h) + half(c, h)).astype(f16)
                               for h in (False, True)]), "HHH"),
    "v_pk_min_f16": (
        lambda a, b: pack(minimum(half(a), half(b)), minimum(half(a, True), half(b, True))), "HH"),
    "v_pk_add_u16": (
        lambda a, b: low(a + b) | ((a >> u32(16)) + (b >> u32(16))) << u32(16), "II"),
    "v_pk_mul_lo_u16": (
        lambda a, b: low(low(a) * low(b)) | ((a >> u32(16)) * (b >> u32(16))) << u32(16), "II"),
    "v_pk_max_i16": (
        lambda a, b: np.maximum(a.view(np.int16), b.view(np.int16)).view(u32), "II"),
    "v_pk_lshlrev_b16": (
        lambda a, b: (b.view(np.uint16) << (a.view(np.uint16) & 15)).view(u32), "II"),
    # conversions
    "v_cvt_f32_i32": (lambda a: a.view(i32).astype(f32), "I"),
    "v_cvt_f32_u32": (lambda a: a.astype(f32), "I"),
    "v_cvt_f32_ubyte2": (lambda a: ((a >> u32(16)) & u32(255)).astype(f32), "I"),
    "v_cvt_i32_f32": (
        lambda a: np.clip(np.nan_to_num(np.trunc(a.astype(f64)), nan=0, posinf=2e10, neginf=-2e10),
                          -2**31, 2**31 - 1).astype(i32), "F"),
    "v_cvt_u32_f32": (
        lambda a: np.clip(np.nan_to_num(np.trunc(a.astype(f64)), nan=0, posinf=2e10, neginf=-2e10),
                          0, 2**32 - 1).astype(u32), "F"),
    "v_cvt_f16_f32": (lambda a: from_half(a.astype(f16)), "N"),
    "v_cvt_f32_f16": (lambda a: half(a).astype(f32), "H"),
    "v_pack_b32_f16": (lambda a, b: low(a) | low(b) << u32(16), "HH"),
    "v_cvt_pk_i16_i32": (
        lambda a, b: np.stack([np.clip(x.view(i32), -32768, 32767) for x in (a, b)], 1)
        .astype(np.int16).reshape(-1).view(u32), "II"),
    "v_cvt_pk_u16_u32": (
        lambda a, b: np.stack([np.minimum(x, 65535) for x in (a, b)], 1)
        .astype(np.uint16).reshape(-1).view(u32), "II"),
    # dot products
    "v_dot2_i32_i16": (
        lambda a, b, c: ((a.view(np.int16).astype(np.int64) * b.view(np.int16)).reshape(-1, 2)
                         .sum(1) + c.view(i32)).astype(np.int64).astype(u32), "III"),
    "v_dot4_i32_i8": (
        lambda a, b, c: ((a.view(np.int8).astype(np.int64) * b.view(np.int8)).reshape(-1, 4)
                         .sum(1) + c.view(i32)).astype(np.int64).astype(u32), "III"),
    "v_dot4_u32_u8": (
        lambda a, b, c: ((a.view(np.uint8).astype(np.int64) * b.view(np.uint8)).reshape(-1, 4)
                         .sum(1) + c).astype(u32), "III"),
}  # fmt: skip

# Within an ulp or so of the exact function; f32 subnormals are flushed.
TRANSCENDENTAL = {
    "v_rcp_f32": lambda a: 1 / a,
    "v_rsq_f32": lambda a: 1 / np.sqrt(np.abs(a)),
    "v_sqrt_f32": lambda a: np.sqrt(np.abs(a)),
    "v_exp_f32": np.exp2,
    "v_log_f32": lambda a: np.log2(np.abs(a)),
    "v_sin_f32": lambda a: np.sin(2 * np.pi * np.remainder(a, 1)),
}


def kernel(name: str, count: int, modifier: str = "") -> str:
    operands = ", ".join(f"%{n + 1}" for n in range(count))
    sources = ", ".join(f'"v"({v}[i])' for v in "abc"[:count])
    return f"""
GLOBAL void k_{name}(u32* d, const u32* a, const u32* b, const u32* c) {{
  int i = BID * 256 + TID; u32 r;
  asm volatile("{name} %0, {operands}{modifier}" : "=&v"(r) : {sources});
  d[i] = r;
}}"""


@pytest.fixture(scope="module")
def code():
    source = "".join(kernel(n, len(kinds)) for n, (_, kinds) in CASES.items())
    source += "".join(
        kernel(n, 1) if n in ("v_rcp_f32", "v_exp_f32", "v_sin_f32")
        else kernel(n, 1).replace("%1", "|%1|").replace(n + " ", n + "_e64 ")
        for n in TRANSCENDENTAL)  # fmt: skip
    return device(source)


SPECIALS = np.array(
    [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 1, 0x80000001, 0x7FFFFF, 0x800000,
     0x7F7FFFFF, 0x3F800000, 0xBF800000, 0x3F000000, 0xCB000001, 0x4B800001, 0xBF000000], u32
)  # fmt: skip


def operand(kind: str, rng) -> np.ndarray:
    x = rng.integers(0, 2**32, LANES, dtype=u32)
    if kind in "HG":
        halves = rng.standard_normal(2 * LANES).astype(f16)
        halves[:256] = (rng.standard_normal(256) * 1e-6).astype(f16)  # subnormals
        return halves.view(u32) & u32(0x7FFF7FFF if kind == "G" else 0xFFFFFFFF)
    if kind == "N":
        return (rng.standard_normal(LANES) * np.exp2(rng.integers(-8, 8, LANES))).astype(
            f32).view(u32)  # fmt: skip
    if kind == "F":
        x = (rng.standard_normal(LANES) * np.exp2(rng.integers(-30, 30, LANES))).astype(
            f32).view(u32)  # fmt: skip
        x[:256] = rng.choice(SPECIALS, 256)
    if kind == "P":
        x = rng.integers(0, 14, 4 * LANES, dtype=np.uint8).view(u32)
    if kind == "Z":
        x >>= rng.integers(0, 33, LANES).astype(u64).astype(u32) % u32(32)
        x[::17] = 0
    return x


def run(code, name, inputs):
    out = np.zeros(LANES, u32)
    unused = np.zeros(LANES, u32)
    args = [out, *inputs, *[unused] * (3 - len(inputs))]
    code.launch(f"k_{name}", LANES // 256, 256, args).check()
    return out


@pytest.mark.parametrize("name", CASES)
def test_exact(code, name):
    definition, kinds = CASES[name]
    inputs = [operand(k, np.random.default_rng(n)) for n, k in enumerate(kinds)]
    got = run(code, name, inputs)
    with np.errstate(all="ignore"):
        values = [x.view(f32) if k in "FN" else x for x, k in zip(inputs, kinds, strict=True)]
        want = np.ascontiguousarray(definition(*values))
    if want.dtype == f32:
        same = (got == want.view(u32)) | (np.isnan(want) & np.isnan(got.view(f32)))
    else:
        same = got == want.view(u32)
    bad = np.flatnonzero(~same)
    assert bad.size == 0, (
        f"{name} lane {bad[0]}: inputs {[hex(x[bad[0]]) for x in inputs]} gave "
        f"{got[bad[0]]:#x}, want {want.view(u32)[bad[0]]:#x}")  # fmt: skip


@pytest.mark.parametrize("name", TRANSCENDENTAL)
def test_transcendental(code, name):
    x = operand("N", np.random.default_rng(0))
    x[:4] = [0x3F800000, 0x40000000, 0x3E800000, 1]
    with np.errstate(all="ignore"):
        want = TRANSCENDENTAL[name](flush(x.view(f32)).astype(f64))
    got = run(code, name, [x]).view(f32)
    if name == "v_sin_f32":
        np.testing.assert_allclose(got, want, atol=2e-7)
    else:
        with np.errstate(over="ignore"):
            want = flush(want.astype(f32))
        np.testing.assert_allclose(got, want, rtol=1.3e-7, atol=1e-38)
