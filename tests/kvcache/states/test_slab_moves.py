"""Random moves on a manager whose states and pages share one memory, and on its model: every answer agrees."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.kvcache.moves import SeededChooser
from tests.kvcache.states.hinted_slab_moves import HintedSlabMoves
from tests.kvcache.states.slab_moves import SlabMoves


@pytest.mark.parametrize(
    ("seed", "kind"), [*((at, SlabMoves) for at in range(3)), *((at, HintedSlabMoves) for at in (3, 4))]
)
def test_seeded_moves_with_states_in_slabs(seed: int, kind: type[SlabMoves]) -> None:
    """6,000 moves, in which what one memory adds happens often enough to be tested."""
    seen: Counter[str] = Counter()
    for number in range(30):
        moves = kind(SeededChooser(seed * 1000 + number))
        for _ in range(200):
            moves.move()
        seen += moves.seen + Counter({"moved": moves.moved, "replicas": len(moves.slabs) - 1})
        for model, states in zip(moves.slabs, moves.manager.states, strict=True):
            seen += Counter({"state hit": model.hits, "state evicted": states.evictions, "evicted": model.evictions})
        moves.finish()
        seen["compared"] += moves.kv.compared
    least = {"hit": 5, "refused": 20, "no state": 20, "fork": 20, "run_batch": 50, "cut": 50, "state hit": 5}
    least |= {
        "state evicted": 50,
        "moved": 4,
        "evicted": 100,
        "compared": 5000,
        "set back": 10,
        "all right": 5,
        "replicas": 5,
    }
    if kind is HintedSlabMoves:
        least |= {"hit": 2, "state hit": 2, "hint": 500, "a tenant's copies": 50, "a hinted copy": 300, "too much": 50}
    assert {event: seen[event] for event, count in least.items() if seen[event] < count} == {}
