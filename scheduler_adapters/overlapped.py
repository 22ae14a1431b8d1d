"""`OverlappedLoop`: a `ServingLoop` that plans a step while the model runs the previous one.

Each step performs these actions, in this order:

    plan      the next step: reserve and admit while the model runs; a future token stands for an unknown token
    wait      for the tokens of the running step; they replace the future tokens
    launch    the next step
    finish    publish, release and report the results of the previous step, while the model runs

If there are too few free pages for the next step, that step is not planned ahead. Pages that are released while the
model runs become free only when the model has finished.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidRequestError, PromptTooLongError, SequenceTooLongError, WeightsChangedError
from kvcache.steps_in_flight import StepInFlight
from kvcache.types import RaggedKVCacheInputs, RequestID
from scheduler_adapters.base import PagesAhead, RunTokens
from scheduler_adapters.loop import Entry, ModelRunner, Output, ServingLoop

PagesAheadT_co = TypeVar("PagesAheadT_co", bound=PagesAhead, covariant=True)
RunBatch = tuple[Sequence[RunTokens], Sequence[RaggedKVCacheInputs]]
"""The work of one replica: its requests, and the inputs of each of its shards."""


@dataclass(frozen=True, slots=True)
class _Running:
    """The tokens that a request runs in a planned step.

    The start and the end are recorded when the step is planned, because the request's context changes before the step
    has run.
    """

    request_id: RequestID
    tokens: NDArray[np.int32]  # a view, which stays valid because a context never changes tokens that it already has
    start_idx: int
    active_idx: int

    @property
    def active_length(self) -> int:
        return self.active_idx - self.start_idx


@dataclass(slots=True)
class _Planned:
    """A step whose inputs have been fetched."""

    entries: list[Entry]
    yields: list[bool]  # for each request, whether its chunk reaches the end of its known tokens
    lengths: list[int]  # length of each request after this step's token
    step: StepInFlight
    batches: list[RunBatch]  # the work of each replica that runs a request


class PendingTokens(Protocol):
    """The tokens of a step that was launched and may still run."""

    def result(self) -> list[int]:
        """Waits for the model. Returns the next token of each request, in the order of the launched batches."""
        ...


class _Launched(NamedTuple):
    """A step that the model runs, and its pending tokens."""

    planned: _Planned
    tokens: PendingTokens


class LaunchingRunner(ModelRunner, Protocol):
    """A model that can launch a step and return at once, as a model on a GPU does."""

    def launch(self, batches: Sequence[RunBatch]) -> PendingTokens:
        """Launches each replica's requests with the inputs of its shards. They run after everything launched before."""
        ...


class ThreadedRunner:
    """Runs launched steps of any `ModelRunner` in a separate thread."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.eos_token_ids = runner.eos_token_ids
        self.vocab_size: int | None = getattr(runner, "vocab_size", None)
        self._thread = ThreadPoolExecutor(1, "model")
        self._started = Semaphore(0)

    def run(self, batch: Sequence[RunTokens], inputs: Sequence[RaggedKVCacheInputs]) -> list[int]:
        """Runs in the caller's thread."""
        return self.runner.run(batch, inputs)

    def launch(self, batches: Sequence[RunBatch]) -> Future[list[int]]:
        """Runs the batches in the thread, after all batches that were launched before."""
        tokens = self._thread.submit(self._run, batches)
        # Wait until the thread has begun. Otherwise it would get the GIL only when the caller waits for the tokens.
        self._started.acquire()
        return tokens

    def close(self) -> None:
        """Waits for the launched steps and stops the thread. Safe to call twice."""
        self._thread.shutdown()

    def _run(self, batches: Sequence[RunBatch]) -> list[int]:
        self._started.release()
        return [token for batch, inputs in batches for token in self.runner.run(batch, inputs)]


