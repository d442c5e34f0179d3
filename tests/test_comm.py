"""Exchanges between processes on the CPU: 2 and 4 ranks, all against the definition, to the bit."""

import pytest
import torch
from comm_ranks import Ranks

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="module")
def four(package, tmp_path_factory):
    ranks = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def require_one_result(results: list) -> None:
    """The ranks of the group got the same bits; None comes from a rank outside."""
    found = [result for result in results if result is not None]
    assert len(found) in (2, 4) and len({*found}) == 1


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("into", ["new", "out", "x"])
def test_all_reduce(four, ranks, dtype, into):
    # The longest is divided among threads.
    for seed, shape in enumerate([(1,), (63,), (3, 5, 67), (70001,)]):
        require_one_result(
            four.run("sums", ranks=ranks, shape=shape, dtype=dtype, seed=seed, into=into)
        )


@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values(four, dtype):
    require_one_result(four.run("special_values", ranks=2, dtype=dtype))
    require_one_result(four.run("special_values", ranks=4, dtype=dtype))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", FLOATS)
def test_reduce_scatter_and_all_gather(four, ranks, dtype):
    four.run("scatter_and_gather", ranks=ranks, dtype=dtype, rows=1, seed=5)
    four.run("scatter_and_gather", ranks=ranks, dtype=dtype, rows=7, seed=6)


def test_no_elements(four):
    four.run("sums", ranks=4, shape=(0, 5), dtype=torch.float32, seed=0, into="new")


@pytest.mark.parametrize("quantization", [{}, {"group_size": 128}, {"scale": 0.05}])
def test_all_reduce_rmsnorm_fp8(four, quantization):
    for ranks in (2, 4):
        require_one_result(
            four.run("norms", ranks=ranks, dtype=torch.bfloat16, seed=7, quantization=quantization)
        )


def test_linear_all_reduce(four):
    require_one_result(four.run("linears", ranks=2, seed=8))
    require_one_result(four.run("linears", ranks=4, seed=9))


@pytest.mark.parametrize("ranks", [2, 4])
def test_many_calls_of_all_kinds(four, ranks):
    """A buffer that is written again too early shows here."""
    four.run("many", ranks=ranks, seed=100, calls=60)


@pytest.mark.parametrize("late", [0, 1])
def test_a_late_rank(four, late):
    four.run("a_late_rank", late=late)


def test_a_rank_that_stays_away_is_an_error(four):
    first, second, *_ = four.run("a_rank_that_stays_away")
    assert "all_reduce: rank 1 did not come in time: has its process ended?" in first[0]
    assert first[1] == "True"
    assert "an earlier call of this Communicator failed: make a new one" in first[2]
    # What rank 0 had shown before it gave up is right.
    assert second[0] == "no error"
    assert "another rank gave up: its error says why" in second[1]


def test_a_dead_rank_is_an_error(package, tmp_path):
    ranks = Ranks(2, tmp_path)
    try:
        ranks.start("wait_for_a_dead_rank")
        assert "rank 1 did not come in time: has its process ended?" in ranks.answer(0)
        ranks.processes[1].join(30)
        assert ranks.processes[1].exitcode == 3
    finally:
        ranks.close()


@pytest.mark.parametrize("other", ["size", "dtype", "op"])
def test_ranks_that_call_otherwise_are_an_error(four, other):
    for said in four.run("other_calls_on_other_ranks", other=other)[:2]:
        assert "every rank must call the same op with the same number of elements" in said


def test_refused_calls(four):
    wanted = {
        "x": "x must be a torch.Tensor, got a list",
        "dtype": "x must be float32, float16 or bfloat16, got int32",
        "out dtype": "out must have the dtype of x, got bfloat16 and float32",
        "out shape": "out must have 4 elements for 1 of x on 4 ranks, got 4 and 4",
        "out strides": "out must be contiguous; call .contiguous() first",
        "overlap": "out is written and must not share memory with x",
        "rows": "x must have a multiple of 4 rows for as many ranks, got (6,)",
        "bytes": "the tensor has more bytes than the Communicator was made for: give it more",
        "gradient": "all_reduce has no gradient, got x with requires_grad",
        "memory": "memory must be that of this rank's Communicator",
        "ranks": "ranks must be 2 to 8, got 9",
        "rank": "rank must be below ranks, got 4 of 4",
    }
    for said in four.run("refused"):
        assert said.keys() == wanted.keys()
        assert not {name: said[name] for name in wanted if wanted[name] not in said[name]}


def test_refused_groups(four):
    for one, sizes, closed in four.run("refused_groups"):
        assert one == "a Communicator takes 2 to 8 ranks, got 1"
        assert sizes.endswith("the same on every rank, got [64, 65, 66, 67]")
        assert closed == "the Communicator is closed: make a new one"


def test_without_a_process_group(package):
    with pytest.raises(RuntimeError, match=r"init_process_group first"):
        package.comm.Communicator()


def test_memory_is_released(four):
    for before, after, file in four.run("released"):
        assert before and not after and not file


def test_torch_compile(four):
    four.run("compiled")
