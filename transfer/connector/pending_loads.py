"""The reader's side of a scheduler: what every rank loads for a request, and when all of them are done with it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from transfer.connector.config import GroupConfig
from transfer.connector.metadata import ConnectorMetadata, LoadRequest
from transfer.connector.transfer_params import RemotePages
from transfer.errors import InvalidTransferError, TransferParamsError


@dataclass(slots=True, eq=False)
class Pending:
    """One request's load.

    Attributes:
        source: what its params said first.
        blocks: for each group, our blocks.
        first_blocks: for each group, which block of the request the first of them is.
        limit: tokens that are wanted at most.
        asked: tokens that have been asked for, or were here already.
        received: ranks that are done with it.
        failed: a rank has failed.
        held: there are no blocks yet.
    """

    source: RemotePages
    blocks: tuple[tuple[int, ...], ...]
    first_blocks: tuple[int, ...]
    limit: int
    asked: int
    received: set[int] = field(default_factory=set[int])
    failed: bool = False
    held: bool = False


class PendingLoads:
    """Loads by request. One is over when every rank has said so, and has failed when one rank has.

    Args:
        groups: of the model.
        ranks: of the engine.
    """

    def __init__(self, groups: Sequence[GroupConfig], ranks: int) -> None:
        self._groups = groups
        self._ranks = ranks
        self._by_request: dict[str, Pending] = {}
        # A chunk that is not the last ends with a block of every group: no two READs may write to one page.
        self._chunk = math.lcm(*(group.block_size for group in groups if not group.is_state))

    def __len__(self) -> int:
        return len(self._by_request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_request

    def check(self, request_id: str, source: RemotePages, num_tokens: int) -> int:
        """Returns up to which token a source's pages are of use to a request.

        Raises:
            TransferParamsError: the source's recurrent state is that after more tokens than the request has.
        """
        if any(group.is_state for group in self._groups) and source.total_tokens > num_tokens:
            raise TransferParamsError(
                f"request {request_id!r}: kv_transfer_params['remote_total_tokens'] is {source.total_tokens}: a state "
                f"after more tokens than the {num_tokens} of the request is of no use"
            )
        return min(source.total_tokens, num_tokens)

    def hold(self, metadata: ConnectorMetadata, request_id: str, source: RemotePages) -> None:
        """Has every rank tell a source that its pages are waited for. `begin` says where they are to go.

        Raises:
            InvalidTransferError: the request has a load.
        """
        if request_id in self._by_request:
            raise InvalidTransferError(f"request {request_id!r}: its load has not ended on every rank yet")
        nothing: tuple[tuple[int, ...], ...] = ((),) * len(self._groups)
        pending = Pending(source, nothing, (0,) * len(self._groups), source.total_tokens, 0, held=True)
        self._ask(metadata, request_id, pending, source, stop=0)
        self._by_request[request_id] = pending

    def begin(
        self,
        metadata: ConnectorMetadata,
        request_id: str,
        source: RemotePages,
        blocks: tuple[tuple[int, ...], ...],
        first_blocks: tuple[int, ...],
        num_computed_tokens: int,
        limit: int,
    ) -> None:
        """Asks every rank for what is missing of a request. Where nothing is, the source is told, and that is all.

        Raises:
            InvalidTransferError: the request has a load, or its source could not be held; or the blocks are not those
                of all groups.
        """
        held = self._by_request.get(request_id)
        if held is not None and (not held.held or held.failed):
            raise InvalidTransferError(f"request {request_id!r}: its load has not ended on every rank yet")
        if len(blocks) != len(self._groups) or len(first_blocks) != len(self._groups):
            raise InvalidTransferError(
                f"request {request_id!r}: blocks of {len(blocks)} groups, there are {len(self._groups)}"
            )
        pending = Pending(source, blocks, first_blocks, limit, num_computed_tokens)
        silent = num_computed_tokens >= min(source.total_tokens, limit)
        if metadata.reqs_to_recv.pop(request_id, None) is not None:
            held = None  # no rank has heard of it yet
        self._ask(metadata, request_id, pending, source)
        self._by_request.pop(request_id, None)
        if not silent or held is not None:
            pending.received = set() if held is None else held.received
            self._by_request[request_id] = pending

    def more(self, metadata: ConnectorMetadata, request_id: str, source: RemotePages) -> None:
        """Asks for the further blocks that a source has computed. Nothing happens where the load is over or has failed.

        Raises:
            TransferParamsError: they are not of the source and the lease that the load began with.
        """
        pending = self._by_request.get(request_id)
        if pending is None or pending.failed:
            return
        first = pending.source
        for key, ours, theirs in (
            ("remote_engine_id", first.engine_id, source.engine_id),
            ("lease_id", first.lease, source.lease),
            ("remote_total_tokens", first.total_tokens, source.total_tokens),
        ):
            if ours != theirs:
                raise TransferParamsError(
                    f"request {request_id!r}: kv_transfer_params[{key!r}] is {theirs}, the load began with {ours}"
                )
        before, queued = pending.asked, metadata.reqs_to_recv.pop(request_id, None)
        if queued is not None:  # what no rank has heard of yet grows, instead of being followed by more
            pending.asked = queued.num_computed_tokens
        self._ask(metadata, request_id, pending, source)
        if queued is None and pending.asked == before and request_id in metadata.reqs_to_recv:
            del metadata.reqs_to_recv[request_id]  # no block is full yet

    def _ask(
        self,
        metadata: ConnectorMetadata,
        request_id: str,
        pending: Pending,
        source: RemotePages,
        stop: int | None = None,
    ) -> None:
        total = min(source.total_tokens, pending.limit)
        stop = min(source.num_tokens, total) if stop is None else stop
        if stop < total:
            stop = max(stop // self._chunk * self._chunk, pending.asked)
        metadata.reqs_to_recv[request_id] = LoadRequest(
            address=source.address,
            engine_id=source.engine_id,
            incarnation=source.incarnation,
            ranks=source.ranks,
            lease=source.lease,
            local_block_ids=pending.blocks,
            first_blocks=pending.first_blocks,
            remote_block_ids=source.block_ids,
            num_computed_tokens=min(pending.asked, total),
            num_tokens=min(max(stop, pending.asked), total),
            remote_num_tokens=source.num_tokens,
            total_tokens=total,
        )
        pending.asked = max(stop, pending.asked)

    def cancel(self, metadata: ConnectorMetadata, request_id: str, reason: str) -> bool:
        """Gives a load up on every rank. Whether there is one: its blocks are safe when all ranks have said so."""
        if request_id not in self._by_request:
            return False
        metadata.reqs_to_cancel[request_id] = reason
        return True

    def on_received(self, rank: int, request_id: str) -> bool:
        """Books that a rank is done with a load. Whether all of them are."""
        if (pending := self._by_request.get(request_id)) is None:
            return False
        pending.received.add(rank)
        if len(pending.received) < self._ranks:
            return False
        del self._by_request[request_id]
        return True

    def on_failed(self, metadata: ConnectorMetadata, request_id: str, reason: str) -> bool:
        """Books that a rank's load has failed, and has the other ranks give it up. Whether it is the first to."""
        pending = self._by_request.get(request_id)
        if pending is None or pending.failed:
            return False
        pending.failed = True
        metadata.reqs_to_cancel[request_id] = reason
        metadata.reqs_to_recv.pop(request_id, None)
        return True
