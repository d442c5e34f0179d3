"""The judge on Triton's kernels: no false alarm in correct ones, and every planted bug told.

    make triton                                    in an environment of its own, build/triton
    python simulator/suites/triton_suite.py [--write] [--seeds 4] [--only NAME]

Triton compiles ahead of time for gfx942 and gfx950. A correct kernel must give the reference's
values without an error, in every order of waves; a planted bug must be told in one of them.
`--write` puts the table into simulator/docs/suites.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Callable

import numpy as np
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(pathlib.Path(__file__).parent)]

import suite_table  # noqa: E402
import triton_kernels as kernels  # noqa: E402

import simulator  # noqa: E402

TARGETS = ("gfx942", "gfx950")
HANG = "hang"
f16, f32, i32 = np.float16, np.float32, np.int32


@dataclasses.dataclass
class Case:
    kernel: object
    grid: tuple
    # name -> array, number or Out; constants are capital.
    arguments: Callable[[np.random.Generator], dict]
    right: Callable[[dict], bool] | None = None  # None: a bug is planted
    told: tuple[str, ...] = ()  # kinds of findings, one of which tells the bug
    warps: int = 4
    title: str = ""

    @property
    def name(self) -> str:
        return self.title or self.kernel.__name__


def near(a, b, tolerance: float) -> bool:
    return bool(np.allclose(a.astype(np.float64), b, rtol=tolerance, atol=tolerance))


def _normal(g, *shape, kind=f32):
    return g.standard_normal(shape).astype(kind)


def vectors(g):
    return {"x": _normal(g, 1000), "y": _normal(g, 1000), "out": np.empty(1000, f32), "n": 1000,
            "BLOCK": 256}  # fmt: skip


def rows(g, n=300, count=5):
    return {"x": _normal(g, count, n), "out": np.empty((count, n), f32), "n": n, "BLOCK": 512}


def products(g, m=100, n=90, k=72):
    return {"a": _normal(g, m, k, kind=f16), "b": _normal(g, k, n, kind=f16),
            "c": np.empty((m, n), f16), "M": m, "N": n, "K": k,
            "BM": 64, "BN": 64, "BK": 32}  # fmt: skip


def splits(g, atomic):
    return {"a": _normal(g, 64, 256, kind=f16), "b": _normal(g, 256, 32, kind=f16),
            "c": np.zeros((64, 32), f32), "N": 32, "K": 256, "BM": 32, "BN": 32, "BK": 64,
            "ATOMIC": atomic}  # fmt: skip


def heads(g):
    q, k, v = (_normal(g, 2, 128, 64, kind=f16) for _ in range(3))
    return {"q": q, "k": k, "v": v, "out": np.empty_like(q), "scale": 0.125, "n": 128, "D": 64,
            "BM": 64, "BN": 32}  # fmt: skip


def attention_right(a):
    q, k, v = (a[x].astype(np.float64) for x in "qkv")
    s = q @ k.transpose(0, 2, 1) * 0.125
    s = np.where(np.tri(128, dtype=bool), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return near(a["out"], p / p.sum(-1, keepdims=True) @ v, 4e-3)


def layers(g):
    n = 300
    return {"x": _normal(g, 5, n, kind=f16), "weight": _normal(g, n), "bias": _normal(g, n),
            "out": np.empty((5, n), f16), "n": n, "BLOCK": 512}  # fmt: skip


def layer_right(a):
    x = a["x"].astype(np.float64)
    x -= x.mean(1, keepdims=True)
    x /= np.sqrt((x * x).mean(1, keepdims=True) + 1e-5)
    return near(a["out"], x * a["weight"] + a["bias"], 4e-3)


def soft_right(a):
    e = np.exp(a["x"].astype(np.float64))
    return near(a["out"], e / e.sum(1, keepdims=True), 1e-5)


def drops(g):
    return {"x": _normal(g, 1000), "out": np.empty(1000, f32), "seed": 7, "n": 1000, "BLOCK": 256}


def dropout_right(a):
    kept = a["out"] != 0
    return 400 < kept.sum() < 600 and near(a["out"][kept], 2 * a["x"][kept], 1e-6)


def integers(g):
    return {"x": g.integers(-9, 9, (4, 200), dtype=i32), "out": np.empty((4, 200), i32), "n": 200,
            "BLOCK": 256}  # fmt: skip


def to_sort(g):
    return {"x": _normal(g, 4, 128), "out": np.empty((4, 128), f32), "BLOCK": 128}


def counted(g, atomic):
    return {"x": g.integers(0, 16, 1000, dtype=i32), "out": np.zeros(16, i32), "n": 1000,
            "BLOCK": 256, "ATOMIC": atomic}  # fmt: skip


def squares(g, in_place):
    x = _normal(g, 64, 64)
    return {"x": x, "out": x if in_place else np.empty_like(x), "M": 64, "N": 64, "B": 32}


def labels(g):
    return {"x": _normal(g, 5, 300), "target": g.integers(0, 300, 5, dtype=i32),
            "out": np.empty(5, f32), "n": 300, "BLOCK": 512}  # fmt: skip


def entropy_right(a):
    x = a["x"].astype(np.float64)
    return near(a["out"], np.log(np.exp(x).sum(1)) - x[np.arange(5), a["target"]], 1e-4)


def partial(g, sem):
    return {"x": _normal(g, 8 * 256), "parts": np.empty(8, f32), "count": np.zeros(1, i32),
            "out": np.empty(1, f32), "BLOCK": 256, "PROGRAMS": 8, "SEM": sem}  # fmt: skip


def everyone(g):
    return {"x": _normal(g, 8 * 256), "parts": np.zeros(8, f32), "out": np.empty(8, f32),
            "BLOCK": 256, "PROGRAMS": 8}  # fmt: skip


def locked(g, lock=True, free=True, sem="release"):
    return {"x": _normal(g, 6, 200), "out": np.zeros(200, f32), "lock": np.zeros(1, i32), "n": 200,
            "BLOCK": 256, "LOCKED": lock, "FREED": free, "SEM": sem}  # fmt: skip


k = kernels
CASES = [
    Case(k.vector_add, (4,), vectors, lambda a: near(a["out"], a["x"] + a["y"], 1e-6)),
    Case(k.softmax, (5,), rows, soft_right),
    Case(k.layer_norm, (5,), layers, layer_right),
    Case(k.dropout, (4,), drops, dropout_right),
    Case(k.matmul, (2, 2), products,
         lambda a: near(a["c"], a["a"].astype(np.float64) @ a["b"], 2e-2)),
    Case(k.split_k, (2, 4), lambda g: splits(g, True),
         lambda a: near(a["c"], a["a"].astype(np.float64) @ a["b"], 1e-3)),
    Case(k.attention, (2, 2), heads, attention_right),
    Case(k.prefix_sum, (4,), integers, lambda a: (a["out"] == a["x"].cumsum(1)).all()),
    Case(k.sort, (4,), to_sort, lambda a: (a["out"] == np.sort(a["x"], 1)).all()),
    Case(k.histogram, (4,), lambda g: counted(g, True),
         lambda a: (a["out"] == np.bincount(a["x"], minlength=16)).all()),
    Case(k.transpose, (2, 2), lambda g: squares(g, False), lambda a: (a["out"] == a["x"].T).all()),
    Case(k.cross_entropy, (5,), labels, entropy_right),
    Case(k.last_sums, (8,), lambda g: partial(g, "acq_rel"),
         lambda a: near(a["out"], a["x"].sum(), 1e-3)),
    Case(k.locked_sum, (6,), locked, lambda a: near(a["out"], a["x"].sum(0), 1e-4)),
    # ---- planted ----
    Case(k.vector_add_store_unmasked, (4,), vectors, told=("out-of-bounds",),
         title="vector_add, the store without a mask"),
    Case(k.softmax_store_unmasked, (5,), rows, told=("global-race", "out-of-bounds"),
         title="softmax, the store without a mask"),
    Case(k.matmul_adds_to_c, (2, 2), lambda g: products(g, k=64), told=("uninitialised",),
         title="matmul that adds to a fresh c"),
    Case(k.split_k, (2, 4), lambda g: splits(g, False), told=("global-race",),
         title="split_k, no atomic"),
    Case(k.histogram, (4,), lambda g: counted(g, False), told=("global-race", "lane-collision"),
         title="histogram, no atomic"),
    Case(k.transpose, (2, 2), lambda g: squares(g, True), told=("global-race",),
         title="transpose in place"),
    Case(k.last_sums, (8,), lambda g: partial(g, "relaxed"), told=("global-race",),
         title="last_sums, a relaxed counter"),
    Case(k.all_sum, (8,), everyone, told=("global-race",), title="all_sum, nothing waited for"),
    Case(k.locked_sum, (6,), lambda g: locked(g, lock=False), told=("global-race",),
         title="locked_sum, no lock"),
    Case(k.locked_sum, (6,), lambda g: locked(g, sem="relaxed"), told=("global-race",),
         title="locked_sum, a relaxed unlock"),
    Case(k.locked_sum, (6,), lambda g: locked(g, free=False), told=(HANG,),
         title="locked_sum, never unlocked"),
]  # fmt: skip


CONSTANTS = ("ATOMIC", "B", "BK", "BLOCK", "BM", "BN", "D", "FREED", "LOCKED", "PROGRAMS", "SEM")


def compiled(case: Case, target: str, arguments: dict):
    """The code object and the metadata of Triton."""
    kinds = {f16: "*fp16", f32: "*fp32", i32: "*i32"}
    signature, constants = {}, {}
    for name, value in arguments.items():
        if name in CONSTANTS:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, np.ndarray):
            signature[name] = kinds[value.dtype.type]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    pointers = {(n,): [["tt.divisibility", 16]] for n, x in enumerate(arguments.values())
                if isinstance(x, np.ndarray)}  # fmt: skip
    source = ASTSource(case.kernel, signature, constants, pointers)
    made = triton.compile(source, target=GPUTarget("hip", target, 64),
                          options={"num_warps": case.warps})  # fmt: skip
    with tempfile.NamedTemporaryFile(suffix=".hsaco") as file:
        file.write(made.asm["hsaco"])
        file.flush()
        return simulator.load(file.name), made.metadata, constants


def judged(case: Case, target: str, seeds: int) -> dict:
    """Errors and suspicious findings of all orders, and whether the values were right in all."""
    errors, suspicious, right, kinds = 0, 0, True, set()
    code = None
    for seed in range(seeds):
        generator = np.random.default_rng(seed)
        arguments = case.arguments(generator)
        if code is None:
            code, metadata, constants = compiled(case, target, arguments)
        given = []
        for name, value in arguments.items():
            if name in constants:
                continue
            # np.empty says that nobody wrote it; zeros are the kernel's starting point.
            empty = isinstance(value, np.ndarray) and name in UNWRITTEN.get(case.name, ("out", "c"))
            given.append(simulator.Out(value) if empty else value)
        try:
            result = code.launch(metadata.name, case.grid, metadata.num_warps * metadata.warp_size,
                                 [*given, None, None], metadata.shared, seed=seed)  # fmt: skip
        except simulator.SimulatorError as error:
            waits = "never comes" in str(error) or "hangs on hardware" in str(error)
            kinds.add(HANG if waits else "stopped")
            errors += 1
            continue
        errors += sum(f.level == "error" for f in result.findings)
        suspicious += sum(f.level == "suspicious" for f in result.findings)
        kinds |= {f.kind for f in result.findings if f.level == "error"}
        if case.right:
            right = right and bool(case.right(arguments))
    return {"errors": errors, "suspicious": suspicious, "right": right, "kinds": kinds}


# Results that start as zeros or that hold the input, by the case's name.
UNWRITTEN = {
    **dict.fromkeys(("split_k", "split_k, no atomic", "histogram", "histogram, no atomic",
                     "transpose in place"), ()),
    **{c.name: () for c in CASES if c.kernel is kernels.locked_sum},
    **{c.name: ("out", "parts") for c in CASES if c.kernel is kernels.last_sums},
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true", help="the table into simulator/docs")
    chosen = parser.parse_args()
    table = []
    for case in CASES:
        if chosen.only not in case.name:
            continue
        for target in TARGETS:
            got = judged(case, target, chosen.seeds)
            if case.right:
                passed = not got["errors"] and got["right"]
                said = "clean" if passed else ", ".join(sorted(got["kinds"])) or "wrong values"
                if passed and got["suspicious"]:
                    said = f"{got['suspicious']} suspicious"
            else:
                passed = bool(got["kinds"] & set(case.told))
                said = ", ".join(sorted(got["kinds"])) or "nothing"
            table.append(suite_table.Row(case.name, target, not case.right, said, passed))
            print(table[-1].words(), flush=True)
    head = f"Triton {triton.__version__}, {chosen.seeds} orders a kernel"
    print(suite_table.summary(table))
    if chosen.write:
        suite_table.write("triton", head, table)
    return int(not all(row.passed for row in table))


if __name__ == "__main__":
    sys.exit(main())
