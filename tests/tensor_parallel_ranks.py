"""Cases of comm_ranks.py: a transformers model divided among the ranks by ``tp_plan="auto"``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from comm_ranks import Here, bits, error_of
from kernels import Mode, kernelize, use_kernel_mapping
from safetensors.torch import load_file
from torch import distributed

NEW_TOKENS = 5


def _load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    os.environ.update(WORLD_SIZE=f"{ranks}", RANK=f"{rank}", LOCAL_RANK=f"{rank}")
    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=torch.float32).eval()


def _kernelize(here: Here, model: Any) -> None:
    mapping = here.package.layers.kernel_mapping()
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device="cpu")


@torch.no_grad()
def through_a_communicator(here: Here, folder: Path) -> dict[str, Any]:
    """What a model gives with its sums through torch.distributed, and then through ours."""
    models = here.package.models
    expected = load_file(folder / "expected")
    ids = expected["ids"]
    model = _load(folder)
    said = {"not quantised": error_of(models.use_communicator, model)}
    models.quantize_model_(model, activations="none")
    _kernelize(here, model)
    said["not called"] = error_of(models.communicated_sums, model)
    before = model(ids).logits
    models.use_communicator(model)
    said["begun"] = models.communicated_sums(model)
    after = model(ids).logits
    said["one call"] = models.communicated_sums(model)
    close = {"rtol": 1e-5, "atol": 1e-5 * expected["logits"].abs().max().item()}
    torch.testing.assert_close(after, expected["logits"], **close)
    torch.testing.assert_close(after, before, **close)
    # Whatever does not fit goes as before; a second call takes the place of the first.
    models.use_communicator(model, max_bytes=3 * model.config.hidden_size * 4)
    short = model(ids[:1, :3]).logits
    torch.testing.assert_close(short, expected["logits"][:1, :3], **close)
    again = model(ids).logits
    torch.testing.assert_close(again, expected["logits"], **close)
    said["two calls"] = models.communicated_sums(model)
    models.stop_communicator(model)
    said["stopped"] = error_of(models.communicated_sums, model)
    said["bits of torch's"] = torch.equal(before, after)
    said["bits of before"] = torch.equal(model(ids).logits, before)
    models.use_communicator(model)
    # A whole answer; on the CPU its steps are not recorded, but the cache is ours.
    models.use_decode_step(model)
    answer = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(answer, expected["answer"])
    linear = model.model.layers[0].mlp.down_proj
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(here.rank)
    x = torch.randn(2, linear.in_features, generator=generator)
    torch.testing.assert_close(compiled(x), linear(x))
    said["bits"] = bits(after)
    return said


def refused(here: Here, folder: Path) -> list[str]:
    """A sum over more than 8, and memory that one rank cannot make: on all ranks alike, and the
    model sums as before."""
    from unittest import mock

    models = here.package.models
    model = _load(folder)
    models.quantize_model_(model, activations="none")
    memory = here.package.comm.memory
    said = []

    def no_room(size: int) -> str:
        raise OSError("No space left on device")

    with mock.patch.object(memory, "_new_file", no_room):
        said.append(error_of(models.use_communicator, model))
    with mock.patch.object(here.package.comm.communicator, "MOST_RANKS", 1):
        said.append(error_of(models.use_communicator, model))
    said.append(error_of(models.communicated_sums, model))
    return said
