"""What gfx950 adds: scaled conversions, stochastic rounding, transposing reads, wider SMFMAC; and
what both targets have for it: packed multiply-accumulate, relative moves of scalar registers."""

import ml_dtypes
import numpy as np
import pytest
import test_matrix
from hipcc import device

u8, u32, f16, f32 = np.uint8, np.uint32, np.float16, np.float32
BF16 = ml_dtypes.bfloat16
NARROW = {"fp8": (ml_dtypes.float8_e4m3fn, 8), "bf8": (ml_dtypes.float8_e5m2, 8),
          "fp6": (ml_dtypes.float6_e2m3fn, 6), "bf6": (ml_dtypes.float6_e3m2fn, 6),
          "fp4": (ml_dtypes.float4_e2m1fn, 4)}  # fmt: skip
WIDE = {"f32": f32, "f16": f16, "bf16": BF16}
SCALES = np.exp2(np.arange(64) % 9 - 4).astype(f32)

# label -> (registers of result, registers of source, kind of instruction text)
FORMS: dict[str, tuple[int, int, str]] = {}
for w, size in (("f32", 32), ("f16", 16), ("bf16", 16)):
    two = 1 if size == 16 else 2
    for n in ("fp8", "bf8"):
        FORMS[f"pk_{n}_{w}"] = (1, two, "%0, %1, %4" if two == 1 else "%0, %2, %3, %4")
        FORMS[f"sr_{n}_{w}"] = (1, 1, "%0, %1, %5, %4")
        FORMS[f"pk_{w}_{n}"] = (two, 1, "%0, %1, %4")
        if w != "bf16":
            FORMS[f"{w}_{n}"] = (1, 1, "%0, %1, %4")
    FORMS[f"pk_fp4_{w}"] = (1, two, "%0, %1, %4" if two == 1 else "%0, %2, %3, %4")
    FORMS[f"sr_pk_fp4_{w}"] = (1, two, "%0, %1, %5, %4")
    FORMS[f"pk_{w}_fp4"] = (two, 1, "%0, %1, %4")
    for n in ("fp6", "bf6"):
        FORMS[f"pk32_{w}_{n}"] = (size, 6, "%0, %1, %4")
        FORMS[f"sr_pk32_{n}_{w}"] = (6, size, "%0, %1, %5, %4")
        if w == "f32":
            FORMS[f"2xpk16_{n}_{w}"] = (6, 32, "%0, %2, %3, %4")
        else:
            FORMS[f"pk32_{n}_{w}"] = (6, 16, "%0, %1, %4")


