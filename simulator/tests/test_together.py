"""Launches of several devices, judged together: a one-shot all-reduce, with planted bugs."""

import re

import numpy as np
import pytest
from hipcc import PRELUDE, device

import simulator

i32, f32 = np.int32, np.float32
SYSTEM, AGENT = "__HIP_MEMORY_SCOPE_SYSTEM", "__HIP_MEMORY_SCOPE_AGENT"

# Every rank writes its share to a buffer that all others read, tells them by a flag of its own in
# each one's memory, waits for theirs, and adds. clang 22 drops the wait for the write-back of a
# release, so it stands here by itself.
SOURCE = """
#define RANKS 4
struct Peers { float* share[RANKS]; int* start[RANKS]; int* end[RANKS]; };
DEVICE static void write_back() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, WRITE_BACK);
  asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
}
// All ranks have come here, and what they wrote before is seen.
DEVICE static void meet(int* const* flags, int rank, int ranks, int epoch) {
  RELEASE
  sync();
  if (TID < ranks) {
    __hip_atomic_store(flags[TID] + BID * RANKS + rank, epoch, __ATOMIC_RELAXED,  // FLAG
                       STORE_SCOPE);
    int* mine = flags[rank] + BID * RANKS + TID;
    while (__hip_atomic_load(mine, __ATOMIC_RELAXED, LOAD_SCOPE) < epoch)        // POLL
      __builtin_amdgcn_s_sleep(1);
  }
  sync();
  ACQUIRE
}
GLOBAL void all_reduce(Peers peers, const float* in, float* out, int rank, int ranks, int epoch,
                       int n) {
  if (in)
    for (int i = BID * 128 + TID; i < n; i += GROUPS * 128) peers.share[rank][i] = in[i];  // SHARE
  meet(peers.start, rank, ranks, epoch);
  for (int i = BID * 128 + TID; i < n; i += GROUPS * 128) {
    float sum = 0;
    for (int r = 0; r < ranks; ++r) sum += peers.share[r][i];                            // READ
    out[i] = sum;
  }
  EXIT
}
"""
# What stands in a share already, by an earlier launch.
SOURCE += """
GLOBAL void fill(float* share, const float* in, int n) {
  for (int i = BID * 128 + TID; i < n; i += GROUPS * 128) share[i] = in[i];
}
GLOBAL void look(const float* share, float* out) { out[TID] = share[TID]; }
"""
RIGHT = {
    "GROUPS": "2",
    "WRITE_BACK": '""',
    "RELEASE": "write_back();",
    "ACQUIRE": '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");',
    "STORE_SCOPE": SYSTEM,
    "LOAD_SCOPE": SYSTEM,
    "EXIT": "meet(peers.end, rank, ranks, epoch);",
}


def reduced(ranks: int, rounds: int, seed: int, epochs=None, filled=False, come=None, **changed):
    """Rounds of launches of `ranks` devices, each with new numbers; `filled`: a launch of its own
    writes the shares; `come`: so many of the ranks are launched."""
    flags = [f"-D{name}={text}" for name, text in {**RIGHT, **changed}.items()]
    code = device(SOURCE, *flags)
    rng = np.random.default_rng(seed)
    n = 300
    given = rng.standard_normal((rounds, ranks, n)).astype(f32)
    out = np.full((rounds, ranks, n), np.nan, f32)
    shares = [np.zeros(n, f32) for _ in range(ranks)]
    signals = [[np.zeros(2 * 4, i32) for _ in range(ranks)] for _ in range(2)]
    peers = np.zeros(12, np.uint64)
    for at, arrays in zip((0, 4, 8), (shares, *signals), strict=True):
        peers[at : at + ranks] = [a.ctypes.data for a in arrays]
    calls: list[list[simulator.Call]] = [[] for _ in range(come or ranks)]
    for r, stream in enumerate(calls):
        for k, epoch in enumerate(epochs or range(1, rounds + 1)):
            if filled:
                stream.append(simulator.Call(code, "fill", 2, 128, [shares[r], given[k, r], n]))
            args = [peers.tobytes(), None if filled else given[k, r], out[k, r], r, ranks, epoch, n]
            stream.append(simulator.Call(code, "all_reduce", 2, 128, args))
    buffers = [*shares, *signals[0], *signals[1]]
    results = simulator.launch_together(calls, seed=seed, buffers=buffers)
    right = np.allclose(out, given.sum(1, keepdims=True), atol=1e-5)
    return [f for stream in results for r in stream for f in r.findings], right


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_correct_all_reduce_has_no_finding(ranks):
    for seed in range(40):
        findings, right = reduced(ranks, 3, seed)
        assert right and not findings, "\n".join(map(str, findings))


def told(findings) -> set[str]:
    """Marks of the lines at which errors are told, and of those that they name."""
    lines = (PRELUDE + SOURCE).split("\n")
    return {
        mark
        for f in findings
        for mark in ("SHARE", "READ", "FLAG", "POLL")
        for number in re.findall(r"\.hip:(\d+)", f"{f.source} {f.message}")
        if f.level == "error" and f"// {mark}" in lines[int(number) - 1]
    }


