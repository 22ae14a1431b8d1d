"""What does it cost to plan a step while the previous one runs, and what does that gain?

`cost` compares the host's part of a decode step of a `Batch` in two ways. The plain way is reserve, fetch, update and
step. The other way fetches each step ahead, while the previous one is in flight. Such a step has tables of its own.
Each of its requests has a future token in place of the token that the model has not returned yet, and the real token
replaces it one step later. The time of such a step includes ending the previous one. `gain` compares a `ServingLoop`
with an `OverlappedLoop`. Their model runs for `model_ms` without the loop's thread, like a device. A loop that waits
for tokens spins until that time is over, by the benchmark's clock. `plan_ms` is the part of a step that the plain loop
spends outside of the model. An overlapped loop does this part while the model runs. All requests decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.decode_step import begun, bound
from benchmarks.frame import WARM_UP, Row, now, options, pin, report, samples, settle, summary
from benchmarks.pools import Prompts, expect, manager_of
from kvcache import RaggedKVCacheInputs, StepInFlight
from scheduler_adapters.base import RunTokens
from scheduler_adapters.loop import Request, ServingLoop
from scheduler_adapters.overlapped import OverlappedLoop, RunBatch

PAGE_SIZE, PROMPT = 16, 256
_STATISTICS = (
    "cost: us_min and us_median are the minimum and the median of the n steps of a row; gain: *_ms are the least "
    "means over 16 steps, gain_pct is the share of the plain step that the overlapped one saves"
)


def ahead(batch: int, steps: int) -> Callable[[], None]:
    """Runs steps of `batch` requests. Each step is fetched while the previous one is in flight."""
    manager, contexts = begun(batch, PAGE_SIZE, steps, full=False)
    requests, tokens, before = manager.batch(contexts), np.ones(batch, np.int32), list[StepInFlight]()

    def step() -> None:
        manager.reserve_batch(requests)
        planned = manager.fetch_ahead(requests)
        if before:
            requests.realize_future_tokens(tokens)
            manager.end_step(before.pop())
            manager.step(requests)
        requests.update_with_future_tokens()
        before.append(planned)

    return step


def cost(batch: int, repeats: int) -> list[Row]:
    """The rows for a batch size: one for plain steps, and one for steps that are fetched ahead."""
    manager, contexts = begun(batch, PAGE_SIZE, repeats + WARM_UP, full=False)
    kinds = {"fetch": bound(manager, contexts), "fetch_ahead": ahead(batch, repeats + WARM_UP)}
    rows: list[Row] = []
    for calls, step in kinds.items():
        times = samples(repeats, lambda: None, lambda _, step=step: step())
        rows.append({"what": "cost", "batch": batch, "calls": calls, **summary(times)})
    return rows


class Deadline(NamedTuple):
    """The tokens of a step, which are ready at a given time."""

    tokens: list[int]
    when: int

    def result(self) -> list[int]:
        """Waits for the tokens."""
        while now() < self.when:
            pass
        return self.tokens


class Device:
    """A model that takes a fixed time. A launched step continues by itself."""

    eos_token_ids = frozenset[int]()

    def __init__(self, milliseconds: float) -> None:
        self._ns = int(milliseconds * 1e6)

    def run(self, batch: Sequence[RunTokens], inputs: Sequence[RaggedKVCacheInputs]) -> list[int]:
        """Returns one token for each request."""
        return self.launch([(batch, inputs)]).result()

    def launch(self, batches: Sequence[RunBatch]) -> Deadline:
        """Begin a step."""
        return Deadline([1 for batch, _ in batches for _ in batch], now() + self._ns)


def step_ms(loop: ServingLoop, batch: int, steps: int) -> float:
    """Returns the time of a decode step: the lowest mean over as many steps as a page has tokens."""
    prompts = Prompts()
    for number in range(batch):
        loop.add(Request(f"r{number}", prompts.tokens(PROMPT).tolist(), steps + 20))
    while len(loop.step()) < batch:
        pass
    settle()
    times: list[float] = []
    for _ in range(steps // PAGE_SIZE):
        start = now()
        for _ in range(PAGE_SIZE):
            expect(len(loop.step()) == batch, "every request has a token each step")
        times.append((now() - start) / 1e6 / PAGE_SIZE)
    return min(times)


def gain(batch: int, milliseconds: float, steps: int) -> Row:
    """One row: the time of a step in both loops."""
    pages = batch * -(-(PROMPT + steps + 20) // PAGE_SIZE) + 1

    def manager() -> object:
        return manager_of(pages, page_size=PAGE_SIZE, rows=batch)

    model, budget = Device(milliseconds), batch * (PROMPT + 1)
    plain = step_ms(ServingLoop(manager(), model, budget), batch, steps)  # type: ignore[arg-type]
    overlapped = OverlappedLoop(manager(), model, budget)  # type: ignore[arg-type]
    try:
        hidden = step_ms(overlapped, batch, steps)
    finally:
        overlapped.close()
    return {
        "what": "gain",
        "batch": batch,
        "model_ms": milliseconds,
        "plan_ms": round(plain - milliseconds, 3),
        "plain_ms": round(plain, 3),
        "overlapped_ms": round(hidden, 3),
        "gain_pct": round(100 * (1 - hidden / plain), 1),
    }


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    batches, repeats = ([64], 32) if chosen.quick else ([1, 64, 256], 256)
    rows = [row for batch in batches for row in cost(batch, repeats)]
    for batch in batches:
        rows += [gain(batch, milliseconds, min(repeats, 128)) for milliseconds in (0.5, 2.0, 10.0)]
    report("overlap", rows, chosen, _STATISTICS)


if __name__ == "__main__":
    main()
