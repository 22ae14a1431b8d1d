"""What does a switch to other weights cost, beside a reset of the cache, and how many tokens does it save?

Both are timed on the same manager, whose pools are full of published pages, and which has running requests. `switch` is
`set_weights`, for each way in which running requests go on. `first switch` is the first one of the manager. `reset` is
`reset_prefix_cache`, after which the pools are filled again. `decode step` is one of all running
requests, and `admission` of a prompt that waits. `weights_of` hashes tensors on the host.

The rows `rollouts` are counts, not times. A trace of 32 prompts of 512 tokens runs with 8 samples each, as agents do: a
sample has 4 turns, and each turn adds a question of 32 tokens and an answer of 32. 64 samples take turns at random, and
after every 64 turns the weights change. `computed` is the number of prompt tokens that the model runs. It is counted
for a cache that is flushed at each switch, and for each `max_staleness`. `oldest` is the greatest age of a token in
switches. The rows `rollback` count the first turn of each prompt after other weights have come and gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.frame import Row, options, pin, progress, report, samples, settle, summary, timed
from benchmarks.pools import expect, manager_of
from kvcache import TextContext, weights_of
from kvcache.weights import Running

PAGE, REPLICAS, RUNNING_PAGES = 16, 16, 20
HOWS: tuple[Running, ...] = ("finish", "recompute", "stop")


class Bench:
    """A manager of several replicas with full pools, and requests that decode on all of them."""

    def __init__(self, pages: int, replicas: int, rows: int) -> None:
        self.of_each = pages // replicas
        self.longest = max(self.of_each // 4, 2 * RUNNING_PAGES) * PAGE
        self.manager = manager_of(
            self.of_each, page_size=PAGE, rows=rows, max_seq_len=self.longest, replicas=replicas, weights=0
        )
        self.random = np.random.default_rng(0)
        self.versions: Iterator[int] = itertools.count(1)
        self.rows, self.running = rows, list[TextContext]()
        self.fill()

    def request(self, replica: int, pages: int) -> TextContext:
        """Returns a request that has computed a new prompt of so many pages, less a token, on this replica."""
        context = TextContext(self.random.integers(0, 1 << 17, pages * PAGE - 1), self.longest)
        self.manager.external_claim(context.request_id, replica)
        expect(self.manager.maybe_reserve(context), "there is room")
        self.step([context])
        return context

    def step(self, contexts: list[TextContext]) -> None:
        """Run one step."""
        self.manager.fetch(contexts)
        for context in contexts:
            context.update(1)
        self.manager.step(contexts)

    def fill(self) -> None:
        """Release what runs, fill each pool with pages that are idle then, and let new requests run."""
        for context in self.running:
            self.manager.release(context.request_id)
        replicas = range(self.manager.num_replicas)
        for replica in replicas:
            for _ in range(5):
                self.manager.release(self.request(replica, self.longest // PAGE).request_id)
        self.running = [self.request(replica, RUNNING_PAGES // 2) for replica in replicas for _ in range(self.rows)]

    def switched(self, how: Running, repeats: int) -> Row:
        """Times switches, before each of which the requests of the one before run again."""

        def prepared() -> int:
            if how == "stop":
                for context in self.running:
                    self.manager.release(context.request_id)
                    self.manager.external_claim(context.request_id, self.running.index(context) // self.rows)
            for context in self.running if how != "finish" else ():
                expect(self.manager.maybe_reserve(context), "there is room")
            return next(self.versions)

        return summary(samples(repeats, prepared, lambda version: self.manager.set_weights(version, how)))

    def reset(self, repeats: int) -> Row:
        """Times resets of full pools."""
        times: list[float] = []
        for number in range(repeats):
            if number:
                self.fill()
            settle()
            times.append(timed(lambda _: self.manager.reset_prefix_cache(), None))
            progress(f"reset {number}: {times[-1]:.0f} us")
        return summary(times)

    def decoded(self, repeats: int) -> Row:
        """Times decode steps of all running requests, without the model's work and the updates of contexts."""
        batch = self.manager.batch(self.running)
        tokens = np.ones(len(self.running), np.int32)

        def step(_: None) -> None:
            self.manager.reserve_batch(batch)
            self.manager.fetch(batch)
            batch.update(tokens)
            self.manager.step(batch)

        return summary(samples(repeats, lambda: None, step))

    def admitted(self, repeats: int) -> Row:
        """Times `admission` of a prompt that was asked for before."""
        context = TextContext(self.random.integers(0, 1 << 17, min(256 * PAGE, self.longest)), self.longest)
        return summary(samples(repeats, lambda: context, self.manager.admission))


