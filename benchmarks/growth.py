"""How does the cost of manager and loop calls grow with the number of requests, replicas and pages?

`batch` is a decode step of a growing number of requests of 1,024 tokens, with pages of 16. The figure is the mean over
16 steps, in which each request needs one new page. `replicas` is a decode step of 64 requests over a growing number of
replicas. It also times the choice of a replica for a new prompt of 4,096 tokens, including its hash. `pool` has a full
pool that grows. It times the decode step of 64 requests, and the reservation of 4,096 tokens by eviction or by hits.
`waiting` is a step of 64 requests while a growing number waits, and adding and aborting one request
(`benchmarks.waiting`). `benchmarks.growth_transfer` does the same for pulls, and `python -m benchmarks.plots` draws
both on one page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from benchmarks import waiting
from benchmarks.admission import Bench
from benchmarks.decode_step import PROMPT, begun, bound
from benchmarks.frame import Row, options, pin, report, samples, summary
from benchmarks.pools import LONGEST, Prompts, age, manager_of, running
from kvcache import TextContext

PAGE, RUNNING, PROMPT_TOKENS = 16, 64, 4096
BATCHES = (1, 4, 16, 64, 256, 1024, 2048, 4096, 8192)
REPLICAS = (1, 2, 4, 8, 16)
POOLS = (10_000, 100_000, 1_000_000, 10_000_000)
WAITING = (1, 10, 100, 1000, 10_000)
_STATISTICS = (
    "columns us_min and us_median: minimum and median of the n samples of a row; of decode steps a sample is the mean "
    "over as many steps as a page has tokens"
)


def steps(step: Callable[[], None], repeats: int) -> Row:
    """Samples of `step`. Each is the mean over as many steps as a page has tokens."""

    def page_of_steps(_: None) -> None:
        for _ in range(PAGE):
            step()

    return summary([one / PAGE for one in samples(repeats, lambda: None, page_of_steps)])


def row(along: str, size: int, call: str, found: Row) -> Row:
    """A row: one point of a curve."""
    return {"along": along, "size": size, "call": call, **found}


def by_batch(size: int, repeats: int) -> Iterator[Row]:
    """A decode step of `size` requests."""
    manager, contexts = begun(size, PAGE, (repeats + 4) * PAGE, full=False)
    yield row("batch", size, "step", steps(bound(manager, contexts), repeats))


def by_replicas(count: int, repeats: int) -> Iterator[Row]:
    """A decode step of 64 requests over `count` replicas, and the choice of a replica."""
    prompts = Prompts()
    # Each replica has room for all requests, and twice the room that the new prompt needs.
    pages = RUNNING * (PROMPT // PAGE + repeats + 6) + 2 * PROMPT_TOKENS // PAGE
    manager = manager_of(pages, rows=RUNNING, replicas=count)
    contexts = [TextContext(prompts.tokens(PROMPT + at % PAGE), LONGEST) for at in range(RUNNING)]
    for at, context in enumerate(contexts):
        manager.external_claim(context.request_id, at % count)
        manager.maybe_reserve(context)
    manager.fetch(contexts)
    for context in contexts:
        context.update(1)
    manager.step(contexts)
    yield row("replicas", count, "step", steps(bound(manager, contexts), repeats))
    times = samples(
        repeats, lambda: TextContext(prompts.tokens(PROMPT_TOKENS), LONGEST), manager.get_or_recommend_replica
    )
    yield row("replicas", count, "choose", summary(times))


def by_pool(pages: int, repeats: int) -> Iterator[Row]:
    """Calls on a full pool of `pages` pages."""
    manager = manager_of(pages, page_size=PAGE, rows=2 * RUNNING)
    bench = Bench(manager, PROMPT_TOKENS, repeats)
    age(manager, bench.prompts)
    yield row("pool", pages, "reserve, evicting", bench.evicting())
    yield row("pool", pages, "reserve, cached", bench.warm())
    # The most tokens for which the smallest of these pools still has idle pages.
    contexts = running(manager, bench.prompts, [PROMPT + at % PAGE for at in range(RUNNING)])
    yield row("pool", pages, "step", steps(bound(manager, contexts), min(repeats, 30)))


def by_queue(count: int, repeats: int) -> Iterator[Row]:
    """Calls while `count` requests wait."""
    for one in waiting.measure(count, repeats):
        call = one["call"]
        yield row("waiting", count, call, {key: one[key] for key in ("us_min", "us_median", "n")})


def measure(sizes: Sequence[tuple[Callable[[int, int], Iterator[Row]], Sequence[int], int]]) -> list[Row]:
    """The rows of these curves. A curve is given as a measurement, its sizes and its repeats."""
    return [found for curve, many, repeats in sizes for size in many for found in curve(size, repeats)]


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    curves = ((by_batch, BATCHES, 12), (by_replicas, REPLICAS, 60), (by_pool, POOLS, 60), (by_queue, WAITING, 200))
    quick = [(curve, many[::2][:2], 5) for curve, many, _ in curves]
    rows = measure(quick if chosen.quick else curves)
    report("growth", rows, chosen, _STATISTICS)


if __name__ == "__main__":
    main()