def kernel(label: str, select: str = "", suffix: str = "") -> str:
    results, sources, operands = FORMS[label]
    vector = lambda n: f"__attribute__((ext_vector_type({n})))" if n > 1 else ""  # noqa: E731
    half = max(1, sources // 2)
    name = f"cvt_{label}{suffix}"
    whole = "%2, %3" not in operands  # one source, or two
    return f"""
typedef u32 {name}_R {vector(results)}; typedef u32 {name}_S {vector(sources)};
typedef u32 {name}_H {vector(half)};
GLOBAL void {name}(u32* out, const u32* in, const u32* scale, const u32* seed) {{
  {name}_R r; {name}_S s; {name}_H a, b; u32 x = scale[TID], y = seed[TID];
  __builtin_memcpy(&r, out + TID * {results}, {4 * results});
  __builtin_memcpy(&s, in + TID * {sources}, {4 * sources});
  __builtin_memcpy(&a, in + TID * {sources}, {4 * half});
  __builtin_memcpy(&b, in + TID * {sources} + {half}, {4 * half if not whole else 0});
  asm volatile("v_cvt_scalef32_{label} {operands} {select}\\n s_nop 4"
               : "+&v"(r) : "v"({"s" if whole else "x"}), "v"({"x" if whole else "a"}),
                 "v"({"x" if whole else "b"}), "v"(x), "v"(y));
  __builtin_memcpy(out + TID * {results}, &r, {4 * results});
}}"""


SELECTED = {"f32_fp8": "op_sel:[0,1,0]", "pk_f32_bf8": "op_sel:[1,0,0]",
            "pk_f16_fp4": "op_sel:[1,1,0]", "pk_fp4_f32": "op_sel:[0,0,1,0]",
            "sr_bf8_f16": "op_sel:[0,0,1,1]", "pk_fp8_bf16": "op_sel:[0,0,1]",
            "f16_bf8": "op_sel:[1,0,1]"}  # fmt: skip
OTHERS = """
typedef half h2 __attribute__((ext_vector_type(2)));
GLOBAL void sr_f16(u32* out, const float* x, const u32* seed) {
  u32 r = out[TID]; float a = x[TID]; u32 s = seed[TID];
  asm volatile("v_cvt_sr_f16_f32 %0, %1, %2 op_sel:[0,0,1]" : "+v"(r) : "v"(a), "v"(s));
  out[TID] = r;
}
GLOBAL void sr_bf16(u32* out, const float* x, const u32* seed) {
  u32 r = out[TID]; float a = x[TID]; u32 s = seed[TID];
  asm volatile("v_cvt_sr_bf16_f32 %0, %1, %2" : "+v"(r) : "v"(a), "v"(s));
  out[TID] = r;
}
GLOBAL void prng(u32* out, const u32* x) {
  u32 r, a = x[TID]; asm volatile("v_prng_b32 %0, %1" : "=v"(r) : "v"(a)); out[TID] = r;
}
#define TR(name, N) GLOBAL void name(u32* out, const u32* in) { \\
    SHARED u32 s[64 * N]; for (int n = 0; n < N; ++n) s[TID * N + n] = in[TID * N + n]; sync(); \\
    typedef u32 V __attribute__((ext_vector_type(N))); V r; \\
    u32 at = (u32)(u64)(__attribute__((address_space(3))) u32*)s + TID * 4 * N; \\
    asm volatile("ds_read_" #name " %0, %1\\n s_waitcnt lgkmcnt(0)" : "=v"(r) : "v"(at)); \\
    for (int n = 0; n < N; ++n) out[TID * N + n] = r[n]; }
TR(b64_tr_b16, 2) TR(b64_tr_b8, 2) TR(b64_tr_b4, 2) TR(b96_tr_b6, 3)
"""


@pytest.fixture(scope="module")
def code():
    source = "".join(map(kernel, FORMS)) + OTHERS
    source += "".join(kernel(label, select, "_selected") for label, select in SELECTED.items())
    return device(source, target="gfx950")


def elements(words, width, count):
    """[64, registers] words to [64, count] codes of `width` bits."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(u8).reshape(64, -1), axis=1,
                         bitorder="little")[:, : width * count]  # fmt: skip
    return (bits.reshape(64, count, width).astype(u32) << np.arange(width)).sum(-1).astype(u32)


def packed(codes, width, registers):
    bits = (codes[..., None] >> np.arange(width) & 1).astype(u8).reshape(64, -1)
    bits = np.pad(bits, ((0, 0), (0, 32 * registers - bits.shape[1])))
    return np.packbits(bits, axis=1, bitorder="little").view(u32)


def parts(label):
    """(count, narrow name, wide name, to narrow?, stochastic?)"""
    words = label.split("_")
    count = 32 if "pk32" in words or "2xpk16" in words else 2 if "pk" in words else 1
    to, source = words[-2:]
    down = to in NARROW
    return count, to if down else source, source if down else to, down, "sr" in words


def run(code, label, data, seeds=None, before=0, suffix="", scales=SCALES):
    results, sources, _ = FORMS[label]
    out = np.full((64, results), before, u32)
    seeds = np.zeros(64, u32) if seeds is None else seeds
    data = np.ascontiguousarray(data).reshape(64, sources)
    args = [out, data, scales.view(u32), seeds]
    code.launch(f"cvt_{label}{suffix}", 1, 64, args).check()
    return out


def wide_words(x, wide, label):
    """Values in registers; the two sources of 2xpk16 take even and odd elements."""
    if "2xpk16" in label:
        x = np.concatenate([x[:, 0::2], x[:, 1::2]], axis=1)
    x = np.ascontiguousarray(x.astype(WIDE[wide]))
    if x.shape[1] * x.itemsize < 4:
        x = np.pad(x, ((0, 0), (0, 1)))
    return x.view(u32)


def rounded(x, narrow):
    """To nearest even: 6- and 4-bit formats saturate, 8-bit ones overflow as ml_dtypes has it."""
    dtype, width = NARROW[narrow]
    if width < 8:
        limit = float(ml_dtypes.finfo(dtype).max)
        x = np.clip(x, -limit, limit)
    return x.astype(dtype).view(u8).astype(u32)


@pytest.mark.parametrize("label", [f for f in FORMS if parts(f)[3] and not parts(f)[4]])
def test_to_narrow(code, label):
    count, narrow, wide, _, _ = parts(label)
    rng = np.random.default_rng(len(label))
    x = rng.standard_normal((64, count)) * np.exp2(rng.integers(-6, 6, (64, count)))
    x[0, 0], x[1, 0] = 0.0, -0.0
    x = x.astype(WIDE[wide])
    want = rounded(x.astype(np.float64) / SCALES[:, None], narrow)
    width = NARROW[narrow][1]
    got = elements(run(code, label, wide_words(x, wide, label)), width, count)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("label", [f for f in FORMS if parts(f)[3] and not parts(f)[4]])
def test_ties_and_overflow_to_narrow(code, label):
    """Values of the narrow format, ties between neighbours, and what lies just beside them."""
    count, narrow, wide, _, _ = parts(label)
    dtype, width = NARROW[narrow]
    values = np.arange(2**width, dtype=u8).view(dtype).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    step = values[-1] - values[-2]
    hard = np.concatenate([values, (values[1:] + values[:-1]) / 2, values[-1] + step * np.arange(
        0.25, 2, 0.25)]).astype(WIDE[wide])  # fmt: skip
    hard = np.concatenate([hard, -hard])
    infinity = np.full_like(hard, np.inf)
    hard = np.concatenate([hard, np.nextafter(hard, infinity), np.nextafter(hard, -infinity)])
    rows = -(-len(hard) // (64 * count))
    # Scales that leave float16 its bits.
    scales = SCALES if wide != "f16" else np.ones_like(SCALES)
    for x in np.resize(hard, (rows, 64, count)).astype(np.float64):
        given = (x * scales[:, None]).astype(WIDE[wide])
        want = rounded(given.astype(np.float64) / scales[:, None], narrow)
        got = run(code, label, wide_words(given, wide, label), scales=scales)
        np.testing.assert_array_equal(elements(got, width, count), want)


@pytest.mark.parametrize("label", [f for f in FORMS if not parts(f)[3]])
def test_from_narrow(code, label):
    count, narrow, wide, _, _ = parts(label)
    dtype, width = NARROW[narrow]
    sources = FORMS[label][1]
    rng = np.random.default_rng(len(label))
    codes = rng.integers(0, 2**width, (64, count))
    codes[codes & 0x7C == 0x7C] = 1  # no infinities and NaN of the 8-bit formats
    values = codes.astype(u8).view(dtype).astype(np.float64)
    out = run(code, label, packed(codes, width, sources))
    size = np.dtype(WIDE[wide]).itemsize
    got = out.view(u8).reshape(64, -1)[:, : count * size].copy().view(WIDE[wide])
    want = (values * SCALES[:, None]).astype(WIDE[wide])
    np.testing.assert_array_equal(got.astype(f32), want.astype(f32))


@pytest.mark.parametrize("label", [f for f in FORMS if parts(f)[4]])
def test_stochastic_rounding(code, label):
    count, narrow, wide, _, _ = parts(label)
    dtype, width = NARROW[narrow]
    rng = np.random.default_rng(len(label))
    limit = min(float(ml_dtypes.finfo(dtype).max), 3000)  # scaled it must fit f16
    x = rng.uniform(-0.9, 0.9, (64, count)) * limit
    x = (x * SCALES[:, None]).astype(WIDE[wide])
    exact = x.astype(np.float64) / SCALES[:, None]
    words = wide_words(x, wide, label)
    decode = lambda out: elements(out, width, count).astype(u8).view(dtype).astype(f32)  # noqa: E731
    seen = []
    for _ in range(24):
        got = decode(run(code, label, words, rng.integers(0, 2**32, 64, dtype=u32)))
        step = np.exp2(np.floor(np.log2(np.maximum(abs(exact), 1e-9))))
        step = np.maximum(step, float(ml_dtypes.finfo(dtype).smallest_normal))
        step = step * float(ml_dtypes.finfo(dtype).eps)
        assert (abs(got - exact) < step).all(), "one of the two neighbours"
        seen.append((got - exact) / step)
    # The mean error of a fair rounding vanishes; deviation of one is at most 1/2.
    mean = np.mean(seen)
    assert abs(mean) < 4 * 0.5 / np.sqrt(np.size(seen)), mean
    down = decode(run(code, label, words, np.zeros(64, u32)))
    assert (abs(down[:, 0]) <= abs(exact[:, 0])).all(), "nothing is added to the first element"


def test_op_sel_of_scaled_conversions(code):
    rng = np.random.default_rng(5)
    old = 0xA1B2C3D4
    codes = rng.integers(0, 0x70, (64, 4)).astype(u8)
    e4m3, e5m2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
    scale = SCALES.astype(f32)
    words = codes.view(u32)[:, 0]
    got = run(code, "f32_fp8", words, suffix="_selected").view(f32)[:, 0]
    np.testing.assert_array_equal(got, codes[:, 2].view(e4m3).astype(f32) * scale)
    got = run(code, "pk_f32_bf8", words, suffix="_selected").view(f32)
    np.testing.assert_array_equal(got, codes[:, 2:].copy().view(e5m2).astype(f32) * scale[:, None])
    got = run(code, "pk_f16_fp4", words, suffix="_selected").view(f16)
    nibbles = np.stack([codes[:, 3] & 15, codes[:, 3] >> 4], 1).view(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(got.astype(f32), nibbles.astype(f32) * scale[:, None])
    got = run(code, "f16_bf8", words, before=old, suffix="_selected")[:, 0]
    np.testing.assert_array_equal(got & 0xFFFF, old & 0xFFFF)
    want = (codes[:, 1].view(e5m2).astype(f32) * scale).astype(f16)
    np.testing.assert_array_equal((got >> 16).astype(np.uint16).view(f16), want)

    x = rng.standard_normal((64, 2)).astype(f32)
    four = rounded(x / scale[:, None], "fp4")
    got = run(code, "pk_fp4_f32", x.view(u32), before=old, suffix="_selected")[:, 0]
    np.testing.assert_array_equal(got, (old & 0xFFFF00FF) | (four[:, 0] | four[:, 1] << 4) << 8)
    half = x.astype(BF16)
    eight = rounded(half.astype(f32) / scale[:, None], "fp8")
    got = run(code, "pk_fp8_bf16", half.view(u32), before=old, suffix="_selected")[:, 0]
    np.testing.assert_array_equal(got, (old & 0xFFFF) | (eight[:, 0] | eight[:, 1] << 8) << 16)
    exact = (codes[:, :2].copy().view(e5m2).astype(f32) * scale[:, None]).astype(f16)
    got = run(code, "sr_bf8_f16", exact.view(u32), before=old, suffix="_selected")[:, 0]
    kept = exact[:, 0].astype(f32) == codes[:, 0].view(e5m2).astype(f32) * scale  # fits f16
    assert kept.sum() > 30
    want = (old & 0xFFFFFF) | codes[:, 0].astype(u32) << 24
    np.testing.assert_array_equal(got[kept], want[kept])


@pytest.mark.parametrize("name", ["sr_f16", "sr_bf16"])
def test_stochastic_rounding_to_16_bits(code, name):
    dtype, mantissa, shift = (f16, 10, 16) if name == "sr_f16" else (BF16, 7, 0)
    rng = np.random.default_rng(9)
    x = rng.uniform(1, 2, 64).astype(f32)
    seed = rng.integers(0, 2**32, 64, dtype=u32)
    out = np.full(64, 0x12345678, u32)
    code.launch(name, 1, 64, [out, x, seed]).check()
    got = (out >> u32(shift)).astype(np.uint16).view(dtype).astype(f32)
    fraction = x.view(u32) & u32(0x7FFFFF)
    total = fraction.astype(np.uint64) + (seed >> u32(9 + mantissa)).astype(np.uint64)
    want = 1 + (total >> np.uint64(23 - mantissa)).astype(f32) * f32(2.0**-mantissa)
    np.testing.assert_array_equal(got, want)
    kept = out & u32(0xFFFF) if shift else out >> u32(16)
    assert (kept == (0x5678 if shift else 0x1234)).all()


def test_random_numbers(code):
    x = np.random.default_rng(2).integers(0, 2**32, 64, dtype=u32)
    out = np.zeros(64, u32)
    code.launch("prng", 1, 64, [out, x]).check()
    np.testing.assert_array_equal(out, (x << u32(1)) ^ np.where(x >> u32(31), u32(197), u32(0)))


@pytest.mark.parametrize("name", ["b64_tr_b16", "b64_tr_b8", "b64_tr_b4", "b96_tr_b6"])
def test_transposing_reads(code, name):
    """16 lanes read rows of 16 elements; each gets a column."""
    registers, width = int(name[1:3]) // 32, int(name.rpartition("b")[2])
    count = 32 * registers // width
    data = np.random.default_rng(4).integers(0, 2**32, (64, registers), dtype=u32)
    out = np.zeros_like(data)
    code.launch(name, 1, 64, [out, data]).check()
    rows = elements(data, width, count).reshape(4, count, 16)  # 16 lanes' elements, 16 a row
    want = rows.transpose(0, 2, 1).reshape(64, count)
    np.testing.assert_array_equal(elements(out, width, count), want)


WIDER = [
    *[(f"f32_16x16x128_{a}_{b}", 16, 128, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")],
    *[(f"f32_32x32x64_{a}_{b}", 32, 64, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")],
    ("i32_16x16x128_i8", 16, 128, "i8", "i8"),
    ("i32_32x32x64_i8", 32, 64, "i8", "i8"),
    *[(f"f32_16x16x64_{t}", 16, 64, t, t) for t in ("f16", "bf16")],
    *[(f"f32_32x32x32_{t}", 32, 32, t, t) for t in ("f16", "bf16")],
]


@pytest.fixture(scope="module")
def wider():
    source = "".join(map(test_matrix.sparse_kernel, WIDER))
    spec = next(s for s in WIDER if s[0] == "f32_16x16x64_f16")
    return device(source + test_matrix.sparse_kernel(spec, "abid:1", "second"), target="gfx950")


@pytest.mark.parametrize("spec", WIDER, ids=lambda s: s[0])
def test_wider_sparse_products(wider, spec, monkeypatch):
    monkeypatch.setitem(test_matrix.NUMPY, "fp8", ml_dtypes.float8_e4m3fn)
    monkeypatch.setitem(test_matrix.NUMPY, "bf8", ml_dtypes.float8_e5m2)
    test_matrix.run_sparse(wider, spec, 0)
    if spec[0] == "f32_16x16x64_f16":
        test_matrix.run_sparse(wider, spec, 1, "second")


BOTH = """
typedef half h2 __attribute__((ext_vector_type(2)));
GLOBAL void pk_fmac(h2* out, const h2* a, const h2* b) {
  h2 r = out[TID], x = a[TID], y = b[TID];
  asm volatile("v_pk_fmac_f16 %0, %1, %2" : "+v"(r) : "v"(x), "v"(y));
  out[TID] = r;
}
GLOBAL void movrel(u32* out, u32 n) {
  u32 a, b, c, d;
  asm volatile("s_mov_b32 s20, 100\\n s_mov_b32 s21, 101\\n s_mov_b32 s22, 102\\n"
               "s_mov_b32 s23, 103\\n s_mov_b32 s24, 104\\n s_mov_b32 s25, 105\\n"
               "s_mov_b32 s26, 106\\n s_mov_b32 s27, 107\\n s_mov_b32 m0, %4\\n s_nop 1\\n"
               "s_movrels_b32 s30, s20\\n s_movrels_b64 s[32:33], s[20:21]\\n"
               "s_movreld_b32 s24, 7\\n v_mov_b32 %0, s30\\n v_mov_b32 %1, s33\\n"
               "v_mov_b32 %2, s26\\n"
               "s_movreld_b64 s[22:23], s[20:21]\\n v_mov_b32 %3, s25"
               : "=&v"(a), "=&v"(b), "=&v"(c), "=&v"(d) : "s"(n)
               : "s20", "s21", "s22", "s23", "s24", "s25", "s26", "s27", "s30", "s32", "s33", "m0");
  out[0] = a; out[1] = b; out[2] = c; out[3] = d;
}
"""


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_packed_accumulation_and_relative_moves(target):
    both = device(BOTH, target=target)
    rng = np.random.default_rng(6)
    out, a, b = (rng.integers(-20, 20, (64, 2)).astype(f16) for _ in range(3))
    want = out + a * b
    both.launch("pk_fmac", 1, 64, [out, a, b]).check()
    np.testing.assert_array_equal(out, want)
    moved = np.zeros(4, u32)
    both.launch("movrel", 1, 1, [moved, 2]).check()
    assert moved.tolist() == [102, 103, 7, 101]
