"""Order between waves and workgroups: what hardware promises is clean, the rest is found."""

import hipcc
import numpy as np
import pytest
from hipcc import device

u32 = np.uint32
TARGETS = ["gfx942", "gfx950"]
SEEDS = range(4)

SOURCE = """
#define DEV __MEMORY_SCOPE_DEVICE
#define WRK __MEMORY_SCOPE_WRKGRP
#define RELAXED __ATOMIC_RELAXED
#define LOAD(p, scope) __scoped_atomic_load_n(p, RELAXED, scope)
#define STORE(p, x, scope) __scoped_atomic_store_n(p, x, RELAXED, scope)
#define ADD(p, x, scope) __scoped_atomic_fetch_add(p, x, RELAXED, scope)
#define POLL(p, scope) while (LOAD(p, scope) == 0) __builtin_amdgcn_s_sleep(1)
#define RELEASE __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent")
#define ACQUIRE __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent")

// ---- within a workgroup: its waves share an L1, and no wait stands before the barrier -----------
GLOBAL void through_global(u32* o, u32* g) { g[TID] = 3 * TID; sync(); o[TID] = g[255 - TID]; }
GLOBAL void read_then_write(u32* o, u32* g) {
  u32 x = g[255 - TID]; sync(); g[TID] = 1000 + TID; o[TID] = x; sync(); o[256 + TID] = g[TID ^ 64];
}
GLOBAL void bins(u32* o, u32* g) {
  ADD(&g[TID & 15], 1u, WRK); sync(); o[TID] = LOAD(&g[TID & 15], WRK);
}
GLOBAL void bins_device(u32* o, u32* g) {
  ADD(&g[TID & 15], 1u, DEV); sync(); o[TID] = g[TID & 15];
}
GLOBAL void generic_pointer(u32* o, u32* g) {
  SHARED u32 x[256]; u32* p = o == g ? (u32*)x : g; asm volatile("" : "+v"(p));
  p[TID] = 3 * TID; sync(); o[TID] = g[255 - TID];
}
GLOBAL void no_barrier(u32* o, u32* g) { g[TID] = 3 * TID; o[TID] = g[255 - TID]; }    // NO BARRIER

// ---- from workgroup 0 to workgroup 1, by a flag -------------------------------------------------
#define HAND(name, release, store, poll, acquire) \\
  GLOBAL void name(u32* o, u32* data, u32* flag) { \\
    if (BID == 0) { \\
      data[TID] = TID * 7; \\
      sync(); \\
      if (TID == 0) { release; store; } \\
    } else { \\
      if (TID == 0) { poll; acquire; } \\
      sync(); \\
      o[TID] = data[TID]; \\
    } \\
  }
#define NOTHING ((void)0)
HAND(handed, RELEASE, STORE(flag, 1u, DEV), POLL(flag, DEV), ACQUIRE)
HAND(no_acquire, RELEASE, STORE(flag, 1u, DEV), POLL(flag, DEV), NOTHING)              // NO ACQUIRE
HAND(no_release, NOTHING, STORE(flag, 1u, DEV), POLL(flag, DEV), ACQUIRE)              // NO RELEASE
HAND(narrow_store, RELEASE, STORE(flag, 1u, WRK), POLL(flag, DEV), ACQUIRE)          // NARROW STORE
HAND(narrow_poll, RELEASE, STORE(flag, 1u, DEV), POLL(flag, WRK), ACQUIRE)            // NARROW POLL
HAND(plain_store, RELEASE, asm volatile("global_store_dword %0, %1, off" :: "v"(flag), "v"(1)
     : "memory"), POLL(flag, DEV), ACQUIRE)                                           // PLAIN STORE
HAND(narrow_write_back, asm volatile("buffer_wbl2 sc0\\n s_waitcnt vmcnt(0)" ::: "memory"),
     STORE(flag, 1u, DEV), POLL(flag, DEV), ACQUIRE)                            // NARROW WRITE BACK
HAND(narrow_invalidate, RELEASE, STORE(flag, 1u, DEV), POLL(flag, DEV),
     asm volatile("buffer_inv sc0" ::: "memory"))                               // NARROW INVALIDATE
HAND(write_back_not_awaited, asm volatile("buffer_wbl2 sc1" ::: "memory"),
     asm volatile("global_store_dword %0, %1, off sc1" :: "v"(flag), "v"(1) : "memory"),
     POLL(flag, DEV), ACQUIRE)                                                        // NOT AWAITED
HAND(by_system, __builtin_amdgcn_fence(__ATOMIC_RELEASE, ""), *(volatile u32*)flag = 1,
     while (*(volatile u32*)flag == 0) __builtin_amdgcn_s_sleep(1),
     __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, ""))
HAND(by_add, RELEASE, ADD(flag, 1u, DEV), POLL(flag, DEV), ACQUIRE)
HAND(by_swap, RELEASE, ADD(flag, 1u, DEV), while (ADD(flag, 0u, DEV) == 0), ACQUIRE)
// The stores of waves that go on after the barrier are written back with those of the first one.
GLOBAL void others_linger(u32* o, u32* data, u32* flag) {
  if (BID == 0) {
    for (u32 n = 0; n < 20000; ++n) asm volatile("s_nop 0");  // until the other one polls
    data[TID] = TID * 7;
    sync();
    if (TID == 0) { RELEASE; ADD(flag, 1u, DEV); }
    if (TID >= 64) for (u32 n = 0; n < 5000; ++n) asm volatile("s_nop 0");
  } else {
    if (TID == 0) { POLL(flag, DEV); ACQUIRE; }
    sync();
    o[TID] = data[TID];
  }
}

// One wave's write-back says nothing about what another one stores.
GLOBAL void others_write_back(u32* o, u32* data, u32* flag) {
  if (BID == 0) {
    if (TID < 64) { RELEASE; }
    else if (TID < 128) {
      data[TID] = TID * 7;
      asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
      if (TID == 64) STORE(flag, 1u, DEV);
    }
  } else if (TID >= 64 && TID < 128) {
    POLL(flag, DEV); ACQUIRE;
    o[TID] = data[TID];                                                        // OTHER'S WRITE BACK
  }
}
GLOBAL void first_is_flag(u32* x, u32* o) {
  if (TID == 0) ADD(x, 1u, DEV);
  x[TID] = BID;                                                                   // FIRST IS A FLAG
  o[TID] = 0;
}
GLOBAL void scalar_race(u32* o, u32* data) {
  if (BID == 0) { data[TID] = TID * 7; return; }
  u32 r;
  asm volatile("s_load_dword s20, %1, 0x0\\n s_waitcnt lgkmcnt(0)\\n"            // SCALAR RACE
               "v_mov_b32 %0, s20"
               : "=v"(r) : "s"(data) : "s20");
  o[TID] = r;
}

// Scalar loads have a cache of their own: that a wave has issued a store says nothing to them, and
// that one of theirs is issued says nothing to a store.
#define SCALAR_LOAD(p, byte) \\
  asm volatile("s_load_dword s20, %0, " #byte :: "s"(p) : "s20", "memory")
#define SCALAR_VALUE(r) \\
  asm volatile("s_waitcnt lgkmcnt(0)\\n v_mov_b32 %0, s20" : "=v"(r) :: "memory")
#define BARRIER asm volatile("s_barrier" ::: "memory")
GLOBAL void scalar_after_store(u32* o, u32* g) {
  u32 r; g[TID] = 3 * TID; asm volatile("s_waitcnt vmcnt(0)" ::: "memory"); BARRIER;
  SCALAR_LOAD(g, 0x200); SCALAR_VALUE(r); o[TID] = r;
}
GLOBAL void scalar_too_early(u32* o, u32* g) {
  u32 r; g[TID] = 3 * TID; BARRIER;
  SCALAR_LOAD(g, 0x200);                                                      // SCALAR TOO EARLY
  SCALAR_VALUE(r); o[TID] = r;
}
GLOBAL void store_after_scalar(u32* o, u32* g) {
  u32 r; SCALAR_LOAD(g, 0x200); SCALAR_VALUE(r); BARRIER; g[TID] = 3 * TID; o[TID] = r;
}
GLOBAL void store_too_early(u32* o, u32* g) {
  u32 r; SCALAR_LOAD(g, 0x200); BARRIER;                                           // LOAD IN FLIGHT
  g[TID] = 3 * TID;                                                              // STORE TOO EARLY
  SCALAR_VALUE(r); o[TID] = r;
}
// A write-back is none of a scalar load's business: the flag goes out while it is under way.
#define SCALAR_HAND(name, wait) GLOBAL void name(u32* o, u32* data, u32* flag) { \\
    u32 r = 0; \\
    if (BID == 0 && TID < 64) { \\
      SCALAR_LOAD(data, 0x0); \\
      asm volatile(wait "buffer_wbl2 sc1\\n s_waitcnt vmcnt(0)\\n" \\
                   "global_store_dword %0, %1, off sc1" :: "v"(flag), "v"(1) : "memory"); \\
      SCALAR_VALUE(r); \\
      o[TID] = r; \\
    } else if (BID == 1 && TID == 0) { \\
      POLL(flag, DEV); \\
      ACQUIRE; \\
      *data = 7; \\
    } \\
  }
SCALAR_HAND(scalar_awaited, "s_waitcnt lgkmcnt(0)\\n")
SCALAR_HAND(scalar_outrun, "")                                                  // SCALAR OUTRUN

// ---- plain accesses and atomics on one word -----------------------------------------------------
GLOBAL void zero_beside_add(u32* o, u32* sum) {
  if (TID == 0) *sum = 0;                                                         // ZERO BESIDE ADD
  ADD(sum, 1u, DEV);                                                              // ADD BESIDE ZERO
  o[TID] = 0;
}
GLOBAL void zero_beside_add_lds(u32* o, u32* g) {
  SHARED u32 sum;
  if (TID == 0) sum = 0;                                                      // ZERO BESIDE ADD LDS
  ADD(&sum, 1u, WRK);                                                         // ADD BESIDE ZERO LDS
  sync(); o[TID] = sum;
}
GLOBAL void sum_too_early(u32* o, u32* sum) { ADD(sum, 1u, DEV); o[TID] = *sum; }  // SUM TOO EARLY
GLOBAL void sum_too_early_lds(u32* o, u32* g) {
  SHARED u32 sum;
  if (TID == 0) sum = 0;
  sync();
  ADD(&sum, 1u, WRK);
  asm volatile("s_waitcnt lgkmcnt(0)" ::: "memory");
  o[TID] = sum;                                                                 // SUM TOO EARLY LDS
}
GLOBAL void sum_in_order(u32* o, u32* sum) {
  SHARED u32 s;
  if (TID == 0) *sum = 0, s = 0;
  sync();
  ADD(sum, 1u, DEV); ADD(&s, 1u, WRK);
  sync();
  o[TID] = *sum + s;
}

// ---- LDS through generic pointers ---------------------------------------------------------------
GLOBAL void flat_flag(u32* o, const u32* in) {
  SHARED u32 data[64]; SHARED u32 flag;
  u32* f = &flag; asm volatile("" : "+v"(f));
  if (TID == 0) flag = 0;
  sync();
  if (TID < 64) {
    data[TID] = in[TID];
    __scoped_atomic_store_n(f, 1u, __ATOMIC_RELEASE, WRK);
  } else {
    while (__scoped_atomic_load_n(f, __ATOMIC_ACQUIRE, WRK) == 0) __builtin_amdgcn_s_sleep(1);
    o[TID] = data[TID & 63];
  }
}
GLOBAL void flat_write_race(u32* o, const u32* in) {
  SHARED u32 x[256]; u32* p = x; asm volatile("" : "+v"(p));
  p[TID] = in[TID];
  asm volatile("s_waitcnt vmcnt(0) lgkmcnt(0)" ::: "memory");
  o[TID] = x[255 - TID];                                                         // AFTER FLAT WRITE
}
GLOBAL void flat_read_race(u32* o, const u32* in) {
  SHARED u32 x[256]; u32* p = x; asm volatile("" : "+v"(p));
  x[TID] = in[TID];
  asm volatile("s_waitcnt vmcnt(0) lgkmcnt(0)" ::: "memory");
  o[TID] = p[255 - TID];                                                                // FLAT READ
}
GLOBAL void flat_in_order(u32* o, const u32* in) {
  SHARED u32 x[256]; u32* p = x; asm volatile("" : "+v"(p));
  p[TID] = in[TID]; sync();
  o[TID] = x[255 - TID]; sync();
  x[TID] = 5; sync();
  o[TID] += p[255 - TID];
}

// ---- correct ways to wait -----------------------------------------------------------------------
// The first look stands apart from the loop, with a scalar load between.
GLOBAL void look_then_loop(u32* o, const u32* in, const u32* turns) {
  SHARED u32 data[64]; SHARED u32 flag;
  if (TID == 0) flag = 0;
  sync();
  if (TID < 64) {
    data[TID] = in[TID];
    __scoped_atomic_store_n(&flag, 3u, __ATOMIC_RELEASE, WRK);
  } else {
    u32 seen = LOAD(&flag, WRK), n = 0;
    if (seen == 0) {
      u32 sleepy = turns[BID];
      do { n += sleepy; } while ((seen = LOAD(&flag, WRK)) == 0);
    }
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    o[TID] = data[TID & 63] + (seen == 3 ? 0 : 1000) + (n & 0x80000000);
  }
}
// As CUTLASS's semaphore waits: the barrier is in the loop.
GLOBAL void barrier_in_loop(u32* o, u32* data, u32* flag) {
  SHARED u32 state;
  if (BID == 0) {
    data[TID] = TID * 7; sync();
    if (TID == 0) __scoped_atomic_store_n(flag, 1u, __ATOMIC_RELEASE, DEV);
    return;
  }
  for (;;) {
    if (TID == 0) state = __scoped_atomic_load_n(flag, __ATOMIC_ACQUIRE, DEV);
    sync();
    bool done = state == 1;
    sync();
    if (done) break;
  }
  o[TID] = data[TID];
}
GLOBAL void one_look(u32* o, u32* data, u32* flag) {
  if (BID == 0) {
    data[TID] = TID * 7; sync();
    if (TID == 0) __scoped_atomic_store_n(flag, 1u, __ATOMIC_RELEASE, DEV);
  } else if (__scoped_atomic_load_n(flag, __ATOMIC_ACQUIRE, DEV)) {
    o[TID] = data[TID];
  } else {
    o[TID] = TID * 7;
  }
}
GLOBAL void flag_a_lane(u32* o, u32* data, u32* flag) {
  if (BID == 0) {
    data[TID] = TID * 7;
    RELEASE;
    STORE(&flag[TID], 1u, DEV);
  } else {
    POLL(&flag[255 - TID], DEV);
    ACQUIRE;
    o[TID] = data[255 - TID];
  }
}
GLOBAL void packet(u32* o, u32* data, u32* flag) {
  u64 at = (u64)(data + 4 * TID);
  if (BID == 0) {
    u4 p = {TID * 7u, TID * 9u, 5, 1};
    asm volatile("global_store_dwordx4 %0, %1, off sc0 sc1" :: "v"(at), "v"(p) : "memory");
  } else {
    u4 p;
    do {
      asm volatile("global_load_dwordx4 %0, %1, off sc0 sc1\\n s_waitcnt vmcnt(0)"
                   : "=v"(p) : "v"(at) : "memory");
    } while (p.w != 1);
    o[TID] = p.x + p.y + p.z;
  }
}
GLOBAL void lock(u32* o, u32* g) {
  SHARED u32 held, count;
  if (TID == 0) held = 0, count = 0;
  sync();
  if (TID % 64 == 0) {
    while (__scoped_atomic_exchange_n(&held, 1u, __ATOMIC_ACQUIRE, WRK))
      __builtin_amdgcn_s_sleep(1);
    count = count + 1;
    __scoped_atomic_store_n(&held, 0u, __ATOMIC_RELEASE, WRK);
  }
  sync();
  o[TID] = count;
}
"""


