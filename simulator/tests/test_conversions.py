"""Every conversion that the engine knows, against NumPy and ml_dtypes where rounding is hard: each
value of the result's format, each tie between neighbours and what lies just beside it, subnormals,
overflow, infinities and NaN. test_gfx950.py has scaled conversions of few values."""

import functools
import re

import isa
import ml_dtypes
import numpy as np
import pytest
from hipcc import device

TARGETS = ("gfx942", "gfx950")
u8, u16, u32, u64 = np.uint8, np.uint16, np.uint32, np.uint64
i8, i16, i32, i64 = np.int8, np.int16, np.int32, np.int64
f16, f32, f64, BF16 = np.float16, np.float32, np.float64, ml_dtypes.bfloat16
FP8 = {"gfx942": ml_dtypes.float8_e4m3fnuz, "gfx950": ml_dtypes.float8_e4m3fn}
BF8 = {"gfx942": ml_dtypes.float8_e5m2fnuz, "gfx950": ml_dtypes.float8_e5m2}
SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan])


# ---- Inputs


def beside(x):
    """Each value with its neighbours on both sides."""
    with np.errstate(all="ignore"):
        return np.concatenate([x, np.nextafter(x, x.dtype.type(np.inf)),
                               np.nextafter(x, x.dtype.type(-np.inf))])  # fmt: skip


def around(target, source):
    """What rounds to `target` in hard ways, as values of `source`."""
    codes = np.arange(2 ** (8 * np.dtype(target).itemsize), dtype=u32)
    with np.errstate(invalid="ignore"):
        values = codes.astype(f"u{np.dtype(target).itemsize}").view(target).astype(f64)
    values = np.unique(values[np.isfinite(values)])
    ties = (values[1:] + values[:-1]) / 2
    step = values[-1] - values[-2]
    over = values[-1] + step * np.array([0.25, 0.5, 0.75, 1, 2, 1e3])
    least = float(np.finfo(source).smallest_subnormal)
    rest = np.concatenate([over, -over, [least, -least, 1e-30, -1e-30]])
    with np.errstate(over="ignore"):
        hard = np.concatenate([values, ties, rest]).astype(source)
    return np.concatenate([beside(hard), SPECIAL.astype(source)])


def integers_as_floats(source, bits, signed):
    """Near integers, halves between them, and the ends of the integers' range."""
    low, high = (-(2.0 ** (bits - 1)), 2.0 ** (bits - 1)) if signed else (0.0, 2.0**bits)
    small = np.arange(-70, 70) / 4
    powers = 2.0 ** np.arange(0, 53)
    ends = [low, high, low - 1, high - 1, low - 0.5, high - 0.5, -0.5, 0.5, 1e30, -1e30]
    ends = np.concatenate([ends, powers, -powers, powers + 0.5, -powers - 0.5])
    with np.errstate(over="ignore"):
        hard = np.concatenate([small, ends]).astype(source)
    return np.concatenate([beside(hard), SPECIAL.astype(source)])


def hard_integers():
    """32 bits whose value ties, or nearly, in a float32."""
    found = [0, 1, 2**31 - 1, 2**31, 2**32 - 1]
    for exponent in range(20, 32):
        half = max(1, 2 ** (exponent - 24))
        for odd in (1, 3, 5, 2**23 - 1, 2**22 + 1):
            found += [2**exponent + odd * half + by for by in (-1, 0, 1)]
    found = np.array(found, i64)
    chance = np.random.default_rng(3).integers(0, 2**32, 2000)
    return np.concatenate([found, -found, chance]).astype(u32)


def doubles():
    """float64 around the values of float32, its subnormals and its overflow."""
    chance = np.random.default_rng(4)
    codes = np.concatenate([chance.integers(0, 2**32, 3000, dtype=u32),
                            np.array([0, 1, 2, 0x7FFFFF, 0x800000, 0x7F7FFFFF], u32)])  # fmt: skip
    values = codes.view(f32)
    values = values[np.isfinite(values)]
    with np.errstate(over="ignore"):
        above = np.nextafter(values, f32(np.inf)).astype(f64)
    above = np.where(np.isinf(above), 2.0**128, above)
    ties = (values.astype(f64) + above) / 2
    more = [5e-324, 1e-310, 2.0**-149, 2.0**-150, 2.0**-151, 3e38, 3.5e38, 1e300]
    hard = np.concatenate([values.astype(f64), ties, more, np.negative(more)])
    return np.concatenate([beside(hard), SPECIAL])


