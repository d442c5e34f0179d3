"""What each reader makes of a ``quantization_config``, of a linear by its names: how it is stored,
None for 16 bits, "left" where all of it is another loader's, or a sentence."""

import pytest
from test_families import tiny
from tiny_checkpoints import autofp8, compressed_tensors, fbgemm, modelopt, quark

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


@pytest.fixture
def formats(package):
    return package.models.formats


def read(formats, config, *names, **classes):
    layout_of = formats.layouts_of(config)
    return "left" if layout_of is None else layout_of(*(names or (Q,)), **classes)


# ---- lists of what stays in 16 bits

# An entry; whether it leaves out q_proj of layer 0, and up_proj of layer 1.
AS_TRANSFORMERS_HAS_IT = {
    "model.layers.0.self_attn.q_proj": (True, False),
    "model.layers.0": (True, False),
    "model.layers": (True, True),
    "layers.0": (False, False),
    "q_proj": (True, False),
    "self_attn.q_proj": (True, False),
    "model.layers.0.self": (False, False),
    "model.layers.[0-9]+.mlp": (False, True),
    "*.mlp.*": (False, True),
    "re:.*up_proj": (False, True),
    "re:up_proj": (False, False),
}
NAMES_ALONE = {Q: (True, False), "re:.*up_proj": (False, True), "q_proj": (False, False),
               "model.layers.0": (False, False)}  # fmt: skip
SHELL_PATTERNS = {**NAMES_ALONE, "*.up_proj": (False, True), "model.layers.?.mlp.*": (False, True)}
TREES = {**SHELL_PATTERNS, "model.layers.0": (True, False), "q_proj": (True, False),
         "layers.0.self_attn": (True, False), "model.layers.1.mlp*": (False, True),
         "self": (False, False), "*self_attn": (False, False), "*self_attn*": (True, False),
         "model.layers.1.m*": (False, True)}  # fmt: skip
LISTS = {
    "modules_to_not_convert": (fbgemm()[0], AS_TRANSFORMERS_HAS_IT),
    "ignored_layers": (autofp8("dynamic")[0], AS_TRANSFORMERS_HAS_IT),
    "exclude": (quark("static")[0], SHELL_PATTERNS),
    "ignore": (
        compressed_tensors("channel", "dynamic")[0],
        {**NAMES_ALONE, "Linear": (True, True)},
    ),
    "exclude_modules": (modelopt("FP8")[0], TREES),
}


@pytest.mark.parametrize(
    ("field", "entry", "out"),
    [(field, entry, out) for field, (_, known) in LISTS.items() for entry, out in known.items()],
)
def test_an_entry_leaves_out_what_its_makers_mean(formats, field, entry, out):
    config = {**LISTS[field][0], field: [entry]}
    assert tuple(read(formats, config, name) is None for name in (Q, UP)) == out
    assert read(formats, {**config, field: []}) is not None
    # By any name that it has, as one of another prefix.
    assert (read(formats, config, f"language_model.{Q}", Q) is None) == out[0]


@pytest.mark.parametrize("field", LISTS)
def test_what_is_no_linear_is_no_ones_default(formats, field):
    config = LISTS[field][0]
    assert read(formats, config, "model.embed_tokens", classes=("Embedding", "Module")) is None
    assert read(formats, config, Q, classes=("Falcon", "Linear", "Module")) is not None


def test_a_list_may_have_the_names_that_files_have(package):
    """Also where nothing is known of the files, as with a model that is loaded from tensors."""
    gate = "model.layers.0.mlp.gate"
    names = package.models.names.listed_names(tiny("mixtral"), [gate], {})
    assert names == {gate: (gate, "model.layers.0.block_sparse_moe.gate")}


# ---- compressed-tensors


def scheme(weights=None, inputs=None, outputs=None, **config):
    group = {"targets": ["Linear"], "weights": {**FP8, "strategy": "channel", **(weights or {})},
             "input_activations": inputs if inputs is None else {**FP8, **inputs},
             "output_activations": outputs}  # fmt: skip
    return {"quant_method": "compressed-tensors", "config_groups": {"a": group}, **config}


