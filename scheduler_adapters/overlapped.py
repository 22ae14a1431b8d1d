"""`OverlappedLoop`: a `ServingLoop` that plans a step while the model runs the one before it.

A step of it does this, in this order:

    plan      the next step: reserve and admit while the model runs; requests wait for a token, a future one stands in
    wait      for the tokens of the step that runs; they take the places of the future ones
    launch    the next step
    finish    publish, release and report what the step before has given, while the model runs

Short of pages, nothing is planned ahead: what is released while the model runs is free only afterwards.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Semaphore
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import InvalidRequestError, PromptTooLongError, SequenceTooLongError
from kvcache.steps_in_flight import StepInFlight
from kvcache.types import RaggedKVCacheInputs, RequestID
from scheduler_adapters.base import PagesAhead, RunTokens
from scheduler_adapters.loop import Entry, ModelRunner, Output, ServingLoop

RunBatch = tuple[Sequence[RunTokens], Sequence[RaggedKVCacheInputs]]
"""What one replica runs: its requests, and an entry of inputs for each of its shards."""


@dataclass(frozen=True, slots=True)
class _Running:
    """What the model reads of a request, as it was when the step was planned: the context goes on meanwhile."""

    request_id: RequestID
    tokens: NDArray[np.int32]  # a view: a context only writes behind its known tokens
    start_idx: int
    active_idx: int

    @property
    def active_length(self) -> int:
        return self.active_idx - self.start_idx


@dataclass(slots=True)
class _Planned:
    """A step that is fetched."""

    entries: list[Entry]
    yields: list[bool]  # whether a request's chunk ends its known tokens
    lengths: list[int]  # tokens of each with the one that the step gives
    step: StepInFlight
    batches: list[RunBatch]  # of each replica that runs something


class PendingTokens(Protocol):
    """The tokens of a step that was launched."""

    def result(self) -> list[int]:
        """Wait for the model, and give the next token of each request, replica by replica."""
        ...


class _Launched(NamedTuple):
    """A step that the model runs, and the tokens that are to come."""

    planned: _Planned
    tokens: PendingTokens


class LaunchingRunner(ModelRunner, Protocol):
    """A model that can begin a step and return at once, as a device does."""

    def launch(self, batches: Sequence[RunBatch]) -> PendingTokens:
        """Run what each replica has to run, the shards of each with it, behind what was launched before."""
        ...


class ThreadedRunner:
    """Any `ModelRunner`, in a thread of its own, which alone calls it for what is launched."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.eos_token_ids = runner.eos_token_ids
        self.vocab_size: int | None = getattr(runner, "vocab_size", None)
        self._thread = ThreadPoolExecutor(1, "model")
        self._started = Semaphore(0)

    def run(self, batch: Sequence[RunTokens], inputs: Sequence[RaggedKVCacheInputs]) -> list[int]:
        """Run in the caller's thread."""
        return self.runner.run(batch, inputs)

    def launch(self, batches: Sequence[RunBatch]) -> Future[list[int]]:
        """Run in the thread; one step at a time."""
        tokens = self._thread.submit(self._run, batches)
        self._started.acquire()  # else the thread would not get the interpreter before somebody waits for its tokens
        return tokens

    def close(self) -> None:
        """Wait for what was launched, and end the thread. Calling it twice is safe."""
        self._thread.shutdown()

    def _run(self, batches: Sequence[RunBatch]) -> list[int]:
        self._started.release()
        return [token for batch, inputs in batches for token in self.runner.run(batch, inputs)]


class OverlappedLoop(ServingLoop[PagesAhead]):
    """A `ServingLoop` that plans while its model runs. `step` returns the outputs of the step before.

    One step runs at a time. If its tokens raise, its requests are aborted, and `step` raises. Recurrent states are
    refused. Call `close` at the end.
    """

    def __init__(self, manager: PagesAhead, runner: LaunchingRunner, token_budget: int = 512) -> None:
        super().__init__(manager, runner, token_budget)
        if getattr(manager, "states", ()):
            raise InvalidRequestError("OverlappedLoop of recurrent states: a step writes over the state before it")
        self._launching = runner
        self._launched: _Launched | None = None
        self._next: _Planned | None = None

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs, or the tokens of a step are to come."""
        return self._launched is not None or super().has_work

    def step(self) -> list[Output]:
        """Plan a step, wait for the one that runs, launch the planned one, and return the outputs of that which ran."""
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
        """Wait for the step that runs, whose tokens are dropped. Requests stay claimed. Calling it twice is safe."""
        try:
            if self._launched is not None:
                self._launched.tokens.result()
        finally:
            self._end_steps()

    def _fits_ahead(self) -> bool:
        """Whether every running request gets pages for its next step without a preemption."""
        for entry in self._going():
            self._choose_chunk(entry.context)
            try:
                if not self.manager.maybe_reserve(entry.context):
                    return False
            except (PromptTooLongError, SequenceTooLongError):
                return False  # reported when no step is in flight
        return True

    def _going(self) -> list[Entry]:
        """The running requests that do not end by their length with the token that is to come."""
        return [
            entry
            for entry in self._running.values()
            if entry.context.current_length - len(entry.request.prompt) < entry.request.max_new_tokens
        ]

    def _plan_next(self, *, alone: bool) -> list[Output]:
        """Fetch the next step, if there is one; `alone`: no step is in flight, and requests may be preempted."""
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
        """What each replica runs. A future token among it is known before it is launched: the tokens are views."""
        shards = len(step.inputs) // self.manager.num_replicas
        batches: list[RunBatch] = []
        for replica in range(self.manager.num_replicas):
            contexts = [entry.context for entry in entries if entry.replica == replica]
            runs = [_Running(one.request_id, one.tokens, one.start_idx, one.active_idx) for one in contexts]
            if runs:
                batches.append((runs, step.inputs[replica * shards : (replica + 1) * shards]))
        return batches

    def _launch(self) -> None:
        """Let the model run the planned step; its requests go on with future tokens."""
        planned, self._next, self._launched = self._next, None, None
        if planned is None:
            return
        self._launched = _Launched(planned, self._launching.launch(planned.batches))
        for entry in planned.entries:
            entry.context.update_with_future_token()

    def _wait(self, launched: _Launched) -> list[int]:
        """The tokens of the step that runs, known to its requests by now."""
        try:
            tokens = launched.tokens.result()
        except Exception:
            self._give_up(launched.planned)
            raise
        for entry, token in zip(launched.planned.entries, tokens, strict=True):
            entry.context.realize_future_token(token)
        return tokens

    def _finish(self, ran: _Planned, tokens: list[int]) -> list[Output]:
        """Publish what was computed, and report the tokens of requests that were not aborted meanwhile."""
        places = [at for at, entry in enumerate(ran.entries) if self._running.get(entry.request.request_id) is entry]
        self.manager.step([ran.entries[at].context for at in places])
        self.manager.end_step(ran.step)
        return [self._output(ran.entries[at], tokens[at], ran.lengths[at]) for at in places if ran.yields[at]]

    def _give_up(self, ran: _Planned) -> None:
        """The model has failed: the requests of its step end, and what was planned behind it."""
        self._end_steps()
        for entry in ran.entries:
            if self._running.get(entry.request.request_id) is entry:
                self.abort(entry.request.request_id)

    def _end_steps(self) -> None:
        """No step is in flight."""
        for planned in (None if self._launched is None else self._launched.planned, self._next):
            if planned is not None:
                self.manager.end_step(planned.step)
        self._launched = self._next = None
