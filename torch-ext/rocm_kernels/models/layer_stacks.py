"""Decoder layers of a recorded step, many a launch: ``decode_layers`` in place of the ops that it
stands for.

    norm, FP8 ─▶ qkv ─▶ [rotate, cache ─▶ attention ─▶ FP8 ─▶ o ─▶ + residual, norm, FP8 ─▶ gate and
    up ─▶ SwiGLU, FP8 ─▶ down ─▶ + residual, norm, FP8 ─▶ qkv ─▶] rotate, cache ...

On NVIDIA's GPUs o and down make their rows FP8 themselves, and gate and up end with SwiGLU: then
there are three ops fewer.

Which of a model's layers these are is asked of the step itself, while it is recorded and each op is
seen: launches of ours wait. Those in a row whose arguments say that they are such layers, one
behind the other, become one call; all others are launched as they were. Nothing is known of the
model: of its modules, their names or their forwards.

What lies between the ops of a layer is not made then. Where anything reads it later, the step is
recorded without.
"""

import threading
from collections import Counter
from typing import Any, Callable, Dict, List, NamedTuple, Tuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .._ops import add_op_namespace_prefix, ops
from .seen_ops import EMPTY, may_be_a_view, storages_of, tensors_in, written_by

_OURS = add_op_namespace_prefix("").rstrip(":")
_WAITING = (
    "hold_rotation", "rope_and_cache", "attention", "swiglu_fp8", "rmsnorm_fp8", "gemm",
    "quantized_gemm", "gated_gemm",
)  # fmt: skip
_HEADS = (64, 128)
# Bytes of a layer's cache with its room, of all sequences, up to which NVIDIA's kernel of layers is
# the quicker, for one to four sequences: attention's own kernel reads keys and values sooner. The
# two were even with 68 MB of one sequence and 38 of four; with 38 MB of two it led by 6 %.
_MOST_CACHE = (64e6, 56e6, 36e6, 36e6)
_here = threading.local()


class WasNotMade(Exception):
    """Something reads what a call of decode_layers does not make."""


class _Differs(Exception):
    """An op is not the one of a layer: why."""


def takes_stacks(device: torch.device) -> bool:
    """Whether layers are put together: on AMD's GPUs, where launches are dear, and on NVIDIA's
    Hopper, whose memory is the busier for it."""
    if device.type != "cuda" or torch.version.cuda is None:
        return device.type == "cuda" and torch.version.hip is not None
    return torch.cuda.get_device_capability(device) == (9, 0)


def most_cache(device: torch.device, sequences: int) -> float:
    """Bytes of a layer's cache that a call of decode_layers is to have at most; 0: it takes fewer
    sequences."""
    if device.type == "cuda" and torch.version.cuda is not None:
        return _MOST_CACHE[sequences - 1] if sequences <= len(_MOST_CACHE) else 0.0
    return 0.0 if device.type == "cuda" and sequences > 1 else float("inf")


