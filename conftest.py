"""What the project's tests and the simulator's share: the slow ones run when --slow asks for them.

kernel-builder's ci-test, which has tests/ alone, does without: it picks its tests by a marker.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

BYTES_A_PROCESS = 5 << 30  # 3.7 GB when all tests have run: torch, transformers, the simulator
CORES = len(os.sched_getaffinity(0))

# Processes of `pytest -n` share the cores; before any of them imports torch.
if processes := os.environ.get("PYTEST_XDIST_WORKER_COUNT"):
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, CORES // int(processes))))


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist, which vLLM's environment has not
def pytest_xdist_auto_num_workers() -> int:
    """Of `pytest -n auto`: one a core, as far as memory goes."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(CORES, memory // BYTES_A_PROCESS))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if "slow" in item.keywords]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]


@pytest.fixture
def fetching() -> contextlib.AbstractContextManager:
    """For what pip fetches: if it fails where pip finds no package at all, the test is skipped."""

    @contextlib.contextmanager
    def block() -> Iterator[None]:
        try:
            yield
        except (subprocess.CalledProcessError, AssertionError):
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries", "1"]
            asked = [*pip, "--dry-run", "--ignore-installed", "--no-deps", "packaging"]
            done = subprocess.run(asked, capture_output=True, text=True)
            if done.returncode:
                why = done.stderr.strip().splitlines()[-1:]
                pytest.skip(f"pip reaches no index of packages: {' '.join(why)}")
            raise

    return block()
