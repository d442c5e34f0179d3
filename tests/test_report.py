"""What quantize_model_ says of a model: each line of its report, what counts as kept and replaced,
and why a linear stays."""

import dataclasses
import functools
import importlib
from types import SimpleNamespace

import pytest
import torch
from tiny_models import tiny_llama
from torch import nn


@pytest.fixture
def of(package):
    """A module of the package's models, by name."""
    return lambda name: importlib.import_module(f"{package.models.__name__}.{name}")


# ---- the report


def test_every_line_of_a_report(package):
    """With values that differ in every field; equal ones are counted together."""
    report = dataclasses.replace(
        package.models.quantize_model_(tiny_llama()),
        converted=("a.0.q", "a.0.k", "a.1.q"),
        fused={"a.0.qk": ("a.0.q", "a.0.k"), "a.1.qk": ("a.1.q", "a.1.k")},
        adopted=("b", "c", "d", "e"),
        skipped={"a.0.gate": "chooses experts", "a.1.gate": "chooses experts",
                 "a.2.gate": "asked to skip", "head": "output head"},
        experts={"a.0.experts": "FP8", "a.1.experts": "FP8", "a.2.experts": "stay, a gate"},
        kept={"embed.weight": 0.625, "a.*.norm.weight": 0.0125},
        norms={"LayerNorm": 2, "OddNorm": 1},
        bytes_before=7_340_000, bytes_after=2_560_000,
        fp8_dtype=torch.float8_e4m3fnuz, activations="dynamic",
    )  # fmt: skip
    lines = str(report).splitlines()
    expected = [
        "3 linears to torch.float8_e4m3fnuz, activations 'dynamic'",
        "2 fused projections, 4 linears held FP8 already",
        "7.3 MB before, 2.6 MB after",
        "2 layers of a.*.experts: FP8",
        "1 layers of a.*.experts: stay, a gate",
        "not FP8: 62.5% of the bytes, embed.weight",
        "not FP8: 1.2% of the bytes, a.*.norm.weight",
        "skipped a.*.gate: chooses experts (2)",
        "skipped a.*.gate: asked to skip",
        "skipped head: output head",
        "not replaced: 2 LayerNorm",
        "not replaced: 1 OddNorm",
    ]
    assert [line for line in lines if line in expected] == expected


def test_what_is_kept_is_named_once_experts_first(of):
    model = nn.Module()
    for name, parameter in {
        "layers": [nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(2, 4))],
        "experts": [nn.Parameter(torch.zeros(1, 2))],
        "big": nn.Parameter(torch.zeros(50, dtype=torch.float64)),
        "a8": nn.Parameter(torch.zeros(7).to(torch.float8_e4m3fn), requires_grad=False),
        "b8": nn.Parameter(torch.zeros(7).to(torch.float8_e4m3fnuz), requires_grad=False),
        "four": nn.Parameter(torch.zeros(7, dtype=torch.uint8), requires_grad=False),
        "w_scale": nn.Parameter(torch.zeros(900)),
        "w_scale_inv": nn.Parameter(torch.zeros(900)),
        "scale_of": nn.Parameter(torch.zeros(1)),
    }.items():
        if isinstance(parameter, list):
            parameter = nn.ParameterList(parameter)
        setattr(model, name, parameter)
    kept = of("report").kept_bytes(model)
    assert list(kept.items()) == [
        ("experts.*", 8), ("big", 400), ("layers.*", 80), ("scale_of", 4)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "starred"),
    [
        ("layers.12.mlp", "layers.*.mlp"),
        ("0", "*"),
        ("0.1.2", "*.*.*"),
        ("conv1d.w8.10", "conv1d.w8.*"),
        ("h.3a.a3", "h.3a.a3"),
    ],
)
def test_numbers_in_names_are_starred(of, name, starred):
    assert of("report")._starred(name) == starred


def test_bytes_count_shared_tensors_once_and_buffers(of):
    model = nn.Module()
    model.a = nn.Linear(3, 5, bias=False)
    model.b = nn.Linear(3, 5, bias=False)
    model.b.weight = model.a.weight
    model.register_buffer("c", torch.zeros(7, dtype=torch.int16))
    assert of("report").bytes_of(model) == 15 * 4 + 7 * 2


