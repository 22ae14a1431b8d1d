"""The transfer engine: moves pages between the pools of two processes, and tracks each transfer until it ends.

A page belongs to a transfer until NIXL reports the transfer's end, even if the caller no longer waits for the transfer,
because NIXL cannot stop a copy. After a timeout, a failure or a `disconnect`, the engine parks the copies that are
still in flight, and polls them until they end. Until then `quarantined_pages` reports the local pages of these copies,
and the pages must not be used again.
"""

from __future__ import annotations

import itertools
import os
import secrets
import socket
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Self

import torch

from kvcache.uncopied import Uncopied
from transfer.engine.checks import check_replica, check_request, check_tensors, page_indices
from transfer.engine.metadata import WIRE_VERSION, KVTransferEngineMetadata, TransferReqData, sealed
from transfer.engine.peers import NotificationBook, Peers
from transfer.engine.postings import Posting, Postings, page_runs
from transfer.engine.tensor_agent import TensorAgent
from transfer.errors import (
    AgentError,
    EngineClosedError,
    InvalidTransferError,
    PeerFailedError,
    TransferFailedError,
    TransferIncompleteError,
    TransferTimeoutError,
    UnknownPeerError,
    UnknownTransferError,
)
from transfer.memory import MemoryType
from transfer.nixl.agent import Agent
from transfer.nixl.settings import agreed_settings

_FIRST_PAUSE_S = 20e-6  # in seconds: most small transfers end within this time
_LAST_PAUSE_S = 1e-3  # in seconds: a stuck transfer is polled every millisecond, which takes 2 % of a core


