"""Request contexts: the tokens of a request, the number of tokens that are computed, and the hasher of its pages."""

import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from kvcache.arguments import check_request_id, integer, of_kind, shown, whole
from kvcache.errors import InvalidRequestError, SequenceTooLongError
from kvcache.params import HashAlgorithm
from kvcache.replica.hashing import ExtraKeys, PrefixHasher
from kvcache.retention import Retention
from kvcache.types import RequestID
from kvcache.weights import UNSAID, Segments

_NEW_CAPACITY = 64
_NO_KEYS: ExtraKeys = ()
NEVER = 1 << 62
_NOWHERE: tuple["memoryview[int] | list[int]", int] = [0], 0  # where contexts count that count along in no manager
ContextIndices = tuple[int, int, int]
"""`start_idx`, `active_idx` and `end_idx` of a context."""
FUTURE_TOKEN = -999
"""The last entry of a request's tokens while a step is in flight. It stands for the token that the step yields."""


class Context(Protocol):
    """The interface through which the manager reads and changes a request. `TextContext` documents each member.

    An object may also have these optional attributes: `cache_salt` (str), `extra_keys` (`ExtraKeys`), `max_staleness`
    (int), `retention` (`Retention`), `computed_idx`, and `prefix_hasher`. `prefix_hasher` must be None at first. While
    a request waits or is preempted, the manager keeps the hashes of the request's pages in it.

    `cache_salt` and `extra_keys` may change until the request gets pages. From then on they must stay the same until
    the request is released. If they do change, `maybe_reserve`, `step` and imports refuse the context.

    Each token must fit into 32 bits, because pages are named by 32-bit tokens. A call refuses other tokens.

    A known token must never be replaced. A context that drops tokens from its end (such as a rejected draft) must have
    the attribute `prefix_hasher`, and must set it to None when it drops them. Otherwise the pages that the request
    fills later would be published under the digests of the dropped tokens.

    If tokens before `start_idx` are still to be computed by a step in flight, `computed_idx` must be the number of
    tokens that are already computed. `step` then publishes no page that has tokens beyond it.

    The manager itself keeps track of how much of a request is computed. When the request gets its first pages, the
    manager calls `set_token_indices` to move `start_idx`: forward to the end of a prefix hit, or back if the request
    has lost the pages that it had before. When the request is released, the manager makes all known tokens active.
    """

    @property
    def request_id(self) -> RequestID: ...
    @property
    def tokens(self) -> NDArray[np.integer[Any]]: ...
    @property
    def start_idx(self) -> int: ...
    @property
    def active_idx(self) -> int: ...
    @property
    def end_idx(self) -> int: ...
    @property
    def active_length(self) -> int: ...
    @property
    def current_length(self) -> int: ...
    def update(self, token: int) -> None: ...
    def set_token_indices(
        self, start_idx: int | None = None, active_idx: int | None = None, end_idx: int | None = None
    ) -> None: ...


class Leader(Protocol):
    """A `Batch` as its contexts see it.

    The batch advances many contexts at once, and each context catches up when it is read. `index` is the context's
    index in the batch. `end` is the number of tokens that this context already has.
    """

    def catch_up(self, index: int, end: int) -> None: ...
    def lose(self, index: int, end: int) -> None: ...


