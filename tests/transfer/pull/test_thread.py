"""The transfer thread sleeps while no event needs a poll, and wakes at once when an event does."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from kvcache.replica.block_table import PageCopy
from tests.transfer.clock import Clock
from tests.transfer.replicas import TOKENS, Engine
from transfer.errors import EngineClosedError
from transfer.pull.bell import Alarm
from transfer.pull.lease import LeaseRef, new_lease_id
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOffer, LeaseOver, Offered, ReplicaTransfer
from transfer.pull.thread import (
    AWAIT_POLL_S,
    BUSY_POLL_S,
    IDLE_POLL_S,
    LINGER_S,
    POLL_S,
    READ_SOON_S,
    SOON_POLL_S,
    TransferThread,
)


class Threaded:
    """An engine whose replica is owned by a thread. The polls of the thread are counted."""

    def __init__(self, name: str) -> None:
        self.engine = Engine(name)
        self.polls = 0
        poll = self.engine.replica.poll

        def counted() -> bool:
            self.polls += 1
            return poll()

        self.engine.replica.poll = counted  # type: ignore[method-assign]
        self.rung: list[int] = []  # For each ring of the bell, the number of events at the time of the ring.
        self.thread = TransferThread(self.engine.replica, lambda: self.rung.append(len(self.thread.events)))

    def polls_within(self, seconds: float) -> int:
        before = self.polls
        time.sleep(seconds)
        return self.polls - before

    def offer(self, word_idx: int, duration_s: float = 30.0) -> LeaseRef:
        lease = LeaseRef(new_lease_id(), word_idx, duration_s)
        self.thread.offer(LeaseOffer(f"r{word_idx}", lease))
        return lease

    def pull(self, p: Threaded, word_idx: int) -> None:
        """Pulls a page under a new, open lease of another engine."""
        lease = p.offer(word_idx)
        p.until(lambda: any(event.lease_id == lease.lease_id for event in list(p.thread.events)))  # type: ignore[union-attr]
        self.thread.pull(f"r{word_idx}", p.engine.source(lease), [PageCopy([1], [4], (0, TOKENS))], 20.0)

    def ended(self, word_idx: int) -> bool:
        return PullEvent(f"r{word_idx}", "", safe=True) in self.thread.events

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
    """Waits until the thread is idle. A busy machine can delay polls, but cannot cause more polls."""
    deadline = time.monotonic() + 20
    while one.polls_within(2 * IDLE_POLL_S) > 6:
        assert time.monotonic() < deadline, "an idle engine has not stopped polling"


def test_the_thread_rests_without_leases_and_pulls_and_polls_while_there_are_some(
    threaded: Callable[[str], Threaded],
) -> None:
    p, d = threaded("p"), threaded("d")
    at_rest(p)
    at_rest(d)
    lease = p.offer(0)
    started = p.polls
    # At the idle rate, so many polls would take a minute.
    p.until(lambda: p.polls - started > 60 / IDLE_POLL_S)
    source = p.engine.source(lease)
    d.thread.pull("r0", source, [PageCopy([1], [4], (0, TOKENS))], 20.0)
    d.until(lambda: bool(d.thread.events))
    assert list(d.thread.events) == [PullEvent("r0", "", safe=True)]
    p.until(lambda: any(isinstance(event, LeaseOver) for event in p.thread.events))
    at_rest(p)
    at_rest(d)


def test_a_pull_that_waits_for_its_owner_to_name_pages_is_polled_seldom(threaded: Callable[[str], Threaded]) -> None:
    p, d = threaded("p"), threaded("d")
    lease = p.offer(0)
    p.until(lambda: bool(p.thread.events))
    d.thread.pull("r0", p.engine.source(lease), None, 60.0)
    deadline = time.monotonic() + 20
    while d.polls_within(20 * AWAIT_POLL_S) > 25:  # A busy machine can delay polls, but cannot cause more polls.
        assert time.monotonic() < deadline, "a pull without named pages is polled as often as any other"
    started = d.polls  # At the idle rate, so many polls would take a minute. They renew the lease, and end the pull.
    d.until(lambda: d.polls - started > 60 / IDLE_POLL_S)
    d.thread.add_pages("r0", [PageCopy([1], [4], (0, TOKENS))], last=True)
    d.until(lambda: d.ended(0))


def test_a_source_that_pulls_as_well_is_polled_for_its_readers(threaded: Callable[[str], Threaded]) -> None:
    p, d = threaded("p"), threaded("d")
    lease = p.offer(0)
    p.until(lambda: bool(p.thread.events))
    d.thread.pull("r0", p.engine.source(lease), None, 60.0)
    time.sleep(LINGER_S)
    d.offer(1)
    deadline = time.monotonic() + 20
    while d.polls_within(50 * AWAIT_POLL_S) <= 60:  # A pull alone causes at most 50 polls.
        assert time.monotonic() < deadline, "the source is polled too rarely for its readers"
    d.thread.call_soon(ReplicaTransfer.cancel, "r0", "test")


def test_events_of_a_command_are_reported_before_the_next_poll(threaded: Callable[[str], Threaded]) -> None:
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


def test_a_lease_ends_in_time_even_if_the_thread_was_at_rest(threaded: Callable[[str], Threaded]) -> None:
    p = threaded("p")
    at_rest(p)
    p.offer(0, duration_s=2 * IDLE_POLL_S)
    p.until(lambda: any(isinstance(event, LeaseOver) for event in p.thread.events))
    assert "expired" in p.thread.events[-1].reason  # type: ignore[union-attr]
    at_rest(p)


def test_the_thread_keeps_its_pace_for_a_while_after_the_last_lease(
    threaded: Callable[[str], Threaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that has just sent its last notification may still wait for an answer within NIXL. The thread therefore
    polls for some more time.
    """
    p, clock = threaded("p"), Clock()
    at_rest(p)
    monkeypatch.setattr("transfer.pull.thread.time", SimpleNamespace(perf_counter=clock))
    lease = p.offer(0)
    p.until(lambda: bool(p.thread.events))

    def pause_at(now: float) -> float:
        clock.now = now
        p.until(lambda: not p.thread._early)  # The events of the last command are delivered.
        return p.thread.call(lambda _: p.thread._pause())

    assert pause_at(200.0) == POLL_S
    p.thread.call(lambda replica: replica.revoke(lease.lease_id, "test"))
    assert pause_at(200.0 + 0.99 * LINGER_S) == POLL_S
    assert pause_at(200.0 + LINGER_S) == IDLE_POLL_S
    started = p.polls
    clock.now = 200.0
    p.until(lambda: p.polls - started > 60 / IDLE_POLL_S)


