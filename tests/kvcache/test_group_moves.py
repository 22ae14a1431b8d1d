"""Random moves on managers of groups of layers, with hints and quotas, and on their model: every answer agrees."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kvcache.group_moves import GroupMoves
from tests.kvcache.hinted_moves import HintedMoves
from tests.kvcache.moves import SeededChooser


@pytest.mark.parametrize(("seed", "kind"), [*((at, GroupMoves) for at in range(3)), (5, HintedMoves), (4, HintedMoves)])
def test_seeded_moves_with_groups(seed: int, kind: type[GroupMoves]) -> None:
    """4,000 moves, in which what groups add happens often enough to be tested."""
    seen: Counter[str] = Counter()
    for number in range(20):
        moves = kind(SeededChooser(seed * 1000 + number))
        for _ in range(200):
            moves.move()
        moves.finish()
        seen += moves.seen + moves.of_groups()
        seen["evicted"] += moves.manager.metrics.evictions
        seen["compared"] += moves.kv.compared
    least = {"hit": 10, "shared": 5, "refused": 20, "evicted": 30, "fork": 15, "run_batch": 50, "reset": 3}
    if kind is HintedMoves:
        least |= {"hint": 100, "evicted before its turn": 20, "evicted above a quota": 20, "evicted after its time": 2}
    least |= {"came back beyond the first table": 1, "came back": 40, "moved back": 15, "fits": 50, "does not fit": 2}
    least |= {"chunk": 50, "slid": 100, "hit shortened": 5, "evicted beyond the first table": 30, "lease": 50}
    assert {event: seen[event] for event, count in least.items() if seen[event] < count} == {}
