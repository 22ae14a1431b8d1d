"""`PageExchange`: pages change hands between processes, under leases and fences, and never apart from their manager.

One a process: an engine with a thread for each replica of a manager, and the server that tells peers of them.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kvcache.errors import InvalidRequestError
from kvcache.layout import kv_kind, scales_kind
from transfer.errors import InvalidEngineError, InvalidLeaseError
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent
from transfer.plan.boxes import ShardLayout
from transfer.plan.shapes import dense, of_tables, with_states
from transfer.pull.asking import Lent, PageAsks
from transfer.pull.bell import Bell
from transfer.pull.lease import LEASE_SLOTS, LENT_SLOTS, LeaseRef, LeaseSlots, new_lease_id
from transfer.pull.lending import LENT_S, PageLending
from transfer.pull.pull_state import PullEvent
from transfer.pull.rank import RankIdentity, RankTransfer, ShardMemory, make_rank, new_incarnation
from transfer.pull.replica import LeaseOver, Offered, ReplicaTransfer
from transfer.pull.seals import TableSeals, new_table_key
from transfer.pull.source import Source
from transfer.pull.thread import TransferThread, start_thread
from transfer.wire.allowed_peers import AllowedPeers, host_of
from transfer.wire.handshake import EngineCard, HandshakeClient, HandshakeServer
from transfer.wire.secret import fleet_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import torch

    from kvcache.replica.block_table import BlockTable, PageDigests
    from transfer.pull.page_owner import PageOwner, PendingPages
    from transfer.wire.keys import Keyring

_STUCK_S = 10.0
"""A stopped source's READs may never end. Until their agent is destroyed they hold pages and rows here."""
_REFUSE_S = 5.0
"""To reach a source that nobody here has spoken to. Its lease ends by itself, too."""


class ExchangeEvent(NamedTuple):
    """An event on one of our replicas.

    Attributes:
        replica: the number of the replica.
        event: the event.
        proof: the proof of a pull that passed, for `commit_import`; None for other events, and if nothing was read.
    """

    replica: int
    event: PullEvent | LeaseOver | Offered | Lent
    proof: Any = None


