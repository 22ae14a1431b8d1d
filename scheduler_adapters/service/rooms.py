"""Rooms: one attempt at one request, as each side keeps it. Every legal move is in a table, every phase has a deadline.

Prefill's room:

    queued ──► leasing ──► computing ──► offered ──► held ──► over
                    each of the four may go to  ending ──► over

    queued      in the loop, without pages
    leasing     it has pages and runs; a lease was asked for
    computing   the lease stands, and no reader knows of it
    offered     the reader knows, and takes pages while the rest of the prompt runs
    held        the reader knows all; pages are kept until the lease is over
    ending      the lease was revoked; pages are kept until its word is cleared

Decode's room:

    waiting ──► asked ──► offered ──► pulling ──► decoding ──► over
       ▲──────────┴──────────┴───────────┘   another attempt

    waiting     for a prefill process to ask
    asked       a prefill process computes it
    offered     a lease stands there, and is renewed; no pages here yet
    pulling     pages are reserved here, READs are on their way
    decoding    in the loop

From each phase that is not `over` a failure or a cancellation leads to the end. Deadlines are on a monotonic clock of
this process; what the other side is told is a duration. The first reason of a failure is the one that is kept.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from scheduler_adapters.errors import IllegalMoveError

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from kvcache.replica.block_table import BlockTable, PendingImport
    from kvcache.replica.context import TextContext
    from scheduler_adapters.loop import Request
    from scheduler_adapters.service.links import PrefillLink
    from transfer.pull.pull_state import LeaseRef

PREFILL_MOVES: dict[str, frozenset[str]] = {
    "queued": frozenset({"leasing", "over"}),
    "leasing": frozenset({"computing", "held", "ending", "over"}),
    "computing": frozenset({"offered", "held", "ending", "over"}),
    "offered": frozenset({"held", "ending", "over"}),
    "held": frozenset({"ending", "over"}),
    "ending": frozenset({"over"}),
    "over": frozenset(),
}
DECODE_MOVES: dict[str, frozenset[str]] = {
    "waiting": frozenset({"asked", "over"}),
    "asked": frozenset({"offered", "waiting", "over"}),
    "offered": frozenset({"pulling", "waiting", "over"}),
    "pulling": frozenset({"decoding", "waiting", "over"}),
    "decoding": frozenset({"over"}),
    "over": frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimes:
    """Seconds that a prefill process gives each phase.

    Attributes:
        compute_s: most that a reader may ask for.
        lease_s: that a lease stands without a word of its reader.
        step_s: for the transfer thread to do what it was told; beyond it, the process is broken.
    """

    compute_s: float = 600.0
    lease_s: float = 10.0
    step_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """Seconds that a decode process gives each phase.

    Attributes:
        wait_s: for a prefill process to be there.
        prefill_s: for it to compute the prompt.
        room_s: for pages to become free here. A lease lives 20 durations at most.
        pull_s: for the READs.
        decode_s: for the rest of the tokens.
    """

    wait_s: float = 30.0
    prefill_s: float = 120.0
    room_s: float = 120.0
    pull_s: float = 30.0
    decode_s: float = 600.0


MAX_REMEMBERED = 16_384
"""Names that `Recent` keeps: what comes again after so many others is taken for new."""

_Name = TypeVar("_Name", bound="Hashable")


class Recent(Generic[_Name]):
    """Names that were used before, the youngest `most` of them: what comes again is told from what is new."""

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._names: OrderedDict[_Name, None] = OrderedDict()

    def add(self, name: _Name) -> bool:
        """Keep a name. Whether it is new."""
        if name in self._names:
            return False
        self._names[name] = None
        if len(self._names) > self._most:
            self._names.popitem(last=False)
        return True


@dataclass(slots=True, eq=False)
class Room:
    """What both sides keep of a room.

    Attributes:
        request_id: as the client calls the request.
        attempt: a number of decode's, higher for each attempt at any request.
        phase: where it stands.
        deadline: of this phase.
        reason: the first reason of its failure; empty where there is none.
    """

    moves: ClassVar[Mapping[str, frozenset[str]]]

    request_id: str
    attempt: int
    phase: str
    deadline: float
    reason: str = ""

    def move(self, phase: str, deadline: float = math.inf) -> None:
        """Go on to another phase.

        Raises:
            IllegalMoveError: the table has no such move. A bug of ours.
        """
        if phase not in self.moves[self.phase]:
            raise IllegalMoveError(f"request {self.request_id!r}, attempt {self.attempt}: {self.phase} to {phase}")
        self.phase, self.deadline = phase, deadline

    def blame(self, reason: str) -> str:
        """Keep the first reason; returns it."""
        self.reason = self.reason or reason
        return self.reason


@dataclass(slots=True, eq=False)
class PrefillRoom(Room):
    """A room of a prefill process.

    Attributes:
        compute_by: the deadline of its prompt, whatever the phase.
        reader: identity of the connection that asked.
        key: what the loop and the transfer call it.
        chunkwise: the reader takes pages while the prompt runs.
        replica: ours that holds the pages, once there is a lease.
        lease: once asked for.
        table: of the whole prompt, once computed.
        token: the first new token, likewise.
        told: tokens that the reader has been offered.
        silent: the reader need not be told of the end: it asked for it, or is gone.
        final: it would fail elsewhere too.
    """

    moves = PREFILL_MOVES

    compute_by: float = math.inf
    reader: bytes = b""
    key: str = ""
    chunkwise: bool = False
    replica: int = 0
    lease: LeaseRef | None = None
    table: BlockTable | None = None
    token: int | None = None
    told: int = 0
    silent: bool = False
    final: bool = False


@dataclass(slots=True, eq=False)
class DecodeRoom(Room):
    """A room of a decode process. It takes up the next attempt where one fails.

    Attributes:
        request: what the client asked for.
        serial: of its submission; 0 for none.
        emitted: tokens that the client has had before this attempt's first.
        link: the prefill process that was asked.
        load: prompt tokens that it has to compute, as far as is known, and that have not come.
        avoid: names of those where an attempt failed.
        replica: ours.
        lease: of the offers of this attempt.
        table: of the longest offer.
        token: the first new token of this attempt, once offered.
        context: once pages are reserved.
        pending: likewise.
        reasons: why each attempt failed.
    """

    moves = DECODE_MOVES

    request: Request = field(kw_only=True)
    serial: int = 0
    emitted: list[int] = field(default_factory=list)
    link: PrefillLink | None = None
    load: int = 0
    avoid: set[str] = field(default_factory=set)
    replica: int = 0
    lease: LeaseRef | None = None
    table: BlockTable | None = None
    token: int | None = None
    context: TextContext | None = None
    pending: PendingImport | None = None
    reasons: list[str] = field(default_factory=list)

    @property
    def key(self) -> str:
        """What the transfer calls this attempt's pull."""
        return f"{self.request_id}#{self.attempt}"

    @property
    def tokens(self) -> list[int]:
        """The prompt and all that the client has had."""
        return [*self.request.prompt, *self.emitted]

    def has_had(self, table: BlockTable, token: int | None) -> bool:
        """Whether an offer of this attempt says nothing new: it comes again, or after a younger one."""
        if self.token is not None or self.table is None:
            return self.token is not None
        return token is None and table.num_tokens <= self.table.num_tokens