class TextContext:
    """One request: its tokens, and which of them are cached, run in the next step, or wait for a later chunk.

        0 ........ start_idx ........ active_idx ........ end_idx
          cached             run now              later chunks

    Args:
        tokens: the prompt, 1-D, each from 0 to 2**31 - 1.
        max_length: the most tokens that the request may ever have, including generated ones.
        request_id: a new id is generated if this is None.
        cache_salt: requests with different salts never share a page. Salt and keys may be changed while the request
            waits. Changing them while the request holds pages is an error: the next `maybe_reserve` for more than one
            step, or the `step` that publishes the request's next page, refuses the context and changes nothing.
        retention: what the client knows about the future use of these pages.
        extra_keys: `(position, key)` for each input other than tokens. The KV of the token at `position`, and of all
            later tokens, depends on this input. Examples are the name of a LoRA adapter (position 0) and the digest of
            an image (the position of its first token). Requests share pages only if their keys are equal, too.
        max_staleness: the request may use cached pages of weights that are at most so many switches old
            (`PagedKVCacheManager.set_weights`). It counts when the request gets its first pages.

    A copy (`copy`, `pickle`) has its own tokens and indices, and is a separate object for the same request. The manager
    accepts it if the request has no pages yet. `fork` makes a context for another request.

    Raises:
        InvalidRequestError: (a ValueError) tokens that are empty, not 1-D, not integers, or out of range; an id or salt
            that is not a string, or not valid UTF-8; keys of the wrong shape; an invalid retention or staleness.
        SequenceTooLongError: (a RuntimeError) more tokens than `max_length`.

    Examples:
        >>> request = TextContext([5, 6, 7], max_length=100, request_id="r")
        >>> request
        TextContext('r', start=0, active=3, end=3)
        >>> request.update(8)  # the three tokens are computed, and the model has sampled the next one
        >>> request
        TextContext('r', start=3, active=4, end=4)
    """

    __slots__ = (
        *("__weakref__", "_active", "_buffer", "_cells", "_counts", "_end", "_flight", "_leader", "_member"),
        *("_start", "_until", "hint", "max_length", "named", "prefix_hasher", "request_id"),
        "staleness",
    )

    _cells: "memoryview[int]"  # of `_buffer`, because assigning an item of it takes half the time; valid below `_until`

    refused = False  # whether setting the indices has failed; always False, because `run_from` never raises here

    def __init__(
        self,
        tokens: Sequence[int] | NDArray[np.integer],
        max_length: int,
        request_id: RequestID | None = None,
        cache_salt: str | None = None,
        retention: Retention | None = None,
        extra_keys: Sequence[tuple[int, bytes]] = (),
        max_staleness: int = 0,
    ) -> None:
        if request_id is not None:
            check_request_id(request_id, "TextContext")
        self.request_id: RequestID = uuid.uuid4().hex if request_id is None else request_id
        self.max_length = whole(f"request {self.request_id!r}: max_length", max_length, 1, error=InvalidRequestError)
        self._leader: Leader | None = None  # the batch that advances this context
        self._member = 0
        # the first token that the step in flight runs; None if no step is in flight whose token is not known yet
        self._flight: int | None = None
        self._counts = _NOWHERE  # an array of a manager, and the context's place in it: see `count_along`
        # An update of a context with fewer tokens needs no check of the context. It is 0 after every other change.
        self._until = 0
        self.prefix_hasher: PrefixHasher | None = None
        # The content of pages depends on tokens, salt and keys. Salt and keys are in one tuple, so that usually one
        # identity test shows that neither has changed.
        self.named = (checked_salt(self.request_id, cache_salt), checked_keys(self.request_id, extra_keys))
        self.retention = retention
        self.max_staleness = max_staleness
        self._buffer = checked_tokens(self.request_id, tokens)
        count = len(self._buffer)
        if count > self.max_length:
            raise SequenceTooLongError(
                f"request {self.request_id!r}: has {count} tokens, but its max_length is {self.max_length}"
            )
        self._start: int = 0
        self._active: int = count
        self._end: int = count

    @property
    def cache_salt(self) -> str | None:
        return self.named[0]

    @cache_salt.setter
    def cache_salt(self, salt: str | None) -> None:
        self.named = (checked_salt(self.request_id, salt), self.named[1])
        # A batch keeps the hashers of its requests. When a context leaves its batch, the batch reads the context and
        # its new hasher again.
        self.leave()

    @property
    def extra_keys(self) -> ExtraKeys:
        return self.named[1]

    @extra_keys.setter
    def extra_keys(self, keys: Sequence[tuple[int, bytes]]) -> None:
        self.named = (self.named[0], checked_keys(self.request_id, keys))
        self.leave()

    @property
    def retention(self) -> Retention | None:
        return self.hint

    @retention.setter
    def retention(self, retention: Retention | None) -> None:
        name = f"request {self.request_id!r}: retention"
        kinds = (Retention, type(None))
        # The manager reads `hint` instead of the property `retention`, because the property takes three times as long.
        self.hint = of_kind(name, retention, kinds, "a Retention or None", InvalidRequestError)

    @property
    def max_staleness(self) -> int:
        return self.staleness

    @max_staleness.setter
    def max_staleness(self, switches: int) -> None:
        # The manager reads `staleness`, as it reads `hint`.
        self.staleness = checked_staleness(self.request_id, switches)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All known tokens, int32 `[end_idx]`; a view, valid until the next `update`."""
        if self._leader is not None:
            self._leader.catch_up(self._member, self._end)
        return self._buffer[: self._end]

    @property
    def start_idx(self) -> int:
        if self._leader is not None:
            self._leader.catch_up(self._member, self._end)
        return self._start

    @property
    def computed_idx(self) -> int:
        """The number of computed tokens before `start_idx`. Tokens that a step in flight runs are not computed yet."""
        if self._leader is not None:
            self._leader.catch_up(self._member, self._end)
        return self._start if self._flight is None else min(self._start, self._flight)

    @property
    def has_future_token(self) -> bool:
        """Whether a step is in flight for which `realize_future_token` has not been called yet."""
        if self._leader is not None:
            self._leader.catch_up(self._member, self._end)
        return self._flight is not None

    @property
    def active_idx(self) -> int:
        if self._leader is not None:
            self._leader.catch_up(self._member, self._end)
        return self._active

    @property
    def end_idx(self) -> int:
        if self._leader is not None:
            self._leader.catch_up(self._member, self._end)
        return self._end

    @property
    def active_length(self) -> int:
        if self._leader is not None:
            self._leader.catch_up(self._member, self._end)
        return self._active - self._start

    current_length = end_idx

    @property
    def indices(self) -> ContextIndices:
        """`start_idx`, `active_idx` and `end_idx` as one tuple. Reading all three takes as long as reading one."""
        if self._leader is not None:
            self._leader.catch_up(self._member, self._end)
        return self._start, self._active, self._end

    def run_from(self, start: int, active: int) -> None:
        """Set `start_idx` to `start`, and `active_idx` to `active`. The caller ensures `start < active <= end_idx`."""
        self.leave()
        self._start, self._active = start, active

    def count_along(self, starts: "memoryview[int]", place: int) -> None:
        """Keep `start_idx` in `starts[place]` as long as this context only decodes.

        While it is below `NEVER`, the context runs the token at this index, which is its last one, and has only been
        updated since this call. A manager that has checked the context before this call then needs neither to read nor
        to check it again. If the context runs several tokens, it begins to count with its next update. Does nothing if
        the next update does not yield a token, or if the context follows a leader or has a future token.
        """
        if self._leader is None and self._flight is None and self._active == self._end:
            if self._counts is not _NOWHERE:
                self.stop_counting()
            self._counts = starts, place
            if self._start + 1 == self._active:
                starts[place] = self._start

    def stop_counting(self) -> None:
        """From now on a manager must read the context. Called before any change except `update`."""
        if self._counts is _NOWHERE:
            return
        starts, place = self._counts
        starts[place] = NEVER
        self._counts = _NOWHERE  # set last: no other context gets a place in which this one still counts

    def update(self, token: int) -> None:
        """Record the model's result for the active tokens.

        If the active tokens reach the end of the known tokens, `token` is appended. Otherwise a chunk of the prompt has
        run, and the model's output has no meaning: `token` is dropped, and the other known tokens become active. Raises
        `InvalidRequestError` if the token is out of range, and `SequenceTooLongError` if the request already has
        `max_length` tokens.
        """
        end = self._end
        if end >= self._until or type(token) is not int or not 0 <= token < 1 << 31:
            checked = self._checked_update(token)
            if checked is None:
                return
            token, end = checked, self._end
        starts, place = self._counts
        self._cells[end] = token
        self._start = starts[place] = end
        self._active = self._end = end + 1

    def _checked_update(self, token: object) -> int | None:
        """Returns the token of an update, for which the context then has room.

        If a chunk of the prompt has run, makes the other known tokens active, and returns None.
        """
        if self._leader is not None:
            self.leave()
        if self._flight is not None:
            self._refuse_future("update")
        if self._active < self._end:
            self._start, self._active = self._active, self._end
            return None
        checked = token if type(token) is int and 0 <= token < 1 << 31 else self._checked_token(token)
        if self._end >= self.max_length:
            self._refuse_full()
        if self._end == len(self._buffer):
            self._grow(1)
        if self._end >= self._until:
            self._cells, self._until = self._buffer.data, min(len(self._buffer), self.max_length)
        return checked

    def update_with_future_token(self) -> None:
        """Do the same as `update` while the step that runs the active tokens is in flight (`fetch_ahead`).

        `FUTURE_TOKEN` takes the place of the step's token, so that the next step can be planned. `realize_future_token`
        must be called before another update. Raises the errors of `update`.
        """
        self.leave()
        if self._flight is not None:
            self._refuse_future("update_with_future_token")
        if self._active == self._end:
            self._refuse_full()
            self.append_future(self._start, self._end + 1)
        else:
            self._flight = self._start
            self._start, self._active = self._active, self._end

    def realize_future_token(self, token: int) -> None:
        """Record the token of the step in flight. The tokens that the step ran then count as computed.

        `token` is dropped if the step ran a chunk of the prompt that is not the last one. The request may have been
        released meanwhile. Raises `InvalidRequestError` if the token is out of range, or if no step is in flight.
        """
        self.leave()
        if self._flight is None:
            raise InvalidRequestError(
                f"request {self.request_id!r}: realize_future_token was called, but the request has no future token"
            )
        if self._buffer[self._end - 1] == FUTURE_TOKEN:
            self._buffer[self._end - 1] = self._checked_token(token)
        self._flight = None

    def set_token_indices(
        self, start_idx: int | None = None, active_idx: int | None = None, end_idx: int | None = None
    ) -> None:
        """Set the given indices. A smaller `end_idx` drops tokens from the end, but never a future token.

        Raises `InvalidRequestError`, and changes nothing, unless `0 <= start_idx < active_idx <= end_idx <= tokens
        known`.
        """
        self.leave()
        start = self._start if start_idx is None else self._index("start_idx", start_idx)
        end = self._end if end_idx is None else self._index("end_idx", end_idx)
        active = self._active if active_idx is None else self._index("active_idx", active_idx)
        if not 0 <= start < active <= end <= self._end:
            raise InvalidRequestError(
                f"request {self.request_id!r}: start {shown(start)}, active {shown(active)}, end {shown(end)} "
                f"are not ordered within its {self._end} tokens"
            )
        if end < self._end and self._flight is not None and self._buffer[self._end - 1] == FUTURE_TOKEN:
            self._refuse_future(f"set_token_indices with end_idx {end} of {self._end}")
        if end < self._end and self.prefix_hasher is not None and self.prefix_hasher.num_tokens > end:
            self.prefix_hasher = None  # the old hasher has digests of pages with dropped tokens
        self._start, self._active, self._end = start, active, end

    def reset(self) -> None:
        """Make every known token active. The manager calls this when it releases the request."""
        self.leave()
        self._start, self._active = 0, self._end

    def __getstate__(self) -> tuple[dict[str, Any] | None, dict[str, Any]]:
        # `tokens` is read first, because this applies the batch's updates. The copied context belongs to no batch.
        tokens = self.tokens.copy()
        if self._flight is not None:
            self._refuse_future("a copy")
        plain, slots = cast("tuple[dict[str, Any] | None, dict[str, Any]]", super().__getstate__())
        slots.pop("_cells", None)
        slots |= {"_buffer": tokens, "_leader": None, "_counts": _NOWHERE, "_until": 0, "prefix_hasher": None}
        return plain, slots

    def fork(self, request_id: RequestID | None = None) -> "TextContext":
        """Returns a context of another request with the same tokens, indices, salt, keys and `max_staleness`.

        While a step is in flight, the new context has only the known tokens, and runs from the end of the computed
        tokens.
        """
        tokens, start, active = self.tokens, self.computed_idx, self.active_idx
        if tokens[-1] == FUTURE_TOKEN:
            tokens, active = tokens[:-1], len(tokens) - 1
        twin = TextContext(tokens, self.max_length, request_id, self.cache_salt, self.retention, self.extra_keys)
        twin.staleness = self.staleness
        twin.set_token_indices(start_idx=start, active_idx=active)
        twin.prefix_hasher = None if self.prefix_hasher is None else self.prefix_hasher.copy()
        return twin

    def follow(self, leader: "Leader", index: int) -> None:
        """Let `leader` advance this context until `leave` is called. Leaves the previous leader first.

        `index` is the context's index in `leader`.
        """
        self.leave()
        self._member = index  # set first, because `leader` needs it as soon as it advances this context
        self._leader = leader

    def catch_up(self, leader: "Leader", index: int) -> None:
        """Apply the updates of `leader` that this context lacks, if the context follows `leader`."""
        if self._leader is leader:
            leader.catch_up(index, self._end)

    def leave(self) -> None:
        """Apply the leader's updates that this context lacks, and stop following the leader. Also stops counting."""
        self._until = 0
        if self._counts is not _NOWHERE:
            self.stop_counting()
        if self._leader is not None:
            self._leader.lose(self._member, self._end)
            # Cleared last. If an interrupt comes before this line, the next call finds no update that the context
            # lacks.
            self._leader = None

    def append_one(self, token: int, start: int, active: int) -> None:
        """Do `append` for a single token, in half the time."""
        if self._end == len(self._buffer):
            self._grow(1)
        self._buffer[self._end] = token
        self._start, self._active, self._end = start, active, self._end + 1

    def append(self, tokens: NDArray[np.int32], start: int, active: int) -> None:
        """Apply updates of the leader: append `tokens`, and set `start_idx` to `start` and `active_idx` to `active`."""
        end = self._end + len(tokens)
        if end > len(self._buffer):
            self._grow(len(tokens))
        self._buffer[self._end : end] = tokens
        self._start, self._active, self._end = start, active, end

    def __repr__(self) -> str:
        return f"TextContext({self.request_id!r}, start={self.start_idx}, active={self.active_idx}, end={self.end_idx})"

    def append_future(self, start: int, end: int) -> None:
        """Append the future token of a step in flight that runs the tokens from token `start` on."""
        self._flight = start  # set before the token is appended: an interrupt must not leave the token without it
        self.append_one(FUTURE_TOKEN, end - 1, end)

    def realize(self, token: int) -> None:
        """Replace the context's future token, if any, with the real `token` that the leader has received."""
        if self._flight is not None:
            self._buffer[self._end - 1] = token
            self._flight = None

    def _refuse_future(self, call: str) -> NoReturn:
        raise InvalidRequestError(
            f"request {self.request_id!r}: {call} was called while its last token is still a future token: "
            "call realize_future_token first"
        )

    def _refuse_full(self) -> None:
        if self._end >= self.max_length:
            raise SequenceTooLongError(
                f"request {self.request_id!r}: token {self._end + 1} is past its max_length {self.max_length}"
            )

    def _checked_token(self, token: object) -> int:
        found = self._index("token", token)
        if not 0 <= found < 1 << 31:
            raise InvalidRequestError(f"request {self.request_id!r}: token {shown(found)} is not within 0 to 2**31 - 1")
        return found

    def _index(self, name: str, value: object) -> int:
        found = integer(value)
        if found is None:
            raise InvalidRequestError(f"request {self.request_id!r}: {name} is {shown(value)}: an integer is needed")
        return found

    def _grow(self, count: int) -> None:
        room = min(self.max_length, max(_NEW_CAPACITY, 2 * self._end, self._end + count))
        grown = np.empty(room, np.int32)
        grown[: self._end] = self._buffer[: self._end]
        self._buffer = grown


