"""Serves checkpoints in this process and prints, as JSON, what each generated and what ran.

python serve.py CHECKPOINT... [--compile] [--count] [--reference] [--wrong=FACTOR] [--ranks]
    [--attention]
"""

import collections
import json
import sys
import types

import torch
import vllm._custom_ops
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.fusion import fused_act_quant

# vLLM's attention by AMX ended in an illegal instruction on the machine where this was written, in
# its own code (a tile that it had set up was not). Its other attention serves both sides here.
torch.cpu._is_amx_tile_supported = lambda: False


def scaled_fp8_quant(input, scale, *_, **__):
    """By one scale. vLLM brings the shards of a fused weight to one scale as it loads them, by an
    op that its CPU build has not got."""
    return (input.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


vllm._custom_ops.scaled_fp8_quant = scaled_fp8_quant


def reshape_and_cache_flash(key, value, key_cache, value_cache, slot_mapping, *_):
    """Of 16-bit pages. vLLM's op for its GPUs, which its CPU build has not got."""
    slots = slot_mapping[slot_mapping >= 0].long()
    place = slots // key_cache.shape[1], slots % key_cache.shape[1]
    key_cache[place] = key[: len(slot_mapping)][slot_mapping >= 0]
    value_cache[place] = value[: len(slot_mapping)][slot_mapping >= 0]


def take_attention() -> None:
    """Puts the plugin's attention in the place of vLLM's on the CPU, which takes no other."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    vllm._custom_ops.reshape_and_cache_flash = reshape_and_cache_flash
    ours = "rocm_kernels_vllm.attention.RocmKernelsAttention"
    register_backend(AttentionBackendEnum.CPU_ATTN, ours)


PROMPTS = [[5, 17, 300, 42], [7] * 70, [11, 400, 3, 250, 99, 8, 123]]
TOKENS = 8


def main() -> None:
    calls = collections.Counter()
    if "--count" in sys.argv:
        from rocm_kernels_vllm import kernels

        factors = [float(a.partition("=")[2]) for a in sys.argv if a.startswith("--wrong=")]
        count_calls(kernels, calls, *factors)
    else:
        fused_act_quant._FUSED_ACT_QUANT.clear()  # vLLM's rows there call ops of its GPU builds
    if "--attention" in sys.argv:
        take_attention()
    for checkpoint in [argument for argument in sys.argv[1:] if not argument.startswith("--")]:
        calls.clear()
        print(f"\nSERVING {checkpoint}", flush=True)
        result = serve(checkpoint)
        print("\nRESULT " + json.dumps(result | {"calls": dict(calls)}), flush=True)


def serve(checkpoint: str) -> dict:
    llm = LLM(
        model=checkpoint,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        max_num_seqs=4,
        max_num_batched_tokens=128,  # as many it warms up with
        enforce_eager="--compile" not in sys.argv,
        seed=0,
        # Calls are counted in this process alone: with --ranks the workers are others.
        tensor_parallel_size=2 if "--ranks" in sys.argv else 1,
        enable_expert_parallel="--ranks" in sys.argv,
    )
    parameters = SamplingParams(
        temperature=0, max_tokens=TOKENS, logprobs=5, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [output.outputs[0] for output in llm.generate(prompts, parameters, use_tqdm=False)]
    return {
        "tokens": [list(output.token_ids) for output in outputs],
        "logprobs": [
            [{token: p.logprob for token, p in step.items()} for step in output.logprobs]
            for output in outputs
        ],
    }


def count_calls(kernels, calls: collections.Counter, factor: float = 1.0) -> None:
    """Counts the package's functions that the plugin's ops call, by name and by class of rows; its
    ops, which they call past the functions, by the names of these. The factor makes every product's
    scale wrong, for a test of the comparison; with --reference the experts are the definition's."""
    package = kernels.package()
    wrong = {"fp8_linear": "scale_x", "fused_moe": "scale_gate_up"}

    def count(name, rows):
        calls[f"{name}, {'few' if rows <= len(PROMPTS) else 'many'} rows"] += 1

    class CountingOps:
        def __getattr__(self, name):
            op = getattr(package._ops.ops, name).default

            def counted(out, *args):
                called = name
                if name == "gemm":
                    a, w, scale_a, *others = args
                    if scale_a is not None:
                        called, args = "fp8_linear", (a, w, scale_a * factor, *others)
                count(called, out.shape[0])
                return op(out, *args)

            return types.SimpleNamespace(default=counted)

    class Counting:
        functional = package.functional
        _ops = types.SimpleNamespace(ops=CountingOps())

        def __getattr__(self, name):
            function = getattr(package, name)
            if name == "fused_moe" and "--reference" in sys.argv:
                function = defined

            def counted(x, *args, **kwargs):
                count(name, x.shape[0])
                if kwargs.get(wrong.get(name)) is not None:
                    kwargs[wrong[name]] = kwargs[wrong[name]] * factor
                return function(x, *args, **kwargs)

            return counted

    def defined(x, *args, out, **kwargs):
        return out.copy_(package.reference.fused_moe(x, *args, **kwargs))

    kernels.package = Counting


if __name__ == "__main__":
    main()
