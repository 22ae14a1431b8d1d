"""What does it cost to release a request of 2,048 pages?

In the case `published`, the request's pages stay cached after its release, and no other request holds them. In the case
`unpublished` the pages have no useful content, because the model never ran. In the case `shared` another request holds
the pages. The pool is full (`pools.age`), in several sizes. A release might defer work to later calls. The case
`published` is therefore repeated until twice as many pages have been allocated as the pool has. Each row also has the
mean and the slowest call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from benchmarks.frame import POOL_SIZES, Row, options, pin, report, samples, summary
from benchmarks.pools import Prompts, age, claimed, compute, expect, manager_of, reserve
from kvcache import TextContext

PAGES = 2048


def measure(pages: int, page_size: int, repeats: int) -> list[Row]:
    """The rows for one pool size."""
    manager, prompts = manager_of(pages, page_size=page_size), Prompts()
    age(manager, prompts)
    tokens = prompts.tokens(PAGES * page_size)

    def unpublished() -> str:
        context = prompts.claimed(manager, PAGES * page_size)
        reserve(manager, context)
        return context.request_id

    def published() -> str:
        context = prompts.claimed(manager, PAGES * page_size)
        reserve(manager, context)
        compute(manager, context)
        return context.request_id

    def shared() -> str:
        context: TextContext = claimed(manager, tokens)
        reserve(manager, context)
        expect(context.start_idx == (PAGES - 1) * page_size, "all pages but the last are shared")
        return context.request_id

    def row(case: str, prepare: Callable[[], str], count: int) -> Row:
        times = samples(count, prepare, manager.release)
        every = {"us_mean": round(statistics.mean(times), 2), "us_max": round(max(times), 2)}
        return {"pages": pages, "page": page_size, "case": case, **summary(times), **every}

    free = manager.num_free_blocks
    rows = [row("published", published, max(repeats, 2 * pages // PAGES)), row("unpublished", unpublished, repeats)]
    expect(manager.num_free_blocks == free, "everything came back")
    holder = claimed(manager, tokens)
    reserve(manager, holder)
    compute(manager, holder)
    rows.append(row("shared", shared, repeats))
    expect(manager.num_free_blocks == free - PAGES, "what is shared stays held")
    return rows


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    sizes = POOL_SIZES[:2] if chosen.quick else POOL_SIZES
    rows = [row for pages in sizes for row in measure(pages, 16, 20 if chosen.quick else 100)]
    report("release", rows, chosen)


if __name__ == "__main__":
    main()
