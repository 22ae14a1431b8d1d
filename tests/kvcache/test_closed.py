"""After `close`, callers can still give back what they hold, and can still read the manager's state. Every other call
is refused with an error that names the call.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvcache import ManagerClosedError, PagedKVCacheManager, TextContext
from kvcache.params import StateShape
from tests.kvcache.build import manager_of

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "host": {"host_slots": 20},
    "replicas": {"dp": 2},
    "states": {"params": {"states": StateShape(2, 2, 1, 1, 1, 2, torch.float32, torch.float32), "state_copies": 2}},
}


class Closed:
    """A manager that was closed with one running request, one leased request, and one request in an import."""

    def __init__(self, kind: dict[str, Any]) -> None:
        self.manager = manager = manager_of(60, page_size=4, checks=False, **kind)
        self.contexts = [TextContext(range(at, at + 10), 90, f"r{at}") for at in (0, 100)]
        for context in self.contexts:
            manager.external_claim(context.request_id, 0)
            assert manager.maybe_reserve(context)
            if not manager.states:
                context.update(1)
                manager.step([context])
        self.batch = manager.batch(self.contexts)
        self.lease = manager.lease("r0")
        self.reader = TextContext(range(11), 90, "reader")
        manager.external_claim("reader", 0)
        self.table = self.pending = self.copier = None
        if not manager.states:
            self.table = manager.block_table("r0")
            self.pending = manager.import_block_table(self.reader, self.table)
            assert self.pending is not None
            self.copier = manager.copier(self.pending) if self.pending.needs_copy else None
        manager.close()


REFUSED: dict[str, Callable[[Closed], object]] = {
    "external_claim": lambda it: it.manager.external_claim("new", 0),
    "claim": lambda it: it.manager.claim(TextContext([1], 9), 0).__enter__(),
    "claim where it is best": lambda it: it.manager.claim(TextContext([1], 9)).__enter__(),
    "maybe_reserve": lambda it: it.manager.maybe_reserve(it.contexts[0]),
    "reserve_batch": lambda it: it.manager.reserve_batch(it.contexts),
    "reserve_batch of a batch": lambda it: it.manager.reserve_batch(it.batch),
    "fork": lambda it: it.manager.fork(it.contexts[0], it.contexts[0].fork("child")),
    "batch": lambda it: it.manager.batch(it.contexts),
    "fetch": lambda it: it.manager.fetch(it.contexts),
    "fetch_ahead": lambda it: it.manager.fetch_ahead(it.contexts),
    "step": lambda it: it.manager.step(it.contexts),
    "admission": lambda it: it.manager.admission(TextContext([1], 9)),
    "get_or_recommend_replica": lambda it: it.manager.get_or_recommend_replica(TextContext([1], 9)),
    "prefetch": lambda it: it.manager.prefetch(TextContext([1], 9)),
    "block_table": lambda it: it.manager.block_table("r0"),
    "lease": lambda it: it.manager.lease("r0"),
    "import_block_table": lambda it: it.manager.import_block_table(it.contexts[0], it.table),  # type: ignore[arg-type]
    "extend_import": lambda it: it.manager.extend_import(it.reader, it.pending, it.table, last=True),  # type: ignore[arg-type]
    "commit_import": lambda it: it.manager.commit_import(it.reader, it.pending),  # type: ignore[arg-type]
    "copier": lambda it: it.manager.copier(it.pending),  # type: ignore[arg-type]
    "get_data_parallel_splits": lambda it: it.manager.get_data_parallel_splits(it.contexts),
    "reset_prefix_cache": lambda it: it.manager.reset_prefix_cache(),
    "set_weights": lambda it: it.manager.set_weights(1),
    "flush_tiers": lambda it: it.manager.flush_tiers(),
}
ANSWERED = {
    *("release", "end_lease", "cancel_import", "check", "recover", "close", "contains", "get_replica"),
    *("get_req_blocks", "lineage", "reset_metrics", "end_step"),
    # The results of these two calls depend only on arguments and shapes.
    *("increment_cache_lengths", "input_symbols"),
    *("estimated_memory_size", "infer_optimal_batch_size", "max_supported_sequence_length"),
}


@pytest.fixture(params=KINDS)
def closed(request: pytest.FixtureRequest) -> Closed:
    return Closed(KINDS[request.param])


@pytest.mark.parametrize("call", REFUSED)
def test_a_call_that_takes_or_runs_is_refused_by_name(closed: Closed, call: str) -> None:
    before = closed.manager.num_free_blocks
    with pytest.raises(ManagerClosedError, match="the manager is closed"):
        REFUSED[call](closed)
    assert closed.manager.num_free_blocks == before


def test_every_public_call_is_refused_or_answered() -> None:
    public = {
        name for name, _ in inspect.getmembers(PagedKVCacheManager, inspect.isfunction) if not name.startswith("_")
    }
    listed = {name.split()[0] for name in REFUSED} | ANSWERED
    assert public - listed == {*()}


def test_a_closed_manager_takes_back_what_is_held_and_shows_its_state(closed: Closed) -> None:
    manager = closed.manager
    manager.check()
    assert manager.contains("r0")
    assert manager.get_replica(closed.contexts[0]) == 0
    assert len(manager.get_req_blocks("r0")) >= 3
    assert manager.metrics.prompt_tokens >= 0
    manager.reset_metrics()
    assert manager.recover().call is None
    manager.end_lease(closed.lease)
    for _ in range(2):
        if closed.pending is not None:
            manager.cancel_import(closed.pending)
            if closed.copier is not None:
                closed.copier.give_up()
    for name in ("r0", "r100", "reader"):
        manager.release(name)
    manager.check()
    assert manager.num_held_blocks == 0
    manager.close()
    with pytest.raises(ManagerClosedError, match="external_claim: the manager is closed"):
        manager.external_claim("new", 0)


def test_a_claim_block_that_outlives_its_manager_gives_the_row_back() -> None:
    manager = manager_of(20, page_size=4)
    with manager.claim(context := TextContext(range(9), 90, "r"), 0):
        assert manager.maybe_reserve(context)
        manager.close()
    assert not manager.contains("r")
    assert manager.num_held_blocks == 0
