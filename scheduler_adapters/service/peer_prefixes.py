"""`PeerPrefixes`: pulls the pages of a waiting prompt that other processes have cached; the rest is computed.

The request names the processes that may have pages. Such a process may have evicted them, be busy, or be gone. The
prompt is then computed as if no process had been named, after the answer or after the time limit of a question or a
pull. Pulled pages are cached like any others: the request finds them when it is admitted, in its turn.

Sources are asked one after another, each for the pages still missing. Each stretch of pages is published before the
next one is requested. So there is never a gap, a stretch that fails leaves the earlier ones intact, and no two sources
lend the same page. Rejected: asking all sources at once, because each would hold pages that only one is read for.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from kvcache.errors import KVCacheError
from kvcache.replica.block_table import PendingImport
from kvcache.replica.context import TextContext
from kvcache.replica.copier import ImportProof
from scheduler_adapters.base import PulledPages
from scheduler_adapters.loop import Request
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.places import reserve
from scheduler_adapters.service.pull_or_compute import PullOrCompute
from scheduler_adapters.service.requests import Recent
from transfer.pull.asking import Lent
from transfer.pull.exchange import ExchangeEvent, PageExchange
from transfer.pull.pull_state import PullEvent
from transfer.pull.source import Source

FetchOutcome = Literal["pulled", "computed", "stale", "unanswered", "no_room", "failed"]
"""The outcome for a prompt with a named source.

