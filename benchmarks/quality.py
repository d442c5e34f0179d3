"""What FP8 costs SmolLM2-135M-Instruct in accuracy: each mode, and each checkpoint format; or the
cache of keys and values.

    python benchmarks/quality.py            # prints the table of docs/results/models.md
    python benchmarks/quality.py --write    # saves it to results/tables, and puts it there
    python benchmarks/quality.py --caches [--write]    # that of docs/kernels/attention_journal.md

Read are pages of Python's own language reference, as pydoc ships them. Predictions after each token
are compared with bfloat16's. Then each model continues a prompt greedily, and its definition, with
linears that the reference computes in float64 from the same FP8 numbers, is asked for each of those
tokens.

Caches are read in windows of some contexts: all of a window's queries attend to what the cache
holds. The model stays in bfloat16. A scale a head is its largest key or value of another text, by
448.
"""

import argparse
import copy
import math
import platform
import sys
import tempfile
from pathlib import Path
from pydoc_data import topics

import torch
from kernels import Mode, kernelize, register_kernel_mapping
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / name) for name in ("tools", "tests", "examples", "benchmarks")]
import demo  # noqa: E402
import load  # noqa: E402
import pages  # noqa: E402
import tables  # noqa: E402
import tiny_checkpoints  # noqa: E402
from tiny_models import quantizing_inputs  # noqa: E402

PAGE = ROOT / "docs" / "results" / "models.md"
HEADER = ["", "perplexity", "same most likely token", "KL, nats", "greedy tokens as defined"]
CACHES = (
    "quality_caches",
    ROOT / "docs" / "kernels" / "attention_journal.md",
    ["cache", "context", "perplexity", "same most likely token", "KL, nats"],
)
CONTEXTS = (512, 1024, 2048)

PAGES = ("assignment", "class", "exceptions", "for", "import", "lambda", "try", "while")
PROMPT = "Write a short story about a river, a mill and a miller who cannot sleep."
MODES = ("dynamic", "none")
FORMATS = (
    "finegrained, blocks",
    "finegrained, tensor",
    "finegrained, static",
    "FBGEMM",
    "compressed-tensors, channel, dynamic",
    "compressed-tensors, tensor, dynamic",
    "compressed-tensors, tensor, static",
    "Quark, static",
    "torchao, rows",
)


def text(pages=PAGES):
    return "\n\n".join(topics.topics[page] for page in pages)


def calibrated(model, ids):
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
        model(ids)
    for hook in hooks:
        hook.remove()
    return lambda name: seen[name] / 448


def of_format(package, bf16, name, static_of):
    """The model out of a checkpoint of that format."""
    if name == "torchao, rows":  # what torchao makes of a model that is loaded
        model = copy.deepcopy(bf16)
        tiny_checkpoints.to_torchao_(model, inputs=True)
        return model
    with tempfile.TemporaryDirectory() as folder:
        tiny_checkpoints.write(bf16, Path(folder), name, static_of)
        with package.models.fp8_checkpoints():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype="bfloat16")
    return model.eval().to(demo.DEVICE)


@torch.no_grad()
def predictions(model, ids):
    return model(ids).logits[0, :-1].float().log_softmax(-1)


@torch.no_grad()
def greedy_agreement(model, definition, inputs, count):
    """Share of a greedy continuation's tokens that the definition would have chosen, too."""
    out = model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    start = inputs["input_ids"].shape[1]
    wanted = definition(out).logits[0, start - 1 : -1].argmax(-1)
    return (wanted == out[0, start:]).float().mean().item()


def table(package, tokens, greedy):
    bf16, tokenizer = demo.load_model()
    ids = tokenizer(text(), return_tensors="pt")["input_ids"][:, :tokens].to(demo.DEVICE)
    sample = tokenizer(demo.TEXT, return_tensors="pt")["input_ids"].to(demo.DEVICE)
    inputs = demo.chat(tokenizer, PROMPT)
    base = predictions(bf16, ids)
    rows = []

    def show(*cells):
        rows.append(cells)
        print(*cells, sep=" | ", file=sys.stderr, flush=True)

    def perplexity(log_p):
        return math.exp(-log_p.gather(1, ids[0, 1:, None]).mean().item())

    def row(name, model, **arguments):
        report = package.models.quantize_model_(model, **arguments)
        definition = quantizing_inputs(package, model)
        kernelize(model, mode=Mode.INFERENCE)
        log_q = predictions(model, ids)
        top1 = (log_q.argmax(-1) == base.argmax(-1)).float().mean().item()
        kl = (base.exp() * (base - log_q)).sum(-1).mean().item()
        same = greedy_agreement(model, definition, inputs, greedy)
        show(name, f"{perplexity(log_q):.2f}", f"{top1:.1%}", f"{kl:.4f}", f"{same:.1%}")
        return report

    show("bfloat16", f"{perplexity(base):.2f}", "", "", "")
    for activations in MODES:
        row(f'`activations="{activations}"`', copy.deepcopy(bf16), activations=activations)
    static_of = calibrated(bf16, sample)
    # It came out of another format's file.
    bf16.hf_quantizer, bf16._weight_conversions = None, None
    vars(bf16.config).pop("quantization_config", None)
    for name in FORMATS:
        report = row(name, of_format(package, bf16, name, static_of))
        assert not report.converted, "adopted, with the checkpoint's own values"
    return rows


