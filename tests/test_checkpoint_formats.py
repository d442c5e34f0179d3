"""What each format's files may hold of a linear: scales of any shape and dtype that their makers
write, loaded as the numbers that they stand for, in float64; or a sentence."""

import pytest
import torch
from published import PROJECTION, change_config, change_tensors, compressed, llama, load
from tiny_checkpoints import autofp8, compressed_tensors, fbgemm, finegrained, modelopt, quark

E8M0 = torch.float8_e8m0fnu
ONE_A_TENSOR = "its inputs have a scale a token, where the checkpoint says one for all tokens"
ONE_FOR_32 = "its inputs have a scale for 128 columns, where the checkpoint says one for 32"


@pytest.fixture
def package(best_package):
    return best_package


def of_quark(weights, inputs, dynamic=False):
    """As Quark's own exporter describes a layer."""
    config, *_ = quark("static")
    fp8 = config["global_quant_config"]["weight"]
    of = {"tensor": {**fp8}, "channel": {**fp8, "qscheme": "per_channel", "ch_axis": 0},
          "token": {**fp8, "qscheme": "per_channel", "ch_axis": 1}}  # fmt: skip
    taken = None if inputs is None else {**of[inputs], "is_dynamic": dynamic}
    layer = {**config["global_quant_config"], "weight": of[weights], "input_tensors": taken}
    return {**config, "global_quant_config": layer, "layer_quant_config": {}}


def of_blocks(method, block, **more):
    return {"quant_method": method, "activation_scheme": "dynamic", "weight_block_size": block,
            "modules_to_not_convert": ["lm_head"], **more}  # fmt: skip


def in_groups(block):
    """compressed-tensors' for 32 columns, or for a block of rows and columns."""
    group = compressed_tensors("channel", "none")[0]["config_groups"]["group_0"]
    fp8 = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    inputs = {**fp8, "strategy": "group", "group_size": 32, "dynamic": True}
    by = {"strategy": "group", "group_size": 32}
    if block[0] > 1:
        by = {"strategy": "block", "block_structure": block}
    return compressed({**group, "weights": {**fp8, **by}, "input_activations": inputs})


# Config, name of the weight's scale, what has one, how inputs are taken, and what the report says.
CASES = {
    **{f"compressed-tensors, {by}, {inputs}": (
        compressed_tensors(by, inputs)[0], "weight_scale", by,
        "dynamic" if inputs == "one for all tokens" else inputs,
        ONE_A_TENSOR if inputs == "one for all tokens" else None,
    ) for by in ("tensor", "channel", "block")
      for inputs in ("dynamic", "static", "none", "one for all tokens")},
    "compressed-tensors, 1 x 32": (in_groups([1, 32]), "weight_scale", (1, 32), "dynamic",
                                   ONE_FOR_32),
    "compressed-tensors, 32 x 32": (in_groups([32, 32]), "weight_scale", (32, 32), "dynamic",
                                    ONE_FOR_32),
    "Quark, tensor, static": (of_quark("tensor", "tensor"), "weight_scale", "tensor", "static",
                              None),
    "Quark, tensor, dynamic": (of_quark("tensor", "tensor", True), "weight_scale", "tensor",
                               "dynamic", ONE_A_TENSOR),
    "Quark, channel, static": (of_quark("channel", "tensor"), "weight_scale", "channel", "static",
                               None),
    "Quark, channel, token": (of_quark("channel", "token", True), "weight_scale", "channel",
                              "dynamic", None),
    "Quark, channel, tensor": (of_quark("channel", "tensor", True), "weight_scale", "channel",
                               "dynamic", ONE_A_TENSOR),
    "Quark, tensor, token": (of_quark("tensor", "token", True), "weight_scale", "tensor",
                             "dynamic", None),
    "Quark, channel, none": (of_quark("channel", None), "weight_scale", "channel", "none", None),
    "ModelOpt, tensor": (modelopt("FP8")[0], "weight_scale", "tensor", "static", None),
    "ModelOpt, channel": (modelopt("FP8_PER_CHANNEL_PER_TOKEN")[0], "weight_scale", "channel",
                          "dynamic", None),
    "ModelOpt, block": (modelopt("FP8_PB_WO")[0], "weight_scale", "block", "none", None),
    "ModelOpt, 1 x 32": ({**modelopt("FP8")[0], "quant_algo": "MXFP8"}, "weight_scale", (1, 32),
                         "dynamic", ONE_FOR_32),
    "AutoFP8, static": (autofp8("static")[0], "weight_scale", "tensor", "static", None),
    "AutoFP8, dynamic": (autofp8("dynamic")[0], "weight_scale", "tensor", "dynamic", ONE_A_TENSOR),
    "FBGEMM": (fbgemm()[0], "weight_scale", "channel", "dynamic", None),
    "finegrained, block": (finegrained("dynamic", True)[0], "weight_scale_inv", "block", "dynamic",
                           None),
    "finegrained, tensor": (finegrained("static", False)[0], "weight_scale_inv", "tensor",
                            "static", None),
    "finegrained, 32 x 32": (of_blocks("fp8", [32, 32], scale_fmt="ue8m0"), "weight_scale_inv",
                             (32, 32), "dynamic", ONE_FOR_32),
    "finegrained, 1 x 32": (of_blocks("fp8", [1, 32]), "weight_scale_inv", (1, 32), "dynamic",
                            ONE_FOR_32),
    "mxfp8": (of_blocks("mxfp8", [1, 32]), "weight_scale_inv", (1, 32), "dynamic", ONE_FOR_32),
}  # fmt: skip


