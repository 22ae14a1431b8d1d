"""All kinds of hint share one log, which consists of chunks. The log never runs out of chunks, wherever the pages of a
kind are in the log.
"""

from __future__ import annotations

import numpy as np

from kvcache import LruOrder
from kvcache.policies.hinted_order import HintedOrder
from kvcache.pool.lru_order import CHUNK
from kvcache.retention import SHARED


def append(order: HintedOrder, code: int, first: int, count: int) -> None:
    pages = np.arange(first, first + count, dtype=np.int32)
    order.codes[pages] = code
    order.append(pages)


def skip(order: HintedOrder, code: int, first: int, count: int) -> None:
    """Fills entries of the log with pages that leave the order at once, so that the entries are invalid."""
    append(order, code, first, count)
    order.remove(np.arange(first, first + count, dtype=np.int32))


def test_every_kind_with_a_page_in_its_oldest_chunk_and_one_in_its_newest_leaves_chunks_for_the_rest() -> None:
    size, free = 2 * CHUNK, CHUNK + 200  # The test appends the pages from number `free` on only to remove them again.
    order = HintedOrder(size, LruOrder(size), share=1.0)
    kinds, rest = range(SHARED), SHARED
    for code in kinds:
        append(order, code, 1 + 2 * code, 1)
        skip(order, code, free, CHUNK - 200)
        skip(order, code, free, 199)
        append(order, code, 2 + 2 * code, 1)
    first = 1 + 2 * len(kinds)
    for count in (1, CHUNK, 1, 1):  # Any two consecutive counts are too many pages for one chunk.
        append(order, rest, first, count)
        if count == 1:
            skip(order, rest, free, CHUNK - 200)
            skip(order, rest, free, 199)
        first += count
    order.check()
    assert order.count == 2 * len(kinds) + CHUNK + 3
