"""Random moves on managers whose states are kept below the device, and on their models: every answer agrees."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.kvcache.moves import Keys, SeededChooser
from tests.kvcache.states.moves_below import BelowMoves, FileMoves


@pytest.mark.parametrize("seed", range(4))
def test_seeded_moves_with_states_in_host_memory(seed: int) -> None:
    """8,000 moves, in which what a host tier adds happens often enough to be tested."""
    seen: Counter[str] = Counter()
    for number in range(40):
        moves = BelowMoves(SeededChooser(seed * 1000 + number))
        for _ in range(200):
            moves.move()
        if moves.host:
            seen += moves.seen + Counter(
                {
                    "to the host": moves.below.stored,
                    "from the host": moves.below.loaded,
                    "hit": moves.models[0].hits,
                    "hit shortened": moves.models[0].shortened,
                    "evicted below": moves.below.stored - len(moves.below.there),
                    "pages from the host": moves.host.loaded,
                }
            )
        moves.finish()
        seen["compared"] += moves.kv.compared
    least = {"to the host": 250, "from the host": 20, "hit": 100, "hit shortened": 100, "evicted below": 100}
    least |= {"pages from the host": 8, "reset": 4, "cut": 150, "set back": 50}
    assert {event: seen[event] for event, count in least.items() if seen[event] < count} == {}


@pytest.mark.parametrize("seed", range(4))
def test_seeded_moves_with_states_in_slabs_and_files(seed: int, tmp_path: Path) -> None:
    """5,000 moves on one manager after another over the same folder."""
    seen: Counter[str] = Counter()
    past: list[tuple[list[int], Keys]] = []
    for number in range(25):
        moves = FileMoves(SeededChooser(seed * 1000 + number), tmp_path, (1, 2, 4, 7)[seed], past)
        for _ in range(200):
            moves.move()
        past = moves.past
        metrics = moves.manager.metrics
        seen += moves.seen + Counter(
            {
                "states read": metrics.file_states_read,
                "states written": metrics.file_states_written,
                "from the host": metrics.h2d_states_copied,
                "pages read": metrics.file_blocks_read,
                "moved": moves.moved,
            }
        )
        assert not metrics.file_states_refused
        moves.finish()
        moves.manager.close()
    least = {"states read": 5, "from the host": 20, "pages read": 10, "reset": 1}
    least |= {"moved": 5} if seed else {}
    assert {event: seen[event] for event, count in least.items() if seen[event] < count} == {}
