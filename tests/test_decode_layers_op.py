"""decode_layers, the op, against the functions that it stands for."""

import pytest
import torch
from compare import assert_near


def weights(backend, name, count, rows, columns, fp8, scale_a_row):
    scales = [
        (torch.rand(rows if scale_a_row else 1, 1) + 0.5) / (30 * columns**0.5)
        for _ in range(count)
    ]
    w = [(torch.randn(rows, columns) * 30).to(fp8) for _ in range(count)]
    return {
        f"w_{name}": [t.to(backend.device) for t in w],
        f"scale_{name}": [t.to(backend.device) for t in scales],
    }


SMALL = (1024, 1024, 8, 2)  # hidden, intermediate, heads, KV heads: that GPUs' kernels take


def random_call(backend, fp8, layers, of_last, dtype, position, scale_a_row=True, scales=None,
                more=False, sizes=SMALL, head_dim=128, rotary_dim=None):  # fmt: skip
    hidden, intermediate, heads, kv_heads = sizes
    columns = (heads + 2 * kv_heads) * head_dim
    count = layers - 1 + of_last

    def several(n, *shape):
        return [torch.randn(shape).to(backend.device, dtype) for _ in range(n)]

    angles = torch.randn((rotary_dim or head_dim) // 2).repeat(2).to(backend.device)
    caches = {name: several(layers, position + 3, kv_heads, head_dim)
              for name in ("k_caches", "v_caches")}  # fmt: skip
    for cache in (*caches["k_caches"], *caches["v_caches"]):
        cache[position:] = float("nan")
    if scales is not None:
        caches = {name: [cache.to(fp8) for cache in its] for name, its in caches.items()}
    for name in ("k_scales", "v_scales") if scales else ():
        caches[name] = [torch.rand(scales).to(backend.device) + 0.5 for _ in range(layers)]
    options = (fp8, scale_a_row)
    if more:
        caches.update((f"{name}_norm_weights", several(layers, head_dim)) for name in "qk")
        caches["bias_qkv"] = several(count, columns)
    return {
        "residual": several(1, hidden)[0], "qkv": several(1, columns)[0],
        "cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype),
        "position": torch.tensor([position], dtype=torch.int32, device=backend.device), **caches,
        "norm_weights": several(layers, hidden),
        **weights(backend, "o", layers, hidden, heads * head_dim, *options),
        **weights(backend, "gate_up", layers, 2 * intermediate, hidden, *options),
        **weights(backend, "down", layers, hidden, intermediate, *options),
        "next_norm_weights": several(count, hidden),
        **weights(backend, "qkv", count, columns, hidden, *options),
    }  # fmt: skip


def of_sequences(call, backend, count):
    """The call with `count` sequences; their rows of its caches lie apart."""
    dtype = call["residual"].dtype

    def several(t):
        return torch.randn(count, *t.shape).to(backend.device, dtype)

    position = int(call["position"])
    angles = torch.randn(count, len(call["cos"]) // 2).repeat(1, 2).to(backend.device)
    more = {"cos": angles.cos().to(dtype), "sin": angles.sin().to(dtype)}
    for name in ("k_caches", "v_caches"):
        more[name] = []
        for cache in call[name]:
            memory = several(torch.cat([cache.float(), cache[:5].float()]))
            memory[:, position:] = float("nan")
            more[name].append(memory.to(cache.dtype)[:, : len(cache)])
    return {**call, **more, **{name: several(call[name]) for name in ("residual", "qkv")}}


def copy_of(call):
    def copied(value):
        return [t.clone() for t in value] if isinstance(value, list) else value.clone()

    written = ("residual", "qkv", "k_caches", "v_caches")
    return {name: copied(value) if name in written else value for name, value in call.items()}


@pytest.mark.parametrize("layers, of_last, dtype, position, options", [
    (1, True, torch.bfloat16, 0, {}),
    pytest.param(
        2, False, torch.float16, 9, {"eps": 1e-5, "weight_offset": 1.0, "scale": 0.1},
        marks=pytest.mark.slow,
    ),
    pytest.param(2, True, torch.bfloat16, 70, {}, marks=pytest.mark.slow),
    (1, False, torch.bfloat16, 70, {"seqused_k": 50, "leftpad_k": 11}),
    (1, False, torch.bfloat16, 70, {"seqused_k": 71, "leftpad_k": 2, "window_left": 30}),
    (1, False, torch.bfloat16, 6, {"window_left": 0}),
    (2, False, torch.bfloat16, 9, {"scales": 2}),
    (1, True, torch.float16, 40, {"scales": 1, "seqused_k": 30, "leftpad_k": 11}),
    (1, False, torch.bfloat16, 0, {"scales": 0}),
    (2, True, torch.bfloat16, 20, {"more": True, "eps": 1e-2, "weight_offset": 1.0}),
    (1, True, torch.float16, 40, {"more": True, "scales": 2}),
    (2, True, torch.bfloat16, 20, {"sequences": 2, "more": True}),
    (1, True, torch.float16, 40, {"sequences": 3, "scales": 2, "leftpad_k": [0, 11, 40]}),
    (1, False, torch.bfloat16, 70, {"sequences": 4, "seqused_k": [50, 71, 12, 1],
                                    "leftpad_k": [11, 0, 3, 0]}),
    (1, True, torch.bfloat16, 9, {"sequences": 1, "window_left": 3}),
    # Two KV heads of 64 a block, of one query head, of three, of more than a block takes.
    (2, True, torch.bfloat16, 70, {"sizes": (1024, 1024, 16, 4), "head_dim": 64}),
    (1, True, torch.float16, 40, {"sizes": (1024, 1024, 16, 16), "head_dim": 64, "more": True,
                                  "scales": 16}),
    (1, True, torch.bfloat16, 9, {"sizes": (1024, 1024, 24, 8), "head_dim": 64, "sequences": 2,
                                  "scales": 8, "leftpad_k": [0, 9], "apart": True}),
    (1, False, torch.bfloat16, 0, {"sizes": (1024, 1024, 22, 2), "head_dim": 64, "scales": 1}),
    (1, False, torch.bfloat16, 40, {"sizes": (1024, 1024, 16, 4), "head_dim": 64, "scales": 4,
                                    "apart": True}),
    # Shorter rows than AMD's kernel takes.
    (2, True, torch.bfloat16, 70, {"sizes": (896, 640, 14, 2), "head_dim": 64, "scales": 2}),
    (2, True, torch.float16, 9, {"sizes": (512, 2176, 4, 1), "sequences": 3, "more": True}),
    # A part of a head rotates, or neighbours.
    (2, True, torch.bfloat16, 20, {"rotary_dim": 96}),
    (1, True, torch.float16, 9, {"rotary_dim": 64, "interleaved": True, "more": True}),
    (1, True, torch.bfloat16, 9, {"interleaved": True, "sequences": 3}),
    (1, True, torch.bfloat16, 9, {"sizes": (1024, 1024, 16, 4), "head_dim": 64, "rotary_dim": 40,
                                  "more": True}),
    (1, True, torch.bfloat16, 9, {"sizes": (1024, 1024, 16, 4), "head_dim": 64, "rotary_dim": 8,
                                  "interleaved": True, "sequences": 2, "scales": 4}),
    # Rows of more than one part, the last one short, more rows than a tile; keys of several blocks;
    # more query heads than a block takes; each thread two vectors of a row, or four.
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            (1, True, torch.bfloat16, 300, {"sizes": (4224, 2304, 16, 1), "scales": 1}),
            (2, True, torch.float16, 700, {"sizes": (1152, 4480, 24, 8), "more": True}),
            (1, False, torch.bfloat16, 2100, {"sizes": (1024, 1024, 8, 8), "seqused_k": 2090}),
            (2, True, torch.bfloat16, 300, {"sizes": (4224, 2304, 16, 1), "sequences": 2}),
            (2, True, torch.bfloat16, 700, {"sizes": (1152, 4480, 32, 8), "head_dim": 64,
                                            "sequences": 3, "more": True, "apart": True}),
            (1, True, torch.float16, 2100, {"sizes": (2048, 2304, 64, 4), "head_dim": 64,
                                            "scales": 4, "seqused_k": 2090, "rotary_dim": 24}),
            (1, True, torch.float16, 700, {"sizes": (1152, 4480, 24, 8), "sequences": 3,
                                           "scales": 1, "leftpad_k": [9, 300, 0]}),
        )
    ),
])  # fmt: skip
def test_as_the_functions_one_by_one(backend, package, layers, of_last, dtype, position, options):
    if backend.name == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("refused there")
    options = dict(options)
    sequences = options.pop("sequences", None)
    call = random_call(backend, backend.fp8_dtype, layers, of_last, dtype, position, layers == 2,
                       options.pop("scales", None), options.pop("more", False),
                       options.pop("sizes", SMALL), options.pop("head_dim", 128),
                       options.pop("rotary_dim", None))  # fmt: skip
    if sequences is not None:
        call = of_sequences(call, backend, sequences)
    if options.pop("apart", False):  # the rows of a KV head together, and so heads apart
        for caches in (call["k_caches"], call["v_caches"]):
            caches[:] = [cache.transpose(-3, -2).contiguous().transpose(-3, -2) for cache in caches]
    if options.keys() & {"seqused_k", "leftpad_k", "window_left"}:
        begins, ends = (
            torch.as_tensor(options.get(name, its)).expand(sequences or 1).tolist()
            for name, its in (("leftpad_k", 0), ("seqused_k", position + 1))
        )
        if "window_left" in options:
            begins = [max(begin, end - 1 - options["window_left"])
                      for begin, end in zip(begins, ends, strict=True)]  # fmt: skip
            call["position"] = call["position"].long()
        for cache in (*call["k_caches"], *call["v_caches"]):  # what is not seen is not read
            nothing = torch.full((1,), float("nan")).to(cache)
            for own, begin, end in zip(cache[None] if sequences is None else cache, begins, ends,
                                       strict=True):  # fmt: skip
                own[:begin] = own[end:] = nothing
        for name in ("seqused_k", "leftpad_k"):
            if name in options:
                number = torch.as_tensor(options[name]).view(-1).int()
                options[name] = number.to(backend.device)
    expected, found = copy_of(call), copy_of(call)
    says = None
    if sequences is not None and sequences > 1:
        says = "takes one sequence on this GPU"
    elif len(call["residual"]) == 896:
        says = "hidden must be a multiple of 128, from 1024"
    elif call["cos"].shape[-1] % 16 != 0:
        says = "rotary_dim must be a multiple of 16"
    if backend.name == "simulator" and says is not None:
        with pytest.raises(RuntimeError, match=says):
            backend.ops.decode_layers(**found, **options)
        return
    package.reference.decode_layers(**expected, **options)
    residual = backend.ops.decode_layers(**found, **options)
    assert residual is found["residual"]
    assert_near(found["residual"], expected["residual"])
    if of_last:
        assert_near(found["qkv"], expected["qkv"])
    for name in ("k_caches", "v_caches"):
        for ours, its in zip(found[name], expected[name], strict=True):
            if sequences is not None:
                ours, its = ours.transpose(0, 1), its.transpose(0, 1)
            assert_near(ours[position], its[position])
            others = torch.arange(len(its)) != position
            assert torch.equal(ours[others].view(torch.uint8), its[others].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_sequence_has_its_own_place(backend, package, dtype):
    """And all may have the same angles."""
    if backend.name == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("refused there")
    call = random_call(backend, backend.fp8_dtype, 2, True, torch.bfloat16, 9)
    angles = {name: call[name] for name in ("cos", "sin")}
    call = {**of_sequences(call, backend, 3), **angles}
    places = [9, 0, 4]
    for caches in (call["k_caches"], call["v_caches"]):
        for cache in caches:
            for own, place in zip(cache, places, strict=True):
                own[:place].normal_()
                own[place:] = float("nan")
    call["position"] = torch.tensor(places).to(backend.device, dtype)
    expected, found = copy_of(call), copy_of(call)
    if backend.name == "simulator":
        with pytest.raises(RuntimeError, match="takes one sequence on this GPU"):
            backend.ops.decode_layers(**found)
        return
    package.reference.decode_layers(**expected)
    backend.ops.decode_layers(**found)
    for name in ("residual", "qkv"):
        assert_near(found[name], expected[name])
    for ours, its in zip(found["k_caches"] + found["v_caches"],
                         expected["k_caches"] + expected["v_caches"], strict=True):  # fmt: skip
        for b, place in enumerate(places):
            assert_near(ours[b, : place + 1], its[b, : place + 1])
            assert torch.isnan(ours[b, place + 1 :].float()).all()


@pytest.mark.not_on("reference")
def test_a_place_beyond_the_cache(backend):
    """Is refused on the CPU; on a GPU, which nobody waits for, nothing is written."""
    if backend.name == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("refused there")
    call = random_call(backend, backend.fp8_dtype, 1, False, torch.bfloat16, 9)
    rows = call["k_caches"][0].shape[0]
    for name in ("k_caches", "v_caches"):
        call[name] = [torch.randn_like(call[name][0])]
    found = copy_of(call)
    found["position"] = torch.full_like(call["position"], rows)
    roomy = {name: torch.full((2 * rows, *call[name][0].shape[1:]), 7.0).to(call[name][0])
             for name in ("k_caches", "v_caches")}  # fmt: skip
    for name, cache in roomy.items():  # what lies behind must stay
        cache[:rows] = found[name][0]
        found[name] = [cache[:rows]]
    if backend.name == "cpu":
        with pytest.raises(RuntimeError, match="cache"):
            backend.ops.decode_layers(**found)
        return
    before = {name: cache.clone() for name, cache in roomy.items()}
    backend.ops.decode_layers(**found)
    for name, cache in roomy.items():
        assert torch.equal(cache.view(torch.uint8), before[name].view(torch.uint8)), name
    assert found["residual"].isfinite().all()
    assert not torch.equal(found["residual"], call["residual"])
