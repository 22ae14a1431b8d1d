"""`StateMemory`: the state pages of one replica: their memory, what is found in it, and the copies below it."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.pool.index import NO_PAGE, Digests, PrefixIndex
from kvcache.replica.pages_below import PagesBelow
from kvcache.replica.resume import Asked, last_end
from kvcache.state_shape import StateShape
from kvcache.states.state_layout import StateViews
from kvcache.states.state_room import StateRoom, one_page

_LOOKED_AT = 128  # pages of a prompt that are looked at together for the newest state


class StateMemory:
    """State pages in a `room`, which decides what is evicted for a page. Kept copies also go to the lower tiers.

    Requests, leases and transfers hold the pages; see `StatePages`.
    """

    def __init__(self, shape: StateShape, room: StateRoom) -> None:
        self.shape, self._room, self.pool = shape, room, room.pool
        self.layouts, self.blocks, self.num_pages = room.layouts, room.blocks, room.pool.num_pages
        self._views = StateViews(self.layouts, self.blocks, shape.matrix)
        self._tokens = np.zeros(self.num_pages + 1, np.int64)
        self._told = np.zeros(self.num_pages + 1, np.int64)  # tokens of the state that a block table last named
        self.below = PagesBelow()

    @property
    def tensors(self) -> list[list[torch.Tensor]]:
        """The states' own memory, `[shard][kind]`; empty lists if they lie in the token pages."""
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
        """Copies without a holder."""
        return self._room.num_idle

    @property
    def goes_next(self) -> int:
        """The page whose copy is evicted for the next request; 0 if none is, or if slabs hide it."""
        return self._room.goes_next

    @property
    def may_lose_pages(self) -> bool:
        """Whether pages or copies may be evicted for the next request and it cannot be known which: with slabs only."""
        return self._room.may_lose_pages

    @property
    def index(self) -> PrefixIndex:
        """The copies that can be found, by the digest of the last page before each."""
        return self.pool.index

    @property
    def num_kept(self) -> int:
        """Copies that can be found."""
        return int(np.count_nonzero(self.pool.index.published))

    @property
    def evictions(self) -> int:
        """Copies that were given up for another page."""
        return self.pool.evictions

    # ---- lookups, on the device and below

    def kept_after(self, digests: Digests, *, but: int = NO_PAGE) -> NDArray[np.bool_]:
        """Whether there is a copy of the state after the page of each digest, on the device or in host memory: a mask.

        `but`: a page whose copy does not count.
        """
        pages = self.pool.index.find(digests)
        return ((pages != NO_PAGE) & (pages != but)) | (self.below.slots(digests) != NO_PAGE)

    @property
    def generation(self) -> int:
        """Counts the copies that have come and gone, on the device and below it."""
        return self.pool.index.generation + self.below.generation

    def longest(self, digests: Digests) -> int:
        """The length, in pages, of the longest prefix of these pages after which there is a copy of the state."""
        return last_end(self.kept_after(digests))

    def there(self, digests: Digests) -> NDArray[np.bool_]:
        """`kept_after`, plus copies that are known to be in files or objects."""
        found = self.kept_after(digests)
        return found | self.below.has(digests[None], ~found[None])[0]

    def ask(self, digests: Digests) -> bool:
        """Ask the lower tiers for the last copies that are not known yet. Returns whether an answer is on its way."""
        return ask_newest(self.below, digests[self.longest(digests) :])

    def bring_newest(self, digests: Digests, *, wait: bool) -> bool:
        """Bring the last copy below host memory up to the host, if it is later than `longest`. True if one is coming.

        `wait`: wait a while for it.
        """
        return bring_newest(self.below, digests[self.longest(digests) :], wait=wait)

    # ---- copies and releases

    def _let_go(self, page: int) -> None:
        self.pool.release(one_page(page))

    def _copy(self, source: int, target: int) -> None:
        for tensor in chain.from_iterable(self.blocks):
            tensor[target] = tensor[source]
        self._tokens[target] = self._tokens[source]

    def _found(self, digest: Digests) -> int:
        """The copy under this digest, marked as just used; `NO_PAGE` if there is none."""
        copy = int(self.pool.index.find(digest)[0])
        if copy != NO_PAGE:
            self.pool.hold(one_page(copy))
            self.pool.idle.hint(one_page(copy), None)  # a hint that it goes first was wrong
            self._let_go(copy)
        return copy

    def _forget(self, digest: Digests) -> None:
        """Withdraw the copy under this digest, if there is one, and free its page."""
        copy = int(self.pool.index.find(digest)[0])
        if copy == NO_PAGE:
            return
        self._spare(one_page(copy))
        self.pool.idle.renew(one_page(copy))
        self.pool.hold(one_page(copy))
        self.pool.index.withdraw_one(copy)
        self.pool.idle.forget(one_page(copy))
        self._let_go(copy)

    def _keep_below(self, copy: int, digest: Digests) -> None:
        """Store a copy that stays in the lower tiers, too. `copy` may be `NO_PAGE`."""
        if copy != NO_PAGE:
            for tell in self.pool.journal.came:
                tell(one_page(copy), digest)

    def _spare(self, copies: NDArray[np.int32]) -> None:
        """These copies are about to be overwritten: make their pending copies to the lower tiers now."""
        for save in self.pool.journal.going:
            save(copies)

    def _reset(self, page: int) -> None:
        for tensor in chain.from_iterable(self.blocks):
            tensor[page] = 0
        self._tokens[page] = self._told[page] = 0


def ask_newest(tier: PagesBelow, digests: Digests) -> bool:
    """Ask for the last states that are not known yet. Returns whether an answer is on its way.

    Asks further back only if no later state is known to be there.
    """
    before = tier.answers
    for end in range(len(digests), 0, -_LOOKED_AT):
        some = digests[None, max(0, end - _LOOKED_AT) : end]
        there = tier.has(some, np.ones(some.shape[:2], np.bool_))
        if _ask(tier, some, there):
            return True
        if there.any():
            break
    return tier.answers != before  # an answer that has just come may allow a further question


def bring_newest(tier: PagesBelow, digests: Digests, *, wait: bool) -> bool:
    """Bring the last of these states that a lower tier has to the host, which has none. True if it is on its way.

    If it cannot be read, the one before it is tried, and so on. `wait`: wait a while for it, and not for answers.
    """
    before = tier.answers
    for end in range(len(digests), 0, -_LOOKED_AT):
        first = max(0, end - _LOOKED_AT)
        some = digests[None, first:end]
        there = tier.has(some, np.ones(some.shape[:2], np.bool_))
        if _ask(tier, some, there) and not wait:
            return True
        for at in np.flatnonzero(there[0])[::-1].tolist():
            one = np.zeros_like(there)
            one[0, at] = True
            if tier.to_host(some, one, first + at + 1, wait=wait):
                return True
            if tier.slots(some[0, at : at + 1]).all():
                return False
    return tier.answers != before  # an answer that has just come may allow a further question


def _ask(tier: PagesBelow, digests: Digests, there: Asked) -> bool:
    """Ask for the states later than the last one of `there`. Returns whether an answer is on its way."""
    later = np.ones_like(there)
    later[:, : there.shape[1] - int(there[0, ::-1].argmax()) if there.any() else 0] = False
    return tier.ask(digests, later)
