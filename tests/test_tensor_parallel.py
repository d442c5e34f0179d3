"""transformers' tensor parallelism with its sums through a Communicator: 2 and 4 processes, and
with ``--device cuda`` or ``rocm`` as many GPUs."""

import copy
import csv
import subprocess
import sys

import pytest
import tiny_checkpoints
import torch
from comm_ranks import Ranks
from kernels import Mode, kernelize, use_kernel_mapping
from project import ROOT
from tensor_parallel_ranks import NEW_TOKENS
from tiny_models import randomized, tiny_llama, tokens

HIDDEN = 128
COUNTS = (2, pytest.param(4, marks=pytest.mark.slow))


def pytest_generate_tests(metafunc):
    if "where" in metafunc.fixturenames:
        devices = [
            d
            for d in metafunc.config.getoption("--device").split(",")
            if d in ("cpu", "cuda", "rocm")
        ]
        metafunc.parametrize("where", devices, scope="module")


@pytest.fixture(scope="module", params=COUNTS, ids=str)
def ranks(request, where, cpu_package, device, tmp_path_factory):
    if where != "cpu" and torch.cuda.device_count() < request.param:
        pytest.skip(f"needs {request.param} GPUs, got {torch.cuda.device_count()}")
    ranks = Ranks(request.param, tmp_path_factory.mktemp("ranks"), where)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def folder(cpu_package, tmp_path_factory):
    """A model, and what one process makes of it with the same FP8 weights: with 16-bit inputs, and
    with FP8 ones, "dynamic"."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(4)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = tiny_llama(hidden_size=HIDDEN, intermediate_size=512, **heads).eval()
    model.save_pretrained(folder)
    in_fp8 = copy.deepcopy(model)
    cpu_package.models.quantize_model_(model, activations="none")
    cpu_package.models.quantize_model_(in_fp8, activations="dynamic")
    with use_kernel_mapping(cpu_package.layers.kernel_mapping(), inherit_mapping=False):
        kernelize(in_fp8, mode=Mode.INFERENCE, device="cpu")
    ids = tokens(2, 7)
    with torch.no_grad():
        logits = model(ids).logits
        answer = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
        dynamic = in_fp8(ids).logits
    expected = {"ids": ids, "logits": logits, "answer": answer, "dynamic": dynamic}
    save_file(expected, folder / "expected")
    return folder


def run(ranks, case, folder):
    return ranks.run(f"tensor_parallel_ranks.{case}", folder=folder)


def test_a_model_sums_through_a_communicator(ranks, folder):
    count, size = len(ranks.processes), 2 if ranks.on_gpu else 4
    parts = ("self_attn.o_proj", "mlp.down_proj")
    linears = {f"model.layers.{n}.{part}": count for n in range(2) for part in parts}
    others = {"model.embed_tokens": "embedding_rowwise", "lm_head": "colwise_gather_output"}
    results = run(ranks, "through_a_communicator", folder)
    assert len({said["bits"] for said in results}) == 1
    for said in results:
        assert "FP8 linears whose K is divided among processes" in said["not quantised"]
        assert "use_communicator was not called with this LlamaFor" in said["not called"]
        assert said["begun"] == (linears, 0, {}, others)
        assert said["one call"][1:3] == (4, {})
        assert said["two calls"][1:3] == (4, {f"more than {3 * HIDDEN * size} bytes": 4})
        assert said["stopped"] == said["not called"]
        assert said["bits of torch's"] or count > 2
        assert said["bits of before"]


def test_whole_answers(ranks, folder):
    for said in run(ranks, "whole_answers", folder):
        assert said["as before"] or len(ranks.processes) > 2
        assert (said["steps"].replayed > 0) == ranks.on_gpu
        if not ranks.on_gpu:
            why = "a step recorded on a CPU would not exchange with other processes"
            assert said["steps"].passed_on[why] > 0


def test_a_sum_and_the_norm_behind_it_are_one_op(ranks, folder):
    results = run(ranks, "sums_with_norms", folder)
    assert len({said["bits"] for said in results}) == 1
    assert len({said["seen"] for said in results}) == 1
    for said in results:
        assert (said["fused"], said["summed"], said["fused beside a hook"]) == (2, 4, 1)
        assert said["bits of torch's"] or len(ranks.processes) > 2


def test_divided_experts(ranks, package, tmp_path):
    """In FP8 they are summed as linears are; in 16 bits as transformers does."""
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=HIDDEN, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=8, num_key_value_heads=4, head_dim=16, vocab_size=160, num_experts=8,
        num_experts_per_tok=2,
    )  # fmt: skip
    model = randomized(Qwen3MoeForCausalLM(config)).eval()
    model.save_pretrained(tmp_path)
    expected = {"ids": tokens(2, 7)}
    for in_fp8, skip in ((True, []), (False, ["*.experts"])):
        one = copy.deepcopy(model)
        package.models.quantize_model_(one, activations="none", skip=skip)
        with torch.no_grad():
            expected[f"fp8 {in_fp8}, reference"] = one(expected["ids"]).logits
            with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
                kernelize(one, mode=Mode.INFERENCE, device="cpu")
            expected[f"fp8 {in_fp8}, kernels"] = one(expected["ids"]).logits
    save_file(expected, tmp_path / "expected")
    layers = [f"model.layers.{n}" for n in (0, 1)]
    attentions, experts = (
        {f"{n}.{end}" for n in layers} for end in ("self_attn.o_proj", "mlp.experts")
    )
    for in_fp8 in (True, False):
        results = ranks.run("tensor_parallel_ranks.divided_experts", folder=tmp_path, in_fp8=in_fp8)
        assert len({said["bits"] for said in results}) == 1
        for said in results:
            by_transformers = {n for n, s in said["sums"].others.items() if s == "moe_tp_experts"}
            assert said["sums"].linears.keys() == attentions | (experts if in_fp8 else set())
            assert said["sums"][1:3] == (4 if in_fp8 else 2, {})
            assert by_transformers == (set() if in_fp8 else experts)
            assert said["report"].keys() == experts
            becomes = "FP8, a scale a channel" if in_fp8 else "stays: asked to skip"
            assert set(said["report"].values()) == {becomes}
            if in_fp8:
                assert "is one process's share of a tensor-parallel model" in said["saved"]
                assert said["again"] == "no error"
                assert "needs experts whose inputs stay in 16 bits, and" in said["rows"]


@pytest.mark.parametrize(
    "kind, hidden, intermediate, error",
    [
        ("finegrained, blocks", HIDDEN, 1024, 1e-5),
        # Shares of 192, and of 64 keys: a block is cut, and takes the larger of two scales.
        ("finegrained, blocks", 2 * HIDDEN, 384, 0.02),
        ("compressed-tensors, channel, dynamic", HIDDEN, 384, 1e-5),
    ],
)
def test_divided_fp8_checkpoints(ranks, package, tmp_path, kind, hidden, intermediate, error):
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    torch.manual_seed(6)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    model = tiny_llama(hidden_size=hidden, intermediate_size=intermediate, **heads)
    tiny_checkpoints.write(model, tmp_path, kind)
    with package.models.fp8_checkpoints():
        one = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    package.models.quantize_model_(one, activations="none")
    ids = tokens(2, 7)
    with torch.no_grad():
        save_file({"ids": ids, "logits": one(ids).logits}, tmp_path / "expected")
    results = run(ranks, "divided_checkpoint", tmp_path)
    assert len({said["bits"] for said in results}) == 1
    for said in results:
        assert said["adopted"] == 14
        assert said["error"] < (0.1 if ranks.on_gpu else error)


def test_scales_of_whole_rows(ranks, folder):
    """Where they are asked for, FP8 inputs are those of one process; but for values so near to the
    middle of two FP8 ones that the rounding of the sums before decides."""
    results = run(ranks, "whole_row_scales", folder)
    for name in ("shares", "rows", "rows by torch"):
        assert len({said[f"bits of {name}"] for said in results}) == 1
    for said in results:
        assert "mlp.down_proj have one for 128 columns" in said["refused"]
        if not ranks.on_gpu:
            assert said["shares"] > 0.01
            assert said["rows"] < 0.002 and said["rows by torch"] < 0.002


def test_refusals_leave_the_model_as_it_was(ranks, folder):
    if ranks.on_gpu:
        pytest.skip("needs memory of processes")
    count = len(ranks.processes)
    for memory, many, model in run(ranks, "refused", folder):
        assert "rank 0 cannot make" in memory and "No space left" in memory
        assert many == f"a Communicator takes 2 to 1 ranks, got {count}"
        assert "use_communicator was not called" in model


@pytest.mark.slow
def test_the_benchmark_of_a_decode_step_runs(package, device, tmp_path):
    """With the narrow model that it takes where there is no GPU."""
    if device.type != "cpu":
        pytest.skip("takes a model of 8 billion on a GPU")
    script, table = ROOT / "benchmarks" / "tensor_parallel.py", tmp_path / "table.csv"
    options = ["--batches", "2", "--context", "16", "--csv", str(table)]
    said = subprocess.run([sys.executable, script, *options], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert "4 linears" in said.stdout and "differ from torch.distributed's by 0 of" in said.stdout
    header, row = csv.reader(table.read_text().splitlines())
    assert header[1:] == ["one process", "torch.distributed", "Communicator"]
    assert all(float(cell) > 0 for cell in row[1:])
