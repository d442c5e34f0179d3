"""generate.py: steps of a model through transformers' generate, and the picture of a layer."""

import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch
from project import ROOT, slow_but
from torch import nn

sys.path.append(str(ROOT / "benchmarks"))
import families
import generate
import picture
import prompt
import tables

LAYER = [
    "rmsnorm_fp8_kernel",
    "skinny_gemm_ring_kernel",
    "attention_decode",
    "skinny_gemm_ring_kernel",
]
# What a recorded step launches: o, gate and up behind "fp8", as down and the next layer's qkv are.
RECORDED = ["norm", "product", "rope", "attention", "fp8", "product"]
RECORDED += ["norm", "product", "fp8", "product"]


def events(layer, layers):
    """A trace of three steps: kernels of 5 us that begin 2 us before the one before has ended, each
    layer 1 us behind the one before; each step has one more first, and copies, which are none."""
    found, now = [], 100.0
    for _ in range(3):
        for i, name in enumerate(["void at::native::index<int>(int)", *layer * layers]):
            begin = now + 1.0 if i % len(layer) == 1 else now - 2.0
            now = begin + 5.0
            found.append({"cat": "kernel", "name": name, "ts": begin, "dur": 5.0})
            found.append({"cat": "gpu_memcpy", "name": "Memcpy", "ts": begin, "dur": 50.0})
    random.shuffle(found)
    return found


@pytest.mark.parametrize("layers", [4, 8, 9, 32])
@pytest.mark.parametrize("layer", [LAYER, RECORDED])
def test_a_layer_is_found_in_a_trace(layer, layers):
    """Of an overlap only what is behind the end of the kernel before counts."""
    step = generate.kernels_in(events(layer, layers), 3)
    assert [kernel.name for kernel in step] == ["at::native::index", *layer * layers]
    found = generate.layer_of(step)
    names = [kernel.name for kernel in found]
    turn = next(i for i in range(len(names)) if names[i:] + names[:i] == layer)
    before, widths = 0.0, []
    for _, begin, end in found:
        assert begin >= before - 1e-6
        widths.append((end - begin, begin - before))
        before = end
    assert before == pytest.approx(6 + 3 * (len(layer) - 1))
    widths = widths[turn:] + widths[:turn]
    assert widths[0] == pytest.approx((5, 1))
    for width in widths[1:]:
        assert width == pytest.approx((3, 0))


def test_the_timeline_has_a_lane_a_side():
    found = [
        picture.Launch("as it was", "skinny_gemm <x>", 40.0, 60.0),
        picture.Launch("as it was", "attention_decode", 180.0, 200.0),
        picture.Launch("use_decode_step", "skinny_gemm <x>", 0.0, 20.0),
        picture.Launch("use_decode_step", "attention_decode", 20.0, 40.0),
    ]
    drawn = ElementTree.fromstring(picture.timeline(found, "a card, measured: a & b"))
    space = "{http://www.w3.org/2000/svg}"
    text = [element.text for element in drawn.iter(f"{space}text")]
    assert "as it was: 200 us, 2 kernels" in text and "use_decode_step: 40 us, 2 kernels" in text
    bars = [
        [float(bar.get(name)) for name in ("x", "width")]
        for bar in drawn.iter(f"{space}rect") if bar.find(f"{space}title") is not None
    ]  # fmt: skip
    across = picture.WIDTH - 24
    expected = [
        (40, 20, 200),
        (180, 20, 200),
        (0, 20, 200),
        (20, 20, 200),
        (0, 20, 40),
        (20, 20, 40),
    ]
    for bar, (begin, us, whole) in zip(bars, expected, strict=True):
        assert bar == pytest.approx([12 + across * begin / whole, across * us / whole], abs=0.01)


