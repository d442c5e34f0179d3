"""Other people's kernels: what is a bug is told as an error, what hardware forgives is clean or
suspicious, and a caller can pick."""

import numpy as np
import pytest
from hipcc import device

import simulator

i32, f32 = np.int32, np.float32
SOURCE = """
#define AGENT __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT
DEVICE static inline int atomicAdd(int* p, int v) { return __hip_atomic_fetch_add(p, v, AGENT); }
DEVICE static inline int atomicMin(int* p, int v) { return __hip_atomic_fetch_min(p, v, AGENT); }
DEVICE static inline int atomicCAS(int* p, int e, int v) {
  __hip_atomic_compare_exchange_strong(p, &e, v, __ATOMIC_RELAXED, AGENT);
  return e;
}
// ---- planted ----
GLOBAL void volatile_reduction(float* out, const float* in) {
  SHARED float s[256];
  volatile float* v = s;
  s[TID] = in[TID];
  sync();
  if (TID < 128) s[TID] += s[TID + 128];
  if (TID < 64) out[TID] = v[TID] + v[TID + 64];                          // NO BARRIER BEFORE IT
}
GLOBAL void histogram(int* out, const int* in) { out[in[TID]] += 1; }     // LANES COLLIDE
GLOBAL void lds_histogram(int* out, const int* in) {
  SHARED int h[8];
  if (TID < 8) h[TID] = 0;
  sync();
  h[in[TID]] += 1;                                                        // LANES COLLIDE IN LDS
  sync();
  if (TID < 8) out[TID] = h[TID];
}
GLOBAL void different_values(int* out, const int* in) { out[TID / 2] = in[TID] + TID; }
GLOBAL void barrier_count(int* out, const int* in) {
  SHARED int s[256];
  s[TID] = in[TID];
  if (TID < 64) sync();                                                   // ONE WAVE HAS ONE MORE
  s[TID ^ 64] += 1;
  sync();
  out[TID] = s[TID];
}
GLOBAL void late_write_back(int* out, int* data, int* flag) {
  if (BID == 0) {
    data[TID] = TID + 1;
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    if (TID == 0)
      asm volatile("buffer_wbl2 sc1\\n global_store_dword %0, %1, off sc1"  // NOBODY AWAITS IT
                   :: "v"(flag), "v"(1) : "memory");
  } else {
    if (TID == 0)
      while (!__hip_atomic_load(flag, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_AGENT)) {}
    sync();
    out[TID] = data[TID];
  }
}
GLOBAL void written_argument(int* in) { in[TID] = TID; }
GLOBAL void added_to_argument(int* in) { atomicAdd(in + TID, 1); }
// ---- benign ----
GLOBAL void replicated(int* out, const int* in) {
  SHARED int s[64];
  s[TID & 63] = in[TID & 63];
  sync();
  out[TID] = s[63 - (TID & 63)];
}
GLOBAL void found(int* out, const int* in) { if (in[BID * 128 + TID] == 3) *out = 1; }
GLOBAL void levels(int* out, const int* in) { if (out[in[TID]] < 0) out[in[TID]] = 7; }
GLOBAL void cas_loop(int* out, const int* in) {
  int old = *out, seen;
  do { seen = old; old = atomicCAS(out, seen, seen + in[TID]); } while (old != seen);
}
GLOBAL void minimum(int* out, const int* in) {
  int v = in[BID * 128 + TID];
  if (v < *out) atomicMin(out, v);
}
GLOBAL void insert(int* table, const int* in) {
  int key = in[BID * 128 + TID] + 1, at = key & 15;
  for (int n = 0; n < 16; ++n, at = (at + 1) & 15) {
    if (table[at] == key) return;
    int was = table[at] ? table[at] : atomicCAS(table + at, 0, key);
    if (was == 0 || was == key) return;
  }
}
GLOBAL void look(int* out, const int* in) {
  atomicAdd(out, in[TID] >= 0);
  if (atomicAdd(out, 0) > 1 << 20) atomicAdd(out + 1, 1);
}
struct Padded { char a; double b; int c; };
GLOBAL void padding(Padded* to, const Padded* from, Padded* between) {
  between[TID].a = from[TID].a; between[TID].b = from[TID].b; between[TID].c = from[TID].c;
  __builtin_memcpy(to + TID, between + TID, sizeof(Padded));
}
"""
PLANTED = {
    "volatile_reduction": "lds-race",
    "histogram": "lane-collision",
    "lds_histogram": "lane-collision",
    "barrier_count": "barrier-count",
    "late_write_back": "global-race",
}


