"""The AMD kernels of attention on the simulator, by their configs: what test_attention.py's short
sequences do not reach. Machine code is executed instruction by instruction, so sizes are small but
for the slow ones."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from project import ROOT
from test_attention import Case

pytestmark = pytest.mark.usefixtures("on_the_simulator")
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.fixture
def amd(monkeypatch):
    """The package on the simulator; its ``config`` is what the next calls run."""
    import simulated

    package = simulated.functional()
    module = sys.modules["simulated_rocm_kernels.functional.attention"]
    native, found = module._attention, SimpleNamespace(name="simulator", ops=package, config="")
    found.device, found.fp8 = torch.device("cpu"), simulated.NATIVE
    found.foreign = ({torch.float8_e4m3fn, torch.float8_e4m3fnuz} - {found.fp8}).pop()
    monkeypatch.setattr(module, "_attention", lambda *a: native(*a[:-1], found.config))
    return found


def decode(rows=16, parts=1):
    return f"decode rows={rows} parts={parts} xcds=1 heavy_first=0 chain=registers"


def prefill(rows, xcds=1, heavy_first=1, chain="registers"):
    order = f"xcds={xcds} heavy_first={heavy_first} chain={chain}"
    return f"prefill rows={rows} parts=1 {order}"


# ---- Decode ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size, dtype, kv", [
    (64, FP16, None), (64, BF16, "fp8"), (80, BF16, None), (96, FP16, "fp8"), (128, BF16, None),
    (128, FP16, "fp8"), (192, BF16, "fp8"), (256, FP16, None), (512, BF16, None),
    (512, FP16, "fp8"),
])  # fmt: skip
def test_decode_of_long_sequences(amd, size, dtype, kv):
    """Several steps of each wave, beginnings and ends inside of a step, in pages."""
    amd.config = decode()
    kv_dtype = amd.fp8 if kv else None
    case = Case(
        amd, [290, 131, 1], size=size, dtype=dtype, kv_dtype=kv_dtype, page=48, heads=(4, 1)
    )
    case.check(*case.run())


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("rows, queries, heads", [
    (16, 2, (16, 2)), (32, 8, (4, 1)), (16, 3, (14, 1)),
])  # fmt: skip
def test_parts_of_the_keys_meet(amd, rows, queries, heads, parts):
    """More parts than a short sequence has steps, and rows that need several workgroups."""
    amd.config = decode(rows, parts)
    case = Case(amd, [250, 40, 0, 3], rows=queries, heads=heads, size=64, causal=True)
    first = case.run()
    case.check(*first)
    assert all(map(torch.equal, first, case.run()))  # another order of arrival


@pytest.mark.parametrize("options", [
    {"window_size": (37, -1)}, {"window_size": (70, 3)}, {"softcap": 5.0, "causal": True},
    {"s_aux": torch.randn(8), "window_size": (20, 0)},
])  # fmt: skip
def test_windows_caps_and_sinks_over_parts(amd, options):
    amd.config = decode(16, 2)
    case = Case(amd, [200, 77], rows=3, size=128, page=16, **options)
    case.check(*case.run())


@pytest.mark.parametrize("config", [decode(), prefill(256)])
def test_maxima_that_grow_late(amd, config):
    """Sums move to a new maximum only where a score exceeds the old one by 2^8."""
    amd.config = config
    case = Case(amd, [300], size=64, heads=(2, 1), softmax_scale=1.0)
    case.k *= torch.linspace(0.01, 3, 300)[:, None, None].to(BF16)
    case.expected, case.lse = case.definition()
    case.check(*case.run())


@pytest.mark.parametrize("parts", [2, 7])
@pytest.mark.parametrize("window", [(-1, -1), (20, 0)])
def test_parts_leave_the_bits_of_one_step_alone(amd, parts, window):
    """Where all that a sequence's queries see lies in one step of 32 keys, the other parts add
    zeros. Where it does not, each division has sums of its own."""
    lengths = [32, 9, 1] if window == (-1, -1) else [64, 32, 57]
    case = Case(amd, lengths, rows=2, heads=(6, 2), size=64, window_size=window)
    case.options["window_size"] = window
    amd.config = decode(16, 1)
    expected = case.run()
    amd.config = decode(16, parts)
    assert all(map(torch.equal, case.run(), expected))
    case = Case(amd, [190, 170], rows=4, heads=(8, 2), size=64)
    several = case.run()
    amd.config = decode(16, 1)
    assert not all(map(torch.equal, several, case.run()))


# ---- Prefill -----------------------------------------------------------------------------------

ROWS = {64: 256, 80: 192, 96: 192, 128: 192, 192: 128, 256: 128}  # of a workgroup, by size


@pytest.mark.parametrize("size, dtype, kv", [
    (64, BF16, None), (64, FP16, "fp8"), (80, FP16, None), (96, BF16, "fp8"), (128, BF16, None),
    (128, FP16, None), (128, BF16, "fp8"), (192, BF16, None), (192, FP16, "fp8"), (256, BF16, None),
    (256, FP16, "fp8"),
])  # fmt: skip
@pytest.mark.parametrize("most", [True, False])
def test_prefill(amd, size, dtype, kv, most):
    """Several workgroups of a KV head, the last with waves that have few rows or none; fewer keys
    than rows, so that some rows see none."""
    if not most and ROWS[size] == 128:
        pytest.skip("one tile")
    amd.config = prefill(ROWS[size] if most else 128)
    case = Case(
        amd, [150, 40], rows=100, heads=(3, 1), size=size, size_v=128 if size == 192 else None,
        dtype=dtype, kv_dtype=amd.fp8 if kv else None, page=48, causal=True,
    )  # fmt: skip
    case.check(*case.run())


@pytest.mark.parametrize("options", [
    {"window_size": (37, -1)}, {"window_size": (70, 3)}, {"softcap": 5.0, "causal": True},
    {"s_aux": torch.randn(8), "window_size": (20, 0)}, {"softmax_scale": 1e-9},
    {"softmax_scale": -0.3, "causal": True},
])  # fmt: skip
def test_windows_caps_and_sinks_of_prompts(amd, options):
    amd.config = prefill(192)
    case = Case(amd, [120, 77], rows=77, size=128, **options)
    case.check(*case.run())


@pytest.mark.parametrize("xcds, heavy_first, chain", [
    (1, 0, "registers"), (8, 0, "registers"), (8, 1, "registers"), (3, 1, "registers"),
    (1, 1, "lds"),
])  # fmt: skip
def test_order_and_chain_leave_the_bits_alone(amd, xcds, heavy_first, chain):
    case = Case(amd, [130, 99], rows=99, heads=(12, 4), size=128, causal=True)
    amd.config = prefill(192)
    expected = case.run()
    amd.config = prefill(192, xcds, heavy_first, chain)
    assert all(map(torch.equal, case.run(), expected))


# ---- Both --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows, config", [
    ([3, 0, 2, 1], decode(16, 2)), ([30, 0, 130, 1], prefill(256)), ([30, 0, 130, 1], ""),
])  # fmt: skip
def test_ragged_sequences(amd, package, rows, config):
    keys = [40, 9, 130, 70]
    amd.config = config
    starts = [torch.tensor([0, *n]).cumsum(0).to(torch.int32) for n in (rows, keys)]
    q = torch.randn(sum(rows), 8, 64).bfloat16()
    k, v = torch.randn(2, sum(keys), 2, 64).bfloat16()
    out, lse = amd.ops.flash_attn_varlen_func(
        q, k, v, *starts, max(rows), max(keys), causal=True, return_lse=True
    )
    for b in (0, 2, 3):
        of_q, of_k = (slice(at[b], at[b + 1]) for at in starts)
        expected, sums = package.reference.attention(
            q[of_q].double(), k[of_k].double(), v[of_k].double(), causal=True
        )
        assert (out[of_q].double() - expected).norm() / expected.norm() < 2**-8
        torch.testing.assert_close(lse[:, of_q].double(), sums, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("config", [decode(), decode(16, 3), prefill(192)])
@pytest.mark.parametrize("kv", [None, "fp8"])
def test_neighbours_leave_the_bits_alone(amd, config, kv):
    """Their queries, keys, lengths, scales and padding, at the same sizes of the call."""
    amd.config = config
    case = Case(
        amd, [150, 99, 40], rows=5, heads=(4, 2), size=128, causal=True,
        kv_dtype=amd.fp8 if kv else None,
    )  # fmt: skip
    case.options["cache_leftpad"] = torch.zeros(3, dtype=torch.int32)
    one = [t[1] for t in case.run()]
    others = torch.tensor([0, 2])
    case.q[others] = 9.0
    case.k[others] = torch.randn(2, 150, 2, 128).to(case.k.dtype)
    case.lengths[others] = torch.tensor([3, 150], dtype=torch.int32)
    case.options["cache_leftpad"][others] = torch.tensor([1, 33], dtype=torch.int32)
    if kv:
        case.options["k_descale"][others] = 7.0
    assert all(map(torch.equal, [t[1] for t in case.run()], one))


@pytest.mark.parametrize("size, kv, config, words", [
    (64, "foreign", decode(), "another FP8 dialect"),
    (72, "fp8", decode(), "whole 16"),
    (33, None, decode(), "whole 8"),
    (64, None, decode(8), "no tile of so many rows"),
    (512, None, prefill(192), "no tile of so many rows"),
    (64, None, prefill(256, chain="lds"), "no tile of so many rows"),
    (64, None, decode(16, 0), "parts must be 1 to 128"),
    (64, None, decode().replace("xcds=1", "xcds=2"), "decode takes xcds=1"),
    (64, None, prefill(256, 9), "xcds must be 1 to 8"),
    (64, None, prefill(256).replace("parts=1", "parts=2"), "prefill takes parts=1"),
    (64, None, "decode rows=16", "must read like"),
    (64, None, decode(32).replace("decode", "plain"), "default fields"),
])  # fmt: skip
def test_configs_that_cannot_serve_say_why(amd, size, kv, config, words):
    amd.config = config
    kv_dtype = {"foreign": amd.foreign, "fp8": amd.fp8, None: None}[kv]
    case = Case(amd, [5], size=size, kv_dtype=kv_dtype)
    with pytest.raises(RuntimeError, match=words):
        case.run()


# ---- The choice --------------------------------------------------------------------------------


def test_the_choice(tmp_path):
    """Which design takes a call, by a program of the host; all that it offers can serve it."""
    program = tmp_path / "choices"
    source = ROOT / "tests/launches/attention_choices.cpp"
    subprocess.run(["g++", "-std=c++17", "-O1", source, "-o", program], check=True)
    done = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    *lines, misfits = done.splitlines()
    assert misfits == "misfits 0"
    taken = dict(line.split(": ") for line in lines)
    designs = {name: text.split()[0] for name, text in taken.items()}
    assert designs == {
        "step": "decode", "batch": "decode", "fp8 step": "decode", "eight queries": "decode",
        "heads of 512": "decode", "prompt": "prefill", "short prompts": "prefill",
        "odd heads": "plain", "foreign fp8": "plain", "native fp8": "decode", "float32": "plain",
        "no matrix instructions": "plain", "pages beyond the magic": "plain",
    }  # fmt: skip
    assert " rows=192 " in taken["prompt"] and " xcds=8 heavy_first=1 " in taken["prompt"]
    assert " rows=128 " in taken["short prompts"]  # 192 would fill one compute unit in eight twice
    assert " rows=32 " in taken["eight queries"] and " parts=1 " in taken["batch"]


# ---- Full size: what the choice takes -----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kv", [None, "fp8"])
@pytest.mark.parametrize("page", [None, 16, 1568])
def test_a_decode_step_of_llama(amd, kv, page):
    kv_dtype = amd.fp8 if kv else None
    case = Case(amd, [4096, 1000], size=128, heads=(32, 8), page=page, kv_dtype=kv_dtype)
    case.check(*case.run())


@pytest.mark.slow
@pytest.mark.parametrize("page, kv", [(None, None), (16, None), (256, "fp8")])
def test_prompts_of_a_thousand_tokens(amd, page, kv):
    case = Case(
        amd, [1000, 1000], rows=1000, size=128, heads=(8, 2), page=page,
        kv_dtype=amd.fp8 if kv else None, causal=True,
    )  # fmt: skip
    case.check(*case.run())
