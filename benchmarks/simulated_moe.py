"""Grouped products on the simulated MI300X: what the cycle model says, beside the bytes' floor.

    python benchmarks/simulated_moe.py [--product 8,8,1536,2048,row ...] [--config TEXT ...]

What docs/kernels/moe_journal.md says of large prompts comes from here; whole layers are
simulated_moe_layers.py's. Each product is a grouped_gemm: rows spread evenly over the experts that
they touch. The launcher's machine code runs in the simulator (checkers off), and the cycle model
plays it; nothing here was measured on an AMD GPU, and the model has been held against few matrix
products. Without --config: what the choice takes. The floor is that of w's bytes at 4.2 TB/s.
"""

from __future__ import annotations

import torch
from simulated_product import (
    aligned,
    arguments,
    largest_shares,
    last_played,
    print_table,
    read_product,
    simulated,
    start,
)

TERABYTES = 4.2

# Rows, experts touched, N, K and kind of operands: Qwen3-30B-A3B at 1 and at 64 tokens, DeepSeek-V3
# TP8 at 1 token, and a part of eight of DeepSeek-V3 at 64 tokens.
PRODUCTS = [
    "8,8,1536,2048,row", "8,8,2048,768,row", "8,8,1536,2048,bf16",
    "512,126,1536,2048,row", "8,8,512,7168,block", "8,8,7168,256,block",
]  # fmt: skip


def operands(rows: int, experts: int, n: int, k: int, kind: str) -> tuple:
    offsets = torch.tensor([(e + 1) * rows // experts for e in range(experts)], dtype=torch.int32)
    if kind == "bf16":
        a, w = aligned(torch.randn(rows, k).bfloat16()), torch.randn(n, k).bfloat16()
        return a, aligned(w.expand(experts, n, k)), offsets, None, None
    blocks, blocks_n = -(-k // 128), -(-n // 128)
    sizes = {"row": ((rows, 1), (n, 1)), "block": ((rows, blocks), (blocks_n, blocks))}[kind]
    a, w = (torch.randn(count, k).to(simulated.NATIVE) for count in (rows, n))
    scale_a, scale_w = (torch.rand(size) + 0.5 for size in sizes)
    w, scale_w = (t.view(torch.uint8) if t.dtype != torch.float32 else t for t in (w, scale_w))
    w = aligned(w.expand(experts, n, k)).view(simulated.NATIVE)
    return aligned(a), w, offsets, aligned(scale_a), aligned(scale_w.expand(experts, *sizes[1]))


def row(product: str, config: str | None) -> list[str]:
    rows, experts, n, k, kind = read_product(product)
    out = aligned(torch.zeros(rows, n, dtype=torch.bfloat16))
    given = operands(rows, experts, n, k, kind)
    config = config or simulated.ops.grouped_gemm_configs(out, *given).splitlines()[0]
    simulated.ops.grouped_gemm(out, *given, config)
    played = last_played()
    floor = experts * n * k * given[1].element_size() / (TERABYTES * 1e6)
    return [
        f"{rows} of {experts} x {n} x {k} {kind}",
        f"`{config}`",
        f"{floor:.1f}",
        f"{played.seconds * 1e6:.1f}",
        largest_shares(played, 4),
    ]


def main() -> None:
    given = arguments(__doc__.partition("\n")[0], PRODUCTS, "R,E,N,K,row|block|bf16").parse_args()
    start()
    header = ["rows of experts x N x K", "config", "floor us", "modelled us", "cycles of the SIMDs"]
    print_table(header, row, given)


if __name__ == "__main__":
    main()
