"""Attention over FP8 keys and values against its definition in float64, on every backend of
--device."""

import pytest
from test_attention import FLOATS, FP8, Case, lengths_for

pytestmark = pytest.mark.not_on("reference")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kv_dtype", FP8)
@pytest.mark.parametrize("size", [64, 128, 256])
def test_fp8(backend, size, kv_dtype, dtype):
    lengths = lengths_for(backend, 400, 65)
    case = Case(backend, lengths, size=size, dtype=dtype, kv_dtype=kv_dtype, heads=(16, 4))
    case.check(*case.run())


@pytest.mark.parametrize("size", [64, 128, 256, 512])
@pytest.mark.parametrize("rows", [4, 7])
def test_fp8_of_several_rows(backend, rows, size):
    """A KV head whose scale is 0 sees alike all keys that its queries see, and no others."""
    lengths, options = lengths_for(backend, 400, 65), {"heads": (16, 4), "causal": True}
    case = Case(backend, lengths, rows=rows, size=size, kv_dtype=FP8[0], **options)
    case.options["k_descale"][:, 1] = 0
    case.expected, case.lse = case.definition()
    case.check(*case.run())


@pytest.mark.parametrize("large", [1e-30, 1e-4, 3e4])
def test_fp8_keys_meet_queries_of_any_size(backend, large):
    case = Case(backend, lengths_for(backend, 50, 3), kv_dtype=FP8[0], size=128)
    case.q = (case.q.float() * large).to(case.dtype)
    case.options["softmax_scale"] = 0.1 / large
    case.expected, case.lse = case.definition()
    case.check(*case.run())