ALL_HALVES = np.arange(65536, dtype=u32)
ALL_BYTES = np.arange(256, dtype=u32)


# ---- Definitions


def saturated(x, to):
    ends = np.iinfo(to)
    with np.errstate(invalid="ignore"):
        return np.clip(np.nan_to_num(x.astype(f64), nan=0, posinf=1e30, neginf=-1e30),
                       ends.min, ends.max).astype(i64).astype(to)  # fmt: skip


def halves(x):
    return x.astype(u16).view(f16)


def toward_zero(x):
    """float32 to float16."""
    with np.errstate(over="ignore"):
        near = x.astype(f16)
    away = np.isfinite(x) & (np.abs(near.astype(f64)) > np.abs(x.astype(f64)))
    return np.where(away, np.nextafter(near, f16(0)), near).astype(f16)


def stochastic(x, seeds, to):
    """Random bits of 32 are added below the last place that is kept; then it truncates."""
    info = ml_dtypes.finfo(to)
    with np.errstate(all="ignore"):
        size = np.abs(x.astype(f64))
        exponent = np.floor(np.log2(np.maximum(size, 1e-300)))
        exponent += np.exp2(exponent + 1) <= size  # what log2 rounds
        exponent -= np.exp2(exponent) > size
        exponent = np.maximum(exponent, np.log2(float(info.smallest_normal)))
        step = np.exp2(exponent) * float(info.eps)
        kept = np.floor(size / step + seeds / 2.0**32) * step
        return np.where(np.isfinite(x), np.copysign(kept, x), x.astype(f64)).astype(f32).astype(to)


def norm(x, low, scale):
    with np.errstate(all="ignore"):
        return np.rint(np.minimum(np.maximum(x, f32(low)), f32(1)) * f32(scale))


def pairs(make):
    """Of two operands: the second's result in the high half."""
    return lambda a, b: np.stack([make(a), make(b)], 1)


class Case:
    """What an instruction does to registers: `source` and `result` are types of what it takes and
    gives, of as many bytes as their registers but for what is narrower, which lies low."""

    def __init__(self, source, inputs, definition, both=False, seeds=False, registers=1):
        self.source, self.inputs, self.definition = source, inputs, definition
        self.both, self.seeds, self.registers = both, seeds, registers