PLANTED = {
    "no release": ({"RELEASE": ""}, {"SHARE", "READ"}, "release at system scope"),
    "release of agent scope": ({"WRITE_BACK": '"agent"'}, {"SHARE", "READ"},
                               "release at system scope"),
    "no acquire": ({"ACQUIRE": ""}, {"SHARE", "READ"}, "acquire at system scope"),
    "acquire of agent scope": (
        {"ACQUIRE": '__builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");'}, {"SHARE", "READ"},
        "acquire at system scope"),
    "flag stored with agent scope": ({"STORE_SCOPE": AGENT}, {"FLAG", "POLL"},
                                     "needs system scope"),
    "flag polled with agent scope": ({"LOAD_SCOPE": AGENT}, {"FLAG", "POLL"},
                                     "needs system scope"),
    "no barrier at the end": ({"EXIT": ""}, {"SHARE", "READ"}, "of device"),
    "an epoch used again": ({"epochs": [1, 1, 1]}, {"SHARE", "READ"}, "of device"),
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("bug", list(PLANTED))
def test_planted_bugs_are_told(bug, ranks):
    changed, lines, words = PLANTED[bug]
    for seed in range(3):
        findings, _ = reduced(ranks, 3, seed, **changed)
        assert {f.kind for f in findings} == {"global-race"}
        assert lines <= told(findings), "\n".join(map(str, findings))
        assert any(words in f.message for f in findings), "\n".join(map(str, findings))


def test_shares_of_an_earlier_launch():
    """The end of a launch releases. A reader without an acquire is suspicious, as in libraries that
    poll with relaxed loads; without any barrier it is an error."""
    for seed in range(3):
        findings, right = reduced(2, 2, seed, filled=True)
        assert right and not findings, "\n".join(map(str, findings))
        findings, right = reduced(2, 2, seed, filled=True, RELEASE="", ACQUIRE="")
        assert right and {f.level for f in findings} == {"suspicious"}
        # Where the next epoch's flag came before the poll, the flags order all: the sum is wrong.
        findings, right = reduced(2, 2, seed, filled=True, EXIT="")
        assert not right or "error" in {f.level for f in findings}


def test_a_rank_that_does_not_come_is_a_hang():
    with pytest.raises(simulator.SimulatorError) as error:
        reduced(3, 1, 0, come=2)
    text = str(error.value)
    assert "every wave of every launch waits for something that never comes" in text
    assert "device 0:" in text and "device 1:" in text, "each launch says why it ended"


def test_launches_of_a_stream_and_of_two_devices():
    code = device(SOURCE, *[f"-D{name}={text}" for name, text in RIGHT.items()])
    share, given, out = np.zeros(64, f32), np.arange(64, dtype=f32), np.zeros(64, f32)
    fill = simulator.Call(code, "fill", 1, 64, [share, given, 64])
    look = simulator.Call(code, "look", 1, 64, [share, out])
    for seed in range(3):
        ((first, second),) = simulator.launch_together([[fill, look]], seed=seed)
        first.check("suspicious"), second.check("suspicious")
        np.testing.assert_array_equal(out, given)
        found = [f for [r] in simulator.launch_together([[fill], [look]], seed=seed)
                 for f in r.findings]  # fmt: skip
        assert {f.kind for f in found} == {"global-race"}
        assert any("of launch 0" in f.message for f in found)
    with pytest.raises(ValueError, match="required at least one Call"):
        simulator.launch_together([[]])
    with pytest.raises(simulator.SimulatorError, match="there is no kernel nothing"):
        simulator.launch_together([[simulator.Call(code, "nothing", 1, 64, [])]])


def test_a_seed_gives_the_same_again():
    code = device(SOURCE, *[f"-D{name}={text}" for name, text in RIGHT.items()])

    def instructions(seed: int) -> list[int]:  # polls take as many turns as the others let them
        signals = [np.zeros(8, i32) for _ in range(4)]
        shares = [np.zeros(64, f32) for _ in range(2)]
        peers = np.zeros(12, np.uint64)
        for at, arrays in zip((0, 4, 8), (shares, signals[:2], signals[2:]), strict=True):
            peers[at : at + 2] = [a.ctypes.data for a in arrays]
        calls = [
            [simulator.Call(code, "all_reduce", 2, 128,
                            [peers.tobytes(), shares[r].copy(), shares[r].copy(), r, 2, 1, 64])]
            for r in range(2)
        ]  # fmt: skip
        results = simulator.launch_together(calls, seed=seed, buffers=[*shares, *signals])
        return [stream[0].counters["instructions"] for stream in results]

    first, again, other = instructions(4), instructions(4), instructions(5)
    assert first == again != other


def test_waiting_waves_cost_little():
    """Three ranks wait for all that the first one writes: their polls take turns, not work."""
    code = device("""
        GLOBAL void fill(int* words, int* flag, int n) {
          for (int i = 0; i < n; ++i) ((volatile int*)words)[TID] = i;
          __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
          asm volatile("s_waitcnt vmcnt(0)" ::: "memory");
          if (TID == 0) __hip_atomic_store(flag, 1, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);
        }
        GLOBAL void await(const int* words, int* flag, int* out, int spins) {
          long long begin = spins ? 0 : __builtin_readcyclecounter();
          for (int n = 0; !__hip_atomic_load(flag, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM);) {
            __builtin_amdgcn_s_sleep(1);
            if (spins ? ++n > spins : __builtin_readcyclecounter() - begin > 1000000000) return;
          }
          __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
          out[BID * 256 + TID] = words[TID % 64];
        }
    """)
    for spins in (0, 1 << 30):  # some loops look at the clock, some count
        words, flag, outs = np.zeros(64, i32), np.zeros(1, i32), np.zeros((3, 8 * 256), i32)
        fill = simulator.Call(code, "fill", 1, 64, [words, flag, 20_000])
        wait = [simulator.Call(code, "await", 8, 256, [words, flag, out, spins]) for out in outs]
        results = simulator.launch_together([[fill], *([call] for call in wait)], seed=1)
        for stream in results:
            stream[0].check("suspicious")
        np.testing.assert_array_equal(outs, 19_999)
        worked, *waited = (stream[0].counters["instructions"] for stream in results)
        assert sum(waited) < worked, (worked, waited)
