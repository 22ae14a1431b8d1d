"""A scan-resistant eviction order: a page that was hit again is evicted only after all pages that were used once.

A system prompt is served twice. Then 99 long prompts follow, each of them once. The default order evicts the system
prompt to make room for them; the order below keeps it.

    python examples/scan_resistant_order.py
"""

import numpy as np
import torch

from pagewire import EvictionOrder, KVCacheParams, LruOrder, PagedKVCacheManager, TextContext


class FoundAgainLast(EvictionOrder):
    """Evicts pages that were used once before pages that were hit again."""

    def __init__(self, num_pages: int) -> None:
        self.once, self.again = LruOrder(num_pages), LruOrder(num_pages)
        self.found = np.zeros(num_pages + 1, np.bool_)

    def append(self, pages: np.ndarray) -> None:
        self.once.append(pages[~self.found[pages]])
        self.again.append(pages[self.found[pages]])
        self.count += len(pages)

    def remove(self, pages: np.ndarray) -> None:
        self.once.remove(pages[~self.found[pages]])
        self.again.remove(pages[self.found[pages]])
        self.found[pages] = True
        self.count -= len(pages)

    def pop(self, count: int) -> np.ndarray:
        once = min(count, self.once.count)
        pages = np.concatenate((self.once.pop(once), self.again.pop(count - once)))
        self.count -= count
        self.forget(pages)
        return pages

    def pages(self) -> np.ndarray:
        return np.concatenate((self.once.pages(), self.again.pages()))

    def forget(self, pages: np.ndarray) -> None:
        self.found[pages] = False

    def clear(self) -> None:
        self.once.clear()
        self.again.clear()
        self.count = 0


def cached_tokens_after_a_scan(order: type[EvictionOrder]) -> int:
    """Returns how many tokens of the system prompt are still cached after the scan."""
    params = KVCacheParams(torch.bfloat16, 8, 64, enable_prefix_caching=True, eviction_order=order)
    manager = PagedKVCacheManager(params, 8, 4096, 2, ["cpu"], available_cache_memory=100 << 20, page_size=128)

    def serve(tokens: range) -> int:
        context = TextContext([*tokens, 0], 4096)
        with manager.claim(context):
            manager.maybe_reserve(context)
            found = context.start_idx
            manager.fetch([context])  # a model would run here
            context.update(1)
            manager.step([context])
        return found

    for _ in range(2):
        serve(range(1024))
    for number in range(1, 100):
        serve(range(2048 * number, 2048 * number + 2048))
    manager.check()
    cached = serve(range(1024))
    manager.close()
    return cached


def main() -> None:
    """Compares the order with the default one."""
    print("least recently used first:", cached_tokens_after_a_scan(LruOrder), "of 1024 tokens are cached")
    print("found again last:", cached_tokens_after_a_scan(FoundAgainLast), "of 1024 tokens are cached")


if __name__ == "__main__":
    main()
