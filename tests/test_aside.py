"""What goes to branches of a recorded step, without a GPU: streams that only note what waits for
what, and each op is looked at for whether it comes behind those whose results it reads.

All of it is seen in a model whose attentions were asked; others have no branches."""

import contextlib
import random

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from tiny_attention import FAMILIES, prompt, tiny
from torch.utils._python_dispatch import TorchDispatchMode


class Stream:
    """A stream that notes of each stream how many of its ops have ended before what comes next."""

    current = None

    def __init__(self, device=None):
        self.device, self.clock, self.joined = device, {self: 0}, Stream.current is None

    def wait_event(self, event):
        self.joined = True
        for stream, count in event.clock.items():
            self.clock[stream] = max(self.clock.get(stream, 0), count)

    def wait_stream(self, other):
        event = Event()
        event.record(other)
        self.wait_event(event)

    def __enter__(self):
        self.outer, Stream.current = Stream.current, self

    def __exit__(self, *error):
        Stream.current = self.outer


class Event:
    def record(self, stream):
        self.clock = dict(stream.clock)


class Order(TorchDispatchMode):
    """Looks whether each op comes behind those that wrote what it touches, and behind those that
    read what it writes; and names the ops of each stream."""

    def __init__(self, seen_ops):
        super().__init__()
        self.seen_ops, self.uses, self.names, self.kept = seen_ops, {}, [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        storages, tensors = self.seen_ops.storages_of, self.seen_ops.tensors_in
        kwargs = kwargs or {}
        touched = storages(tensors((args, kwargs)))
        written = storages(self.seen_ops.written_by(func, args, kwargs))
        stream = Stream.current
        assert stream.joined
        made = func(*args, **kwargs)
        new = storages(tensors(made)) - touched
        self.kept.append(made)  # a storage is told by its address
        if func.overloadpacket in self.seen_ops.EMPTY:
            # The allocator gives a stream memory that ops of this stream have left.
            for memory in new:
                self.uses[memory] = [(stream, stream.clock[stream], True)]
            return made
        if not new and not written and func._schema.returns:
            return made  # a view
        stream.clock[stream] += 1
        self.names.append((stream, func._schema.name.rpartition("::")[2]))
        for memory in touched | new:
            writes = memory in written or memory in new
            for other, count, has_written in self.uses.get(memory, ()):
                if writes or has_written:
                    assert stream.clock.get(other, 0) >= count, (func, other, stream)
            self.uses.setdefault(memory, []).append((stream, stream.clock[stream], writes))
        return made


@pytest.fixture
def order(package, monkeypatch):
    """What an ``Aside`` must be entered within."""
    main = Stream()
    with main:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream.current)
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        order = Order(package.models.seen_ops)
        order.main = main
        yield order


@pytest.fixture
def recorded(package, order, monkeypatch):
    """Records the steps of a model as for a GPU, branches and all; gives the ops of the last
    one, with whether each is the main stream's."""
    package.models.use_attention()

    def recorded(family, padding):
        if family not in FAMILIES:
            changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
            monkeypatch.setitem(FAMILIES, family, changes)
        _, model = tiny(family, torch.bfloat16, head_dim=64)
        package.models.quantize_model_(model, lm_head=True)
        with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
            model = kernelize(model, mode=Mode.INFERENCE, device="cpu")
        record = package.models.recorded_step._record

        def record_twice(device, run, weights):
            assert {*weights} == {*model.parameters()}
            aside = package.models.aside.Aside(weights)
            order.names.clear()

            def with_branches():
                with order, aside:
                    run()

            return record(device, with_branches, weights)

        with monkeypatch.context() as patch:
            patch.setattr(package.models.recorded_step, "_record", record_twice)
            package.models.use_decode_step(model)
            given = prompt(len(padding), 9, padding)
            model.generate(**given, max_new_tokens=6, do_sample=False, eos_token_id=999)
        steps = package.models.decode_steps(model)
        assert steps.recorded == 1 and steps.replayed == 4, steps
        return [(name, stream is order.main) for stream, name in order.names]

    return recorded


