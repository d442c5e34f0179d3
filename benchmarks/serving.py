"""vLLM with and without the plugin: time of a decode step, tokens a second, and where a step's time
goes, for an FP8 Llama of 8 billion random weights.

    python benchmarks/serving.py [--batches 1,8,32,64] [--format fp8|channel|block] [--quick]

To be run with the Python of an environment that has vLLM and the plugin (integrations/vllm). As in
the source of these kernels: prompts of one token, 128 tokens each, the median of 30 runs; then one
run more under the profiler, its device time by class of kernel. Each side is a process of its own.
--quick takes a model of two narrow layers and two short runs: to see that it works, on a CPU too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SIDES = {"vLLM": "all", "with rocm-kernels": ""}  # what ROCM_KERNELS_VLLM_OFF says
RUNS, TOKENS = 30, 128
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
    ("GEMM", r"gemm|matmul|cutlass|cublas|hipblas|splitk|skinny|mfma|wgmma|nvjet|_mm_|Cijk_"),
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


def work(model: str, batches: list[int], runs: int, tokens: int) -> None:
    """One side, in a process of its own; says its results as JSON."""
    import torch
    from vllm import LLM, SamplingParams

    if not torch.cuda.is_available():  # as in integrations/vllm/tests/serve.py, which says why
        torch.cpu._is_amx_tile_supported = lambda: False
    llm = LLM(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=256,
        max_num_seqs=max(batches),
        enforce_eager=not torch.cuda.is_available(),
        compilation_config={
            "custom_ops": ["none", "+quant_fp8"],
            "pass_config": {"fuse_norm_quant": True, "fuse_act_quant": True},
        },
    )
    parameters = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    for batch in batches:
        prompts = [{"prompt_token_ids": [1 + index]} for index in range(batch)]

        def generate(prompts=prompts):
            llm.generate(prompts, parameters, use_tqdm=False)

        generate()  # warm
        seconds = []
        for _ in range(runs):
            start = time.perf_counter()
            generate()
            seconds.append(time.perf_counter() - start)
        step = statistics.median(seconds) / tokens
        result = {"batch": batch, "step_ms": 1e3 * step, "tokens_per_s": batch / step}
        print("RESULT " + json.dumps(result | {"classes": profiled(generate, tokens)}), flush=True)


def profiled(generate, tokens: int) -> dict[str, float]:
    """Device time of a step by class, in microseconds; empty without a GPU."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--format", choices=("fp8", "channel", "block"), default="channel")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--work", metavar="MODEL", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    batches = [int(batch) for batch in arguments.batches.split(",")]
    if arguments.work:
        lengths = (QUICK_RUNS, QUICK_TOKENS) if arguments.quick else (RUNS, TOKENS)
        work(arguments.work, batches, *lengths)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        shape = QUICK if arguments.quick else LLAMA_8B
        write_model(Path(folder), shape, arguments.format)
        for side, off in SIDES.items():
            # In one process, where the profiler sees the kernels.
            environment = {"ROCM_KERNELS_VLLM_OFF": off, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
            command = [sys.executable, __file__, *sys.argv[1:], "--work", folder]
            done = subprocess.run(
                command, env={**os.environ, **environment}, capture_output=True, text=True
            )
            if done.returncode:
                print(done.stdout[-3000:] + done.stderr[-3000:], file=sys.stderr)
                print(f"{side} ended with {done.returncode}", file=sys.stderr)
                return 1
            for line in re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE):
                result = json.loads(line)
                print(
                    f"{side:18} batch {result['batch']:3}: {result['step_ms']:8.2f} ms a step, "
                    f"{result['tokens_per_s']:8.0f} tokens/s"
                )
                for name, time_us in result["classes"].items():
                    print(f"{'':18} {name:14} {time_us:10.1f} us")
    return 0


if __name__ == "__main__":
    sys.exit(main())
