"""A decode step of a Llama that transformers' tp_plan divides among GPUs: ms a step.

    python benchmarks/tensor_parallel.py [--shape llama-8b] [--batches 1,8,32] [--csv FILE] [--save]

Three sides, all with these kernels and ``use_decode_step``: one process with the whole model; the
model divided, summing through NCCL as transformers does (gloo on the CPU); and the same through
``use_communicator``. Weights are random, made where they stay, in FP8 but for embeddings. A step is
one call of the model behind a prompt, with the device waited for: the median, the slowest rank's.
A model of two narrow layers runs where there is no GPU: to see that it works.
"""

from __future__ import annotations

import argparse
import csv
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator

import end_to_end
import generate
import tables
import torch
from torch import distributed, multiprocessing, nn

SHAPES = {
    "llama-8b": {},
    "llama-70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                  "num_attention_heads": 64},
}  # fmt: skip
ONE, TORCHS, OURS = "one process", "torch.distributed", "Communicator"
NAME = "tensor_parallel"


def random_model(shape: dict, device: torch.device, divided: bool) -> nn.Module:
    """A model on the device, of which this process has its share where it is divided."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    torch.set_default_dtype(torch.bfloat16)
    config = LlamaConfig(**shape)
    with torch.device("meta"):
        model = LlamaForCausalLM(config).eval().requires_grad_(False)
    if divided:
        ranks = (distributed.get_world_size(),)
        mesh = distributed.init_device_mesh(device.type, ranks)
        apply_tensor_parallelism(model, mesh, model.tp_plan)
    model.to_empty(device=device)
    for parameter in model.parameters():
        mine = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if mine.dim() == 1:
            mine.fill_(1)
        else:
            mine.normal_(0, parameter.shape[-1] ** -0.5)
    with device:  # its table of frequencies is no parameter
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return end_to_end.with_kernels(model, False)


def sides(options: argparse.Namespace, shape: dict, device: torch.device) -> Iterator[tuple]:
    """Yields (side, model), the models one after the other."""
    models = end_to_end.load.load(end_to_end.load.choose()).models
    if not options.divided_only:
        model = random_model(shape, device, divided=False)
        models.use_decode_step(model)
        yield ONE, model
        models.stop_decode_step(model)
        del model
        gc.collect()  # the next one wants its memory
    model = random_model(shape, device, divided=True)
    models.use_decode_step(model)
    yield TORCHS, model
    models.use_communicator(model)
    models.use_decode_step(model)  # counts anew
    yield OURS, model


def slowest(seconds: float, device: torch.device) -> float:
    every = torch.tensor([seconds], device=device, dtype=torch.float64)
    distributed.all_reduce(every, distributed.ReduceOp.MAX)
    return every.item()


@torch.no_grad()
def run_rank(rank: int, options: argparse.Namespace, file: str) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(rank)
    device = end_to_end.load.choose().device
    if device.type == "cuda":
        device = torch.device("cuda", rank)
    else:
        torch.set_num_threads(1)
    os.environ.update(TORCH_SYMM_MEM_DISABLE_MULTICAST="1", NCCL_NVLS_ENABLE="0")
    ranks = options.ranks
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, f"file://{file}", rank=rank, world_size=ranks)
    shape = {**end_to_end.MODELS["llama-8b"].shape, **SHAPES[options.shape]}
    if device.type != "cuda":
        shape.update(end_to_end.TINY, num_hidden_layers=2)
        shape.pop("moe_intermediate_size")
    if options.layers:
        shape["num_hidden_layers"] = options.layers
    batches = [int(batch) for batch in options.batches.split(",")]
    models = end_to_end.load.load(end_to_end.load.choose()).models
    found: dict[int, dict[str, float]] = {batch: {} for batch in batches}
    logits: dict[str, torch.Tensor] = {}
    start = time.perf_counter()
    for side, model in sides(options, shape, device):
        ready = time.perf_counter() - start
        for batch in batches:
            torch.manual_seed(batch)  # all ranks have the same prompt
            ids = torch.randint(5, shape["vocab_size"], (batch, options.context), device=device)
            logits[side] = model(ids, logits_to_keep=1).logits.float()
            step, *_ = generate.step_seconds(model, ids, False, False)
            found[batch][side] = slowest(step, device) * 1e3
            if rank == 0:
                print(f"{side}, batch {batch}: {found[batch][side]:.3f} ms", flush=True)
        if rank == 0:
            print(f"    ready in {ready:.0f} s; {models.decode_steps(model)}", flush=True)
            if side == OURS:
                sums = models.communicated_sums(model)
                apart = (logits[OURS] - logits[TORCHS]).abs().max() / logits[OURS].abs().max()
                print(f"    {len(sums.linears)} linears; {sums[1:]}", flush=True)
                print(f"    logits differ from {TORCHS}'s by {apart:.1g} of the largest")
        del model
        start = time.perf_counter()
    if rank == 0:
        report(options, found, shape["num_hidden_layers"], device)
    distributed.barrier()
    sys.stdout.flush()
    os._exit(0)  # or now and then it aborts: a thread of gloo outlives its group


def report(options: argparse.Namespace, found: dict, layers: int, device: torch.device) -> None:
    card = torch.cuda.get_device_name() if device.type == "cuda" else "processes of a CPU"
    header = ["ms a step", ONE, TORCHS, OURS]
    case = f"{options.ranks} {card}, measured: {options.shape}, {layers} layers"
    case += f", context {options.context}"
    rows = [
        [f"{case}, batch {batch}"]
        + [f"{by_side[side]:.3f}" if side in by_side else "" for side in header[1:]]
        for batch, by_side in found.items()
    ]
    print(tables.markdown(header, rows), flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as out:
            csv.writer(out, lineterminator="\n").writerows([header, *rows])
    if options.save:
        source = f"python benchmarks/tensor_parallel.py --save\n{card}, torch {torch.__version__}"
        tables.save_beside(NAME, source, header, rows, case)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--batches", default="1,8,32")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--divided-only", action="store_true", help="of what one GPU cannot hold")
    parser.add_argument("--csv", help="a file for the table")
    parser.add_argument("--save", action="store_true", help="to results/tables")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (options, f"{folder}/group"), nprocs=options.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
