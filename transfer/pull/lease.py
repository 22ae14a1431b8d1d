"""Leases: how long readers may read a request's pages, and the words in memory that show readers if a lease is open.

A lease is open while its random id is in its *lease word*, eight bytes that every peer may READ. A reader first copies
the pages and then READs the word. If the id is still there, the pages had not been given to another request when the
last byte was copied, because a lease always ends in one order: first the word is cleared, then the pages lose their
holder. All later writes to the pages therefore come after the word was cleared. `docs/concepts/protocol.md` has the
whole argument.

    word       0 ──grant──► id ─────────────────────────────cleared──► 0
    pages      ─────── held ────────────────────────────────────────────┤ free: another request may write them
    reader A            ├─ copy the pages ─┤ READ: id, the copy is right
    reader B                                    ├─ copy the pages ────────┤ READ: 0, the copy is thrown away

Reading a generation word after the data is the idea of a seqlock (Lameter 2005; Boehm, MSPC 2012).
"""

from __future__ import annotations

import heapq
import math
import mmap
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from transfer.errors import InvalidEngineError, InvalidLeaseError
from transfer.nixl.agent import WORD_BYTES
from transfer.wire.messages import ReaderNote

CLEARED = 0
"""What a lease word holds while there is no lease. No lease has this id."""

LEASE_WORDS = 4096
"""How many leases this process's own requests may have at the same time."""
LENT_WORDS = 1024
"""How many leases on pages that readers asked for by content may exist at the same time.

The words of these leases follow the words of the leases of our own requests. A reader that asks by content can
therefore never take a word that one of our own requests needs.
"""

_MAX_ENDED = 1 << 16
_MADV_WIPEONFORK = 18
"""A Linux constant that Python does not define. A forked child gets zeroed pages instead of a copy."""

Verdict = Literal["accepted", "unknown", "late", "duplicate", "malformed"]


def make_words(count: int) -> NDArray[np.uint64]:
    """Returns `count` zeroed words (uint64), in memory pages of their own.

    These memory pages hold no other data that a peer could read. The memory is private to this process. A forked child
    finds zeros at the same address, and the parent does not see the child's writes. If a reader reads a lease word in
    the child, for example because the child now has our pid, the reader finds no lease.
    """
    size = count * WORD_BYTES
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # freed with the last view of it
    try:
        memory.madvise(_MADV_WIPEONFORK)
    except OSError as error:
        raise InvalidEngineError(
            f"this kernel cannot wipe the {size} bytes of lease words in a fork: {error}"
        ) from error
    return np.frombuffer(memory, np.uint64)


def new_lease_id() -> int:
    """Returns a random 64-bit id, never 0. Fences rely on its being unique among the leases of all processes."""
    return secrets.randbelow((1 << 64) - 1) + 1


class LeaseRef(NamedTuple):
    """A lease as its readers know it: its id, the index of its word, and the duration of a renewal in seconds."""

    lease_id: Annotated[int, Meta(ge=1)]
    word_idx: Annotated[int, Meta(ge=0)]
    duration_s: Annotated[float, Meta(gt=0, le=1e6)]


class LeaseWords:
    """The free lease words of an engine. All its ranks use the same words, so words are allocated here for all ranks.

    Args:
        words: the words to allocate from.

    Examples:
        >>> words = LeaseWords(range(1))
        >>> lease = words.take(duration_s=10.0, lease_id=7)
        >>> lease
        LeaseRef(lease_id=7, word_idx=0, duration_s=10.0)
        >>> words.take(duration_s=10.0) is None  # no word is free
        True
        >>> words.give_back(lease)
    """

    def __init__(self, words: range = range(LEASE_WORDS)) -> None:
        self.words = words
        self._free = list(words)

    def take(self, duration_s: float, lease_id: int | None = None) -> LeaseRef | None:
        """Returns a lease at the lowest free word, with a new id or the given one. Returns None if no word is free."""
        if not self._free:
            return None
        return LeaseRef(new_lease_id() if lease_id is None else lease_id, heapq.heappop(self._free), duration_s)

    def give_back(self, lease: LeaseRef) -> None:
        """Frees the word of a lease, once it is cleared on every rank, or that was never granted."""
        heapq.heappush(self._free, lease.word_idx)


