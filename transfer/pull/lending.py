"""The source's side of a pull by content: readers ask for pages by digest, and this process leases its pages to them.

A query arrives on the handshake server's thread. That thread has no access to the pages, so the query waits for the
serving loop. The loop looks up the pages, holds them, and requests a lease for them. The server keeps the query open
for a while. If there is still no answer, the reader asks again. When every rank has granted the lease, the reader gets
the page ids, and pulls the pages as under any other lease. The ranks of a connector ask for the page ids once more, by
the lease's id (`PageLending.leased`), because its scheduler tells them only the lease.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

from kvcache.errors import BlockTableMismatchError, KVCacheError
from kvcache.replica.block_table import BlockTable, PageDigests
from transfer.pull.lease import LENT_WORDS
from transfer.pull.page_owner import PageOwner
from transfer.pull.replica import LeaseOver, Offered
from transfer.pull.seals import TableSeals
from transfer.pull.source import OfferedPages, Source
from transfer.wire.messages import ContentQuery, LeasedPages, LeaseQuery, LeaseReply, sealed_pages
from transfer.wire.prompt import HashedPages

LENT_S = 10.0  # in seconds: duration of a lease. It is short, because its reader is waiting and renews it
_KNOWN = 4096  # how many answers are kept for each replica
_MOST_ASKED = 64  # how many queries to a replica may wait for the loop; each may have half a MiB of digests
_MOST_OF_ONE = 32  # how many queries from one reader may wait for the loop
_LOAD_S = 0.25  # in seconds; pages that take longer to load from a lower tier are left out
_LOADING = LeaseReply(query_id=0, waits_for="its pages to come from a lower tier")
_UNSEEN = LeaseReply(query_id=0, waits_for="its serving loop to look for the pages")
_LENT = LeaseReply(query_id=0, waits_for="the reader's earlier lease of the same pages to end")
_GRANTING = LeaseReply(query_id=0, waits_for="all its ranks to grant the lease")


class _LentPages(NamedTuple):
    """Leased pages, the query that asked for them, and the answer to send once the lease is granted.

    Attributes:
        replica: index of the replica.
        ask_id: id of the query.
        asker: id of the reading process.
        pages: the ids of the token pages, and the negated ids of the state pages.
        size: how many pages count towards the lending limit: the token pages, and for a state the pages of its slab.
        answer: the sealed answer.
        source: the lease.
        offered: the answer to a reader that knows only the lease.
    """

    replica: int
    ask_id: int
    asker: str
    pages: frozenset[int]
    size: int
    answer: bytes
    source: Source
    offered: OfferedPages


class Lendable(Protocol):
    """The pages that a `PageLending` lends. A `PageOwner` is one."""

    @property
    def slab_pages(self) -> int:
        """How many token pages a request's state takes; 0 if it takes none."""
        ...

    @property
    def contents(self) -> Any:
        """Has the methods `bring` and `lease` of a `kvcache.replica.contents.PageContents`."""
        ...

    def end_lease(self, lease: Any) -> None:
        """Releases the pages of a lease that `contents.lease` returned. No reader may still read them."""


class LendingLimits(NamedTuple):
    """The most pages and leases that readers who ask by digest may hold at the same time.

    Attributes:
        pages: the most pages of one replica, counted over all leases.
        leases: for each replica, the most leases.
    """

    pages: int
    leases: Sequence[int]


