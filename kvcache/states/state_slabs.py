"""`StateSlabs`: recurrent states in slabs of the memory of token pages, so that one budget is for both.

A slab (`kvcache.pool.slabs`) is as many neighbouring pages as hold a state on every shard. State page s is slab s: its
kinds lie one behind the other from the slab's first byte on, each aligned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from kvcache.errors import PoolTooSmallError
from kvcache.layout import KindPages, PageLayout
from kvcache.pool.slabs import CachedSlabs, SlabPool, num_slabs

_ALIGNED = 16  # bytes, of slabs and of the kinds in them

StateLayouts = Sequence[Mapping[str, PageLayout]]


def pages_of_slab(states: StateLayouts, pages: Sequence[PageLayout]) -> int:
    """The least number of pages whose bytes, aligned, hold a state on each shard."""
    count = max(-(-kind_offsets(kinds)[-1] // page.page_bytes) for kinds, page in zip(states, pages, strict=True))
    while any(count * page.page_bytes % _ALIGNED for page in pages):
        count += 1
    return count


def most_states(num_pages: int, slab_pages: int) -> int:
    """The states that there may be in so many pages of a replica, if no token had one."""
    return num_slabs(num_pages, slab_pages)


class StateSlabs:
    """The slabs of one replica's pages: `rows` are these, `[pages, words]`, on each shard.

    Raises `PoolTooSmallError` where no slab has room.
    """

    def __init__(self, layouts: StateLayouts, pool: SlabPool, rows: Sequence[torch.Tensor]) -> None:
        if pool.num_slabs < 1:
            raise PoolTooSmallError(
                f"available_cache_memory holds {pool.num_pages} pages, a state takes {pool.slab_pages} of them, and as "
                "many before it stay pages: twice as many are needed"
            )
        self.pool = pool
        self._layouts = layouts
        self._slab_bytes = [pool.slab_pages * row.shape[1] * row.element_size() for row in rows]
        # Of each shard the states of each kind, `[slabs + 1, ...]` as `as_blocks` has pages.
        self.blocks = [
            _views(kinds, shard, pool.num_slabs + 1, size)
            for kinds, shard, size in zip(layouts, rows, self._slab_bytes, strict=True)
        ]

    @property
    def num_slabs(self) -> int:
        """The state pages that there may be, if no token had a page."""
        return self.pool.num_slabs

    def cache(self, cached: CachedSlabs) -> None:
        """These states may be evicted for pages of tokens."""
        self.pool.cached = cached

    def kinds(self, shard: int) -> list[KindPages]:
        """Where the states of each kind lie in the memory of the pages."""
        kinds, stride = self._layouts[shard], self._slab_bytes[shard]
        return [
            KindPages(kind, page, None, offset, stride)
            for (kind, page), offset in zip(kinds.items(), kind_offsets(kinds), strict=False)
        ]


def kind_offsets(kinds: Mapping[str, PageLayout]) -> list[int]:
    """Bytes from the start of a state to each of its kinds, one behind another, and to the end of the last."""
    at = [0]
    for page in kinds.values():
        at.append(-(-(at[-1] + page.page_bytes) // _ALIGNED) * _ALIGNED)
    return at


def _views(kinds: Mapping[str, PageLayout], rows: torch.Tensor, count: int, slab_bytes: int) -> list[torch.Tensor]:
    memory = rows.reshape(-1).view(torch.uint8)[: count * slab_bytes]
    views: list[torch.Tensor] = []
    for page, offset in zip(kinds.values(), kind_offsets(kinds), strict=False):
        dtype: torch.dtype = getattr(torch, page.dtype)
        items, first = memory.view(dtype), offset // page.itemsize
        strides = (slab_bytes // page.itemsize, *page.shape_strides)
        views.append(items[first:].as_strided((count, *page.shape), strides))
    return views
