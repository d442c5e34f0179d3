"""What test_tuning.py runs in a process of its own, on a package whose CPU tensors are multiplied
by the AMD launchers in the simulator (simulated.package_folder).

    python tests/tuning_script.py FOLDER FILE.json

Times come from a table of this script, so that a known config wins. Prints "done" at the end.
"""

import ctypes
import importlib.util
import json
import sys
import threading
from pathlib import Path

import torch

folder, path = Path(sys.argv[1]), Path(sys.argv[2])
spec = importlib.util.spec_from_file_location("tuned", folder / "__init__.py")
package = importlib.util.module_from_spec(spec)
sys.modules["tuned"] = package
spec.loader.exec_module(package)
tuning, runtime = package.tuning, sys.modules["tuned._ops"].runtime
runtime.sim_last_launch.restype = ctypes.c_char_p

N, K, FP8 = 48, 640, torch.float8_e4m3fnuz
WINNER = "specialised_waves block_n=16 waves=8 split_k=3 workgroups=0 xcds=8 producers=4 sparse=0"
winner = WINNER
timed = set()


def last_kernel() -> str:
    return json.loads(runtime.sim_last_launch())["kernel"]


def from_table(call, inputs, replays):
    """Calls once, with 1 us for the winner and 2 us for the others."""
    call(inputs[0])
    config = call.__closure__[call.__code__.co_freevars.index("config")].cell_contents
    timed.add(config)
    return 1.0 if config == winner else 2.0


tuning.tuner.median_us = from_table
lines = []
shape = tuning.GemmShape(N, K, FP8, FP8)
document = tuning.tune_gemm([shape], rows=[1, 9], output=path, progress=lines.append)
(entry,) = document["entries"]
assert entry["m"] == 16 and entry["config"] == WINNER != entry["default"], entry
assert len(lines) == 2 and "wrong" not in "".join(lines), lines

# In force, for all rows of the class and no others.
weight = torch.randn(N, K).to(FP8)
a = {rows: torch.randn(rows, K).to(FP8) for rows in (1, 16, 17)}
everything = tuning.gemm_candidates(a[1], weight)
assert timed == set(everything) and len(everything) > 20
assert everything[0] == entry["default"]
for rows in (1, 16):
    assert package.gemm_config(a[rows], weight) == WINNER
    package.gemm(a[rows], weight)
    assert "specialised_waves" in last_kernel(), last_kernel()
assert package.gemm_config(a[17], weight) != WINNER
assert package.gemm_config(a[1], weight[:32]) != WINNER

# Cleared, and loaded from the file.
tuning.clear_tuning(document)
assert package.gemm_config(a[1], weight) == entry["default"]
package.gemm(a[1], weight)
assert "register_pipeline" in last_kernel()
assert tuning.load_tuning(path) == 1
assert package.gemm_config(a[1], weight) == WINNER

# A file whose config cannot serve the class is refused as a whole.
broken = json.loads(path.read_text())
broken["entries"].append({**entry, "n": 32, "config": WINNER.replace("split_k=3", "split_k=6")})
bad = path.with_name("broken.json")
bad.write_text(json.dumps(broken))
tuning.clear_tuning(document)
try:
    tuning.load_tuning(bad)
except ValueError as error:
    assert "K blocks" in str(error) and "split_k=6" in str(error), error
else:
    raise AssertionError("a config that cannot be was loaded")
assert package.gemm_config(a[1], weight) == entry["default"]

# A call keeps one config from its workspace to its launch, whatever other threads set.
expected = {config: tuning.gemm_with_config(config, a[16], weight) for config in everything[:4]}
exact = a[16].double() @ weight.double().t()
done = threading.Event()


def keep_changing() -> None:
    key = (-1, 16, N, K, "float8_e4m3fnuz", "float8_e4m3fnuz", False)
    while not done.is_set():
        for config in ("", *everything[:4]):
            package.functional.ops.tune_gemm(*key, config)


other = threading.Thread(target=keep_changing)
other.start()
for _ in range(60):
    out = package.gemm(a[16], weight)
    assert any(torch.equal(out, one) for one in expected.values())
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
done.set()
other.join()

# gemm: a class that ends at a power of two, and its own choice where the config cannot serve.
N, K = 128, 640
weight = torch.randn(N, K).to(FP8)
a = {rows: torch.randn(rows, K).to(FP8) for rows in (150, 256, 257)}
everything = tuning.gemm_candidates(a[256], weight)
winner = everything[-1]
path = path.with_name("gemm.json")
document = tuning.tune_gemm([tuning.GemmShape(N, K, FP8, FP8)], rows=[256], output=path)
(entry,) = document["entries"]
assert len(everything) > 5 and entry["config"] == winner != entry["default"] == everything[0], entry
assert package.gemm_config(a[150], weight) == package.gemm_config(a[256], weight) == winner
assert package.gemm_config(a[257], weight) != winner
tuning.clear_tuning(document)
assert package.gemm_config(a[256], weight) == entry["default"]
assert tuning.load_tuning(path) == 1 and package.gemm_config(a[256], weight) == winner

key = (-1, 256, N, K, "float8_e4m3fnuz", "float8_e4m3fnuz", False)
rounds = "tiled block_m=64 block_n=64 split_k=0 workgroups=6 whole_rounds=1 group_m=2 xcds=2"
package.functional.ops.tune_gemm(*key, rounds)
assert package.gemm_config(a[256], weight) == rounds
own = tuning.gemm_candidates(a[150], weight)[0]  # six tiles: none is left after the first round
assert package.gemm_config(a[150], weight) == own
for rows in (150, 256):
    exact = a[rows].double() @ weight.double().t()
    out = package.gemm(a[rows], weight)
    torch.testing.assert_close(out.double(), exact, rtol=1e-2, atol=1e-2)
    config = rounds if rows == 256 else own
    assert torch.equal(out, tuning.gemm_with_config(config, a[rows], weight))
tuning.clear_tuning(document)
assert runtime.sim_finding_count() == 0
print("done")