@pytest.fixture(scope="module", params=TARGETS)
def code(request):
    return device(SOURCE, target=request.param)


def line_of(text):
    lines = (hipcc.PRELUDE + SOURCE).splitlines()
    return next(n + 1 for n, line in enumerate(lines) if text in line)


def launch(code, kernel, seed, groups=1, extra=256):
    o, g, flag = np.zeros(512, u32), np.zeros(1024, u32), np.zeros(extra, u32)
    args = [o, g, flag][: len(code.kernels[kernel]["args"])]
    return code.launch(kernel, groups, 256, args, seed=seed), o


T = np.arange(256)
WITHIN = {
    "through_global": 3 * (255 - T),
    "bins": np.full(256, 16),
    "bins_device": np.full(256, 16),
    "generic_pointer": 3 * (255 - T),
    "scalar_after_store": np.full(256, 3 * 128),
    "store_after_scalar": np.zeros(256),
    "sum_in_order": np.full(256, 512),
    "lock": np.full(256, 4),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", WITHIN)
def test_waves_of_a_workgroup_need_a_barrier_and_no_wait(code, kernel, seed):
    result, o = launch(code, kernel, seed)
    result.check()
    np.testing.assert_array_equal(o[:256], WITHIN[kernel])


@pytest.mark.parametrize("seed", SEEDS)
def test_a_load_before_the_barrier_keeps_its_value(code, seed):
    o, g = np.zeros(512, u32), np.arange(256, dtype=u32)
    code.launch("read_then_write", 1, 256, [o, g], seed=seed).check()
    np.testing.assert_array_equal(o[:256], 255 - T)
    np.testing.assert_array_equal(o[256:], 1000 + (T ^ 64))


BETWEEN = (
    "handed",
    "by_system",
    "by_add",
    "by_swap",
    "others_linger",
    "barrier_in_loop",
    "one_look",
    "flag_a_lane",
)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", BETWEEN)
def test_what_a_flag_hands_over_is_clean(code, kernel, seed):
    result, o = launch(code, kernel, seed, groups=2)
    result.check()
    want = (255 - T) * 7 if kernel == "flag_a_lane" else T * 7
    np.testing.assert_array_equal(o[:256], want)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_scalar_load_that_is_awaited_may_be_overwritten(code, seed):
    result, o = launch(code, "scalar_awaited", seed, groups=2)
    result.check()
    assert not o[:64].any()


@pytest.mark.parametrize("seed", SEEDS)
def test_flag_and_data_in_one_packet(code, seed):
    result, o = launch(code, "packet", seed, groups=2)
    result.check()
    np.testing.assert_array_equal(o[:256], T * 16 + 5)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", ["flat_flag", "flat_in_order", "look_then_loop"])
def test_flags_and_data_in_lds(code, kernel, seed):
    o, data = np.zeros(256, u32), np.random.default_rng(seed).integers(1, 2**30, 256, dtype=u32)
    args = [o, data, np.ones(1, u32)][: len(code.kernels[kernel]["args"])]
    code.launch(kernel, 1, 256, args, seed=seed).check()
    want = data[::-1] + u32(5) if kernel == "flat_in_order" else data[T & 63]
    np.testing.assert_array_equal(o[64:], want[64:])


# kernel -> kind, workgroups, the lines where it may be reported
BAD = {
    "no_barrier": ("global-race", 1, ["// NO BARRIER"]),
    "no_acquire": ("global-race", 2, ["// NO ACQUIRE"]),
    "no_release": ("global-race", 2, ["// NO RELEASE"]),
    "narrow_store": ("global-race", 2, ["// NARROW STORE"]),
    "narrow_poll": ("global-race", 2, ["// NARROW POLL"]),
    "plain_store": ("global-race", 2, ["// PLAIN STORE"]),
    "narrow_write_back": ("global-race", 2, ["// NARROW WRITE BACK"]),
    "narrow_invalidate": ("global-race", 2, ["// NARROW INVALIDATE"]),
    "write_back_not_awaited": ("global-race", 2, ["// NOT AWAITED"]),
    "others_write_back": ("global-race", 2, ["// OTHER'S WRITE BACK"]),
    "first_is_flag": ("global-race", 2, ["// FIRST IS A FLAG"]),
    "scalar_too_early": ("global-race", 1, ["// SCALAR TOO EARLY"]),
    "store_too_early": ("global-race", 1, ["// STORE TOO EARLY", "// LOAD IN FLIGHT"]),
    "scalar_outrun": ("global-race", 2, ["// SCALAR OUTRUN"]),
    "scalar_race": ("global-race", 2, ["// SCALAR RACE", "data[TID] = TID * 7; return"]),
    "zero_beside_add": ("global-race", 1, ["// ZERO BESIDE ADD", "// ADD BESIDE ZERO"]),
    "zero_beside_add_lds": ("lds-race", 1, ["// ZERO BESIDE ADD LDS", "// ADD BESIDE ZERO LDS"]),
    "sum_too_early": ("global-race", 1, ["// SUM TOO EARLY"]),
    "sum_too_early_lds": ("lds-race", 1, ["// SUM TOO EARLY LDS", "ADD(&sum, 1u, WRK);"]),
    "flat_write_race": ("lds-race", 1, ["// AFTER FLAT WRITE", "p[TID] = in[TID];"]),
    "flat_read_race": ("lds-race", 1, ["// FLAT READ", "x[TID] = in[TID];"]),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kernel", BAD)
def test_what_nothing_orders_is_found(code, kernel, seed):
    kind, groups, lines = BAD[kernel]
    result, _ = launch(code, kernel, seed, groups)
    kinds = {f.kind for f in result.findings} - {"uninitialised"}  # LDS that is read too early
    assert kinds == {kind}, [str(f) for f in result.findings]
    lines_found = [f.source.rpartition(":")[2] for f in result.findings if f.kind == kind]
    at = {int(n) for n in lines_found if n.isdigit()}
    where = {line_of(text) for text in lines}
    # A macro's use may start on an earlier line; merged tails of branches have no line.
    assert any(w - 2 <= a <= w for a in at for w in where) or not at, at
    if kernel in ("narrow_store", "narrow_poll", "plain_store"):
        assert any("device scope (sc1)" in f.message for f in result.findings)
