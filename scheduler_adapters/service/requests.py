"""The states of a request on the prefill side and on the decode side of the service.

A table lists every legal move from one phase to another, and every phase has a deadline.

Every message between the sides belongs to one attempt, named by (request id, attempt).

On the prefill side, each attempt is a request of its own:

    fetching ──► queued ──► leasing ──► computing ──► offered ──► held ──► over
                                 each of the last four may go to  ending ──► over

    fetching    another process is asked for pages of the prompt, or the pages are pulled from it
    queued      the request waits in the loop, and has no pages yet
    leasing     the request has pages and runs; a lease has been requested
    computing   the lease was granted, but the reader has not been told of it
    offered     the reader was told of the lease, and may read pages while the rest of the prompt runs
    held        the reader was told of all pages; they are kept until the lease is over
    ending      the lease was revoked; pages are kept until the lease word is cleared

On the decode side, a request continues with the next attempt when one fails:

    waiting ──► asked ──► offered ──► pulling ──► decoding ──► over
       ▲──────────┴──────────┴───────────┘   another attempt

    waiting     no prefill process has been asked yet
    asked       a prefill process was asked to compute the prompt
    offered     the prefill process has granted a lease, which is renewed; no pages are reserved here yet
    pulling     pages are reserved here, and READs fill them
    decoding    the request runs in the loop

From any phase, a failure or a cancellation leads to `over`. Deadlines are times of this process's monotonic clock, so
messages to the other side carry durations instead. If several reasons for a failure are reported, the first one is
kept.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache.replica.block_table import BlockTable, PendingImport
from kvcache.replica.context import TextContext
from scheduler_adapters.errors import IllegalMoveError
from scheduler_adapters.loop import Request
from scheduler_adapters.service import messages as msg
from scheduler_adapters.service.offers import Offers
from scheduler_adapters.service.prefill_router import OwnPages, PrefillConnection, route
from transfer.pull.pull_state import PullTimes
from transfer.pull.source import Source
from transfer.wire.prompt import Prompt

if TYPE_CHECKING:
    from transfer.spans import HandoverSpan

PREFILL_MOVES: dict[str, frozenset[str]] = {
    "fetching": frozenset({"queued", "over"}),
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

_PARTS = {"waiting": "queue", "asked": "lease", "offered": "room", "pulling": "read"}
"""The part of a hand-over's trace (`transfer.spans.PARTS`) that each phase belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimes:
    """Time limits of a prefill process, in seconds.

    Attributes:
        compute_s: the longest time that a reader may allow for its prompt.
        lease_s: duration of a lease that its reader does not renew.
        step_s: time for the transfer thread to carry out a command. A process that takes longer counts as broken.
    """

    compute_s: float = 600.0
    lease_s: float = 10.0
    step_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimes:
    """Time limits of a decode process, in seconds.

    Attributes:
        wait_s: time until a prefill process is connected.
        prefill_s: time until the prompt is computed.
        room_s: time until pages become free here. The lease must be renewed during this time, which is possible for at
            most 20 times the lease's duration.
        pull_s: time for the READs.
        decode_s: time for the remaining tokens.
    """

    wait_s: float = 30.0
    prefill_s: float = 120.0
    room_s: float = 120.0
    pull_s: float = 30.0
    decode_s: float = 600.0


MAX_REMEMBERED = 16_384
"""The most names that `Recent` remembers. A name that recurs after that many others counts as new."""

_Name = TypeVar("_Name", bound="Hashable")


class Recent(Generic[_Name]):
    """Remembers the names that were added last, in order to recognise a repeated name.

    `most` is the number of names that are kept.
    """

    def __init__(self, most: int = MAX_REMEMBERED) -> None:
        self._most = most
        self._names: OrderedDict[_Name, None] = OrderedDict()

    def add(self, name: _Name) -> bool:
        """Adds a name. Returns whether the name is new."""
        if name in self._names:
            return False
        self._names[name] = None
        if len(self._names) > self._most:
            self._names.popitem(last=False)
        return True


