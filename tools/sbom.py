"""The bill of materials of one variant, as a CycloneDX document.

Lists the package with the hash of every file, what is compiled into the binary from elsewhere, and
what it needs at run time. The same build gives the same document: no clock, no random number.
"""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from kernels._rust import Metadata


@dataclass(frozen=True)
class Foreign:
    """Somebody else's code in or beside the binary."""

    name: str
    license: str  # an SPDX expression, or the name of a licence that SPDX does not list
    purpose: str


_HEADERS = [
    Foreign("PyTorch", "BSD-3-Clause", "stable ABI headers, compiled in"),
    Foreign("CPython", "PSF-2.0", "Python.h, compiled in"),
    Foreign(
        "GCC runtime library",
        "GPL-3.0-or-later WITH GCC-exception-3.1",
        "libstdc++ headers, compiled in",
    ),
]
_DEVICE = {
    "cpu": [],
    "cuda": [Foreign("CUDA Toolkit", "NVIDIA CUDA Toolkit EULA", "runtime headers, compiled in")],
    "rocm": [
        Foreign("HIP", "MIT", "runtime headers, compiled in"),
        Foreign("ROCm device libraries", "NCSA", "bitcode linked into the device code"),
        Foreign("LLVM", "Apache-2.0 WITH LLVM-exception", "HIP wrapper headers, compiled in"),
    ],
}
_RUNTIME = {
    "cpu": [],
    "cuda": [Foreign("CUDA runtime", "NVIDIA CUDA Toolkit EULA", "libcudart, loaded")],
    "rocm": [Foreign("HIP runtime", "MIT", "libamdhip64, loaded")],
}


def compiled_in(backend: str) -> list[Foreign]:
    """Whose code the extension holds beside this project's; THIRD_PARTY_NOTICES names each."""
    return [*_HEADERS, *_DEVICE[backend]]


def document(metadata: Metadata, backend: str, files: dict[str, Path]) -> str:
    """The JSON text, for the files of a variant by their paths."""
    package = Component(
        name=str(metadata.name),
        version=str(metadata.version),
        type=ComponentType.LIBRARY,
        bom_ref=metadata.id,
        licenses=[LicenseExpression(metadata.license)],
        components=[_file(name, path) for name, path in files.items()],
        properties=[Property(name="backend", value=backend)]
        + [Property(name="arch", value=arch) for arch in metadata.backend.archs or ()],
    )
    loaded = Foreign("torch", "BSD-3-Clause", "2.11 or later, loaded")
    included = [_foreign(f) for f in compiled_in(backend)]
    needed = [_foreign(f, ComponentScope.REQUIRED) for f in [loaded, *_RUNTIME[backend]]]
    # The serial number is the build's id, and the time is left at the epoch: see above.
    bom = Bom(
        components=[*included, *needed],
        serial_number=uuid.uuid5(uuid.NAMESPACE_URL, f"rocm-kernels:{metadata.id}"),
    )
    bom.metadata.component = package
    bom.metadata.timestamp = datetime.fromtimestamp(0, UTC)
    bom.register_dependency(package, [*included, *needed])
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _file(name: str, path: Path) -> Component:
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest)]
    return Component(name=name, type=ComponentType.FILE, bom_ref=f"file:{name}", hashes=hashes)


def _foreign(foreign: Foreign, scope: ComponentScope | None = None) -> Component:
    listed = "EULA" not in foreign.license
    expression = LicenseExpression(foreign.license) if listed else None
    return Component(
        name=foreign.name,
        type=ComponentType.LIBRARY,
        bom_ref=foreign.name,
        scope=scope,
        description=foreign.purpose,
        licenses=[expression or DisjunctiveLicense(name=foreign.license)],
    )
