"""A reader of the KV events of a manager with recurrent states can tell how much of a prefix the manager would find."""

from __future__ import annotations

from contextlib import ExitStack

import numpy as np
import pytest

from kvcache import KVEvents, PagedKVCacheManager, TextContext
from kvcache.events.wire import hashes_of
from kvcache.pool.pages_below import last_end
from tests.kvcache.events.mirror import Known, Mirror
from tests.kvcache.random_model.run import Model

ANY = "tcp://127.0.0.1:0"
TOLD = {"kv_events": KVEvents(ANY, ANY)}


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shortens the time until a follower learns that it has lost the last message."""
    monkeypatch.setattr("kvcache.endpoints.publisher._QUIET_S", 0.02)


def told_of(known: Known, group: int, medium: str = "GPU") -> set[int]:
    return set((known.groups.get(group, Known()) if group else known).there.get(medium, {}))


def there(index: object) -> set[int]:
    published = np.flatnonzero(index.published).astype(np.int32)  # type: ignore[attr-defined]
    return set(hashes_of(index.digests_of(published)).tolist())  # type: ignore[attr-defined]


def promised(known: Known, hashes: list[int]) -> int:
    """Returns how many pages of this prompt a reader of the events expects the manager to find."""
    pages, states = told_of(known, 0), told_of(known, 1) | told_of(known, 1, "CPU")
    run = next((at for at, one in enumerate(hashes) if one not in pages), len(hashes))
    return max((at for at in range(1, run + 1) if hashes[at - 1] in states), default=0)


def found(manager: PagedKVCacheManager, replica_idx: int, context: TextContext) -> tuple[int, list[int]]:
    """Returns how many pages a new request with these tokens would find. Also returns the hashes of its full pages."""
    replica = manager._replicas.each[replica_idx]
    hasher = replica.hasher(None, context)
    digests = hasher.digests(context.tokens, 0, (context.current_length - 1) // replica.page_size)
    (pages,) = replica.tables.run(0, digests).pages
    # A request's own claim may evict a state. `match` foresees this eviction, but no reader of the events can, so the
    # claim is left out here.
    return last_end(replica.kept.ends(digests[: len(pages)])), hashes_of(digests).tolist()


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("seed", "features"),
    [
        (seed, one)
        for seed in range(5)
        for one in (("states apart", "replicas"), ("states in slabs",), ("states apart", "host"))
    ],
)
def test_a_reader_expects_as_much_of_a_prompt_as_the_manager_finds(seed: int, features: tuple[str, ...]) -> None:
    moves = Model.of(seed, ("drafts", "forks", "preemption", "batches", "resets", *features), TOLD)
    manager = moves.manager
    if not moves.caching:
        assert manager.kv_event_endpoints == []
        return
    assert len(manager.kv_event_endpoints) == manager.num_replicas
    with ExitStack() as stack:
        mirrors = [stack.enter_context(Mirror(ends).begin()) for ends in manager.kv_event_endpoints]
        for _ in range(6):
            for _ in range(20):
                moves.move()
            for replica, mirror in enumerate(mirrors):
                mirror.settle(manager, replica)
                assert told_of(mirror, 0) == there(manager._replicas.each[replica].pool.index)
                assert told_of(mirror, 1) == there(manager.states[replica].pool.index)
                of_groups = (manager._replicas.tiers, manager._replicas.state_tiers) if "host" in features else ()
                for group, tiers in enumerate(of_groups):
                    assert tiers is not None
                    assert told_of(mirror, group, "CPU") == there(tiers.host.pool.index)
                for context in [one.context for one in moves.live.values()]:
                    again = TextContext(context.tokens.tolist(), 4096, "again", cache_salt=context.cache_salt)
                    again.extra_keys = context.extra_keys
                    count, hashes = found(manager, replica, again)
                    assert promised(mirror, hashes) == count
    every = [event for mirror in mirrors for event in mirror.events]
    kinds = {event["kv_cache_spec_kind"] for event in every if event["type"] == "BlockStored"}
    assert kinds <= {"full_attention", "mamba"}
    assert {event["group_idx"] for event in every if event.get("kv_cache_spec_kind") == "mamba"} <= {1}
    manager.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_reader_of_events_knows_the_pages_of_each_table_and_the_states_after_them(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvcache.endpoints.publisher._QUIET_S", 0.02)
    features = ("states in slabs" if seed % 2 else "states apart", "window", *["chunk"] * (seed > 2))
    moves = Model.of(seed, ("forks", "preemption", "drafts", *features), TOLD)
    manager = moves.manager
    with ExitStack() as stack:
        mirrors = [stack.enter_context(Mirror(ends).begin()) for ends in manager.kv_event_endpoints]
        for _ in range(4 if moves.caching else 0):
            for _ in range(30):
                moves.move()
            for replica, mirror in enumerate(mirrors):
                mirror.settle(manager, replica)
                mirror.check_same(manager, replica)
                index = manager.states[replica].pool.index
                states = mirror.groups.get(len(manager.layer_tables.tables), Known())
                published = np.flatnonzero(index.published).astype(np.int32)
                assert set(states.there.get("GPU", {})) == set(hashes_of(index.digests_of(published)).tolist())
                assert states.spec in (None, ("mamba", None))
    manager.close()
