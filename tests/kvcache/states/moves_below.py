"""The random moves with recurrent states and tiers below the device.

Where states have memory of their own the model keeps the host's states as contents, least recently used first, and the
queue of what is to be copied there: all is foretold. With slabs and files it asks the manager what lies below, once
nothing is on its way, and sees to it that a request finds just what that lets it go on from.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from kvcache.pool.index import Digests
from kvcache.replica.context import hasher_of
from kvcache.state_shape import StateShape
from kvcache.states.state_layout import state_layouts
from kvcache.states.state_slabs import kind_offsets
from kvcache.states.state_tiers import StateTier
from tests.kvcache.kv import Run
from tests.kvcache.model import Content, ModelHost, ModelReplica, Named
from tests.kvcache.moves import PAGE_SIZE, ROWS, Chooser, Keys
from tests.kvcache.states.slab_moves import SlabMoves, SlabReplica
from tests.kvcache.states.state_moves import SHAPE, StateMoves, StateReplica


def tier_of(manager: PagedKVCacheManager) -> StateTier:
    (states,) = manager.states
    assert states.below is not None
    return states.below


def with_tiers(shape: StateShape, layers: int, slots: int, states: int, **more: Any) -> dict[str, Any]:
    """Params of tiers of so many pages and states in host memory."""
    of_pages = slots * PAGE_SIZE * KVCacheParams(torch.int64, 1, 2).bytes_per_token(layers)
    of_states = states * sum(kind_offsets(kinds)[-1] for kinds in state_layouts(shape, 1))
    return {
        "enable_kvcache_swapping_to_host": True,
        "host_kvcache_swap_space_gb": (of_pages + of_states) / 2**30,
        "tier_state_share": (of_states + 0.5) / (of_pages + of_states),
        **more,
    }


class StatesInHost:
    """What the host has of states, least recently used first, and what is to be copied and used there, in order."""

    def __init__(self, slots: int) -> None:
        self.slots, self.there = slots, list[Content]()
        self.waiting: list[tuple[str, Content]] = []
        self.stored = self.loaded = 0

    def stay(self, content: Content) -> None:
        if ("copy", content) not in self.waiting:
            self.waiting.append(("copy", content))

    def use(self, content: Content) -> None:
        self.waiting.append(("use", content))
        self.pass_uses()

    def copy(self, until: Content | None = None) -> None:
        """Copy what waits, up to this content."""
        while self.waiting and (until is None or ("copy", until) in self.waiting):
            what, content = self.waiting.pop(0)
            if what == "use":
                self.touch(content)
            elif content not in self.there:
                self.there = self.there[max(0, len(self.there) + 1 - self.slots) :]
                self.there.append(content)
                self.stored += 1
        self.pass_uses()

    def pass_uses(self) -> None:
        while self.waiting and self.waiting[0][0] == "use":
            self.touch(self.waiting.pop(0)[1])

    def touch(self, content: Content) -> None:
        if content in self.there:
            self.there.remove(content)
            self.there.append(content)


class BelowReplica(StateReplica):
    """A model whose states go to the host, too."""

    def __init__(
        self, num_pages: int, copies: int, every: int, host: ModelHost | None, states: int, **more: Any
    ) -> None:
        super().__init__(num_pages, copies, every, **more)
        self.host = host
        self.below = StatesInHost(states if host else 0)

    def has_copy(self, content: Content) -> bool:
        return content in self.kept or content in self.below.there

    def resume(self, content: Content) -> None:
        if content in self.kept:
            self.touch(content)
        else:
            self.below.loaded += 1
            self.below.touch(content)
        if self.host:
            self.below.use(content)

    def stay(self, content: Content) -> None:
        if self.host:
            self.below.stay(content)

    def spare(self, content: Content) -> None:
        self.below.copy(content)

    def reset(self) -> None:
        super().reset()
        self.below.there.clear()
        self.below.waiting.clear()


class BelowMoves(StateMoves):
    """A manager with state pages of their own, and a host tier, beside its model."""

    host_slots, few_copies, most_replicas = (6, 20, 60, 60), (1, 1, 2, 4), 1
    knows_less = True  # a state that only the host has is not foreseen

    def __init__(self, chooser: Chooser, params: dict[str, Any] | None = None) -> None:
        self.host_states = chooser.pick((2, 3, 5, 20))
        super().__init__(chooser, params)
        if self.host:
            tiers = self.manager._replicas.state_tiers
            assert tiers is not None
            assert tiers.host.pool.num_pages == self.host_states
            assert self.manager.total_num_host_pages == self.host.num_slots
            tiers.share = 0.0

    def build(self, dp: int, slots: int, params: dict[str, Any] | None) -> PagedKVCacheManager:
        copies, every = (self.copies, self.every) if self.caching else (0, 0)
        told = {"states": SHAPE, "state_copies": copies, "state_every_pages": every, "page_size": PAGE_SIZE}
        told |= params or {} if self.caching else {}
        if slots:
            told |= with_tiers(SHAPE, self.layers, slots, self.host_states)
        return self.made_of(dp, told, ROWS + copies + 1)

    def model(self) -> ModelReplica:
        return BelowReplica(self.pages, self.copies, self.every, self.host, self.host_states)

    def reset(self) -> None:
        if not self.choose.integer(0, 5):  # so that the host has more to give
            super().reset()

    @property
    def below(self) -> StatesInHost:
        (model,) = self.models
        assert isinstance(model, BelowReplica)
        return model.below

    def store(self) -> None:
        super().store()
        if self.host and not self.lazy:
            tier_of(self.manager).store_all()
            self.below.copy()

    def same_states(self) -> None:
        super().same_states()
        if self.host:
            metrics = self.manager.metrics
            assert (metrics.d2h_states_copied, metrics.h2d_states_copied) == (self.below.stored, self.below.loaded)
            assert tier_of(self.manager).host.pool.index.published.sum() == len(self.below.there)


class FileReplica(SlabReplica):
    """What lies below, the manager is asked: nothing is on its way then."""

    manager: PagedKVCacheManager

    def in_host(self, tokens: list[int], named: Named, first: int) -> list[Content]:
        last = (len(tokens) - 1) // PAGE_SIZE
        there = self.found_in(self.manager._replicas.tiers.host.pool.index, tokens, named, first, last)  # type: ignore[union-attr]
        count = next((at for at, one in enumerate(there) if not one), len(there))
        return [self.content(tokens, named, page) for page in range(first, first + count)]

    def most_pages(self, name: str, tokens: list[int], named: Named, first: int, end: int) -> int:
        self.in_host_now = self.found_in(tier_of(self.manager).host.pool.index, tokens, named, first, end)
        self.first, self.of = first, [self.content(tokens, named, page) for page in range(first, end)]
        return super().most_pages(name, tokens, named, first, end)

    def found_in(self, index: Any, tokens: list[int], named: Named, first: int, last: int) -> list[bool]:
        if last <= first:
            return []
        return [bool(page) for page in index.find(digests_of(tokens, named)[first:last])]

    def has_copy(self, content: Content) -> bool:
        return content in self.kept or self.in_host_now[self.of.index(content)]

    def resume(self, content: Content) -> None:
        if content in self.kept:
            self.touch(content)


def digests_of(tokens: list[int], named: Named) -> Digests:
    context = TextContext(tokens, 4096, "asked", cache_salt=named[0])
    context.extra_keys = named[1]
    return hasher_of(context, "sha256", PAGE_SIZE).digests(context.tokens, 0, len(tokens) // PAGE_SIZE)


class FileMoves(SlabMoves):
    """A manager of one budget, a host tier and files, which an earlier one may have written."""

    most_replicas = 1

    def __init__(
        self, chooser: Chooser, folder: Path, slab_pages: int, past: Sequence[tuple[list[int], Keys]] = ()
    ) -> None:
        self.folder, self.slab_sizes = folder, (slab_pages,)
        super().__init__(chooser)
        self.past += past

    def build(self, dp: int, slots: int, params: dict[str, Any] | None) -> PagedKVCacheManager:  # noqa: ARG002 - as the base
        self.caching = True
        self.numbers = itertools.count()
        told = {"states": self.shape, "state_every_pages": self.every, "page_size": PAGE_SIZE}
        files = {"file_tier_dir": str(self.folder), "file_tier_max_gb": 400_000 / 2**30, "file_tier_key": "moves"}
        return self.made_of(dp, told | with_tiers(self.shape, self.layers, 200, 60, **files), 0)

    def model(self) -> ModelReplica:
        made = FileReplica(self.pages, self.every, self.manager, next(self.numbers))
        made.manager = self.manager
        return made

    def stay(self) -> bool:
        return bool(self.manager._replicas.each[0].tier.coming())

    def reset(self) -> None:
        if not self.choose.integer(0, 9):
            super().reset()

    def model_reserve(self, context: TextContext, steps: int) -> int | None:
        end = time.monotonic() + 10
        while self.manager.prefetch(context):
            assert time.monotonic() < end
            time.sleep(0.001)
        return super().model_reserve(context, steps)

    def compute(self, batch: Sequence[TextContext], runs: Sequence[Run]) -> None:
        before = self.manager.metrics.h2d_states_copied
        super().compute(batch, runs)
        assert self.manager.metrics.h2d_states_copied == before  # they came when the request was reserved
