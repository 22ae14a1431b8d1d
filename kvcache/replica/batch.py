"""`Batch`: the requests of a step, looked up once and advanced together.

`Gathered`: what one call needs to know about its requests, read from their contexts.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, NoReturn, overload

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidRequestError, SequenceTooLongError
from kvcache.events.log import AnyLog
from kvcache.replica.context import FUTURE_TOKEN, Context, ContextIndices, TextContext, computed_of
from kvcache.replica.hashing import PrefixHasher, next_digests, token_bytes
from kvcache.replica.rows import NEVER, ONE, AllRows, Ints, PromptCounter, Rows, as_rows, rows_at
from kvcache.uncopied import Uncopied

HasherOf = Callable[[int, Context], PrefixHasher]
"""Returns the hasher of a request, given its place and context."""


class Share(NamedTuple):
    """The requests of a batch that are in one replica: their indices in the batch, and their rows."""

    replica: int
    at: Rows  # the indices of the requests in the batch; a slice if they are consecutive, because slices make no copies
    rows: Rows


Longest = tuple[int, int, int]
"""Three maxima over the requests of a replica: the tokens that one of them runs next, `active_idx`, and `end_idx`.

A plain tuple, because creating a named tuple takes a twentieth of the time of a `fetch` for one request.
"""

UNKNOWN = -(1 << 62)
_UNCOUNTED = -NEVER // 2  # `slack` of a list is below it if a context must be read
INT64 = np.dtype(np.int64)  # numpy takes longer with the class
_UNSIGNED = {np.dtype(f"{kind}{size}"): np.dtype(f"u{size}") for kind in "iu" for size in (4, 8)}
_UPDATES = (TextContext.update, TextContext.update_with_future_token, TextContext.realize_future_token)
_STEPS_KEPT = 256  # how many updates a batch keeps before it passes them to the contexts


class Gathered:
    """The requests of one call, as arrays `[len]` in the order of the batch."""

    __slots__ = (
        *("_every", "_indices", "_only", "_read", "actives", "computed", "contexts", "due", "ends", "is_counted"),
        *("is_read", "places", "shares", "slack", "starts", "unbound"),
    )

    lasts = False  # whether it is passed to several steps, as only a `Batch` is

    starts: Ints
    actives: Ints
    ends: Ints
    computed: Ints  # how many tokens are computed; while steps are in flight, it is wrong until `read_computed`

    def __init__(self, contexts: Sequence[Context], places: Rows, every: AllRows, *, unbound: bool) -> None:
        self.contexts = contexts
        self.places = places  # the place of each request in `every`, the arrays over the rows of all replicas
        self._every = every
        # the requests of each replica
        self.shares: list[Share] = (
            [Share(0, slice(0, len(contexts)), places)]
            if every.replicas == 1
            else shares_of_all(self.replicas, self.rows, every.replicas)
        )
        self.unbound = unbound  # whether some requests have no pages yet; their rows are then not bound to a context
        # the place of the only request; a call for one request would take a third more time without it
        self._only = (places.start if isinstance(places, slice) else places.item()) if len(contexts) == 1 else -1

    @property
    def replicas(self) -> Ints:
        """The index of each request's replica."""
        return as_rows(self.places) // self._every.rows

    @property
    def rows(self) -> Ints:
        """The row of each request in its replica."""
        return as_rows(self.places) % self._every.rows

    def refresh(self, computed_only: bool = False) -> None:
        """Get the indices of every request. With `computed_only`, only how many tokens are computed."""
        every, only = self._every, self._only
        if only < 0:
            starts = every.starts[self.places]
            slack = every.slack(self.places, starts) - 1
            due = every.due(self.places, starts) if computed_only else UNKNOWN
        elif (start := every.start_of[only]) < NEVER:
            starts = every.starts[self.places]
            slack, due = every.capacity_of[only] - start - 1, every.commit_at_of[only] - start
        else:
            self.gather(computed_only)
            return
        # A lower bound of the number of tokens by which every request can grow within its pages. Each update subtracts
        # one.
        self.slack = slack
        # A lower bound of the number of tokens that every request can still compute before the first request fills a
        # page. Each update subtracts one.
        self.due = due
        # Whether all contexts count along, so that none must be read, nor checked again. `is_read`: whether contexts
        # were read for this call, so that some may run several tokens.
        self.is_counted = slack > _UNCOUNTED
        if not self.is_counted:
            self.gather(computed_only)
            return
        self.is_read = False
        self.starts = self.computed = starts

    def gather(self, computed_only: bool = False) -> None:
        """Read every context that does not count along. With `computed_only`, only how many tokens are computed."""
        self.slack, self.due, self.is_counted, self.is_read = UNKNOWN, UNKNOWN, False, True
        # the indices of the contexts to be read
        self._read: list[int] = [0]
        contexts = self.contexts
        if self._only < 0:
            counted = self._every.starts[self.places]
            self._read = (counted >= NEVER).nonzero()[0].tolist()
            if 0 < len(self._read) < len(contexts):
                self._gather_some(counted, computed_only)
                return
        if computed_only:
            self.starts = self.computed = np.array([*map(_computed_of, contexts)], INT64)
            return
        if self._only < 0:
            numbers = np.array([*chain.from_iterable(map(_indices_of, contexts))], INT64)
        else:
            context = contexts[0]
            self._indices = context.indices if type(context) is TextContext else _indices_of(context)
            numbers = np.array(self._indices, INT64)
            self.slack = self._every.capacity_of[self._only] - self._indices[2]
        self.starts, self.actives, self.ends = numbers[::3], numbers[1::3], numbers[2::3]
        self.computed = self.starts

    def _gather_some(self, counted: Ints, computed_only: bool) -> None:
        read = [self.contexts[at] for at in self._read]
        self.starts = self.computed = starts = counted.copy()
        if computed_only:
            starts[self._read] = [*map(_computed_of, read)]
            return
        self.actives, self.ends = actives, ends = starts + ONE, starts + ONE
        starts[self._read], actives[self._read], ends[self._read] = zip(*map(_indices_of, read), strict=True)

    def count_along(self, counters: Sequence[PromptCounter]) -> None:
        """Let each context that was read count along from now on. Its indices have been checked.

        `counters` has the counter of each replica. A request whose prompt is not fully counted is read again.
        """
        every = self._every
        places: list[int] = [self._only] if self._only >= 0 else as_rows(self.places)[self._read].tolist()
        for at, place in zip(self._read, places, strict=True):
            context = self.contexts[at]
            replica, row = divmod(place, every.rows)
            if type(context) is TextContext and row not in counters[replica].open:
                context.count_along(every.start_of, place)

    def lengths_after(self, num_steps: int) -> Ints:
        """Returns how many tokens of each request need a page if it runs so many steps."""
        if self.is_counted:
            return self.starts + num_steps
        return self.ends if num_steps == 1 else self.ends + (num_steps - 1)

    def keep_computed(self) -> None:
        """Record that the model has computed the tokens before each request's start."""
        if self._only >= 0:
            self._every.cached_of[self._only] = self.computed.item()
        else:
            self._every.cached[self.places] = self.computed

    def room_after(self, num_steps: int) -> int:
        """Returns by how many tokens each request can still grow within its pages after so many steps."""
        if self._only < 0:
            return self._every.slack(self.places, self.lengths_after(num_steps))
        end = self.starts.item() + 1 if self.is_counted else self.ends.item()  # numbers instead of arrays
        return self._every.capacity_of[self._only] - end - num_steps + 1

    def published(self, *, any_full: bool) -> None:
        """Record that all full pages of computed tokens are published. `any_full`: whether there were any.

        Called if this `lasts`.
        """

    def read_computed(self) -> None:
        """Read how many tokens of each request are computed.

        Tokens that a step in flight is still computing are not counted.
        """
        contexts = self.contexts
        self.computed = np.fromiter([computed_of(context) for context in contexts], np.int64, len(contexts))

    def turning(self, most: int = NEVER) -> list[Share] | None:  # noqa: ARG002 - `Batch` uses it
        """Returns the requests whose newest token begins a page, as one `Share` for each replica.

        Returns None if the caller must test each request. Also returns None if a request has more than `most` tokens.
        """
        return None

    def part(self, share: Share) -> tuple[Ints, Longest]:
        """Returns `start_idx` of each request of one replica, and the maxima over these requests."""
        at = share.at
        starts = self.starts[at]
        if not len(starts):
            return starts, (0, 0, 0)
        if self.is_counted:
            longest = (starts.item() if len(starts) == 1 else int(starts.max())) + 1
            return starts, (1, longest, longest)
        if self._only >= 0:  # numbers instead of numpy's maxima
            start, active, end = self._indices
            return starts, (active - start, active, end)
        actives, ends = self.actives[at], self.ends[at]
        return starts, (int((actives - starts).max()), int(actives.max()), int(ends.max()))

    def digests(self, indices: Ints, firsts: Ints, lasts: Ints, hasher_of: HasherOf, log: AnyLog) -> NDArray[np.uint64]:
        """Returns the digests of pages `firsts[i]` to `lasts[i]` (excluded) of each context in `indices`.

        The digests come one after another. `log` records to which request each digest belongs. If KV events are read,
        it also records the tokens of the pages.
        """
        if self._only >= 0 and not log.is_read:  # numbers instead of arrays and lists: a tenth of the `step`
            context: Context = self.contexts[0]
            return hasher_of(self._only, context).digests(context.tokens, firsts.item(), lasts.item())
        at: list[int] = indices.tolist()
        hashers = self.hashers(at, hasher_of)
        spans = list(zip(at, firsts.tolist(), lasts.tolist(), strict=True))
        if len(at) == 1 or np.count_nonzero(lasts - firsts != ONE):
            found: list[NDArray[np.uint64]] = []
            for hasher, (index, first, last) in zip(hashers, spans, strict=True):
                found.append(hasher.digests(self.contexts[index].tokens, first, last))
            if log.is_read:
                log.describe((hashers, firsts, lasts, [*map(token_bytes, self._tokens_of(spans))]))
            return found[0] if len(found) == 1 else np.concatenate(found)
        tokens = np.array(self._tokens_of(spans), np.int32)
        digests = self.digest_pages(at, hashers, firsts.tolist(), tokens)
        log.describe((hashers, firsts, lasts, tokens))
        return digests

    def digest_pages(
        self, at: list[int], hashers: list[PrefixHasher], firsts: list[int], tokens: NDArray[np.int32]
    ) -> NDArray[np.uint64]:
        """Returns one digest for each item of `at`: the digest of page `firsts[i]` of `contexts[at[i]]`.

        `tokens` has the tokens of these pages, `[len(at), page_size]`.
        """

        def from_the_context(nth: int) -> bytes:
            return hashers[nth].digests(self.contexts[at[nth]].tokens, firsts[nth], firsts[nth] + 1).tobytes()

        return next_digests(hashers, firsts, tokens, from_the_context)

    def _tokens_of(self, spans: list[tuple[int, int, int]]) -> list[NDArray[np.integer[Any]]]:
        """Returns the tokens of pages `first` to `last` (excluded) of each context: `(index, first, last)`."""
        size = self._every.page_size
        return [self.contexts[index].tokens[first * size : last * size] for index, first, last in spans]

    def hashers(self, at: list[int], hasher_of: HasherOf) -> list[PrefixHasher]:
        places: list[int] = as_rows(self.places)[at].tolist()
        return [*map(hasher_of, places, map(self.contexts.__getitem__, at))]


