"""`StateMemory`: the state pages of one replica, whoever has them: their memory, and which gives way to which."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.pool.index import NO_PAGE, Digests, PrefixIndex
from kvcache.state_shape import StateShape
from kvcache.states.state_layout import StateViews
from kvcache.states.state_room import StateRoom, one_page
from kvcache.states.state_tiers import StatePlaces, StateTier


class StatesBelow:
    """Copies of states that are kept where an eviction on the device does not reach them. Here: nowhere.

    `kvcache.states.state_tiers` has the tier that keeps them.
    """

    generation = 0  # counts what has come and gone

    def in_host(self, digests: Digests) -> NDArray[np.bool_]:
        """Which of these states the host has."""
        return np.zeros(len(digests), np.bool_)

    def has(self, digests: Digests, asked: NDArray[np.bool_]) -> NDArray[np.bool_]:  # noqa: ARG002 - there is none
        """Which of these states, `[1, states]`, lie below, as far as is known."""
        return np.zeros_like(asked)

    def ask_newest(self, digests: Digests) -> bool:  # noqa: ARG002 - as above
        """Have asked for the last of these states of which nothing is known; whether an answer is on its way."""
        return False

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:  # noqa: ARG002 - as above
        """Have the last of these states that there is brought to the host; is it on its way? `wait`: for a while."""
        return False

    def came(self, pages: NDArray[np.int32], digests: Digests) -> None:
        """These copies stay: they are to be kept."""

    def used(self, digest: Digests) -> None:
        """A request goes on from this state, wherever it lies."""

    def fill(self, page: int, digest: Digests) -> bool:  # noqa: ARG002 - as above
        """Bring the state of this digest into a held page. False: there is none."""
        return False

    @property
    def is_bringing(self) -> bool:
        """Whether a copy is on its way to the device that no request waits for."""
        return False

    def bring_copy(self, page: int, digest: Digests) -> None:
        """Bring the state of this digest, which the host has, into a held page, where it is found once it is there."""

    def coming(self) -> list[NDArray[np.int32]]:
        """Pages that states are on their way to."""
        return []

    def mend(self, rows: Iterable[int]) -> None:
        """After an interrupt: nothing is being copied any more."""


class StateMemory:
    """State pages in a `room`, which says who gives way to whom; copies that stay are kept below besides.

    A page has requests, leases and transfers as holders (`StatePages`).
    """

    def __init__(self, shape: StateShape, room: StateRoom) -> None:
        self.shape, self._room, self._pool = shape, room, room.pool
        self.layouts, self.blocks, self.num_pages = room.layouts, room.blocks, room.pool.num_pages
        self._views = StateViews(self.layouts, self.blocks, shape.matrix)
        self._tokens = np.zeros(self.num_pages + 1, np.int64)
        self._told = np.zeros(self.num_pages + 1, np.int64)  # tokens of the state that a table named last
        self.below: StateTier | StatesBelow = StatesBelow()

    @property
    def tensors(self) -> list[list[torch.Tensor]]:
        """Memory of their own, `[shard][kind]`; none where they lie in the token pages'."""
        return self._room.tensors

    @property
    def num_free(self) -> int:
        """Pages that `allocate` can give, including those of copies. With slabs: 1 if it can give one, else 0."""
        return self._room.num_free

    @property
    def num_held(self) -> int:
        """Pages that a request or a lease holds, or that a transfer writes."""
        return self._room.num_held

    @property
    def num_idle(self) -> int:
        """Copies that nobody holds."""
        return self._room.num_idle

    @property
    def goes_next(self) -> int:
        """The page whose copy is evicted for the next request; 0: none, or, of slabs, nobody knows."""
        return self._room.goes_next

    @property
    def may_lose_pages(self) -> bool:
        """Whether pages or copies may be evicted for the next request, and nobody knows which: of slabs."""
        return self._room.may_lose_pages

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

    # ---- what is let go, copied and found

    def _let_go(self, page: int) -> None:
        self._pool.release(one_page(page))

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
        if copy != NO_PAGE:
            self.below.came(one_page(copy), digest)

    def _spare(self, copies: NDArray[np.int32]) -> None:
        """What is to be copied down from these is copied now: they are about to be written over."""
        for save in self._pool.journal.going:
            save(copies)

    def _reset(self, page: int) -> None:
        for tensor in chain.from_iterable(self.blocks):
            tensor[page] = 0
        self._tokens[page] = self._told[page] = 0
