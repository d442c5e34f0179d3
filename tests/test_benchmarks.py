"""The pages of the GPU benchmarks come from their committed results."""

import json
import random
import sys

import pytest
from project import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import cpu
import end_to_end
import gemm_tiles
import gpu_report
import serving

import gemm


@pytest.mark.parametrize("name", ["h200"])
def test_page_is_what_the_results_say(name):
    assert (gpu_report.DOCS / f"{name}_benchmarks.md").read_text() == gpu_report.page(name)


def test_page_of_gemm_is_what_the_results_say():
    saved = json.loads((gpu_report.RESULTS / "h200_gemm.json").read_text())
    assert (gpu_report.DOCS / "h200_gemm.md").read_text() == gemm.document(saved)


def test_overlapping_launches_are_counted_once():
    launches = [(0.0, 10.0, "product"), (6.0, 12.0, "waits"), (7.0, 9.0, "inside"), (20, 21, "a")]
    assert end_to_end.time_by_name(launches) == {
        "product": 10.0, "waits": 2.0, "inside": 0.0, "a": 1.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_sm90_tst_64x8_64x16_2x1_v_bz_splitK_TNT", "matrix products"),
        ("void rocm_kernels::cuda::skinny_gemm_ring_kernel<Operands>", "matrix products"),
        ("triton_red_fused__scaled_mm__to_copy_abs_amax_8", "torch.compile's kernels"),
        ("void rocm_kernels::(anonymous namespace)::rms_norm_fp8_kernel<half>", "norm and FP8"),
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


def test_kernels_of_a_server_by_class():
    times = {
        "rms_norm_fp8_kernel<bf16>": 2.0,
        "vllm::fused_add_rms_norm_static_fp8_quant_kernel": 3.0,
        "void swiglu_fp8_kernel": 1.0,
        "skinny_gemm_register_pipeline": 10.0,
        "nvjet_tst_192x192_NNT": 1.0,
        "paged_attention_ll4mi_QKV_mfma16_kernel": 4.0,
        "vllm::dynamic_per_token_scaled_fp8_quant_kernel": 0.5,
        "ncclDevKernel_AllReduce_Sum_bf16": 6.0,
    }
    assert serving.breakdown(times) == {
        "communication": 6.0,
        "SwiGLU": 1.0,
        "RMSNorm": 5.0,
        "quantisation": 0.5,
        "attention": 4.0,
        "GEMM": 11.0,
        "other": 0.0,
    }


def test_the_fit_of_tiles_finds_what_made_the_times():
    """Times that the model gives, 3 % apart from it; judged on products that it has not seen."""
    chance = random.Random(5)
    tiles = {("128", "128"): (0.4, 2.0), ("256", "128"): (0.7, 3.0), ("128", "64"): (0.3, 1.5)}
    rows = [
        {"kind": "row", "m": m, "n": n, "k": k, "us": 1, "block_m": block_m, "block_n": block_n,
         "rows": "a", "cluster_m": "1", "cluster_n": "1", "schedule": schedule, "split_k": split}
        for m, n, k in [(chance.randrange(64, 4096), chance.randrange(512, 9000),
                         chance.randrange(512, 9000)) for _ in range(60)]
        for block_m, block_n in tiles
        for schedule, split in (("data_parallel", "1"), ("split_k", "3"), ("hybrid", "1"))
    ]  # fmt: skip
    fit = gemm_tiles.Fit(rows)
    true = {tile: tiles[tile[1:3]] for tile in fit.tiles}
    fit.us = fit.predict(gemm_tiles.START, true)
    fit.us *= [chance.uniform(0.97, 1.03) for _ in rows]
    p, found = fit.run(2)
    assert fit.regret(fit.predict(p, found), fit.judged).mean() < 1.03
    # What a tile takes is told from what its end takes only roughly.
    for tile, (chunk, _) in true.items():
        assert found[tile][0] == pytest.approx(chunk, rel=0.2)
    report = gemm_tiles.report(fit, p, found)
    assert "{128, 64, false, {0." in report and "judged: 6 products" in report


def test_the_cut_of_a_product_is_the_kernels():
    row = {"kind": "block", "m": 512, "n": 2112, "k": 7168, "block_m": 128, "block_n": 128,
           "rows": "a", "cluster_m": 2, "cluster_n": 1,
           "schedule": "split_k", "split_k": 2}  # fmt: skip
    # 2 x 17 tiles of pairs, split in two: 68 units for 66 workers, of 28 of 56 chunks.
    assert gemm_tiles.geometry(row)[:2] == (56, 2)
    # Streamed: less than one round, so all 34 x 56 chunks over 66 workers.
    row |= {"schedule": "hybrid", "split_k": 1}
    assert gemm_tiles.geometry(row)[:2] == (29, 1) and gemm_tiles.geometry(row)[4:] == (2, 1.0)
