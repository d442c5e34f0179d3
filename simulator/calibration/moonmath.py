"""moonmath's bfloat16 attention on an MI300X, as its README times it: B 2, H 24, S 16384, D 128.

One round of the GPU is played: 304 workgroups of 384 queries, one a compute unit, a head a die, as
its order of workgroups has it. Two short contexts are played, and what a block of 64 keys adds
between them is carried on to the published context and number of rounds. The transpose of V
before it and the merge of the last, split round after it are left out: they are under 1 %.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import rocm

import simulator

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "calibration"
# Its main loop needs every register. Clang 19 spills two in it, clang 22 some 900.
COMPILER = "clang++-19"
FLAGS = ("-ffast-math", "-fno-math-errno", "-mllvm", "-amdgpu-early-inline-all=true", "-w")
HEADS, CONTEXT, D, MILLISECONDS = 48, 16384, 128, 11.385  # rounding towards zero, as compiled here
QUERIES, KEYS, THREADS = 384, 64, 512  # of a workgroup, of a block, of a workgroup
DIES, UNITS = 8, 38
BLOCKS = (8, 16)  # of keys, in the two launches


def checkout() -> Path:
    return Path(os.environ.get("MOONMATH", FOLDER / "moonmath"))


def compiler() -> str | None:
    return shutil.which(COMPILER)


def _compiled(include: Path) -> simulator.CodeObject:
    source, output = Path(__file__).with_name("moonmath.hip"), FOLDER / "moonmath.co"
    extra = (*FLAGS, f"-I{include}", f"-I{checkout()}")
    command = rocm.find_toolchain().device_command(source, output, "gfx942", extra=extra)
    subprocess.run([compiler(), *command[1:]], check=True)
    return simulator.load(output)


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _float(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.uint32) << 16).view(np.float32)


def _transposed(v: np.ndarray) -> np.ndarray:
    """V [heads, context, D] as the kernel reads it: by block of keys, 16 of D and pair of 16 keys,
    64 lanes with 4 keys of each of the pair."""
    heads, context, _ = v.shape
    v = v.reshape(heads, context // KEYS, 2, 2, 4, 4, D // 16, 16)  # pair, half, quad, key, D, D
    return np.ascontiguousarray(v.transpose(0, 1, 6, 2, 4, 7, 3, 5))


def _seconds(code, blocks: int, array, machine) -> float:
    random, queries, context = np.random.default_rng(0), UNITS * QUERIES, blocks * KEYS
    q, k, v = (array((DIES, rows, D), np.uint16) for rows in (queries, context, context))
    for values in (q, k, v):
        values[...] = _bfloat16(random.standard_normal(values.shape))
    turned = array(v.size, np.uint16)
    turned[...] = _transposed(v).reshape(-1)
    out = array(q.shape, np.uint16)
    (kernel,) = (k for k in code.kernels if "attention_forwardILb0ELb0ELb0E" in k)
    scale = D**-0.5
    arguments = [q, k, turned, out, queries, context, float(scale * np.log2(np.e)), DIES]
    arguments += [None, None, None, 0.0, 0, None, 0, 0, None]
    got = code.launch(kernel, (UNITS, DIES), THREADS, arguments, checks=False, caches=False,
                      cycles=machine)  # fmt: skip
    for head, row in ((0, 0), (DIES - 1, queries - 1)):
        weights = np.exp(_float(k[head]) @ _float(q[head, row]) * scale)
        want = weights @ _float(v[head]) / weights.sum()
        if not np.allclose(_float(out[head, row]), want, atol=0.02):
            raise RuntimeError(f"required the attention of head {head}, row {row}, got another")
    return got.cycles.seconds


def teraflops(array, machine: simulator.cycles.Machine, include: Path) -> tuple[float, float]:
    """Published and modelled. `include` has an empty hip/hip_bf16.h."""
    code = _compiled(include)
    few, many = (_seconds(code, blocks, array, machine) for blocks in BLOCKS)
    block = (many - few) / (BLOCKS[1] - BLOCKS[0])
    round_s = many + block * (CONTEXT // KEYS - BLOCKS[1])
    rounds = HEADS * -(-CONTEXT // QUERIES) / (DIES * UNITS)
    work = 4e-12 * HEADS * CONTEXT**2 * D
    return work / MILLISECONDS * 1e3, work / (round_s * rounds)