def handed_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which a step that is recorded hands out: in the end it must be there."""
    stacks = getattr(_here, "stacks", None)
    if stacks is not None:
        stacks.handed_out.append(tensor)
    return tensor


class _Call:
    """An op of ours with its arguments by name."""

    def __init__(self, func: Any, args: Tuple, kwargs: Dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        schema = func._schema
        self.name = schema.name.rpartition("::")[2]
        names = [argument.name for argument in schema.arguments]
        self.given = {argument.name: argument.default_value for argument in schema.arguments}
        self.given.update(zip(names, args), **kwargs)
        self.tensors = tensors_in((args, kwargs))
        self.read = storages_of(self.tensors)
        self.written = storages_of(written_by(func, args, kwargs))

    def __getattr__(self, name: str) -> Any:
        return self.given[name]

    def must_be(self, name: str, **values: Any) -> None:
        """Requires an op of a name, and of arguments values, or one of some."""
        if self.name != name:
            raise _Differs(f"{self.name} stands where {name} would")
        for argument, allowed in values.items():
            found = self.given[argument]
            if isinstance(found, torch.Tensor):
                raise _Differs(f"{name} has a {argument}")
            if found not in (allowed if isinstance(allowed, tuple) else (allowed,)):
                raise _Differs(f"{argument} of {name} is {found}")


class _Layer(NamedTuple):
    """The calls of a layer."""

    rope: _Call
    attention: _Call
    o: _Call
    norm: _Call  # the MLP's
    gate_up: _Call
    down: _Call
    last: _Call  # the norm behind, which makes the last sum
    length: int  # calls up to that one


class LayerStacks(TorchDispatchMode):
    """Launches within wait until something else needs them; ``layers`` counts what became of
    layers: how many run in calls of decode_layers, and of the others why not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: Counter = Counter()
        self.waiting: List[_Call] = []
        self.handed_out: List[torch.Tensor] = []
        self.not_made: Dict[int, torch.Tensor] = {}  # by storages, which are held

    def __enter__(self) -> Any:
        _here.stacks = self
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _here.stacks = None
        result = super().__exit__(*error)
        if error[0] is None:
            self._launch()
            self.require_made(self.handed_out)
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == _OURS and func._schema.name.rpartition("::")[2] in _WAITING:
            self.waiting.append(_Call(func, args, kwargs))
            return None
        if not (self.waiting or self.not_made) or func.overloadpacket in EMPTY:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        touched = storages_of(tensors)
        if may_be_a_view(func):
            seen = func(*args, **kwargs)
            if storages_of(tensors_in(seen)) <= touched:
                return seen
        written = storages_of(written_by(func, args, kwargs))
        if any(touched & call.written or written & call.read for call in self.waiting):
            self._launch()
        self.require_made(tensors)
        return func(*args, **kwargs)

    def require_made(self, tensors: List[torch.Tensor]) -> None:
        if self.not_made and storages_of(tensors) & self.not_made.keys():
            raise WasNotMade("something reads what lies between the ops of a layer")

    def _launch(self) -> None:
        calls, self.waiting = self.waiting, []
        layers = self._layers_of(calls)
        at = 0
        while at < len(calls):
            if at not in layers:
                self.require_made(calls[at].tensors)
                calls[at].func(*calls[at].args, **calls[at].kwargs)
                at += 1
                continue
            stack, products = [layers[at]], []
            end = at + stack[0].length  # where the next one's qkv would be
            while (behind := layers.get(end + 1)) is not None and _follows(
                stack[-1], behind, calls[end]
            ):
                stack.append(behind)
                products.append(calls[end])
                end += 1 + behind.length
            replaced = calls[at : end - 1]  # all but the last norm
            if not self._launch_stack(stack, products, replaced):
                for call in calls[at:end]:
                    call.func(*call.args, **call.kwargs)
            at = end

    def _layers_of(self, calls: List[_Call]) -> Dict[int, _Layer]:
        found = {}
        for i, call in enumerate(calls):
            if call.name == "rope_and_cache":
                # That it may be the attention's launch is said of it before.
                begin = i - (i > 0 and calls[i - 1].name == "hold_rotation")
                try:
                    found[begin] = _layer_of(calls[begin:])
                except _Differs as why:
                    self.layers[str(why)] += 1
        return found

    def _launch_stack(
        self, stack: List[_Layer], products: List[_Call], replaced: List[_Call]
    ) -> bool:
        """Whether decode_layers has taken some layers; products: their qkv, but the first's."""
        first, last = stack[0], stack[-1]
        residual = last.last.residual
        rope, attention = first.rope, first.attention
        norms, weights = [layer.norm.weight for layer in stack], {}
        for name in ("o", "gate_up", "down"):
            of_layers = [getattr(layer, name) for layer in stack]
            weights[name] = [call.w for call in of_layers], [call.scale_w for call in of_layers]
        for call in replaced:
            self.require_made(call.tensors)
        residual.copy_(first.norm.x.view_as(residual))
        try:
            ops.decode_layers.default(
                _by_sequence(residual, rope), _qkv_of(rope),
                [_by_sequence(layer.rope.k_cache, rope) for layer in stack],
                [_by_sequence(layer.rope.v_cache, rope) for layer in stack],
                norms, *weights["o"], *weights["gate_up"], *weights["down"],
                [layer.last.weight for layer in stack[:-1]],
                [call.w for call in products], [call.scale_w for call in products],
                [call.bias for call in products if call.bias is not None],
                *([layer.rope.given[name] for layer in stack if rope.given[name] is not None]
                  for name in ("q_weight", "k_weight", "k_scale", "v_scale")),
                *(_angles_of(table, rope.rotary_dim) for table in (rope.cos, rope.sin)),
                rope.places.view(-1), rope.rotary_dim, rope.interleaved, first.norm.eps,
                first.norm.weight_offset, attention.scale, attention.seqused_k,
                attention.leftpad_k, attention.window_left,
            )  # fmt: skip
        except RuntimeError as error:  # it says what it takes before it writes
            self.layers[str(error).splitlines()[0]] += len(stack)
            return False
        self.layers["decode_layers"] += len(stack)
        kept = storages_of(
            [residual, *(layer.rope.given[n] for layer in stack for n in ("k_cache", "v_cache"))]
        )
        for call in replaced:
            for tensor in written_by(call.func, call.args, call.kwargs):
                (storage,) = storages_of([tensor])
                if storage not in kept:
                    self.not_made[storage] = tensor
        norm = last.last
        alone = {**norm.given, "x": residual.view_as(norm.x), "residual": None, "addend": None}
        norm.func(*alone.values())
        return True


