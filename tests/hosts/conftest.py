"""Runs these tests on several hosts. They are skipped if this user may not make network namespaces."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scheduler_adapters.hf.runner import load_model
from tests.hosts.network import IPV4, IPV6, Family, why_not
from tests.hosts.pair import Pair, two_hosts


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("hosts") and (reason := why_not()):
            item.add_marker(pytest.mark.skip(reason=f"no hosts of their own: {reason}"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs each test that is marked `both_families` once over IPv4 and once over IPv6, and the others over IPv4."""
    if "family" in metafunc.fixturenames:
        is_marked = metafunc.definition.get_closest_marker("both_families") is not None
        families = [IPV4, IPV6] if is_marked else [IPV4]
        metafunc.parametrize("family", families, indirect=True, scope="module", ids=[one.name for one in families])


@pytest.fixture(scope="module")
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture(scope="session")
def tiny_model() -> Any:
    return load_model(None)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, family: Family) -> Iterator[Pair]:
    with two_hosts(tmp_path_factory.mktemp("pair"), family=family) as found:
        yield found


@pytest.fixture
def own_pair(tmp_path: Path, family: Family) -> Iterator[Pair]:
    """Returns a pair of hosts for a test that ends the program of one side."""
    with two_hosts(tmp_path, family=family) as found:
        yield found
