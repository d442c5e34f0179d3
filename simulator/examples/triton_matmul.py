"""Use 2 of the simulator by itself: a Triton kernel, compiled for an MI300X where there is none.

    pip install ./simulator triton
    python simulator/examples/triton_matmul.py [--target gfx950] [--html FILE]

Triton compiles ahead of time for a target that it is told. Its kernels take LDS at launch
(`metadata.shared`) and two hidden pointers behind their own arguments.
"""

import argparse
import pathlib
import tempfile

import numpy as np
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

import simulator

M, N, K = 256, 512, 384
BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32}


@triton.jit
def matmul(a, b, c, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """c [M, N] = a [M, K] b [K, N], a block a program."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, K, BLOCK_K):
        x = tl.load(a + m[:, None] * K + (begin + k)[None, :])
        y = tl.load(b + (begin + k)[:, None] * N + n[None, :])
        sums += tl.dot(x, y)
    tl.store(c + m[:, None] * N + n[None, :], sums.to(tl.float16))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--target", default="gfx942")
    parser.add_argument("--html", type=pathlib.Path)
    arguments = parser.parse_args()
    types = {"a": "*fp16", "b": "*fp16", "c": "*fp16", "N": "i32", "K": "i32"}
    types |= dict.fromkeys(BLOCKS, "constexpr")
    aligned = {(n,): [["tt.divisibility", 16]] for n in range(5)}
    source = ASTSource(matmul, types, BLOCKS, aligned)
    kernel = triton.compile(source, target=GPUTarget("hip", arguments.target, 64))

    with tempfile.NamedTemporaryFile(suffix=".hsaco") as file:
        file.write(kernel.asm["hsaco"])
        file.flush()
        code = simulator.load(file.name)
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape).astype(np.float16) for shape in ((M, K), (K, N)))
    c = np.empty((M, N), np.float16)
    result = code.launch(
        "matmul",
        grid=(M // BLOCKS["BLOCK_M"], N // BLOCKS["BLOCK_N"]),
        block=kernel.metadata.num_warps * kernel.metadata.warp_size,
        args=[a, b, simulator.Out(c), N, K, None, None],
        lds=kernel.metadata.shared,
        cycles=simulator.machine_for(arguments.target, traced=1),
    ).check()
    error = np.abs(c - a.astype(np.float64) @ b).max()
    mfma, time = result.counters["by_class"]["matrix"], result.cycles.seconds * 1e6
    print(f"{code.target}: largest error {error:.3f}, {mfma} MFMA, {time:.2f} us modelled, "
          "no findings")  # fmt: skip
    if arguments.html:
        arguments.html.write_text(simulator.html_page(result))


if __name__ == "__main__":
    main()
