"""Chooses and imports the next pages of a prompt to request from peers: from the prompt's front, or its end.

A stretch is a run of consecutive pages that is requested and pulled at once. A stretch from the front follows the pages
that are cached by then, and the request waits for all stretches. While stretches from the end are pulled, the request
computes its prompt from the front. Each stretch from the end ends where the previous stretch began, so the pulled pages
and the computed pages grow towards each other. The loop looks up cached pages before every chunk, so when the
computation reaches the first pulled page, the request uses all pages from there on. Pages that have not arrived by then
are computed.

A stretch from the end has as many pages as can be pulled before the computation reaches them. If the pull ends early, a
shorter stretch before these pages is pulled next. If the pull is a little late, the request waits for it. If the pull
is very late, the computation continues.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol

from kvcache.replica.block_table import BlockTable, PageDigests, PendingImport
from kvcache.replica.context import TextContext
from kvcache.replica.copier import ImportProof
from scheduler_adapters.base import PulledPages
from scheduler_adapters.pull_or_compute import PullOrCompute
from scheduler_adapters.service.reserving import reserve

_MOST_S = 1.0  # in seconds: the longest that pulling one stretch from the end should take


class NextPages(NamedTuple):
    """The pages to ask for.

    Attributes:
        digests: digests of the pages. A source lends the longest prefix that it has.
        tokens: the number of prompt tokens whose pages a source might have.
    """

    digests: PageDigests
    tokens: int


class Stretches(Protocol):
    """The stretches of one prompt, and their imports."""

    outcome: Literal["pulled", "split"]
    """The outcome to count for the prompt if at least one stretch was pulled."""
    most: float
    """The most stretches that are pulled for one prompt."""

    def admitted(self, cached: int) -> None:
        """Called when the request begins to run. Its first `cached` tokens are in the cache."""
        ...

    def next(self) -> NextPages | None:
        """Returns the pages to ask for next.

        Returns None if computing is estimated to be quicker, or if no page is missing.
        """
        ...

    def meet(self, pending: PendingImport) -> bool:
        """Returns whether the request has computed everything before the stretch that is being pulled.

        The first call that returns True measures the speed of the computation.
        """
        ...

    def skip(self) -> bool:
        """Skips the current stretch, which no source has. Returns whether later stretches are useful without it."""
        ...

    def has_more(self, table: BlockTable, end: int) -> bool:
        """Returns whether the source of `table` may have pages of the next stretch too.

        `table` names the pages that the source has leased. The pulled stretch ends at token `end`.
        """
        ...

    def reserve(self, tables: Sequence[BlockTable]) -> PendingImport | None:
        """Reserves pages for the import of a stretch. Returns None if too few are free.

        Raises as `import_block_table`.
        """
        ...

    def commit(self, pending: PendingImport, proof: ImportProof | None) -> None:
        """Publishes the pages of a complete stretch, so that the request finds them in the cache."""
        ...

    def cancel(self, pending: PendingImport) -> None:
        """Cancels the import of a stretch."""
        ...


class FromTheFront:
    """Stretches from the front of a prompt. Each stretch begins after the cached pages.

    The request waits outside the loop until the last stretch is done.

    Args:
        manager: the manager whose pages are filled.
        context: the context of the request.
        replica: the replica where the pages will be cached.
        most: the most tokens that any source is known to have.
        estimate: the times of pulls and computations.
    """

    outcome: Literal["pulled", "split"] = "pulled"
    most: float = 8  # if more stretches are needed, the sources hold alternate pages, and computing is quicker

    def __init__(
        self, manager: PulledPages, context: TextContext, replica: int, most: int, estimate: PullOrCompute
    ) -> None:
        self._manager, self._context, self._replica = manager, context, replica
        self._most, self._estimate = most, estimate

    def admitted(self, cached: int) -> None:
        """Does nothing, because the request is admitted only after its stretches have been pulled."""

    def missing(self) -> tuple[int, int]:
        """Returns how many leading tokens are cached here, and how many tokens after them a source may have.

        Both numbers count full pages only.
        """
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

    def meet(self, pending: PendingImport) -> bool:  # noqa: ARG002
        """Returns False, because the request does not run."""
        return False

    def skip(self) -> bool:
        """Returns False: pages that follow a gap are of no use to the request."""
        return False

    def has_more(self, table: BlockTable, end: int) -> bool:
        """Returns True if the source's table ends before the pulled stretch does.

        The source then lacks later pages of this stretch, but may have pages of the next one.
        """
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
    """Stretches from the end of a prompt. Each stretch ends where the previous stretch began.

    At the same time, the request computes its prompt from the front.

    Args:
        manager: the manager whose pages are filled. It can import any part of a prompt.
        context: the context of the request. Its `start_idx` says how much of the prompt has been computed.
        replica: the replica where the pages will be cached.
        tokens: the range of tokens that are not cached here, and whose pages a source might have.
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
        # The time at which the request began to run. Infinite before that time, and after the request's speed was
        # measured.
        self._ran_since = math.inf
        self._has_come = False  # whether a stretch was committed

    def admitted(self, cached: int) -> None:
        """See `Stretches`."""
        self._cached = cached
        if not self._has_come:
            self._ran_since = self._clock()

    def next(self) -> NextPages | None:
        """See `Stretches`."""
        manager, size = self._manager, self._manager.page_size
        at = max(self._cached, self._context.start_idx)
        tokens = self._estimate.meets(at, self._stop, size)
        if not tokens:
            return None
        tokens = self._estimate.pulled_within(_MOST_S, tokens, size)
        self._first = self._stop - tokens
        every = manager.contents.digests(self._context, self._first // size)
        width = len(every.digests) // ((self._context.current_length - 1) // size - every.first_page)
        return NextPages(every._replace(digests=every.digests[: tokens // size * width]), tokens)

    def meet(self, pending: PendingImport) -> bool:
        """See `Stretches`."""
        if self._context.start_idx < pending.tokens[0]:
            return False
        self._measure()
        return True

    def _measure(self) -> None:
        """Measures how quickly the prompt has been computed so far.

        Must be called before the request waits for a pulled page or uses one.
        """
        computed, seconds = self._context.start_idx - self._cached, self._clock() - self._ran_since
        if computed > 0 < seconds:
            self._estimate.compute.add(computed, seconds, self._cached)
        self._ran_since = math.inf

    def skip(self) -> bool:
        """Returns True: the tokens of this stretch are computed, and pages before the stretch may still be pulled."""
        self._stop = self._first
        return True

    def has_more(self, table: BlockTable, end: int) -> bool:  # noqa: ARG002
        """Returns True: the next stretch lies before this one in the prompt, so the same source may have it."""
        return True

    def reserve(self, tables: Sequence[BlockTable]) -> PendingImport | None:
        """Reserves pages, as `Stretches` describes. No request waits for the import."""
        return self._manager.contents.import_pages(self._context, self._replica, tables[0], tables[1:])

    def commit(self, pending: PendingImport, proof: ImportProof | None) -> None:
        """Publishes a pulled stretch, as `Stretches` describes.

        The first call measures how quickly the prompt is computed, before the prompt uses any pulled page.
        """
        self._measure()
        self._has_come = True
        self._manager.contents.commit_pages(pending, proof)
        self._stop = pending.tokens[0]

    def cancel(self, pending: PendingImport) -> None:
        """See `Stretches`."""
        self._manager.cancel_import(pending)
