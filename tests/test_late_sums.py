"""Sums that wait for the norms behind them: the same bits as made at once, whatever reads them."""

import contextlib
import random

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from tiny_attention import prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode

ROWS, COLUMNS = 3, 64


class Names(TorchDispatchMode):
    """What is launched, an op of ours with whether it adds something up."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.rpartition("::")[2]
        if name == "rmsnorm_fp8":
            name = "norm" if args[3] is None else "sum and norm"
        self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def run(package):
    def run(program, *tensors):
        """What a program returns with sums that wait; it must be what it returns without."""
        mode = package.models.late_sums.LateSums
        expected = program(*(tensor.clone() for tensor in tensors))
        names = Names()
        with names, mode():
            found = program(*(tensor.clone() for tensor in tensors))
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return [name for name in names.names if name in ("add", "norm", "sum and norm")]

    return run


@pytest.fixture
def rows():
    return [torch.randn(ROWS, COLUMNS).bfloat16() for _ in range(3)]


def test_a_norm_makes_the_sum_before_it(package, run, rows):
    """Through a view, and leaves it to whoever reads it later: another norm, another sum."""
    weight = torch.randn(COLUMNS).bfloat16()

    def layers(x, y, z):
        h = (x + y).view(1, ROWS, COLUMNS)
        q, scale = package.rmsnorm_fp8(h, weight)
        again = package.rmsnorm(h.flatten(0, -2), weight)
        last = h.view(ROWS, COLUMNS) + z
        return h, q, scale, again, last, package.rmsnorm(last, weight)

    assert run(layers, *rows) == ["sum and norm", "norm", "sum and norm"]


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize(
    "read",
    [
        lambda h: h * 2,
        lambda h: h[1:].clone(),
        lambda h: h.t().reshape(-1),
        lambda h: h.view(ROWS, 1, COLUMNS).float(),
        lambda h: torch.cat([h, h]),
    ],
)
def test_whatever_else_reads_a_sum_has_it(package, run, rows, read, inference):
    weight = torch.ones(COLUMNS).bfloat16()

    def program(x, y, z):
        h = x + y
        seen = read(h)
        return seen, package.rmsnorm(h, weight)

    with torch.inference_mode(inference):
        assert run(program, *rows) == ["sum and norm", "norm"]  # on the CPU a norm's op adds up


def test_a_norm_of_a_part_or_with_a_residual_is_another(package, run, rows):
    weight = torch.ones(COLUMNS).bfloat16()

    def program(x, y, z):
        h, other = x + y, y + z
        return package.rmsnorm(h[1:], weight), package.rmsnorm(other, weight, residual=z), z

    assert run(program, *rows) == ["sum and norm", "norm", "sum and norm", "sum and norm"]


@pytest.mark.parametrize("which", [0, 1])
def test_a_summand_that_is_written_is_added_up_before(package, run, rows, which):
    weight = torch.ones(COLUMNS).bfloat16()

    def program(*given):
        h = given[0] + given[1]
        given[which].mul_(3)
        return h, package.rmsnorm(h, weight)

    run(program, *rows)

    def by_the_norm(*given):
        h = given[0] + given[1]
        normed = package.rmsnorm(given[2], weight, out=given[which])
        return h, normed, package.rmsnorm(h, weight)

    run(by_the_norm, *rows)
    run(lambda *given: [package.rmsnorm(given[0] + given[1], weight, out=given[which])], *rows)


def test_a_sum_that_nobody_reads_is_made_in_the_end(run, rows):
    assert run(lambda x, y, z: (x + y, (x + y) + z), *rows) == ["sum and norm"] * 3


def test_an_error_is_itself(package, rows):
    with pytest.raises(ZeroDivisionError), package.models.late_sums.LateSums():
        rows[0] + rows[1]
        raise ZeroDivisionError


@pytest.mark.parametrize("seed", range(60))
def test_any_program(package, run, rows, seed):
    weight = torch.randn(COLUMNS).bfloat16()

    def program(*given):
        choose = random.Random(seed)
        known = list(given)
        for _ in range(14):
            x, y = choose.choice(known), choose.choice(known)
            what = choose.randrange(8)
            if what < 3:
                known.append(x + y)
            elif what == 3:
                known.append(package.rmsnorm(x, weight))
            elif what == 4 and x.data_ptr() != y.data_ptr():
                known.append(package.rmsnorm(x, weight, residual=y))
            elif what == 5:
                known.append(x.view(ROWS, COLUMNS))
            elif what == 6:
                x.mul_(0.5)
            else:
                known.append(package.rmsnorm_fp8(x, weight)[0].to(torch.bfloat16))
        return known

    run(program, *rows)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_recorded_step_has_no_sum_of_its_own(package, monkeypatch, family):
    """Of layers that are ours: each layer's last sum is its successor's norm's, the last layer's
    the model's norm's."""
    package.models.use_attention()
    _, model = tiny(family, torch.bfloat16, head_dim=64)
    package.models.quantize_model_(model)
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        model = kernelize(model, mode=Mode.INFERENCE, device="cpu")
    package.models.use_decode_step(model)
    mode = package.models.late_sums.LateSums
    begun, made = [], []
    is_left, make = mode._is_left_to, mode._make

    def left(self, args):
        begun.append(is_left(self, args))
        return begun[-1]

    monkeypatch.setattr(mode, "_is_left_to", left)
    monkeypatch.setattr(
        mode, "_make", lambda self, keys: made.extend(keys) or make(self, list(keys))
    )
    model.generate(**prompt(), max_new_tokens=4, do_sample=False)
    assert package.models.decode_steps(model).recorded == 1
    assert sum(begun) == model.config.num_hidden_layers
    assert not made


def test_what_does_not_run_where_ops_are_seen_is_recorded_without(package, monkeypatch):
    """As a CUDA graph, which stands here for one."""
    recorded_step = package.models.recorded_step
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext())
    seen = []

    class Sums(package.models.late_sums.LateSums):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            raise NotImplementedError("no rule for a higher-order op")

    monkeypatch.setattr(recorded_step, "LateSums", Sums)
    ran = []
    recorded_step._record(torch.device("cuda"), lambda: ran.append(torch.ones(2) + 1), None)
    assert len(seen) == len(ran) == 1
    with pytest.raises(ZeroDivisionError):
        recorded_step._record(torch.device("cuda"), lambda: 1 / 0, None)
