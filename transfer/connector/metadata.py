"""What a scheduler tells its workers each step, and what they tell it: plain data that pickles and encodes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from transfer.pull.lease import LeaseRef
from transfer.wire.messages import Wanted


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that a request needs from elsewhere; where its source was held before, once more, now with blocks.

    Attributes:
        wanted: the source, and which tokens' pages it is to have.
        local_block_ids: for each group, our blocks from the one that holds the first token on that is to be read. More
            of them than the tokens need are left alone. Without any group nothing is read yet: the source's lease is
            renewed until there are blocks.
        first_blocks: for each group, which block of the request the first of them is.
        num_computed_tokens: tokens that are here already.
        num_tokens: tokens that are wanted at most.
    """

    wanted: Wanted
    local_block_ids: tuple[tuple[int, ...], ...] = ()
    first_blocks: tuple[int, ...] = ()
    num_computed_tokens: int = 0
    num_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens that are to be here in the end."""
        return min(self.wanted.num_tokens, self.num_tokens)


class SendRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A lease that is to stand over pages of a request.

    Attributes:
        lease: a new id, a free slot, and seconds.
        engines: reading engines that must have ended before the lease does.
        running: the request is still computed; no time runs before it is among `reqs_computed`.
        block_ids: for each group, the blocks under it, where page checks are made; empty otherwise.
    """

    lease: LeaseRef
    engines: int = 1
    running: bool = False
    block_ids: tuple[tuple[int, ...], ...] = ()


class ConnectorMetadata(msgspec.Struct, kw_only=True):
    """One step's work for every worker, by request.

    A request that is to be sent is named before its lease leaves the scheduler, not when it was part of a batch: a
    reader that comes early finds no lease, instead of pages that nobody knows it may read.

    Attributes:
        reqs_to_recv: loads to begin or to go on with.
        reqs_to_save: for each group, blocks that are to be copied to host buffers; with these alone.
        reqs_to_send: leases to grant.
        reqs_computed: requests whose pages are all computed: the time of their leases runs.
        reqs_not_processed: requests whose leases end now, and why.
        reqs_to_cancel: loads to give up, and why.
        to_give_back: leases of other engines under which nothing is read, and why.
    """

    reqs_to_recv: dict[str, LoadRequest] = {}
    reqs_to_save: dict[str, tuple[tuple[int, ...], ...]] = {}
    reqs_to_send: dict[str, SendRequest] = {}
    reqs_computed: list[str] = []
    reqs_not_processed: dict[str, str] = {}
    reqs_to_cancel: dict[str, str] = {}
    to_give_back: list[tuple[Wanted, str]] = []


class WorkerOutput(msgspec.Struct, kw_only=True):
    """The events of one rank since it was last asked. Each request is named once.

    Attributes:
        offered: requests whose lease stands; with a reason, those whose lease was not granted.
        sent: requests whose lease has ended, with "read" or the reason. Their pages may be freed.
        received: requests whose load has ended, successfully or not: none of its transfers is in flight any more.
        failed: requests whose load failed, with the reason; among `received` now or later.
        block_ids_with_errors: blocks of failed loads, of every group: their contents must not be used.
        times: for loads that succeeded, if loads are timed: when the last fence was posted and when it had passed.
        unwritten: for loads that succeeded, by group: the token before which the group's blocks were not written, if
            they begin before it; among `received` at the same time.
    """

    offered: dict[str, str] = {}
    sent: dict[str, str] = {}
    received: set[str] = set()
    failed: dict[str, str] = {}
    block_ids_with_errors: set[int] = set()
    times: dict[str, tuple[float, float]] = {}
    unwritten: dict[str, dict[int, int]] = {}

    def __bool__(self) -> bool:
        """Whether anything has happened."""
        return any(getattr(self, name) for name in self.__struct_fields__)


class Progress(msgspec.Struct, kw_only=True):
    """What a scheduler learns from its workers' outputs. Each request is named once in each field.

    Attributes:
        offered: requests whose lease stands on every rank.
        sent: requests whose lease has ended on every rank, and how: "read", or why else. Their pages may go.
        received: requests whose load is over on every rank, well or not: their pages may be used, or go.
        failed: requests whose load failed, and why; among `received` now or later.
        block_ids_with_errors: blocks of theirs, of every group.
        unwritten: of requests that are among `received` at the same time and have not failed, by group, the token
            before which nothing of the group's blocks was written, where these begin before it. The request itself
            needs no token before it. But the block that holds this token, and those before it, must not be found by
            others: what they hold is not the KV of all their tokens.
    """

    offered: set[str] = set()
    sent: dict[str, str] = {}
    received: set[str] = set()
    failed: dict[str, str] = {}
    block_ids_with_errors: set[int] = set()
    unwritten: dict[str, dict[int, int]] = {}


def as_blocks(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Block ids of each group as plain integers."""
    return tuple(tuple(int(block) for block in group) for group in groups)