def chunk_end(indices: ContextIndices, start: int) -> int:
    """Returns the token at which a chunk that begins at token `start` ends.

    `indices` are the context's indices before its start was moved to `start`. `indices` describe the planned chunk. If
    `start` is not within the planned chunk, another chunk of the same length begins at `start`.
    """
    before, active, end = indices
    return active if start < active else min(end, start + active - before)


class ReadContext:
    """A snapshot of a caller's own context, taken at the start of a call. Reading it later in the call cannot raise.

    `run_from` sets the indices of the caller's context. If that context raises an error, its old indices are set again.
    `refused` says whether setting the old indices succeeded.
    """

    __slots__ = (
        *("_began", "_hasher", "active_idx", "end_idx", "hint", "named", "own", "refused"),
        *("request_id", "staleness", "start_idx", "tokens"),
    )

    def __init__(self, own: Context) -> None:
        self.own = own
        self.request_id: RequestID = own.request_id
        self.start_idx, self.active_idx, self.end_idx = self._began = _indices_of(own)
        self.tokens: NDArray[np.integer[Any]] = own.tokens[: self.end_idx]
        # a context that was checked before may give other values now
        if not 0 <= self.start_idx <= self.active_idx <= self.end_idx == len(self.tokens):
            raise InvalidRequestError(
                f"request {self.request_id!r}: start {shown(self.start_idx)}, active {shown(self.active_idx)}, end "
                f"{shown(self.end_idx)} are not ordered within its {len(self.tokens)} tokens"
            )
        if self.tokens.dtype.itemsize >= 4 and self.tokens.dtype != np.int32:
            _refuse_wide(self.request_id, self.tokens)
        self.named = salt_and_keys(own)
        self.staleness = checked_staleness(self.request_id, getattr(own, "max_staleness", 0))
        hint: object = getattr(own, "retention", None)
        self.hint = hint if isinstance(hint, Retention) else None  # an invalid hint is no reason to refuse the call
        hasher: object = getattr(own, "prefix_hasher", None)
        self._hasher = hasher if isinstance(hasher, PrefixHasher) else None
        self.refused = False

    @property
    def indices(self) -> ContextIndices:
        return self.start_idx, self.active_idx, self.end_idx

    @property
    def prefix_hasher(self) -> PrefixHasher | None:
        """The hasher that the caller's context carries. None if the context carries no hasher."""
        return self._hasher

    @prefix_hasher.setter
    def prefix_hasher(self, hasher: PrefixHasher) -> None:
        try:
            if hasattr(self.own, "prefix_hasher"):
                self.own.prefix_hasher = hasher  # pyright: ignore[reportAttributeAccessIssue] - an optional attribute
                self._hasher = hasher
        except Exception:  # noqa: BLE001 - the caller's code: if it cannot carry the hasher, the manager keeps it
            self._hasher = None

    def run_from(self, start: int, active: int) -> None:
        """Set `start_idx` and `active_idx`. Raises `InvalidRequestError` if the context then has a different start."""
        own = self.own
        try:
            own.set_token_indices(start_idx=start, active_idx=active)
            self.start_idx, self.active_idx, self.end_idx = _indices_of(own)
        except Exception:
            if _indices_of(own) != self._began:
                own.set_token_indices(start_idx=self._began[0], active_idx=self._began[1])
            self.refused = _indices_of(own) == self._began
            raise
        if self.start_idx != start:
            raise InvalidRequestError(
                f"request {self.request_id!r}: set_token_indices({start}) left start_idx at {self.start_idx}"
            )

    def leave(self) -> None:
        """Do nothing: only a `TextContext` counts along or follows a batch."""

    def reset(self) -> None:
        """Make every known token active, unless the context refuses. `maybe_reserve` moves `start_idx` in any case."""
        with suppress(Exception):  # the caller's code: a release must not fail because of a context
            self.own.set_token_indices(start_idx=0, active_idx=self.own.end_idx)


