"""The random moves with states in slabs of the token pages' memory: one budget, whose bytes the model counts.

Which page or copy goes for which depends on where pages lie, and no plain model foretells that: it is told what went,
and sees to it that nobody held it, that as much is findable as was not evicted, and that a request is refused only
where the pages that are left are too few, whatever lies where.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch

from kvcache import PagedKVCacheManager, TextContext
from kvcache.errors import NoFreeStatePageError
from kvcache.pool.slabs import SlabPool
from kvcache.state_shape import StateShape
from tests.kvcache.kv import Run
from tests.kvcache.model import Content, ModelReplica, Named
from tests.kvcache.moves import LONGEST, PAGE_SIZE, Chooser
from tests.kvcache.states.state_moves import StateMoves, StateReplica

# Of 1, 2, 4 and 7 pages.
SHAPES = {
    pages: StateShape(2, heads, 1, 1, 1, 2, torch.int64, torch.int64)
    for pages, heads in ((1, 2), (2, 5), (4, 9), (7, 20))
}


class SlabReplica(StateReplica):
    """`manager`: whom to ask what went."""

    width = 1  # block tables

    def __init__(self, num_pages: int, every: int, manager: PagedKVCacheManager, at: int, **more: Any) -> None:
        super().__init__(num_pages, 0, every, **more)
        self.ours, self.states = manager._replicas.each[at], manager.states[at]
        self.slab_pages = manager.slab_pages
        self.digests: dict[Content, Any] = {}
        self.unkept = 0

    @property
    def free(self) -> int:
        return self.num_pages - len(self.holders) - self.slab_pages * len(self.requests)

    def follow(self, drafted: int = 0) -> None:
        """What the manager evicted by now is not found any more, and nobody held it; `drafted`: second pages."""
        for content in [content for content in self.page_of if content in self.digests]:
            if not self.ours.pool.index.find(self.digests[content])[0]:
                page = self.page_of.pop(content)
                self.idle.remove(page)
                del self.content_of[page]
                self.evictions += 1
        for content in [content for content in self.kept if not self.has_state(content)]:
            self.kept.remove(content)
            self.state_evictions += 1
        slabs = len(self.requests) + len(self.kept) + drafted
        assert len(self.holders) + len(self.idle) + self.slab_pages * slabs <= self.num_pages

    def has_slab(self) -> bool:
        """Whether a request's state has room. The pages before the first slab and behind the last hold none."""
        return self.free >= self.slab_pages and len(self.requests) < (self.num_pages + 1) // self.slab_pages - 1

    def has_state(self, content: Content) -> bool:
        return bool(self.states._pool.index.find(self.digests[content])[0])

    def learn(self, name: str) -> None:
        """The digests of a request's pages that are published."""
        replica, held = self.ours, self.requests[name]
        pages = replica.rows.pages(replica.rows.row_of[name])
        for ours, page in zip(pages[: held.committed], held.pages, strict=False):
            self.digests[self.content_of[page]] = replica.pool.index.digests_of(ours.reshape(1))

    def make_room(self) -> bool:
        return True  # `step` asks the manager

    def claimed(self) -> None:
        """Who made room is for `follow` to say."""

    def step(self, name: str, tokens: list[int], named: Named, start: int) -> tuple[int, list[int]]:
        done = super().step(name, tokens, named, start)
        self.learn(name)
        for content in [content for content in self.kept[-1:] if not self.has_state(content)]:
            self.kept.remove(content)  # there was no room for it, or a request of the same step has taken it
            self.unkept += 1
        if name not in self.states._passing:
            self.passing.pop(name, None)
        return done

    def fork(self, parent: str, child: str, computed: int, length: int) -> bool:
        new = -(-length // self.page_size) - computed // self.page_size
        if not self.has_slab() or new * self.width > self.free - self.slab_pages:
            return False
        return super().fork(parent, child, computed, length)

    def _take(self) -> int:
        self._names += 1
        self.holders[self._names] = 1
        return self._names


class SlabMoves(StateMoves):
    """A manager of one budget beside its model."""

    slab_sizes, knows_less = tuple(SHAPES), True

    def __init__(self, chooser: Chooser, params: dict[str, Any] | None = None) -> None:
        slab_pages = chooser.pick(self.slab_sizes)
        self.shape, self.pages = SHAPES[slab_pages], slab_pages + self.more_pages(chooser, slab_pages)
        super().__init__(chooser, params)

    def more_pages(self, chooser: Chooser, slab_pages: int) -> int:
        """So few that no request which they hold is longer than may be."""
        return chooser.integer(max(12, slab_pages), LONGEST // PAGE_SIZE)

    def build(self, dp: int, slots: int, params: dict[str, Any] | None) -> PagedKVCacheManager:  # noqa: ARG002 - no host
        every, self.numbers = self.every if self.caching else 0, itertools.count()
        told = {"states": self.shape, "state_every_pages": every, "page_size": PAGE_SIZE}
        return self.made_of(dp, told | (params or {} if self.caching else {}), 0)

    def model(self) -> ModelReplica:
        return SlabReplica(self.pages, self.every, self.manager, next(self.numbers))

    @property
    def slabs(self) -> list[SlabReplica]:
        return [model for model in self.models if isinstance(model, SlabReplica)]

    def follow(self, drafted: str | None = None) -> None:
        """What went on each replica; `drafted`: a request with a second state page now."""
        for model in self.slabs:
            model.follow(int(drafted in model.requests))

    @property
    def moved(self) -> int:
        """Pages of all replicas that were moved so far."""
        pools = [replica.pool for replica in self.manager._replicas.each]
        return sum(pool.moved for pool in pools if isinstance(pool, SlabPool))

    def too_long(self, length: int, start: int, active: int, steps: int = 1) -> bool:  # noqa: ARG002 - with one table
        return -(-(length + steps - 1) // PAGE_SIZE) + self.manager.slab_pages > self.pages

    def claim_row(self, context: TextContext, replica: int) -> None:
        room = self.slabs[replica].has_slab()
        try:
            super().claim_row(context, replica)
        except NoFreeStatePageError:
            assert not room or self.stay(), "the replica has as much free as a state takes"
            self.seen["no state"] += 1
            self.follow()
            raise
        assert room
        self.follow()

    def stay(self) -> bool:
        """Whether some held pages cannot be moved."""
        return False

    def draft(self, name: str) -> bool:
        """No model foretells which slabs have no held pages; that there is one only where as much is free."""
        model = self.states_of(name)
        assert isinstance(model, SlabReplica)
        room, moved = model.has_slab(), self.moved
        there = self.pages_of(name).draft(name)
        assert room or not there
        assert self.moved == moved
        self.follow(name if there else None)
        return there

    def reserve_one(self, context: TextContext, steps: int) -> bool:
        done = super().reserve_one(context, steps)
        self.follow()
        return done

    def fork(self) -> bool:
        fork = self.manager.fork

        def refused(parent: TextContext, child: TextContext) -> bool:
            try:
                return fork(parent, child)
            except NoFreeStatePageError:
                model = self.states_of(parent.request_id)
                assert isinstance(model, SlabReplica)
                assert not model.has_slab() or self.stay()
                return False

        self.manager.fork = refused  # type: ignore[method-assign, assignment]
        try:
            return super().fork()
        finally:
            self.manager.fork = fork  # type: ignore[method-assign]
            self.follow()

    def compute(self, batch: Sequence[TextContext], runs: Sequence[Run]) -> None:
        self.follow()  # before the step publishes anew what was evicted
        super().compute(batch, runs)

    def batch_step(self, batch: Sequence[TextContext], known: dict[str, list[int]]) -> None:
        super().batch_step(batch, known)
        self.follow()

    def model_step(self, context: TextContext) -> None:
        super().model_step(context)
        self.follow()

    def same_books(self) -> None:
        self.follow()
        super().same_books()

    def same_states(self) -> None:
        for ours, theirs in zip(self.manager.states, self.slabs, strict=True):
            assert ours.num_held == len(theirs.requests)
            if self.caching:
                assert (ours.num_kept, ours.hits) == (len(theirs.kept), theirs.hits)
