"""The records that one worker keeps for each request: its lease, its load, and the events to report."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from transfer.connector.config import GroupConfig, check_groups
from transfer.connector.metadata import ConnectorMetadata, LoadRequest, WorkerOutput
from transfer.errors import InvalidTransferError
from transfer.plan.page_lists import BlocksOfGroup, kernel_pages
from transfer.pull.pull_state import PullEvent
from transfer.pull.replica import LeaseOver, Offered

_NONE = BlocksOfGroup((), (0, 0), 0)


@dataclass(slots=True, eq=False)
class OpenLoad:
    """One load, from its first `LoadRequest` until it has ended."""

    request_id: str
    key: str  # key of the load's pull; no other load has the same key
    pages: list[list[int]]  # for each group, the pages that the load writes to
    # For each group, a pair: the first token in the group's blocks that this engine lacks, and the first token to be
    # read.
    begins: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    blocks: set[int] = field(default_factory=set[int])  # the blocks of all groups
    closed: bool = False  # whether the load has its blocks; before that, only the source's lease is renewed
    # True if no page has to be read: the load only tells the source that it is done, and reports no event
    silent: bool = True
    cancelled: bool = False  # whether the scheduler has cancelled the load
    error: str = ""


class WorkerBook:
    """The leases and loads of a worker, and the events to report about them.

    Only the thread that runs the model may use it.
    """

    def __init__(self, groups: Sequence[GroupConfig]) -> None:
        self.leases: dict[str, int] = {}  # for each request, the id of a lease that was requested and has not ended
        # The requests in `leases` whose lease the transfer thread has neither granted nor refused yet.
        self.ungranted: set[str] = set()
        # If True, every load must begin at the start of a page. Host buffers require this, because they are copied to
        # the device page by page.
        self.whole_pages = False
        self.output = WorkerOutput()
        self._groups = groups
        self._numbers = itertools.count()
        self._by_request: dict[str, OpenLoad] = {}
        self._by_key: dict[str, OpenLoad] = {}

    def lease(self, request_id: str, lease_id: int) -> None:
        """Records that a lease was requested from the transfer thread."""
        self.leases[request_id] = lease_id
        self.ungranted.add(request_id)

    def find(self, request_id: str) -> OpenLoad | None:
        """Returns the open load of a request, or None."""
        return self._by_request.get(request_id)

    def check_new(self, step: ConnectorMetadata) -> None:
        """Raises `InvalidTransferError` if a request in `step` still has an earlier lease or load.

        A load that waits for its blocks does not count, because `step` may name its blocks. A failed or cancelled load
        does not count either.
        """
        for request_id in step.reqs_to_send:
            if request_id in self.leases:
                raise InvalidTransferError(
                    f"request {request_id!r}: its lease {self.leases[request_id]:#x} has not ended yet"
                )
        for request_id in step.reqs_to_recv:
            load = self.find(request_id)
            if load is not None and load.closed and not load.cancelled and not load.error:
                raise InvalidTransferError(
                    f"request {request_id!r}: its load has not ended yet, and cannot be given more pages"
                )

    def begin(self, request_id: str) -> OpenLoad:
        """Records a new load of a request, and returns it."""
        load = OpenLoad(request_id, f"{request_id}#{next(self._numbers)}", [[] for _ in self._groups])
        self._by_request[request_id] = self._by_key[load.key] = load
        return load

    def ask(self, load: OpenLoad, asked: LoadRequest) -> list[BlocksOfGroup] | None:
        """Records the blocks of a load. Returns the tokens to read in each group; None if it has no blocks yet.

        Raises:
            InvalidTransferError: the blocks do not match the groups or the tokens.
        """
        if not asked.local_block_ids:
            load.silent = False
            return None
        load.closed = True
        load.blocks.update(*asked.local_block_ids)
        stop = asked.total_tokens
        found = self._pages(f"request {load.request_id!r}", asked, min(asked.num_computed_tokens, stop), stop)
        load.pages = [np.asarray(group.local).tolist() for group in found]
        load.begins = [
            _begins(group, read, max(asked.num_computed_tokens, first * group.block_size), stop)
            for group, read, first in zip(self._groups, found, asked.first_blocks, strict=True)
        ]
        load.silent = load.silent and all(group.tokens == (0, 0) for group in found)
        return found

    def _pages(self, where: str, asked: LoadRequest, start: int, stop: int) -> list[BlocksOfGroup]:
        check_groups(where, self._groups, asked.local_block_ids, asked.first_blocks)
        if start < 0:
            raise InvalidTransferError(f"{where}: the load starts at token {start}: 0 or more is needed")
        return [
            self._pages_of(f"{where}: group {number}", number, asked, start, stop)
            for number in range(len(self._groups))
        ]

    def _pages_of(self, where: str, number: int, asked: LoadRequest, start: int, stop: int) -> BlocksOfGroup:
        group, blocks = self._groups[number], asked.local_block_ids[number]
        if start >= stop:
            return _NONE
        if group.is_state:
            return BlocksOfGroup(blocks[-1:], (start, stop), 0)
        needed = max(start, group.needed(stop))
        begin = max(start, needed // group.block_size * group.block_size)
        if begin >= stop:
            return _NONE
        if (self.whole_pages or group.whole_pages) and begin % group.page_size:
            raise InvalidTransferError(
                f"{where}: the load starts at token {begin}, which is not the start of a page of {group.page_size} "
                "tokens"
            )
        first = asked.first_blocks[number]
        skipped = begin // group.block_size - first
        if skipped < 0:
            raise InvalidTransferError(
                f"{where}: its blocks on this engine begin with token {first * group.block_size}, but the load "
                f"starts at token {begin}"
            )
        # the first page holds token `begin`, and the last page holds token `stop - 1`
        pages = kernel_pages(blocks[skipped:], group.block_pages)[begin % group.block_size // group.page_size :]
        pages = pages[: -(-stop // group.page_size) - begin // group.page_size]
        return BlocksOfGroup(pages, (begin, stop), needed)

    def fail(self, load: OpenLoad, reason: str, *, safe: bool) -> None:
        """Records that a load has failed.

        `safe` is True if none of the load's transfers is in flight. The load has then also ended.
        """
        load.silent = False
        self.on_pull(PullEvent(load.key, reason, safe))

    def on_pull(self, event: PullEvent) -> OpenLoad | None:
        """Records an event of a pull. Returns the load if the event has ended it successfully, and otherwise None."""
        load = self._by_key.get(event.key)
        if load is None:
            return None
        if event.error and not load.error:
            load.error = event.error
            if not load.silent and not load.cancelled:
                self.output.failed[load.request_id] = _naming(load, event.error)
                self.output.block_ids_with_errors |= load.blocks
        if not event.safe:
            return None
        del self._by_key[load.key], self._by_request[load.request_id]
        if not load.silent:
            self.output.received.add(load.request_id)
            if not load.error and (unwritten := _unwritten(load, event.begins)):
                self.output.unwritten[load.request_id] = unwritten
            if event.times is not None:
                self.output.times[load.request_id] = event.times
        return None if load.error else load

    def on_lease(self, event: Offered | LeaseOver) -> None:
        """Records an event of a lease. An event of an earlier lease of the same request is ignored."""
        if self.leases.get(event.request_id) != event.lease_id:
            return
        self.ungranted.discard(event.request_id)
        if isinstance(event, Offered):
            self.output.offered[event.request_id] = event.error
        else:
            self.output.sent[event.request_id] = event.reason
        if isinstance(event, LeaseOver) or event.error:
            del self.leases[event.request_id]


def _begins(group: GroupConfig, read: BlocksOfGroup, first: int, stop: int) -> tuple[int, int]:
    if group.is_state:
        return stop, stop  # a state block holds a single state, which a load always writes as a whole
    start, end = read.tokens
    return first, start if start < end else stop


def _unwritten(load: OpenLoad, begins: Sequence[int]) -> dict[int, int]:
    """Returns, for each group, the first token that the load wrote.

    A group is left out unless its blocks also hold earlier tokens that this engine lacks.
    """
    return {
        group: max(asked, read)
        for group, ((first, asked), read) in enumerate(zip(load.begins, begins or [0] * len(load.begins), strict=True))
        if max(asked, read) > first
    }


def _naming(load: OpenLoad, reason: str) -> str:
    """Returns the reason for a failure, with the request's id in place of the pull's key.

    The key has no meaning for users.
    """
    reason = reason.removeprefix(f"request {load.key!r}: ")
    return reason if repr(load.request_id) in reason else f"request {load.request_id!r}: {reason}"
