"""vLLM's decoding step with its attention backends and with ours (integrations/vllm): a Llama with
the layers of the 8-billion one, 8 of them, of random weights, in bfloat16.

    python benchmarks/vllm_attention.py [--sides CUSTOM,FLASH_ATTN,FLASHINFER] [--caches auto,fp8]
        [--batches 1,8,32] [--contexts 512,8192] [--quick] [--limit SECONDS] [--save FILE.json]

Needs a GPU, and a Python with vLLM, the plugin and the kernels: in LOCAL_KERNELS, or in build/ of
this checkout. CUSTOM is ours. Each side is a process of its own, one after the other; what does not
start, or is not done when --limit is over, is said and left out.

A step's time is that of a generation of 65 tokens less that of one token, by 64; the prompts' pages
stay cached between runs, so no prompt is computed in it. Then one generation under the profiler:
microseconds a step of kernels that attention has. Tokens: greedy answers to prompts of several
lengths, one batch of prompts and decoding steps together, compared with the first side of the same
cache; random weights make near ties, so the gap of log-probabilities at the first step that differs
says whether it is one. --quick takes two narrow layers, to see that it works.
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
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 8, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32768, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 16384, "rope_theta": 500000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QUICK = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 512,
}  # fmt: skip
STEPS, RUNS = 64, 5
# 70 tokens and more, a page that is not full, one token.
ANSWERED = [[5, 17, 300, 42], [7] * 70, [11], [(37 * i) % 500 + 3 for i in range(333)]]
OF_ATTENTION = r"attention_(decode|join|rows)|attn|flash|fmha|Batch\w*Paged|reshape_and_cache"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sides", default="CUSTOM,FLASH_ATTN,FLASHINFER")
    parser.add_argument("--caches", default="auto,fp8")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--contexts", default="512,8192")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--limit", type=float, default=540)
    parser.add_argument("--save")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        measure(*options.child, options)
        return
    until, results = time.time() + options.limit, []
    for cache in options.caches.split(","):
        for side in options.sides.split(","):
            result = run(side, cache, until - time.time())
            print(line(result), flush=True)
            results.append(result)
            if options.save:
                Path(options.save).write_text(json.dumps(results))
    for result in results:
        first = next(r for r in results if r["cache"] == result["cache"])
        if result is not first and "tokens" in result and "tokens" in first:
            print(f"{result['side']}, {result['cache']}: {agreement(result, first)}")


def run(side: str, cache: str, seconds: float) -> dict:
    result = {"side": side, "cache": cache}
    if seconds < 30:
        return result | {"not measured": "no time was left"}
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        environment = {
            "LOCAL_KERNELS": f"org/rocm-kernels={ROOT}", "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
            **os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RESULT": file.name,
            "ROCM_KERNELS_VLLM_OFF": "fp8_linear,fp8_block_linear,weight_only,experts,swiglu,"
            "swiglu_pass,norm,skinny",
        }  # fmt: skip
        command = [sys.executable, __file__, *sys.argv[1:], "--child", side, cache]
        try:
            done = subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", timeout=seconds,
            )  # fmt: skip
            end = f"ended with {done.returncode}:\n" + "\n".join(done.stdout.splitlines()[-25:])
        except subprocess.TimeoutExpired:
            end = "ran out of time"
        text = Path(file.name).read_text()
    if not text:
        return result | {"not measured": end}
    return result | json.loads(text)


def line(result: dict) -> str:
    name = f"{result['side']}, cache {result['cache']}"
    if "steps" not in result:
        return f"NOT MEASURED {name}: {result['not measured']}"
    text = [f"{name} ({result['backend']}, {result['gpu']}), ready after {result['ready']:.0f} s"]
    for cell, ms in result["steps"].items():
        spread = result["spread"][cell]
        text.append(f"  {cell}: {ms:.3f} ms a step (spread {spread:.0%})")
        for kernel, us, calls in result["kernels"].get(cell, []):
            text.append(f"      {us:8.1f} us in {calls:.1f} calls a step: {kernel}")
    return "\n".join(text)


def agreement(result: dict, first: dict) -> str:
    """How many tokens of each answer are the first side's, and by how much the next was lost."""
    equal, gaps, largest = [], [], 0.0
    answers = (result["tokens"], first["tokens"], result["logprobs"], first["logprobs"])
    for ours, theirs, mine, other in zip(*answers, strict=True):
        count = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), None)
        equal.append(len(ours) if count is None else count)
        for a, b in zip(mine[:count], other[:count], strict=True):
            largest = max([largest, *(abs(a[t] - b[t]) for t in a.keys() & b.keys())])
        if count is not None:
            gap = other[count][str(theirs[count])] - other[count].get(str(ours[count]), -99)
            gaps.append(round(gap, 3))
    return (
        f"tokens equal to {first['side']}'s: {equal} of {len(ours)}; log-probabilities up to there "
        f"differ by {largest:.3f} at most; those that differ were lost by {gaps}"
    )


