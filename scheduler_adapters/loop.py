"""A small continuous-batching loop over the cache manager, as an example of how a scheduler drives the manager.

Each `step` does five things, in this order:

    reserve   pages for the next tokens of every running request; if pages run short, the newest one is preempted
    admit     waiting requests, oldest first, while rows and pages last
    plan      the tokens of each request: one if it decodes; prompts share the rest of the budget
    run       fetch, model, update, step
    finish    release finished requests; report tokens
"""

import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, NamedTuple, Protocol, TypeVar

from kvcache.errors import (
    AlreadyClaimedError,
    InvalidRequestError,
    NoFreeRowError,
    PromptTooLongError,
    SequenceTooLongError,
    UnknownRequestError,
    WeightsChangedError,
)
from kvcache.replica.context import TextContext
from kvcache.types import Admission, RaggedKVCacheInputs
from kvcache.uncopied import Uncopied
from scheduler_adapters.base import Pages, RunTokens

# in seconds: the longest that a request waits for its cached pages to be loaded from files or a store
_LONGEST_FETCH_S = 5.0

FinishReason = Literal["eos", "length", "error"]
# The owner of the loop may need a richer interface than `Pages`: `DecodeScheduler` also imports pages.
PagesT_co = TypeVar("PagesT_co", bound=Pages, covariant=True)