class Batch(Uncopied, Gathered, Sequence[Context]):
    """Contexts that are bound to their rows and advanced together by `update`. Made by `PagedKVCacheManager.batch`.

    The batch keeps the indices of its contexts in arrays. An update changes these arrays. A `TextContext` applies the
    update only when the context is read. If a caller changes a `TextContext` directly, the context leaves the batch,
    and the next call with the batch reads all contexts again. A batch is valid until one of its requests is released.

    Examples:
        >>> from kvcache import KVCacheParams, PagedKVCacheManager
        >>> import torch
        >>> params = KVCacheParams(torch.float16, n_kv_heads=2, head_dim=64, page_size=16)
        >>> manager = PagedKVCacheManager(params, 4, 256, 1, ["cpu"], available_cache_memory=1 << 20)
        >>> requests = [TextContext([1, 2, 3], max_length=100), TextContext([4, 5], max_length=100)]
        >>> for request in requests:
        ...     manager.external_claim(request.request_id)
        ...     _ = manager.maybe_reserve(request)
        >>> batch = manager.batch(requests)
        >>> _ = manager.fetch(batch)
        >>> batch.update(np.array([7, 8]))  # the tokens that the model has sampled
        >>> manager.step(batch)
        >>> [request.start_idx for request in requests]
        [3, 2]
    """

    lasts = True

    def __init__(
        self, contexts: Sequence[Context], places: Rows, every: AllRows, owner: object, *, unbound: bool
    ) -> None:
        page_size = every.page_size
        self._page_size, self._page_sizes = page_size, np.array(page_size)
        self.owner = owner  # the object that owns the rows (`Claims`)
        # There is one row for each step, with one token for each context. The first `page_size` rows have the last
        # known tokens of each context. Each update adds a row.
        self._log = np.zeros((page_size + _STEPS_KEPT, len(contexts)), np.int32)
        self._hashers: dict[int, PrefixHasher] = {}  # by index
        self._hashed_under = every.weights.now  # the weights to which these hashers belong
        self.checked_at = -1  # the manager's count of releases when the batch's claims were last checked
        # The contexts of class `TextContext`. The batch advances its contexts together only if all contexts are of this
        # class.
        self._own = [context for context in contexts if isinstance(context, TextContext)]
        # A subclass with an `update` of its own must see each token.
        self._may_advance = 0 < len(self._own) == len(contexts) and all(map(_updates_alike, self._own))
        super().__init__(contexts, places, every, unbound=unbound)
        self.gather()

    def found_right(self, releases: int, *, unbound: bool) -> None:
        """Record that the batch has the right row of each request.

        `releases` is the number of releases that the manager has made so far. `unbound` says whether some requests have
        no pages yet.
        """
        self.unbound = unbound
        self.slack = self.due = UNKNOWN  # a request may have been claimed again, and may have other pages
        self.checked_at = releases  # set last, so that after an interrupt the claims are checked again

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

    def gather(self, computed_only: bool = False) -> None:
        # `_stale` is cleared after all contexts follow this batch. After an interrupt before that, all contexts are
        # read again.
        self._stale = True
        super().gather(computed_only)
        self.slack, self.is_read = UNKNOWN, False  # a batch tests what its requests run when it needs pages
        self._begin_log()
        self._hashers = {}
        # The results of `turning`. The key is the position of the first request's newest token within its page. The
        # value has the shares of the requests whose newest token then begins a page.
        self._turning: dict[int, list[Share]] = {}
        # For each replica, a number of tokens: the length of the longest request of the batch, minus the length of the
        # longest request on the replica.
        self._behind: dict[int, int] = {}
        self._updated = False
        own = self._own
        self._together = self._may_advance and bool((self.actives == self.ends).all())
        self._read_futures()
        if self._together:
            self._longest = int(self.ends.max())
            self._updates_left = min(
                context.max_length - end for context, end in zip(own, self.ends.tolist(), strict=True)
            )
            for index, context in enumerate(own):
                last = context.tokens[-self._page_size :]
                self._log[self._page_size - len(last) : self._page_size, index] = last
                context.follow(self, index)
        # Cleared after the loop: if a context already followed this batch, `follow` made it leave, which set `_stale`.
        self._stale = False

    @property
    def lengths(self) -> Ints:
        """The number of known tokens of each request, int64 `[len]`. The array is valid until the next `update`."""
        self.refresh()
        return self.ends

    @property
    def last_tokens(self) -> NDArray[np.integer[Any]]:
        """The last token of each request, `[len]`.

        A loop that streams tokens can use this instead of reading the contexts.
        """
        self.refresh()
        if self._together:
            return self._log[self._count - 1]
        return np.array([context.tokens[-1] for context in self.contexts], np.int32)

    def turning(self, most: int = NEVER) -> list[Share] | None:
        if not self._updated or self._longest > most:
            return None
        at = self.ends.item(0) % self._page_size
        shares = self._turning.get(at)
        # each request grows by one token per step, so the same requests begin a page again after `page_size` steps
        if shares is None:
            indices = (self.ends % self._page_size == 1 % self._page_size).nonzero()[0]
            shares = self._turning[at] = shares_at(self.replicas, self.rows, indices)
        return shares

    def part(self, share: Share) -> tuple[Ints, Longest]:
        at = share.at
        starts = self.starts[at]
        if not self._updated or not len(starts):
            return super().part(share)
        # Each request runs one token, so the maxima are known without a search.
        behind = self._behind.get(share.replica)
        if behind is None:
            behind = self._behind[share.replica] = self._longest - int(self.ends[at].max())
        longest = self._longest - behind
        return starts, (1, longest, longest)

    def published(self, *, any_full: bool) -> None:
        if self._futures:
            self.due = UNKNOWN
        elif any_full:
            self.due = 1  # among many requests, one of them probably fills a page with its next token
        else:
            self.due = self._every.due(self.places, self.computed)

    def refresh(self, computed_only: bool = False) -> None:  # noqa: ARG002 - a batch reads all indices at once
        """Read all contexts again if the caller has changed one of them directly."""
        if self._stale or not self._together:
            self.gather()

    def update(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Give each request its next token, int `[len]`, as `TextContext.update` does.

        Raises `InvalidRequestError` unless there is one integer from 0 to 2**31 - 1 for each request, and
        `SequenceTooLongError` if a request already has `max_length` tokens. In both cases nothing changes. Contexts of
        classes other than `TextContext` are updated one by one. After an interrupt (Ctrl-C), some of these contexts
        have their token and others do not. Their lengths show which contexts have it.
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
        if not self._updates_left:
            self._refuse_longest()
        self._append(array)
        self.computed = self.starts
        self._stale = False

    def update_with_future_tokens(self) -> None:
        """Do the same as `update` while the step that runs these requests is in flight: see `TextContext`.

        Raises the errors of `update`. Also raises `InvalidRequestError` if a context already has a future token, or is
        not a `TextContext`.
        """
        self.refresh()
        if self._futures or len(self._own) < len(self.contexts):
            self._refuse_futures("update_with_future_tokens", waiting=True)
        if not self._together:
            for context in self._own:
                context.update_with_future_token()
            self.gather()
            return
        if not self._updates_left:
            self._refuse_longest()
        self._stale = True
        if self._count == len(self._log):
            self._hand_over()
        self._had_futures, self._future_row = True, self._count
        self._append(FUTURE_TOKEN)  # `computed` stays the same, because the step in flight has not ended
        self._futures = len(self.contexts)
        self._stale = False

    def realize_future_tokens(self, tokens: Sequence[int] | NDArray[np.integer]) -> None:
        """Replace the future token of each request with the real token from the step in flight, int `[len]`.

        The call also works if one of the requests was released in the meantime, although the manager then no longer
        accepts the batch. Raises `InvalidRequestError`, and changes nothing, unless every request has a future token.
        """
        array = self._checked(tokens)
        self.refresh()
        if self._futures < len(self.contexts):
            self._refuse_futures("realize_future_tokens", waiting=False)
        if not self._together:
            for context, token in zip(self._own, array.tolist(), strict=True):
                context.realize_future_token(token)
            self.gather()
            return
        self._log[self._count - 1] = array
        self._stale = True
        # All tokens in the log are known now. A context that still ends with the future token gets the real token when
        # it is read.
        self._future_row = -1
        self._futures = 0
        self.computed = self.starts
        self._stale = False

    def digests(self, indices: Ints, firsts: Ints, lasts: Ints, hasher_of: HasherOf, log: AnyLog) -> NDArray[np.uint64]:
        ahead = firsts * self._page_sizes - self.ends[indices]
        step = self._count + ahead.item(0)
        differ = np.count_nonzero(ahead != ahead[0]) or np.count_nonzero(lasts - firsts != ONE)
        if not self._together or step < 0 or differ:
            return super().digests(indices, firsts, lasts, hasher_of, log)
        # The usual case: all these requests fill a page with the same update. The log has all tokens of these pages, so
        # no context has to be read.
        tokens = np.ascontiguousarray(self._log[step : step + self._page_size].take(indices, axis=1).T)
        at = indices.tolist()
        hashers = self.hashers(at, hasher_of)
        digests = self.digest_pages(at, hashers, firsts.tolist(), tokens)
        log.describe((hashers, firsts, lasts, tokens))
        return digests

    def hashers(self, at: list[int], hasher_of: HasherOf) -> list[PrefixHasher]:
        kept = self._hashers
        if self._hashed_under is not self._every.weights.now:  # the requests may begin new segments
            self._hashed_under = self._every.weights.now
            kept.clear()
        try:
            return [kept[index] for index in at]
        except KeyError:
            kept.update(zip(at, super().hashers(at, hasher_of), strict=True))
            return [kept[index] for index in at]

    def catch_up(self, index: int, end: int) -> None:
        ends, first = self._began
        count = self._count
        behind = count - first - (end - ends[index])
        if self._had_futures:
            behind = self._catch_up_with_futures(index, end, behind)
        if behind <= 0:
            return
        context = self._own[index]
        end += behind  # the context runs the last of the missing tokens next
        if behind == 1:
            context.append_one(self._log.item(count - 1, index), end - 1, end)
        else:
            context.append(self._log[count - behind : count, index], end - 1, end)

    def _catch_up_with_futures(self, index: int, end: int, behind: int) -> int:
        """Do `catch_up` for a context that has a future token, or is about to get a future token.

        Returns how many tokens the context still lacks.
        """
        context, count = self._own[index], self._count
        if self._future_row != count - behind - 1:
            context.realize(self._log.item(count - behind - 1, index))
        if behind <= 0 or self._future_row != count - 1:
            return behind
        end += behind
        if behind > 1:
            context.append(self._log[count - behind : count - 1, index], end - 2, end - 1)
        context.append_future(self.computed.item(index), end)
        return 0

    def count_along(self, counters: Sequence[PromptCounter]) -> None:
        """Do nothing: these contexts follow the batch."""

    def lose(self, index: int, end: int) -> None:
        self.catch_up(index, end)
        self._stale = True

    def _begin_log(self) -> None:
        """Begin a new log of tokens. All contexts have all tokens of the old log."""
        # Set before `_began`: if a context is read between the two assignments, it must not find any token missing.
        self._count = self._page_size
        # whether this log has ever had a future token; contexts may have copied it
        self._had_futures = False
        # how many tokens each context knew when this log began, and the row of the log for the next token
        self._began: tuple[list[int], int] = (self.ends.tolist(), self._page_size)

    def _append(self, tokens: NDArray[np.integer] | int) -> None:
        """Add one token to each request.

        Sets `_stale`. The caller clears `_stale` at the end of its work, so `_stale` stays set after an interrupt.
        """
        self._stale = True
        if self._count == len(self._log):
            self._hand_over()
        self._log[self._count] = tokens
        self._count += 1  # from here on each request counts as having its new token
        # The first update after the contexts were read ends the tokens that they ran: a whole chunk of a prompt, for
        # example. Each later update ends one token.
        grew_by_one, self._updated = self._updated, True
        self._longest += 1
        self._updates_left -= 1
        self.slack -= 1
        self.due = self.due - 1 if grew_by_one else UNKNOWN
        self.ends += 1
        self.actives = self.ends
        self.starts = self.ends - 1

    def _read_futures(self) -> None:
        """Find the contexts that end with a future token.

        The batch can advance its contexts together only if either all of them or none of them end with a future token.
        """
        own = self._own
        waiting = [context for context in own if context.has_future_token]
        self._futures, self._future_row = len(waiting), -1
        if not waiting:
            return
        self.read_computed()
        self._together &= len(waiting) == len(own) and all(context.tokens[-1] == FUTURE_TOKEN for context in own)
        if self._together:
            self._future_row = self._count - 1
            self._had_futures = True  # the contexts already have the future tokens

    def _refuse_futures(self, call: str, *, waiting: bool) -> NoReturn:
        """Raise `InvalidRequestError` for the first request that has a future token.

        If `waiting` is False, raise the error for the first request without a future token.
        """
        for context in self.contexts:
            if not isinstance(context, TextContext):
                raise InvalidRequestError(
                    f"request {context.request_id!r}: {call} needs a TextContext for each request, but the context of "
                    f"this request is a {type(context).__name__}"
                )
            if context.has_future_token == waiting:
                state = "it already has a future token" if waiting else "it has no future token"
                raise InvalidRequestError(f"request {context.request_id!r}: {call} was called, but {state}")
        raise InvalidRequestError(f"batch of {len(self)} requests: {call}")

    def _refuse_longest(self) -> None:
        for context, end in zip(self._own, self.ends.tolist(), strict=True):
            if end >= context.max_length:
                raise SequenceTooLongError(
                    f"request {context.request_id!r}: token {end + 1} is past its max_length {context.max_length}"
                )

    def _hand_over(self) -> None:
        """Let every context catch up, and begin a new log. The new log begins with the tokens of the last page."""
        for index, context in enumerate(self._own):
            context.catch_up(self, index)
        self._log[: self._page_size] = self._log[self._count - self._page_size :].copy()
        self._begin_log()

    def _checked(self, tokens: Sequence[int] | NDArray[np.integer]) -> NDArray[np.integer]:
        try:
            array = np.asarray(tokens)
        except (TypeError, ValueError, OverflowError, RuntimeError):
            array = np.zeros((), object)
        if array.shape != (len(self.contexts),) or (array.size and array.dtype.kind not in "iu"):
            raise InvalidRequestError(
                f"batch of {len(self.contexts)} requests: got tokens of shape {array.shape} and dtype {array.dtype}; "
                "one integer for each request is needed"
            )
        # Items that are narrower, or whose byte order is not this machine's, are converted first.
        if array.size and array.dtype not in _UNSIGNED:
            array = array.astype(np.int64)
        # Read as unsigned, a negative token is a huge number. So one comparison finds both kinds of error.
        if array.size and array.view(_UNSIGNED[array.dtype]).max() >= 1 << 31:
            at = int(np.flatnonzero((array < 0) | (array >= 1 << 31))[0])
            raise InvalidRequestError(
                f"request {self.contexts[at].request_id!r}: token {array[at]} is not within 0 to 2**31 - 1"
            )
        return array


def _updates_alike(context: TextContext) -> bool:
    """Returns whether the class of `context` changes none of the calls that a batch makes for all of its contexts."""
    of = type(context)
    return (of.update, of.update_with_future_token, of.realize_future_token) == _UPDATES


def shares_of_all(replicas: Ints, rows: Ints, count: int) -> list[Share]:
    """Returns one `Share` for each of `count` replicas. Replicas without requests in the batch get an empty `Share`.

    `replicas` and `rows` have the replica and the row of each request, in batch order.
    """
    of_each = [(replicas == replica).nonzero()[0] for replica in range(count)]
    return [Share(replica, as_run(at), as_run(rows[at])) for replica, at in enumerate(of_each)]


def shares_at(replicas: Ints, rows: Rows, indices: Ints) -> list[Share]:
    """Returns the requests at these `indices` of the batch, as one `Share` for each replica that has any."""
    mine, own = replicas[indices], rows_at(rows, indices)
    # All requests are on one replica, as is usual. Finding that out takes half the time of the general case.
    if mine.size and np.count_nonzero(mine == mine[0]) == len(mine):
        return [Share(mine.item(0), indices, own)]
    of_each = [(replica, mine == replica) for replica in np.unique(mine).tolist()]
    return [Share(replica, indices[at], own[at]) for replica, at in of_each]


def _indices_of(context: Context) -> ContextIndices:
    """Returns the indices. Raises `InvalidRequestError` if they are not ordered, as a caller may return anything."""
    if type(context) is TextContext:
        return context.indices
    start, active, end = context.start_idx, context.active_idx, context.current_length
    if start < 0:
        _refuse_start(context, start)
    if not start <= active <= end:
        raise InvalidRequestError(
            f"request {context.request_id!r}: start {start}, active {active}, end {end} are not ordered within its "
            f"{end} tokens"
        )
    return start, active, end


def _computed_of(context: Context) -> int:
    if type(context) is TextContext:
        return context.computed_idx
    start = context.start_idx
    if start < 0:
        _refuse_start(context, start)
    return start


def _refuse_start(context: Context, start: int) -> NoReturn:
    raise InvalidRequestError(f"request {context.request_id!r}: its start_idx is {start}")


def as_run(indices: Ints) -> Rows:
    """Returns `indices` as a slice if they are consecutive, else unchanged."""
    count = len(indices)
    if not count:
        return slice(0, 0)
    first = indices.item(0)
    if count > 1 and (indices.item(-1) - first != count - 1 or np.count_nonzero(indices[1:] - indices[:-1] != 1)):
        return indices
    return slice(first, first + count)
