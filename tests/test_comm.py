"""Exchanges between processes, 2 and 4 ranks, all against the definition, to the bit: on the CPU,
and with ``--device cuda`` or ``rocm`` between up to 8 GPUs."""

import re

import pytest
import torch
from comm_ranks import Ranks

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def pytest_generate_tests(metafunc):
    """`ranks`: of the group that a test takes from the processes there are."""
    if "everyone" not in metafunc.fixturenames:
        return
    devices = [
        d for d in metafunc.config.getoption("--device").split(",") if d in ("cpu", "cuda", "rocm")
    ]
    if "ranks" not in metafunc.fixturenames:
        metafunc.parametrize("everyone", devices, indirect=True, scope="module")
        return
    cases = [(d, ranks) for d in devices for ranks in ((2, 4) if d == "cpu" else (8, 4, 2))]
    metafunc.parametrize("everyone, ranks", cases, indirect=["everyone"], scope="module")


@pytest.fixture(scope="module")
def everyone(request, cpu_package, device, tmp_path_factory):
    """Four processes; of GPUs as many as there are, to 8."""
    count = 4
    if request.param != "cpu":
        count = min(8, torch.cuda.device_count())
        if count < 2:
            pytest.skip(f"needs two GPUs, got {count}")
    ranks = Ranks(count, tmp_path_factory.mktemp("ranks"), request.param)
    yield ranks
    ranks.close()


@pytest.fixture
def on_cpu(everyone):
    if everyone.on_gpu:
        pytest.skip("only processes on the CPU look at what the others called")
    return everyone


@pytest.fixture
def on_gpu(everyone):
    if not everyone.on_gpu:
        pytest.skip("needs two GPUs")
    return everyone


def require_ranks(everyone, ranks):
    if len(everyone.processes) < ranks:
        pytest.skip(f"needs {ranks} GPUs, got {len(everyone.processes)}")


