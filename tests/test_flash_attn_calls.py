"""Attention as strangers call it: flash_attn's other order, its keywords, lengths and tables of any
kind. It computes what was meant, or says what it wants."""

import random as pyrandom
import re

import pytest
import torch

B, S, H, KV, D, L = 2, 17, 4, 2, 64, 32


def exact(q, k, v, causal=False, window=(-1, -1), scale=None):
    q, k, v = (t.double() for t in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bshd,blhd->bhsl", q, k) * (scale or q.shape[3] ** -0.5)
    at = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
    key = torch.arange(k.shape[1])
    left, right = window[0], 0 if causal else window[1]
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if left >= 0:
        seen &= key >= at - left
    if right >= 0:
        seen &= key <= at + right
    shares = scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0)
    return torch.einsum("bhsl,blhd->bshd", shares, v)


def random(*shape):
    return torch.randn(*shape).bfloat16()


@pytest.fixture
def qkv():
    return random(B, S, H, D), random(B, S, KV, D), random(B, S, KV, D)


@pytest.fixture
def caches():
    """A query a sequence, and caches."""
    return random(B, 1, H, D), random(B, L, KV, D), random(B, L, KV, D)


def close(got, expected):
    torch.testing.assert_close(got.double(), expected, rtol=0.02, atol=0.02)


def test_keywords_of_flash_attn_2(package, qkv):
    """Those of inference are taken, in any of its words for no window."""
    for window in ((-1, -1), None, [-1, None], (None, None)):
        got = package.flash_attn_func(
            *qkv, dropout_p=0.0, softmax_scale=None, causal=True, window_size=window, softcap=0.0,
            alibi_slopes=None, deterministic=True, return_attn_probs=False,
        )  # fmt: skip
        close(got, exact(*qkv, causal=True))
    close(package.flash_attn_func(*qkv, window_size=[3, None]), exact(*qkv, window=(3, -1)))
    close(package.flash_attn_func(*qkv, softcap=None), exact(*qkv))


