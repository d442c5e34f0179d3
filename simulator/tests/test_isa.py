"""What is not executed stops with its name: a table of every instruction that LLVM decodes."""

import re

import isa
import numpy as np
import pytest

import simulator

u32 = np.uint32
TARGETS = ("gfx942", "gfx950")
MEMORY = re.compile("(ds|global|flat|scratch|buffer)_(?!inv|wb|gws|nop)")
ELSEWHERE = re.compile("ds_(b?permute|swizzle)|(global|scratch)_load_lds")  # tested with values

# v2 (v3) is the address of the lane's 32 bytes, v4 to v7 the data, v8 to v11 the result.
BEFORE = """
s_load_dwordx4 s[12:15], s[0:1], 0x0
s_mov_b32 s8, 0
s_mov_b32 s9, 0
s_mov_b32 s10, 0x2000
s_mov_b32 s11, 0x27000
s_mov_b32 m0, 0
v_lshlrev_b32 v20, 5, v0
v_lshlrev_b32 v21, 4, v0
v_mov_b32 v22, 0
s_waitcnt lgkmcnt(0)
s_mov_b32 s8, s12
s_mov_b32 s9, s13
global_load_dwordx4 v[4:7], v21, s[14:15]
global_load_dwordx4 v[24:27], v20, s[12:13]
global_load_dwordx4 v[28:31], v20, s[12:13] offset:16
s_waitcnt vmcnt(0)
ds_write_b128 v20, v[24:27]
ds_write_b128 v20, v[28:31] offset:16
ds_write_b128 v20, v[24:27] offset:2048
ds_write_b128 v20, v[28:31] offset:2064
scratch_store_dwordx4 v22, v[24:27], off
scratch_store_dwordx4 v22, v[28:31], off offset:16
s_waitcnt vmcnt(0) lgkmcnt(0)
v_mov_b32 v8, 0x55
v_mov_b32 v9, 0x55
v_mov_b32 v10, 0x55
v_mov_b32 v11, 0x55
v_mov_b32 v2, {low}
v_mov_b32 v3, {high}
{address}
"""
AFTER = """
s_waitcnt vmcnt(0) lgkmcnt(0)
global_store_dwordx4 v21, v[8:11], s[14:15]
ds_read_b128 v[24:27], v20
ds_read_b128 v[28:31], v20 offset:2048
scratch_load_dwordx4 v[32:35], v22, off
s_waitcnt vmcnt(0) lgkmcnt(0)
global_store_dwordx4 v21, v[24:27], s[14:15] offset:1024
global_store_dwordx4 v21, v[28:31], s[14:15] offset:2048
global_store_dwordx4 v21, v[32:35], s[14:15] offset:3072
s_endpgm
"""


def kernel(name: str, encoding: str) -> str:
    if not MEMORY.match(name):
        return f"{encoding}\ns_endpgm\n"
    wide = name.startswith(("global", "flat"))
    low = "v20" if name.startswith(("ds", "buffer")) else "0"
    address = "v_lshl_add_u64 v[2:3], s[12:13], 0, v[2:3]" if wide else ""
    if name.startswith(("buffer_atomic", "buffer_store")):  # its data has the result's registers
        address += "".join(f"v_mov_b32 v{8 + n}, v{4 + n}\n" for n in range(4))
    before = BEFORE.format(low="v20" if wide else low, high="0", address=address)
    return f"{before}{encoding}\n{AFTER}"


@pytest.fixture(scope="module", params=TARGETS)
def table(request):
    bodies = {}
    for name, forms in isa.instructions(request.param).items():
        for n, encoding in enumerate(forms):
            bodies[f"{name}__{n}"] = kernel(name, encoding)
    return isa.assembled(request.param, bodies)


def test_the_table_is_whole(table):
    names = {k.split("__")[0] for k in table.kernels}
    assert len(names) > 1100
    for some in ("ds_max_rtn_f32", "buffer_load_format_xyzw", "global_atomic_add_f32", "v_fma_f64",
                 "v_mfma_f32_32x32x16_fp8_fp8", "s_movrels_b32", "v_pk_fmac_f16", "flat_load_dword",
                 "scratch_store_dwordx4", "ds_append", "s_bitreplicate_b64_b32"):  # fmt: skip
        assert some in names, some


def test_what_is_not_executed_stops_with_its_name(table):
    assert {"buffer_load_format_x", "v_screen_partition_4se_b32"} <= set(table.unknown)
    stopped = set()
    for name in table.kernels:
        plain = name.split("__")[0]
        if plain not in table.unknown:
            continue
        data = np.zeros(4096, u32)
        with pytest.raises(simulator.SimulatorError, match=f"stopped at '{plain}.*does not know"):
            table.launch(name, 1, 64, [data, data.copy()])
        stopped.add(plain)
    assert stopped == set(table.unknown)


def test_every_memory_instruction_has_an_effect(table):
    """Nothing that counts as known is a silent no-op: memory, LDS, scratch or a register moves."""
    checked = 0
    for name in table.kernels:
        plain = name.split("__")[0]
        if not MEMORY.match(plain) or plain in table.unknown or ELSEWHERE.match(plain):
            continue
        moved = False
        for same in (False, True):  # a compare-and-swap acts when the values are equal
            rng = np.random.default_rng(7)
            memory = np.full((64, 8), 0x40404040, u32)
            data = rng.integers(0x3F800000, 0x41000000, 2048, dtype=u32)
            if same:
                data.reshape(-1, 4)[:, :2] = 0x40404040
            if same and plain.startswith(("global", "flat", "buffer")):
                data.reshape(-1, 4)[:, 0] = 7
                if plain.endswith("_x2"):
                    data.reshape(-1, 4)[:, 1:] = 0x40404040
            result = table.launch(name, 1, 64, [memory, data], threads=1, caches=False)
            bad = [str(f) for f in result.findings]
            assert not bad, f"{plain}: {bad}"
            results = (data[:256] != 0x55) & ("buffer_" not in plain or "_load" in plain)
            rest = np.concatenate([memory.ravel(), data[256:1024]]) != 0x40404040
            moved |= bool(np.any(results) or rest.any())
        assert moved, f"{plain} did nothing"
        checked += 1
    assert checked > 250
