"""The flake evaluates, and asks kernel-builder for nothing that it does not offer.

Nix itself builds with the real kernel-builder, which needs the internet; here a stand-in takes its
place, with the same function and the same arguments, and hands back what it was given.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from project import ROOT

# The arguments that kernel-builder's genKernelFlakeOutputs takes, at the revision in flake.lock.
STAND_IN = """\
{
  outputs = { self }: {
    lib.genKernelFlakeOutputs =
      {
        path,
        rev ? null,
        self ? null,
        doGetKernelCheck ? true,
        pythonCheckInputs ? python: [ ],
        pythonNativeCheckInputs ? python: [ ],
        torchVersions ? defaults: defaults,
      }:
      {
        received = {
          buildToml = builtins.pathExists (path + "/build.toml");
          source = toString self;
          checkInputs = pythonCheckInputs (
            builtins.listToAttrs (map (name: { inherit name; value = name; }) [ NAMES ])
          );
          torchVersions = torchVersions [ "2.12" "2.13" ];
        };
      };
  };
}
"""
PYTHON_PACKAGES = ("hypothesis", "ml-dtypes", "numpy", "transformers")


@pytest.fixture(scope="module")
def lock() -> dict:
    return json.loads((ROOT / "flake.lock").read_text())


def evaluate(folder: Path, flake: str) -> subprocess.CompletedProcess:
    """Evaluates the flake against the stand-in, with a store of its own."""
    source, stand_in = folder / "source", folder / "kernel-builder"
    source.mkdir()
    stand_in.mkdir()
    for name in ("flake.lock", "build.toml"):
        shutil.copyfile(ROOT / name, source / name)
    (source / "flake.nix").write_text(flake)
    names = " ".join(f'"{name}"' for name in PYTHON_PACKAGES)
    (stand_in / "flake.nix").write_text(STAND_IN.replace("NAMES", names))
    private = {
        "HOME": folder / "home",
        "NIX_STORE_DIR": folder / "store",
        "NIX_STATE_DIR": folder / "state",
        "NIX_LOG_DIR": folder / "log",
    }
    command = ["nix", "--extra-experimental-features", "nix-command flakes", "--offline", "eval"]
    command += ["--json", f"path:{source}#received", "--no-write-lock-file"]
    command += ["--override-input", "kernel-builder", f"path:{stand_in}"]
    environment = {**os.environ, **{name: str(path) for name, path in private.items()}}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


@pytest.fixture
def nix() -> None:
    if shutil.which("nix") is None:
        pytest.skip("nix is not installed (Debian, Ubuntu: apt install nix-bin)")


def test_flake_evaluates(nix, tmp_path, lock):
    result = evaluate(tmp_path, (ROOT / "flake.nix").read_text())
    assert result.returncode == 0, result.stderr
    received = json.loads(result.stdout)
    assert received["buildToml"] and received["source"]
    assert set(received["checkInputs"]) <= set(PYTHON_PACKAGES)
    # The override replaced exactly the locked input: flake.nix and flake.lock name the same one.
    assert lock["nodes"]["kernel-builder"]["locked"]["rev"] in result.stderr


def test_evaluation_refuses_an_argument_that_does_not_exist(nix, tmp_path):
    flake = (ROOT / "flake.nix").read_text().replace("inherit self;", "inherit self; archs = [ ];")
    result = evaluate(tmp_path, flake)
    assert result.returncode != 0
    assert "archs" in result.stderr


def test_lock_pins_every_input(lock):
    reached, open_nodes = set(), [lock["root"]]
    while open_nodes:
        name = open_nodes.pop()
        if name in reached:
            continue
        reached.add(name)
        node = lock["nodes"][name]
        # A list is a path of names to follow from the root, a string a node.
        open_nodes += [i for i in node.get("inputs", {}).values() if isinstance(i, str)]
        if name != lock["root"]:
            assert re.fullmatch("[0-9a-f]{40}", node["locked"]["rev"]), name
            assert re.fullmatch("sha256-[A-Za-z0-9+/]{43}=", node["locked"]["narHash"]), name
    assert reached == set(lock["nodes"])
    original = lock["nodes"]["kernel-builder"]["original"]
    url = re.search(r'kernel-builder\.url = "github:([^"]+)"', (ROOT / "flake.nix").read_text())
    assert url and url[1] == f"{original['owner']}/{original['repo']}"
