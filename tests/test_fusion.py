"""The parts of a product and those of a row kernel meet in one kernel: what an AMD product whose
output is FP8 is made of."""

import subprocess

import pytest
from project import ROOT

KERNEL = """\
#include "{root}/blocks/rows/gpu/quantize.h"
#include "{root}/blocks/product/cdna/waves_sink.h"
#include "{root}/blocks/product/cdna/tile_loader.h"

namespace rocm_kernels::cdna {{
__global__ void __launch_bounds__(512)
    product_with_fp8_out([[maybe_unused]] const GemmProblem p, [[maybe_unused]] const Output out) {{
#if ROCM_KERNELS_CDNA
  constexpr int kCount = kVectorElements<bfloat16>;
  extern __shared__ __attribute__((aligned(16))) float lds[];
  TileLoader<MmaKind::kFp8, 16, 16, false> loader(DenseRows::of_a(p, 0), DenseRows::of_w(p, 0), p.k,
                                                  threadIdx.x);
  workgroup_barrier();
  float values[kCount];
  for (int i = 0; i < kCount; ++i) values[i] = lds[threadIdx.x * kCount + i];
  const int column = static_cast<int>(threadIdx.x) * kCount;
  store_output<bfloat16, Fit::kWhole>(values, 1.0f, 0, column, p.n, out);
#endif
}}
}}  // namespace rocm_kernels::cdna
"""


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_one_source_holds_a_product_and_a_quantised_output(tmp_path, toolchain, target):
    source, assembly = tmp_path / "fused.hip", tmp_path / "fused.s"
    source.write_text(KERNEL.format(root=ROOT))
    command = toolchain.device_command(source, assembly, target, assembly=True)
    subprocess.run(command, check=True)
    text = assembly.read_text()
    assert "v_cvt_pk_fp8_f32" in text and "s_barrier" in text