class Rollouts:
    """Samples of a few prompts, several turns each, while the weights change again and again."""

    prompts, samples, turns, window, switch_every = 32, 8, 4, 64, 64
    prompt_tokens, question, answer = 512, 32, 32

    def __init__(self, staleness: int, *, flush: bool) -> None:
        self.random, self.staleness, self.flush = np.random.default_rng(0), staleness, flush
        self.longest = self.prompt_tokens + self.turns * (self.question + self.answer)
        self.manager = manager_of(20_000, page_size=PAGE, max_seq_len=self.longest + PAGE, weights=0)
        self.history, self.oldest = [self.manager.weights], 0

    def tokens(self, count: int) -> list[int]:
        """Returns random tokens."""
        return self.random.integers(0, 1 << 17, count).tolist()

    def turn(self, tokens: list[int]) -> None:
        """Runs one turn of a sample, whose `tokens` are those of the turns before, and appends this one's."""
        tokens += self.tokens(self.question)
        context = TextContext(tokens, self.longest + PAGE, max_staleness=self.staleness)
        with self.manager.claim(context):
            expect(self.manager.maybe_reserve(context, self.answer), "there is room")
            for _, _, version in self.manager.lineage(context.request_id):
                self.oldest = max(self.oldest, self.history[::-1].index(version))
            self.manager.fetch([context])
            tokens += (answer := self.tokens(self.answer))
            for token in answer:
                context.update(token)
            self.manager.step([context])

    def switch(self, version: int) -> None:
        """Sets other weights, and resets the cache if it is to be flushed."""
        self.manager.set_weights(version)
        self.history.append(self.manager.weights)
        if self.flush:
            self.manager.reset_prefix_cache()

    def run(self) -> None:
        """Runs the trace."""
        every = [self.tokens(self.prompt_tokens) for _ in range(self.prompts)]
        waiting = [[*prompt] for prompt in every for _ in range(self.samples)]
        running, waiting = waiting[: self.window], waiting[self.window :]
        for number in itertools.count(1):
            if not running:
                return
            sample = running[int(self.random.integers(len(running)))]
            self.turn(sample)
            if len(sample) == self.longest:
                running.remove(sample)
                running += waiting[:1]
                del waiting[:1]
            if number % self.switch_every == 0:
                self.switch(number // self.switch_every)

    def row(self, before: int = 0, found: int = 0) -> Row:
        """Returns the counts since so many tokens were computed and found."""
        metrics = self.manager.metrics
        row = {"prompt_tokens": metrics.prompt_tokens - before - found, "computed": metrics.input_tokens - before}
        return {**row, "cached": metrics.cache_tokens - found, "oldest": self.oldest}


def rollouts() -> list[Row]:
    """Counts what each way saves on the same trace, and after a rollback."""
    rows: list[Row] = []
    for name, staleness, flush in (("flush", 0, True), *((f"max_staleness={k}", k, False) for k in (0, 1, 4))):
        bench = Rollouts(staleness, flush=flush)
        bench.run()
        rows.append({"case": f"rollouts: {name}", **bench.row()})
    flushed, none, one, four = (row["computed"] for row in rows)
    expect(flushed == none > one > four, "each version more that a request allows saves tokens")
    for name, flush in (("flush", True), ("versions", False)):
        bench = Rollouts(0, flush=flush)
        prompts = [bench.tokens(bench.prompt_tokens) for _ in range(bench.prompts)]
        for version in (0, 1, 0):
            bench.switch(version)
            before, found = bench.manager.metrics.input_tokens, bench.manager.metrics.cache_tokens
            for prompt in prompts:
                bench.turn([*prompt])
        rows.append({"case": f"rollback: {name}", **bench.row(before, found)})
    return rows


def hashed(gib: float, repeats: int) -> Row:
    """Times `weights_of` of tensors on the host."""
    tensors = {f"layer {at}": torch.rand(int(gib * (1 << 28)) // 16) for at in range(16)}
    row = summary(samples(repeats, lambda: tensors, weights_of))
    return {"case": f"weights_of, {gib} GiB", **row, "gb_per_s": round(gib * (1 << 30) / row["us_min"] / 1000, 1)}


def measure(pages: int, replicas: int, rows: int, repeats: int, resets: int) -> list[Row]:
    """Measures everything on one manager."""
    bench = Bench(pages, replicas, rows)
    size = {"pages": bench.manager.total_num_pages, "replicas": replicas, "running": len(bench.running)}
    found: list[Row] = []

    def add(case: str, row: Row) -> None:
        found.append({"case": case, **size, **row})

    add("decode step, no switch", bench.decoded(repeats))
    add("admission, no switch", bench.admitted(repeats))
    first = timed(bench.manager.set_weights, next(bench.versions))
    add("first switch", summary([first]))
    for how in HOWS:
        add(f"switch: {how}", bench.switched(how, repeats))
    bench.fill()
    add("decode step, after switches", bench.decoded(repeats))
    add("admission, after switches", bench.admitted(repeats))
    bench.fill()
    add("reset", bench.reset(resets))
    return found


def main() -> None:
    """Measures and reports."""
    chosen = options(__doc__)
    pin()
    rows = measure(8_000, 4, 2, 20, 2) if chosen.quick else measure(1_000_000, REPLICAS, 16, 100, 3)
    rows += [*rollouts(), hashed(0.0625 if chosen.quick else 1.0, 3)]
    report("weights", rows, chosen)


if __name__ == "__main__":
    main()
