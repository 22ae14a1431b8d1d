"""What does it cost to take up one prompt: hash, look up, reserve; cold in a fresh pool, cold while evicting, warm?"""

from __future__ import annotations

from itertools import count

import numpy as np

from benchmarks.frame import Row, best_of, manager_of, options, pin, report
from kvcache import PagedKVCacheManager, TextContext

LONGEST = 1 << 17


def cold(manager: PagedKVCacheManager, length: int, seed: int) -> TextContext:
    """A claimed request with a prompt that nobody has seen."""
    context = TextContext(np.random.default_rng(seed).integers(0, 50_000, length), LONGEST)
    manager.external_claim(context.request_id)
    return context


def compute(manager: PagedKVCacheManager, context: TextContext) -> None:
    context.update(1)
    manager.step([context])


def measure(pages: int, page_size: int, length: int, algorithm: str, repeats: int) -> list[Row]:
    manager, seeds = manager_of(pages, page_size=page_size, algorithm=algorithm), count()
    open_requests: list[TextContext] = []

    def drop() -> None:
        for context in open_requests:
            manager.release(context.request_id)
        open_requests.clear()

    def fresh() -> TextContext:
        drop()
        open_requests.append(cold(manager, length, next(seeds)))
        return open_requests[0]

    def warm() -> TextContext:
        drop()
        known = cold(manager, length, 1 << 40)
        manager.maybe_reserve(known)
        compute(manager, known)
        manager.release(known.request_id)
        open_requests.append(cold(manager, length, 1 << 40))
        return open_requests[0]

    rows: list[Row] = []
    shape = {"page": page_size, "prompt": length, "hash": algorithm, "pool": pages}
    rows.append({**shape, "case": "cold", **best_of(repeats, fresh, manager.maybe_reserve)})
    rows.append({**shape, "case": "warm", **best_of(repeats, warm, manager.maybe_reserve)})
    drop()
    while manager.metrics.evictions == 0:  # fill the pool with published pages
        compute(manager, filler := _reserved(manager, length, next(seeds)))
        manager.release(filler.request_id)

    def evicting() -> TextContext:
        for context in open_requests:
            compute(manager, context)
        return fresh()

    rows.append({**shape, "case": "cold, evicting", **best_of(repeats, evicting, manager.maybe_reserve)})
    return rows


def _reserved(manager: PagedKVCacheManager, length: int, seed: int) -> TextContext:
    context = cold(manager, length, seed)
    manager.maybe_reserve(context)
    return context


def main() -> None:
    chosen = options(__doc__)
    pin()
    repeats = 15 if chosen.quick else 40
    rows = [
        row
        for algorithm in ("sha256", "xxh3_128")
        for page, length in ((16, 4096), (16, 32768), (128, 32768))
        for row in measure(1 << 14, page, length, algorithm, repeats)
    ]
    for pages in (10_000, 100_000) if chosen.quick else (10_000, 100_000, 1_000_000, 4_000_000):
        rows += measure(pages, 16, 4096, "sha256", repeats)
    report("admission", rows, chosen)


if __name__ == "__main__":
    main()
