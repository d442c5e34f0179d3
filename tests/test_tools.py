"""The tools say what is wrong: each error that one of them can raise is raised here, and what a
build records of its sources is true."""

import ast
import hashlib
import importlib
import inspect
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

sys.path.insert(0, str(ROOT / "tools"))
import device_code
import environment
import marked
import public_api
import resources
import rocm
import sbom
from test_release import cpu_build, variant_of

build = importlib.import_module("build")  # tools/build.py, not the folder

__all__ = ["cpu_build"]  # a fixture


def errors_of(module) -> set[tuple[str, int]]:
    """Each `raise` of an exception by a tool: its function, and which of the function's it is."""
    found = set()
    for function in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(function, ast.FunctionDef):
            raises = [node for node in ast.walk(function) if isinstance(node, ast.Raise)]
            found |= {(function.name, number) for number in range(len(raises))}
    return found


# ---- build.py and rocm.py

TOML = """
[general]
name = "rocm-kernels"
version = 1
license = "Apache-2.0"
backends = ["cpu"]
[torch]
src = ["one.cpp"]
[torch.stable-abi]
cpu = "2.11"
[kernel]
"""


def no_tool(monkeypatch, tmp_path):
    build.require_tool("no-such-compiler", advice="apt install one")


def no_headers(monkeypatch, tmp_path):
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    build.python_include()


def undeclared(monkeypatch, tmp_path):
    (tmp_path / "build.toml").write_text(TOML)
    build.read_package(tmp_path, "rocm")


def not_there(monkeypatch, tmp_path):
    (tmp_path / "build.toml").write_text(TOML)
    build.read_package(tmp_path, "cpu")


def no_hip(monkeypatch, tmp_path):
    monkeypatch.setattr(rocm, "_rocm_installation", lambda: None)
    monkeypatch.setattr(rocm, "_newest_clang", lambda: (None, ""))
    build.rocm_toolchain(build.read_package(ROOT, "rocm"), tmp_path)


def not_writable(monkeypatch, tmp_path):
    (tmp_path / "build.toml").write_text(TOML)
    (tmp_path / "one.cpp").touch()
    (tmp_path / "build").touch()  # a file where the folder should be, for nothing stops root
    build.build(tmp_path, "cpu")


def does_not_compile(monkeypatch, tmp_path):
    (tmp_path / "build.toml").write_text(TOML)
    (tmp_path / "one.cpp").write_text("this is no C++\n")
    build.build(tmp_path, "cpu")


BUILD_ERRORS = {
    ("read_package", 0): (undeclared, r"declares \['cpu'\], not 'rocm'"),
    ("read_package", 1): (not_there, "one.cpp, which does not exist"),
    ("python_include", 0): (no_headers, r"Python's headers"),
    ("require_tool", 0): (no_tool, r"none of no-such-compiler is installed \(apt install one\)"),
    ("rocm_toolchain", 0): (no_hip, "no HIP compiler found: install ROCm"),
    ("build", 0): (not_writable, "build/objects/cpu cannot be written"),
    ("build", 1): (does_not_compile, "the cpu backend does not compile"),
}


def test_every_error_of_a_build_is_raised_here():
    assert errors_of(build) == BUILD_ERRORS.keys()
    assert errors_of(rocm) == {("_distribution_llvm", 0)}  # no_hip's


@pytest.mark.parametrize("error", BUILD_ERRORS, ids=str)
def test_a_build_that_cannot_be_says_why(error, monkeypatch, tmp_path):
    cause, words = BUILD_ERRORS[error]
    with pytest.raises(build.BuildError, match=words) as found:
        cause(monkeypatch, tmp_path)
    assert found.traceback[-1].name == error[0]


def test_the_command_prints_the_error_and_fails(monkeypatch, capsys):
    def fails(root, backend):
        raise build.BuildError("something is missing")

    monkeypatch.setattr(build, "build", fails)
    monkeypatch.setattr(sys, "argv", ["build.py"])
    assert build.main() == 1
    assert capsys.readouterr().err == "error: something is missing\n"


