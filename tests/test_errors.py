"""Bad input raises, names what was required and what came, and writes nothing."""

import re

import pytest
import torch
from every_call import calls, same

FP8 = torch.float8_e4m3fn
pytestmark = pytest.mark.usefixtures("on_device")


@pytest.fixture
def package(best_package):
    return best_package


def f32(*shape):
    return torch.randn(shape)


def fp8(*shape):
    return torch.randn(*shape).to(FP8)


# name -> (call, what the message must say)
CASES = {
    "x dtype": (lambda p: p.rmsnorm(f32(2, 8).double(), f32(8)), "x must be .* got float64"),
    "weight length": (lambda p: p.rmsnorm(f32(2, 8), f32(7)), r"weight .* \[8\], got \[7\]"),
    "weight dtype": (
        lambda p: p.rmsnorm(f32(2, 8), f32(8).half()),
        "weight must be float32 or have the dtype of x, got float16 and float32",
    ),
    "out not contiguous": (
        lambda p: p.rmsnorm(f32(2, 8), f32(8), out=f32(8, 2).t()),
        "out must be contiguous in its last dimension, got a stride of 2",
    ),
    "residual dtype": (
        lambda p: p.rmsnorm(f32(2, 8), f32(8), residual=f32(2, 8).half()),
        "residual must have the dtype of x",
    ),
    "residual shape": (
        lambda p: p.rmsnorm(f32(2, 8), f32(8), residual=f32(3, 8)),
        r"residual must have shape \[2, 8\], got \[3, 8\]",
    ),
    "residual expanded": (
        lambda p: p.rmsnorm(f32(2, 8), f32(8), residual=f32(1, 8).expand(2, 8)),
        "residual is written, so its rows must not overlap",
    ),
    "residual not foldable": (
        lambda p: p.rmsnorm(f32(2, 3, 8), f32(8), residual=f32(3, 2, 8).transpose(0, 1)),
        "leading dimensions must fold",
    ),
    "residual_out alone": (
        lambda p: p.rmsnorm(f32(2, 8), f32(8), residual_out=f32(2, 8)),
        "residual_out must come with a residual, got none",
    ),
    "residual_out dtype": (
        lambda p: p.rmsnorm(f32(2, 8), f32(8), residual=f32(2, 8), residual_out=f32(2, 8).half()),
        "residual_out must have the dtype of x, got float16 and float32",
    ),
    "residual beside residual_out": (
        lambda p: p.rmsnorm(f32(2, 8), f32(8), residual=f32(2, 8).half(), residual_out=f32(2, 8)),
        "residual must have the dtype of x, got float16 and float32",
    ),
    "out shape": (
        lambda p: p.rmsnorm(f32(2, 8), f32(8), out=f32(2, 9)),
        r"out must have shape \[2, 8\], got \[2, 9\]",
    ),
    "out dtype": (
        lambda p: p.rmsnorm(f32(2, 8), f32(8), out=f32(2, 8).half()),
        "out must be FP8 or have the dtype of x, got float16 and float32",
    ),
    "fp8 dtype": (
        lambda p: p.quantize_fp8(f32(2, 8), fp8_dtype=torch.float8_e5m2),
        "fp8_dtype must be one of .* got torch.float8_e5m2",
    ),
    "scale count": (
        lambda p: p.quantize_fp8(f32(2, 8), scale=f32(2)),
        r"scale must be one float32 value, got float32 \[2\]",
    ),
    "scale dtype": (
        lambda p: p.quantize_fp8(f32(2, 8), scale=f32(1).half()),
        "scale must be one float32 value, got float16",
    ),
    "group size": (lambda p: p.quantize_fp8(f32(2, 8), group_size=100), "group_size .* got 100"),
    "group and static": (
        lambda p: p.quantize_fp8(f32(2, 8), group_size=128, scale=f32(1)),
        "group_size must be 0",
    ),
    "scales shape": (
        lambda p: p.quantize_fp8(f32(2, 8), out=(fp8(2, 8), f32(2, 2))),
        r"scales must have shape \[2, 1\], got \[2, 2\]",
    ),
    "scale_ub": (lambda p: p.quantize_fp8(f32(2, 8), scale_ub=-1.0), "scale_ub .* got -1"),
    "odd halves": (lambda p: p.swiglu(f32(2, 7)), "even number of columns, got 7"),
    "activation": (lambda p: p.swiglu(f32(2, 8), activation="relu"), "activation .* got 'relu'"),
    "up shape": (lambda p: p.swiglu(f32(2, 8), f32(2, 7)), "up must have the shape of x"),
    "up dtype": (lambda p: p.swiglu(f32(2, 8), f32(2, 8).half()), "up must have the dtype of gate"),
    "too many rows": (
        lambda p: p.skinny_gemm(fp8(65, 8), fp8(4, 8)),
        r"at most 64 rows, got a of \(65, 8\); gemm takes any number",
    ),
    "K differs": (lambda p: p.skinny_gemm(fp8(2, 8), fp8(4, 9)), r"K of a, got \[4, 9\]"),
    "mixed dialects": (
        lambda p: p.skinny_gemm(fp8(2, 8), f32(4, 8).to(torch.float8_e4m3fnuz)),
        "one dtype, .* got float8_e4m3fn and float8_e4m3fnuz",
    ),
    "mixed halves": (
        lambda p: p.skinny_gemm(f32(2, 8).half(), f32(4, 8).bfloat16()),
        "got float16 and bfloat16",
    ),
    "float32 operands": (lambda p: p.skinny_gemm(f32(2, 8), f32(4, 8)), "got float32 and float32"),
    "scale of 16 bits": (
        lambda p: p.skinny_gemm(f32(2, 8).half(), f32(4, 8).half(), None, f32(1)),
        "scales are for FP8 operands",
    ),
    "scale_a shape": (
        lambda p: p.skinny_gemm(fp8(2, 300), fp8(4, 300), f32(3, 1)),
        r"scale_a must have shape \[1\], \[2, 1\] or \[2, 3\], got \[3, 1\]",
    ),
    "scale_w shape": (
        lambda p: p.skinny_gemm(fp8(2, 300), fp8(4, 300), None, f32(4, 3)),
        r"scale_w must have shape \[1\], \[4, 1\] or \[1, 3\], got \[4, 3\]",
    ),
    "bias dtype": (
        lambda p: p.skinny_gemm(fp8(2, 8), fp8(4, 8), bias=f32(4).int()),
        "bias must be float32, float16 or bfloat16, got int32",
    ),
    "bias length": (
        lambda p: p.skinny_gemm(fp8(2, 8), fp8(4, 8), bias=f32(5)),
        r"bias must have shape \[4\], got \[5\]",
    ),
    "w not contiguous": (lambda p: p.skinny_gemm(fp8(2, 8), fp8(8, 4).t()), "w must be contiguous"),
    "linear w dtype": (
        lambda p: p.fp8_linear(f32(2, 8), f32(4, 8), f32(1)),
        "fp8_dtype must be one of .* got torch.float32",
    ),
}