@pytest.mark.parametrize("tls", ["tcp,self", "posix,sysv,cma"])
def test_the_source_polls_often_while_a_reader_may_need_its_polls(
    threaded: Callable[[str], Threaded], monkeypatch: pytest.MonkeyPatch, tls: str
) -> None:
    monkeypatch.setattr("transfer.pull.replica.effective_settings", lambda *_: {"UCX_TLS": tls})
    p, soon = threaded("p"), (SOON_POLL_S, BUSY_POLL_S) if tls == "tcp,self" else (POLL_S, POLL_S)
    clock = Clock()
    monkeypatch.setattr("transfer.pull.thread.time", SimpleNamespace(perf_counter=clock))

    def pause_after(act: Callable[[ReplicaTransfer], None]) -> float:
        p.until(lambda: not p.thread._early)  # The events of the last command are delivered.
        return p.thread.call(lambda replica: (act(replica), p.thread._pause())[1])

    running, lease = (LeaseRef(new_lease_id(), word_idx, 30.0) for word_idx in (0, 1))
    assert pause_after(lambda replica: replica.offer(LeaseOffer("r0", running, running=True))) == POLL_S
    assert soon[0] <= pause_after(lambda replica: replica.offer(LeaseOffer("r1", lease))) <= soon[1]
    clock.now += READ_SOON_S
    assert pause_after(lambda _: None) == POLL_S
    assert soon[0] <= pause_after(lambda replica: replica.start_clock(running.lease_id)) <= soon[1]
    for one in (running, lease):
        p.thread.call(lambda replica, one=one: replica.revoke(one.lease_id, "test"))  # type: ignore[misc]
    clock.now += POLL_S
    assert pause_after(lambda _: None) == POLL_S