def cases(target):
    fp8, bf8 = FP8[target], BF8[target]

    def decoded(dtype):
        return lambda x: x.astype(u8).view(dtype).astype(f32)

    def decoded_pair(dtype):
        return lambda x: np.stack([decoded(dtype)(x & 255), decoded(dtype)(x >> 8)], 1)

    def rounded(dtype):
        def to(x):
            with np.errstate(all="ignore"):
                return x.astype(dtype)

        return to

    two_bytes = (ALL_BYTES | (255 - ALL_BYTES) << 8).astype(u32)
    floats = integers_as_floats
    found = {
        "v_cvt_pk_fp8_f32": Case(f32, around(fp8, f32), pairs(rounded(fp8)), both=True),
        "v_cvt_pk_bf8_f32": Case(f32, around(bf8, f32), pairs(rounded(bf8)), both=True),
        "v_cvt_sr_fp8_f32": Case(f32, around(fp8, f32), lambda x, s: stochastic(x, s, fp8),
                                 seeds=True),
        "v_cvt_sr_bf8_f32": Case(f32, around(bf8, f32), lambda x, s: stochastic(x, s, bf8),
                                 seeds=True),
        "v_cvt_f32_fp8": Case(u32, ALL_BYTES, decoded(fp8)),
        "v_cvt_f32_bf8": Case(u32, ALL_BYTES, decoded(bf8)),
        "v_cvt_pk_f32_fp8": Case(u32, two_bytes, decoded_pair(fp8), registers=2),
        "v_cvt_pk_f32_bf8": Case(u32, two_bytes, decoded_pair(bf8), registers=2),
        "v_cvt_f32_i32": Case(u32, hard_integers(), lambda x: x.view(i32).astype(f32)),
        "v_cvt_f32_u32": Case(u32, hard_integers(), lambda x: x.astype(f32)),
        "v_cvt_off_f32_i4": Case(u32, ALL_BYTES, lambda x: ((x.astype(i32) & 15) - (
            (x.astype(i32) & 8) << 1)).astype(f32) / 16),
        "v_cvt_i32_f32": Case(f32, floats(f32, 32, True), lambda x: saturated(np.trunc(x), i32)),
        "v_cvt_u32_f32": Case(f32, floats(f32, 32, False), lambda x: saturated(np.trunc(x), u32)),
        "v_cvt_rpi_i32_f32": Case(f32, floats(f32, 32, True), lambda x: saturated(
            np.floor(x.astype(f64) + 0.5), i32)),
        "v_cvt_flr_i32_f32": Case(f32, floats(f32, 32, True), lambda x: saturated(
            np.floor(x), i32)),
        "v_cvt_f32_f16": Case(u32, ALL_HALVES, lambda x: halves(x).astype(f32)),
        "v_cvt_f16_f32": Case(f32, around(f16, f32), rounded(f16)),
        "v_cvt_pkrtz_f16_f32": Case(f32, around(f16, f32), pairs(toward_zero), both=True),
        "v_cvt_pknorm_i16_f32": Case(f32, np.concatenate([around(fp8, f32)[:-2], np.linspace(
            -1.01, 1.01, 9000, dtype=f32)]), pairs(lambda x: norm(x, -1, 32767).astype(i16)),
            both=True),
        "v_cvt_pknorm_u16_f32": Case(f32, np.concatenate([around(fp8, f32)[:-2], np.linspace(
            -0.01, 1.01, 9000, dtype=f32)]), pairs(lambda x: norm(x, 0, 65535).astype(u16)),
            both=True),
        "v_cvt_pk_u16_u32": Case(u32, hard_integers(), pairs(
            lambda x: np.minimum(x, 65535).astype(u16)), both=True),
        "v_cvt_pk_i16_i32": Case(u32, np.concatenate([hard_integers(), np.arange(
            -33000, 33000).astype(u32)]), pairs(
            lambda x: np.clip(x.view(i32), -32768, 32767).astype(i16)), both=True),
        "v_cvt_u16_f16": Case(u32, ALL_HALVES, lambda x: saturated(np.trunc(halves(x)), u16)),
        "v_cvt_i16_f16": Case(u32, ALL_HALVES, lambda x: saturated(np.trunc(halves(x)), i16)),
        "v_cvt_f16_u16": Case(u32, ALL_HALVES, lambda x: x.astype(f32).astype(f16)),
        "v_cvt_f16_i16": Case(u32, ALL_HALVES, lambda x: x.astype(u16).view(i16).astype(f16)),
        "v_cvt_f32_f64": Case(f64, doubles(), rounded(f32)),
        "v_cvt_f64_f32": Case(f32, around(f16, f32), lambda x: x.astype(f64), registers=2),
        "v_cvt_i32_f64": Case(f64, floats(f64, 32, True), lambda x: saturated(np.trunc(x), i32)),
        "v_cvt_u32_f64": Case(f64, floats(f64, 32, False), lambda x: saturated(np.trunc(x), u32)),
        "v_cvt_f64_i32": Case(u32, hard_integers(), lambda x: x.view(i32).astype(f64),
                              registers=2),
        "v_cvt_f64_u32": Case(u32, hard_integers(), lambda x: x.astype(f64), registers=2),
    }  # fmt: skip
    for byte in range(4):
        found[f"v_cvt_f32_ubyte{byte}"] = Case(
            u32, hard_integers(), lambda x, byte=byte: x.view(u8)[byte::4].astype(f32)
        )
    if target == "gfx950":
        found |= {
            "v_cvt_f32_bf16": Case(u32, ALL_HALVES, lambda x: x.astype(u16).view(BF16).astype(f32)),
            "v_cvt_pk_bf16_f32": Case(f32, around(BF16, f32), pairs(rounded(BF16)), both=True),
            "v_cvt_pk_f16_f32": Case(f32, around(f16, f32), pairs(rounded(f16)), both=True),
            "v_cvt_sr_f16_f32": Case(f32, around(f16, f32), lambda x, s: stochastic(x, s, f16),
                                     seeds=True),
            "v_cvt_sr_bf16_f32": Case(f32, around(BF16, f32), lambda x, s: stochastic(x, s, BF16),
                                      seeds=True),
        }  # fmt: skip
    return found


# Of another form, or tested by values of their own elsewhere.
ELSEWHERE = re.compile(r"v_cvt_(scalef32_\w+|pk_u8_f32)")
SEEDS = np.array([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x40000000, 0xC0000000, 0x12345678],
                 u32)  # fmt: skip


