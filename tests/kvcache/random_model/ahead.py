"""Random steps in flight. A step is fetched ahead and runs later. Meanwhile its requests and their pages may change in
any way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcache import FUTURE_TOKEN, Batch, InvalidRequestError, StepInFlight, TextContext
from tests.kvcache.kv import Named, Run
from tests.kvcache.random_model import seam
from tests.kvcache.random_model.matrix import LONGEST
from tests.kvcache.random_model.plain import Request
from tests.kvcache.random_model.tails import TailMoves


@dataclass(eq=False)
class Entry:
    """A request of a step in flight: the range of its tokens that runs, and its tokens."""

    one: Request
    named: Named
    tokens: list[int]
    start: int
    active: int
    advanced: bool = False  # The request has a future token for this step.
    realized: bool = False  # The value of the request's future token is known.


@dataclass(eq=False)
class Flight:
    """A step in flight."""

    step: StepInFlight
    entries: list[Entry]
    batch: Batch | None


class AheadMoves(TailMoves):
    """Moves with steps in flight. Up to two steps are in flight at a time. A device runs them later, in the order in
    which they were fetched.
    """

    def __init__(self, *args: Any) -> None:
        self.flights: list[Flight] = []
        super().__init__(*args)

    def weights(self) -> dict[str, int]:
        return super().weights() | {"fetch_ahead": 16, "land": 12}

    def is_of(self, kind: str) -> str:
        return "overlap" if kind in {"fetch_ahead", "land"} else super().is_of(kind)

    @property
    def steps_are_in_flight(self) -> bool:
        return bool(self.flights)

    @property
    def running(self) -> list[Request]:
        """The running requests that can join a step. A request without a future token is left out if an earlier step in
        flight has already fetched it.
        """
        waiting = {entry.one for flight in self.flights for entry in flight.entries if not entry.advanced}
        return [one for one in super().running if one not in waiting]

    @property
    def ready(self) -> list[Request]:
        return [one for one in super().ready if not one.context.has_future_token]

    def has_computed(self, one: Request) -> bool:
        entries = [entry for flight in self.flights for entry in flight.entries if entry.one is one]
        return all(entry.start >= one.cached for entry in entries)

    def fetch_ahead(self) -> bool:
        """Plans a step of some requests. A third step in flight is refused."""
        ready = [one for one in super().ready if one in self.running and len(one.tokens) < LONGEST]
        if self.manager.states or not ready:
            return False
        chosen = [one for one in ready if self.choose.integer(0, 2)] or ready[:1]
        for one in chosen:
            self.limit(one)
        batch: Sequence[Any] = [one.context for one in chosen]
        if "batches" in self.features and self.choose.integer(0, 1):
            batch = self.manager.batch(batch)
        if len(self.flights) == 2:
            return self.third(batch)
        step = self.call("fetch_ahead", lambda: self.manager.fetch_ahead(batch))
        entries = [
            Entry(one, one.named, [*one.tokens], one.context.start_idx, one.context.active_idx) for one in chosen
        ]
        own = all(type(context) is TextContext for context in batch)
        flight = Flight(step, entries, batch if isinstance(batch, Batch) and own else None)
        self.flights.append(flight)
        if "host" in self.features:
            for one in chosen:
                self.books.use(one.loads)
                one.loads = []
        self.advance(flight)
        self.books.learn()
        self.seen["ahead of a future token"] += any(not entry.advanced for entry in entries)
        return True

    def limit(self, one: Request) -> None:
        """Some prompts run in chunks."""
        chunk = self.choose.integer(1, 30)
        if one.context.active_length > chunk:
            one.context.set_token_indices(active_idx=one.context.start_idx + chunk)

    def third(self, batch: Sequence[Any]) -> bool:
        try:
            self.manager.fetch_ahead(batch)
        except InvalidRequestError as error:
            assert "2 steps are in flight" in str(error)  # noqa: PT017 - the moves run without pytest, too
            return True
        raise AssertionError("the manager has fetched a third step while two are in flight")

    def advance(self, flight: Flight) -> None:
        """Adds a future token to each request of the step. A request that has a future token already or was released is
        left out.
        """
        may = [entry for entry in flight.entries if not entry.advanced and not entry.one.context.has_future_token]
        may = [entry for entry in may if self.live.get(entry.one.name) is entry.one]
        if flight.batch is not None and len(may) == len(flight.entries):
            flight.batch.update_with_future_tokens()
        else:
            for entry in may:
                entry.one.context.update_with_future_token()
        for entry in may:
            entry.advanced = True
            if entry.active == len(entry.one.tokens):
                entry.one.tokens.append(FUTURE_TOKEN)
            entry.one.ready = entry.one.room >= len(entry.one.tokens)
        if may and self.choose.integer(0, 2) == 0:
            self.step([entry.one for entry in may])
            self.seen["stepped in flight"] += 1

    def land(self) -> bool:
        """Runs the oldest step on the device with the step's own tables, whatever has happened to its requests."""
        if not self.flights:
            return False
        flight = self.flights[0]
        self.run_flight(flight)
        live = [entry.one for entry in flight.entries if entry.advanced and self.is_live(entry)]
        self.seen["landed, and its request had gone"] += len(live) < len(flight.entries)
        late = bool(self.choose.integer(0, 1))
        if late:
            self.end_step(flight)
        if live:
            self.step(live)
        if not late:
            self.end_step(flight)
        for other in self.flights:
            self.advance(other)
        return True

    def is_live(self, entry: Entry) -> bool:
        """Returns whether the request has pages, and was not released since the step was planned."""
        return self.live.get(entry.one.name) is entry.one and entry.one.has_pages

    def run_flight(self, flight: Flight) -> None:
        """Computes as the device would, and then knows the tokens that follow."""
        runs = [self.run_ahead(entry) for entry in flight.entries]
        self.books.kv.run(runs, flight.step.inputs)
        for entry, run in zip(flight.entries, runs, strict=True):
            self.ran(entry.one, run)
        self.realize(flight)

    def run_ahead(self, entry: Entry) -> Run:
        one = entry.one
        return Run(one.name, one.replica, entry.named, entry.tokens, entry.start, entry.active, one.again)

    def realize(self, flight: Flight) -> None:
        """Replaces the future tokens of a step, in the requests that still have them."""
        mine = [entry for entry in flight.entries if entry.advanced and not entry.realized]
        tokens = [self.choose.integer(1, 2) for _ in mine]
        if flight.batch is not None and len(mine) == len(flight.entries):
            flight.batch.realize_future_tokens(np.array(tokens))
        for entry, token in zip(mine, tokens, strict=True):
            context, entry.realized = entry.one.context, True
            if context.has_future_token:
                context.realize_future_token(token)
            others = [other for of in self.flights for other in of.entries if other.one.context is context]
            records = [other.tokens for other in others] + [
                one.tokens for one in self.live.values() if one.context is context
            ]
            for record in records:
                if record[-1] == FUTURE_TOKEN:
                    record[-1] = token

    def step(self, requests: Sequence[Request]) -> None:
        contexts = [one.context for one in requests]
        self.call("step", lambda: self.manager.step(contexts))
        for one in requests:
            one.cached = one.context.computed_idx
            one.ready = one.room >= len(one.tokens)
        if self.steady:
            seam.copy_below(self.manager)
        self.books.learn(stepped=requests)

    def end_step(self, flight: Flight) -> None:
        parked = [(at, page) for at in range(len(self.books.replicas)) for page in seam.parked(self.manager, at)]
        self.call("end_step", lambda: self.manager.end_step(flight.step))
        self.flights.remove(flight)
        self.seen["parked"] += len(parked)
        self.books.learn(leaving=parked)

    def end_unknown_steps(self, steps: Sequence[StepInFlight]) -> None:
        """Ends the steps that an interrupted call has begun and not returned. Also records which steps have ended."""
        for step in steps:
            if all(step is not flight.step for flight in self.flights):
                self.manager.end_step(step)
        self.flights = [flight for flight in self.flights if not flight.step.is_over]

    def finish(self) -> None:
        for flight in self.flights:
            self.run_flight(flight)
            self.manager.end_step(flight.step)
        super().finish()
