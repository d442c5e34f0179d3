"""Asks a device, once, whether a graph may have calls of decode_layers, of which nobody has seen
every device and every runtime.

    layers of random numbers, by their ops and by decode_layers    must be near, of each cache, of
                                                                   one sequence and of several
    the same call recorded                                         must write nothing
    the graph replayed                                             must write what the call did
"""

from typing import Any, Callable, Dict, List, Optional

import torch

from ..functional import decode_layers, native_fp8_dtype
from ..reference import decode_layers as ops_one_by_one
from .layer_stacks import most_cache

_HIDDEN, _HEADS, _KV_HEADS, _ROWS = 1024, 8, 2, 6  # that the kernel takes
_known: Dict[torch.device, Optional[str]] = {}


def why_no_stacks(
    device: torch.device, record: Callable[[Callable[[], Any]], Any]
) -> Optional[str]:
    """Why a graph that ``record`` makes of a run cannot have such calls; None: it can."""
    if device not in _known:
        with torch.inference_mode(False), torch.no_grad():
            _known[device] = _ask(device, record)
    return _known[device]


def _ask(device: torch.device, record: Callable[[Callable[[], Any]], Any]) -> Optional[str]:
    for sequences in (1, 3):
        for in_fp8 in (False, True) if most_cache(device, sequences) > 0 else ():
            why = _ask_with(_call(device, in_fp8, sequences), record)
            if why is not None:
                return why
    return None


def _ask_with(given: Dict[str, Any], record: Callable[[Callable[[], Any]], Any]) -> Optional[str]:
    expected, found, recorded = (_copied(given) for _ in range(3))
    ops_one_by_one(**expected)
    try:
        decode_layers(**found)
        error = (found["residual"].float() - expected["residual"].float()).norm()
        if not error < 0.1 * expected["residual"].float().norm():
            return "decode_layers gives something else here than its ops"
        graph = record(lambda: decode_layers(**recorded))
        if not _are_equal(recorded, given):
            return "decode_layers is run at once here where it should be recorded"
        graph.replay()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    if not _are_equal(recorded, found):
        return "decode_layers gives something else here in a graph"
    return None


def _call(device: torch.device, in_fp8: bool, sequences: int) -> Dict[str, Any]:
    random, fp8 = torch.Generator().manual_seed(1), native_fp8_dtype(device)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float32, device="cpu")

    def some(*shape: int) -> torch.Tensor:
        return randn(*shape).to(device, torch.bfloat16)

    def weight(name: str, rows: int, columns: int) -> Dict[str, Any]:
        w = randn(rows, columns).to(fp8)
        scale = torch.full((1,), columns**-0.5, dtype=torch.float32, device=device)
        return {f"w_{name}": [w.to(device)], f"scale_{name}": [scale]}

    angles = randn(64).repeat(2)
    caches = {
        f"{name}_caches": [
            some(sequences, _ROWS, _KV_HEADS, 128).to(fp8 if in_fp8 else torch.bfloat16)
        ]
        for name in "kv"
    }
    more = {f"{name}_scales": [randn(_KV_HEADS).abs().to(device) + 0.5] for name in "kv"}
    more.update((f"{name}_norm_weights", [some(128)]) for name in "qk")
    return {
        "residual": some(sequences, _HIDDEN),
        "qkv": some(sequences, (_HEADS + 2 * _KV_HEADS) * 128),
        "cos": angles.cos().to(device, torch.bfloat16),
        "sin": angles.sin().to(device, torch.bfloat16),
        "position": torch.tensor([_ROWS - 1], dtype=torch.int64, device=device),
        **caches, **(more if in_fp8 else {}),
        "norm_weights": [some(_HIDDEN)], **weight("o", _HIDDEN, _HEADS * 128),
        **weight("gate_up", 2 * _HIDDEN, _HIDDEN), **weight("down", _HIDDEN, _HIDDEN),
    }  # fmt: skip


def _copied(call: Dict[str, Any]) -> Dict[str, Any]:
    def copy(value: Any) -> Any:
        return value.clone() if isinstance(value, torch.Tensor) else [t.clone() for t in value]

    return {name: copy(value) for name, value in call.items()}


def _are_equal(one: Dict[str, Any], other: Dict[str, Any]) -> bool:
    def written(call: Dict[str, Any]) -> List[torch.Tensor]:
        tensors = [call["residual"], *call["k_caches"], *call["v_caches"]]
        return [tensor.view(torch.uint8) for tensor in tensors]

    return all(map(torch.equal, written(one), written(other)))
