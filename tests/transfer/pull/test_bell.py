"""A thread that sleeps on a bell wakes at each ring, can sleep again after `hear`, and misses no ring."""

from __future__ import annotations

import os
import select
import threading
from typing import Any

import pytest

from transfer.pull.bell import Bell


def rings(bell: Bell, within_s: float = 0.0) -> bool:
    return bool(select.select([bell], [], [], within_s)[0])


def test_a_ring_stays_until_it_is_heard() -> None:
    bell = Bell()
    assert not rings(bell)
    bell.ring()
    bell.ring()
    assert rings(bell)
    bell.hear()
    assert not rings(bell)
    bell.ring()
    assert rings(bell)
    bell.close()


def test_a_closed_bell_can_be_neither_rung_nor_heard() -> None:
    bell = Bell()
    bell.ring()
    bell.close()
    bell.close()
    bell.ring()
    bell.hear()
    assert bell.fileno() == -1


def test_work_that_is_queued_before_a_ring_is_never_missed() -> None:
    bell, there, taken = Bell(), list[int](), 0

    def put() -> None:
        for number in range(20_000):
            there.append(number)
            bell.ring()

    threads = [threading.Thread(target=put) for _ in range(2)]
    for thread in threads:
        thread.start()
    while taken < 40_000:
        assert rings(bell, 20.0), f"asleep although {len(there) - taken} items were not taken"
        bell.hear()
        taken = len(there)
    for thread in threads:
        thread.join()
    bell.close()


@pytest.mark.parametrize("call", ["eventfd_read", "eventfd_write"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("by", ["a thread", "a signal handler"])
def test_a_ring_during_a_system_call_does_not_silence_later_rings(
    monkeypatch: pytest.MonkeyPatch, call: str, after: bool, by: str
) -> None:
    """`hear` or `ring` makes its system call. Before or after this call, another thread or a signal handler rings."""
    bell = Bell()
    real, threads = getattr(os, call), list[threading.Thread]()

    def ring() -> None:
        if by == "a thread":
            threads.append(threading.Thread(target=bell.ring))
            threads[-1].start()
            threads[-1].join(0.05)  # The thread may have to wait until the system call has ended.
        else:
            bell.ring()

    def interrupted(*arguments: Any) -> Any:
        monkeypatch.setattr(os, call, real)
        if not after:
            ring()
        result = real(*arguments)
        if after:
            ring()
        return result

    if call == "eventfd_read":
        bell.ring()
    monkeypatch.setattr(os, call, interrupted)
    (bell.hear if call == "eventfd_read" else bell.ring)()
    for thread in threads:
        thread.join()
    bell.ring()  # A sleeping thread calls `hear` only after it has woken. Therefore no `hear` comes before this ring.
    assert rings(bell)
    bell.hear()
    assert not rings(bell)
    bell.ring()
    assert rings(bell)
    bell.close()


def test_a_hear_between_two_simultaneous_rings_silences_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second thread reads the flag before the first thread rings. It writes to the bell after the hearer has heard
    the first ring.
    """
    bell, real = Bell(), os.eventfd_write
    others: list[threading.Thread] = []

    def late(*arguments: Any) -> None:
        monkeypatch.setattr(os, "eventfd_write", real)
        real(*arguments)
        others.extend(threading.Thread(target=call) for call in (bell.ring, bell.hear))
        for other in others:
            other.start()
            other.join(0.05)

    monkeypatch.setattr(os, "eventfd_write", late)
    bell.ring()
    for other in others:
        other.join()
    bell.ring()
    assert rings(bell)
    bell.close()


def test_closing_a_bell_during_a_ring_does_not_write_to_a_reused_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of the bell's descriptor may be reused as soon as the descriptor is closed. `close` therefore waits
    for the ring.
    """
    bell, real = Bell(), os.eventfd_write
    closing = threading.Thread(target=bell.close)

    def closed(fd: int, count: int) -> None:
        closing.start()
        closing.join(0.05)
        real(fd, count)

    monkeypatch.setattr(os, "eventfd_write", closed)
    bell.ring()
    closing.join()
    assert bell.fileno() == -1
