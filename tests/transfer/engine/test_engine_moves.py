"""Runs some of the random moves of `engine_moves`. Some tests leave out a rule of the protocol. The moves must then
find a violation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.transfer import engine_moves
from tests.transfer.engine_moves import CONFIGS, ViolationError, World
from transfer.pull.lease import Lease, LeaseBook
from transfer.pull.pull import Puller
from transfer.pull.pull_state import RankPull


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("pagewire.transfer").setLevel(logging.ERROR)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    tps, rates, verify = request.param
    made = World(tps, rates, verify=verify, seed=1)
    yield made
    made.close()


@pytest.mark.few(2)
@pytest.mark.parametrize("world", CONFIGS[::-1], indirect=True, ids=["verified", "1to2", "2to2", "1to1"])
def test_what_is_accepted_is_what_the_source_held_and_every_page_comes_back(world: World):
    for seed in range(400):
        # The speed of the machine decides whether a pull succeeds, so a slow machine needs more runs.
        if seed >= 40 and min(world.counts["pulls accepted"], world.counts["pulls failed"]) > 20:
            break
        world.run(seed)
    assert world.counts["pulls accepted"] > 20
    assert world.counts["pulls failed"] > 20
    assert world.counts["leases read"] > 0


def notices(world: World, runs: int = 150) -> str:
    """Makes up to `runs` runs. Returns the text of the first violation, or an empty text if there was none."""
    for seed in range(runs):
        try:
            world.run(seed)
        except ViolationError as error:
            return str(error)
    return ""


DELAYED = [CONFIGS[2]]


@pytest.mark.parametrize("world", DELAYED, indirect=True)
def test_without_the_fence_a_page_that_was_given_away_is_accepted(world: World, monkeypatch: pytest.MonkeyPatch):
    def no_fence(self: Puller, pull: RankPull) -> None:
        pull.marking = pull.added if pull.more else 0
        self._passed(pull)

    monkeypatch.setattr(Puller, "_fence", no_fence)
    assert "differs from the source's" in notices(world)


@pytest.mark.parametrize("world", DELAYED, indirect=True)
def test_a_word_that_outlives_the_hold_on_its_pages_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch):
    end = LeaseBook._end

    def keep_the_word(self: LeaseBook, lease: Lease, reason: str) -> object:
        ended = end(self, lease, reason)
        for words in self.words:
            words[lease.word_idx] = lease.lease_id
        return ended

    monkeypatch.setattr(LeaseBook, "_end", keep_the_word)
    monkeypatch.setattr(LeaseBook, "check", lambda _: None)
    assert "differs from the source's" in notices(world)


@pytest.mark.parametrize("world", DELAYED, indirect=True)
def test_a_fence_beside_the_data_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch):
    advance = Puller._advance

    def fence_at_once(self: Puller, pull: RankPull) -> None:
        if not pull.error:
            self._post(pull)
            if not pull.more and not pull.waiting:
                self._fence(pull)
        advance(self, pull)

    monkeypatch.setattr(Puller, "_advance", fence_at_once)
    assert "differs from the source's" in notices(world)


@pytest.mark.parametrize("world", DELAYED, indirect=True)
def test_pages_given_back_while_copies_go_on_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch):
    on_pull = World.on_pull

    def hasty(self: World, reader: Any, reading: Any, event: Any) -> None:
        if event.key in reading:
            on_pull(self, reader, reading, event._replace(safe=True))

    def take(self: World, at: int) -> None:
        events = self.readers[at].replica.events
        while events:
            hasty(self, self.readers[at], self.reading[at], events.popleft())

    monkeypatch.setattr(World, "take_reader_events", take)
    noticed = notices(world)
    assert "written" in noticed or "differs from the source's" in noticed


@pytest.mark.parametrize("world", [CONFIGS[3]], indirect=True)
def test_a_reader_that_does_not_compare_accepts_short_and_wrong_reads(world: World, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("transfer.pull.page_checks.PageChecks.bad", lambda *_: engine_moves.np.array([], int))
    assert "differs from the source's" in notices(world)
