"""`PeerPrefixes`: pulls pages of a waiting prompt that other processes have cached. The rest of the prompt is computed.

The request names the processes that may have pages of its prompt. Such a process may have evicted the pages, or be
busy, or be gone. The prompt is then computed as if the request had named no process. The computation begins at once if
the process answers, and after a time limit if it does not answer. Pulled pages are cached like any others, so the
request finds them when its turn comes. If pulling takes about as long as computing, the request runs at once, and
meanwhile pages are pulled from the end of the prompt (`scheduler_adapters.service.stretches`).

The pages are pulled in *stretches*: runs of consecutive pages of the prompt. A long stretch is read from several
sources at once (`transfer.pull.shared_pull`), so all of these are asked at the same time. When the first source has
lent its pages, the other sources get about as much additional time as the first one took. A longer wait would cost more
than another source saves. Pages that a source lends later are given back. A short stretch is read from a single source,
so its sources are asked one after another. If they were asked at the same time, all but one would hold pages that
nobody reads.

Each stretch is published before the next one is asked for, so a stretch that fails leaves the earlier ones intact.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from kvcache.errors import KVCacheError
from kvcache.replica.block_table import BlockTable, PendingImport
from kvcache.replica.context import TextContext
from kvcache.replica.copier import ImportProof
from scheduler_adapters.base import PulledPages
from scheduler_adapters.loop import Request
from scheduler_adapters.pull_or_compute import PullOrCompute
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.requests import Recent
from scheduler_adapters.service.stretches import FromTheEnd, FromTheFront, NextPages, Stretches
from transfer.pull.asking import Lent
from transfer.pull.exchange import ExchangeEvent, PageExchange
from transfer.pull.pull_state import PullEvent, PullShare
from transfer.pull.source import Contact, Source

FetchOutcome = Literal["pulled", "split", "computed", "stale", "unanswered", "no_room", "failed"]
"""The outcome for a prompt for which at least one source of pages was named.

