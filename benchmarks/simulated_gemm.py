"""gemm on the simulated MI300X: what the cycle model says of a config, and where the cycles go.

    python benchmarks/simulated_gemm.py [--product 1024,4608,7168,block ...] [--config TEXT ...]
    python benchmarks/simulated_gemm.py --product 512,3072,1536,block --html FILE --trace FILE

Prints the table of docs/results/gemm.md. The launcher's machine code runs in the simulator
(checkers off), and the cycle model plays it; nothing here was measured on an AMD GPU. Without
--config: what the choice takes. --html (checkers on) and --trace show the last launch as a page and
as a timeline for Perfetto.
"""

from __future__ import annotations

from pathlib import Path

import torch
from simulated_product import (
    aligned,
    arguments,
    largest_shares,
    last_played,
    print_table,
    read_product,
    simulated,
    simulator,
    start,
)

# M, N, K and kind of scales: layers of DeepSeek-V3 under TP8, and squares.
PRODUCTS = ["1024,4608,7168,block", "512,3072,1536,block", "16,4608,7168,block",
            "2048,2048,2048,row", "2048,2048,2048,bf16", "4096,4096,4096,row",
            "4096,4096,4096,bf16"]  # fmt: skip


def operands(m: int, n: int, k: int, kind: str) -> list:
    if kind == "bf16":
        return [aligned(torch.randn(rows, k).bfloat16()) for rows in (m, n)] + [None, None]
    blocks = -(-k // 128)
    sizes = {"row": ((m, 1), (n, 1)), "block": ((m, blocks), (-(-n // 128), blocks))}[kind]
    values = [aligned(torch.randn(rows, k).to(simulated.NATIVE)) for rows in (m, n)]
    return values + [aligned(torch.rand(size) + 0.5) for size in sizes]


def run(m: int, n: int, k: int, kind: str, config: str | None = None) -> tuple:
    """The product's operands, its output, and the config that it took."""
    out, given = aligned(torch.zeros(m, n, dtype=torch.bfloat16)), operands(m, n, k, kind)
    ops = simulated.ops
    config = config or ops.gemm_configs(out, *given, False).splitlines()[0]
    ops.gemm(out, *given, None, config)
    return given, out, config


def row(product: str, config: str | None) -> list[str]:
    m, n, k, kind = read_product(product)
    *_, config = run(m, n, k, kind, config)
    played = last_played()
    return [
        f"{m} x {n} x {k} {kind}",
        f"`{config}`",
        f"{played.seconds * 1e6:.1f}",
        f"{2 * m * n * k / played.seconds / 1e12:.0f}",
        largest_shares(played, 5),
    ]


def main() -> None:
    parser = arguments(__doc__.partition("\n")[0], PRODUCTS, "M,N,K,row|block|bf16")
    parser.add_argument("--html", type=Path)
    parser.add_argument("--trace", type=Path)
    given = parser.parse_args()
    start(checks=given.html is not None)  # the page lists findings
    print_table(
        ["M x N x K", "config", "modelled us", "TFLOP/s", "cycles of the SIMDs"], row, given
    )
    for path, draw in (
        (given.html, simulator.html_page),
        (given.trace, simulator.chrome_trace),
    ):
        if path:
            path.write_text(draw(simulator.load_runtime().last()))


if __name__ == "__main__":
    main()
