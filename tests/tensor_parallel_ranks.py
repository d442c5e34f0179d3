"""Cases of comm_ranks.py: a transformers model divided among the ranks by ``tp_plan="auto"``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from comm_ranks import Here, bits, error_of
from kernels import Mode, kernelize, use_kernel_mapping
from safetensors.torch import load_file
from torch import distributed

NEW_TOKENS = 5


def _load(here: Here, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    ranks, rank = distributed.get_world_size(), distributed.get_rank()
    os.environ.update(WORLD_SIZE=f"{ranks}", RANK=f"{rank}", LOCAL_RANK=f"{rank}")
    dtype = torch.float32 if here.device.type == "cpu" else torch.bfloat16
    return AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=dtype).eval()


def _prepared(here: Here, folder: Path, activations: str) -> Any:
    model = _load(here, folder)
    here.package.models.quantize_model_(model, activations=activations)
    _kernelize(here, model)
    return model


def _kernelize(here: Here, model: Any) -> None:
    mapping = here.package.layers.kernel_mapping()
    with use_kernel_mapping(mapping, inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE, device=here.device.type)


def _answer(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)


@torch.no_grad()
def through_a_communicator(here: Here, folder: Path) -> dict[str, Any]:
    """What a model gives with its sums through torch.distributed, and then through ours."""
    models = here.package.models
    expected = load_file(folder / "expected")
    ids, whole = expected["ids"].to(here.device), expected["logits"].to(here.device)
    model = _load(here, folder)
    said = {"not quantised": error_of(models.use_communicator, model)}
    models.quantize_model_(model, activations="none")
    _kernelize(here, model)
    said["not called"] = error_of(models.communicated_sums, model)
    before = model(ids).logits
    models.use_communicator(model)
    said["begun"] = models.communicated_sums(model)
    after = model(ids).logits
    said["one call"] = models.communicated_sums(model)
    # On the CPU all is float32; 16 bits round in other places than one process does.
    rounding = 1e-5 if here.device.type == "cpu" else 0.05
    close = {"rtol": rounding, "atol": rounding * whole.abs().max().item()}
    torch.testing.assert_close(after.float(), whole, **close)
    torch.testing.assert_close(after, before, **close)
    # Whatever does not fit goes as before; a second call takes the place of the first.
    models.use_communicator(model, max_bytes=3 * model.config.hidden_size * after.element_size())
    torch.testing.assert_close(model(ids[:1, :3]).logits.float(), whole[:1, :3], **close)
    torch.testing.assert_close(model(ids).logits.float(), whole, **close)
    said["two calls"] = models.communicated_sums(model)
    models.stop_communicator(model)
    said["stopped"] = error_of(models.communicated_sums, model)
    said["bits of torch's"] = torch.equal(before, after)
    said["bits of before"] = torch.equal(model(ids).logits, before)
    said["bits"] = bits(after)
    models.use_communicator(model)
    linear = model.model.layers[0].mlp.down_proj
    compiled = torch.compile(linear, backend="aot_eager", fullgraph=True)
    generator = torch.Generator().manual_seed(here.rank)
    x = torch.randn(2, linear.in_features, generator=generator).to(here.device, after.dtype)
    torch.testing.assert_close(compiled(x), linear(x))
    return said


@torch.no_grad()
def whole_answers(here: Here, folder: Path) -> dict[str, Any]:
    """With use_decode_step; on the CPU steps are not recorded, but the cache is ours."""
    models = here.package.models
    expected = load_file(folder / "expected")
    ids = expected["ids"].to(here.device)
    model = _prepared(here, folder, "none")
    models.use_decode_step(model)
    # What a recorded step reads has addresses, divided tensors too.
    assert 0 not in models.model_state.fingerprint(model)[0]
    without = _answer(model, ids)
    models.use_communicator(model)
    first, second = _answer(model, ids), _answer(model, ids)
    assert torch.equal(first, second)
    if here.device.type == "cpu":
        assert torch.equal(first.cpu(), expected["answer"])
    steps = models.decode_steps(model)
    models.stop_communicator(model)
    assert torch.equal(_answer(model, ids), without)
    return {"as before": torch.equal(first, without), "steps": steps}


@torch.no_grad()
def sums_with_norms(here: Here, folder: Path) -> dict[str, Any]:
    """The attention's sum, and the norm that quantises behind it, in one op."""
    models = here.package.models
    ids = load_file(folder / "expected")["ids"].to(here.device)
    model = _prepared(here, folder, "dynamic")
    before = model(ids).logits
    models.use_communicator(model)
    communicator = here.package.comm.Communicator
    one = mock.patch.object(
        communicator, "all_reduce_rmsnorm_fp8", autospec=True,
        side_effect=communicator.all_reduce_rmsnorm_fp8,
    )  # fmt: skip
    said: dict[str, Any] = {}
    with one as fused:
        after = model(ids).logits
        said["fused"] = fused.call_count
        said["summed"] = models.communicated_sums(model).summed
        # Who looks at an output projection sees a sum.
        seen: list[torch.Tensor] = []
        out = model.model.layers[0].self_attn.o_proj
        handle = out.register_forward_hook(lambda module, args, result: seen.append(result))
        hooked = model(ids).logits
        handle.remove()
        said["fused beside a hook"] = fused.call_count - said["fused"]
    said["seen"] = bits(seen[0])
    assert torch.equal(hooked, after)
    said["bits of torch's"] = torch.equal(before, after)
    said["bits"] = bits(after)
    return said


