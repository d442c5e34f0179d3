"""SGLang: an example of its hooks, and the variants that its pinned kernels client loads."""

import importlib
import os
import shutil
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from compare import assert_product_close
from project import ROOT

CLIENT = ("kernels==0.14.1", "kernels-data==0.14.1")  # what SGLang 0.5.23 asks for
VARIANT = "torch-stable-abi211-cpu-x86_64-linux"


@pytest.fixture
def plugin(package, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "integrations" / "sglang"))
    module = importlib.import_module("rocm_kernels_sglang")
    monkeypatch.setattr(module, "kernels", lambda: package)
    return module


def test_the_hook_is_registered(plugin, monkeypatch):
    registered = []
    registry = ModuleType("sglang.srt.plugins.hook_registry")
    registry.HookRegistry = SimpleNamespace(register=lambda *given: registered.append(given))
    registry.HookType = SimpleNamespace(AROUND="around")
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    for parent in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    plugin.register()
    assert registered == [(plugin.TARGET, plugin.apply_fp8_linear, "around")]


def refuse(*_, **__):
    raise AssertionError("SGLang's own function ran")


@pytest.mark.parametrize("scheme", ["dynamic", "static", "quantised before"])
@pytest.mark.parametrize("channels", [True, False], ids=["channel", "tensor"])
def test_linears(plugin, package, scheme, channels):
    reference = package.reference
    x, w = torch.randn(2, 3, 256), torch.randn(96, 256).to(torch.float8_e4m3fn)
    scale_w = torch.rand(96, 1) if channels else torch.rand(())
    scale = torch.tensor([0.02]) if scheme == "static" else None
    q, scale_x = reference.quantize_fp8(x.view(6, 256), scale=scale)
    given = (x, w.t(), scale_w, scale)
    if scheme == "quantised before":
        given = (q.view(2, 3, 256), w.t(), scale_w, scale_x)
    dtype = {"pre_quant_output_dtype": torch.float32} if scheme == "quantised before" else {}
    out = plugin.apply_fp8_linear(refuse, *given, **dtype)
    operands = reference.dequantize(q, scale_x, 1), reference.dequantize(w, scale_w, 128)
    assert out.shape == (2, 3, 96) and out.dtype == torch.float32
    assert_product_close(out.view(6, 96), operands[0] @ operands[1].t(), operands)


def test_a_bound_stays_with_sglang(plugin):
    own = []
    x, w = torch.randn(2, 64), torch.randn(32, 64).to(torch.float8_e4m3fn)
    bound = torch.tensor(1200.0)
    plugin.apply_fp8_linear(lambda *given, **named: own.append(named), x, w.t(), bound, None, bound,
                            use_per_token_if_dynamic=True)  # fmt: skip
    assert own == [{"use_per_token_if_dynamic": True}]


@pytest.mark.slow
def test_its_client_loads_variants_of_one_torch(package, fetching, tmp_path):
    """And none of the stable ABI: so a release for SGLang needs them both."""
    client = ROOT / "build" / "kernels-0.14.1"
    if not client.is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        with fetching:
            subprocess.run([*pip, "--target", str(tmp_path / "client"), *CLIENT], check=True)
        shutil.move(tmp_path / "client", client)
    version = ".".join(torch.__version__.split(".")[:2])
    command = [sys.executable, "tools/build.py", "--backend", "cpu", "--for-torch", version]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    variant = ROOT / done.stdout.splitlines()[-1]
    assert variant.name == f"torch{version.replace('.', '')}-cxx11-cpu-x86_64-linux"
    shutil.move(variant, tmp_path / "per torch" / "build" / variant.name)
    shutil.copytree(ROOT / "build" / VARIANT, tmp_path / "stable" / "build" / VARIANT)
    code = (
        "import sys, torch, kernels; from pathlib import Path\n"
        "assert kernels.__version__ == '0.14.1'\n"
        "package = kernels.get_local_kernel(Path(sys.argv[1]) / 'build', backend='cpu')\n"
        "print(package.rmsnorm(torch.ones(1, 64), torch.ones(64)).sum().item())"
    )

    def load(folder):
        return subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / folder)],
            env={**os.environ, "PYTHONPATH": str(client)},
            capture_output=True,
            text=True,
        )

    loaded = load("per torch")
    assert loaded.returncode == 0 and float(loaded.stdout) == pytest.approx(64), loaded.stderr
    assert load("stable").returncode != 0
