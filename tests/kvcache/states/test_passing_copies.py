"""Passing copies of states, which follow their requests. The copies of one step replace all earlier passing copies at
once.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kvcache.errors import StatePageError
from kvcache.params import StateShape
from kvcache.pool.slabs import SlabPool
from kvcache.states.state_memory import room_in_slabs
from kvcache.states.state_pages import StatePages
from kvcache.under_way import UnderWay
from tests.kvcache.build import as_long_as, states_of

SHAPE = StateShape(1, 16, 1, 1, 1, 2, torch.uint8, torch.uint8, "short_conv")
NAMES = ["a", "b", "c"]
ALL = [True, True, True]


def digests(*words: int) -> np.ndarray:
    return np.array(words, np.uint64).reshape(-1, 1)


def made(copies: int = 4, tokens: int = 8) -> StatePages:
    """Returns the states of three requests that have run `tokens` tokens. Each request has one passing copy
    (1 to 3).
    """
    states = states_of(SHAPE, len(NAMES) + copies)
    for at, name in enumerate(NAMES):
        states.allocate(name)
        run(states, name, tokens, at)
        states.keep(name, digests(at + 1), tokens, passing=True)
    return states


def run(states: StatePages, name: str, tokens: int, content: int) -> None:
    states.blocks[0][0][states.page_of(name)] = content
    states.advance(torch.tensor([states.page_of(name)]), [tokens])


def on(states: StatePages, tokens: int = 16) -> None:
    for at, name in enumerate(NAMES):
        run(states, name, tokens, 10 + at)


def kept(states: StatePages, *words: int) -> list[int]:
    """Returns the contents of the copies of these digests. A digest without a copy has 0."""
    pages = states.pool.index.find(digests(*words)).tolist()
    return [int(states.blocks[0][0][page].flatten()[0]) if page else 0 for page in pages]


def test_each_passing_copy_is_replaced_in_its_place_by_the_next_one() -> None:
    states = made(copies=3)
    on(states)
    assert states.keep_passing(NAMES, digests(11, 12, 13), np.array([16, 16, 16]), ALL) == []
    assert kept(states, 1, 2, 3, 11, 12, 13) == [0, 0, 0, 10, 11, 12]
    assert (states._tokens[states.pool.index.find(digests(11, 12, 13))] == 16).all()
    assert (states.num_kept, states.pool.evictions) == (3, 0)
    states.check(NAMES)
    on(states, 24)
    others = states.keep_passing(NAMES, digests(21, 22, 23), np.array([24, 24, 24]), ALL)
    assert others == [], "these copies are passed along, too"
    assert states.num_kept == 3
    states.allocate("d")
    states.allocate("e")
    assert kept(states, 21, 22, 23) == [0, 0, 12], "the copy of the first request is evicted first"


def test_new_passing_copies_count_as_used_last() -> None:
    states = made()
    run(states, "a", 9, 50)
    states.keep("a", digests(9), 9, passing=False)  # This copy is permanent. It replaces copy 1.
    assert states.num_kept == 3
    for name in ("b", "c"):
        run(states, name, 16, 60)
    assert states.keep_passing(["b", "c"], digests(12, 13), np.array([16, 16]), ALL[:2]) == []
    for name in ("d", "e"):
        states.allocate(name)
    assert kept(states, 9, 12, 13) == [0, 60, 60]


def held(states: StatePages) -> None:
    states.pool.hold(states.pool.index.find(digests(2)))


def gone(states: StatePages) -> None:
    states.forget_copies()


def evicted(states: StatePages) -> None:
    for _ in as_long_as(lambda: states.num_kept == 3):
        states.allocate(f"other {states.num_held}")


def elsewhere(states: StatePages) -> None:
    run(states, "b", 17, 70)


@pytest.mark.parametrize(
    ("happens", "others"), [(held, [1]), (gone, [0, 1, 2]), (evicted, [0]), (elsewhere, [1]), (str, [])]
)
def test_the_passing_copies_that_can_be_overwritten_are_made_together(
    happens: Callable[[StatePages], object], others: list[int]
) -> None:
    states = made(copies=5)  # Five copies have room for all copies that follow.
    on(states)
    happens(states)
    before = kept(states, 1, 2, 3)
    assert [*states.keep_passing(NAMES, digests(11, 12, 13), np.array([16, 16, 16]), ALL)] == others
    for at in range(3):
        was, now = kept(states, at + 1, at + 11)
        assert (was, now) == ((before[at], 0) if at in others else (0, 10 + at))


def test_a_copy_that_becomes_permanent_is_not_made_with_the_passing_ones() -> None:
    states = made()
    on(states)
    assert states.keep_passing(NAMES, digests(11, 12, 13), np.array([16, 16, 16]), [True, False, True]) == [1]
    assert kept(states, 1, 2, 3, 11, 12, 13) == [0, 1, 0, 10, 0, 12]


def test_a_state_that_is_cached_already_is_used_and_not_cached_again() -> None:
    states = made(copies=5)
    on(states)
    states.allocate("d")
    run(states, "d", 16, 70)
    states.keep("d", digests(12), 16, passing=False)
    free = states.pool.free_count
    assert states.keep_passing(NAMES, digests(11, 12, 13), np.array([16, 16, 16]), ALL) == []
    assert kept(states, 1, 2, 3, 11, 12, 13) == [0, 0, 0, 10, 70, 12]
    assert states.pool.idle.pages()[-1:] == states.pool.index.find(digests(12)), "it counts as used last"
    assert states.pool.free_count == free
    on(states, 24)
    assert states.keep_passing(NAMES, digests(21, 22, 23), np.array([24, 24, 24]), ALL) == [1]
    assert kept(states, 12) == [70], "request b does not replace it"
    states.check([*NAMES, "d"])


def test_passing_copies_are_made_one_by_one_if_two_requests_have_the_same_tokens() -> None:
    states = made()
    on(states)
    assert states.keep_passing(NAMES, digests(11, 11, 13), np.array([16, 16, 16]), ALL) == range(3)
    states._passing["c"] = states._passing["b"]
    assert states.keep_passing(NAMES, digests(11, 12, 13), np.array([16, 16, 16]), ALL) == range(3)
    assert kept(states, 1, 2, 3, 11, 12, 13) == [0, 1, 2, 0, 0, 0]


def test_passing_copies_in_slabs_are_as_young_as_the_page_released_last() -> None:
    pool = SlabPool(63, 1, 4)
    rows = torch.zeros((64, 4), dtype=torch.uint8)
    states = StatePages(SHAPE, room_in_slabs(SHAPE, pool, [rows]), UnderWay())
    for at, name in enumerate(NAMES):
        states.allocate(name)
        run(states, name, 8, at)
        states.keep(name, digests(at + 1), 8, passing=True)
    pool.release(pool.allocate(4))
    on(states)
    assert states.keep_passing(NAMES, digests(11, 12, 13), np.array([16, 16, 16]), ALL) == []
    assert pool.cached.oldest_use == pool.uses.clock
    assert kept(states, 11, 12, 13) == [10, 11, 12]
    states.check(NAMES)


def test_the_request_that_may_not_run_is_named_among_many() -> None:
    states = made()
    with pytest.raises(StatePageError, match="'b' would run from token 7"):
        states.pages_at(NAMES, [8, 7, 8])
    lease = states.held("c")
    lease.pool.hold(lease.pages)
    assert states.pages_at(NAMES, [8, 8, 8]).tolist() == [states.page_of(name) for name in NAMES]
    states.tell("c")
    with pytest.raises(StatePageError, match="'c': its state after 8 tokens is leased"):
        states.pages_at(NAMES, [8, 8, 8])
    lease.release()
    states.begin_import("a")
    with pytest.raises(StatePageError, match="written by a transfer"):
        states.pages_at(NAMES, [8, 8, 8])
