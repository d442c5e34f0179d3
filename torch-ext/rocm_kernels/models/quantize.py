"""``quantize_model_``: FP8 weights for a loaded model, in place."""

import fnmatch
from typing import Dict, List, Optional, Sequence

import torch
from torch import nn

from ..functional import FP8_DTYPES, native_fp8_dtype
from ..reference import quantize_fp8
from .adopt import adopt, is_adoptable
from .experts import convert_experts_
from .fuse import fuse_projections
from .known import make_modules_known
from .linear import FP8Linear, FP8LinearPart
from .norms import other_norms
from .reads import read_by_their_owner
from .report import QuantizationReport, bytes_of, kept_bytes


def quantize_model_(
    model: nn.Module,
    *,
    activations: str = "dynamic",
    lm_head: bool = False,
    skip: Sequence[str] = (),
    fuse: bool = True,
    fp8_dtype: Optional[torch.dtype] = None,
) -> QuantizationReport:
    """Turns a model's ``nn.Linear`` layers into FP8 ones with per-channel scales, in place.

    So do experts, whose weights no ``nn.Linear`` holds: each layer's become one ``Experts``.
    Embeddings and norms stay as they are. Linears of FP8 checkpoints (transformers' finegrained
    ``FP8Linear`` and ``FbgemmFp8Linear``) are adopted: they take the device's dialect and are made
    known to ``kernelize``; on an FNUZ device only the kernels can run them from then on.

    Args:
        model: a transformers model, or any module. Quantise where it will run, or move it after:
            the weights follow their device's FP8 dialect.
        activations: ``"dynamic"``: inputs are quantised to FP8 per token; ``"none"``: they stay
            16-bit and only weights are FP8.
        lm_head: also convert the output embedding. If it is tied to the input embedding, that one
            keeps its own weight, and the model grows by the FP8 copy.
        skip: ``fnmatch`` patterns of names to leave as they are, such as ``"*.down_proj"``.
        fuse: join q/k/v and gate/up projections, so that ``kernelize`` replaces whole decoder
            layers.
        fp8_dtype: the weights' dialect; None: that of the device they are on.

    Returns:
        A :class:`QuantizationReport`. Nothing is printed.
    """
    if activations not in ("dynamic", "none"):
        raise ValueError(f"activations must be 'dynamic' or 'none', got {activations!r}")
    if fp8_dtype is not None and fp8_dtype not in FP8_DTYPES:
        raise ValueError(f"fp8_dtype must be one of {FP8_DTYPES}, got {fp8_dtype}")
    bytes_before = bytes_of(model)
    head = _output_embedding(model)
    converted: List[str] = []
    adopted: List[str] = []
    skipped: Dict[str, str] = {}
    read = read_by_their_owner(model)
    # By name, not by module: each 16-bit weight is freed before the next one is quantised.
    for name in [name for name, module in model.named_modules() if hasattr(module, "in_features")]:
        module = model.get_submodule(name)
        reason = None
        if isinstance(module, (FP8Linear, FP8LinearPart)):
            continue
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip):
            reason = "asked to skip"
        elif module is head and not lm_head:
            reason = "output embedding"
        elif name in read:
            reason = f"{read[name]} reads its weight itself"
        elif is_adoptable(module):
            reason = adopt(module, fp8_dtype)
            adopted += [name] if reason is None else []
        elif type(module) is not nn.Linear:
            reason = f"is a {type(module).__name__}"
        elif module.weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            reason = f"weight is {module.weight.dtype}"
        else:
            if module is head and hasattr(model, "config"):
                # Or a later tie_weights() would put the embedding's weight into the FP8 head.
                model.config.tie_word_embeddings = False
            _replace(model, module, _quantized(module, activations, fp8_dtype))
            converted.append(name)
        if reason is not None:
            skipped[name] = reason
    experts = convert_experts_(model, activations, skip, fp8_dtype)
    fused = fuse_projections(model) if fuse else {}
    make_modules_known(model)
    bytes_after = bytes_of(model)
    return QuantizationReport(
        converted=tuple(converted),
        fused=fused,
        adopted=tuple(adopted),
        skipped=skipped,
        experts=experts,
        kept={name: count / bytes_after for name, count in kept_bytes(model).items()},
        norms=other_norms(model),
        bytes_before=bytes_before,
        bytes_after=bytes_after,
        fp8_dtype=_native(model, fp8_dtype),
        activations=activations,
    )


def _output_embedding(model: nn.Module) -> Optional[nn.Module]:
    get = getattr(model, "get_output_embeddings", None)
    return None if get is None else get()


def _quantized(linear: nn.Linear, activations: str, fp8_dtype: Optional[torch.dtype]) -> FP8Linear:
    weight = linear.weight.detach()
    dialect = native_fp8_dtype(weight.device) if fp8_dtype is None else fp8_dtype
    # Quantising a weight per row of [N, K] is quantising it per output channel. The reference runs
    # on any device, also where this build has no kernel (a CUDA build, a model still on the CPU).
    q, scale = quantize_fp8(weight, fp8_dtype=dialect)
    return FP8Linear(q, scale, linear.bias, activations)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Wherever it is: a module may be shared."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is old:
                setattr(parent, name, new)


def _native(model: nn.Module, fp8_dtype: Optional[torch.dtype]) -> torch.dtype:
    if fp8_dtype is not None:
        return fp8_dtype
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    return native_fp8_dtype(device)
