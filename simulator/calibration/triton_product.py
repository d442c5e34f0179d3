"""A float16 product in Triton, of the shape of one whose times on gfx950 are published.

The published kernel copies tiles to LDS asynchronously into a ring of buffers, eight waves and MFMA
of 16 x 16 x 32; workgroups are dealt to dies in chunks and walked in groups of rows. This one says
the same in plain Triton, whose compiler makes the ring of `num_stages`; the two differ in compiler
version and in when the next tile's copy starts.
"""

from __future__ import annotations

import pathlib

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

DIES, CHUNK, GROUP, BLOCK_K, WAVES = 8, 4, 16, 32, 8


@triton.jit
def product(
    a, b, c, M, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, DIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """c [M, N] = a [M, K] b [N, K] transposed; whole blocks only."""
    worker = tl.program_id(0)
    rows, columns = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    if worker < rows * columns // (DIES * CHUNK) * (DIES * CHUNK):
        turn = worker // DIES
        worker = (turn // CHUNK * DIES + worker % DIES) * CHUNK + turn % CHUNK
    first = worker // (GROUP * columns) * GROUP
    height = min(rows - first, GROUP)
    row, column = first + worker % (GROUP * columns) % height, worker % (GROUP * columns) // height
    tl.assume(row >= 0)
    tl.assume(column >= 0)
    m = row * BLOCK_M + tl.arange(0, BLOCK_M)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    a_tile = a + m[:, None] * K + k[None, :]
    b_tile = b + n[None, :] * K + k[:, None]
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(0, K, BLOCK_K):
        sums = tl.dot(tl.load(a_tile), tl.load(b_tile), sums)
        a_tile += BLOCK_K
        b_tile += BLOCK_K
    tl.store(c + m[:, None] * N + n[None, :], sums.to(tl.float16))


def compiled(
    target: str, block_m: int, block_n: int, stages: int, folder: pathlib.Path
) -> tuple[pathlib.Path, int]:
    """The code object's file, and the LDS that a launch gives it."""
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": BLOCK_K, "GROUP": GROUP,
                 "DIES": DIES, "CHUNK": CHUNK}  # fmt: skip
    types = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "M": "i32", "N": "i32", "K": "i32"}
    types |= dict.fromkeys(constants, "constexpr")
    facts = [["tt.divisibility", 16]]
    known = {(n,): facts + [["tt.pointer_range", 32]] * (n < 3) for n in range(6)}
    options = {"num_warps": WAVES, "num_stages": stages, "matrix_instr_nonkdim": 16}
    source = ASTSource(product, types, constants, known)
    kernel = triton.compile(source, target=GPUTarget("hip", target, 64), options=options)
    file = folder / f"product-{target}-{block_m}-{block_n}-{stages}.co"
    file.write_bytes(kernel.asm["hsaco"])
    return file, kernel.metadata.shared
