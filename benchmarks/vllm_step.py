"""A decode step of vLLM itself, with the plugin of integrations/vllm and without, in turns.

    python benchmarks/vllm_step.py [--parts dense,moe] [--limit SECONDS] [--out FOLDER] [--save]

Needs a GPU, and a Python with vLLM, the plugin and the kernels: in LOCAL_KERNELS, or in build/ of
this checkout; 100 GB of GPU memory. `dense` is 16 layers of the 8-billion Llama with a scale a
channel, `moe` 20 layers of Qwen3-30B-A3B in blocks of 128 x 128; random weights. Parts go one after
the other. Each side is a process of its own, and those of a part start together: on 16 cores
vLLM takes one to three minutes for that, so a part may use 0.7 of its time. Each cell is then timed
side after side, in rounds of turning order, and the medians are printed with the least and the
greatest. What is not ready in time is said.

A step's time is the median of what passes between the answers of two steps in which the whole batch
decodes. Then a few steps of each cell under the profiler: microseconds of kernels, summed, busy (an
overlap counts once) and from the first to the last; and a middle layer's kernels in their order. A
prompt's time is that of one token of a prompt that no page has, in a CUDA graph (128 tokens) or op
by op (more). `moe` also says how many experts the tokens meet. --save writes
results/tables/vllm_step.csv.
"""

from __future__ import annotations

import argparse
import inspect
import itertools
import json
import os
import re
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import tables

ROOT = Path(__file__).resolve().parent.parent
COMMON = {
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "hidden_act": "silu", "head_dim": 128,
    "max_position_embeddings": 16384, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "num_attention_heads": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 16, "num_key_value_heads": 8,
    "vocab_size": 32768,
}  # fmt: skip
QWEN3_MOE = COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
    "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 20,
    "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
}  # fmt: skip
NUMBER = {"num_bits": 8, "type": "float", "symmetric": True}
CHANNEL = {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "quantization_status": "compressed", "ignore": ["lm_head"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": NUMBER | {"strategy": "channel", "dynamic": False},
        "input_activations": NUMBER | {"strategy": "token", "dynamic": True},
    }},
}  # fmt: skip
BLOCK = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(20))],
}  # fmt: skip

README = {"custom_ops": ["none", "+quant_fp8"], "pass_config": {"fuse_norm_quant": True}}
OFF = {"ROCM_KERNELS_VLLM_OFF": "all"}
THEIRS, OURS = ({"attention_config": {"backend": name}} for name in ("FLASH_ATTN", "CUSTOM"))
FP8_CACHE = {"kv_cache_dtype": "fp8"}
# vLLM's experts are Triton's either way; DeepGEMM's products compile when they are first called.
NO_DEEP_GEMM = {"VLLM_USE_DEEP_GEMM": "0"}
BATCHES = (1, 8, 32, 64)
SHORT, LONG = ([(batch, context) for batch in BATCHES] for context in (512, 8192))
# Of a part: model, weights, and its sides: environment, vLLM's compilation_config, more of its
# arguments, and cells (batch, context).
PARTS = {
    "dense": (LLAMA, CHANNEL, {
        "vLLM": (OFF, {}, THEIRS, SHORT),
        "with the plugin": ({}, README, THEIRS, SHORT),
        "with the plugin and its attention": ({}, README, OURS, SHORT),
        "vLLM, FP8 cache": (OFF, {}, THEIRS | FP8_CACHE, SHORT + LONG),
        "with the plugin and its attention, FP8 cache":
            ({}, README, OURS | FP8_CACHE, SHORT + LONG),
    }),
    "moe": (QWEN3_MOE, BLOCK, {
        "vLLM, FP8 cache": (OFF | NO_DEEP_GEMM, {}, THEIRS | FP8_CACHE, SHORT + LONG),
        "with the plugin, FP8 cache": (NO_DEEP_GEMM, README, THEIRS | FP8_CACHE, SHORT + LONG),
        "with the plugin and its attention, FP8 cache":
            (NO_DEEP_GEMM, README, OURS | FP8_CACHE, SHORT + LONG),
    }),
}  # fmt: skip
PROMPTS = (128, 200, 1024, 2048)
STEPS, ROUNDS, PROFILED = 40, 7, 8
TOLD = (
    r"Selected|[Uu]sing .*(backend|attention)|stay with vLLM|rocm-kernels:|took .* s\b|init engine"
)
LATE = "is late"
OF_ATTENTION = re.compile(r"FlashAttnFwd(?!Combine)|attention_(decode|rows)|unified_attention")


# ---- One side, in a process of its own -----------------------------------------------------------


