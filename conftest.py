"""What the project's tests and the simulator's share: the slow ones run when --slow asks for them.

kernel-builder's ci-test, which has tests/ alone, does without: it picks its tests by a marker.
"""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests marked slow too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if "slow" in item.keywords]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if item not in slow]
