"""What does it cost to admit one prompt: to hash it, look it up, and reserve its pages?

Four calls are timed. `cold`: `maybe_reserve` for a new prompt that gets fresh pages. `evicting`: the same for a new
prompt, each of whose pages must first be evicted. `warm`: the same for a prompt whose full pages are all cached.
`publish`: the `step` after the prompt was computed. The pool is new, or full (`pools.age`). Each sample is a new
context, so the figures of `maybe_reserve` include hashing the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.frame import POOL_SIZES, Row, options, pin, report, samples, summary
from benchmarks.pools import Prompts, age, claimed, compute, expect, manager_of, reserve
from kvcache import PagedKVCacheManager, TextContext


class Bench:
    """A manager that serves one request at a time, and its measurements."""

    def __init__(self, manager: PagedKVCacheManager, length: int, repeats: int) -> None:
        self.manager = manager
        self.length = length
        self.repeats = repeats
        self.prompts = Prompts()
        self._open: TextContext | None = None

    def close(self) -> None:
        """Release the request of the previous sample."""
        if self._open is not None:
            self.manager.release(self._open.request_id)
            self._open = None

    def unseen(self) -> TextContext:
        """A new prompt. The previous sample's prompt was not published, so its pages are fresh."""
        self.close()
        self._open = self.prompts.claimed(self.manager, self.length)
        return self._open

    def published(self) -> TextContext:
        """Measures like `unseen`, but first publishes the previous sample's prompt, whose pages then stay cached."""
        if self._open is not None:
            compute(self.manager, self._open)
        return self.unseen()

    def sampled(self, prepare: Callable[[], TextContext], hit: int) -> Row:
        """Times `maybe_reserve` for each context that `prepare` returns.

        Checks that each call found `hit` cached tokens.
        """
        last: list[TextContext] = []

        def prepared() -> TextContext:
            expect(not last or last[0].start_idx == hit, f"every prompt hits {hit} tokens")
            last[:] = [prepare()]
            return last[0]

        row = summary(samples(self.repeats, prepared, self.manager.maybe_reserve))
        prepared()
        self.close()
        return row

    def cold(self) -> Row:
        """The prompt gets fresh pages."""
        # every sample takes this prompt's pages, which had to be evicted first if the pool is full
        reserve(self.manager, self.unseen())
        before = self.manager.metrics.evictions
        row = self.sampled(self.unseen, 0)
        expect(self.manager.metrics.evictions == before, "nothing is evicted")
        return row

    def evicting(self) -> Row:
        """Measures a prompt that gets only evicted pages."""
        reserve(self.manager, self.published())  # uses up the fresh pages, so that later prompts evict pages
        before = self.manager.metrics.evictions
        row = self.sampled(self.published, 0)
        pages = (self.repeats - 1) * (self.length // self.manager.page_size)
        expect(self.manager.metrics.evictions - before >= pages, "every page is evicted")
        return row

    def warm(self) -> Row:
        """The prompt finds every full page cached, except the page with its last token."""
        tokens = self.prompts.tokens(self.length)
        self.close()
        self._open = claimed(self.manager, tokens)
        reserve(self.manager, self._open)
        compute(self.manager, self._open)

        def again() -> TextContext:
            self.close()
            self._open = claimed(self.manager, tokens)
            return self._open

        size = self.manager.page_size
        return self.sampled(again, (self.length - 1) // size * size)

    def publish(self) -> Row:
        """Times `step` after the whole prompt was computed."""

        def computed() -> TextContext:
            context = self.unseen()
            reserve(self.manager, context)
            context.update(1)
            return context

        row = summary(samples(self.repeats, computed, lambda context: self.manager.step([context])))
        self.close()
        return row


def measure(pages: int, page_size: int, length: int, algorithm: str, repeats: int, pools: tuple[str, ...]) -> list[Row]:
    """The rows of one prompt length on one pool."""
    manager = manager_of(pages, page_size=page_size, algorithm=algorithm)
    bench = Bench(manager, length, repeats)
    shape = {"pages": pages, "page": page_size, "prompt": length, "hash": algorithm}
    rows: list[Row] = []
    for pool in pools:
        if pool == "full":
            age(manager, bench.prompts)
        cases = {"cold": bench.cold, "warm": bench.warm, "publish": bench.publish}
        if pool == "full":
            cases["evicting"] = bench.evicting
        rows += [{**shape, "pool": pool, "case": case, **run()} for case, run in cases.items()]
    return rows


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    repeats = 15 if chosen.quick else 60
    lengths = (4096, 32_768) if chosen.quick else (256, 1024, 4096, 16_384, 32_768, 65_536, 130_000)
    sizes = POOL_SIZES[:2] if chosen.quick else POOL_SIZES
    rows = [
        row
        for algorithm in ("sha256", "xxh3_128")
        for page, length in [*((16, length) for length in lengths), (128, 4096), (128, 32_768)]
        for row in measure(1 << 17, page, length, algorithm, repeats, ("new",))
    ]
    rows += [row for pages in sizes for row in measure(pages, 16, 4096, "sha256", repeats, ("full",))]
    report("admission", rows, chosen)


if __name__ == "__main__":
    main()