@pytest.fixture(scope="module", params=["gfx942", "gfx950"])
def code(request):
    return device(SOURCE, target=request.param)


def arguments(kernel):
    x = np.random.default_rng(3).integers(0, 8, 256).astype(i32)
    out = np.full(256, 100, i32)
    if kernel == "volatile_reduction":
        return 1, 256, [np.zeros(256, f32), x.astype(f32)]
    if kernel in ("histogram", "lds_histogram"):
        return 1, 64, [np.zeros(8, i32), x]
    if kernel == "barrier_count":
        return 1, 256, [out, x]
    if kernel == "late_write_back":
        return 2, 128, [out, np.zeros(128, i32), np.zeros(1, i32)]
    if kernel in ("found", "minimum", "insert"):
        return 2, 128, [np.zeros(16, i32) if kernel == "insert" else out[:1], x]
    if kernel == "levels":
        return 1, 256, [np.full(8, -1, i32), x]
    if kernel == "padding":
        room = lambda: np.zeros(64 * 24, np.uint8)  # noqa: E731
        return 1, 64, [room(), room(), simulator.Out(room())]
    return 1, 128, [out, x]


@pytest.mark.parametrize("kernel", PLANTED)
def test_a_planted_bug_is_an_error(code, kernel):
    for seed in range(3):
        grid, block, args = arguments(kernel)
        found = code.launch(kernel, grid, block, args, seed=seed).select("error")
        assert PLANTED[kernel] in {f.kind for f in found}, seed
    if kernel == "late_write_back":
        for words in ("buffer_wbl2 sc1", "s_waitcnt vmcnt(0)", "clang 22.1 leaves it out"):
            assert words in found[0].message


def test_lanes_that_store_different_values(code):
    result = code.launch("different_values", *arguments("different_values"))
    assert {(f.kind, f.level) for f in result.findings} == {("lane-collision", "suspicious")}


MEETINGS = """
#define OF(T, name) \\
  GLOBAL void lds_##name(int* out, const int* at) { \\
    SHARED T s[256]; s[at[TID]] = TID; sync(); out[TID] = *(char*)(s + at[TID]); } \\
  GLOBAL void memory_##name(T* out, const int* at) { out[at[TID]] = TID; }
OF(unsigned char, 1) OF(short, 2) OF(int, 4) OF(long long, 8)
OF(u4, 16)
"""