def kernel(name, case):
    source = {f32: "u32", u32: "u32", f64: "u64"}[case.source]
    result = "u64" if case.registers == 2 else "u32"
    second = ", %2" if case.both or case.seeds else ""
    return f"""
GLOBAL void k_{name}({result}* d, const {source}* a, const u32* b) {{
  int i = BID * 256 + TID; {result} r = 0; {source} x = a[i]; u32 y = b[i];
  asm volatile("{name} %0, %1{second}" : "+&v"(r) : "v"(x), "v"(y));
  d[i] = r;
}}"""


@functools.cache
def code_for(target):
    source = "".join(kernel(name, case) for name, case in cases(target).items())
    byte = """
GLOBAL void pack_byte(u32* d, const u32* a, const u32* b) {
  int i = BID * 256 + TID; u32 r, x = a[i], y = b[i], z = 0xA1B2C3D4;
  asm volatile("v_cvt_pk_u8_f32 %0, %1, %2, %3" : "=&v"(r) : "v"(x), "v"(y), "v"(z));
  d[i] = r;
}"""
    return device(source + byte, target=target)


@pytest.mark.parametrize("target", TARGETS)
def test_every_known_conversion_is_here(target):
    forms = {name: found for name, found in isa.instructions(target).items()
             if name.startswith("v_cvt")}  # fmt: skip
    table = isa.assembled(target, {name: f"{found[0]}\ns_endpgm\n"
                                   for name, found in forms.items()})  # fmt: skip
    known = {name for name in forms if name not in table.unknown}
    assert {name for name in known if not ELSEWHERE.fullmatch(name)} == set(cases(target))
    assert len(known) > 35


def padded(x, count):
    return np.ascontiguousarray(np.resize(x, count))


def launch(code, name, first, second, registers):
    out = np.zeros((len(first), registers), u32)
    code.launch(name, len(first) // 256, 256, [out, first, second], caches=False).check()
    return out


CASES = [(target, name) for target in TARGETS for name in cases(target)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy's casts that overflow
@pytest.mark.parametrize(("target", "name"), CASES)
def test_conversion(target, name):
    case = cases(target)[name]
    chance = np.random.default_rng(len(name))
    inputs = np.concatenate([case.inputs] * (len(SEEDS) if case.seeds else 1))
    count = -(-len(inputs) // 256) * 256
    first, operands = padded(inputs, count), None
    if case.both:
        second = padded(chance.permutation(case.inputs), count)
        operands = first, second
    elif case.seeds:
        second = padded(np.repeat(SEEDS, len(case.inputs)), count)
        operands = first, second
    else:
        second, operands = np.zeros(count, u32), (first,)
    got = launch(code_for(target), f"k_{name}", first, second, case.registers)
    want = np.ascontiguousarray(case.definition(*operands))
    size = want.dtype.itemsize * (want.shape[1] if want.ndim > 1 else 1)
    bytes_of = got.view(u8).reshape(count, -1)
    assert not bytes_of[:, size:].any(), "beyond the result the register keeps what it had"
    actual = np.ascontiguousarray(bytes_of[:, :size]).view(want.dtype).reshape(want.shape)
    unsigned = f"u{want.dtype.itemsize}"
    same = actual.view(unsigned) == want.view(unsigned)
    if not np.issubdtype(want.dtype, np.integer):
        same |= np.isnan(actual.astype(f64)) & np.isnan(want.astype(f64))
    bad = np.argwhere(~same)
    assert len(bad) == 0, (
        f"{name}: {len(bad)} of {same.size}; operands {[o[bad[0][0]] for o in operands]} gave "
        f"{actual[tuple(bad[0])]}, want {want[tuple(bad[0])]}")  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
def test_a_byte_of_a_word(target):
    x = integers_as_floats(f32, 8, False)
    count = -(-len(x) * 4 // 256) * 256
    first, which = padded(np.repeat(x, 4), count), padded(np.arange(count, dtype=u32) % 8, count)
    got = launch(code_for(target), "pack_byte", first, which, 1)[:, 0].view(u8).reshape(count, 4)
    want = np.tile(np.array([0xD4, 0xC3, 0xB2, 0xA1], u8), (count, 1))
    with np.errstate(all="ignore"):
        want[np.arange(count), which % 4] = saturated(np.rint(first), u8)
    np.testing.assert_array_equal(got, want)
