"""Launches that wait: for workgroups that start later, for some that never can, for nothing."""

import numpy as np
import pytest
from hipcc import device

import simulator

u32 = np.uint32
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}

GRID = """
GLOBAL void __attribute__((amdgpu_flat_work_group_size(64, 64))) barrier(u32* count, u32* o) {
  u32 n = *(const __attribute__((address_space(4))) u32*)__builtin_amdgcn_implicitarg_ptr();
  if (TID == 0) {
    __scoped_atomic_fetch_add(count, 1u, __ATOMIC_ACQ_REL, __MEMORY_SCOPE_DEVICE);
    while (__scoped_atomic_load_n(count, __ATOMIC_ACQUIRE, __MEMORY_SCOPE_DEVICE) < n)
      __builtin_amdgcn_s_sleep(1);
  }
  sync();
  o[BID * 64 + TID] = BID + TID;
}
GLOBAL void never(u32* flag, u32* o) {
  while (__scoped_atomic_load_n(flag, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE) == 0)
    __builtin_amdgcn_s_sleep(1);
  o[TID] = 1;
}
// Reads the same words over and over, as a stream that must not be cached, but it ends.
GLOBAL void volatile_stream(u32* in, u32* o, int turns) {
  u32 sum = 0;
  for (int r = 0; r < turns; ++r)
    for (int n = 0; n < 8; ++n) sum += ((volatile u32*)in)[n * 64 + TID] + r;
  o[TID] = sum;
}
GLOBAL void patient(u32* flag, u32* o) {
  u64 start = __builtin_readcyclecounter();
  while (__scoped_atomic_load_n(flag, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE) == 0)
    if (__builtin_readcyclecounter() - start > 4000000) break;
  o[TID] = 2;
}
"""


@pytest.fixture(scope="module", params=list(COMPUTE_UNITS))
def code(request):
    return device(GRID, target=request.param)


def barrier(code, groups, **options):
    """One workgroup fills a compute unit, by its LDS. The race checker would be slow here."""
    lds = {"gfx942": 65536, "gfx950": 163840}[code.target]
    count, out = np.zeros(1, u32), np.zeros((groups, 64), u32)
    result = code.launch("barrier", groups, 64, [count, out], lds, caches=False, race=False,
                         **options)  # fmt: skip
    result.check()
    assert count[0] == groups and (out == np.arange(groups)[:, None] + np.arange(64)).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_a_grid_barrier_that_fits_ends(code, threads):
    barrier(code, COMPUTE_UNITS[code.target], threads=threads)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_grid_barrier_with_one_workgroup_too_many_hangs(code, threads):
    units = COMPUTE_UNITS[code.target]
    with pytest.raises(simulator.SimulatorError) as error:
        barrier(code, units + 1, threads=threads)
    message = str(error.value)
    assert "the launch hangs on hardware" in message and "bytes of LDS" in message
    assert f"holds {units} of its {units + 1} workgroups (1 a compute unit" in message


def test_a_flag_that_nobody_sets(code):
    with pytest.raises(simulator.SimulatorError, match="waits for something that never comes"):
        code.launch("never", 3, 128, [np.zeros(1, u32), np.zeros(128, u32)])


def test_loops_that_end_by_themselves_are_no_hang(code):
    data, out = np.ones(512, u32), np.zeros(64, u32)
    code.launch("volatile_stream", 1, 64, [data, out, 4000], checks=False).check()
    assert (out == (8 * 4000 + 8 * 3999 * 4000 // 2) % 2**32).all()
    code.launch("patient", 1, 64, [np.zeros(1, u32), out]).check()
    assert (out == 2).all()


BROADCAST = """
GLOBAL void lock_of_a_workgroup(u32* lock, u32* o) {
  SHARED u32 got;
  do {
    if (TID == 0) got = __hip_atomic_exchange(lock, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    sync();
    u32 mine = got;
    sync();
    if (!mine) break;
  } while (true);
  o[TID] += 1;
}
"""


def test_waves_that_pass_barriers_with_one_that_polls_wait_too():
    """As Triton's locks: a wave polls, and tells the others by LDS."""
    code, out = device(BROADCAST), np.zeros(256, u32)
    code.launch("lock_of_a_workgroup", 1, 256, [np.zeros(1, u32), out]).check()
    assert (out == 1).all()
    with pytest.raises(simulator.SimulatorError, match="waits for something that never comes"):
        code.launch("lock_of_a_workgroup", 3, 256, [np.zeros(1, u32), out], race=False)
