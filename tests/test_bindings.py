"""Every check of the bindings fails some call, and what is written shares memory with nothing.

Calls go to the ops, below the functional API. From one that is right come those that are wrong: an
argument left out, of another dtype, shape or layout, or in another's memory. Then each message that
is stored of an op (binding_sources.py) must have come: a check that is taken out, or a new one that
nothing reaches, fails.

Longer than 500 lines, because all ops' calls stand beside the rules that change them.
"""

import json
import math
import re

import kernels
import pytest
import stack_calls
import torch
from binding_sources import FORMS, STORED, current, matches, messages_of
from binding_sources import ops as defined_ops
from project import REPO_ID

pytestmark = pytest.mark.usefixtures("on_device")

FP8 = torch.float8_e4m3fn
PROGRAMS = []  # numbers of some that are there
M, K, N, E, SLOTS = 3, 256, 160, 4, 2  # rows, columns, columns of a result, experts, slots a token


# What a GPU does not serve, in the shapes of this file.
NOT_ON_GPUS = {
    "decode_layers": "is for larger layers",
    "gated_gemm": "is for one row on NVIDIA",
}


@pytest.fixture
def ops(request, best_package, device):
    op = getattr(request.node, "callspec", None) and request.node.callspec.params.get("op")
    if device.type == "cuda" and op in NOT_ON_GPUS:
        pytest.skip(f"{op} {NOT_ON_GPUS[op]}")
    ops = best_package.functional.ops
    PROGRAMS.append(ops.record_program(0, "new"))
    return ops


def fp8(*shape):
    return torch.randn(shape).to(FP8)


def half(*shape):
    return torch.randn(shape).bfloat16()


def rand(*shape):
    return torch.rand(shape) + 0.5


def codes(*shape):
    return torch.randint(110, 140, shape, dtype=torch.uint8)


def quantized(*, static):
    return {"out": fp8(M, K), "scales": None if static else rand(M, 1)}


def norms():
    rest = {"eps": 1e-6, "group_size": 0, "scale_ub": 0.0, "ue8m0": False}
    rest |= {"weight_offset": 0.0, "addend": None}
    for static in (False, True):
        inputs = {"x": torch.randn(M, K), "residual": torch.randn(M, K), "weight": rand(K)}
        yield {**quantized(static=static), **inputs, "scale": rand(1) if static else None, **rest}
    groups = {"scales": rand(M, 2), "group_size": 128, "scale": None}
    yield {**quantized(static=False), **inputs, **rest, **groups}
    plain = {"scale": None, **rest, "out": torch.randn(M, K)}
    yield {**quantized(static=True), **inputs, **plain}
    yield {**quantized(static=True), **inputs, **plain, "addend": torch.randn(M, K)}
    yield {**quantized(static=False), **inputs, "scale": None, **rest, "addend": torch.randn(M, K)}


def activations():
    rest = {"activation": "silu", "group_size": 0, "scale_ub": 0.0, "ue8m0": False}
    for static in (False, True):
        inputs = {"gate": torch.randn(M, K), "up": torch.randn(M, K)}
        yield {**quantized(static=static), **inputs, "scale": rand(1) if static else None, **rest}
    groups = {"scales": rand(M, 2), "group_size": 128, "scale": None}
    yield {**quantized(static=False), **inputs, **rest, **groups}
    plain = {"up": None, "scale": None, "activation": "identity"}
    yield {**quantized(static=False), **inputs, **rest, **plain}
    yield {**quantized(static=True), **inputs, **rest, "scale": None, "out": torch.randn(M, K)}


