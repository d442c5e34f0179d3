"""Scalar instructions against their definitions in Python integers: result and SCC."""

import numpy as np
import pytest
from hipcc import device

M32, M64 = (1 << 32) - 1, (1 << 64) - 1
u32, u64 = np.uint32, np.uint64


def s32(x):
    return x - (1 << 32) if x >> 31 else x


def s64(x):
    return x - (1 << 64) if x >> 63 else x


def bfe(x, control, signed, width):
    offset, count = control & (width - 1), control >> 16 & 127
    if not count:
        return 0
    x = (s32(x) if width == 32 else s64(x)) >> offset if signed else x >> offset
    count = min(count, width)
    x &= (1 << count) - 1
    return x - (1 << count) if signed and x >> (count - 1) else x


def overflow(x):
    return not -(2**31) <= x < 2**31


# name -> function of (a, b) giving the result and, where it is written, SCC
OPS32 = {
    "s_add_u32": lambda a, b: (a + b, a + b > M32),
    "s_sub_u32": lambda a, b: (a - b, b > a),
    "s_add_i32": lambda a, b: (a + b, overflow(s32(a) + s32(b))),
    "s_sub_i32": lambda a, b: (a - b, overflow(s32(a) - s32(b))),
    "s_min_i32": lambda a, b: (min(s32(a), s32(b)), s32(a) < s32(b)),
    "s_max_u32": lambda a, b: (max(a, b), a > b),
    "s_and_b32": lambda a, b: (a & b, a & b != 0),
    "s_or_b32": lambda a, b: (a | b, a | b != 0),
    "s_xor_b32": lambda a, b: (a ^ b, a ^ b != 0),
    "s_andn2_b32": lambda a, b: (a & ~b, a & ~b != 0),
    "s_orn2_b32": lambda a, b: (a | ~b, (a | ~b) & M32 != 0),
    "s_nand_b32": lambda a, b: (~(a & b), ~(a & b) & M32 != 0),
    "s_xnor_b32": lambda a, b: (~(a ^ b), ~(a ^ b) & M32 != 0),
    "s_lshl_b32": lambda a, b: (a << (b & 31), (a << (b & 31)) & M32 != 0),
    "s_lshr_b32": lambda a, b: (a >> (b & 31), a >> (b & 31) != 0),
    "s_ashr_i32": lambda a, b: (s32(a) >> (b & 31), s32(a) >> (b & 31) != 0),
    "s_bfm_b32": lambda a, b: (((1 << (a & 31)) - 1) << (b & 31), None),
    "s_bfe_u32": lambda a, b: (bfe(a, b, False, 32), bfe(a, b, False, 32) != 0),
    "s_bfe_i32": lambda a, b: (bfe(a, b, True, 32), bfe(a, b, True, 32) != 0),
    "s_mul_i32": lambda a, b: (a * b, None),
    "s_mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "s_mul_hi_i32": lambda a, b: (s32(a) * s32(b) >> 32, None),
    "s_lshl2_add_u32": lambda a, b: ((a << 2) + b, (a << 2) + b > M32),
    "s_pack_ll_b32_b16": lambda a, b: (a & 0xFFFF | b << 16, None),
    "s_pack_lh_b32_b16": lambda a, b: (a & 0xFFFF | b & 0xFFFF0000, None),
    "s_pack_hh_b32_b16": lambda a, b: (a >> 16 | b & 0xFFFF0000, None),
    "s_absdiff_i32": lambda a, b: (
        abs(s32((a - b) & M32)), (a - b) & M32 != 0),
}  # fmt: skip
UNARY32 = {
    "s_not_b32": lambda a: (~a, ~a & M32 != 0),
    "s_brev_b32": lambda a: (int(f"{a:032b}"[::-1], 2), None),
    "s_bcnt1_i32_b32": lambda a: (a.bit_count(), a != 0),
    "s_ff1_i32_b32": lambda a: ((a & -a).bit_length() - 1, None),
    "s_flbit_i32_b32": lambda a: (32 - a.bit_length() if a else -1, None),
    "s_flbit_i32": lambda a: (
        -1 if a in (0, M32) else 32 - (a if a < 2**31 else ~a & M32).bit_length(), None),
    "s_sext_i32_i8": lambda a: ((a & 255) - (256 if a & 128 else 0), None),
    "s_sext_i32_i16": lambda a: ((a & 65535) - (65536 if a & 32768 else 0), None),
    "s_abs_i32": lambda a: (abs(s32(a)), a != 0),
}  # fmt: skip
OPS64 = {
    "s_and_b64": lambda a, b: (a & b, a & b != 0),
    "s_xor_b64": lambda a, b: (a ^ b, a ^ b != 0),
    "s_andn2_b64": lambda a, b: (a & ~b, a & ~b != 0),
    "s_lshl_b64": lambda a, b: (a << (b & 63), (a << (b & 63)) & M64 != 0),
    "s_lshr_b64": lambda a, b: (a >> (b & 63), a >> (b & 63) != 0),
    "s_ashr_i64": lambda a, b: (s64(a) >> (b & 63), s64(a) >> (b & 63) != 0),
    "s_bfe_u64": lambda a, b: (bfe(a, b & M32, False, 64), bfe(a, b & M32, False, 64) != 0),
    "s_bfe_i64": lambda a, b: (bfe(a, b & M32, True, 64), bfe(a, b & M32, True, 64) != 0),
}
COMPARES = {f"s_cmp_{n}_{t}": (n, t) for n in ("eq", "lg", "gt", "ge", "lt", "le")
            for t in ("i32", "u32")}  # fmt: skip
