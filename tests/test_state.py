"""A quantised model's state: pickled and copied, loaded, asked for its dtype."""

import copy
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from project import REPO_ID, ROOT
from test_families import tiny
from tiny_models import tiny_llama, tokens
from transformers import AutoModelForCausalLM, FineGrainedFP8Config


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture
def quantize_(package):
    return package.models.quantize_model_


@pytest.fixture
def run_kernelized(package, device):
    def kernelized(model, mode=Mode.INFERENCE):
        with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
            return kernelize(model, mode=mode)

    return kernelized


# ---- pickling

OTHER_PROCESS = f"""
import sys, torch
from kernels import Mode, get_kernel, kernelize, use_kernel_mapping
folder, backend = sys.argv[1:]
package = get_kernel("{REPO_ID}", version=1, backend=backend)
for name in torch.load(folder + "/names"):
    model, ids, logits, quick, counts = torch.load(folder + "/" + name, weights_only=False)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, logits), name
        with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
            kernelize(model, mode=Mode.INFERENCE)
        assert package.models.kernelized_layers(model) == counts, name
        assert torch.equal(model(ids).logits, quick), name
print("as it was")
"""


@pytest.mark.parametrize("when", ["quantised", "kernelized"])
@torch.no_grad()
def test_a_model_is_pickled_whole(package, quantize_, run_kernelized, device, tmp_path, when):
    """Into a process that has loaded the package: the same values, the same layers to kernelize.
    Of a kernelized one, too, the other process kernelizes anew."""
    names = ("llama", "gemma2", "mixtral", "llama4_text")
    for name in names:
        model = (tiny_llama() if name == "llama" else tiny(name)).to(device)
        quantize_(model)
        quick = copy.deepcopy(model)
        run_kernelized(quick)
        counts = package.models.kernelized_layers(quick)
        assert counts
        ids = tokens(2, 7, device)
        logits = model(ids).logits
        if when == "kernelized":
            run_kernelized(model)
        quick = quick(ids).logits
        torch.save((model, ids, logits, quick, counts), tmp_path / name)
    torch.save(names, tmp_path / "names")
    script = tmp_path / "other.py"
    script.write_text(OTHER_PROCESS)
    backend = "cpu" if device.type == "cpu" else ("rocm" if torch.version.hip else "cuda")
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path), backend],
        env={**os.environ, "LOCAL_KERNELS": f"{REPO_ID}={ROOT}"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.endswith("as it was\n"), done.stderr


def test_what_describes_a_checkpoint_is_pickled(package, quantize_, tmp_path):
    """The config of a quantised model, and what transformers keeps of one that was just loaded."""
    model = tiny_llama()
    quantize_(model)
    config = pickle.loads(pickle.dumps(model.config))
    assert config.to_dict() == copy.deepcopy(model.config).to_dict() == model.config.to_dict()
    assert config.quantization_config.quant_method == "compressed-tensors"
    model.save_pretrained(tmp_path / "ours")
    finegrained = FineGrainedFP8Config(modules_to_not_convert=["lm_head"])
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}
    tiny_llama(**sizes, tie_word_embeddings=False).save_pretrained(tmp_path / "16")
    with package.models.fp8_checkpoints():
        loaded = AutoModelForCausalLM.from_pretrained(
            tmp_path / "16", quantization_config=finegrained
        )
        loaded.save_pretrained(tmp_path / "finegrained")
        for name in ("ours", "finegrained"):
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / name)
            buffer = io.BytesIO()
            loaded.hf_quantizer.quantization_config.unseen = 7
            torch.save((loaded.config, loaded.hf_quantizer), buffer)
            buffer.seek(0)
            config, quantizer = torch.load(buffer, weights_only=False)
            assert config.to_dict() == loaded.config.to_dict()
            assert quantizer.quantization_config.unseen == 7
            assert type(quantizer).__name__ == type(loaded.hf_quantizer).__name__
