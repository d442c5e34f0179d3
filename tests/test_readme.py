"""What the README tells people to type."""

import re

import pytest
from project import REPO_ID, ROOT, TORCH_BUILDS, slow_but, torch_built_for
from test_hub_roundtrip import client, hub, result_of
from test_package import clean_python, hub_cache, run_python, variant

__all__ = ["client", "hub", "variant"]  # fixtures

README = (ROOT / "README.md").read_text()


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


PYTHON_BLOCKS = python_blocks("README.md")

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


@pytest.fixture(params=slow_but(["cuda"], TORCH_BUILDS))
def machine(request, tmp_path, variant):
    """A machine without a GPU, by what its torch was built for; the package is in its cache."""
    cache = hub_cache(tmp_path / "cache", {1: variant})
    return {"HF_HUB_CACHE": str(cache), **torch_built_for(request.param, tmp_path / "torch")}


def test_get_kernel(machine):
    code = PYTHON_BLOCKS[0] + "\nprint(tuple(q.shape), tuple(scale.shape), q.dtype)"
    assert run_python(code, **machine) == "(8, 4096) (8, 1) torch.float8_e4m3fn"


@pytest.mark.parametrize(
    ("page", "machine"),
    [
        ("README.md", "cuda"),  # what pip installs; test_get_kernel has each build
        *(pytest.param("README.md", build, marks=pytest.mark.slow) for build in ("cpu", "rocm")),
        pytest.param("docs/models.md", "cuda", marks=pytest.mark.slow),
    ],
    indirect=["machine"],
)
def test_speed_up_a_model(machine, page):
    """Every layer is replaced, and nothing is said that the page does not print."""
    block = next(b for b in python_blocks(page) if "kernelize(model" in b)
    # The build's own state of the sources is not what a stranger meets.
    quiet = "import logging; logging.getLogger('kernels.validate').setLevel(logging.ERROR)\n"
    check = """
with torch.inference_mode():
    logits = model(torch.arange(9, device=device).view(1, 9)).logits
assert logits.isfinite().all()
import collections
counts = collections.Counter(rocm_kernels.models.kernelized_layers(model).values())
print(sorted(counts.elements()))
"""
    process = clean_python(quiet + TINY_LLAMA + block + check, **machine)
    assert process.stdout.splitlines()[-1] == "[2, 2, 5, 8, 10]"
    assert process.stderr == ""


def test_stranger_trusts_the_publisher(hub, client):
    """What is pasted says so itself, where the client does not know the publisher yet."""
    hub.trusted.clear()
    assert PYTHON_BLOCKS[0].count("trust_remote_code=True") == 1
    assert result_of(client("-c", PYTHON_BLOCKS[0] + "print(q.shape[0])")) == "8"
    assert f'get_kernel("{REPO_ID}"' in PYTHON_BLOCKS[0]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert {"demo", "test"} <= named
    for target in named:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
