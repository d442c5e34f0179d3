"""transformers' attention on this package's: tiny models against their own eager attention."""

import contextlib
import copy
import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from tiny_attention import FAMILIES, assert_same_logits, prompt, tiny
from tiny_models import randomized, tokens
from transformers import ContinuousBatchingConfig, GenerationConfig, StaticCache


@pytest.fixture
def package(package):
    """On the CPU, whose attention takes float32, so that little stands between it and eager's."""
    package.models.use_attention()
    package.models.attention._DELEGATED.clear()
    return package


@pytest.mark.parametrize("padding", [(0, 0, 0), (0, 4, 1)])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_eagers(package, family, padding):
    eager, ours = tiny(family)
    given = prompt(padding=padding)
    with torch.no_grad():
        assert_same_logits(ours(**given).logits, eager(**given).logits, given["attention_mask"])
    assert package.models.delegated_attention() == {}


WAYS = {
    "greedy": {},
    "static": {"cache_implementation": "static"},
    "beams": {"num_beams": 3},
    "static beams": {"num_beams": 2, "cache_implementation": "static"},
    "chunks": {"prefill_chunk_size": 5},
    "prompt lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("family", FAMILIES)
def test_generates_what_eager_does(package, family, way):
    eager, ours = tiny(family)
    alone = "prompt lookup" in way
    given = prompt(1, 12, (0,)) if alone else prompt()
    options = {"max_new_tokens": 12, "do_sample": False, **WAYS[way]}
    expected = eager.generate(**given, **options)
    assert torch.equal(ours.generate(**given, **options), expected)
    assert package.models.delegated_attention() == {}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_are_as_near_as_eager(package, dtype):
    eager, ours = tiny("Mistral")
    given = prompt()
    with torch.no_grad():
        exact = eager(**given).logits
        errors = [
            (model.to(dtype)(**given).logits.float() - exact)[given["attention_mask"].bool()].norm()
            for model in (eager, ours)
        ]
    assert errors[1] <= 1.5 * errors[0]


def test_the_kernel_computes_it(package, monkeypatch):
    """Or every comparison here would be one of transformers with itself."""
    calls = []
    theirs = package.models.attention.flash_attn_with_kvcache

    def counted(q, *args, **options):
        calls.append((q.shape[1], options["cache_leftpad"] is not None))
        return theirs(q, *args, **options)

    monkeypatch.setattr(package.models.attention, "flash_attn_with_kvcache", counted)
    _, ours = tiny("Llama")
    ours.generate(**prompt(), max_new_tokens=3)
    assert calls == [(12, True)] * 2 + [(1, True)] * 4  # two layers
    calls.clear()
    ours.generate(**prompt(padding=(0, 0, 0)), max_new_tokens=2, cache_implementation="static")
    assert calls == [(12, False)] * 2 + [(1, False)] * 2


def test_assisted_decoding_says_what_eager_does(package):
    eager, ours = tiny("Mistral")
    _, draft = tiny("Mistral", num_hidden_layers=1)
    given = prompt(1, 12, (0,))
    expected = eager.generate(**given, max_new_tokens=12, do_sample=False)
    got = ours.generate(**given, max_new_tokens=12, do_sample=False, assistant_model=draft)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("way", [{}, {"cache_implementation": "static"}])
def test_a_conversation_goes_on_in_its_cache(package, way):
    """A second prompt behind keys that are there: more than one query, and keys before them."""
    eager, ours = tiny("Gemma2")
    given = prompt()
    said = []
    for model in (eager, ours):
        first = model.generate(**given, max_new_tokens=5, return_dict_in_generate=True, **way)
        more = torch.cat([first.sequences, given["input_ids"][:, -3:]], 1)
        mask = torch.cat([given["attention_mask"], torch.ones(3, 8, dtype=torch.int64)], 1)
        cache = {} if way else {"past_key_values": first.past_key_values}
        said.append(model.generate(more, attention_mask=mask, max_new_tokens=5, **cache, **way))
    assert torch.equal(*said)


@pytest.mark.parametrize("family, in_fp8", [("Mistral", False), ("GptOss", True)])
def test_a_decode_step_is_one_graph(package, family, in_fp8):
    """Whole, with a static cache whose length the step asks of nobody."""
    eager, ours = tiny(family)
    eager = ours if in_fp8 else eager
    given = prompt()
    step = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    logits = []
    for model, call in ((eager, eager.forward), (ours, step)):
        if in_fp8:
            cache = package.models.fp8_static_cache(model, max_cache_len=20)
        else:
            cache = StaticCache(config=model.config, max_cache_len=20)
        mask = given["attention_mask"]
        with torch.no_grad():
            model(**given, past_key_values=cache)
            for token in range(3):
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
                made = model.prepare_inputs_for_generation(
                    torch.full((3, 1), 7 + token), attention_mask=mask, past_key_values=cache,
                    position_ids=(mask.sum(-1) - 1)[:, None], is_first_iteration=False,
                    next_sequence_length=1,
                )  # fmt: skip
                logits.append(call(**made).logits)
    for expected, got in zip(logits[:3], logits[3:], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_a_whole_call_is_one_graph(package):
    """With the making of the mask, where no code may look at values."""
    eager, ours = tiny("Mistral")
    given = prompt()
    with torch.no_grad():
        got = torch.compile(ours, fullgraph=True, backend="aot_eager")(**given, use_cache=False)
        expected = eager(**given, use_cache=False)
    assert_same_logits(got.logits, expected.logits, given["attention_mask"])


def test_what_is_compiled_asks_no_stream(package, monkeypatch):
    """On a GPU machine: torch.compile cannot trace that question."""
    asked = []
    cuda = SimpleNamespace(
        is_available=lambda: True, is_current_stream_capturing=lambda: asked.append(1)
    )
    attention = package.models.attention
    monkeypatch.setattr(attention, "torch", SimpleNamespace(compiler=torch.compiler, cuda=cuda))
    torch.compile(lambda x: x + bool(attention._is_recorded()), fullgraph=True, backend="eager")(
        torch.ones(1)
    )
    assert asked == []
    attention._is_recorded()
    assert asked == [1]


def test_right_padding_and_no_cache(package):
    eager, ours = tiny("Mistral")
    given = prompt()
    given = {name: value.flip(-1) for name, value in given.items()}
    with torch.no_grad():
        assert_same_logits(ours(**given).logits, eager(**given).logits, given["attention_mask"])
    assert package.models.delegated_attention() == {}


@pytest.mark.parametrize("way", [{}, {"cache_implementation": "static"}, {"num_beams": 2}])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_behind_right_padding_is_eagers(package, family, way):
    """It begins with what a token of padding says, which sees none of the padding before it."""
    eager, ours = tiny(family)
    given = {name: value.flip(-1) for name, value in prompt().items()}
    options = {"max_new_tokens": 6, "do_sample": False, **way}
    assert torch.equal(ours.generate(**given, **options), eager.generate(**given, **options))
    with torch.no_grad():
        last = [model(**given).logits[:, -1:] for model in (ours, eager)]
    assert_same_logits(*last, torch.ones(3, 1))


ELSEWHERE = {
    "holes": "the mask is more than a window and padding at its ends",
    "mask of its own": "the mask is more than a window and padding at its ends",
    "gradient": "a gradient is wanted",
    "probabilities": "probabilities are asked for",
    "dropout": "dropout",
}


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GptOss"])
@pytest.mark.parametrize("case", ELSEWHERE)
def test_what_goes_elsewhere_is_right_and_said(package, family, case):
    eager, ours = tiny(family)
    given = prompt()
    context = torch.no_grad()
    if case == "holes":
        given["attention_mask"][:, 6] = 0
    if case == "mask of its own":
        del given["attention_mask"]
        seen = (torch.rand(3, 1, 12, 12) < 0.6) | torch.eye(12, dtype=torch.bool)
        seen = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
        kinds = getattr(eager.config, "layer_types", None)
        given["attention_mask"] = dict.fromkeys(kinds, seen) if kinds else seen
    if case == "gradient":
        context = torch.enable_grad()
    if case == "probabilities":
        given["output_attentions"] = True
    if case == "dropout":
        for model in (eager, ours):
            model.train()
            for module in model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.5
    results = []
    for model in (eager, ours):
        torch.manual_seed(3)
        with context:
            results.append(model(**given))
    if case != "dropout" or family != "Llama":  # SDPA drops others
        mask = prompt()["attention_mask"] * 0 + 1
        if torch.is_tensor(given.get("attention_mask")) and given["attention_mask"].dim() == 2:
            mask = given["attention_mask"]
        assert_same_logits(results[1].logits, results[0].logits, mask)
    if case == "gradient":
        seen = given["attention_mask"].bool()
        for result in results:
            result.logits[seen].square().sum().backward()
        for one, other in zip(eager.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-3, atol=1e-3)
    if case == "probabilities":
        assert len(results[1].attentions) == 2
    name = {"GptOss": "GptOssAttention"}.get(family, f"{family}Attention")
    assert package.models.delegated_attention() == {name: ELSEWHERE[case]}


def test_a_dtype_of_no_kernel_goes_elsewhere(package):
    eager, ours = tiny("Gemma2", torch.float64)
    given = prompt(padding=(0, 0, 0))  # eager's least score is no float32
    with torch.no_grad():
        assert_same_logits(ours(**given).logits, eager(**given).logits, given["attention_mask"])
    said = {"Gemma2Attention": "queries are torch.float64"}
    assert package.models.delegated_attention() == said


def encoder(name):
    module = importlib.import_module("transformers")
    common = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
              "num_hidden_layers": 2, "vocab_size": 160}  # fmt: skip
    if name == "Bert":
        model = module.BertModel(module.BertConfig(**common))
    else:
        model = module.ModernBertModel(
            module.ModernBertConfig(
                **common, pad_token_id=0, local_attention=6, global_attn_every_n_layers=2
            )
        )
    return randomized(model)


@pytest.mark.parametrize("is_causal", [True, False])
def test_rows_without_a_mask(package, is_causal):
    """Causal rows are the first of a static cache, whose rest is empty: as SDPA takes them."""
    module = torch.nn.Module()
    module.is_causal = is_causal
    q = torch.randn(2, 4, 5, 16)
    k, v = torch.randn(2, 2, 2, 9, 16)
    if is_causal:
        k[:, :, 5:] = v[:, :, 5:] = torch.nan
    out, _ = package.models.attention.attend(module, q, k, v, scaling=0.3)
    keys = 5 if is_causal else 9
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k[:, :, :keys], v[:, :, :keys], is_causal=is_causal, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["Bert", "ModernBert"])
def test_encoders(package, name, side):
    eager = encoder(name)
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("rocm_kernels")
    given = prompt()
    if side == "right":
        given = {key: value.flip(-1) for key, value in given.items()}
    with torch.no_grad():
        assert_same_logits(
            ours(**given).last_hidden_state, eager(**given).last_hidden_state,
            given["attention_mask"],
        )  # fmt: skip


