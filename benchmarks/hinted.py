"""What do retention hints cost the host, at any pool size?

On a full pool (`pools.age`), prompts of 256 pages are reserved and then released. Each reservation evicts as many
pages. This is done without any hint, and with a hint on every request. The prompts are hashed beforehand. `first` is
the time of the release with the first hint, in milliseconds. That release searches the whole pool, which happens once
in a manager's life.
"""

from __future__ import annotations

from benchmarks.frame import POOL_SIZES, WARM_UP, Row, options, pin, report, settle, summary, timed
from benchmarks.pools import Prompts, age, compute, expect, manager_of
from kvcache import PagedKVCacheManager, Retention, TextContext

_PAGES = 256


def sampled(manager: PagedKVCacheManager, prompts: Prompts, repeats: int, *, hinted: bool) -> tuple[Row, Row]:
    """Times reserving and releasing new prompts. With hints, every second hint says that the session continues."""
    reserving: list[float] = []
    releasing: list[float] = []
    before = manager.metrics.evictions
    for number in range(WARM_UP + repeats):
        hint = Retention(session_continues=number % 2 == 0) if hinted else None
        context = TextContext(prompts.tokens(_PAGES * manager.page_size), manager.max_seq_len, retention=hint)
        manager.get_or_recommend_replica(context)  # computes the digests
        manager.external_claim(context.request_id)
        reserving.append(timed(manager.maybe_reserve, context))
        compute(manager, context)
        releasing.append(timed(manager.release, context.request_id))
        if number == WARM_UP:
            settle()
    expect(manager.metrics.evictions - before >= (repeats - 1) * _PAGES, "every page is evicted")
    return summary(reserving[WARM_UP:]), summary(releasing[WARM_UP:])


def measure(pages: int, repeats: int) -> list[Row]:
    """The rows for one pool size."""
    manager, prompts = manager_of(pages), Prompts()
    age(manager, prompts)
    rows: list[Row] = []
    for hinted in (False, True):
        first: Row = {}
        if hinted:
            context = prompts.claimed(manager, manager.page_size)
            expect(manager.maybe_reserve(context), "there is room")
            context.retention = Retention(session_continues=True)
            first = {"first_ms": round(timed(manager.release, context.request_id) / 1e3, 2)}
        for call, row in zip(("reserve", "release"), sampled(manager, prompts, repeats, hinted=hinted), strict=True):
            rows.append({"pages": pages, "call": call, "hints": "every request" if hinted else "none", **row, **first})
    return rows


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    sizes = POOL_SIZES[:2] if chosen.quick else POOL_SIZES
    report("hinted", [row for pages in sizes for row in measure(pages, 15 if chosen.quick else 60)], chosen)


if __name__ == "__main__":
    main()
