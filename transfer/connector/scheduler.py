"""`NixlConnectorScheduler`: the scheduler's side of the connector workers, for a source and for a reader.

A scheduler tells it of requests, ships what `build_metadata` returns to every worker once a step, and hands back what
each worker's `take_output` returned. At a source a request goes through `offer`, then `params` once its lease stands,
and then is among the sent: its pages may go. At a reader: `read` what came, `load`, and it is among the received.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transfer.connector.config import GroupConfig, WorkerConfig, check_config
from transfer.connector.metadata import ConnectorMetadata, LoadRequest, Progress, SendRequest, WorkerOutput, as_blocks
from transfer.connector.offer import Held, Offer
from transfer.connector.transfer_params import TransferParams, params_of, pointer_in, read_params
from transfer.errors import HandshakeError, InvalidLeaseError, InvalidTransferError, TransferParamsError
from transfer.pull.lease import LEASE_SLOTS, LeaseSlots
from transfer.wire.handshake import EngineCard, HandshakeServer
from transfer.wire.keys import Keyring
from transfer.wire.messages import LeaseQuery, LeaseReply, Wanted
from transfer.wire.prompt import Prompt
from transfer.wire.secret import fleet_keys

_LARGEST_BLOCK = 4096
"""Tokens. A reader's blocks of a window begin before the window does, by up to a block of its own: a source names its
blocks from there on, as far as it has them, for readers with blocks of up to this size."""


@dataclass(slots=True, eq=False)
class _Load:
    """The load of one request: what was asked of every rank, which ranks are done, and whether one has failed."""

    asked: LoadRequest
    received: set[int] = field(default_factory=set[int])
    failed: bool = False
    unwritten: dict[int, int] = field(default_factory=dict[int, int])  # as in `Progress`, of the ranks that are done


class NixlConnectorScheduler:
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
        self._key, self._keyring = fleet_keys(f"engine {config.engine_id!r}", config.secret, config.key, keyring)
        self._server: HandshakeServer | None = None
        self._metadata = ConnectorMetadata()
        self._slots = LeaseSlots()
        self._offers: dict[str, Offer] = {}
        self._by_lease: dict[int, Offer] = {}
        self._loads: dict[str, _Load] = {}

    def set_handshake_metadata(self, ranks: Mapping[int, bytes], fingerprint: Mapping[str, str] | None = None) -> str:
        """Starts to answer for the engine. Returns the endpoint that readers are told.

        Args:
            ranks: of each rank, what its `get_handshake_metadata` returned.
            fingerprint: of the ranks' configs, if they know more than this one's; None: its own.

        Raises:
            HandshakeError: a rank is missing, or the endpoint is taken.
        """
        if sorted(ranks) != list(range(self.config.ranks)):
            raise HandshakeError(
                f"engine {self.config.engine_id!r}: metadata of ranks {sorted(ranks)[:16]}, it has {self.config.ranks}"
            )
        metadata = tuple(ranks[rank] for rank in range(self.config.ranks))
        agreed = self.config.fingerprint() if fingerprint is None else fingerprint
        card = EngineCard(self.config.engine_id, self.config.incarnation, metadata, agreed, self._leased)
        if self._server is None:
            secure = None if self._keyring is None else self._keyring.secure_server
            self._server = HandshakeServer([card], self._bind, secure)
        else:
            self._server.serve(card)
        return self.address

    @property
    def address(self) -> str:
        """Endpoint of the handshake, as readers are told.

        Raises:
            HandshakeError: there is none yet.
        """
        return f"tcp://{self._host}:{self._port}"

    @property
    def _port(self) -> int:
        if self._server is None:
            raise HandshakeError(f"engine {self.config.engine_id!r}: the metadata of its ranks is not known yet")
        return int(self._server.endpoint.rpartition(":")[2])

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
            running: it is still computed; no time runs until `computed`.
            engines: reading engines that must have ended before the lease does.
            block_ids: for each group its blocks, where page checks are made.

        Raises:
            InvalidLeaseError: it has a lease, or no slot is free.
        """
        if request_id in self._offers:
            raise InvalidLeaseError(f"request {request_id!r}: its lease has not ended on every rank yet")
        lease = self._slots.take(self.config.timing.lease)
        if lease is None:
            raise InvalidLeaseError(f"request {request_id!r}: all {LEASE_SLOTS} lease slots are taken")
        offer = Offer(lease, self.config.ranks)
        self._offers[request_id] = self._by_lease[lease.lease_id] = offer
        self._metadata.reqs_to_send[request_id] = SendRequest(
            lease=lease, engines=engines, running=running, block_ids=as_blocks(block_ids)
        )

    def computed(self, request_id: str) -> None:
        """Says that all pages of a request are written: from now on the time of its lease runs."""
        self._metadata.reqs_computed.append(request_id)

    def is_offered(self, request_id: str) -> bool:
        """Whether a request's lease stands on every rank."""
        offer = self._offers.get(request_id)
        return offer is not None and not offer.missing

    def _leased(self, query: LeaseQuery) -> LeaseReply:
        """What a lease holds, for a reader that asks. In the thread of the handshake's server."""
        offer = self._by_lease.get(query.lease_id)
        if offer is None:
            error = f"lease {query.lease_id:#018x} has ended, or engine {self.config.engine_id!r} never had it"
            return LeaseReply(query_id=query.query_id, error=error)
        return offer.answer(query, self.config, self._key)

    def params(
        self,
        request_id: str,
        prompt: Prompt,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        *,
        first_blocks: Sequence[int] = (),
    ) -> dict[str, Any]:
        """Returns `kv_transfer_params` for the reader of a request that has a lease, and records the lease's pages.

        The parameters are a pointer: a reader that asks for the lease with them is told of its pages, once the lease
        stands on every rank. Blocks of a sliding window that no reader's first block reaches are left out.

        Args:
            request_id: the request.
            prompt: its tokens, and anything else that its KV depends on.
            block_ids: for each group its blocks, none of which it has given back: a reader may read all of each. Blocks
                beyond those that the tokens fill are left out. For a state only the last one is used.
            num_tokens: tokens whose pages are written, or will be by the end of the current step.
            first_blocks: for each group, the index in the request of its first block; 0 for all if empty.

        Raises:
            InvalidLeaseError: it has no lease, or that has ended on a rank.
            InvalidTransferError: too few blocks or tokens, or blocks of another number of groups.
        """
        offer = self._offers.get(request_id)
        if offer is None or offer.ended:
            reason = "it has none" if offer is None else offer.ended
            raise InvalidLeaseError(f"request {request_id!r}: no lease of it stands: {reason}")
        groups = self.config.groups
        firsts = tuple(first_blocks) or (0,) * len(groups)
        if len(block_ids) != len(groups) or len(firsts) != len(groups):
            raise InvalidTransferError(
                f"request {request_id!r}: blocks of {len(block_ids)} groups, there are {len(groups)}"
            )
        if len(prompt.token_ids) < num_tokens:
            raise InvalidTransferError(
                f"request {request_id!r}: a prompt of {len(prompt.token_ids)} tokens, the pages of {num_tokens}"
            )
        kept = [
            _kept(f"request {request_id!r}: group {number}", group, blocks, first, num_tokens)
            for number, (group, blocks, first) in enumerate(zip(groups, block_ids, firsts, strict=True))
        ]
        offer.held = Held(prompt, num_tokens, as_blocks(kept))
        params = TransferParams(
            engine_id=self.config.engine_id,
            request_id=request_id,
            host=self._host,
            port=self._port,
            lease_id=f"{offer.lease.lease_id:#018x}",
            num_tokens=num_tokens,
        )
        return params_of(params)

    def abort(self, request_id: str, reason: str) -> bool:
        """Ends a request's lease even if it is read; False if it has none. Its pages may go once it is in `sent`."""
        if (offer := self._offers.get(request_id)) is not None:
            offer.aborted = True
            self._metadata.reqs_not_processed[request_id] = reason
        return offer is not None

    def read(self, request_id: str, params: object, prompt: Prompt) -> Wanted | None:
        """Returns the source that a request's `kv_transfer_params` name; None if they ask for no pages.

        Args:
            request_id: the request.
            params: from outside.
            prompt: of the request: the pages must be those of its tokens. It may have more than the source has
                computed, or fewer.

        Raises:
            TransferParamsError: (a ValueError) names the request, the key, its value, and what may be there.
        """
        found, count = read_params(request_id, params), len(prompt.token_ids)
        if found is not None and found.num_tokens > count and any(group.is_state for group in self.config.groups):
            raise TransferParamsError(
                f"request {request_id!r}: kv_transfer_params['remote_num_tokens'] is {found.num_tokens}: a state after "
                f"more tokens than the {count} of the request is of no use"
            )
        return None if found is None else found.wanted(prompt)

    def give_back(self, params: object, reason: str) -> None:
        """Has a source told that nothing is read under the lease that a request's params name, if they name one.

        For a request that takes no load: its params are wrong, or its name is that of another load.
        """
        if (wanted := pointer_in(params)) is not None:
            self._metadata.to_give_back.append((wanted, reason))

    def hold(self, request_id: str, wanted: Wanted) -> None:
        """Tells a source that a request waits for its pages, which has no blocks yet: the lease is renewed until then.

        The time of the load runs from now on. `load` goes on with it; `cancel` gives it up, and the source is told.

        Raises:
            InvalidTransferError: the request has a load that is not over.
        """
        if request_id in self._loads:
            raise InvalidTransferError(f"request {request_id!r}: its load has not ended on every rank yet")
        asked = LoadRequest(wanted=wanted)
        self._loads[request_id], self._metadata.reqs_to_recv[request_id] = _Load(asked), asked

    def load(
        self,
        request_id: str,
        wanted: Wanted,
        block_ids: Sequence[Sequence[int]],
        num_tokens: int,
        num_computed_tokens: int,
        *,
        first_blocks: Sequence[int] = (),
    ) -> None:
        """Has every rank read the pages of a request. If no page is missing, it only notifies the source.

        A request whose source is held (`hold`) is among the received afterwards even if no page was missing.

        Args:
            request_id: the request.
            wanted: the result of `read`.
            block_ids: for each group our blocks to read into, for all pages to come. For a state only the last one.
            num_tokens: the tokens of the request.
            num_computed_tokens: tokens that are already here.
            first_blocks: for each group, the index in the request of its first block; if empty, the block that holds
                the first missing token.

        Raises:
            InvalidTransferError: the request has a load that is not over, or blocks of another number of groups.
            TransferParamsError: the source's pages cannot be used.
        """
        missing = min(wanted.num_tokens, num_tokens) > num_computed_tokens
        groups, load = self.config.groups, self._loads.get(request_id)
        if load is not None and (load.asked.local_block_ids or load.failed):
            raise InvalidTransferError(f"request {request_id!r}: its load has not ended on every rank yet")
        firsts = tuple(first_blocks) or tuple(num_computed_tokens // group.block_size for group in groups)
        if len(block_ids) != len(groups) or len(firsts) != len(groups):
            raise InvalidTransferError(
                f"request {request_id!r}: blocks of {len(block_ids)} groups, there are {len(groups)}"
            )
        asked = LoadRequest(
            wanted=wanted,
            local_block_ids=as_blocks(block_ids),
            first_blocks=firsts,
            num_computed_tokens=num_computed_tokens,
            num_tokens=num_tokens,
        )
        if load is not None and request_id in self._metadata.reqs_to_recv:
            del self._loads[request_id]  # no rank has heard yet that its source is held
            load = None
        self._metadata.reqs_to_recv[request_id] = asked
        if load is not None:
            load.asked = asked
        elif missing:
            self._loads[request_id] = _Load(asked)

    def cancel(self, request_id: str, reason: str) -> bool:
        """Gives a load up. Whether there is one: its pages may go once the request is among the received."""
        if request_id in self._loads:
            self._metadata.reqs_to_cancel[request_id] = reason
        return request_id in self._loads

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
            if error:
                self.abort(request_id, "not granted by every rank")
                self._lease_over(rank, request_id, error, progress)
            elif (offer := self._offers.get(request_id)) is not None:
                offer.offered.add(rank)
                if self.is_offered(request_id):
                    progress.offered.add(request_id)
        for request_id, reason in output.sent.items():
            self._lease_over(rank, request_id, reason, progress)
        self._book_loads(rank, output, progress)
        return progress

    def _lease_over(self, rank: int, request_id: str, reason: str, progress: Progress) -> None:
        """The request's pages go when every rank's lease has ended."""
        if (offer := self._offers.get(request_id)) is None:
            return
        offer.over.add(rank)
        if offer.reason == "read":
            offer.reason = reason
        if len(offer.over) == self.config.ranks:
            del self._offers[request_id], self._by_lease[offer.lease.lease_id]
            self._slots.give_back(offer.lease)
            progress.sent[request_id] = offer.reason

    def _book_loads(self, rank: int, output: WorkerOutput, progress: Progress) -> None:
        """A load has failed when one rank's has, which the others give up then; it is over when every rank's is."""
        for request_id, reason in output.failed.items():
            load = self._loads.get(request_id)
            if load is not None and not load.failed:
                load.failed = True
                self._metadata.reqs_to_recv.pop(request_id, None)
                self._metadata.reqs_to_cancel[request_id] = reason
                progress.failed[request_id] = reason
                progress.block_ids_with_errors |= output.block_ids_with_errors
        for request_id in output.received:
            if (load := self._loads.get(request_id)) is not None:
                load.received.add(rank)
                for group, token in output.unwritten.get(request_id, {}).items():
                    load.unwritten[group] = max(token, load.unwritten.get(group, 0))
                if len(load.received) == self.config.ranks:
                    del self._loads[request_id]
                    progress.received.add(request_id)
                    if load.unwritten and not load.failed:
                        progress.unwritten[request_id] = load.unwritten

    def close(self) -> None:
        """Ends the handshake server. Safe to call twice."""
        server, self._server = self._server, None
        if server is not None:
            server.close()


def _kept(where: str, group: GroupConfig, blocks: Sequence[int], first: int, num_tokens: int) -> list[int]:
    """The blocks that a reader can need, the last of which holds the last token."""
    if group.is_state:
        return list(blocks[-1:])
    end = -(-num_tokens // group.block_size)
    if first + len(blocks) < end or first < 0:
        raise InvalidTransferError(
            f"{where}: blocks {first} to {first + len(blocks)}, {num_tokens} tokens fill {end} of {group.block_size}"
        )
    start = max(first, (group.needed(num_tokens) - _LARGEST_BLOCK) // group.block_size)
    return list(blocks[min(start, end) - first : end - first])
