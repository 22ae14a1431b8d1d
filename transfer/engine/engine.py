"""The transfer engine: moves pages between the pools of two processes, and knows when each transfer is over.

A page belongs to a transfer until NIXL has called it ended, whoever stopped waiting for it in between. NIXL cannot stop
a copy: what a time-out, a failure or a `disconnect` leaves in flight is parked, polled to its end, and its local pages
are reported by `quarantined_pages` until then. Nothing else tells when they may be used again.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import uuid
from typing import TYPE_CHECKING

from transfer.engine.checks import check_replica, check_tensors, page_indices, sorted_pairs
from transfer.engine.metadata import WIRE_VERSION, KVTransferEngineMetadata, TransferReqData, sealed
from transfer.engine.postings import Posting
from transfer.engine.tensor_agent import TensorAgent
from transfer.engine.transfers import TransferBook
from transfer.errors import AgentError, EngineClosedError, InvalidEngineError, InvalidTransferError
from transfer.memory import MemoryType
from transfer.nixl.settings import agreed_settings, fingerprint_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Self

    import torch


class KVTransferEngine:
    """Sends pages to other engines and reads pages from them. Both sides must `connect` to each other first.

    A WRITE is started by the source, a READ by the destination. The side that starts it hears of its end from NIXL, the
    other side from one notification per shard, which follows the last byte. Nothing runs in the background: a peer's
    first READ, and every notification, wait until this side calls `poll`, `is_complete` or `sync_and_release`. So call
    `poll` every few milliseconds while peers may be at work.

    One NIXL agent serves each (replica, shard). Not thread-safe: one thread owns the engine.

    Args:
        name: names the engine to its peers; a restarted engine may take its predecessor's.
        tensors: `[replica][tp_shard]`, all of one size, dtype and kind of device. Each covers a dense stretch of
            memory, page after page, whatever the order of its dimensions. It stays registered until `cleanup`, and must
            stay mapped while any peer lives: a READ of unmapped memory breaks the connection, or delivers half a page.
        total_num_pages: pages of each tensor.

    Attributes:
        name: as given.
        total_num_pages: as given.
        bytes_per_page: bytes of a page of one tensor.
        dp: number of replicas.
        tp: number of shards of a replica.
        memory_type: where the tensors live.
        metadata: what a peer's `connect` needs, for all replicas.
        tensor_agents: `[replica][tp_shard]`; empty after `cleanup`.

    Raises:
        InvalidEngineError: the tensors do not fit together, or are not pages.
        AgentError: NIXL cannot be used, or refuses the memory. Nothing stays registered.
    """

    def __init__(self, name: str, tensors: Sequence[Sequence[torch.Tensor]], *, total_num_pages: int) -> None:
        self._owner = os.getpid()
        self.tensor_agents: list[list[TensorAgent]] = []
        self._book: TransferBook | None = None
        if not isinstance(name, str) or not name:  # pyright: ignore[reportUnnecessaryIsInstance] -- callers may be untyped
            raise InvalidEngineError(f"an engine needs a name, got {name!r}")
        self.name = name
        self.memory_type: MemoryType = check_tensors(name, tensors, total_num_pages)
        self.total_num_pages = int(total_num_pages)
        self.dp, self.tp = len(tensors), len(tensors[0])
        self.bytes_per_page: int = tensors[0][0].nbytes // self.total_num_pages
        self._ids = itertools.count()
        incarnation = uuid.uuid4().hex
        pages = (self.total_num_pages, tensors[0][0].numel() // self.total_num_pages)
        try:
            for replica, shards in enumerate(tensors):
                self.tensor_agents.append([])
                for shard, tensor in enumerate(shards):
                    agent = f"{name}/{replica}.{shard}@{incarnation}"
                    self.tensor_agents[-1].append(TensorAgent.create_agent(agent, 0, tensor, *pages, self.memory_type))
        except BaseException:
            self.cleanup()
            raise
        self.metadata: KVTransferEngineMetadata = self._describe(incarnation)
        self._book = TransferBook(self.metadata, self.tensor_agents)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def _describe(self, incarnation: str) -> KVTransferEngineMetadata:
        settings = agreed_settings(self.memory_type)
        return sealed(
            KVTransferEngineMetadata(
                name=self.name,
                total_num_pages=self.total_num_pages,
                bytes_per_page=self.bytes_per_page,
                memory_type=self.memory_type,
                hostname=socket.gethostname(),
                agents_meta=[[agent.to_metadata() for agent in shards] for shards in self.tensor_agents],
                incarnation=incarnation,
                settings=settings,
                settings_fingerprint=fingerprint_of(settings),
                version=WIRE_VERSION,
            )
        )

    def _open(self) -> TransferBook:
        if self._book is None:
            raise EngineClosedError(f"engine {self.name!r} was cleaned up")
        return self._book

    @property
    def remote_connections(self) -> dict[str, KVTransferEngineMetadata]:
        """Engine name to metadata of each connected peer, dead ones included until `disconnect`."""
        return {name: peer.metadata for name, peer in self._book.peers.connected.items()} if self._book else {}

    @property
    def remote_agent_to_engine(self) -> dict[str, str]:
        """Agent name to engine name, of each agent of a connected peer."""
        return {agent: name for agent, (name, _) in self._book.peers.sender.items()} if self._book else {}

    @property
    def inflight_send_transfers(self) -> dict[str, TransferReqData]:
        """Transfer name to request of each WRITE that this engine started and that is not cleaned up."""
        return self._started(is_read=False)

    @property
    def inflight_read_transfers(self) -> dict[str, TransferReqData]:
        """Transfer name to request of each READ that this engine started and that is not cleaned up."""
        return self._started(is_read=True)

    def _started(self, *, is_read: bool) -> dict[str, TransferReqData]:
        requests = [posting.request for posting in self._book.postings.values()] if self._book else []
        return {request.transfer_name: request for request in requests if request.is_read is is_read}

    @property
    def completed_recv_transfers(self) -> dict[str, dict[str, set[int]]]:
        """Engine name to transfer name to the shards that have ended, of the transfers that peers started."""
        return self._book.notifications.completed if self._book else {}

    @property
    def notification_counts(self) -> dict[str, int]:
        """How many notifications were accepted, and how many dropped as unknown, malformed, duplicate or late."""
        return {str(verdict): count for verdict, count in self._open().notifications.counts.items()}

    @property
    def suspect_peers(self) -> frozenset[str]:
        """Peers with whom a transfer timed out, and none that we started has ended well since."""
        return frozenset(self._book.suspects) if self._book else frozenset()

    @property
    def failed_peers(self) -> dict[str, str]:
        """Engine name to reason of each connected peer that is known to be dead. Only `disconnect` is of use for it."""
        return self._book.peers.failed() if self._book else {}

    def connect(self, remote: KVTransferEngineMetadata) -> None:
        """Connects to an engine, with all its replicas. The number of replicas and of pages may differ from ours.

        Where the metadata comes from is the caller's responsibility: all around NIXL's own part of it is checked. Who
        takes metadata from a network gives `encode` and `decode_metadata` a key, or uses `NixlConnectorWorker`.

        A name that is connected stays so until `disconnect`, even when its engine has died and a new incarnation calls:
        only the caller knows what is to become of the transfers with the old one.

        Args:
            remote: the other engine's `metadata`. Everything in it is checked before NIXL sees any of it.

        Raises:
            AlreadyConnectedError: an engine of this name is connected, or its last connection has not drained yet.
            SettingsMismatchError: the peer runs with other UCX settings or another version of NIXL.
            MetadataError: the metadata is damaged, or of pages, shards or a host that do not go with ours.
            AgentError: NIXL refuses the peer. None of it stays loaded.
        """
        book = self._open()
        book.poll()
        book.notifications.connect(book.peers.connect(remote))

    def disconnect(self, name: str) -> None:
        """Forgets a peer. Transfers with it that have not ended fail; those in flight are drained by `poll`.

        It does not stop the peer: pages of a peer's own transfer that was given up here stay in quarantine until
        `release_quarantine`.

        Raises:
            UnknownPeerError: no engine of this name is connected.
        """
        self._open().disconnect(name)

    def initiate_send_transfer(
        self,
        remote_metadata: KVTransferEngineMetadata,
        src_idxs: Sequence[int],
        dst_idxs: Sequence[int],
        src_replica_idx: int,
        dst_replica_idx: int,
    ) -> TransferReqData:
        """Starts to write pages of ours into pages of a peer, the same pages in every shard. Returns at once.

        Args:
            remote_metadata: the peer's metadata, as it was connected.
            src_idxs: pages of ours, in any order.
            dst_idxs: pages of the peer, one for each of `src_idxs`, none twice.
            src_replica_idx: our replica.
            dst_replica_idx: the peer's replica.

        Returns:
            The request, by which both sides name the transfer. Send it to the peer.

        Raises:
            InvalidTransferError: a page, a replica or a length does not fit, or a page of ours is in quarantine.
            UnknownPeerError: no engine of this name, or not this incarnation of it, is connected.
            PeerFailedError: the peer is gone.
            TransferFailedError: NIXL refused a shard. Those started before it are parked; the transfer never completes.
        """
        return self._initiate(False, remote_metadata, src_idxs, dst_idxs, src_replica_idx, dst_replica_idx)

    def initiate_read_transfer(
        self,
        remote_metadata: KVTransferEngineMetadata,
        src_idxs: Sequence[int],
        dst_idxs: Sequence[int],
        src_replica_idx: int,
        dst_replica_idx: int,
    ) -> TransferReqData:
        """Starts to read pages of a peer, `src_idxs` of its `src_replica_idx`, into pages of ours. Returns at once.

        The peer is notified once its pages have been read. Returns and raises as `initiate_send_transfer` does.
        """
        return self._initiate(True, remote_metadata, src_idxs, dst_idxs, src_replica_idx, dst_replica_idx)

    def _initiate(
        self,
        is_read: bool,
        remote: KVTransferEngineMetadata,
        src_idxs: Sequence[int],
        dst_idxs: Sequence[int],
        src_replica_idx: int,
        dst_replica_idx: int,
    ) -> TransferReqData:
        book = self._open()
        connection = book.peers.connection(remote)
        mine, theirs = self.metadata, connection.metadata
        source, destination = (theirs, mine) if is_read else (mine, theirs)
        pair = f"transfer from {source.name!r} to {destination.name!r}"
        check_replica(f"{pair}: src_replica_idx", src_replica_idx, len(source.agents_meta))
        check_replica(f"{pair}: dst_replica_idx", dst_replica_idx, len(destination.agents_meta))
        src = page_indices(f"{pair}: src_idxs", src_idxs, source.total_num_pages)
        dst = page_indices(f"{pair}: dst_idxs", dst_idxs, destination.total_num_pages)
        sorted_src, sorted_dst = sorted_pairs(pair, src, dst)
        request = TransferReqData(
            dst_name=destination.name,
            src_name=source.name,
            transfer_name=secrets.token_hex(16),
            transfer_ids=[next(self._ids) for _ in range(self.tp)],
            src_idxs=src.tolist(),
            dst_idxs=dst.tolist(),
            src_replica_idx=int(src_replica_idx),
            dst_replica_idx=int(dst_replica_idx),
            is_read=is_read,
            version=WIRE_VERSION,
        )
        posting = Posting(request, connection)
        if held := book.quarantine.pages(posting.replica).intersection(posting.pages):
            raise InvalidTransferError(f"{pair}: pages {sorted(held)[:8]} of {self.name!r} are in quarantine")
        local, there = (sorted_dst, sorted_src) if is_read else (sorted_src, sorted_dst)
        book.start(posting, local, there)
        return request

    def is_complete(self, transfer_req: TransferReqData) -> bool:
        """Tells whether a transfer has ended well, whichever side started it. Also moves it on, and serves peers.

        Until it returns True, pages of the destination hold anything. After an error they do for ever.

        Raises:
            TransferFailedError: NIXL ended the transfer with an error. Each further call raises it again.
            PeerFailedError: as above, since the peer is gone or was disconnected.
            UnknownTransferError: it was cleaned up or given up.
            UnknownPeerError: the peer that started it is not connected, so that no notification can come.
            InvalidTransferError: the request is not of this engine.
        """
        return self._open().is_complete(transfer_req)

    def poll(self) -> int:
        """Serves the peers' transfers, books their notifications, and moves on what was given up.

        Returns:
            How many notifications were accepted.

        Raises:
            AgentError: NIXL fails.
        """
        return self._open().poll()

    def cleanup_transfer(self, transfer_req: TransferReqData) -> None:
        """Forgets a transfer that has ended or failed. Each side does so for itself.

        Raises:
            TransferIncompleteError: it has not ended; see `abandon_transfer`.
            TransferFailedError: it turns out just now to have failed. The next call forgets it.
            UnknownTransferError: it was cleaned up or given up before.
        """
        self._open().clean_up(transfer_req)

    def abandon_transfer(self, transfer_req: TransferReqData) -> None:
        """Stops waiting for a transfer, in any state. Nothing stops the copy: see `quarantined_pages`.

        Raises:
            UnknownTransferError: it was cleaned up or given up before.
            InvalidTransferError: the request is not of this engine.
        """
        self._open().give_up(transfer_req)

    def sync_and_release(self, transfer_req: TransferReqData, timeout_s: float = 30.0) -> None:
        """Waits for the end of a transfer, serves peers meanwhile, and forgets the transfer in every case.

        Raises:
            TransferTimeoutError: it did not end within `timeout_s` seconds. It is given up, its local pages are in
                quarantine, and the peer is among `suspect_peers`.
            TransferFailedError: as `is_complete` raises it, like the other errors there.
            InvalidTransferError: `timeout_s` is negative or no number, or the request is not of this engine.
        """
        self._open().wait(transfer_req, timeout_s)

    def quarantined_pages(self, replica_idx: int) -> frozenset[int]:
        """Returns the pages of one replica that a transfer which was given up or failed may still read or write.

        A transfer of ours lets go of its pages when NIXL says that it has ended, which `poll` asks. A peer's does when
        its last notification comes in, or at `release_quarantine`. `cleanup` ends them all.
        """
        check_replica(f"engine {self.name!r}: replica_idx", replica_idx, self.dp)
        return self._book.quarantine.pages(replica_idx) if self._book else frozenset()

    def release_quarantine(self, peer: str) -> None:
        """Lets go of the pages that transfers started by `peer` hold. Only where its process is known to be gone."""
        self._open().release_quarantine(peer)

    def cleanup(self, drain_s: float = 2.0) -> None:
        """Gives everything back to NIXL, and destroys its agents. Safe twice, and after a failed constructor.

        No byte moves for this engine when it returns. Peers' transfers from and to it fail. In a fork of its process
        the engine is only forgotten.

        Args:
            drain_s: seconds that transfers in flight are given to end. One that is cut off over TCP can crash the peer.

        Raises:
            AgentError: NIXL failed to give something back. All the rest was given back before this is raised.
        """
        book, agents = self._book, self.tensor_agents
        self._book, self.tensor_agents = None, []
        if self._owner != os.getpid():
            return
        busy = book.close(drain_s) if book else ()
        refused: list[AgentError] = []
        for made in itertools.chain.from_iterable(agents):
            made.pages = None  # a list keeps the agent that made it
            try:
                made.agent.close(in_flight=made.agent in busy)
            except AgentError as error:
                refused.append(error)
        if refused:
            raise refused[0]
