"""Proves what a build folder claims, before it is uploaded.

    python tools/release_check.py                       # every variant in build/
    python tools/release_check.py build/VARIANT --reproduce --release

Each check reads the artifact itself, never the build's own logs. ``--reproduce`` builds the
variant twice more, in two folders that hold only the files that build.toml lists, and compares
bytes. ``--release`` also refuses what is fine during development: uncommitted changes, an API that
is not the stored one. A bill of materials for each variant (CycloneDX) is written to build/sbom/.
"""

from __future__ import annotations

import argparse
import ast
import functools
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import device_code
import public_api
import sbom
from elftools.elf.elffile import ELFFile
from kernel_abi_check import ObjectFile
from kernels._rust import Digest, DigestAlgorithm, DigestValidationError, Metadata
from kernels.variants import parse_variant

ROOT = Path(__file__).resolve().parent.parent
MANYLINUX = "manylinux_2_28"
# The newest symbol versions of manylinux_2_28.
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8,)}

# Base system libraries, then what each backend may add.
LIBRARIES = {"libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6", "libtorch.so"}
LIBRARIES |= {"libtorch_cpu.so", "libc10.so", "ld-linux-x86-64.so.2", "libpthread.so.0"}
BACKEND_LIBRARIES = {
    "cpu": r"libgomp\.so\.1",
    "cuda": r"libtorch_cuda\.so|libc10_cuda\.so|libcudart\.so\.\d+",
    "rocm": r"libtorch_hip\.so|libc10_hip\.so|libamdhip64\.so\.\d+",
}
# Undefined symbols beyond the versioned ones of the system libraries: torch's C interface, what a
# module without functions takes of Python's stable ABI, the GPU runtimes.
SYMBOLS = {
    "cpu": r"aoti_torch_\w+|torch_\w+|PyModule_Create2",
    "cuda": r"cuda[A-Z]\w+|__cuda\w+",
    "rocm": r"hip[A-Z]\w+|__hip\w+",
}
# A kernel neither ends the process, nor prints, nor starts or loads anything.
FORBIDDEN = r"_?exit|abort|quick_exit|printf|puts|putchar|fopen\w*|system|exec\w+|fork|popen|dlopen"
FORBIDDEN += r"|socket|connect|_ZSt4c(out|err|log)"
COMPILER_SYMBOLS = {"__gmon_start__", "_ITM_registerTMCloneTable", "_ITM_deregisterTMCloneTable"}
COMPILER_SYMBOLS |= {"__cxa_finalize", "__tls_get_addr"}
LINKER_SYMBOLS = {"_edata", "_end", "__bss_start", "_init", "_fini", "_etext"}
# A path of the machine that built it. Two levels at least: "/v" may be part of any table. What Nix
# keeps in /nix/store has the same name on every machine.
ROOTS = rb"home|root|work|tmp|build|nix|opt|mnt|Users|usr|var"
PATHS = rb"(?<![\w.+-])/(?!nix/store/)(?:" + ROOTS + rb")/[\x21-\x7e]{2,}"


class Failure(Exception):
    """A check's finding: what is wrong with the build."""


@dataclass(frozen=True)
class Symbol:
    """A dynamic symbol of the extension."""

    name: str
    version: str  # "GLIBC_2.14", or empty
    defined: bool
    unique: bool


@dataclass
class Variant:
    """One folder of build/, and build.toml beside it."""

    folder: Path
    root: Path

    @functools.cached_property
    def metadata(self) -> Metadata:
        return Metadata.read_from_file(self.folder / "metadata.json")

    @functools.cached_property
    def config(self) -> dict:
        with open(self.root / "build.toml", "rb") as file:
            return tomllib.load(file)

    @property
    def backend(self) -> str:
        return str(self.metadata.backend.backend_type).rpartition(".")[2].lower()

    @property
    def package(self) -> str:
        return self.config["general"]["name"].replace("-", "_")

    @functools.cached_property
    def extension(self) -> Path:
        found = list(self.folder.glob("*.so"))
        if len(found) != 1:
            raise Failure(f"one extension is expected, got {[p.name for p in found]}")
        return found[0]

    @functools.cached_property
    def files(self) -> dict[str, Path]:
        """Every file that an upload takes, by its path."""
        paths = (p for p in self.folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts)
        return {p.relative_to(self.folder).as_posix(): p for p in sorted(paths)}

    def symbols(self) -> Iterator[Symbol]:
        with open(self.extension, "rb") as file:
            elf = ELFFile(file)
            names = {}
            for _, auxiliaries in elf.get_section_by_name(".gnu.version_r").iter_versions():
                names |= {auxiliary["vna_other"]: auxiliary.name for auxiliary in auxiliaries}
            versions = elf.get_section_by_name(".gnu.version")
            for index, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
                if symbol.name:
                    yield Symbol(
                        symbol.name,
                        names.get(versions.get_symbol(index).entry["ndx"], ""),
                        symbol["st_shndx"] != "SHN_UNDEF",
                        symbol["st_info"]["bind"] == "STB_LOOS",
                    )


