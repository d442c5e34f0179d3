"""A static cache in FP8, and the scales that checkpoints have for it."""

import sys

import pytest
import torch
from published import change_tensors
from tiny_attention import prompt, tiny
from tiny_checkpoints import write
from tiny_models import tiny_llama, tokens
from transformers import AutoModelForCausalLM, StaticCache


@pytest.fixture
def package(package):
    """On the CPU, whose attention takes float32, so that little stands between it and eager's."""
    package.models.use_attention()
    package.models.attention._DELEGATED.clear()
    return package


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Gemma2", "GptOss"])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_static_cache_in_fp8(package, family, scaled):
    """Against eager attention whose keys and values are rounded where the cache rounds them, with
    a scale a head; windows of the cache roll on."""
    eager, ours = tiny(family)
    attentions = [m for m in ours.modules() if hasattr(m, "layer_idx") and hasattr(m, "is_causal")]
    scales = {}
    for module in attentions:
        shape = (ours.config.num_key_value_heads,) if module.layer_idx else ()
        for name in ("k_scale", "v_scale"):
            if scaled:
                module.register_buffer(name, torch.rand(shape) * 0.02 + 0.003)
        scales[module.layer_idx] = [
            getattr(module, n, torch.ones(())) for n in ("k_scale", "v_scale")
        ]
    given = prompt()
    cache = package.models.fp8_static_cache(ours, max_cache_len=24)
    got = ours.generate(
        **given, past_key_values=cache, max_new_tokens=12, do_sample=False,
        output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip

    class Rounding(StaticCache):
        def update(self, keys, values, layer_idx, *args, **kwargs):
            both = []
            for states, scale in zip((keys, values), scales[layer_idx], strict=True):
                scale = scale.reshape(-1, 1, 1)
                narrow = (states / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
                both.append(narrow.float() * scale)
            return super().update(*both, layer_idx, *args, **kwargs)

    expected = eager.generate(
        **given, past_key_values=Rounding(config=eager.config, max_cache_len=24),
        max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    # A rounding that falls the other way moves a number by a sixteenth.
    first = torch.stack(got.logits)[:2], torch.stack(expected.logits)[:2]
    torch.testing.assert_close(*first, rtol=0.05, atol=0.05)
    assert (got.sequences == expected.sequences).float().mean() > 0.9
    assert cache.layers[0].keys.element_size() == 1
    assert package.models.delegated_attention() == {}


def test_an_fp8_cache_asks_for_the_attention_that_reads_it(package):
    eager, _ = tiny("Llama")
    with pytest.raises(ValueError, match="got LlamaForCausalLM with 'eager'"):
        package.models.fp8_static_cache(eager, max_cache_len=8)


@pytest.mark.parametrize("dialect, factor", [("fn", 1), ("fnuz", 2)])
def test_scales_are_of_the_devices_dialect(package, monkeypatch, dialect, factor):
    """Checkpoints' are of OCP's range, of which FNUZ has half; and what is beyond it saturates."""
    fp8 = getattr(torch, f"float8_e4m3{dialect}")
    module = sys.modules[f"{package.models.__name__}.cache"]
    monkeypatch.setattr(module, "native_fp8_dtype", lambda device: fp8)
    _, ours = tiny("Llama")
    for attention in (layer.self_attn for layer in ours.model.layers):
        attention.register_buffer("k_scale", torch.tensor([0.01, 0.02]))
        attention.register_buffer("v_scale", torch.tensor(0.03))
    cache = package.models.fp8_static_cache(ours, max_cache_len=4)
    k, v = torch.randn(2, 1, 2, 3, 16)
    k[0, 1, 2, 5], v[0, 0, 1, 7] = 1e4, -1e4
    largest = torch.finfo(fp8).max
    scales = torch.tensor([0.01, 0.02]) * factor, torch.tensor([0.03]) * factor
    for layer, attention in zip(cache.layers, ours.model.layers, strict=True):
        kept = layer.update(k, v)
        for states, scale, found in zip((k, v), scales, kept, strict=True):
            expected = (states / scale[:, None, None]).clamp(-largest, largest).to(fp8)
            assert torch.equal(found[:, :, :3].view(torch.uint8), expected.view(torch.uint8))
        torch.testing.assert_close(attention.self_attn.cache_scales, scales)


def test_an_fp8_cache_is_widened_for_transformers(package):
    """Where the kernel does not compute it, here for a mask with holes."""
    _, ours = tiny("Llama")
    for module in ours.modules():
        if hasattr(module, "is_causal") and hasattr(module, "layer_idx"):
            module.register_buffer("k_scale", torch.tensor([0.01, 0.02]))
            module.register_buffer("v_scale", torch.tensor(0.01))
    given = prompt(padding=(0, 0, 0))
    given["attention_mask"][:, 6] = 0
    seen = torch.ones(12, 12, dtype=torch.bool).tril()
    seen[:, 6] = False
    seen = torch.where(seen, 0.0, torch.finfo(torch.float32).min).expand(3, 1, -1, -1)
    logits = []
    with torch.no_grad():
        for mask in (given["attention_mask"], seen):
            cache = package.models.fp8_static_cache(ours, max_cache_len=12)
            inputs = {"input_ids": given["input_ids"], "attention_mask": mask}
            inputs["position_ids"] = torch.arange(12)[None].expand(3, -1)
            logits.append(ours(**inputs, past_key_values=cache).logits)
    torch.testing.assert_close(*logits)
    assert package.models.delegated_attention() != {}


WHERE = {
    "compressed-tensors, channel, dynamic": "self_attn.{0}_scale",
    "ModelOpt, static": "self_attn.{0}_proj.{0}_scale",
    "Quark, static": "self_attn.{0}_proj.output_scale",
    "AutoFP8, static": "self_attn.{0}_scale",
}


@pytest.mark.parametrize("name", WHERE)
@torch.no_grad()
def test_scales_of_a_checkpoint_are_its_caches(package, name, tmp_path):
    """Where each format has them, of any shape of one; quantised and saved again they are there."""
    expected = {}

    def add(tensors):
        for layer in range(2):
            for kind in "kv":
                place = f"model.layers.{layer}.{WHERE[name].format(kind)}"
                value = torch.rand(()) + 0.5
                tensors[place] = value.reshape((1,) * layer)
                expected[f"model.layers.{layer}.self_attn.{kind}_scale"] = value

    write(tiny_llama(tie_word_embeddings=False), tmp_path, name)
    change_tensors(tmp_path, add)
    with package.models.fp8_checkpoints():
        model, told = AutoModelForCausalLM.from_pretrained(
            tmp_path, dtype=torch.bfloat16, output_loading_info=True
        )
    assert not told["missing_keys"] and not told["unexpected_keys"]
    package.models.quantize_model_(model)
    model.save_pretrained(tmp_path / "saved")
    with package.models.fp8_checkpoints():
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16)
    for each in (model, again):
        found = {n: b for n, b in each.named_buffers() if n.endswith(("k_scale", "v_scale"))}
        assert found.keys() == expected.keys()
        for place, scale in expected.items():
            torch.testing.assert_close(found[place].float().reshape(()), scale, rtol=0, atol=0)
        package.models.use_attention(each)
        cache = package.models.fp8_static_cache(each, max_cache_len=8)
        each.generate(tokens(1, 4), past_key_values=cache, max_new_tokens=2)
        scales = [float(scale) for layer in cache.layers for scale in layer.scales]
        assert scales == [float(scale) for scale in expected.values()]
