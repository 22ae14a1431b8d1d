"""Random moves on the manager and on the model: every answer agrees, and `check()` holds after each move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kvcache.moves import Moves, SeededChooser

T = TypeVar("T")


class DrawnChooser:
    """Choices of Hypothesis, which shrinks them to the shortest that still fail."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def integer(self, low: int, high: int) -> int:
        return self._data.draw(st.integers(low, high))

    def pick(self, choices: Sequence[T]) -> T:
        return self._data.draw(st.sampled_from(choices))


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data(), st.integers(1, 40))
def test_drawn_moves(data: st.DataObject, count: int) -> None:
    moves = Moves(DrawnChooser(data))
    for _ in range(count):
        moves.move()
    moves.finish()


@pytest.mark.parametrize("seed", range(4))
def test_seeded_moves(seed: int) -> None:
    """3,500 moves, in which everything that can happen happens often enough to be tested."""
    seen: Counter[str] = Counter()
    for number in range(35):
        moves = Moves(SeededChooser(seed * 1000 + number))
        for _ in range(100):
            moves.move()
        moves.finish()
        seen += moves.seen
        seen["evicted"] += moves.manager.metrics.evictions
        seen["restored"] += moves.manager.metrics.h2d_blocks_copied
        seen["compared"] += moves.kv.compared
    least = {"hit": 15, "shared": 5, "refused": 20, "evicted": 30, "fork": 20, "run_batch": 50, "reset": 3}
    least |= {"lease": 50, "tell": 10, "outlived": 20}
    least |= {"ask": 50, "renamed": 5, "rename refused": 20}
    least |= {"stale": 25, "preempt": 60, "came back": 40, "moved back": 15, "fits": 50, "does not fit": 4}
    assert {event: seen[event] for event, count in least.items() if seen[event] < count} == {}
