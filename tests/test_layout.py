"""The layout that docs/design.md describes, read from the sources: which folder may include which,
where code may ask which vendor compiles it, and that build.toml lists what is included."""

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from project import ROOT
from torch.utils._device import _device_constructors

# Rooms from the top floor down: ops, blocks, common. A file includes from its own room and from
# those it may reach.
COMMON = {"common/gpu", "common/cdna", "common/cuda", "common/cpu", "common/core"}
MAY_INCLUDE = {
    "torch-ext": {"ops", "blocks", "common/core"},
    "ops": {"blocks", *COMMON},
    "blocks": COMMON,
    "common/gpu": {"common/core"},
    "common/cdna": {"common/gpu", "common/core"},
    "common/cuda": {"common/gpu", "common/core"},
    "common/cpu": {"common/core"},
    "common/core": set(),
}
# Products are one op: skinny_gemm/ holds its designs for few rows.
OP_OF_FOLDER = {"skinny_gemm": "gemm"}
SUFFIXES = (".h", ".cuh", ".cpp", ".hip", ".cu")
# Which compiler or target it is. AMD's folders may tell AMD's targets apart, CUDA's NVIDIA's.
VENDOR = re.compile(r"__(?:CUDACC|CUDA_ARCH|HIPCC|HIP|AMDGCN|gfx\w+|GFX\w+)__")


def kernel_config() -> dict:
    return tomllib.loads((ROOT / "build.toml").read_text())


def sources() -> list[str]:
    """The package's C++ files: those under git in the folders that build.toml names."""
    config = kernel_config()
    listed = [*config["torch"]["src"], *(s for k in config["kernel"].values() for s in k["src"])]
    folders = sorted({Path(name).parts[0] for name in listed})
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders]
    files = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [name for name in files.splitlines() if name.endswith(SUFFIXES)]


def room(name: str) -> str:
    parts = Path(name).parts
    if parts[0] == "common":
        return "/".join(parts[:2])
    return parts[0] if parts[0] in ("torch-ext", "blocks") else "ops"


def op(name: str) -> str:
    folder = Path(name).parts[0]
    return OP_OF_FOLDER.get(folder, folder)


def includes(name: str) -> list[str]:
    """The project's files that a file includes; a CPU body is named by a macro, seen from
    common/cpu/."""
    text = (ROOT / name).read_text()
    found = re.findall(r'^\s*#\s*include "([^"]+)"', text, re.MULTILINE)
    paths = [os.path.normpath(os.path.join(os.path.dirname(name), other)) for other in found]
    bodies = re.findall(r'^#define \w+_BODY "([^"]+)"', text, re.MULTILINE)
    paths += [os.path.normpath(os.path.join("common/cpu", other)) for other in bodies]
    return [path for path in paths if (ROOT / path).is_file()]


@pytest.mark.parametrize("name", sources())
def test_includes_go_down(name):
    own = room(name)
    for other in includes(name):
        if room(other) == own:
            assert own != "ops" or op(other) == op(name), (
                f"{name} includes {other}: ops share through blocks/ and common/"
            )
        else:
            assert room(other) in MAY_INCLUDE[own], f"{name} ({own}) includes {other}"


@pytest.mark.parametrize("name", sources())
def test_vendors_are_told_apart_in_common_gpu_alone(name):
    if name.startswith("common/gpu/") or name == "common/core/compiler.h":
        return
    asked = set(VENDOR.findall((ROOT / name).read_text()))
    if "cdna" in Path(name).parts:
        asked = {macro for macro in asked if "CUDA" in macro}
    if "cuda" in Path(name).parts:
        asked = {macro for macro in asked if "CUDA_ARCH" not in macro}
    assert not asked, f"{name} asks {asked}: that belongs in common/gpu/"


@pytest.mark.parametrize("name", sources())
def test_files_that_a_comment_names_are_there(name):
    """By its own name, wherever it lies: comments outlive what they speak of."""
    there = {Path(other).name for other in sources()}
    comments = re.findall(r"//.*", (ROOT / name).read_text())
    # Up to a suffix: `tiles_*.h` and `<dtype>.cu` name several files.
    named = re.findall(r"(?<![\w*>.])(\w+\.(?:h|cuh|hip|cu))\b", "\n".join(comments))
    assert not (missing := set(named) - there), f"{name} speaks of {missing}"


@pytest.mark.parametrize("name", sources())
def test_drawings_in_comments_are_within_100_columns(name):
    """clang-format leaves indented comments alone, for it would run their lines together."""
    text = re.sub(
        r"// clang-format off.*?// clang-format on", "", (ROOT / name).read_text(), flags=re.S
    )
    assert not [line for line in text.splitlines() if len(line) > 100 and "//" in line]


def classes(name: str) -> list[tuple[str, str]]:
    """The classes that a file defines for others: (namespace, name). Names of an unnamed namespace
    are the file's own."""
    found, inside = [], []
    for line in (ROOT / name).read_text().splitlines():
        if opened := re.match(r"(?:inline )?namespace ?([\w:]*) ?\{$", line):
            inside.append(opened[1])
        elif line.startswith("}  // namespace"):
            inside.pop()
        elif "" not in inside and (
            found_one := re.match(r"(?:struct|class|union|enum class) (\w+)(?: :.*)? \{", line)
        ):
            found.append(("::".join(inside), found_one[1]))
    return found


