"""Random programs: device code in the simulator against the same C on the host.

A program is a kernel of straight-line code, branches and loops over variables of many types. Its
text compiles for both machines; floating point is not contracted, so results agree to the bit.
"""

import ctypes
import random

import numpy as np
import pytest
from hipcc import compiler, device, host_library

THREADS = 256
TYPES = {"signed char": 8, "unsigned char": 8, "short": 16, "unsigned short": 16, "int": 32,
         "unsigned": 32, "long long": 64, "unsigned long long": 64, "float": 0, "double": 0,
         "_Float16": 0}  # fmt: skip
INTEGERS = [t for t, bits in TYPES.items() if bits]
FLOATS = [t for t, bits in TYPES.items() if not bits]

HELPERS = """
#define U unsigned
typedef unsigned long long UL;
FUNCTION static inline int to_int(double x) {
  return x != x ? 0 : x > 2e9 ? 2000000000 : x < -2e9 ? -2000000000 : (int)x;
}
// NaN payloads and the sign of NaN are not part of the comparison.
FUNCTION static inline U bits_f(float x) { return x != x ? 0x7fc00000u : __builtin_bit_cast(U, x); }
FUNCTION static inline UL bits_d(double x) {
  return x != x ? 0x7ff8000000000000ull : __builtin_bit_cast(UL, x);
}
FUNCTION static inline U bits_h(_Float16 x) {
  return x != x ? 0x7e00u : __builtin_bit_cast(unsigned short, x);
}
// Half precision without -0: the compiler makes a rounded product fma(a, b, +0), which loses it.
FUNCTION static inline _Float16 to_half(_Float16 x) { return x == 0 ? (_Float16)0 : x; }
// Hides what the compiler knows of a 64-bit dividend. clang 22 divides by float arithmetic of 24
// bits where both operands have more than 8 sign bits, which is wrong for unsigned constants from
// 2^32 - 2^23 up: 4294967290ull % d for the signed char d = 89 gives 78 at -O1, and 39 at -O0
// (llvm-project pull requests 196418 and 198391).
FUNCTION static inline UL hidden(UL x) {
#ifdef __AMDGCN__
  asm("" : "+v"(x));
#endif
  return x;
}
"""


