"""Whoever sleeps on a bell wakes at a ring, sleeps again once it has heard it, and misses none."""

from __future__ import annotations

import select
import threading

from transfer.pull.bell import Bell


def rings(bell: Bell, within_s: float = 0.0) -> bool:
    return bool(select.select([bell], [], [], within_s)[0])


def test_a_ring_is_there_until_it_is_heard() -> None:
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


def test_a_closed_bell_is_neither_rung_nor_heard() -> None:
    bell = Bell()
    bell.ring()
    bell.close()
    bell.close()
    bell.ring()
    bell.hear()
    assert bell.fileno() == -1


def test_what_is_put_down_before_a_ring_is_never_slept_over() -> None:
    bell, there, taken = Bell(), list[int](), 0

    def put() -> None:
        for number in range(20_000):
            there.append(number)
            bell.ring()

    threads = [threading.Thread(target=put) for _ in range(2)]
    for thread in threads:
        thread.start()
    while taken < 40_000:
        assert rings(bell, 20.0), f"asleep with {len(there) - taken} that nobody has looked at"
        bell.hear()
        taken = len(there)
    for thread in threads:
        thread.join()
    bell.close()
