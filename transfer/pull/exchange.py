"""`PageExchange`: leases a manager's pages to other processes, and pulls pages from other processes into the manager.

Each process has one exchange. It turns each replica of the manager into an engine with a separate transfer thread, and
runs the server that describes these engines to peers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import zmq

from kvcache.arguments import number, whole
from kvcache.errors import InvalidRequestError
from kvcache.layout import kv_kind, scales_kind
from kvcache.replica.block_table import BlockTable, PageDigests
from kvcache.uncopied import Uncopied
from transfer.errors import InvalidLeaseError
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent
from transfer.plan.boxes import ShardLayout
from transfer.plan.shapes import dense, of_tables, with_states
from transfer.pull.asking import Lent, PageAsks
from transfer.pull.bell import Bell
from transfer.pull.exchange_checks import (
    check_exchange,
    check_pending,
    check_pull,
    check_question,
    check_source,
    check_text,
)
from transfer.pull.lease import LEASE_WORDS, LENT_WORDS, LeaseRef, LeaseWords, new_lease_id
from transfer.pull.lending import LENT_S, PageLending, lending_limits
from transfer.pull.page_owner import PageOwner, PendingPages
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankIdentity, RankTransfer, ShardMemory, new_incarnation
from transfer.pull.replica import LeaseOffer, LeaseOver, Offered, ReplicaTransfer
from transfer.pull.seals import TableSeals, new_table_key
from transfer.pull.shared_pull import SourcePages, shares
from transfer.pull.source import Source
from transfer.pull.thread import TransferThread, start_thread
from transfer.wire.allowed_peers import AllowedPeers, host_of
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer
from transfer.wire.keys import Keyring
from transfer.wire.secret import fleet_keys

_STUCK_S = 10.0
"""In seconds: how long READs of a failed pull may continue before their agent is destroyed.

READs from a stopped source may never end. They hold pages and rows here until their agent is destroyed.
"""
_REFUSE_S = 5.0
"""In seconds: how long a refusal may take to reach a source that this process has not contacted yet.

