"""Builds the package from build.toml on a machine without Nix.

    python tools/build.py --backend cpu|cuda|rocm [--for-torch 2.13]

--for-torch lays the variant out once more under the name of one torch, for clients before kernels
0.15, which know no stable-ABI variants (SGLang 0.5.23 pins 0.14.1).

cuda needs nvcc, rocm a ROCm installation or clang and HIP headers (tools/rocm.py); neither needs
the GPU, nor a torch that knows it.

Longer than 500 lines, because what kernel-builder generates is written out here: one file is then
all that a source tree needs beside tools/rocm.py.

build.toml is the only list of what is built. The result, build/<variant>/, is laid out as the
kernels Hub expects, so get_kernel, get_local_kernel and kernelize load it. Compiling goes through
ninja, which rebuilds what changed. torch's own cpp_extension tells include and library folders; it
does not drive the build, because it cannot cross-build: it insists on linking GPU libraries that a
CPU-only torch does not have.
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import ninja
import rocm
from kernels._rust import Digest, DigestAlgorithm
from ninja import ninja_syntax
from torch.utils import cpp_extension

# What kernel-builder generates beside the sources of a package: the macros by which an extension
# registers its ops under a name that is unique to the build.
REGISTRATION_H = """\
#pragma once

#include <Python.h>

#define ROCM_KERNELS_STRINGIFY_(text) #text
#define ROCM_KERNELS_STRINGIFY(text) ROCM_KERNELS_STRINGIFY_(text)
#define ROCM_KERNELS_INIT_(name) PyInit_##name
#define ROCM_KERNELS_INIT(name) ROCM_KERNELS_INIT_(name)

#define STABLE_TORCH_LIBRARY_EXPAND(name, library) STABLE_TORCH_LIBRARY(name, library)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(name, key, library) \\
  STABLE_TORCH_LIBRARY_IMPL(name, key, library)

#define REGISTER_EXTENSION(name)                                                       \\
  PyMODINIT_FUNC ROCM_KERNELS_INIT(name)() {                                           \\
    static struct PyModuleDef module = {                                               \\
        PyModuleDef_HEAD_INIT, ROCM_KERNELS_STRINGIFY(name), nullptr, 0, nullptr, nullptr, \\
        nullptr, nullptr, nullptr};                                                    \\
    return PyModule_Create(&module);                                                   \\
  }
"""

# libstdc++'s shared pointers ask glibc 2.32 and later whether the process has one thread. Their own
# answer, "no", keeps the extension loadable where glibc is older, as its platform tag promises.
SINGLE_THREADED_CPP = """\
extern "C" {
__attribute__((visibility("hidden"))) extern const char __libc_single_threaded = 0;
}
"""

OPS_PY = '''\
import torch

from . import {ops_name}

ops = torch.ops.{ops_name}


def add_op_namespace_prefix(op_name: str) -> str:
    """The op's qualified name, for torch.library."""
    return f"{ops_name}::{{op_name}}"
