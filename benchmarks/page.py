"""Shared by scripts that write results/<name>.json and make docs/<name>.md from it: arguments,
saving."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from gpu_report import DOCS, RESULTS
from result_text import result_text


def arguments(description: str, quick: str, peers: str | None = None) -> argparse.Namespace:
    """description: the script's docstring; quick: what --quick leaves; peers: whose there are."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--save", action="store_true", help="write the JSON and the page too")
    parser.add_argument("--quick", action="store_true", help=f"{quick}, to see that it works")
    parser.add_argument("--tflops", type=float, default=1979, help="FP8 peak of the GPU")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    if peers:
        parser.add_argument(
            "--peers", type=Path, help=f"folder that peers.py has built, for {peers}"
        )
    return parser.parse_args()


def publish(name: str, saved: dict, page: str, save: bool) -> None:
    """Prints the page of `saved`, and writes both if asked to."""
    print(page)
    if save:
        (RESULTS / f"{name}.json").write_text(result_text(saved))
        (DOCS / f"{name}.md").write_text(page)
