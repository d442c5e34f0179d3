"""Every family that models/families.py lists, and some others: quantised, saved and loaded it is
what it was."""

import importlib.util

import pytest
import torch
import transformers
from project import ROOT
from test_families import tiny
from tiny_models import tokens
from transformers import AutoModelForCausalLM

_spec = importlib.util.spec_from_file_location(
    "families", ROOT / "torch-ext/rocm_kernels/models/families.py"
)
families = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(families)

UNNAMED = ("ArceeDecoderLayer", "CohereDecoderLayer", "Starcoder2DecoderLayer")


@pytest.fixture
def package(best_package):
    return best_package


def model_type(decoder_class):
    """transformers' name of the family that has such a decoder layer."""
    name = decoder_class.removesuffix("DecoderLayer")
    for found in (name, name.removesuffix("Text")):
        if model := getattr(transformers, f"{found}ForCausalLM", None):
            return model.config_class.model_type
    raise AssertionError(f"transformers {transformers.__version__} has no {name}ForCausalLM")


# Layers of other sizes than blocks have, in two tensors of experts or one by one in the files.
@pytest.mark.parametrize("decoder_class", [*families.BY_DECODER, *UNNAMED])
@pytest.mark.parametrize("activations", ["dynamic", "none"])
@torch.no_grad()
def test_saved_and_loaded(package, tmp_path, decoder_class, activations):
    own = {"pad_token_id": 0} if decoder_class == "SmolLM3DecoderLayer" else {}
    model = tiny(model_type(decoder_class), **own)
    assert type(model.model.layers[0]).__name__ == decoder_class
    quantize_ = package.models.quantize_model_
    report = quantize_(model, activations=activations)
    assert not any(what.startswith("stays") for what in report.experts.values())
    ids = tokens(2, 7)
    before = model(ids).logits
    model.save_pretrained(tmp_path)
    with package.models.fp8_checkpoints():
        loaded, told = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    again = quantize_(loaded.eval())
    assert not again.converted and set(again.adopted) == set(report.converted)
    assert again.fused == report.fused and again.experts.keys() == report.experts.keys()
    assert all("of the checkpoint" in what for what in again.experts.values())
    first, second = model.state_dict(), loaded.state_dict()
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor.float(), second[name].float()), name
    torch.testing.assert_close(loaded(ids).logits, before, rtol=1e-4, atol=1e-4)
    for one, other in zip(model.modules(), loaded.modules(), strict=True):
        assert type(one).__name__ == type(other).__name__
        for name in ("activation_scheme", "scale_fmt", "interleaved", "limit", "activation"):
            assert getattr(one, name, None) == getattr(other, name, None)
