"""Runs these tests on several hosts. They are skipped if this user may not make network namespaces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_adapters.hf.runner import load_model
from tests.hosts.network import why_not
from tests.hosts.pair import Pair, two_hosts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("hosts") and (reason := why_not()):
            item.add_marker(pytest.mark.skip(reason=f"no hosts of their own: {reason}"))


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    return load_model(None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with two_hosts(tmp_path_factory.mktemp("pair")) as found:
        yield found


@pytest.fixture
def own_pair(tmp_path: Path) -> Iterator[Pair]:
    """Returns a pair of hosts for a test that ends the program of one side."""
    with two_hosts(tmp_path) as found:
        yield found