"pulled": at least one stretch was pulled while the request waited. "split": at least one stretch was pulled while the
prompt was being computed. "computed": computing was estimated to be quicker, so no source was asked. The other outcomes
describe the last source. "stale": it has no more pages than this process. "unanswered": it did not answer in time, or
reported an error. "no_room": too few pages were free here. "failed": the pull failed, or the lent pages did not fit.
"""
FETCH_OUTCOMES: tuple[FetchOutcome, ...] = get_args(FetchOutcome)

# in seconds: how long the sources of one stretch may take to answer, all together; a source may be busy with a step
_ASK_S = 1.0
_AT_ONCE = 4  # the most sources that are asked at the same time
# In seconds: when a source has leased pages, the other sources get some extra time to answer. The extra time is as long
# as the first source took to answer, but lies between this minimum and this maximum.
_LEAST_WAIT_S, _MOST_WAIT_S = 5e-3, 0.05
_PULL_S = 5.0  # in seconds: the time limit for pulling one stretch
# In seconds: how long the loop awaits a source's answer instead of running a step. The loop waits only if a running
# prompt is its only request. The answer takes a few milliseconds unless the source runs a step. Without this wait, the
# pull would begin only after a step.
_ANSWER_S = 0.01
# If a running prompt is the only request of the loop and has been computed up to the pages of a pull, the loop awaits
# these pages. It waits until the pull has taken `_PATIENCE` times its estimated time. Computing the pages instead would
# be wasted work, because the pull brings the same tokens.
_PATIENCE = 1.25
_DROPPED, _USELESS = "its request was dropped", "its pages cannot be used here"
_LATE = "its answer was no longer awaited"


class Waiting(NamedTuple):
    """A request that should join the loop now. The request uses the pages that are cached at that time."""

    request: Request
    context: TextContext


class _LentStretch(NamedTuple):
    """Pages that a source has lent."""

    source: Source
    table: BlockTable


@dataclass(slots=True, eq=False)
class _Fetch:
    """A prompt whose pages are requested from sources or are being pulled.

    Attributes:
        context: the context of the prompt's request.
        waiting: the request, if it waits for the pages; None if it runs at the same time.
        replica: the local replica that asks for the pages and will cache them.
        stretches: chooses the pages to ask for, and imports them.
        contacts: address and engine id of each source that has not failed. The sources that were asked last are at the
            end.
        to_ask: the sources that are still to be asked for the current stretch.
        since: time at which the current stretch was first asked for.
        asked: keys of the queries that await an answer. An answer to any other query is late.
        asked_at: time at which the queries in `asked` were sent.
        share_s: how long each source may take to answer, in seconds, if the sources are asked one after another.
        wait_until: the time until which answers are awaited.
        lent: the pages that sources have leased in answer to these queries.
        outcome: the outcome that is counted if no source leases pages. The latest answer without pages sets it.
        pending: the import of the stretch that is being pulled from the sources of `lent`.
        pull_at: time at which the pull of `pending` began.
        before_s: the exchange's `pull_seconds` at the time `pull_at`.
        pulled: number of stretches that were pulled so far.
    """

    context: TextContext
    waiting: Waiting | None
    replica: int
    stretches: Stretches
    contacts: list[Contact]
    to_ask: deque[Contact]
    since: float
    asked: set[str] = field(default_factory=set[str])
    asked_at: float = 0.0
    share_s: float = 0.0
    wait_until: float = 0.0
    lent: list[_LentStretch] = field(default_factory=list[_LentStretch])
    outcome: FetchOutcome = "unanswered"
    pending: PendingImport | None = None
    pull_at: float = 0.0
    before_s: float = 0.0
    pulled: int = 0


class _PromptQuestion(NamedTuple):
    """A query about a prompt, not answered by its source yet."""

    fetch: _Fetch
    contact: Contact


class PeerPrefixes:
    """The prompts whose pages are requested from peers. Only the loop's thread may call it. No call waits.

    Args:
        manager: the manager that receives the pages. Only pages that it does not cache are requested.
        exchange: the exchange that pulls the pages.
        clock: a monotonic clock, in seconds.

    Attributes:
        counts: number of prompts for which a source was named, by outcome.
        pages_pulled: number of pages that were pulled.
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
        # By key. A query is removed when the source has answered or its time is over.
        self._questions: dict[str, _PromptQuestion] = {}
        self._serial = itertools.count()
        self._met: Recent[str] = Recent()
        # Called when pages of a running prompt are being pulled, with the request's id and the first token of those
        # pages.
        self.on_pages: Callable[[str, int], None] = lambda _key, _token: None
        # requests that run, and for which pages at the end of the prompt have been pulled
        self._split: set[str] = set()

    def begin(self, request: Request, context: TextContext, sources: Sequence[msg.KVSource]) -> bool:
        """Starts to ask peers for pages of an unclaimed request. Returns whether the request should wait for them.

        If the result is False, the request should run at once: no peer has a useful page, or computing is quicker, or
        the prompt is computed from its front while pages are pulled from its end.
        """
        if not sources:
            return False
        manager, estimate = self._manager, self.estimate
        replica = manager.get_or_recommend_replica(context)
        contacts = list(dict.fromkeys((source.address, engine) for source in sources for engine in source.engines))
        tokens = [source.tokens for source in sources]
        most = max(tokens) if all(tokens) else context.current_length
        stretches: Stretches = FromTheFront(manager, context, replica, most, estimate)
        cached, missing = stretches.missing()
        if missing <= 0 or not contacts:
            return False
        waiting, rest = Waiting(request, context), context.current_length - cached - missing
        if manager.contents.takes_any_part and estimate.splits(cached, missing, rest, manager.page_size):
            tokens_of = range(cached, cached + missing)
            stretches, waiting = FromTheEnd(manager, context, replica, tokens_of, estimate, self._clock), None
        wanted = stretches.next()
        if wanted is None:
            self.counts["computed"] += 1
            return False
        fetch = _Fetch(context, waiting, replica, stretches, contacts, deque(contacts), self._clock())
        self._open[context.request_id] = fetch
        self._ask(fetch, wanted)
        return waiting is not None

    def begin_waiting(self) -> bool:
        """Returns whether a running prompt must now wait for an answer or for pages, rather than be computed.

        A prompt waits for pages when it has been computed up to the first of these pages. The speed of the computation
        is measured before the wait, so that the wait does not count.
        """
        now, running = self._clock(), (fetch for fetch in self._open.values() if fetch.waiting is None)
        return any(now < self._awaited_until(fetch) for fetch in running)

    def _awaited_until(self, fetch: _Fetch) -> float:
        if fetch.asked:
            return fetch.asked_at + _ANSWER_S
        if fetch.pending is None or not fetch.stretches.meet(fetch.pending):
            return 0.0
        begin, end = fetch.pending.tokens
        return fetch.pull_at + _PATIENCE * (self.estimate.pull.seconds(end - begin) or 0.0)

    def admitted(self, key: str, replica: int, cached: int) -> None:
        """Reports that a prompt begins to run on a replica, after `cached` cached tokens.

        If the prompt does not run on the replica that pulls its pages, it cannot use these pages. The fetch is then
        dropped.
        """
        fetch = self._open.get(key)
        if fetch is None:
            return
        if fetch.replica != replica:
            self.drop(key)
            return
        fetch.stretches.admitted(cached)
        if fetch.pending is not None:
            self.on_pages(key, fetch.pending.tokens[0])

    def computed(self, key: str, tokens: int, seconds: float, cached: int) -> None:
        """Reports that computing `tokens` tokens of a prompt, after `cached` cached ones, took `seconds` seconds.

        The measurement is discarded if pages of the prompt were pulled during the computation.

        If a pull of the prompt's pages has not been reported as complete, the computation was quicker. If that pull has
        already taken longer than estimated, the time so far is recorded as its duration. An unfinished pull would take
        even longer. Without this record, a link that has become slower would never be noticed, and pages would be
        requested in vain for each further prompt.
        """
        if key not in self._split:
            self.estimate.compute.add(tokens, seconds, cached)
        fetch = self._open.get(key)
        if fetch is not None and fetch.pending is not None and self._meet_sources(fetch):
            begin, end = fetch.pending.tokens
            took_s, estimated_s = self._took_s(fetch), self.estimate.pull.seconds(end - begin)
            if estimated_s is not None and took_s > estimated_s:
                self.estimate.pull.add(end - begin, took_s)
        self.drop(key)

    def on_event(self, happened: ExchangeEvent) -> Waiting | None:
        """Handles a source's answer or the outcome of a pull.

        Returns a request that should join the loop now, or None.
        """
        event = happened.event
        if isinstance(event, Lent):
            return self._on_lent(happened.replica, event)
        fetch = self._open.get(event.key) if isinstance(event, PullEvent) else None
        if fetch is None or not isinstance(event, PullEvent):
            return None  # the prompt was dropped
        if not event.error:
            return self._take(fetch, happened.proof, event.shares)
        if not event.safe:  # the pull may still write, so neither its key nor its pages can be used for another pull
            return self._end(fetch, "failed")
        self._give_up(fetch, [lent.source.contact for lent in fetch.lent])
        return self._go_on(fetch, "failed")

    def poll(self) -> list[Waiting]:
        """Stops waiting for sources that have timed out. Returns the requests that should join the loop now."""
        now = self._clock()
        due = [fetch for fetch in self._open.values() if fetch.asked and now >= fetch.wait_until]
        return [waiting for fetch in due if (waiting := self._pull(fetch)) is not None]

    def drop(self, key: str) -> None:
        """Gives up a prompt that is no longer wanted. A no-op if the prompt is not open."""
        self._split.discard(key)
        fetch = self._open.pop(key, None)
        if fetch is None:
            return
        fetch.asked.clear()
        if fetch.pending is None:
            self._refuse(fetch, _DROPPED)
        else:
            self._exchange.cancel_pull(fetch.replica, key, _DROPPED)
            self._give_back(fetch)

    def _ask(self, fetch: _Fetch, wanted: NextPages) -> None:
        """Asks the next source for pages. A long stretch is requested from several sources at the same time.

        All sources of a stretch share one time limit, in equal parts. If several sources are asked at the same time,
        each of them may take the sum of their parts to answer.
        """
        context, now = fetch.context, self._clock()
        count = min(_AT_ONCE, len(fetch.to_ask)) if self._exchange.reads_several(wanted.tokens) else 1
        fetch.share_s = max(0.0, fetch.since + _ASK_S - now) / len(fetch.to_ask)
        fetch.asked_at, fetch.wait_until = now, now + fetch.share_s * count
        fetch.lent.clear()
        for _ in range(count):
            contact, key = fetch.to_ask.popleft(), f"{context.request_id}?{next(self._serial)}"
            fetch.contacts.remove(contact)
            fetch.contacts.append(contact)
            fetch.asked.add(key)
            self._questions[key] = _PromptQuestion(fetch, contact)
            self._exchange.ask(fetch.replica, key, *contact, wanted.digests, fetch.share_s * count)

    def _on_lent(self, replica: int, lent: Lent) -> Waiting | None:
        question = self._questions.pop(lent.key, None)
        if question is None:
            return None  # the query belongs to another user of the exchange
        fetch, contact = question
        is_late = lent.key not in fetch.asked
        fetch.asked.discard(lent.key)
        if lent.error:
            self._give_up(fetch, [contact])
        if is_late:
            if lent.source is not None:
                self._exchange.refuse(replica, lent.source, _LATE)
                fetch.to_ask.append(contact)
            return None
        now = self._clock()
        if lent.source is None or lent.table is None:
            fetch.outcome = "unanswered" if lent.error else "stale"
            fetch.wait_until = min(fetch.wait_until, fetch.asked_at + fetch.share_s * len(fetch.asked))
        else:
            fetch.lent.append(_LentStretch(lent.source, lent.table))
            wait_s = min(max(now - fetch.asked_at, _LEAST_WAIT_S), _MOST_WAIT_S)
            fetch.wait_until = min(fetch.wait_until, now + wait_s)
        return None if fetch.asked else self._pull(fetch)

    def _pull(self, fetch: _Fetch) -> Waiting | None:
        """Pulls the pages that sources have leased so far. Outstanding answers are no longer awaited."""
        is_silent = bool(fetch.asked)
        fetch.asked.clear()
        if not fetch.lent:
            return self._go_on(fetch, "unanswered" if is_silent else fetch.outcome)
        # the first table that is passed to an import must be the longest one
        fetch.lent.sort(key=lambda lent: -lent.table.num_tokens)
        sources, tables = zip(*fetch.lent, strict=True)
        context, contacts = fetch.context, [source.contact for source in sources]
        try:
            fetch.pending = fetch.stretches.reserve(tables)
        except KVCacheError:  # an answer does not fit this cache, or the pages before the stretch have been evicted
            self._refuse(fetch, _USELESS)
            self._give_up(fetch, contacts)
            return self._go_on(fetch, "failed")
        if fetch.pending is not None and fetch.pending.needs_copy:
            fetch.pull_at, fetch.before_s = self._clock(), self._exchange.pull_seconds
            self._exchange.pull(context.request_id, sources, fetch.pending, _PULL_S)
            if fetch.waiting is None:
                self.on_pages(context.request_id, fetch.pending.tokens[0])
            return None
        # no page was free here, or this process has computed the pages of the stretch in the meantime
        self._refuse(fetch, _USELESS)
        return self._end(fetch, "no_room") if fetch.pending is None else self._take(fetch, None, ())

    def _take(self, fetch: _Fetch, proof: ImportProof | None, shares: Sequence[PullShare]) -> Waiting | None:
        """Publishes a complete stretch and releases it.

        The request, or the next stretch, finds its pages in the cache.
        """
        pending = fetch.pending
        if pending is None:
            return None
        now, (begin, end) = self._clock(), pending.tokens
        fetch.stretches.commit(pending, proof)
        fetch.pending = None
        failed = [share.contact for share in shares if share.error]
        if proof is not None:
            self.pages_pulled += (end - begin) // self._manager.page_size
            # A pull is not measured if it was the first contact with a source or if a source failed.
            if self._meet_sources(fetch) and not failed:
                self.estimate.pull.add(end - begin, self._took_s(fetch))
        if not fetch.pulled:
            self.counts[fetch.stretches.outcome] += 1
        if fetch.waiting is None:
            self._split.add(fetch.context.request_id)
        fetch.pulled, fetch.since = fetch.pulled + 1, now
        self._give_up(fetch, failed)
        left_out = {lent.source.contact for lent in fetch.lent if not fetch.stretches.has_more(lent.table, end)}
        left_out.update(question.contact for question in self._questions.values() if question.fetch is fetch)
        fetch.to_ask = deque(contact for contact in fetch.contacts if contact not in left_out)
        return self._go_on(fetch, "pulled")

    def _meet_sources(self, fetch: _Fetch) -> bool:
        """Records the sources of this pull as known. Returns whether all of them were known before."""
        are_new = [self._met.add(lent.source.incarnation) for lent in fetch.lent]
        return not any(are_new)

    def _took_s(self, fetch: _Fetch) -> float:
        """Returns how long a pull has taken so far, in seconds, including the time that the query took.

        If the prompt runs, the pull may have ended during a step of the loop. The time between the end of the pull and
        the end of the step does not count.
        """
        now = self._clock()
        if fetch.waiting is not None:
            return now - fetch.since
        return min(now, fetch.pull_at + self._exchange.pull_seconds - fetch.before_s) - fetch.since

    def _go_on(self, fetch: _Fetch, outcome: FetchOutcome) -> Waiting | None:
        """Asks the next sources for the missing pages, or ends the fetch if another pull is not worthwhile."""
        if not fetch.to_ask and fetch.stretches.skip():
            fetch.to_ask = deque(fetch.contacts)
        if not fetch.to_ask or fetch.pulled >= fetch.stretches.most or self._clock() >= fetch.since + _ASK_S:
            return self._end(fetch, outcome)
        self._give_back(fetch)
        wanted = fetch.stretches.next()
        if wanted is None:
            return self._end(fetch, outcome)
        self._ask(fetch, wanted)
        return None

    def _give_up(self, fetch: _Fetch, contacts: Sequence[Contact]) -> None:
        """Records that these sources have failed. They are not asked again."""
        fetch.contacts = [contact for contact in fetch.contacts if contact not in contacts]
        fetch.to_ask = deque(contact for contact in fetch.to_ask if contact not in contacts)

    def _refuse(self, fetch: _Fetch, reason: str) -> None:
        """Gives back lent pages that are not pulled."""
        for lent in fetch.lent:
            self._exchange.refuse(fetch.replica, lent.source, reason)

    def _end(self, fetch: _Fetch, outcome: FetchOutcome) -> Waiting | None:
        if not fetch.pulled:
            self.counts[outcome] += 1
        del self._open[fetch.context.request_id]
        self._give_back(fetch)
        return fetch.waiting

    def _give_back(self, fetch: _Fetch) -> None:
        """Cancels the current import, if any. Its pages become free when no READ of the pull is in flight any more."""
        pending, fetch.pending = fetch.pending, None
        if pending is not None:
            fetch.stretches.cancel(pending)