def test_layers_of_others_do_not_count(package):
    """Only a forward of this package's layers, bound to the module itself."""

    class Theirs(nn.Module):
        def forward(self, x):
            return x

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    ours = package.layers.FP8Linear.forward
    for linear, forward in zip(model, (ours, ours, Theirs.forward, None), strict=True):
        if forward is not None:
            linear.forward = functools.partial(forward).func.__get__(linear)
    assert package.models.kernelized_layers(model) == {("Linear", "FP8Linear"): 2}


# ---- weight_access.py


class Reads(nn.Module):
    """Reads weights in every way that a model has."""

    def __init__(self):
        super().__init__()
        self.called, self.read, self.made = (nn.Linear(2, 2) for _ in range(3))
        self.inner = nn.Module()
        self.inner.deep = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Module(), nn.Module()])
        for block in self.blocks:
            block.out = nn.Linear(2, 2)
        self.made.weight.data.zero_()

    def forward(self, x):
        return self.called(x) @ self.read.weight

    def helper(self):
        return self.inner.deep.weight.dtype, [block.out.weight for block in self.blocks]


def test_linears_whose_weight_is_read_are_named(of, package):
    """By a method of any name but the constructor; calling alone is no reading."""
    read = {"read", "inner.deep", "blocks.0.out", "blocks.1.out"}
    assert of("weight_access").linears_read_without_a_call(Reads()) == dict.fromkeys(read, "Reads")
    nested = of("weight_access").linears_read_without_a_call(nn.ModuleDict({"m": Reads()}))
    assert nested == {f"m.{name}": "Reads" for name in read}
    report = package.models.quantize_model_(nn.ModuleDict({"m": Reads()}))
    assert report.converted == ("m.called", "m.made")
    assert report.skipped == {f"m.{name}": "Reads reads its weight itself" for name in read}


def test_what_a_base_class_reads_counts(of):
    class Derived(Reads):
        def forward(self, x):
            return self.called(x)

    assert "inner.deep" in of("weight_access").linears_read_without_a_call(Derived())
    assert "read" in of("weight_access").linears_read_without_a_call(Derived()), (
        "its base's forward may be called"
    )


# ---- tensor_parallel.py


class Divided:
    """A DTensor as far as it is asked: what a process has, and how it was divided."""

    def __init__(self, local, divides_k=False, dimensions=1):
        self.local = local
        self.placements = [SimpleNamespace(is_shard=lambda dim: divides_k and dim == 1)]
        self.device_mesh = SimpleNamespace(ndim=dimensions, get_group=lambda: "the group")
        self.requires_grad = True

    def detach(self):
        return self

    def to_local(self):
        return self.local


@pytest.mark.parametrize(
    ("style", "dimensions", "reason"),
    [
        ("colwise", 1, None),
        ("rowwise", 1, None),
        ("colwise", 2, "is divided among processes by colwise"),
        ("colwise_gather_output", 1, "is divided among processes by colwise_gather_output"),
        (None, 1, "is divided among processes by a plan of its own"),
    ],
)
def test_which_plans_of_tensor_parallelism_are_served(of, style, dimensions, reason):
    linear = SimpleNamespace(weight=Divided(torch.zeros(2, 2), dimensions=dimensions))
    model = SimpleNamespace(tp_plan={"layers.*.q_proj": style} if style else None)
    found = of("tensor_parallel").why_shard_stays(model, "layers.3.q_proj", linear)
    assert found == reason
    assert of("tensor_parallel").is_sharded(linear) and not of("tensor_parallel").is_sharded(
        nn.Linear(2, 2)
    )


@pytest.mark.parametrize("divides_k", [False, True])
def test_a_shard_has_a_group_where_k_is_divided(of, divides_k):
    shards = of("tensor_parallel")
    weight, bias = torch.randn(4, 6), torch.randn(4)
    linear = SimpleNamespace(weight=Divided(weight, divides_k), bias=Divided(bias))
    shard = shards.local_shard(linear)
    assert shard.process_group == ("the group" if divides_k else None)
    assert shard.weight is weight
    assert torch.equal(shard.bias.data, bias) and isinstance(shard.bias, nn.Parameter)
    plain = nn.Parameter(bias)
    assert shards.local_shard(SimpleNamespace(weight=Divided(weight), bias=plain)).bias is plain
    if not divides_k:
        largest = shards.row_amax_of_all_shards(shard.weight, shard.process_group)
        assert largest is None, "each row is in one shard"


