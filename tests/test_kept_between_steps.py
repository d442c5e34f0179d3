"""What a model keeps between two steps that are replayed, an image above all:
an argument that grows with the answer, a tensor of a module, other rows of a cache, padding."""

import copy

import pytest
import shrunk
import torch
from tiny_attention import tiny
from tiny_models import randomized
from transformers import DynamicCache, MllamaConfig, MllamaForConditionalGeneration
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

IMAGE, BEGIN, END = 152, 155, 156
SIZE, PATCH = 32, 8


@pytest.fixture
def package(package):
    package.models.use_attention()
    return package


def prompt(columns, image):
    """Tokens, an image's in them behind the third."""
    ids = torch.randint(5, 140, (1, columns))
    ids = torch.cat([ids[:, :3], torch.tensor([image]), ids[:, 3:]], 1)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def qwen(columns, high=4):
    """2 x 2 patches are a token."""
    given = prompt(columns, [BEGIN, *[IMAGE] * high, END])
    pixels = torch.randn(4 * high, 3 * 2 * PATCH * PATCH)
    kinds = (given["input_ids"] == IMAGE).int()
    grid = torch.tensor([[1, high, 4]])
    return {**given, "mm_token_type_ids": kinds, "pixel_values": pixels, "image_grid_thw": grid}


def square(columns, count, kinds=False, frames=()):
    given = prompt(columns, [IMAGE] * count)
    if kinds:
        given["token_type_ids"] = (given["input_ids"] == IMAGE).long()
    return {**given, "pixel_values": torch.randn(1, *frames, 3, SIZE, SIZE)}


def mllama_prompt(columns):
    given = prompt(columns, [IMAGE])
    tiles = 4
    mask = (torch.arange(columns + 1) >= 3).long()[None, :, None, None].expand(-1, -1, 1, tiles)
    return {
        **given, "pixel_values": torch.randn(1, 1, tiles, 3, SIZE, SIZE),
        "aspect_ratio_ids": torch.tensor([[1]]), "cross_attention_mask": mask.contiguous(),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.int64),
    }  # fmt: skip


def mllama():
    text = shrunk.shrunk(MllamaTextConfig, num_hidden_layers=4, cross_attention_layers=[1, 3])
    vision = shrunk.shrunk(
        MllamaVisionConfig, intermediate_layers_indices=[0, 1], vision_output_dim=192,
        num_global_layers=1,
    )  # fmt: skip
    config = MllamaConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), image_token_index=IMAGE
    )
    config._attn_implementation = "eager"
    return randomized(MllamaForConditionalGeneration(config))


# What it is given, and what tells whether its steps are replayed.
MODELS = {
    "qwen2_vl": qwen, "qwen2_5_vl": qwen, "qwen3_vl": qwen, "qwen3_vl_moe": qwen,
    "gemma3": lambda n: square(n, 4, kinds=True), "paligemma": lambda n: square(n, 16, kinds=True),
    "llava": lambda n: square(n, 16), "internvl": lambda n: square(n, 4),
    "idefics3": lambda n: square(n, 4, frames=(1,)), "mllama": mllama_prompt,
}  # fmt: skip
QUICK = ("qwen2_vl", "paligemma", "mllama")


def made(kind, monkeypatch):
    if kind == "mllama":
        return mllama()
    monkeypatch.setitem(shrunk.OTHERS, "gemma3", {"mm_tokens_per_image": 4})
    model = shrunk.tiny_of(kind, "IMAGE_TEXT_TO_TEXT")
    for module in model.modules():
        if kind == "qwen2_5_vl" and hasattr(module, "window_size"):
            module.window_size = 4 * PATCH
    return model


def answer(model, given):
    return model.generate(
        **copy.deepcopy(given), max_new_tokens=8, do_sample=False, eos_token_id=None,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip


def assert_same(got, expected):
    assert torch.equal(got.sequences, expected.sequences)
    pair = torch.stack(got.logits), torch.stack(expected.logits)
    torch.testing.assert_close(*pair, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in MODELS]
)
def test_answers_about_images(package, monkeypatch, kind):
    """Three images and then none, the later ones in what the first has left."""
    model = made(kind, monkeypatch)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    for columns in (9, 6, 12):
        given = MODELS[kind](columns)
        assert_same(answer(step, given), answer(model, given))
    given = {"input_ids": torch.randint(5, 140, (1, 8)), "attention_mask": torch.ones(1, 8).long()}
    assert_same(answer(step, given), answer(model, given))
    steps = package.models.decode_steps(step)
    if kind == "mllama":
        assert steps.passed_on["its layers keep other rows than its tokens'"] == 1
    else:
        assert steps.replayed >= 20, steps  # of 28


def test_an_image_behind_a_chats_first_turn(package):
    """Whose rows a cache in place has no room for: it becomes one that has."""
    model = mllama()
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    first, later, said = prompt(8, [BEGIN]), mllama_prompt(6), []
    for each in (model, step):
        cache = DynamicCache(config=model.config)
        ids = each.generate(**first, past_key_values=cache, **options)
        length = cache.get_seq_length()
        ids = torch.cat([ids, later["input_ids"]], 1)
        mask = torch.nn.functional.pad(later["cross_attention_mask"], (0, 0, 0, 0, length + 1, 0))
        given = {
            **later, "input_ids": ids, "attention_mask": torch.ones_like(ids),
            "cross_attention_mask": mask, "past_key_values": cache,
        }  # fmt: skip
        said.append(each.generate(**given, **options))
    assert torch.equal(*said)
    steps = package.models.decode_steps(step)
    assert steps.passed_on["its layers keep other rows than its tokens'"] == 1
    assert steps.replayed == 6  # of the first turn's 7