def _layer_of(calls: List[_Call]) -> _Layer:
    """The layer that calls begin with.

    Raises:
        _Differs: it is none that decode_layers takes.
    """
    coming = iter(calls)

    def following() -> _Call:
        call = next(coming, None)
        if call is None:
            raise _Differs("other ops come between those of a layer")
        return call

    rope = following()
    if rope.name == "hold_rotation":
        rope = following()
    _require_rotation(rope)
    attention = following()
    attention.must_be(
        "attention", lse=None, cu_seqlens_q=None, cu_seqlens_k=None, block_table=None,
        sinks=None, max_seqlen_q=1, window_right=(-1, 0), softcap=0.0,
    )  # fmt: skip
    if attention.seqused_k is None:
        raise _Differs("the attention does not say how many keys there are")
    for one, other in (("q", "out"), ("k", "k_cache"), ("v", "v_cache")):
        _require_same(attention.given[one], rope.given[other])
    for one, other in (("k_descale", "k_scale"), ("v_descale", "v_scale")):
        of_cache, kv_heads = rope.given[other], rope.k.shape[2]
        if of_cache is not None:
            _require_same(attention.given[one], of_cache.expand(rope.q.shape[0], kv_heads))
        elif attention.given[one] is not None:
            raise _Differs(f"attention has a {one}, and its cache none")
    o = _product_of(attention.out, following)
    if rope.k_cache.dtype not in (rope.q.dtype, o.w.dtype):
        raise _Differs(f"queries are {rope.q.dtype}, and the cache {rope.k_cache.dtype}")
    norm = following()
    _require_sum(norm, o)
    dtype = norm.x.dtype
    gate_up = following()
    if gate_up.name == "gated_gemm":
        gate_up.must_be(
            "gated_gemm", bias=None, activation="silu", rounded=str(dtype).rpartition(".")[2]
        )
        _require_operand(gate_up, norm)
        down = _product_of(gate_up.out, following)
    else:
        _require_product(gate_up, norm)
        half = gate_up.out.shape[-1] // 2
        activation = following()
        _require_quantized(activation, gate_up.out[..., :half])
        activation.must_be("swiglu_fp8", activation="silu")
        _require_same(activation.up, gate_up.out[..., half:])
        if gate_up.out.dtype != dtype:
            raise _Differs(f"rows are {dtype}, and products {gate_up.out.dtype}")
        down = following()
        _require_product(down, activation)
    last = following()
    _require_sum(last, down)
    _require_same(last.x, norm.residual)
    if norm.weight.dtype != dtype:
        raise _Differs(f"weights of norms are {norm.weight.dtype}, and rows {dtype}")
    _require_norms_of_heads(rope, norm)
    return _Layer(
        rope, attention, o, norm, gate_up, down, last, len(calls) - sum(1 for _ in coming)
    )


