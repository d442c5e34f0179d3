"""Which configs attention has for a call: each gives the definition's result, the first is what
runs, and another text is refused. On every backend of --device; what each design does with long
sequences is in test_attention_amd.py and test_attention_cuda.py."""

import subprocess
import sys

import pytest
import torch
from project import ROOT
from test_attention import FP8, Case

pytestmark = pytest.mark.not_on("reference")

# A decode step of shared heads in pages, several queries of one sequence, a short prompt, FP8, and
# what the plain design alone serves on GPUs.
CALLS = {
    "step": {"lengths": [190, 60], "heads": (12, 1), "page": 16},
    "queries": {"lengths": [40, 33], "rows": 8, "heads": (4, 1), "causal": True},
    "fp8 step": {"lengths": [70, 9], "heads": (2, 1), "kv_dtype": FP8},
    "prompt": {"lengths": [90], "rows": 70, "heads": (2, 1), "causal": True},
    "odd heads": {"lengths": [9, 3], "size": 33},
}


@pytest.fixture
def run(backend, monkeypatch):
    """``run(case, config)``: out and lse by the op with that config; empty: by the choice."""
    module = sys.modules[backend.ops.flash_attn_func.__module__]
    native = module._attention

    def run(case, config):
        monkeypatch.setattr(module, "_attention", lambda *a: native(*a[:-1], config))
        torch.manual_seed(0)  # one order of pages, wherever they lie
        return case.run()

    return run


def case_of(backend, call):
    given = dict(CALLS[call])
    if "kv_dtype" in given:
        given["kv_dtype"] = backend.fp8_dtype
    return Case(backend, **given)


def listed(backend, case):
    """As asked with the tensors of the case."""
    to, pages = case.on_device, None
    k, v = case.k, case.v
    if case.page is not None:
        pages = torch.zeros(case.batch, -(-case.most // case.page), dtype=torch.int32)
        k, v = (t[:1, :1].expand(9, case.page, -1, -1).contiguous() for t in (k, v))
    return backend.ops.attention_configs(
        to(case.q), to(k), to(v), causal=case.options.get("causal", False), block_table=to(pages)
    )


@pytest.mark.parametrize("call", CALLS)
def test_each_config_is_right(backend, run, call):
    case = case_of(backend, call)
    configs = listed(backend, case)
    assert len({*configs}) == len(configs)
    designs = {config.split()[0] for config in configs}
    if backend.name == "cpu":
        assert len(configs) == 1 and designs <= {"portable", "neon", "avx2", "avx512"}
    elif call == "odd heads":
        assert designs == {"plain"}
    else:
        # Of a prompt's rows decode would read the keys again and again, where prefill serves them.
        assert "plain" in designs and ("decode" in designs or call == "prompt")
        assert len(designs) > 1 and (len(configs) > 9 or backend.name != "simulator")
    for config in configs:
        case.check(*run(case, config))


@pytest.mark.parametrize("call", CALLS)
def test_what_is_told_is_what_runs(backend, run, call):
    """By the bits of float32 sums, which differ from config to config where keys are many."""
    case = case_of(backend, call)
    configs = listed(backend, case)
    device = [case.on_device(t) for t in (case.q, case.k, case.v)]
    if case.page is None:
        causal = case.options.get("causal", False)
        assert backend.ops.attention_config(*device, causal=causal) == configs[0]
    chosen = run(case, "")
    assert all(map(torch.equal, chosen, run(case, configs[0])))
    if call == "step" and len(configs) > 1:
        others = [run(case, config) for config in configs[1::7]]
        assert any(not torch.equal(chosen[1], lse) for _, lse in others)


@pytest.mark.parametrize("config", ["nonsense", "plain", "decode rows=16", " "])
def test_another_text_is_refused(backend, run, config):
    case = case_of(backend, "step")
    with pytest.raises(RuntimeError, match=r"config: .*attention_configs tells") as refused:
        run(case, config)
    assert f"got '{config}'" in str(refused.value)


def test_ragged_sequences_and_pages(backend):
    """Are asked about with the arguments of flash_attn_varlen_func."""
    to = lambda t: t.to(backend.device)  # noqa: E731
    q, k, v = (to(torch.randn(30, heads, 64).bfloat16()) for heads in (4, 2, 2))
    ends = to(torch.tensor([0, 10, 30], dtype=torch.int32))
    asked = backend.ops.attention_config
    of_rows = asked(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=20, max_seqlen_k=20)
    pages = to(torch.zeros(2, 2, dtype=torch.int32))
    cache = to(torch.randn(4, 10, 2, 64).bfloat16())  # with room for as many keys
    in_pages = asked(
        q, cache, cache, cu_seqlens_q=ends, cu_seqlens_k=ends, max_seqlen_q=20, block_table=pages
    )
    assert of_rows.split()[0] == in_pages.split()[0]
    assert asked(q[:0], k, v, cu_seqlens_q=ends[:1] * 0, cu_seqlens_k=ends[:1] * 0)


def test_usual_lengths_choose_the_config_of_longer_ones(backend, monkeypatch):
    """The result stays the definition's, of sequences below and above them."""
    module = sys.modules[backend.ops.flash_attn_func.__module__]
    native, taken = module._attention, []
    monkeypatch.setattr(module, "_attention", lambda *a: taken.append(a[-1]) or native(*a))
    lengths, page, bound = [300, 20, 90], 16, 4096
    own = torch.randperm(100)[:96].int().view(3, 32)
    table = torch.cat([own, torch.full((3, bound // page - 32), 2**30, dtype=torch.int32)], 1)
    to = lambda t: t.to(backend.device)  # noqa: E731
    q, k, v = to(torch.randn(3, 8, 64).bfloat16()), *to(torch.randn(2, 100, page, 2, 64).bfloat16())
    cu, used = to(torch.arange(4).int()), to(torch.tensor(lengths).int())
    call = {"max_seqlen_q": 1, "max_seqlen_k": bound, "causal": True, "block_table": to(table)}
    run = backend.ops.flash_attn_varlen_func
    out, plain = (
        run(q, k, v, cu, seqused_k=used, usual_seqlen_k=usual, **call).cpu().float()
        for usual in (64, None)
    )
    asked = backend.ops.attention_config(q, k, v, cu_seqlens_q=cu, **{**call, "max_seqlen_k": 64})
    assert taken == [asked, ""]
    for row, pages, length in zip(range(3), table, lengths, strict=True):
        keys, values = (
            t.cpu().double()[pages[: -(-length // page)].long()].flatten(0, 1)[:length]
            for t in (k, v)
        )
        for head in range(8):
            weights = (keys[:, head // 4] @ q[row, head].cpu().double() / 8).softmax(0)
            exact = (weights @ values[:, head // 4]).float()
            assert (out[row, head] - exact).abs().max() < 2**-7
            assert (plain[row, head] - exact).abs().max() < 2**-7


def test_a_call_that_is_wrong_is_refused_in_the_words_of_attention(package):
    q, k, v = (torch.randn(1, 5, heads, 64).bfloat16() for heads in (4, 3, 3))
    with pytest.raises(RuntimeError, match="heads of q must be a multiple of those of k"):
        package.attention_config(q, k, v)


def test_a_choice_is_kept_by_all_that_it_depends_on(tmp_path):
    """By a program of the host, which asks both GPU backends for calls that differ in one thing."""
    program = tmp_path / "kept"
    source = ROOT / "tests/launches/kept_choices.cpp"
    command = ["g++", "-std=c++17", "-O1", f"-I{ROOT}", source, "-o", program]
    subprocess.run(command, check=True)
    done = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert done == "calls 200000, stale 0\n"
