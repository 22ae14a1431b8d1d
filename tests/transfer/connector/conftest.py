"""Fixtures that the tests of this folder share."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.transfer.pair_model import GroupSpec, Side
from tests.transfer.pair_ranks import EngineUnderTest, LocalRank

FULL = (GroupSpec(layers=(0, 1)),)
PLAIN = Side()


@pytest.fixture
def engine() -> Iterator[Callable[..., EngineUnderTest]]:
    engines: list[EngineUnderTest] = []

    def make(engine_id: str, groups: Any = FULL, side: Side = PLAIN, **options: Any) -> EngineUnderTest:
        ranks = [LocalRank() for _ in range(side.tp * side.pp)]
        engines.append(EngineUnderTest(ranks, groups, side, engine_id, **options))
        return engines[-1]

    yield make
    for one in engines:
        one.close()