def _product_of(x: torch.Tensor, following: Callable[[], _Call]) -> _Call:
    """The product that takes a row, which an op before it has made FP8, or it itself."""
    call = following()
    if call.name == "quantized_gemm":
        call.must_be("quantized_gemm", bias=None)
        _require_same(call.a, x)
        return call
    if call.name == "gemm":
        raise _Differs("inputs are not quantised")
    _require_quantized(call, x)
    call.must_be("swiglu_fp8", activation="identity", up=None)
    product = following()
    _require_product(product, call)
    return product


def _require_rotation(rope: _Call) -> None:
    q, k, v = rope.q, rope.k, rope.v
    if q.dim() != 4 or q.shape[1] != 1:
        raise _Differs("more than one token of a sequence")
    if k is None or v is None or rope.k_cache is None or rope.v_cache is None:
        raise _Differs("no cache, or no keys and values")
    most = most_cache(q.device, q.shape[0])
    if most == 0.0:
        raise _Differs("more sequences than decode_layers takes here")
    if 2 * rope.k_cache.nbytes > most:
        raise _Differs("the cache is so long that the attention's own kernel is quicker")
    head = q.shape[3]
    if head not in _HEADS or v.shape[3] != head:
        raise _Differs(f"heads of {head}, not 64 or 128")
    rope.must_be(
        "rope_and_cache", k_out=None, positions=None, block_table=None,
        places_are="cache_positions",
    )  # fmt: skip
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise _Differs(f"queries are {q.dtype}")
    places = storages_of([rope.out, k, v])
    sequences, heads, kv_heads = q.shape[0], q.shape[2], k.shape[2]
    columns = (heads + 2 * kv_heads) * head
    begins = [t.storage_offset() - q.storage_offset() for t in (rope.out, k, v)]
    if (
        places != storages_of([q])
        or begins != [0, heads * head, (heads + kv_heads) * head]
        or any(t.stride()[2:] != (head, 1) for t in (q, rope.out, k, v))
        or (sequences > 1 and any(t.stride(0) != columns for t in (q, rope.out, k, v)))
    ):
        raise _Differs("queries, keys and values do not lie side by side")
    angles = (rope.cos, rope.sin)
    numbers = (rope.rotary_dim, sequences * rope.rotary_dim)
    if any(
        t is None
        or t.shape[-1] != rope.rotary_dim  # two rows of half the columns are as many numbers
        or t.numel() not in numbers
        or t.dtype != q.dtype
        for t in angles
    ):
        raise _Differs("angles of another type or number")
    if rope.places is None or rope.places.numel() not in (1, sequences):
        raise _Differs("no place in the cache")


def _require_norms_of_heads(rope: _Call, norm: _Call) -> None:
    """That q and k have such norms as the rows, or none."""
    weights = [weight for weight in (rope.q_weight, rope.k_weight) if weight is not None]
    if len(weights) == 1 or any(weight.dtype != rope.q.dtype for weight in weights):
        raise _Differs("norms of heads are of q or k alone, or of another type")
    if weights and (rope.eps, rope.weight_offset) != (norm.eps, norm.weight_offset):
        raise _Differs("norms of heads are of another kind than those of rows")


def _require_quantized(call: _Call, x: torch.Tensor) -> None:
    """That a call makes a row of x FP8, with a scale of its own."""
    call.must_be("swiglu_fp8", scale=None, group_size=0, scale_ub=0.0, ue8m0=False)
    if call.scales is None:
        raise _Differs("inputs are not quantised")
    _require_same(call.gate, x)


