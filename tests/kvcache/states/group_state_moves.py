"""The random moves with groups of layers and recurrent states in one model.

Written from the contract: of the ends of pages at which every table has what is seen next, a hit goes to the last one
after which there is a copy of the state too.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

from kvcache import PagedKVCacheManager
from tests.kvcache.group_moves import GroupedReplica, GroupMoves
from tests.kvcache.model import Content, Held, ModelReplica, Named
from tests.kvcache.moves import PAGE_SIZE, ROWS, Chooser
from tests.kvcache.states.moves_below import BelowMoves, BelowReplica, with_tiers
from tests.kvcache.states.slab_moves import SlabMoves, SlabReplica
from tests.kvcache.states.state_moves import SHAPE, StateMoves, StateReplica


class GroupedStates(StateReplica, GroupedReplica):
    """A replica whose requests have further tables, and states."""

    by_both = 0  # hits that are shorter than what the tables alone, and than what the states alone would give

    def found_in_all(self, held: Held, tokens: list[int], named: Named, start: int) -> list[int]:
        hits: list[int] = []
        for page in range(held.committed, (len(tokens) - 1) // PAGE_SIZE):
            found = self.page_of.get(self.content(tokens, named, page)) if self.caching else None
            if found is None:
                break
            hits.append(found)
        if not hits:
            return []
        name = next(name for name, one in self.requests.items() if one is held)
        self.shared[name] = len(hits) * PAGE_SIZE
        first = held.committed
        ends = range(first + len(hits), first, -1)
        by_tables = [end for end in ends if self.goes_on(tokens, named, first, end)]
        by_states = [end for end in ends if self.has_copy(self.content(tokens, named, end - 1))]
        end = next((end for end in by_tables if end in by_states), first)
        self.shortened += bool(by_tables) and end < by_tables[0]
        self.by_both += bool(by_tables and by_states) and end < min(by_tables[0], by_states[0])
        return hits[: end - first] if end * PAGE_SIZE > start else []


class SlabGroups(GroupedStates, SlabReplica):
    """The same with states among the pages: what went, the manager is asked."""

    def __init__(self, num_pages: int, every: int, manager: PagedKVCacheManager, at: int, **more: Any) -> None:
        super().__init__(num_pages, every, manager, at, **more)
        self.width = 1 + len(self.tables)

    def learn(self, name: str) -> None:
        super().learn(name)
        further, row = self.ours.further, self.ours.rows.row_of[name]
        assert further is not None
        for table, columns in enumerate(self.of(name).columns):
            for column, page in columns.items():
                if column < self.requests[name].committed:
                    own = further.table[table, row, column].reshape(1)
                    self.digests[self.content_of[page]] = self.ours.pool.index.digests_of(own)

    def follow(self, drafted: int = 0) -> None:
        before: list[Content] = [*self.page_of]
        super().follow(drafted)
        self.evicted_further += sum(one[0] == "table" and one not in self.page_of for one in before)


class GroupStateMoves(GroupMoves, StateMoves):
    """A manager of groups whose states have memory of their own."""

    host_slots = (0,)

    def build(self, dp: int, slots: int, params: dict[str, Any] | None) -> PagedKVCacheManager:  # noqa: ARG002 - no host
        copies, every = (self.copies, self.every) if self.caching else (0, 0)
        told = {"states": SHAPE, "state_copies": copies, "state_every_pages": every, "page_size": PAGE_SIZE}
        return self.made_of(dp, told | (params or {}), ROWS + copies + 1)

    def seen_tables(self) -> list[tuple[str, int]]:
        return [(one.group.kind, one.group.window) for one in self.manager.layer_tables.tables[1:]]

    def model(self) -> ModelReplica:
        more = {"tables": self.seen_tables(), "caching": self.caching}
        return GroupedStates(self.pages, self.copies, self.every, **more)

    def of_groups(self) -> Counter[str]:
        found = super().of_groups()
        for model, states in zip(self.each_states, self.manager.states, strict=True):
            assert isinstance(model, GroupedStates)
            found["state hit"] += model.hits
            found["state evicted"] += states.evictions
            found["hit shortened by both"] += model.by_both
        return found


class GroupSlabMoves(GroupStateMoves, SlabMoves):
    """A manager of groups, of one budget with their states."""

    def more_pages(self, chooser: Chooser, slab_pages: int) -> int:
        return chooser.integer(max(24, slab_pages), 40)

    def build(self, dp: int, slots: int, params: dict[str, Any] | None) -> PagedKVCacheManager:  # noqa: ARG002 - no host
        every, self.numbers = self.every if self.caching else 0, itertools.count()
        told = {"states": self.shape, "state_every_pages": every, "page_size": PAGE_SIZE}
        return self.made_of(dp, told | (params or {}), 0)

    def model(self) -> ModelReplica:
        more = {"tables": self.seen_tables(), "caching": self.caching}
        return SlabGroups(self.pages, self.every, self.manager, next(self.numbers), **more)

    def too_long(self, length: int, start: int, active: int, steps: int = 1) -> bool:
        return self.least_pages(length, start, active, steps) + self.manager.slab_pages > self.pages

    def of_groups(self) -> Counter[str]:
        return super().of_groups() + Counter({"moved": self.moved})


class GroupsBelow(GroupedStates, BelowReplica):
    """The same with pages and states in host memory, too."""

    def may_end(self, content: Content) -> bool:
        return self.has_copy(content)


class GroupBelowMoves(GroupStateMoves, BelowMoves):
    """A manager of groups and states, and a host tier."""

    host_slots = (12, 40, 120)

    def build(self, dp: int, slots: int, params: dict[str, Any] | None) -> PagedKVCacheManager:
        copies, every = (self.copies, self.every) if self.caching else (0, 0)
        told = {"states": SHAPE, "state_copies": copies, "state_every_pages": every, "page_size": PAGE_SIZE}
        told |= params or {}
        if slots:
            told |= with_tiers(SHAPE, 1, slots, self.host_states)
        return self.made_of(dp, told, ROWS + copies + 1)

    def model(self) -> ModelReplica:
        more = {"tables": self.seen_tables(), "caching": self.caching}
        return GroupsBelow(self.pages, self.copies, self.every, self.host, self.host_states, **more)

    def of_groups(self) -> Counter[str]:
        metrics = self.manager.metrics
        return super().of_groups() + Counter({"state from the host": metrics.h2d_states_copied})
