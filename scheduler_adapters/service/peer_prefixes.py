"""`PeerPrefixes`: what other processes have cached of a waiting prompt is pulled from there, and the rest is computed.

Who may have it is named with the request, and may have forgotten it, be busy, or be gone: then the prompt is computed
as if nobody had been named, after a question, or after the time that a question or a pull is given. What was pulled is
cached here like anything else: the request finds it when it is admitted, in its turn.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

from kvcache.errors import KVCacheError
from scheduler_adapters.service.pull_or_compute import PullOrCompute
from scheduler_adapters.service.requests import Recent, reserve
from transfer.pull.asking import Lent
from transfer.pull.pull_state import PullEvent

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache.replica.block_table import BlockTable, PageDigests, PendingImport
    from kvcache.replica.context import TextContext
    from kvcache.replica.copier import ImportProof
    from scheduler_adapters.base import PulledPages
    from scheduler_adapters.loop import Request
    from scheduler_adapters.service import messages as msg
    from transfer.pull.exchange import ExchangeEvent, PageExchange
    from transfer.pull.source import Source

FetchOutcome = Literal["pulled", "computed", "stale", "unanswered", "no_room", "failed"]
"""Pulled; computed, as that is quicker; the source has no more than we, or did not say; no pages here; no pull."""
FETCH_OUTCOMES: tuple[FetchOutcome, ...] = get_args(FetchOutcome)

_ASK_S = 1.0  # for a source to answer: it may be in the middle of a step
_PULL_S = 5.0


class Waiting(NamedTuple):
    """A request that is to join the loop now, whatever is cached of it."""

    request: Request
    context: TextContext


@dataclass(slots=True, eq=False)
class _Fetch:
    """A prompt that somebody is asked for, and then the pull of it."""

    waiting: Waiting
    replica: int
    engines: list[tuple[str, str]]  # address and engine of those that are yet to be asked
    wanted: PageDigests
    cached: int  # tokens that are here
    begun: float
    source: str = ""  # the start of the process that is pulled from
    pending: PendingImport | None = None


class PeerPrefixes:
    """The prompts that are asked for. Belongs to the thread of the loop; no call waits.

    Args:
        manager: whose pages are filled. What it does not cache is not asked for.
        exchange: of these pages.
        clock: seconds, monotonic.

    Attributes:
        counts: prompts for which a source was named, by what came of it.
        pages_pulled: pages that were filled.
        estimate: what pulls and prompts took.
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
        """Ask for a prompt that is not claimed. False: there is nothing to ask for, or computing it is quicker."""
        if not sources:
            return False
        manager = self._manager
        wanted = manager.contents.digests(context)
        replica = manager.get_or_recommend_replica(context)
        cached = manager.contents.cached(replica, wanted)
        missing = (context.current_length - 1) // manager.page_size * manager.page_size - cached
        engines = [(source.address, engine) for source in sources for engine in source.engines]
        if not wanted.digests or missing <= 0:
            return False
        if not self.estimate.pays(missing, context.current_length - cached - missing):
            self.counts["computed"] += 1
            return False
        fetch = _Fetch(Waiting(request, context), replica, engines, wanted, cached, self._clock())
        self._open[context.request_id] = fetch
        self._ask(fetch)
        return True

    def on_event(self, happened: ExchangeEvent) -> Waiting | None:
        """What a source has said, or became of a pull: the request that is to join the loop now, if one is."""
        event = happened.event
        if not isinstance(event, Lent | PullEvent):
            return None
        fetch = self._open.get(event.key)
        if fetch is None:
            return None  # it was dropped
        if isinstance(event, PullEvent):
            return self._end(fetch, "failed") if event.error else self._take(fetch, happened.proof)
        return self._on_lent(fetch, event)

    def drop(self, key: str) -> None:
        """Nobody wants this prompt any more. Safe for one that is not open."""
        fetch = self._open.pop(key, None)
        if fetch is not None and fetch.pending is not None:
            self._exchange.cancel_pull(fetch.replica, key, "nobody wants it any more")
            self._give_back(fetch.waiting.context, fetch.pending)

    def _ask(self, fetch: _Fetch) -> None:
        address, engine = fetch.engines.pop(0)
        left = max(0.0, fetch.begun + _ASK_S - self._clock())
        self._exchange.ask(fetch.replica, fetch.waiting.context.request_id, address, engine, fetch.wanted, left)

    def _on_lent(self, fetch: _Fetch, lent: Lent) -> Waiting | None:
        if lent.source is not None and lent.table is not None and lent.table.num_tokens > fetch.cached:
            return self._pull(fetch, lent.source, lent.table)
        if fetch.engines and self._clock() < fetch.begun + _ASK_S:
            self._ask(fetch)
            return None
        return self._end(fetch, "unanswered" if lent.error else "stale")

    def _pull(self, fetch: _Fetch, source: Source, table: BlockTable) -> Waiting | None:
        fetch.source = source.incarnation
        try:
            fetch.pending = reserve(self._manager, fetch.waiting.context, fetch.replica, table)
        except KVCacheError:  # what the source has said is no good to us
            return self._end(fetch, "failed")
        if fetch.pending is None:
            return self._end(fetch, "no_room")
        if not fetch.pending.needs_copy:  # it was computed here meanwhile
            return self._take(fetch, None)
        self._exchange.pull(fetch.pending.request_id, source, fetch.pending, _PULL_S)
        return None

    def _take(self, fetch: _Fetch, proof: ImportProof | None) -> Waiting | None:
        """All of it is here: it is published, and given back for the request to find it."""
        context, pending = fetch.waiting.context, fetch.pending
        if pending is None:
            return None
        tokens = pending.tokens[1] - pending.tokens[0]
        self._manager.commit_import(context, pending, proof)
        fetch.pending = None
        if proof is not None:
            self.pages_pulled += tokens // self._manager.page_size
            if not self._met.add(fetch.source):  # the first contact comes once
                self.estimate.pull.add(tokens, self._clock() - fetch.begun)
        self._manager.release(context.request_id)
        return self._end(fetch, "pulled")

    def _end(self, fetch: _Fetch, outcome: FetchOutcome) -> Waiting:
        self.counts[outcome] += 1
        context, pending = fetch.waiting.context, fetch.pending
        del self._open[context.request_id]
        if pending is not None:
            self._give_back(context, pending)
        context.reset()
        return fetch.waiting

    def _give_back(self, context: TextContext, pending: PendingImport) -> None:
        """The import is over; its pages are, when nothing of the pull is in flight."""
        self._manager.release(context.request_id)
        self._manager.cancel_import(pending)