@dataclass(slots=True, eq=False)
class Lease:
    """One lease, which all ranks of a source grant under the same id and word."""

    lease_id: int  # random, 64 bits; the lease word holds the same number
    request_id: str  # the source's name for the request whose pages are held
    word_idx: int  # index of the lease word
    duration_s: float  # the duration of a grant and of each renewal
    engines: int  # how many reading engines must finish before the lease ends
    # When the lease expires, by the clock of its `LeaseBook`; a renewal extends it. Inf if the clock has not started.
    deadline: float = math.inf
    last_deadline: float = math.inf  # renewals do not extend `deadline` beyond this
    # For each reading engine, which of its ranks have told which local ranks that they have finished, as pairs: the
    # local rank that got the note, and the reading rank that sent it.
    heard: dict[str, set[tuple[int, int]]] = field(default_factory=dict[str, set[tuple[int, int]]])
    # for each reading engine in `heard`: its number of ranks
    ranks: dict[str, int] = field(default_factory=dict[str, int])
    refusal: str = ""  # the reason given by the first reader that gave up
    ended: str = ""  # why the lease has ended; empty while it is open

    def is_read(self, ours: int) -> bool:
        """Whether enough reading engines have told every local rank that they no longer need the lease.

        `ours` is the number of local ranks. A reading engine has finished when each of its ranks has told each local
        rank that it is done, or that it will not read.
        """
        ended = sum(len(heard) == self.ranks[engine] * ours for engine, heard in self.heard.items())
        return ended >= self.engines