'''

# Clients before flattened variants import the folder of the package's name, which kernel-builder
# no longer makes.
COMPATIBILITY_PY = """\
import importlib.util
import sys
from pathlib import Path


def _import_parent():
    path = Path(__file__).resolve().parent.parent / "__init__.py"
    name = "{ops_name}_package"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


globals().update({{k: v for k, v in vars(_import_parent()).items() if not k.startswith("__")}})
__all__ = list(_import_parent().__all__)
"""

# The ROCm release whose runtime the rocm variant asks for.
ROCM_VERSION = (7, 1)

# Beside those that build.toml gives to a section.
CXX_FLAGS = ["-std=c++17", "-O3", "-DNDEBUG", "-fPIC", "-Wall", "-Wextra", "-fno-gnu-unique"]

# build.toml's names of the flags for each kind of source.
FLAGS = {".cpp": "cxx-flags", ".cu": "cuda-flags", ".hip": "hip-flags"}


class BuildError(Exception):
    """Something that the user can mend; printed without a traceback."""


@dataclass
class Package:
    """build.toml, as far as a build needs it."""

    root: Path
    name: str
    version: int
    license: str
    stable_abi: str
    torch_sources: list[str]
    torch_flags: list[str]
    sections: dict[str, dict] = field(default_factory=dict)

    @property
    def python_name(self) -> str:
        return self.name.replace("-", "_")

    @property
    def python_files(self) -> list[Path]:
        folder = self.root / "torch-ext" / self.python_name
        return sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".pyi"))

    def archs(self, key: str) -> list[str]:
        """The device targets of the backend's sections, in build.toml's order."""
        listed = [arch for section in self.sections.values() for arch in section[key]]
        return list(dict.fromkeys(listed))

    def sources(self) -> list[str]:
        """Every file that the selected sections list, without duplicates."""
        listed = list(self.torch_sources)
        for section in self.sections.values():
            listed += section["src"]
        return list(dict.fromkeys(listed))

    def flags(self, source: str) -> str:
        """What build.toml adds to the compilation of one source."""
        if source in self.torch_sources:
            return " ".join(self.torch_flags)
        section = next(s for s in self.sections.values() if source in s["src"])
        return " ".join(section.get(FLAGS[Path(source).suffix], []))

    def unique_id(self) -> str:
        """Changes when anything that is built changes, or its version, and only then."""
        digest = hashlib.sha256(f"{self.name} {self.version}".encode())
        for path in [*(self.root / s for s in sorted(self.sources())), *self.python_files]:
            digest.update(path.relative_to(self.root).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
        return digest.hexdigest()[:10]


def read_package(root: Path, backend: str) -> Package:
    """Reads build.toml and keeps the sections of one backend.

    Raises:
        BuildError: the backend is not declared, or a listed file does not exist.
    """
    with open(root / "build.toml", "rb") as file:
        config = tomllib.load(file)
    general, torch_section = config["general"], config["torch"]
    if backend not in general["backends"]:
        raise BuildError(f"build.toml declares {general['backends']}, not {backend!r}")
    package = Package(
        root=root,
        name=general["name"],
        version=general["version"],
        license=general["license"],
        stable_abi=torch_section["stable-abi"][backend],
        torch_sources=torch_section["src"],
        torch_flags=torch_section.get("cxx-flags", []),
        sections={n: s for n, s in config["kernel"].items() if s["backend"] == backend},
    )
    for source in package.sources():
        if not (root / source).is_file():
            raise BuildError(f"build.toml lists {source}, which does not exist")
    return package


def target_version_flag(stable_abi: str) -> str:
    """Returns the flag with which torch's headers offer what that version's ABI has, and no
    more."""
    major, minor = (int(part) for part in stable_abi.split("."))
    return f"-DTORCH_TARGET_VERSION={major << 56 | minor << 48:#018x}"


def git_provenance(root: Path) -> dict | None:
    """Commit and dirtiness of the sources; None outside of a git checkout."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != root.resolve():
            return None
        changed = git("status", "--porcelain", "--untracked-files=no")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (subprocess.CalledProcessError, FileNotFoundError):
        return None


def python_include() -> str:
    include = sysconfig.get_paths()["include"]
    if not (Path(include) / "Python.h").is_file():
        raise BuildError(
            f"Python.h is not in {include}; install Python's headers "
            "(Debian and Ubuntu: apt install python3-dev)"
        )
    return include


def require_tool(*names: str, advice: str = "Debian and Ubuntu: apt install g++") -> str:
    """Returns the first of the programs that is installed; a BuildError says what to install."""
    for name in names:
        if found := shutil.which(name):
            return found
    raise BuildError(f"none of {', '.join(names)} is installed ({advice})")


@dataclass
class Toolchain:
    """What differs between backends: the variant's name, the flags, how device code is compiled."""

    variant: str
    define: str
    link_flags: list[str]
    archs: list[str] | None = None
    device_suffix: str | None = None
    device_command: str | None = None  # ninja's: with $in, $out, $out.d and $unit


def cpu_toolchain(package: Package, work: Path) -> Toolchain:
    library = cpp_extension.library_paths()[0]
    return Toolchain(
        variant=variant_name(package, "cpu"),
        define="-DCPU_KERNEL",
        link_flags=[f"-L{library}", "-ltorch_cpu", "-lc10"],
    )


def cuda_toolchain(package: Package, work: Path) -> Toolchain:
    nvcc = require_tool("nvcc", advice="install the CUDA toolkit")
    text = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = re.search(r"release (\d+)\.(\d+)", text).groups()
    archs = package.archs("cuda-capabilities")
    numbers = [arch.replace(".", "") for arch in archs]
    codes = [f"-gencode=arch=compute_{n},code=sm_{n}" for n in numbers]
    # PTX of the newest target lets later GPUs compile the kernels for themselves.
    codes.append(f"-gencode=arch=compute_{numbers[-1]},code=compute_{numbers[-1]}")
    libraries = cuda_toolkit(nvcc) / "lib64"
    return Toolchain(
        variant=variant_name(package, f"cu{major}{minor}"),
        define="-DCUDA_KERNEL -DUSE_CUDA=1",
        link_flags=[
            f"-L{libraries}",
            "-lcudart",
            *torch_gpu_library(work, "torch_cuda"),
        ],
        archs=[*archs[:-1], f"{archs[-1]}+PTX"],
        device_suffix=".cu",
        device_command=" ".join(
            [
                *repeatable(),
                shlex.quote(nvcc),
                "-std=c++17 -O3 -DNDEBUG --threads 0",
                # No random names. One remains: a hash of the source's full path.
                "--frandom-seed=$unit --objdir-as-tempdir",
                *codes,
                "-Xcompiler -fPIC",
                # Quoted twice: nvcc's own shell splits what it hands on.
                f"""-Xcompiler '"-ffile-prefix-map={package.root}=."'""",
                "$flags -MD -MF $out.d -c $in -o $out",
            ]
        ),
    )


def repeatable() -> list[str]:
    """Words before nvcc's command, so that the same source gives the same code every time.

    cicc, the front end of CUDA 13.0, orders some of its work by addresses. They follow its start
    address, which Linux draws at random, and when jemalloc hands pages back, which goes by time.
    """
    words = ["env", "MALLOC_CONF=dirty_decay_ms:-1,muzzy_decay_ms:-1"]
    fixed = ["setarch", "--addr-no-randomize"]
    try:
        subprocess.run([*fixed, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):  # docker's default profile forbids it
        print("note: addresses cannot be fixed here; a second build may differ", file=sys.stderr)
        return words
    return [*words, *fixed]


def cuda_toolkit(nvcc: str) -> Path:
    """The toolkit's folder, as nvcc itself names it: nvcc on the PATH may be a wrapper script."""
    command = [nvcc, "--dryrun", "-c", "-x", "cu", os.devnull, "-o", os.devnull]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return Path(re.search(r"^#\$ TOP=(.+)$", text, re.MULTILINE).group(1)).resolve()


def rocm_toolchain(package: Package, work: Path) -> Toolchain:
    try:
        hip = rocm.find_toolchain()
    except rocm.ToolchainMissing as missing:
        raise BuildError(str(missing)) from None
    archs = package.archs("rocm-archs")
    # The same bytes in any folder: no line tables, no marker hashed from the source's full path.
    same = (f"-ffile-prefix-map={package.root}=.", "-g0", "-cuid=$unit")
    command = hip.compile_command(
        "$in", "$out", tuple(archs), extra=("-MD", "-MF", "$out.d", "$flags", *same)
    )
    # The runtime's library belongs to ROCm 7 and is not linked by its file: cross-builds have none.
    runtime = stub_library(work, "amdhip64", f"libamdhip64.so.{ROCM_VERSION[0]}")
    return Toolchain(
        variant=variant_name(package, "rocm{}{}".format(*ROCM_VERSION)),
        define="-DROCM_KERNEL -DUSE_ROCM=1",
        link_flags=[*runtime, *torch_gpu_library(work, "torch_hip")],
        archs=archs,
        device_suffix=".hip",
        device_command=" ".join(word if "$" in word else shlex.quote(word) for word in command),
    )


def torch_gpu_library(work: Path, name: str) -> list[str]:
    """Link flags for torch's own libraries; a stub stands for the GPU one that is not installed."""
    library = Path(cpp_extension.library_paths()[0])
    flags = [f"-L{library}", "-ltorch_cpu", "-lc10"]
    if (library / f"lib{name}.so").exists():
        return [*flags, f"-l{name}"]
    return [*flags, *stub_library(work, name, f"lib{name}.so")]


def stub_library(work: Path, name: str, soname: str) -> list[str]:
    """Flags that record a dependency on a library which this machine may lack."""
    folder = work / "stubs"
    folder.mkdir(exist_ok=True)
    path = folder / f"lib{name}.so"
    compiler = require_tool("g++", "c++")
    command = [compiler, "-shared", "-o", str(path), f"-Wl,-soname,{soname}", "-x", "c", os.devnull]
    subprocess.run(command, check=True)
    return ["-Wl,--no-as-needed", f"-L{folder}", f"-l{name}", "-Wl,--as-needed"]


def variant_name(package: Package, compute: str) -> str:
    abi = package.stable_abi.replace(".", "")
    return f"torch-stable-abi{abi}-{compute}-{platform.machine()}-{platform.system().lower()}"


TOOLCHAINS = {"cpu": cpu_toolchain, "cuda": cuda_toolchain, "rocm": rocm_toolchain}


def write_ninja(package: Package, toolchain: Toolchain, ops_name: str, work: Path) -> Path:
    """Writes work/build.ninja and returns the extension that it makes."""
    root = package.root
    generated = work / "generated"
    generated.mkdir(parents=True, exist_ok=True)
    for name, text in [
        ("registration.h", REGISTRATION_H),
        ("single_threaded.cpp", SINGLE_THREADED_CPP),
    ]:
        path = generated / name
        if not path.exists() or path.read_text() != text:
            path.write_text(text)

    # Paths of this machine must not reach the binary: not in assertions, not in debug information.
    # Of a header in an environment behind a link, the compiler keeps the shorter of its two paths.
    torch_includes = [os.path.realpath(path) for path in cpp_extension.include_paths()]
    remap = [f"-ffile-prefix-map={root}=.", f"-ffile-prefix-map={torch_includes[0]}=torch"]
    includes = [f"-isystem{path}" for path in [*torch_includes, python_include()]]
    extension = work / f"{ops_name}.abi3.so"
    with open(work / "build.ninja", "w") as file:
        writer = ninja_syntax.Writer(file)
        writer.rule(
            "cxx",
            command=f"{require_tool('g++', 'c++')} -MD -MF $out.d {shlex.join(CXX_FLAGS + remap)} "
            "$flags -c $in -o $out",
            depfile="$out.d",
            deps="gcc",
            description="compile $name",
        )
        if toolchain.device_command:
            writer.rule(
                "device",
                command=toolchain.device_command,
                depfile="$out.d",
                deps="gcc",
                description="compile $name (device)",
            )
        writer.rule(
            "link",
            command=f"{require_tool('g++', 'c++')} -shared -Wl,--as-needed "
            "-Wl,--build-id=none -Wl,-z,relro,-z,now -s $in -o $out $flags",
            description="link $out",
        )
        binding_flags = [
            f"-DTORCH_EXTENSION_NAME={ops_name}",
            "-DPy_LIMITED_API=0x03090000",
            target_version_flag(package.stable_abi),
            f"-I{generated}",
            *includes,
        ]
        objects = [str(work / "objects" / "single_threaded.o")]
        writer.build(
            objects[0],
            "cxx",
            str(generated / "single_threaded.cpp"),
            variables={"name": "single_threaded.cpp", "flags": ""},
        )
        for source in package.sources():
            suffix = Path(source).suffix
            if suffix not in FLAGS:
                continue
            output = str(work / "objects" / f"{source}.o")
            variables = {"name": source, "flags": package.flags(source)}
            if suffix == ".cpp":
                own = shlex.join(binding_flags if source in package.torch_sources else [])
                variables["flags"] = " ".join([toolchain.define, own, variables["flags"]])
                writer.build(output, "cxx", str(root / source), variables=variables)
                objects.append(output)
            elif suffix == toolchain.device_suffix:
                variables["unit"] = Path(source).stem
                writer.build(output, "device", str(root / source), variables=variables)
                objects.append(output)
        flags = shlex.join(toolchain.link_flags)
        writer.build(str(extension), "link", objects, variables={"flags": flags})
        writer.default(ninja_syntax.escape_path(str(extension)))
    return extension


def assemble(package: Package, toolchain: Toolchain, backend: str, extension: Path) -> Path:
    """Lays out build/<variant>/ around the linked extension, anew if it is not there already."""
    target = package.root / "build" / toolchain.variant
    staging = target.with_name(f".{target.name}.new")
    shutil.rmtree(staging, ignore_errors=True)
    ops_name = extension.name.removesuffix(".abi3.so")
    source_folder = package.root / "torch-ext" / package.python_name
    for path in package.python_files:
        copy = staging / path.relative_to(source_folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    shutil.copyfile(extension, staging / extension.name)
    (staging / "_ops.py").write_text(OPS_PY.format(ops_name=ops_name))
    compatibility = staging / package.python_name / "__init__.py"
    compatibility.parent.mkdir()
    compatibility.write_text(COMPATIBILITY_PY.format(ops_name=ops_name))

    metadata = {
        "id": ops_name,
        "name": package.name,
        "version": package.version,
        "license": package.license,
        "python-depends": [],
        "backend": {"type": backend, **({"archs": toolchain.archs} if toolchain.archs else {})},
        "digest": None,
        # The client reads provenance of kernel-builder alone; a build of this script says so.
        "provenance": {"kernel-builder": {"version": "0.0.0+tools.build.py"}},
    }
    if kernel := git_provenance(package.root):
        metadata["provenance"]["kernel"] = kernel
    digest = Digest.hash_variant(DigestAlgorithm.SHA256, staging)
    metadata["digest"] = {"algorithm": "sha256", "files": dict(sorted(digest.files.items()))}
    (staging / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")

    if is_laid_out(target, staging):  # programs may be reading it
        shutil.rmtree(staging)
        return target
    shutil.rmtree(target, ignore_errors=True)
    staging.rename(target)
    return target


def is_laid_out(target: Path, staging: Path) -> bool:
    """Whether a folder has another's files, with the same bytes, and no others but Python's own."""

    def files(folder: Path) -> set[Path]:
        found = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder) for path in found if path.parent.name != "__pycache__"}

    names = files(staging)
    same, _, _ = filecmp.cmpfiles(target, staging, names, shallow=False)
    return names == files(target) and len(same) == len(names)


def for_torch(variant: Path, version: str) -> Path:
    """A copy of a stable-ABI variant, which any later torch loads, under the name that clients look
    for who know variants of one torch alone."""
    major, minor = version.split(".")[:2]
    _, _, compute = variant.name.partition("-stable-")[2].partition("-")
    target = variant.with_name(f"torch{major}{minor}-cxx11-{compute}")
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(variant, target)
    return target


def build(root: Path, backend: str) -> Path:
    """Builds one backend's variant; returns build/<variant>/.

    Raises:
        BuildError: something is missing, or does not compile.
    """
    package = read_package(root, backend)
    work = root / "build" / "objects" / backend
    try:
        work.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=work).close()
    except OSError as error:
        raise BuildError(f"{work} cannot be written ({error.strerror})") from None
    toolchain = TOOLCHAINS[backend](package, work)
    ops_name = f"_{package.python_name}_{backend}_{package.unique_id()}"
    extension = write_ninja(package, toolchain, ops_name, work)
    command = [str(Path(ninja.BIN_DIR) / "ninja"), "-C", str(work)]
    if subprocess.run(command).returncode != 0:
        raise BuildError(f"the {backend} backend does not compile; the first error is above")
    for stale in work.glob("*.abi3.so"):
        if stale != extension:
            stale.unlink()
    return assemble(package, toolchain, backend, extension)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog=textwrap.dedent("The variant's folder is the last line of the output."),
    )
    parser.add_argument("--backend", choices=sorted(TOOLCHAINS), default="cpu")
    parser.add_argument("--for-torch", metavar="VERSION")
    arguments = parser.parse_args()
    root = Path(__file__).resolve().parent.parent
    try:
        variant = build(root, arguments.backend)
        if arguments.for_torch:
            variant = for_torch(variant, arguments.for_torch)
        print(variant.relative_to(root))
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
