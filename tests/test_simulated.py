"""The simulated backend must be able to fail: launches that touch what they were not given."""

import pytest
import torch


@pytest.fixture(scope="module")
def simulated(request):
    if "simulator" not in request.config.getoption("--device"):
        pytest.skip("needs --device simulator")
    import simulated

    return simulated


def arguments(x, out, weight, rows):
    from launchers import DTYPES, RmsNormFp8Args

    return RmsNormFp8Args(
        rows=rows, hidden=x.shape[1], x=x.data_ptr(), x_stride=x.stride(0),
        weight=weight.data_ptr(), out=out.data_ptr(), out_stride=out.stride(0), eps=1e-6,
        x_dtype=DTYPES[x.dtype], weight_dtype=DTYPES[weight.dtype], out_dtype=DTYPES[out.dtype],
    )  # fmt: skip


@pytest.mark.parametrize("hidden", [520, 523])
@pytest.mark.parametrize("wrong", ["nothing", "too many rows", "no weight", "half of the output"])
def test_a_wrong_launch_is_found(simulated, hidden, wrong):
    x, weight = torch.randn(4, hidden).half(), torch.randn(hidden).half()
    out = torch.empty(4, hidden, dtype=torch.float16)
    args = arguments(x, out, weight, rows=5 if wrong == "too many rows" else 4)
    written = [out[:2]] if wrong == "half of the output" else [out]
    read = [x] if wrong == "no weight" else [x, weight]
    calls = simulated.library_of_launchers()
    if wrong == "nothing":
        calls.launch("rms_norm_fp8", args, written, read)
        return
    with pytest.raises(AssertionError, match="out-of-bounds"):
        calls.launch("rms_norm_fp8", args, written, read)
