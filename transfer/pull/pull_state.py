"""A pull of one rank, or of all of a replica: what is in flight or waits of it, and what became of it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from transfer.errors import InvalidTransferError, PullFailedError
from transfer.nixl.agent import Agent, Handle
from transfer.plan.page_lists import PageLists, with_blocks
from transfer.pull.lease import CLEARED, LeaseRef
from transfer.pull.parts import Part
from transfer.pull.remote import RemoteEngine
from transfer.pull.source import Source
from transfer.wire.messages import LeasedPages, Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache.replica.block_table import BlockTable

FIRST_PAUSE_S = 1e-3
"""Until a source is asked again whether a lease stands by now on all its ranks; doubled each time."""
# Default factories. Not `list[int]` and the like: calling such an alias takes 1 µs, and a pull has eight of them.
_LIST = cast("Callable[[], list[Any]]", list)
_SET = cast("Callable[[], set[Any]]", set)
_DEQUE = cast("Callable[[], deque[Any]]", deque)


class PullTimes(NamedTuple):
    """When the last fence of a pull was posted, and when it had passed, on the puller's clock."""

    fence_at: float
    over_at: float


class PullEvent(NamedTuple):
    """The outcome of a pull. Its last event has `safe` set; at most one earlier event reports that it failed.

    Attributes:
        key: the name of the pull, as given to `pull` or `open_pull`.
        error: why it failed; empty if every byte was under the lease when it was read.
        safe: none of its transfers is in flight any more: its pages may be given back or, without an error, used.
        passed: for a pull that failed, the number of its reads (`PageExchange.read`, or the one of
            `PageExchange.pull`), from the first on, whose pages were under the lease when they were read. Those pages
            may be kept, and only the rest pulled from elsewhere.
        times: the times of a pull that passed, if pulls are timed (`ReplicaTransfer`); else None, also without READs.
        begins: for a pull that passed and whose source has named its blocks, the first token read of each group: a
            source whose window has moved on may have less than was asked for. Otherwise empty.
    """

    key: str
    error: str
    safe: bool
    passed: int = 0
    times: PullTimes | None = None
    begins: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class RankPull:
    """The part of a pull that one rank reads, from every rank of the source that holds some of it."""

    key: str
    engine: RemoteEngine
    agent: Agent  # that reads from it
    lease: LeaseRef
    deadline: float  # on the puller's clock, as the next two and `failed_at`
    started: float
    renew_at: float
    more: bool = True  # further parts may be added, so the fence has to wait
    error: str = ""
    failed_at: float = 0.0
    fence_at: float = 0.0  # where pulls are timed: when the last fence was posted
    num_bytes: int = 0  # read so far, or on their way
    num_runs: int = 0
    post_s: float = 0.0  # that the posts took
    added: int = 0  # times that parts were added
    passed: int = 0  # of those, how many a fence has passed
    marking: int = 0  # of those, how many the fence in flight is for; 0 if it is the last one
    waiting: list[Part] = field(default_factory=_LIST)
    reading: list[tuple[Handle, Part]] = field(default_factory=_LIST)
    # of each READ of a lease word its handle, the rank of the source, and which word of the puller's it goes to
    fencing: list[tuple[Handle, int, int]] = field(default_factory=_LIST)
    fenced: bool = False  # the last fence has passed
    is_over: bool = False  # it has its last event: nothing of it is in flight, or ever will be
    over_at: float = 0.0  # where it has passed, on the puller's clock
    read_ranks: list[int] = field(default_factory=_LIST)  # of the source: the fence reads the words of these
    told: list[int] = field(default_factory=_LIST)  # of the source, those that know that this rank is done

    @property
    def in_flight(self) -> bool:
        """Whether NIXL may still write for this pull."""
        return bool(self.reading or self.fencing)

    def posted(self, part: Part, last: int) -> None:
        """The runs of a part up to the index `last` were posted."""
        if not part.posted:
            self.num_bytes += part.num_bytes
            if part.rank not in self.read_ranks:
                self.read_ranks.append(part.rank)
        self.num_runs += last - part.posted
        part.posted = last