@pytest.mark.parametrize("name", ["Bart", "T5"])
def test_an_encoder_and_a_decoder(package, name):
    """Cross attention, with the encoder's padding; T5's bias of scores goes to SDPA."""
    module = importlib.import_module("transformers")
    if name == "Bart":
        config = module.BartConfig(
            vocab_size=160, d_model=64, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=96,
            encoder_attention_heads=4, decoder_attention_heads=4, decoder_ffn_dim=96,
            max_position_embeddings=64, pad_token_id=0, forced_eos_token_id=None, eos_token_id=None,
        )  # fmt: skip
    else:
        config = module.T5Config(
            vocab_size=160, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, pad_token_id=0,
            decoder_start_token_id=0, eos_token_id=None,
        )  # fmt: skip
    eager = randomized(getattr(module, f"{name}ForConditionalGeneration")(config))
    eager.set_attn_implementation("eager")
    ours = copy.deepcopy(eager)
    ours.set_attn_implementation("rocm_kernels")
    given = {key: value.flip(-1) for key, value in prompt().items()}
    expected = eager.generate(**given, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours.generate(**given, max_new_tokens=8, do_sample=False), expected)
    if name == "Bart":
        assert package.models.delegated_attention() == {}


def test_a_version_that_makes_masks_otherwise_is_named(package, monkeypatch):
    masks = importlib.import_module("transformers.masking_utils")
    monkeypatch.setattr(masks, "sdpa_mask", lambda batch_size, cache_position: None)
    with pytest.raises(ImportError, match=r"as 5\.22 to 5\.24 do"):
        package.models.use_attention()


