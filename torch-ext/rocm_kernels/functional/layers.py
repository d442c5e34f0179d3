"""Decoder layers of a token of each sequence in one call."""

from typing import Optional, Sequence

import torch

from .._ops import ops
from .gradients import mark_written, needs_gradient, refuse_gradient
from .rows import input_vector
from .shapes import register_shapes

_decode_layers = ops.decode_layers.default


register_shapes("decode_layers")

Tensors = Sequence[torch.Tensor]


def decode_layers(
    residual: torch.Tensor,
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position: torch.Tensor,
    *,
    k_caches: Tensors,
    v_caches: Tensors,
    norm_weights: Tensors,
    w_o: Tensors,
    scale_o: Tensors,
    w_gate_up: Tensors,
    scale_gate_up: Tensors,
    w_down: Tensors,
    scale_down: Tensors,
    next_norm_weights: Tensors = (),
    w_qkv: Tensors = (),
    scale_qkv: Tensors = (),
    bias_qkv: Tensors = (),
    q_norm_weights: Tensors = (),
    k_norm_weights: Tensors = (),
    k_scales: Tensors = (),
    v_scales: Tensors = (),
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    scale: Optional[float] = None,
    seqused_k: Optional[torch.Tensor] = None,
    leftpad_k: Optional[torch.Tensor] = None,
    window_left: int = -1,
    interleaved: bool = False,
) -> torch.Tensor:
    """Decoder layers for a token of each sequence, each from its attention to the next one's qkv.

    For AMD's MI300X and later, where launches are dear: a launch takes up to sixteen layers, of one
    sequence. Only the simulator has run that kernel so far, no GPU. For NVIDIA's Hopper, whose
    memory idles between launches: up to 64 layers, of one to four sequences; other GPUs refuse it.
    On the CPU the ops run one by one.

    For each layer, where ``fp8`` quantises a row with one scale::

        q, k, v  = heads of qkv, of D each;  q, k become their norms, if these have weights
        q, k rotated;  k, v to row `position` of the layer's caches
        x        = fp8(softmax(q . keys * scale) . values) . w_o^T
        h        = x + residual
        g, u     = halves of fp8(norm(h)) . w_gate_up^T
        residual = h + fp8(silu(g) * u) . w_down^T
        qkv      = fp8(next_norm(residual)) . w_qkv^T + bias_qkv     of the next layer

    Args:
        residual: ``[B, H]`` of B sequences, float16 or bfloat16: what the first layer's norm took.
            Written. Or ``[H]``: then nothing else has a dimension B.
        qkv: ``[B, (heads + 2 * KV heads) * D]`` like residual: the first layer's. Written: of the
            layer behind the last, where the last one's ``w_qkv`` is given.
        cos: ``[B, rotary_dim]`` like residual, the tokens' angles, the second half as the first;
            ``[rotary_dim]``: the same for all. So many elements of a head rotate, a multiple of 8.
            Likewise ``sin``.
        position: int32 or int64 of one element or ``[B]``: how many rows a sequence's caches have,
            and where the new one goes.
        k_caches: for each layer ``[B, rows, KV heads, D]`` like residual, or FP8 like the weights,
            of one shape and of the same strides. D is 128 or 64. Written. Likewise ``v_caches``.
        norm_weights: for each layer ``[H]`` like residual, of the norm behind its attention.
        w_o: for each layer FP8 ``[H, heads * D]``, in the dialect of the device; likewise
            ``w_gate_up``, ``[2 * I, H]``, ``w_down``, ``[H, I]``, and ``w_qkv`` of the *next*
            layer. Rows that are further apart than they are long are copied.
            ``next_norm_weights``, ``w_qkv`` and ``scale_qkv`` may lack the last layer's.
        scale_o: for each layer float32 of one element or ``[H, 1]``; likewise the other scales of
            weights.
        bias_qkv: for each w_qkv ``[(heads + 2 * KV heads) * D]`` like residual; none: no bias.
        q_norm_weights: for each layer ``[D]`` like residual, of norms of the query heads, which
            are rounded after the rotation; none: no norms. Likewise ``k_norm_weights``.
        k_scales: of FP8 caches, which hold k divided by it: for each layer float32 of one element
            or ``[KV heads]``; none: 1. Likewise ``v_scales``.
        eps, weight_offset: of all norms, as in :func:`rmsnorm`.
        scale: of scores; None: ``D ** -0.5``.
        seqused_k: int32 of one element or ``[B]``: how many rows count, from 1 to
            ``position + 1``; None: ``position + 1``.
        leftpad_k: int32 of one element or ``[B]``: the first so many rows are not seen, fewer than
            count.
        window_left: rows before the last that counts which are seen; -1: all.
        interleaved: an element rotates with its neighbour (GPT-J, GLM), not with one half of
            rotary_dim apart (NeoX, Llama).

    H, I and heads * D are multiples of 128, on AMD's GPUs from 1024 on, on NVIDIA's from 512; there
    H and heads * D are 8192 at most, and H is 4096 at most with three or four sequences. On GPUs,
    heads of 64 have an even number of KV heads, and on AMD's rotary_dim is a multiple of 16. A
    device or a size that is not served raises a RuntimeError that says so, before anything is
    written.

    Returns:
        residual.
    """
    lists = (
        k_caches, v_caches, norm_weights, w_o, scale_o, w_gate_up, scale_gate_up, w_down,
        scale_down, next_norm_weights, w_qkv, scale_qkv, bias_qkv, q_norm_weights, k_norm_weights,
        k_scales, v_scales,
    )  # fmt: skip
    lists = [list(tensors) for tensors in lists]
    if needs_gradient(residual, qkv, cos, sin, *(t for tensors in lists for t in tensors)):
        refuse_gradient("decode_layers", residual=residual, qkv=qkv, cos=cos, sin=sin,
                        k_caches=tuple(k_caches), v_caches=tuple(v_caches),
                        norm_weights=tuple(norm_weights), w_o=tuple(w_o), scale_o=tuple(scale_o),
                        w_gate_up=tuple(w_gate_up), scale_gate_up=tuple(scale_gate_up),
                        w_down=tuple(w_down), scale_down=tuple(scale_down),
                        next_norm_weights=tuple(next_norm_weights), w_qkv=tuple(w_qkv),
                        scale_qkv=tuple(scale_qkv), bias_qkv=tuple(bias_qkv),
                        q_norm_weights=tuple(q_norm_weights), k_norm_weights=tuple(k_norm_weights),
                        k_scales=tuple(k_scales), v_scales=tuple(v_scales))  # fmt: skip
    if scale is None:
        scale = k_caches[0].shape[-1] ** -0.5 if k_caches else 1.0  # the op says what is missing
    caches, rest = lists[:2], [[_in_place(t) for t in tensors] for tensors in lists[2:]]
    _decode_layers(
        residual, qkv, *caches, *rest, input_vector(cos), input_vector(sin), position,
        cos.shape[-1] if cos.dim() else 0, interleaved, eps, weight_offset, scale, seqused_k,
        leftpad_k, window_left,
    )  # fmt: skip
    mark_written(residual, qkv, *k_caches, *v_caches)
    return residual


def _in_place(tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous; a weight whose last dimension is not is left to be refused."""
    if tensor.is_contiguous() or (tensor.dim() == 2 and tensor.stride(1) != 1):
        return tensor
    return tensor.contiguous()
