"""Random moves on managers of groups of layers with recurrent states, and on their model: every answer agrees."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import numpy as np
import pytest

from kvcache import KVEvents
from kvcache.events.wire import hashes_of
from tests.kvcache.events.mirror import Known, Mirror
from tests.kvcache.moves import SeededChooser
from tests.kvcache.states.group_state_moves import GroupSlabMoves, GroupStateMoves

ANY = "tcp://127.0.0.1:0"


@pytest.mark.parametrize(
    ("seed", "kind"), [(seed, kind) for seed in (0, 1) for kind in (GroupStateMoves, GroupSlabMoves)]
)
def test_seeded_moves_with_groups_and_states(seed: int, kind: type[GroupStateMoves]) -> None:
    """4,000 moves, in which what both bring together happens often enough to be tested."""
    seen: Counter[str] = Counter()
    for number in range(20):
        moves = kind(SeededChooser(seed * 1000 + number))
        for _ in range(200):
            moves.move()
        seen += moves.seen + moves.of_groups() + Counter({"replicas": len(moves.models) - 1})
        moves.finish()
        seen["evicted"] += moves.manager.metrics.evictions
        seen["compared"] += moves.kv.compared
    least = {"hit": 5, "refused": 20, "fork": 10, "run_batch": 30, "cut": 50, "chunk": 50, "reset": 3, "replicas": 5}
    least |= {"slid": 100, "evicted": 100, "evicted beyond the first table": 50, "hit shortened": 5, "state hit": 5}
    least |= {"state evicted": 50, "set back": 10, "all right": 5, "compared": 5000}
    least |= {"moved": 10, "no state": 10} if kind is GroupSlabMoves else {}
    assert {event: seen[event] for event, count in least.items() if seen[event] < count} == {}


@pytest.mark.parametrize("seed", range(6))
def test_a_reader_of_events_knows_the_pages_of_each_table_and_the_states_behind_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.events.publisher._QUIET_S", 0.02)
    kind = GroupSlabMoves if seed % 2 else GroupStateMoves
    moves = kind(SeededChooser(seed), {"kv_events": KVEvents(ANY, ANY)})
    manager = moves.manager
    with ExitStack() as stack:
        mirrors = [stack.enter_context(Mirror(ends).begin()) for ends in manager.kv_event_endpoints]
        for _ in range(4 if moves.caching else 0):
            for _ in range(30):
                moves.move()
            for replica, mirror in enumerate(mirrors):
                mirror.settle(manager, replica)
                mirror.same(manager, replica)
                index = manager.states[replica].index
                states = mirror.groups.get(len(manager.layer_tables.tables), Known())
                published = np.flatnonzero(index.published).astype(np.int32)
                assert set(states.there.get("GPU", {})) == set(hashes_of(index.digests_of(published)).tolist())
                assert states.spec in (None, ("mamba", None))
    manager.close()