def _require_product(call: _Call, row: _Call, may_have_bias: bool = False) -> None:
    call.must_be("gemm", **({} if may_have_bias else {"bias": None}))
    _require_operand(call, row)


def _require_operand(call: _Call, row: _Call) -> None:
    """That a product multiplies an FP8 row, with the row's own scale."""
    _require_same(call.a, row.out)
    if call.scale_a is None or not _is_same(call.scale_a, row.scales):
        raise _Differs("inputs are not quantised by the row")


def _require_sum(norm: _Call, product: _Call) -> None:
    """That a norm adds a product to what is left in its ``residual``."""
    norm.must_be("rmsnorm_fp8", scale=None, group_size=0, scale_ub=0.0, ue8m0=False)
    if norm.residual is None or norm.addend is None:
        raise _Differs("a sum is not a norm's")
    _require_same(norm.addend, product.out)


def _require_same(one: Any, other: torch.Tensor) -> None:
    if one is None or not _is_same(one, other):
        raise _Differs("what an op reads is not what the one before has made")


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """The same elements of memory, in one order."""

    def kept(tensor: torch.Tensor) -> List[Tuple[int, int]]:
        return [(n, step) for n, step in zip(tensor.shape, tensor.stride()) if n != 1]

    if one.is_contiguous() and other.is_contiguous():
        same = one.numel() == other.numel()
    else:
        same = kept(one) == kept(other)
    return same and one.data_ptr() == other.data_ptr() and one.dtype == other.dtype


def _qkv_of(rope: _Call) -> torch.Tensor:
    sequences, columns = rope.q.shape[0], (rope.q.shape[2] + 2 * rope.k.shape[2]) * rope.q.shape[3]
    qkv = rope.q.as_strided((sequences, columns), (columns, 1), rope.q.storage_offset())
    return _by_sequence(qkv, rope)


def _by_sequence(tensor: torch.Tensor, rope: _Call) -> torch.Tensor:
    """A row, or a cache, of each sequence; of one alone without that dimension."""
    sequences = rope.q.shape[0]
    if tensor.dim() < 4:
        tensor = tensor.view(sequences, -1)
    return tensor[0] if sequences == 1 else tensor


def _angles_of(table: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """``[rotary_dim]``, where all sequences have the same, or a row for each of them."""
    if table.numel() == rotary_dim or table.stride(0) == 0:
        return table.select(0, 0).view(-1)
    return table.view(-1, rotary_dim)


def _follows(layer: _Layer, behind: _Layer, qkv: _Call) -> bool:
    """Whether a layer's result, through a product, is the next one's, and both may be one call."""
    try:
        _require_product(qkv, layer.last, may_have_bias=True)
        _require_same(qkv.out, _qkv_of(behind.rope))
        _require_same(behind.norm.x, layer.last.residual)
    except _Differs:
        return False
    return (
        layer.last.scales is not None
        and _shared(layer) == _shared(behind)
        and _of_norm(layer.norm) == _of_norm(layer.last)
    )


def _shared(layer: _Layer) -> List[Any]:
    """What layers of a call have in common: as it is, and which memory it is."""
    rope, attention = layer.rope, layer.attention
    numbers = (rope.cos, rope.sin, rope.places, attention.seqused_k, attention.leftpad_k)
    return [
        rope.q.shape,
        *((c.shape, c.stride(), c.dtype) for c in (rope.k_cache, rope.v_cache)),
        *(None if s is None else s.shape for s in (rope.k_scale, rope.v_scale, rope.q_weight)),
        *(None if t is None else (t.data_ptr(), t.dtype) for t in numbers),
        attention.scale,
        attention.window_left,
        (rope.rotary_dim, rope.interleaved),
        _of_norm(layer.norm),
    ]


def _of_norm(norm: _Call) -> Tuple[Any, ...]:
    return norm.eps, norm.weight_offset, norm.weight.dtype, norm.weight.shape
