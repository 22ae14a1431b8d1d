"""`TransferCompanion`: the scheduler's side of the connector workers, for a source and for a reader.

A scheduler tells it of requests, ships what `build_metadata` returns to every worker once a step, and hands back what
each worker's `take_output` returned. At a source a request goes through `offer`, then `params` once its lease stands,
and then is among the sent: its pages may go. At a reader: `read` what came, `load`, and it is among the received.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import zmq

from transfer.connector.config import GroupConfig, WorkerConfig, check_config, keyring_of
from transfer.connector.metadata import ConnectorMetadata, WorkerOutput, as_blocks
from transfer.connector.offers import Offers
from transfer.connector.pending_loads import PendingLoads
from transfer.connector.transfer_params import RemotePages, params_of, read_params
from transfer.errors import HandshakeError, InvalidLeaseError, InvalidTransferError
from transfer.wire.handshake import EngineCard, HandshakeServer
from transfer.wire.keys import Keyring

LEASE_SLOTS = 4096
"""Lease words of a rank, as `transfer.pull.lease.LeaseBook` makes them."""


class Progress(msgspec.Struct, kw_only=True):
    """What a scheduler learns from its workers' outputs. Each request is named once in each field.

    Attributes:
        offered: requests whose lease stands on every rank.
        sent: requests whose lease has ended on every rank, and how: "read", or why else. Their pages may go.
        received: requests whose load is over on every rank, well or not: their pages may be used, or go.
        failed: requests whose load failed, and why; among `received` now or later.
        block_ids_with_errors: blocks of theirs, of every group.
    """

    offered: set[str] = set()
    sent: dict[str, str] = {}
    received: set[str] = set()
    failed: dict[str, str] = {}
    block_ids_with_errors: set[int] = set()


class TransferCompanion:
    """Leases and loads of one engine, over all its ranks. For one thread.

    Args:
        config: of any of the ranks.
        host: name or address under which readers reach this process.
        bind: ZMQ endpoint of the handshake server; the loopback, and a free port, unless told otherwise.
        keyring: keys for the side channel; those of the config's shared secret, or plain sockets, where None.

    Raises:
        InvalidEngineError: a config that no engine can be made of.
    """

    def __init__(
        self,
        config: WorkerConfig,
        host: str = "127.0.0.1",
        bind: str = "tcp://127.0.0.1:0",
        keyring: Keyring | None = None,
    ) -> None:
        self.config = check_config(config)
        self._host = host
        self._bind = bind
        keyring = keyring_of(self.config, keyring)
        self._secure: Callable[[zmq.Socket[bytes]], None] | None = None if keyring is None else keyring.secure_server
        self._server: HandshakeServer | None = None
        self._metadata = ConnectorMetadata()
        self._offers = Offers(config.ranks, config.timing.lease, LEASE_SLOTS)
        self._loads = PendingLoads(config.groups, config.ranks)

    def set_handshake_metadata(self, ranks: Mapping[int, bytes], fingerprint: Mapping[str, str] | None = None) -> str:
        """Starts to answer for the engine. Returns the endpoint that readers are told.

        Args:
            ranks: of each rank, what its `get_handshake_metadata` returned.
            fingerprint: of the ranks' configs, where they know more than this one's; its own where None.

        Raises:
            HandshakeError: a rank is missing, or the endpoint is taken.
        """
        if sorted(ranks) != list(range(self.config.ranks)):
            raise HandshakeError(
                f"engine {self.config.engine_id!r}: metadata of ranks {sorted(ranks)[:16]}, it has {self.config.ranks}"
            )
        metadata = tuple(ranks[rank] for rank in range(self.config.ranks))
        agreed = self.config.fingerprint() if fingerprint is None else fingerprint
        card = EngineCard(self.config.engine_id, self.config.incarnation, metadata, agreed)
        if self._server is None:
            self._server = HandshakeServer([card], self._bind, self._secure)
        else:
            self._server.serve(card)
        return self.address

    @property
    def address(self) -> str:
        """Endpoint of the handshake, as readers are told.

        Raises:
            HandshakeError: there is none yet.
        """
        if self._server is None:
            raise HandshakeError(f"engine {self.config.engine_id!r}: the metadata of its ranks is not known yet")
        return f"tcp://{self._host}:{self._server.endpoint.rpartition(':')[2]}"

    def offer(
        self,
        request_id: str,
        *,
        running: bool = False,
        engines: int = 1,
        block_ids: Sequence[Sequence[int]] = (),
    ) -> None:
        """Asks every rank for a lease over a request's pages. The caller holds them until it is among the sent.

        Args:
            request_id: the request.
            running: it is still computed; no time runs until `computed`. Its full blocks may be read meanwhile.
            engines: reading engines that must have ended before the lease does.
            block_ids: for each group its blocks, where page checks are made.

        Raises:
            InvalidLeaseError: it has a lease, or no slot is free.
        """
        self._offers.begin(self._metadata, request_id, running=running, engines=engines, block_ids=as_blocks(block_ids))

    def computed(self, request_id: str) -> None:
        """Says that all pages of a request are written: from now on the time of its lease runs."""
        self._metadata.reqs_computed.append(request_id)

    def is_offered(self, request_id: str) -> bool:
        """Whether a request's lease stands on every rank."""
        return self._offers.standing(request_id) is not None

    def params(
        self,
        request_id: str,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        first_blocks: Sequence[int] = (),
        total_tokens: int = 0,
        granted: bool = True,
    ) -> dict[str, Any]:
        """Returns `kv_transfer_params` for the reader of a request whose lease stands.

        Blocks that no sliding window reaches are left out.

        Args:
            request_id: the request.
            block_ids: for each group its blocks; more than the tokens fill are left out. Of a state the last one.
            num_tokens: tokens whose pages are written.
            first_blocks: for each group, which block of the request the first of them is; 0 for all where empty.
            total_tokens: tokens that will be computed; `num_tokens` where 0. Where it is more, further params follow.
            granted: every rank must have said that the lease stands. A scheduler that has to answer in the step in
                which the workers were told of it leaves this out: a reader that is quicker than a worker is refused.

        Raises:
            InvalidLeaseError: the lease does not stand on every rank, or not any more.
            InvalidTransferError: too few blocks for the tokens, or blocks of another number of groups.
        """
        lease = self._offers.standing(request_id) if granted else self._offers.promised(request_id)
        if lease is None:
            raise InvalidLeaseError(
                f"request {request_id!r}: no lease of it stands: {self._offers.missing(request_id)}"
            )
        groups, total = self.config.groups, max(total_tokens, num_tokens)
        firsts = tuple(first_blocks) or (0,) * len(groups)
        if len(block_ids) != len(groups) or len(firsts) != len(groups):
            raise InvalidTransferError(
                f"request {request_id!r}: blocks of {len(block_ids)} groups, there are {len(groups)}"
            )
        kept = [
            _kept(f"request {request_id!r}: group {number}", group, blocks, first, num_tokens, total)
            for number, (group, blocks, first) in enumerate(zip(groups, block_ids, firsts, strict=True))
        ]
        pages = RemotePages(
            engine_id=self.config.engine_id,
            request_id=request_id,
            address=self.address,
            incarnation=self.config.incarnation,
            ranks=self.config.ranks,
            lease=lease,
            block_ids=as_blocks(kept),
            num_tokens=num_tokens,
            total_tokens=total,
        )
        return params_of(pages, self.config.tp_size, self.config.pp_size)

    def abort(self, request_id: str, reason: str) -> bool:
        """Ends a request's lease, whoever reads. Whether it has one: its pages may go once it is among the sent."""
        return self._offers.end(self._metadata, request_id, reason)

    def read(self, request_id: str, params: object) -> RemotePages | None:
        """Returns what `kv_transfer_params` from outside say; None where they ask for no pages from elsewhere.

        Raises:
            TransferParamsError: (a ValueError) names the request, the key, its value, and what may be there.
        """
        return read_params(request_id, params, len(self.config.groups))

    def external_tokens(self, request_id: str, pages: RemotePages, num_tokens: int, num_computed_tokens: int) -> int:
        """Returns how many tokens a load would bring, beyond those that are here.

        A prompt may be longer than what the source has computed, or shorter.

        Args:
            request_id: the request.
            pages: of `read`.
            num_tokens: of the request.
            num_computed_tokens: tokens that are here.

        Raises:
            TransferParamsError: the source's pages are of no use.
        """
        return max(0, self._loads.check(request_id, pages, num_tokens) - num_computed_tokens)

    def hold(self, request_id: str, pages: RemotePages) -> None:
        """Tells a source that a request waits for its pages, which has no blocks yet: the lease is renewed until then.

        The time of the load runs from now on. `load` goes on with it; `cancel` gives it up, and the source is told.

        Raises:
            InvalidTransferError: the request has a load that is not over.
        """
        self._loads.hold(self._metadata, request_id, pages)

    def load(
        self,
        request_id: str,
        pages: RemotePages,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        num_computed_tokens: int,
        *,
        first_blocks: Sequence[int] = (),
    ) -> None:
        """Has every rank read the pages of a request. Where nothing is missing, the source is told, and that is all.

        A request whose source is held (`hold`) is among the received afterwards even if nothing was missing.

        Args:
            request_id: the request.
            pages: of `read`.
            block_ids: for each group our blocks to read into, for all that is to come. Of a state the last one.
            num_tokens: of the request.
            num_computed_tokens: tokens that are here.
            first_blocks: for each group, which block of the request the first of them is; where empty, the one that
                holds the first token that is missing.

        Raises:
            InvalidTransferError: the request has a load that is not over, or blocks of another number of groups.
            TransferParamsError: the source's pages are of no use.
        """
        limit = self._loads.check(request_id, pages, num_tokens)
        firsts = tuple(first_blocks) or tuple(num_computed_tokens // group.block_size for group in self.config.groups)
        self._loads.begin(self._metadata, request_id, pages, as_blocks(block_ids), firsts, num_computed_tokens, limit)

    def load_more(self, request_id: str, params: object) -> None:
        """Goes on with a load whose source has computed further blocks. Nothing happens where the load is over.

        Raises:
            TransferParamsError: as `read`; or they are of another source or lease.
        """
        pages = self.read(request_id, params)
        if pages is not None:
            self._loads.more(self._metadata, request_id, pages)

    def cancel(self, request_id: str, reason: str) -> bool:
        """Gives a load up. Whether there is one: its pages may go once the request is among the received."""
        return self._loads.cancel(self._metadata, request_id, reason)

    def save(self, request_id: str, block_ids: Sequence[Sequence[int]]) -> None:
        """Has every rank copy blocks of a request to its host buffers, if any, before they are told of in `params`."""
        self._metadata.reqs_to_save[request_id] = as_blocks(block_ids)

    def build_metadata(self) -> ConnectorMetadata:
        """Returns a step's work for the workers, the same for all, and begins the next step's."""
        metadata, self._metadata = self._metadata, ConnectorMetadata()
        return metadata

    def update(self, rank: int, output: WorkerOutput) -> Progress:
        """Books what a worker told, and returns what that makes known.

        Raises:
            InvalidTransferError: the engine has no such rank.
        """
        if not 0 <= rank < self.config.ranks:
            raise InvalidTransferError(f"output of rank {rank}, there are 0 to {self.config.ranks - 1}")
        progress = Progress()
        for request_id, error in output.offered.items():
            over = self._offers.on_offered(self._metadata, rank, request_id, error)
            if over is not None:
                progress.sent[request_id] = over
            elif self.is_offered(request_id):
                progress.offered.add(request_id)
        for request_id, reason in output.sent.items():
            over = self._offers.on_sent(rank, request_id, reason)
            if over is not None:
                progress.sent[request_id] = over
        for request_id, reason in output.failed.items():
            if self._loads.on_failed(self._metadata, request_id, reason):
                progress.failed[request_id] = reason
                progress.block_ids_with_errors |= output.block_ids_with_errors
        progress.received |= {request_id for request_id in output.received if self._loads.on_received(rank, request_id)}
        return progress

    def close(self) -> None:
        """Ends the handshake server. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def _kept(where: str, group: GroupConfig, blocks: Sequence[int], first: int, num_tokens: int, total: int) -> list[int]:
    """The blocks that a reader can need, the last of which holds the last token."""
    if group.is_state:
        return list(blocks[-1:])
    end = -(-num_tokens // group.block_size)
    if first + len(blocks) < end or first < 0:
        raise InvalidTransferError(
            f"{where}: blocks {first} to {first + len(blocks)}, {num_tokens} tokens fill {end} of {group.block_size}"
        )
    # One more than this side's window needs: the reader's may begin earlier where it wants fewer tokens.
    start = max(first, group.needed(total) // group.block_size - 1)
    return list(blocks[min(start, end) - first : end - first])