@torch.no_grad()
def divided_experts(here: Here, folder: Path, in_fp8: bool) -> dict[str, Any]:
    """A model whose experts are divided: in FP8, or as transformers has them and sums them."""
    models = here.package.models
    expected = load_file(folder / "expected")
    ids = expected["ids"].to(here.device)
    model = _load(here, folder)
    report = models.quantize_model_(model, activations="none", skip=[] if in_fp8 else ["*.experts"])
    # 16 bits may choose another expert for a token, so on a GPU the whole is looked at, not each.
    rounding = 1e-5 if here.device.type == "cpu" else 0.2

    def require_close(logits: torch.Tensor, wanted: str) -> None:
        whole = expected[f"fp8 {in_fp8}, {wanted}"].to(here.device)
        assert (logits.float() - whole).abs().mean() < rounding * whole.abs().mean()

    require_close(model(ids).logits, "reference")
    _kernelize(here, model)
    before = model(ids).logits
    models.use_communicator(model)
    after = model(ids).logits
    require_close(after, "kernels")
    torch.testing.assert_close(after, before, rtol=1e-5, atol=rounding * before.abs().max().item())
    said = {"sums": models.communicated_sums(model), "bits": bits(after), "report": report.experts}
    models.stop_communicator(model)
    assert torch.equal(model(ids).logits, before)
    if in_fp8:
        said["saved"] = error_of(model.state_dict)
        said["again"] = error_of(models.quantize_model_, model, activations="dynamic")
        said["rows"] = error_of(models.use_communicator, model, whole_row_scales=True)
    return said


@torch.no_grad()
def divided_checkpoint(here: Here, folder: Path) -> dict[str, Any]:
    """How far a divided FP8 checkpoint is from the same on one process."""
    models = here.package.models
    expected = load_file(folder / "expected")
    ids, whole = expected["ids"].to(here.device), expected["logits"].to(here.device)
    with models.fp8_checkpoints():
        model = _load(here, folder)
    report = models.quantize_model_(model, activations="none")
    _kernelize(here, model)
    before = model(ids).logits
    models.use_communicator(model)
    after = model(ids).logits
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5 * before.abs().max().item())
    error = (after.float() - whole).abs().mean() / whole.abs().mean()
    return {"adopted": len(report.adopted), "error": error.item(), "bits": bits(after)}


@torch.no_grad()
def whole_row_scales(here: Here, folder: Path) -> dict[str, Any]:
    """How far a model is from one process's, both with inputs in FP8."""
    models = here.package.models
    expected = load_file(folder / "expected")
    ids, whole = expected["ids"].to(here.device), expected["dynamic"].to(here.device)
    model = _prepared(here, folder, "dynamic")
    said: dict[str, Any] = {}
    for name, options in (
        ("shares", {}),
        ("rows", {"whole_row_scales": True}),
        ("rows by torch", {"whole_row_scales": True, "max_bytes": 4}),
    ):
        models.use_communicator(model, **options)
        logits = model(ids).logits
        said[name] = ((logits - whole).abs().mean() / whole.abs().mean()).item()
        said[f"bits of {name}"] = bits(logits)
    linear = model.model.layers[0].mlp.down_proj
    scales = torch.ones(1, 2, device=here.device)
    with mock.patch.dict(linear._parameters, weight_scale_inv=torch.nn.Parameter(scales)):
        said["refused"] = error_of(models.use_communicator, model, whole_row_scales=True)
    return said


def refused(here: Here, folder: Path) -> list[str]:
    """Memory that one rank cannot make, and too many ranks: on all ranks alike, and the model sums
    as before."""
    models = here.package.models
    model = _load(here, folder)
    models.quantize_model_(model, activations="none")
    memory = here.package.comm.memory
    said = []

    def no_room(*arguments: Any) -> Any:
        raise OSError("No space left on device")

    with mock.patch.object(memory, "_new_file", no_room):
        said.append(error_of(models.use_communicator, model))
    with mock.patch.object(here.package.comm.communicator, "MOST_RANKS", 1):
        said.append(error_of(models.use_communicator, model))
    said.append(error_of(models.communicated_sums, model))
    return said
