"""Leases: the readers of a request's pages, their deadline, and the words in memory that show a reader if one stands.

A lease stands while its random id stands in its *lease word*, eight bytes that every peer may READ. A reader copies the
pages first and READs the word afterwards. If the id is still there, the pages had not been given away when the last
byte was copied, because a lease is ended in one order only: the word is cleared, then the pages lose their holder. So
all later writes to the pages come after the word was cleared. `docs/concepts/protocol.md` has the whole argument.

The idea of a generation word that is read after the data is that of a seqlock (Lameter 2005; Boehm, MSPC 2012).
"""

from __future__ import annotations

import heapq
import math
import mmap
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from transfer.errors import InvalidEngineError, InvalidLeaseError
from transfer.nixl.agent import WORD_BYTES
from transfer.wire.messages import ReaderNote

CLEARED = 0
"""What a lease word holds while no lease stands in it. No lease has this id."""

LEASE_SLOTS = 4096
"""Leases of our own requests that can stand at a time."""
LENT_SLOTS = 1024
"""Leases of pages that readers asked for by what they hold: their words follow those of our own requests. So nobody
who asks can take a word that a request of ours needs."""

_MAX_ENDED = 1 << 16
_MADV_WIPEONFORK = 18
"""A Linux constant that Python does not name. A fork gets pages of zeros instead of a copy."""

Verdict = Literal["accepted", "unknown", "late", "duplicate", "malformed"]


def make_words(count: int) -> NDArray[np.uint64]:
    """Returns `count` words of zero, uint64, in pages of their own: a transfer may read them, and nothing else.

    They are this process's alone. A process that is forked from it finds zeros at their address, and what it writes
    there nobody else sees: whoever reads a lease word of the fork, say because the fork has got our pid and is older
    than the lease's end, finds no lease.
    """
    size = count * WORD_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # freed with the last view of it
    try:
        memory.madvise(_MADV_WIPEONFORK)
    except OSError as error:
        raise InvalidEngineError(
            f"{size} bytes of lease words: this kernel cannot wipe them in a fork: {error}"
        ) from error
    return np.frombuffer(memory, np.uint64)


def new_lease_id() -> int:
    """Returns a random 64-bit id, never 0. That no other process can hold it is what a fence rests on."""
    return secrets.randbelow((1 << 64) - 1) + 1


class LeaseRef(NamedTuple):
    """A lease as its readers know it: id, slot of the word on every rank, and seconds that a renewal lasts."""

    lease_id: Annotated[int, Meta(ge=1)]
    slot: Annotated[int, Meta(ge=0)]
    duration_s: Annotated[float, Meta(gt=0, le=1e6)]


class LeaseSlots:
    """The free slots. The grantor of leases on several ranks takes slots here, so that the ranks agree.

    Args:
        slots: those that may be taken.
    """

    def __init__(self, slots: range = range(LEASE_SLOTS)) -> None:
        self.slots = slots
        self._free = list(slots)

    def take(self, duration_s: float, lease_id: int | None = None) -> LeaseRef | None:
        """A lease in the lowest free slot, with a new id or the given one; None if as many stand as can."""
        if not self._free:
            return None
        return LeaseRef(new_lease_id() if lease_id is None else lease_id, heapq.heappop(self._free), duration_s)

    def give_back(self, lease: LeaseRef) -> None:
        """The word of a lease is cleared on every rank, or it never stood: the slot may be another's."""
        heapq.heappush(self._free, lease.slot)


@dataclass(slots=True, eq=False)
class Lease:
    """One lease on one shard. Every shard of a source grants it under the same id and slot."""

    lease_id: int  # random, 64 bits; also the content of the word
    request_id: str  # whose pages are held, as the source calls it
    slot: int  # index of the lease word
    duration_s: float  # that a grant or a renewal lasts
    engines: int  # reading engines that must have ended before the lease does
    deadline: float  # on the book's clock
    last_deadline: float  # no renewal goes beyond it
    heard: dict[str, set[int]] = field(default_factory=dict[str, set[int]])  # by engine, its ranks that have ended
    ranks: dict[str, int] = field(default_factory=dict[str, int])  # by engine, how many it has
    refusal: str = ""  # the first reason that a reader gave for giving up
    ended: str = ""  # why it has ended; empty while it stands

    @property
    def is_read(self) -> bool:
        """Whether every rank of as many engines as were expected has said that it is done, or will not read."""
        ended = sum(len(ranks) == self.ranks[engine] for engine, ranks in self.heard.items())
        return ended >= self.engines