@pytest.mark.parametrize("tls", ["tcp,self", "posix,sysv,cma"])
def test_a_shorter_wait_for_a_distant_peer_is_polled_more_often(
    threaded: Callable[[str], Threaded], monkeypatch: pytest.MonkeyPatch, tls: str
) -> None:
    monkeypatch.setattr("transfer.pull.replica.effective_settings", lambda *_: {"UCX_TLS": tls})
    thread = threaded("d").thread

    def pauses(replica: ReplicaTransfer) -> tuple[float, float]:
        thread._busy = True
        replica.ranks[0].puller.num_posted += 1
        at_once, (awaited, since) = thread._pause(), thread._awaited
        thread._awaited = awaited, since - READ_SOON_S / 2
        return at_once, thread._pause()

    at_once, later = thread.call(pauses)
    assert at_once == (SOON_POLL_S if tls == "tcp,self" else BUSY_POLL_S)
    assert (BUSY_POLL_S / 2 if tls == "tcp,self" else BUSY_POLL_S) <= later <= BUSY_POLL_S


def test_a_lease_is_granted_when_the_call_returns_unless_the_thread_is_busy(
    threaded: Callable[[str], Threaded],
) -> None:
    p, at_once = threaded("p"), False
    for word_idx in range(50):  # A poll may be running, so the test tries several times.
        lease = p.offer(word_idx)
        at_once = at_once or (
            bool(p.thread.events) and p.thread.events[-1] == Offered(f"r{word_idx}", lease.lease_id, "")
        )
        p.until(lambda word_idx=word_idx: len(p.thread.events) > word_idx)  # type: ignore[misc]
    assert at_once
    with p.thread._turn:
        p.offer(50)
        assert len(p.thread.events) == 50
    p.until(lambda: len(p.thread.events) > 50)


