"""`pagewire top` for our cache in SGLang's scheduler: the pages of SGLang's pool, their states and owners.

Our cache knows which pages are cached and how soon they are evicted. SGLang knows which pages are free. Its row pool
says which request owns each of the other pages. SGLang's data are tensors, which the thread of the
`pagewire top` endpoint reads.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sglang.srt.runtime_context import get_parallel

from kvcache.endpoints.watch import Watch
from kvcache.pool.pages import PagePool
from kvcache.types import KVCacheMetrics
from kvcache.watch.book import WatchBook
from kvcache.watch.cells import pool_cells
from kvcache.watch.messages import OWNER_SHIFT, STATE_BITS, Beside, Cells, PageState
from kvcache.watch.names import WatchNames
from kvcache.watch.pools import OwnerRow, WatchedPool
from scheduler_adapters.sglang.cache import PagewireCache
from scheduler_adapters.sglang.settings import Settings
from transfer.wire.secret import fleet_keys

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    # a request, the index of its row in SGLang's row pool, and the pages in that row
    Row = tuple[Req, int, NDArray[np.int32]]

logger = logging.getLogger("pagewire.sglang")


def watch(cache: object, settings: Settings) -> None:
    """Starts to serve watchers at the address in `PAGEWIRE_WATCH`.

    Only rank 0 serves them, because all ranks have the same pages.

    If the endpoint cannot be bound, raises the same error as `Watch`.
    """
    if not settings.watch or not isinstance(cache, PagewireCache) or get_parallel().attn_tp_rank:
        return
    keyring = fleet_keys("SGLang", settings.secret)[1]
    secure = None if keyring is None else keyring.secure_server
    allocator: Any = cache.token_to_kv_pool_allocator
    page_bytes = int(np.sum(allocator.get_kvcache().get_kv_size_bytes())) // allocator.size * cache.page_size
    name, sizes = f"sglang-{os.getpid()}", (cache.page_size, page_bytes)
    names = WatchNames(are_clear=secure is not None)

    def make_book(owner: PagewireCache) -> WatchBook:
        return WatchBook(name, [CachePool(owner)], sizes, Beside, names)

    def metrics(owner: PagewireCache) -> KVCacheMetrics:
        return KVCacheMetrics(evictions=owner.pool.evictions)

    made = Watch(cache, make_book, metrics, cache.check, lambda: [CachePool(cache)], settings.watch, secure)
    cache.watch = made
    logger.info("pagewire top %s shows the pages of this scheduler", made.address)


class CachePool(WatchedPool):
    """The data that `pagewire top` shows: from our cache, and from SGLang's row pool and free pages."""

    def __init__(self, cache: PagewireCache) -> None:
        super().__init__("0", cache.pool)
        self._cache: PagewireCache = weakref.proxy(cache)

    @property
    def pool(self) -> PagePool:
        """The cache's pool, which each `reset` replaces."""
        return self._cache.pool

    def cells(self) -> Cells:
        """The state of each page.

        In our pool, SGLang holds every page that is not cached. This method marks the uncached pages that are free in
        SGLang. It records the owning request of each other uncached page.
        """
        pool = self.pool
        cells = pool_cells(pool)
        free = self._cache.free_pages()
        cells[free[~pool.index.published[free]]] = PageState.FREE
        for _, row, pages in self._rows():
            held = pages[cells[pages] & STATE_BITS == PageState.HELD]
            held = held[cells[held] >> OWNER_SHIFT == 0]
            cells[held] |= np.uint32(row + 1 << OWNER_SHIFT)
        return cells

    def owners(self, phases: Mapping[str, str]) -> list[OwnerRow]:
        """The requests that have a row in SGLang, and the requests that are still waiting for one."""
        rows = {id(req): (row + 1, len(pages)) for req, row, pages in self._rows()}
        found: list[OwnerRow] = []
        for req in self._cache.requests():
            if id(req) in rows or not req.finished():
                row, pages = rows.get(id(req), (0, 0))
                phase = phases.get(req.rid) or ("decoding" if req.output_ids else "prompt" if row else "waiting")
                tokens, prompt = req.kv.kv_committed_len, len(req.origin_input_ids)
                found.append((row, req.rid, req.cache_salt or "", phase, self.name, pages, tokens, prompt))
        return found

    def prefixes(self) -> Iterable[NDArray[np.int32]]:
        """The cached pages of each request that has a row."""
        return [pages[: req.kv.cache_protected_len // self._cache.page_size] for req, _, pages in self._rows()]

    def _rows(self) -> list[Row]:
        size, table = self._cache.page_size, self._cache.req_to_token_pool.req_to_token
        has = [(req, req.kv.req_pool_idx, req.kv.kv_allocated_len) for req in self._cache.requests()]
        found = [(req, row, tokens) for req, row, tokens in has if row is not None and tokens]
        if not found:
            return []
        # All rows are copied to the host at once, because the table may be on a GPU.
        slots = table[[row for _, row, _ in found], : max(tokens for _, _, tokens in found) : size]
        pages = (slots // size).cpu().numpy()
        return [(req, row, pages[at, : -(-tokens // size)]) for at, (req, row, tokens) in enumerate(found)]