def _refuse_wide(request_id: str, tokens: NDArray[np.integer[Any]]) -> None:
    """Raise `InvalidRequestError` if a token does not fit into 32 bits.

    Otherwise prompts whose tokens differ only in higher bits would share pages.
    """
    for token in (int(tokens.min()), int(tokens.max())) if tokens.size else ():
        if not -(1 << 31) <= token < 1 << 31:
            raise InvalidRequestError(f"request {request_id!r}: token {token} is not within -2**31 to 2**31 - 1")


SafeContext = TextContext | ReadContext
"""A context that a call may read at any point, even while it changes state, because reading it cannot raise."""


def computed_of(context: Context) -> int:
    """Returns the number of computed tokens: `start_idx`, or `computed_idx` if the context has that attribute."""
    return getattr(context, "computed_idx", context.start_idx)


def read_context(context: Context) -> SafeContext:
    """Returns the context itself if it is a `TextContext`, else a snapshot of it."""
    return context if type(context) is TextContext else ReadContext(context)


def _indices_of(context: Context) -> ContextIndices:
    return context.start_idx, context.active_idx, context.end_idx


def checked_tokens(request_id: str, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.int32]:
    """Returns an int32 copy of `tokens`. Raises `InvalidRequestError` unless it is a non-empty list of token ids."""
    try:
        array = np.asarray(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"request {request_id!r}: its tokens are not a list of integers: {error}") from error
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"request {request_id!r}: tokens of shape {array.shape} and dtype {array.dtype}: "
            "a non-empty list of integers is needed"
        )
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= 1 << 31:
        raise InvalidRequestError(
            f"request {request_id!r}: token {low if low < 0 else high} is not within 0 to 2**31 - 1"
        )
    return array.astype(np.int32, copy=True)


