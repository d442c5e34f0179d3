"""vllm_step.py: what it makes of times and profiles. vLLM itself needs a GPU there."""

import sys

import pytest
from project import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import vllm_step


def kernels():
    """Steps of 3 layers: attention, then two kernels of 6 us of which the second begins 4 us before
    the first ends; 1 us between layers."""
    found, now = [], 0.0
    for _ in range(vllm_step.PROFILED * 3):
        for name, begin in (("FlashAttnFwdSm90", 0.0), ("moe_gate_up", 5.0), ("moe_down", 7.0)):
            found.append((now + begin, 6.0 if begin else 5.0, name))
        now += 14.0
    return found


def test_an_overlap_is_busy_once():
    sums = vllm_step.summed(kernels())
    assert sums["summed"] == pytest.approx(3 * 17)
    assert sums["busy"] == pytest.approx(3 * 13)
    assert sums["all"] == pytest.approx((3 * 14 * vllm_step.PROFILED - 1) / vllm_step.PROFILED)


def test_a_layer_stands_between_two_kernels_of_attention():
    of_a_step = [*kernels(), (1000.0, 5.0, "FlashAttnFwdSm90"), (1005.0, 3.0, "lm_head")]
    expected = [(0.0, 5.0, "FlashAttnFwdSm90"), (5.0, 6.0, "moe_gate_up"), (7.0, 6.0, "moe_down")]
    found = vllm_step.layer(of_a_step)
    assert [name for *_, name in found] == [name for *_, name in expected]
    assert [times for *times, _ in found] == [pytest.approx(times) for *times, _ in expected]
    assert vllm_step.layer([(0.0, 5.0, "lm_head")]) == []


class Answering:
    part, cells = "dense", [(1, 512)]

    def __init__(self, name, order):
        self.name, self.order = name, order

    def ask(self, *what):
        self.order.append(self.name)
        return {"error": "has ended"} if what[0] == "prompt" else {"ms": float(len(self.order))}


def test_sides_take_turns_and_errors_are_said(capsys):
    order = []
    sides = [Answering(name, order) for name in "ab"]
    sides[1].cells = [(1, 512), (8, 512)]
    found = vllm_step.timed(sides, float("inf"))
    prompts = len(vllm_step.PROMPTS)
    turns = ["ab" + "b" + "ab" * prompts, "ba" + "b" + "ba" * prompts]
    assert "".join(order).startswith("".join(turns))
    cells = [("step", 1, 512), ("step", 8, 512)]
    assert list(found) == [(cells[0], "a"), (cells[0], "b"), (cells[1], "b")]
    assert all(len(times) == vllm_step.ROUNDS for times in found.values())
    assert "dense, a, ('prompt', 128): has ended" in capsys.readouterr().out
    times = {(cells[0], name): [1.0, 3.0, 2.0] for name in "ab"}
    rows = vllm_step.rows_of("dense", times, {(cells[0], "a"): 0.5}, "GPU")
    title = "GPU, measured: 16 layers of Llama 8B, batch 1, context 512: "
    assert rows == [
        [title + "a", "2.00", "1.00", "3.00", "0.50"], [title + "b", "2.00", "1.00", "3.00", ""]
    ]  # fmt: skip
