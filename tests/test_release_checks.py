"""Every check of tools/release_check.py, and every failure that it can find, is met by an artifact
that is damaged so."""

import ast
import inspect
import json
import shutil
import struct
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from project import ROOT
from test_release import CPU_VARIANT, copied, cpu_build, release_check, variant_of

__all__ = ["copied", "cpu_build"]  # fixtures

CHECKS = {n: f for n, f in vars(release_check).items() if n.startswith("check_")}


@pytest.mark.parametrize("check", release_check.CHECKS, ids=lambda check: check.__name__)
def test_cpu_variant_passes(check, cpu_build):
    assert check(variant_of(cpu_build))


# ---- Damages: each takes a copy of the CPU variant's folder, and pytest's monkeypatch


def extension(folder: Path) -> Path:
    return next(folder.glob("*.so"))


def edit(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert old in content
    path.write_bytes(content.replace(old, new))


def metadata_of(folder: Path) -> dict:
    return json.loads((folder / "metadata.json").read_text())


def edit_metadata(folder: Path, **changes: object) -> None:
    text = json.dumps({**metadata_of(folder), **changes})
    (folder / "metadata.json").write_text(text)


def edit_provenance(folder: Path, **kernel: object) -> None:
    provenance = metadata_of(folder)["provenance"]
    known = {"commit": "0" * 40, "dirty": False}
    edit_metadata(folder, provenance={**provenance, "kernel": {**known, **kernel}})


def without_commit(folder: Path) -> None:
    provenance = metadata_of(folder)["provenance"]
    provenance.pop("kernel", None)
    edit_metadata(folder, provenance=provenance)


def without_metadata(folder: Path, key: str) -> None:
    kept = {name: value for name, value in metadata_of(folder).items() if name != key}
    (folder / "metadata.json").write_text(json.dumps(kept))


def rename(folder: Path, identifier: str) -> None:
    """The extension, its ops and its module by another name, all of the same one."""
    old = metadata_of(folder)["id"]
    edit_metadata(folder, id=identifier)
    extension(folder).rename(folder / f"{identifier}.abi3.so")
    edit(folder / "_ops.py", old.encode(), identifier.encode())


def registers_another(folder: Path) -> None:
    name = metadata_of(folder)["id"].encode()
    edit(extension(folder), b"\0" + name + b"\0", b"\0" + name[:-1] + b"_\0")


def search_path(folder: Path, tag: int) -> None:
    """Turns the dynamic section's count of relocations into another tag: its value is taken for a
    place in the string table."""
    path = extension(folder)
    with open(path, "rb") as file:
        dynamic = ELFFile(file).get_section_by_name(".dynamic")
        tags = [t.entry.d_tag for t in dynamic.iter_tags()]
        at = dynamic["sh_offset"] + 16 * tags.index("DT_RELACOUNT")
    content = bytearray(path.read_bytes())
    struct.pack_into("<QQ", content, at, tag, 1)
    path.write_bytes(content)


def make_unique(folder: Path) -> None:
    """Gives an own symbol the binding STB_GNU_UNIQUE."""
    path = extension(folder)
    with open(path, "rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym")
        names = [symbol.name for symbol in symbols.iter_symbols()]
        index = next(i for i, name in enumerate(names) if name.startswith("PyInit_"))
        at = symbols["sh_offset"] + 24 * index + 4
    content = bytearray(path.read_bytes())
    content[at] = 10 << 4 | content[at] & 15
    path.write_bytes(content)


def compile_calling(folder: Path, name: str) -> None:
    """In the extension's place a library, not stripped, that needs a function of Python's."""
    source = folder.parent / "calling.cpp"
    source.write_text(f'extern "C" void {name}(); extern "C" void call() {{ {name}(); }}\n')
    command = ["g++", "-shared", "-fPIC", str(source), "-o", str(extension(folder))]
    subprocess.run(command, check=True)


def released(monkeypatch, version: int = 1, is_released: bool = True, stored: dict | None = None):
    """A changelog and a stored API."""
    api = release_check.public_api
    stored = stored or {"version": version, "released": True, "api": api.public_api()}
    folder = Path(__file__).parent  # for the text alone
    file = type("Stored", (type(folder),), {"read_text": lambda self: json.dumps(stored)})
    monkeypatch.setattr(api, "newest_entry", lambda: (version, is_released))
    monkeypatch.setattr(api, "STORED", file(folder))


def device_code(folder: Path, monkeypatch, listed: list[str], units: list[set[str]]) -> None:
    edit_metadata(folder, backend={"type": "rocm", "archs": listed})
    monkeypatch.setattr(release_check.device_code, "units", lambda extension, backend: units)


def another_root(folder: Path, **texts: str) -> Path:
    """A source tree beside the variant, with these texts."""
    for name in ("LICENSE", "THIRD_PARTY_NOTICES", "build.toml"):
        shutil.copyfile(ROOT / name, folder.parent.parent / name)
    for name, text in texts.items():
        (folder.parent.parent / name).write_text(text)
    return folder.parent.parent


def version_of(folder: Path) -> int:
    return metadata_of(folder)["version"]


def notices() -> str:
    return (ROOT / "THIRD_PARTY_NOTICES").read_text().replace("PyTorch", "Torch")


ROW_FUNCTIONS = "functional/rows.py"

# Function of release_check.py, which of its `raise Failure` it is, and damages that lead there.
DAMAGES = {
    ("extension", 0): {
        "two": lambda v, m: shutil.copyfile(extension(v), v / "other.so"),
        "none": lambda v, m: extension(v).unlink(),
    },
    ("check_layout", 0): {
        "a file too many": lambda v, m: (v / "notes.txt").write_text("left behind"),
        "a file too few": lambda v, m: (v / ROW_FUNCTIONS).unlink(),
        "no metadata in the list": lambda v, m: (v / "_ops.py").unlink(),
    },
    ("check_layout", 1): {
        "other sources": lambda v, m: edit(v / ROW_FUNCTIONS, b"import math", b"import  math"),
    },
    ("check_metadata", 0): {
        "version": lambda v, m: edit_metadata(v, version=9),
        "name": lambda v, m: edit_metadata(v, name="other"),
        "license": lambda v, m: edit_metadata(v, license="MIT"),
    },
    ("check_metadata", 1): {
        "backend": lambda v, m: edit_metadata(v, backend={"type": "rocm", "archs": ["gfx942"]}),
    },
    ("check_metadata", 2): {"id": lambda v, m: edit_metadata(v, id="rocm-kernels")},
    ("check_metadata", 3): {"none": lambda v, m: without_metadata(v, "provenance")},
    ("check_provenance", 0): {"no commit": lambda v, m: without_commit(v)},
    ("check_provenance", 1): {"uncommitted": lambda v, m: edit_provenance(v, dirty=True)},
    ("check_version", 0): {
        "another version": lambda v, m: released(m, version_of(v) + 1),
        "unreleased": lambda v, m: released(m, version_of(v), is_released=False),
    },
    ("check_version", 1): {
        "another API": lambda v, m: released(
            m, version_of(v), stored={"version": version_of(v), "released": True, "api": {}}
        ),
    },
    ("check_digest", 0): {"none": lambda v, m: edit_metadata(v, digest=None)},
    ("check_digest", 1): {
        "a changed file": lambda v, m: edit(v / "_ops.py", b"import torch", b"import torch "),
        "a changed binary": lambda v, m: edit(extension(v), b"GCC: (", b"gcc: ("),
    },
    ("check_namespace", 0): {
        "the extension": lambda v, m: edit_metadata(v, id="_rocm_kernels_cpu_other"),
    },
    ("check_namespace", 1): {
        "the module": lambda v, m: edit(v / "_ops.py", b"torch.ops._rocm", b"torch.ops.other"),
    },
    ("check_namespace", 2): {
        "the package": lambda v, m: rename(v, "_other_kernels_cpu_0123456789"),
        "the backend": lambda v, m: rename(v, "_rocm_kernels_cuda_0123456789"),
    },
    ("check_namespace", 3): {"the ops": lambda v, m: registers_another(v)},
    ("check_namespace", 4): {
        "a neighbour": lambda v, m: shutil.copytree(v, v.with_name(f"{v.name}-again")),
    },
    ("check_abi", 0): {"a later Python": lambda v, m: compile_calling(v, "PyType_GetDict")},
    ("check_abi", 1): {
        "glibc": lambda v, m: edit(extension(v), b"GLIBC_2.14", b"GLIBC_2.34"),
        "libstdc++": lambda v, m: edit(extension(v), b"GLIBCXX_3.4.21", b"GLIBCXX_3.4.29"),
        "libstdc++'s ABI": lambda v, m: edit(extension(v), b"CXXABI_1.3.9", b"CXXABI_1.9.9"),
        "libgcc": lambda v, m: edit(extension(v), b"GCC_3.0", b"GCC_9.0"),
    },
    ("check_libraries", 0): {
        "another": lambda v, m: edit(extension(v), b"libstdc++.so.6", b"libcurl_4.so.6"),
    },
    ("check_libraries", 1): {
        "DT_RPATH": lambda v, m: search_path(v, 15),
        "DT_RUNPATH": lambda v, m: search_path(v, 29),
    },
    ("check_symbols", 0): {
        "system": lambda v, m: edit(extension(v), b"\0memcmp\0", b"\0system\0"),
        "fopen": lambda v, m: edit(extension(v), b"\0sqrtf\0", b"\0fopen\0"),
        "printf": lambda v, m: edit(extension(v), b"\0strlen\0", b"\0printf\0"),
    },
    ("check_symbols", 1): {"shared": lambda v, m: make_unique(v)},
    ("check_symbols", 2): {
        "exported": lambda v, m: edit(extension(v), b"\0__bss_start\0", b"\0__own_start\0"),
    },
    ("check_symbols", 3): {
        "undefined": lambda v, m: edit(extension(v), b"\0torch_call_dis", b"\0other_call_dis"),
        "Python": lambda v, m: edit(extension(v), b"\0PyModule_Create2", b"\0PyFrame_GetBack_"),
    },
    ("check_device_code", 0): {
        "of a CPU": lambda v, m: edit_metadata(v, backend={"type": "cpu", "archs": ["gfx942"]}),
    },
    ("check_device_code", 1): {
        "none": lambda v, m: device_code(v, m, ["gfx942"], []),
        "none listed": lambda v, m: device_code(v, m, [], [{"gfx942"}]),
    },
    ("check_device_code", 2): {
        "one too few": lambda v, m: device_code(
            v, m, ["gfx942", "gfx950"], [{"gfx942", "gfx950"}, {"gfx942"}]
        ),
        "one too many": lambda v, m: device_code(v, m, ["gfx942"], [{"gfx942", "gfx950"}]),
    },
    ("check_paths", 0): {
        "in Python": lambda v, m: edit(v / "reference.py", b"import math", b"#/home/me/src\n"),
        "in the binary": lambda v, m: edit(extension(v), b"\0GCC: (Debian", b"\0/tmp/x/Debia"),
    },
    ("check_python", 0): {
        "later syntax": lambda v, m: edit(
            v / ROW_FUNCTIONS, b"import math", b"match 1:\n    case _: pass"
        ),
    },
    ("check_python", 1): {
        "import": lambda v, m: edit(v / ROW_FUNCTIONS, b"import math", b"import numpy"),
        "a later import of a line": lambda v, m: edit(
            v / ROW_FUNCTIONS, b"import math", b"import math, torch.nn, numpy.linalg"
        ),
        "from": lambda v, m: edit(v / ROW_FUNCTIONS, b"import math", b"from numpy import pi"),
    },
    ("check_licence", 0): {
        "of the metadata": lambda v, m: edit_metadata(v, license="MIT"),
        "of the file": lambda v, m: another_root(v, LICENSE="MIT License"),
    },
    ("check_licence", 1): {
        "a notice": lambda v, m: another_root(v, THIRD_PARTY_NOTICES=notices()),
    },
}  # fmt: skip


def failures() -> dict[tuple[str, int], int]:
    """The line of each `raise Failure` of release_check.py, by function and number."""
    tree = ast.parse(inspect.getsource(release_check))
    found = {}
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            raises = [
                node.lineno
                for node in ast.walk(function)
                if isinstance(node, ast.Raise) and ast.unparse(node.exc).startswith("Failure(")
            ]
            found |= {(function.name, i): line for i, line in enumerate(sorted(raises))}
    return found


def test_every_failure_has_a_damage():
    reproducible = {key for key in failures() if key[0] == "check_reproducible"}
    assert failures().keys() - reproducible == DAMAGES.keys()
    assert len(reproducible) == len(UNLIKE)


@pytest.mark.parametrize(
    ("function", "number", "damage"),
    [(*key, name) for key, damages in DAMAGES.items() for name in damages],
)
def test_damage_is_found(function, number, damage, copied, monkeypatch):
    """By its own check, at the place that tells of it."""
    check = CHECKS.get(function, release_check.check_layout)
    before = variant_of(copied)
    if function not in ("check_provenance", "check_version"):
        assert check(before)
    root = DAMAGES[function, number][damage](copied, monkeypatch)
    root = root if isinstance(root, Path) and (root / "build.toml").exists() else ROOT
    with pytest.raises(release_check.Failure) as found:
        check(release_check.Variant(copied, root))
    assert found.traceback[-1].lineno + 1 == failures()[function, number]


def test_a_release_that_is_fine_passes(copied, monkeypatch):
    edit_provenance(copied)
    released(monkeypatch, version_of(copied))
    assert release_check.check_provenance(variant_of(copied)) == "commit 0000000000"
    assert release_check.check_version(variant_of(copied)).startswith(f"{version_of(copied)}, ")


def test_device_code_that_is_fine_passes(copied, monkeypatch):
    device_code(copied, monkeypatch, ["gfx942", "gfx950"], [{"gfx942", "gfx950"}] * 3)
    assert release_check.check_device_code(variant_of(copied)).startswith("3 units")


# ---- Building again

BUILD_PY = """
import pathlib, sys
{first}
folder = pathlib.Path("build") / {variant!r}
folder.mkdir(parents=True)
(folder / "built.py").write_text(pathlib.Path("source.cpp").read_text(){added})
print("compiling\\n" + str(folder))
"""
# What a builder does that is not reproducible: its first line, and what it adds to a file.
UNLIKE = {
    "do not build": ("sys.exit('no compiler')", ""),
    "two builds differ in built.py": ("import time", " + str(time.perf_counter_ns())"),
    "a fresh build of the sources differs in built.py": ("", " + '# another compiler'"),
}


@pytest.mark.parametrize("words", [None, *UNLIKE])
def test_what_is_not_reproducible_is_found(words, tmp_path):
    first, added = UNLIKE.get(words, ("", ""))
    config = tomllib.loads((ROOT / "build.toml").read_text())["general"]["name"]
    texts = {
        "build.toml": f'[general]\nname = "{config}"\n[torch]\nsrc = ["source.cpp"]\n[kernel]\n',
        "source.cpp": "# the same\n",
        "tools/build.py": BUILD_PY.format(first=first, variant=CPU_VARIANT, added=added),
        "tools/rocm.py": "",
        f"build/{CPU_VARIANT}/built.py": "# the same\n",
        f"build/{CPU_VARIANT}/metadata.json": (
            ROOT / "build" / CPU_VARIANT / "metadata.json"
        ).read_text(),
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    variant = release_check.Variant(tmp_path / "build" / CPU_VARIANT, tmp_path)
    variant.__dict__["extension"] = tmp_path / "none.so"
    if words is None:
        assert release_check.check_reproducible(variant) == "1 files, the same bytes each time"
        return
    with pytest.raises(release_check.Failure, match=words):
        release_check.check_reproducible(variant)


# ---- The command


@pytest.mark.parametrize(
    ("options", "more"),
    [
        ([], []),
        (["--release"], ["check_provenance", "check_version"]),
        (["--reproduce"], ["check_reproducible"]),
        (["--release", "--reproduce"], ["check_provenance", "check_version", "check_reproducible"]),
    ],
)
@pytest.mark.parametrize("failed", [0, 1])
def test_the_command_runs_every_check(options, more, failed, monkeypatch, capsys):
    """And fails where one has failed, of any variant."""
    ran = []
    monkeypatch.setattr(
        release_check, "run", lambda variant, checks: ran.append(checks) or failed * len(ran[1:])
    )
    monkeypatch.setattr(sys, "argv", ["release_check.py", "build/one", "build/two", *options])
    assert release_check.main() == failed
    names = [[check.__name__ for check in checks] for checks in ran]
    assert names == [[check.__name__ for check in release_check.CHECKS] + more] * 2
    if len(options) == 2:
        assert {*names[0]} == {*CHECKS}, "each check of the file is run"
    assert capsys.readouterr().out.endswith("1 checks failed\n" if failed else "passed\n")


def test_the_command_needs_a_build(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(release_check, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["release_check.py"])
    assert release_check.main() == 1
    assert "run `make build` first" in capsys.readouterr().err


@pytest.mark.parametrize("error", [release_check.Failure, OSError, ValueError, KeyError])
def test_what_a_check_finds_is_counted(error, cpu_build, capsys):
    def check_fine(variant):
        return "fine"

    def check_broken_thing(variant):
        raise error("is broken")

    checks = [check_broken_thing, check_fine, check_broken_thing]
    assert release_check.run(variant_of(cpu_build), checks) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == CPU_VARIANT and lines[2].split() == ["ok", "fine", "fine"]
    assert lines[1].startswith("  FAIL  broken thing") and "is broken" in lines[1]
