"""gemm on the simulated MI300X: what the cycle model says of a config, and where the cycles go.

    python benchmarks/simulated_gemm.py [--product 1024,4608,7168,block ...] [--config TEXT ...]
    python benchmarks/simulated_gemm.py --product 512,3072,1536,block --html FILE --trace FILE

Prints the table of docs/kernels/gemm.md. The launcher's machine code runs in the simulator
(checkers off), and the cycle model plays it; nothing here was measured on an AMD GPU. Without
--config: what the choice takes. --html (checkers on) and --trace show the last launch as a page and
as a timeline for Perfetto.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]

import simulated  # noqa: E402
from gpu_report import markdown  # noqa: E402

import simulator  # noqa: E402
from simulator import cycles  # noqa: E402

# M, N, K and kind of scales: layers of DeepSeek-V3 under TP8, and a square.
PRODUCTS = ["1024,4608,7168,block", "512,3072,1536,block", "2048,2048,2048,row",
            "2048,2048,2048,bf16"]  # fmt: skip
ALIGNMENT = 2 << 20  # of what a GPU allocates: where arrays lie must not depend on the host


def aligned(values: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(values.nbytes + ALIGNMENT, dtype=torch.uint8)
    begin = -storage.data_ptr() % ALIGNMENT
    result = storage[begin : begin + values.nbytes].view(values.dtype).view(values.shape)
    return result.copy_(values)


def operands(m: int, n: int, k: int, kind: str) -> list:
    if kind == "bf16":
        return [aligned(torch.randn(rows, k).bfloat16()) for rows in (m, n)] + [None, None]
    blocks = -(-k // 128)
    sizes = {"row": ((m, 1), (n, 1)), "block": ((m, blocks), (-(-n // 128), blocks))}[kind]
    values = [aligned(torch.randn(rows, k).to(simulated.NATIVE)) for rows in (m, n)]
    return values + [aligned(torch.rand(size) + 0.5) for size in sizes]


def row(product: str, config: str | None) -> list[str]:
    m, n, k, kind = (int(part) if part.isdigit() else part for part in product.split(","))
    out, given = aligned(torch.zeros(m, n, dtype=torch.bfloat16)), operands(m, n, k, kind)
    ops = simulated.ops
    chosen = ops.gemm_configs(out, *given).splitlines()[0]
    ops.gemm_with_config(out, *given, None, config or chosen)
    played = simulator.load_runtime().last().cycles
    spent = played.raw["spent"]
    total = sum(spent.values())
    largest = sorted(spent, key=spent.get, reverse=True)[:5]
    return [
        f"{m} x {n} x {k} {kind}",
        f"`{config or chosen}`",
        f"{played.seconds * 1e6:.1f}",
        f"{2 * m * n * k / played.seconds / 1e12:.0f}",
        ", ".join(f"{name} {spent[name] / total:.0%}" for name in largest),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--product", nargs="+", default=PRODUCTS, help="M,N,K,row|block|bf16")
    parser.add_argument("--config", nargs="+", default=[None], help="texts of gemm_configs")
    parser.add_argument("--html", type=Path)
    parser.add_argument("--trace", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    simulated.functional()
    simulated.CHECKS = arguments.html is not None  # the page lists findings
    simulator.load_runtime().cycles(cycles.machine_for(simulated.TARGET, traced=4))
    rows = [row(product, config) for product in arguments.product for config in arguments.config]
    print(markdown(["M x N x K", "config", "modelled us", "TFLOP/s", "cycles of the SIMDs"], rows))
    for path, draw in (
        (arguments.html, simulator.html_page),
        (arguments.trace, simulator.chrome_trace),
    ):
        if path:
            path.write_text(draw(simulator.load_runtime().last()))


if __name__ == "__main__":
    main()
