"""Models that nobody here has tried: tiny ones of every family of transformers' registry. With this
package's attention, quantised and kernelized, each gives what it gave, or is refused by a sentence
and left as it was.

`make test` takes a few of them, one of each kind of fault that was found so; `--slow` all."""

import copy
import re

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from shrunk import OTHERS, families, tiny_of

# Families that are not tiny by any number, need what is not here (timm), or more than tokens.
NOT_BUILT = {
    "blt", "cohere_compass_text", "dbrx", "gemma3n", "gemma4_assistant",
    "gemma4_unified_assistant", "musicgen", "musicgen_melody", "qwen4_exp", "qwen4_exp_text",
    "xlstm", "zamba", "zamba2",
}  # fmt: skip
SAMPLE = [
    "bloom",  # has biases as long as its mask
    "cpmant",  # has biases as long as its prompt, and its steps are prompts
    "deepseek_v32",  # an index chooses keys
    "deepseek_v4",  # joins masks
    "doge",  # adds to its mask
    "git",  # adds its mask to the scores itself, and makes room in it for an image
    "granitemoehybrid",  # keeps states in its cache, and has a norm that may be given a gate
    "llama4_text",  # not for flash attention, but hands its masks on
    "mpt",  # cuts biases as long as its cache from a table
    "moshi",  # has windows that its own cache alone makes
    "openai-gpt",  # writes nothing to a cache
    "recurrent_gemma",  # keeps states in its modules
    "xglm",  # asks whether its table of positions is as long as its cache
    "xmod",  # takes the rows of a language
]
# Families that are not refused, but whose step cannot be recorded: which experts' products it runs
# is what a router says; and why.
NOT_RECORDED = {
    "jetmoe": r"_jetmoe.py:\d+ .*by tolist",
    "longcat_flash": r"_longcat_flash.py:\d+ ",
    "minimax": "do not stay in place",  # makes its cache itself
}
KINDS = [
    kind if kind in SAMPLE else pytest.param(kind, marks=pytest.mark.slow)
    for kind in families()
    if kind not in NOT_BUILT
]


@pytest.fixture
def model(request):
    return tiny_of(request.param)


