"""What a pull is made of: the lease it reads under, the pages, the runs, and what is in flight of it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, NamedTuple

import numpy as np
from msgspec import Meta

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import ArrayLike, NDArray

    from transfer.nixl.agent import Handle, RunList
    from transfer.pull.remote import RemoteEngine


class LeaseRef(NamedTuple):
    """A lease as its readers know it: id, slot of the word on every rank, and seconds that a renewal lasts."""

    lease_id: Annotated[int, Meta(ge=1)]
    slot: Annotated[int, Meta(ge=0)]
    duration_s: Annotated[float, Meta(gt=0, le=1e6)]


class PagesOfGroup(NamedTuple):
    """What is read of one group of layers.

    Attributes:
        local: our pages of the logical pages that the tokens touch, in our page size.
        remote: the source's pages of those that they touch in its page size.
        tokens: first token, and the one after the last; nothing before the first is written.
    """

    local: ArrayLike
    remote: ArrayLike
    tokens: tuple[int, int]


class BlocksOfGroup(NamedTuple):
    """What is read of one group of layers, the source's side named as its scheduler does: by blocks.

    Attributes:
        local: our pages of the logical pages that the tokens touch, in our page size.
        blocks: the source's blocks; the last one holds token `end` - 1, or the state after it.
        end: tokens that the source has computed.
        tokens: first token, and the one after the last.
        needed: the first token that must be read. Those before it, from the first one on, only where the source has
            them: with a sliding window, the page that holds `needed` begins before it, and elsewhere on each side.
    """

    local: ArrayLike
    blocks: ArrayLike
    end: int
    tokens: tuple[int, int]
    needed: int


class PullEvent(NamedTuple):
    """What became of a pull. The last event of each has `safe` set; an earlier one, at most, says that it failed.

    Attributes:
        key: the pull.
        error: why it failed; empty where every byte was under the lease when it was read.
        safe: nothing of it is in flight any more: its pages may be given back or, without error, be used.
        passed: of a pull that failed, how many calls of `add_pages`, from the first on, brought pages that were under
            the lease when they were read: those may be kept, and only the rest be pulled from elsewhere.
    """

    key: str
    error: str
    safe: bool
    passed: int = 0


@dataclass(slots=True, eq=False)
class Part:
    """Runs to read from one rank, by one transfer or several.

    Attributes:
        rank: of the source.
        local: where the bytes go.
        remote: where they lie.
        num_bytes: of all runs.
        arrived: called once they are there, to compare or to move them; returns what must be read after them, if
            anything, and raises PullFailedError where they are of no use. None where nothing is to be done.
        posted: runs that were posted.
        in_flight: transfers that have not ended.
    """

    rank: int
    local: RunList
    remote: RunList
    num_bytes: int
    arrived: Callable[[], Part | None] | None = None
    posted: int = 0
    in_flight: int = 0
    _ends: NDArray[np.int64] | None = None

    @property
    def ends(self) -> NDArray[np.int64]:
        """int64 `[runs]`: bytes up to the end of each run."""
        if self._ends is None:
            self._ends = np.cumsum(np.asarray(self.local)[:, 1], dtype=np.int64)
        return self._ends

    @property
    def is_here(self) -> bool:
        """Whether all of it was posted and has ended."""
        return not self.in_flight and self.posted == len(self.local)

    def is_ready(self) -> bool:
        """Whether it can be posted now; asked again until it can, and its first transfer posted then."""
        return True

    def settle(self) -> None:
        """Nothing of it is in flight any more, and nothing further will be posted."""


@dataclass(slots=True, eq=False)
class Pull:
    """One request's pull by this rank, from every rank of the source that holds a part of it.

    Attributes:
        key: names it among the pulls of this rank.
        engine: the source.
        lease: under which the source holds the pages.
        deadline: on the puller's clock.
        started: when it was opened, likewise.
        more: further parts may be added, so the fence has to wait.
        error: why it failed; empty otherwise.
        num_bytes: read so far, or on their way.
        num_runs: likewise.
        post_s: seconds that the posts took.
        total_s: seconds from its opening to its end.
        failed_at: when it failed, on the puller's clock.
        added: times that parts were added.
        passed: of those, how many a fence has passed.
        marking: of those, how many the fence in flight is for; 0 where it is the last one.
    """

    key: str
    engine: RemoteEngine
    lease: LeaseRef
    deadline: float
    started: float
    more: bool = True
    error: str = ""
    num_bytes: int = 0
    num_runs: int = 0
    post_s: float = 0.0
    total_s: float = 0.0
    failed_at: float = 0.0
    added: int = 0
    passed: int = 0
    marking: int = 0
    renew_at: float = math.inf
    waiting: deque[Part] = field(default_factory=deque[Part])
    reading: list[tuple[Handle, Part]] = field(default_factory=list["tuple[Handle, Part]"])
    fencing: list[tuple[Handle, int, int]] = field(default_factory=list["tuple[Handle, int, int]"])
    fenced: bool = False
    read_ranks: set[int] = field(default_factory=set[int])
    told: set[int] = field(default_factory=set[int])

    @property
    def in_flight(self) -> bool:
        """Whether NIXL may still write for this pull."""
        return bool(self.reading or self.fencing)
