"""What FP8 costs SmolLM2-135M-Instruct in accuracy: each mode, and each checkpoint format.

    python benchmarks/quality.py            # prints the table of docs/models.md

Read are pages of Python's own language reference, as pydoc ships them. Predictions after each token
are compared with bfloat16's. Then each model continues a prompt greedily, and its definition, with
linears that the reference computes in float64 from the same FP8 numbers, is asked for each of those
tokens.
"""

import argparse
import copy
import math
import sys
import tempfile
from pathlib import Path
from pydoc_data import topics

import torch
from kernels import Mode, kernelize, register_kernel_mapping
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / name) for name in ("tools", "tests", "examples")]
import demo  # noqa: E402
import load  # noqa: E402
import tiny_checkpoints  # noqa: E402
from tiny_models import quantizing_inputs  # noqa: E402

PAGES = ("assignment", "class", "exceptions", "for", "import", "lambda", "try", "while")
PROMPT = "Write a short story about a river, a mill and a miller who cannot sleep."
MODES = ("dynamic", "none")
FORMATS = (
    "finegrained, blocks",
    "compressed-tensors, tensor, dynamic",
    "compressed-tensors, tensor, static",
)


def text():
    return "\n\n".join(topics.topics[page] for page in PAGES)


def calibrated(model, tokenizer):
    """Static scales of inputs: the largest magnitude over the demo's text, alike for what shares an
    input."""
    seen = {}

    def look(name):
        return lambda _, args: seen.update({name: args[0].abs().max().item()})

    hooks = [
        module.register_forward_pre_hook(look(name))
        for name, module in model.named_modules()
        if name.endswith("_proj")
    ]
    with torch.no_grad():
        model(**tokenizer(demo.TEXT, return_tensors="pt").to(demo.DEVICE))
    for hook in hooks:
        hook.remove()
    return lambda name: seen[name] / 448


@torch.no_grad()
def predictions(model, ids):
    return model(ids).logits[0, :-1].float().log_softmax(-1)


@torch.no_grad()
def greedy_agreement(model, definition, tokenizer, count):
    """Share of a greedy continuation's tokens that the definition would have chosen, too."""
    inputs = demo.chat(tokenizer, PROMPT)
    out = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    start = inputs["input_ids"].shape[1]
    wanted = definition(out).logits[0, start - 1 : -1].argmax(-1)
    return (wanted == out[0, start:]).float().mean().item()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of the text that is read")
    parser.add_argument("--greedy", type=int, default=200, help="tokens of the continuation")
    args = parser.parse_args()
    package = load.load(demo.CHOICE)
    register_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False)
    bf16, tokenizer = demo.load_model()
    ids = tokenizer(text(), return_tensors="pt")["input_ids"][:, : args.tokens].to(demo.DEVICE)
    base = predictions(bf16, ids)

    def perplexity(log_p):
        return math.exp(-log_p.gather(1, ids[0, 1:, None]).mean().item())

    def row(name, model):
        """The model is quantised, and runs its own forwards yet."""
        definition = quantizing_inputs(package, model)
        kernelize(model, mode=Mode.INFERENCE)
        log_q = predictions(model, ids)
        top1 = (log_q.argmax(-1) == base.argmax(-1)).float().mean().item()
        kl = (base.exp() * (base - log_q)).sum(-1).mean().item()
        greedy = greedy_agreement(model, definition, tokenizer, args.greedy)
        columns = f"{perplexity(log_q):.2f} | {top1:.1%} | {kl:.4f} | {greedy:.1%}"
        print(f"| {name} | {columns} |", flush=True)

    python = ".".join(map(str, sys.version_info[:2]))
    read = f"{ids.shape[1]} tokens of the reference of Python {python}"
    print(f"{demo.CHOICE}, {read}, {args.greedy} greedy tokens", flush=True)
    print("| | perplexity | same most likely token | KL, nats | greedy tokens as defined |")
    print("| --- | ---: | ---: | ---: | ---: |")
    print(f"| bfloat16 | {perplexity(base):.2f} | | | |", flush=True)
    for activations in MODES:
        model = copy.deepcopy(bf16)
        package.models.quantize_model_(model, activations=activations)
        row(f'`activations="{activations}"`', model)
    static_of = calibrated(bf16, tokenizer)
    # It came out of another format's file.
    bf16.hf_quantizer, bf16._weight_conversions = None, None
    vars(bf16.config).pop("quantization_config", None)
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as folder:
            tiny_checkpoints.write(bf16, Path(folder), name, static_of)
            with package.models.fp8_checkpoints():
                model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16").eval()
        model.to(demo.DEVICE)
        package.models.quantize_model_(model)
        row(f"checkpoint: {name}", model)
    return 0


if __name__ == "__main__":
    sys.exit(main())
