"""A custom eviction order: it evicts the most recently used page first, for prompts that recur in a cycle.

Ten prompts take turns, and the pool holds the pages of five. If the least recently used page is evicted first, each
prompt is evicted just before its turn, so there is no hit. The order below keeps the pages of the first prompts, which
are then found.

    python examples/eviction_order.py
"""

import numpy as np
import torch

from pagewire import EvictionOrder, KVCacheParams, LruOrder, PagedKVCacheManager, TextContext


class MostRecentFirst(EvictionOrder):
    """Evicts the page that became idle last. The dict keeps pages in the order in which they became idle."""

    def __init__(self, num_pages: int) -> None:  # noqa: ARG002 - an order that keeps arrays needs the number
        self.idle: dict[int, None] = {}

    def append(self, pages: np.ndarray) -> None:
        # `pages` begins with the last page of a prompt. That page has to be evicted before the pages of the prefix,
        # which other prompts may share. `pop` takes the page that was added last, so the pages are added in reverse.
        self.idle.update(dict.fromkeys(pages[::-1].tolist()))
        self.count = len(self.idle)

    def remove(self, pages: np.ndarray) -> None:
        for page in pages.tolist():
            del self.idle[page]
        self.count = len(self.idle)

    def pop(self, count: int) -> np.ndarray:
        taken = [self.idle.popitem()[0] for _ in range(count)]
        self.count = len(self.idle)
        return np.array(taken, np.int32)

    def pages(self) -> np.ndarray:
        return np.array([*reversed(self.idle)], np.int32)

    def clear(self) -> None:  # called after an interrupted call, before the idle pages are appended again
        self.idle.clear()
        self.count = 0


def hit_rate(order: type[EvictionOrder]) -> float:
    """Serves ten prompts in five rounds. Returns the share of prompt tokens that were found in the cache."""
    params = KVCacheParams(torch.float32, 2, 16, enable_prefix_caching=True, page_size=16, eviction_order=order)
    manager = PagedKVCacheManager(
        params, 4, 256, num_layers=1, devices=["cpu"], available_cache_memory=45 * 16 * params.bytes_per_token(1)
    )
    for _ in range(5):
        for number in range(10):
            request = TextContext(range(1000 * number, 1000 * number + 128), max_length=256)
            with manager.claim(request):
                manager.maybe_reserve(request)
                manager.fetch([request])  # a model would run here
                request.update(1)
                manager.step([request])
    manager.check()
    metrics = manager.metrics
    manager.close()
    return metrics.cache_tokens / metrics.prompt_tokens


def main() -> None:
    """Compares the order with the default one."""
    print(f"least recently used first: {hit_rate(LruOrder):.0%} of the tokens are cached")
    print(f"most recently used first: {hit_rate(MostRecentFirst):.0%} of the tokens are cached")


if __name__ == "__main__":
    main()