def check_layout(variant: Variant) -> str:
    parse_variant(variant.folder.name)
    expected = {"__init__.py", "_ops.py", "metadata.json", variant.extension.name}
    source = variant.root / "torch-ext" / variant.package
    expected |= {p.relative_to(source).as_posix() for p in source.rglob("*.py")}
    # A signature, and the folder for old clients that tools/build.py makes.
    optional = {"metadata.json.sigstore", f"{variant.package}/__init__.py"}
    if odd := (set(variant.files) - optional) ^ expected:
        raise Failure(f"missing or not expected: {', '.join(sorted(odd))}")
    for name in expected - {"_ops.py"}:
        if (source / name).is_file() and (source / name).read_bytes() != (
            variant.files[name].read_bytes()
        ):
            raise Failure(
                f"{name} differs from torch-ext/{variant.package}; run `make build` again"
            )
    return f"{len(variant.files)} files"


def check_metadata(variant: Variant) -> str:
    general, metadata = variant.config["general"], variant.metadata
    stated = (str(metadata.name), metadata.version, metadata.license)
    declared = (general["name"], general["version"], general["license"])
    if stated != declared:
        raise Failure(f"build.toml declares {declared}, metadata.json {stated}")
    arch = parse_variant(variant.folder.name).arch
    if arch.backend.name != variant.backend:
        raise Failure(f"the folder says {arch.backend.name}, metadata.json {variant.backend}")
    if not metadata.id.isidentifier():
        raise Failure(f"id {metadata.id!r} is not a Python module name")
    if metadata.provenance is None:
        raise Failure("no provenance")
    return f"id {metadata.id}"


def check_provenance(variant: Variant) -> str:
    """Requires of a release that it was built from a commit, by kernel-builder or here, with
    nothing uncommitted."""
    kernel = variant.metadata.provenance.kernel
    if kernel is None:
        raise Failure("metadata.json records no commit of the sources")
    if variant.metadata.provenance.dirty:
        raise Failure(f"built from {kernel.commit[:10]} with uncommitted changes")
    return f"commit {kernel.commit[:10]}"


def check_version(variant: Variant) -> str:
    """Requires of a release that the changelog begins with its version, and that the API is the
    stored one."""
    entry, released = public_api.newest_entry()
    if entry != variant.metadata.version or not released:
        raise Failure(f"CHANGELOG.md begins with {entry}{'' if released else ' (unreleased)'}")
    stored = json.loads(public_api.STORED.read_text())
    if stored != {"version": entry, "released": True, "api": public_api.public_api()}:
        raise Failure("tools/public_api.json is not this API: run `python tools/public_api.py`")
    return f"{entry}, {len(stored['api'])} public names"


def check_digest(variant: Variant) -> str:
    stored = variant.metadata.digest
    if stored is None:
        raise Failure("metadata.json has no digest")
    with tempfile.TemporaryDirectory() as folder:
        # Files that Python left beside the uploaded ones do not count.
        for name, path in variant.files.items():
            target = Path(folder) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        try:
            stored.validate(Digest.hash_variant(DigestAlgorithm.SHA256, folder))
        except DigestValidationError as error:
            raise Failure("; ".join(str(v) for v in error.violations)) from None
    return f"{len(stored.files)} files hashed"


def check_namespace(variant: Variant) -> str:
    """Requires one name for the extension, its ops and its module, that no other build shares."""
    name = variant.metadata.id
    if variant.extension.name != f"{name}.abi3.so":
        raise Failure(f"the extension is {variant.extension.name}, the id {name}")
    if f"torch.ops.{name}\n" not in variant.files["_ops.py"].read_text():
        raise Failure(f"_ops.py does not name torch.ops.{name}")
    if not re.fullmatch(rf"_{variant.package}_{variant.backend}_[0-9a-z_]+", name):
        raise Failure(f"{name} does not tell package, backend and build apart")
    binary = variant.extension.read_bytes()
    registered = set(re.findall(rb"\0(_%s_\w+)\0" % variant.package.encode(), binary))
    if registered != {name.encode()}:
        raise Failure(f"the binary registers {sorted(registered)}")
    for other in variant.folder.parent.glob("*/metadata.json"):
        if other.parent != variant.folder and Metadata.read_from_file(other).id == name:
            raise Failure(f"{other.parent.name} has the same id")
    return name


