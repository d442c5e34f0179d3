"""What records a run on the CPU, without a model: what it computes anew, by which op, and on which
threads. Whole steps are recorded in test_decode_step.py."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx


def test_recording_changes_nothing(package):
    """No tensor from outside is written, whatever depends on inputs is computed anew, and what
    does not is kept."""
    graph_of = package.models.cpu_recording.CpuGraph
    x, state, results = torch.randn(3, 8), torch.zeros(3, 8), {}
    table = torch.randn(8)

    def run():
        count = torch.arange(8.0) * 2
        count += 1
        state.add_(x)
        sum_ = package.rmsnorm(x, table) + state.clone()
        results.update(sum=sum_, scaled=sum_ * count, parts=(sum_ * 2).split(4, -1)[1], count=count)

    graph = graph_of(run)
    assert not state.any()
    total = torch.zeros(3, 8)
    for _ in range(3):
        x.copy_(torch.randn(3, 8))
        total += x
        graph.replay()
        expected = package.rmsnorm(x, table) + total
        assert torch.equal(state, total) and torch.equal(results["sum"], expected)
        assert torch.equal(results["scaled"], expected * (torch.arange(8.0) * 2 + 1))
        assert torch.equal(results["parts"], (expected * 2)[:, 4:])
    assert not any("arange" in str(step.function) for step in graph.steps)


def test_numbers_of_the_code_may_be_asked_for(package):
    """As torch.distributions checks its own; those of inputs, and of what has met them, may not."""
    graph_of = package.models.cpu_recording.CpuGraph
    x, result, chosen = torch.randn(3), torch.zeros(3), torch.zeros(2)

    def fixed():
        spread = torch.distributions.Normal(0, 1).icdf(torch.tensor(0.9))
        result.copy_(x * spread if (torch.arange(3) * 2)[1].item() == 2 else x)
        rows = torch.arange(3) > 0  # which of x, whatever x is
        chosen.copy_(x[rows])
        result[rows] += 1

    with torch.no_grad():  # inference mode does not show how tensors of numbers are made
        graph = graph_of(fixed)
        x.normal_()
        graph.replay()
    torch.testing.assert_close(result, x * 1.2815516 + torch.tensor([0.0, 1.0, 1.0]))
    assert torch.equal(chosen, x[1:])

    def filled():
        mine = torch.zeros(3)
        mine[:] = x
        return mine[0].item()

    asking = {
        "input": lambda: x[0].item(), "sum": lambda: bool((x.sum() + torch.ones(1)) > 0),
        "filled": filled, "random": lambda: torch.rand(1).item(),
        "randomized": lambda: torch.zeros(1).normal_().item(), "shape": lambda: x[x > 0],
        "chosen": lambda: (torch.arange(3) * 2)[x > 0],
    }  # fmt: skip
    for name, ask in asking.items():
        with pytest.raises(NotImplementedError, match=r"test_cpu_recording.py:\d+ takes numbers"):
            graph_of(ask)
            pytest.fail(name)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_threads_that_stay_give_the_same_bits(package, threads):
    """Launches large enough to be divided, each on the results of the one before."""
    rows, k, n = 9, 1024, 1536
    x, norm = torch.randn(rows, k).bfloat16(), torch.rand(k).bfloat16()
    up, scale_up = package.quantize_fp8(torch.randn(2 * n, k) / 32)
    down, scale_down = package.quantize_fp8(torch.randn(k, n) / 32)
    keys, values = torch.randn(2, 1, 300, 16, 64).bfloat16()
    used = torch.tensor([257]).int()
    out = {}

    def run():
        h = x
        for _ in range(5):
            q, scale = package.rmsnorm_fp8(h, norm)
            gate, other = package.gemm(q, up, scale, scale_up).chunk(2, -1)
            q, scale = package.swiglu_fp8(gate, other)
            h = package.gemm(q, down, scale, scale_down) + h
            heads = h.view(1, rows, 16, 64)
            heads = package.flash_attn_with_kvcache(heads, keys, values, cache_seqlens=used)
            h = heads.reshape(rows, k) + h
        out["h"] = h

    graph = package.models.cpu_recording.CpuGraph(run)
    result = out["h"]
    for count in (1, 2, 3, 7):
        threads(count)
        for _ in range(20):
            x.copy_(torch.randn(rows, k))
            result.fill_(float("nan"))
            graph.replay()
            threads(1)
            run()
            threads(count)
            assert torch.equal(result, out["h"])
    assert len(graph.steps) == 1


def test_a_graph_may_end_while_another_is_traced(package):
    """As a garbage collector ends it, amid anything: nothing of it is in what is traced, and its
    program is freed before the next is made."""
    graph_of = package.models.cpu_recording.CpuGraph
    x, weight = torch.randn(2, 64), torch.randn(64)
    graphs = [graph_of(lambda: package.rmsnorm(x, weight))]
    (program,) = {step.args[0] for step in graphs[0].steps}

    def traced(x):
        graphs.clear()
        return package.rmsnorm(x, weight)

    found = make_fx(traced, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    assert not graphs and not any("program" in str(node.target) for node in found.graph.nodes)
    assert torch.equal(found(x), package.rmsnorm(x, weight))
    package.functional.ops.run_program(program, 0, 0)  # still there
    graph_of(lambda: None)
    with pytest.raises(RuntimeError, match="program must be one that is there"):
        package.functional.ops.run_program(program, 0, 0)


@pytest.mark.parametrize("count", [1, 3])
def test_a_launch_that_fails_says_so(package, threads, count):
    threads(count)
    a, w, out = torch.randn(2, 64).half(), torch.randn(32, 64).half(), torch.zeros(2, 32).half()
    op = package.functional.ops.gemm
    graph = package.models.cpu_recording.CpuGraph(
        lambda: op(out, a, w, None, None, None, "nonsense")
    )
    with pytest.raises(RuntimeError, match="got 'nonsense'"):
        graph.replay()
    op(out, a, w, None, None, None, "")  # the thread runs its own ops again
    torch.testing.assert_close(out.float(), a.float() @ w.float().T, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_in_16_bits_are_ours_where_they_are_recorded(package, dtype, mode):
    """Of one and two rows: sums in another order than torch's, rounded once. Others stay torch's, a
    weight that lies otherwise and one with a bias too."""
    k, n = 96, 72
    w, bias = torch.randn(n, k, dtype=dtype), torch.randn(n, dtype=dtype)
    linear, columns = torch.nn.functional.linear, w.T.contiguous()
    for rows, ours in ((1, True), (2, True), (3, False)):
        x, out = torch.randn(rows, k, dtype=dtype), {}

        def run(x=x, out=out):
            out["linear"] = linear(x[None], w)
            out["product"] = torch.mm(x, w.T)
            out["other"] = torch.mm(x, columns)
            out["bias"] = linear(x, w, bias)

        with mode():
            graph = package.models.cpu_recording.CpuGraph(run)
            x.copy_(torch.randn(rows, k, dtype=dtype))
            for result in out.values():
                result.fill_(float("nan"))
            graph.replay()
        exact = x.double() @ w.double().T
        for name, result in out.items():
            expected = exact + bias.double() if name == "bias" else exact
            assert result.dtype == dtype
            found = result.double().view(rows, n)
            torch.testing.assert_close(found, expected, rtol=2**-8, atol=1e-2)
        functions = [str(step.function) for step in graph.steps]
        assert len(functions) == (3 if ours else 4), functions
        assert any("run_program" in name for name in functions) == ours
