"""What large tensors alone reach on a whole GPU: rows that a block takes after its first, and
slices of rows after the first. On the simulator, by the launchers of a GPU of one compute unit, and
of launches of few items. The bits are those of the whole GPU in one launch."""

import ctypes
import math
import subprocess

import pytest
import torch
from compare import Guarded, assert_product_close, bits
from project import ROOT
from test_moe import check
from test_moe_configs import Experts

simulated = pytest.importorskip("simulated")
pytestmark = pytest.mark.usefixtures("on_the_simulator")

CPU = torch.device("cpu")
SOURCE = """\
#include "rmsnorm_fp8/rmsnorm_fp8_device.h"
#include "swiglu_fp8/swiglu_fp8_device.h"

using namespace rocm_kernels;

namespace {
DeviceFacts facts_of(int compute_units) {
  DeviceFacts facts;
  facts.compute_units = compute_units;
  facts.wave_size = 64;
  facts.fnuz = FNUZ;
  return facts;
}
template <typename Args>
void set_output(Args& args, void* out, float* scales, int64_t columns, int group) {
  args.out = out;
  args.out_stride = columns;
  args.out_dtype = FNUZ ? DType::kFloat8E4M3FNUZ : DType::kFloat8E4M3FN;
  args.scales = scales;
  args.scaling = group != 0 ? Scaling::kPerGroup : Scaling::kPerToken;
  args.group_size = group;
}
}  // namespace

extern "C" const char* norm(void* out, float* scales, const void* x, void* residual,
                            const void* weight, int64_t rows, int64_t columns, int group,
                            int compute_units) {
  RmsnormFp8Args args;
  args.rows = rows;
  args.hidden = columns;
  args.x = x;
  args.residual = residual;
  args.x_stride = args.residual_stride = columns;
  args.weight = weight;
  set_output(args, out, scales, columns, group);
  return launch_typed<bfloat16>(args, facts_of(compute_units), nullptr);
}
extern "C" const char* activation(void* out, float* scales, const void* gate, const void* up,
                                  int64_t rows, int64_t columns, int group, int compute_units,
                                  int64_t most_items) {
  SwigluFp8Args args;
  args.rows = rows;
  args.columns = columns;
  args.gate = gate;
  args.up = up;
  args.gate_stride = args.up_stride = columns;
  set_output(args, out, scales, columns, group);
  return launch_typed<bfloat16>(args, facts_of(compute_units), nullptr, most_items);
}
"""
WHOLE = 304
MANY = 1 << 30
# Columns, and rows of which one compute unit's blocks have at least three each: a team of each
# size, rows of no whole vectors, rows that no team holds.
SHAPES = [(128, 300), (512, 140), (1024, 70), (2048, 20), (4096, 20), (8192, 11), (16384, 7),
          (1001, 11), (4001, 11), (9001, 4), (40960, 3)]  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory, toolchain):
    import simulator

    folder = tmp_path_factory.mktemp("rounds")
    source, compiled, output = folder / "rounds.hip", folder / "rounds.o", folder / "librounds.so"
    source.write_text(SOURCE)
    fnuz = f"-DFNUZ={'true' if torch.float8_e4m3fnuz == simulated.NATIVE else 'false'}"
    extra = (f"-I{ROOT}", fnuz)
    command = toolchain.compile_command(source, compiled, (simulated.TARGET,), extra=extra)
    subprocess.run(command, check=True)
    command = toolchain.link_command([compiled], output)
    command[command.index("-lamdhip64")] = str(simulator.runtime())
    subprocess.run(command, check=True)
    simulator.load_runtime()
    loaded = ctypes.CDLL(str(output))
    pointers, size = [ctypes.c_void_p] * 4, ctypes.c_int64
    loaded.norm.argtypes = [*pointers, ctypes.c_void_p, size, size, ctypes.c_int, ctypes.c_int]
    loaded.activation.argtypes = [*pointers, size, size, ctypes.c_int, ctypes.c_int, size]
    loaded.norm.restype = loaded.activation.restype = ctypes.c_char_p
    return loaded


