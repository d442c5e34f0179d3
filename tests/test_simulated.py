"""The simulated backend must be able to fail: kernels that touch what their call was not given.

A wrong kernel is a right one whose call is shown to the simulator as smaller than it is.
"""

import os

import pytest
import torch


@pytest.fixture(scope="module")
def simulated(on_the_simulator):
    import simulated

    simulated.functional()
    return simulated


def norm(simulated, x, out, weight, residual=None):
    simulated.ops.rmsnorm_fp8.unchecked(
        out, None, x, residual, weight, None, 1e-6, 0, 0.0, False, 0.0, None
    )


@pytest.mark.parametrize("hidden", [520, 523])
@pytest.mark.parametrize(
    "wrong",
    ["nothing", "a row too many", "no weight", "half of the output", "an element beyond each row",
     "an element beyond the last row"],
)  # fmt: skip
def test_a_wrong_launch_is_found(simulated, hidden, wrong):
    x, weight = torch.randn(5, hidden).half(), torch.randn(hidden).half()
    out = torch.empty(5, hidden + 8, dtype=torch.float16)[:, :hidden]
    written, read = [out], [x, weight]
    if wrong == "a row too many":
        written, read = [out[:4]], [x[:4], weight]
    elif wrong == "no weight":
        read = [x]
    elif wrong == "half of the output":
        written = [out[:2]]
    elif wrong == "an element beyond each row":
        written = [out[:, :-1]]
    elif wrong == "an element beyond the last row":
        written = [out[:4], out[4:, :-1]]
    if wrong == "nothing":
        with simulated.checked(written, read):
            norm(simulated, x, out, weight)
        return
    with pytest.raises(AssertionError, match="out-of-bounds"), simulated.checked(written, read):
        norm(simulated, x, out, weight)


def test_an_output_that_is_read_first_is_found(simulated):
    x, weight, residual = torch.randn(2, 520), torch.randn(520), torch.randn(2, 520)
    out = torch.empty_like(x)
    call = simulated.checked([out, residual], [x, weight])
    with pytest.raises(AssertionError, match="uninitialised"), call:
        norm(simulated, x, out, weight, residual)


@pytest.mark.parametrize("short", [0, 1])
def test_scratch_memory_ends_where_the_binding_asked(simulated, short, monkeypatch):
    register, sizes = simulated.simulator.hip.Runtime.register, []

    def shorter(hip, buffer, **arguments):
        if buffer.dtype == torch.uint8:  # scratch alone
            sizes.append(len(buffer))
            buffer = buffer[: len(buffer) - short]
        return register(hip, buffer, **arguments)

    monkeypatch.setattr(simulated.simulator.hip.Runtime, "register", shorter)
    a, w = (torch.randn(rows, 1024).to(simulated.NATIVE) for rows in (1, 48))
    out = torch.empty(1, 48)
    configs = simulated.ops.gemm_configs(out, a, w, None, None, False).splitlines()
    config = next(text for text in configs if "split_k=2" in text)
    call = (out, a, w, None, None, None, config)
    if short:
        with pytest.raises(AssertionError, match="out-of-bounds"):
            simulated.ops.gemm(*call)
    else:
        simulated.ops.gemm(*call)
    assert sizes and all(sizes)


def test_tensors_of_a_call(simulated):
    out, scales, x, residual, weight = (torch.empty(i + 1) for i in range(5))
    op = simulated.ops.rmsnorm_fp8
    arguments = (out, scales, x, residual, weight, None, 1e-6, 0, 0.0, False, 0.0, None)
    written, read = op.tensors(arguments)
    assert [len(t) for t in written] == [1, 2] and [len(t) for t in read] == [3, 4, 5]


def test_a_launcher_is_compiled_anew_when_a_header_has_changed(simulated, tmp_path):
    """Whatever folder that is in: headers of blocks/ and common/ are no section's of build.toml."""
    source, header, output = (tmp_path / name for name in ("a.hip", "with space.h", "a.o"))
    source.write_text('#include "with space.h"\n')
    header.write_text("int a();\n")
    toolchain = simulated.rocm.find_toolchain()

    def compiled_at():
        simulated.compile_where_changed(toolchain, source, output)
        return output.stat().st_mtime

    compiled_at()
    os.utime(output, (2e9, 2e9))
    assert compiled_at() == 2e9, "nothing has changed"
    os.utime(header, (2e9 + 1, 2e9 + 1))
    assert compiled_at() < 2e9
    os.utime(output, (3e9, 3e9))
    assert compiled_at() == 3e9
    output.with_suffix(".d").unlink()
    assert compiled_at() < 3e9, "what went into it is not known"
