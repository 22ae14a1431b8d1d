"""The loads of one worker: which pages each asks for, what of it has come, and what became of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from transfer.connector.config import GroupConfig
from transfer.connector.metadata import LoadRequest
from transfer.errors import InvalidTransferError
from transfer.plan.intersection import Ints
from transfer.plan.plan import kernel_pages
from transfer.pull.pull_state import BlocksOfGroup, PullEvent

_NONE = BlocksOfGroup((), (), 0, (0, 0), 0)


@dataclass(slots=True, eq=False)
class Load:
    """One load, from the first pages that were asked for to its end.

    Attributes:
        request_id: whose it is.
        key: its name among the pulls; no two loads have one.
        blocks: our blocks that it writes to, of all groups.
        pages: for each group, pages that it writes to.
        asked: how often pages were asked for.
        closed: nothing further will be asked for.
        silent: there is nothing to read, so nobody waits for it: the source is told, and that is all.
        cancelled: given up by its owner.
        error: why it failed; empty otherwise.
        arrived: layers that have come, for each time that pages were asked for. Appended to by the transfer thread.
        restored: layers that were copied back from host buffers.
    """

    request_id: str
    key: str
    blocks: set[int] = field(default_factory=set[int])
    pages: list[list[int]] = field(default_factory=list[list[int]])
    asked: int = 0
    closed: bool = False
    silent: bool = True
    cancelled: bool = False
    error: str = ""
    arrived: list[range] = field(default_factory=list[range])
    restored: set[str] = field(default_factory=set[str])

    def has(self, layer: int) -> bool:
        """Whether a layer of the model has come as a whole."""
        return self.closed and sum(layer in layers for layers in self.arrived) >= self.asked


class Loads:
    """All loads of a worker. For the thread that runs the model.

    Args:
        groups: of the model.
        whole_pages: a load must begin with a page: host buffers are copied back page by page.

    Attributes:
        failed: loads that failed since this was taken: request to reason.
        received: requests whose loads are over since this was taken.
        bad_blocks: blocks of failed loads, of every group, since this was taken.
    """

    def __init__(self, groups: Sequence[GroupConfig], *, whole_pages: bool) -> None:
        self.failed: dict[str, str] = {}
        self.received: set[str] = set()
        self.bad_blocks: set[int] = set()
        self._groups = groups
        self._whole_pages = whole_pages
        self._numbers = itertools.count()
        self._by_request: dict[str, Load] = {}
        self._by_key: dict[str, Load] = {}

    def __len__(self) -> int:
        return len(self._by_request)

    def find(self, request_id: str) -> Load | None:
        """Returns the load of a request that is going on."""
        return self._by_request.get(request_id)

    def check_new(self, request_ids: Iterable[str]) -> None:
        """Checks that nothing more is asked of a load that has been asked for as a whole.

        Raises:
            InvalidTransferError: names the first request for which it is.
        """
        for request_id in request_ids:
            load = self._by_request.get(request_id)
            if load is not None and load.closed and not load.cancelled and not load.error:
                raise InvalidTransferError(
                    f"request {request_id!r}: its load has not ended yet, and takes no more pages"
                )

    def add(self, request_id: str, asked: LoadRequest) -> tuple[Load, list[BlocksOfGroup]]:
        """Books a load, or further pages of one, and returns what to read of each group.

        Raises:
            InvalidTransferError: blocks and tokens that do not fit each other. The load is booked all the same: the
                caller fails it.
        """
        load = self._by_request.get(request_id)
        if load is None:
            load = Load(request_id, f"{request_id}#{next(self._numbers)}", pages=[[] for _ in self._groups])
            self._by_request[request_id] = self._by_key[load.key] = load
        load.blocks.update(*asked.local_block_ids)
        load.asked += asked.brings_layers
        load.closed = asked.last
        found = self._pages(request_id, asked)
        for pages, group in zip(load.pages, found, strict=True):
            pages.extend(np.asarray(group.local).tolist())
        load.silent = load.silent and load.closed and all(group.tokens == (0, 0) for group in found)
        return load, found

    def _pages(self, request_id: str, asked: LoadRequest) -> list[BlocksOfGroup]:
        where = f"request {request_id!r}"
        lists = (asked.local_block_ids, asked.first_blocks, asked.remote_block_ids)
        if {len(found) for found in lists} != {len(self._groups)}:
            raise InvalidTransferError(
                f"{where}: blocks of {[len(found) for found in lists]} groups, there are {len(self._groups)}"
            )
        reaches = asked.num_tokens if asked.num_tokens > asked.num_computed_tokens else 0
        if not 0 <= asked.num_computed_tokens <= asked.total_tokens or reaches > asked.remote_num_tokens:
            raise InvalidTransferError(
                f"{where}: tokens {asked.num_computed_tokens} to {asked.num_tokens} of {asked.total_tokens}, the "
                f"source has computed {asked.remote_num_tokens}"
            )
        return [
            self._pages_of(f"{where}: group {number}", number, asked, blocks, first)
            for number, (blocks, first) in enumerate(zip(asked.local_block_ids, asked.first_blocks, strict=True))
        ]

    def _pages_of(
        self, where: str, number: int, asked: LoadRequest, blocks: Sequence[int], first: int
    ) -> BlocksOfGroup:
        group = self._groups[number]
        start, stop = asked.num_computed_tokens, asked.num_tokens
        if start >= stop or (group.is_state and not asked.last):
            return _NONE
        remote = asked.remote_block_ids[number]
        if group.is_state:
            return self._state(where, asked, blocks, remote)
        if not asked.last and stop % group.block_size:
            raise InvalidTransferError(
                f"{where}: token {stop}, before which more is to follow, is not at the end of a block of "
                f"{group.block_size}"
            )
        needed = max(start, group.needed(asked.total_tokens))
        begin = max(start, needed // group.block_size * group.block_size)
        if begin >= stop:
            return _NONE
        if (self._whole_pages or group.whole_pages) and begin % group.page_size:
            raise InvalidTransferError(f"{where}: token {begin} is within a page of {group.page_size}")
        skipped = begin // group.block_size - first
        if skipped < 0:
            raise InvalidTransferError(
                f"{where}: our blocks begin with token {first * group.block_size}, token {begin} is the first to read"
            )
        pages = _pages_between(group, blocks[skipped:], begin, stop)
        return BlocksOfGroup(pages, remote, asked.remote_num_tokens, (begin, stop), needed)

    def _state(self, where: str, asked: LoadRequest, blocks: Sequence[int], remote: Sequence[int]) -> BlocksOfGroup:
        if asked.num_tokens != asked.remote_num_tokens:
            raise InvalidTransferError(
                f"{where}: the source's state is that after {asked.remote_num_tokens} tokens, {asked.num_tokens} are "
                "to be loaded"
            )
        tokens = (asked.num_computed_tokens, asked.num_tokens)
        return BlocksOfGroup(tuple(blocks[-1:]), remote, asked.remote_num_tokens, tokens, 0)

    def fail(self, load: Load, reason: str, *, safe: bool) -> None:
        """Books a failure, and the end of the load where nothing of it is in flight."""
        load.silent = False
        self.on_event(PullEvent(load.key, reason, safe))

    def on_event(self, event: PullEvent) -> Load | None:
        """Books what became of a load. Returns it if it has just ended well."""
        load = self._by_key.get(event.key)
        if load is None:
            return None
        if event.error and not load.error:
            load.error = event.error
            if not load.silent and not load.cancelled:
                self.failed[load.request_id] = _naming(load.request_id, event.error)
                self.bad_blocks |= load.blocks
        if not event.safe:
            return None
        del self._by_key[load.key], self._by_request[load.request_id]
        if not load.silent:
            self.received.add(load.request_id)
        return None if load.error else load


def _pages_between(group: GroupConfig, blocks: Sequence[int], begin: int, stop: int) -> Ints:
    """Our pages from the one that holds token `begin` on, up to the one that holds the last."""
    pages = kernel_pages(blocks, group.block_pages)[begin % group.block_size // group.page_size :]
    return pages[: -(-stop // group.page_size) - begin // group.page_size]


def _naming(request_id: str, reason: str) -> str:
    return reason if repr(request_id) in reason else f"request {request_id!r}: {reason}"