def test_the_largest_of_rows_is_over_all_shards(of, monkeypatch):
    asked = []

    def all_reduce(tensor, op, group):
        asked.append((op, group))
        tensor.clamp_(min=2.0)  # what another process has

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    weight = torch.tensor([[1.0, -3.0], [-0.5, 0.25]])
    largest = of("tensor_parallel").row_amax_of_all_shards(weight, "the group")
    assert largest.tolist() == [[3.0], [2.0]]
    assert asked == [(torch.distributed.ReduceOp.MAX, "the group")]


# ---- quantize.py


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"activations": "static"}, r"activations must be .*, got 'static'"),
        ({"fp8_dtype": torch.float8_e5m2}, r"fp8_dtype must be one of .*, got torch.float8_e5m2"),
    ],
)
def test_what_cannot_be_asked_is_refused(package, arguments, words):
    model = tiny_llama()
    with pytest.raises(ValueError, match=words):
        package.models.quantize_model_(model, **arguments)
    assert type(model.model.layers[0].mlp.down_proj) is nn.Linear


def test_what_chooses_experts_stays(package):
    """A gate or router beside experts; a gate without them is a linear like others."""

    def layer(**modules):
        return nn.ModuleDict(modules)

    def linear():
        return nn.Linear(8, 8)

    model = nn.ModuleDict(
        {
            "moe": layer(experts=nn.ModuleList([linear()]), gate=linear(), up=linear(),
                         shared_expert_gate=linear()),
            "routed": layer(router=nn.Sequential(linear()), gate=linear()),
            "dense": layer(gate=linear(), shared_expert_gate=linear()),
        }
    )  # fmt: skip
    report = package.models.quantize_model_(model)
    chooses = {"moe.gate", "moe.shared_expert_gate", "routed.router.0", "routed.gate"}
    assert report.skipped == dict.fromkeys(chooses, "chooses experts")
    assert set(report.converted) == {"moe.experts.0", "moe.up", "dense.gate",
                                     "dense.shared_expert_gate"}  # fmt: skip


def test_a_module_that_is_shared_is_replaced_wherever_it_is(package):
    linear = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": nn.Sequential(linear), "b": nn.ModuleList([linear, nn.ReLU()])})
    report = package.models.quantize_model_(model)
    assert report.converted == ("a.0",)
    assert model["a"][0] is model["b"][0] and isinstance(model["a"][0], package.models.FP8Linear)


def test_every_reason_why_a_linear_stays(package):
    class Odd(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    class Extra(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.gain = nn.Parameter(torch.ones(()))

    class Tagged(nn.Parameter):
        pass

    model = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("fine", "wide", "tagged", "skip")})
    model.update({"odd": Odd(4, 4), "extra": Extra(), "conv": nn.Conv1d(4, 4, 1)})
    model["wide"].double()
    model["tagged"].weight = Tagged(model["tagged"].weight.data)
    report = package.models.quantize_model_(model, skip=["sk*"])
    assert report.converted == ("fine",)
    assert report.skipped == {
        "wide": "weight is torch.float64", "tagged": "its weight is a Tagged",
        "skip": "asked to skip", "odd": "is a Odd", "extra": "is a Extra", "conv": "is a Conv1d",
    }  # fmt: skip


@pytest.mark.parametrize("activations", [None, "none", "dynamic"])
def test_a_second_call_takes_what_is_asked_of_inputs(package, activations):
    """And leaves weights alone."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    package.models.quantize_model_(model, activations="dynamic")
    for linear in model:
        linear.scale_ub = 3.0
    weights = [linear.weight for linear in model]
    report = package.models.quantize_model_(model, activations=activations)
    assert report.converted == () and [linear.weight for linear in model] == weights
    assert {linear.activation_scheme for linear in model} == {activations or "dynamic"}
    assert {linear.scale_ub for linear in model} == {None if activations == "none" else 3.0}
