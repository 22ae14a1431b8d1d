"""The state of a pull, for one rank and for all ranks of a replica: READs in flight, waiting pages, and the outcome."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

from kvcache.replica.block_table import BlockTable
from transfer.errors import InvalidTransferError, PullFailedError
from transfer.failures import Failure, FailureKind
from transfer.nixl.agent import Agent, Handle
from transfer.plan.page_lists import PageLists
from transfer.pull.lease import CLEARED, LeaseRef
from transfer.pull.parts import Part
from transfer.pull.remote import RemoteEngine
from transfer.pull.source import Contact, Source
from transfer.wire.messages import LeasedPages, Wanted

FIRST_PAUSE_S = 1e-3
"""In seconds: the pause before a source is asked again whether all its ranks have granted a lease.

The pause doubles each time.
"""
# Default factories. An alias such as `list[int]` is slow to call, and a pull has eight of these fields.
_LIST = cast("Callable[[], list[Any]]", list)
_DEQUE = cast("Callable[[], deque[Any]]", deque)


class OwnKey(str):
    """The key of a pull that this package opens for itself. It equals only itself, and so never a caller's key.

    Its text is for messages.
    """

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    __hash__ = object.__hash__


class PullTimes(NamedTuple):
    """When the last fence of a pull was posted and when it passed, on the puller's clock."""

    fence_at: float
    over_at: float


class PullShare(NamedTuple):
    """The part of a pull that one of several sources has contributed.

    Attributes:
        contact: address and engine id of the source.
        num_bytes: bytes of the pages that were read from the source under its lease.
        error: why the source was given up; empty if it was not.
    """

    contact: Contact
    num_bytes: int
    error: str


class PullEvent(NamedTuple):
    """An event of a pull. The last event has `safe` set. At most one earlier event reports that the pull failed.

    Attributes:
        key: the name of the pull, as given to `pull` or `open_pull`.
        error: why the pull failed; empty if every byte was under the lease when it was read.
        safe: True if none of the pull's transfers is in flight. Its pages may then be given back or, without an error,
            used.
        passed: for a pull that failed: how many of its reads, counted from the first, copied pages while the lease was
            open. Each call to `PageExchange.read` counts as one read, and so does `PageExchange.pull`. The pages of
            these reads may be kept, so that only the other pages must be pulled from another source.
        times: the times of the last fence of a successful pull, if pulls are timed (see `ReplicaTransfer`). None for
            other pulls, and if no page had to be read.
        begins: for each group, the first token that was read, if the pull was successful and its source has named its
            blocks. This may be a later token than the first one asked for, because a source whose sliding window has
            moved on may have freed earlier blocks. Empty for other pulls.
        stop: the end of the tokens that were read, if a pull from several sources succeeded without the later tokens.
            The later tokens were no longer available from any source. 0 for other pulls.
        shares: for a pull from several sources, what each source has contributed; empty for other pulls.
    """

    key: str
    error: str
    safe: bool
    passed: int = 0
    times: PullTimes | None = None
    begins: tuple[int, ...] = ()
    stop: int = 0
    shares: tuple[PullShare, ...] = ()


@dataclass(slots=True, eq=False)
class RankPull:
    """The part of a pull that one local rank reads, from one or more ranks of the source."""

    key: str
    engine: RemoteEngine
    agent: Agent  # the agent that reads from the source
    lease: LeaseRef
    deadline: float  # `deadline`, `started`, `renew_at` and `failed_at` are times on the puller's clock
    started: float
    renew_at: float
    more: bool = True  # whether more parts may be added; the last fence is not posted before all parts were added
    error: Failure | None = None
    failed_at: float = 0.0
    fence_at: float = 0.0  # when the last fence was posted, if pulls are timed
    num_bytes: int = 0  # bytes posted so far
    num_runs: int = 0
    post_s: float = 0.0  # seconds spent posting
    added: int = 0  # number of calls to `Puller.add` so far
    passed: int = 0  # number of `add` calls whose parts a fence has confirmed
    marking: int = 0  # number of `add` calls that the fence in flight covers; 0 for the last fence
    waiting: list[Part] = field(default_factory=_LIST)
    reading: list[tuple[Handle, Part]] = field(default_factory=_LIST)
    # For each READ of a lease word: its handle, the rank of the source, and the index of the puller's word.
    fencing: list[tuple[Handle, int, int]] = field(default_factory=_LIST)
    fenced: bool = False  # whether the last fence has passed
    # whether the pull's last event was reported; after that, none of its READs is ever in flight again
    is_over: bool = False
    over_at: float = 0.0  # when the pull passed, on the puller's clock
    # Ranks of the source that were read from. The fence reads the lease words of these ranks.
    read_ranks: list[int] = field(default_factory=_LIST)
    # ranks of the source to which the last fence has carried this rank's `done` note
    told: list[int] = field(default_factory=_LIST)

    @property
    def in_flight(self) -> bool:
        """Whether NIXL may still write for this pull."""
        return bool(self.reading or self.fencing)

    def posted(self, part: Part, last: int) -> None:
        """Records that the runs of a part up to index `last` were posted."""
        if not part.posted:
            self.num_bytes += part.num_bytes
            if part.rank not in self.read_ranks:
                self.read_ranks.append(part.rank)
        self.num_runs += last - part.posted
        part.posted = last


