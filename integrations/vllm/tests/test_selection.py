"""What vLLM selects with the plugin on a faked gfx942: with the vLLM that is installed, and with
the Python files of the newest and of the oldest that the plugin is for, of which VLLM_NEWEST and
VLLM_OLDEST name the folders."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hooks import HOOKS, YOUNGER

HERE = Path(__file__).resolve().parent
VERSIONS = {
    "installed": None,
    "newest": os.environ.get("VLLM_NEWEST"),
    "oldest": os.environ.get("VLLM_OLDEST"),
}
ALL_PARTS = [
    "fp8_linear", "fp8_block_linear", "weight_only", "experts", "swiglu", "swiglu_pass", "norm",
    "skinny", "attention",
]  # fmt: skip


def parts_of(version):
    """The oldest has no table of fused activations."""
    return [part for part in ALL_PARTS if version != "oldest" or part != "swiglu"]


@pytest.fixture(params=VERSIONS)
def version(request):
    if request.param != "installed" and VERSIONS[request.param] is None:
        pytest.skip(f"VLLM_{request.param.upper()} names no folder of vLLM's Python files")
    return request.param


@pytest.fixture(scope="session")
def faked(tmp_path_factory):
    """Runs select_on_gfx942.py, with a distribution whose entry point is the platform."""
    folder = tmp_path_factory.mktemp("faked")
    metadata = folder / "faked_gfx942-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: faked-gfx942\nVersion: 1.0\n")
    entry = "[vllm.platform_plugins]\nfaked = faked_machine:platform\n"
    (metadata / "entry_points.txt").write_text(entry)

    @functools.cache
    def run(version: str, *moved: str, off: str = "", arch: str = "gfx942"):
        paths = [VERSIONS[version], folder, HERE]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
            "ROCM_KERNELS_VLLM_OFF": off,
            "FAKED_ARCH": arch,
            "HF_HUB_OFFLINE": "1",
        }
        command = [sys.executable, str(HERE / "select_on_gfx942.py"), *moved]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        assert lines, done.stdout[-3000:] + done.stderr[-3000:]
        return json.loads(lines[0].removeprefix("RESULT ")), done.stdout + done.stderr

    return run


@pytest.mark.parametrize("hook", HOOKS)
def test_the_hook_is_there(faked, version, hook):
    """A vLLM that has moved one fails here, by the hook's name."""
    result, _ = faked(version)
    if version == "oldest" and hook in YOUNGER:
        assert not result["hooks"][hook], f"vLLM {result['version']} has {hook}: it is not younger"
        return
    assert result["hooks"][hook], f"vLLM {result['version']} has no {hook}"


def test_every_part_is_on(faked, version, record_property):
    result, _ = faked(version)
    record_property("vllm", result["version"])
    assert result["rocm"] and result["on"] == parts_of(version)
    assert list(result["failed"]) == [p for p in ALL_PARTS if p not in parts_of(version)]


def test_linears_are_ours(faked, version):
    result, _ = faked(version)
    plain = ("static", "dynamic tensor", "token, tensor", "token, channel")
    assert result["linears"] == {
        **{name: "RocmKernelsFP8Linear" for name in plain},
        "block": "RocmKernelsFP8BlockLinear",
        "weight only": "RocmKernelsWeightOnlyLinear",
    }


def test_experts_are_ours(faked, version):
    """What vLLM is to run itself it selects itself, as without the plugin."""
    result, log = faked(version)
    experts = dict(result["experts"])
    assert experts.pop("limit") == [1.5]
    assert experts.pop("ours raises") == [["TRITON", "TritonExperts"]] * 2
    assert log.count("whose configs are not as they were (AttributeError: ") == 1
    ours = ("static", "dynamic tensor", "token, channel", "block", "expert parallel")
    sixteen_bit = ("16-bit", "16-bit, GPT-OSS")
    theirs = ("asked for", "LoRA", "not gated", "half a block", "many a token", "exchanged")
    assert experts == {
        **{name: ["TRITON", "RocmKernelsExperts"] for name in (*ours, *sixteen_bit)},
        **{name: ["TRITON", "TritonExperts"] for name in theirs},
    }


def test_fusion_passes_put_our_ops_into_graphs(faked, version):
    result, _ = faked(version)
    op = "rocm_kernels_vllm_1.{}.default".format
    assert result["graphs"] == {
        "static": [op("rms_norm_static_fp8_quant")],
        "static_add": [op("fused_add_rms_norm_static_fp8_quant")],
        "token": [op("rms_norm_dynamic_per_token_quant")],
        "token_add": [op("rms_norm_dynamic_per_token_quant")],
    }