@pytest.mark.parametrize("way", [{}, {"num_beams": 2}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_name_with_flash_generates_too(package, family, way):
    eager, ours = tiny(family)
    package.models.use_attention(ours)  # GPT-OSS lists what flash attention it takes
    ours.set_attn_implementation("rocm_kernels_flash_attention_2")
    assert ours.config._attn_implementation == "rocm_kernels_flash_attention_2"
    given, options = prompt(), {"max_new_tokens": 8, "do_sample": False, **way}
    assert torch.equal(ours.generate(**given, **options), eager.generate(**given, **options))


@pytest.mark.parametrize("family", ["Llama", "Mistral", "GptOss"])
def test_continuous_batching(package, family, monkeypatch):
    """Models without windows decode from block tables, and the kernel appends; transformers does
    so on GPUs alone, so here it sees one."""
    flash = importlib.import_module("transformers.modeling_flash_attention_utils")
    batching = importlib.import_module("transformers.generation.continuous_batching.initialization")
    names = ("flash_attn_varlen_func", "flash_attn_with_kvcache")
    called = dict.fromkeys(names, 0)
    for name in names:
        theirs = getattr(package.models.attention, name)

        def counted(*args, name=name, theirs=theirs, **options):
            called[name] += 1
            return theirs(*args, **options)

        counted.__signature__ = inspect.signature(theirs)  # transformers reads it
        monkeypatch.setattr(package.models.attention, name, counted)
    monkeypatch.setattr(flash, "_loaded_implementation", None)
    monkeypatch.setattr(batching, "is_torch_xpu_available", lambda: True)
    eager, ours = tiny(family)
    package.models.use_attention(ours)
    ours.set_attn_implementation("rocm_kernels_flash_attention_2")
    prompts = [(tokens(1, length)[0] % 150 + 5).tolist() for length in (12, 5, 20)]
    options = {"max_new_tokens": 6, "do_sample": False}
    results = ours.generate_batch(
        prompts,
        generation_config=GenerationConfig(**options, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(
            page_size=8,
            num_blocks=32,
            max_batch_tokens=64,
            use_cuda_graph=False,  # of a model on the CPU, also where there is a GPU
        ),
    )
    for each, result in zip(prompts, results.values(), strict=True):
        alone = eager.generate(torch.tensor([each]), **options)[0, len(each) :].tolist()
        assert result.generated_tokens == alone
    assert called["flash_attn_varlen_func"] > 0
    assert (called["flash_attn_with_kvcache"] > 0) == (family == "Llama")


@pytest.mark.parametrize("way", [{}, {"cache_implementation": "static"}])
def test_a_kernelized_model_says_the_same(package, way):
    """Fused decoder layers call the attention that the config names."""
    model = tiny("Llama")[0]
    package.models.quantize_model_(model, activations="none")
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        kernelize(model, mode=Mode.INFERENCE)
    assert ("LlamaDecoderLayer", "LlamaDecoderLayer") in package.models.kernelized_layers(model)
    given, options = prompt(), {"max_new_tokens": 8, "do_sample": False, **way}
    expected = model.generate(**given, **options)
    package.models.use_attention(model)
    assert torch.equal(model.generate(**given, **options), expected)
    assert package.models.delegated_attention() == {}


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_on_a_gpu(best_package, device, family, in_fp8):
    """transformers compiles the step, and CUDA captures it."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    best_package.models.use_attention()
    best_package.models.attention._DELEGATED.clear()
    eager, ours = tiny(family, head_dim=64)
    ours = ours.to(device, torch.bfloat16)
    given = {name: value.to(device) for name, value in prompt().items()}
    cache = {"cache_implementation": "static"}
    if in_fp8:
        cache = {"past_key_values": best_package.models.fp8_static_cache(ours, max_cache_len=32)}
    said = ours.generate(
        **given, **cache, max_new_tokens=12, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    mask = torch.nn.functional.pad(given["attention_mask"], (0, 12), value=1)
    with torch.no_grad():
        exact = eager.to(device)(said.sequences, attention_mask=mask).logits[:, 11:-1]
    error = (torch.stack(said.logits, 1).float() - exact).norm() / exact.norm()
    # Roundings of bfloat16 make 0.01 to 0.03, FP8 0.02 to 0.15; a wrong key makes about 1.
    assert error < (0.25 if in_fp8 else 0.06)
    assert best_package.models.delegated_attention() == {}


@pytest.mark.parametrize("end", [5, torch.tensor(5), torch.tensor([5])])
@pytest.mark.parametrize("window", [(-1, 0), (3, 0), (3, 2), (-1, -1)])
@pytest.mark.parametrize("padded", [False, True])
def test_a_span_lies_on_the_devices_of_the_mask(package, end, window, padded):
    """A new cache counts on the CPU until it is written: what is made of its count moves. A meta
    device stands for the GPU: tensors that have no values, and do not meet those of a CPU."""
    meta = torch.device("meta")
    real = torch.ones(1, 5, dtype=torch.bool, device=meta) if padded else None
    span = package.models.attention._span
    asks = pytest.raises(RuntimeError, match="meta tensors")  # whether padding lies elsewhere
    with asks if padded else contextlib.nullcontext():
        options = {"device": meta, "is_step": False, "is_read": False}
        assert span(1, end, 0, real, window, **options).device == meta