class Server:
    """A vLLM of random weights, which answers what the parent asks."""

    def __init__(self, part: str, side: str, folder: str):
        from vllm import LLM

        self.model, weights, sides = PARTS[part]
        _, compilation, more, self.cells = sides[side]
        random_weights()
        config = self.model | {"quantization_config": weights}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        a_token = 2 * self.model["num_hidden_layers"] * self.model["num_key_value_heads"] * 128
        a_token *= 1 if "kv_cache_dtype" in more else 2
        # A prompt of one cell begins those of the others, so the largest cell has all pages.
        tokens = max(batch * (context + 96) for batch, context in self.cells) + 16384
        sizes = sorted({PROMPTS[0], *(batch for batch, _ in self.cells)})
        self.llm = LLM(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
            max_model_len=max(*PROMPTS, *(context for _, context in self.cells)) + 256,
            max_num_seqs=max(batch for batch, _ in self.cells), max_num_batched_tokens=8192,
            gpu_memory_utilization=0.1, kv_cache_memory_bytes=tokens * a_token,
            enable_prefix_caching=True,
            compilation_config={**compilation, "cudagraph_capture_sizes": sizes}, **more,
        )  # fmt: skip
        self.prompts = 0
        for cell in self.cells:
            self.step(*cell)
        for length in PROMPTS:
            self.prompt(length)

    def answer(self, what: str, *arguments) -> dict:
        return getattr(self, what)(*arguments)

    def step(self, batch: int, context: int) -> dict:
        engine, answers = self._begin(batch, context), []
        while engine.has_unfinished_requests():
            whole = len(engine.step()) == batch
            answers.append(time.perf_counter() if whole else None)
        gaps = [b - a for a, b in itertools.pairwise(answers) if a and b]
        return {"ms": 1e3 * statistics.median(gaps)}

    def prompt(self, length: int) -> dict:
        self.prompts += 1
        ids = [(11 * i + 7919 * self.prompts) % 1009 + 3 for i in range(length)]
        start = time.perf_counter()
        self.llm.generate([{"prompt_token_ids": ids}], self._tokens(1), use_tqdm=False)
        return {"ms": 1e3 * (time.perf_counter() - start)}

    def profile(self, batch: int, context: int) -> dict:
        """Kernels of PROFILED steps behind the prompts': begin and length in us, and name."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        engine = self._begin(batch, context)
        for _ in range(STEPS // 4):
            engine.step()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(PROFILED):
                engine.step()
            torch.cuda.synchronize()
        while engine.has_unfinished_requests():
            engine.step()
        found = [
            (event.time_range.start, event.time_range.end, event.name[:120])
            for event in profiler.events()
            if event.device_time_total and "CUDA" in str(event.device_type)
        ]
        found.sort()
        return {"kernels": [(a - found[0][0], b - a, name) for a, b, name in found]}

    def routing(self) -> dict:
        """How many experts the last tokens of 64 prompts meet, by layer."""
        from vllm.model_executor.layers.fused_moe import modular_kernel

        kernel = modular_kernel.FusedMoEKernelModularImpl
        theirs, seen = kernel.apply, []
        signature = inspect.signature(theirs)

        def apply(*arguments, **named):
            given = signature.bind(*arguments, **named).arguments
            seen.append(given["topk_ids"].cpu())
            return theirs(*arguments, **named)

        kernel.apply = apply
        length = 17
        prompts = [[(i * 37 + j * 101 + 5) % 900 + 3 for j in range(length)] for i in range(64)]
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
        self.llm.generate(prompts, self._tokens(1), use_tqdm=False)
        kernel.apply = theirs
        last = [ids[length - 1 :: length] for ids in seen if len(ids) == 64 * length]
        return {
            str(n): [int(ids[:n].unique().numel()) for ids in last]
            for n in dict(self.cells)
        }  # fmt: skip

    def _tokens(self, count: int):
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip

    def _begin(self, batch: int, context: int):
        """The engine, which has a cell's requests now."""
        engine = self.llm.llm_engine
        for j in range(batch):
            ids = [(7 * i + 13 * j + 31 * i * j) % 997 + 3 for i in range(context)]
            prompt = {"prompt_token_ids": ids}
            engine.add_request(f"{time.time()}-{j}", prompt, self._tokens(STEPS))
        return engine


def random_weights() -> None:
    """Has vLLM make the same random weights on all sides. Its own dummies are below 1e-3, which FP8
    rounds to zero; these fill FP8's range, and their scales keep activations near 1."""
    import torch
    from vllm.model_executor.model_loader import dummy_loader

    count = [0]

    def initialize(param, *_, **__):
        if not torch.is_floating_point(param) or param.device.type == "meta":
            return
        if (value := getattr(param, "dummy_weight_value", None)) is not None:
            param.data.fill_(value)
            return
        count[0] += 1
        generator = torch.Generator(device=param.device).manual_seed(count[0])
        data = param.data
        if data.dtype.itemsize == 1:
            for part in (data if data.is_contiguous() else data.t()).view(-1).split(1 << 26):
                values = torch.randn(part.shape, generator=generator, device=data.device)
                part.copy_((values * 64).clamp(-448, 448).to(data.dtype))
        elif data.dtype == torch.float32 and data.dim() > 0:  # scales
            data.uniform_(0.5 / 4096, 1.5 / 4096, generator=generator)
        elif data.dim() < 2:
            data.fill_(1.0)
        else:
            data.normal_(0, 1 / 64, generator=generator)

    dummy_loader.initialize_single_dummy_weight = initialize


