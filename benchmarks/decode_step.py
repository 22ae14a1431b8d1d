"""What does one decode step cost the host: reserve, fetch, update and step for every running request?"""

from __future__ import annotations

import numpy as np

from benchmarks.frame import Row, best_of, manager_of, options, pin, report
from kvcache import PagedKVCacheManager, TextContext

PROMPT = 1024


def running(batch: int, page_size: int) -> tuple[PagedKVCacheManager, list[TextContext]]:
    """A manager with `batch` requests whose prompts are computed, spread evenly over their last pages."""
    pages = batch * (-(-(PROMPT + page_size) // page_size) + 40)
    manager = manager_of(pages, page_size=page_size, rows=batch, max_seq_len=4096)
    rng = np.random.default_rng(0)
    contexts = [TextContext(rng.integers(0, 50_000, PROMPT + at % page_size), 4096) for at in range(batch)]
    for context in contexts:
        manager.external_claim(context.request_id)
        assert manager.maybe_reserve(context)
    manager.fetch(contexts)
    for context in contexts:
        context.update(1)
    manager.step(contexts)
    return manager, contexts


def by_calls(manager: PagedKVCacheManager, contexts: list[TextContext]) -> None:
    for context in contexts:
        manager.maybe_reserve(context)
    manager.fetch(contexts)
    for context in contexts:
        context.update(1)
    manager.step(contexts)


def measure(batch: int, page_size: int, repeats: int) -> list[Row]:
    manager, contexts = running(batch, page_size)
    plain = best_of(repeats, lambda: None, lambda _: by_calls(manager, contexts))
    bound, tokens = manager.batch(contexts), np.ones(batch, np.int32)

    def step(_: None) -> None:
        manager.reserve_batch(bound)
        manager.fetch(bound)
        bound.update(tokens)
        manager.step(bound)

    batched = best_of(repeats, lambda: None, step)
    shape = {"page": page_size, "batch": batch}
    return [{**shape, "calls": "Batch", **batched}, {**shape, "calls": "per request", **plain}]


def main() -> None:
    chosen = options(__doc__)
    pin()
    batches = [1, 64, 1024] if chosen.quick else [1, 16, 64, 256, 1024]
    rows = [row for page in (16, 128) for batch in batches for row in measure(batch, page, 30 if chosen.quick else 100)]
    report("decode_step", rows, chosen)


if __name__ == "__main__":
    main()
