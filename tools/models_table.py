"""The table of docs/results/models.md: families of models x FP8 checkpoints, and what runs of each.

    python tools/models_table.py            # prints it
    python tools/models_table.py --write    # puts it into docs/results/models.md

Each cell is a tiny random model: written in the format, loaded within ``fp8_checkpoints``,
quantised, kernelized, and compared with its own forwards on linears that the reference computes.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from kernels import Mode, kernelize, use_kernel_mapping
from transformers import AutoModelForCausalLM

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT / name) for name in ("tools", "tests")]
import load  # noqa: E402
import marked  # noqa: E402
from test_families import FAMILIES, tiny  # noqa: E402
from tiny_checkpoints import write  # noqa: E402
from tiny_models import dequantized, quantizing_inputs, tokens  # noqa: E402

PAGE = ROOT / "docs" / "results" / "models.md"
BEGIN, END = "<!-- tools/models_table.py -->\n", "<!-- end -->\n"

ROWS = ("llama", "mistral", "qwen2", "qwen3", "smollm3", *FAMILIES)
COLUMNS = {
    "16 bits": None,
    "finegrained, blocks": "finegrained, blocks",
    "finegrained, static": "finegrained, static",
    "compressed-tensors, channel": "compressed-tensors, channel, dynamic",
    "compressed-tensors, static": "compressed-tensors, tensor, static",
    "Quark": "Quark, static",
    "Quark, per token": "Quark, per token",
    "ModelOpt": "ModelOpt, static",
    "AutoFP8": "AutoFP8, dynamic",
    "FBGEMM": "FBGEMM",
}
# Families whose checkpoints have experts in FP8, too: GPT-OSS's are MXFP4.
IN_FP8 = ("mixtral", "qwen3_moe", "deepseek_v3", "llama4_text")
# Widths of whole blocks, so that those of q, k, v, gate and up can be joined.
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4}
OWN = {
    "smollm3": {"pad_token_id": 0},
    "deepseek_v3": {"num_key_value_heads": 4, "q_lora_rank": 128},
    **{name: {"head_dim": 64} for name, own in FAMILIES.items() if "head_dim" in own},
}


@torch.no_grad()
def cell(package, family, checkpoint):
    """What of a family's model in a format is replaced, if it computes what it should."""
    torch.manual_seed(0)
    model = tiny(family, **WIDE, **OWN.get(family, {}))
    if checkpoint is not None:
        with tempfile.TemporaryDirectory() as folder:
            write(model, Path(folder), checkpoint, experts=family in IN_FP8)
            with package.models.fp8_checkpoints():
                model = AutoModelForCausalLM.from_pretrained(
                    folder, dtype=torch.float32, attn_implementation="eager"
                ).eval()
    package.models.quantize_model_(model, activations="dynamic" if checkpoint is None else None)
    ids = tokens(2, 5)
    expected = quantizing_inputs(package, model)(ids).logits
    noise = (expected - dequantized(package, model)(ids).logits).abs().mean()
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE)
    error = (model(ids).logits - expected).abs().mean()
    if not error < 0.1 * noise:
        return f"wrong: {error / noise:.2f} of the noise"
    replaced = Counter()
    for (_, layer), count in package.models.kernelized_layers(model).items():
        replaced[layer] += count
    layers = replaced["LlamaDecoderLayer"] + replaced["GemmaDecoderLayer"]
    if layers < len(model.model.layers):
        return "linears"
    return "whole layers" if replaced["SwiGLUMLP"] + replaced["Experts"] >= layers else "attention"


def table(package, rows=ROWS):
    lines = ["| | " + " | ".join(COLUMNS) + " |", "| --- |" + " --- |" * len(COLUMNS)]
    for family in rows:
        cells = [cell(package, family, checkpoint) for checkpoint in COLUMNS.values()]
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"into {PAGE.relative_to(ROOT)}")
    arguments = parser.parse_args()
    made = table(load.load(load.choose()))
    if arguments.write:
        marked.replace(PAGE, BEGIN, END, made)
    else:
        print(made, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
