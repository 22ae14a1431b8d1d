"""Tests on several hosts run where this user may make network namespaces."""

from typing import Any

import pytest

from scheduler_adapters.hf.runner import load_model
from tests.hosts.network import why_not


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("hosts") and (reason := why_not()):
            item.add_marker(pytest.mark.skip(reason=f"no hosts of their own: {reason}"))


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    return load_model(None)