# Torch's ops of a step: those between the layers' and behind them, with positions and masks beside
# them, and these again with padding; one of them widens the angles' buffer, in 16 bits here. More
# of them is time in which nothing else runs.
CHOICE = ["argmax", "where", "ne", "logical_and_", "copy_"]
SOFT_CAP = ["div", "tanh", "mul"]
STEPS = {
    "Llama": (["embedding", *CHOICE], 15, 33),
    "Mistral": (["embedding", *CHOICE], 15, 33),
    "Qwen3": (["embedding", *CHOICE], 15, 33),
    "Qwen3Moe": (["embedding", *CHOICE], 15, 33),
    "Gemma2": (["embedding", "mul", *SOFT_CAP, *CHOICE], 17, 51),
    "Gemma3Text": (["embedding", "mul", *CHOICE], 27, 61),
    "GptOss": (["embedding", *CHOICE], 16, 50),
}
OURS = ["rmsnorm_fp8", "gemm", "rope_and_cache", "attention", "swiglu_fp8", "topk", "fused_moe"]
OURS += ["hold_rotation"]  # on NVIDIA's GPUs


@pytest.mark.parametrize("family", STEPS)
def test_what_a_step_consists_of_beside_its_layers(recorded, family):
    between, plain, padded = STEPS[family]
    for padding, aside in ((0,), plain), ((0, 3), padded):
        names = recorded(family, padding)
        main = [name for name, is_main in names if is_main and name not in OURS]
        assert [name for name in main if name != "add"] == between  # sums go to norms
        assert len([name for name, is_main in names if not is_main]) == aside
        assert not any(name in OURS for name, is_main in names if not is_main)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_any_program(package, order, seed, inference):
    """Of ops on what is there before, on weights, and on each other's results; results are read,
    written and given up."""
    choose = random.Random(seed)
    weight = torch.randn(4, 4)
    known = [torch.randn(4, 4) for _ in range(3)] + [torch.ones(4, 4)]
    program = [(choose.randrange(9), choose.random(), choose.random()) for _ in range(40)]

    def run(known):
        for what, i, j in program:
            x, y = (known[int(part * len(known))] for part in (i, j))
            if what < 3:
                known.append((x + y).tanh())
            elif what == 3:
                known.append(x @ weight)
            elif what == 4:
                x.mul_(0.5).add_(y.cos())
            elif what == 5:
                known.append(x.t())
            elif what == 6:
                known.append(package.rmsnorm(x, weight[0]))
            elif what == 7:
                known.append(torch.arange(16.0).reshape(4, 4) + torch.empty(4, 4).fill_(2))
            elif len(known) > 5:
                known.pop()
        return known

    with torch.inference_mode(inference):
        expected = run([tensor.clone() for tensor in known])
        given = [tensor.clone() for tensor in known]
        with order, package.models.aside.Aside([weight]):
            found = run(given)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)
    for branch in {stream for stream, _ in order.names} - {order.main}:
        assert order.main.clock.get(branch, 0) == branch.clock[branch]  # all end before the graph


def test_what_is_beside_is_there(package, order):
    """Three chains that know nothing of each other, and a fourth that a weight is in."""
    weight, x, y, z = (torch.randn(4, 4) for _ in range(4))
    with order, package.models.aside.Aside([weight]):
        (x + 1).cos(), (y + 1).cos(), (z + 1).cos(), (x @ weight).cos()
    streams = [stream for stream, _ in order.names]
    assert len({*streams}) == 4 and streams[::2] == streams[1::2] and streams[-1] is order.main
    assert streams[-1].clock[streams[0]] and "mm" in [name for _, name in order.names]


@pytest.mark.parametrize("change", [None, "unasked", "divided"])
def test_only_what_is_asked_has_branches(package, monkeypatch, change):
    """Kernels that no dispatcher sees would not wait for them."""
    package.models.use_attention()
    _, model = tiny("Llama", torch.bfloat16, head_dim=64)
    assert not package.models.aside.may_branch(model)
    package.models.quantize_model_(model)
    if change == "unasked":
        model.model.layers[1].self_attn.kernel_attention = None
    if change == "divided":
        model.model.layers[1].mlp.process_group = object()
    assert package.models.aside.may_branch(model) == (change is None)


def test_a_graph_has_branches_and_late_sums(package, order, monkeypatch):
    """As a CUDA graph, which stands here for one."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **options: contextlib.nullcontext())
    x, weight = torch.randn(3, 16).bfloat16(), torch.ones(16).bfloat16()

    def run():
        (torch.ones(3) + 1).cos()
        package.rmsnorm(x * weight + x, weight)

    for weights, names in ((None, 0), ([weight], 3)):
        order.names.clear()
        with order:
            package.models.recorded_step._record(torch.device("cuda"), run, weights)
        assert [stream is order.main for stream, _ in order.names].count(False) == names
        assert [name for _, name in order.names][-2:] == ["mul", "rmsnorm_fp8"]


def test_an_error_is_itself(package, order):
    with pytest.raises(ZeroDivisionError), package.models.aside.Aside([]):
        torch.ones(3) + 1
        raise ZeroDivisionError