class ModelRunner(Protocol):
    """The interface of a model that the loop calls."""

    eos_token_ids: frozenset[int]

    def run(self, batch: Sequence[RunTokens], inputs: Sequence[RaggedKVCacheInputs]) -> list[int]:
        """Returns the next token of each request of one replica, given the inputs of that replica's shards."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """A request of a client."""

    request_id: str  # unique among the requests that the loop knows
    prompt: Sequence[int]  # tokens, at least one
    max_new_tokens: int  # most tokens to generate, at least one
    # keep the pages after the request's end, until `free` is called, because another process reads them
    hold_pages: bool = False
    cache_salt: str | None = None  # requests with different salts never share a page
    ignore_eos: bool = False  # continue after an end-of-sequence token


class Output(NamedTuple):
    """One token of one request, or its end, or both."""

    request_id: str
    token: int | None  # None if the request failed
    finished: FinishReason | None  # why the request ended; None while it continues
    error: str = ""  # the failure, if `finished` is "error"


@dataclass(slots=True, eq=False)
class Entry:
    """A queued or running request. Its context records its progress."""

    request: Request
    context: TextContext
    replica: int = 0
    fetching_since: float | None = None  # when the loop first saw that the request's pages are being fetched
    meets: int = 0  # the first token of the pages that a peer provides while the prompt runs; no chunk runs past it


class ServingLoop(Uncopied, Generic[PagesT_co]):
    """Serves requests from one manager with one model. Not thread-safe: one thread calls it.

    The loop need not be the manager's only user: pulls, and requests that were handed over, may hold pages of it too. A
    step runs at most `token_budget` tokens, but at least one for each running request that decodes.
    """

    def __init__(self, manager: PagesT_co, runner: ModelRunner, token_budget: int = 512) -> None:
        if token_budget < 1:
            raise InvalidRequestError(f"token_budget is {token_budget}: at least 1 is needed")
        self.manager = manager
        self.runner = runner
        self.token_budget = token_budget
        # A runner without a vocabulary accepts every token.
        self.vocab_size: int | None = getattr(runner, "vocab_size", None)
        self._has_windows = bool(manager.layer_tables.kinds_named)
        # the most pages that a request can have for its tokens
        self._most_pages = manager.total_num_pages // manager.num_replicas - manager.slab_pages
        # If recurrent states share memory with KV pages, claiming a request takes a page for its state. Therefore the
        # loop first asks `admission` whether the request's KV pages will fit as well.
        self._admission: Callable[[TextContext], Admission] | None = (
            getattr(manager, "admission", None) if manager.slab_pages else None
        )
        self.preemptions = 0  # how often a request was preempted
        # whether the first waiting request waits until its cached pages have been loaded from files or a store
        self.fetching = False
        # Called when a request starts to run, with its id, its replica and its number of cached tokens.
        self.on_admit: Callable[[str, int, int], None] | None = None
        # By request id, oldest first. A step admits requests in this order, and stops at the first request that must
        # wait.
        self._waiting: OrderedDict[str, Entry] = OrderedDict()
        self._running: dict[str, Entry] = {}
        self._held: set[str] = set()

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def is_running(self) -> bool:
        """Whether the next `step` has something to run or to finish."""
        return bool(self._running)

    @property
    def num_running(self) -> int:
        """The number of requests that hold pages and run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """The number of waiting requests: new ones, which hold no pages yet, and preempted ones."""
        return len(self._waiting)

    def add(self, request: Request, context: TextContext | None = None) -> None:
        """Queues a request. `context` is the result of `context_for`, if the caller has already created it.

        Raises `PromptTooLongError` if the request can never fit, and `AlreadyClaimedError` if the loop knows a request
        with that id. Raises `InvalidRequestError` if there is no prompt, a token is invalid, or `max_new_tokens` is
        below 1.
        """
        self._check_new(request.request_id)
        self._waiting[request.request_id] = Entry(request, context or self.context_for(request))

    def adopt(self, request: Request, context: TextContext) -> None:
        """Adds a request that was prefilled by another process.

        The caller has claimed the request and committed its imported pages. Only the request's last known token is left
        to run.
        """
        self._check_new(request.request_id)
        self._running[request.request_id] = Entry(request, context, self.manager.get_replica(context))

    def knows(self, token: int) -> bool:
        """Whether the model's vocabulary has this token."""
        return self.vocab_size is None or 0 <= token < self.vocab_size

    def context_for(self, request: Request) -> TextContext:
        """Returns the context of a new request, checked against the cache. Raises as `add` does."""
        self._check_new(request.request_id)
        if request.max_new_tokens < 1:
            raise InvalidRequestError(
                f"request {request.request_id!r}: max_new_tokens is {request.max_new_tokens}: at least 1 is needed"
            )
        total = len(request.prompt) + request.max_new_tokens
        context = TextContext(request.prompt, total, request.request_id, request.cache_salt)
        highest = int(context.tokens.max())
        if not self.knows(highest):
            raise InvalidRequestError(
                f"request {request.request_id!r}: token {highest} is not in the vocabulary of {self.vocab_size} tokens"
            )
        # The last generated token is never an input of the model, so its KV needs no room.
        if total - 1 > (longest := self.manager.longest_request):
            raise PromptTooLongError(
                f"request {request.request_id!r}: {len(request.prompt)} prompt tokens and {request.max_new_tokens} "
                f"new ones do not fit: the cache has room for {longest} tokens of a request"
            )
        return context

    def free(self, request_id: str) -> None:
        """Frees the pages of a finished request with `hold_pages`. Raises `UnknownRequestError` if it holds none."""
        if request_id not in self._held:
            raise UnknownRequestError(f"request {request_id!r} holds no pages after its end")
        self._held.remove(request_id)
        self.manager.release(request_id)

    def abort(self, request_id: str) -> bool:
        """Forgets a request in any state. Returns False if the loop does not know it."""
        if request_id in self._held:
            self.free(request_id)
            return True
        if self._running.pop(request_id, None) is not None:
            self.manager.release(request_id)
            return True
        return self._waiting.pop(request_id, None) is not None

    def meet(self, request_id: str, token: int) -> None:
        """Reports that pages of a running prompt have been pulled from a peer, or soon will be.

        These pages begin at token `token`. A chunk that would run past that token ends at the token. The next chunk
        finds the pages that have arrived by then in the cache.
        """
        entry = self._running.get(request_id)
        if entry is not None:
            entry.meets = token

    def step(self) -> list[Output]:
        """Runs the model once if any request can run. Returns failures, and then new tokens.

        The new tokens are sorted by replica and then by age, oldest request first.
        """
        outputs = self._reserve_running()
        outputs += self._admit()
        entries = self._plan([*self._running.values()])
        return outputs + (self._run(entries) if entries else [])

    def close(self) -> None:
        """Closes the loop. A no-op here: `step` returns only after the model has finished. Safe to call twice."""

    def _plan(self, running: list[Entry]) -> list[Entry]:
        """Chooses the requests that run, and how many tokens each of them runs.

        The result is sorted by replica and then by age, oldest first, as `fetch` requires.
        No chunk runs past the first token of pages that a peer provides.
        """
        for entry in running:
            if entry.context.start_idx < entry.meets < entry.context.active_idx:
                entry.context.set_token_indices(active_idx=entry.meets)
        counts = plan_chunks([entry.context.active_length for entry in running], self.token_budget)
        for entry, count in zip(running, counts, strict=True):
            if count:
                entry.context.set_token_indices(active_idx=entry.context.start_idx + count)
        runs = [entry for entry, count in zip(running, counts, strict=True) if count]
        return sorted(runs, key=lambda entry: entry.replica)

    def _reserve_running(self) -> list[Output]:
        """Reserves pages for every running request, oldest first.

        Older requests come first, so an old request never gives its pages to a newer one.
        """
        outputs = list[Output]()
        for entry in list(self._running.values()):
            while entry.request.request_id in self._running:
                self._choose_chunk(entry)
                try:
                    if self.manager.maybe_reserve(entry.context):
                        break
                except (PromptTooLongError, SequenceTooLongError, WeightsChangedError) as error:
                    outputs.append(self._fail(entry, error))
                    break
                self._preempt(next(e for e in reversed(self._running.values()) if e.replica == entry.replica))
        return outputs

    def _preempt(self, entry: Entry) -> None:
        """Releases a running request and puts it first in the queue.

        When the request is admitted again, it uses its pages that are still in the cache.
        """
        # The preempted request is not admitted again in this step. It needs as many pages as it gave back, and an older
        # request has already taken some of these.
        request_id = entry.request.request_id
        del self._running[request_id]
        self.manager.release(request_id)
        self._waiting[request_id] = entry
        self._waiting.move_to_end(request_id, last=False)
        self.preemptions += 1

    def _admit(self) -> list[Output]:
        outputs = list[Output]()
        self.fetching = False
        while self._waiting:
            request_id, entry = next(iter(self._waiting.items()))
            self.fetching = self._fetches(entry)
            if self.fetching:
                break  # the request waits, and the running requests continue
            try:
                admitted = self._claim(entry)
            except (PromptTooLongError, SequenceTooLongError) as error:
                outputs.append(self._fail(entry, error))
                continue
            if not admitted:
                break
            self._running[request_id] = self._waiting.pop(request_id)
            if self.on_admit is not None:
                self.on_admit(request_id, entry.replica, entry.context.start_idx)
        return outputs

    def _fetches(self, entry: Entry) -> bool:
        """Returns whether a waiting request should wait longer for pages that are being fetched for it."""
        if not self.manager.prefetch(entry.context):
            return False
        now = time.monotonic()
        if entry.fetching_since is None:
            entry.fetching_since = now
        return now - entry.fetching_since < _LONGEST_FETCH_S

    def _claim(self, entry: Entry) -> bool:
        """Takes a row and pages for a waiting request.

        Returns False and takes nothing if no row is free, or too few pages are free.
        """
        context = entry.context
        self._choose_chunk(entry)
        if self._admission is not None and not self._admission(context).fits:
            return False
        entry.replica = self.manager.get_or_recommend_replica(context)
        try:
            self.manager.external_claim(context.request_id, entry.replica)
        except NoFreeRowError:
            return False
        reserved = False
        try:
            reserved = self.manager.maybe_reserve(context)
        finally:
            if not reserved:
                self.manager.release(context.request_id)
        return reserved

    def _choose_chunk(self, entry: Entry) -> None:
        """With windows, limits the part of a prompt that runs in one step. Pages are reserved only for this part.

        The longer a chunk is, the more pages it needs. A chunk never needs more pages than an empty replica has, so a
        request that `add` has accepted can always run.
        """
        context = entry.context
        if self._has_windows and context.active_length > 1:
            # A chunk has at least two tokens if there is room for them: a single token would count as a decode step,
            # which looks up no cached prefix.
            most, known = max(2, self.token_budget), context.end_idx
            pages_of = partial(self.manager.layer_tables.most_pages, known, self.manager.page_size)
            if pages_of(most) > self._most_pages:
                most = bisect_right(range(2, most), self._most_pages, key=pages_of) + 1
            context.set_token_indices(active_idx=min(known, context.start_idx + most))

    def _run(self, entries: list[Entry]) -> list[Output]:
        """Runs the planned requests, and returns their new tokens.

        A request yields a token only if its chunk reaches the end of its known tokens.
        """
        yields = [entry.context.active_idx == entry.context.end_idx for entry in entries]
        tokens = self._next_tokens(entries)
        for entry, token in zip(entries, tokens, strict=True):
            entry.context.update(token)
        self.manager.step([entry.context for entry in entries])
        return [
            self._output(entry, token, entry.context.current_length)
            for entry, token, yes in zip(entries, tokens, yields, strict=True)
            if yes
        ]

    def _next_tokens(self, entries: list[Entry]) -> list[int]:
        inputs = self.manager.fetch([entry.context for entry in entries])
        replicas = self.manager.num_replicas
        shards = len(inputs) // replicas
        tokens = list[int]()
        for replica in range(replicas):
            contexts = [entry.context for entry in entries if entry.replica == replica]
            if contexts:
                tokens += self.runner.run(contexts, inputs[replica * shards : (replica + 1) * shards])
        return tokens

    def _output(self, entry: Entry, token: int, length: int) -> Output:
        """Reports the newest token of a request of `length` tokens, and releases the request if that token ends it."""
        request = entry.request
        reason = finish_reason(request, length, token, self.runner.eos_token_ids)
        if reason:
            del self._running[request.request_id]
            if request.hold_pages:
                self._held.add(request.request_id)
            else:
                self.manager.release(request.request_id)
        return Output(request.request_id, token, reason)

    def _fail(self, entry: Entry, error: Exception) -> Output:
        self.abort(entry.request.request_id)
        return Output(entry.request.request_id, None, "error", str(error))

    def _check_new(self, request_id: str) -> None:
        if request_id in self._held or request_id in self._waiting or request_id in self._running:
            raise AlreadyClaimedError(f"request {request_id!r} is already in the loop")


def plan_chunks(pending: Sequence[int], budget: int) -> list[int]:
    """Returns how many of its `pending` tokens each running request runs in this step. The oldest request comes first.

    A request with 1 pending token decodes, and always runs. Prompts share the rest of the budget, and together get at
    least one token. A prompt therefore makes progress however many requests decode.
    """
    left = max(1, budget - sum(count == 1 for count in pending))
    counts: list[int] = []
    for count in pending:
        run = count if count == 1 else min(count, left)
        left -= 0 if count == 1 else run
        counts.append(run)
    return counts


def finish_reason(
    request: Request, length: int, token: int, eos_token_ids: frozenset[int]
) -> Literal["eos", "length"] | None:
    """Returns why a request that now has `length` tokens ends with `token`, or None if it continues."""
    if token in eos_token_ids and not request.ignore_eos:
        return "eos"
    return "length" if length - len(request.prompt) >= request.max_new_tokens else None
