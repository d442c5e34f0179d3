"""How results are compared with the reference, and buffers that show stray writes.

The tolerances are those of the numerics contract: an FP8 result equals the reference's but for
elements whose float32 value sits within rounding distance of a tie, which may differ by one FP8
step, in at most 1 of 10,000 elements; a 16-bit result likewise, by one unit in the last place.
"""

from __future__ import annotations

import math

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
GUARD = 8  # elements around a guarded view, on each side
POISON = {1: 0x5A, 2: 0x5A5A, 4: 0x5A5A5A5A}
INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bits as integers of its element size."""
    return tensor.contiguous().view(INTEGER[tensor.element_size()])


def steps(tensor: torch.Tensor) -> torch.Tensor:
    """Each value's place in the order of its format: neighbours differ by one, -0 equals +0."""
    width = 8 * tensor.element_size()
    code = bits(tensor).to(torch.int64) & ((1 << width) - 1)
    magnitude = code & ((1 << (width - 1)) - 1)
    return torch.where(code >= 1 << (width - 1), -magnitude, magnitude)


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, rtol: float = 2e-6, atol: float | torch.Tensor = 0
) -> None:
    """Compares results that are rounded once from float32 values of about ``rtol`` precision.

    FP8 may differ by one step in 1 of 10,000 elements, 16-bit types in 5 of 1,000, and both in two
    elements more: short rows of few-bit numbers meet exact ties more often than continuous ones do.

    Args:
        rtol: relative error of the values before rounding; float32 results are held to it.
        atol: a difference that does not count, for functions whose tails cancel.
    """
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert actual.dtype == expected.dtype, (actual.dtype, expected.dtype)
    actual, expected = actual.cpu(), expected.cpu()
    nan = expected.float().isnan()
    assert torch.equal(actual.float().isnan(), nan), "NaN in other places than the reference has it"
    difference = (actual.float() - expected.float()).abs()
    exempt = nan | ((difference > 0) & (difference <= torch.as_tensor(atol).cpu()))
    actual_values, expected_values = actual.float()[~exempt], expected.float()[~exempt]
    if actual.dtype == torch.float32:
        torch.testing.assert_close(actual_values, expected_values, rtol=rtol, atol=1e-30)
        return
    distance = (steps(actual)[~exempt] - steps(expected)[~exempt]).abs()
    worst = int(distance.max()) if distance.numel() else 0
    where = _first(distance > 1, actual_values, expected_values) if worst > 1 else ""
    assert worst <= 1, f"off by {worst} steps: {where}"
    share = {1: 1e-4, 2: 5e-3}[actual.element_size()]
    count, allowed = int((distance > 0).sum()), math.ceil(share * distance.numel()) + 2
    assert count <= allowed, f"{count} of {distance.numel()} elements differ, {allowed} may"


def _first(where: torch.Tensor, actual: torch.Tensor, expected: torch.Tensor) -> str:
    index = int(where.nonzero()[0])
    return f"{actual[index].item()} for {expected[index].item()} at flat index {index}"


def assert_quantized_close(
    actual: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """FP8 values and their scales. A wrong scale cannot hide: it is compared at 2e-6."""
    torch.testing.assert_close(actual[1].cpu(), expected[1].cpu(), rtol=2e-6, atol=0)
    assert_close(actual[0], expected[0])


def assert_product_close(
    actual: torch.Tensor, exact: torch.Tensor, operands: tuple[torch.Tensor, torch.Tensor]
) -> None:
    """A matrix product: at most twice the error of float32 arithmetic rounded once.

    Of few outputs the greatest error is a matter of the order of K: by which torch's product goes
    depends on the CPU, so there it is the worst of four.

    Args:
        exact: the product in float64.
        operands: the dequantised a [M, K] and w [N, K] (bias left out: exact has it).
    """
    a, w = (operand.float().cpu() for operand in operands)
    exact = exact.double().cpu()
    offset = exact - operands[0].double().cpu() @ operands[1].double().cpu().t()
    pairs = [(a, w)]
    if exact.numel() < 10_000:
        options = {"generator": torch.Generator().manual_seed(0), "device": "cpu"}
        orders = (torch.randperm(a.shape[1], **options) for _ in range(3))
        pairs += [(a[:, order], w[:, order]) for order in orders]
    baselines = [
        ((x @ y.t()).double() + offset).to(actual.dtype).double() - exact for x, y in pairs
    ]
    error = actual.cpu().double() - exact
    # float32 arithmetic may be exact where the terms are few: half a unit is then granted.
    unit = exact.abs().max() * torch.finfo(torch.float32).eps / 2
    assert error.isfinite().all(), "not every output is finite"
    for norm in (torch.inf, 2):
        ours = torch.linalg.vector_norm(error, norm)
        worst = max(torch.linalg.vector_norm(baseline, norm) for baseline in baselines)
        allowed = 2 * worst + unit * (1 if norm == torch.inf else math.sqrt(error.numel()))
        assert ours <= allowed, f"error {ours:.3g} exceeds {allowed:.3g} (norm {norm})"


class Guarded:
    """A poisoned ``[rows, columns]`` view inside a larger buffer that must stay as it is."""

    def __init__(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
        size = torch.empty(0, dtype=dtype).element_size()
        self.shape = (rows, columns)
        self.raw = torch.full(
            (rows + 2, columns + 2 * GUARD), POISON[size], dtype=INTEGER[size], device=device
        )
        self.view = self.raw.view(dtype)[1 : rows + 1, GUARD : GUARD + columns]

    def assert_guards_intact(self) -> None:
        rows, columns = self.shape
        untouched = torch.ones_like(self.raw, dtype=torch.bool)
        untouched[1 : rows + 1, GUARD : GUARD + columns] = False
        poison = POISON[self.raw.element_size()]
        stray = (self.raw != poison) & untouched
        assert not stray.any(), f"written outside of the output: {stray.nonzero()[:4].tolist()}"


def strided(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zero-centred random values in a view whose rows lie further apart than they are long."""
    return torch.randn(rows, columns + 13, device=device).to(dtype)[:, 5 : 5 + columns]


def assert_near(found, right, norm=0.08):
    """Of layers: sums in another order make some FP8 codes differ by a step, an eighth at most, in
    each of four products: found up to a twentieth in the mean, behind two layers. A head that lacks
    a part is off by more.

    Args:
        norm: the largest error, by its norm; of an element by a quarter more, of the largest.
    """
    found, right = found.float(), right.float()
    assert ((found - right).norm() / right.norm()).item() < norm
    most = 1.25 * norm
    torch.testing.assert_close(found, right, rtol=most, atol=most * right.abs().max().item())