def serve(part: str, side: str, pipe: int) -> None:
    """Tells when it is ready, then answers lines of JSON by lines of JSON."""
    import torch

    with os.fdopen(pipe, "w", buffering=1) as answers, tempfile.TemporaryDirectory() as folder:
        server = Server(part, side, folder)
        answers.write(json.dumps({"gpu": torch.cuda.get_device_name()}) + "\n")
        for line in sys.stdin:
            try:
                answer = server.answer(*json.loads(line))
            except Exception as error:  # of vLLM's, which the parent says
                answer = {"error": f"{type(error).__name__}: {error}"[:300]}
            answers.write(json.dumps(answer) + "\n")


# ---- The parent ----------------------------------------------------------------------------------


class Side:
    """A process that serves."""

    def __init__(self, part: str, name: str, out: Path):
        self.part, self.name, self.begun = part, name, time.monotonic()
        self.log = out / (re.sub(r"\W+", "_", f"{part}_{name}") + ".log")
        ours, theirs = os.pipe()
        variables, _, _, self.cells = PARTS[part][2][name]
        environment = {
            "LOCAL_KERNELS": f"org/rocm-kernels={ROOT}", "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1",
            "TORCHINDUCTOR_COMPILE_THREADS": "3", "OMP_NUM_THREADS": "2", **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", **variables,
        }  # fmt: skip
        command = [sys.executable, __file__, "--serve", part, name, str(theirs)]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=self.log.open("w"),
            stderr=subprocess.STDOUT, text=True, pass_fds=[theirs], start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self.pipe, self.unread = ours, b""

    def said(self, words: str, most: int = 12) -> list[str]:
        """Lines of its log, each once."""
        lines = self.log.read_text(errors="replace").splitlines()
        return list(dict.fromkeys(line[-200:] for line in lines if re.search(words, line)))[-most:]

    def next_answer(self, seconds: float) -> dict:
        until = time.monotonic() + seconds
        while b"\n" not in self.unread:
            ready, _, _ = select.select([self.pipe], [], [], max(0.0, until - time.monotonic()))
            read = os.read(self.pipe, 1 << 20) if ready else b""
            if not read:
                return {"error": "has ended" if ready else LATE}
            self.unread += read
        line, self.unread = self.unread.split(b"\n", 1)
        return json.loads(line)

    def ask(self, *what, seconds: float = 60) -> dict:
        try:
            self.process.stdin.write(json.dumps(what) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return {"error": "has ended"}
        answer = self.next_answer(seconds)
        if answer.get("error") == LATE:
            self.end()  # or its answer would pass for the next one's
        return answer

    def end(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def ready(sides: list[Side], until: float) -> tuple[list[Side], str]:
    """Those that are, and on which GPU; the others are said and ended."""
    found, gpu = [], ""
    for side in sides:
        answer = side.next_answer(max(1.0, until - time.monotonic()))
        took = f"{time.monotonic() - side.begun:.0f} s"
        if "gpu" in answer:
            found.append(side)
            gpu = answer["gpu"]
            print(f"{side.part}, {side.name}: ready within {took}")
            print("\n".join(f"    {line}" for line in side.said(TOLD)), flush=True)
        else:
            side.end()
            last = "\n".join(side.said("."))
            print(f"NOT MEASURED {side.part}, {side.name}: {answer['error']} after {took}\n{last}")
            sys.stdout.flush()
    return found, gpu


def timed(sides: list[Side], until: float) -> dict[tuple, list[float]]:
    """Milliseconds by cell and side, in rounds."""
    found: dict[tuple, list[float]] = defaultdict(list)
    cells = dict.fromkeys(("step", *cell) for side in sides for cell in side.cells)
    for turn in range(ROUNDS):
        for cell in [*cells, *(("prompt", length) for length in PROMPTS)]:
            for side in sides if turn % 2 == 0 else sides[::-1]:
                if cell[0] == "step" and cell[1:] not in side.cells:
                    continue
                if time.monotonic() > until and turn > 0:
                    return found
                answer = side.ask(*cell)
                if "ms" not in answer:
                    print(f"{side.part}, {side.name}, {cell}: {answer['error']}", flush=True)
                    continue
                found[cell, side.name].append(answer["ms"])
    return found


def summed(kernels: list) -> dict[str, float]:
    """Of a step, us: kernels summed, busy, from the first's begin to the last's end."""
    busy = end = 0.0
    for begin, length, _ in kernels:
        busy += max(0.0, begin + length - max(begin, end))
        end = max(end, begin + length)
    total = sum(length for _, length, _ in kernels)
    return {"summed": total / PROFILED, "busy": busy / PROFILED, "all": end / PROFILED}


def layer(kernels: list) -> list[tuple[float, float, str]]:
    """Between two kernels of attention, as most often: medians of begin and length, and name."""
    at = [i for i, (_, _, name) in enumerate(kernels) if OF_ATTENTION.search(name)]
    alike = defaultdict(list)
    for a, b in itertools.pairwise(at):
        alike[tuple(name for _, _, name in kernels[a:b])].append(kernels[a:b])
    if not alike:
        return []
    most = max(alike.values(), key=len)
    return [
        (
            statistics.median(one[i][0] - one[0][0] for one in most),
            statistics.median(one[i][1] for one in most),
            name,
        )
        for i, (_, _, name) in enumerate(most[0])
    ]


def busy_ms(side: Side, batch: int, context: int, out: Path) -> float | None:
    """Of a step's profile, which is shown and kept in `out`."""
    kernels = side.ask("profile", batch, context).get("kernels")
    if not kernels:
        print(f"{side.part}, {side.name}: no profile", flush=True)
        return None
    sums = summed(kernels)
    text = ", ".join(f"{name} {us:,.0f}" for name, us in sums.items())
    print(f"\n{side.part}, {side.name}, batch {batch}, context {context}: us a step: {text}")
    for begin, length, name in layer(kernels):
        print(f"  at {begin:7.1f} for {length:6.1f}  {name[:80]}", flush=True)
    with (out / "profiles.jsonl").open("a") as file:
        line = {"part": side.part, "side": side.name, "batch": batch, "context": context}
        file.write(json.dumps({**line, "kernels": kernels}) + "\n")
    return sums["busy"] / 1e3


def title(part: str, cell: tuple) -> str:
    model = {"dense": "Llama 8B", "moe": "Qwen3-30B-A3B"}[part]
    model = f"{PARTS[part][0]['num_hidden_layers']} layers of {model}"
    if cell[0] == "prompt":
        return f"{model}, a prompt of {cell[1]:,}"
    return f"{model}, batch {cell[1]}, context {cell[2]:,}"


def rows_of(part: str, found: dict[tuple, list[float]], busy: dict, gpu: str) -> list[list[str]]:
    rows = []
    for (cell, name), times in found.items():
        ms = [statistics.median(times), min(times), max(times)]
        text = f"{gpu}, measured: {title(part, cell)}: {name}"
        of_gpu = busy.get((cell, name))
        rows.append([text, *("" if value is None else f"{value:.2f}" for value in (*ms, of_gpu))])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default="dense,moe")
    parser.add_argument("--limit", type=float, default=540)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(*options.serve[:2], int(options.serve[2]))
        os._exit(0)  # vLLM's own end may take longer than all of this
    out = options.out or Path(tempfile.mkdtemp())
    out.mkdir(parents=True, exist_ok=True)
    print(f"logs and profiles: {out}", flush=True)
    header = ["", "ms", "least", "greatest", "GPU busy, ms"]
    end, parts, rows, gpu = time.monotonic() + options.limit, options.parts.split(","), [], ""
    for i, part in enumerate(parts):
        now = time.monotonic()
        share = (end - now) / (len(parts) - i)
        sides = [Side(part, name, out) for name in PARTS[part][2]]
        there, found_gpu = ready(sides, now + 0.7 * share)
        gpu = found_gpu or gpu
        if part == "moe" and there:
            print("experts met, by layer:", there[-1].ask("routing"), flush=True)
        left = now + share - time.monotonic()
        found = timed(there, now + share - 0.3 * left)
        busy = {
            (("step", *cell), side.name): busy_ms(side, *cell, out)
            for cell in dict.fromkeys(cell for side in there for cell in side.cells)
            for side in there
            if cell in side.cells and time.monotonic() < now + share - 3
        }
        for side in sides:
            side.end()
        of_part = rows_of(part, found, busy, gpu)
        rows += of_part
        print(f"\n{tables.markdown(header, of_part)}in {time.monotonic() - now:.0f} s", flush=True)
    if options.save and rows:
        import torch
        import vllm

        source = "python benchmarks/vllm_step.py --save\n"
        source += f"{gpu}, torch {torch.__version__}, vLLM {vllm.__version__}"
        tables.save_beside("vllm_step", source, header, rows, gpu)


if __name__ == "__main__":
    main()