def require_one_result(results: list) -> None:
    """The ranks of the group got the same bits; None comes from a rank outside."""
    found = [result for result in results if result is not None]
    assert len(found) in (2, 4, 8) and len({*found}) == 1


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("into", ["new", "out", "x"])
def test_all_reduce(everyone, ranks, dtype, into):
    require_ranks(everyone, ranks)
    # The longest is divided among threads.
    for seed, shape in enumerate([(1,), (63,), (3, 5, 67), (70001,)]):
        require_one_result(
            everyone.run("sums", ranks=ranks, shape=shape, dtype=dtype, seed=seed, into=into)
        )


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(everyone, ranks, dtype):
    require_ranks(everyone, ranks)
    require_one_result(everyone.run("special_values", ranks=ranks, dtype=dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_scatter_and_all_gather(everyone, ranks, dtype):
    require_ranks(everyone, ranks)
    everyone.run("scatter_and_gather", ranks=ranks, dtype=dtype, rows=1, seed=5)
    everyone.run("scatter_and_gather", ranks=ranks, dtype=dtype, rows=7, seed=6)


def test_no_elements(everyone):
    everyone.run("sums", ranks=2, shape=(0, 5), dtype=torch.float32, seed=0, into="new")


@pytest.mark.parametrize("columns", [384, 2048])  # on a GPU two kernels, and one
@pytest.mark.parametrize("quantization", [{}, {"group_size": 128}, {"scale": 0.05}])
def test_all_reduce_rmsnorm_fp8(everyone, ranks, columns, quantization):
    require_ranks(everyone, ranks)
    data = {"dtype": torch.bfloat16, "seed": 7, "columns": columns, "quantization": quantization}
    require_one_result(everyone.run("norms", ranks=ranks, **data))


@pytest.mark.parametrize("case", [{"m": 3, "n": 48, "k": 64}, {"m": 20, "n": 9, "k": 256}])
@pytest.mark.parametrize("dtype", FLOATS)
def test_linear_all_reduce(everyone, ranks, case, dtype):
    require_ranks(everyone, ranks)
    require_one_result(everyone.run("linears", ranks=ranks, seed=8, dtype=dtype, **case))


# On an H200 by which kernel of skinny_gemm/cuda.
SENT = [
    {"m": 1, "n": 4096, "k": 1024},  # TMA pipeline
    {"m": 8, "n": 4104, "k": 1024, "bias": False},
    {"m": 13, "n": 8192, "k": 896, "dtype": torch.float16},
    {"m": 16, "n": 16384, "k": 256},
    {"m": 5, "n": 40960, "k": 128},  # more blocks than the device holds
    {"m": 9, "n": 4096, "k": 1024, "blocks": True},
    {"m": 17, "n": 2048, "k": 2048},  # wgmma, clusters of four blocks
    {"m": 64, "n": 4096, "k": 1024},  # of two
    {"m": 33, "n": 4104, "k": 1152, "bias": False},
    {"m": 32, "n": 16384, "k": 256},  # a block alone
    {"m": 64, "n": 8192, "k": 512, "dtype": torch.float16},
    {"m": 48, "n": 9216, "k": 384},
]


@pytest.mark.parametrize("case", SENT, ids=lambda case: "x".join(str(case[key]) for key in "mnk"))
def test_linear_all_reduce_that_sends(on_gpu, ranks, case):
    """The bits of a product and a sum; where two shots are quicker it is these two."""
    require_ranks(on_gpu, ranks)
    if ranks > 2 and case["m"] * case["n"] * 2 > 64 << 10:
        pytest.skip("two shots")
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("which kernel a product takes is written for sm_90")
    for odd_rank in (-1, 1):
        result = on_gpu.run(
            "linears", ranks=ranks, seed=9, odd_rank=odd_rank, config="sent", **case
        )
        require_one_result(result)


@pytest.mark.parametrize("m, n", [(8, 4100), (65, 4096)])
def test_linear_all_reduce_that_does_not_send(on_gpu, ranks, m, n):
    require_ranks(on_gpu, ranks)
    require_one_result(on_gpu.run("linears", ranks=ranks, seed=10, m=m, n=n, k=1024))


def test_linear_all_reduce_config_runs_no_kernel(everyone):
    everyone.run("no_kernels.telling", ranks=2)


def test_linear_all_reduce_in_graphs(on_gpu, ranks):
    require_ranks(on_gpu, ranks)
    on_gpu.run("comm_gpu_ranks.linears_in_graphs", ranks=ranks)


def test_many_calls_of_all_kinds(everyone, ranks):
    """A buffer that is written again too early shows here."""
    require_ranks(everyone, ranks)
    everyone.run("many", ranks=ranks, seed=100, calls=60)


@pytest.mark.parametrize("late", ["first", "last"])
def test_a_late_rank(everyone, ranks, late):
    require_ranks(everyone, ranks)
    everyone.run("a_late_rank", ranks=ranks, late=0 if late == "first" else ranks - 1)


def test_a_rank_that_stays_away_is_an_error(on_cpu):
    first, second, *_ = on_cpu.run("a_rank_that_stays_away")
    assert "all_reduce: rank 1 did not come in time: has its process ended?" in first[0]
    assert first[1] == "True"
    assert "an earlier call of this Communicator failed: make a new one" in first[2]
    # What rank 0 had shown before it gave up is right.
    assert second[0] == "no error"
    assert "another rank gave up: its error says why" in second[1]


def test_a_rank_that_a_gpu_waited_for_is_an_error(on_gpu, ranks):
    """The call returns at once; check() and every later call say who did not come."""
    require_ranks(on_gpu, ranks)
    first, *others = on_gpu.run("comm_gpu_ranks.a_rank_that_a_gpu_waited_for", ranks=ranks)
    late = r"rank [1-7] did not come within 0\.5 seconds: has its process ended\?"
    assert all(re.search(late, said) for said in first)
    for said in others[: ranks - 1]:
        # Rank 0 had sent its x before it gave up, so the others' first calls were right.
        assert said[:2] == ["no error", "no error"]
        assert "rank 0 did not come within 0.5 seconds: has its process ended?" in said[2]


def test_a_dead_rank_is_an_error(everyone, ranks, tmp_path):
    require_ranks(everyone, ranks)
    processes, last = Ranks(ranks, tmp_path, everyone.backend), ranks - 1
    late = rf"rank {last} did not come (in time|within 2 seconds): has its process ended\?"
    try:
        processes.start("wait_for_a_dead_rank")
        for rank in range(last):
            assert re.search(late, processes.answer(rank))
        processes.processes[last].join(30)
        assert processes.processes[last].exitcode == 3
    finally:
        processes.close()


@pytest.mark.parametrize("other", ["size", "dtype", "op"])
def test_ranks_that_call_otherwise_are_an_error(on_cpu, other):
    for said in on_cpu.run("other_calls_on_other_ranks", other=other)[:2]:
        assert "every rank must call the same op with the same number of elements" in said


def require_said(results, wanted):
    found = [said for said in results if said]
    assert found
    for said in found:
        assert said.keys() == wanted.keys()
        assert not {name: said[name] for name in wanted if wanted[name] not in said[name]}


def test_refused_calls(everyone, ranks):
    require_ranks(everyone, ranks)
    wanted = {
        "x": "x must be a torch.Tensor, got a list",
        "dtype": "x must be float32, float16 or bfloat16, got int32",
        "out dtype": "out must have the dtype of x, got bfloat16 and float32",
        "out shape": f"out must have {ranks} elements for 1 of x on {ranks} ranks, got {ranks} and "
        f"{ranks}",
        "out strides": "out must be contiguous; call .contiguous() first",
        "overlap": "out is written and must not share memory with x",
        "rows": f"x must have a multiple of {ranks} rows for as many ranks, got ({ranks + 1},)",
        "bytes": "the tensor has more bytes than the Communicator was made for: give it more",
        "gradient": "all_reduce has no gradient, got x with requires_grad",
    }
    require_said(everyone.run("refused", ranks=ranks), wanted)


def test_refused_memory(on_cpu):
    wanted = {
        "memory": "memory must be that of this rank's Communicator",
        "ranks": "ranks must be 2 to 8, got 9",
        "rank": "rank must be below ranks, got 4 of 4",
    }
    require_said(on_cpu.run("refused_memory"), wanted)


def test_refused_groups(everyone):
    sizes = [64 + rank for rank in range(len(everyone.processes))]
    for one, asked, closed in everyone.run("refused_groups"):
        assert one == "a Communicator takes 2 to 8 ranks, got 1"
        assert asked.endswith(f"the same on every rank, got {sizes}")
        assert closed == "the Communicator is closed: make a new one"


def test_without_a_process_group(package):
    with pytest.raises(RuntimeError, match=r"init_process_group first"):
        package.comm.Communicator()


def test_memory_is_released(on_cpu):
    for before, after, file in on_cpu.run("released"):
        assert before and not after and not file


def test_memory_of_a_gpu_is_released(on_gpu):
    for during, after in on_gpu.run("comm_gpu_ranks.released_on_a_gpu")[:2]:
        assert during >= 4 * (64 << 20) and after <= 8 << 20


def test_ranks_share_memory_in_the_same_way(on_cpu):
    """What one rank cannot do, none does."""
    case = "comm_gpu_ranks.sharing"
    found = on_cpu.run(case, symmetric_works=True, ipc_works=True)[:2]
    assert found == ["symmetric", "symmetric"]
    for symmetric, met_before in ((False, 0), (True, 3)):
        options = {"symmetric_works": symmetric, "met_before": met_before}
        assert on_cpu.run(case, ipc_works=True, **options)[:2] == ["ipc", "ipc"]
    for said in on_cpu.run(case, symmetric_works=False, ipc_works=False)[:2]:
        assert said.endswith("memory: rank 1: no fabric; by IPC handles: rank 0: no handle")


def test_groups_of_other_sizes(on_gpu):
    assert len({*on_gpu.run("comm_gpu_ranks.groups_of_other_sizes")}) == 1


def test_memory_by_ipc_handles(on_gpu, ranks):
    require_ranks(on_gpu, ranks)
    require_one_result(on_gpu.run("comm_gpu_ranks.memory_by_ipc", ranks=ranks))


def test_graphs(on_gpu, ranks):
    require_ranks(on_gpu, ranks)
    on_gpu.run("comm_gpu_ranks.graphs", ranks=ranks)


def test_streams(on_gpu, ranks):
    require_ranks(on_gpu, ranks)
    on_gpu.run("comm_gpu_ranks.streams", ranks=ranks)


def test_torch_compile(everyone, ranks):
    require_ranks(everyone, ranks)
    everyone.run("compiled", ranks=ranks)