class LeaseBook:
    """The leases of one shard. Only `_end` clears a word, and it does so before anyone learns that the lease is over.

    Args:
        slots: leases that can stand at once.
        clock: seconds, monotonic. Deadlines never leave the process: peers are told durations.
        longest: how many durations a lease lives at most, whatever readers renew.

    Attributes:
        words: uint64 `[slots]`, the lease words. To be registered, and to stay mapped while any peer lives.
        counts: how many notes of readers met which verdict.
    """

    def __init__(self, slots: int = 4096, clock: Callable[[], float] = time.monotonic, *, longest: float = 20) -> None:
        self.words = make_words(slots)
        self.counts: Counter[Verdict] = Counter()
        self._clock = clock
        self._longest = longest
        self._by_id: dict[int, Lease] = {}
        self._slots: dict[int, Lease] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._next_deadline = math.inf

    def __len__(self) -> int:
        return len(self._by_id)

    def grant(
        self,
        lease_id: int,
        request_id: str,
        slot: int,
        duration_s: float,
        *,
        engines: int = 1,
        running: bool = False,
    ) -> Lease:
        """Lets a lease stand from now on. Its id may leave the process afterwards, not before.

        See `ReplicaTransfer.offer`. The caller holds the pages until the lease has ended.

        Raises:
            InvalidLeaseError: (a ValueError) an id or slot that is taken or out of range, or no duration.
        """
        lease = f"request {request_id!r}: lease {lease_id:#018x}"
        if not CLEARED < lease_id < 1 << 64 or lease_id in self._by_id:
            raise InvalidLeaseError(f"{lease} is taken, or not a 64-bit number above 0")
        if not 0 <= slot < len(self.words) or slot in self._slots:
            raise InvalidLeaseError(f"{lease}: slot {slot} is taken, or outside of 0 to {len(self.words) - 1}")
        if not 0 < duration_s < math.inf or engines < 1:
            raise InvalidLeaseError(f"{lease}: {duration_s} s for {engines} engines; both must be above 0")
        now = math.inf if running else self._clock()
        granted = Lease(
            lease_id, request_id, slot, duration_s, engines, now + duration_s, now + duration_s * self._longest
        )
        self._by_id[lease_id] = self._slots[slot] = granted
        self._next_deadline = min(self._next_deadline, granted.deadline)
        self.words[slot] = lease_id
        return granted

    def start_clock(self, lease_id: int) -> None:
        """Starts the clock of a lease that was granted to a running request. A no-op if the clock already runs."""
        lease = self._by_id.get(lease_id)
        if lease is not None and lease.deadline == math.inf:
            now = self._clock()
            lease.deadline, lease.last_deadline = now + lease.duration_s, now + lease.duration_s * self._longest
            self._next_deadline = min(self._next_deadline, lease.deadline)

    def find(self, lease_id: int) -> Lease | None:
        """Returns the lease of this id if it stands."""
        return self._by_id.get(lease_id)

    def times(self, lease: Lease) -> tuple[float, float | None]:
        """Seconds since a lease's time began, and to its deadline; 0 and None before that. Any thread may ask."""
        if lease.deadline == math.inf:
            return 0.0, None
        now = self._clock()
        return now - lease.last_deadline + lease.duration_s * self._longest, lease.deadline - now

    def ids(self) -> list[int]:
        """Returns the ids of all leases that stand."""
        return list(self._by_id)

    def hear(self, note: ReaderNote) -> Lease | None:
        """Books what a rank of a reading engine says.

        Returns the lease where this was the last that had to end: its word is cleared, the pages may go.
        """
        verdict = self._verdict(note)
        self.counts[verdict] += 1
        if verdict != "accepted":
            return None
        lease = self._by_id[note.lease_id]
        if note.verdict == "renew":
            self._renew(lease)
            return None
        lease.ranks[note.engine_id] = note.ranks
        lease.heard.setdefault(note.engine_id, set()).add(note.rank)
        if note.verdict == "refused" and not lease.refusal:
            lease.refusal = note.reason or "refused"
        return self._end(lease, lease.refusal or "read") if lease.is_read else None

    def _verdict(self, note: ReaderNote) -> Verdict:
        lease = self._by_id.get(note.lease_id)
        if lease is None:
            return "late" if note.lease_id in self._ended else "unknown"
        if not 0 <= note.rank < note.ranks or lease.ranks.get(note.engine_id, note.ranks) != note.ranks:
            return "malformed"
        if note.rank in lease.heard.get(note.engine_id, ()):
            return "late" if note.verdict == "renew" else "duplicate"
        return "accepted"

    def _renew(self, lease: Lease) -> None:
        lease.deadline = max(lease.deadline, min(self._clock() + lease.duration_s, lease.last_deadline))

    def end(self, lease_id: int, reason: str) -> Lease | None:
        """Ends a lease even if it is read, and returns it, its word cleared; None if it has ended before.

        For an abort, or where room is needed. Readers find out by their fence.
        """
        lease = self._by_id.get(lease_id)
        return None if lease is None else self._end(lease, reason)

    def expire(self) -> list[Lease]:
        """Ends the leases whose deadline has passed, and returns them, their words cleared."""
        now = self._clock()
        if now < self._next_deadline:
            return []
        over = [lease for lease in self._by_id.values() if lease.deadline <= now]
        for lease in over:
            self._end(lease, f"expired after {lease.duration_s} s without a word of its readers")
        self._next_deadline = min((lease.deadline for lease in self._by_id.values()), default=math.inf)
        return over

    def _end(self, lease: Lease, reason: str) -> Lease:
        self.words[lease.slot] = CLEARED  # first: from here on no fence accepts what is read of the pages
        lease.ended = reason
        del self._by_id[lease.lease_id], self._slots[lease.slot]
        self._ended[lease.lease_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        return lease

    def check(self) -> None:
        """Recounts everything.

        Raises:
            InvalidLeaseError: a word does not hold the id of the lease in its slot, or a lease that has ended stands.
        """
        expected = np.zeros_like(self.words)
        for slot, lease in self._slots.items():
            expected[slot] = lease.lease_id
            if lease.slot != slot or lease.ended or self._by_id.get(lease.lease_id) is not lease:
                raise InvalidLeaseError(f"request {lease.request_id!r}: lease {lease.lease_id:#018x} is booked wrongly")
        wrong = np.flatnonzero(self.words != expected)
        if wrong.size or len(self._slots) != len(self._by_id):
            raise InvalidLeaseError(f"lease words {wrong[:8].tolist()} do not hold the ids of their leases")