def attentions():
    rest = {"max_seqlen_q": M, "max_seqlen_k": 5, "scale": 0.1, "window_left": -1}
    rest |= {"window_right": 0, "softcap": 0.0}
    common = {"k_descale": rand(2, 2), "v_descale": rand(2, 2), "sinks": half(4), **rest}
    ends = {"cu_seqlens_q": None, "cu_seqlens_k": None}
    q = {"out": half(2, M, 4, 64), "lse": rand(2, 4, M), "q": half(2, M, 4, 64), **ends}
    used = torch.tensor([5, 2]).int()
    common["leftpad_k"] = torch.tensor([1, 0]).int()
    rows = {"k": half(2, 5, 2, 64), "v": half(2, 5, 2, 64), "block_table": None}
    yield {**q, **rows, "seqused_k": used, **common}
    table = torch.tensor([[2, 0], [1, 3]]).int()
    pages = {"k": fp8(4, 3, 2, 64), "v": fp8(4, 3, 2, 64), "block_table": table}
    yield {**q, **pages, "seqused_k": used, **common}
    ends = {"cu_seqlens_q": torch.tensor([0, 1, M]).int(), "block_table": None}
    ends["cu_seqlens_k"] = torch.tensor([0, 2, 7]).int()
    ragged = {"out": half(M, 4, 32), "lse": rand(4, M), "q": half(M, 4, 64), **ends}
    yield {**ragged, "k": half(7, 2, 64), "v": half(7, 2, 32), "seqused_k": None, **common}


def rotations():
    rest = {"rotary_dim": 64, "interleaved": False, "eps": 1e-6, "weight_offset": 0.0}
    absent = {"places": None, "places_are": "slot_mapping", "block_table": None}
    absent |= {"k_cache": None, "v_cache": None, "k_scale": None, "v_scale": None}
    none = {**absent, "sin": None, "positions": None, "q_weight": None, "k_weight": None}
    heads = {"out": half(2, M, 4, 64), "q": half(2, M, 4, 64), "k": half(2, M, 2, 64)}
    heads |= {"v": half(2, M, 2, 32), "k_out": half(2, M, 2, 64)}
    weights = {"q_weight": half(64), "k_weight": half(64)}
    turn = {"cos": rand(2, M, 64), "sin": rand(2, M, 64)}
    yield {**none, **heads, **weights, **turn, **rest}
    caches = {"k_cache": half(2, 5, 2, 64), "v_cache": half(2, 5, 2, 32)}
    for name, places in (
        ("cache_seqlens", torch.tensor([[0], [2]]).expand(2, M).contiguous()),
        ("cache_positions", torch.tensor([[0, 4, -1], [2, 1, 0]]).int()),
        ("slot_mapping", torch.tensor([[0, 9, -1], [2, 1, 3]])),
    ):
        yield {**none, **heads, **turn, **caches, **rest, "places": places, "places_are": name}
    pages = {"k_cache": fp8(4, 3, 2, 64), "v_cache": fp8(4, 3, 2, 32)}
    paged = {"block_table": torch.tensor([[2, 0], [1, 3]]).int(), "places_are": "cache_seqlens"}
    paged |= {"places": torch.tensor([[0, 0, 0], [2, 2, 2]]), "k_scale": rand(2)}
    of_position = {"cos": rand(5, 64), "positions": torch.tensor([[4, 0, 1], [3, 3, 2]])}
    yield {**none, **heads, **pages, **paged, **of_position, "v_scale": rand(1), **rest}
    begins = {**of_position, "positions": torch.tensor([0, 2]), "v_scale": rand(2, 2)}
    yield {**none, **heads, **pages, **paged, **begins, **rest}
    apart = {"sin": rand(5, 64), **weights}
    yield {**none, **heads, **of_position, **apart, **rest}


def products():
    operands = {"out": half(M, N), "a": fp8(M, K), "w": fp8(N, K)}
    yield {**operands, "scale_a": rand(M, 1), "scale_w": rand(N, 1), "bias": half(N)}
    yield {**operands, "scale_a": rand(M, 2), "scale_w": rand(2, 2), "bias": None}
    without = {"scale_a": None, "scale_w": None, "bias": None}
    yield {**operands, "a": half(M, K), "w": half(N, K), **without}
    yield {**operands, "a": half(M, K), **without, "scale_w": rand(1)}


def quantized_products():
    operands = {"out": half(M, N), "w": fp8(N, K), "scale_w": rand(N, 1)}
    yield {**operands, "a": torch.randn(M, K), "bias": half(N)}
    yield {**operands, "a": half(M, K), "scale_w": rand(1), "bias": None}


