"""A source lends only a limited number of recurrent states at a time. The tests use two managers, exchanges and real
NIXL.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcache import TextContext
from tests.kvcache.states.served_states import ServedStates
from transfer import Lent, PageExchange
from transfer.pull.pull_state import PullEvent

NO_HOST = {"enable_kvcache_swapping_to_host": False, "host_kvcache_swap_space_gb": None, "tier_state_share": 0.5}


def prompt(first: int, tokens: int) -> list[int]:
    """Returns a prompt of the token `first` and `tokens` more tokens."""
    return [first, *range(tokens)]


class Pair:
    """A source that lends a quarter of its pages, and a reader."""

    def __init__(self, *, slabs: bool) -> None:
        self.it = ServedStates(slabs=slabs, params=NO_HOST, every=4, checks=False)
        self.other = ServedStates(slabs=slabs, params=NO_HOST)
        self.source = PageExchange(self.it.manager, "p", lend=0.25)
        self.reader = PageExchange(self.other.manager, "d")

    def ask(self, first: int) -> Lent:
        """Asks for a prompt that begins with this token. Returns the answer."""
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
        """Returns how many pages of each group are lent for this prompt. The result is empty if no page is lent."""
        found = self.ask(first)
        assert not found.error
        return () if found.table is None else tuple(map(len, found.table.groups))

    def give_back(self, found: Lent) -> None:
        """Makes the reader give the lent pages back."""
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
    assert pair.lent(300) == ()  # The limit has room for the request's five pages, but not for a third state.
    pair.give_back(first)
    assert pair.lent(300) == (5, 1)


@both(slabs=True)
def test_a_state_in_a_slab_counts_as_the_pages_of_the_slab(pair: Pair) -> None:
    for first in (100, 200):
        pair.it.serve(prompt(first, 40))
    slab = pair.it.manager.slab_pages
    assert (int(0.25 * pair.it.manager.total_num_pages), slab) == (20, 2)
    assert pair.lent(100) == (10, 1)
    # The limit is 20 pages, and 12 are lent. Eight more pages would fit, but with the next state the request needs ten.
    assert pair.lent(200) == (4, 1)


class Three:
    """Two sources that have computed these numbers of a prompt's tokens, and a reader of both sources."""

    def __init__(self, *tokens: int, slabs: bool) -> None:
        self.sides = [ServedStates(slabs=slabs, params=NO_HOST, every=4, checks=False) for _ in range(3)]
        self.sources = [PageExchange(side.manager, f"p{at}", lend=1.0) for at, side in enumerate(self.sides[:2])]
        self.reader, self.manager = PageExchange(self.sides[2].manager, "d"), self.sides[2].manager
        self.context = TextContext(prompt(100, 40), 256, "mine")
        for side, count in zip(self.sides, tokens, strict=False):
            side.serve(prompt(100, count))

    def poll(self) -> list[Any]:
        for source in self.sources:
            source.poll()
        time.sleep(1e-4)
        return [happened for happened in self.reader.poll() if getattr(happened.event, "safe", True)]

    def until(self, count: int) -> list[Any]:
        found, deadline = list[Any](), time.monotonic() + 20
        while len(found) < count:
            assert time.monotonic() < deadline
            found += self.poll()
        return found

    def pull(self, revoked: int = 2) -> PullEvent:
        """Asks both sources, and pulls from both. If `revoked` is given, the lease of this source is revoked."""
        wanted = self.manager.contents.digests(self.context)
        for at, source in enumerate(self.sources):
            self.reader.ask(0, f"{at}", source.address, source.engine_id(0), wanted)
        lent = sorted((one.event for one in self.until(2)), key=lambda one: (-one.table.num_tokens, one.key))
        for source in self.sources[revoked : revoked + 1]:
            source.revoke(lent[revoked].source, "test")
            while source.lending.num_leases:
                self.poll()
        self.manager.external_claim("mine")
        pending = self.manager.import_block_table(self.context, lent[0].table, others=[lent[1].table])
        assert pending is not None
        self.reader.pull("mine", [one.source for one in lent], pending, 20.0)
        (happened,) = self.until(1)
        if happened.event.error:
            self.manager.cancel_import(pending)
        else:
            self.manager.commit_import(self.context, pending, happened.proof)
        self.manager.release("mine")
        while any(source.lending.num_leases for source in self.sources):
            self.poll()
        return happened.event

    def close(self) -> None:
        for exchange, side in zip([*self.sources, self.reader], self.sides, strict=True):
            exchange.close()
            side.manager.check()
            assert side.manager.num_held_blocks == 0
            side.manager.close()


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Three]]:
    """Returns two sources and a reader. Even small pulls use both sources."""
    for name, value in (("ONE_SOURCE_BYTES", 0), ("_PROBE_BYTES", 1), ("_LEAST_BYTES", 1)):
        monkeypatch.setattr(f"transfer.pull.shared_pull.{name}", value)
    made = list[Three]()

    def make(*tokens: int, slabs: bool) -> Three:
        made.append(Three(*tokens, slabs=slabs))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.mark.parametrize("slabs", [False, True])
@pytest.mark.parametrize("second", [40, 20])
def test_pages_and_the_state_behind_them_come_from_two_sources(
    three: Callable[..., Three], slabs: bool, second: int
) -> None:
    """The state comes from the source that has it at the end of the last page."""
    it = three(40, second, slabs=slabs)
    assert not it.pull().error
    mine = it.sides[2]
    compared = mine.compared
    # `serve` finds 40 cached tokens and runs the last token. It then compares the KV of the cached tokens and their
    # state with the expected values.
    assert mine.serve([*prompt(100, 40), 7]) == 40
    assert mine.compared > compared


@pytest.mark.parametrize("slabs", [False, True])
def test_if_the_state_at_the_end_is_lost_with_its_source_nothing_is_kept(
    three: Callable[..., Three], slabs: bool
) -> None:
    it = three(40, 20, slabs=slabs)
    assert it.pull(revoked=0).error
    assert it.sides[2].serve([*prompt(100, 40), 7]) == 0


@pytest.mark.parametrize("slabs", [False, True])
def test_if_both_sources_have_the_state_one_of_them_is_enough(three: Callable[..., Three], slabs: bool) -> None:
    it = three(40, 40, slabs=slabs)
    assert not it.pull(revoked=0).error
    assert it.sides[2].serve([*prompt(100, 40), 7]) == 40
