"""Memory instructions by width and space, and atomics, against NumPy on the same bytes."""

import ml_dtypes
import numpy as np
import pytest
from hipcc import device

import simulator

u8, u32, f16, f32 = np.uint8, np.uint32, np.float16, np.float32
LANES = np.arange(64)
OLD = 0xAAAABBBB  # what the destination holds before a load that fills a half only

# suffix -> (bytes, signed, which half of the register or None)
GLOBAL_LOADS = {
    "ubyte": (1, False, None), "sbyte": (1, True, None), "ushort": (2, False, None),
    "sshort": (2, True, None), "dword": (4, False, None), "dwordx2": (8, False, None),
    "dwordx3": (12, False, None), "dwordx4": (16, False, None),
    "ubyte_d16": (1, False, 0), "ubyte_d16_hi": (1, False, 1), "sbyte_d16": (1, True, 0),
    "sbyte_d16_hi": (1, True, 1), "short_d16": (2, False, 0), "short_d16_hi": (2, False, 1),
}  # fmt: skip
LDS_LOADS = {
    "u8": (1, False, None), "i8": (1, True, None), "u16": (2, False, None),
    "i16": (2, True, None), "b32": (4, False, None), "b64": (8, False, None),
    "b96": (12, False, None), "b128": (16, False, None), "u8_d16": (1, False, 0),
    "u8_d16_hi": (1, False, 1), "i8_d16_hi": (1, True, 1), "u16_d16": (2, False, 0),
    "u16_d16_hi": (2, False, 1),
}  # fmt: skip
GLOBAL_STORES = {
    "byte": (1, 0),
    "byte_d16_hi": (1, 2),
    "short": (2, 0),
    "short_d16_hi": (2, 2),
    "dword": (4, 0),
    "dwordx2": (8, 0),
    "dwordx3": (12, 0),
    "dwordx4": (16, 0),
}
LDS_STORES = {
    "b8": (1, 0),
    "b16": (2, 0),
    "b8_d16_hi": (1, 2),
    "b16_d16_hi": (2, 2),
    "b32": (4, 0),
    "b64": (8, 0),
    "b96": (12, 0),
    "b128": (16, 0),
}
ATOMICS = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "and": lambda a, b: a & b,
    "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "swap": lambda a, b: b,
    "smin": lambda a, b: np.minimum(a.view(np.int32), b.view(np.int32)).view(u32),
    "smax": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(u32),
    "umin": np.minimum, "umax": np.maximum,
    "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(u32),
    "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(u32),
}  # fmt: skip
LDS_ATOMICS = {"add": "add_rtn_u32", "sub": "sub_rtn_u32", "and": "and_rtn_b32",
               "or": "or_rtn_b32", "xor": "xor_rtn_b32", "swap": "wrxchg_rtn_b32",
               "smin": "min_rtn_i32", "smax": "max_rtn_i32", "umin": "min_rtn_u32",
               "umax": "max_rtn_u32", "inc": "inc_rtn_u32", "dec": "dec_rtn_u32"}  # fmt: skip

COPY_IN = "for (int n = TID; n < 256; n += 64) x[n] = ((const u32*)a)[n]; sync();"
AT = "u32 at = (u32)(u64)(__attribute__((address_space(3))) u32*)x"


def row(count):
    return ["u32", "u32", "u2", "u3", "u4"][count]