@pytest.mark.parametrize("space", ["lds", "memory"])
def test_two_lanes_that_meet_are_told_and_no_others(space):
    code, draw = device(MEETINGS), np.random.default_rng(4)
    for width in (1, 2, 4, 8, 16):
        for meet in (False, True) * 12:
            at = draw.permutation(64 if draw.random() < 0.5 else 256)[:64].astype(i32)
            if meet:
                one, other = draw.permutation(64)[:2]
                at[one] = at[other]
            out = np.zeros(64 if space == "lds" else 256 * width // 4, i32)
            result = code.launch(f"{space}_{width}", 1, 64, [out, at])
            kinds = [f.kind for f in result.findings]
            assert kinds == ["lane-collision"] * meet, (width, at.tolist())


CLEAN = ["replicated", "found", "levels", "cas_loop", "minimum", "insert", "look"]


@pytest.mark.parametrize("kernel", [*CLEAN, "padding"])
def test_benign_programs_are_no_errors(code, kernel):
    for seed in range(4):
        grid, block, args = arguments(kernel)
        result = code.launch(kernel, grid, block, args, seed=seed).check()
        if kernel in CLEAN:
            result.check("suspicious")


def test_findings_are_picked_by_level_kind_and_line(code):
    result = code.launch("volatile_reduction", *arguments("volatile_reduction"))
    finding = result.findings[0]
    file, _, line = finding.source.rpartition(":")
    short = file.rsplit("/", 1)[-1]
    with pytest.raises(simulator.SimulatorError, match="lds-race"):
        result.check()
    for all_of_it in ("lds-race", f"lds-race@{short}", "*-race", f"*@{file[:-9]}*"):
        result.check("suspicious", [all_of_it])
    assert not finding.matches(f"lds-race@{short}:{int(line) + 1}")
    assert not finding.matches("global-race") and finding.matches(f"lds-race@{short}:{line}")
    with pytest.raises(ValueError, match="required one of error, suspicious"):
        result.check("warning")
    suspicious = code.launch("different_values", *arguments("different_values"))
    suspicious.check()
    with pytest.raises(simulator.SimulatorError, match="suspicious: lane-collision"):
        suspicious.check("suspicious")


@pytest.mark.parametrize("kernel", ["written_argument", "added_to_argument"])
def test_a_read_only_array_is_not_written(code, kernel):
    array = np.frombuffer(bytes(1024), i32)
    result = code.launch(kernel, 1, 64, [array])
    assert [f.kind for f in result.findings] == ["read-only"] and not array.any()


# clang's own variables have no names in the debug information, and all of them live in scratch.
UNOPTIMISED = """
struct Sum { long long a, b; };
GLOBAL void own(int* out, float* more) { Sum s{1, 2}; out[TID] = s.a + s.b; more[TID] = 1; }
GLOBAL void assembly(int* out) {
  unsigned x; asm volatile("s_mov_b32 %0, 5" : "=s"(x)); if (TID < 64) out[TID] = x;
}
GLOBAL void past(int* out, int at) { int x[4] = {}; x[(TID & 3) + at] = 5; out[TID] = x[TID & 3]; }
"""


def test_unoptimised_frames():
    code = device(UNOPTIMISED, "-O0")
    out, more = np.zeros(64, i32), np.zeros(64, f32)
    code.launch("own", 1, 64, [out, more]).check("suspicious")
    code.launch("assembly", 1, 64, [out]).check("suspicious")
    code.launch("past", 1, 64, [out, 0]).check("suspicious")
    found = code.launch("past", 1, 64, [out, 1]).findings
    assert {f.kind for f in found} == {"out-of-bounds"} and "has 16 bytes" in found[0].message


SLIPS = """
struct Pair { float* p; int n; };
GLOBAL void scaled(float* out, float s, int n, double d) { if (TID < n) out[TID] = s + d; }
GLOBAL void structure(Pair a) { if (TID < a.n) a.p[TID] = 1; }
"""


def test_slips_in_arguments():
    code, out = device(SLIPS), np.zeros(64, f32)
    code.launch("scaled", 1, 64, [out, 2, 64, 1]).check()
    assert (out == 3).all(), "an int for a float becomes one"
    launch = lambda *args: code.launch("scaled", 1, 64, args)  # noqa: E731
    with pytest.raises(TypeError, match=r"argument 2 \(n\): required integer of 4 bytes"):
        launch(out, 2.0, 64.0, 1.0)
    with pytest.raises(TypeError, match=r"argument 1 \(s\).*got an array"):
        launch(out, out, 64, 1.0)
    with pytest.raises(TypeError, match=r"argument 3 \(d\).*got an array"):
        launch(out, 1.0, 64, out)
    with pytest.raises(TypeError, match=r"argument 1 \(s\): required float"):
        launch(out, np.int32(1), 64, 1.0)
    with pytest.raises(ValueError, match="does not fit the kernel's 4 bytes"):
        launch(out, 1.0, 1 << 32, 1.0)
    with pytest.raises(TypeError, match=r"argument 0 \(out\): required pointer"):
        launch(1.5, 1.0, 64, 1.0)


BUFFERS = """
typedef int i4 __attribute__((ext_vector_type(4)));
GLOBAL void swizzled(int* out, int* in) {
  u64 address = (u64)in;
  i4 resource = {(int)address, (int)(address >> 32 | 1u << 31), 256, 0x00020000};
  int x, at = TID * 4;
  asm volatile("buffer_load_dword %0, %1, %2, 0 offen\\n s_waitcnt vmcnt(0)"
               : "=v"(x) : "v"(at), "s"(resource) : "memory");
  out[TID] = x;
}
"""


def test_a_descriptor_with_bit_63_and_no_index_is_linear():
    out, data = np.zeros(64, i32), np.arange(64, dtype=i32)
    device(BUFFERS).launch("swizzled", 1, 64, [out, data]).check()
    np.testing.assert_array_equal(out, data)


def test_generic_code_objects_run():
    code = device("GLOBAL void one(int* out) { out[TID] = TID; }", target="gfx9-4-generic")
    out = np.zeros(64, i32)
    code.launch("one", 1, 64, [out]).check()
    assert code.target == "gfx942"
    np.testing.assert_array_equal(out, np.arange(64))
