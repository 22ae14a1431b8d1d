"""What do layers of several kinds cost, and how many requests fit: Gemma 3 27B and gpt-oss 120B in 40 GiB.

The pages have one byte an element and head, so that as many as 40 GiB of bfloat16 hold fit on any machine. fit:
requests of so many tokens that decode at a time; each prompt, of its own tokens, ran in chunks of 2,048. step: reserve,
fetch, update and step of a batch of 256 requests of 2,000 tokens, the mean over the steps in which each crosses a page
once; in 640 GiB, which hold them all. `one table` is the same model without groups: every layer keeps every page.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import numpy as np
import torch

from benchmarks.frame import WARM_UP, Row, now, options, pin, report, settle
from benchmarks.pools import expect
from kvcache import KVCacheParams, LayerGroup, PagedKVCacheManager, TextContext

PAGE, CHUNK, BATCH, LENGTH = 16, 2048, 256, 2000
BUDGET, BUDGET_OF_STEPS = 40 << 30, 640 << 30
# Layers, which of them are full, the window of the others, and the bytes of a token in one layer.
MODELS = {
    "Gemma 3 27B": (62, range(5, 62, 6), 1024, 16 * 128 * 2 * 2),
    "gpt-oss 120B": (36, range(1, 36, 2), 128, 8 * 64 * 2 * 2),
}


_STATISTICS = (
    "columns step_*: minimum and median, in microseconds, of the means over as many steps as a page has tokens"
)


def manager_of(name: str, budget: int, *, grouped: bool, rows: int) -> PagedKVCacheManager:
    """A manager with as many bytes, in units of a token in a layer, as the budget has."""
    layers, full, window, of_token = MODELS[name]
    rest = tuple(layer for layer in range(layers) if layer not in full)
    groups = (LayerGroup("full", tuple(full)), LayerGroup("window", rest, window)) if grouped else ()
    params = KVCacheParams(
        dtype=torch.uint8, n_kv_heads=1, head_dim=1, page_size=PAGE, enable_prefix_caching=True, groups=groups
    )
    memory = 2 * budget // of_token  # a byte for a key, one for a value
    return PagedKVCacheManager(params, rows, 1 << 17, layers, ["cpu"], available_cache_memory=memory)


def prompt(number: int, length: int) -> np.ndarray:
    """Tokens of its own."""
    return np.random.default_rng(number).integers(0, 1 << 30, length)


def prefilled(manager: PagedKVCacheManager, number: int, length: int) -> TextContext | None:
    """A request that decodes; None: it does not fit."""
    context = TextContext(prompt(number, length), 1 << 17, str(number))
    manager.external_claim(context.request_id)
    while context.start_idx < length:
        context.set_token_indices(active_idx=min(context.end_idx, context.start_idx + CHUNK))
        if not manager.maybe_reserve(context):
            manager.release(context.request_id)
            return None
        context.update(1)
        manager.step([context])
    return context


def fitting(manager: PagedKVCacheManager, length: int) -> int:
    """Requests of so many tokens that decode at a time."""
    count = 0
    while (context := prefilled(manager, count, length)) is not None and manager.maybe_reserve(context):
        count += 1
    return count


def step_us(manager: PagedKVCacheManager, repeats: int) -> list[float]:
    """Of each page's worth of steps the mean, in microseconds."""
    made = [prefilled(manager, number, LENGTH + number % PAGE) for number in range(BATCH)]
    batch, tokens = manager.batch([context for context in made if context is not None]), np.ones(BATCH, np.int32)
    means: list[float] = []
    settle()
    for _ in range(WARM_UP + repeats):
        start = now()
        for _ in range(PAGE):
            expect(bool(manager.reserve_batch(batch).all()), "every request has its pages")
            manager.fetch(batch)
            batch.update(tokens)
            manager.step(batch)
        means.append((now() - start) / 1e3 / PAGE)
    return means[WARM_UP:]


def measure(repeats: int) -> Iterable[Row]:
    """A row for each model, with groups and without."""
    for name in MODELS:
        for grouped in (True, False):
            manager = manager_of(name, BUDGET_OF_STEPS, grouped=grouped, rows=BATCH)
            times = step_us(manager, repeats)
            row: Row = {"model": name, "tables": len(manager.layer_tables.tables) if grouped else "one table"}
            for length in (8192, 65536):
                row[f"fit {length}"] = fitting(manager_of(name, BUDGET, grouped=grouped, rows=1024), length)
            yield row | {"step_min": round(min(times), 1), "step_median": round(statistics.median(times), 1)}


def main() -> None:
    """Run and report."""
    chosen = options(__doc__)
    pin()
    report("layer_groups", list(measure(5 if chosen.quick else 20)), chosen, _STATISTICS)


if __name__ == "__main__":
    main()
