"""Puts empty ``FP8Linear`` modules where a checkpoint has FP8 linears, and reads their scales;
embeddings in FP8 become 16 bits."""

import importlib
from typing import Any, Dict, Iterable, List, Sequence, Set

import torch
from torch import nn

from ..functional import SCALE_BLOCK
from .formats import BLOCK, FORMATS, Layout, LayoutOf
from .formats.loaded import weight_scale
from .formats.others import is_left_out
from .linear import FP8Linear, computes_linear
from .names import listed_names
from .regroup import decoded, regrouped
from .stored_tensors import Header
from .tensor_parallel import is_sharded
from .weight_access import linears_read_without_a_call

# An FP8Linear's own names, by those in files.
_SCALES = {
    **{format.weight_scale: "weight_scale_inv" for format in FORMATS},
    **{format.input_scale: "activation_scale" for format in FORMATS},
}


def place_linears(
    model: Any, layout_of: LayoutOf, files: Dict[str, Dict[str, Header]]
) -> List[str]:
    """Puts an empty :class:`FP8Linear` in the place of each linear that a checkpoint has in FP8;
    ``files`` are the headers of what its files have for each module. Returns the names of
    embeddings that are FP8 there."""
    modules = dict(model.named_modules())
    linears = {name: module for name, module in modules.items() if computes_linear(module)}
    embeddings = {n: module for n, module in modules.items() if isinstance(module, nn.Embedding)}
    names = listed_names(model, [*linears, *embeddings], files)

    def layout(name: str) -> Any:
        return layout_of(
            *names[name], classes=tuple(c.__name__ for c in type(modules[name]).__mro__)
        )

    others = _without_tensors(model, files) | set(linears_read_without_a_call(model))
    for name, linear in linears.items():
        if name in others:
            continue
        found = layout(name)
        if found is not None and found.weights == "mxfp4":
            raise ValueError(
                f"{name} is MXFP4 in this checkpoint, which experts alone can be here: load this "
                "model without fp8_checkpoints"
            )
        if found is not None:
            model.set_submodule(name, _empty(linear, found))
    # A list may say so of what the files have in 16 bits: where they are known, they decide.
    return [
        name
        for name in embeddings
        if (
            any(header.dtype == torch.float8_e4m3fn for header in files[name].values())
            if name in files
            else layout(name) is not None
        )
    ]


def left_in_16_bits(
    model: Any, entries: Sequence[str], files: Dict[str, Dict[str, Header]]
) -> List[str]:
    """Names of linears that a list of finegrained FP8's leaves out by whatever name they have, and
    of heads of which the files have nothing."""
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = listed_names(model, linears, files)
    left = {name for name in linears if is_left_out(entries, names[name])}
    return sorted((left | _without_tensors(model, files)) - {*entries})


def _without_tensors(model: Any, files: Dict[str, Dict[str, Header]]) -> Set[str]:
    """Heads of which the files have nothing: tied ones, which will have their embedding's weight,
    and a new task's, which transformers sets."""
    names = {key.rpartition(".")[0] for key in model.all_tied_weights_keys}
    base = model.base_model_prefix
    if files and base in model._modules:
        outside = [name for name, _ in model.named_children() if name != base]
        for name in outside:
            names |= {inner for inner, _ in model.get_submodule(name).named_modules(prefix=name)}
    return {name for name in names if not files.get(name)}


def _empty(linear: nn.Linear, layout: Layout) -> FP8Linear:
    """Makes an ``FP8Linear`` without values, whose scales are NaN until they are set."""
    n, k = linear.out_features, linear.in_features
    device, static = linear.weight.device, layout.inputs == "static"
    new = FP8Linear(
        torch.empty(n, k, dtype=torch.float8_e4m3fn, device=device),
        torch.full(layout.scale_shape(n, k), torch.nan, dtype=torch.float32, device=device),
        linear.bias,
        layout.inputs,
        activation_scale=(
            torch.full((1,), torch.nan, dtype=torch.float32, device=device) if static else None
        ),
        scale_ub=layout.scale_ub,
        scale_fmt=layout.scale_fmt,
    )
    new.stored_as = layout
    return new


def conversions_of_linears() -> List[Any]:
    core = importlib.import_module("transformers.core_model_loading")

    class StoredScale(core.ConversionOps):
        """A scale of any shape, as the linear that it belongs to has it."""

        def convert(self, tensors: Dict, model: Any, full_layer_name: str, **_: Any) -> Dict:
            (scale,) = tensors.values()
            scale = decoded(scale[0] if isinstance(scale, list) else scale)
            name, _, which = full_layer_name.rpartition(".")
            linear = model.get_submodule(name)
            if which == "activation_scale":
                return {full_layer_name: scale.reshape(1)}
            return {full_layer_name: _as_linear_has_it(scale, linear)}

        @property
        def reverse_op(self) -> Any:
            return self

    return [
        core.WeightConverter(f"{stored}$", name, operations=[StoredScale()])
        for stored, name in _SCALES.items()
    ]


