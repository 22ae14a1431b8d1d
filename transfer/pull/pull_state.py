"""A pull of one rank: the lease it reads under, what is in flight of it, and what became of it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from transfer.nixl.agent import Handle
from transfer.pull.lease import LeaseRef
from transfer.pull.parts import Part
from transfer.pull.remote import RemoteEngine


class PullTimes(NamedTuple):
    """When the last fence of a pull was posted, and when it had passed, on the puller's clock."""

    fence_at: float
    over_at: float


class PullEvent(NamedTuple):
    """What became of a pull. The last event of each has `safe` set; an earlier one, at most, says that it failed.

    Attributes:
        key: the pull, as `pull` or `open_pull` were told to call it.
        error: why it failed; empty where every byte was under the lease when it was read.
        safe: nothing of it is in flight any more: its pages may be given back or, without error, be used.
        passed: of a pull that failed, how many of its reads (`PageExchange.read`, or the one of `PageExchange.pull`),
            from the first on, brought pages that were under the lease when they were read: those may be kept, and only
            the rest be pulled from elsewhere.
        times: of one that passed, where pulls are timed (`ReplicaTransfer`); None elsewhere, and of one without READs.
    """

    key: str
    error: str
    safe: bool
    passed: int = 0
    times: PullTimes | None = None


@dataclass(slots=True, eq=False)
class RankPull:
    """What one rank reads of a pull, from every rank of the source that holds a part of it."""

    key: str
    engine: RemoteEngine
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
    marking: int = 0  # of those, how many the fence in flight is for; 0 where it is the last one
    waiting: deque[Part] = field(default_factory=deque[Part])
    reading: list[tuple[Handle, Part]] = field(default_factory=list["tuple[Handle, Part]"])
    # of each READ of a lease word its handle, the rank of the source, and which word of the puller's it goes to
    fencing: list[tuple[Handle, int, int]] = field(default_factory=list["tuple[Handle, int, int]"])
    fenced: bool = False  # the last fence has passed
    read_ranks: set[int] = field(default_factory=set[int])  # of the source: the fence reads the words of these
    told: set[int] = field(default_factory=set[int])  # of the source, those that know that this rank is done

    @property
    def in_flight(self) -> bool:
        """Whether NIXL may still write for this pull."""
        return bool(self.reading or self.fencing)