def load_kernel(space, suffix, size):
    words = max(1, size // 4)
    start = f"{row(words)} r; for (int n = 0; n < {words}; ++n) ((u32*)&r)[n] = {OLD:#x}u;"
    store = f"for (int n = 0; n < {words}; ++n) o[TID * 4 + n] = ((u32*)&r)[n];"
    if space == "ds":
        body = (f'SHARED u32 x[256]; {COPY_IN} {AT} + TID * 16; asm volatile("ds_read_{suffix} '
                f'%0, %1\\n s_waitcnt lgkmcnt(0)" : "+v"(r) : "v"(at) : "memory");')  # fmt: skip
    else:
        name = {"global": "off", "flat": "", "buffer": ""}[space]
        text = f"{space}_load_{suffix} %0, %1{', off' if name else ''}"
        wait = "s_waitcnt vmcnt(0) lgkmcnt(0)"
        body = (f'u64 p = (u64)(a + TID * 16); asm volatile("{text}\\n {wait}" : "+v"(r) : '
                f'"v"(p) : "memory");')  # fmt: skip
    return (
        f"GLOBAL void {space}_load_{suffix}(u32* o, const char* a) {{ {start} {body} {store} }}\n"
    )


def store_kernel(space, suffix, size):
    words = max(1, size // 4)
    fetch = f"{row(words)} r = *(const {row(words)}*)(a + TID * 16);"
    if space == "ds":
        body = (f'SHARED u32 x[256]; for (int n = TID; n < 256; n += 64) x[n] = 0; sync(); {AT} + '
                f'TID * 16; asm volatile("ds_write_{suffix} %0, %1\\n s_waitcnt lgkmcnt(0)" :: '
                f'"v"(at), "v"(r) : "memory"); sync();'
                f"for (int n = TID; n < 256; n += 64) ((u32*)o)[n] = x[n];")  # fmt: skip
    else:
        text = f"{space}_store_{suffix} %0, %1{', off' if space == 'global' else ''}"
        body = f'u64 p = (u64)(o + TID * 4); asm volatile("{text}" :: "v"(p), "v"(r) : "memory");'
    return f"GLOBAL void {space}_store_{suffix}(u32* o, const char* a) {{ {fetch} {body} }}\n"


def atomic_kernels(name):
    return f"""
GLOBAL void global_{name}(u32* o, u32* a, const u32* b) {{
  u64 p = (u64)(a + TID); u32 r, d = b[TID];
  asm volatile("global_atomic_{name} %0, %1, %2, off sc0\\n s_waitcnt vmcnt(0)"
               : "=&v"(r) : "v"(p), "v"(d) : "memory");
  o[TID] = r;
}}
GLOBAL void ds_{name}(u32* o, u32* a, const u32* b) {{
  SHARED u32 x[64]; x[TID] = a[TID]; sync(); {AT} + TID * 4; u32 r, d = b[TID];
  asm volatile("ds_{LDS_ATOMICS[name]} %0, %1, %2\\n s_waitcnt lgkmcnt(0)"
               : "=&v"(r) : "v"(at), "v"(d) : "memory");
  o[TID] = r; a[TID] = x[TID];
}}
"""


@pytest.fixture(scope="module")
def code():
    source = "typedef unsigned u3 __attribute__((ext_vector_type(3)));\n"
    for space in ("global", "flat"):
        source += "".join(load_kernel(space, s, spec[0]) for s, spec in GLOBAL_LOADS.items())
        source += "".join(store_kernel(space, s, spec[0]) for s, spec in GLOBAL_STORES.items())
    source += "".join(load_kernel("ds", s, spec[0]) for s, spec in LDS_LOADS.items())
    source += "".join(store_kernel("ds", s, spec[0]) for s, spec in LDS_STORES.items())
    source += "".join(map(atomic_kernels, ATOMICS))
    source += f"""
GLOBAL void pairs(u4* o, const char* a) {{
  SHARED u32 x[2048]; for (int n = TID; n < 2048; n += 64) x[n] = n; sync(); {AT} + TID * 8;
  u2 one, wide; u4 two;
  asm volatile("ds_read2_b32 %0, %3 offset0:1 offset1:3\\n"
               "ds_read2st64_b32 %1, %3 offset0:2 offset1:5\\n"
               "ds_read2_b64 %2, %3 offset0:4 offset1:9\\n s_waitcnt lgkmcnt(0)"
               : "=&v"(one), "=&v"(wide), "=&v"(two) : "v"(at) : "memory");
  o[TID * 2] = (u4){{one.x, one.y, wide.x, wide.y}}; o[TID * 2 + 1] = two;
  u32 d = 1000 + TID, e = 2000 + TID; u32 to = at - TID * 4;
  asm volatile("ds_write2st64_b32 %0, %1, %2 offset0:1 offset1:3\\n s_waitcnt lgkmcnt(0)"
               :: "v"(to), "v"(d), "v"(e) : "memory");
  sync();
  o[128 + TID] = (u4){{x[64 + TID], x[192 + TID], 0, 0}};
}}
GLOBAL void compare_swap(u32* o, u32* a, const u32* b) {{
  u64 p = (u64)(a + TID); u32 r; u2 d = {{b[TID], (u32)(TID & 1)}};  // new value, expected
  asm volatile("global_atomic_cmpswap %0, %1, %2, off sc0\\n s_waitcnt vmcnt(0)"
               : "=&v"(r) : "v"(p), "v"(d) : "memory");
  o[TID] = r;
}}
GLOBAL void wide_atomic(u64* sum, const u64* b) {{
  u64 d = b[TID];
  asm volatile("global_atomic_add_x2 %0, %1, off" :: "v"(sum), "v"(d) : "memory");
}}
GLOBAL void lds_float_atomic(float* o, const float* b) {{
  SHARED float x[1]; if (TID == 0) x[0] = 0; sync(); {AT}; float d = b[TID];
  asm volatile("ds_add_f32 %0, %1\\n s_waitcnt lgkmcnt(0)" :: "v"(at), "v"(d) : "memory");
  sync(); o[TID] = x[0];
}}
GLOBAL void bf16_atomic(u32* sum, const u32* b) {{
  u32 d = b[TID];
  asm volatile("global_atomic_pk_add_bf16 %0, %1, off" :: "v"(sum), "v"(d) : "memory");
}}
GLOBAL void wide_scalars(u32* o, const u32* a) {{
  asm volatile("s_load_dwordx16 s[16:31], %1, 0x10\\n s_waitcnt lgkmcnt(0)\\n"
               "v_mov_b32 v9, s31\\n global_store_dword %0, v9, off"
               :: "v"(o + TID), "s"(a) : "v9", "memory", "s16", "s17", "s18", "s19", "s20", "s21",
                  "s22", "s23", "s24", "s25", "s26", "s27", "s28", "s29", "s30", "s31");
}}
"""
    return device(source)


def some_bytes():
    return np.random.default_rng(0).integers(0, 256, 1024, dtype=u8)


def loaded(data, size, signed, half):
    """Registers that a load of `size` bytes at lane * 16 gives."""
    lanes = data.reshape(64, 16)[:, :size]
    if size >= 4:
        return np.ascontiguousarray(lanes).view(u32)
    x = np.ascontiguousarray(lanes).view(f"{'i' if signed else 'u'}{size}").astype(np.int64)
    x = x.astype(u32)
    if half is not None:
        keep = u32(OLD) & u32(0xFFFF0000 if half == 0 else 0x0000FFFF)
        x = (x & u32(0xFFFF)) << u32(16 * half) | keep
    return x


CASES = [(space, s) for space in ("global", "flat") for s in GLOBAL_LOADS]
CASES += [("ds", s) for s in LDS_LOADS]


@pytest.mark.parametrize("space,suffix", CASES)
def test_loads(code, space, suffix):
    data, out = some_bytes(), np.zeros((64, 4), u32)
    code.launch(f"{space}_load_{suffix}", 1, 64, [out, data]).check()
    want = loaded(data, *(LDS_LOADS if space == "ds" else GLOBAL_LOADS)[suffix])
    np.testing.assert_array_equal(out[:, : want.shape[1]], want)


STORES = [(space, s) for space in ("global", "flat") for s in GLOBAL_STORES]
STORES += [("ds", s) for s in LDS_STORES]


@pytest.mark.parametrize("space,suffix", STORES)
def test_stores(code, space, suffix):
    data, out = some_bytes(), np.zeros(1024, u8)
    code.launch(f"{space}_store_{suffix}", 1, 64, [out, data]).check()
    size, first = (LDS_STORES if space == "ds" else GLOBAL_STORES)[suffix]
    want = np.zeros((64, 16), u8)
    want[:, :size] = data.reshape(64, 16)[:, first : first + size]
    np.testing.assert_array_equal(out.reshape(64, 16), want)


@pytest.mark.parametrize("space", ["global", "ds"])
@pytest.mark.parametrize("name", ATOMICS)
def test_atomics(code, space, name):
    rng = np.random.default_rng(1)
    cells, data = (rng.integers(0, 2**32, 64, dtype=u32) for _ in range(2))
    cells[:8], data[:8] = [0, 5, 7, 0, 1, 2, 3, 4], [3, 5, 6, 0, 9, 1, 3, 5]
    before, out = cells.copy(), np.zeros(64, u32)
    code.launch(f"{space}_{name}", 1, 64, [out, cells, data]).check()
    np.testing.assert_array_equal(out, before)
    np.testing.assert_array_equal(cells, ATOMICS[name](before, data))


def test_pairs_of_lds_words(code):
    out = np.zeros((192, 4), u32)
    code.launch("pairs", 1, 64, [out, np.zeros(1024, u8)]).check()
    first = 2 * LANES  # words
    want = np.stack([first + 1, first + 3, first + 128, first + 320], 1)
    np.testing.assert_array_equal(out[:128:2], want)
    want = np.stack([first + 8, first + 9, first + 18, first + 19], 1)
    np.testing.assert_array_equal(out[1:128:2], want)
    np.testing.assert_array_equal(out[128:, :2], np.stack([1000 + LANES, 2000 + LANES], 1))


def test_compare_and_swap(code):
    cells = (LANES // 2 % 2).astype(u32)
    before, out, data = cells.copy(), np.zeros(64, u32), (LANES + 100).astype(u32)
    code.launch("compare_swap", 1, 64, [out, cells, data]).check()
    np.testing.assert_array_equal(out, before)
    np.testing.assert_array_equal(cells, np.where(before == LANES % 2, data, before))


def test_wide_and_float_atomics(code):
    total, data = np.zeros(1, np.uint64), np.arange(64, dtype=np.uint64) << np.uint64(30)
    code.launch("wide_atomic", 1, 64, [total, data]).check()
    assert total[0] == data.sum()
    out, numbers = np.zeros(64, f32), np.arange(64, dtype=f32)
    code.launch("lds_float_atomic", 1, 64, [out, numbers]).check()
    assert (out == 2016).all()
    pair, ones = np.zeros(2, ml_dtypes.bfloat16), np.ones(128, ml_dtypes.bfloat16)
    code.launch("bf16_atomic", 1, 64, [pair.view(u32), ones.view(u32)]).check()
    assert pair.astype(f32).tolist() == [64, 64]


def test_wide_scalar_loads(code):
    data, out = np.arange(64, dtype=u32), np.zeros(64, u32)
    code.launch("wide_scalars", 1, 64, [out, data]).check()
    assert (out == 4 + 15).all()


# What __hip_atomic_fetch_max on a shared float becomes, and the atomics of LDS with two operands.
ODD_LDS = """
GLOBAL void shared_max(float* o, const float* a) {
  SHARED float most, least;
  if (TID == 0) most = -1e30f, least = 1e30f;
  sync();
  __scoped_atomic_fetch_max(&most, a[TID], __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
  float old = __scoped_atomic_fetch_min(&least, a[TID], __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
  sync();
  o[TID] = TID == 0 ? most : TID == 1 ? least : old;
}
#define ODD(name, instruction, W, operands) \
  GLOBAL void name(W* o, const W* old, const W* x, const W* y) { \
    SHARED W s[64]; s[TID] = old[TID]; sync(); W r = 0, a = x[TID], b = y[TID]; \
    u32 at = (u32)(u64)(__attribute__((address_space(3))) W*)&s[TID]; \
    asm volatile(instruction " " operands "\\n s_waitcnt lgkmcnt(0)" \
                 : "+v"(r) : "v"(at), "v"(a), "v"(b) : "memory"); \
    o[TID] = r; o[64 + TID] = s[TID]; }
ODD(cmpst_f32, "ds_cmpst_rtn_f32", u32, "%0, %1, %2, %3")
ODD(cmpst_f64, "ds_cmpst_rtn_f64", u64, "%0, %1, %2, %3")
ODD(mskor_b32, "ds_mskor_rtn_b32", u32, "%0, %1, %2, %3")
ODD(mskor_b64, "ds_mskor_rtn_b64", u64, "%0, %1, %2, %3")
ODD(mskor, "ds_mskor_b32", u32, "%1, %2, %3")
ODD(wrap, "ds_wrap_rtn_b32", u32, "%0, %1, %2, %3")
GLOBAL void append(u32* o) {
  SHARED u32 n, m;
  if (TID == 0) n = 5, m = 900;
  sync();
  u32 a = 0, b = 0, at = (u32)(u64)(__attribute__((address_space(3))) u32*)&n;
  u32 at2 = (u32)(u64)(__attribute__((address_space(3))) u32*)&m;
  if (TID % 64 < 40) {
    asm volatile("s_mov_b32 m0, %1\\n ds_append %0\\n s_waitcnt lgkmcnt(0)"
                 : "=v"(a) : "s"(at) : "m0", "memory");
    asm volatile("s_mov_b32 m0, %1\\n ds_consume %0\\n s_waitcnt lgkmcnt(0)"
                 : "=v"(b) : "s"(at2) : "m0", "memory");
  }
  sync();
  o[TID * 2] = a; o[TID * 2 + 1] = b;
  if (TID == 0) o[512] = n, o[513] = m;
}
GLOBAL void exchange_two(u32* o) {
  SHARED u32 s[192];
  for (int n = TID; n < 192; n += 64) s[n] = n;
  sync();
  u64 r; u32 x = 1000 + TID, y = 2000 + TID;
  u32 at = (u32)(u64)(__attribute__((address_space(3))) u32*)&s[TID];
  asm volatile("ds_wrxchg2st64_rtn_b32 %0, %1, %2, %3 offset0:0 offset1:2\\n s_waitcnt lgkmcnt(0)"
               : "=v"(r) : "v"(at), "v"(x), "v"(y) : "memory");
  o[TID * 4] = (u32)r; o[TID * 4 + 1] = (u32)(r >> 32);
  o[TID * 4 + 2] = s[TID]; o[TID * 4 + 3] = s[128 + TID];
}
"""


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def odd(request):
    return device(ODD_LDS, target=request.param)


def test_maximum_of_shared_floats(odd):
    a = np.random.default_rng(11).standard_normal(256).astype(f32)
    out = np.zeros(256, f32)
    odd.launch("shared_max", 1, 256, [out, a]).check()
    assert out[0] == a.max() and out[1] == a.min()
    assert np.isin(out[2:], np.append(a, f32(1e30))).all() and (out == f32(1e30)).any()


@pytest.mark.parametrize(
    "name", ["cmpst_f32", "cmpst_f64", "mskor_b32", "mskor_b64", "mskor", "wrap"]
)
def test_lds_atomics_with_two_operands(odd, name):
    rng = np.random.default_rng(12)
    wide = np.uint64 if name.endswith("64") else u32
    old, x, y = (rng.integers(0, 2**30, 64, dtype=wide) for _ in range(3))
    if name.startswith("cmpst"):
        real = np.float64 if wide is np.uint64 else f32
        old, x = rng.standard_normal(64).astype(real), rng.standard_normal(64).astype(real)
        x[::2] = old[::2]
        old[:4], x[:4] = [0.0, -0.0, np.nan, 1], [-0.0, 0.0, np.nan, -1]  # as floats compare
        want = np.where(old == x, y, old.view(wide))
        old, x = old.view(wide), x.view(wide)
    elif name == "wrap":
        want = np.where(old >= x, old - x, old + y)
    else:
        want = (old & ~x) | y
    out = np.zeros(128, wide)
    odd.launch(name, 1, 64, [out, old, x, y]).check()
    if name != "mskor":
        np.testing.assert_array_equal(out[:64], old)
    np.testing.assert_array_equal(out[64:], want)


def test_append_and_consume_count_lanes(odd):
    out = np.zeros(514, u32)
    odd.launch("append", 1, 256, [out]).check()
    assert out[512] == 5 + 4 * 40 and out[513] == 900 - 4 * 40
    pairs = out[:512].reshape(4, 64, 2)
    assert not pairs[:, 40:].any() and (pairs[:, :40] == pairs[:, :1]).all()
    assert sorted(pairs[:, 0, 0]) == [5, 45, 85, 125]
    assert sorted(pairs[:, 0, 1]) == [780, 820, 860, 900]


def test_two_exchanges_in_one(odd):
    out = np.zeros((64, 4), u32)
    odd.launch("exchange_two", 1, 64, [out]).check()
    np.testing.assert_array_equal(out, LANES[:, None] + [0, 128, 1000, 2000])


OVERLAP = """
GLOBAL void copy(u32* to, const u32* from) { to[TID] = from[TID] + 1; }
GLOBAL void three(u32* a, u32* b, u32* c, int n) {
  a[TID] += 1; b[TID] += 10; if (TID < n) c[TID] = a[TID];
}
"""


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def overlap(request):
    return device(OVERLAP, target=request.param)


def test_a_buffer_and_a_slice_of_it(overlap):
    for at in (0, 64, 100, 192):
        data = np.arange(256, dtype=u32)
        want = data.copy()
        want[at : at + 64] = np.arange(64) + 1 if at else want[:64] + 1
        overlap.launch("copy", 1, 64, [data[at : at + 64], data]).check()
        np.testing.assert_array_equal(data, want)
    data = np.arange(256, dtype=u32)
    overlap.launch("copy", 1, 64, [data, data]).check()  # the same buffer twice
    np.testing.assert_array_equal(data[:64], np.arange(64) + 1)


def test_overlapping_buffers_keep_their_ends_and_their_unwritten_bytes(overlap):
    whole = np.zeros(512, u32)
    args = [whole[:128], whole[64:128], simulator.Out(whole[100:200]), 64]
    overlap.launch("three", 1, 64, args).check()
    assert (whole[:64] == 1).all() and (whole[64:100] == 10).all()
    whole[:] = 0
    found = overlap.launch("three", 1, 64, [whole[:128], whole[64:100], whole[60:120], 64]).findings
    assert not found, "the first buffer holds them all"
    found = overlap.launch("three", 1, 64, [whole[:100], whole[64:100], whole[90:120], 64]).findings
    assert [f.kind for f in found].count("out-of-bounds") >= 2  # loads and stores past byte 480
    # bytes of an output that no other buffer covers are still unwritten
    args = [simulator.Out(whole[:100]), whole[32:96], whole[200:300], 0]
    found = overlap.launch("three", 1, 64, args).findings
    assert [f.kind for f in found] == ["uninitialised"] and found[0].count == 32


def test_loads_to_lds_beyond_64_kib():
    code = device(
        """GLOBAL void far(u32* o, const u32* a) {
        SHARED u32 x[36864];
        __builtin_amdgcn_global_load_lds((__attribute__((address_space(1))) u32*)a + TID,
            (__attribute__((address_space(3))) u32*)&x[32768], 4, 0, 0);
        asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
        x[TID] = 1; sync();
        o[TID] = x[32768 + TID]; }""",
        target="gfx950",
    )
    a, out = np.random.default_rng(13).integers(0, 2**31, 64, dtype=u32), np.zeros(64, u32)
    code.launch("far", 1, 64, [out, a]).check()
    np.testing.assert_array_equal(out, a)
