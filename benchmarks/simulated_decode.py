"""A layer of a decode step on the simulated MI300X: how often it launches, and what that costs.

    python benchmarks/simulated_decode.py [--save]

One layer of an 8-billion Llama at batch 1: FP8 weights with a scale a row, bfloat16 elsewhere, a
cache that holds 512 tokens. Its launches are those that docs/decode.md draws. The launchers'
machine code runs in the simulator (checkers off) and the cycle model plays each launch, caches
cold; nothing here was measured on an AMD GPU. The sum behind down is torch's own kernel, which does
not run here: it is taken for a load and a store.

The second table has the layer, and a stack of STACK, as one kernel, decode_layers, whose workgroups
meet between its parts: the cycle model lets a poll wait for the flag that it finds, and FLAG_US
more. Of the stack two layers are played; each of the others is taken to cost what the second adds.

Between kernels there are gaps, which no model here knows: BOUNDARY_US is a published one. Of graphs
on this GPU nobody has published any. --save writes results/tables, from where
`python benchmarks/pages.py --write` puts the tables into docs/decode.md.
"""

from __future__ import annotations

import argparse
import datetime
import fractions
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]

import simulated_layers  # noqa: E402
import tables  # noqa: E402
from simulated_layers import Attention, Stack, Weight  # noqa: E402
from simulated_moe_layers import launches, zeros  # noqa: E402
from simulated_product import aligned, simulated, simulator, start  # noqa: E402

from simulator import cycles  # noqa: E402

READ_BYTES_PER_US = 4.2e6  # what people measure of an MI300X's memory
# From one kernel to the next on an MI300X, as blog.kog.ai tells of it, and 0.5 us until memory is
# at its rate again, which the cycle model has.
BOUNDARY_US = 4.5
# From a flag's store until another die has seen it: the longest way there and back that was
# published, of an MI355X (benchmark/aid_remote_hbm of ROCm/fleet-chiplet-megakernel: 0.63 to 1.15).
FLAG_US = 1.15

HIDDEN, INTERMEDIATE = 4096, 14336
HEADS, KV_HEADS, HEAD_DIM, CONTEXT = 32, 8, 128, 512
STACK = 16  # layers that a launch of decode_layers takes


def row(columns: int) -> torch.Tensor:
    return aligned(torch.randn(1, columns).bfloat16())


def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Zeros take no memory here and as long as others; a scale a row."""
    return zeros(rows, columns, dtype=simulated.NATIVE), aligned(torch.full((rows, 1), 0.01))


class Layer:
    """The launches of a layer: each a name, what it runs, and the bytes that it must read."""

    def __init__(self) -> None:
        self.kernels = simulated.functional()
        self.norm, self.row = aligned(torch.ones(HIDDEN).bfloat16()), row(HIDDEN)
        self.weights = {
            "qkv": weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            "o": weight(HIDDEN, HEADS * HEAD_DIM),
            "gate and up": weight(2 * INTERMEDIATE, HIDDEN),
            "down": weight(HIDDEN, INTERMEDIATE),
        }
        shape = (1, CONTEXT + 1, KV_HEADS, HEAD_DIM)
        self.k, self.v = (zeros(*shape, dtype=torch.bfloat16) for _ in range(2))

    def product(self, name: str) -> tuple[str, Callable, int]:
        w, scale = self.weights[name]
        a = zeros(1, w.shape[1], dtype=simulated.NATIVE)
        out = zeros(1, w.shape[0], dtype=torch.bfloat16)
        scale_a = aligned(torch.ones(1, 1))
        return name, lambda: self.kernels.gemm(a, w, scale_a, scale, out=out), w.nbytes

    def quantised(self, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        return zeros(1, columns, dtype=simulated.NATIVE), aligned(torch.zeros(1, 1))

    def rotate(self) -> None:
        heads = row((HEADS + 2 * KV_HEADS) * HEAD_DIM).view(1, 1, -1, HEAD_DIM)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 2)
        cos, sin = (aligned(torch.ones(1, HEAD_DIM).bfloat16()) for _ in range(2))
        places = aligned(torch.full((1,), CONTEXT, dtype=torch.int32))
        self.kernels.rope_and_cache(
            q, k, v, cos, sin, k_cache=self.k, v_cache=self.v, cache_positions=places, out=q
        )

    def attend(self) -> None:
        q = row(HEADS * HEAD_DIM).view(1, 1, HEADS, HEAD_DIM)
        self.kernels.flash_attn_func(q, self.k, self.v, out=aligned(torch.zeros_like(q)))

    def launches(self) -> list[tuple[str, Callable, int]]:
        k = self.kernels
        norm_out, attended = self.quantised(HIDDEN), row(HEADS * HEAD_DIM)
        residual, gate_up = row(HIDDEN), row(2 * INTERMEDIATE)
        attended_out, activated_out = self.quantised(HEADS * HEAD_DIM), self.quantised(INTERMEDIATE)
        return [
            ("norm, FP8", lambda: k.rmsnorm_fp8(self.row, self.norm, 1e-5, out=norm_out), 0),
            self.product("qkv"),
            ("rotation, cache", self.rotate, 0),
            ("attention", self.attend, self.k.nbytes + self.v.nbytes),
            ("FP8", lambda: k.quantize_fp8(attended, out=attended_out), 0),
            self.product("o"),
            ("+ residual, norm, FP8",
             lambda: k.rmsnorm_fp8(self.row, self.norm, 1e-5, residual, out=norm_out), 0),
            self.product("gate and up"),
            ("SwiGLU, FP8", lambda: k.swiglu_fp8(gate_up, out=activated_out), 0),
            self.product("down"),
        ]  # fmt: skip


def played(run: Callable) -> tuple[int, float]:
    """How many kernels a call launches, and their modelled us, without the model's own gap."""
    launches()
    run()
    reports = launches()
    gap = cycles.MACHINES[simulated.TARGET].launch_s
    return len(reports), sum(report["cycles"]["seconds"] - gap for report in reports) * 1e6