def test_no_two_files_define_a_class_of_one_name():
    """In one namespace: a library that holds both would break the one-definition rule, and no
    linker says so. Bodies are compiled for each instruction set, in namespaces of their own."""
    places = {}
    for name in sources():
        if not name.endswith("_body.h"):
            for found in classes(name):
                places.setdefault(found, []).append(name)
    assert len(places) > 100
    assert not {key: names for key, names in places.items() if len(names) > 1}


CHOICES = [
    f"{op}/{backend}"
    for op in ("gemm", "skinny_gemm", "moe", "attention")
    for backend in ("cdna", "cuda")
]


@pytest.mark.parametrize("folder", CHOICES)
def test_a_choice_is_four_files(folder):
    """What a config asks of a device, the tiles that there are, how long it would take, the least
    of these: in the files of these names, each of which includes the one before, and in functions
    of the same names."""
    files = [f"{folder}/{name}.h" for name in ("tiles", "config", "time_model", "choose")]
    for below, above in itertools.pairwise(files):
        assert below in reached(above)
    assert not set(files[1:]) & reached(files[0])
    functions = {"choose": ["choose_config", "for_each_config"], "time_model": ["modelled_time"]}
    if folder == "skinny_gemm/cuda":  # thresholds that were measured, no model
        functions["time_model"] = ["quickest_rows"]
    for file, names in functions.items():
        text = (ROOT / folder / f"{file}.h").read_text()
        assert not [name for name in names if not re.search(rf"\b{name}\(", text)]
    texts = [(ROOT / folder / name).read_text() for name in ("config.h", "choose.h")]
    assert any(re.search(r"\bcheck_config\(", text) for text in texts)


def test_nobody_imports_a_conftest():
    """There are two, and which of them has the name depends on what pytest collects first."""
    files = [*(ROOT / "tests").glob("*.py"), *(ROOT / "simulator" / "tests").glob("*.py")]
    importing = re.compile(r"^from conftest import", re.MULTILINE)
    found = [str(path.relative_to(ROOT)) for path in files if importing.search(path.read_text())]
    assert not found


def test_long_files_say_why():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in listed.split("\0"):
        if name.endswith((*SUFFIXES, ".py", ".sh", ".md")) and (ROOT / name).is_file():
            text = (ROOT / name).read_text()
            assert text.count("\n") <= 500 or "Longer than 500 lines, because" in text, name


def reached(source: str) -> set[str]:
    """All files that a source needs, itself included, whatever the preprocessor picks."""
    seen, todo = set(), [source]
    while todo:
        name = todo.pop()
        if name not in seen:
            seen.add(name)
            todo += includes(name)
    return seen


def is_shared(name: str) -> bool:
    return name.startswith(("blocks/", "common/")) and name.endswith((".h", ".cuh"))


@pytest.mark.parametrize("section", kernel_config()["kernel"])
def test_section_lists_what_it_includes(section):
    """No more and no less: the builder's sandbox has the listed files alone. Headers of blocks/ and
    common/ are listed once, under [torch]."""
    config = kernel_config()
    listed = set(config["kernel"][section]["src"])
    compiled = {name for name in listed if name.endswith((".cpp", ".cu", ".hip"))}
    needed = set().union(*(reached(name) for name in compiled))
    assert {name for name in needed if name in compiled or not is_shared(name)} == listed


def test_torch_section_lists_the_binding_and_what_kernels_share():
    config = kernel_config()
    listed = set(config["torch"]["src"])
    compiled = {name for name in listed if name.endswith(".cpp")}
    kernels = {name for section in config["kernel"].values() for name in section["src"]}
    needed = set().union(*(reached(name) for name in {*compiled, *kernels}))
    shared = {name for name in needed if name.startswith("torch-ext/") or is_shared(name)}
    assert shared == listed
    assert shared | kernels == set(sources())


MAKERS = {f.__name__ for f in _device_constructors()} | {"normal"}
# Of integers, or of the dtype of what they are given.
OF_WHAT_THEY_GET = {"arange", "as_tensor", "asarray", "randint", "randperm"}


def test_new_tensors_say_their_dtype_and_device():
    """Models are made while torch's default is 16 bits: a float32 scale is not meant then. And a
    program may have a default device that is not the model's, nor the CPU."""
    silent = []
    for path in sorted((ROOT / "torch-ext" / "rocm_kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name = node.func.attr
            if ast.unparse(node.func.value) != "torch" or name not in MAKERS:
                continue
            given = {keyword.arg for keyword in node.keywords}  # None: of a dictionary
            needed = {"device"} if name in OF_WHAT_THEY_GET else {"device", "dtype"}
            if not needed <= given and None not in given:
                silent.append(f"{path.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not silent


def test_finalizers_call_no_op():
    """They run amid anything, as a trace of torch.compile, which would take the op in."""
    found = []
    for path in sorted((ROOT / "torch-ext" / "rocm_kernels").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            ends = isinstance(node, ast.FunctionDef) and node.name == "__del__"
            if isinstance(node, ast.Call) and "finalize" in ast.unparse(node.func):
                ends = "ops." in ast.unparse(node)
            if ends:
                found.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not found


@pytest.mark.slow
def test_tests_are_found_without_pytest_xdist():
    """vLLM's environment has none (make test-vllm), and reads conftest.py too."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "--collect-only", "-q", __file__]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
