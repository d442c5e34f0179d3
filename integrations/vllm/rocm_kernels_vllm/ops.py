"""The ops that vLLM's graphs hold, under names that stay as the kernels change.

Each is opaque: which kernel runs is chosen inside, by the number of rows of that very call. A
choice outside would be made once, when vLLM traces a prompt, and then serve decoding too.

    fp8_product          (a * scale_a) @ (w * scale_w).T + bias, FP8 operands
    weight_only_product  a @ (w * scale_w).T + bias, 16-bit a
    product_16bit        a @ w.T + bias
    swiglu_fp8           silu(gate) * up in FP8, with its scales
    fused_moe            a layer of experts without its router
    the rest             what vLLM's own ops of these names compute, with their schemas: its fusion
                         passes put them into graphs in their place

The namespace counts the schemas' versions, for vLLM caches graphs that name these ops.

Prompts longer than vLLM's CUDA graphs wait for the host's part of each call. So operands of the
usual kind go straight to the package's ops, which check them too. All others (rows with strides,
scales of another type, a bias to convert), and calls outside of inference mode, where the package
refuses gradients and marks what it writes, go through its functions to the same kernels.
"""

import torch

from . import kernels
from .parts import CACHED

NAMESPACE = f"rocm_kernels_vllm_{CACHED}"

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
GROUP = 128
MAX_SKINNY_ROWS = 64  # of skinny_gemm


def _op(schema: str, fake):
    """Defines an op with the decorated function for every device."""

    def define(function):
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        return getattr(getattr(torch.ops, NAMESPACE), name).default

    return define


def define_op(schema: str, function):
    """Defines an op that writes to its arguments alone; once a process."""
    name = schema.partition("(")[0]
    if not hasattr(getattr(torch.ops, NAMESPACE), name):
        return _op(schema, fake=_writes_only)(function)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _product_like(a, w, *_, dtype=None):
    return a.new_empty(a.shape[0], w.shape[0], dtype=dtype)


def _writes_only(*_, **__):
    return None


