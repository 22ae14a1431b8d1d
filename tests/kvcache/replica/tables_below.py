"""Helpers for tests of several block tables over lower tiers."""

from __future__ import annotations

from collections.abc import Callable

from kvcache import LayerGroup
from tests.kvcache.served import Served

WINDOW = LayerGroup("full", (0,)), LayerGroup("window", (1,), 6)  # A window of 6 tokens takes 2 pages of 4 tokens.
TWO = LayerGroup("full", (0, 1)), LayerGroup("window", (2,), 6), LayerGroup("chunked", (3,), 8)
PROMPT = range(41)  # ten full pages of 4 tokens, and one more token
Make = Callable[..., Served]


def fill(it: Served, pages: int) -> None:
    """Evicts all idle pages and makes sure that none of them can be loaded again."""
    it.tiers.store_all()
    pool = it.manager._replicas.each[0].pool
    taken = pool.allocate(pages)
    pool.release(taken)


def lost(it: Served, column: int) -> None:
    """Removes the window's page of this block from the device, as an eviction would."""
    replica = it.manager._replicas.each[0]
    page = replica.pool.index.find(replica.tables.every(it.digests(PROMPT))[1, column : column + 1])
    replica.pool.hold(page)
    replica.pool.index.withdraw(page)
    replica.pool.release(page)