@pytest.mark.parametrize("change", [None, "bytes", "more", "fewer", "no folder"])
def test_what_is_laid_out_stays(tmp_path, change):
    """Programs may be reading it, tests beside this one among them."""
    target, staging = tmp_path / "target", tmp_path / "staging"
    for folder in (target, staging):
        (folder / "models").mkdir(parents=True)
        for name in ("__init__.py", "models/a.py"):
            (folder / name).write_text(f"# {name}\n")
    (target / "__pycache__").mkdir()
    (target / "__pycache__" / "a.pyc").write_text("Python's own")
    if change == "bytes":
        (target / "models" / "a.py").write_text("# models/b.py\n")
    elif change == "more":
        (target / "models" / "b.py").touch()
    elif change == "fewer":
        (target / "models" / "a.py").unlink()
    elif change == "no folder":
        shutil.rmtree(target)
    assert build.is_laid_out(target, staging) == (change is None)


def test_a_build_knows_of_uncommitted_changes(tmp_path):
    def git(*arguments):
        someone = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        command = ["git", "-C", str(tmp_path), *someone, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert build.git_provenance(tmp_path) is None, "no checkout"
    (tmp_path / "inside").mkdir()
    source = tmp_path / "inside" / "source"
    source.write_text("one")
    git("init", "-q")
    git("add", ".")
    git("commit", "-qm", "one")
    commit = git("rev-parse", "HEAD")
    assert build.git_provenance(tmp_path) == {"commit": commit, "dirty": False}
    (tmp_path / "left").write_text("is not built")
    assert build.git_provenance(tmp_path) == {"commit": commit, "dirty": False}
    source.write_text("two")
    assert build.git_provenance(tmp_path) == {"commit": commit, "dirty": True}
    git("add", ".")
    assert build.git_provenance(tmp_path) == {"commit": commit, "dirty": True}
    assert build.git_provenance(tmp_path / "inside") is None, "somebody else's checkout"


def package_of(folder: Path) -> build.Package:
    (folder / "torch-ext" / "rocm_kernels").mkdir(parents=True)
    for name in ("a.cpp", "b.h", "torch-ext/rocm_kernels/__init__.py"):
        (folder / name).write_text(name)
    sections = {"k": {"src": ["b.h"]}}
    return build.Package(folder, "rocm-kernels", 1, "MIT", "2.11", ["a.cpp"], [], sections)


NEW = "torch-ext/rocm_kernels/new.py"


@pytest.mark.parametrize("change", ["a.cpp", "b.h", NEW.replace("new", "__init__"), NEW, "version",
                                    "name"])  # fmt: skip
def test_a_build_has_an_id_of_its_own(change, tmp_path):
    package = package_of(tmp_path)
    before = package.unique_id()
    assert before == package.unique_id()
    if change in ("version", "name"):
        setattr(package, change, {"version": 2, "name": "other"}[change])
    else:
        (tmp_path / change).write_text("changed")
    assert package.unique_id() != before


def test_torchs_headers_are_named_without_links(tmp_path, monkeypatch):
    """Of a system header behind a link the compiler keeps the shorter of both paths, whose start
    must be the one that is taken out of the binary."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "environment").symlink_to(tmp_path / "torch")
    monkeypatch.setattr(
        build.cpp_extension, "include_paths", lambda: [f"{tmp_path}/environment/include"]
    )
    package = package_of(tmp_path)
    build.write_ninja(package, build.Toolchain("v", "-D", []), "ops", tmp_path)
    text = (tmp_path / "build.ninja").read_text().replace(" $\n", "")
    assert f"-isystem{tmp_path}/torch/include" in text and "/environment" not in text
    assert f"-ffile-prefix-map={tmp_path}/torch/include=torch" in text


# ---- device_code.py


def container(*entries: tuple[int, int, int]) -> bytes:
    """A unit of CUDA code: kind, architecture and flags of each entry."""
    data = b""
    for kind, arch, flags in entries:
        entry = bytearray(64)
        struct.pack_into("<HHIQ", entry, 0, kind, 1, 64, 0)
        struct.pack_into("<I", entry, 28, arch)
        struct.pack_into("<I", entry, 40, flags)
        data += entry
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(data)) + data


def bundle(target: str, code: bytes) -> bytes:
    label = f"hip-amdgcn-amd-amdhsa--{target}".encode()
    head = b"__CLANG_OFFLOAD_BUNDLE__" + struct.pack("<Q", 1)
    at = len(head) + 24 + len(label)
    return head + struct.pack("<QQQ", at, len(code), len(label)) + label + code


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> list[bytes]:
    """An x86 library, and the same with the machine number of gfx942: it holds no kernel."""
    folder = tmp_path_factory.mktemp("libraries")
    command = ["g++", "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", str(folder / "empty.so")]
    subprocess.run(command, check=True)
    other = (folder / "empty.so").read_bytes()
    empty = bytearray(other)
    struct.pack_into("<H", empty, 18, 224)  # EM_AMDGPU
    struct.pack_into("<I", empty, 48, 0x4C)
    return [other, bytes(empty)]


def test_every_error_of_device_code_is_raised_here(libraries):
    other, empty = libraries
    hip, cuda = device_code._hip_units, device_code._cuda_units
    causes = {
        ("_hip_units", 0): (hip, b"CCOB", "compressed device code is not read"),
        ("_check_code_object", 0): (hip, bundle("gfx942", other), "is for EM_X86_64"),
        ("_check_code_object", 1): (hip, bundle("gfx942", empty), "holds no kernel"),
        ("_cuda_units", 0): (cuda, container((3, 90, 0)), "unknown kind of device code: 3"),
        ("_cuda_units", 1): (cuda, container((1, 90, 0)), r"PTX alone.* for \['9.0'\]"),
    }
    assert errors_of(device_code) == causes.keys()
    for read, data, words in causes.values():
        with pytest.raises(ValueError, match=words):
            read(data)
    with pytest.raises(ValueError, match="is for EM_AMDGPU 0x4c"):
        hip(bundle("gfx950", empty))


def test_targets_of_cuda_code():
    """By unit: machine code, for an architecture alone, and PTX beside it."""
    first = container((2, 80, 0), (2, 90, 0x100000))
    second = container((2, 120, 0), (1, 120, 0))
    found = device_code._cuda_units(first + b"\0" * 8 + second)
    assert found == [{"8.0", "9.0a"}, {"12.0+PTX"}]


# ---- marked.py, sbom.py, public_api.py, environment.py, resources.py


def test_a_table_goes_between_its_marks(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("before <a>old<b> after")
    marked.replace(page, "<a>", "<b>", "new")
    assert page.read_text() == "before <a>new<b> after"
    assert errors_of(marked) == {("replace", 0)}
    for begin, end in (("<x>", "<b>"), ("<a>", "<x>"), ("<b>", "<a>")):
        with pytest.raises(ValueError, match="must hold"):
            marked.replace(page, begin, end, "newer")
    assert page.read_text() == "before <a>new<b> after"


@pytest.mark.parametrize("built_for", ["cpu", "cuda", "rocm"])
def test_the_bill_of_materials_names_everything(built_for, cpu_build):
    variant = variant_of(cpu_build)
    document = json.loads(sbom.document(variant.metadata, built_for, variant.files))
    files = document["metadata"]["component"]["components"]
    assert {f["name"]: f["hashes"][0]["content"] for f in files} == {
        name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in variant.files.items()
    }
    named = {component["name"]: component for component in document["components"]}
    inside = {foreign.name for foreign in sbom.compiled_in(built_for)}
    loaded = {"cpu": {"torch"}, "cuda": {"torch", "CUDA runtime"}, "rocm": {"torch", "HIP runtime"}}
    assert named.keys() == inside | loaded[built_for]
    assert {n for n, c in named.items() if c.get("scope") == "required"} == loaded[built_for]
    assert all(component["licenses"] for component in named.values())
    (root,) = [d for d in document["dependencies"] if d["ref"] == variant.metadata.id]
    assert {*root["dependsOn"]} == {*named}


@pytest.fixture
def api_file(tmp_path, monkeypatch):
    """public_api's command over a file of its own: version, whether released, the API."""
    stored = tmp_path / "api.json"
    monkeypatch.setattr(public_api, "STORED", stored)

    def run(*arguments, kept=None, now=(1, True, {}), entry=None):
        version, is_released, api = now
        if kept:
            keys = ("version", "released", "api")
            stored.write_text(json.dumps(dict(zip(keys, kept, strict=True))))
        monkeypatch.setattr(sys, "argv", ["public_api.py", *arguments])
        monkeypatch.setattr(public_api, "version", lambda: version)
        monkeypatch.setattr(public_api, "newest_entry", lambda: (entry or version, is_released))
        monkeypatch.setattr(public_api, "public_api", lambda: api)
        code = public_api.main()
        return code, json.loads(stored.read_text()) if stored.exists() else None

    return run


def test_the_stored_api_is_compared_and_written(api_file, capsys):
    assert api_file(kept=(1, True, {}))[0] == 0
    assert api_file(now=(1, True, {"f": "(x)"}))[0] == 1
    assert '+  "f": "(x)"' in capsys.readouterr().out
    code, stored = api_file("--write", now=(1, True, {"f": "(x)"}))
    assert code == 1 and stored["api"] == {}, "version 1 is released"
    assert "raise `version`" in capsys.readouterr().out
    assert api_file(now=(2, True, {}), entry=1)[0] == 1
    assert "CHANGELOG.md begins with 1, build.toml says 2" in capsys.readouterr().out
    code, stored = api_file("--write", now=(2, False, {"f": "(x)"}))
    assert code == 0 and stored == {"version": 2, "released": False, "api": {"f": "(x)"}}
    assert api_file("--write", now=(2, False, {"g": "()"}))[0] == 0, "2 is still free"


def test_an_environment_that_lacks_nothing_is_told_so(monkeypatch, capsys):
    versions = {"torch": "2.13.0"}
    monkeypatch.setattr(environment, "FILES", ())
    assert environment.main() == 0
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(environment, "FILES", ("requirements.txt",))
    monkeypatch.setattr(
        environment.metadata, "version", lambda name: versions.get(name, "0.0.0+other")
    )
    assert environment.main() == 0
    said = capsys.readouterr().out
    assert "pytest 0.0.0+other (tested with ==" in said and "torch" not in said.split()


KERNEL = resources.Kernel("k", "gfx942", 256, 64, 32, 0, 0, 0, 0, 8, 8)


@pytest.mark.parametrize(
    ("scratch", "budgets", "words", "code"),
    [
        (0, {"one": {}}, "1 kernels, 0 above budget", 0),
        (8, {"one": {}}, "FAILS: scratch 8 bytes", 1),
        (0, {}, "no budget for ['one']", 1),
    ],
)
def test_a_kernel_above_its_budget_fails_the_command(
    scratch, budgets, words, code, monkeypatch, capsys
):
    budget = {"vgprs": 128, "lds": 1024, "waves": 1}
    kernel = resources.replace(KERNEL, scratch=scratch)
    monkeypatch.setattr(resources.rocm, "find_toolchain", lambda: None)
    monkeypatch.setattr(resources, "listed_sources", lambda: {"one": Path("one.hip")})
    monkeypatch.setattr(resources, "kernels_of", lambda source, target: [kernel])
    monkeypatch.setattr(resources.tomllib, "loads", lambda text: {n: budget for n in budgets})
    monkeypatch.setattr(sys, "argv", ["resources.py", "--target", "gfx942"])
    assert resources.main() == code
    assert words in capsys.readouterr().out


def test_resources_need_a_compiler(monkeypatch, capsys):
    def missing():
        raise rocm.ToolchainMissing("install one")

    monkeypatch.setattr(resources.rocm, "find_toolchain", missing)
    monkeypatch.setattr(sys, "argv", ["resources.py"])
    assert resources.main() == 1 and capsys.readouterr().err == "error: install one\n"


def test_every_tool_can_be_imported():
    for path in sorted((ROOT / "tools").glob("*.py")):
        assert importlib.import_module(path.stem)