def checked_salt(request_id: str, salt: object) -> str | None:
    """Returns `salt` if it is None or valid UTF-8 text. Raises `InvalidRequestError` otherwise."""
    if salt is None:
        return None
    try:
        if isinstance(salt, str):
            salt.encode()
            return salt
    except UnicodeEncodeError:
        pass
    raise InvalidRequestError(f"request {request_id!r}: cache_salt is {shown(salt)}: UTF-8 text or None is needed")


def checked_keys(request_id: str, keys: object) -> ExtraKeys:
    """Returns `keys` as a tuple of `(position, bytes)`.

    Raises `InvalidRequestError` unless positions and lengths are below 2**31.
    """
    if keys is _NO_KEYS:  # nearly always true, because Python has only one empty tuple
        return _NO_KEYS
    found: list[tuple[int, bytes]] = []
    try:
        pairs = [(position, key) for position, key in cast("Sequence[tuple[object, object]]", keys)]
    except (TypeError, ValueError):
        raise InvalidRequestError(
            f"request {request_id!r}: extra_keys is {shown(keys)}: a list of (position, bytes) is needed"
        ) from None
    for position, key in pairs:
        at = integer(position)
        if at is None or not 0 <= at < 1 << 31 or not isinstance(key, bytes | bytearray) or len(key) >= 1 << 31:
            raise InvalidRequestError(
                f"request {request_id!r}: extra key {shown(key)} at token {shown(position)}: "
                "bytes at a position are needed, with length and position below 2**31"
            )
        found.append((at, bytes(key)))
    return tuple(found)


