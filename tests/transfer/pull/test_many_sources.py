"""A reader that knows hundreds of sources polls only the agents of sources in use."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.transfer.clock import Clock
from tests.transfer.replicas import Engine
from transfer.failures import Failure, FailureKind
from transfer.memory import MemoryType
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.parts import Part
from transfer.pull.pull import LATELY_S
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankTransfer
from transfer.wire.handshake import HandshakeClient, HandshakeServer
from transfer.wire.messages import Ping


class Known:
    """A source that a rank knows. Its polls are counted."""

    def __init__(self, number: int) -> None:
        self.engine_id, self.failure, self.words, self.polls = f"s{number}", None, 4096, 0
        self.ranks = [SimpleNamespace(agent_name=self.engine_id, words_addr=0, memory_type=MemoryType.DRAM)]
        self.agent = SimpleNamespace(notifications=self._polled, notify=lambda *_: None)

    def _polled(self) -> list[Any]:
        self.polls += 1
        return []


@pytest.fixture
def rank_of() -> Any:
    """Returns a rank with the test's clock that knows `count` sources."""
    made: list[Engine] = []

    def make(count: int) -> tuple[RankTransfer, list[Any], Clock]:
        clock = Clock()
        made.append(Engine("d", clock=clock))
        rank, sources = made[-1].ranks[0], [Known(number) for number in range(count)]
        rank._remotes.update({source.engine_id: source for source in sources})  # type: ignore[misc]
        return rank, sources, clock

    yield make
    for engine in made:
        engine.ranks[0]._remotes.clear()
        engine.close()


Make = Callable[[int], tuple[RankTransfer, list[Known], Clock]]


def test_each_poll_serves_all_sources_if_they_are_few(rank_of: Make) -> None:
    rank, sources, _ = rank_of(8)
    for _ in range(3):
        rank.poll()
    assert {source.polls for source in sources} == {3}


def test_of_many_idle_sources_some_are_polled_in_turn(rank_of: Make) -> None:
    rank, sources, _ = rank_of(40)
    rank.poll()
    assert sum(source.polls for source in sources) == 8
    for _ in range(9):
        rank.poll()
    assert {source.polls for source in sources} == {2}


@pytest.mark.parametrize("count", [41, 43, 47])
def test_every_idle_source_gets_its_turn(rank_of: Make, count: int) -> None:
    rank, sources, _ = rank_of(count)
    for _ in range(20):
        rank.poll()
    assert min(source.polls for source in sources) >= 2


def test_a_source_is_polled_while_a_notification_to_it_may_be_in_flight(rank_of: Make) -> None:
    rank, sources, clock = rank_of(40)
    lease = LeaseRef(new_lease_id(), 0, 600.0)
    rank.puller.open("r", sources[39], lease, 600.0)  # type: ignore[arg-type]
    for _ in range(3):
        rank.poll()
    assert sources[39].polls == 3
    clock.now += LATELY_S
    rank.poll()
    assert sources[39].polls == 3
    # The failure makes the reader notify the source.
    rank.puller.fail(rank.puller._pulls.get("r"), Failure(FailureKind.OTHER, "test"))
    rank.poll()
    rank.poll()
    assert sources[39].polls == 5


def test_a_source_is_polled_while_it_is_read_from(rank_of: Make) -> None:
    rank, sources, clock = rank_of(40)
    pull = rank.puller.open("r", sources[39], LeaseRef(new_lease_id(), 0, 600.0), 600.0)  # type: ignore[arg-type]
    clock.now += LATELY_S
    rank.puller._moving["r"] = pull
    pull.fencing.append((object(), 0, 0))
    sources[39].agent.done = lambda _: False
    for _ in range(3):
        rank.poll()
    assert sources[39].polls == 3
    pull.fencing.clear()


def test_a_source_is_polled_after_a_pull_that_ended_as_it_was_posted(rank_of: Make) -> None:
    rank, sources, clock = rank_of(40)
    there, lease = sources[39], LeaseRef(new_lease_id(), 0, 600.0)

    def fenced(_peer: str, word: int, *_: Any) -> None:
        ctypes.c_uint64.from_address(word).value = lease.lease_id

    there.agent.read, there.agent.read_word = lambda *_: None, fenced
    event = rank.puller.pull_at_once("r", there, lease, 600.0, Part(0, [(0, 8, 0)], [(0, 8, 0)], 8))  # type: ignore[arg-type]
    assert isinstance(event, PullEvent)
    for _ in range(3):
        rank.poll()
    assert there.polls == 3
    clock.now += LATELY_S
    rank.poll()
    assert there.polls == 3


def test_a_source_that_is_no_longer_known_is_not_polled(rank_of: Make) -> None:
    rank, sources, _ = rank_of(40)
    rank.puller.open("r", sources[39], LeaseRef(new_lease_id(), 0, 600.0), 600.0)  # type: ignore[arg-type]
    del rank._remotes["s39"]
    rank.poll()
    assert sources[39].polls == 0


def test_a_client_that_knows_many_sources_polls_only_those_that_it_has_asked() -> None:
    asking = HandshakeClient()
    with HandshakeServer([]) as one, HandshakeServer([]) as other:
        answers: list[Any] = []
        for server in (one, other):
            asking.ask(server.endpoint, Ping(query_id=0, engine_id="p"), answers.append, 10.0)
        while len(answers) < 2:
            asking.poll()
        untouched = asking._sockets[one.endpoint]
        asking._sockets[one.endpoint] = SimpleNamespace(closed=False)  # type: ignore[assignment]
        asking.ask(other.endpoint, Ping(query_id=0, engine_id="p"), answers.append, 10.0)
        while len(answers) < 3:
            asking.poll()
        asking._sockets[one.endpoint] = untouched
        assert len({type(answer) for answer in answers}) == 1, "the third question must be answered like the first two"
    asking.close()