# ---- caches of keys and values


@torch.no_grad()
def cached_predictions(model, ids, cache):
    return model(ids, past_key_values=cache).logits[0, :-1].float().log_softmax(-1)


@torch.no_grad()
def largest_of_heads(model, ids):
    """Of each layer the largest magnitudes of keys and of values, ``[KV heads]``."""
    cache = DynamicCache(config=model.config)
    model(ids, past_key_values=cache)
    return [
        [states.float().abs().amax((0, 2, 3)) for states in (layer.keys, layer.values)]
        for layer in cache.layers
    ]


def cache_table(package, tokens):
    model, tokenizer = demo.load_model()
    package.models.use_attention(model)
    ids = tokenizer(text(tuple(topics.topics)), return_tensors="pt")["input_ids"][:, :tokens]
    largest = largest_of_heads(
        model, tokenizer(demo.TEXT, return_tensors="pt")["input_ids"].to(demo.DEVICE)
    )
    fp8 = {"FP8, scales of 1": None, "FP8, a scale a head": largest}

    def set_scales(found):
        for layer, of_layer in zip(model.model.layers, found or [[None] * 2] * 99, strict=False):
            for name, most in zip(("k_scale", "v_scale"), of_layer, strict=True):
                scale = None if most is None else most / torch.finfo(torch.float8_e4m3fn).max
                layer.self_attn.register_buffer(name, scale, persistent=False)

    def measured(context):
        """Of bfloat16 and each FP8 cache: loss, share of the same choice and KL, of each token."""
        sums = {name: torch.zeros(3, dtype=torch.float64) for name in ("bfloat16", *fp8)}
        windows = ids.to(demo.DEVICE).split(context, dim=1)
        for window in windows:
            cache = StaticCache(config=model.config, max_cache_len=context)
            base = cached_predictions(model, window, cache)
            for name in sums:
                log_q = base
                if name in fp8:
                    set_scales(fp8[name])
                    cache = package.models.fp8_static_cache(model, context)
                    log_q = cached_predictions(model, window, cache)
                loss = -log_q.gather(1, window[0, 1:, None]).mean().item()
                same = (log_q.argmax(-1) == base.argmax(-1)).double().mean().item()
                kl = (base.exp() * (base - log_q)).sum(-1).mean().item()
                sums[name] += torch.tensor([loss, same, kl], dtype=torch.float64) / len(windows)
        return sums

    rows = []
    for context in CONTEXTS:
        for name, (loss, same, kl) in measured(context).items():
            beside = (f"{same:.1%}", f"{kl:.4f}") if name in fp8 else ("", "")
            rows.append([name, f"{context:,}", f"{math.exp(loss):.3f}", *beside])
            print(*rows[-1], sep=" | ", file=sys.stderr, flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--caches", action="store_true", help="those of keys and values instead")
    parser.add_argument(
        "--tokens", type=int, help="of the text that is read: 512, with --caches 16,384"
    )
    parser.add_argument("--greedy", type=int, default=200, help="tokens of the continuation")
    parser.add_argument("--write", action="store_true", help="into the page")
    args = parser.parse_args()
    package = load.load(demo.CHOICE)
    python = ".".join(platform.python_version_tuple()[:2])
    of_text = f"{demo.CHOICE}; {{}} tokens of the reference of Python {python}"
    if args.caches:
        tokens, name, page, header = args.tokens or 16384, *CACHES
        rows = cache_table(package, tokens)
        source = f"python benchmarks/quality.py --caches --write; {of_text.format(tokens)}"
    else:
        register_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False)
        tokens, name, page, header = args.tokens or 512, "quality", PAGE, HEADER
        rows = table(package, tokens, args.greedy)
        source = f"python benchmarks/quality.py --write; {of_text.format(tokens)}"
        source += f", {args.greedy} greedy tokens"
    if args.write:
        tables.save_printed(name, source, header, rows)
        page.write_text(pages.rendered(page.read_text()))
    else:
        print(tables.markdown(header, rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
