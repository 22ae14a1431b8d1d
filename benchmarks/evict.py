"""What does it cost to evict a page, at any pool size?

On a full pool (`pools.age`), a request reserves n pages that must be evicted first, and then n pages that need no
eviction. `evict` is the difference of the two times, divided by n. The prompts are hashed before the timed part.
"""

from __future__ import annotations

import statistics

from benchmarks.frame import POOL_SIZES, WARM_UP, Row, options, pin, report, settle, timed
from benchmarks.pools import Prompts, age, compute, expect, manager_of
from kvcache import PagedKVCacheManager, TextContext

_STATISTICS = (
    "columns *_min and *_median: minimum and median of the n samples of a row; evict_min is the difference of the "
    "two minima, evict_median the median of the differences of pairs"
)


def hashed(manager: PagedKVCacheManager, prompts: Prompts, count: int) -> TextContext:
    """Returns a new prompt of `count` pages. It is hashed already, because choosing its replica has hashed it."""
    context = TextContext(prompts.tokens(count * manager.page_size), manager.max_seq_len)
    manager.get_or_recommend_replica(context)
    manager.external_claim(context.request_id)
    return context


def pair(manager: PagedKVCacheManager, prompts: Prompts, count: int) -> tuple[float, float]:
    """Returns the microseconds to reserve `count` pages by eviction, and to reserve `count` fresh pages."""
    evictor = hashed(manager, prompts, count)
    before = manager.metrics.evictions
    evicting = timed(manager.maybe_reserve, evictor)
    expect(manager.metrics.evictions == before + count, f"{count} pages are evicted")
    manager.release(evictor.request_id)
    fresh = hashed(manager, prompts, count)
    reusing = timed(manager.maybe_reserve, fresh)
    expect(manager.metrics.evictions == before + count, "the second reservation evicts nothing")
    compute(manager, fresh)  # publishes the pages and releases them as the youngest idle pages
    manager.release(fresh.request_id)
    return evicting, reusing


def measure(pages: int, counts: tuple[int, ...], repeats: int) -> list[Row]:
    """The rows for one pool size."""
    manager, prompts = manager_of(pages), Prompts()
    age(manager, prompts)
    rows: list[Row] = []
    for count in counts:
        for _ in range(WARM_UP):
            pair(manager, prompts, count)
        settle()
        evicting, reusing = zip(*(pair(manager, prompts, count) for _ in range(repeats)), strict=True)
        differences = [one - other for one, other in zip(evicting, reusing, strict=True)]
        rows.append(
            {
                "pages": pages,
                "at a time": count,
                "evicting_min": round(min(evicting), 2),
                "evicting_median": round(statistics.median(evicting), 2),
                "reusing_min": round(min(reusing), 2),
                "reusing_median": round(statistics.median(reusing), 2),
                "evict_min": round((min(evicting) - min(reusing)) / count, 3),
                "evict_median": round(statistics.median(differences) / count, 3),
                "n": repeats,
            }
        )
    return rows


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    sizes = POOL_SIZES[:2] if chosen.quick else POOL_SIZES
    rows = [row for pages in sizes for row in measure(pages, (1, 64, 256, 2048), 15 if chosen.quick else 60)]
    report("evict", rows, chosen, _STATISTICS)


if __name__ == "__main__":
    main()