# ---- one side, in a process of its own -----------------------------------------------------------


def measure(side: str, cache: str, options) -> None:
    import torch
    from vllm import LLM, SamplingParams

    begun = time.perf_counter()
    random_weights()
    contexts = [int(n) for n in options.contexts.split(",")]
    batches = [int(n) for n in options.batches.split(",")]
    shape = LLAMA | (QUICK if options.quick else {})
    steps, runs = (8, 2) if options.quick else (STEPS, RUNS)
    tokens = max(batches) * (max(contexts) + 128)
    bytes_a_token = 4 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * 128
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(shape))
        llm = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=max(max(contexts) + 128, 512), max_num_seqs=max(batches),
            max_num_batched_tokens=8192, kv_cache_memory_bytes=tokens * bytes_a_token + (1 << 30),
            kv_cache_dtype=cache, attention_config={"backend": side}, enable_prefix_caching=True,
            compilation_config={"cudagraph_capture_sizes": batches},
        )  # fmt: skip
        result = answers(llm, SamplingParams)
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        backend = next(iter(layers.values())).attn_backend
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
        result |= {"backend": backend.__name__, "gpu": gpu, "ready": time.perf_counter() - begun}
        result |= {"steps": {}, "spread": {}, "kernels": {}}
        for context in contexts:
            for batch in batches:
                cell = f"batch {batch}, context {context}"
                prompts = [
                    {"prompt_token_ids": [(7 * i + 13 * j) % 500 + 3 for j in range(context)]}
                    for i in range(batch)
                ]

                def generate(count, prompts=prompts):
                    parameters = SamplingParams(
                        temperature=0, max_tokens=count, ignore_eos=True, detokenize=False
                    )
                    start = time.perf_counter()
                    llm.generate(prompts, parameters, use_tqdm=False)
                    return time.perf_counter() - start

                generate(1 + steps)  # the prompts' pages are there from here on
                generate(1)
                times = [1e3 * (generate(1 + steps) - generate(1)) / steps for _ in range(runs)]
                result["steps"][cell] = statistics.median(times)
                result["spread"][cell] = (max(times) - min(times)) / min(times)
                if torch.cuda.is_available():
                    result["kernels"][cell] = profiled(lambda g=generate: g(1 + steps), 1 + steps)
                write(result)
    os._exit(0)  # vLLM's own end may take longer than all of this


def answers(llm, SamplingParams) -> dict:
    parameters = SamplingParams(
        temperature=0, max_tokens=16, logprobs=5, ignore_eos=True, detokenize=False
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in ANSWERED]
    outputs = [answer.outputs[0] for answer in llm.generate(prompts, parameters, use_tqdm=False)]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [{token: p.logprob for token, p in step.items()} for step in output.logprobs]
            for output in outputs
        ],
    }


def profiled(generate, steps: int) -> list:
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        generate()
        torch.cuda.synchronize()
    found: dict[str, list] = {}
    for event in profiler.events():
        if event.device_time_total and re.search(OF_ATTENTION, event.name, re.IGNORECASE):
            entry = found.setdefault(event.name[:90], [0.0, 0])
            entry[0] += event.device_time_total / steps
            entry[1] += 1 / steps
    return sorted(([name, *entry] for name, entry in found.items()), key=lambda e: -e[1])[:5]


def random_weights() -> None:
    """Has vLLM make the same random weights on all sides, of a size that keeps activations near 1:
    its own dummies are so small that no key is preferred to another."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    count = [0]

    def initialize(param, *_, **__):
        if not torch.is_floating_point(param) or param.device.type == "meta":
            return
        count[0] += 1
        generator = torch.Generator(device=param.device).manual_seed(count[0])
        if param.dim() < 2:
            param.data.fill_(1.0)
        else:
            param.data.normal_(0, param.shape[-1] ** -0.5, generator=generator)

    dummy_loader.initialize_single_dummy_weight = initialize


def write(result: dict) -> None:
    """Writes the result at once, so that a side that runs out of time has what it measured
    before."""
    Path(os.environ["RESULT"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