# What a beginner passes: (call, what the message must say).
NO_TENSORS = {
    "no weight": (lambda p: p.rmsnorm(f32(2, 8), None), "weight must be a torch.Tensor, got None"),
    "list for x": (lambda p: p.rmsnorm([1.0], f32(1)), "x must be a torch.Tensor, got a list"),
    "list for weight": (lambda p: p.rmsnorm(f32(2, 1), [1.0]), "weight must .* got a list"),
    "list for residual": (
        lambda p: p.rmsnorm_fp8(f32(2, 8), f32(8), 1e-6, [1.0]),
        "residual must",
    ),
    "number for scale": (lambda p: p.quantize_fp8(f32(2, 8), scale=0.5), "scale must .* a float"),
    "list for up": (lambda p: p.swiglu(f32(2, 8), [1.0]), "up must be a torch.Tensor, got a list"),
    "list to swiglu_fp8": (lambda p: p.swiglu_fp8([1.0]), "x must be a torch.Tensor, got a list"),
    "no w": (lambda p: p.skinny_gemm(fp8(2, 8), None), "w must be a torch.Tensor, got None"),
    "number for scale_a": (lambda p: p.skinny_gemm(fp8(2, 8), fp8(4, 8), 0.5), "scale_a must"),
    "no scale_w": (lambda p: p.fp8_linear(f32(2, 8), fp8(4, 8), None), "scale_w must .* got None"),
    "no scale": (lambda p: p.to_native_fp8(fp8(2, 8), None), "scale must be a torch.Tensor"),
    "scalar to rmsnorm": (
        lambda p: p.rmsnorm(f32(), f32(1)),
        "x must have .* dimension, got a s",
    ),
    "scalar to quantize": (lambda p: p.quantize_fp8(f32()), "x must have at least one dimension"),
    "scalar to swiglu": (lambda p: p.swiglu(f32()), "x must have at least one dimension"),
    "scalar to swiglu_fp8": (lambda p: p.swiglu_fp8(f32()), "x must have at least one dimension"),
    "scalar a": (lambda p: p.skinny_gemm(fp8(1)[0], fp8(4, 8)), "at least one dimension"),
    "scalar to fp8_linear": (lambda p: p.fp8_linear(f32(), fp8(4, 8), f32(1)), "at least one dim"),
    "float64 to quantize": (lambda p: p.quantize_fp8(f32(2, 8).double()), "x must be .* float64"),
}