def gated_products():
    operands = {"out": torch.randn(M, N // 2), "a": fp8(M, K), "w": fp8(N, K)}
    scales = {"scale_a": rand(M, 1), "scale_w": rand(N, 1)}
    rest = {"activation": "silu", "rounded": "bfloat16"}
    yield {**operands, **scales, "bias": half(N), **rest}
    yield {**operands, "scale_a": rand(1), "scale_w": None, "bias": None, **rest}


def routings():
    operands = {"weights": rand(M, 4), "ids": torch.zeros(M, 4).int(), "logits": half(M, 8)}
    rest = {"renormalize": True, "scale": 1.0}
    yield {**operands, "bias": rand(8), "scoring": "sigmoid", "groups": 4, "groups_kept": 2, **rest}
    yield {**operands, "bias": None, "scoring": "softmax", "groups": 1, "groups_kept": 1, **rest}


def layers():
    routing = {
        "topk_weights": rand(M, SLOTS),
        "topk_ids": torch.randint(0, E, (M, SLOTS), dtype=torch.int32),
    }
    rest = {"activation": "silu", "limit": math.inf, "interleaved": False, "quantize_input": True}
    rest["ue8m0"] = False
    x = {"out": half(M, K), "x": half(M, K)}
    weights = {"w_gate_up": fp8(E, 2 * N, K), "w_down": fp8(E, K, N)}
    scales = {"scale_gate_up": rand(E, 2 * N, 1), "scale_down": rand(E)}
    biases = {"bias_gate_up": half(E, 2 * N), "bias_down": half(E, K)}
    yield {**x, **weights, **routing, **scales, **biases, **rest}
    none = {"bias_gate_up": None, "bias_down": None}
    weights = {"w_gate_up": codes(E, 2 * N, K // 2), "w_down": codes(E, K, N // 2)}
    scales = {"scale_gate_up": codes(E, 2 * N, K // 32), "scale_down": codes(E, K, N // 32)}
    yield {**x, **weights, **routing, **scales, **none, **rest}
    weights = {"w_gate_up": half(E, 2 * N, K), "w_down": half(E, K, N)}
    scales = {"scale_gate_up": None, "scale_down": None}
    yield {**x, **weights, **routing, **scales, **none, **rest}


def grouped():
    rows = {"out": half(M, N), "offsets": torch.tensor([1, 1, 2, M]).int()}
    yield {**rows, "a": fp8(M, K), "w": fp8(E, N, K), "scale_a": rand(M, 1), "scale_w": rand(E)}
    mx = {"w": codes(E, N, K // 2), "scale_w": codes(E, N, K // 32)}
    yield {**rows, "a": half(M, K), **mx, "scale_a": None}
    yield {**rows, "a": half(M, K), "w": half(E, N, K), "scale_a": None, "scale_w": None}


def rounding(kind):
    """How a layer's rows are quantised, and static scales of its two linears."""
    static = kind == "static"
    how = {"quantizes": kind != "not", "group_size": 128 if kind == "blocks" else 0}
    return {**how, "scale_ub": 0.0, "ue8m0": False}, [rand(1) if static else None for _ in range(2)]


def linear(name, n, k, static, kind, bias):
    scale = rand(-(-n // 128), -(-k // 128)) if kind == "blocks" else rand(n, 1)
    return {
        f"w_{name}": fp8(n, k), f"scale_{name}": scale, f"input_scale_{name}": static,
        f"bias_{name}": half(n) if bias else None,
    }  # fmt: skip


def mlps():
    for kind in ("rows", "static", "blocks", "not"):
        how, static = rounding(kind)
        yield {
            "out": half(M, N), "sum": half(M, K), "x": half(M, K), "attended": half(M, K),
            "norm_weight": half(K), "activation": "silu", "eps": 1e-6, "weight_offset": 0.0, **how,
            **linear("gate_up", 2 * K, K, static[0], kind, True),
            **linear("down", N, K, static[1], kind, True),
        }  # fmt: skip


def attention_halves():
    q_heads, kv_heads, room = 4, 2, 5
    for kind in ("rows", "static", "blocks", "not"):
        how, static = rounding(kind)
        caches = [fp8(2, room, kv_heads, 64) for _ in range(2)]
        scales = {f"{name}_{what}": None for name in "kv" for what in ("scale", "descale")}
        if kind == "rows":
            scales = {name: rand(kv_heads) for name in ("k_scale", "v_scale")}
            scales |= {name: rand(2, kv_heads) for name in ("k_descale", "v_descale")}
        if kind == "static":
            caches = [half(2, room, kv_heads, 64) for _ in range(2)]
        yield {
            "out": half(2 * M, N), "k_cache": caches[0], "v_cache": caches[1], "x": half(2 * M, K),
            **linear("qkv", (q_heads + 2 * kv_heads) * 64, K, static[0], kind, True),
            **linear("o", N, q_heads * 64, static[1], kind, True), **scales, **how,
            "norm_weight": half(K), "cos": rand(2, M, 64), "sin": rand(2, M, 64),
            "q_norm_weight": half(64), "k_norm_weight": half(64), "sinks": half(q_heads),
            "cache_positions": torch.tensor([[1, 2, 3], [0, 1, 2]]),
            "leftpad_k": torch.tensor([1, 0]).int(),
            "seqused_k": torch.tensor([4, 3]).int(), "rotary_dim": 64, "interleaved": False,
            "head_eps": 1e-6, "head_weight_offset": 0.0, "scale": 0.1, "window_left": -1,
            "window_right": 0, "softcap": 0.0, "eps": 1e-6, "weight_offset": 0.0,
        }  # fmt: skip


MEMORIES = {}  # address -> memory of a group; they live as long as the process


def lone_group():
    """A group of two ranks that are one and the same, in its first exchange: it waits for nobody,
    since what was never sent reads as zeros. In its third a GPU would wait for the second rank.
    A GPU's op believes how many ranks there are, so all that it may be told of have memory."""
    memory = torch.zeros(1 << 16, dtype=torch.uint8)
    comm = kernels.get_kernel(REPO_ID, version=1, backend="cpu").comm
    ranks = comm.memory.MOST_RANKS if memory.is_cuda else 2
    comm.memory.write_header(memory, 0, [memory.data_ptr()] * ranks)
    MEMORIES[memory.data_ptr()] = memory
    at = {"memory": memory.data_ptr(), "memory_bytes": memory.numel()}
    return {**at, "rank": 0, "ranks": 2, "timeout": 9.0}


def exchanges(of_out, of_x):
    """Of ops whose out has `of_out` elements for `of_x` of x."""

    def calls():
        tensors = {"out": torch.randn(of_out * M, K), "x": torch.randn(of_x * M, K)}
        yield {**tensors, **lone_group()}

    return calls


def norms_of_sums():
    for call in norms():
        yield {**call, **lone_group()}


def products_of_ranks():
    for call in products():
        yield {**call, **lone_group()}


def tuned():
    dtypes = {"a_dtype": "bfloat16", "w_dtype": "bfloat16", "block_scales": False}
    yield {"device": -1, "rows": 4, "n": N, "k": K, **dtypes, "config": ""}


def limits():
    yield {"device": -1, "n": N, "k": K, "scales": "row"}


def new_program():
    yield {"program": 0, "what": "new"}
    yield {"program": PROGRAMS[-1], "what": "off"}


def launches():
    yield {"program": PROGRAMS[-1], "begin": 0, "end": 0}


# Name of each op -> right calls of it, and what else they take.
CALLS = {
    "all_reduce": (exchanges(1, 1), {}),
    "all_reduce_rmsnorm_fp8": (norms_of_sums, {}),
    "linear_all_reduce": (products_of_ranks, {}),
    "linear_all_reduce_configs": (products_of_ranks, {}),
    "reduce_scatter": (exchanges(1, 2), {}),
    "all_gather": (exchanges(2, 1), {}),
    "rmsnorm_fp8": (norms, {}),
    "swiglu_fp8": (activations, {}),
    "attention": (attentions, {"config": ""}),
    "attention_configs": (attentions, {}),
    "rope_and_cache": (rotations, {}),
    "decode_layers": (stack_calls.right_calls, {}),
    "layer_attention": (attention_halves, {}),
    "layer_mlp": (mlps, {}),
    "gemm": (products, {"config": ""}),
    "gemm_configs": (products, {"tuned": True}),
    "quantized_gemm": (quantized_products, {}),
    "gated_gemm": (gated_products, {}),
    "tune_gemm": (tuned, {}),
    "linear_limits": (limits, {}),
    "hold_rotation": (lambda: iter([{"next": False}]), {}),
    "settle_weights": (lambda: iter([{"address": 0}]), {}),
    "ask_ahead": (lambda: iter([{"places": torch.zeros(3, 4).long()}, {"places": None}]), {}),
    "topk": (routings, {}),
    "record_program": (new_program, {}),
    "run_program": (launches, {}),
    **{
        f"{op}{form}": (calls, more)
        for op, calls in (("fused_moe", layers), ("grouped_gemm", grouped))
        for form, more in (("", {"config": ""}), ("_configs", {}))
    },
}
every_op = pytest.mark.parametrize("op", CALLS)


def schema(ops, op):
    return getattr(ops, op).default._schema.arguments


def right_calls(ops, op):
    """By the names of the op's schema."""
    calls, more = CALLS[op]
    names = {argument.name for argument in schema(ops, op)}
    for call in calls():
        yield {name: value for name, value in {**call, **more}.items() if name in names}


def run(ops, op, call):
    """What it raised, or an empty text. A group's memory serves one call: lone_group()."""
    if call.get("memory") in MEMORIES:
        call = {**call, "memory": lone_group()["memory"]}
    try:
        getattr(ops, op)(**call)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


def test_every_op_has_calls(ops):
    assert defined_ops() == {*CALLS}
    assert all(hasattr(ops, op) for op in CALLS)


@every_op
def test_right_calls_are_right(ops, op):
    for call in right_calls(ops, op):
        assert run(ops, op, call) == ""
        if call.get("config") == "":
            assert "got 'nonsense'" in run(ops, op, {**call, "config": "nonsense"})


# ---- Memory


def in_one_buffer(first, second, offset):
    """Both from one buffer, with their values, the second `offset` bytes behind the first."""
    behind = max(-offset, 0)
    sizes = first.nbytes, second.nbytes
    buffer = torch.empty(behind + max(sizes[0], offset + sizes[1]) + 64, dtype=torch.uint8)

    def at(begin, like):
        part = buffer[begin : begin + like.nbytes].view(like.dtype).view(like.shape)
        return part.copy_(like)

    return at(behind, first), at(behind + offset, second)


def written(ops, op):
    aliases = [(a.name, a.alias_info) for a in schema(ops, op)]
    return [name for name, alias in aliases if alias is not None and alias.is_write]


def pairs(ops, op, call):
    tensors = [name for name, value in call.items() if isinstance(value, torch.Tensor)]
    for one in {*written(ops, op)} & {*tensors}:
        yield from ((one, other) for other in tensors if one != other)


# What may be worked on where it lies.
IN_PLACE = {
    ("all_reduce", "out", "x"),
    ("rope_and_cache", "out", "q"),
    ("rope_and_cache", "k_out", "k"),
}


def user_name(name, call):
    """With an addend, which users know as the residual, the sum goes to residual_out; where tokens
    go has one of three names."""
    if name == "places":
        return call["places_are"]
    names = {"residual": "residual_out", "addend": "residual"}
    return names.get(name, name) if call.get("addend") is not None else name


def in_pages(call):
    return call.get("block_table") is not None or call.get("places_are") == "slot_mapping"


@every_op
def test_what_is_written_shares_no_memory(ops, op):
    for call in right_calls(ops, op):
        for one, other in pairs(ops, op, call):
            first, second = call[one], call[other]
            size = max(first.element_size(), second.element_size())
            inside = (first.nbytes - 1) // size * size  # the last element of one, the first of both
            before = -((second.nbytes - 1) // size * size)
            in_place = {(op, one, other), (op, other, one)} & IN_PLACE
            if {one, other} == {"k_cache", "v_cache"} and in_pages(call):
                inside, before = 2, -2  # pages that lie apart may be of one memory
            for offset in {inside, before} | (set() if in_place else {0}):
                a, b = in_one_buffer(first, second, offset)
                message = run(ops, op, {**call, one: a, other: b})
                x, y = user_name(one, call), user_name(other, call)
                assert re.fullmatch(
                    f"({x} is written and must not share memory with {y}"
                    f"|{y} is written and must not share memory with {x})",
                    message,
                ), f"{one} and {other}, {offset} bytes apart: {message or 'nothing was raised'}"
            a, b = in_one_buffer(first, second, -(-first.nbytes // 16) * 16)
            assert "share" not in run(ops, op, {**call, one: a, other: b}), "side by side"


@every_op
def test_what_is_written_has_rows_of_its_own(ops, op):
    for call in right_calls(ops, op):
        for name in {one for one, _ in pairs(ops, op, call)}:
            message = run(ops, op, {**call, name: call[name][:1].expand(call[name].shape)})
            assert re.search("must not overlap|contiguous", message), f"{name}: {message}"


# ---- Messages

OTHER_DTYPES = (torch.float64, torch.float32, torch.float16, torch.int64, torch.uint8, FP8)


def spaced(tensor):
    return torch.stack([tensor, tensor], -1)[..., 0]


def far_apart(tensor):
    return torch.cat([tensor, tensor], -1)[..., : tensor.shape[-1]]


def wrong_tensors(tensor):
    for dtype in {*OTHER_DTYPES} - {tensor.dtype}:
        yield tensor.to(dtype)
    yield tensor[0]
    yield tensor[None]
    for dim in range(tensor.dim()):
        yield torch.cat([tensor, tensor], dim)
        yield tensor.narrow(dim, 0, tensor.shape[dim] - 1)
        yield tensor.narrow(dim, 0, 0)
    if tensor.element_size() > 1 or tensor.dtype == torch.uint8:
        yield spaced(tensor)
    else:
        yield spaced(tensor.view(torch.uint8)).view(torch.uint8).view(tensor.dtype)
    yield far_apart(tensor)
    yield tensor[:1].expand(tensor.shape)


WRONG_VALUES = {str: ("nonsense",), int: (-1, 0, 3, 100, 129), float: (-1.0, 2.0), bool: ()}


def wrong_calls(ops, op):
    for call in right_calls(ops, op):
        for name, value in call.items():
            if isinstance(value, torch.Tensor):
                for other in wrong_tensors(value):
                    yield {**call, name: other}
            elif isinstance(value, list):
                if not value:
                    continue  # none of them is right, too
                for other in wrong_tensors(value[-1]):
                    yield {**call, name: [*value[:-1], other]}
                yield {**call, name: []}
                yield {**call, name: [value[0][0], *value[1:]]}
            elif value is not None:
                yield from ({**call, name: other} for other in WRONG_VALUES[type(value)])
        optional = [a.name for a in schema(ops, op) if str(a.type) == "Optional[Tensor]"]
        for name in {*optional} & {*call}:
            yield {**call, name: None}
        for other in right_calls(ops, op):  # what belongs to another form of the call
            for name in call:
                yield {**call, name: other[name]}
        # What tells configs asks for the same as what runs them, and writes nothing.
        for one, other in pairs(ops, op.removesuffix("_configs"), call):
            a, b = in_one_buffer(call[one], call[other], 0)
            yield {**call, one: a, other: b}
    yield from beyond(op)


def beyond(op):
    """Limits, and what takes two changes."""
    calls, more = CALLS[op]
    call = {**next(calls()), **more}
    if "ue8m0" in call:
        yield from ({**right, **more, "ue8m0": True} for right in calls())
    if op == "all_reduce":
        both = torch.randn(2 * M, K)
        yield {**call, "out": both[:M], "x": both[1 : M + 1]}
    if op.startswith("attention"):
        pages = {**[*calls()][1], **more}
        yield {**pages, **{name: pages[name][:, :0] for name in "kv"}}
    if op == "rope_and_cache":
        yield {**call, "rotary_dim": 0, "cos": None}
        yield {**call, "k": None, "v": None, "k_out": None}
        vast = half(1, 1, 2, 64).expand(2**16, 2**15, 2, 64)
        places = torch.zeros(2, M).int()
        yield {**call, "k_cache": vast, "v_cache": vast[..., :32], "places": places}
    if "addend" in call:
        yield {**call, "residual": None, "addend": torch.randn(M, K)}
    if op == "quantized_gemm":
        yield {**call, "scale_w": rand(2, 2)}
    if op == "gated_gemm":
        yield {**call, "activation": "identity"}
        yield {**call, "scale_a": rand(M, 2)}
        odd = {"w": fp8(N - 1, K), "scale_w": rand(1), "bias": None}
        yield {**call, **odd, "out": torch.randn(M, N // 2 - 1)}
        yield {**call, "out": half(M, N // 2)}
        yield {**call, "a": half(M, K), "scale_a": None}
    if op.startswith("fused_moe"):
        yield {**call, "ue8m0": True, "quantize_input": False}
    if op.startswith("fused_moe"):
        yield {**call, "topk_ids": torch.zeros(M, 33).int(), "topk_weights": rand(M, 33)}
        yield {**call, "w_gate_up": torch.empty(2049, 2, K).bfloat16()}
        mx = [*calls()][1]
        yield {**mx, **more, "w_gate_up": codes(E, 2 * N, 24), "x": half(M, 48), "out": half(M, 48)}
        yield {**mx, **more, "w_gate_up": codes(E, 40, K // 2), "scale_gate_up": codes(E, 40, 8)}
        wide = [*calls()][2]
        yield {**wide, **more, **{name: wide[name].half() for name in ("w_gate_up", "w_down")}}
    if op.startswith("grouped_gemm"):
        yield {**call, "w": fp8(2049, N, K)}
        mx = [*calls()][1]
        yield {**mx, **more, "w": codes(E, N, 24), "a": half(M, 48)}
    if op == "topk":
        yield {**call, "logits": half(M, 2049), "bias": None}
    if op == "decode_layers":
        yield from stack_calls.wrong_calls(call)
    if op == "settle_weights":
        yield {"address": -1}


def test_stored_messages_are_those_of_the_sources():
    """Or a check has come, or gone: if that is meant, `python tests/binding_sources.py --write`."""
    assert json.loads(STORED.read_text()) == current()


def wanted(op, on_gpu):
    """Of the messages that are stored those that this op can give."""
    stored = {*json.loads(STORED.read_text())[FORMS.sub("", op)]}
    if op in ("gemm_configs", "linear_all_reduce_configs"):
        stored &= messages_of(op)  # they are asked without a bias
    return {message for message in stored if ("on the device of" in message) == on_gpu}


def assert_each_came(messages, raised):
    missed = [text for text in messages if not any(matches(text, other) for other in raised)]
    assert not missed, "nothing failed by:\n" + "\n".join(sorted(missed))


@every_op
def test_every_check_fails_some_call(ops, op):
    names = {argument.name for argument in schema(ops, op)}
    calls = ({n: v for n, v in call.items() if n in names} for call in wrong_calls(ops, op))
    messages = wanted(op, on_gpu=False)
    assert messages or op == "hold_rotation"  # which takes either
    assert_each_came(messages, {run(ops, op, call) for call in calls})


@every_op
@pytest.mark.usefixtures("gpu")
def test_every_tensor_is_on_one_device(ops, op):
    raised = set()
    for call in right_calls(ops, op):
        for name, value in call.items():
            if isinstance(value, torch.Tensor):
                raised.add(run(ops, op, {**call, name: value.cpu()}))
            elif isinstance(value, list) and value:
                raised.add(run(ops, op, {**call, name: [*value[:-1], value[-1].cpu()]}))
    assert_each_came(wanted(op, on_gpu=True), raised)