class Reading(NamedTuple):
    """Pages that a pull is to read.

    Attributes:
        groups: for each group of the layout the pages here and there, and their tokens.
        last: nothing more will be read.
        tables: the source's block tables that name them, beside those of readings before: its seals are compared first.
    """

    groups: PageLists
    last: bool
    tables: Sequence[BlockTable] = ()


@dataclass(slots=True, eq=False)
class ReplicaPull:
    """A pull by all ranks: what waits until its source is known, and which ranks are not through. Each has its READs.

    Attributes:
        source: a `Wanted` until it has said what it holds.
        pages: that; None if the owner names the pages.
        ask_at: when it is to be asked again.
        waits_for: what it has said was missing when it was last asked, and since when it has said so.
        waiting: pages to read.
        reads: what each rank reads, in order, once the source is known.
        told: its owner knows that it has failed.
        refusal: what its source is to be told, of which the owner has had the last event.
        begins: of each group the first token that is read, where the source has named its blocks.
    """

    source: Source | Wanted
    deadline: float
    pages: LeasedPages | None = None
    ask_at: float = math.inf
    waits_for: tuple[str, float] = ("", math.inf)
    pause_s: float = FIRST_PAUSE_S
    waiting: deque[Reading] = field(default_factory=_DEQUE)
    reads: list[RankPull] = field(default_factory=_LIST)
    started: bool = False
    error: str = ""
    told: bool = False
    refusal: str = ""
    begins: tuple[int, ...] = ()

    @property
    def is_safe(self) -> bool:
        """Whether no rank reads any more."""
        return all(one.is_over for one in self.reads)

    @property
    def passed(self) -> int:
        """How many calls of `add_pages` a fence has passed, on every rank."""
        return min((one.passed for one in self.reads), default=0)

    @property
    def times(self) -> PullTimes | None:
        """Those of the last fence over all ranks; None if none was timed."""
        fence_at = max(one.fence_at for one in self.reads)
        return PullTimes(fence_at, max(one.over_at for one in self.reads)) if fence_at else None

    def next_pages(self, key: str) -> Reading:
        """The first that wait, with the blocks that the source has named."""
        reading = self.waiting.popleft()
        if self.pages is None:
            return reading
        return reading._replace(groups=with_blocks(f"request {key!r}", reading.groups, self.pages))


def check_opening(key: str, engine: RemoteEngine, lease: LeaseRef, timeout_s: float, *, is_open: bool) -> None:
    """Whether a pull can begin.

    Raises:
        InvalidTransferError: the key is that of an open pull, the source has no such lease word, or a time is wrong.
        PullFailedError: the source is known to be gone.
    """
    if is_open:
        raise InvalidTransferError(f"request {key!r}: a pull of this name has not ended yet")
    if engine.failure:
        raise PullFailedError(f"request {key!r}: engine {engine.engine_id!r} was lost: {engine.failure}")
    if not 0 <= lease.slot < engine.words or not CLEARED < lease.lease_id < 1 << 64:
        raise InvalidTransferError(
            f"request {key!r}: lease {lease.lease_id:#x} in slot {lease.slot}, engine {engine.engine_id!r} has "
            f"{engine.words} slots"
        )
    if not 0 < timeout_s < math.inf or not 0 < lease.duration_s < math.inf:
        raise InvalidTransferError(f"request {key!r}: timeout of {timeout_s} s, lease of {lease.duration_s} s")


def how_ended(lease: LeaseRef) -> str:
    """What a reader can say of a lease whose word holds another value. The log of the source has the reason."""
    return (
        f"expired (it lasts {lease.duration_s:g} s without a word of its reader, who may read or renew sooner), "
        "was ended by the source, or never stood"
    )