def test_a_sleeping_thread_is_woken_by_a_grant(
    threaded: Callable[[str], Threaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transfer.pull.thread.POLL_S", 60.0)  # 60 s is longer than `until` waits.
    p = threaded("p")
    started = p.polls
    p.offer(0)
    p.until(lambda: p.polls > started)


@pytest.fixture
def pair(threaded: Callable[[str], Threaded]) -> tuple[Threaded, Threaded]:
    """A source, and a reader that has pulled from it before."""
    p, d = threaded("p"), threaded("d")
    d.pull(p, 0)
    d.until(lambda: d.ended(0))
    return p, d


def test_a_page_of_a_known_source_has_arrived_when_the_call_returns_unless_the_thread_is_busy(
    pair: tuple[Threaded, Threaded],
) -> None:
    p, d = pair
    at_once = False
    for word_idx in range(1, 50):  # A poll may be running, so the test tries several times.
        rings = len(d.rung)
        d.pull(p, word_idx)
        at_once = at_once or (d.ended(word_idx) and d.rung[rings:] == [len(d.thread.events)])
        d.until(lambda word_idx=word_idx: d.ended(word_idx))  # type: ignore[misc]
    assert at_once
    with d.thread._turn:
        d.pull(p, 50)
        assert not d.ended(50)
    d.until(lambda: d.ended(50))


def test_commands_run_in_the_order_in_which_they_were_given(pair: tuple[Threaded, Threaded]) -> None:
    p, d = pair
    ran: list[str] = []
    pull = d.engine.replica.pull
    d.engine.replica.pull = lambda *args, **named: ran.append("pull") or pull(*args, **named)  # type: ignore[method-assign,func-returns-value]
    at_rest(d)
    # The test simulates a command that the sleeping thread has not seen yet.
    d.thread._commands.append(lambda: ran.append("before"))
    d.pull(p, 1)
    d.until(lambda: d.ended(1))
    assert ran == ["before", "pull"]


def test_a_thread_at_rest_is_woken_by_a_read_of_the_caller(
    pair: tuple[Threaded, Threaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = pair
    monkeypatch.setattr("transfer.pull.thread.IDLE_POLL_S", 60.0)  # 60 s is longer than `until` waits.
    at_rest(d)
    d.pull(p, 1)
    started = d.polls
    d.until(lambda: d.polls > started)
    assert d.ended(1)


def test_a_failure_in_the_callers_thread_ends_the_engine_and_is_reported_like_any_other(
    pair: tuple[Threaded, Threaded],
) -> None:
    p, d = pair

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("broken by the test")

    d.engine.replica.pull = broken  # type: ignore[method-assign]
    rings = len(d.rung)
    d.pull(p, 1)
    d.thread._thread.join(20)
    assert len(d.rung) > rings
    with pytest.raises(EngineClosedError, match="broken by the test"):
        d.thread.raise_failure()
    with pytest.raises(EngineClosedError, match="the transfer thread died: .*broken by the test"):
        d.pull(p, 2)


def test_leases_and_pulls_that_end_with_the_thread_are_reported(threaded: Callable[[str], Threaded]) -> None:
    """The owner of the thread holds the pages of each lease and pull until the thread reports its end."""
    p, d = threaded("p"), threaded("d")
    lease = p.offer(1)
    p.until(lambda: bool(p.thread.events))
    p.engine.serve()
    p.thread.events.clear()
    d.thread.pull("open", p.engine.source(lease), None, 20.0)
    d.thread.call(lambda _: None)
    for one in (d, p):
        one.thread.close()
        assert one.thread.is_closed
    assert [(event.lease_id, event.request_id) for event in p.thread.events if isinstance(event, LeaseOver)] == [
        (lease.lease_id, "r1")
    ]
    (event,) = [event for event in d.thread.events if isinstance(event, PullEvent) and event.safe]
    assert event.key == "open"
    assert event.error
    told = [len(one.thread.events) for one in (p, d)]
    for one in (p, d):
        one.thread.close()
        with pytest.raises(EngineClosedError, match="was closed"):
            one.thread.call_soon(ReplicaTransfer.poll)
    assert [len(one.thread.events) for one in (p, d)] == told


@pytest.fixture
def busy() -> Iterator[None]:
    """Threads that never sleep. Other threads therefore often wait longer for a processor than their sleep should
    last.
    """
    stopping = threading.Event()

    def spin() -> None:
        while not stopping.is_set():
            sum(range(1000))

    spinners = [threading.Thread(target=spin, daemon=True) for _ in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    for spinner in spinners:
        spinner.start()
    yield
    stopping.set()
    for spinner in spinners:
        spinner.join()
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("busy")
def test_a_sleep_ends_even_if_its_time_is_over_before_it_begins() -> None:
    """Before CPython 3.13, `SimpleQueue.get` with a timeout sleeps for ever after some 400 rounds of this test."""
    alarm, rounds = Alarm(), 0

    def sleep() -> None:
        nonlocal rounds
        for rounds in range(1, 2001):  # noqa: B007 - read at the end
            alarm.ring()
            assert alarm.sleep(0)
            assert not alarm.sleep(1e-5)

    sleeper = threading.Thread(target=sleep, daemon=True)
    sleeper.start()
    sleeper.join(60)
    assert (sleeper.is_alive(), rounds) == (False, 2000)


def test_rings_before_a_sleep_count_once_and_one_ring_ends_one_sleep() -> None:
    alarm = Alarm()
    assert not alarm.sleep(0)
    alarm.ring()
    alarm.ring()
    assert alarm.sleep(0)
    assert not alarm.sleep(1e-4)
    later = threading.Timer(0.05, alarm.ring)
    later.start()
    assert alarm.sleep(20)
    later.join()