class OverlappedLoop(ServingLoop[PagesAheadT_co]):
    """A `ServingLoop` that plans while its model runs. `step` returns the outputs of the previous step.

    Only one step runs at a time. If the model raises, the requests of its step are aborted and `step` raises. The loop
    refuses models with recurrent states. Call `close` at the end.
    """

    def __init__(self, manager: PagesAheadT_co, runner: LaunchingRunner, token_budget: int = 512) -> None:
        super().__init__(manager, runner, token_budget)
        if getattr(manager, "states", ()):
            raise InvalidRequestError(
                "OverlappedLoop does not support recurrent states, because a step overwrites the state before it: use "
                "ServingLoop, or serve without --overlap"
            )
        self._launching = runner
        self._launched: _Launched | None = None
        self._next: _Planned | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or a step's tokens are pending."""
        return self._launched is not None or super().has_work

    @property
    def is_running(self) -> bool:
        """Whether a request runs, or a step's tokens are pending."""
        return self._launched is not None or super().is_running

    def step(self) -> list[Output]:
        """Plans a step, waits for the running one, and launches the planned one.

        Returns the outputs of the step that ran.
        """
        launched, outputs = self._launched, list[Output]()
        if self._next is None and (launched is None or self._fits_ahead()):
            outputs += self._plan_next(alone=launched is None)
        if launched is None:
            self._launch()
            return outputs
        ran, tokens = launched.planned, self._wait(launched)
        self._launch()
        outputs += self._finish(ran, tokens)
        if self._launched is None:  # nothing was planned ahead
            outputs += self._plan_next(alone=True)
            self._launch()
        return outputs

    def close(self) -> None:
        """Waits for the running step and drops its tokens. Requests stay claimed. Safe to call twice."""
        try:
            if self._launched is not None:
                self._launched.tokens.result()
        finally:
            self._end_steps()

    def _fits_ahead(self) -> bool:
        """Returns whether every running request can get pages for its next step without a preemption."""
        for entry in self._going():
            self._choose_chunk(entry)
            try:
                if not self.manager.maybe_reserve(entry.context):
                    return False
            except (PromptTooLongError, SequenceTooLongError, WeightsChangedError):
                return False  # a later step that is planned while no step is in flight reports the failure
        return True

    def _going(self) -> list[Entry]:
        """Returns the running requests whose length limit allows another token after the pending token.

        Such a request still ends if the pending token turns out to be an end-of-sequence token.
        """
        return [
            entry
            for entry in self._running.values()
            if entry.context.current_length - len(entry.request.prompt) < entry.request.max_new_tokens
        ]

    def _plan_next(self, *, alone: bool) -> list[Output]:
        """Plans the next step, and fetches its inputs, if any request can run.

        With `alone`, no step is in flight. Only then can running requests be preempted.
        """
        outputs = self._reserve_running() if alone else []
        outputs += self._admit()
        entries = self._plan(self._going())
        if entries:
            yields = [entry.context.active_idx == entry.context.end_idx for entry in entries]
            lengths = [entry.context.current_length + 1 for entry in entries]
            step = self.manager.fetch_ahead([entry.context for entry in entries])
            self._next = _Planned(entries, yields, lengths, step, self._batches(entries, step))
        return outputs

    def _batches(self, entries: list[Entry], step: StepInFlight) -> list[RunBatch]:
        """Returns the work of each replica that runs a request.

        The tokens are views of the contexts, so future tokens among them are replaced by real ones before the launch.
        """
        shards = len(step.inputs) // self.manager.num_replicas
        batches: list[RunBatch] = []
        for replica in range(self.manager.num_replicas):
            contexts = [entry.context for entry in entries if entry.replica == replica]
            runs = [_Running(one.request_id, one.tokens, one.start_idx, one.active_idx) for one in contexts]
            if runs:
                batches.append((runs, step.inputs[replica * shards : (replica + 1) * shards]))
        return batches

    def _launch(self) -> None:
        """Launches the planned step. Its requests hold future tokens until `_wait` replaces them."""
        planned, self._next, self._launched = self._next, None, None
        if planned is None:
            return
        self._launched = _Launched(planned, self._launching.launch(planned.batches))
        for entry in planned.entries:
            entry.context.update_with_future_token()

    def _wait(self, launched: _Launched) -> list[int]:
        """Waits for the running step, and gives its tokens to its requests."""
        try:
            tokens = launched.tokens.result()
        except Exception:
            self._give_up(launched.planned)
            raise
        for entry, token in zip(launched.planned.entries, tokens, strict=True):
            entry.context.realize_future_token(token)
        return tokens

    def _finish(self, ran: _Planned, tokens: list[int]) -> list[Output]:
        """Publishes computed pages, and returns the tokens of the requests that were not aborted during the step."""
        running = [at for at, entry in enumerate(ran.entries) if self._running.get(entry.request.request_id) is entry]
        self.manager.step([ran.entries[at].context for at in running])
        self.manager.end_step(ran.step)
        return [self._output(ran.entries[at], tokens[at], ran.lengths[at]) for at in running if ran.yields[at]]

    def _give_up(self, ran: _Planned) -> None:
        """Aborts the requests of a step in which the model failed. Drops the step that was planned after it."""
        self._end_steps()
        for entry in ran.entries:
            if self._running.get(entry.request.request_id) is entry:
                self.abort(entry.request.request_id)

    def _end_steps(self) -> None:
        """Ends the launched and the planned step in the manager."""
        for planned in (None if self._launched is None else self._launched.planned, self._next):
            if planned is not None:
                self.manager.end_step(planned.step)
        self._launched = self._next = None