def checked_staleness(request_id: str, switches: object) -> int:
    """Returns `switches`, at least 0, as an int. Raises `InvalidRequestError` if it is not one."""
    return whole(f"request {request_id!r}: max_staleness", switches, 0, error=InvalidRequestError)


HasherOfRow = Callable[[int, SafeContext], PrefixHasher]
"""Returns the hasher of a request, given its row and context."""


def salt_and_keys(context: Context) -> tuple[str | None, ExtraKeys]:
    """Returns the salt and extra keys of the context. Raises `InvalidRequestError` if one of them is invalid."""
    name, keys = context.request_id, getattr(context, "extra_keys", None)
    return checked_salt(name, getattr(context, "cache_salt", None)), checked_keys(name, () if keys is None else keys)


def hasher_of(
    context: SafeContext, algorithm: HashAlgorithm, page_size: int, segments: Segments = UNSAID
) -> PrefixHasher:
    """Returns a `PrefixHasher` for the context's tokens with this algorithm, page size and `segments`.

    Uses the hasher that the context carries if that one has all of them. If not, makes a new hasher, and stores it in
    the context if the context has an attribute `prefix_hasher`.
    """
    kept = context.prefix_hasher
    if kept is None or not kept.fits(algorithm, page_size, context.named, segments):
        kept = context.prefix_hasher = PrefixHasher(algorithm, page_size, *context.named, segments)
    return kept