class Program:
    """Makes the text of one random function body `void body(int id, U* in, UL* out)`."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.variables = [(f"v{n}", self.random.choice(list(TYPES))) for n in range(10)]
        lines = [f"{t} {v} = {self.start(t, n)};" for n, (v, t) in enumerate(self.variables)]
        lines += ["int a[8]; for (int k = 0; k < 8; ++k) a[k] = (int)in[k] + id;"]
        lines += [self.statement(2) for _ in range(self.random.randint(12, 30))]
        lines += [f"out[{n}] = {self.out(v, t)};" for n, (v, t) in enumerate(self.variables)]
        lines += ["UL sum = 0; for (int k = 0; k < 8; ++k) sum = sum * 31 + (U)a[k];",
                  f"out[{len(self.variables)}] = sum;"]  # fmt: skip
        self.body = "\n  ".join(lines)
        self.results = len(self.variables) + 1

    def pick(self, types):
        names = [v for v, t in self.variables if t in types]
        return self.random.choice(names) if names else None

    def cast(self, t, value):
        return f"to_half((_Float16)({value}))" if t == "_Float16" else f"({t})({value})"

    def start(self, t, n):
        if t in FLOATS:
            return self.cast(t, f"(int)(in[{n}] >> 8) % 1000 * 0.125")
        return f"({t})(in[{n}] * {self.random.choice(['1u', '3u', '0x9e3779b9u'])})"

    def out(self, v, t):
        if t in FLOATS:
            return {"float": "bits_f", "double": "bits_d", "_Float16": "bits_h"}[t] + f"({v})"
        return f"(UL)(long long){v}"

    def integer(self, depth):
        r = self.random
        if depth == 0 or r.random() < 0.2:
            choice = self.pick(INTEGERS)
            constant = str(r.choice([0, 1, 7, 31, 255, 65535, -1, 1 << 20, 0x7FFFFFFF]))
            return r.choice([choice or constant, constant, "id", f"a[(U){choice or 'id'} % 8]"])
        a, b = self.integer(depth - 1), self.integer(depth - 1)
        kind = r.randint(0, 13)
        if kind < 3:  # unsigned arithmetic has no undefined overflow
            cast = r.choice(["U", "UL"])
            return f"(({cast})({a}) {r.choice('+-*')} ({cast})({b}))"
        if kind < 5:
            return f"(({a}) {r.choice('&|^')} ({b}))"
        if kind == 5:
            return f"((U)({a}) {r.choice(['<<', '>>'])} ((U)({b}) & 31))"
        if kind == 6:
            return f"((long long)({a}) >> ((U)({b}) & 63))"
        if kind == 7:
            cast = r.choice(["U", "UL"])
            dividend = f"hidden((UL)({a}))" if cast == "UL" else f"(U)({a})"
            return f"({dividend} {r.choice('/%')} (({cast})({b}) | 1))"
        if kind == 8:
            return f"({a} {r.choice(['<', '<=', '==', '!=', '>'])} {b} ? {a} : {b})"
        if kind == 9:
            return f"__builtin_popcountll((UL)({a}))"
        if kind == 10:
            return f"((int)({a}) < 0 ? -1 : __builtin_clz((U)({a}) | 1))"
        if kind == 11:
            return f"({r.choice(INTEGERS)})({a})"
        if kind == 12:
            return f"to_int({self.real(depth - 1)})"
        return f"(int)((UL)(U)({a}) * (U)({b}) >> 32)"

    def real(self, depth):
        r = self.random
        if depth == 0 or r.random() < 0.2:
            constant = r.choice(["0.5f", "1.0f", "3.25f", "-2.0f", "0.1f", "65504.0f", "1e-7f"])
            return r.choice([self.pick(FLOATS) or constant, constant])
        a, b = self.real(depth - 1), self.real(depth - 1)
        t = r.choice(FLOATS)
        kind = r.randint(0, 9)
        # Every step is cast: the host may keep half precision wider within an expression.
        cast = self.cast
        if kind < 4:
            return cast(t, f"{cast(t, a)} {r.choice('+-*')} {cast(t, b)}")
        if kind == 4:
            square = cast(t, f"{cast(t, b)} * {cast(t, b)}")
            return cast(t, cast(t, a) + " / " + cast(t, f"{square} + ({t})1"))
        if kind == 5:
            return f"({a} {r.choice(['<', '>=', '=='])} {b} ? {a} : {b})"
        if kind == 6:
            return f"__builtin_{r.choice(['floorf', 'truncf', 'fabsf', 'rintf'])}((float)({a}))"
        if kind == 7:
            return f"__builtin_fma((double)({a}), (double)({b}), 1.5)"
        if kind == 8:
            return f"__builtin_fmaf((float)({a}), (float)({b}), -0.75f)"
        return cast(t, f"(int)(short)({self.integer(depth - 1)})")

    def statement(self, depth):
        r = self.random
        v, t = r.choice(self.variables)
        value = self.real(3) if t in FLOATS else self.integer(3)
        kind = r.randint(0, 9)
        if depth and kind == 0:
            inside = " ".join(self.statement(depth - 1) for _ in range(2))
            other = self.statement(depth - 1)
            return f"if ({self.integer(2)} % 3 == 0) {{ {inside} }} else {{ {other} }}"
        if depth and kind == 1:
            inside = self.statement(depth - 1)
            return f"for (int n = 0; n < (int)((U)({self.integer(1)}) % 5); ++n) {{ {inside} }}"
        if kind == 2:
            return f"a[(U)({self.integer(1)}) % 8] = (int)({self.integer(2)});"
        return f"{v} = {self.cast(t, value)};"


@pytest.fixture(scope="module")
def supports_half():
    try:
        host_library('extern "C" void f(_Float16* x) { *x += 1; }', "-march=native")
    except RuntimeError:
        pytest.skip(f"{compiler()} has no _Float16 for this host")


def check(seed: int, count: int):
    programs = [Program(seed * 1000 + n) for n in range(count)]
    device_source = "#pragma clang fp contract(off)\n#define FUNCTION DEVICE\n" + HELPERS
    host_source = "#pragma clang fp contract(off)\n#define FUNCTION\n" + HELPERS
    for n, p in enumerate(programs):
        body = f"body{n}(int id, const U* in, UL* out) {{\n  {p.body}\n}}\n"
        device_source += f"DEVICE static void {body}GLOBAL void k{n}(UL* out, const U* in) {{"
        device_source += f" body{n}(TID, in + TID * 16, out + TID * {p.results}); }}\n"
        host_source += f'extern "C" void {body}'
    code = device(device_source, "-ffp-contract=off")
    library = host_library(host_source, "-ffp-contract=off", "-march=native")
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 2**32, (THREADS, 16), dtype=np.uint32)
    for n, p in enumerate(programs):
        got = np.zeros((THREADS, p.results), np.uint64)
        want = np.zeros_like(got)
        code.launch(f"k{n}", 1, THREADS, [got, data], seed=n).check()
        body = getattr(library, f"body{n}")
        for t in range(THREADS):
            body(t, data[t].ctypes.data_as(ctypes.c_void_p),
                 want[t].ctypes.data_as(ctypes.c_void_p))  # fmt: skip
        bad = np.argwhere(got != want)
        if len(bad):
            thread, at = bad[0]
            name = [*p.variables, ("a", "int[8]")][at]
            raise AssertionError(
                f"program {seed * 1000 + n}, thread {thread}, result {at} {name}: "
                f"{got[thread, at]:#x}, the host has {want[thread, at]:#x}; "
                f"Program({seed * 1000 + n}).body has the text"
            )


@pytest.mark.parametrize("seed", range(4))
def test_random_programs(supports_half, seed):
    check(seed, 12)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 140))
def test_many_random_programs(supports_half, seed):
    check(seed, 25)