def lending_limits(owner: PageOwner, share: float) -> LendingLimits:
    """Returns the limits that leave the fraction 1 - `share` of every kind of pages to the owner's own requests."""
    # Each lease takes one page of every further group, so the smallest of these groups limits the number of leases.
    leases = [
        min((int(share * group.num_pages) for group in groups), default=LENT_WORDS) for groups in owner.further_groups
    ]
    return LendingLimits(int(share * (owner.total_num_pages // owner.num_replicas)), leases)


class PageLending:
    """Leases pages of a manager's replicas to readers that ask for them by digest.

    Any thread may call `answer` and `leased`. Only the serving loop may make the other calls. For each query, `ring` is
    called on the handshake server's thread; it must make the serving loop call `poll`. `grant` requests a lease, given
    the manager's hold on the pages and their block table; it returns None if every lease word is taken. `key` is the
    key of the digests that authenticate the answers, and `seals` seals lent tables. `kind` says what the pages hold,
    and must be equal at a reader; `tables` is the number of block tables of a request.

    Requests of this process take precedence over readers. Therefore at most the `limits` are leased to readers at the
    same time. Beyond them, a reader gets fewer pages than it asks for. Leases by digest have lease words of their own.
    A reader gets each page under only one lease at a time.

    Attributes:
        lent_by_replica: for each replica, the number of pages leased so far, including state pages. A page counts each
            time it is leased.
    """

    def __init__(
        self,
        manager: Lendable,
        grant: Callable[[Any, BlockTable], Source | None],
        ring: Callable[[], None],
        *,
        limits: LendingLimits,
        kind: str,
        tables: int,
        key: bytes,
        seals: TableSeals,
    ) -> None:
        self.lent_by_replica = [0] * len(limits.leases)
        self._manager = manager
        self._grant = grant
        self._ring = ring
        self._most, self._most_leases = limits
        self._key, self._seals = key, seals
        self._kind, self._tables = kind, tables
        self._lent: dict[int, _LentPages] = {}  # by lease id
        self._lent_to: dict[tuple[int, str], set[int]] = {}  # by replica and reader: the pages leased to the reader
        self._granting: set[int] = set()  # leases that are not granted yet
        self._has_answers = False  # whether a query has got its final answer since the last `take_answers`
        self._lock = threading.Lock()  # protects the next three fields
        self._asked: deque[tuple[int, ContentQuery]] = deque()  # each query with its replica, as below
        # Queries whose pages must be loaded from a lower tier first, or are still leased to the same reader. Each query
        # has a time limit.
        self._loading: list[tuple[int, ContentQuery, float]] = []
        self._answers: OrderedDict[int, LeaseReply] = OrderedDict()  # the latest answers, by query

    @property
    def is_asked(self) -> bool:
        """Whether a query waits for the serving loop."""
        return bool(self._asked or self._granting or self._loading)

    @property
    def num_leases(self) -> int:
        """The number of leases that are granted or requested."""
        return len(self._lent)

    @property
    def pages_lent(self) -> int:
        """The number of pages leased so far to readers that asked for pages by digest."""
        return sum(self.lent_by_replica)

    def take_answers(self) -> bool:
        """Whether a query got its final answer since the last call."""
        has_answers, self._has_answers = self._has_answers, False
        return has_answers

    def stop(self) -> None:
        """Lends no more pages."""
        self._most = 0

    def answer(self, replica: int, query: ContentQuery) -> LeaseReply:
        """Returns the current answer to a reader's query to a replica. The query may be new or repeated."""
        with self._lock:
            known = self._answers.get(query.ask_id)
            if known is None and (most := self._too_many(replica, query)):
                known = LeaseReply(query_id=0, error=f"{most} questions already wait for its serving loop")
            elif known is None and query.digests:
                known = self._answers[query.ask_id] = _UNSEEN
                self._asked.append((replica, query))
                self._ring()
                while len(self._answers) > _KNOWN * len(self.lent_by_replica):
                    self._answers.popitem(last=False)
        if known is None:
            known = LeaseReply(query_id=0, error=f"its question {query.ask_id:#x} is unknown (it may have expired)")
        return LeaseReply(query_id=query.query_id, pages=known.pages, error=known.error, waits_for=known.waits_for)

    def leased(self, replica: int, query: LeaseQuery) -> LeaseReply:
        """Returns the pages of a lease of a replica, for a reader that knows only the lease."""
        where, lent = f"lease {query.lease_id:#018x}", self._lent.get(query.lease_id)
        if lent is None or lent.replica != replica:
            error = f"{where} has ended, or engine {query.engine_id!r} never lent pages under it"
            return LeaseReply(query_id=query.query_id, error=error, is_over=True)
        if query.lease_id in self._granting:
            return LeaseReply(query_id=query.query_id, waits_for=_GRANTING.waits_for)
        source = lent.source
        return lent.offered.told(query, source.engine_id, source.incarnation, source.lease, self._key)

    def _too_many(self, replica: int, query: ContentQuery) -> int:
        """Returns the limit on a replica's waiting queries that this query would exceed, or 0.

        One limit applies to the queries from all readers together, the other to the queries from each reader.
        """
        asked = (*self._asked, *(loading[:2] for loading in self._loading))
        waiting = [query for at, query in asked if at == replica]
        if len(waiting) >= _MOST_ASKED:
            return _MOST_ASKED
        return _MOST_OF_ONE if sum(_asker(one) == _asker(query) for one in waiting) >= _MOST_OF_ONE else 0

    def poll(self) -> None:
        """Looks up the pages that readers have asked for since the last call, and requests leases for them."""
        now, looked_for = time.monotonic(), self._loading
        self._loading = []
        while self._asked:
            with self._lock:
                looked_for.append((*self._asked.popleft(), now + _LOAD_S))
        for replica, query, until in looked_for:
            try:
                self._lend(replica, query, until, now)
            except KVCacheError as error:
                self._say(query.ask_id, LeaseReply(query_id=0, error=str(error)))

    def settle(self, event: LeaseOver | Offered) -> bool:
        """Handles an event of a lease. Returns True for a lease by digest; the loop ignores such events."""
        lent = self._lent.get(event.lease_id)
        if lent is None:
            return False
        if isinstance(event, Offered) and not event.error:
            self._granting.discard(event.lease_id)
            self._say(lent.ask_id, LeaseReply(query_id=0, pages=lent.answer))
            return True
        # In this order, because `leased` runs on another thread: a lease that was refused must never look granted.
        del self._lent[event.lease_id]
        self._granting.discard(event.lease_id)
        left = self._lent_to[lent.replica, lent.asker]
        left -= lent.pages
        if not left:
            del self._lent_to[lent.replica, lent.asker]
        reason = event.error if isinstance(event, Offered) else f"its lease is over: {event.reason}"
        self._say(lent.ask_id, LeaseReply(query_id=0, error=reason))
        return True

    def _lend(self, replica: int, query: ContentQuery, until: float, now: float) -> None:
        if query.kind != self._kind:
            raise BlockTableMismatchError(
                f"request {query.reader!r}: the reader's cache is {query.kind!a}, but this engine's is {self._kind!r}"
            )
        held = [lent.size for lent in self._lent.values() if lent.replica == replica]
        most = self._most - sum(held) if len(held) < self._most_leases[replica] else 0
        named = tuple(query.named.items())
        wanted = PageDigests(query.page_size, query.hash_algorithm, query.digests, query.first_page, named)
        reader = query.reader, replica
        if now < until and self._manager.contents.bring(*reader, wanted, most):
            self._loading.append((replica, query, until))
            self._say(query.ask_id, _LOADING)
            return
        found = self._manager.contents.lease(*reader, wanted, most)
        asker, pages, size = _asker(query), frozenset[int](), 0
        if found is not None:
            groups: tuple[tuple[int, ...], ...] = found[1].groups
            of_tokens, beside = groups[: self._tables], groups[self._tables :]
            pages = frozenset((*chain(*of_tokens), *(-page for page in chain(*beside))))
            size = sum(map(len, of_tokens)) + self._manager.slab_pages
            if not pages.isdisjoint(self._lent_to.get((replica, asker), ())):
                self._manager.end_lease(found[0])
                if now < until:
                    self._loading.append((replica, query, until))
                    self._say(query.ask_id, _LENT)
                    return
                found = None
        source = None if found is None else self._grant(*found)
        if found is None or source is None:
            self._say(query.ask_id, LeaseReply(query_id=0, pages=self._sealed(query, None, None)))
            return
        table, lease_id = found[1], source.lease.lease_id
        width = len(table.digests) // (table.num_tokens // query.page_size - query.first_page)
        content = HashedPages(query.page_size, query.hash_algorithm, table.digests, width, query.first_page, named)
        offered, answer = OfferedPages(content, table.num_tokens, table.groups), self._sealed(query, source, table)
        self._granting.add(lease_id)
        self._lent[lease_id] = _LentPages(replica, query.ask_id, asker, pages, size, answer, source, offered)
        self._lent_to.setdefault((replica, asker), set()).update(pages)
        self.lent_by_replica[replica] += len(pages)
        self._say(query.ask_id, _GRANTING)

    def _sealed(self, query: ContentQuery, source: Source | None, table: BlockTable | None) -> bytes:
        """Returns the sealed answer that leases the pages of `table`. Without a table, the answer leases no pages."""
        pages = 0 if table is None else table.num_tokens // query.page_size - query.first_page
        digests = b"" if table is None else table.digests
        leased = LeasedPages(
            engine_id=query.engine_id,
            incarnation="-" if source is None else source.incarnation,
            lease_id=0 if source is None else source.lease.lease_id,
            word_idx=0 if source is None else source.lease.word_idx,
            duration_s=LENT_S,
            num_tokens=pages * query.page_size,
            block_ids=((),) if table is None else table.groups,
            prompt_digest=digests[len(digests) - len(digests) // max(1, pages) :],
            table_seal=b"" if source is None or table is None else self._seals.seal(source.lease.lease_id, table),
        )
        return sealed_pages(leased, self._key)

    def _say(self, ask_id: int, reply: LeaseReply) -> None:
        with self._lock:
            if ask_id in self._answers:
                self._answers[ask_id] = reply
        if not reply.waits_for:
            self._has_answers = True


def _asker(query: ContentQuery) -> str:
    """Returns the id of the reading process.

    Readers of an earlier version send only a name, which includes the request.
    """
    return query.asker or query.reader