def answer(model, padding=3, is_alone=False):
    """Tokens and logits of two prompts, one padded on the left, beyond each window. Without padding
    they have no mask."""
    ids = torch.randint(5, 140, (2, 9), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    ids[0, :padding], mask[0, :padding] = 0, 0
    if is_alone:  # the one that would be padded
        ids, padding = ids[:1, padding:], 0
    here = {"input_ids": ids.to(model.device)}
    if padding:
        here["attention_mask"] = mask.to(model.device)
    said = model.generate(
        **here, max_new_tokens=12, do_sample=False, eos_token_id=None,
        pad_token_id=0, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return said.sequences.cpu(), torch.stack(said.logits, 1).cpu()


def difference(got, expected):
    """The largest relative one of a prompt's logits, up to where the tokens part: then they answer
    something else."""
    (tokens, logits), (other, expected_logits) = got, expected
    assert tokens.shape == other.shape
    said = logits.shape[1]
    worst = 0.0
    for row in range(len(tokens)):
        parted = (tokens[row, -said:] != other[row, -said:]).nonzero()
        count = 1 + int(parted[0]) if len(parted) else said
        pair = logits[row, :count].float(), expected_logits[row, :count].float()
        worst = max(worst, float((pair[0] - pair[1]).norm() / pair[1].norm().clamp(min=1e-6)))
    return worst if logits.isfinite().all() else float("inf")


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_attention(package, model):
    """In float32 but for the order of sums: 1e-4 of the logits."""
    expected = [answer(model, padding) for padding in (3, 0)]
    package.models.use_attention(model)
    for padding, each in zip((3, 0), expected, strict=True):
        assert difference(answer(model, padding), each) < 1e-4


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_decode_step(package, model):
    """The same tokens and logits from a step that is replayed, or a sentence, and the model as it
    was."""
    expected, was = [answer(model, padding) for padding in (3, 0)], outside(model)
    try:
        package.models.use_decode_step(model)
    except (NotImplementedError, ValueError) as refused:
        assert str(refused).startswith(("model must ", "layers must ")), refused
        assert outside(model) == was
    for turn in (0, 0, 1):  # the later ones in what the first has left
        assert difference(answer(model, (3, 0)[turn]), expected[turn]) < 1e-4
    if "forward" in vars(model):
        steps = package.models.decode_steps(model)
        why = NOT_RECORDED.get(model.config.model_type)
        if why is None:
            assert steps.replayed == 31, steps
        else:
            assert steps.replayed == 0 and re.search(why, " ".join(steps.passed_on)), steps


def outside(model):
    """What a call to prepare a model may have changed."""
    attentions = [m.config._attn_implementation for m in model.modules() if hasattr(m, "config")]
    return attentions, sorted(vars(model)), model.generation_config.disable_compile


@pytest.mark.parametrize("model", KINDS, indirect=True)
def test_kernelized(package, run_kernelized, model):
    """In 16 bits: norms, activations and sums round once where the model's own modules round often.
    Wrong layers differ by one."""
    kind = model.config.model_type
    if kind == "xlnet":
        pytest.skip("multiplies float32 by bfloat16, which torch refuses")
    model = model.bfloat16()
    for module in model.modules():
        if hasattr(module, "index_topk"):  # a rounding chooses other keys
            module.index_topk = 256
    package.models.quantize_model_(model, activations="none")
    expected = answer(model)
    # Phi's router compares its scores with a bound: a rounding chooses other experts.
    bound = 0.4 if kind == "phimoe" else 0.2
    assert difference(answer(run_kernelized(copy.deepcopy(model))), expected) < bound


LINEAR_FIRST = ["linear_attention", "full_attention", "linear_attention", "full_attention"]


@pytest.mark.parametrize(
    ("kind", "others"),
    [
        ("minimax", {"layer_types": LINEAR_FIRST}),  # as published
        ("minimax", {"layer_types": LINEAR_FIRST[1:3]}),
        ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 0}),
        ("bamba", {"attn_layer_indices": [0]}),
        ("granitemoehybrid", {"layer_types": ["attention", "mamba"]}),
        ("lfm2", {"layer_types": ["full_attention", "conv"]}),
        ("nemotron_h", {"layer_types": ["mamba", "mlp", "attention", "mamba"]}),
        ("qwen3_next", {"layer_types": LINEAR_FIRST[1:3]}),
        ("qwen3_next", {"layer_types": LINEAR_FIRST}),
    ],
)
def test_layers_without_rows_in_another_order(package, monkeypatch, kind, others):
    """MiniMax's cache counts what its first layer holds, be it nothing. transformers' own attention
    then sees padding wrongly, so each prompt is asked alone too."""
    layers = {"num_hidden_layers": len(others.get("layer_types", (0, 1)))}
    monkeypatch.setitem(OTHERS, kind, {**OTHERS.get(kind, {}), **layers, **others})
    model = tiny_of(kind)
    expected, alone = answer(model, 0), answer(model, 3, is_alone=True)
    package.models.use_attention(model)
    padded = answer(model, 3)[0][:1, 3:], answer(model, 3)[1][:1]
    assert difference(answer(model, 0), expected) < 1e-4
    assert difference(padded, alone) < 1e-4
    package.models.use_decode_step(model)
    assert difference(answer(model, 0), expected) < 1e-4


def test_the_name_with_flash_says_what_it_cannot_do(package):
    """transformers would call it, and leave the masks out that these models work on."""
    package.models.use_attention()
    model = tiny_of("deepseek_v32")
    model.set_attn_implementation("rocm_kernels_flash_attention_2")
    with pytest.raises(ValueError, match="got one with DeepseekV32Config, which transformers does"):
        answer(model)


@pytest.mark.parametrize(
    ("kind", "table"),
    [
        ("deepseek_v32", "CAUSAL_LM"),
        ("minimax_m3_vl_text", "CAUSAL_LM"),
        # None of its models names the configuration of its text as its own.
        ("mistral_large4", "IMAGE_TEXT_TO_TEXT"),
    ],
)
def test_an_attention_that_chooses_keys_is_transformers_own(package, kind, table):
    """It would tell ours which, by an argument that ours has not, and see all the others too. One
    that has no such layer is ours."""
    model = tiny_of(kind, table)
    package.models.use_attention(model)
    assert model.config._attn_implementation == "sdpa"
    model.set_attn_implementation("rocm_kernels")
    with pytest.raises(ValueError, match=r"which chooses keys by (block_)?indices: call use_att"):
        answer(model)
    if kind == "minimax_m3_vl_text":
        model.config.layer_types = ["full_attention"] * 2
        package.models.use_attention(model)
        assert model.config._attn_implementation == "rocm_kernels"


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(NOT_BUILT))
def test_what_is_not_built_still_cannot_be(kind):
    errors = AttributeError, ImportError, RuntimeError, TypeError, ValueError, StrictDataclassError
    with pytest.raises(errors):
        answer(tiny_of(kind))