class Case:
    def __init__(self, rows, columns, group):
        self.rows, self.columns, self.group = rows, columns, group
        self.inputs = [torch.randn(rows, columns).bfloat16() for _ in range(2)]
        self.weight = torch.randn(columns).bfloat16()

    def outputs(self):
        groups = math.ceil(self.columns / self.group) if self.group else 1
        # In a guarded view of one row: the memory is contiguous, as the kernels are told.
        out = Guarded(1, self.rows * self.columns, simulated.NATIVE, CPU)
        return out, torch.full((self.rows, groups), math.nan)

    def norm(self, library, compute_units):
        (x, residual), (out, scales) = self.inputs, self.outputs()
        residual = residual.clone()
        written, read = (out.view, scales), (x, residual, self.weight)
        with simulated.checked(written, read):
            status = library.norm(
                out.view.data_ptr(), scales.data_ptr(), x.data_ptr(), residual.data_ptr(),
                self.weight.data_ptr(), self.rows, self.columns, self.group, compute_units,
            )  # fmt: skip
        return [*self.results(status, out, scales), bits(residual)]

    def activation(self, library, compute_units, most_items=MANY):
        (gate, up), (out, scales) = self.inputs, self.outputs()
        with simulated.checked((out.view, scales), (gate, up)):
            status = library.activation(
                out.view.data_ptr(), scales.data_ptr(), gate.data_ptr(), up.data_ptr(), self.rows,
                self.columns, self.group, compute_units, most_items,
            )  # fmt: skip
        return self.results(status, out, scales)

    @staticmethod
    def results(status, out, scales):
        assert status is None, status
        out.assert_guards_intact()
        assert not scales.isnan().any()
        return [bits(out.view), bits(scales)]


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("columns, rows", SHAPES)
@pytest.mark.parametrize("op", ["norm", "activation"])
def test_a_block_takes_row_after_row(library, op, columns, rows):
    case = Case(rows, columns, 0)
    assert_same(getattr(case, op)(library, 1), getattr(case, op)(library, WHOLE))


@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("columns, rows", [(1024, 20), (1001, 20), (96, 50)])
def test_an_activation_in_slices_of_rows(library, columns, rows, group):
    """Of 7 rows or so: the last is shorter."""
    case = Case(rows, columns, group)
    vectors = -(-columns // 8)
    most = 7 * (vectors + 128) - 3
    assert_same(case.activation(library, WHOLE, most), case.activation(library, WHOLE))


@pytest.mark.parametrize("kind", ["bfloat16", "fp8-row", "fp8-block", "mxfp4"])
def test_a_layer_in_slices_of_tokens(package, kind):
    """Rows of x so far apart that three of them span all that 31 bits can count."""
    from types import SimpleNamespace

    backend = SimpleNamespace(
        name="simulator", ops=simulated.functional(), device=CPU, fp8_dtype=simulated.NATIVE
    )
    tokens, hidden, stride = 8, 256, 1 << 28
    experts = Experts(kind, 4, hidden, 128, torch.bfloat16, backend)
    x = torch.empty(tokens * stride, dtype=torch.bfloat16)  # of which little is ever touched
    x = x.view(tokens, stride)[:, :hidden]
    x.copy_(torch.randn(tokens, hidden))
    weights = torch.rand(tokens, 2)
    ids = torch.stack([torch.randperm(4)[:2] for _ in range(tokens)]).int()
    check(backend, package, x, experts, weights, ids)


@pytest.mark.slow
def test_a_plain_product_in_slices_of_rows():
    """A launch counts 32,768 groups of 8 rows; 9 are left over."""
    simulated.functional()
    m, n, k = 8 * 32768 + 9, 4, 16
    a, w = (torch.randn(rows, k).to(simulated.NATIVE) for rows in (m, n))
    scale_a, scale_w = torch.rand(m, 1) + 0.5, torch.rand(n, 1) + 0.5
    config = next(
        f"plain {text.partition(' ')[2]}"
        for text in simulated.ops.gemm_configs(
            torch.empty(128, n), a[:128], w, scale_a[:128], scale_w, False
        ).splitlines()
    )
    out = Guarded(m, n, torch.float32, CPU)
    simulated.ops.gemm(out.view, a, w, scale_a, scale_w, None, config)
    out.assert_guards_intact()
    operands = a.double() * scale_a, w.double() * scale_w
    assert_product_close(out.view, operands[0] @ operands[1].t(), operands)
