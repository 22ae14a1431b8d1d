"""What is parked is parked once, and lets go of its pages once it has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from transfer.engine.postings import Quarantine


def posting(name: str, *pages: int) -> Any:
    return SimpleNamespace(
        request=SimpleNamespace(transfer_name=name),
        peer="p",
        replica=0,
        pages=pages,
        pending={0: "a handle"},
        poll=lambda: None,
    )


def test_a_transfer_that_is_parked_twice_is_one() -> None:
    quarantine, slow = Quarantine(), posting("slow", 3, 4)
    quarantine.park(slow)
    quarantine.park(slow)
    quarantine.reap()
    assert quarantine.pages(0) == {3, 4}
    assert quarantine.pages(1) == frozenset()
    assert quarantine.parked() == [slow]


def test_what_has_ended_is_not_parked_and_what_ends_is_let_go() -> None:
    quarantine, slow, ended = Quarantine(), posting("slow", 3), posting("ended", 4)
    ended.pending.clear()
    quarantine.park(slow)
    quarantine.park(ended)
    assert quarantine.pages(0) == {3}
    slow.pending.clear()
    quarantine.reap()
    assert quarantine.pages(0) == frozenset()
    assert not quarantine.parked()


def test_a_peer_s_own_transfers_are_told_from_ours_with_it() -> None:
    quarantine = Quarantine()
    quarantine.park(posting("ours", 3))
    quarantine.hold("theirs", "p", 0, [4])
    quarantine.hold("another's", "q", 0, [5])
    assert quarantine.of_peer("p") == ["theirs"]
