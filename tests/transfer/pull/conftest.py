"""Fixtures that the tests of this folder share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transfer.replicas import Engine


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(*args: Any, **options: Any) -> Engine:
        engines.append(Engine(*args, **options))
        return engines[-1]

    yield make
    for one in engines:
        one.close()