class Reading(NamedTuple):
    """Pages that a pull must read.

    Attributes:
        groups: for each group of the layout, the local and remote pages and their tokens.
        last: whether this is the last reading of the pull.
        tables: the source's block tables that name these pages, except tables that an earlier `Reading` of the pull
            has. Their seals are checked before the pages are read.
    """

    groups: PageLists
    last: bool
    tables: Sequence[BlockTable] = ()


@dataclass(slots=True, eq=False)
class ReplicaPull:
    """A pull by all ranks: the pages that wait to be read, and the pull of each rank.

    Attributes:
        source: the source to read from; a `Wanted` until the source has named the pages of its lease.
        deadline: the time limit, on the replica's clock.
        pages: the source's answer to a `Wanted`. None before the answer arrives. Always None if the owner of the pull
            names the pages.
        weights: the reader's weights with which these pages were compared.
        ask_at: when to ask the source again, on the replica's clock; inf if no query is due.
        waits_for: what was missing according to the source's last answer, and when an answer first reported anything
            missing.
        pause_s: the pause before the next query.
        waiting: pages to read, in order.
        reads: the `RankPull` of each local rank, once the source is known.
        started: whether the ranks' pulls were opened.
        error: why the pull failed; None if it has not.
        told: whether the failure of the pull was reported to its owner.
        refusal: why the source's lease is refused, if the pull was opened only to refuse it. Such a pull has no events.
        begins: for each group, the first token that is read, if the source has named its blocks.
    """

    source: Source | Wanted
    deadline: float
    pages: LeasedPages | None = None
    weights: Mapping[str, str] = field(default_factory=dict[str, str])
    ask_at: float = math.inf
    waits_for: tuple[str, float] = ("", math.inf)
    pause_s: float = FIRST_PAUSE_S
    waiting: deque[Reading] = field(default_factory=_DEQUE)
    reads: list[RankPull] = field(default_factory=_LIST)
    started: bool = False
    error: Failure | None = None
    told: bool = False
    refusal: str = ""
    begins: tuple[int, ...] = ()

    @property
    def passed(self) -> int:
        """The number of calls to `add_pages` whose pages have passed a fence on every rank."""
        return min((one.passed for one in self.reads), default=0)

    @property
    def times(self) -> PullTimes | None:
        """The times of the last fence over all ranks; None if pulls are not timed."""
        fence_at = max(one.fence_at for one in self.reads)
        return PullTimes(fence_at, max(one.over_at for one in self.reads)) if fence_at else None


def check_opening(key: str, engine: RemoteEngine, lease: LeaseRef, timeout_s: float) -> None:
    """Raises if a pull cannot be opened.

    Raises:
        InvalidTransferError: the source has no such lease word, or a time is invalid.
        PullFailedError: the source is known to be gone.
    """
    if engine.failure:
        lost = f"request {key!r}: engine {engine.engine_id!r} was lost: {engine.failure.text}"
        raise PullFailedError(lost, FailureKind.SOURCE_GONE)
    if not 0 <= lease.word_idx < engine.words or not CLEARED < lease.lease_id < 1 << 64:
        raise InvalidTransferError(
            f"request {key!r}: lease {lease.lease_id:#x} in word {lease.word_idx} is invalid: a 64-bit id above 0 is "
            f"needed, and engine {engine.engine_id!r} has {engine.words} words"
        )
    if not 0 < timeout_s < math.inf or not 0 < lease.duration_s < math.inf:
        raise InvalidTransferError(
            f"request {key!r}: its timeout is {timeout_s} s and its lease lasts {lease.duration_s} s; both must be "
            "above 0 and finite"
        )


def how_ended(lease: LeaseRef, said: str = "") -> str:
    """Describes how a lease has ended, if its lease word no longer holds its id.

    `said` is what this process has told the source about the lease; empty if nothing. Otherwise only the source's log
    has the real reason.
    """
    return said or (
        f"expired (it lasts {lease.duration_s:g} s unless its reader renews it), "
        "was ended by the source, or was never granted"
    )
