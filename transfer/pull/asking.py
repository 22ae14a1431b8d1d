"""The reader's side of a pull by content: asks sources for pages by digest, and receives the leases that they grant."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import zmq
from msgspec.structs import replace

from kvcache.replica.block_table import BlockTable, PageDigests
from transfer.errors import TransferError
from transfer.pull.lease import LeaseRef
from transfer.pull.source import Contact, Source
from transfer.wire.handshake import HandshakeClient
from transfer.wire.messages import MAX_DIGEST_BYTES, Answer, ContentQuery, LeasedPages, LeaseReply, open_pages

# In seconds: the pause before a query is sent again to a source that has not processed it yet. The pause doubles each
# time, up to the maximum.
_PAUSE_S, _MAX_PAUSE_S = 1e-4, 0.05
_LATE_S = 10.0
"""In seconds: how long an answer is still accepted after its query has timed out.

A late answer may come with a lease, which this reader then gives back. Otherwise the lease would keep its pages at the
source until it expires. Until then this reader could not get the same pages again, because a source lends a page to a
reader under only one lease at a time.
"""


class Lent(NamedTuple):
    """A source's answer to a query for pages by content.

    Attributes:
        key: the key of the query.
        source: the source, with the lease under which the pages can be pulled. None if the source has none of the
            pages, if it may lend no more of them, or if there is an error.
        table: block table of the leased pages, for `import_block_table`; None without a source.
        error: why the query failed: the source has not answered, has refused, or has named unusable pages. Empty after
            a valid answer, even if the answer has no pages.
    """

    key: str
    source: Source | None
    table: BlockTable | None
    error: str


@dataclass(slots=True, eq=False)
class _Question:
    """An open query, and when to send it again."""

    replica: int
    key: str
    contact: Contact
    query: ContentQuery
    digests: bytes
    deadline: float
    at: float = -math.inf  # when to ask again; inf while an answer is awaited
    pause_s: float = _PAUSE_S
    waits_for: str = ""
    # Whether the timeout of the query was reported to its owner. A lease that is granted after the report is given
    # back.
    is_told: bool = False


class PageAsks:
    """Asks sources for pages by digest. Only the serving loop's thread may use this object. No call blocks.

    Args:
        client: sends the queries. No other object may use it.
        name: name of the asking process.
        key: key of the digests that authenticate the answers.
        compatibility: entries that must be equal here and at the source, such as the model.
        kind: what the cache stores for a token (`kvcache.layout.kv_kind`). It must be equal at the source, too.
        tables: number of block tables per request.
        kinds: kind of each block table, as in a `BlockTable`.
        beside: number of groups that follow the groups of token pages in a block table. Each of them has one page,
            which holds a state of the request.
        give_back: called with the asking replica, a source whose lease cannot be used, and the reason. The lease was
            granted too late, or does not hold the requested pages.
    """

    def __init__(
        self,
        client: HandshakeClient,
        name: str,
        key: bytes,
        compatibility: Mapping[str, str],
        kind: str,
        tables: int = 1,
        kinds: tuple[str, ...] = (),
        beside: int = 0,
        *,
        give_back: Callable[[int, Source, str], None],
    ) -> None:
        self._client, self._kind, self._tables, self._kinds, self._beside = client, kind, tables, kinds, beside
        self._name, self._key, self._compatibility = name, key, dict(compatibility)
        # The random part distinguishes a restarted process from its predecessor.
        self._asker = f"{name[:400]}@{secrets.token_hex(8)}"
        self._give_back = give_back
        self._open: dict[int, _Question] = {}  # by `ask_id`
        self._happened: list[tuple[int, Lent]] = []

    def ask(self, replica: int, key: str, contact: Contact, wanted: PageDigests, timeout_s: float) -> None:
        """See `PageExchange.ask`."""
        now, ask_id = time.monotonic(), secrets.randbits(63)
        query = ContentQuery(
            query_id=0,
            engine_id=contact[1],
            ask_id=ask_id,
            reader=f"{key} of {self._name}"[:512],
            asker=self._asker,
            compatibility=self._compatibility,
            kind=self._kind,
            page_size=wanted.page_size,
            hash_algorithm=wanted.hash_algorithm,
            digests=wanted.digests[:MAX_DIGEST_BYTES],
            first_page=wanted.first_page,
            named=dict(wanted.named),
        )
        self._open[ask_id] = _Question(replica, key, contact, query, query.digests, now + timeout_s)
        self._send(self._open[ask_id])

    @property
    def is_asking(self) -> bool:
        """Whether a query has not been answered and its time is not over."""
        return any(not ask.is_told for ask in self._open.values())

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """The sockets on which answers arrive."""
        return self._client.sockets

    def poll(self) -> list[tuple[int, Lent]]:
        """Returns the answers since the last call, each with the index of the asking replica."""
        if not self._open:
            return []
        self._client.poll()
        now = time.monotonic()
        for ask in list(self._open.values()):
            if now >= ask.deadline and ask.is_told:
                del self._open[ask.query.ask_id]
            elif now >= ask.deadline:
                missing = ask.waits_for or "its answer"
                error = f"engine {ask.contact[1]!r} at {ask.contact[0]}: waited in vain for {missing}"
                self._happened.append((ask.replica, Lent(ask.key, None, None, error)))
                ask.is_told, ask.deadline = True, now + _LATE_S
            elif now >= ask.at:
                self._send(ask)
        found, self._happened = self._happened, []
        return found

    def close(self) -> None:
        """Drops all open queries. Safe to call twice."""
        self._open.clear()
        self._client.close()

    def _send(self, ask: _Question) -> None:
        ask.at = math.inf

        def done(answer: Answer | TransferError) -> None:
            if self._open.get(ask.query.ask_id) is ask:
                self._on_answer(ask, answer)

        left = max(1e-3, ask.deadline - time.monotonic())
        self._client.ask(ask.contact[0], ask.query, done, left)

    def _on_answer(self, ask: _Question, answer: Answer | TransferError) -> None:
        where = f"engine {ask.contact[1]!r} at {ask.contact[0]}"
        if not isinstance(answer, LeaseReply):
            self._end(ask, error=f"{where}: {answer}")
        elif answer.error:
            self._end(ask, error=f"{where}: {answer.error}")
        elif not answer.pages:
            ask.at, ask.pause_s = time.monotonic() + ask.pause_s, min(2 * ask.pause_s, _MAX_PAUSE_S)
            ask.waits_for = answer.waits_for[:200]
            ask.query = replace(ask.query, digests=b"")
        else:
            self._on_pages(ask, where, answer.pages)

    def _on_pages(self, ask: _Question, where: str, data: bytes) -> None:
        """Completes a query with the leased pages. Gives the lease back if they are not the requested pages."""
        try:
            pages = open_pages(data, ask.contact[1], None, self._key)
        except TransferError as error:
            self._end(ask, error=f"{where}: {error}")
            return
        if not any(pages.block_ids) and not pages.num_tokens:
            self._end(ask)
            return
        address, engine_id = ask.contact[0], pages.engine_id
        source = Source(
            address, engine_id, LeaseRef(pages.lease_id, pages.word_idx, pages.duration_s), pages.incarnation
        )
        size = pages.num_tokens // ask.query.page_size * len(pages.prompt_digest)
        # the digests of the leased pages; empty if the source leased more pages than the query asked for
        digests = ask.digests[:size] if size <= len(ask.digests) else b""
        if fault := self._fault(ask, pages, digests):
            self._end(ask, error=f"{where}: lease {pages.lease_id:#018x} {fault}")
            self._give_back(ask.replica, source, fault)
        else:
            self._end(ask, source, self._table(ask, pages, digests))

    def _fault(self, ask: _Question, pages: LeasedPages, digests: bytes) -> str:
        """Describes how the leased pages differ from the requested ones. Empty if they do not differ."""
        count, rest = divmod(pages.num_tokens, ask.query.page_size)
        groups, beside = pages.block_ids[: self._tables], pages.block_ids[self._tables :]
        most = max(map(len, groups), default=0)
        others = len(groups) != self._tables or [*map(len, beside)] != [1] * self._beside
        if rest or others or most > count or not (most == count or self._kinds):
            return (
                f"covers {pages.num_tokens} tokens in {most} pages of {len(groups)} tables and {len(beside)} states; "
                f"this engine has {self._tables} tables and {self._beside} states"
            )
        if not digests or digests[-len(pages.prompt_digest) :] != pages.prompt_digest:
            return "holds other pages than this engine asked for"
        return ""

    def _table(self, ask: _Question, pages: LeasedPages, digests: bytes) -> BlockTable:
        return BlockTable(
            request_id=ask.key,
            replica_idx=0,
            num_tokens=ask.query.first_page * ask.query.page_size + pages.num_tokens,
            page_size=ask.query.page_size,
            groups=pages.block_ids,
            kinds=self._kinds,
            fingerprint="",  # left empty, because the layouts are compared when the transfer plan is computed
            hash_algorithm=ask.query.hash_algorithm,
            digests=digests,
            first_page=ask.query.first_page,
            seals=(pages.table_seal,),
        )

    def _end(
        self, ask: _Question, source: Source | None = None, table: BlockTable | None = None, error: str = ""
    ) -> None:
        del self._open[ask.query.ask_id]
        if not ask.is_told:
            self._happened.append((ask.replica, Lent(ask.key, source, table, error)))
        elif source is not None:
            self._give_back(ask.replica, source, f"{ask.query.reader} no longer waits for these pages")
