"""How long ``quantize_model_`` takes: seconds a billion parameters, of a random model.

    python benchmarks/getting_ready.py [--layers 4] [--hidden 2048] [--experts 8]

A Llama of Llama-3's proportions, or a Mixtral. Its weights in bfloat16 are quantised by
``quantize_model_`` whole; and, beside that, alone, by this package's op and by its definition in
plain torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig

sys.path.append(str(Path(__file__).resolve().parent.parent / "tools"))
import load

ROUNDS = 3


def model_of(layers: int, hidden: int, experts: int, device: torch.device) -> torch.nn.Module:
    shape = {
        "hidden_size": hidden,
        "intermediate_size": hidden * 7 // 2,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 128,
        "num_key_value_heads": hidden // 512,
        "vocab_size": 1024,
    }
    config = MixtralConfig(**shape, num_local_experts=experts) if experts else LlamaConfig(**shape)
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def weights_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """What is quantised of a layer, as matrices."""
    found = []
    for name, parameter in model.model.layers.named_parameters():
        if parameter.dim() > 1 and "router" not in name and ".gate.weight" not in name:
            found += parameter.detach().reshape(-1, parameter.shape[-1]).split(2**15)
    return found


def seconds(call: Callable[[], object], device: torch.device) -> float:
    started = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--experts", type=int, default=0, help="a Mixtral of so many a layer")
    arguments = parser.parse_args()
    choice = load.choose()
    package, device = load.load(choice), choice.device
    least: dict[str, float] = {}
    for _ in range(ROUNDS):  # in turns: a slow moment of the machine meets all
        model = model_of(arguments.layers, arguments.hidden, arguments.experts, device)
        weights = weights_of(model)
        billions = sum(weight.numel() for weight in weights) / 1e9
        calls = {
            "the definition": lambda w=weights: [package.reference.quantize_fp8(x) for x in w],
            "the op": lambda w=weights: [package.quantize_fp8(x) for x in w],
            "quantize_model_": lambda m=model: package.models.quantize_model_(m),
        }
        for name, call in calls.items():
            took = seconds(call, device) / billions
            least[name] = min(took, least.get(name, took))
        del model, weights, calls
    table = Table(
        "", "s a billion parameters", title=f"{billions:.2f} billion parameters, {choice}"
    )
    for name, took in least.items():
        table.add_row(name, f"{took:.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