def test_attention_is_ours_where_it_is_asked_for(faked, version):
    """And what it does not serve vLLM refuses, with the reason."""
    found = faked(version)[0]["attention"]
    served = ("16 bits", "FP8", "window and sinks")
    ours = "rocm_kernels_vllm.attention.RocmKernelsAttention"
    assert {name: found.pop(name) for name in served} == dict.fromkeys(served, ours)
    reasons = {
        "MLA": "MLA not supported",
        "encoder": "attention type encoder_only not supported",
        "E5M2": "kv_cache_dtype not supported",
        "float16 for bfloat16": "a 16-bit cache must have the dtype of queries",
        "head of 1024": "head_size not supported",
        "not causal": "non-causal attention not supported",
        "batch invariant": "batch invariance not supported",
    }
    assert found.keys() == reasons.keys()
    assert all(reasons[name] in text for name, text in found.items()), found


def test_drafts_may_have_our_attention(faked, version):
    found = faked(version)[0]["drafts"]
    assert len(found) == 4 and all(found.values()), found


def test_activations_and_16_bit_products_are_ours(faked, version):
    result, _ = faked(version)
    rows = 3 if "swiglu" in parts_of(version) else 0
    assert len(result["activation"]) == rows and all(result["activation"].values())
    assert result["gemm"] == ["ours", "vLLM's", "vLLM's"]


def test_products_on_other_gpus_of_amd_stay_with_vllm(faked):
    """The package has plain kernels alone for them: of linears that is better than none."""
    result, _ = faked("installed", arch="gfx90a")
    reason = "no matrix kernels for gfx90a"
    linears = result["linears"]
    assert linears.pop("block") == "TritonFp8BlockScaledMMKernel"
    assert set(linears.values()) == {"PlainFP8Linear", "PlainWeightOnlyLinear"}
    del result["experts"]["limit"], result["experts"]["ours raises"]
    assert {tuple(selected) for selected in result["experts"].values()} == {
        ("TRITON", "TritonExperts")
    }
    assert result["gemm"] == ["vLLM's"] * 3
    products = ("fp8_linear", "fp8_block_linear", "weight_only", "experts")
    on, _, off = result["what runs"].partition("; hooked in, and off here: ")
    assert off.startswith(", ".join(f"{part} ({reason})" for part in products) + ", ")
    assert "skinny (for gfx942 alone, got gfx90a)" in off and on == "rocm-kernels: on swiglu"


@pytest.mark.parametrize(
    "moved, part",
    [
        ("vllm.model_executor.kernels.linear:_POSSIBLE_FP8_BLOCK_KERNELS", "fp8_block_linear"),
        ("vllm.model_executor.layers.utils:rocm_unquantized_gemm", "skinny"),
        (
            "vllm.model_executor.layers.fused_moe.oracle.unquantized:"
            "select_unquantized_moe_backend",
            "experts",
        ),
        ("vllm.compilation.passes.fusion.rms_quant_fusion:FUSED_OPS", "norm"),
        ("vllm.model_executor.layers.fusion.fused_act_quant", "swiglu"),
        ("vllm.v1.attention.backends.registry:register_backend", "attention"),
    ],
)
def test_a_moved_hook_gets_one_sentence(faked, version, moved, part):
    """And the other parts run."""
    if part not in parts_of(version):
        pytest.skip("the oldest has not got it")
    result, log = faked(version, moved)
    name = moved.partition(":")[2] or moved
    absent = [p for p in ALL_PARTS if p not in parts_of(version)]
    assert sorted(result["failed"]) == sorted([part, *absent]) and name in result["failed"][part]
    assert result["on"] == [other for other in parts_of(version) if other != part]
    sentences = [
        line for line in log.splitlines() if "as its hook has moved" in line and name in line
    ]
    assert len(sentences) == 1 and result["version"] in sentences[0] and name in sentences[0]


def test_rays_workers_get_the_variables(faked, version):
    """And what is in them joins the names of vLLM's cached graphs, beside the parts that run."""
    found = faked(version)[0]["variables"]
    on = "rocm_kernels_vllm,1," + ",".join(parts_of(version))
    assert found == {
        "ROCM_KERNELS_VLLM": on,
        "ROCM_KERNELS_VLLM_OFF": "",
        "ROCM_KERNELS_VLLM_ON": None,
        "LOCAL_KERNELS": os.environ.get("LOCAL_KERNELS"),
    }


def test_parts_are_turned_off(faked):
    result, log = faked("installed", off="norm, swiglu_pass, nonsense")
    expected = [part for part in ALL_PARTS if part not in ("norm", "swiglu_pass")]
    assert result["on"] == expected and result["failed"] == {}
    assert "names 'nonsense', which is no part" in log
    assert result["graphs"]["static"] == ["_C.rms_norm_static_fp8_quant.default"]
