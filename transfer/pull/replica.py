"""Drives the local ranks of one engine together. All ranks grant a lease, or none does. The same applies to a pull.

Single-threaded: `transfer.pull.thread` runs it. `transfer.pull.directory` finds and watches the sources.
"""

from __future__ import annotations

import heapq
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from numpy.typing import ArrayLike

from kvcache.replica.block_table import BlockTable
from transfer.errors import PullFailedError, TransferError
from transfer.failures import Failure, FailureKind
from transfer.memory import MemoryType
from transfer.nixl.settings import effective_settings, reaches_other_hosts
from transfer.plan.page_lists import PageLists, with_blocks
from transfer.pull.directory import Directory, Peer, Times
from transfer.pull.lease import Lease, LeaseBook, LeaseRef
from transfer.pull.pull_state import OwnKey, PullEvent, Reading, ReplicaPull
from transfer.pull.rank import RankTransfer
from transfer.pull.shared_pull import SharedPull, SharedPulls, SourcePages
from transfer.pull.source import NO_WEIGHTS, Contact, Source, check_tokens, check_weights, source_in
from transfer.stats import TransferStats
from transfer.wire.handshake import HandshakeClient
from transfer.wire.messages import Answer, LeaseQuery, LeaseRefusal, LeaseReply, ReaderNote, Wanted


class LeaseOver(NamedTuple):
    """A lease has ended on every local rank: every word is cleared, so the pages may be freed.

    Attributes:
        request_id: as in the offer.
        lease_id: the lease.
        reason: why the lease ended: "read", or another reason.
    """

    request_id: str
    lease_id: int
    reason: str


class Offered(NamedTuple):
    """The answer to an offer.

    If `error` is empty, the lease was granted on every local rank, and its id may leave the process. Otherwise `error`
    says why it was not granted.
    """

    request_id: str
    lease_id: int
    error: str


class LeaseOffer(NamedTuple):
    """A lease to grant.

    Attributes:
        request_id: the request whose pages are leased.
        lease: the lease to grant, with a new id, a free word, and the duration that it has without a renewal.
        engines: how many reading engines must finish before the lease ends.
        pages: the leased pages of each group, so that readers can verify them. None if no reader does.
        running: True if the request is still being computed, chunk by chunk. The duration of the lease then counts from
            `start_clock` on.
    """

    request_id: str
    lease: LeaseRef
    engines: int = 1
    pages: Sequence[ArrayLike] | None = None
    running: bool = False


_MAX_PAUSE_S = 0.25  # in seconds: the longest pause before a source is asked again; see `ReplicaPull`
_SMALL_BYTES = 1 << 20
"""In bytes: a pull up to this size counts as small. On a busy machine, waking a thread takes longer."""
Event = PullEvent | LeaseOver | Offered


