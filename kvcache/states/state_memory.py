"""`StateMemory`: the state pages of one replica, whoever has them: their memory, and which gives way to which."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.pool.index import NO_PAGE, Digests, PrefixIndex
from kvcache.pool.pages import PagePool
from kvcache.state_shape import StateShape
from kvcache.states.state_layout import state_layouts
from kvcache.states.state_slabs import StateSlabs
from kvcache.states.state_tiers import StatePlaces, StateTier
from kvcache.states.state_views import StateViews
from kvcache.storage import allocate_blocks


class StateMemory:
    """Pages in memory of their own, or slabs; copies, which nobody holds, go least recently used first.

    A page has requests, leases and transfers as holders (`StatePages`); copies that stay are kept below besides.
    """

    def __init__(
        self,
        shape: StateShape,
        num_pages: int,
        devices: Sequence[torch.device | str],
        digest_words: int,
        slabs: StateSlabs | None,
    ) -> None:
        self.shape = shape
        self._slabs = slabs
        self.num_pages = num_pages = num_pages if slabs is None else slabs.num_slabs
        # Of each shard the page of each kind, and its memory, page after page; page 0 is nobody's.
        self.layouts = state_layouts(shape, len(devices))
        self.blocks = (
            slabs.blocks
            if slabs is not None
            else [
                [allocate_blocks(layout, num_pages + 1, torch.device(device)) for layout in kinds.values()]
                for kinds, device in zip(self.layouts, devices, strict=True)
            ]
        )
        self._views = StateViews(self.layouts, self.blocks, shape.matrix)
        self._pool = PagePool(num_pages, digest_words)
        self._tokens = np.zeros(num_pages + 1, np.int64)
        self._told = np.zeros(num_pages + 1, np.int64)  # tokens of the state that a table named last
        self.below: StateTier | None = None  # where copies that stay are kept besides
        self._used = np.zeros(num_pages + 1, np.int64)  # of copies, by the clock of the slabs' pool
        if slabs is not None:
            self._pool.allocate(num_pages)  # token pages hold them all
            slabs.cache(self)

    @property
    def tensors(self) -> list[list[torch.Tensor]]:
        """Memory of their own, `[shard][kind]`; none where they lie in the token pages'."""
        return self.blocks if self._slabs is None else [[] for _ in self.blocks]

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give: those of copies count. Of slabs: whether it can give one."""
        return self._pool.free_count if self._slabs is None else int(self._slabs.pool.can_take_slab())

    @property
    def num_held(self) -> int:
        """Pages that a request or a lease holds, or that a transfer writes."""
        if self._slabs is not None:
            return int(np.count_nonzero(self._slabs.pool.taken)) - self.num_idle
        return self.num_pages - self.num_free

    @property
    def index(self) -> PrefixIndex:
        """The copies that can be found, by the digest of the last page before each."""
        return self._pool.index

    @property
    def num_kept(self) -> int:
        """Copies that can be found."""
        return int(np.count_nonzero(self._pool.index.published))

    @property
    def evictions(self) -> int:
        """Copies that were given up for another page."""
        return self._pool.evictions

    @property
    def places(self) -> StatePlaces:
        """Where the states lie, for a tier below."""
        return StatePlaces(self._pool, self.blocks, self._let_go)

    # ---- slabs of the memory of token pages

    @property
    def num_idle(self) -> int:
        """Copies that nobody holds."""
        return self._pool.idle.count

    @property
    def oldest_use(self) -> int:
        """When the first of these was used, by the clock of the slabs' pool, as hints and quotas have it."""
        order, used = self._pool.idle, self._used
        return int(used[order.first()]) if self._slabs is None else self._slabs.pool.use_of(order, used)

    def give_up_oldest(self) -> None:
        """Forget the copy that was used longest ago: its slab is token pages."""
        self._pool.release(one_page(self._pool.allocate_one()))
        self._give_back()

    @property
    def goes_next(self) -> int:
        """The page whose copy is evicted for the next request; 0: none, or, of slabs, nobody knows."""
        return 0 if self._slabs is not None else self._pool.next_evicted()

    @property
    def may_lose_pages(self) -> bool:
        """Whether pages or copies may be evicted for the next request, and nobody knows which: of slabs."""
        return self._slabs is not None and not self._slabs.pool.has_fresh_slab

    def _has_room(self, *, moving: bool) -> bool:
        """Whether a page can be had, of which a copy may have to go. `moving`: token pages may be moved for it."""
        if self._slabs is not None and (slab := self._slabs.pool.take_slab(moving=moving)):
            self._pool.release(one_page(slab))
        return self._pool.free_count > 0

    def _give_back(self) -> None:
        """What nobody holds, and is no copy, is token pages again."""
        if self._slabs is not None and (fresh := self._pool.free_count - self.num_idle):
            for page in self._pool.allocate(fresh).tolist():
                self._slabs.pool.give_back(page)

    def _let_go(self, page: int) -> None:
        self._pool.release(one_page(page))
        if self._slabs is not None:
            self._used[page] = self._slabs.pool.clock
            self._give_back()

    def drop_hold(self, copies: NDArray[np.int32]) -> None:
        """Somebody who held these copies lets go of them: they were used now, the first of them last."""
        self._pool.release(copies)
        if self._slabs is not None:
            self._used[copies] = self._slabs.pool.clock

    def _copy(self, source: int, target: int) -> None:
        for tensor in chain.from_iterable(self.blocks):
            tensor[target] = tensor[source]
        self._tokens[target] = self._tokens[source]

    def _found(self, digest: Digests) -> int:
        """The copy of this digest, which is used now; `NO_PAGE` where there is none."""
        copy = int(self._pool.index.find(digest)[0])
        if copy != NO_PAGE:
            self._pool.hold(one_page(copy))
            self._pool.idle.hint(one_page(copy), None)  # whoever said that it goes first was wrong
            self._let_go(copy)
        return copy

    def _forget(self, digest: Digests) -> None:
        """The copy of this digest, if there is one, is not found any more; its page is free."""
        copy = int(self._pool.index.find(digest)[0])
        if copy == NO_PAGE:
            return
        self._spare(one_page(copy))
        self._pool.idle.renew(one_page(copy))
        self._pool.hold(one_page(copy))
        self._pool.index.withdraw_one(copy)
        self._pool.idle.forget(one_page(copy))
        self._let_go(copy)

    def _keep_below(self, copy: int, digest: Digests) -> None:
        """The copy of this digest, `NO_PAGE` for none, stays: it is to be kept below, too."""
        if self.below is not None and copy != NO_PAGE:
            self.below.came(one_page(copy), digest)

    def _spare(self, copies: NDArray[np.int32]) -> None:
        """What is to be copied down from these is copied now: they are about to be written over."""
        for save in self._pool.journal.going:
            save(copies)

    def _reset(self, page: int) -> None:
        for tensor in chain.from_iterable(self.blocks):
            tensor[page] = 0
        self._tokens[page] = self._told[page] = 0


def one_page(page: int) -> NDArray[np.int32]:
    """The page as an array of one."""
    return np.array([page], np.int32)