def check_context(context: object, call: str) -> None:
    """Raise `InvalidRequestError` unless `context` has the members of a `Context`, with ordered indices."""
    if type(context) is TextContext:
        return
    check_request_id(getattr(context, "request_id", None), f"{call} of {shown(context)}")
    names = ("start_idx", "active_idx", "end_idx", "active_length", "current_length")
    found = [integer(getattr(context, name, None)) for name in names]
    tokens = getattr(context, "tokens", None)
    start, active, end = (-1 if at is None else at for at in found[:3])
    if (
        not 0 <= start <= active <= end
        or found[3:] != [active - start, end]
        or not isinstance(tokens, np.ndarray)
        or cast("NDArray[Any]", tokens).dtype.kind not in "iu"
        or len(cast("NDArray[Any]", tokens)) < end
        or not all(callable(getattr(context, name, None)) for name in ("update", "set_token_indices"))
    ):
        raise InvalidRequestError(
            f"{call}: {shown(context)} is not a request context, or its indices do not fit its tokens"
        )
    salt_and_keys(cast("Context", context))
    checked_staleness(cast("Context", context).request_id, getattr(context, "max_staleness", 0))


def check_fork(parent: Context, child: Context, computed: int) -> None:
    """Raise `InvalidRequestError` unless the parent's `computed` tokens are a proper prefix of the child's tokens."""
    name = f"request {child.request_id!r}, fork of {parent.request_id!r}"
    if not computed:
        raise InvalidRequestError(f"{name}: the parent has computed no token yet: fork it after step")
    if computed >= child.end_idx:
        raise InvalidRequestError(
            f"{name}: has {child.end_idx} tokens, but needs more than the {computed} that the parent has computed"
        )
    if not np.array_equal(parent.tokens[:computed], child.tokens[:computed]):
        raise InvalidRequestError(f"{name}: its first {computed} tokens are not the parent's")
    for field in ("cache_salt", "extra_keys"):
        if getattr(parent, field, None) != getattr(child, field, None):
            raise InvalidRequestError(f"{name}: its {field} is not the parent's")
