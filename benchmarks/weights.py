"""What does a switch to other weights cost, beside a reset of the cache?

Both are timed on the same manager, whose pools are full of published pages, and which has running requests. `switch` is
`set_weights`, for each way in which running requests go on. `first switch` is the first one of the manager. `reset` is
`reset_prefix_cache`, after which the pools are filled again. `decode step` is one of all running
requests, and `admission` of a prompt that waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import torch

from benchmarks.frame import Row, options, pin, progress, report, samples, settle, summary, timed
from benchmarks.pools import expect
from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from kvcache.weights import Running

PAGE, REPLICAS, RUNNING_PAGES = 16, 16, 20
HOWS: tuple[Running, ...] = ("finish", "recompute", "stop")


class Bench:
    """A manager of several replicas with full pools, and requests that decode on all of them."""

    def __init__(self, pages: int, replicas: int, rows: int) -> None:
        self.of_each = pages // replicas
        params = KVCacheParams(
            dtype=torch.uint8,
            n_kv_heads=1,
            head_dim=1,
            is_mla=True,
            enable_prefix_caching=True,
            page_size=PAGE,
            n_devices=replicas,
            data_parallel_degree=replicas,
            weights=0,
        )
        self.longest = max(self.of_each // 4, 2 * RUNNING_PAGES) * PAGE
        self.manager = PagedKVCacheManager(
            params, rows * replicas, self.longest, 1, ["cpu"] * replicas, available_cache_memory=pages * PAGE
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
    report("weights", rows, chosen)


if __name__ == "__main__":
    main()
