"""How much of a source's recurrent states is lent at a time: two managers, their exchanges, real NIXL."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache import TextContext
from tests.kvcache.states.served_states import ServedStates
from transfer import Lent, PageExchange

NO_HOST = {"enable_kvcache_swapping_to_host": False, "host_kvcache_swap_space_gb": None, "tier_state_share": 0.5}


def prompt(first: int, tokens: int) -> list[int]:
    """A prompt that begins with this token, and has so many others."""
    return [first, *range(tokens)]


class Pair:
    """A source that lends a quarter of what it has, and a reader."""

    def __init__(self, *, slabs: bool) -> None:
        self.it = ServedStates(slabs=slabs, params=NO_HOST, every=4, checks=False)
        self.other = ServedStates(slabs=slabs, params=NO_HOST)
        self.source = PageExchange(self.it.manager, "p", lend=0.25)
        self.reader = PageExchange(self.other.manager, "d")

    def ask(self, first: int) -> Lent:
        """What is lent of a prompt that begins with this token."""
        context = TextContext(prompt(first, 40), 256, "theirs")
        wanted = self.other.manager.contents.digests(context)
        self.reader.ask(0, f"k{first}", self.source.address, self.source.engine_id(0), wanted)
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            self.source.poll()
            for happened in self.reader.poll():
                if isinstance(happened.event, Lent):
                    return happened.event
            time.sleep(1e-3)
        raise TimeoutError

    def lent(self, first: int) -> tuple[int, ...]:
        """How many pages of each group are lent; none where nothing is."""
        found = self.ask(first)
        assert not found.error
        return () if found.table is None else tuple(map(len, found.table.groups))

    def give_back(self, found: Lent) -> None:
        """The reader has no use for it."""
        assert found.source is not None
        leases = self.source.lending.num_leases
        self.reader.refuse(0, found.source, "no use")
        deadline = time.monotonic() + 20
        while self.source.lending.num_leases == leases:
            assert time.monotonic() < deadline
            self.source.poll()
            time.sleep(1e-3)

    def close(self) -> None:
        for exchange, it in ((self.source, self.it), (self.reader, self.other)):
            exchange.close()
            it.manager.check()
            assert it.manager.num_held_blocks == 0
            it.manager.close()


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(slabs=request.param)
    yield made
    made.close()


def both(slabs: bool) -> Any:
    return pytest.mark.parametrize("pair", [slabs], indirect=True)


@both(slabs=False)
def test_no_more_than_the_share_of_the_state_pages_is_lent(pair: Pair) -> None:
    for first in (100, 200, 300):
        pair.it.serve(prompt(first, 20))
    assert int(0.25 * pair.it.manager.states[0].num_pages) == 2
    first = pair.ask(100)
    assert first.table is not None
    assert [*map(len, first.table.groups)] == [5, 1]
    assert pair.lent(200) == (5, 1)
    assert pair.lent(300) == ()  # there is room for its five pages, and none for a third state
    pair.give_back(first)
    assert pair.lent(300) == (5, 1)


@both(slabs=True)
def test_a_state_in_a_slab_counts_as_the_pages_of_the_slab(pair: Pair) -> None:
    for first in (100, 200):
        pair.it.serve(prompt(first, 40))
    slab = pair.it.manager.slab_pages
    assert (int(0.25 * pair.it.manager.total_num_pages), slab) == (20, 2)
    assert pair.lent(100) == (10, 1)
    assert pair.lent(200) == (4, 1)  # of 20 pages eight are left, and with the next state it would be ten
