"""transformers' tensor parallelism with its sums through a Communicator: 2 and 4 processes."""

import pytest
import torch
from comm_ranks import Ranks
from tensor_parallel_ranks import NEW_TOKENS
from tiny_models import tiny_llama, tokens


@pytest.fixture
def package(best_package):
    return best_package


@pytest.fixture(
    scope="module",
    params=[2, pytest.param(4, marks=pytest.mark.slow)],
    ids=lambda count: f"{count}",
)
def ranks(request, best_package, tmp_path_factory):
    ranks = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture
def folder(package, tmp_path):
    """A model, and what one process makes of it with the same FP8 weights."""
    from safetensors.torch import save_file

    torch.manual_seed(4)
    model = tiny_llama(num_attention_heads=8, num_key_value_heads=4).eval()
    model.save_pretrained(tmp_path)
    package.models.quantize_model_(model, activations="none")
    ids = tokens(2, 7)
    with torch.no_grad():
        logits = model(ids).logits
        answer = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    save_file({"ids": ids, "logits": logits, "answer": answer}, tmp_path / "expected")
    return tmp_path


def test_a_model_sums_through_a_communicator(ranks, folder):
    count = len(ranks.processes)
    names = [
        f"model.layers.{n}.{x}" for n in range(2) for x in ("self_attn.o_proj", "mlp.down_proj")
    ]
    results = ranks.run("tensor_parallel_ranks.through_a_communicator", folder=folder)
    assert len({said["bits"] for said in results}) == 1
    for said in results:
        assert "FP8 linears whose K is divided among processes" in said["not quantised"]
        assert "use_communicator was not called with this LlamaFor" in said["not called"]
        others = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
        assert said["begun"] == ({name: count for name in names}, 0, {}, others)
        assert said["one call"][1:3] == (4, {})
        assert said["two calls"][1:3] == (4, {f"more than {3 * 96 * 4} bytes": 4})
        assert said["stopped"] == said["not called"]
        assert said["bits of torch's"] or count > 2
        assert said["bits of before"]


def test_refusals_leave_the_model_as_it_was(ranks, folder):
    count = len(ranks.processes)
    for memory, many, model in ranks.run("tensor_parallel_ranks.refused", folder=folder):
        assert "rank 0 cannot make" in memory and "No space left" in memory
        assert many == f"a Communicator takes 2 to 1 ranks, got {count}"
        assert "use_communicator was not called" in model
