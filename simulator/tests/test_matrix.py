"""MFMA and SMFMAC: layouts lane by lane, number formats, and what modifiers do.

The maps below are AMD's published ones, written element by element and not as the engine has them.
"""

import ml_dtypes
import numpy as np
import pytest
from hipcc import device

FP8, BF8, BF16 = ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz, ml_dtypes.bfloat16
f32 = np.float32

# (name, M = N, K, blocks, types of A and B, accumulator)
DENSE = [
    *[(f"f32_16x16x32_{a}_{b}", 16, 32, 1, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")],
    *[(f"f32_32x32x16_{a}_{b}", 32, 16, 1, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")],
    *[(f"f32_16x16x16_{t}", 16, 16, 1, t, t) for t in ("f16", "bf16")],
    *[(f"f32_32x32x8_{t}", 32, 8, 1, t, t) for t in ("f16", "bf16")],
    *[(f"f32_32x32x4_2b_{t}", 32, 4, 2, t, t) for t in ("f16", "bf16")],
    *[(f"f32_16x16x4_4b_{t}", 16, 4, 4, t, t) for t in ("f16", "bf16")],
    *[(f"f32_4x4x4_16b_{t}", 4, 4, 16, t, t) for t in ("f16", "bf16")],
    ("i32_16x16x32_i8", 16, 32, 1, "i8", "i8"),
    ("i32_32x32x16_i8", 32, 16, 1, "i8", "i8"),
    ("i32_32x32x4_2b_i8", 32, 4, 2, "i8", "i8"),
    ("i32_16x16x4_4b_i8", 16, 4, 4, "i8", "i8"),
    ("i32_4x4x4_16b_i8", 4, 4, 16, "i8", "i8"),
    ("f32_32x32x1_2b_f32", 32, 1, 2, "f32", "f32"),
    ("f32_16x16x1_4b_f32", 16, 1, 4, "f32", "f32"),
    ("f32_4x4x1_16b_f32", 4, 1, 16, "f32", "f32"),
    ("f32_32x32x2_f32", 32, 2, 1, "f32", "f32"),
    ("f32_16x16x4_f32", 16, 4, 1, "f32", "f32"),
    ("f32_16x16x8_xf32", 16, 8, 1, "xf32", "xf32"),
    ("f32_32x32x4_xf32", 32, 4, 1, "xf32", "xf32"),
    ("f64_16x16x4_f64", 16, 4, 1, "f64", "f64"),
    ("f64_4x4x4_4b_f64", 4, 4, 4, "f64", "f64"),
]
SPARSE = [
    *[(f"f32_16x16x64_{a}_{b}", 16, 64, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")],
    *[(f"f32_32x32x32_{a}_{b}", 32, 32, a, b) for a in ("fp8", "bf8") for b in ("fp8", "bf8")],
    ("i32_16x16x64_i8", 16, 64, "i8", "i8"),
    ("i32_32x32x32_i8", 32, 32, "i8", "i8"),
    *[(f"f32_16x16x32_{t}", 16, 32, t, t) for t in ("f16", "bf16")],
    *[(f"f32_32x32x16_{t}", 32, 16, t, t) for t in ("f16", "bf16")],
]
NUMPY = {"fp8": FP8, "bf8": BF8, "bf16": BF16, "f16": np.float16, "i8": np.int8, "f32": f32,
         "f64": np.float64, "xf32": f32}  # fmt: skip


def shapes(m, k, blocks, kind, element):
    """Registers of A (or B) a lane, and of the accumulator."""
    size = np.dtype(NUMPY[element]).itemsize
    a = max(1, m * k * blocks // 64 * size // 4)
    d = m * m * blocks // 64 * (2 if kind == "f64" else 1)
    return a, d


def asm_kernel(name, label, d, a, b, text, zero=False):
    """Loads a (and d) registers a lane, runs one instruction and stores d registers a lane."""
    vec = lambda n: f"__attribute__((ext_vector_type({n})))" if n > 1 else ""  # noqa: E731
    return f"""
typedef u32 {label}_A {vec(a)}; typedef u32 {label}_B {vec(b)}; typedef u32 {label}_D {vec(d)};
GLOBAL void {label}({label}_D* out, const {label}_A* pa, const {label}_B* pb, const u32* index) {{
  {label}_D acc = out[TID]; {label}_A a = pa[TID]; {label}_B b = pb[TID]; u32 x = index[TID];
  asm volatile("s_nop 7\\n {text}\\n s_nop 15\\n s_nop 15" : "+v"(acc) : "v"(a), "v"(b), "v"(x));
  out[TID] = acc;
}}"""


def dense_kernel(spec, modifier="", label=None):
    name, m, k, blocks, ta, _ = spec
    a, d = shapes(m, k, blocks, name[:3], ta)
    label = label or "m_" + name
    return asm_kernel(name, label, d, a, a, f"v_mfma_{name} %0, %1, %2, %0 {modifier}")


def sparse_kernel(spec, modifier="", label=None):
    name, m, k, ta, _ = spec
    size = np.dtype(NUMPY[ta]).itemsize
    a = m * k // 2 // 64 * size // 4
    label = label or "s_" + name
    return asm_kernel(name, label, m * m // 64, a, 2 * a,
                      f"v_smfmac_{name} %0, %1, %2, %3 {modifier}")  # fmt: skip


@pytest.fixture(scope="module")
def code():
    source = "".join(map(dense_kernel, DENSE)) + "".join(map(sparse_kernel, SPARSE))
    by_name = {s[0]: s for s in DENSE}
    source += dense_kernel(by_name["f32_4x4x4_16b_f16"], "cbsz:2 abid:3", "broadcast")
    for n in range(1, 8):
        source += dense_kernel(by_name["f32_16x16x16_f16"], f"blgp:{n}", f"blgp{n}")
    sparse = {s[0]: s for s in SPARSE}
    source += sparse_kernel(sparse["f32_16x16x64_fp8_fp8"], "abid:1", "sparse_abid")
    for n in range(1, 4):
        source += sparse_kernel(sparse["f32_16x16x32_f16"], f"abid:{n}", f"sparse_set{n}")
    source += dense_kernel(by_name["f64_16x16x4_f64"], "neg:[1,0,1]", "negated")
    source += """
GLOBAL void exec_ignored(f4* out, const long* a, const long* b) {
  f4 acc = {0, 0, 0, 0}; long x = a[TID], y = b[TID];
  asm volatile("s_mov_b64 s[20:21], exec\\n s_mov_b64 exec, 1\\n"
               "v_mfma_f32_16x16x32_fp8_fp8 %0, %1, %2, 0\\n s_nop 15\\n s_mov_b64 exec, s[20:21]"
               : "+v"(acc) : "v"(x), "v"(y) : "s20", "s21");
  out[TID] = acc;
}
GLOBAL void accumulators(f4* out, const long* a, const long* b) {
  u2 x = ((const u2*)a)[TID], y = ((const u2*)b)[TID]; f4 acc;
  asm volatile("v_accvgpr_write_b32 a0, %1\\n v_accvgpr_write_b32 a1, %2\\n"
               "v_accvgpr_write_b32 a2, %3\\n v_accvgpr_write_b32 a3, %4\\n s_nop 7\\n"
               "v_mfma_f32_16x16x32_fp8_fp8 a[4:7], a[0:1], a[2:3], 0\\n s_nop 15\\n"
               "v_accvgpr_read_b32 %0, a4" : "=v"(acc.x)
               : "v"(x.x), "v"(x.y), "v"(y.x), "v"(y.y)
               : "a0", "a1", "a2", "a3", "a4", "a5", "a6", "a7");
  asm volatile("v_accvgpr_read_b32 %0, a5\\n v_accvgpr_read_b32 %1, a6\\n"
               "v_accvgpr_read_b32 %2, a7" : "=v"(acc.y), "=v"(acc.z), "=v"(acc.w));
  out[TID] = acc;
}"""
    return device(source)


def values(element, shape, rng):
    if element == "i8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    # Small integers: sums are exact in f32, so the order of summation cannot matter.
    return rng.integers(-7, 8, shape).astype(f32).astype(NUMPY[element])


def lane_words(elements):
    """[64, n] elements of any size to [64, registers] words."""
    data = np.ascontiguousarray(elements).view(np.uint8).reshape(64, -1)
    padded = np.zeros((64, -(-data.shape[1] // 4) * 4), np.uint8)
    padded[:, : data.shape[1]] = data
    return padded.view(np.uint32)


def place_dense(x, m, k, blocks):
    """x[block][row][k] to [lane][element]: rows, then blocks, then groups of k over the lanes."""
    per = m * k * blocks // 64
    lanes = np.zeros((64, per), x.dtype)
    for lane in range(64):
        row, rest = lane % m, lane // m
        block, group = rest % blocks, rest // blocks
        lanes[lane] = x[block, row, group * per : (group + 1) * per]
    return lanes


def read_result(out, m, blocks, kind):
    """[64, registers] words to d[block][row][column]."""
    dtype = {"f32": f32, "i32": np.int32, "f64": np.float64}[kind]
    lanes = out.view(dtype).reshape(64, -1)
    d = np.zeros((blocks, m, m), dtype)
    for block in range(blocks):
        for i in range(m):
            for j in range(m):
                if kind == "f64":
                    lane, reg = (
                        (16 * (i % 4) + j, i // 4) if m == 16 else (16 * i + 4 * block + j, 0)
                    )
                elif m == 32:
                    lane, reg = 32 * (i // 4 % 2) + j, 16 * block + 4 * (i // 8) + i % 4
                elif m == 16:
                    lane, reg = 16 * (i // 4) + j, 4 * block + i % 4
                else:
                    lane, reg = 4 * block + j, i
                d[block, i, j] = lanes[lane, reg]
    return d


def launch(code, label, acc, a, b, index=None):
    out = np.ascontiguousarray(acc).copy()
    index = np.zeros(64, np.uint32) if index is None else index
    code.launch(label, 1, 64, [out, lane_words(a), lane_words(b), index]).check()
    return out


def run_dense(code, spec, label=None, a=None):
    name, m, k, blocks, ta, tb = spec
    rng = np.random.default_rng(len(name))
    a = values(ta, (blocks, m, k), rng) if a is None else a
    b = values(tb, (blocks, m, k), rng)  # b[block][column][k]
    _, d = shapes(m, k, blocks, name[:3], ta)
    acc = np.arange(64 * d).reshape(64, d)
    if name[:3] == "f64":
        acc = np.arange(32 * d).astype(np.float64).reshape(64, -1)
    acc = acc if name[:3] == "f64" else acc.astype({"f32": f32, "i32": np.int32}[name[:3]])
    out = launch(code, label or "m_" + name, acc, place_dense(a, m, k, blocks),
                 place_dense(b, m, k, blocks))  # fmt: skip
    wide = np.float64 if ta != "i8" else np.int64
    before = read_result(acc, m, blocks, name[:3]).astype(wide)
    return a.astype(wide), b.astype(wide), before, read_result(out, m, blocks, name[:3])


@pytest.mark.parametrize("spec", DENSE, ids=lambda s: s[0])
def test_dense(code, spec):
    a, b, before, got = run_dense(code, spec)
    want = np.einsum("bik,bjk->bij", a, b) + before
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("spec", SPARSE, ids=lambda s: s[0])
def test_sparse(code, spec):
    run_sparse(code, spec, 0)


def test_sparse_index_sets(code):
    by_name = {s[0]: s for s in SPARSE}
    run_sparse(code, by_name["f32_16x16x64_fp8_fp8"], 1, "sparse_abid")
    for n in range(1, 4):
        run_sparse(code, by_name["f32_16x16x32_f16"], n, f"sparse_set{n}")


def run_sparse(code, spec, index_set, label=None):
    name, m, k, ta, tb = spec
    rng = np.random.default_rng(7)
    span = m * k // 64  # dense k a lane
    stored = values(ta, (m, k // 4, 2), rng)
    positions = np.sort(np.stack([rng.permutation(4)[:2] for _ in range(m * k // 4)]), axis=1)
    positions = positions.reshape(m, k // 4, 2)
    b = values(tb, (m, k), rng)
    lanes_a = np.zeros((64, span // 2), stored.dtype)
    lanes_b = np.zeros((64, span), b.dtype)
    index = np.zeros(64, np.uint32)
    dense = np.zeros((m, k), np.float64)
    for lane in range(64):
        row, first = lane % m, lane // m * span
        lanes_b[lane] = b[row, first : first + span]
        bits = 0
        for g in range(span // 4):
            group = first // 4 + g
            lanes_a[lane, 2 * g : 2 * g + 2] = stored[row, group]
            for n in range(2):
                position = int(positions[row, group, n])
                dense[row, 4 * group + position] = stored[row, group, n]
                bits |= position << (4 * g + 2 * n)
        index[lane] = bits << (span * index_set)
    kind = name[:3]
    acc = np.arange(64 * m * m // 64).reshape(64, -1).astype(f32 if kind == "f32" else np.int32)
    out = launch(code, label or "s_" + name, acc, lanes_a, lanes_b, index)
    want = dense @ b.astype(np.float64).T + read_result(acc, m, 1, kind)[0]
    np.testing.assert_array_equal(read_result(out, m, 1, kind)[0], want)


def test_cbsz_broadcasts_a_block(code):
    spec = next(s for s in DENSE if s[0] == "f32_4x4x4_16b_f16")
    a, b, before, got = run_dense(code, spec, "broadcast")
    taken = np.array([block // 4 * 4 + 3 for block in range(16)])  # groups of 4, block 3 of each
    np.testing.assert_array_equal(got, np.einsum("bik,bjk->bij", a[taken], b) + before)


@pytest.mark.parametrize("blgp", range(1, 8))
def test_blgp_permutes_lanes_of_b(code, blgp):
    spec = next(s for s in DENSE if s[0] == "f32_16x16x16_f16")
    a, b, before, got = run_dense(code, spec, f"blgp{blgp}")
    lanes = place_dense(b, 16, 16, 1)
    order = {1: [*range(32)] * 2, 2: [*range(32, 64)] * 2, 3: np.roll(np.arange(64), -16)}
    source = order.get(blgp, [*range(16 * (blgp - 4), 16 * (blgp - 3))] * 4)
    moved = lanes[np.asarray(source)].reshape(4, 16, 4).transpose(1, 0, 2).reshape(1, 16, 16)
    np.testing.assert_array_equal(got, np.einsum("bik,bjk->bij", a, moved) + before)


def test_f64_negation(code):
    spec = next(s for s in DENSE if s[0] == "f64_16x16x4_f64")
    a, b, before, got = run_dense(code, spec, "negated")
    np.testing.assert_array_equal(got, -np.einsum("bik,bjk->bij", a, b) - before)


@pytest.mark.parametrize("label", ["exec_ignored", "accumulators"])
def test_exec_and_accumulation_registers(code, label):
    rng = np.random.default_rng(3)
    a, b = values("fp8", (1, 16, 32), rng), values("fp8", (1, 16, 32), rng)
    out = np.zeros((64, 4), f32)
    code.launch(label, 1, 64, [out, lane_words(place_dense(a, 16, 32, 1)),
                               lane_words(place_dense(b, 16, 32, 1))]).check()  # fmt: skip
    want = np.einsum("bik,bjk->bij", a.astype(f32), b.astype(f32))
    np.testing.assert_array_equal(read_result(out, 16, 1, "f32"), want)


def test_f16_subnormals_are_kept(code):
    spec = next(s for s in DENSE if s[0] == "f32_16x16x16_f16")
    tiny = np.full((1, 16, 16), 2.0**-24, np.float16)
    a, b, before, got = run_dense(code, spec, a=tiny)
    np.testing.assert_allclose(got, np.einsum("bik,bjk->bij", a, b) + before, rtol=1e-7)


def test_eight_dense_rows_fill_a_sparse_block(code):
    """Each dense row becomes two sparse rows of its even and odd pairs; their sum is the result."""
    rng = np.random.default_rng(5)
    a, b = values("fp8", (8, 64), rng), values("fp8", (16, 64), rng)
    lanes_a, lanes_b = np.zeros((64, 8), FP8), np.zeros((64, 16), FP8)
    index = np.zeros(64, np.uint32)
    for lane in range(64):
        row, first = lane % 16, lane // 16 * 16
        lanes_b[lane] = b[row, first : first + 16]
        for g in range(4):
            k = first + 4 * g + 2 * (row % 2)
            lanes_a[lane, 2 * g : 2 * g + 2] = a[row // 2, k : k + 2]
            index[lane] |= (0b1110 if row % 2 else 0b0100) << (4 * g)
    out = launch(code, "s_f32_16x16x64_fp8_fp8", np.zeros((64, 4), f32), lanes_a, lanes_b, index)
    d = read_result(out, 16, 1, "f32")[0]
    np.testing.assert_array_equal(d[0::2] + d[1::2], a.astype(f32) @ b.astype(f32).T)


def test_gfx950_scaled_and_wide():
    code = device(
        """
typedef int i8v __attribute__((ext_vector_type(8)));
GLOBAL void wide(f4* out, const i8v* a, const i8v* b, const u32* scale) {
  f4 acc = {0, 0, 0, 0};
  out[TID] = __builtin_amdgcn_mfma_scale_f32_16x16x128_f8f6f4(a[TID], b[TID], acc, 0, 0, 0,
                                                             scale[TID], 0, scale[TID]);
}
GLOBAL void plain(f4* out, const i8v* a, const i8v* b, const u32* scale) {
  f4 acc = {0, 0, 0, 0};
  asm volatile("s_nop 7\\n v_mfma_f32_16x16x128_f8f6f4 %0, %1, %2, %0\\n s_nop 15\\n s_nop 15"
               : "+v"(acc) : "v"(a[TID]), "v"(b[TID]));
  out[TID] = acc;
}""",
        target="gfx950",
    )
    assert code.target == "gfx950"
    rng = np.random.default_rng(0)
    ocp = ml_dtypes.float8_e4m3fn
    a = rng.integers(-7, 8, (16, 128)).astype(f32).astype(ocp)
    b = rng.integers(-7, 8, (16, 128)).astype(f32).astype(ocp)
    place = lambda x: lane_words(  # noqa: E731
        np.stack([x[lane % 16, lane // 16 * 32 :][:32] for lane in range(64)]))  # fmt: skip
    exponents = rng.integers(125, 130, 64).astype(np.uint32)
    scale = np.exp2(exponents.astype(f32) - 127).reshape(4, 16).T.repeat(32, axis=1)
    for label, s in (("wide", scale), ("plain", 1.0)):
        out = np.zeros((64, 4), f32)
        code.launch(label, 1, 64, [out, place(a), place(b), exponents]).check()
        want = (a.astype(f32) * s) @ (b.astype(f32) * s).T
        np.testing.assert_array_equal(read_result(out, 16, 1, "f32")[0], want)


@pytest.mark.parametrize("shape", ["16x16x8", "32x32x4"])
def test_xf32_truncates_its_operands(shape):
    m, _, k = map(int, shape.split("x"))
    registers = m * m // 64
    code = device(f"""
    typedef float D __attribute__((ext_vector_type({registers})));
    GLOBAL void run(float* o, const f2* a, const f2* b) {{
      D c = __builtin_amdgcn_mfma_f32_{shape}_xf32(a[TID], b[TID], (D)0, 0, 0, 0);
      for (int n = 0; n < {registers}; ++n) o[TID * {registers} + n] = c[n]; }}""")
    ones = np.ones((64, 2), np.float32)
    almost = np.full((64, 2), 0x3F801FFF, np.uint32).view(np.float32)
    out = np.zeros(64 * registers, np.float32)
    code.launch("run", 1, 64, [out, almost, ones]).check()
    assert (out == k).all(), "0x3f801fff counts as 0x3f800000"
    code.launch("run", 1, 64, [out, ones, -almost]).check()
    assert (out == -k).all()
    nan = np.full((64, 2), 0x7F800001, np.uint32).view(np.float32)
    code.launch("run", 1, 64, [out, nan, ones]).check()
    assert np.isnan(out).all()
