"""To make room for a slab, held pages are moved. A page can be moved only if no one except its own request knows its
id.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvcache import PagedKVCacheManager, TextContext
from kvcache.replica.devices import ReplicaPageMoves
from kvcache.replica.replica import Replica
from tests.kvcache.build import manager_of
from tests.kvcache.states.served_states import SHAPE


class Rig:
    """Requests with three pages each, in a manager whose pages the test moves."""

    def __init__(self, rows: int = 1) -> None:
        self.manager: PagedKVCacheManager = manager_of(16, page_size=4, rows=rows)
        self.replica: Replica = self.manager._replicas.each[0]
        self.copied: list[tuple[list[int], list[int]]] = []
        self.moves = ReplicaPageMoves(
            self.replica, lambda sources, targets: self.copied.append((sources.tolist(), targets.tolist()))
        )

    def start(self, name: str, first: int = 0) -> tuple[TextContext, int]:
        context = TextContext([*range(first, first + 10)], 64, name)
        self.manager.external_claim(name, 0)
        row = self.replica.rows.row_of[name]
        self.moves.claimed(row)
        assert self.manager.maybe_reserve(context)
        return context, row

    def staying(self, name: str) -> list[bool]:
        return self.moves.staying()[list(self.manager.get_req_blocks(name))].tolist()


KNOWN: dict[str, Callable[[Rig, int], None]] = {
    "told": lambda rig, row: rig.moves.told(row),
    "read by a model": lambda rig, row: rig.moves.fetched([row]),
    "both": lambda rig, row: (rig.moves.told(row), rig.moves.fetched([row]))[0],
}


@pytest.mark.parametrize("known", KNOWN)
def test_known_pages_of_an_earlier_request_do_not_keep_the_pages_of_a_later_request_in_its_row(known: str) -> None:
    rig = Rig()
    _, row = rig.start("a")
    assert rig.staying("a") == [False] * 3
    KNOWN[known](rig, row)
    assert rig.staying("a") == [True] * 3
    rig.manager.release("a")
    _, again = rig.start("b", 100)
    assert again == row
    assert rig.staying("b") == [False] * 3


def test_pages_can_be_moved_after_their_step_unless_readers_were_told_of_them() -> None:
    rig = Rig()
    _, row = rig.start("a")
    rig.moves.fetched([row])
    rig.moves.stepped(np.array([row]))
    assert rig.staying("a") == [False] * 3
    rig.moves.told(row)
    rig.moves.fetched([row])
    rig.moves.stepped(np.array([row]))
    assert rig.staying("a") == [True] * 3


def test_rows_that_were_fetched_twice_with_another_list_in_between_are_free_after_their_step() -> None:
    rig = Rig(rows=2)
    (_, first), (_, second) = rig.start("a"), rig.start("b", 100)
    one, other = slice(first, first + 1), slice(second, second + 1)
    for rows in (one, other, one):
        rig.moves.fetched(rows)
    rig.moves.stepped(one)
    assert rig.staying("a") == [False] * 3
    assert rig.staying("b") == [True] * 3
    rig.moves.stepped(other)
    assert rig.staying("b") == [False] * 3


def test_leased_pages_cannot_be_moved_and_free_pages_do_not_count() -> None:
    rig = Rig()
    context, _ = rig.start("a")
    assert rig.moves.staying().sum() == 0
    lease = rig.manager.lease("a")
    assert rig.staying("a") == [True] * 3
    context.update(1)
    rig.manager.step([context])
    rig.manager.release("a")
    assert rig.moves.staying().sum() == 3, "the lease alone holds them"
    rig.manager.end_lease(lease)
    assert rig.moves.staying().sum() == 0


def test_a_moved_page_is_found_and_held_where_it_is_now() -> None:
    rig = Rig()
    context, row = rig.start("a")
    context.update(1)
    rig.manager.step([context])
    before = list(rig.manager.get_req_blocks("a"))
    pool = rig.replica.pool
    sources = np.array(before[1:], np.int32)
    targets = pool.allocate(2)
    rig.moves.move(sources, targets)
    assert rig.copied == [(before[1:], targets.tolist())]
    now = [before[0], *targets.tolist()]
    assert list(rig.manager.get_req_blocks("a")) == now
    assert rig.replica.rows.changed[row]
    pool.release(sources)  # In the manager, `SlabPool` releases the sources of a move.
    rig.manager.check()
    rig.manager.release("a")
    again, _ = rig.start("b")
    assert again.start_idx == 8
    assert list(rig.manager.get_req_blocks("b"))[:2] == now[:2]


def test_pages_in_a_block_table_stay_until_another_request_claims_the_row() -> None:
    manager = manager_of(100, rows=1, dtype=torch.int64, params={"states": SHAPE})
    moves, states = manager._replicas.each[0].pool.moves, manager.states[0]
    for first in (0, 100):
        context = TextContext(range(first, first + 10), 64, f"from {first}")
        name = context.request_id
        manager.external_claim(name)
        for _ in range(2):  # the chunk up to the last full page, and the rest
            assert manager.maybe_reserve(context)
            manager.fetch([context])
            assert moves.staying()[list(manager.get_req_blocks(name))].all()
            states.advance(states.pages_at([name], [context.start_idx]), [context.active_idx])
            context.update(1)
            manager.step([context])
            assert not moves.staying()[list(manager.get_req_blocks(name))].any()
        assert context.end_idx == 11
        manager.block_table(name)
        assert moves.staying()[list(manager.get_req_blocks(name))].all()
        manager.release(name)
