"""A server with and without these kernels: time of a decode step, tokens a second, and where a
step's time goes, for an FP8 Llama of 8 billion random weights.

    python benchmarks/serving.py [--batches 1,8,32,64] [--format fp8|channel|block] [--quick]
                                 [--loop vllm|steps] [--contexts 512,8192] [--save FILE.json]

The loop is vLLM's where the Python that runs this has vLLM and the plugin (integrations/vllm): as
in the source of these kernels, prompts of one token, 128 tokens each, the median of 30 runs; then
one run more under the profiler, its device time by class of kernel. Elsewhere it is step_loop.py's,
our own, with transformers before and our kernels after. Each side is a process of its own. --quick
takes a model of two narrow layers and short runs: to see that it works, on a CPU too.

With --contexts a prompt of vLLM's has as many tokens, whose pages stay cached, and a step is the
time of the tokens behind the first, the median of 5 runs: what generate.py shows beside its own
from results/NAME_vllm_decode.json.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from result_text import result_text

ROOT = Path(__file__).resolve().parent.parent
SIDES = {"vLLM": "all", "vLLM with rocm-kernels": ""}  # what ROCM_KERNELS_VLLM_OFF says
RUNS, TOKENS = 30, 128
CONTEXT_RUNS = 5
QUICK_RUNS, QUICK_TOKENS = 2, 8

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
QUICK = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}

# The classes of the source's breakdown; a kernel belongs to the first whose words its name has.
CLASSES = (
    ("communication", r"all_?reduce|all_?gather|reduce_scatter|nccl|rccl|cross_device"),
    ("SwiGLU", r"silu|swiglu|act_and_mul"),
    ("RMSNorm", r"rms_?norm|layer_?norm"),
    ("quantisation", r"scaled_fp8_quant|per_token_group_quant|quantize_fp8|fp8_quant"),
    ("attention", r"attention|attn|flash|fmha|rotary|rope|reshape_and_cache|kv_cache"),
    ("GEMM", r"gemm|matmul|cutlass|cublas|hipblas|splitk|skinny|mfma|wgmma|nvjet|_mm(_|$)|Cijk_"),
)


def class_of(kernel: str) -> str:
    """The class of a kernel of that name."""
    for name, words in CLASSES:
        if re.search(words, kernel, re.IGNORECASE):
            return name
    return "other"


def breakdown(microseconds: dict[str, float]) -> dict[str, float]:
    """Time by kernel to time by class, the classes in the order of CLASSES, then the rest."""
    total = {name: 0.0 for name, _ in CLASSES} | {"other": 0.0}
    for kernel, time_us in microseconds.items():
        total[class_of(kernel)] += time_us
    return total


def write_model(folder: Path, shape: dict, quantization: str) -> None:
    """A config; vLLM makes random weights for it (`load_format="dummy"`)."""
    sys.path.append(str(ROOT / "integrations" / "vllm" / "tests"))
    import checkpoints

    name = {
        "fp8": "fp8 dynamic",
        "channel": "compressed-tensors channel, dynamic",
        "block": "fp8 block",
    }[quantization]
    config = checkpoints.MODELS["llama"] | checkpoints.COMMON | shape
    config["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    config["quantization_config"] = checkpoints.quantization_config("llama", name)
    (folder / "config.json").write_text(json.dumps(config))


def work_vllm(
    model: str, batches: list[int], contexts: list[int], runs: int, tokens: int
) -> list[dict]:
    """One side, in a process of its own: of each batch, and each context if there are such, its
    results."""
    import torch
    from vllm import LLM, SamplingParams

    if not torch.cuda.is_available():  # as in integrations/vllm/tests/serve.py, which says why
        torch.cpu._is_amx_tile_supported = lambda: False
    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=max([128, *contexts]) + 128,
        max_num_seqs=max(batches),
        enable_prefix_caching=bool(contexts),
        enforce_eager=not torch.cuda.is_available(),
        compilation_config={
            "custom_ops": ["none", "+quant_fp8"],
            "pass_config": {"fuse_norm_quant": True, "fuse_act_quant": True},
        },
    )
    results = []
    for batch, context in [(b, c) for b in batches for c in contexts or [0]]:
        prompts = [
            {"prompt_token_ids": [1 + (index + 13 * i) % 500 for i in range(context or 1)]}
            for index in range(batch)
        ]

        def generate(count=tokens, prompts=prompts):
            parameters = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
            )
            start = time.perf_counter()
            llm.generate(prompts, parameters, use_tqdm=False)
            return time.perf_counter() - start

        generate()  # warm
        if context:
            generate(1)
            seconds = [generate() - generate(1) for _ in range(runs)]
            step = statistics.median(seconds) / (tokens - 1)
        else:
            step = statistics.median(generate() for _ in range(runs)) / tokens
        result = {"batch": batch, "step_ms": 1e3 * step, "tokens_per_s": batch / step}
        if context:
            results.append({"context": context, **result})
        else:
            results.append(result | {"classes": profiled(generate, tokens)})
    return results


def work_steps(side: str, batches: list[int], quick: bool) -> list[dict]:
    """Times one side as work_vllm does, but in a loop of this project's own."""
    import end_to_end
    import step_loop

    shape = end_to_end.MODELS["llama-8b"].shape | (QUICK if quick else LLAMA_8B)
    if quick:
        end_to_end.WARM_UP, end_to_end.STEPS = 1, QUICK_TOKENS
    return step_loop.work(side, batches, shape, class_of)