def torch_sum_us() -> float:
    machine = cycles.MACHINES[simulated.TARGET]
    return (machine.memory_latency + machine.l2_latency) / machine.clock_hz * 1e6


LAYER_HEADER = ["kernels of a layer, modelled", "launches", "us", "us of its bytes, at 4.2 TB/s"]
ONE_KERNEL_HEADER = ["a layer, modelled", "launches", "us", "with boundaries, us",
                     "us of its bytes, at 4.2 TB/s", "of that rate", "with boundaries"]  # fmt: skip


def tables_of_a_layer() -> tuple[list[list[str]], list[list[str]]]:
    layer = Layer()
    rows = []  # name, launches, us, us of its bytes
    for name, run, read in layer.launches():
        rows.append((name, *played(run), read / READ_BYTES_PER_US))
        print(rows[-1], flush=True)
    rows.append(("+ residual (torch's: a load and a store)", 1, torch_sum_us(), 0.0))

    def sums(part: list[tuple]) -> tuple[int, float, float]:
        return tuple(sum(column) for column in list(zip(*part, strict=True))[1:])

    count, us, floor = sums(rows)
    lines = [[name, str(n), f"{its:.1f}", f"{read:.1f}" if read else ""]
             for name, n, its, read in rows]  # fmt: skip
    lines.append(["in all", str(count), f"{us:.1f}", f"{floor:.1f}"])
    name = f"with {BOUNDARY_US} us between kernels, published"
    lines.append([name, str(count), f"{us + count * BOUNDARY_US:.1f}", f"{floor:.1f}"])

    def of_stack(attends: bool) -> simulated_layers.Layer:
        weights = {name: Weight(*pair) for name, pair in Layer().weights.items()}
        norms = [aligned(torch.ones(HIDDEN).bfloat16()) for _ in range(2)]
        caches = Layer().k[0], Layer().v[0]
        return simulated_layers.Layer(
            norms[0], weights["gate and up"], weights["down"], weights["o"], norms[1],
            weights["qkv"], *(caches if attends else ()),
        )  # fmt: skip

    attended, residual, qkv = (
        row(n)[0] for n in (HEADS * HEAD_DIM, HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
    )
    cos, sin = (aligned(torch.ones(HEAD_DIM).bfloat16()) for _ in range(2))
    position = aligned(torch.full((1,), CONTEXT, dtype=torch.int32))
    attention = Attention(cos, sin, position, HEADS)
    machine = cycles.machine_for(simulated.TARGET, flag_s=FLAG_US * 1e-6)
    simulator.load_runtime().cycles(machine)

    def stack_us(layers: int) -> float:
        stack = Stack([of_stack(True) for _ in range(layers)], attention)
        return played(lambda: stack.launch(qkv, residual, residual, stack.state(), qkv))[1]

    between = Stack([of_stack(False)])
    one = played(lambda: between.launch(attended, residual, residual, between.state(), qkv))
    apart = sums([row for row in rows if row[0] in ("rotation, cache", "attention")])
    first, two = stack_us(1), stack_us(2)
    together = [
        ("launch by launch", (count, us)),
        ("decode_layers behind rotation and attention", (one[0] + apart[0], one[1] + apart[1])),
        ("decode_layers", (1, first)),
        (f"decode_layers, {STACK} layers a launch",
         (f"1/{STACK}", (first + (STACK - 1) * (two - first)) / STACK)),
    ]  # fmt: skip
    one_lines = []
    for name, (n, its_us) in together:
        with_gaps = its_us + float(fractions.Fraction(n)) * BOUNDARY_US
        numbers = (its_us, with_gaps, floor)
        rates = (floor / its_us, floor / with_gaps)
        one_lines.append([name, str(n), *(f"{x:.1f}" for x in numbers),
                          *(f"{x:.2f}" for x in rates)])  # fmt: skip
    return lines, one_lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--save", action="store_true", help="write results/tables too")
    given = parser.parse_args()
    start()
    source = f"python benchmarks/simulated_decode.py, {datetime.date.today()}; modelled"
    names = (("decode_mi300x", LAYER_HEADER), ("decode_layer_mi300x", ONE_KERNEL_HEADER))
    for (name, header), lines in zip(names, tables_of_a_layer(), strict=True):
        print(tables.markdown(header, lines))
        if given.save:
            tables.save_printed(name, source, header, lines)


if __name__ == "__main__":
    main()
