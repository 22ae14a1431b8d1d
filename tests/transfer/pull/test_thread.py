"""The transfer thread sleeps while nobody waits for a poll, and is there at once when somebody does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from tests.transfer.replicas import TOKENS, Engine
from transfer.plan.page_lists import PagesOfGroup
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOver, ReplicaTransfer
from transfer.pull.thread import IDLE_POLL_S, LINGER_S, POLL_S, TransferThread


class Threaded:
    """An engine whose replica a thread owns; how often that has polled is counted."""

    def __init__(self, name: str) -> None:
        self.engine = Engine(name)
        self.polls = 0
        poll = self.engine.replica.poll

        def counted() -> bool:
            self.polls += 1
            return poll()

        self.engine.replica.poll = counted  # type: ignore[method-assign]
        self.thread = TransferThread(self.engine.replica)

    def polls_within(self, seconds: float) -> int:
        before = self.polls
        time.sleep(seconds)
        return self.polls - before

    def offer(self, slot: int, duration_s: float = 30.0) -> LeaseRef:
        lease = LeaseRef(new_lease_id(), slot, duration_s)
        self.thread.call_soon(ReplicaTransfer.offer, f"r{slot}", lease)
        return lease

    def until(self, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not ready():
            self.thread.raise_failure()
            assert time.monotonic() < deadline
            time.sleep(POLL_S)

    def close(self) -> None:
        self.thread.close()
        self.engine.close()


@pytest.fixture
def threaded() -> Iterator[Callable[[str], Threaded]]:
    made: list[Threaded] = []

    def make(name: str) -> Threaded:
        made.append(Threaded(name))
        return made[-1]

    yield make
    for one in made:
        one.close()


def at_rest(one: Threaded) -> None:
    """Waits until the thread has come to rest. A busy machine polls late, and never too often."""
    deadline = time.monotonic() + 20
    while one.polls_within(2 * IDLE_POLL_S) > 6:
        assert time.monotonic() < deadline, "an engine that nobody wants anything of goes on polling"


def test_a_thread_without_leases_and_pulls_comes_to_rest_and_polls_on_while_there_are_some(
    threaded: Callable[[str], Threaded],
) -> None:
    p, d = threaded("p"), threaded("d")
    at_rest(p)
    at_rest(d)
    lease = p.offer(0)
    started = p.polls
    # At the pace of rest this many polls take a minute.
    p.until(lambda: p.polls - started > 60 / IDLE_POLL_S)
    source = p.engine.source(lease)
    d.thread.pull("r0", source, [PagesOfGroup([1], [4], (0, TOKENS))], 20.0)
    d.until(lambda: bool(d.thread.events))
    assert list(d.thread.events) == [PullEvent("r0", "", safe=True)]
    p.until(lambda: any(isinstance(event, LeaseOver) for event in p.thread.events))
    at_rest(p)
    at_rest(d)


def test_what_a_command_brings_is_told_before_the_next_poll(threaded: Callable[[str], Threaded]) -> None:
    p = threaded("p")
    at_rest(p)
    replica, untold = p.engine.replica, list[int]()
    poll = replica.poll

    def watched() -> bool:
        untold.append(len(replica.events))
        return poll()

    replica.poll = watched  # type: ignore[method-assign]
    p.offer(0)
    p.until(lambda: len(untold) > 3)
    assert len(p.thread.events) == 1
    assert not any(untold)


def test_a_lease_ends_in_time_after_any_rest(threaded: Callable[[str], Threaded]) -> None:
    p = threaded("p")
    at_rest(p)
    p.offer(0, duration_s=2 * IDLE_POLL_S)
    p.until(lambda: any(isinstance(event, LeaseOver) for event in p.thread.events))
    assert "expired" in p.thread.events[-1].reason  # type: ignore[union-attr]
    at_rest(p)


def test_the_last_lease_is_followed_by_a_while_at_the_same_pace(threaded: Callable[[str], Threaded]) -> None:
    """A reader that has said its last word may still wait for an answer below NIXL."""
    p = threaded("p")
    at_rest(p)
    lease = p.offer(0)
    p.until(lambda: bool(p.thread.events))
    ended, started = time.monotonic(), p.polls
    p.thread.call(lambda replica: replica.revoke(lease.lease_id, "test"))
    while time.monotonic() < ended + LINGER_S:
        time.sleep(POLL_S)
    assert p.polls - started > 2 * LINGER_S / IDLE_POLL_S
