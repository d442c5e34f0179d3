"""Decode steps of models of many families, beside the bytes that they read.

    python benchmarks/families.py [--models qwen3-14b,gemma2-9b] [--batches 1,8] [--context 512]
                                  [--save]

Shapes are the published models', with 12 layers of random weights: what a layer takes is a whole
model's, and its output embedding weighs more. FP8 linears, output embedding and cache. A step is
what a token takes in generate's loop; its floor is that of generate.py. With --save a table says
both, and how the decoder layers run: one kernel of all, or launches and why. Tiny models run where
there is no GPU: to see that it works.
"""

from __future__ import annotations

import argparse
import datetime
import gc

import end_to_end
import generate
import tables
import torch
import transformers

LAYERS = 12
# Family in transformers, hidden and intermediate size, query heads and KV heads, and the rest.
MODELS = {
    "llama-1b": ("Llama", 2048, 8192, 32, 8, {"head_dim": 64}),
    "qwen2.5-0.5b": ("Qwen2", 896, 4864, 14, 2, {}),
    "llama-3b": ("Llama", 3072, 8192, 24, 8, {}),
    "llama-70b": ("Llama", 8192, 28672, 64, 8, {}),
    "qwen2.5-7b": ("Qwen2", 3584, 18944, 28, 4, {}),
    "qwen3-14b": ("Qwen3", 5120, 17408, 40, 8, {"head_dim": 128}),
    "mistral-nemo": ("Mistral", 5120, 14336, 32, 8, {"head_dim": 128, "sliding_window": None}),
    "gemma2-9b": ("Gemma2", 3584, 14336, 16, 8, {"head_dim": 256}),
    "phi4-14b": ("Phi3", 5120, 17920, 40, 10, {"pad_token_id": 0}),
    "phi4-mini": ("Phi3", 3072, 8192, 24, 8, {
        "pad_token_id": 0, "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        },
    }),
    "glm-9b": ("Glm", 4096, 13696, 32, 2, {"head_dim": 128, "pad_token_id": 0}),
    "glm4-9b": ("Glm4", 4096, 13696, 32, 2, {"head_dim": 128, "pad_token_id": 0}),
    "granite-8b": ("Granite", 4096, 12800, 32, 8, {
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22, "logits_scaling": 16.0,
    }),
    "olmo2-7b": ("Olmo2", 4096, 11008, 32, 32, {}),
    "starcoder2-7b": ("Starcoder2", 4608, 18432, 36, 4, {}),
    "cohere-8b": ("Cohere", 4096, 14336, 32, 8, {"eos_token_id": 2}),
}  # fmt: skip


def model_of(name: str, device: torch.device) -> torch.nn.Module:
    family, hidden, intermediate, heads, kv_heads, others = MODELS[name]
    shape = {
        "hidden_size": hidden, "intermediate_size": intermediate, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 128256, "tie_word_embeddings": False,
        "num_hidden_layers": LAYERS, "max_position_embeddings": 8192, **others,
    }  # fmt: skip
    if device.type != "cuda":
        shape.update(end_to_end.TINY, num_hidden_layers=2)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**shape)
    with device:
        model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    model.generation_config.eos_token_id = None
    return end_to_end.with_kernels(model.eval().requires_grad_(False), False, True)


def how(layers: dict[str, int]) -> str:
    if not layers or list(layers) == ["decode_layers"]:
        return "one kernel" if layers else "launches"
    return f"launches: {next(name for name in layers if name != 'decode_layers')}"


@torch.inference_mode()
def measure(options: argparse.Namespace) -> list[list[str]]:
    package = end_to_end.load.load(end_to_end.load.choose())
    device = end_to_end.load.choose().device
    name_of_device = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    rate, rows = generate.read_rate(device), []
    cell = argparse.Namespace(launches=False, kernels=False, timeline=False, loop=False)
    for name in options.models.split(","):
        model = model_of(name, device)
        for batch in map(int, options.batches.split(",")):
            found = generate.measure_cell(model, "fp8", batch, options.context, rate, cell, False)
            step, floor = 1e3 * batch / found["tokens_per_s"], found["floor_ms"]
            layers = package.models.decode_steps(model).layers
            rows.append([
                f"{name_of_device}, measured: {name}, batch {batch}, context {options.context}",
                f"{step:.2f}", f"{floor:.2f}", f"{step / floor:.2f}", how(layers),
            ])  # fmt: skip
            print(*rows[-1], sep=" | ", flush=True)
        del model
        gc.collect()
    if options.save:
        made = f"{name_of_device}, torch {torch.__version__}, {datetime.date.today()}"
        source = f"python benchmarks/families.py --save\n{made}"
        header = [f"{LAYERS} layers, FP8 linears, head and cache", "a step, ms", "floor, ms",
                  "step / floor", "decoder layers"]  # fmt: skip
        tables.save_rows("decode_families", source, header, rows)
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--save", action="store_true", help="to results/tables")
    measure(parser.parse_args(arguments))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
