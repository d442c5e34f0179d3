"""torch.export of kernelized models: one graph for any number of sequences, of any length."""

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from project import slow_but
from test_families import tiny
from tiny_models import tiny_llama, tokens
from torch import nn

LENGTH = torch.export.Dim("length", min=2, max=512)
BATCH = torch.export.Dim("batch", min=1, max=16)

# Two things of a model that torch does not export for any length, kernelized or not: before 2.13
# keys that are repeated for groups of heads, whose strides it compares, and on CUDA 2.11's SDPA
# with a mask, which it pads to a multiple of eight. So heads have keys of their own there, and
# attention is eager.
HEADS = {} if torch.__version__ >= (2, 13) else {"num_key_value_heads": 6}


class Logits(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids):
        return self.model(ids, use_cache=False).logits


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture
def kernelized(package, device):
    def prepare(model, activations="dynamic"):
        model = model.to(device)
        package.models.quantize_model_(model, activations=activations)
        mapping = package.layers.kernel_mapping()
        with use_kernel_mapping(mapping, inherit_mapping=False):
            return kernelize(model, mode=Mode.INFERENCE | Mode.TORCH_COMPILE)

    return prepare


def exported(model, example, dynamic):
    shapes = {"ids": dynamic}
    return torch.export.export(Logits(model), (example,), dynamic_shapes=shapes).module()


def llama():
    return tiny_llama(attn_implementation="eager", **HEADS)


def is_as_eager(program, model, device, shapes):
    for batch, length in shapes:
        ids = tokens(batch, length, device)
        actual, expected = program(ids), model(ids).logits
        if device.type == "cpu":
            torch.testing.assert_close(actual, expected, rtol=1e-3, atol=5e-3)
        else:  # eager takes other kernels for few rows, and FP8 roundings may fall the other way
            assert nn.functional.cosine_similarity(actual, expected, dim=-1).min() > 0.999


@pytest.mark.parametrize("activations", slow_but(["dynamic"], ["none", "dynamic"]))
@pytest.mark.parametrize("sequences", slow_but([2], [1, 2]))
@torch.no_grad()
def test_a_dynamic_length(kernelized, device, sequences, activations):
    model = kernelized(llama(), activations)
    program = exported(model, tokens(sequences, 9, device), {1: LENGTH})
    is_as_eager(program, model, device, [(sequences, length) for length in (2, 30, 100)])


@pytest.mark.parametrize("activations", slow_but(["none"], ["none", "dynamic"]))
@torch.no_grad()
def test_a_dynamic_batch_and_length(kernelized, device, activations):
    """Of an example of two: torch takes a size of one in an example for a constant."""
    model = kernelized(llama(), activations)
    program = exported(model, tokens(2, 9, device), {0: BATCH, 1: LENGTH})
    is_as_eager(program, model, device, [(1, 2), (1, 40), (2, 9), (2, 30), (3, 100)])


# A multiplier of sums; norms after; experts, whose router tells tokens apart; latent projections.
@pytest.mark.parametrize(
    "family", slow_but(["qwen3_moe"], ["granite", "gemma2", "qwen3_moe", "deepseek_v3"])
)
@torch.no_grad()
def test_a_dynamic_batch_and_length_of_a_family(kernelized, device, family):
    model = kernelized(tiny(family, **HEADS))
    program = exported(model, tokens(2, 9, device), {0: BATCH, 1: LENGTH})
    is_as_eager(program, model, device, [(1, 40), (2, 30), (3, 17)])


@torch.no_grad()
def test_what_is_written_may_have_any_length(package, device):
    """A residual and an ``out=`` of three dimensions, which fold into rows by a view."""

    class Written(nn.Module):
        def forward(self, x, weight, out):
            residual = torch.nn.functional.linear(x, torch.eye(96, device=x.device))
            package.functional.rmsnorm(x, weight, 1e-5, residual=residual, out=out)
            q, scale = package.functional.rmsnorm_fp8(x, weight, 1e-5, residual=residual)
            return residual, out, q.float() * scale

    def arguments(batch, length):
        x = torch.randn(batch, length, 96, device=device)
        return x, torch.rand(96, device=device), torch.empty_like(x)

    both = {0: BATCH, 1: LENGTH}
    shapes = {"x": both, "weight": None, "out": both}
    program = torch.export.export(Written(), arguments(2, 9), dynamic_shapes=shapes).module()
    for batch, length in ((1, 2), (2, 30), (3, 100)):
        given = arguments(batch, length)
        expected = [each.clone() for each in Written()(*given)]
        for one, other in zip(program(*given), expected, strict=True):
            torch.testing.assert_close(one, other)
