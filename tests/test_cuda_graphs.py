"""Launches on a GPU go to the current stream, are captured into graphs, and replay alike."""

import pytest
import torch
from compare import bits

pytestmark = pytest.mark.usefixtures("gpu")

ROWS = (1, 8, 32, 64)


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture
def calls(package, device):
    """Every op as users call it: name -> (call, inputs that may change between replays)."""
    half = {"device": device, "dtype": torch.bfloat16}
    weight, w16 = torch.randn(4096, **half), torch.randn(1000, 4096, **half)
    w = torch.randn(1000, 4096, **half).to(package.native_fp8_dtype(device))
    scale_w = torch.rand(1000, 1, device=device)
    static = torch.full((1,), 0.05, device=device)
    fp8 = package.native_fp8_dtype(device)
    w_gate_up, w_down = (torch.randn(s, **half).to(fp8) for s in ((16, 256, 4096), (16, 4096, 128)))
    scale_gate_up, scale_down = (torch.rand(16, n, 1, device=device) / 64 for n in (256, 4096))

    def norm(x):
        residual = x.flip(0).clone()
        q, scale = package.rmsnorm_fp8(x, weight, residual=residual)
        return q, scale, residual

    def product(x):
        q, scale = package.quantize_fp8(x)
        return (package.skinny_gemm(q, w, scale, scale_w),)

    def many_rows(x):
        q, scale = package.quantize_fp8(x)
        return (package.gemm(q, w, scale, scale_w),)

    def schedules(x):  # K is long beside M and N, so most configs share sums
        q, scale = package.quantize_fp8(x)
        ops, outputs = package.functional.ops, []
        out = torch.empty(len(x), len(w), **half)
        for config in ops.gemm_configs(out, q, w, scale, scale_w, False).splitlines()[::4]:
            outputs.append(torch.empty_like(out))
            ops.gemm(outputs[-1], q, w, scale, scale_w, None, config)
        return outputs

    def experts(x):  # whose routing changes between replays
        weights, ids = package.topk_softmax(x[:, :16], 4)
        scales = {"scale_gate_up": scale_gate_up, "scale_down": scale_down}
        return weights, ids, package.fused_moe(x, w_gate_up, w_down, weights, ids, **scales)

    calls = {
        "experts": (experts, [1, 30, 300]),
        "rmsnorm": (lambda x: (package.rmsnorm(x, weight),), [2, 300]),
        "rmsnorm_fp8": (norm, [2, 300]),
        "swiglu_fp8": (lambda x: package.swiglu_fp8(x), [2, 300]),
        "swiglu_fp8 static": (lambda x: package.swiglu_fp8(x, scale=static), [2, 300]),
        "quantize_fp8": (lambda x: package.quantize_fp8(x, group_size=128), [2, 300]),
        "FP8 x FP8": (product, ROWS),
        "gemm": (many_rows, [65, 300]),
        "gemm, its schedules": (schedules, [100]),
        "gemm, 16 bits": (lambda x: (package.gemm(x, w16),), [65, 300]),
        "gemm, weight only": (lambda x: (package.gemm(x, w, None, scale_w),), [65, 300]),
        "16 bits": (lambda x: (package.skinny_gemm(x, w16),), ROWS),
        "weight only": (lambda x: (package.skinny_gemm(x, w, None, scale_w),), ROWS),
    }
    return {
        f"{name}, {rows} rows": (call, [torch.randn(rows, 4096, **half) for _ in range(3)])
        for name, (call, counts) in calls.items()
        for rows in counts
    }


def assert_same_bits(actual, expected, name):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(bits(one), bits(other)), name


def captured(call, x):
    """A graph of the call, captured on a stream of its own, and its outputs."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(x)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        outputs = call(x)
    return graph, outputs


def test_a_graph_replays_with_new_data_on_another_stream(calls):
    for name, (call, (first, *others)) in calls.items():
        x = first.clone()
        graph, outputs = captured(call, x)
        for data in others:
            expected = call(data)
            other = torch.cuda.Stream()
            other.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(other):
                x.copy_(data)
                graph.replay()
            other.synchronize()
            assert_same_bits(outputs, expected, name)


def test_graphs_replay_at_once(calls):
    """Workspaces and tickets of one launch are no other's, whatever runs beside it."""
    for name, (call, (one, other, eager)) in calls.items():
        expected = [call(x) for x in (one, other, eager)]
        graphs = [captured(call, x) for x in (one, other)]
        streams = [torch.cuda.Stream() for _ in graphs]
        for _ in range(10):
            torch.cuda.synchronize()
            for (graph, _), stream in zip(graphs, streams, strict=True):
                with torch.cuda.stream(stream):
                    graph.replay()
            beside = call(eager)
            torch.cuda.synchronize()
            for (_, outputs), reference in zip(graphs, expected, strict=False):
                assert_same_bits(outputs, reference, name)
            assert_same_bits(beside, expected[2], name)


def test_launches_go_to_the_current_stream(calls):
    """Behind a kernel that holds up the stream, an op still reads what that stream wrote last."""
    for name, (call, (before, after, _)) in calls.items():
        expected, x = call(after), before.clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)  # a millisecond: another stream would be too early
            x.copy_(after)
            outputs = call(x)
        stream.synchronize()
        assert_same_bits(outputs, expected, name)


def test_same_bits_every_run(calls):
    for name, (call, (x, *_)) in calls.items():
        first = call(x)
        for _ in range(20):
            assert_same_bits(call(x), first, name)


def test_get_kernel_loads_the_variant_of_this_gpu(package):
    platform = "rocm" if torch.version.hip else "cu"
    assert f"-{platform}" in package.__file__
