"""Exchanges between processes, 2 and 4 ranks, all against the definition, to the bit: on the CPU,
and with ``--device cuda`` or ``rocm`` between as many GPUs."""

import re

import pytest
import torch
from comm_ranks import Ranks

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def pytest_generate_tests(metafunc):
    if "four" in metafunc.fixturenames:
        devices = [
            d
            for d in metafunc.config.getoption("--device").split(",")
            if d in ("cpu", "cuda", "rocm")
        ]
        metafunc.parametrize("four", devices, indirect=True, scope="module")


@pytest.fixture(scope="module")
def four(request, package, device, tmp_path_factory):
    """Four processes; of GPUs as many as there are."""
    count = 4
    if request.param != "cpu":
        count = min(count, torch.cuda.device_count())
        if count < 2:
            pytest.skip(f"needs two GPUs, got {count}")
    ranks = Ranks(count, tmp_path_factory.mktemp("ranks"), request.param)
    yield ranks
    ranks.close()


@pytest.fixture
def on_cpu(four):
    if four.on_gpu:
        pytest.skip("only processes on the CPU look at what the others called")
    return four


@pytest.fixture
def on_gpu(four):
    if not four.on_gpu:
        pytest.skip("needs two GPUs")
    return four


def require_ranks(four, ranks):
    if len(four.processes) < ranks:
        pytest.skip(f"needs {ranks} GPUs, got {len(four.processes)}")


def require_one_result(results: list) -> None:
    """The ranks of the group got the same bits; None comes from a rank outside."""
    found = [result for result in results if result is not None]
    assert len(found) in (2, 4) and len({*found}) == 1


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("into", ["new", "out", "x"])
def test_all_reduce(four, ranks, dtype, into):
    require_ranks(four, ranks)
    # The longest is divided among threads.
    for seed, shape in enumerate([(1,), (63,), (3, 5, 67), (70001,)]):
        require_one_result(
            four.run("sums", ranks=ranks, shape=shape, dtype=dtype, seed=seed, into=into)
        )


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(four, ranks, dtype):
    require_ranks(four, ranks)
    require_one_result(four.run("special_values", ranks=ranks, dtype=dtype))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_scatter_and_all_gather(four, ranks, dtype):
    require_ranks(four, ranks)
    four.run("scatter_and_gather", ranks=ranks, dtype=dtype, rows=1, seed=5)
    four.run("scatter_and_gather", ranks=ranks, dtype=dtype, rows=7, seed=6)


def test_no_elements(four):
    four.run("sums", ranks=2, shape=(0, 5), dtype=torch.float32, seed=0, into="new")


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("columns", [384, 2048])  # on a GPU two kernels, and one
@pytest.mark.parametrize("quantization", [{}, {"group_size": 128}, {"scale": 0.05}])
def test_all_reduce_rmsnorm_fp8(four, ranks, columns, quantization):
    require_ranks(four, ranks)
    data = {"dtype": torch.bfloat16, "seed": 7, "columns": columns, "quantization": quantization}
    require_one_result(four.run("norms", ranks=ranks, **data))


@pytest.mark.parametrize("ranks", [2, 4])
def test_linear_all_reduce(four, ranks):
    require_ranks(four, ranks)
    require_one_result(four.run("linears", ranks=ranks, seed=8))


@pytest.mark.parametrize("ranks", [2, 4])
def test_many_calls_of_all_kinds(four, ranks):
    """A buffer that is written again too early shows here."""
    require_ranks(four, ranks)
    four.run("many", ranks=ranks, seed=100, calls=60)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank(four, late):
    four.run("a_late_rank", late=late)


def test_a_rank_that_stays_away_is_an_error(on_cpu):
    first, second, *_ = on_cpu.run("a_rank_that_stays_away")
    assert "all_reduce: rank 1 did not come in time: has its process ended?" in first[0]
    assert first[1] == "True"
    assert "an earlier call of this Communicator failed: make a new one" in first[2]
    # What rank 0 had shown before it gave up is right.
    assert second[0] == "no error"
    assert "another rank gave up: its error says why" in second[1]


def test_a_rank_that_a_gpu_waited_for_is_an_error(on_gpu):
    """The call returns at once; check() and every later call say who did not come."""
    first, second, *_ = on_gpu.run("comm_gpu_ranks.a_rank_that_a_gpu_waited_for")
    for said, missing in ((first, 1), (second, 0)):
        late = f"rank {missing} did not come within 0.5 seconds: has its process ended?"
        # Rank 0 had sent its x before it gave up, so rank 1's first call was right.
        assert said[0] == "no error" if said is second else late in said[0]
        assert said[1] == "no error" if said is second else late in said[1]
        assert late in said[2]


def test_a_dead_rank_is_an_error(four, tmp_path):
    ranks = Ranks(2, tmp_path, four.backend)
    late = r"rank 1 did not come (in time|within 2 seconds): has its process ended\?"
    try:
        ranks.start("wait_for_a_dead_rank")
        assert re.search(late, ranks.answer(0))
        ranks.processes[1].join(30)
        assert ranks.processes[1].exitcode == 3
    finally:
        ranks.close()


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


@pytest.mark.parametrize("ranks", [2, 4])
def test_refused_calls(four, ranks):
    require_ranks(four, ranks)
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
    require_said(four.run("refused", ranks=ranks), wanted)


def test_refused_memory(on_cpu):
    wanted = {
        "memory": "memory must be that of this rank's Communicator",
        "ranks": "ranks must be 2 to 8, got 9",
        "rank": "rank must be below ranks, got 4 of 4",
    }
    require_said(on_cpu.run("refused_memory"), wanted)


def test_refused_groups(four):
    sizes = [64 + rank for rank in range(len(four.processes))]
    for one, asked, closed in four.run("refused_groups"):
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
    assert on_cpu.run("comm_gpu_ranks.sharing", ipc_works=True)[:2] == ["ipc", "ipc"]
    for said in on_cpu.run("comm_gpu_ranks.sharing", ipc_works=False)[:2]:
        assert said.endswith("memory: rank 1: no fabric; by IPC handles: rank 0: no handle")


def test_memory_by_ipc_handles(on_gpu):
    require_one_result(on_gpu.run("comm_gpu_ranks.memory_by_ipc"))


def test_graphs(on_gpu):
    on_gpu.run("comm_gpu_ranks.graphs")


def test_streams(on_gpu):
    on_gpu.run("comm_gpu_ranks.streams")


@pytest.mark.parametrize("ranks", [2, 4])
def test_torch_compile(four, ranks):
    require_ranks(four, ranks)
    four.run("compiled", ranks=ranks)