TOKEN = {"strategy": "token", "dynamic": True}
BLOCK = {"strategy": "block", "block_structure": [128, 128]}
ONE = {"strategy": "tensor", "dynamic": False}
SCHEMES = {
    "a channel": (scheme(), ("channel", "none", None)),
    "no strategy": (scheme({"strategy": None}), ("tensor", "none", None)),
    "no strategy, groups of all": (scheme({"strategy": None, "group_size": -1}),
                                   ("channel", "none", None)),
    "a token": (scheme(None, TOKEN), ("channel", "dynamic", None)),
    "static": (scheme(None, ONE), ("channel", "static", None)),
    "blocks, a token": (scheme(BLOCK, TOKEN), ("block", "dynamic", "says one a token")),
    "blocks, all tokens": (scheme(BLOCK, {**ONE, "dynamic": True}),
                           ("block", "dynamic", "says one for all tokens")),
    "static a channel": (scheme(None, {"strategy": "channel", "dynamic": False}), "left"),
    "static a token": (scheme(None, {"strategy": "token", "dynamic": False}), "left"),
    "inputs in groups": (scheme(None, {"strategy": "group", "group_size": 64, "dynamic": True}),
                         "left"),
    "asymmetric": (scheme({"symmetric": False}), "left"),
    "asymmetric inputs": (scheme(None, {**TOKEN, "symmetric": False}), "left"),
    "integers": (scheme({"type": "int"}), "left"),
    "integers as inputs": (scheme(None, {**TOKEN, "type": "int"}), "left"),
    "four bits": (scheme({"num_bits": 4}), "left"),
    "other blocks": (scheme({**BLOCK, "block_structure": [64, 64]}), "left"),
    "other groups": (scheme({"strategy": "group", "group_size": 64}), "left"),
    "outputs": (scheme(outputs={**FP8, **ONE}), "left"),
}  # fmt: skip


def assert_is(layout, expected):
    if expected == "left":
        assert layout == "left"
        return
    weights, inputs, instead = expected
    assert (layout.weights, layout.inputs) == (weights, inputs)
    assert layout.instead is None if instead is None else layout.instead.endswith(instead)


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors(formats, name):
    config, expected = SCHEMES[name]
    assert_is(read(formats, config), expected)


@pytest.mark.parametrize(
    ("targets", "served"),
    [(["re:.*k_proj", "re:.*v_proj$"], True), (["re:.*k_proj", "re:.*q_proj"], False)],
)
def test_outputs_of_a_cache_are_read_over(formats, targets, served):
    config = scheme()
    cache = {**config["config_groups"]["a"], "targets": targets, "output_activations": FP8}
    config["config_groups"]["b"] = cache
    assert (read(formats, config) != "left") == served


def test_several_layouts_are_described_by_name(formats):
    """And one by the class; what is read again is what was told."""
    channel, block = formats.Layout("channel", "dynamic"), formats.Layout("block", "none")
    mxfp4 = formats.Layout("mxfp4", "none")
    experts = r"re:model\.layers\.0\.mlp\.experts\."
    both = formats.describe({Q: channel, UP: block, experts: mxfp4}, ["lm_head"])
    assert both["format"] == "mixed-precision"
    assert read(formats, both, Q) == channel and read(formats, both, UP) == block
    assert read(formats, both, "model.layers.0.mlp.experts.3.up_proj") == mxfp4
    assert read(formats, both, "lm_head") is None and read(formats, both, "other") is None
    two = formats.describe({Q: channel, UP: block}, [])
    assert read(formats, two, Q) == channel and read(formats, two, UP) == block
    one = formats.describe({Q: channel, UP: channel}, ["lm_head"])
    assert one["format"] == "float-quantized"
    assert [group["targets"] for group in one["config_groups"].values()] == [["Linear"]]
    assert read(formats, one, Q) == channel and read(formats, one, "lm_head") is None


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_blocks_alone_are_described_as_finegrained(formats, scale_fmt):
    layout = formats.Layout("block", "dynamic", scale_fmt=scale_fmt)
    said = formats.describe({Q: layout, UP: layout}, ["lm_head", r"re:.*\.gate"])
    assert said["quant_method"] == "fp8" and said.get("scale_fmt") == scale_fmt
    assert said["modules_to_not_convert"] == ["lm_head", r".*\.gate"]
    static = formats.Layout("block", "none", scale_fmt=scale_fmt)
    assert formats.describe({Q: static}, [])["quant_method"] == "compressed-tensors"