class PageExchange:
    """Leases pages of a manager to other processes, and pulls pages of others' into it.

    What is leased is held by the manager, whatever becomes of its request, from `offer` until the lease word is cleared
    on every shard; what is pulled into is the pull's until nothing of it is in flight, whatever becomes of the import.
    Both ends are booked by `poll`.

    Every method may be called at any time by the thread that runs the scheduler; none waits, but `wait` and `close`.
    The pages of a call that names few (1 MiB, of a known source) are read within it: waking the transfer thread for
    them would take longer.

    Args:
        manager: whose pages. Its tensors must live until `close`.
        name: of this process, as peers call it. Its replicas are the engines `<name>/<replica>`.
        bind: ZMQ endpoint at which peers ask for what they need to know.
        compatibility: what must agree with a peer, say the model.
        replica_options: times of `ReplicaTransfer`, by name.
        verify: the source makes page checks, and the reader compares all that it pulls with them. Only between
            processes whose pages are laid out alike.
        agent: makes an agent, given its name and memory type. Replaced by one that misbehaves, to see what it harms.
        keyring: keys of the sockets over which engines tell each other of themselves; None for plain sockets.
        secret: shared by the fleet, as `transfer.wire.secret.read_secret` takes it: turns on keys for those sockets,
            and for the metadata that they carry. In place of a keyring.
        allowed_peers: addresses, networks and host names of sources that may be contacted, beside this host.
        lend: of a replica's pages, the share that readers who `ask` may hold at a time, 0.0 to 1.0; they get fewer
            pages beyond that, as our own requests come first.

    Attributes:
        address: the endpoint, as bound.
        incarnation: random, new with each start.
        cards: of each replica, what peers are told of it.
        bell: can be waited for like a file: it can be read once `poll` has something to tell, or to do.
        lending: what readers who asked for pages by what they hold were leased.
        threads: of each replica, the thread that counts what it does.
        queries: how often peers have asked, by what became of it.

    Raises:
        AgentError: NIXL cannot be used.
        HandshakeError: the endpoint cannot be bound.
        InvalidEngineError: a secret that cannot be read, or one beside a keyring; no list of peers; no such share.
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
        self._verify, self._agent = verify, agent
        if not 0.0 <= lend <= 1.0:
            raise InvalidEngineError(f"exchange {name!r}: lend is {lend}, a share from 0.0 to 1.0 is needed")
        self._table_key = new_table_key()
        self._seals = TableSeals(self._table_key)
        self._key, keyring = fleet_keys(f"exchange {name!r}", secret, keyring=keyring)
        allowed = AllowedPeers((*host_of(bind), *allowed_peers))
        self.incarnation = new_incarnation()
        self._manager = manager
        self._names = [f"{name}/{replica}" for replica in range(manager.num_replicas)]
        self.threads: list[TransferThread] = []
        self._slots, self._lent_slots = list[LeaseSlots](), list[LeaseSlots]()
        self._leases: list[dict[int, tuple[LeaseRef, Any]]] = []  # of each replica, by the id in the word
        self._pulls: dict[tuple[int, str], Any] = {}  # the copiers of those that are open, by replica and key
        self._happened: list[ExchangeEvent] = []  # at the end of a thread
        agreed, options = dict(compatibility or {}), dict[str, Any](replica_options or {})
        tables = manager.layer_tables  # with several a page is of other layers, and its neighbours of other tokens
        agreed |= {"layer tables": tables.described()} if tables.kinds_named else {}
        agreed |= {"scales": shared} if (shared := scales_kind(manager.layouts)) else {}
        ask = None if keyring is None else keyring.secure_client
        self.cards: list[EngineCard] = []
        self.bell = Bell()
        calls = self._grant_lent, self.bell.ring, self._answered
        self.lending = PageLending(manager, *calls, share=lend, key=self._key, seals=self._seals)
        told = kv_kind(manager.layouts), len(tables.tables), tables.kinds_named, len(manager.further_groups[0])
        self._asks = PageAsks(HandshakeClient(ask, allowed=allowed), name, self._key, agreed, *told)
        try:
            for replica, engine_id in enumerate(self._names):
                ranks = self._ranks(replica, engine_id, agreed)
                transfers = ReplicaTransfer(ranks, HandshakeClient(ask, allowed=allowed), **options)
                self.threads.append(start_thread(transfers, self.bell.ring))
                self._slots.append(LeaseSlots())
                self._lent_slots.append(LeaseSlots(range(LEASE_SLOTS, LEASE_SLOTS + LENT_SLOTS)))
                self._leases.append({})
                sealed = tuple(rank.metadata for rank in ranks)
                lent = self.lending.of[replica].answer
                self.cards.append(EngineCard(engine_id, self.incarnation, sealed, agreed, lent=lent))
            self._server = HandshakeServer(self.cards, bind, None if keyring is None else keyring.secure_server)
        except BaseException:
            for thread in self.threads:
                thread.close()
            self.bell.close()
            raise
        self.address, self.queries = self._server.endpoint, self._server.counts

    def _ranks(self, replica: int, engine_id: str, compatibility: Mapping[str, str]) -> list[RankTransfer]:
        ranks: list[RankTransfer] = []
        shards = _shards(self._manager, replica)
        for rank, (layout, tensors) in enumerate(shards):
            identity = RankIdentity(
                engine_id=engine_id,
                incarnation=self.incarnation,
                rank=rank,
                ranks=len(shards),
                compatibility=compatibility,
                key=self._key,
                table_key=self._table_key,
            )
            memory = ShardMemory(layout, [tensor.data_ptr() for tensor in tensors], tensors[0].device)
            ranks.append(
                make_rank(
                    identity,
                    memory,
                    checks=self._verify,
                    verify=float(self._verify),
                    stuck_s=_STUCK_S,
                    agent=self._agent,
                )
            )
        return ranks

    def engine_id(self, replica: int) -> str:
        """The name by which peers know a replica."""
        return self._names[replica]

    @property
    def pull_seconds(self) -> float:
        """Time in which at least one READ was under way, in seconds, of all replicas."""
        return sum(thread.pull_seconds for thread in self.threads)

    @property
    def open_pulls(self) -> set[str]:
        """Keys of the pulls, of all replicas, whose last event has not come out of `poll`."""
        return {key for _, key in list(self._pulls)}  # also read by who scrapes metrics, in another thread

    # ---- leases

    def offer(self, request_id: str, duration_s: float, *, running: bool = False) -> Source | None:
        """Leases what a claimed request computes. None: as many leases stand as can.

        `Offered` tells that the lease stands: only then may the result leave, with the manager's block table. That is
        made after this call: a table carries the seals of the leases that its request has by then, and no reader takes
        one that lacks the seal of its lease. The manager holds the pages from now on, also when the request is
        released, until `LeaseOver` or a failed `Offered` has come out of `poll`.

        Args:
            request_id: claimed, and not to be filled by an import.
            duration_s: seconds that the lease stands without a word of its reader.
            running: the request still computes: no time runs before `start_clock`.

        Raises:
            UnknownRequestError: (a KeyError) the manager has no such request.
            NotReservedError: (a RuntimeError) an import of its pages is pending.
            EngineClosedError: the transfer thread has died.
        """
        lease_id = new_lease_id()
        held = self._manager.lease(request_id, seal=partial(self._seals.seal, lease_id))
        return self._grant(held, self._slots, lease_id, request_id, duration_s, running=running)

    def _grant(
        self,
        held: Any,
        slots: list[LeaseSlots],
        lease_id: int,
        name: str,
        duration_s: float,
        *,
        running: bool,
        pages: Sequence[Sequence[int]] | None = None,
    ) -> Source | None:
        """Has a lease stand for what the manager holds; lets go of that where there is none."""
        replica: int = held.replica_idx
        lease = None
        try:
            lease = slots[replica].take(duration_s, lease_id)
            if lease is not None:
                self.threads[replica].call_soon(ReplicaTransfer.offer, name, lease, pages=pages, running=running)
        except BaseException:
            if lease is not None:
                slots[replica].give_back(lease)
            self._manager.end_lease(held)
            raise
        if lease is None:
            self._manager.end_lease(held)
            return None
        self._leases[replica][lease.lease_id] = (lease, held)
        return Source(self.address, self._names[replica], lease, self.incarnation)

    def _grant_lent(self, held: Any, table: BlockTable) -> Source | None:
        pages = table.groups if self._verify else None
        slots, name = self._lent_slots, table.request_id
        return self._grant(held, slots, new_lease_id(), name, LENT_S, running=False, pages=pages)

    def _answered(self) -> None:
        self._server.look_again()

    def seal(self, replica: int, pages: Sequence[Sequence[int]]) -> None:
        """Makes the page checks of computed pages, a list for each group, where readers verify. Waits for that."""
        if self._verify:
            self.threads[replica].call(lambda transfers: [rank.seal(pages) for rank in transfers.ranks])

    def start_clock(self, source: Source) -> None:
        """All pages of an offer are computed: it ends where its reader says nothing for as long as it lasts.

        Raises:
            InvalidLeaseError: (a ValueError) the offer is another process's. So for `revoke`.
        """
        self._thread_of(source).call_soon(ReplicaTransfer.start_clock, source.lease.lease_id)

    def revoke(self, source: Source, reason: str) -> None:
        """Ends a lease: `LeaseOver` tells when no reader can take the pages for good any more."""
        self._thread_of(source).call_soon(ReplicaTransfer.revoke, source.lease.lease_id, reason)

    def _thread_of(self, source: Source) -> TransferThread:
        if source.engine_id not in self._names:
            raise InvalidLeaseError(f"engine {source.engine_id!r} has offered it, ours are {self._names}")
        return self.threads[self._names.index(source.engine_id)]

    # ---- pages by what they hold

    def ask(
        self, replica: int, key: str, address: str, engine_id: str, wanted: PageDigests, timeout_s: float = 5.0
    ) -> None:
        """Asks a source for pages by content, whichever request computed them. `Lent` comes out of `poll`.

        The source leases the longest run of them, from the first on, that it holds, and that it lends: it may be
        shorter than it was yesterday, and none, which is no error. With the table of a `Lent` the pages are imported
        and pulled like those of any offer, where all that comes before them is cached here: so one prompt may come from
        several sources, in stretches. `refuse` gives back what nobody pulls; else it ends by itself within seconds.

        Args:
            replica: ours, which the event names.
            key: names the question in the event.
            address: ZMQ endpoint of the source's handshake.
            engine_id: the engine there, a replica of another exchange.
            wanted: `manager.contents.digests` of the request, or those from a page on, as each names all before it;
                of more than 512 KiB of digests the first.
            timeout_s: seconds until the source is given up, and `Lent` says so.
        """
        self._asks.ask(replica, key, (address, engine_id), wanted, timeout_s)

    def refuse(self, replica: int, source: Source, reason: str) -> None:
        """Gives a lease back under which nothing was read, and never will be: its source need not keep the pages."""
        self.threads[replica].call_soon(ReplicaTransfer.refuse, source, reason, _REFUSE_S)

    # ---- pulls

    def pull(self, key: str, source: Source, pending: PendingPages, timeout_s: float) -> None:
        """Pulls all that an import lacks, in one; its last `PullEvent` comes with the proof for `commit_import`.

        Args:
            key: names the pull, and no other one that is open on the import's replica.
            source: as it was offered.
            pending: an open import of the manager, which nobody else copies.
            timeout_s: seconds until the pull fails, its first contact with the source included.

        Raises:
            InvalidRequestError: (a ValueError) a pull of this name is open; the import is closed, of another manager,
                or somebody else copies it.
            EngineClosedError: the transfer thread has died, or was closed. So for all calls but `poll` and `close`.
        """
        replica = pending.replica_idx
        self._refuse_open(replica, key)
        copier = self._manager.copier(pending)
        try:
            self.threads[replica].pull(key, source, copier.take(last=True), timeout_s, copier.tables)
        except BaseException:
            copier.give_up()  # nobody has begun to write
            raise
        self._pulls[replica, key] = copier

    def open_pull(self, replica: int, key: str, source: Source, timeout_s: float) -> None:
        """Begins a pull of which the pages are named later: from now on the lease is renewed. `read` says of what.

        Raises:
            InvalidRequestError: (a ValueError) a pull of this name is open.
        """
        self._refuse_open(replica, key)
        self.threads[replica].pull(key, source, None, timeout_s)
        self._pulls[replica, key] = None

    def _refuse_open(self, replica: int, key: str) -> None:
        if (replica, key) in self._pulls:
            raise InvalidRequestError(f"a pull {key!r} is open on replica {replica} already")

    def read(self, replica: int, key: str, pending: PendingPages, *, last: bool) -> None:
        """Reads what an import lacks and was not read before; `last` ends the pull with the fence after it.

        The pull has the import's copier from the first call on: the proof that it gives comes with its last event.

        Raises:
            InvalidRequestError: (a ValueError) no such pull is open, or its last pages were asked for; the import is
                closed, of another manager, replica or pull, or somebody else copies it.
        """
        is_open = (replica, key) in self._pulls
        if not is_open or pending.replica_idx != replica:
            raise InvalidRequestError(
                f"request {pending.request_id!r}: its import is on replica {pending.replica_idx}, and "
                f"{'a' if is_open else 'no'} pull {key!r} is open on replica {replica}"
            )
        copier = self._pulls[replica, key]
        if copier is None:
            copier = self._pulls[replica, key] = self._manager.copier(pending)
        elif copier.pending is not pending:
            raise InvalidRequestError(f"request {pending.request_id!r}: the pull {key!r} is of another import")
        groups = copier.take(last=last)
        self.threads[replica].add_pages(key, groups, last=last, tables=copier.tables)

    def cancel_pull(self, replica: int, key: str, reason: str) -> None:
        """Gives a pull up; its last event comes when nothing of it is in flight."""
        self.threads[replica].call_soon(ReplicaTransfer.cancel, key, reason)

    # ---- what happened

    def poll(self) -> list[ExchangeEvent]:
        """The events since the last call. Pages whose lease or pull is over belong to the manager again.

        Raises:
            EngineClosedError: a transfer thread has died. Leased or pulled pages stay held: a lease word may still
                stand, a READ may still write.
        """
        self.bell.hear()
        found, self._happened = self._happened, []
        for replica, thread in enumerate(self.threads):
            thread.raise_failure()
            found += self._take(replica)
        self.lending.poll()
        return found + [ExchangeEvent(*answered) for answered in self._asks.poll()]

    def _take(self, replica: int) -> list[ExchangeEvent]:
        events, found = self.threads[replica].events, list[ExchangeEvent]()
        while events:
            event, proof = events.popleft(), None
            if isinstance(event, PullEvent):
                proof = self._end_copy(replica, event) if event.safe else None
            elif isinstance(event, LeaseOver) or event.error:
                self._end_lease(replica, event.lease_id)
            if not isinstance(event, PullEvent) and self.lending.of[replica].settle(event):
                continue
            found.append(ExchangeEvent(replica, event, proof))
        return found

    def _end_copy(self, replica: int, event: PullEvent) -> Any:
        """Nothing of a pull is in flight any more. Gives the proof of one that has passed."""
        copier = self._pulls.pop((replica, event.key), None)
        if copier is None:
            return None
        if not event.error:
            return copier.prove()
        copier.give_up()
        return None

    def _end_lease(self, replica: int, lease_id: int) -> None:
        """The word of a lease is cleared on every rank, or never stood: word and pages may be used again."""
        lease, held = self._leases[replica].pop(lease_id)
        slots = self._lent_slots if lease.slot in self._lent_slots[replica].slots else self._slots
        slots[replica].give_back(lease)
        self._manager.end_lease(held)

    def wait(self, replica: int, timeout_s: float) -> None:
        """Waits until something has happened on a replica."""
        thread = self.threads[replica]
        thread.wait(lambda: bool(thread.events), timeout_s)

    def totals(self) -> tuple[int, int]:
        """Bytes that were pulled, and pulls that failed."""
        every = [thread.replica.stats for thread in self.threads]
        return sum(one.num_bytes for one in every), sum(one.failures.total() for one in every)

    def close(self) -> None:
        """Ends everything: leases and pulls give their pages back. Safe to call twice.

        Those of a thread that cannot be ended stay held: nobody knows what it still does.
        """
        for replica, thread in enumerate(self.threads):
            thread.close()
            self._happened += self._take(replica)
            if thread.is_closed:
                # The thread never began its last requests, and never will.
                for lease_id in list(self._leases[replica]):
                    self._end_lease(replica, lease_id)
                for place in [place for place in self._pulls if place[0] == replica]:
                    copier = self._pulls.pop(place)
                    if copier is not None:
                        copier.give_up()
        self._server.close()
        self._asks.close()
        self.bell.close()


def _shards(manager: PageOwner, replica: int) -> list[tuple[ShardLayout, list[torch.Tensor]]]:
    """The layout of each shard of a replica, and its tensors in the order of the layout's regions."""
    pages = manager.total_num_pages // manager.num_replicas + 1  # the null page is one of the tensor's
    shards: list[tuple[ShardLayout, list[torch.Tensor]]] = []
    for shard, (page, blocks) in enumerate(zip(manager.layouts, manager.device_tensors[replica], strict=True)):
        layout, tensors = of_tables(dense(page, pages), manager.layer_tables), [blocks]
        for group in manager.further_groups[replica]:
            layout = with_states(layout, group.kinds(shard), group.num_pages + 1)
            tensors += group.tensors[shard]
        shards.append((layout, tensors))
    return shards