REFUSED = {
    "dropout": ({"dropout_p": 0.1}, "dropout_p must be 0"),
    "slopes": ({"alibi_slopes": torch.rand(H)}, "alibi_slopes must be None"),
    "values of their own": ({"qv": torch.rand(B, S, H, D)}, "qv must be None, .* torch.cat"),
    "queries' scale": ({"q_descale": torch.rand(B, KV)}, "q_descale must be None"),
    "chunks": ({"attention_chunk": 64}, "attention_chunk must be 0, got 64: give each chunk"),
    "rows that count": ({"seqused_q": torch.tensor([1, 2])}, "seqused_q must be None"),
    "another name": ({"learnable_sink": torch.rand(H)}, "its name is s_aux"),
    "causal as a count": ({"causal": 9}, "causal must be True or False, got 9"),
    "causal as counts": ({"causal": torch.tensor([9, 5])}, "causal must be .* got a tensor"),
    "a switch as a cap": ({"softcap": True}, "softcap must be a number"),
    "three sequences' scales": ({"k_descale": torch.rand(3, KV)}, "k_descale must be .* shape"),
    "one bound": ({"window_size": 3}, "window_size must be two integers, .* got 3"),
    "three bounds": ({"window_size": (3, 3, 3)}, "window_size must be two integers"),
    "half a key": ({"window_size": (2.5, 0)}, "window_size must be two integers"),
    "no scale": ({"softmax_scale": 0.0}, "softmax_scale must be a number other than 0, got 0.0"),
    "a tensor": ({"softmax_scale": torch.tensor(9)}, "softmax_scale must be .* got a tensor"),
    "a switch": ({"softmax_scale": True}, "softmax_scale must be .* got True"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(package, qkv, case):
    options, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        package.flash_attn_func(*qkv, **options)


def test_heads_without_elements_are_refused(package, qkv):
    """Before a scale is made of their size."""
    q, k, v = qkv
    with pytest.raises(RuntimeError, match="heads must have 1 to 512 elements, got 0 of q"):
        package.flash_attn_func(q[..., :0], k[..., :0], v)


# Arguments behind q, k and v by their place, of flash_attn 2.8, its interface of version 3, and 4.
ORDERS = {
    "flash_attn_func": (
        "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
        "return_attn_probs",
        "softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk softcap "
        "num_splits pack_gqa deterministic sm_margin return_attn_probs",
        "softmax_scale causal window_size learnable_sink softcap num_splits pack_gqa deterministic",
    ),
    "flash_attn_varlen_func": (
        "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale causal "
        "window_size softcap alibi_slopes deterministic return_attn_probs block_table",
        "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q seqused_k softmax_scale "
        "causal qv q_descale k_descale v_descale window_size attention_chunk softcap num_splits",
    ),
    "flash_attn_with_kvcache": (
        "k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
        "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits",
        "k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad page_table "
        "cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale v_descale "
        "softmax_scale causal window_size attention_chunk softcap rotary_interleaved",
    ),
}  # fmt: skip
NO_ARGUMENTS_OF_OURS = "unexpected keyword|positional argument|ambiguous|not supported between"


def values_of(name):
    """Each that a caller may have for it, most often what is left alone."""
    ends = torch.tensor([0, S, 2 * S])
    lists = {
        "dropout_p": [0.0], "softmax_scale": [None, 0.3], "causal": [False, True],
        "window_size": [(-1, -1), (3, 0)], "softcap": [0.0, 9.0], "deterministic": [False],
        "return_attn_probs": [False], "num_splits": [0, 1], "pack_gqa": [None, True],
        "sm_margin": [0], "attention_chunk": [0, 8], "cu_seqlens_q": [ends, ends.int()],
        "cu_seqlens_k": [ends], "max_seqlen_q": [S], "max_seqlen_k": [S],
        "cache_seqlens": [None, 9, torch.tensor([9, 5])], "rotary_interleaved": [True],
        "seqused_k": [None, torch.tensor([9, 5])], "cache_batch_idx": [None, torch.tensor([1, 0])],
    }  # fmt: skip
    some = {"q_descale": torch.rand(B, KV), "qv": torch.rand(B, S, H, D), "k": random(B, 1, KV, D)}
    some["v"] = some["k"]
    some |= {"k_descale": torch.rand(B, KV), "learnable_sink": torch.rand(H)}
    some |= {"rotary_cos": torch.rand(L, D // 2), "alibi_slopes": torch.rand(H)}
    return lists.get(name, [None, some.get(name)])


def of_call(run, operands, *by_place, **by_name):
    """Its result; None where a sentence of ours refuses it."""
    try:
        return run(*operands, *by_place, **by_name)
    except (ValueError, TypeError, RuntimeError) as error:
        assert not re.search(NO_ARGUMENTS_OF_OURS, str(error)), error


@pytest.mark.parametrize(
    "function, order", [(name, i) for name, orders in ORDERS.items() for i in range(len(orders))]
)
def test_by_position_it_is_what_it_is_by_name_or_refused(package, qkv, caches, function, order):
    """By names each call is right or refused (above). By position, of whatever version and however
    many: that very result, or a sentence of ours."""
    draw, names = pyrandom.Random(0), ORDERS[function][order].split()
    run, taken = getattr(package, function), 0
    operands = caches if "kvcache" in function else qkv
    if "varlen" in function:
        operands = [states.flatten(0, 1) for states in qkv]
        names[:4], fixed = [], [values_of(name)[0] for name in names[:4]]
        operands = [*operands, *fixed]
    for _ in range(120):
        count = draw.randint(0, len(names))
        given = {name: draw.choice(values_of(name)) for name in names[:count]}
        copies = [t.clone() if torch.is_tensor(t) else t for t in operands]
        by_place = of_call(run, operands, *given.values())
        by_name = of_call(run, copies, **given)
        taken += by_place is not None
        assert by_place is None or torch.equal(by_place, by_name), given
    assert taken > 0


def test_arguments_of_other_versions(package, qkv, caches):
    """What changes nothing is taken, by any of their names; what is none is told."""
    nothing = {
        "pack_gqa": True,
        "sm_margin": 8,
        "attention_chunk": 0,
        "qv": None,
        "q_descale": None,
    }
    close(package.flash_attn_func(*qkv, **nothing, dropout_p=0), exact(*qkv))
    got = package.flash_attn_with_kvcache(
        *caches, **nothing, scheduler_metadata=torch.zeros(4), rotary_seqlens=None
    )
    close(got, exact(*caches))
    with pytest.raises(TypeError, match="flash_attn_func has no argument casual; help"):
        package.flash_attn_func(*qkv, casual=True)
    with pytest.raises(TypeError, match=r"by position, got 9: .* give arguments .* by name"):
        package.flash_attn_func(*qkv, None, False, None, None, None, None)


def test_ragged_queries_of_a_cache(package, caches):
    """As SGLang asks: queries of all sequences one after the other, keys in pages."""
    _, k, v = caches
    q, ends = random(5, H, D), torch.tensor([0, 4, 5], dtype=torch.int32)
    pages = [states.view(4, 16, KV, D) for states in (k, v)]
    got, lse = package.flash_attn_with_kvcache(
        q, *pages, cache_seqlens=torch.tensor([9, 5]), page_table=torch.tensor([[0, 1], [2, 3]]),
        cu_seqlens_q=ends, cu_seqlens_k_new=ends, max_seqlen_q=4, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    for i, (rows, count) in enumerate(((slice(0, 4), 9), (slice(4, 5), 5))):
        one = q[None, rows], k[i : i + 1, :count], v[i : i + 1, :count]
        close(got[None, rows], exact(*one, causal=True))
    assert lse.shape == (H, 5)
    plain = package.flash_attn_with_kvcache(q, k, v, cache_seqlens=7, cu_seqlens_q=ends)
    for i, rows in enumerate((slice(0, 4), slice(4, 5))):
        close(plain[None, rows], exact(q[None, rows], k[i : i + 1, :7], v[i : i + 1, :7]))
    with pytest.raises(ValueError, match="cu_seqlens_q is for calls without new keys"):
        package.flash_attn_with_kvcache(q, k, v, k, v, cache_seqlens=7, cu_seqlens_q=ends)


@pytest.mark.parametrize("kind", ["packed", "transposed", "every second", "expanded"])
def test_views(package, qkv, kind):
    q, k, v = qkv
    if kind == "packed":
        q, k, v = random(B, S, 3, H, D).unbind(2)
    elif kind == "transposed":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in qkv)
    elif kind == "every second":
        q = random(B, S, H, 2 * D)[..., ::2]
    else:
        k, v = (t[:1, :, :1].expand(B, -1, H, -1) for t in (k, v))
    close(package.flash_attn_func(q, k, v, causal=True), exact(q, k, v, causal=True))


LENGTHS = {
    "a number": 9, "int64": torch.tensor([9, 5]), "int32": torch.tensor([9, 5], dtype=torch.int32),
    "no dimension": torch.tensor(9), "every second": torch.tensor([9, 0, 5, 0])[::2],
    "none of one": torch.tensor([0, 5]),
}  # fmt: skip


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("table", [None, torch.int32, torch.int64, "by index"])
def test_lengths_and_tables(package, caches, lengths, table):
    q, k, v = caches
    counts = torch.as_tensor(LENGTHS[lengths]).expand(B).tolist()
    options = {}
    if table == "by index":
        options["cache_batch_idx"] = order = torch.tensor([1, 0])
        read = k[order], v[order]
    elif table is not None:
        order = torch.tensor([[2, 1], [0, 3]])
        options["block_table"] = order.to(table)
        k, v = (states.view(4, 16, KV, D) for states in (k, v))
        read = [states[order].flatten(1, 2) for states in (k, v)]
    else:
        read = k, v
    got = package.flash_attn_with_kvcache(q, k, v, cache_seqlens=LENGTHS[lengths], **options)
    for i, count in enumerate(counts):
        close(got[i : i + 1], exact(q[i : i + 1], *(t[i : i + 1, :count] for t in read)))


def test_new_keys_by_index(package, caches):
    q, k, v = caches
    new = random(B, 1, KV, D), random(B, 1, KV, D)
    order, lengths = torch.tensor([1, 0]), torch.tensor([9, 5])
    expected = k.clone(), v.clone()
    for states, rows in zip(expected, new, strict=True):
        states[order, lengths] = rows[:, 0]
    got = package.flash_attn_with_kvcache(
        q, k, v, *new, cache_seqlens=lengths, cache_batch_idx=order
    )
    assert torch.equal(k, expected[0]) and torch.equal(v, expected[1])
    for i, (row, count) in enumerate(((1, 10), (0, 6))):
        close(
            got[i : i + 1], exact(q[i : i + 1], k[row : row + 1, :count], v[row : row + 1, :count])
        )


NO_INTEGERS = {
    "a list": ({"cache_seqlens": [9, 5]}, TypeError, "cache_seqlens must be .* got list"),
    "floats": ({"cache_seqlens": torch.rand(2)}, TypeError, "cache_seqlens must be .*float32"),
    "pages": ({"block_table": [[0]]}, TypeError, "block_table must be .* got list"),
    "negative": ({"cache_seqlens": -1}, ValueError, "cache_seqlens must be 0 to the 32 rows"),
    "too many": ({"cache_seqlens": 33}, ValueError, "cache_seqlens must be 0 to the 32 rows"),
    "both": (
        {"cache_batch_idx": torch.tensor([0, 1]), "block_table": torch.tensor([[0], [1]])},
        ValueError, "cache_batch_idx is for a cache without block_table",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", NO_INTEGERS)
def test_integers_that_are_none(package, caches, case):
    options, error, words = NO_INTEGERS[case]
    with pytest.raises(error, match=words):
        package.flash_attn_with_kvcache(*caches, **options)


@pytest.mark.parametrize("rows", [1, 3, 40])
@pytest.mark.parametrize("page", [-1, 4, 100, 2**31 - 1])
def test_a_page_that_is_none(package, page, rows):
    """On the CPU, where it can be asked: it was read, out of memory. What no query sees may be
    anything."""
    q, pages = random(2, rows, H, D), random(4, 16, KV, D)
    table = torch.tensor([[0, 1, 2], [3, page, 1]])
    lengths = torch.tensor([48, 17])
    words = "block_table must name pages that k and v have for all keys that queries see"
    with pytest.raises(RuntimeError, match=words):
        package.flash_attn_with_kvcache(q, pages, pages, cache_seqlens=lengths, block_table=table)
    lengths = torch.tensor([48, 16])
    valid = table.clamp(0, 3)
    for options in ({}, {"causal": True}, {"window_size": (3, 0)}):
        got, expected = (
            package.flash_attn_with_kvcache(
                q, pages, pages, cache_seqlens=lengths, block_table=each, **options
            )
            for each in (table, valid)
        )
        assert torch.equal(got, expected)
    if rows < 16:  # behind a window, too
        table[1] = torch.tensor([page, 2, 1])
        lengths = torch.tensor([48, 44])
        options = {"cache_seqlens": lengths, "window_size": (8, 0)}
        got, expected = (
            package.flash_attn_with_kvcache(q, pages, pages, block_table=each, **options)
            for each in (table, table.clamp(0, 3))
        )
        assert torch.equal(got, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_no_new_keys(package, caches, dtype, turned, causal):
    """k and v of no rows: a server's step of nothing. The queries turn all the same."""
    q, k, v = caches[0].expand(B, 3, H, D), *(states.to(dtype) for states in caches[1:])
    options = {"cache_seqlens": torch.tensor([9, 5]), "causal": causal}
    before = k.clone()
    new, turn = torch.empty(B, 0, KV, D).bfloat16(), {}
    if turned:
        turn = {f"rotary_{name}": torch.rand(L + 3, D // 2) for name in ("cos", "sin")}
    got = package.flash_attn_with_kvcache(q, k, v, new, new, **options, **turn)
    if turned:
        places = options["cache_seqlens"][:, None] + torch.arange(3) * causal
        cos, sin = (table[places] for table in turn.values())
        q = package.reference.rope_and_cache(
            q, cos=torch.cat([cos, cos], -1), sin=torch.cat([sin, sin], -1), interleaved=True
        )
    expected = package.flash_attn_with_kvcache(q, k, v, **options)
    close(got, expected.double())
    assert torch.equal(k.view(torch.uint8), before.view(torch.uint8))
