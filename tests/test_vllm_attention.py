"""The vLLM plugin's attention on stand-ins for the classes of vLLM that it derives from: its
numbers against the definition, from pages that it wrote itself. With vLLM itself:
tests/test_vllm.py."""

import importlib
import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from project import ROOT

FP8 = torch.float8_e4m3fn
NOWHERE = 2**30  # a page number
MOST = {torch.float16: 2**-11, torch.bfloat16: 2**-8}  # as in tests/test_attention.py


def reshape_and_cache_flash(
    key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale
):
    """vLLM's op: slots below 0 are nobody's, and key and value may have padding behind them."""
    size, fp8 = key_cache.shape[1], kv_cache_dtype.startswith("fp8")
    for row, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        for new, cache, scale in ((key, key_cache, k_scale), (value, value_cache, v_scale)):
            new = (new[row].float() / scale).to(FP8).view(torch.uint8) if fp8 else new[row]
            cache[slot // size, slot % size] = new


def split_decodes_and_prefills(batch, decode_threshold):
    lengths = batch.query_start_loc.diff()
    decodes = int((lengths <= decode_threshold).sum())
    rows = int(batch.query_start_loc[decodes])
    return decodes, len(lengths) - decodes, rows, int(batch.query_start_loc[-1]) - rows


class Builder:
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.vllm_config = vllm_config

    def __class_getitem__(cls, _):
        return cls

    def _init_reorder_batch_threshold(self, threshold, supports_spec_as_decode):
        assert supports_spec_as_decode
        self.reorder_batch_threshold = threshold + self.vllm_config.drafts


class Registry:
    class AttentionBackendEnum(Enum):
        CUSTOM = None

        def is_overridden(self):
            return self in Registry.paths

        def get_path(self):
            return Registry.paths[self]

    paths: ClassVar = {}

    @staticmethod
    def register_backend(member, path):
        Registry.paths[member] = path


@pytest.fixture
def attention(package, monkeypatch):
    """The plugin's module of this name, on the package's CPU build."""

    def module(name, **contents):
        found = ModuleType(name)
        vars(found).update(contents)
        monkeypatch.setitem(sys.modules, name, found)
        return found

    Registry.paths = {}
    platform = SimpleNamespace(
        is_cuda_alike=lambda: True, is_cuda=lambda: False, fp8_dtype=lambda: FP8
    )
    operations = module("vllm._custom_ops", reshape_and_cache_flash=reshape_and_cache_flash)
    module("vllm", _custom_ops=operations)
    module("vllm.platforms", current_platform=platform)
    module(
        "vllm.v1.attention.backend",
        AttentionBackend=object,
        AttentionCGSupport=SimpleNamespace(UNIFORM_BATCH="uniform"),
        AttentionImpl=type("Impl", (), {"__class_getitem__": classmethod(lambda cls, _: cls)}),
        AttentionMetadataBuilder=Builder,
        AttentionType=SimpleNamespace(DECODER="decoder"),
    )
    registry = module("vllm.v1.attention.backends.registry", **vars(Registry))
    module("vllm.v1.attention.backends", registry=registry)
    module(
        "vllm.v1.attention.backends.utils", split_decodes_and_prefills=split_decodes_and_prefills
    )
    monkeypatch.syspath_prepend(str(ROOT / "integrations" / "vllm"))
    monkeypatch.delitem(sys.modules, "rocm_kernels_vllm.attention", raising=False)
    kernels = importlib.import_module("rocm_kernels_vllm.kernels")
    monkeypatch.setattr(kernels, "package", lambda: package)
    monkeypatch.setattr(kernels, "why_not", lambda: "")
    yield importlib.import_module("rocm_kernels_vllm.attention")
    sys.modules.pop("rocm_kernels_vllm.attention")


class Served:
    """Sequences, of which ``before`` keys are in the cache and ``new`` queries come, in a batch
    with vLLM's padding behind it."""

    def __init__(
        self, attention, new, before, page=16, heads=(8, 2), size=64, dtype=torch.bfloat16,
        cache="auto", rows_first=True, drafts=0, **options,
    ):  # fmt: skip
        self.attention, self.new, self.before, self.drafts = attention, new, before, drafts
        self.heads, self.size, self.dtype, self.cache, self.page = heads, size, dtype, cache, page
        self.layer = SimpleNamespace(_k_scale=torch.tensor(0.03), _v_scale=torch.tensor(0.02))
        options = {"sliding_window": None, "logits_soft_cap": None, "sinks": None} | options
        self.options = options
        self.impl = attention.RocmKernelsAttentionImpl(
            heads[0], size, 0.11, heads[1], None, options["sliding_window"], cache,
            options["logits_soft_cap"], sinks=options["sinks"],
        )  # fmt: skip
        counts = [a + b for a, b in zip(new, before, strict=True)]
        pages = [-(-count // page) for count in counts]
        order = torch.randperm(sum(pages) + 2)[: sum(pages)].split(pages)
        self.table = torch.full((len(new), max(pages) + 1), NOWHERE, dtype=torch.int32)
        for row, own in zip(self.table, order, strict=True):
            row[: len(own)] = own
        shape = attention.RocmKernelsAttention.get_kv_cache_shape(
            sum(pages) + 2, page, heads[1], size
        )
        if rows_first:  # vLLM's layouts NHD and HND
            self.pages = self.poison(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)
        else:
            self.pages = self.poison(*shape)
        self.q = torch.randn(sum(new), heads[0], size).to(dtype)
        self.k = [2 * torch.randn(count, heads[1], size).to(dtype) for count in counts]
        self.v = [torch.randn(count, heads[1], size).to(dtype) for count in counts]

    def poison(self, *shape):
        if self.cache.startswith("fp8"):
            return torch.full(shape, 0x7F, dtype=torch.uint8)  # NaN; vLLM's FP8 pages are bytes
        return torch.full(shape, torch.nan, dtype=self.dtype)

    def slots(self, sequence, positions):
        pages = self.table[sequence].long()
        return pages[positions // self.page] * self.page + positions % self.page

    def write(self, begins, ends):
        """Keys and values of each sequence from one position to another, in one call, with rows of
        padding behind."""
        keys, values, slots = [], [], []
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            keys.append(self.k[i][begin:end])
            values.append(self.v[i][begin:end])
            slots.append(self.slots(i, torch.arange(begin, end)))
        padding = torch.full((3, self.heads[1], self.size), torch.nan, dtype=self.dtype)
        self.impl.do_kv_cache_update(
            self.layer, torch.cat([*keys, padding]), torch.cat([*values, padding]), self.pages,
            torch.cat([*slots, torch.tensor([-1])]),
        )  # fmt: skip

    def metadata(self, **changes):
        start = torch.tensor([0, *torch.tensor(self.new).cumsum(0)], dtype=torch.int32)
        lengths = torch.tensor([len(keys) for keys in self.k], dtype=torch.int32)
        batch = SimpleNamespace(
            query_start_loc=start, seq_lens=lengths, block_table_tensor=self.table, causal=True,
            max_query_len=max(self.new), max_seq_len=10**6, **changes,
        )  # fmt: skip
        config = SimpleNamespace(drafts=self.drafts)
        return self.attention.MetadataBuilder(None, [], config, "cpu").build(0, batch)

    def run(self):
        self.write([0] * len(self.new), self.before)
        self.write(self.before, [len(keys) for keys in self.k])
        padding = torch.full((5, *self.q.shape[1:]), torch.nan, dtype=self.dtype)
        out = torch.full((len(self.q) + 5, *self.q.shape[1:]), 7.0, dtype=self.dtype)
        result = self.impl.forward(
            self.layer, torch.cat([self.q, padding]), None, None, self.pages, self.metadata(), out
        )
        assert result is out and (out[len(self.q) :] == 7).all()
        return out[: len(self.q)]

    def expected(self, reference):
        fp8 = self.cache.startswith("fp8")
        window, begin, outs = self.options["sliding_window"], 0, []
        for count, keys, values in zip(self.new, self.k, self.v, strict=True):
            if fp8:
                k_scale, v_scale = self.layer._k_scale, self.layer._v_scale
                keys = (keys.float() / k_scale).to(FP8).double() * k_scale.double()
                values = (values.float() / v_scale).to(FP8).double() * v_scale.double()
            sinks = self.options["sinks"]
            out, _ = reference.attention(
                self.q[begin : begin + count].double(), keys.double(), values.double(), 0.11, True,
                (-1 if window is None else window - 1, -1), self.options["logits_soft_cap"] or 0.0,
                None if sinks is None else sinks.double(),
            )  # fmt: skip
            outs.append(out)
            begin += count
        return torch.cat(outs)

    def check(self, reference):
        expected = self.expected(reference)
        error = (self.run().double() - expected).norm() / expected.norm()
        assert error < MOST[self.dtype], f"off by {error:.2e} of the norm"


BATCHES = {
    "one decodes": ([1], [70]),
    "all decode": ([1, 1, 1], [300, 0, 16]),
    "prompts": ([40, 1, 130], [0, 0, 0]),
    "both": ([1, 1, 50, 33], [90, 5, 0, 64]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e4m3"])
def test_batches(attention, package, batch, cache):
    Served(attention, *BATCHES[batch], cache=cache).check(package.reference)


@pytest.mark.parametrize("size", [64, 80, 128, 256])
@pytest.mark.parametrize("rows_first", [True, False], ids=["NHD", "HND"])
@pytest.mark.parametrize("page", [16, 7, 1])
def test_pages(attention, package, page, rows_first, size):
    Served(
        attention, [1, 1, 20], [40, 3, 9], page=page, size=size, rows_first=rows_first,
        dtype=torch.float16,
    ).check(package.reference)  # fmt: skip


@pytest.mark.parametrize("new", [[4, 4, 4], [1, 4, 3], [2, 4, 60, 5]])
def test_drafts_are_verified(attention, package, new):
    """Up to ``1 + drafts`` queries of a sequence are a decoding step's, and share one launch."""
    served = Served(attention, new, [50, 7, 0, 3][: len(new)], drafts=3)
    served.check(package.reference)
    parts = served.metadata().parts
    assert [part.max_seqlen_q for part in parts] == ([4] if max(new) <= 4 else [4, 60])


@pytest.mark.parametrize(
    "options",
    [
        {"sliding_window": 24},
        {"logits_soft_cap": 5.0},
        {"sinks": torch.tensor([-1.0, 0.5, 2.0, 0.0, 1.0, -3.0, 4.0, 0.1])},
        {"sliding_window": 9, "logits_soft_cap": 3.0, "cache": "fp8"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_windows_caps_and_sinks(attention, package, options):
    Served(attention, [1, 3, 30], [80, 8, 20], drafts=2, **options).check(package.reference)


def test_a_graph_on_nvidia_takes_the_config_of_usual_lengths(attention, package, monkeypatch):
    """What vLLM records has the model's longest sequence for a bound."""
    asked = []
    named = package.flash_attn_varlen_func
    recording = SimpleNamespace(
        flash_attn_varlen_func=lambda *operands, usual_seqlen_k, **options: (
            asked.append(usual_seqlen_k)
            or named(*operands, usual_seqlen_k=usual_seqlen_k and 7, **options)
        )
    )
    monkeypatch.setattr(attention.kernels, "package", lambda: recording)
    served = Served(attention, [1, 1], [90, 5])
    served.check(package.reference)
    monkeypatch.setattr(attention.current_platform, "is_cuda", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    served.check(package.reference)
    assert asked == [None, attention.USUAL_SEQLEN_K]


def test_pages_that_vllm_lays_anew_are_seen(attention, package):
    served = Served(attention, [1, 5], [30, 2])
    served.check(package.reference)
    served.pages = torch.full_like(served.pages, torch.nan)
    served.check(package.reference)


def test_a_step_that_is_only_measured_computes_nothing(attention):
    served = Served(attention, [1], [3])
    out = served.impl.forward(
        served.layer, served.q, None, None, torch.empty(0), None, served.q + 1
    )
    assert (out == 0).all()


def test_what_is_not_served_is_refused(attention, monkeypatch):
    """By what vLLM asks a backend before it starts, or with a sentence."""
    backend, impl = attention.RocmKernelsAttention, attention.RocmKernelsAttentionImpl
    assert [s for s in (4, 64, 80, 100, 128, 512, 520) if backend.supports_head_size(s)] == [
        64, 80, 128, 512,
    ]  # fmt: skip
    assert "fp8_e5m2" not in backend.supported_kv_cache_dtypes

    def combination(cache):
        return backend.supports_combination(
            64, torch.bfloat16, cache, 16, False, False, False, False, None
        )

    assert combination("fp8") is combination("auto") is combination("bfloat16") is None
    assert "must have the dtype of queries" in combination("float16")
    monkeypatch.setattr(attention.kernels, "why_not", lambda: "no build for this torch")
    assert "no kernels here (no build for this torch)" in combination("auto")
    with pytest.raises(NotImplementedError, match="takes no alibi_slopes"):
        impl(8, 64, 0.1, 8, alibi_slopes=[1.0] * 8)
    with pytest.raises(NotImplementedError, match="is a decoder's, got encoder"):
        impl(8, 64, 0.1, 8, attn_type="encoder")
    served = Served(attention, [1], [3])
    with pytest.raises(NotImplementedError, match="no quantised results"):
        served.impl.forward(
            served.layer, served.q, None, None, served.pages, None, served.q, torch.ones(1)
        )
    batch = SimpleNamespace(causal=False)
    with pytest.raises(NotImplementedError, match="is causal"):
        attention.MetadataBuilder(None, [], SimpleNamespace(drafts=0), "cpu").build(0, batch)


def test_it_takes_vllms_place_for_others_once(attention):
    assert attention.attention() and attention.attention()
    member = Registry.AttentionBackendEnum.CUSTOM
    assert Registry.paths == {member: "rocm_kernels_vllm.attention.RocmKernelsAttention"}
    Registry.paths[member] = "another.Backend"
    with pytest.raises(attention.HookMoved, match=r"CUSTOM is another\.Backend already"):
        attention.attention()
    attention.current_platform.is_cuda_alike = lambda: False
    assert not attention.attention()
