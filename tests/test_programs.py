"""What people write around a model: each program says with whole steps replayed what it said.

A program gets a model and makes tokens of it, by one call or several. The model's own eager
attention is what its tokens are compared with."""

import contextlib
import copy
import importlib
import tempfile
import threading

import peft
import pytest
import torch
from kernels import Mode, kernelize, use_kernel_mapping
from tiny_attention import MIXED, SIZES, prompt, tiny
from tiny_models import randomized
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

FAMILIES = ["Llama", "Gemma3Text", "GptOss"]
IDS = torch.tensor(
    [[7, 9, 23, 40, 9, 23, 11], [5, 6, 7, 80, 31, 2, 3], [60, 61, 60, 61, 60, 61, 60]]
)
GREEDY = {"do_sample": False, "max_new_tokens": 9, "pad_token_id": 0}
PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def said(model, ids=IDS, **options):
    options = {**GREEDY, **options}
    if "attention_mask" not in options and "inputs_embeds" not in options:
        options["attention_mask"] = torch.ones_like(ids)
    torch.manual_seed(3)
    return [model.generate(ids, **options)]


@program
def no_mask(model):
    return [model.generate(IDS, **GREEDY) for _ in range(2)]


@program
def batches_that_change(model):
    out = []
    for rows, columns in ((3, 7), (1, 7), (2, 3), (3, 5), (1, 1), (3, 7)):
        out += said(model, IDS[:rows, :columns])
    return out


@program
def padding_that_changes(model):
    torch.manual_seed(2)
    return [
        model.generate(**prompt(3, 9, padding), **GREEDY)
        for padding in ((0, 4, 1), (3, 0, 8), (0, 0, 0), (8, 8, 8))
    ]


@program
def long_then_short(model):
    out = []
    for count in (530, 3, 1, 40):
        out += said(model, IDS[:1], max_new_tokens=count)
    return out


@program
def processors(model):
    def halve(ids, scores):
        scores[:, ids[0, -1]] -= 2.0
        return scores

    return (
        said(model, repetition_penalty=1.3, no_repeat_ngram_size=2)
        + said(model, logits_processor=LogitsProcessorList([halve]))
        + said(model, do_sample=True, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01)
        + said(model, prefix_allowed_tokens_fn=lambda row, ids: [5, 6, 70 + row, int(ids[-1])])
        + said(model, suppress_tokens=[5, 6, 7, 8], min_new_tokens=4, eos_token_id=list(range(30)))
        + said(model, bad_words_ids=[[9], [23, 40]], sequence_bias=[[[11], 3.0]])
    )


@program
def criteria(model):
    def stop(ids, scores, **kwargs):
        return torch.tensor([ids.shape[1] >= 12] * len(ids))

    return said(model, stopping_criteria=StoppingCriteriaList([stop])) + said(model, max_time=1e9)


@program
def ends_at_different_times(model):
    free = said(model, max_new_tokens=20)[0][:, IDS.shape[1] :]
    ends = [int(free[0, 3]), int(free[1, 7])]
    return said(model, eos_token_id=ends, max_new_tokens=20) * 1 + said(
        model, eos_token_id=ends[:1]
    )


@program
def beams(model):
    return (
        said(model, num_beams=3, num_return_sequences=2)
        + said(model, num_beams=2, do_sample=True)
        + said(model, num_beams=2, length_penalty=2.0, early_stopping=True, eos_token_id=[9, 31])
        + said(model, do_sample=True, num_return_sequences=3)
    )


@program
def streamed(model):
    class Streamer(BaseStreamer):
        def __init__(self):
            self.seen = []

        def put(self, value):
            self.seen.append(value.flatten())  # kept as it is, not copied

        def end(self):
            self.seen.append(torch.tensor([-1]))

    streamer = Streamer()
    return [*said(model, IDS[:1], streamer=streamer), torch.cat(streamer.seen)]


def alike(model):
    """A plain model of nearly the same weights."""
    other = type(model)(copy.deepcopy(model.config)).eval()
    other.generation_config.pad_token_id = 0
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one, same in zip(other.parameters(), model.parameters(), strict=True):
            one.copy_(same + 0.01 * torch.randn(one.shape, generator=random))
    return other


@program
def assisted(model):
    assistant = alike(model)
    return (
        said(model, IDS[:1], assistant_model=assistant)
        + said(model, IDS[:1])
        + said(model, IDS[:1], assistant_model=assistant, do_sample=True)
    )


@program
def assists(model):
    """The model drafts for another."""
    target = alike(model)
    return said(target, IDS[:1], assistant_model=model) + said(model) + said(target)


