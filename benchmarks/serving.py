"""A step of decoding with and without these kernels, and where its time goes, for an FP8 Llama of 8
billion random weights; inside vLLM vllm_step.py times it.

    python benchmarks/serving.py [--batches 1,8,32,64] [--quick] [--save FILE.json]

The loop is step_loop.py's, with transformers before and our kernels after. Each side is a process
of its own. --quick takes a model of two narrow layers and short runs: to see that it works, on a
CPU too.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

from result_text import result_text

QUICK_STEPS = 8

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


def work(side: str, batches: list[int], quick: bool) -> list[dict]:
    """One side, in a process of its own: the results of each batch."""
    import end_to_end
    import step_loop

    shape = end_to_end.MODELS["llama-8b"].shape | (QUICK if quick else LLAMA_8B)
    if quick:
        end_to_end.WARM_UP, end_to_end.STEPS = 1, QUICK_STEPS
    return step_loop.work(side, batches, shape, class_of)


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


def run(side: str) -> list[dict]:
    """Runs one side in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--work", side]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.search(r"^RESULTS (.*)$", done.stdout, re.MULTILINE)
    if done.returncode or not found:
        sys.exit(f"{done.stdout[-3000:]}{done.stderr[-3000:]}\n{side} ended with {done.returncode}")
    return json.loads(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batches", default="1,8,32,64")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save", type=Path, metavar="FILE.json")
    parser.add_argument("--work", metavar="SIDE", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        batches = [int(batch) for batch in options.batches.split(",")]
        print("RESULTS " + json.dumps(work(options.work, batches, options.quick)), flush=True)
        return 0
    import step_loop

    results = {side: run(side) for side in step_loop.SIDES}
    print(tables(results))
    if options.save:
        options.save.write_text(result_text(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
