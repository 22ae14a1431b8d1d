"""Chooses the pages of a prompt that are asked for next, and imports them: from its front, or from its end.

From the front, each stretch follows the pages that are cached by then, and the request waits for all stretches. From
the end, the request computes its prompt meanwhile. Each stretch ends where the previous one began, so the pulled pages
and the computed ones grow towards each other. When the computation reaches the first pulled page, the request finds
all pages from there on, because the loop looks them up before every chunk. Pages that have not come by then are
computed.

A stretch from the end is a share of the pages that a pull can bring before the computation arrives. So the last
stretches are short, and errors of the first estimate hardly matter. A late stretch costs nothing: the computation
continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from kvcache.replica.block_table import BlockTable, PageDigests, PendingImport
from kvcache.replica.context import TextContext
from kvcache.replica.copier import ImportProof
from scheduler_adapters.base import PulledPages
from scheduler_adapters.service.places import reserve
from scheduler_adapters.service.pull_or_compute import PullOrCompute

_SHARE = 0.75  # every stretch costs a question, which a loop answers only between two steps
_MOST_S = 1.0  # in seconds: the longest that a stretch from the end should take


class NextPages(NamedTuple):
    """The pages to ask for.

    Attributes:
        digests: their digests. A source lends the first of them that it has.
        tokens: the number of tokens that a source may have.
    """

    digests: PageDigests
    tokens: int


class Stretches(Protocol):
    """The stretches of one prompt, and their imports."""

    outcome: Literal["pulled", "split"]
    """The outcome that is counted for the prompt if at least one stretch was pulled."""
    most: float
    """The highest number of stretches of a prompt."""

    def admitted(self, cached: int) -> None:
        """Called when the request begins to run. Its first `cached` tokens are cached."""
        ...

    def next(self) -> NextPages | None:
        """Returns the pages to ask for now. None if computing is estimated to be quicker, or nothing is missing."""
        ...

    def skip(self) -> bool:
        """Leaves out the current stretch, which no source has. Returns whether later ones are useful without it."""
        ...

    def has_more(self, table: BlockTable, end: int) -> bool:
        """Returns whether the source of `table` may also have the next stretch. `end` is the end of the pulled one."""
        ...

    def reserve(self, tables: Sequence[BlockTable]) -> PendingImport | None:
        """Begins the import of a stretch. Returns None if there is no room. Raises as `import_block_table`."""
        ...

    def commit(self, pending: PendingImport, proof: ImportProof | None) -> None:
        """Publishes a complete stretch, and holds none of its pages any more."""
        ...

    def cancel(self, pending: PendingImport) -> None:
        """Gives up the import of a stretch."""
        ...


class FromTheFront:
    """Stretches from the front of a prompt: each follows the cached pages. The request is not claimed meanwhile.

    Args:
        manager: the manager whose pages are filled.
        context: the request's.
        replica: the replica where the pages will be cached.
        most: most tokens that any source is known to have.
        estimate: the times of pulls and computations.
    """

    outcome: Literal["pulled", "split"] = "pulled"
    most: float = 8  # if sources hold alternate pages, computing is quicker

    def __init__(
        self, manager: PulledPages, context: TextContext, replica: int, most: int, estimate: PullOrCompute
    ) -> None:
        self._manager, self._context, self._replica = manager, context, replica
        self._most, self._estimate = most, estimate

    def admitted(self, cached: int) -> None:
        """A no-op, because the request waits until its stretches have come."""

    def missing(self) -> tuple[int, int]:
        """Returns the leading tokens of full pages that are cached here, and the tokens that a source may have."""
        contents, context, size = self._manager.contents, self._context, self._manager.page_size
        wanted = contents.digests(context)
        if not wanted.digests:
            return 0, 0
        cached = contents.cached(self._replica, wanted)
        return cached, min(context.current_length - 1, self._most) // size * size - cached

    def next(self) -> NextPages | None:
        """See `Stretches`."""
        context = self._context
        cached, missing = self.missing()
        if missing <= 0 or not self._estimate.pays(cached, missing, context.current_length - cached - missing):
            return None
        return NextPages(self._manager.contents.digests(context, cached // self._manager.page_size), missing)

    def skip(self) -> bool:
        """False: a request has no use for pages behind a gap."""
        return False

    def has_more(self, table: BlockTable, end: int) -> bool:
        """A source without pages before the stretch may have later ones. One that has lent all of it has no more."""
        return table.num_tokens < end

    def reserve(self, tables: Sequence[BlockTable]) -> PendingImport | None:
        """See `Stretches`."""
        return reserve(self._manager, self._context, self._replica, tables[0], others=tables[1:])

    def commit(self, pending: PendingImport, proof: ImportProof | None) -> None:
        """See `Stretches`. The request, or the next stretch, finds the pages in the cache."""
        self._manager.commit_import(self._context, pending, proof)
        self._manager.release(self._context.request_id)

    def cancel(self, pending: PendingImport) -> None:
        """See `Stretches`."""
        self._manager.release(self._context.request_id)
        self._manager.cancel_import(pending)


class FromTheEnd:
    """Stretches from the end of a prompt: each ends where the previous one began. The request computes meanwhile.

    Args:
        manager: the manager whose pages are filled. Its contents take any part of a prompt.
        context: the request's. Its `start_idx` says how far it is computed.
        replica: the replica where the pages will be cached.
        tokens: the tokens that are not cached here and that a source may have.
        estimate: the times of pulls and computations.
        clock: a monotonic clock, in seconds.
    """

    outcome: Literal["pulled", "split"] = "split"
    most: float = math.inf

    def __init__(
        self,
        manager: PulledPages,
        context: TextContext,
        replica: int,
        tokens: range,
        estimate: PullOrCompute,
        clock: Callable[[], float],
    ) -> None:
        self._manager, self._context, self._replica, self._estimate = manager, context, replica, estimate
        self._cached, self._stop = tokens.start, tokens.stop
        self._first = self._stop  # the first token of the current stretch
        self._clock = clock
        self._has_come = False  # whether a stretch was committed
        self._ran_since = math.inf  # when the request began to run, if that was before the first stretch came

    def admitted(self, cached: int) -> None:
        """See `Stretches`."""
        self._cached = cached
        if not self._has_come:
            self._ran_since = self._clock()

    def next(self) -> NextPages | None:
        """See `Stretches`."""
        manager, size = self._manager, self._manager.page_size
        at = max(self._cached, self._context.start_idx)
        share = self._estimate.meets(at, self._stop, size)
        most = self._estimate.pulled_within(_MOST_S, share, size)
        tokens = min(max(size, int(share * _SHARE) // size * size), most)
        if not share or not tokens:
            return None
        self._first = self._stop - tokens
        every = manager.contents.digests(self._context, self._first // size)
        width = len(every.digests) // ((self._context.current_length - 1) // size - every.first_page)
        return NextPages(every._replace(digests=every.digests[: tokens // size * width]), tokens)

    def skip(self) -> bool:
        """True: the stretch is computed, and those before it may still come."""
        self._stop = self._first
        return True

    def has_more(self, table: BlockTable, end: int) -> bool:  # noqa: ARG002
        """True: the next stretch lies before this one."""
        return True

    def reserve(self, tables: Sequence[BlockTable]) -> PendingImport | None:
        """See `Stretches`. No request waits for the import."""
        return self._manager.contents.import_pages(self._context, self._replica, tables[0], tables[1:])

    def commit(self, pending: PendingImport, proof: ImportProof | None) -> None:
        """See `Stretches`. The first time, it measures how quickly the prompt is computed, before it finds any page."""
        computed, seconds = self._context.start_idx - self._cached, self._clock() - self._ran_since
        if not self._has_come and computed > 0 < seconds:
            self._estimate.compute.add(computed, seconds, self._cached)
        self._has_come = True
        self._manager.contents.commit_pages(pending, proof)
        self._stop = pending.tokens[0]

    def cancel(self, pending: PendingImport) -> None:
        """See `Stretches`."""
        self._manager.cancel_import(pending)