SECOND32 = ("s_lsh", "s_ash", "s_bfe")


def kernel(name, wide, unary):
    type_ = "u64" if wide else "u32"
    second = "" if unary else ", %3"
    narrow = wide and name.startswith(SECOND32)
    b = "(u32)b[BID]" if narrow else "b[BID]"
    return f"""
GLOBAL void k_{name}(u64* o, const {type_}* a, const {type_}* b) {{
  {type_} r; u32 scc; {type_} p = a[BID]; auto q = {b};
  asm volatile("s_cmp_eq_u32 0, 0\\n {name} %0, %2{second}\\n s_cselect_b32 %1, 1, 0"
               : "=&s"(r), "=&s"(scc) : "s"(p), "s"(q) : "scc");
  if (TID == 0) {{ o[2 * BID] = r; o[2 * BID + 1] = scc; }}
}}"""


def compare_kernel(name):
    return f"""
GLOBAL void k_{name}(u64* o, const u32* a, const u32* b) {{
  u32 scc, p = a[BID], q = b[BID];
  asm volatile("{name} %1, %2\\n s_cselect_b32 %0, 1, 0" : "=s"(scc) : "s"(p), "s"(q) : "scc");
  if (TID == 0) o[2 * BID] = scc;
}}"""


@pytest.fixture(scope="module")
def code():
    source = "".join(kernel(n, False, False) for n in OPS32)
    source += "".join(kernel(n, False, True) for n in UNARY32)
    source += "".join(kernel(n, True, False) for n in OPS64)
    source += "".join(map(compare_kernel, COMPARES))
    return device(source)


def inputs(wide):
    rng = np.random.default_rng(0)
    special = [0, 1, M32, 0x80000000, 0x7FFFFFFF, 31, 5 | 7 << 16, 3 | 40 << 16]
    a = [x for x in special for _ in special] + rng.integers(0, M32, 64).tolist()
    b = special * len(special) + rng.integers(0, M32, 64).tolist()
    if wide:
        a = [x | y << 32 for x, y in zip(a, reversed(a), strict=True)]
        b = [x | y << 32 for x, y in zip(b, reversed(b), strict=True)]
    return a, b


def run(code, name, wide):
    a, b = inputs(wide)
    out = np.zeros((len(a), 2), u64)
    dtype = u64 if wide else u32
    arrays = [np.array(x, dtype) for x in (a, b)]
    code.launch(f"k_{name}", len(a), 64, [out, *arrays]).check()
    return a, b, out


@pytest.mark.parametrize("name", [*OPS32, *UNARY32, *OPS64])
def test_result_and_scc(code, name):
    wide = name in OPS64
    a, b, out = run(code, name, wide)
    for n in range(len(a)):
        if name in UNARY32:
            result, scc = UNARY32[name](a[n])
        else:
            second = b[n] & M32 if wide and name.startswith(SECOND32) else b[n]
            result, scc = (OPS64 if wide else OPS32)[name](a[n], second)
        want = result & (M64 if wide else M32), int(True if scc is None else scc)
        assert (int(out[n, 0]), int(out[n, 1])) == want, f"{name} {a[n]:#x}, {b[n]:#x}"


@pytest.mark.parametrize("name", COMPARES)
def test_compares(code, name):
    a, b, out = run(code, name, False)
    kind, type_ = COMPARES[name]
    python = {"eq": "__eq__", "lg": "__ne__", "gt": "__gt__", "ge": "__ge__", "lt": "__lt__",
              "le": "__le__"}[kind]  # fmt: skip
    sign = s32 if type_ == "i32" else int
    want = [int(getattr(sign(x), python)(sign(y))) for x, y in zip(a, b, strict=True)]
    assert out[:, 0].tolist() == want
