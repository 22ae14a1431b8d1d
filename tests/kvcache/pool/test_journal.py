"""Tests the readers of a journal, their order, and the entries of each reader."""

from __future__ import annotations

import numpy as np

from kvcache.eviction_order import BY_HINT, BY_QUOTA, BY_TURN
from kvcache.pool.journal import BY_RESET, Journal, PageReader
from kvcache.watch.log import REASONS

NEWS = ("going", "gone", "came", "followed", "found", "left", "changed")


class Noting(PageReader):
    """Records the readers that were called."""

    def __init__(self, name: str, told: list[str]) -> None:
        self.name, self.told = name, told

    def going(self, pages: np.ndarray) -> None:  # noqa: ARG002
        self.told.append(self.name)


def test_readers_that_save_pages_are_called_first_and_the_others_in_order_of_arrival() -> None:
    journal, told = Journal(), list[str]()
    readers = [Noting(name, told) for name in ("hints", "watch", "tier")]
    for reader in readers:
        journal.read(reader, saves=reader.name == "tier")
    for tell in journal.going:
        tell(np.zeros(0, np.int32))
    assert told == ["tier", "hints", "watch"]
    journal.end(readers[0])
    assert [reader.name for reader in journal.readers if isinstance(reader, Noting)] == ["tier", "watch"]
    assert len(journal.going) == 2


def test_a_reader_is_called_only_for_the_methods_that_it_has() -> None:
    journal = Journal()
    assert not any(getattr(journal, news) for news in NEWS)
    journal.read(PageReader())
    assert not any(getattr(journal, news) for news in NEWS)
    journal.read(Noting("one", []))
    assert [news for news in NEWS if getattr(journal, news)] == ["going"]


def test_each_reason_has_a_number_and_a_name_of_its_own() -> None:
    reasons = (BY_TURN, BY_HINT, BY_QUOTA, BY_RESET)
    assert [REASONS[why] for why in reasons] == ["LRU", "hint", "quota", "reset"]


def test_a_reader_may_leave_while_readers_are_being_called() -> None:
    """While readers are being called, a watcher may end its subscription from its own thread."""
    journal, told = Journal(), list[str]()

    class Leaving(Noting):
        def going(self, pages: np.ndarray) -> None:
            journal.end(self)
            super().going(pages)

    journal.read(Leaving("leaves", told))
    journal.read(Noting("stays", told))
    for tell in journal.going:
        tell(np.zeros(0, np.int32))
    assert told == ["leaves", "stays"]
    assert len(journal.readers) == 1
