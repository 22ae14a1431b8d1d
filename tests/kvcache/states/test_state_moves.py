"""Random moves on a manager with recurrent states and on its model: every answer agrees."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kvcache.moves import SeededChooser
from tests.kvcache.states.state_moves import StateMoves


@pytest.mark.parametrize("seed", range(3))
def test_seeded_moves_with_states(seed: int) -> None:
    """4,000 moves, in which what states add happens often enough to be tested."""
    seen: Counter[str] = Counter()
    for number in range(20):
        moves = StateMoves(SeededChooser(seed * 1000 + number))
        for _ in range(200):
            moves.move()
        seen += moves.seen + Counter({"replicas": len(moves.models) - 1})
        for model in moves.each_states:
            seen += Counter(
                {
                    "state hit": model.hits,
                    "hit shortened": model.shortened,
                    "state evicted": model.state_evictions,
                    "replaced": model.replaced,
                }
            )
        moves.finish()
        seen["compared"] += moves.kv.compared
    least = {
        "all right": 15,
        "set back": 20,
        "no draft": 1,
        "hit": 10,
        "refused": 20,
        "fork": 20,
        "run_batch": 50,
        "reset": 3,
        "cut": 50,
    }
    least |= {"came back": 40, "moved back": 15, "fits": 50, "does not fit": 2}
    least |= {"replicas": 5, "state hit": 10, "hit shortened": 10, "state evicted": 50, "replaced": 20}
    assert {event: seen[event] for event, count in least.items() if seen[event] < count} == {}
