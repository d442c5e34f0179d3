"""decode_mlp, the second half of a decoder layer as one kernel: the bits of the launches that it
stands for, whatever the order in which its workgroups run, launch after launch."""

import pytest
import torch
from compare import Guarded, bits

simulated = pytest.importorskip("simulated")
from simulated_mlp import random_mlp  # noqa: E402

pytestmark = pytest.mark.usefixtures("on_the_simulator")

CPU = torch.device("cpu")
# The order in which decode_mlp adds up.
IN_ORDER = ("register_pipeline block_n=16 waves=8 split_k=1 workgroups=0 xcds=1 producers=0 "
            "sparse=0")  # fmt: skip


def one_by_one(mlp, x, residual):
    """The same by the ops."""
    kernels = simulated.functional()

    def product(a, scale_a, w, scale_w):
        out = torch.empty(1, len(w), dtype=x.dtype)
        scale_w = scale_w[:, None] if scale_w.numel() > 1 else scale_w
        simulated.ops.gemm(out, a, w, scale_a, scale_w, None, IN_ORDER)
        return out

    h = residual.clone()[None]
    a = kernels.rmsnorm_fp8(x[None], mlp.norm, mlp.eps, h, weight_offset=mlp.weight_offset)
    gate_up = product(*a, mlp.gate_up, mlp.scale_gate_up)
    down = product(*kernels.swiglu_fp8(gate_up), mlp.down, mlp.scale_down)
    return (h + down)[0]


# Tiles for some workgroups only, more than one for some, K that eight waves do not divide evenly.
# Hidden sizes whose norm the op takes with as many threads: its sum has the same order.
CASES = [(2048, 2560, torch.bfloat16), (4096, 1152, torch.float16), (3456, 1024, torch.bfloat16)]


@pytest.mark.parametrize("hidden, intermediate, dtype", CASES)
def test_bits_of_the_ops(hidden, intermediate, dtype):
    mlp = random_mlp(hidden, intermediate, dtype, dtype == torch.bfloat16)
    x, residual = torch.randn(2, hidden).to(dtype)
    out = Guarded(1, hidden, dtype, CPU)
    mlp.launch(x, residual, out.view[0], mlp.state())
    out.assert_guards_intact()
    assert torch.equal(bits(out.view[0]), bits(one_by_one(mlp, x, residual)))


@pytest.mark.parametrize("hidden, intermediate", [(5120, 1024), (1024, 16512)])
def test_long_rows_and_an_offset(hidden, intermediate):
    """Where the norm's sum has another order than the op's: a few codes differ by a step. Of down
    more tiles than compute units; of b more than the helpers load at once."""
    mlp = random_mlp(hidden, intermediate, torch.bfloat16, True, weight_offset=1.0)
    x, residual = torch.randn(2, hidden).bfloat16()
    expected = one_by_one(mlp, x, residual)
    mlp.launch(x, residual, residual, mlp.state())
    torch.testing.assert_close(residual, expected, rtol=2e-2, atol=2e-2)


def test_launch_after_launch_in_any_order():
    """One state for all, as a graph that is replayed has, and the residual in place."""
    mlp = random_mlp(1024, 1024, torch.bfloat16, True)
    state = mlp.state()
    x, residual = torch.randn(2, 1024).bfloat16()
    expected = one_by_one(mlp, x, residual)
    found = []
    for seed in range(3):
        h = residual.clone()
        mlp.launch(x, h, h, state, seed=seed)
        torch.testing.assert_close(h, expected, rtol=2e-2, atol=2e-2)
        found.append(bits(h))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("hidden, intermediate, says", [
    (1000, 1024, "hidden must be a multiple of 128, from 1024 to 8192"),
    (1024, 1000, "intermediate must be a multiple of 128, from 1024 on"),
    (1024, 65536, "exceeds what LDS holds"),
])  # fmt: skip
def test_refusals(hidden, intermediate, says):
    mlp = random_mlp(hidden, intermediate, torch.bfloat16, True)
    x = torch.randn(hidden).bfloat16()
    out = torch.full_like(x, 7)
    with pytest.raises(RuntimeError, match=says):
        mlp.launch(x, x.clone(), out, mlp.state())
    assert (out == 7).all()