If the refusal does not arrive, the lease ends when it expires.
"""


class ExchangeEvent(NamedTuple):
    """An event on one of the local replicas.

    Attributes:
        replica: index of the replica.
        event: the event.
        proof: the proof that `commit_import` needs. Only the last event of a successful pull has it; otherwise None. It
            is also None if the pull was opened by `open_pull` and never read.
    """

    replica: int
    event: PullEvent | LeaseOver | Offered | Lent
    proof: Any = None


class PageExchange(Uncopied):
    """Leases a manager's pages to other processes, and pulls pages from other processes into the manager.

    From `offer` until the lease word is cleared on every shard, the manager holds the leased pages, whatever happens to
    their request. The pages that a pull writes belong to the pull until none of its READs is in flight, whatever
    happens to the import. In both cases `poll` then releases the pages.

    The thread that runs the scheduler may call every method at any time. Only `wait`, `record_checksums` and
    `close` block. A small pull (up to 1 MiB, from a known source) is read within the call that requests it, because
    waking the transfer thread would take longer.

    Args:
        manager: the manager whose pages are leased and filled. Its tensors must stay alive until `close`.
        name: the name by which peers know this process. Its replicas are the engines `<name>/<replica>`.
        bind: ZMQ endpoint of the handshake server.
        compatibility: entries that must agree with a peer's, such as the model.
        replica_options: keyword arguments for `ReplicaTransfer`: its time limits, and `timed`.
        verify: whether the source records checksums of pages, and the reader compares all pulled pages with them. Both
            processes then need the same page layout.
        agent: creates an agent, given its name and memory type. Tests pass a function that injects faults.
        keyring: keys of the sockets between engines; None for plain sockets.
        secret: the fleet's shared secret, in the form that `transfer.wire.secret.read_secret` reads. The keys of these
            sockets, and of the metadata that they carry, are then derived from it. Give a secret or a keyring, but not
            both.
        allowed_peers: addresses, networks and host names of the sources that may be contacted, in addition to this
            host.
        lend: the fraction of a replica's pages, 0.0 to 1.0, that may be leased at the same time to readers that call
            `ask`. The limit leaves the other pages to the requests of this process.

    Attributes:
        address: the bound endpoint of the handshake server.
        incarnation: a random name, new at each start.
        cards: the description of each replica for peers.
        bell: has a descriptor that is readable when `poll` has events or work. Answers to `ask` do not ring the bell;
            they arrive on `sockets`.
        lending: the pages leased to readers that asked for them by digest.
        threads: the transfer thread of each replica, with its statistics.
        queries: number of peers' queries, by outcome.

    Raises:
        AgentError: NIXL cannot be used.
        HandshakeError: the endpoint cannot be bound.
        InvalidEngineError: an argument is invalid, the secret cannot be read, or both a secret and a keyring are given.
            No thread, agent or socket was created.
    """

    def __init__(
        self,
        manager: PageOwner,
        name: str,
        *,
        bind: str = "tcp://127.0.0.1:0",
        compatibility: Mapping[str, str] | None = None,
        replica_options: Mapping[str, float] | None = None,
        verify: bool = False,
        agent: Callable[[str, MemoryType], Agent] = Agent,
        keyring: Keyring | None = None,
        secret: str = "",
        allowed_peers: Sequence[str] = (),
        lend: float = 0.25,
    ) -> None:
        given = {"bind": bind, "compatibility": compatibility, "replica_options": replica_options, "verify": verify}
        given |= {"agent": agent, "secret": secret, "allowed_peers": allowed_peers, "lend": lend}
        check_exchange(manager, name, given)
        self._verify = verify
        self._make_rank = partial(RankTransfer, checks=verify, verify=float(verify), stuck_s=_STUCK_S, agent=agent)
        self._table_key = new_table_key()
        self._seals = TableSeals(self._table_key)
        self._key, keyring = fleet_keys(f"exchange {name!r}", secret, keyring=keyring)
        allowed = AllowedPeers((*host_of(bind), *allowed_peers))
        self.incarnation = new_incarnation()
        self._manager = manager
        self._names = [f"{name}/{replica}" for replica in range(manager.num_replicas)]
        self.threads: list[TransferThread] = []
        self._words, self._lent_words = list[LeaseWords](), list[LeaseWords]()
        self._leases: list[dict[int, tuple[LeaseRef, Any]]] = []  # for each replica: its leases, by lease id
        self._pulls: dict[tuple[int, str], Any] = {}  # by replica and key: the copiers of open pulls
        self._happened: list[ExchangeEvent] = []  # events that were taken from a thread when it was closed
        agreed, options = dict(compatibility or {}), dict[str, Any](replica_options or {})
        # With several block tables, two caches may have pages of the same size that hold different layers and tokens.
        # Peers must therefore agree on the tables.
        tables = manager.layer_tables
        agreed |= {"layer tables": tables.described()} if tables.kinds_named else {}
        agreed |= {"scales": shared} if (shared := scales_kind(manager.layouts)) else {}
        ask = None if keyring is None else keyring.secure_client
        self.cards: list[EngineCard] = []
        self.bell = Bell()
        kind, count, limits = kv_kind(manager.layouts), len(tables.tables), lending_limits(manager, lend)
        lend_to = partial(PageLending, manager, self._grant_lent, self.bell.ring, key=self._key, seals=self._seals)
        self.lending = lend_to(limits=limits, kind=kind, tables=count)
        told = kind, count, tables.kinds_named, len(manager.further_groups[0])
        asker = HandshakeClient(ask, allowed=allowed)
        self._asks = PageAsks(asker, name, self._key, agreed, *told, give_back=self.refuse)
        try:
            for replica in range(len(self._names)):
                self._start(replica, agreed, HandshakeClient(ask, allowed=allowed), options)
            self._server = HandshakeServer(self.cards, bind, None if keyring is None else keyring.secure_server)
        except BaseException:
            for thread in self.threads:
                thread.close()
            self.bell.close()
            raise
        self.address, self.queries = self._server.endpoint, self._server.counts

    def _start(
        self, replica: int, compatibility: Mapping[str, str], client: HandshakeClient, options: Mapping[str, Any]
    ) -> None:
        """Registers the pages of a replica and starts its thread."""
        ranks: list[RankTransfer] = []
        shards = _shards(self._manager, replica)
        try:
            for rank, (layout, tensors) in enumerate(shards):
                identity = RankIdentity(
                    engine_id=self._names[replica],
                    incarnation=self.incarnation,
                    rank=rank,
                    ranks=len(shards),
                    compatibility=compatibility,
                    key=self._key,
                    table_key=self._table_key,
                )
                named = {f"tensor {at} of shard {rank}": tensor for at, tensor in enumerate(tensors)}
                memory = ShardMemory(layout, [tensor.data_ptr() for tensor in tensors], tensors[0].device, named)
                ranks.append(self._make_rank(identity, memory))
            thread = start_thread(ReplicaTransfer(ranks, client, **options), self.bell.ring)
            self.threads.append(thread)
        except BaseException:
            for rank in ranks:
                rank.close()
            raise
        self._words.append(LeaseWords())
        self._lent_words.append(LeaseWords(range(LEASE_WORDS, LEASE_WORDS + LENT_WORDS)))
        self._leases.append({})
        sealed = tuple(rank.metadata for rank in ranks)
        leased, lent = partial(self.lending.leased, replica), partial(self.lending.answer, replica)
        refused = partial(thread.call_soon, ReplicaTransfer.hear_refusal)
        card = EngineCard(self._names[replica], self.incarnation, sealed, compatibility, leased, lent, refused)
        self.cards.append(card)

    def engine_id(self, replica: int) -> str:
        """Returns the engine id of a replica."""
        self._thread(replica)
        return self._names[replica]

    def _thread(self, replica: int) -> TransferThread:
        """Returns the thread of a replica. Raises `InvalidRequestError` if there is no such replica."""
        return self.threads[whole("replica", replica, 0, len(self.threads) - 1, InvalidRequestError)]

    @property
    def pull_seconds(self) -> float:
        """Seconds during which a READ was under way or a source was awaited, summed over all replicas."""
        return sum(thread.pull_seconds for thread in self.threads)

    @property
    def open_pulls(self) -> set[str]:
        """The keys of the pulls whose last event `poll` has not returned yet, over all replicas."""
        return {key for _, key in list(self._pulls)}  # a copy, because metrics are read in another thread

    # ---- leases

    def offer(self, request_id: str, duration_s: float, *, running: bool = False) -> Source | None:
        """Leases the pages that a claimed request computes. Returns None if every lease word is taken.

        The `Offered` event reports that the lease was granted. Only after this event may the returned `Source` be sent
        to the reader, together with a block table that the manager made after this call. A block table carries the
        seals of the leases that its request had when the table was made, and a reader rejects a table without the seal
        of its lease. The manager holds the pages from now on, even if the request is released, until `poll` has
        returned `LeaseOver` or a failed `Offered`.

        Args:
            request_id: a claimed request without a pending import.
            duration_s: duration of the lease if its reader does not renew it, in seconds.
            running: True if the request is still being computed. The duration of the lease then counts from
                `start_clock` on.

        Raises:
            InvalidLeaseError: (a ValueError) the duration is not a number.
            UnknownRequestError: (a KeyError) the manager has no such request.
            NotReservedError: (a RuntimeError) an import of the request's pages is pending.
            EngineClosedError: the transfer thread has died.
        """
        number("duration_s", duration_s, error=InvalidLeaseError)
        lease_id = new_lease_id()
        held = self._manager.lease(request_id, seal=partial(self._seals.seal, lease_id))
        return self._grant(held, self._words, lease_id, request_id, duration_s, running=running)

    def _grant(
        self,
        held: Any,
        words: list[LeaseWords],
        lease_id: int,
        name: str,
        duration_s: float,
        *,
        running: bool,
        pages: Sequence[Sequence[int]] | None = None,
    ) -> Source | None:
        """Requests a lease on pages that the manager holds. If no word is free, ends the hold and returns None."""
        replica: int = held.replica_idx
        with ExitStack() as undo:
            undo.callback(self._manager.end_lease, held)
            if (lease := words[replica].take(duration_s, lease_id)) is None:
                return None
            undo.callback(words[replica].give_back, lease)
            self.threads[replica].offer(LeaseOffer(name, lease, pages=pages, running=running))
            undo.pop_all()
        self._leases[replica][lease.lease_id] = (lease, held)
        return Source(self.address, self._names[replica], lease, self.incarnation)

    def _grant_lent(self, held: Any, table: BlockTable) -> Source | None:
        pages = table.groups if self._verify else None
        words, name = self._lent_words, table.request_id
        return self._grant(held, words, new_lease_id(), name, LENT_S, running=False, pages=pages)

    def record_checksums(self, replica: int, pages: Sequence[Sequence[int]]) -> None:
        """Records the checksums of computed pages if readers verify them. `pages` has the page ids of each group.

        Blocks until the checksums are recorded.
        """
        if self._verify:
            self._thread(replica).call(lambda transfers: [rank.record_checksums(pages) for rank in transfers.ranks])

    def start_clock(self, source: Source) -> None:
        """Starts the clock of a lease that was offered with `running`, once all its pages are computed.

        From then on the lease expires if its reader does not renew it within the duration of the lease.

        Raises:
            InvalidLeaseError: (a ValueError) the offer is not from this process. `revoke` raises this too.
        """
        self._thread_of(source).call_soon(ReplicaTransfer.start_clock, source.lease.lease_id)

    def revoke(self, source: Source, reason: str) -> None:
        """Ends a lease. After `LeaseOver`, no reader can prove a read under it."""
        check_text("reason", reason, InvalidLeaseError)
        self._thread_of(source).call_soon(ReplicaTransfer.revoke, source.lease.lease_id, reason)

    def _thread_of(self, source: Source) -> TransferThread:
        check_source("source", source)
        if source.engine_id not in self._names:
            raise InvalidLeaseError(
                f"engine {source.engine_id!r} made this offer, but the engines of this process are {self._names}"
            )
        return self.threads[self._names.index(source.engine_id)]

    # ---- pages by content

    def ask(
        self, replica: int, key: str, address: str, engine_id: str, wanted: PageDigests, timeout_s: float = 5.0
    ) -> None:
        """Asks a source for pages by content, whichever request computed them. `poll` returns the answer as `Lent`.

        The source leases consecutive pages, starting with the first page. It stops at the first page that it lacks or
        may not lease. An answer with few or no pages is not an error, and a repeated query may get fewer pages. Import
        and pull the table of a `Lent` like the table of any offer. All pages before the table's first page must already
        be cached here. A prompt can therefore be pulled in several parts, from different sources. `refuse` gives back a
        lease that will not be pulled. Without `refuse`, such a lease expires within seconds.

        Args:
            replica: the asking replica; the event repeats it.
            key: name of the query; the event repeats it.
            address: ZMQ endpoint of the source's handshake server.
            engine_id: the engine at that address, a replica of another exchange.
            wanted: the result of `manager.contents.digests` for the request. The digests may begin at any page, because
                each digest covers all pages before it. Only the first 512 KiB of digests are sent.
            timeout_s: how long to wait for the answer, in seconds. `Lent` reports a timeout as an error. If the source
                grants a lease after that, the lease is given back.

        Raises:
            InvalidRequestError: (a ValueError) an argument has a wrong type or is out of range. Every method that takes
                the index of a replica raises it if there is no such replica.
        """
        self._thread(replica)
        check_question(key, (address, engine_id), wanted, timeout_s)
        self._asks.ask(replica, key, (address, engine_id), wanted, timeout_s)

    def refuse(self, replica: int, source: Source, reason: str) -> None:
        """Gives back a lease that will not be read, so that its source can free the pages."""
        check_source("source", source)
        check_text("reason", reason)
        self._thread(replica).call_soon(ReplicaTransfer.refuse, source, reason, _REFUSE_S)

    # ---- pulls

    def pull(self, key: str, source: Source | Sequence[Source], pending: PendingPages, timeout_s: float) -> None:
        """Pulls all pages that an import lacks. The event that ends the pull carries the proof for `commit_import`.

        If several sources are given, the pull reads from all of them at the same time. If several sources hold a page,
        a faster source is more likely to deliver it. If a source fails, the pull reads from the other sources
        instead. If a page is no longer available from any source, a pull for a single block table still succeeds, but
        only with the pages before that page. The event that ends the pull then has `stop`, and the import covers fewer
        tokens.

        Args:
            key: name of the pull. No other open pull on the import's replica may have it.
            source: the source, as it was offered; or a list with one source for each block table of the import: for its
                `table` first, then for its `others`.
            pending: an open import of the manager that no other pull writes.
            timeout_s: seconds until the pull fails. This includes the first contact with the source.

        Raises:
            InvalidRequestError: (a ValueError) a pull of this name is open, or the list of sources does not have one
                source for each block table of the import. Also if the import is closed, belongs to another manager, or
                is written by another pull.
            EngineClosedError: the transfer thread has died, or was closed. From then on, all calls except `poll` and
                `close` raise this error.
        """
        check_pull(key, source, pending, timeout_s, len(self.threads))
        replica = pending.replica_idx
        self._refuse_open(replica, key)
        copier = self._manager.copier(pending)
        try:
            if isinstance(source, Source):
                self.threads[replica].pull(key, source, copier.take(last=True), timeout_s, copier.tables)
            else:
                self._pull_shared(key, source, copier, timeout_s)
        except BaseException:
            copier.give_up()  # nothing has been written yet
            raise
        self._pulls[replica, key] = copier

    def _pull_shared(self, key: str, sources: Sequence[Source], copier: Any, timeout_s: float) -> None:
        pending = copier.pending
        copies = copier.take(last=True)
        named = [(copies, copier.tables), *((copies, (table,)) for table, copies in copier.from_others())]
        if len(sources) != len(named):
            raise InvalidRequestError(
                f"request {pending.request_id!r}: got {len(sources)} sources, but the block tables of its import come "
                f"from {len(named)} sources"
            )
        thread = self.threads[int(pending.replica_idx)]
        if len(sources) == 1:
            thread.pull(key, sources[0], copies, timeout_s, copier.tables)
            return
        holdings = [SourcePages(source, *pages) for source, pages in zip(sources, named, strict=True)]
        sizes, shared = (pending.page_size, pending.src_page_size), ReplicaTransfer.pull_shared
        thread.call_soon(shared, key, holdings, sizes, timeout_s, can_shorten=pending.can_shorten)

    def reads_several(self, num_tokens: int) -> bool:
        """Whether a pull of `num_tokens` tokens is large enough to read from several sources."""
        return shares(sum(num_tokens // layout.page_size * layout.page_bytes for layout in self._manager.layouts))

    def open_pull(self, replica: int, key: str, source: Source, timeout_s: float) -> None:
        """Opens a pull whose pages are named later, by `read`. The source's lease is renewed from now on.

        Raises:
            InvalidRequestError: (a ValueError) a pull of this name is open.
        """
        check_text("key", key)
        check_source("source", source, InvalidRequestError)
        number("timeout_s", timeout_s, error=InvalidRequestError)
        thread = self._thread(replica)
        self._refuse_open(replica, key)
        thread.pull(key, source, None, timeout_s)
        self._pulls[replica, key] = None

    def _refuse_open(self, replica: int, key: str) -> None:
        if (replica, key) in self._pulls:
            raise InvalidRequestError(f"request {key!r}: its pull is already open on replica {replica}")

    def read(self, replica: int, key: str, pending: PendingPages, *, last: bool) -> None:
        """Reads the pages that an import lacks and that were not read before. `last` ends the pull with a fence.

        The first call takes the import's copier for the pull. The copier's proof comes with the pull's last event.

        Raises:
            InvalidRequestError: (a ValueError) no such pull is open, or its last pages were already requested; or the
                import is closed, belongs to another manager, replica or pull, or is written by another pull.
        """
        check_text("key", key)
        self._thread(replica)
        check_pending(pending, len(self.threads))
        is_open = (replica, key) in self._pulls
        if not is_open or pending.replica_idx != replica:
            raise InvalidRequestError(
                f"request {pending.request_id!r}: its import is on replica {pending.replica_idx}, but "
                f"{'a' if is_open else 'no'} pull {key!r} is open on replica {replica}"
            )
        copier = self._pulls[replica, key]
        if copier is None:
            copier = self._pulls[replica, key] = self._manager.copier(pending)
        elif copier.pending is not pending:
            raise InvalidRequestError(f"request {pending.request_id!r}: the pull {key!r} belongs to another import")
        groups = copier.take(last=last)
        self.threads[replica].add_pages(key, groups, last=last, tables=copier.tables)

    def cancel_pull(self, replica: int, key: str, reason: str) -> None:
        """Gives up a pull. Its last event comes once none of its READs is in flight."""
        check_text("key", key)
        check_text("reason", reason)
        self._thread(replica).call_soon(ReplicaTransfer.cancel, key, reason)

    # ---- what happened

    @property
    def sockets(self) -> list[zmq.Socket[bytes] | Bell]:
        """The objects for `zmq.zmq_poll` to sleep on. At least one object is readable when `poll` must be called.

        Read this property again before each sleep, because the sockets change with each call to `ask` and each answer.
        """
        return [self.bell, *self._asks.sockets]

    def poll(self) -> list[ExchangeEvent]:
        """Returns the events since the last call. Gives pages whose lease or pull has ended back to the manager.

        Raises:
            EngineClosedError: a transfer thread has died. Leased and pulled pages stay held, because a lease word may
                still be valid and a READ may still write.
        """
        self.bell.hear()
        found, self._happened = self._happened, []
        for thread in self.threads:
            thread.raise_failure()
        found += self._take_all()
        self.lending.poll()
        found += self._take_all()  # events of leases that were granted at once within `lending.poll`
        if self.lending.take_answers():
            self._server.look_again()
        return found + [ExchangeEvent(*answered) for answered in self._asks.poll()]

    def _take_all(self) -> list[ExchangeEvent]:
        return [event for replica in range(len(self.threads)) for event in self._take(replica)]

    def _take(self, replica: int) -> list[ExchangeEvent]:
        thread, found = self.threads[replica], list[ExchangeEvent]()
        while thread.events:
            event, proof = thread.take(), None
            if isinstance(event, PullEvent):
                proof = self._end_copy(replica, event) if event.safe else None
            elif isinstance(event, LeaseOver) or event.error:
                self._end_lease(replica, event.lease_id)
            if not isinstance(event, PullEvent) and self.lending.settle(event):
                continue
            found.append(ExchangeEvent(replica, event, proof))
        return found

    def _end_copy(self, replica: int, event: PullEvent) -> Any:
        """Ends the page copy that a pull made. `event` is the pull's last event, so none of its READs is in flight.

        Returns the pull's proof if its fence showed that the lease held. Returns None if the pull failed or has no
        copier.
        """
        copier = self._pulls.pop((replica, event.key), None)
        if copier is None:
            return None
        if not event.error:
            return copier.prove(event.stop)
        copier.give_up()
        return None

    def _end_lease(self, replica: int, lease_id: int) -> None:
        """Frees the word and the pages of a lease whose word is cleared on every rank, or that was never granted."""
        lease, held = self._leases[replica].pop(lease_id)
        words = self._lent_words if lease.word_idx in self._lent_words[replica].words else self._words
        words[replica].give_back(lease)
        self._manager.end_lease(held)

    def wait(self, replica: int, timeout_s: float) -> None:
        """Blocks until there is an event on a replica, or until the timeout."""
        number("timeout_s", timeout_s, error=InvalidRequestError)
        thread = self._thread(replica)
        thread.wait(lambda: bool(thread.events), timeout_s)

    def totals(self) -> tuple[int, int]:
        """Returns the bytes pulled and the number of failed pulls."""
        every = [thread.replica.stats for thread in self.threads]
        return sum(one.num_bytes for one in every), sum(one.failures.total() for one in every)

    def close(self) -> None:
        """Ends all leases and pulls, and gives their pages back to the manager. Safe to call twice.

        If a transfer thread cannot be stopped, the pages of its replica stay held, because the thread may still use
        them.
        """
        for replica, thread in enumerate(self.threads):
            thread.close()
            self._happened += self._take(replica)
            if thread.is_closed:
                # Commands that the thread has not run by now will never run. Their leases and pulls are therefore ended
                # here.
                for lease_id in list(self._leases[replica]):
                    self._end_lease(replica, lease_id)
                for key in [key for key in self._pulls if key[0] == replica]:
                    copier = self._pulls.pop(key)
                    if copier is not None:
                        copier.give_up()
        self._server.close()
        self._asks.close()
        self.bell.close()


def _shards(manager: PageOwner, replica: int) -> list[tuple[ShardLayout, list[torch.Tensor]]]:
    """Returns the layout of each shard of a replica, and its tensors in the order of the layout's regions."""
    pages = manager.total_num_pages // manager.num_replicas + 1  # the tensor includes the null page
    shards: list[tuple[ShardLayout, list[torch.Tensor]]] = []
    for shard, (page, blocks) in enumerate(zip(manager.layouts, manager.device_tensors[replica], strict=True)):
        layout, tensors = of_tables(dense(page, pages), manager.layer_tables), [blocks]
        for group in manager.further_groups[replica]:
            layout = with_states(layout, group.kinds(shard), group.num_pages + 1)
            tensors += group.tensors[shard]
        shards.append((layout, tensors))
    return shards