def check_abi(variant: Variant) -> str:
    """Runs kernel-abi-check, as `kernel-builder check-abi` does, and checks the versions of all
    symbols.

    kernel-abi-check reads the full symbol table, which a stripped extension has not: then the rest
    of this check, and that of the symbols, stand alone.
    """
    extension = ObjectFile(variant.extension)
    found = [*extension.check_python_abi("3.9"), *extension.check_manylinux(MANYLINUX)]
    if found:
        raise Failure("; ".join(str(violation) for violation in found))
    newest: dict[str, tuple[int, ...]] = {}
    for symbol in variant.symbols():
        if not symbol.version:
            continue
        family, _, number = symbol.version.rpartition("_")
        if family not in NEWEST:  # a library's own: libcudart.so.13 calls its version 13
            continue
        numbers = tuple(int(part) for part in number.split(".") if part.isdigit())
        newest[family] = max(newest.get(family, ()), numbers)
        if numbers > NEWEST[family]:
            raise Failure(f"{symbol.name} needs {symbol.version}, beyond {MANYLINUX}")
    return ", ".join(f"{f} {'.'.join(map(str, v))}" for f, v in sorted(newest.items()))


def check_libraries(variant: Variant) -> str:
    with open(variant.extension, "rb") as file:
        tags = list(ELFFile(file).get_section_by_name(".dynamic").iter_tags())
    needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
    allowed = BACKEND_LIBRARIES[variant.backend]
    odd = [n for n in needed if n not in LIBRARIES and not re.fullmatch(allowed, n)]
    if odd:
        raise Failure(f"needs {', '.join(odd)}")
    if paths := [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")]:
        raise Failure(f"has a library search path: {paths[0]}")
    return ", ".join(needed)


def check_symbols(variant: Variant) -> str:
    allowed = "|".join({SYMBOLS["cpu"], SYMBOLS[variant.backend]})
    undefined = exported = 0
    for symbol in variant.symbols():
        if re.fullmatch(FORBIDDEN, symbol.name):
            raise Failure(f"{symbol.name} is used")
        if symbol.unique:
            raise Failure(f"{symbol.name} would be shared between kernels (STB_GNU_UNIQUE)")
        standard = re.match(r"_Z(Z|GV|T[VTIS])?N?K?S[tao]", symbol.name)
        if symbol.defined:
            exported += 1
            own = symbol.name == f"PyInit_{variant.metadata.id}" or variant.package in symbol.name
            # clang marks each unit of HIP code, for one that is linked with device code elsewhere.
            internal = symbol.name in LINKER_SYMBOLS or symbol.name.startswith("__hip_cuid_")
            if not own and not standard and not internal:
                raise Failure(f"{symbol.name} is exported, and does not name the package")
        else:
            undefined += 1
            known = symbol.version or standard or symbol.name in COMPILER_SYMBOLS
            if not known and not re.fullmatch(allowed, symbol.name):
                raise Failure(f"{symbol.name} is undefined, and no library loaded promises it")
    return f"{undefined} undefined, {exported} exported"


def check_device_code(variant: Variant) -> str:
    """Requires that every translation unit holds code for every target that metadata.json lists."""
    listed = set(variant.metadata.backend.archs or ())
    if variant.backend == "cpu":
        if listed:
            raise Failure(f"a CPU build lists {sorted(listed)}")
        return "none"
    units = device_code.units(variant.extension, variant.backend)
    if not listed or not units:
        raise Failure(f"{len(units)} units of device code for {sorted(listed)}")
    for index, held in enumerate(units):
        if odd := held ^ listed:
            raise Failure(f"unit {index} holds {sorted(held)}, listed differently: {sorted(odd)}")
    return f"{len(units)} units, each for {', '.join(sorted(listed))}"


def check_paths(variant: Variant) -> str:
    for name, path in variant.files.items():
        for match in re.finditer(PATHS, path.read_bytes()):
            raise Failure(f"{name} holds {match[0][:60].decode()!r}")
    return "none of the machine that built it"


def check_python(variant: Variant) -> str:
    """Requires Python 3.9 syntax, and no import beyond the standard library and torch."""
    for name, path in variant.files.items():
        if not name.endswith(".py"):
            continue
        try:
            tree = ast.parse(path.read_text(), name, feature_version=(3, 9))
        except SyntaxError as error:
            raise Failure(f"{name} is not Python 3.9: {error}") from None
        for node in ast.walk(tree):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules.append(node.module)
            for module in modules:
                top = module.split(".")[0]
                if top != "torch" and top not in sys.stdlib_module_names:
                    raise Failure(f"{name} imports {module}")
    return "3.9, imports torch alone"


def check_licence(variant: Variant) -> str:
    text = (variant.root / "LICENSE").read_text()
    if variant.metadata.license != "Apache-2.0" or "Apache License" not in text:
        raise Failure(f"LICENSE and metadata.json ({variant.metadata.license}) must be Apache-2.0")
    notices = (variant.root / "THIRD_PARTY_NOTICES").read_text()
    if missing := [c.name for c in sbom.compiled_in(variant.backend) if c.name not in notices]:
        raise Failure(f"THIRD_PARTY_NOTICES does not name {', '.join(missing)}")
    return "Apache-2.0, and notices for what is compiled in"


def check_sbom(variant: Variant) -> str:
    target = variant.folder.parent / "sbom" / f"{variant.folder.name}.cdx.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(sbom.document(variant.metadata, variant.backend, variant.files))
    return f"{target.parent.parent.name}/sbom/{target.name}"


def check_reproducible(variant: Variant) -> str:
    """Requires that the listed files alone build the variant's own bytes, twice, in folders of
    other names.

    nvcc hashes a source's full path into the names in its anonymous namespaces, so a CUDA build is
    repeated in one folder, and its extension not compared with the one built elsewhere.
    """
    nvcc = variant.backend == "cuda"
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        # One snapshot, should the checkout change meanwhile.
        copy_listed(variant, Path(temporary) / "snapshot", variant.backend)
        snapshot = Variant(Path(temporary) / "snapshot", Path(temporary) / "snapshot")
        for name in ("first", "first" if nvcc else "a/second/place"):
            folder = Path(temporary) / name
            shutil.rmtree(folder, ignore_errors=True)
            copy_listed(snapshot, folder, variant.backend)
            command = [sys.executable, "tools/build.py", "--backend", variant.backend]
            built = subprocess.run(command, cwd=folder, capture_output=True, text=True)
            if built.returncode != 0:
                raise Failure(f"the listed files do not build:\n{built.stdout}{built.stderr}")
            results.append(hashes(Variant(folder / built.stdout.split()[-1], folder)))
    first, second = results
    if differing := [name for name in first | second if first.get(name) != second.get(name)]:
        raise Failure(f"two builds differ in {', '.join(differing)}")
    # metadata.json also records the commit, which a folder outside of git has not.
    own = hashes(variant)
    exempt = {"metadata.json", variant.extension.name if nvcc else ""}
    if differing := [n for n in own | first if own.get(n) != first.get(n) and n not in exempt]:
        raise Failure(f"a fresh build of the sources differs in {', '.join(differing)}")
    return f"{len(first)} files, the same bytes each time"


def copy_listed(variant: Variant, folder: Path, backend: str) -> None:
    """Copies to a folder what kernel-builder's sandbox gets for one backend, and the local
    builder."""
    listed = set(variant.config["torch"]["src"])
    for section in variant.config["kernel"].values():
        if section["backend"] == backend:
            listed |= set(section["src"])
    python = (variant.root / "torch-ext" / variant.package).rglob("*.py")
    listed |= {path.relative_to(variant.root).as_posix() for path in python}
    for name in [*listed, "build.toml", "tools/build.py", "tools/rocm.py"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(variant.root / name, folder / name)


def hashes(variant: Variant) -> dict[str, str]:
    return {n: hashlib.sha256(p.read_bytes()).hexdigest() for n, p in variant.files.items()}


CHECKS = [
    check_layout,
    check_metadata,
    check_digest,
    check_namespace,
    check_abi,
    check_libraries,
    check_symbols,
    check_device_code,
    check_paths,
    check_python,
    check_licence,
    check_sbom,
]


def run(variant: Variant, checks: list[Callable[[Variant], str]]) -> int:
    """Prints a line for each check; returns how many failed."""
    print(variant.folder.name)
    failed = 0
    for check in checks:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        try:
            print(f"  ok    {name:13} {check(variant)}", flush=True)
        except (Failure, OSError, ValueError, KeyError) as error:
            failed += 1
            print(f"  FAIL  {name:13} {error}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("variants", nargs="*", type=Path, help="default: all in build/")
    parser.add_argument("--reproduce", action="store_true", help="build again and compare")
    parser.add_argument("--release", action="store_true", help="only from committed sources")
    arguments = parser.parse_args()
    folders = arguments.variants or [m.parent for m in ROOT.glob("build/torch*/metadata.json")]
    if not folders:
        print("error: build/ has no variant; run `make build` first", file=sys.stderr)
        return 1
    checks = [*CHECKS]
    checks += [check_provenance, check_version] if arguments.release else []
    checks += [check_reproducible] if arguments.reproduce else []
    failed = sum(run(Variant(folder.resolve(), ROOT), checks) for folder in sorted(folders))
    print(f"{failed} checks failed" if failed else "all checks passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
