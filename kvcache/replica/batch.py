"""`Batch`: the requests of a step, looked up once and moved together; `Gathered`: the same for one call."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, cast, overload

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidRequestError, SequenceTooLongError
from kvcache.events.log import EventLog
from kvcache.replica.context import FUTURE_TOKEN, Context, TextContext, computed_of
from kvcache.replica.hashing import PrefixHasher, next_digests, token_bytes
from kvcache.replica.rows import NEVER, Ints, Rows
from kvcache.replica.shares import Share, as_run, shares_at, shares_of_all

HasherOf = Callable[[int, int, Context], PrefixHasher]
"""Replica, row and context → the hasher of the request."""


class BatchState(NamedTuple):
    """The requests of one replica in a batch: int64 `[batch]`, and the largest of each."""

    rows: Rows
    starts: Ints  # tokens cached
    actives: Ints  # end of the tokens to run
    ends: Ints  # tokens known
    longest_run: int
    longest_context: int  # of `actives`
    longest: int  # of `ends`


UNKNOWN = -(1 << 62)
_UNSIGNED = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
_STEPS_KEPT = 256  # updates that a batch holds before it hands them to the contexts


class Gathered:
    """The data that one call needs of its requests, as arrays `[len]`, in batch order."""

    __slots__ = (
        *("_shares", "actives", "computed", "contexts", "due", "ends", "places", "replicas", "rows", "slack"),
        *("starts", "unbound"),
    )

    def __init__(
        self, contexts: Sequence[Context], replicas: Ints, rows: Ints, places: Ints, *, starts_only: bool = False
    ) -> None:
        self.contexts: Sequence[Context] = contexts
        self.replicas = replicas  # of each its replica,
        self.rows = rows  # and its row there
        self.places: Rows = as_run(places)  # the two in one: the row among those of all replicas
        self._shares: list[Share] = []
        self.unbound = False  # whether some hold no pages yet: their rows know no context so far
        self.gather(starts_only=starts_only)

    def gather(self, *, starts_only: bool = False) -> None:
        """Read the indices of every context; `starts_only`: `actives` and `ends` are not asked for."""
        contexts, count = self.contexts, len(self.contexts)
        self.starts: Ints = np.fromiter([context.start_idx for context in contexts], np.int64, count)
        self.computed: Ints = self.starts  # but for steps in flight: see `read_computed`
        self.slack = UNKNOWN  # tokens that every request can surely grow by on its pages; after an update one fewer
        self.due = UNKNOWN  # tokens that every request can surely compute before one fills a page; likewise
        if starts_only:
            return
        self.actives: Ints = np.fromiter([context.active_idx for context in contexts], np.int64, count)
        self.ends: Ints = np.fromiter([context.current_length for context in contexts], np.int64, count)

    def read_computed(self) -> None:
        """Steps may be in flight: what they run is not computed."""
        contexts = self.contexts
        self.computed = np.fromiter([computed_of(context) for context in contexts], np.int64, len(contexts))

    @property
    def has_futures(self) -> bool:
        """Whether the step of some is in flight."""
        return False

    @property
    def looks_up(self) -> bool:
        """Whether prefixes are looked up for some: all but those with pages and one token to run."""
        return self.unbound or bool((self.actives - self.starts > 1).any())

    def split(self, count: int) -> list[Share]:
        """The share of each of `count` replicas in the batch."""
        if not self._shares:
            if count == 1:
                self._shares = [Share(0, slice(0, len(self.rows)), self.places)]
            else:
                self._shares = shares_of_all(self.replicas, self.rows, count)
        return self._shares

    def turning(self, most: int = NEVER) -> list[Share] | None:  # noqa: ARG002 - of a `Batch`
        """The requests whose newest token is the first of a page; None: it takes a look at each.

        `most`: tokens that a request may have. Where one has more, each is looked at.
        """
        return None

    def part(self, share: Share) -> BatchState:
        """The state of the requests of a share."""
        at, rows = share.at, share.rows
        starts, actives, ends = self.starts[at], self.actives[at], self.ends[at]
        if not len(starts):
            return BatchState(rows, starts, actives, ends, 0, 0, 0)
        if len(starts) == 1:  # a tenth of the cost
            start, active, end = starts.item(0), actives.item(0), ends.item(0)
            return BatchState(rows, starts, actives, ends, active - start, active, end)
        return BatchState(
            rows, starts, actives, ends, int((actives - starts).max()), int(actives.max()), int(ends.max())
        )

    def digests(
        self, places: Ints, firsts: Ints, lasts: Ints, hasher_of: HasherOf, log: EventLog | None = None
    ) -> NDArray[np.uint64]:
        """The digests of pages `firsts` to `lasts` of each context at `places`, one after another.

        `log` is told the request of each digest, and its tokens.
        """
        at, pages = places.tolist(), list(zip(firsts.tolist(), lasts.tolist(), strict=True))
        hashers = self.hashers(at, hasher_of)
        size = hashers[0].page_size
        if any(last - first != 1 for first, last in pages):
            digests = np.concatenate(
                [
                    hasher.digests(self.tokens(place), first, last)
                    for place, hasher, (first, last) in zip(at, hashers, pages, strict=True)
                ]
            )
            if log is not None:
                runs = [
                    token_bytes(self.tokens(place)[first * size : last * size])
                    for place, (first, last) in zip(at, pages, strict=True)
                ]
                log.describe((hashers, firsts, lasts, runs))
            return digests
        tokens = np.array(
            [self.tokens(place)[first * size : last * size] for place, (first, last) in zip(at, pages, strict=True)],
            np.int32,
        )
        digests = self.digest_pages(at, hashers, firsts.tolist(), tokens)
        if log is not None:
            log.describe((hashers, firsts, lasts, tokens))
        return digests

    def digest_pages(
        self, at: list[int], hashers: list[PrefixHasher], firsts: list[int], tokens: NDArray[np.int32]
    ) -> NDArray[np.uint64]:
        """The digest of page `firsts` of each context at the places `at`; `tokens` is `[len(at), page_size]`."""

        def from_the_context(nth: int) -> bytes:
            return hashers[nth].digests(self.tokens(at[nth]), firsts[nth], firsts[nth] + 1).tobytes()

        return next_digests(hashers, firsts, tokens, from_the_context)

    def tokens(self, place: int) -> NDArray[np.integer[Any]]:
        context: Context = self.contexts[place]
        return context.tokens

    def hashers(self, at: list[int], hasher_of: HasherOf) -> list[PrefixHasher]:
        return [hasher_of(int(self.replicas[place]), int(self.rows[place]), self.contexts[place]) for place in at]


class Batch(Gathered, Sequence[Context]):
    """Contexts with their rows bound, moved together by `update`. Made by `PagedKVCacheManager.batch`.

    The indices live in arrays here; a `TextContext` catches up when somebody reads it, and leaves when somebody else
    moves it (the batch reads it anew then). Good until one of its requests is released.
    """

    def __init__(
        self, contexts: Sequence[Context], replicas: Ints, rows: Ints, places: Ints, page_size: int, owner: object
    ) -> None:
        self._page_size = page_size
        self.owner = owner  # whose rows these are
        # A row a step, the last tokens of each context in it: a page's worth from before, then those of the updates.
        self._log = np.zeros((page_size + _STEPS_KEPT, len(contexts)), np.int32)
        self._hashers: dict[int, PrefixHasher] = {}  # by place
        self.checked_at = -1  # how many releases there had been when the claims were last compared
        super().__init__(tuple(contexts), replicas, rows, places)

    def found_right(self, releases: int, *, unbound: bool) -> None:
        """Its requests have the rows that it says, after so many `releases`; whether some hold no pages yet."""
        self.unbound = unbound
        self.slack = self.due = UNKNOWN  # a request may have been claimed anew, with other pages
        self.checked_at = releases  # last: what interrupts this has it compared again

    @overload
    def __getitem__(self, index: int) -> Context: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Context]: ...
    def __getitem__(self, index: int | slice) -> Context | Sequence[Context]:
        return self.contexts[index]

    def __len__(self) -> int:
        return len(self.contexts)

    def __iter__(self) -> Iterator[Context]:
        return iter(self.contexts)

    def gather(self, *, starts_only: bool = False) -> None:
        self._stale = True  # until all of them follow: what interrupts it has the contexts read anew
        super().gather(starts_only=starts_only)
        self._begin_log()
        self._hashers = {}
        self._turning: dict[int, list[Share]] = {}  # by the place of the first request's newest token in its page
        self._behind: dict[int, int] = {}  # by replica: by how much its longest request is shorter than the longest
        self._updated = False
        own = [context for context in self.contexts if isinstance(context, TextContext)]
        self._together = len(own) == len(self.contexts) and bool((self.actives == self.ends).all())
        self._read_futures(own)
        if self._together and own:
            self._longest = int(self.ends.max())
            self._updates_left = min(
                context.max_length - end for context, end in zip(own, self.ends.tolist(), strict=True)
            )
            for place, context in enumerate(own):
                last = context.tokens[-self._page_size :]
                self._log[self._page_size - len(last) : self._page_size, place] = last
                context.follow(self, place)
        self._stale = False  # after all have followed: a context that follows anew leaves this same batch first

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Neither `copy` nor `pickle`: two batches would move the same contexts, each as if it were the only one."""
        raise InvalidRequestError(f"batch of {len(self)} requests: it cannot be copied: manager.batch makes another")

    @property
    def lengths(self) -> Ints:
        """The tokens that each request knows, int64 `[len]`. Good until the next `update`, as for the next one."""
        self.refresh()
        return self.ends

    @property
    def last_tokens(self) -> NDArray[np.integer[Any]]:
        """The last token of each request, `[len]`: a loop that streams or stops by it need not read the contexts."""
        self.refresh()
        if self._together:
            return self._log[self._count - 1]
        return np.array([context.tokens[-1] for context in self.contexts], np.int32)

    def turning(self, most: int = NEVER) -> list[Share] | None:
        if not self._updated or self._longest > most:
            return None
        at = self.ends.item(0) % self._page_size
        shares = self._turning.get(at)
        if shares is None:  # each grows by one token a step, so that it is the same ones a page later
            places = (self.ends % self._page_size == 1 % self._page_size).nonzero()[0]
            shares = self._turning[at] = shares_at(self.replicas, self.rows, places)
        return shares

    def part(self, share: Share) -> BatchState:
        at = share.at
        starts = self.starts[at]
        if not self._updated or not len(starts):
            return super().part(share)
        # One token each: what `max` would find is known.
        ends, behind = self.ends[at], self._behind.get(share.replica)
        if behind is None:
            behind = self._behind[share.replica] = self._longest - int(ends.max())
        longest = self._longest - behind
        return BatchState(share.rows, starts, ends, ends, 1, longest, longest)

    @property
    def has_futures(self) -> bool:
        return self._futures > 0

    def refresh(self) -> None:
        """Read the contexts anew if one was moved by another call."""
        if self._stale or not self._together:
            self.gather()

    def update(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Give each request its next token, int `[len]`, as `TextContext.update` does; or touch nothing.

        Raises `InvalidRequestError` unless there is one integer from 0 to 2**31 - 1 a request, and
        `SequenceTooLongError` if a request has its `max_length` already. Contexts of a caller's own are updated one
        by one: what interrupts that (Ctrl-C) leaves some with their token, which their lengths tell.
        """
        array = self._checked(tokens)
        self.refresh()
        if self._futures:
            self._refuse_futures("update", waiting=True)
        if not self._together:
            for context, token in zip(self.contexts, array.tolist(), strict=True):
                context.update(token)
            self.gather()
            return
        if not self.contexts:
            return
        if not self._updates_left:
            self._refuse_longest()
        self._append(array)
        self.computed = self.starts
        self._stale = False

    def update_with_future_tokens(self) -> None:
        """As `update`, while the step that runs these requests is in flight: see `TextContext`. Raises as `update`.

        A request that has a future token already, or is no `TextContext`, is an `InvalidRequestError`.
        """
        self.refresh()
        if self._futures or not all(isinstance(context, TextContext) for context in self.contexts):
            self._refuse_futures("update_with_future_tokens", waiting=True)
        if not self._together:
            for context in cast("Sequence[TextContext]", self.contexts):
                context.update_with_future_token()
            self.gather()
            return
        if not self.contexts:
            return
        if not self._updates_left:
            self._refuse_longest()
        self._stale = True
        if self._count == len(self._log):
            self._hand_over()
        self._future_row = self._count
        self._append(FUTURE_TOKEN)  # and `computed` stays
        self._futures = len(self.contexts)
        self._stale = False

    def realize_future_tokens(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """The step in flight has given these tokens, int `[len]`, one for each request; or touch nothing.

        The batch may have ended for the manager, as one of its requests was released. Raises `InvalidRequestError`
        unless every request has a future token.
        """
        array = self._checked(tokens)
        self.refresh()
        if self._futures < len(self.contexts):
            self._refuse_futures("realize_future_tokens", waiting=False)
        if not self._together:
            for context, token in zip(cast("Sequence[TextContext]", self.contexts), array.tolist(), strict=True):
                context.realize_future_token(token)
            self.gather()
            return
        self._log[self._count - 1] = array
        self._stale = True
        self._future_row = -1  # from here on all are known; a context that has the future token takes it up when read
        self._futures = 0
        self.computed = self.starts
        self._stale = False

    def digests(
        self, places: Ints, firsts: Ints, lasts: Ints, hasher_of: HasherOf, log: EventLog | None = None
    ) -> NDArray[np.uint64]:
        steps = self._count - self.ends[places] + firsts * self._page_size
        step = steps.item(0)
        differ = np.count_nonzero(steps != step) or np.count_nonzero(lasts - firsts != 1)
        if not self._together or step < 0 or differ:
            return super().digests(places, firsts, lasts, hasher_of, log)
        # The usual step: one page each, all of them full at this token. No context has to catch up.
        tokens = np.ascontiguousarray(self._log[step : step + self._page_size].take(places, axis=1).T)
        at = places.tolist()
        hashers = self.hashers(at, hasher_of)
        digests = self.digest_pages(at, hashers, firsts.tolist(), tokens)
        if log is not None:
            log.describe((hashers, firsts, lasts, tokens))
        return digests

    def hashers(self, at: list[int], hasher_of: HasherOf) -> list[PrefixHasher]:
        kept = self._hashers
        try:
            return [kept[place] for place in at]
        except KeyError:
            kept.update(zip(at, super().hashers(at, hasher_of), strict=True))
            return [kept[place] for place in at]

    def catch_up(self, place: int, end: int) -> None:
        ends, first = self._began
        count = self._count
        behind = count - first - (end - ends[place])
        if (behind <= 0 and not self._hands_on) or not isinstance(context := self.contexts[place], TextContext):
            return
        if self._hands_on and self._future_row != count - behind - 1:
            context.realize(self._log.item(count - behind - 1, place))
        if behind <= 0:
            return
        end += behind  # the last of its tokens is to run
        if self._future_row == count - 1:
            self._hands_on = True
            if behind > 1:
                context.append(self._log[count - behind : count - 1, place], end - 2, end - 1)
            context.append_future(self.computed.item(place), end)
        elif behind == 1:
            context.append_one(self._log.item(count - 1, place), end - 1, end)
        else:
            context.append(self._log[count - behind : count, place], end - 1, end)

    def lose(self, place: int, end: int) -> None:
        self.catch_up(place, end)
        self._stale = True

    def _begin_log(self) -> None:
        """All contexts have caught up: the next token comes behind those of before."""
        self._count = self._page_size  # first: a context that looks meanwhile has nothing to catch up with
        self._hands_on = False  # whether contexts may have a future token of their own
        # The number of tokens that each context knew, and the row of the log for the next one.
        self._began: tuple[list[int], int] = (self.ends.tolist(), self._page_size)

    def _append(self, tokens: NDArray[np.integer] | int) -> None:
        """One more token for each request. Stale until all else agrees: what interrupts it has them read anew."""
        self._stale = True
        if self._count == len(self._log):
            self._hand_over()
        self._log[self._count] = tokens
        self._count += 1  # from here on each request has its token
        self._updated = True
        self._longest += 1
        self._updates_left -= 1
        self.slack -= 1
        self.due -= 1
        self.ends += 1
        self.actives = self.ends
        self.starts = self.ends - 1

    def _read_futures(self, own: Sequence[TextContext]) -> None:
        """Some requests may have a future token already: moved together are those that all have one at their end."""
        waiting = [context for context in own if context.has_future_token]
        self._futures, self._future_row = len(waiting), -1
        if not waiting:
            return
        self.read_computed()
        self._together &= len(waiting) == len(own) and all(context.tokens[-1] == FUTURE_TOKEN for context in own)
        if self._together:
            self._future_row = self._count - 1
            self._hands_on = True  # last: which of them is to come is known

    def _refuse_futures(self, call: str, *, waiting: bool) -> NoReturn:
        """Raise for the first request that has a future token, if `waiting`, else for the first that has none."""
        for context in self.contexts:
            if not isinstance(context, TextContext):
                raise InvalidRequestError(f"request {context.request_id!r}: {call}, and it is no TextContext")
            if context.has_future_token == waiting:
                state = "the token of a step in flight is to come already" if waiting else "no token is to come"
                raise InvalidRequestError(f"request {context.request_id!r}: {call}, and {state}")
        raise InvalidRequestError(f"batch of {len(self)} requests: {call}")

    def _refuse_longest(self) -> None:
        for context, end in zip(self.contexts, self.ends.tolist(), strict=True):
            if isinstance(context, TextContext) and end >= context.max_length:
                raise SequenceTooLongError(
                    f"request {context.request_id!r}: token {end + 1} is past its max_length {context.max_length}"
                )

    def _hand_over(self) -> None:
        """Every context catches up, and the log starts anew with its last page's worth."""
        for place, context in enumerate(self.contexts):
            if isinstance(context, TextContext):
                context.catch_up(self, place)
        self._log[: self._page_size] = self._log[self._count - self._page_size :].copy()
        self._begin_log()

    def _checked(self, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.integer]:
        try:
            array = np.asarray(tokens)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            array = np.zeros((), object)
        if array.shape != (len(self.contexts),) or (array.size and array.dtype.kind not in "iu"):
            raise InvalidRequestError(
                f"batch of {len(self.contexts)} requests: tokens of shape {array.shape} and dtype {array.dtype}, "
                "one integer each is needed"
            )
        # As unsigned, a negative token is a huge one: one pass finds both.
        if array.size and array.view(_UNSIGNED[array.itemsize]).max() >= 1 << 31:
            at = int(np.flatnonzero((array < 0) | (array >= 1 << 31))[0])
            raise InvalidRequestError(
                f"request {self.contexts[at].request_id!r}: token {array[at]} is not within 0 to 2**31 - 1"
            )
        return array