class ReplicaTransfer:
    """Leases and pulls of one replica, over all its ranks in this process.

    Args:
        ranks: local ranks of one engine, in order.
        client: asks sources for their metadata.
        timed: whether the events of successful pulls carry the times of their last fence.
        clock: a monotonic clock, in seconds.
        times: fields of `Times`, the time limits.

    Attributes:
        events: events in order. The owner removes them.
        leases: the leases that all ranks have granted.
        stats: counters, and records of the last pulls.
        directory: the sources that this replica knows.
        weights: identifies the weights that the engine has now. A lease that was computed with others is not read.
            Replaced as a whole by the owner, on any thread.
    """

    def __init__(
        self,
        ranks: Sequence[RankTransfer],
        client: HandshakeClient,
        *,
        timed: bool = False,
        clock: Callable[[], float] = time.monotonic,
        **times: float,
    ) -> None:
        self.ranks = list(ranks)
        self.events: deque[Event] = deque()
        self.stats = TransferStats()
        self._client = client
        self._clock = clock
        self._pulls: dict[str, ReplicaPull] = {}
        # The keys of pulls whose source has not answered yet, and a heap of times and keys: when to ask the source
        # again, or when the pull times out.
        self._unstarted: set[str] = set()
        self._due: list[tuple[float, str]] = []
        self.leases = LeaseBook([rank.words for rank in self.ranks], clock)
        self._times = Times(**times)
        self.directory = Directory(self.ranks, client, self._times, clock, self._start_all, self._fail_all)
        self.weights: Mapping[str, str] = NO_WEIGHTS
        self._page_bytes = _page_bytes(self.ranks)
        self._reads_expected = 0  # how many times a reader may have begun to read under a lease
        self._needs_polls = reaches_other_hosts(effective_settings(self.ranks[0].memory_type))
        self._is_host = all(rank.memory_type is MemoryType.DRAM for rank in self.ranks)
        self._shared = SharedPulls(self)
        self.timed = timed

    @property
    def timed(self) -> bool:
        """Whether the events of successful pulls carry the times at which their last fence was posted and passed."""
        return any(rank.puller.timed for rank in self.ranks)

    @timed.setter
    def timed(self, value: bool) -> None:
        for rank in self.ranks:
            rank.puller.timed = value

    def offer(self, offer: LeaseOffer) -> None:
        """Grants a lease on every rank, or on none. An `Offered` event reports the outcome.

        The caller owns the pages, and holds them until `LeaseOver` or a failed `Offered`. For the vLLM connector, the
        engine's block manager does that. For pages of a `PagedKVCacheManager`, use `PageExchange.offer`; the manager
        itself then holds them.
        """
        request_id, (lease_id, word_idx, duration_s), engines, pages, running = offer
        failure = ""
        try:
            self._refuse_moved(request_id)
            if pages is not None:
                for rank in self.ranks:
                    rank.record_checksums(pages)
            self.leases.grant(lease_id, request_id, word_idx, duration_s, engines=engines, running=running)
            self._reads_expected += not running
        except TransferError as error:
            failure = str(error)
        self.events.append(Offered(request_id, lease_id, failure))

    @property
    def moved(self) -> str:
        """Says which tensor of this replica's pages is no longer at its address. Empty if none has moved.

        Safe from any thread.
        """
        for rank in self.ranks:
            if moved := rank.unmoved.moved:
                return moved
        return ""

    def _refuse_moved(self, request_id: str) -> None:
        if moved := self.moved:
            raise PullFailedError(f"request {request_id!r}: {moved}", FailureKind.OTHER)

    def start_clock(self, lease_id: int) -> None:
        """Starts the clock of a lease whose request is computed.

        Does nothing if the clock already runs, or if the lease has ended.
        """
        self._reads_expected += 1
        self.leases.start_clock(lease_id)

    def revoke(self, lease_id: int, reason: str) -> None:
        """Ends a lease on every rank. If it was open, a `LeaseOver` event follows."""
        if (lease := self.leases.end(lease_id, reason)) is not None:
            self._on_over(lease)

    def hear_refusal(self, refusal: LeaseRefusal) -> None:
        """Records that a rank of a reading engine will not read under a lease, as if it had told every local rank."""
        note = ReaderNote(refusal.lease_id, refusal.reader, refusal.rank, refusal.ranks, "refused", refusal.reason)
        for at in range(len(self.ranks)):
            if (lease := self.leases.hear(note, at)) is not None:
                self._on_over(lease)

    def _on_over(self, lease: Lease) -> None:
        self.stats.record_lease(lease.ended)
        self.events.append(LeaseOver(lease.request_id, lease.lease_id, lease.ended))

    def pull(
        self,
        key: str,
        source: Source | Wanted,
        timeout_s: float,
        groups: PageLists | None = None,
        *,
        tables: Sequence[BlockTable] = (),
        refusal: str = "",
    ) -> None:
        """Begins a pull of the pages in `groups` by all ranks. If `groups` is None, `add_pages` names the pages later.

        `PullEvent`s report the outcome, and also invalid input. If a pull of this name is open, an event says so, and
        the open pull continues. If `source` is a `Wanted`, the source is asked which pages its lease holds. If these
        pages hold tokens other than the wanted ones, or too few tokens, the pull fails and gives the lease back. If
        block `tables` name the pages, the pull fails unless the source has sealed each table under this lease.
        """
        if self._is_taken(key):
            return
        if groups is not None and not refusal and self._pull_at_once(key, source, timeout_s, groups, tables):
            return
        pull = self._pulls[key] = ReplicaPull(source, self._clock() + timeout_s, refusal=refusal)
        if groups is not None:
            pull.waiting.append(Reading(groups, True, tables))
        self._start(key, pull)
        if not (pull.started or pull.error):
            self._unstarted.add(key)
            heapq.heappush(self._due, (pull.deadline, key))
            self.directory.connect(source.contact)
            self._ask(key)
        self._collect_pulls()  # a small pull may have ended by now

    def pull_shared(
        self,
        key: str,
        holdings: Sequence[SourcePages],
        page_sizes: tuple[int, int],
        timeout_s: float,
        *,
        can_shorten: bool = False,
    ) -> None:
        """Begins a pull from several sources: each page is read from one of the sources that hold it.

        Args:
            key: names the pull.
            holdings: for each source, the pages that it has leased. The first source has all pages.
            page_sizes: tokens of our pages, and of the sources' pages.
            timeout_s: seconds until the pull fails.
            can_shorten: whether the pull may succeed with fewer pages. If a page is no longer available from any
                source, such a pull ends before that page.
        """
        if self._is_taken(key):
            return
        groups = self.ranks[0].layout.groups
        shared = SharedPull(key, holdings, groups, self._page_bytes, page_sizes, can_shorten=can_shorten)
        self._shared.begin(shared, holdings, timeout_s)
        self._step_shared()

    def _step_shared(self) -> None:
        while happened := self._shared.step(self._clock()):
            self.events.extend(happened)

    def _is_taken(self, key: str) -> bool:
        """Returns whether a pull of this name is open. If so, adds an event that refuses the new pull."""
        is_taken = key in self._pulls or key in self._shared
        if is_taken:
            self.events.append(
                PullEvent(key, f"request {key!r}: an earlier pull of the same name has not ended yet", safe=True)
            )
        return is_taken

    def look_up(self, key: str) -> ReplicaPull | None:
        """Returns an open pull, or None."""
        return self._pulls.get(key)

    def _pull_at_once(
        self, key: str, source: Source | Wanted, timeout_s: float, groups: PageLists, tables: Sequence[BlockTable]
    ) -> bool:
        """Runs a small pull if one local rank reads from one rank of the source. Returns whether the pull was begun.

        Such a pull usually ends within this call. Setting up the state of a normal pull would take longer than the copy
        of a page.
        """
        if len(self.ranks) > 1 or not isinstance(source, Source):
            return False
        rank, peer = self.ranks[0], self.directory.use(source.contact)
        remote = rank.remote(source.engine_id)
        if peer is None or remote is None or is_of_other_start(source, peer):
            return False
        if (part := remote.small_part(groups)) is None:
            return False
        try:
            self._refuse_moved(key)
            remote.check_tables(key, source.lease, tables)
            begun = rank.puller.pull_at_once(key, remote, source.lease, timeout_s, part)
        except TransferError:
            return False  # the normal path reports the error
        if isinstance(begun, PullEvent):
            self.events.append(begun)
        else:
            self._pulls[key] = ReplicaPull(source, begun.deadline, reads=[begun], started=True)
        self._collect_pulls()
        return True

    def is_small(self, source: Source | Wanted, groups: PageLists) -> bool:
        """Whether reading these pages takes less time than waking a thread.

        This is true for a few pages that are read from a known source into host memory.
        """
        sizes, num_bytes = self._page_bytes, 0
        if not self._is_host or not isinstance(source, Source) or len(groups) != len(sizes):
            return False
        for group, size in zip(groups, sizes, strict=True):
            local: Any = group[0]
            num_bytes += len(local) * size
        return num_bytes <= _SMALL_BYTES and self.directory.use(source.contact) is not None

    def _ask(self, key: str) -> None:
        """Asks the source of a pull which pages its lease holds. Does nothing if the pages are known."""
        pull = self._pulls[key]
        wanted, pull.ask_at = pull.source, math.inf
        if isinstance(wanted, Source):
            return

        def done(answer: Answer | TransferError) -> None:
            if self._pulls.get(key) is pull and not pull.error:
                self._on_answer(key, wanted, answer)

        query = LeaseQuery(
            query_id=0, engine_id=wanted.engine_id, lease_id=wanted.lease_id, num_tokens=wanted.num_tokens
        )
        self._client.ask(wanted.address, query, done, self._times.handshake_timeout_s)

    def _on_answer(self, key: str, wanted: Wanted, answer: Answer | TransferError) -> None:
        pull, where = self._pulls[key], f"request {key!r}"
        if not isinstance(answer, LeaseReply):
            text = f"{where}: asking engine {wanted.engine_id!r} for the pages of its lease: {answer}"
            self._fail(key, Failure(FailureKind.HANDSHAKE, text))
        elif answer.error:
            text = f"{where}: engine {wanted.engine_id!r} at {wanted.address}: {answer.error}{self._waited(pull)}"
            self._give_back(key, Failure(FailureKind.LEASE_OVER if answer.is_over else FailureKind.REFUSED, text))
        elif not answer.pages:
            now = self._clock()
            pull.ask_at, pull.pause_s = now + pull.pause_s, min(2 * pull.pause_s, _MAX_PAUSE_S)
            heapq.heappush(self._due, (pull.ask_at, key))
            pull.waits_for = answer.waits_for, min(pull.waits_for[1], now)
        else:
            self._on_pages(key, wanted, answer.pages)

    def _on_pages(self, key: str, wanted: Wanted, data: bytes) -> None:
        """Handles the source's answer. Starts to read if the leased pages hold the KV of the wanted tokens."""
        pull = self._pulls[key]
        try:
            source, pages = source_in(wanted, data, self.ranks[0].identity.key)
        except TransferError as error:
            self._fail(key, error.failure)
            return
        try:
            if not pull.refusal:
                check_tokens(f"request {key!r}", wanted, pages, self.weights)
        except TransferError as error:
            self._give_back(key, error.failure)
            return
        pull.source, pull.pages, pull.weights = source, pages, self.weights
        self._start(key, pull)

    def _waited(self, pull: ReplicaPull) -> str:
        """Describes what the source has named as missing, and for how long. Empty if the source has named nothing."""
        missing, since = pull.waits_for
        return f" (asked for {self._clock() - since:.1f} s, last answer: {missing[:200]})" if missing else ""

    def add_pages(self, key: str, groups: PageLists, *, last: bool, tables: Sequence[BlockTable] = ()) -> None:
        """Adds pages that a pull must read. Does nothing if the pull has ended.

        Args:
            key: the pull.
            groups: for each group of the layout, the local and remote pages and their tokens. If the source names its
                blocks itself, a `BlocksOfGroup` with only the local pages.
            last: whether these are the last pages of the pull.
            tables: the source's block tables that name these pages, as for `pull`.
        """
        if (pull := self._pulls.get(key)) is None or pull.error:
            return
        pull.waiting.append(Reading(groups, last, tables))
        self._start(key, pull)
        self._collect_pulls()

    def cancel(self, key: str, reason: str) -> None:
        """Gives up an open pull. If the source has not answered yet, it learns of this as soon as it answers."""
        if key in self._shared:
            self._shared.cancel(key, reason)
            self._step_shared()
            return
        if (pull := self._pulls.get(key)) is None:
            return
        if not pull.started and not pull.error:
            self.refuse(pull.source, reason, pull.deadline - self._clock())
        self._fail(key, Failure(FailureKind.CANCELLED, reason))

    def _give_back(self, key: str, failure: Failure) -> None:
        """Fails a pull and gives back its source's lease. A pull that was opened to refuse a lease only fails."""
        pull = self._pulls[key]
        if not pull.refusal:
            self.refuse(pull.source, failure.text, pull.deadline - self._clock())
        self._fail(key, failure)

    def refuse(self, source: Source | Wanted, reason: str, timeout_s: float) -> None:
        """Tells a source that no page will be read under its lease, so that it can free the pages. Causes no event.

        A reader may give back any lease that it can name. The leased tokens are not compared with the reader's tokens,
        because the tokens of a rejected request are not known.
        """
        if isinstance(source, Wanted):
            source = source._replace(num_tokens=0, digest=b"")
        self.pull(OwnKey("refusal"), source, timeout_s, refusal=reason)

    def poll(self) -> bool:
        """Advances leases, pulls and handshakes. Returns whether READs are under way or a source is awaited.

        Raises:
            AgentError: NIXL fails.
        """
        self._client.poll()
        for at, rank in enumerate(self.ranks):
            for note in rank.poll():
                if note is None:
                    self.leases.counts["malformed"] += 1
                elif (lease := self.leases.hear(note, at)) is not None:
                    self._on_over(lease)
        for lease in self.leases.expire():
            self._on_over(lease)
        if len(self.leases) and (moved := self.moved):
            for lease_id in self.leases.ids():
                self.revoke(lease_id, moved)
        self._collect_pulls()
        self._expire()
        if len(self._shared):
            self._step_shared()
        self.directory.watch(lambda: {pull.source.contact for pull in self._pulls.values()})
        self.stats.failed_handshakes = self.directory.failed_handshakes
        # Open pulls alone do not count: one that waits for the next chunk of a prompt needs no frequent polls.
        reading = any(rank.puller.is_reading for rank in self.ranks)
        return reading or bool(self._unstarted)

    @property
    def is_copying(self) -> bool:
        """Whether a rank has more bytes to copy, so that the next poll should follow at once."""
        return any(rank.puller.is_copying for rank in self.ranks)

    @property
    def reads_awaited(self) -> int:
        """How many READs have begun or may have begun, here or at a reader. 0 if READs need no polls."""
        return self._reads_expected + sum(rank.puller.num_posted for rank in self.ranks) if self._needs_polls else 0

    @property
    def is_idle(self) -> bool:
        """Whether polls are not urgent, because there is no lease or pull, and no answer from a source is awaited."""
        return not (len(self.leases) or self._pulls or self._client.is_waiting)

    @property
    def pulls(self) -> dict[str, ReplicaPull]:
        """The open pulls by key. Safe from any thread.

        Pulls that were opened only to refuse a lease are left out.
        """
        return {key: pull for key, pull in list(self._pulls.items()) if not pull.refusal}

    @property
    def num_pulls(self) -> tuple[int, int]:
        """The number of active pulls, and the number of failed pulls whose READs may still write.

        Safe from any thread. The length of `leases` may be read from any thread, too.
        """
        pulls = [pull for key, pull in self.pulls.items() if not isinstance(key, OwnKey)]
        failed = sum(bool(pull.error) for pull in pulls)
        return len(pulls) - failed + len(self._shared), failed

    def _collect_pulls(self) -> None:
        for rank in self.ranks:
            while rank.puller.events:
                self._on_rank(rank.puller.events.popleft())
            while rank.puller.ended:
                self.stats.record(rank.puller.ended.popleft())

    def _of(self, contact: Contact) -> list[str]:
        return [key for key, pull in self._pulls.items() if pull.source.contact == contact]

    def _start_all(self, peer: Peer) -> None:
        """Starts the pulls from a source that has confirmed its identity.

        Fails the pulls whose lease was granted by another incarnation of the source.
        """
        for key in self._of(peer.contact):
            if is_of_other_start(self._pulls[key].source, peer):
                text = f"engine {peer.contact[1]!r} has restarted since it granted the lease"
                self._fail(key, Failure(FailureKind.LEASE_OVER, text))
            else:
                self._start(key, self._pulls[key])

    def _fail_all(self, peer: Peer, failure: Failure) -> None:
        for key in self._of(peer.contact):
            pull = self._pulls[key]
            another = isinstance(pull.source, Wanted) or is_of_other_start(pull.source, peer)
            if peer.incarnation and not pull.started and another:
                # Another incarnation has granted the lease, most likely the incarnation that runs now. This call asks
                # for its metadata.
                self.directory.connect(peer.contact)
            else:
                self._fail(key, failure)

    def _start(self, key: str, pull: ReplicaPull) -> None:
        """Opens a pull on every rank and reads its waiting pages, if the source is loaded and has named its pages."""
        if pull.error or isinstance(pull.source, Wanted) or (peer := self.directory.use(pull.source.contact)) is None:
            return
        if is_of_other_start(pull.source, peer):
            # Either the source was restarted after it was loaded here, or an earlier incarnation has granted the lease.
            # A ping shows which is true.
            self.directory.check(peer.contact)
            return
        try:
            if not pull.started:
                pull.started = True
                self._unstarted.discard(key)
                self._open(key, pull, pull.source)
            if pull.refusal:
                self._fail(key, Failure(FailureKind.CANCELLED, pull.refusal))
            while pull.waiting:
                self._read_next(key, pull, pull.source)
        except TransferError as error:
            self._fail(key, error.failure)

    def _open(self, key: str, pull: ReplicaPull, source: Source) -> None:
        left = max(pull.deadline - self._clock(), 1e-3)
        for rank in self.ranks:
            if (remote := rank.remote(source.engine_id)) is None:
                raise PullFailedError(f"request {key!r}: engine {source.engine_id!r} was lost", FailureKind.SOURCE_GONE)
            pull.reads.append(rank.puller.open(key, remote, source.lease, left))

    def _read_next(self, key: str, pull: ReplicaPull, source: Source) -> None:
        """Reads the first waiting pages on every rank. Fills in the source's blocks if the source named them."""
        self._refuse_moved(key)
        groups, last, tables = pull.waiting.popleft()
        if (named := pull.pages) is not None:
            check_weights(f"request {key!r}", source.engine_id, pull.weights, self.weights)
            groups = with_blocks(f"request {key!r}", groups, named.block_ids, named.num_tokens)
        pull.reads[0].engine.check_tables(key, source.lease, tables)
        for rank, one in zip(self.ranks, pull.reads, strict=True):
            rank.puller.add(one, one.engine.parts(key, groups), last=last)
        if named is not None:
            # for each group, the latest first token over all ranks
            begins = [one.engine.begins(groups) for one in pull.reads]
            pull.begins = tuple(map(max, zip(*begins, strict=True)))

    def _on_rank(self, event: PullEvent) -> None:
        if (pull := self._pulls.get(event.key)) is None:
            return
        if event.error:
            self._fail(event.key, pull.error or next(one.error for one in pull.reads if one.error))
            # a ping tells whether the source is alive and still the same incarnation
            self.directory.check(pull.source.contact)
        elif not pull.error and all(one.fenced for one in pull.reads):
            del self._pulls[event.key]
            if pull.begins or len(self.ranks) > 1:
                event = PullEvent(event.key, "", safe=True, times=pull.times, begins=pull.begins)
            self._report(event)

    def _report(self, event: PullEvent) -> None:
        if not self._shared.hear(event):
            self.events.append(event)

    def _fail(self, key: str, failure: Failure) -> None:
        """Fails a pull on all ranks, and reports the failure at once.

        If a READ of the pull is still in flight, reports the failure again once none is in flight.
        """
        pull = self._pulls[key]
        if not pull.error:
            pull.error = failure
            pull.waiting.clear()
            if not pull.refusal:
                self.stats.record_failure(failure.kind)
            if failure.kind is FailureKind.HANDSHAKE and not pull.started:
                self._tell_unloaded(pull, failure)
            # If the pull could not be opened on one of the ranks, `pull.reads` has fewer entries than there are ranks.
            for rank, one in zip(self.ranks, pull.reads, strict=False):
                rank.puller.withdraw(one, failure)
        safe = all(one.is_over for one in pull.reads)  # no rank has anything in flight
        if safe:
            del self._pulls[key]
            self._unstarted.discard(key)
        if pull.refusal or (pull.told and not safe):
            return
        pull.told = True
        self._report(PullEvent(key, pull.error.text, safe=safe, passed=pull.passed if safe else 0))

    def _tell_unloaded(self, pull: ReplicaPull, failure: Failure) -> None:
        """Tells a source that could not be loaded that its lease will not be read.

        No note can reach such a source, because notes go through NIXL. If this message is lost, too, the lease expires.
        """
        source = pull.source
        refusal = LeaseRefusal(
            query_id=0,
            engine_id=source.engine_id,
            lease_id=source.lease_id if isinstance(source, Wanted) else source.lease.lease_id,
            reader=self.ranks[0].identity.engine_id,
            # a request's address, which the text quotes, may have lone surrogates
            reason=(pull.refusal or failure.text)[:500].encode(errors="replace").decode(),
        )
        for identity in (rank.identity for rank in self.ranks):
            one = msgspec.structs.replace(refusal, rank=identity.rank, ranks=identity.ranks)
            self._client.ask(source.address, one, lambda _: None, self._times.handshake_timeout_s)

    def _expire(self) -> None:
        now = self._clock()
        while self._due and self._due[0][0] <= now:
            key = heapq.heappop(self._due)[1]
            pull = self._pulls.get(key)
            if pull is None or pull.started:
                continue
            if now >= pull.deadline:
                missing = "answer the handshake" if isinstance(pull.source, Source) else "confirm its lease"
                text = f"timed out: engine {pull.source.engine_id!r} did not {missing}{self._waited(pull)}"
                self._fail(key, Failure(FailureKind.TIMEOUT, text))
            elif now >= pull.ask_at:
                self._ask(key)

    def close(self) -> None:
        """Ends all leases and pulls. Their last events can still be taken afterwards. Safe to call twice."""
        shutdown = Failure(FailureKind.SHUTDOWN, "this engine was shut down")
        for key in list(self._pulls):
            self._fail(key, shutdown)
        if self.ranks[0].is_open:
            for lease_id in self.leases.ids():
                self.revoke(lease_id, shutdown.text)
        for rank in self.ranks:
            rank.close()
        for key, pull in list(self._pulls.items()):
            del self._pulls[key]  # the agents are destroyed, so nothing is in flight
            self._report(PullEvent(key, (pull.error or shutdown).text, safe=True))
        self._step_shared()
        self._client.close()


def is_of_other_start(source: Source | Wanted, peer: Peer) -> bool:
    """Whether the lease was granted by an incarnation of the engine other than the loaded one."""
    return isinstance(source, Source) and source.incarnation not in (peer.incarnation, "")


def _page_bytes(ranks: Sequence[RankTransfer]) -> list[int]:
    """Returns the bytes of a page of each group, over all ranks."""
    every = zip(*(rank.layout.groups for rank in ranks), strict=True)
    return [sum(box.itemsize * math.prod(box.extent) for one in of for box in one.boxes) for of in every]