# ---- AMD Quark


def of_quark(weight=None, inputs=None, **layer):
    config, *_ = quark("static")
    said = config["global_quant_config"]
    inputs = inputs if inputs is None else {**said["input_tensors"], **inputs}
    said = {
        **said,
        "weight": {**said["weight"], **(weight or {})},
        "input_tensors": inputs,
        **layer,
    }
    return {**config, "global_quant_config": said, "layer_quant_config": {}}


CHANNEL = {"qscheme": "per_channel", "ch_axis": 0}
QUARKS = {
    "a tensor": (of_quark(), ("tensor", "none", None)),
    "a channel": (of_quark(CHANNEL), ("channel", "none", None)),
    "a channel, unsaid axis": (of_quark({"qscheme": "per_channel"}), ("channel", "none", None)),
    "a channel of K": (of_quark({**CHANNEL, "ch_axis": 1}), "left"),
    "a group": (of_quark({"qscheme": "per_group"}), "left"),
    "four bits": (of_quark({"dtype": "fp4"}), "left"),
    "e5m2": (of_quark({"dtype": "fp8_e5m2"}), "left"),
    "dynamic weights": (of_quark({"is_dynamic": True}), "left"),
    "a bias": (of_quark(bias={"dtype": "fp8_e4m3"}), "left"),
    "weights twice": ({**of_quark(), "global_quant_config": {
        "weight": [{"dtype": "fp8_e4m3"}] * 2, "input_tensors": None}}, "left"),
    "static": (of_quark(None, {}), ("tensor", "static", None)),
    "static a channel": (of_quark(None, CHANNEL), "left"),
    "integers as inputs": (of_quark(None, {"dtype": "int8"}), "left"),
    "a token": (of_quark(CHANNEL, {"qscheme": "per_channel", "ch_axis": 1, "is_dynamic": True}),
                ("channel", "dynamic", None)),
    "a token by its name": (of_quark(CHANNEL, {"qscheme": "per_token", "is_dynamic": True}),
                            ("channel", "dynamic", None)),
    "all tokens": (of_quark(None, {"is_dynamic": True}),
                   ("tensor", "dynamic", "says one for all tokens")),
    "inputs in groups": (of_quark(None, {"qscheme": "per_group", "is_dynamic": True}), "left"),
}  # fmt: skip


@pytest.mark.parametrize("name", QUARKS)
def test_quark(formats, name):
    config, expected = QUARKS[name]
    assert_is(read(formats, config), expected)


def test_nothing_quantised_is_another_loaders(formats):
    nothing = {"weight": None, "input_tensors": None}
    assert read(formats, {**of_quark(), "global_quant_config": nothing}) == "left"
    assert read(formats, {"quant_method": "compressed-tensors", "config_groups": {}}) == "left"
    assert read(formats, {"quant_method": "gptq"}) == "left"


# ---- fp8 of several makers


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ("tensor", "dynamic", "says one for all tokens")),
        ({"activation_scheme": "static"}, ("tensor", "static", None)),
        ({"weight_block_size": None}, "left"),
        ({"weight_block_size": [128, 128]}, "left"),
        ({"weight_block_size": [64, 64]}, "left"),
        ({"weight_block_size": [32, 32], "activation_scheme": "static"}, "left"),
        ({"weight_block_size": [32, 32]}, ("block", "dynamic", "says one for 32")),
        ({"quant_method": "mxfp8"}, ("block", "dynamic", "says one for 32")),
    ],
    ids=str,
)
def test_fp8(formats, config, expected):
    layout = read(formats, {"quant_method": "fp8", **config})
    assert_is(layout, expected)
    if expected[0] == "block":
        assert layout.scale_fmt == ("ue8m0" if "quant_method" in config else None)