def scales_of(by, n, k, dtype):
    """Powers of two where the dtype has no others, near enough for small blocks to become large."""
    block = {"tensor": (n, k), "channel": (1, k), "block": (128, 128)}.get(by, by)
    shape = (-(-n // block[0]), -(-k // block[1]))
    if dtype in (E8M0, torch.uint8) or isinstance(by, tuple):
        scale = torch.exp2(torch.randint(-7, -3, shape).float())
    else:
        scale = torch.rand(shape) / 16 + 1e-3
    if dtype == torch.uint8:
        return scale.to(E8M0).view(torch.uint8), scale, block
    return scale.to(dtype), scale.to(dtype).float(), block


# Of what has a scale: shapes in files.
SHAPES = {
    "tensor": {"of none": lambda s: s.reshape(()), "of one": lambda s: s.reshape(1),
               "of one row": lambda s: s},
    "channel": {"a column": lambda s: s, "flat": lambda s: s[:, 0]},
    "block": {"rows and columns": lambda s: s, "of four": lambda s: s[:, None, :, None]},
}  # fmt: skip


def forms():
    for name, (_, _, by, *_) in CASES.items():
        shapes = SHAPES.get(by, {"rows and columns": lambda s: s})
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        if isinstance(by, tuple):
            dtypes = (E8M0, torch.uint8, torch.float32)
        for shape in shapes:
            for dtype in dtypes if shape == next(iter(shapes)) else dtypes[:1]:
                kind = str(dtype).removeprefix("torch.")
                yield pytest.param(name, shape, dtype, id=f"{name}, {shape}, {kind}")


@pytest.mark.parametrize(("name", "shape", "dtype"), forms())
@torch.no_grad()
def test_numbers_are_those_of_the_files(package, tmp_path, name, shape, dtype):
    config, scale_name, by, inputs, instead = CASES[name]
    if name.startswith("finegrained") and shape == "of four":
        pytest.skip("transformers' own module takes these")
    model, exact = llama(num_hidden_layers=1, tie_word_embeddings=False), {}
    model.save_pretrained(tmp_path)

    def change(tensors):
        for key in [key for key in tensors if "_proj.weight" in key]:
            linear = key.removesuffix(".weight")
            n, k = tensors[key].shape
            # Of a few binades, so that small blocks have room for each other's scales.
            q = (tensors[key] / tensors[key].abs().max() * 7).round().mul(4)
            tensors[key] = q.to(torch.float8_e4m3fn)
            stored, scale, block = scales_of(by, n, k, dtype)
            dense = scale.double().repeat_interleave(block[0], 0)[:n]
            dense = dense.repeat_interleave(block[1], 1)[:, :k]
            exact[linear] = tensors[key].double() * dense
            stored = SHAPES.get(by, {}).get(shape, lambda s: s)(stored)
            tensors[f"{linear}.{scale_name}"] = stored.contiguous()
            if inputs == "static":
                own = "activation_scale" if scale_name.endswith("inv") else "input_scale"
                tensors[f"{linear}.{own}"] = torch.tensor(0.5, dtype=dtype)

    change_tensors(tmp_path, change)
    change_config(tmp_path, lambda said: said.update(quantization_config=config))
    loaded = load(package, tmp_path)
    report = package.models.quantize_model_(loaded)
    assert set(report.adopted) == exact.keys() and not report.converted
    assert report.instead == ({} if instead is None else dict.fromkeys(exact, instead))
    for linear, values in exact.items():
        module = loaded.get_submodule(linear)
        assert PROJECTION.search(linear) and module.activation_scheme == inputs
        if inputs == "static":
            assert module.activation_scale.item() == 0.5
        ours = package.reference.dequantize(module.weight, module.weight_scale_inv, 128)
        assert torch.equal(ours, values), linear


def test_each_format_has_a_case(package):
    formats = package.models.formats
    served = {config["quant_method"] for config, *_ in CASES.values()}
    loaded = {format.method for format in formats.FORMATS if format.read_config is not None}
    assert served == loaded - {"mxfp4"}  # experts alone
    for name, (config, *_) in CASES.items():
        transformers_own = name in ("finegrained, block", "finegrained, tensor")
        assert (formats.layouts_of(config) is None) == transformers_own, name