@pytest.mark.parametrize("case", NO_TENSORS)
def test_what_is_no_tensor_or_has_no_rows(package, case):
    call, message = NO_TENSORS[case]
    with pytest.raises((TypeError, ValueError, RuntimeError), match=message) as raised:
        call(package)
    error = raised.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)


@pytest.mark.parametrize("case", CASES)
def test_message(package, case):
    call, message = CASES[case]
    with pytest.raises((RuntimeError, ValueError)) as raised:
        call(package)
    assert re.search(message, str(raised.value).replace("\n", " ")), raised.value


def test_nothing_is_written_on_error(package):
    x, residual = f32(2, 8), f32(2, 8)
    before, out = residual.clone(), torch.full((2, 8), 7.0)
    with pytest.raises(RuntimeError):
        package.rmsnorm(x, f32(7), residual=residual, out=out)
    assert torch.equal(residual, before) and (out == 7).all()


def test_outputs_may_not_share_memory_with_inputs(package):
    x = f32(4, 16)
    with pytest.raises(RuntimeError, match="out is written and must not share memory with x"):
        package.rmsnorm(x, f32(16), out=x)
    buffer = f32(4, 32)
    with pytest.raises(RuntimeError, match="must not share memory"):
        package.rmsnorm(buffer[:, :16], f32(16), out=buffer[:, 8:24])
    residual = f32(4, 16)
    for sum_out, name in ((residual, "residual"), (x, "x")):
        with pytest.raises(
            RuntimeError, match=f"residual_out .* must not share memory with {name}"
        ):
            package.rmsnorm(x, f32(16), residual=residual, residual_out=sum_out)
    with pytest.raises(
        RuntimeError, match="out is written and must not share memory with residual"
    ):
        package.rmsnorm(x, f32(16), residual=residual, residual_out=f32(4, 16), out=residual)
    # Side by side in one buffer is no overlap.
    package.rmsnorm(buffer[:, :16], f32(16), out=buffer[:, 16:])


@pytest.mark.usefixtures("gpu")
def test_mixed_devices(package):
    with pytest.raises(RuntimeError, match="weight must be on the device of x"):
        package.rmsnorm(f32(2, 8).cuda(), f32(8).cpu())


@pytest.mark.parametrize("rows", [2, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_bias_of_another_floating_dtype_is_converted(package, device, dtype, rows):
    """The checkpoint decides what dtype a bias has, not its user."""
    w = torch.randn(16, 32).to(package.native_fp8_dtype(device))
    x, scale, bias = torch.randn(rows, 32), torch.ones(16, 1), torch.randn(16).to(dtype)
    for out_dtype in (torch.float32, torch.bfloat16):
        arguments = {"out_dtype": out_dtype}
        actual = package.fp8_linear(x, w, scale, bias=bias, **arguments)
        assert torch.equal(actual, package.fp8_linear(x, w, scale, bias=bias.float(), **arguments))
        assert not torch.equal(actual, package.fp8_linear(x, w, scale, **arguments))
    a = x[:2].bfloat16()
    actual = package.skinny_gemm(a, w, None, scale, bias=bias)
    assert torch.equal(actual, package.skinny_gemm(a, w, None, scale, bias=bias.float()))


def test_one_operand_without_data_never_leaves_a_result_unset(best_package, device):
    """On the meta device torch asks an op for shapes alone: then nothing may look computed."""
    refused = set()
    for call in calls(best_package, device):
        expected = call.fresh().run(best_package)
        for path, tensor in call.tensors().items():
            changed = call.fresh().with_tensor(path, tensor.to("meta"))
            try:
                found = changed.run(best_package)
            except (RuntimeError, ValueError, NotImplementedError):
                refused.add(call.name)
                continue
            for one, other in zip(found, expected, strict=True):
                # Of one operand, or of one that is not read.
                assert one.device.type == "meta" or same(one, other), f"{call}: {path}"
    assert {"rmsnorm", "swiglu", "gemm", "skinny_gemm", "fused_moe", "grouped_gemm"} <= refused
