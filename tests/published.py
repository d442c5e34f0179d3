"""What tests of FP8 checkpoints write, change and load: a model whose linears are FP8 as a config
says, and the model that the file means."""

import copy
import json
import re

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import by_channel, compressed_tensors, dequantised
from tiny_models import tiny_llama, tokens
from torch import nn
from transformers import AutoModelForCausalLM

PROJECTION = re.compile(r"\.(q|k|v|o|gate|up|down)_proj$")
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


def llama(**changes):
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 128}  # fmt: skip
    return tiny_llama(**{**sizes, **changes})


def load(package, folder, cls=AutoModelForCausalLM, **options):
    with package.models.fp8_checkpoints():
        return cls.from_pretrained(folder, **{"dtype": torch.float32, **options}).eval()


def change_tensors(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


def change_config(folder, change):
    file = folder / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


def checkpoint(model, folder, config, quantised, scale_name="weight_scale"):
    """Writes a model whose linears and embeddings of ``quantised`` (by a module's name, a function
    of its weight) are FP8 with scales of that name. Returns the model that the file means."""
    model.save_pretrained(folder)
    meant = copy.deepcopy(model)

    def change(tensors):
        for name, module in meant.named_modules():
            by = quantised(name) if isinstance(module, (nn.Linear, nn.Embedding)) else None
            if by is None:
                continue
            # Files have names of their own: a weight is known by its values.
            weight = module.weight.detach()
            same = (key for key, t in tensors.items() if t.shape == weight.shape)
            key = next(key for key in same if torch.equal(tensors[key].float(), weight.float()))
            q, scale = by(weight.float())
            tensors[key], tensors[f"{key.removesuffix('weight')}{scale_name}"] = q, scale
            module.weight.data = dequantised(q, scale)

    change_tensors(folder, change)
    change_config(folder, lambda said: said.update(quantization_config=config))
    return meant.eval()


def projections(name):
    return by_channel if PROJECTION.search(name) else None


def group(weights="channel", inputs=None, targets=("Linear",)):
    config, *_ = compressed_tensors(weights, inputs or "none")
    return {**config["config_groups"]["group_0"], "targets": [*targets]}


def compressed(*groups, ignore=("lm_head",), **more):
    config, *_ = compressed_tensors("channel", "none")
    groups = {f"group_{i}": one for i, one in enumerate(groups)}
    return {**config, "config_groups": groups, "ignore": [*ignore], **more}


def check_same(package, loaded, meant, **inputs):
    """Adopted, with inputs in 16 bits, it computes what was meant. Returns the report."""
    report = package.models.quantize_model_(loaded, activations="none")
    inputs = inputs or {"input_ids": tokens(2, 7)}
    with torch.no_grad():
        actual, expected = (model(**inputs)[0] for model in (loaded, meant))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    return report