@program
def looked_up(model):
    return said(model, IDS[2:], prompt_lookup_num_tokens=3) + said(model, IDS[2:])


@program
def a_loop_of_their_own(model):
    def loop(model, input_ids, logits_processor, stopping_criteria, generation_config, **kwargs):
        for _ in range(6):
            inputs = model.prepare_inputs_for_generation(
                input_ids, next_sequence_length=None if kwargs.get("begun") is None else 1,
                **{k: v for k, v in kwargs.items() if k != "begun"},
            )  # fmt: skip
            outputs = model(**inputs)
            kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
            kwargs["begun"] = True
            token = outputs.logits[:, -1].argmin(-1, keepdim=True)
            input_ids = torch.cat([input_ids, token], 1)
        return input_ids

    return said(model, custom_generate=loop) + said(model)


def chat(model, cache, turns=3, **options):
    ids = IDS[:2]
    out = []
    for turn in range(turns):
        answer = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **GREEDY, **options,
            return_dict_in_generate=True,
        )  # fmt: skip
        cache = answer.past_key_values
        out.append(answer.sequences)
        ids = torch.cat([answer.sequences, IDS[:2, turn : turn + 3]], 1)
    return out


@program
def chats(model):
    return (
        chat(model, None)
        + chat(model, DynamicCache())
        + chat(model, DynamicCache(config=model.config))
        + chat(model, None, repetition_penalty=1.2)
    )


@program
def two_chats_in_turns(model):
    def begin(ids):
        return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY,
                              return_dict_in_generate=True)  # fmt: skip

    def go_on(answer, more):
        ids = torch.cat([answer.sequences, more], 1)
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=answer.past_key_values,
            **GREEDY, return_dict_in_generate=True,
        )  # fmt: skip

    one, other = begin(IDS[:1]), begin(IDS[1:2])
    one = go_on(one, IDS[:1, :2])
    other = go_on(other, IDS[1:2, :3])
    return [one.sequences, other.sequences, go_on(one, IDS[2:, :1]).sequences]


@program
def a_prompt_kept_for_many(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        cache = model(IDS[:1], past_key_values=cache).past_key_values
    out = []
    for more in (IDS[1:2, :3], IDS[2:, :2], IDS[1:2, :3]):
        ids = torch.cat([IDS[:1], more], 1)
        out += said(model, ids, past_key_values=copy.deepcopy(cache))
    return out


@program
def inference_mode_and_not(model):
    out = []
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            out += said(model)
    return out


@program
def training_mode(model):
    model.train()
    out = said(model)
    model.eval()
    return out + said(model)


@program
def forwards(model):
    """Of one's own loops, with each way to give what was before."""
    out = []
    for cache, with_mask, with_positions in (
        (None, False, False), (DynamicCache(), True, False),
        (DynamicCache(config=model.config), False, True), (DynamicCache(), True, True),
    ):  # fmt: skip
        ids, mask = IDS, torch.ones_like(IDS)
        tokens, start = [], 0
        with torch.no_grad():
            for _ in range(7):
                given = {"attention_mask": mask} if with_mask else {}
                if with_positions:
                    place = torch.arange(start, start + ids.shape[1])[None].expand(len(ids), -1)
                    given["position_ids"] = place
                start += ids.shape[1]
                outputs = model(ids, past_key_values=cache, use_cache=True, **given)
                cache = outputs.past_key_values
                ids = outputs.logits[:, -1:].argmax(-1)
                mask = torch.cat([mask, torch.ones_like(ids)], 1)
                tokens.append(ids)
        out.append(torch.cat(tokens, 1))
    return out


@program
def a_cache_that_is_cut(model):
    """Steps that are taken back, as search trees do."""
    with torch.no_grad():
        outputs = model(IDS, use_cache=True)
        cache, tokens = outputs.past_key_values, []
        for i in range(9):
            outputs = model(IDS[:, i % 7, None], past_key_values=cache, use_cache=True)
            tokens.append(outputs.logits[:, -1].argmax(-1))
            if i % 3 == 2:
                cache.crop(-2)
    return tokens


@program
def embeddings(model):
    embed = model.get_input_embeddings()
    rows = embed(IDS).detach()
    one = model.generate(inputs_embeds=rows, **GREEDY)
    both = model.generate(IDS, inputs_embeds=rows, **GREEDY)
    empty = model.generate(IDS[:, :0], inputs_embeds=rows, **GREEDY)
    mask = torch.ones_like(IDS)
    mask[1, :2] = 0
    masked = model.generate(inputs_embeds=rows, attention_mask=mask, **GREEDY)
    return [one, both, empty, masked, *said(model)]


@program
def what_else_is_returned(model):
    for options in (
        {"output_scores": True}, {"output_logits": True}, {"output_hidden_states": True},
        {"output_attentions": True},
    ):  # fmt: skip
        answer = model.generate(IDS, **GREEDY, return_dict_in_generate=True, **options)
    return [answer.sequences, *said(model)]


@program
def caches_by_name(model):
    names = (
        ("static", "dynamic", "offloaded") if torch.cuda.is_available() else ("static", "dynamic")
    )
    return [said(model, cache_implementation=name)[0] for name in names]


@program
def without_a_cache(model):
    return said(model, use_cache=False) + said(model)


@program
def two_models(model):
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.9)
    return said(model) + said(other) + said(model) + said(other) + said(model)


