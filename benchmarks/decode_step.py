"""What does one decode step cost the host: reserve, fetch, update and step for every running request?

The requests have evenly spread numbers of tokens in their last pages, so `batch / page` of them need a new page in each
step. With few requests, most steps need no page. `page_mean` is therefore the mean over as many steps as a page has
tokens, in which each request needs one page. A `Batch` keeps lengths and tokens in arrays. It updates its contexts when
they are read, and otherwise every 256 steps. `Batch, arrays read` also takes the length and the last token of every
request from the batch after each step, as a streaming server may. `Batch, contexts read` also reads the last token of
every context, as a server without batches would. `us_mean` and `us_max` cover all steps of a row, including the one in
which all contexts are updated.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.frame import WARM_UP, Row, options, pin, report, samples, summary
from benchmarks.pools import Prompts, age, expect, manager_of, running
from kvcache import PagedKVCacheManager, TextContext

PROMPT = 1024
LONGEST = 4096
CALLS = ("Batch", "Batch, arrays read", "Batch, contexts read", "per request")
_STATISTICS = (
    "columns us_*: minimum, median, mean and maximum of the n steps of a row; page_mean: median of the means over as "
    "many steps as a page has tokens"
)


def begun(batch: int, page_size: int, steps: int, *, full: bool) -> tuple[PagedKVCacheManager, list[TextContext]]:
    """Returns a manager and running requests whose prompts are computed.

    The pool has enough free pages for `steps` more steps. With `full`, it has no free pages, but enough idle pages to
    evict.
    """
    pages = max(batch, 64) * -(-(PROMPT + page_size + steps + 1) // page_size) + 1
    manager = manager_of(pages, page_size=page_size, rows=max(batch, 64), max_seq_len=LONGEST)
    prompts = Prompts()
    if full:
        age(manager, prompts)
    return manager, running(manager, prompts, [PROMPT + at % page_size for at in range(batch)])


def by_calls(manager: PagedKVCacheManager, contexts: list[TextContext]) -> None:
    """Runs one step through the plain calls for each request, as code written for MAX 25.7 does."""
    for context in contexts:
        manager.maybe_reserve(context)
    manager.fetch(contexts)
    for context in contexts:
        context.update(1)
    manager.step(contexts)


def bound(manager: PagedKVCacheManager, contexts: list[TextContext], calls: str = "Batch") -> Callable[[], None]:
    """Runs one step through a `Batch`. Then reads the batch's arrays or the contexts, if `calls` says so."""
    batch, tokens = manager.batch(contexts), np.ones(len(contexts), np.int32)

    def step() -> None:
        manager.reserve_batch(batch)
        manager.fetch(batch)
        batch.update(tokens)
        manager.step(batch)
        if calls == "Batch, arrays read":
            batch.lengths.tolist()
            batch.last_tokens.tolist()
        elif calls == "Batch, contexts read":
            for context in contexts:
                _ = context.tokens[-1]

    return step


def measure(batch: int, page_size: int, repeats: int, *, full: bool = False) -> list[Row]:
    """Returns the rows for one batch size.

    The steps go through a `Batch`, with and without reading contexts, or through one call per request.
    """
    # a multiple of the page size, so that every request needs equally many pages
    repeats = -(-repeats // page_size) * page_size
    rows: list[Row] = []
    for calls in CALLS:
        manager, contexts = begun(batch, page_size, repeats + WARM_UP, full=full)
        step = bound(manager, contexts, calls) if calls != "per request" else partial(by_calls, manager, contexts)
        free, evicted = manager.num_free_blocks, manager.metrics.evictions
        times = samples(repeats, lambda: None, lambda _, step=step: step())
        crossed = free - manager.num_free_blocks
        expect(crossed >= batch * repeats // page_size, "every request crosses a page every page_size steps")
        expect(contexts[0].end_idx == PROMPT + 1 + repeats + WARM_UP, "every request got a token a step")
        expect(not full or manager.metrics.evictions - evicted >= crossed - 1, "every new page is evicted")
        windows = [statistics.mean(times[at : at + page_size]) for at in range(0, repeats, page_size)]
        shape = {"page": page_size, "batch": batch, "pool": "full" if full else "new", "calls": calls}
        means = {"page_mean": round(statistics.median(windows), 2), "us_mean": round(statistics.mean(times), 2)}
        rows.append({**shape, **summary(times), **means, "us_max": round(max(times), 2)})
    return rows


def main() -> None:
    """Runs the benchmark and reports its rows."""
    chosen = options(__doc__)
    pin()
    batches = [1, 64, 1024] if chosen.quick else [1, 4, 16, 64, 256, 1024]
    repeats = 32 if chosen.quick else 256
    rows = [row for page in (16, 128) for batch in batches for row in measure(batch, page, repeats)]
    rows += [row for batch in (1, 1024) for row in measure(batch, 16, repeats, full=True)]
    report("decode_step", rows, chosen, _STATISTICS)


if __name__ == "__main__":
    main()
