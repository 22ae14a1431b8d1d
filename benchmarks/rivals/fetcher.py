"""Our reader: asks a source for the pages of a prompt, pulls them, and publishes them in its manager."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns as now
from typing import NamedTuple, Self, TypeVar

import numpy as np
import torch
import zmq

from benchmarks.pools import LONGEST, Prompts, expect
from benchmarks.rivals.lender import LenderProcess, Setting, exchange_of, manager_of, stamp_of, tokens_of, use_up
from kvcache import TextContext
from transfer import ExchangeEvent, Lent, PullEvent

_MOST_MS = 1
"""In milliseconds: the longest pause between two polls. An answer or the end of a pull wakes the loop sooner."""
_TIMEOUT_S = 30.0
_Happened = TypeVar("_Happened", Lent, PullEvent)


class FetchTimes(NamedTuple):
    """Microseconds of one fetch.

    Attributes:
        total: from the query until the reader's manager finds the pages.
        pull: the part of `total` after the answer: import, pull and commit.
        digests: time to hash the prompt, before the query.
    """

    total: float
    pull: float
    digests: float


class Fetch:
    """One fetch. Its steps are `ask`, `hear`, `pull` and `end`."""

    def __init__(self, fetcher: Fetcher, number: int, pages: int) -> None:
        self._fetcher, self._manager, self._exchange = fetcher, fetcher.manager, fetcher.exchange
        self._number, self._pages = number, pages
        self.context = TextContext(tokens_of(number, pages), LONGEST)
        self.key = self.context.request_id
        self.wanted = self._manager.contents.digests(self.context)

    def ask(self) -> None:
        """Asks the source for all pages of the prompt."""
        self._exchange.ask(0, self.key, *self._fetcher.contact, self.wanted, _TIMEOUT_S)

    def hear(self) -> Lent:
        """Waits for the source's answer."""
        self.lent = self._fetcher.until(Lent, lambda event: event.key == self.key)[0]
        return self.lent

    def pull(self) -> None:
        """Begin to pull the lent pages."""
        pages = 0 if self.lent.table is None else len(self.lent.table.groups[0])
        if self.lent.source is None or self.lent.table is None or pages < self._pages:
            raise RuntimeError(
                f"prompt {self._number}: the source lends {pages} of {self._pages} pages. {self.lent.error}"
            )
        self._manager.external_claim(self.key)
        pending = self._manager.import_block_table(self.context, self.lent.table)
        if pending is None:
            raise RuntimeError(f"prompt {self._number}: the reader needs {self._pages + 1} free pages")
        self.pending = pending
        self._exchange.pull(self.key, self.lent.source, pending, timeout_s=_TIMEOUT_S)

    def end(self) -> PullEvent:
        """Waits for the end of the pull. Then publishes the pages, or gives them back."""
        event, happened = self._fetcher.until(PullEvent, lambda event: event.key == self.key and event.safe)
        if event.error:
            self._manager.cancel_import(self.pending)
        else:
            self._manager.commit_import(self.context, self.pending, happened.proof)
        return event

    def is_published(self) -> bool:
        """Whether the manager finds every page."""
        found = self._manager.contents.cached(0, self.wanted)
        return found == self._pages * self.wanted.page_size

    def has_begun(self) -> bool:
        """Whether the first bytes of any of these pages have arrived."""
        pool = self._manager.device_tensors[0][0]
        pages = enumerate(self._manager.get_req_blocks(self.key)[: self._pages])
        return any(
            int(pool[page].view(torch.int16).flatten()[0]) == stamp_of(self._number, column)
            for column, page in pages
            if not column % 64
        )

    def wrong_pages(self) -> int:
        """The number of published pages whose contents differ from what the source has computed."""
        pool = self._manager.device_tensors[0][0]
        pages = self._manager.get_req_blocks(self.key)[: self._pages]
        return sum(
            not bool((pool[page].view(torch.int16) == stamp_of(self._number, column)).all())
            for column, page in enumerate(pages)
        )

    def num_runs(self) -> int:
        """The number of runs. Pages that are adjacent in both pools form one run."""
        if self.lent.table is None:
            return 0
        theirs = np.array(self.lent.table.groups[0])
        ours = np.array(self._manager.get_req_blocks(self.key)[: len(theirs)])
        return 1 + int(((np.diff(theirs) != 1) | (np.diff(ours) != 1)).sum())

    def release(self) -> None:
        """Release the request. Its pages stay cached until they are evicted."""
        self._manager.release(self.key)


class Fetcher:
    """The reader; a context manager.

    Args:
        setting: the settings that both sides share.
        lender: the source.
    """

    def __init__(self, setting: Setting, lender: LenderProcess) -> None:
        self.manager = manager_of(setting, setting.pages // 2)
        self.exchange = exchange_of(setting, self.manager, "reader", setting.reader)
        address, engine_id = lender("contact")
        self.contact: tuple[str, str] = (address, engine_id)
        self._scattered, self._prompts = setting.scattered, Prompts()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.exchange.close()
        self.manager.close()

    def forget(self) -> None:
        """Forget all prompts of the source that the reader has cached."""
        self.manager.reset_prefix_cache()
        use_up(self.manager, self._prompts, scattered=self._scattered)

    def until(self, kind: type[_Happened], wanted: Callable[[_Happened], bool]) -> tuple[_Happened, ExchangeEvent]:
        """Poll, with pauses, until an event of this kind satisfies `wanted`."""
        while True:
            for happened in self.exchange.poll():
                event = happened.event
                if isinstance(event, kind) and wanted(event):
                    return event, happened
            zmq.zmq_poll([(socket, zmq.POLLIN) for socket in self.exchange.sockets], _MOST_MS)

    def fetch(self, number: int, pages: int) -> tuple[FetchTimes, Fetch]:
        """Fetch a prompt. Returns the fetch; its request is still claimed.

        Raises:
            RuntimeError: the source did not lend all pages, the pull failed, or the reader does not find the pages
                afterwards.
        """
        start = now()
        fetch = Fetch(self, number, pages)
        asked = now()
        fetch.ask()
        fetch.hear()
        lent = now()
        fetch.pull()
        event = fetch.end()
        end = now()
        expect(not event.error, f"a pull ends well, not so: {event.error}")
        expect(fetch.is_published(), f"all {pages} pages are found")
        return FetchTimes((end - asked) / 1e3, (end - lent) / 1e3, (asked - start) / 1e3), fetch
