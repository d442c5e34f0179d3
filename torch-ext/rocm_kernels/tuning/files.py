"""Reads and writes tuning files, and sets the configs in them."""

import datetime
import json
import os
import warnings
from pathlib import Path
from typing import Any, Dict, List, Tuple, Union

import torch

from . import gemm

SCHEMA = "rocm-kernels tuning 1"
VARIABLE = "ROCM_KERNELS_TUNING"

_OPS = {gemm.OP.name: gemm.OP}


def load_tuning(path: Union[str, "os.PathLike[str]"]) -> int:
    """Puts the configs of a file into force, on every device of the file's kind.

    Args:
        path: a file that :func:`tune_gemm` wrote.

    Returns:
        How many products now run with another config than the backend's choice.

    Raises:
        ValueError: the file is of another device, package version or schema, or names a config that
            cannot be. Nothing of it is in force then.
    """
    return _install(_read(path), path)


def clear_tuning(document: Dict[str, Any]) -> None:
    """Gives the products of what a tuner returned back to the backend's choice."""
    for index, _ in _devices():
        for entry in document["entries"]:
            force(index, entry, "")


def force(device: int, entry: Dict[str, Any], config: str) -> None:
    """Lets an entry's op run with this config, or with its own choice for an empty one.

    Args:
        device: a GPU's index; -1: the CPU.
        entry: of a tuning file.
    """
    op = _OPS[entry["op"]]
    key = [entry[name] for name in ("m", "n", "k", "a_dtype", "w_dtype", "block_scales")]
    # The backend's own choice needs no entry in its table.
    op.force(device, *key, "" if config == entry["default"] else config)


def document_of(entries: List[Dict[str, Any]], device: torch.device) -> Dict[str, Any]:
    """What a file of these entries holds."""
    return {
        "schema": SCHEMA,
        "package_version": _package()["version"],
        "build": _package()["id"],
        "device": device_name(device),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "torch": torch.__version__,
        "entries": entries,
    }


def _package() -> Dict[str, Any]:
    """``id``, ``version`` and ``backend`` of the built package."""
    return json.loads((Path(__file__).parent.parent / "metadata.json").read_text())


def _devices() -> List[Tuple[int, str]]:
    """Index and name of each device that this build of the package runs on."""
    if _package()["backend"]["type"] == "cpu":
        return [(-1, device_name(torch.device("cpu")))]
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    return [(device.index, device_name(device)) for device in devices]


def device_names() -> List[str]:
    """What torch calls the devices that this build runs on; first the one without an index."""
    if _package()["backend"]["type"] == "cpu":
        return ["cpu"]
    return ["cuda", *(f"cuda:{index}" for index, _ in _devices())]


def device_name(device: torch.device) -> str:
    """What makes two devices the same to a tuning file."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    units = properties.multi_processor_count
    if torch.version.hip is not None:
        return "{}, {} compute units".format(properties.gcnArchName.split(":")[0], units)
    return f"sm_{properties.major}{properties.minor}, {units} SMs"


def _read(path: Union[str, "os.PathLike[str]"]) -> Dict[str, Any]:
    """The file's object, its schema and version checked."""
    try:
        document = json.loads(Path(path).read_text())
        found = (document.get("schema"), document.get("package_version"))
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is no tuning file: {error}") from None
    wanted = (SCHEMA, _package()["version"])
    if found != wanted:
        raise ValueError(
            f"{path} must have schema {wanted[0]!r} and package_version {wanted[1]}, got "
            f"{found[0]!r} and {found[1]}; run the tuner of this version"
        )
    return document


def _install(document: Dict[str, Any], path: Union[str, "os.PathLike[str]"]) -> int:
    devices = _devices()
    matching = [index for index, name in devices if name == document["device"]]
    if not matching:
        raise ValueError(
            f"{path} was tuned on {document['device']!r}, but here is "
            f"{sorted({name for _, name in devices})}; run the tuner on this machine"
        )
    done = []
    try:
        for index in matching:
            for entry in document["entries"]:
                force(index, entry, entry["config"])
                done.append((index, entry))
    except (RuntimeError, KeyError, TypeError) as error:
        for index, entry in done:
            force(index, entry, "")
        raise ValueError(f"{path} cannot be used: {error}; run the tuner again") from error
    return sum(entry["config"] != entry["default"] for entry in document["entries"])


def load_from_environment() -> None:
    """What an import does: loads the files that ROCM_KERNELS_TUNING names, or warns why not."""
    paths = [path for path in os.environ.get(VARIABLE, "").split(os.pathsep) if path]
    if not paths:
        return

    def install() -> None:
        for path in paths:
            try:
                load_tuning(path)
            except ValueError as error:
                warnings.warn(f"{VARIABLE}: {error}", RuntimeWarning, stacklevel=2)

    if _package()["backend"]["type"] == "cpu":
        install()
    else:
        # An import must not initialise the GPU: a process may fork after it.
        torch.cuda._lazy_call(install)