def profiled(generate, tokens: int) -> dict[str, float]:
    """Device time of a step of vLLM's by class, in microseconds; empty without a GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate()
        torch.cuda.synchronize()
    times: dict[str, float] = {}
    for event in profiler.events():
        times[event.name] = times.get(event.name, 0.0) + event.device_time_total
    return {name: value / tokens for name, value in breakdown(times).items()}


def tables(results: dict[str, list[dict]]) -> str:
    """Markdown: the time of a step, then where it goes, side by side."""
    before, after = results
    lines = [
        "| batch | side | ms a step | tokens/s | x |",
        "| ---: | --- | ---: | ---: | ---: |",
    ]
    for first, *others in zip(*results.values(), strict=True):
        for side, row in zip(results, (first, *others), strict=True):
            ratio = first["step_ms"] / row["step_ms"]
            lines.append(
                f"| {row['batch']} | {side} | {row['step_ms']:.2f} | {row['tokens_per_s']:,.0f} | "
                f"{ratio:.2f} |"
            )
    names = [*(name for name, _ in CLASSES), "other"]
    shown = [n for n in names if any(row["classes"].get(n) for r in results.values() for row in r)]
    lines += ["", f"Microseconds of a step's kernels, {before} / {after}:", ""]
    lines += ["| batch | " + " | ".join([*shown, "all"]) + " |"]
    lines += ["| ---: |" + " ---: |" * (len(shown) + 1)]
    for rows in zip(*results.values(), strict=True):
        sums = [[row["classes"].get(n, 0.0) for n in shown] for row in rows]
        sums = [[*times, sum(times)] for times in sums]
        cells = (" / ".join(f"{times[i]:,.0f}" for times in sums) for i in range(len(shown) + 1))
        lines.append(f"| {rows[0]['batch']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def run(side: str, arguments: list[str], environment: dict[str, str]) -> list[dict]:
    """Runs one side in a process of its own."""
    command = [sys.executable, __file__, *arguments, "--work", side]
    # In one process, where the profiler sees the kernels.
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **environment}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = re.search(r"^RESULTS (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}\n{side} ended with {done.returncode}")
    return json.loads(found[1])


def device_name() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--format", choices=("fp8", "channel", "block"), default="channel")
    parser.add_argument("--loop", choices=("vllm", "steps"))
    parser.add_argument("--contexts", default="", help="tokens of vLLM's prompts")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    parser.add_argument("--work", metavar="SIDE", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    batches = [int(batch) for batch in options.batches.split(",")]
    if options.contexts and options.loop == "steps":
        parser.error("--contexts are of vLLM's loop, got --loop steps")
    loop = options.loop or ("vllm" if importlib.util.find_spec("vllm") else "steps")
    if options.work:
        if loop == "steps":
            results = work_steps(options.work, batches, options.quick)
        else:
            contexts = [int(context) for context in options.contexts.split(",") if context]
            runs = CONTEXT_RUNS if contexts else RUNS
            lengths = (QUICK_RUNS, QUICK_TOKENS) if options.quick else (runs, TOKENS)
            results = work_vllm(options.model, batches, contexts, *lengths)
        print("RESULTS " + json.dumps(results), flush=True)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), QUICK if options.quick else LLAMA_8B, options.format)
        arguments = [*sys.argv[1:], "--loop", loop, "--model", folder]
        if loop == "steps":
            import step_loop

            sides = {side: {} for side in step_loop.SIDES}
        else:
            sides = {side: {"ROCM_KERNELS_VLLM_OFF": off} for side, off in SIDES.items()}
        results = {side: run(side, arguments, variables) for side, variables in sides.items()}
    if options.contexts:
        results = {"device": device_name(), "model": "llama-8b", "sides": results}
        print(result_text(results))
    else:
        print(tables(results))
    if options.save:
        options.save.write_text(result_text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