@program
def threads(model):
    before = said(model)
    found = {}

    def run(i):
        for turn in range(3):
            found[i, turn] = model.generate(IDS[i : i + 1], **GREEDY)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return before + [found[key] for key in sorted(found)]


@program
def weights_that_change(model):
    out = said(model)
    with torch.no_grad():
        model.model.layers[0].mlp.register_buffer("unused", torch.zeros(1))
        for parameter in model.parameters():
            parameter.mul_(0.8)
    out += said(model)
    model.load_state_dict({k: 1.1 * v for k, v in model.state_dict().items()})
    out += said(model)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.flip(0))
    return out + said(model)


@program
def a_larger_vocabulary(model):
    out = said(model)
    model.resize_token_embeddings(176, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[160:] = model.get_output_embeddings().weight[:16] * 2
    return out + said(model)


@program
def another_dtype(model):
    out = said(model)
    model.half()
    out += said(model)
    model.float()
    return out + said(model)


@program
def an_adapter(model):
    out = said(model)
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False, r=4)
    torch.manual_seed(5)
    adapted = peft.get_peft_model(model, config).eval()
    out += said(adapted)
    with adapted.disable_adapter():
        out += said(adapted)
    out += said(adapted)
    return out + said(adapted.merge_and_unload())


@program
def saved_and_loaded(model):
    out = said(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = AutoModelForCausalLM.from_pretrained(folder)
    return out + said(again) + said(model)


@program
def an_error_on_the_way(model):
    calls = []

    def fails(ids, scores):
        calls.append(1)
        if len(calls) == 4:
            raise KeyError
        return scores

    with contextlib.suppress(KeyError):
        said(model, logits_processor=LogitsProcessorList([fails]))
    return said(model)


# Windows' caches cannot be cut but by generate.
CASES = [(name, family) for name in PROGRAMS for family in FAMILIES
         if name != "a_cache_that_is_cut" or family == "Llama"]  # fmt: skip
SLOW = pytest.mark.slow
QUICK = ("padding_that_changes", "chats", "embeddings", "streamed", "threads")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        case if case[0] in QUICK and case[1] == "Llama" else pytest.param(*case, marks=SLOW)
        for case in CASES
    ],
)
def test_a_program_says_what_it_did(package, name, family):
    package.models.use_attention()
    eager, _ = tiny(family)
    eager.generation_config.pad_token_id = 0
    stepped = copy.deepcopy(eager)
    package.models.use_decode_step(stepped)
    got, expected = (PROGRAMS[name](model) for model in (stepped, eager))
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one, other)


OTHERS = {
    "Granite": {"embedding_multiplier": 2.0, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "Cohere2": MIXED, "Exaone4": MIXED, "SmolLM3": {}, "Nemotron": {},
    "Starcoder2": {"sliding_window": 7, "use_bias": True},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", OTHERS)
def test_a_model_in_fp8_says_what_it_did(package, family):
    """Families of no other file, their linears in FP8: by all of the package, and by that alone."""
    module = importlib.import_module("transformers")
    torch.manual_seed(1)
    config = getattr(module, f"{family}Config")(**{**SIZES, **OTHERS[family]})
    model = randomized(getattr(module, f"{family}ForCausalLM")(config))
    model.generation_config.pad_token_id = 0
    package.models.quantize_model_(model)
    with use_kernel_mapping(package.layers.kernel_mapping(), inherit_mapping=False):
        ours = kernelize(copy.deepcopy(model), mode=Mode.INFERENCE)
    package.models.use_decode_step(ours)
    for name in ("processors", "beams", "streamed", "looked_up", "padding_that_changes"):
        for one, other in zip(*(PROGRAMS[name](each) for each in (ours, model)), strict=True):
            assert torch.equal(one, other), name
