"""`StateRoom`: the memory of a replica's recurrent states, either their own or slabs of token pages.

With slabs (`StateSlabs`) states and token pages share one budget. A slab (`kvcache.pool.slabs`) is a run of as many
pages as hold a state on every shard. State page s is slab s. Its kinds lie one behind the other from the slab's first
byte on, each aligned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.errors import InvariantError, PoolTooSmallError
from kvcache.layout import KindPages, PageLayout
from kvcache.pool.pages import PagePool
from kvcache.pool.slabs import SlabPool, SlabStates, num_slabs
from kvcache.storage import allocate_blocks

_ALIGNED = 16  # alignment in bytes, of slabs and of the kinds in them

StateLayouts = Sequence[Mapping[str, PageLayout]]


def pages_of_slab(states: StateLayouts, pages: Sequence[PageLayout]) -> int:
    """The least number of pages that hold a state on each shard, and whose bytes are a multiple of the alignment."""
    count = max(-(-kind_offsets(kinds)[-1] // page.page_bytes) for kinds, page in zip(states, pages, strict=True))
    while any(count * page.page_bytes % _ALIGNED for page in pages):
        count += 1
    return count


def most_states(num_pages: int, slab_pages: int) -> int:
    """The most states that fit into so many pages of a replica, if no tokens are cached."""
    return num_slabs(num_pages, slab_pages)


class StateRoom:
    """Memory of their own for the states of one replica, of `num_pages` pages, and the holders of each page.

    Copies have no holder and are evicted least recently used first. They are found by digests of `digest_words` words.
    Raises `PoolTooSmallError` if a device is too small.
    """

    def __init__(
        self, layouts: StateLayouts, num_pages: int, devices: Sequence[torch.device | str], digest_words: int
    ) -> None:
        self.layouts = layouts  # the page layout of each kind, per shard
        # The blocks of each shard and kind, `[pages + 1, ...]`; page 0 is never used.
        self.blocks = [
            [allocate_blocks(layout, num_pages + 1, torch.device(device)) for layout in kinds.values()]
            for kinds, device in zip(layouts, devices, strict=True)
        ]
        self.pool = PagePool(num_pages, digest_words)

    @property
    def tensors(self) -> list[list[torch.Tensor]]:
        """The memory of the states, `[shard][kind]`."""
        return self.blocks

    @property
    def num_free(self) -> int:
        """Pages that can be allocated, including those of copies."""
        return self.pool.free_count

    @property
    def num_idle(self) -> int:
        """Copies without a holder."""
        return self.pool.idle.count

    @property
    def num_held(self) -> int:
        """Pages that have a holder, or that a transfer writes."""
        return self.pool.num_pages - self.pool.free_count

    @property
    def goes_next(self) -> int:
        """The page whose copy is evicted for the next request; 0 if none is, or if it cannot be known."""
        return self.pool.next_evicted()

    @property
    def may_lose_pages(self) -> bool:
        """Whether token pages or copies may be evicted for the next request, and it cannot be known which."""
        return False

    def make_room(self, *, moving: bool) -> bool:  # noqa: ARG002 - no token pages lie here
        """Whether a page can be allocated, perhaps by evicting a copy. `moving`: token pages may be moved for it."""
        return self.pool.free_count > 0

    def kinds(self, shard: int) -> list[KindPages]:
        """The layout of each kind of state on a shard."""
        return [
            KindPages(kind, layout, region, offset=0, stride=layout.page_bytes)
            for region, (kind, layout) in enumerate(self.layouts[shard].items())
        ]

    def check(self) -> None:
        """Raise `InvariantError` if page 0 was written."""
        if any(tensor[0].any() for tensor in chain.from_iterable(self.blocks)):
            raise InvariantError("state page 0, the null page, was written")


class StateSlabs(StateRoom):
    """The slabs of one replica's token pages as the memory of its states.

    `rows`: these token pages by shard, `[pages, words]`. `SlabStates` takes slabs and gives them back. Raises
    `PoolTooSmallError` if the pool has no slab.
    """

    def __init__(self, layouts: StateLayouts, slabs: SlabPool, rows: Sequence[torch.Tensor]) -> None:
        if slabs.num_slabs < 1:
            raise PoolTooSmallError(
                f"available_cache_memory holds {slabs.num_pages} pages, and a state takes {slabs.slab_pages} of them: "
                f"at least {2 * slabs.slab_pages} pages are needed"
            )
        self._slabs = slabs
        self._slab_bytes = [slabs.slab_pages * row.shape[1] * row.element_size() for row in rows]
        self.layouts = layouts
        self.blocks = [
            _views(kinds, shard, slabs.num_slabs + 1, size)
            for kinds, shard, size in zip(layouts, rows, self._slab_bytes, strict=True)
        ]
        self.pool = self._states = SlabStates(slabs)

    @property
    def tensors(self) -> list[list[torch.Tensor]]:
        """Empty lists, as states lie in the token pages."""
        return [[] for _ in self.blocks]

    @property
    def num_free(self) -> int:
        """1 if a page can be allocated, else 0."""
        return int(self._slabs.can_take_slab())

    @property
    def num_held(self) -> int:
        return int(np.count_nonzero(self._slabs.taken)) - self.num_idle

    @property
    def goes_next(self) -> int:
        return 0

    @property
    def may_lose_pages(self) -> bool:
        return not self._slabs.has_fresh_slab

    def make_room(self, *, moving: bool) -> bool:
        self._states.take(moving=moving)
        return self.pool.free_count > 0

    def kinds(self, shard: int) -> list[KindPages]:
        kinds, stride = self.layouts[shard], self._slab_bytes[shard]
        return [
            KindPages(kind, page, None, offset, stride)
            for (kind, page), offset in zip(kinds.items(), kind_offsets(kinds), strict=False)
        ]

    def check(self) -> None:
        """As the base, except that page 0 belongs to the token pages and is not checked."""


def one_page(page: int) -> NDArray[np.int32]:
    """The page as an array of one."""
    return np.array([page], np.int32)


def kind_offsets(kinds: Mapping[str, PageLayout]) -> list[int]:
    """The byte offsets of each kind in a state, one behind another, and the end of the last."""
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