def prompt_of(tokens: Sequence[int] | NDArray[np.int32], cache_salt: str | None) -> Prompt:
    """Returns everything on which the KV of a request depends: its tokens and salt."""
    return Prompt(np.array(tokens, np.int32), "" if cache_salt is None else f"={cache_salt}")


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """The part of a request's state that both the prefill side and the decode side keep.

    Attributes:
        request_id: the client's id for the request.
        attempt: a number that decode increases for each attempt at any request.
        phase: its current phase.
        deadline: the deadline of this phase.
        reason: the first reason of the request's failure; empty if it has not failed.
        span: the trace span of the hand-over, if hand-overs are traced.
    """

    moves: ClassVar[Mapping[str, frozenset[str]]]

    request_id: str
    attempt: int
    phase: str
    deadline: float
    reason: str = ""
    span: HandoverSpan | None = None

    def move(self, phase: str, deadline: float = math.inf) -> None:
        """Moves the request to another phase.

        Raises `IllegalMoveError` if the table has no such move, which is a bug in the service.
        """
        if phase not in self.moves[self.phase]:
            raise IllegalMoveError(
                f"request {self.request_id!r}, attempt {self.attempt}: the phase {phase} cannot follow {self.phase}"
            )
        self.phase, self.deadline = phase, deadline
        if self.span is not None:
            self.trace(self.span)

    def trace(self, span: HandoverSpan) -> None:
        """Tells the span that a new phase has begun. A side that traces overrides this method; here it does nothing."""

    def blame(self, reason: str) -> str:
        """Records `reason` unless an earlier reason is recorded. Returns the first reason."""
        self.reason = self.reason or reason
        return self.reason


@dataclass(slots=True, eq=False)
class PrefillRequest(TrackedRequest):
    """One attempt at a request, on the prefill side.

    Attributes:
        compute_by: deadline for the whole computation of the prompt, in any phase.
        reader: identity of the reader's connection.
        key: the name of the request in the loop and in the exchange.
        chunkwise: whether the reader accepts pages while the rest of the prompt is computed.
        new_pages: whether an offer leaves out pages that an earlier one has named.
        replica: the local replica that holds the pages, once the request is admitted.
        cached_tokens: prompt tokens that this process found in its cache.
        admitted: time at which the request got pages.
        source: the lease, and the address at which the reader reads. Set when a lease is requested.
        table: block table of the pages that no offer has named yet. Set when the prompt has been computed.
        token: the first new token. Set when the prompt has been computed.
        told: number of tokens whose pages were offered to the reader.
        prompt: the prompt to compute.
        digest: digest of the whole prompt. Set by `digest_ahead`.
        silent: True if the reader gets no message about the end of the request, because it asked for the end or is
            gone.
        final: whether the request would fail at any other process too.
    """

    moves = PREFILL_MOVES

    compute_by: float = math.inf
    reader: bytes = b""
    key: str = ""
    chunkwise: bool = False
    new_pages: bool = False
    replica: int = 0
    cached_tokens: int = 0
    admitted: float = 0.0
    source: Source | None = None
    table: BlockTable | None = None
    token: int | None = None
    told: int = 0
    prompt: Prompt = field(kw_only=True)
    digest: bytes = b""
    silent: bool = False
    final: bool = False

    def digest_of(self, num_tokens: int) -> bytes:
        """Returns the digest of the first `num_tokens` tokens of the request's prompt."""
        known = self.digest and num_tokens == len(self.prompt.token_ids)
        return self.digest if known else self.prompt.digest(num_tokens)

    def digest_ahead(self) -> None:
        """Computes the digest of the whole prompt in advance, while no reader waits for it."""
        self.digest = self.digest or self.prompt.digest(len(self.prompt.token_ids))


def spec_of(message: msg.Submit) -> Request:
    """Returns the loop's description of a client's request."""
    return Request(
        message.request_id,
        message.prompt,
        message.max_new_tokens,
        cache_salt=message.cache_salt,
        ignore_eos=message.ignore_eos,
    )


