"""Which config gemm runs with: asked for, forced, tuned, loaded from a file."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from compare import bits
from project import ROOT

FP8 = torch.float8_e4m3fn
CPU_NAMES = {"portable", "neon", "avx2", "avx512", "amx"}


@pytest.fixture
def operands():
    return torch.randn(3, 200).to(FP8), torch.randn(40, 200).to(FP8)


@pytest.fixture
def document(package, tmp_path):
    """What tuning on the CPU writes, and where."""
    path = tmp_path / "tuning.json"
    package.tuning.tune_gemm([(40, 200), (17, 64)], rows=[1, 20], device="cpu", output=path)
    return json.loads(path.read_text()), path


def test_config_can_be_asked_for(best_package, device):
    dtype = best_package.native_fp8_dtype(device)
    a, w = (torch.randn(n, 256, device=device).to(dtype) for n in (3, 48))
    config = best_package.gemm_config(a, w)
    candidates = best_package.tuning.gemm_candidates(a, w)
    assert config == candidates[0]
    if device.type == "cpu":
        assert config in CPU_NAMES and candidates == [config]


def test_every_candidate_can_be_forced(best_package, device):
    package, tuning = best_package, best_package.tuning
    dtype = package.native_fp8_dtype(device)
    a, w = (torch.randn(n, 256, device=device).to(dtype) for n in (3, 48))
    scale = torch.rand(48, 1, device=device)
    bias = torch.randn(48, device=device).bfloat16()
    expected = package.gemm(a, w, None, scale, bias=bias)
    for config in tuning.gemm_candidates(a, w, None, scale):
        actual = tuning.gemm_with_config(config, a, w, None, scale, bias=bias)
        if config == package.gemm_config(a, w, None, scale):
            assert torch.equal(bits(actual), bits(expected))
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_a_config_that_cannot_be_is_refused(package, operands):
    with pytest.raises(RuntimeError, match=r"instruction set.*got 'fast' for M = 3, N = 40"):
        package.tuning.gemm_with_config("fast", *operands)
    with pytest.raises(RuntimeError, match="got 'fast'"):
        package.functional.ops.tune_gemm(
            -1, 16, 40, 200, "float8_e4m3fn", "float8_e4m3fn", False, "fast"
        )
    with pytest.raises(RuntimeError, match=r"a dtype must be float16.* got float64"):
        package.functional.ops.tune_gemm(-1, 1, 4, 4, "float64", "float16", False, "")


def test_cpu_has_nothing_to_choose(package, document):
    content, path = document
    assert content["schema"] == "rocm-kernels tuning 1" and content["device"] == "cpu"
    assert content["package_version"] == 1 and content["date"].endswith("Z")
    keys = [(entry["op"], entry["m"], entry["n"], entry["k"]) for entry in content["entries"]]
    shapes = [(16, 40, 200), (32, 40, 200), (16, 17, 64), (32, 17, 64)]
    assert keys == [("gemm", *shape) for shape in shapes]
    for entry in content["entries"]:
        assert entry["config"] == entry["default"] in CPU_NAMES
        (times,) = entry["median_us"].values()
        assert all(0 < microseconds < 1e6 for microseconds in times.values())
    assert package.tuning.load_tuning(path) == 0


def test_gemm_is_tuned_for_classes_that_end_at_powers_of_two(package, tmp_path):
    path = tmp_path / "gemm.json"
    rows = [65, 100, 128, 129, 20000]
    package.tuning.tune_gemm([(17, 64)], rows=rows, device="cpu", output=path)
    entries = json.loads(path.read_text())["entries"]
    assert [(entry["op"], entry["m"]) for entry in entries] == [
        ("gemm", 128), ("gemm", 256), ("gemm", 16384)
    ]  # fmt: skip
    for entry, members in zip(entries, (rows[:3], rows[3:4], rows[4:]), strict=True):
        assert entry["config"] == entry["default"] in CPU_NAMES
        assert list(entry["median_us"][entry["config"]]) == [str(m) for m in members]
    assert package.tuning.load_tuning(path) == 0
    package.tuning.clear_tuning({"entries": entries})
    with pytest.raises(ValueError, match=r"rows must be at least 1, got \(5, 0\)"):
        package.tuning.tune_gemm([(17, 64)], rows=[5, 0])


def test_every_candidate_of_gemm_can_be_forced(best_package, device):
    package, tuning = best_package, best_package.tuning
    dtype = package.native_fp8_dtype(device)
    a, w = (torch.randn(n, 256, device=device).to(dtype) for n in (70, 48))
    scale = torch.rand(48, 1, device=device)
    expected = package.gemm(a, w, None, scale)
    configs = tuning.gemm_candidates(a, w, None, scale)
    assert configs[0] == package.gemm_config(a, w, None, scale)
    for config in configs:
        actual = tuning.gemm_with_config(config, a, w, None, scale)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="got 'fast' for M = 70, N = 48"):
        tuning.gemm_with_config("fast", a, w, None, scale)


def test_gemm_takes_the_config_in_force_where_it_serves(best_package, device):
    """On CUDA: a config of the tensor cores does not serve operands of odd strides."""
    package, ops = best_package, best_package.functional.ops
    dtype = package.native_fp8_dtype(device)
    wide = torch.randn(70, 272, device=device).to(dtype)
    a, odd, w = wide[:, :256], wide[:, 1:257], torch.randn(48, 256, device=device).to(dtype)
    configs = package.tuning.gemm_candidates(a, w)
    index = -1 if device.type == "cpu" else torch.cuda.current_device()
    names = [str(t.dtype).removeprefix("torch.") for t in (a, w)]
    key = (index, 100, 48, 256, *names, False)  # of the class of 70
    own = package.gemm_config(odd, w)
    ops.tune_gemm(*key, configs[-1])
    try:
        assert package.gemm_config(a, w) == configs[-1]
        assert package.gemm_config(a[:64], w) == package.tuning.gemm_candidates(a[:64], w)[0]
        assert package.gemm_config(odd, w) in (own, configs[-1])
        for operand in (a, odd):
            exact = operand.double() @ w.double().t()
            torch.testing.assert_close(
                package.gemm(operand, w).double(), exact, rtol=1e-2, atol=1e-2
            )
        ops.tune_gemm(*key, configs[0])
        assert package.gemm_config(a, w) == configs[0]
        assert package.gemm_config(odd, w) == own
    finally:
        ops.tune_gemm(*key, "")
    with pytest.raises(RuntimeError, match="got 'fast'"):
        ops.tune_gemm(*key, "fast")
    with pytest.raises(RuntimeError, match="rows must be at least 1, got 0"):
        ops.tune_gemm(index, 0, *key[2:], "")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"package_version": 2}, "package_version 1, got .* and 2"),
        ({"schema": "another"}, "schema 'rocm-kernels tuning 1'.* got 'another'"),
        ({"device": "gfx942, 304 compute units"}, "tuned on 'gfx942, 304.*here is .'cpu'"),
        ({"entries": [{"m": 16}]}, "cannot be used"),
        ({"entries": [{"op": "another", "default": "", "config": ""}]}, "cannot be used.*another"),
    ],
    ids=["version", "schema", "device", "entry", "op"],
)
def test_files_of_another_kind_are_refused(package, document, change, words):
    content, path = document
    path.write_text(json.dumps({**content, **change}))
    with pytest.raises(ValueError, match=words):
        package.tuning.load_tuning(path)


def test_a_file_that_is_none_is_refused(package, tmp_path):
    with pytest.raises(ValueError, match="is no tuning file"):
        package.tuning.load_tuning(tmp_path / "missing.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(ValueError, match="is no tuning file"):
        package.tuning.load_tuning(tmp_path / "list.json")


def run(code, **environment):
    command = [sys.executable, "-W", "always", *code]
    result = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout, result.stderr


def test_import_loads_or_warns(package, document):
    content, path = document
    folder = os.path.dirname(package.__file__)
    code = ["-c", f"import sys; sys.path.insert(0, {folder!r}); import rocm_kernels"]
    assert "RuntimeWarning" not in run(code, ROCM_KERNELS_TUNING=str(path))[1]
    path.write_text(json.dumps({**content, "device": "sm_90, 132 SMs"}))
    _, errors = run(code, ROCM_KERNELS_TUNING=str(path))
    assert "ROCM_KERNELS_TUNING" in errors and "'sm_90, 132 SMs'" in errors


@pytest.mark.slow
def test_tuner_runs_as_a_program(package, tmp_path):
    folder, path = os.path.dirname(package.__file__), tmp_path / "t.json"
    arguments = ["--shape", "24,64", "--rows", "2", "--device", "cpu", "--output", str(path)]
    out, _ = run([folder, *arguments])
    assert "1 candidate" in out and json.loads(path.read_text())["entries"][0]["n"] == 24
    # Loaded by kernels, under whatever name that gives it.
    code = (
        "from kernels import get_kernel; get_kernel('org/rocm-kernels', version=1, backend='cpu')"
    )
    path.unlink()
    run(["-c", f"{code}.tuning.main()", *arguments])
    assert path.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "rows must be at least 1, got (0,)"),
        (["--rows", "many"], "must be whole numbers, got 'many'"),
        (["--shape", "24"], "must be N,K with both at least 1, got '24'"),
        (["--device", "bogus"], "this build runs on cpu, got 'bogus'"),
        (["--output", "/dev/null/t.json"], "output cannot be written: /dev/null/t.json: Not a dir"),
    ],
)
def test_the_program_refuses_in_a_sentence(package, capsys, tmp_path, arguments, message):
    path = tmp_path / "t.json"
    with pytest.raises(SystemExit):
        package.tuning.main(["--shape", "24,64", "--rows", "2", "--output", str(path), *arguments])
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_products_of_a_model(package):
    model = torch.nn.ModuleDict(
        {"q": torch.nn.Linear(64, 32), "again": torch.nn.Linear(64, 32, bias=False)}
    ).bfloat16()
    package.models.quantize_model_(model, fuse=False, activations="dynamic")
    shape = package.tuning.GemmShape(32, 64, FP8, FP8, False)
    assert package.tuning.shapes_of(model) == [shape]
    (entry,) = package.tuning.tune_gemm(model, rows=[1])["entries"]
    assert (entry["n"], entry["k"], entry["m"]) == (32, 64, 16)

    wide = torch.nn.ModuleDict({"q": torch.nn.Linear(64, 32)}).bfloat16()
    package.models.quantize_model_(wide, fuse=False, activations="none")
    assert package.tuning.shapes_of(wide) == [shape._replace(a_dtype=torch.bfloat16)]


def test_entries_change_while_others_multiply(package, operands):
    a, w = operands
    key = (-1, 16, 40, 200, "float8_e4m3fn", "float8_e4m3fn", False)
    config, expected = package.gemm_config(a, w), package.gemm(a, w)
    done = threading.Event()

    def keep_changing():
        while not done.is_set():
            package.functional.ops.tune_gemm(*key, config)
            package.functional.ops.tune_gemm(*key, "")

    other = threading.Thread(target=keep_changing)
    other.start()
    try:
        for _ in range(500):
            assert torch.equal(bits(package.gemm(a, w)), bits(expected))
    finally:
        done.set()
        other.join()


@pytest.mark.slow
def test_tuning_the_amd_launchers(on_the_simulator, tmp_path):
    """The whole way on the simulator: candidates, contract, winner, file, table, launch."""
    import simulated

    if simulated.TARGET != "gfx942":
        pytest.skip("the script multiplies gfx942's dialect")
    folder = simulated.package_folder()
    out, _ = run([str(ROOT / "tests" / "tuning_script.py"), str(folder), str(tmp_path / "t.json")])
    assert out.splitlines()[-1] == "done"