def test_an_offset_that_a_module_keeps_is_the_calls(package, monkeypatch):
    """Qwen's positions behind an image: a loop of one's own leaves them to the model."""
    _, model = tiny("Llama")
    forward = type(model.model).forward

    def with_offset(self, *args, position_ids=None, **kwargs):
        return forward(self, *args, position_ids=position_ids + self.offset, **kwargs)

    monkeypatch.setattr(type(model.model), "forward", with_offset)
    model.model.offset = torch.zeros(1, 1, dtype=torch.int64)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    ids = torch.randint(5, 150, (2, 9))
    for offset in (3, 40, 7):
        said = []
        for each in (step, model):
            each.model.offset = torch.tensor([[offset]])
            said.append(answer(each, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}))
            assert int(each.model.offset) == offset
        assert_same(*said)
    assert package.models.decode_steps(step).recorded == 1


GROWS = {
    "unread": lambda kinds: 0.0,
    "its length": lambda kinds: float(kinds.shape[1] % 3),
    "its last": lambda kinds: kinds[:, -1:] * 2.0,
}


@pytest.mark.parametrize("read", GROWS)
def test_an_argument_that_grows(package, monkeypatch, read):
    """Replayed where nothing of it is looked at."""
    _, model = tiny("Llama")
    forward = type(model).forward

    def with_kinds(self, *args, kinds=None, **kwargs):
        said = forward(self, *args, **kwargs)
        said.logits[:, :, 7] += GROWS[read](kinds)
        return said

    monkeypatch.setattr(type(model), "forward", with_kinds)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    ids, kinds = torch.randint(5, 150, (2, 9)), torch.randint(0, 9, (2, 30))
    said = []
    for each in (step, model):
        given, logits = {"input_ids": ids, "past_key_values": DynamicCache()}, []
        given["past_key_values"]._is_user_defined = False
        with torch.no_grad():
            for length in range(9, 18):
                outputs = each(kinds=kinds[:, :length], use_cache=True, **given)
                given["input_ids"] = outputs.logits[:, -1:].argmax(-1)
                logits.append(outputs.logits[:, -1])
        said.append(torch.stack(logits))
    torch.testing.assert_close(*said, rtol=1e-4, atol=1e-4)
    steps = package.models.decode_steps(step)
    assert steps.replayed == (7 if read == "unread" else 1), steps  # as it was recorded


def test_numbers_taken_out_of_a_tensor_are_not_recorded(package, monkeypatch):
    """By a way that torch's dispatcher does not see."""
    _, model = tiny("Llama")
    forward = type(model).forward

    def with_list(self, input_ids=None, *args, **kwargs):
        said = forward(self, input_ids, *args, **kwargs)
        said.logits[:, :, input_ids.tolist()[0][-1]] -= 3.0
        return said

    monkeypatch.setattr(type(model), "forward", with_list)
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    ids = torch.randint(5, 150, (2, 9))
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    assert_same(answer(step, given), answer(model, given))
    assert any("by tolist" in why for why in package.models.decode_steps(step).passed_on)


def test_a_cache_with_too_little_room_says_so(package):
    """Before a GPU is asked to write beyond it, which would end its context."""
    _, model = tiny("Llama")
    cache = package.models.growing_cache.growing_cache(model, 4, in_fp8=False)
    with torch.no_grad(), pytest.raises(RuntimeError, match="writes 5 rows where 4 are"):
        model(torch.randint(5, 150, (1, 5)), past_key_values=cache)


@pytest.mark.parametrize("padding", ["right", "gap", "left"])
def test_padding_that_is_not_on_the_left(package, padding):
    """A prompt's last position may be padding, whose answer is not one of those paddings. Nothing
    is recorded that would stop a GPU at such a mask."""
    _, model = tiny("Llama")
    model.set_attn_implementation("eager")
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    mask = torch.ones(3, 9, dtype=torch.int64)
    mask[0, {"right": slice(6, 9), "gap": slice(3, 5), "left": slice(0, 3)}[padding]] = 0
    given = {"input_ids": torch.randint(5, 150, (3, 9)), "attention_mask": mask}
    for _ in range(2):
        assert_same(answer(step, given), answer(model, given))
    given["attention_mask"] = torch.ones_like(mask)
    assert_same(answer(step, given), answer(model, given))
    steps = package.models.decode_steps(step)
    assert steps.passed_on.get("padding lies between tokens", 0) == (0 if padding == "left" else 14)
    assert steps.replayed == (19 if padding == "left" else 6), steps


def test_arguments_without_names(package, monkeypatch):
    _, model = tiny("Llama")
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, *a, **k: forward(self, *a, **k))
    step = copy.deepcopy(model)
    package.models.use_decode_step(step)
    ids = torch.randint(5, 150, (2, 9))
    with torch.no_grad():
        assert torch.equal(step(ids).logits, model(ids).logits)