def _as_linear_has_it(scale: torch.Tensor, linear: FP8Linear) -> torch.Tensor:
    n, k = linear.out_features, linear.in_features
    if scale.dim() == 4:  # ModelOpt's, [rows, 1, columns, 1]
        scale = scale.flatten(2).flatten(0, 1)
    wanted = linear.weight_scale_inv.shape
    if is_sharded(linear):  # this process's share of them
        own = linear.weight_scale_inv.to_local().shape
        if scale.shape != own:
            raise ValueError(
                f"scales of shape {tuple(wanted)} can be divided among processes, of which this "
                f"one wants {tuple(own)}, and got {tuple(scale.shape)}: load it on one process"
            )
        return scale
    if linear.stored_as.block != BLOCK:
        if scale.shape != wanted:
            raise ValueError(f"scales must be {tuple(wanted)}, got {tuple(scale.shape)}")
        return scale
    blocks = scale.dim() == 2 and scale.shape[0] != n and scale.numel() > 1
    scale = weight_scale(scale, n, k, blocks)
    if scale.numel() == 1:  # of a weight that is one block, too
        scale = scale.expand(wanted).contiguous()
    return scale


def regroup_linears(model: Any) -> None:
    """Gives linears whose files have scales for other blocks than 128 x 128 such scales as products
    take."""
    for name, linear in model.named_modules():
        if not isinstance(linear, FP8Linear) or linear.stored_as.block == BLOCK:
            continue
        rows, columns = linear.stored_as.block
        if linear.weight.device.type == "meta":
            raise ValueError(
                f"{name} has scale blocks of {rows} x {columns}, which are changed to 128 x 128 as "
                "it is loaded, and its weight is offloaded: give it a device in device_map"
            )
        made = regrouped(linear.weight, linear.weight_scale_inv, linear.stored_as.block)
        if made is None:
            raise ValueError(
                f"{name} has scale blocks of {rows} x {columns}, and products here take one scale "
                "for 128 x 128 or for a row: its scales differ by more than FP8's range allows, or "
                "by what is no power of two, so that values would change; load this model without "
                "fp8_checkpoints"
            )
        weight, scale = made
        if scale.shape[1] == 1:  # a block of 128 rows, or a row
            scale = scale.repeat_interleave(-(-weight.shape[0] // scale.shape[0]), 0)
            scale = scale[: weight.shape[0]]
        linear.weight.data, linear.weight_scale_inv.data = weight, scale.contiguous()


# ---- embeddings


def conversions_of_embeddings(quantizer: Any, names: Iterable[str]) -> List[Any]:
    """Makes the conversions of FP8 embeddings and their scales to the model's dtype: a lookup has
    no product to put a scale on."""
    core = importlib.import_module("transformers.core_model_loading")

    class Dequantized(core.ConversionOps):
        # By this transformers knows that tensors are to come as the files have them.
        hf_quantizer = quantizer

        def convert(self, tensors: Dict, model: Any, full_layer_name: str, **_: Any) -> Dict:
            parts = {name: t[0] if isinstance(t, list) else t for name, t in tensors.items()}
            weight = next(t for name, t in parts.items() if name.endswith(r"\.weight"))
            scales = [t for name, t in parts.items() if not name.endswith(r"\.weight")]
            embedding = model.get_submodule(full_layer_name.rpartition(".")[0])
            dtype = embedding.weight.dtype
            if weight.dtype != torch.float8_e4m3fn:
                return {full_layer_name: weight.to(dtype)}
            if not scales:
                raise ValueError(f"{full_layer_name} is FP8 and has no scale")
            embedding.stored_as = IN_FP8
            return {full_layer_name: _dequantized(weight, decoded(scales[0]), dtype)}

        @property
        def reverse_op(self) -> Any:
            return core._IdentityOp()

    found = []
    for name in names:
        leaf = name.rpartition(".")[2]
        sources = [
            rf"{leaf}\.{tensor}" for tensor in ("weight", "weight_scale", "weight_scale_inv")
        ]
        found.append(core.WeightConverter(sources, f"{leaf}.weight", operations=[Dequantized()]))
    return found


IN_FP8 = "its checkpoint has it in FP8, here it has the model's dtype: a lookup has no product"


def _dequantized(
    weight: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, rows: int = 32 * SCALE_BLOCK
) -> torch.Tensor:
    """Dequantises an embedding some rows at a time: vocabularies are large."""
    n, k = weight.shape
    blocks = scale.dim() == 2 and scale.shape[0] != n and scale.numel() > 1
    scale = weight_scale(scale, n, k, blocks)
    by_row = scale.dim() == 2
    result = torch.empty(n, k, dtype=dtype, device=weight.device)
    for start in range(0, n, rows):
        part = slice(start, start + rows)
        own = scale
        if by_row and scale.shape[1] > 1:
            own = scale[start // SCALE_BLOCK : -(-(start + rows) // SCALE_BLOCK)]
            own = own.repeat_interleave(SCALE_BLOCK, 0).repeat_interleave(SCALE_BLOCK, 1)
            own = own[: weight[part].shape[0], :k]
        elif by_row:
            own = scale[part]
        result[part] = (weight[part].float() * own).to(dtype)
    return result
