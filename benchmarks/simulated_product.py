"""Runs a product on the simulated GPU with operands at fixed addresses, for the simulated_*.py
scripts.

What the simulated_*.py share. Nothing that comes from here was measured on an AMD GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "tests")]

import simulated  # noqa: E402
from gpu_report import markdown  # noqa: E402

import simulator  # noqa: E402
from simulator import cycles  # noqa: E402

ALIGNMENT = 2 << 20  # of what a GPU allocates: where arrays lie must not depend on the host


def start(checks: bool = False) -> None:
    """The package on the simulated device, its launches played by the cycle model."""
    torch.manual_seed(0)
    simulated.functional()
    simulated.CHECKS = checks
    simulator.load_runtime().cycles(cycles.machine_for(simulated.TARGET, traced=4))


def aligned(values: torch.Tensor) -> torch.Tensor:
    storage = torch.empty(values.nbytes + ALIGNMENT, dtype=torch.uint8)
    begin = -storage.data_ptr() % ALIGNMENT
    result = storage[begin : begin + values.nbytes].view(values.dtype).view(values.shape)
    return result.copy_(values)


def last_played():
    """The cycle model's result of the last launch."""
    return simulator.load_runtime().last().cycles


def largest_shares(played, count: int) -> str:
    """What most of the SIMDs' cycles went to."""
    spent = played.raw["spent"]
    largest = sorted(spent, key=spent.get, reverse=True)[:count]
    return ", ".join(f"{name} {spent[name] / sum(spent.values()):.0%}" for name in largest)


def read_product(text: str) -> list:
    """'1024,4608,7168,block' -> numbers, and the kind of operands."""
    return [int(part) if part.isdigit() else part for part in text.split(",")]


def arguments(
    summary: str, products: list[str], form: str, name: str = "product"
) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument(f"--{name}", nargs="+", dest="product", default=products, help=form)
    parser.add_argument("--config", nargs="+", default=[None], help="texts of configs")
    return parser


def print_table(header: list[str], row: Callable[[str, str | None], list[str]], given) -> None:
    rows = [row(product, config) for product in given.product for config in given.config]
    print(markdown(header, rows))