@_op(
    "fp8_product(Tensor a, Tensor w, Tensor scale_a, Tensor scale_w, Tensor? bias, "
    "ScalarType out_dtype) -> Tensor",
    fake=lambda a, w, sa, sw, bias, out_dtype: _product_like(a, w, dtype=out_dtype),
)
def fp8_product(
    a: torch.Tensor,
    w: torch.Tensor,
    scale_a: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """``a [M, K]`` and ``w [N, K]`` FP8; scales as rocm_kernels.gemm takes them, per tensor, per
    row or per block; ``[M, N]``."""
    rows = a.shape[0]
    if rows == 0:
        return a.new_empty(0, w.shape[0], dtype=out_dtype)
    package = kernels.package()
    usual = _is_usual(a, scale_w, bias, out_dtype)
    if usual and rows <= _rows_of_gemm(package, w, scale_w, scale_a):
        return _multiply(package, a, w, scale_a, scale_w, bias, out_dtype)
    return package.fp8_linear(a, w, scale_w, scale_x=scale_a, bias=bias, out_dtype=out_dtype)


def _is_usual(a, scale_w, bias, out_dtype) -> bool:
    """Whether the op takes a product's operands as they are."""
    return (
        torch.is_inference_mode_enabled()
        and a.is_contiguous()
        and scale_w.dtype is torch.float32
        and (bias is None or (bias.dtype is out_dtype and bias.is_contiguous()))
    )


_most_rows: dict[tuple, int] = {}


def _rows_of_gemm(package, w, scale_w, scale_a) -> int:
    """Up to how many rows of a the product is the package's own, and not the library's. Without a
    scale_a its rows have 16 bits."""
    weight_only = scale_a is None
    static = not weight_only and scale_a.numel() == 1
    key = w.device, w.shape, scale_w.shape, weight_only, static
    most = _most_rows.get(key)
    if most is None:
        rows = package.functional.product.rows_of_gemm(
            w, scale_w, scale_a if static else None, weight_only=weight_only
        )
        most = _most_rows[key] = rows[1]
    return most


def _multiply(package, a, w, scale_a, scale_w, bias, out_dtype):
    out = a.new_empty(a.shape[0], w.shape[0], dtype=out_dtype)
    package._ops.ops.gemm.default(out, a, w, scale_a, scale_w, bias)
    return out


@_op(
    "weight_only_product(Tensor a, Tensor w, Tensor scale_w, Tensor? bias) -> Tensor",
    fake=_product_like,
)
def weight_only_product(
    a: torch.Tensor, w: torch.Tensor, scale_w: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``a [M, K]`` 16-bit, ``w [N, K]`` FP8, ``scale_w`` per tensor, per channel or per block."""
    package = kernels.package()
    usual = _is_usual(a, scale_w, bias, a.dtype)
    if usual and a.shape[0] <= _rows_of_gemm(package, w, scale_w, None):
        return _multiply(package, a, w, None, scale_w, bias, a.dtype)
    return package.functional.product.weight_only_linear(a, w, scale_w, bias)


@_op("product_16bit(Tensor a, Tensor w, Tensor? bias) -> Tensor", fake=_product_like)
def product_16bit(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``a [M, K]``, ``w [N, K]``, both float16 or bfloat16: skinny_gemm for the rows that vLLM's
    kernels on ROCm leave to the library, and vLLM's own op for all others."""
    if VLLM_SKINNY_ROWS < a.shape[0] <= MAX_SKINNY_ROWS and _takes_16bit(a, w, bias):
        return kernels.package().skinny_gemm(a, w, bias=bias)
    return torch.ops.vllm.rocm_unquantized_gemm(a, w, bias)


VLLM_SKINNY_ROWS = 5  # wvSplitK's


def _takes_16bit(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> bool:
    half = (torch.float16, torch.bfloat16)
    return (
        a.dtype in half
        and w.dtype == a.dtype
        and a.stride(-1) == 1
        and w.stride(-1) == 1
        and (bias is None or bias.is_contiguous())
    )


def _swiglu_fp8_fake(x, scale, group_size, fp8_dtype):
    columns = x.shape[-1] // 2
    groups = -(-columns // group_size) if group_size else 1
    q = x.new_empty(*x.shape[:-1], columns, dtype=fp8_dtype)
    shape = (1,) if scale is not None else (*x.shape[:-1], groups)
    return q, x.new_empty(shape, dtype=torch.float32)


@_op(
    "swiglu_fp8(Tensor x, Tensor? scale, int group_size, ScalarType fp8_dtype) -> (Tensor, Tensor)",
    fake=_swiglu_fp8_fake,
)
def swiglu_fp8(
    x: torch.Tensor, scale: torch.Tensor | None, group_size: int, fp8_dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., 2 * d]``: gate and up. A scale makes it static; group_size 128 or, for one scale a
    row, 0. The scale that comes back is a tensor of its own, as ops have it."""
    package = kernels.package()
    usual = torch.is_inference_mode_enabled() and x.dim() == 2 and x.is_contiguous()
    if not usual or scale is not None or x.shape[1] % 2:
        q, scales = package.swiglu_fp8(
            x, scale=scale, group_size=group_size or None, fp8_dtype=fp8_dtype
        )
        return q, scales if scale is None else scales.reshape(1).clone()
    rows, columns = x.shape[0], x.shape[1] // 2
    groups = -(-columns // group_size) if group_size else 1
    q = x.new_empty(rows, columns, dtype=fp8_dtype)
    scales = x.new_empty(rows, groups, dtype=torch.float32)
    gate, up = x.chunk(2, 1)
    package._ops.ops.swiglu_fp8.default(q, scales, gate, up, None, "silu", group_size, 0.0, False)
    return q, scales


def _fused_moe_now(
    out, x, w_gate_up, w_down, topk_weights, topk_ids, expert_map, scale_gate_up, scale_down,
    bias_gate_up, bias_down, activation, limit, interleaved,
):  # fmt: skip
    """rocm_kernels.fused_moe into ``out [M, H]``. ``expert_map``, of all experts, has this rank's
    number of each, or -1; an id below 0 is no expert's already."""
    if x.shape[0] == 0:
        return
    if expert_map is not None:
        here = expert_map[topk_ids.clamp(min=0).long()]
        topk_ids = torch.where(topk_ids < 0, -1, here)
    kernels.package().fused_moe(
        x, w_gate_up, w_down, topk_weights, topk_ids, scale_gate_up=scale_gate_up,
        scale_down=scale_down, bias_gate_up=bias_gate_up, bias_down=bias_down,
        activation=activation, limit=limit, interleaved=interleaved, out=out,
    )  # fmt: skip


_fused_moe = _op(
    "fused_moe(Tensor(a!) out, Tensor x, Tensor w_gate_up, Tensor w_down, Tensor topk_weights, "
    "Tensor topk_ids, Tensor? expert_map, Tensor? scale_gate_up, Tensor? scale_down, "
    "Tensor? bias_gate_up, Tensor? bias_down, str activation, float? limit, bool interleaved"
    ") -> ()",
    fake=_writes_only,
)(_fused_moe_now)


def fused_moe(*arguments) -> None:
    """Runs fused_moe: as an op while a model is traced through vLLM's layer of experts, else as a
    plain call. Where that layer is an op itself, as on GPUs, a second op would only take the host's
    time."""
    (_fused_moe if torch.compiler.is_compiling() else _fused_moe_now)(*arguments)


# ---- in place of vLLM's fused ops, with their schemas --------------------------------------------


def _norm(result, scales, input, residual, weight, scale, epsilon, group_size=0) -> None:
    """rmsnorm_fp8 into ``result``, and ``scales`` where there is no ``scale``."""
    package = kernels.package()
    usual = torch.is_inference_mode_enabled() and input.dim() == 2
    if usual and input.is_contiguous() and weight.is_contiguous():
        package._ops.ops.rmsnorm_fp8.default(
            result, scales, input, residual, weight, scale, epsilon, group_size, 0.0, False
        )
        return
    package.rmsnorm_fp8(
        input, weight, epsilon, residual, scale=scale, group_size=group_size or None,
        out=result if scales is None else (result, scales),
    )  # fmt: skip


@_op(
    "rms_norm_static_fp8_quant(Tensor(a!) result, Tensor input, Tensor weight, Tensor scale, "
    "float epsilon) -> ()",
    fake=_writes_only,
)
def rms_norm_static_fp8_quant(result, input, weight, scale, epsilon):
    _norm(result, None, input, None, weight, scale, epsilon)


@_op(
    "fused_add_rms_norm_static_fp8_quant(Tensor(a!) result, Tensor input, Tensor(b!) residual, "
    "Tensor weight, Tensor scale, float epsilon) -> ()",
    fake=_writes_only,
)
def fused_add_rms_norm_static_fp8_quant(result, input, residual, weight, scale, epsilon):
    _norm(result, None, input, residual, weight, scale, epsilon)


@_op(
    "rms_norm_dynamic_per_token_quant(Tensor(a!) result, Tensor input, Tensor weight, "
    "Tensor(b!) scale, float epsilon, Tensor? scale_ub, Tensor(c!)? residual) -> ()",
    fake=_writes_only,
)
def rms_norm_dynamic_per_token_quant(result, input, weight, scale, epsilon, scale_ub, residual):
    _no_bound(scale_ub)
    _norm(result, scale, input, residual, weight, None, epsilon)


@_op(
    "rms_norm_per_block_quant(Tensor(a!) result, Tensor input, Tensor weight, Tensor(b!) scale, "
    "float epsilon, Tensor? scale_ub, Tensor(c!)? residual, int group_size, "
    "bool is_scale_transposed) -> ()",
    fake=_writes_only,
)
def rms_norm_per_block_quant(
    result, input, weight, scale, epsilon, scale_ub, residual, group_size, is_scale_transposed
):
    _no_bound(scale_ub)
    scales = _row_major(scale)
    _norm(result, scales, input, residual, weight, None, epsilon, group_size)
    _give_back(scale, scales)


@_op(
    "silu_and_mul_quant(Tensor(a!) result, Tensor input, Tensor scale) -> ()",
    fake=_writes_only,
)
def silu_and_mul_quant(result, input, scale):
    kernels.package().swiglu_fp8(input, scale=scale, out=result)


@_op(
    "silu_and_mul_per_block_quant(Tensor(a!) out, Tensor input, Tensor(b!) scales, int group_size, "
    "Tensor? scale_ub=None, bool is_scale_transposed=False) -> ()",
    fake=_writes_only,
)
def silu_and_mul_per_block_quant(
    out, input, scales, group_size, scale_ub=None, is_scale_transposed=False
):
    _no_bound(scale_ub)
    row_major = _row_major(scales)
    kernels.package().swiglu_fp8(input, group_size=group_size, out=(out, row_major))
    _give_back(scales, row_major)


def _no_bound(scale_ub: torch.Tensor | None) -> None:
    """vLLM's patterns fuse no quantisation with a bound, and reading one would wait for the GPU."""
    if scale_ub is not None:
        raise ValueError("scale_ub must be None: a fused norm or activation takes no bound")


def _row_major(scales: torch.Tensor) -> torch.Tensor:
    """The scales, or memory for them where they lie transposed, as some of vLLM's consumers want
    them."""
    return scales if scales.stride(-1) == 1 else torch.empty_like(scales.contiguous())


def _give_back(scales: torch.Tensor, written: torch.Tensor) -> None:
    if written is not scales:
        scales.copy_(written)