"pulled" means that at least one stretch was pulled, and "computed" that computing was estimated to be quicker. The
others describe the last source: "stale" (it has no more than we have), "unanswered", "no_room" (no free pages here) or
"failed" (the pull).
"""
FETCH_OUTCOMES: tuple[FetchOutcome, ...] = get_args(FetchOutcome)

_ASK_S = 1.0  # the time for sources to answer between two stretches, as a source may be in the middle of a step
_PULL_S = 5.0  # in seconds, for one stretch
_DROPPED, _USELESS = "its request was dropped", "its pages cannot be used here"
_MOST_STRETCHES = 8  # the most stretches of one prompt; if two sources hold alternate pages, computing is quicker


class Waiting(NamedTuple):
    """A request that is to join the loop now and uses the pages that are cached by then."""

    request: Request
    context: TextContext


@dataclass(slots=True, eq=False)
class _Fetch:
    """A prompt that a source is asked for, or a stretch of its pages that is being pulled."""

    waiting: Waiting
    replica: int
    engines: deque[tuple[str, str]]  # address and engine of the remaining sources, the next one first
    to_ask: int  # number of sources left to ask before giving up
    most: int  # most tokens that any source is known to have
    since: float  # when the current stretch was first asked for
    source: Source | None = None  # source of the stretch that is being pulled
    pending: PendingImport | None = None
    stretches: int = 0  # stretches pulled so far


class PeerPrefixes:
    """The prompts whose pages are requested from peers. For the loop's thread; no call waits.

    Args:
        manager: the manager whose pages are filled. Pages that it does not cache are not requested.
        exchange: the exchange of these pages.
        clock: a monotonic clock, in seconds.

    Attributes:
        counts: prompts for which a source was named, by outcome.
        pages_pulled: pages that were filled.
        estimate: the measured times of pulls and prompts.
    """

    def __init__(
        self, manager: PulledPages, exchange: PageExchange, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counts: Counter[FetchOutcome] = Counter()
        self.pages_pulled = 0
        self.estimate = PullOrCompute()
        self._manager = manager
        self._exchange = exchange
        self._clock = clock
        self._open: dict[str, _Fetch] = {}
        self._met: Recent[str] = Recent()

    def begin(self, request: Request, context: TextContext, sources: Sequence[msg.KVSource]) -> bool:
        """Starts to ask for a prompt that is not claimed.

        False if there is nothing to ask for or computing is quicker.
        """
        if not sources:
            return False
        replica = self._manager.get_or_recommend_replica(context)
        engines = deque(dict.fromkeys((source.address, engine) for source in sources for engine in source.engines))
        tokens = [source.tokens for source in sources]
        most = max(tokens) if all(tokens) else context.current_length
        fetch = _Fetch(Waiting(request, context), replica, engines, len(engines), most, self._clock())
        cached, missing = self._missing(fetch)
        if missing <= 0 or not engines:
            return False
        if not self.estimate.pays(cached, missing, context.current_length - cached - missing):
            self.counts["computed"] += 1
            return False
        self._open[context.request_id] = fetch
        self._ask(fetch, cached)
        return True

    def on_event(self, happened: ExchangeEvent) -> Waiting | None:
        """Handles a source's answer or the outcome of a pull.

        Returns the request that is to join the loop now, if any.
        """
        event = happened.event
        if not isinstance(event, Lent | PullEvent):
            return None
        fetch = self._open.get(event.key)
        if isinstance(event, Lent):
            return self._on_lent(fetch, happened.replica, event)
        if fetch is None:
            return None  # the prompt was dropped
        if not event.error:
            return self._take(fetch, happened.proof)
        # While the pull may still write, its key and pages cannot be used for another pull.
        return self._go_on(fetch, "failed") if event.safe else self._end(fetch, "failed")

    def drop(self, key: str) -> None:
        """Give up a prompt that is no longer wanted. A no-op if the prompt is not open."""
        fetch = self._open.pop(key, None)
        if fetch is not None and fetch.pending is not None:
            self._exchange.cancel_pull(fetch.replica, key, _DROPPED)
            self._give_back(fetch)

    def _missing(self, fetch: _Fetch) -> tuple[int, int]:
        """Returns the leading tokens of full pages that are cached here, and the tokens that a source may have."""
        contents, context, size = self._manager.contents, fetch.waiting.context, self._manager.page_size
        wanted = contents.digests(context)
        if not wanted.digests:
            return 0, 0
        cached = contents.cached(fetch.replica, wanted)
        return cached, min(context.current_length - 1, fetch.most) // size * size - cached

    def _ask(self, fetch: _Fetch, cached: int) -> None:
        """Asks the next source. It shares the remaining time with the sources after it."""
        (address, engine), context = fetch.engines[0], fetch.waiting.context
        wanted = self._manager.contents.digests(context, cached // self._manager.page_size)
        left = max(0.0, fetch.since + _ASK_S - self._clock()) / fetch.to_ask
        self._exchange.ask(fetch.replica, context.request_id, address, engine, wanted, left)

    def _on_lent(self, fetch: _Fetch | None, replica: int, lent: Lent) -> Waiting | None:
        if lent.source is None or lent.table is None:
            return None if fetch is None else self._go_on(fetch, "unanswered" if lent.error else "stale")
        if fetch is None:
            self._exchange.refuse(replica, lent.source, _DROPPED)
            return None
        fetch.source = lent.source
        try:
            fetch.pending = reserve(self._manager, fetch.waiting.context, replica, lent.table)
        except KVCacheError:  # the answer does not fit our cache, or the pages before it were evicted here
            self._exchange.refuse(replica, lent.source, _USELESS)
            return self._go_on(fetch, "failed")
        if fetch.pending is not None and fetch.pending.needs_copy:
            self._exchange.pull(fetch.pending.request_id, lent.source, fetch.pending, _PULL_S)
            return None
        self._exchange.refuse(replica, lent.source, _USELESS)  # no room, or the pages were computed here meanwhile
        return self._end(fetch, "no_room") if fetch.pending is None else self._take(fetch, None)

    def _take(self, fetch: _Fetch, proof: ImportProof | None) -> Waiting | None:
        """Publishes a complete stretch and releases it.

        The request, or the next stretch, finds its pages in the cache.
        """
        context, pending, source = fetch.waiting.context, fetch.pending, fetch.source
        if pending is None or source is None:
            return None
        now, tokens = self._clock(), pending.tokens[1] - pending.tokens[0]
        self._manager.commit_import(context, pending, proof)
        fetch.pending = None
        if proof is not None:
            self.pages_pulled += tokens // self._manager.page_size
            if not self._met.add(source.incarnation):  # the first contact with a source is not representative
                self.estimate.pull.add(tokens, now - fetch.since)
        self._manager.release(context.request_id)
        fetch.stretches, fetch.since = fetch.stretches + 1, now
        # A source without pages before this stretch may have later ones. The lender of this stretch has no more.
        fetch.to_ask = len(fetch.engines)
        return self._go_on(fetch, "pulled")

    def _go_on(self, fetch: _Fetch, outcome: FetchOutcome) -> Waiting | None:
        """Asks the next source for the pages that are still missing if that is worthwhile; else ends the fetch."""
        context = fetch.waiting.context
        fetch.to_ask -= 1
        fetch.engines.rotate(-1)
        if outcome in ("unanswered", "failed"):
            fetch.engines.pop()  # a source that failed is not asked again
        if not fetch.to_ask or fetch.stretches == _MOST_STRETCHES or self._clock() >= fetch.since + _ASK_S:
            return self._end(fetch, outcome)
        self._give_back(fetch)
        cached, missing = self._missing(fetch)
        if missing <= 0 or not self.estimate.pays(cached, missing, context.current_length - cached - missing):
            return self._end(fetch, outcome)
        self._ask(fetch, cached)
        return None

    def _end(self, fetch: _Fetch, outcome: FetchOutcome) -> Waiting:
        context = fetch.waiting.context
        self.counts["pulled" if fetch.stretches else outcome] += 1
        del self._open[context.request_id]
        self._give_back(fetch)
        return fetch.waiting

    def _give_back(self, fetch: _Fetch) -> None:
        """Cancels the current import, if any. Its pages are free once nothing of the pull is in flight."""
        pending, fetch.pending = fetch.pending, None
        if pending is not None:
            self._manager.release(fetch.waiting.context.request_id)
            self._manager.cancel_import(pending)