class LeaseBook:
    """The leases of a replica. Only `_end` clears a lease word. The end of a lease is reported afterwards.

    Unless it expires or is ended early, a lease ends as soon as each local rank has heard from all readers of the
    lease. It ends on all local ranks at once.

    Args:
        words: uint64 `[words]` for each local rank, from `make_words`: the lease words. They must be registered, and
            must stay mapped as long as any peer is alive.
        clock: a monotonic clock, in seconds. Deadlines are only used in this process; peers are told durations.
        longest: the longest lifetime of a renewed lease, as a multiple of its duration.

    Attributes:
        words: the argument `words`.
        counts: number of notes from readers, by verdict.
    """

    def __init__(
        self,
        words: Sequence[NDArray[np.uint64]],
        clock: Callable[[], float] = time.monotonic,
        *,
        longest: float = 20,
    ) -> None:
        self.words = words
        self._num_words = min(map(len, words))
        self.counts: Counter[Verdict] = Counter()
        self._clock = clock
        self._longest = longest
        self._by_id: dict[int, Lease] = {}
        self._by_word: dict[int, Lease] = {}
        self._ended: OrderedDict[int, None] = OrderedDict()
        self._next_deadline = math.inf

    def __len__(self) -> int:
        return len(self._by_id)

    def grant(
        self,
        lease_id: int,
        request_id: str,
        word_idx: int,
        duration_s: float,
        *,
        engines: int = 1,
        running: bool = False,
    ) -> Lease:
        """Grants a lease. Its id may leave the process only after this call.

        `ReplicaTransfer.offer` describes the arguments. The caller holds the pages until the lease has ended.

        Raises:
            InvalidLeaseError: (a ValueError) the id or the word is taken or out of range, or the duration is invalid.
        """
        lease = f"request {request_id!r}: lease {lease_id:#018x}"
        if not CLEARED < lease_id < 1 << 64 or lease_id in self._by_id:
            raise InvalidLeaseError(f"{lease}: its id is taken, or is not a 64-bit number above 0")
        if not 0 <= word_idx < self._num_words or word_idx in self._by_word:
            raise InvalidLeaseError(f"{lease}: word {word_idx} is taken, or outside of 0 to {self._num_words - 1}")
        if not 0 < duration_s < math.inf or engines < 1:
            raise InvalidLeaseError(
                f"{lease}: its duration is {duration_s} s for {engines} engines; both must be above 0"
            )
        granted = self._by_id[lease_id] = self._by_word[word_idx] = Lease(
            lease_id, request_id, word_idx, duration_s, engines
        )
        if not running:
            self.start_clock(lease_id)
        for words in self.words:
            words[word_idx] = lease_id
        return granted

    def start_clock(self, lease_id: int) -> None:
        """Starts the clock of a lease that was granted for a running request. A no-op if the clock already runs."""
        lease = self._by_id.get(lease_id)
        if lease is not None and lease.deadline == math.inf:
            now = self._clock()
            lease.deadline, lease.last_deadline = now + lease.duration_s, now + lease.duration_s * self._longest
            self._next_deadline = min(self._next_deadline, lease.deadline)

    def find(self, lease_id: int) -> Lease | None:
        """Returns the open lease of this id, or None."""
        return self._by_id.get(lease_id)

    def times(self, lease: Lease) -> tuple[float, float | None]:
        """Returns the seconds since the lease's clock started, and the seconds that are left until its deadline.

        Returns 0 and None if the clock has not started.

        Safe from any thread.
        """
        if lease.deadline == math.inf:
            return 0.0, None
        now = self._clock()
        return now - lease.last_deadline + lease.duration_s * self._longest, lease.deadline - now

    def ids(self) -> list[int]:
        """Returns the ids of all open leases."""
        return list(self._by_id)

    def hear(self, note: ReaderNote, at: int = 0) -> Lease | None:
        """Records a note that a reading engine has sent to the local rank with index `at`.

        Returns the lease if the note ended it. Its words are then cleared, and its pages may be freed.
        """
        verdict = self._verdict(note, at)
        self.counts[verdict] += 1
        if verdict != "accepted":
            return None
        lease = self._by_id[note.lease_id]
        if note.verdict == "renew":
            lease.deadline = max(lease.deadline, min(self._clock() + lease.duration_s, lease.last_deadline))
            return None
        lease.ranks[note.engine_id] = note.ranks
        lease.heard.setdefault(note.engine_id, set()).add((at, note.rank))
        if note.verdict == "refused" and not lease.refusal:
            lease.refusal = note.reason or "refused"
        return self._end(lease, lease.refusal or "read") if lease.is_read(len(self.words)) else None

    def _verdict(self, note: ReaderNote, at: int) -> Verdict:
        lease = self._by_id.get(note.lease_id)
        if lease is None:
            return "late" if note.lease_id in self._ended else "unknown"
        if not 0 <= note.rank < note.ranks or lease.ranks.get(note.engine_id, note.ranks) != note.ranks:
            return "malformed"
        if (at, note.rank) in lease.heard.get(note.engine_id, ()):
            return "late" if note.verdict == "renew" else "duplicate"
        return "accepted"

    def end(self, lease_id: int, reason: str) -> Lease | None:
        """Ends a lease, even one that is being read, and returns it with its words cleared; None if it ended before.

        Use this to abort a lease, or if its pages are needed. Readers learn from their fence that the lease has ended.
        """
        lease = self._by_id.get(lease_id)
        return None if lease is None else self._end(lease, reason)

    def expire(self) -> list[Lease]:
        """Ends the leases whose deadline has passed, and returns them with their words cleared."""
        now = self._clock()
        if now < self._next_deadline:
            return []
        over = [lease for lease in self._by_id.values() if lease.deadline <= now]
        for lease in over:
            self._end(lease, f"expired after {lease.duration_s} s without hearing from its readers")
        self._next_deadline = min((lease.deadline for lease in self._by_id.values()), default=math.inf)
        return over

    def _end(self, lease: Lease, reason: str) -> Lease:
        # the words are cleared first, so that from now on no fence accepts pages read under the lease
        for words in self.words:
            words[lease.word_idx] = CLEARED
        lease.ended = reason
        del self._by_id[lease.lease_id], self._by_word[lease.word_idx]
        self._ended[lease.lease_id] = None
        if len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        return lease

    def check(self) -> None:
        """Checks that the lease words and all records of the leases agree.

        Raises:
            InvalidLeaseError: a word does not hold the id of its lease, or an ended lease is recorded as
                open.
        """
        expected = np.zeros(self._num_words, np.uint64)
        for word_idx, lease in self._by_word.items():
            expected[word_idx] = lease.lease_id
            if lease.word_idx != word_idx or lease.ended or self._by_id.get(lease.lease_id) is not lease:
                raise InvalidLeaseError(
                    f"request {lease.request_id!r}: lease {lease.lease_id:#018x} is recorded inconsistently"
                )
        wrong = np.flatnonzero(np.any([words != expected for words in self.words], axis=0))
        if wrong.size or len(self._by_word) != len(self._by_id):
            raise InvalidLeaseError(f"lease words {wrong[:8].tolist()} do not hold the ids of their leases")
