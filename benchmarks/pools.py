"""Helpers that build managers, prompts and pools for measurements."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from kvcache import KVCacheParams, KVEvents, PagedKVCacheManager, TextContext

LONGEST = 1 << 17
VOCABULARY = 120_000
_OPEN = 32


def manager_of(
    pages: int,
    *,
    page_size: int = 16,
    rows: int = 64,
    max_seq_len: int = LONGEST,
    algorithm: str = "sha256",
    kv_events: KVEvents | None = None,
    replicas: int = 1,
    weights: int | None = None,
) -> PagedKVCacheManager:
    """Returns a manager whose pages have one byte for each token, so that only the manager's own cost is measured.

    Each replica has `pages` pages and `rows` rows.
    """
    params = KVCacheParams(
        dtype=torch.uint8,
        n_kv_heads=1,
        head_dim=1,
        is_mla=True,
        enable_prefix_caching=True,
        page_size=page_size,
        hash_algorithm=algorithm,  # pyright: ignore[reportArgumentType] - one of the two names
        kv_events=kv_events,
        n_devices=replicas,
        data_parallel_degree=replicas,
        weights=weights,
    )
    memory = pages * page_size * replicas
    return PagedKVCacheManager(
        params, rows * replicas, max_seq_len, 1, ["cpu"] * replicas, available_cache_memory=memory
    )


class Prompts:
    """New prompts, the same in every run."""

    def __init__(self) -> None:
        self._rng = np.random.default_rng(0)

    def tokens(self, length: int) -> np.ndarray:
        """`length` random tokens."""
        return self._rng.integers(0, VOCABULARY, length, dtype=np.int32)

    def claimed(self, manager: PagedKVCacheManager, length: int) -> TextContext:
        """Returns a request with a new prompt that is already claimed."""
        return claimed(manager, self.tokens(length))

    def pick(self, count: int) -> int:
        """A random number of `range(count)`."""
        return int(self._rng.integers(count))


def claimed(manager: PagedKVCacheManager, tokens: np.ndarray | list[int]) -> TextContext:
    """A claimed request with these tokens."""
    context = TextContext(tokens, LONGEST)
    manager.external_claim(context.request_id)
    return context


def reserve(manager: PagedKVCacheManager, context: TextContext) -> None:
    """Reserve pages, which must succeed."""
    if not manager.maybe_reserve(context):
        raise RuntimeError("the pool is too small for this benchmark")


def compute(manager: PagedKVCacheManager, context: TextContext) -> None:
    """Treat the whole prompt as computed, which publishes its full pages."""
    context.update(1)
    manager.step([context])


def running(manager: PagedKVCacheManager, prompts: Prompts, lengths: Iterable[int]) -> list[TextContext]:
    """Returns requests whose prompts have these lengths.

    The prompts are computed, and each request has its first new token.
    """
    contexts = [prompts.claimed(manager, length) for length in lengths]
    for context in contexts:
        reserve(manager, context)
    manager.fetch(contexts)
    for context in contexts:
        context.update(1)
    manager.step(contexts)
    return contexts


def age(manager: PagedKVCacheManager, prompts: Prompts) -> None:
    """Bring the pool to the state that a server's pool has after hours.

    Every page is published and idle, in mixed order. To mix it, a few dozen prompts of mixed lengths at a time get
    pages and are released in random order. This continues until 1.5 times as many pages have been allocated as the pool
    has. Pages that are adjacent in eviction order are then not adjacent in memory.
    """
    pages, size = manager.total_num_pages, manager.page_size
    # The concurrent requests take at most half of the pool.
    longest = min(1024, manager.max_seq_len // size - 1, max(2, pages // (2 * _OPEN)))
    running: list[TextContext] = []
    handed_out = 0
    while handed_out < pages + pages // 2 or not manager.metrics.evictions:
        count = 1 + prompts.pick(longest)
        context = prompts.claimed(manager, count * size)
        reserve(manager, context)
        compute(manager, context)
        handed_out += count
        running.append(context)
        if len(running) == _OPEN:
            manager.release(running.pop(prompts.pick(_OPEN)).request_id)
    for context in running:
        manager.release(context.request_id)


def expect(holds: bool, claim: str) -> None:
    """Stops the benchmark if it does not measure what it claims to measure."""
    if not holds:
        raise RuntimeError(f"the claim of this benchmark is false: {claim}")
