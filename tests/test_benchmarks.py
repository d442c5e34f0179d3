"""The pages of the GPU benchmarks come from their committed results."""

import json
import sys

import pytest
from project import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import cpu
import end_to_end
import gpu_report

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