class KVTransferEngine(Uncopied):
    """Sends pages to other engines and reads pages from them. Both sides must `connect` to each other first.

    Either side may start a transfer: the source starts it as a WRITE, or the destination starts it as a READ. NIXL
    reports the end of the transfer to the side that started it. The other side gets one notification for each shard,
    after the shard's last byte. Nothing runs in the background: a peer's first READ, and every notification, wait until
    this side calls `poll`, `is_complete` or `sync_and_release`. Call `poll` every few milliseconds while peers may be
    active.

    One NIXL agent serves each (replica, shard). Not thread-safe: one thread owns the engine.

    Args:
        name: the name by which peers know the engine. A restarted engine may have the name of its predecessor.
        tensors: `[replica][tp_shard]`, all of one size, dtype and kind of device. Each tensor covers a dense range of
            memory, page after page, whatever the order of its dimensions. The memory stays registered until `cleanup`.
            It must stay mapped as long as any peer is alive, because a READ of unmapped memory breaks the connection,
            or delivers half a page.
        total_num_pages: pages of each tensor.

    Attributes:
        name, total_num_pages: as in the arguments.
        bytes_per_page: bytes per page of one tensor.
        dp, tp: number of replicas, and number of shards of a replica.
        memory_type: kind of memory that the tensors are in.
        metadata: the metadata of this engine with all its replicas, which a peer passes to `connect`.
        tensor_agents: the registered tensors with their NIXL agents, `[replica][tp_shard]`; empty after `cleanup`.

    Raises:
        InvalidEngineError: an argument is invalid, the tensors differ in size, dtype or kind of device, two of them
            share memory, or a tensor cannot be divided into dense pages.
        AgentError: NIXL cannot be used, or refuses the memory. Nothing stays registered.
    """

    def __init__(self, name: str, tensors: Sequence[Sequence[torch.Tensor]], *, total_num_pages: int) -> None:
        self._owner = os.getpid()
        self._here = f"engine {name!r}"
        self._peers, self._postings = Peers(name), Postings(name)
        self._suspects: set[str] = set()
        self._ids = itertools.count()
        self.tensor_agents: list[list[TensorAgent]] = []
        self.name = name
        self.memory_type: MemoryType = check_tensors(name, tensors, total_num_pages)
        self.total_num_pages = int(total_num_pages)
        self.dp, self.tp = len(tensors), len(tensors[0])
        self.bytes_per_page: int = tensors[0][0].nbytes // self.total_num_pages
        self._notifications = NotificationBook(self.tp)
        incarnation = uuid.uuid4().hex
        pages = self.total_num_pages, tensors[0][0].numel() // self.total_num_pages
        try:
            for replica, shards in enumerate(tensors):
                self.tensor_agents.append([])
                for shard, tensor in enumerate(shards):
                    agent = f"{name}/{replica}.{shard}@{incarnation}"
                    self.tensor_agents[-1].append(TensorAgent.create_agent(agent, 0, tensor, *pages, self.memory_type))
        except BaseException:
            self.cleanup()
            raise
        self.metadata: KVTransferEngineMetadata = sealed(
            KVTransferEngineMetadata(
                name=name,
                total_num_pages=self.total_num_pages,
                bytes_per_page=self.bytes_per_page,
                memory_type=self.memory_type,
                hostname=socket.gethostname(),
                agents_meta=[[agent.to_metadata() for agent in shards] for shards in self.tensor_agents],
                incarnation=incarnation,
                settings=agreed_settings(self.memory_type),
                version=WIRE_VERSION,
            )
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cleanup()

    def _check_open(self) -> None:
        if not self.tensor_agents:
            raise EngineClosedError(f"{self._here} was cleaned up")

    def _check_unmoved(self) -> None:
        for agent in itertools.chain.from_iterable(self.tensor_agents):
            agent.unmoved.check()

    @property
    def remote_connections(self) -> dict[str, KVTransferEngineMetadata]:
        """The metadata of each connected peer, by engine name. Dead peers stay here until `disconnect`."""
        return {name: peer.metadata for name, peer in self._peers.connected.items()}

    @property
    def remote_agent_to_engine(self) -> dict[str, str]:
        """The engine name for each agent name of a connected peer."""
        return {agent: name for agent, (name, _) in self._peers.sender.items()}

    @property
    def inflight_send_transfers(self) -> dict[str, TransferReqData]:
        """The request of each WRITE that this engine started and that has not been cleaned up, by transfer name."""
        return self._postings.requests(is_read=False)

    @property
    def inflight_read_transfers(self) -> dict[str, TransferReqData]:
        """The request of each READ that this engine started and that has not been cleaned up, by transfer name."""
        return self._postings.requests(is_read=True)

    @property
    def completed_recv_transfers(self) -> dict[str, dict[str, set[int]]]:
        """The shards whose copies have ended, `[engine name][transfer name]`, for each transfer that a peer started."""
        return self._notifications.completed

    @property
    def notification_counts(self) -> dict[str, int]:
        """Number of notifications by verdict: accepted, unknown, malformed, duplicate or late."""
        return dict(self._notifications.counts)

    @property
    def suspect_peers(self) -> frozenset[str]:
        """Peers with which a transfer timed out.

        A peer is removed when a transfer that this engine starts with it succeeds.
        """
        return frozenset(self._suspects)

    @property
    def failed_peers(self) -> dict[str, str]:
        """The connected peers that are known to be dead, with the reason. Such a peer can only be disconnected."""
        return {name: str(peer.failure) for name, peer in self._peers.connected.items() if peer.failure is not None}

    def connect(self, remote: KVTransferEngineMetadata) -> None:
        """Connects to another engine with all its replicas. Its numbers of replicas and pages may differ from ours.

        `remote` is the other engine's `metadata`. It must come from a trusted origin, because NIXL's own bytes in it
        cannot be checked. If it comes over a network, give `encode` and `decode_metadata` a key, or use
        `NixlConnectorWorker`.

        A name stays connected until `disconnect`, even if its engine has died and a new incarnation wants to connect.
        Only the caller can decide what becomes of the transfers with the old incarnation.

        Raises:
            AlreadyConnectedError: an engine of this name is connected, or copies over its previous connection are still
                in flight.
            SettingsMismatchError: the peer runs with other UCX settings or another version of NIXL.
            MetadataError: the metadata is damaged, or its pages, shards or host do not fit ours.
            AgentError: NIXL refuses the peer. No part of it stays loaded.
        """
        self.poll()
        self._notifications.connect(self._peers.connect(self.metadata, self.tensor_agents, remote))

    def disconnect(self, name: str) -> None:
        """Forgets a peer. Unfinished transfers with it fail; `poll` tracks their copies in flight until they end.

        This does not stop copies that the peer has started. If this engine has given up such a transfer, the local
        pages of the transfer stay in quarantine until `release_quarantine`.

        Raises:
            UnknownPeerError: no engine of this name is connected.
        """
        self._check_open()
        self._postings.disconnect(self._peers.disconnect(name))
        self._notifications.disconnect(name)
        self._suspects.discard(name)
        self.poll()

    def initiate_send_transfer(
        self,
        remote_metadata: KVTransferEngineMetadata,
        src_idxs: Sequence[int],
        dst_idxs: Sequence[int],
        src_replica_idx: int,
        dst_replica_idx: int,
    ) -> TransferReqData:
        """Starts to write local pages into pages of a peer, the same pages in every shard. Returns at once.

        Args:
            remote_metadata: the metadata with which the peer was connected.
            src_idxs: local pages, in any order.
            dst_idxs: pages of the peer, one for each of `src_idxs`, no page twice.
            src_replica_idx: the local replica.
            dst_replica_idx: the peer's replica.

        Returns:
            The request, which identifies the transfer on both sides. Send it to the peer.

        Raises:
            InvalidTransferError: a page or replica does not exist, the numbers of source and destination pages differ,
                a destination page is named twice, or a local page is in quarantine.
            MovedMemoryError: torch has moved a tensor of this engine.
            UnknownPeerError: no engine of this name is connected, or only another incarnation of it is.
            PeerFailedError: the peer is gone.
            TransferFailedError: NIXL refused a shard. The shards started before it are parked, and the transfer never
                completes.
        """
        return self._initiate(False, remote_metadata, (src_idxs, dst_idxs), (src_replica_idx, dst_replica_idx))

    def initiate_read_transfer(
        self,
        remote_metadata: KVTransferEngineMetadata,
        src_idxs: Sequence[int],
        dst_idxs: Sequence[int],
        src_replica_idx: int,
        dst_replica_idx: int,
    ) -> TransferReqData:
        """Starts to read the pages `src_idxs` of a peer's replica into local pages. Returns at once.

        The peer is notified when its pages have been read. Returns and raises as `initiate_send_transfer` does.
        """
        return self._initiate(True, remote_metadata, (src_idxs, dst_idxs), (src_replica_idx, dst_replica_idx))

    def _initiate(
        self,
        is_read: bool,
        remote: KVTransferEngineMetadata,
        pages: tuple[Sequence[int], Sequence[int]],
        replicas: tuple[int, int],
    ) -> TransferReqData:
        self._check_open()
        self._check_unmoved()
        connection = self._peers.connection(remote)
        mine, theirs = self.metadata, connection.metadata
        source, destination = (theirs, mine) if is_read else (mine, theirs)
        pair = f"transfer from {source.name!r} to {destination.name!r}"
        check_replica(f"{pair}: src_replica_idx", replicas[0], len(source.agents_meta))
        check_replica(f"{pair}: dst_replica_idx", replicas[1], len(destination.agents_meta))
        src = page_indices(f"{pair}: src_idxs", pages[0], source.total_num_pages)
        dst = page_indices(f"{pair}: dst_idxs", pages[1], destination.total_num_pages)
        runs = page_runs(pair, src, dst, self.bytes_per_page)
        request = TransferReqData(
            dst_name=destination.name,
            src_name=source.name,
            transfer_name=secrets.token_hex(16),
            transfer_ids=[next(self._ids) for _ in range(self.tp)],
            src_idxs=src.tolist(),
            dst_idxs=dst.tolist(),
            src_replica_idx=int(replicas[0]),
            dst_replica_idx=int(replicas[1]),
            is_read=is_read,
            version=WIRE_VERSION,
        )
        replica, ours = request.side_of(self.name)
        if held := self.quarantined_pages(replica).intersection(ours):
            raise InvalidTransferError(
                f"{pair}: pages {sorted(held)[:8]} of {self.name!r} are in quarantine, because an abandoned transfer "
                "may still write to them"
            )
        self._postings.start(Posting(request, connection), self.tensor_agents[replica], runs)
        return request

    def is_complete(self, transfer_req: TransferReqData) -> bool:
        """Returns whether a transfer has ended successfully, whichever side started it.

        The call also advances the transfer, and serves peers.

        Until it returns True, and after an error, the contents of the destination pages are undefined.

        Raises:
            TransferFailedError: NIXL ended the transfer with an error. Each later call raises this error again.
            PeerFailedError: the transfer failed because the peer is gone or was disconnected. Each later call raises
                this error again.
            UnknownTransferError: the transfer was cleaned up or given up.
            UnknownPeerError: the peer that started the transfer is not connected, so no notification can come.
            InvalidTransferError: the request does not belong to this engine.
            MovedMemoryError: torch has moved a tensor of this engine, so what arrived may be missing.
        """
        is_ours = self._is_ours(transfer_req)
        self._check_unmoved()
        if not is_ours:
            return self._has_arrived(transfer_req)
        posting = self._postings.get(transfer_req.transfer_name)
        if not self._postings.is_done(posting):
            self._drain(transfer_req.side_of(self.name)[0])  # also serves the peers, which may be waiting for this side
            return False
        self._suspects.discard(posting.connection.metadata.name)
        return True

    def _is_ours(self, request: TransferReqData) -> bool:
        self._check_open()
        check_request(self._here, self.name, request, self.dp)
        return request.initiator == self.name

    def _has_arrived(self, request: TransferReqData) -> bool:
        self._drain(request.side_of(self.name)[0])
        peer, name = request.initiator, request.transfer_name
        if self._notifications.is_complete(peer, name):
            return True
        if self._notifications.has_ended(name):
            raise UnknownTransferError(f"{self._here}: transfer {name} was cleaned up or given up")
        connection = self._peers.connected.get(peer)
        if connection is None:
            raise UnknownPeerError(f"{self._here} is not connected to engine {peer!r}, which started transfer {name}")
        if connection.failure is not None:
            raise PeerFailedError(
                f"{self._here}: transfer {name} cannot end, because peer {peer!r} was lost: {connection.failure}"
            )
        return False

    def poll(self) -> int:
        """Serves the peers' transfers, handles their notifications, and polls parked transfers.

        Returns the number of accepted notifications. Raises `AgentError` if NIXL fails.
        """
        self._check_open()
        accepted = sum(map(self._drain, range(self.dp)))
        self._peers.reap(self._postings.reap())
        return accepted

    def _drain(self, replica: int) -> int:
        before = self._notifications.counts["accepted"]
        for shard, ours in enumerate(self.tensor_agents[replica]):
            for sender, message in ours.agent.notifications():
                peer, of_shard = self._peers.sender.get(sender, (None, shard))
                self._notifications.accept(peer if of_shard == shard else None, shard, message)
        return self._notifications.counts["accepted"] - before

    def cleanup_transfer(self, transfer_req: TransferReqData) -> None:
        """Forgets a transfer that has ended or failed. Each side calls this for itself.

        Raises:
            TransferIncompleteError: the transfer has not ended; see `abandon_transfer`.
            TransferFailedError: this call has found that the transfer failed. The next call forgets the transfer.
            UnknownTransferError: the transfer was already cleaned up or given up.
        """
        ours, peer, name = self._is_ours(transfer_req), transfer_req.initiator, transfer_req.transfer_name
        if ours:
            if self._postings.get(name).failure is None and not self.is_complete(transfer_req):
                raise TransferIncompleteError(f"{self._here}: transfer {name} has not ended yet")
            del self._postings.started[name]
            return
        with suppress(PeerFailedError):  # a transfer of a dead peer will never end, so it may be forgotten
            if not self._has_arrived(transfer_req):
                raise TransferIncompleteError(f"{self._here}: transfer {name} of {peer!r} has not ended yet")
        self._notifications.end(peer, name)

    def abandon_transfer(self, transfer_req: TransferReqData) -> None:
        """Stops waiting for a transfer, in any state. This does not stop the copy: see `quarantined_pages`.

        Raises:
            UnknownTransferError: the transfer was already cleaned up or given up.
        """
        ours, name = self._is_ours(transfer_req), transfer_req.transfer_name
        if ours:
            self._postings.give_up(name)
            return
        page_indices(f"{self._here}: transfer {name}", transfer_req.side_of(self.name)[1], self.total_num_pages)
        # `_has_arrived` raises these errors if the peer is disconnected or lost. The peer's process may still write to
        # the pages. The transfer is therefore recorded as given up below, which keeps its pages in quarantine.
        with suppress(UnknownPeerError, PeerFailedError):
            if self._has_arrived(transfer_req):
                self._notifications.end(transfer_req.initiator, name)
                return
        self._notifications.given_up[name] = transfer_req

    def sync_and_release(self, transfer_req: TransferReqData, timeout_s: float = 30.0) -> None:
        """Waits until a transfer ends, while serving peers. Then forgets the transfer, even if it failed.

        Raises:
            TransferTimeoutError: the transfer did not end within `timeout_s` seconds. The transfer is given up, its
                local pages are in quarantine, and the peer is in `suspect_peers`.
            InvalidTransferError: `timeout_s` is negative or NaN. The method also raises the errors of `is_complete`.
        """
        if not timeout_s >= 0:  # the negation also refuses NaN
            raise InvalidTransferError(f"{self._here}: timeout_s is {timeout_s}: 0 or more is needed")
        check_request(self._here, self.name, transfer_req, self.dp)
        peer = transfer_req.dst_name if transfer_req.src_name == self.name else transfer_req.src_name
        deadline, pause = time.monotonic() + timeout_s, _FIRST_PAUSE_S
        try:
            while not self.is_complete(transfer_req):
                if time.monotonic() >= deadline:
                    self.abandon_transfer(transfer_req)
                    self._suspects.add(peer)
                    raise TransferTimeoutError(
                        f"{self._here}: transfer {transfer_req.transfer_name} with peer {peer!r} did not end within "
                        f"{timeout_s} s; its pages here are in quarantine until it has ended"
                    )
                self.poll()
                time.sleep(pause)
                pause = min(2 * pause, _LAST_PAUSE_S)
        except TransferFailedError:
            self.cleanup_transfer(transfer_req)
            raise
        self.cleanup_transfer(transfer_req)

    def quarantined_pages(self, replica_idx: int) -> frozenset[int]:
        """Returns the pages of one replica that a failed or given-up transfer may still read or write.

        If this engine started the transfer, its pages are released when NIXL reports the end to `poll`. If a peer
        started the transfer, its pages are released by the transfer's last notification, or by `release_quarantine`.
        `cleanup` releases all pages.
        """
        check_replica(f"{self._here}: replica_idx", replica_idx, self.dp)
        parked = [posting.request for posting in self._postings.parked.values()]
        requests = [*parked, *self._notifications.given_up.values()]
        sides = [request.side_of(self.name) for request in requests]
        return frozenset(page for replica, pages in sides if replica == replica_idx for page in pages)

    def release_quarantine(self, peer: str) -> None:
        """Releases the pages that are in quarantine because of transfers that `peer` started.

        Call this only if the peer's process is known to be gone, because a live peer may still write to the pages.
        """
        self._check_open()
        for name, request in list(self._notifications.given_up.items()):
            if request.initiator == peer:
                self._notifications.end(peer, name)

    def cleanup(self, drain_s: float = 2.0) -> None:
        """Releases everything from NIXL, and destroys the agents. Safe to call twice, and after a failed constructor.

        After this call, no byte moves for this engine. Transfers from and to it that peers have started fail. Transfers
        in flight get `drain_s` seconds to end, because a transfer that is cut off over TCP can crash the peer. In a
        forked child this call releases nothing and only forgets the engine.

        Raises:
            AgentError: NIXL failed to release something. Everything else was released.
        """
        ours, deadline = self._owner == os.getpid(), time.monotonic() + drain_s
        while ours and self._postings.moving() and time.monotonic() < deadline:
            with suppress(AgentError):
                self.poll()
            time.sleep(0.5e-3)
        busy = {agent for posting in self._postings.moving() for agent in posting.drop()} if ours else set[Agent]()
        agents, peers = (self.tensor_agents, self._peers) if ours else ([], Peers(self.name))
        self.tensor_agents, self._peers = [], Peers(self.name)
        self._postings, self._notifications = Postings(self.name), NotificationBook(0)
        peers.close()
        with ExitStack() as closing:  # closes every agent, even after an error, and raises the error at the end
            for made in itertools.chain.from_iterable(agents):
                closing.callback(made.agent.close, in_flight=made.agent in busy)
