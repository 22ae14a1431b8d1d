"""The messages between a scheduler and its workers in each step: plain data that pickles and encodes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from transfer.pull.lease import LeaseRef
from transfer.wire.messages import Wanted


class LoadRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which pages a request loads from a source.

    If the source was told to hold its lease before the request had blocks (`NixlConnectorScheduler.hold`), two
    `LoadRequest`s are sent for the request: the first without blocks, and the second with blocks.

    Attributes:
        wanted: the source's lease, and the tokens whose pages it must hold.
        local_block_ids: our blocks of each group, starting with the block that holds the first token to read. Surplus
            blocks are not written. If the tuple is empty, nothing is read yet, and the source's lease is renewed until
            the blocks arrive.
        first_blocks: for each group, the index within the request of the first block in `local_block_ids`.
        num_computed_tokens: number of tokens that this engine already has.
        num_tokens: upper limit for the number of the request's tokens that this engine has after the load, including
            the computed ones.
    """

    wanted: Wanted
    local_block_ids: tuple[tuple[int, ...], ...] = ()
    first_blocks: tuple[int, ...] = ()
    num_computed_tokens: int = 0
    num_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """The number of tokens whose KV this engine has when the load has ended."""
        return min(self.wanted.num_tokens, self.num_tokens)


class SendRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A lease on a request's pages, which the workers are asked to grant.

    Attributes:
        lease: its new id, its free lease word, and its duration in seconds.
        engines: how many reading engines must finish before the lease ends.
        running: True if prefill is still computing the request. In this case, the lease's clock starts only when
            `reqs_computed` names the request.
        block_ids: the leased blocks of each group if the config turns page checks on; otherwise empty.
    """

    lease: LeaseRef
    engines: int = 1
    running: bool = False
    block_ids: tuple[tuple[int, ...], ...] = ()


class ConnectorMetadata(msgspec.Struct, kw_only=True):
    """The work of one step for every worker, by request.

    `reqs_to_send` names a request as soon as a lease is requested for it, even if the request has not been part of a
    batch yet. A reader that asks for the pages before every rank has granted the lease is told to ask again. The reader
    can therefore never read pages that no rank has leased.

    Attributes:
        reqs_to_recv: loads to begin or to continue.
        reqs_to_save: blocks of each group to copy to host buffers, if the engine has any.
        reqs_to_send: leases to grant.
        reqs_computed: requests whose pages are all computed. The clocks of their leases start now.
        reqs_not_processed: requests whose leases end now, with the reason.
        reqs_to_cancel: loads to give up, with the reason.
        to_give_back: leases of other engines that this engine will not read, each with the reason.
    """

    reqs_to_recv: dict[str, LoadRequest] = {}
    reqs_to_save: dict[str, tuple[tuple[int, ...], ...]] = {}
    reqs_to_send: dict[str, SendRequest] = {}
    reqs_computed: list[str] = []
    reqs_not_processed: dict[str, str] = {}
    reqs_to_cancel: dict[str, str] = {}
    to_give_back: list[tuple[Wanted, str]] = []


class WorkerOutput(msgspec.Struct, kw_only=True):
    """The events of one rank since its output was last taken. Each field names a request at most once.

    Attributes:
        offered: the requests whose lease was granted or refused. The reason is empty if it was granted.
        sent: the requests whose lease has ended, with "read" or another reason. The rank no longer needs their pages.
        received: the requests whose load has ended, successfully or not. None of the load's transfers is still in
            flight.
        failed: the requests whose load has failed, with the reason. They are in `received` now or later.
        block_ids_with_errors: blocks of failed loads, in all groups. Their contents must not be used.
        times: for each successful load, if loads are timed, the time when its last fence was posted and the time when
            that fence passed.
        unwritten: by request and group, where the unwritten tokens end: the first token that the load did write. A
            group is listed only if its blocks also hold earlier tokens that this engine lacks and that the load did not
            write. The request is in `received` at the same time.
        weights: identifies the weights that the rank has had since its last output, if they have changed. The leases of
            the same output were granted with these weights.
    """

    offered: dict[str, str] = {}
    sent: dict[str, str] = {}
    received: set[str] = set()
    failed: dict[str, str] = {}
    block_ids_with_errors: set[int] = set()
    times: dict[str, tuple[float, float]] = {}
    unwritten: dict[str, dict[int, int]] = {}
    weights: dict[str, str] = {}

    def __bool__(self) -> bool:
        """Whether there is any event."""
        return any(getattr(self, name) for name in self.__struct_fields__)


class Progress(msgspec.Struct, kw_only=True):
    """What a scheduler learns from its workers' outputs. Each field names a request at most once.

    Attributes:
        offered: the requests whose lease was granted on every rank.
        sent: the requests whose lease has ended on every rank, with "read" or another reason. Their pages may be freed.
        received: the requests whose load has ended on every rank, successfully or not. Their pages may be used or
            freed.
        failed: the requests whose load has failed, with the reason. They are in `received` now or later.
        block_ids_with_errors: blocks of failed loads, in all groups.
        unwritten: by request and group, where the unwritten tokens end: the first token that the load did write. A
            group is listed only if its blocks also hold earlier tokens that this engine lacks and that the load did not
            write. The request does not need those tokens, but the group's blocks up to the one that holds the listed
            token are incomplete. Other requests must therefore not find these blocks in the prefix cache.
    """

    offered: set[str] = set()
    sent: dict[str, str] = {}
    received: set[str] = set()
    failed: dict[str, str] = {}
    block_ids_with_errors: set[int] = set()
    unwritten: dict[str, dict[int, int]] = {}


def as_blocks(groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    """Returns the block ids of each group as plain integers."""
    return tuple(tuple(int(block) for block in group) for group in groups)
