"""What the README tells people to type."""

import re

import pytest
from project import ROOT
from test_package import hub_cache, run_python, variant

__all__ = ["variant"]  # the fixture

README = (ROOT / "README.md").read_text()
PYTHON_BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)

# Stands for the download of a model: a Llama of two small layers with random weights.
TINY_LLAMA = """
import torch, transformers
def tiny(*args, **kwargs):
    config = transformers.LlamaConfig(
        hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=64)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
transformers.AutoModelForCausalLM.from_pretrained = tiny
"""


@pytest.fixture
def cache(tmp_path, variant):
    return str(hub_cache(tmp_path, {1: variant}))


def test_get_kernel_in_five_lines(cache):
    code = PYTHON_BLOCKS[0] + "\nprint(tuple(q.shape), tuple(scale.shape), q.dtype)"
    printed = run_python(code, HF_HUB_CACHE=cache, CUDA_VISIBLE_DEVICES="")
    assert printed == "(8, 4096) (8, 1) torch.float8_e4m3fn"


def test_kernelize_in_ten_lines(cache):
    check = """
replaced = sum("rocm_kernels" in getattr(m.forward, "__module__", "") for m in model.modules())
with torch.inference_mode():
    logits = model(torch.arange(9).view(1, 9)).logits
assert logits.isfinite().all()
print(replaced > 0)
"""
    code = TINY_LLAMA + PYTHON_BLOCKS[1] + check
    assert run_python(code, HF_HUB_CACHE=cache, CUDA_VISIBLE_DEVICES="") == "True"


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_links_lead_somewhere():
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