def span_of(message: msg.Submit, decode: str) -> HandoverSpan:
    """Returns a new trace span for a request's hand-over. Its first part, the queue, has begun."""
    from transfer.spans import HandoverSpan  # noqa: PLC0415  (an extra, for who wants it)

    span = HandoverSpan(
        {"traceparent": message.traceparent},
        {"gen_ai.request.id": message.request_id, "pagewire.decode": decode},
    )
    span.begin("queue")
    return span


class Importing(NamedTuple):
    """An open import, and the context for which it reserves pages."""

    context: TextContext
    pending: PendingImport


@dataclass(slots=True, eq=False)
class DecodeRequest(TrackedRequest):
    """A request of a decode process. It continues with another attempt if one fails.

    Attributes:
        spec: the loop's description of the client's request.
        serial: serial number of its submission; 0 if there is none.
        wanted: name of the prefill process to ask first; empty for any.
        emitted: tokens that the client already has.
        sources: processes that may have pages of the prompt, according to the client.
        prefill: connection to the prefill process that was asked.
        load: prompt tokens that were added to that process's load. They are subtracted when the first token arrives.
        avoid: names of prefill processes at which an attempt has failed.
        offers: page offers of the current attempt.
        replica: the local replica that will get the pages and renews the lease. Set by the first offer.
        importing: the open import; None before pages are reserved and after the import has ended.
        newest: the latest context. The next context reuses its page hashes.
        digest: the number of tokens sent to prefill, and the digest of these tokens. Computed while prefill runs.
        reasons: why each attempt failed.
        refusals: attempts that a prefill process has refused before it began.
        weights: names the weights that serve the request.
    """

    moves = DECODE_MOVES

    spec: Request = field(kw_only=True)
    serial: int = 0
    wanted: str = ""
    sources: tuple[msg.KVSource, ...] = ()
    emitted: list[int] = field(default_factory=list[int])
    prefill: PrefillConnection | None = None
    load: int = 0
    avoid: set[str] = field(default_factory=set[str])
    offers: Offers = field(default_factory=Offers)
    replica: int = 0
    importing: Importing | None = None
    newest: TextContext | None = None
    digest: tuple[int, bytes] = (0, b"")
    reasons: list[str] = field(default_factory=list[str])
    refusals: int = 0
    weights: str = ""

    @classmethod
    def of(cls, message: msg.Submit, spec: Request, attempt: int, deadline: float) -> DecodeRequest:
        """Returns a new request, in the phase in which it waits for a prefill process."""
        wanted, sources = message.prefill, message.kv_sources
        request_id, serial = message.request_id, message.serial
        return cls(request_id, attempt, "waiting", deadline, spec=spec, serial=serial, wanted=wanted, sources=sources)

    @property
    def key(self) -> str:
        """The name of this attempt's pull in the exchange."""
        return f"{self.request_id}#{self.attempt}"

    @property
    def tokens(self) -> list[int]:
        """The prompt of the next attempt: the request's prompt, followed by all tokens that the client already has."""
        return [*self.spec.prompt, *self.emitted]

    @property
    def offer(self) -> msg.PagesOffer | None:
        """The latest offer of this attempt that was processed."""
        return self.offers.newest

    @property
    def has_ended_prefill(self) -> bool:
        """Whether the first token of the request's current attempt has been offered."""
        return self.offer is not None and self.offer.token is not None

    def trace(self, span: HandoverSpan) -> None:
        """Updates the span.

        Each attempt is a separate hand-over. The hand-over ends when its pages are committed or when the attempt ends.
        """
        if self.phase in ("waiting", "decoding", "over"):
            error = self.reasons[-1] if self.phase == "waiting" else self.reason
            prefill = "" if self.prefill is None else self.prefill.name
            tokens = 0 if self.offer is None else self.offer.table.num_tokens
            span.end(error, attempt=self.attempt, prefill=prefill, tokens=tokens, phase=self.phase)
        if self.phase in _PARTS:
            span.begin(_PARTS[self.phase])

    def next_offer(self) -> msg.PagesOffer | None:
        """Returns the next offer to process; None if there is none or the attempt no longer uses offers."""
        is_open = self.phase in ("asked", "offered", "pulling")
        return self.offers.take() if is_open else None

    def fenced(self, times: PullTimes | None) -> None:
        """Divides the part "pulling" of the span into read, fence and commit, at the times of the pull's fence."""
        if self.span is not None and times is not None:
            self.span.begin("fence", times.fence_at)
            self.span.begin("commit", times.over_at)

    def news(self, tokens: tuple[int, ...], finished: msg.Finished | None = None) -> msg.Tokens:
        """Returns the message that tells the frontend of new tokens, and of the end if `finished` is given."""
        return msg.Tokens(
            request_id=self.request_id,
            tokens=tokens,
            finished=finished,
            error=self.reason if finished == "error" else "",
            serial=self.serial,
            weights=self.weights,
            cached_tokens=0 if finished is None or self.offer is None else self.offer.cached_tokens,
        )

    def new_context(self) -> TextContext:
        """Returns a new context with all tokens that are known so far.

        A request needs several contexts, one after another. Each context reuses the page hashes of the previous
        context.
        """
        limit, before = len(self.spec.prompt) + self.spec.max_new_tokens, self.newest
        known = before is not None and before.end_idx == len(self.spec.prompt) + len(self.emitted)
        tokens = before.tokens if before is not None and known else self.tokens
        self.newest = TextContext(tokens, limit, self.request_id, self.spec.cache_salt)
        if before is not None and before.prefix_hasher is not None:
            self.newest.prefix_hasher = before.prefix_hasher.copy()
        return self.newest

    def foreign(self, offer: msg.PagesOffer) -> str:
        """Returns the reason why an offer's pages do not belong to this request's prompt, or "" if they do."""
        count, theirs = offer.table.num_tokens, offer.prompt_digest
        # the earlier context's array of tokens is reused, because converting a list takes ten times as long
        known = self.newest
        if known is None or known.end_idx < count:
            known = self.new_context()
        if count == self.digest[0]:
            own = self.digest[1]
        else:
            prompt = prompt_of(known.tokens, self.spec.cache_salt)
            own = prompt.digest(count)
            if offer.token is None and self.digest[0] != known.end_idx:
                self.digest = known.end_idx, prompt.digest(known.end_idx)
        if theirs == own:
            return ""
        shown = theirs.hex()[:16], own.hex()[:16]
        return f"the digest of their {count} tokens is {shown[0]}, that of the request's is {shown[1]}"

    def ask(
        self,
        connections: Sequence[PrefillConnection],
        within_s: float,
        *,
        chunkwise: bool,
        own: OwnPages | None = None,
    ) -> bool:
        """Asks a prefill process to compute the prompt. Returns whether a process accepted the message.

        `own` are the pages of the prompt that this process has cached.
        """
        message = msg.Prefill(
            request_id=self.request_id,
            attempt=self.attempt,
            prompt=tuple(self.tokens),
            within_s=within_s,
            chunkwise=chunkwise,
            new_pages=True,
            cache_salt=self.spec.cache_salt,
            kv_sources=self.sources,
            weights=self.weights,
        )
        asked = route(connections, message, self.avoid, self.wanted, own)
        if asked is None:
            return False
        self.prefill, self.load = asked
        return True

    def begin_anew(self, attempt: int, deadline: float) -> None:
        """Prepares another attempt after a failure, preferably at another prefill process."""
        if self.prefill is not None:
            self.avoid.add(self.prefill.name)
        self.move("waiting", deadline)
        self.attempt = attempt
        self.offers, self.prefill = Offers(), None

    def relieve(self) -> None:
        """Subtracts this prompt from the load of the process that was asked."""
        if self.prefill is not None:
            self.prefill.load = max(0, self.prefill.load - self.load)
        self.load = 0