def test_rows_of_the_table(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    common = {"model": "llama-8b", "batch": 8, "context": 8192, "lm_head": True}
    rows = [
        {**common, "side": "bfloat16", "tokens_per_s": 1e3, "step_ms": 8.0, "floor_ms": 5.0},
        {**common, "context": 512, "side": "bfloat16", "error": "out of memory"},
        {**common, "side": "without", "error": "out of memory"},
        {**common, "side": "auto", "tokens_per_s": 2e3, "step_ms": 3.9, "host_ms": 0.2,
         "floor_ms": 3.0, "layer": [generate.Kernel("a", 0.0, 1.5)]},
    ]  # fmt: skip
    head = "card, measured: llama-8b, batch 8, context 8,192: "
    assert generate.table_rows(rows, "card") == [
        [head + "bfloat16, CUDA graph", "1,000", "8.00", "", "5.00"],
        [head + "as it was, FP8 head", "out of memory", "", "", ""],
        [head + "use_decode_step, FP8 head", "2,000", "3.90", "0.20", "3.00"],
        [head.replace("8,192", "512") + "bfloat16, CUDA graph", "out of memory", "", "", ""],
    ]
    (tmp_path / "tables").mkdir()
    generate.save(rows, "card")
    assert tables.printed("generate")[1] == generate.table_rows(rows, "card")
    assert picture.launches() == [picture.Launch("use_decode_step", "a", 0.0, 1.5)]
    assert picture.timeline_source() == "card, measured: llama-8b, batch 8, context 8,192"


def test_the_loop_of_generate():
    """Of the last two of four tokens: one's kernels overlap, and the device waits for the host."""

    def kernel(name, begin, end):
        return {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin}

    argmax = (
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<at::native::ArgMaxOps<float>>>"
    )
    found = []
    for start in (0.0, 50.0, 100.0, 200.0, 300.0):
        found += [kernel(argmax, start, start + 4), kernel("ours<1>", start + 10, start + 30),
                  kernel("void ours<2>", start + 25, start + 40),
                  {**kernel("Memcpy DtoD", start + 45, start + 47), "cat": "gpu_memcpy"},
                  {**kernel("launch", start + 60, start + 90), "cat": "cuda_runtime"}]  # fmt: skip
    loop = generate.loop_in(found[::-1], 2)
    assert loop == (
        100.0,
        100.0 - 4 - 30 - 2,
        {"reduce_kernel ReduceOp ArgMaxOps": 4.0, "Memcpy DtoD": 2.0},
    )


def test_a_step_reads_the_experts_that_its_tokens_meet():
    """Half of two experts a token: of a batch of two, on average, three quarters."""
    model = nn.Module()
    model.config = SimpleNamespace(num_experts_per_tok=1)
    model.embedding = nn.Embedding(10, 8)
    model.get_input_embeddings = lambda: model.embedding
    model.linear = nn.Linear(8, 3, bias=False)
    model.experts = nn.Module()
    model.experts.gate_up_proj = nn.Parameter(torch.zeros(2, 6, 8))
    model.experts.down_proj = nn.Parameter(torch.zeros(2, 8, 3))
    experts = 4 * 2 * (48 + 24)
    for tokens, part in ((1, 1 / 2), (2, 3 / 4), (3, 7 / 8)):
        assert generate.step_bytes(model, tokens) == pytest.approx(4 * 24 + part * experts)


@pytest.mark.parametrize("model", slow_but(["llama-8b"], generate.end_to_end.MODELS))
def test_a_tiny_model_through_generate(model):
    """Each side at two batches and two contexts, on the CPU."""
    command = [sys.executable, "benchmarks/end_to_end.py", "--generate", f"--model={model}"]
    command += ["--batches=1,2", "--contexts=9,70", "--timeline"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(r["side"], r["batch"], r["context"]) for r in rows] == [
        (side, batch, context)
        for side in generate.SIDES for batch in (1, 2) for context in (9, 70)
    ]  # fmt: skip
    for row in rows:
        assert row["tokens_per_s"] > 0 and row["step_ms"] > 0 and row["floor_ms"] > 0
    assert done.stdout.count("DecodeSteps(recorded=2, replayed=1") == 8


def test_prompts_of_a_tiny_model(tmp_path, monkeypatch):
    """One side on the CPU, and the rows of a table."""
    command = [sys.executable, "benchmarks/prompt.py", "--prompts=1x20", "--sides=auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [(r["side"], r["batch"], r["tokens"]) for r in rows] == [("auto", 1, 20)]
    assert rows[0]["first_ms"] > 0 and rows[0]["host_ms"] > 0
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    (tmp_path / "tables").mkdir()
    prompt.save([rows[0] | {"kernel_ms": 1.0}, {**rows[0], "side": "fp8"}], "a GPU")
    header, saved = tables.printed("prompt")
    assert header[1:] == ["to the first token, ms", "the host's part", "the kernels', in sum"]
    head = "a GPU, measured: llama-8b, 1 x 20: use_decode_step"
    assert [row[0] for row in saved] == [head, f"{head}, FP8 cache"]
    assert [row[3] for row in saved] == ["1.0", ""]


def test_a_tiny_model_of_another_family():
    """A row of the table of families; and how one says that its layers run."""
    command = [sys.executable, "benchmarks/families.py", "--models=cohere-8b", "--batches=1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, "--context=9"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (row,) = [line.split(" | ") for line in done.stdout.splitlines() if "measured" in line]
    step, floor, ratio = map(float, row[1:4])
    assert row[0] == "CPU, measured: cohere-8b, batch 1, context 9" and step > floor > 0
    assert ratio == pytest.approx(step / floor, rel=0.3)
    assert families.how({"decode_layers": 12}) == "one kernel"
    assert families.how({}) == "launches"
    assert families.how({"decode_layers": 9, "a reason": 3}) == "launches: a reason"
