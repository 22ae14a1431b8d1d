"""The random moves with recurrent states: the model keeps copies of states as contents, least recently used first.

Written from the contract: a prefix is found up to the last page after which there is a copy, chunks of a prompt end
where copies are made, and a copy of a place that a request only passes goes with its next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvcache import KVCacheParams, PagedKVCacheManager, TextContext
from kvcache.layer_groups import layer_tables
from kvcache.state_shape import StateShape
from kvcache.states.state_layout import page_bytes, state_layouts
from kvcache.states.state_pages import StatePages
from tests.kvcache.kv import Run, kv_of
from tests.kvcache.model import Content, ModelReplica, Named
from tests.kvcache.moves import LONGEST, PAGE_SIZE, ROWS, Chooser, Moves

SHAPE = StateShape(2, 2, 1, 1, 1, 2, torch.int64, torch.int64)


class StateReplica(ModelReplica):
    def __init__(self, num_pages: int, copies: int, every: int, **more: Any) -> None:
        super().__init__(num_pages, PAGE_SIZE, **more)
        self.state_pages, self.spacing = ROWS + copies, every * PAGE_SIZE
        self.kept: list[Content] = []  # least recently used first
        self.passing: dict[str, Content] = {}
        self.shared: dict[str, int] = {}
        self.ends: dict[str, set[int]] = {}
        self.hits = self.shortened = self.state_evictions = self.replaced = 0

    def most_pages(self, name: str, tokens: list[int], named: Named, first: int, end: int) -> int:
        self.shared[name] = (end - first) * PAGE_SIZE
        most = end
        while most > first and not self.has_copy(self.content(tokens, named, most - 1)):
            most -= 1
        self.shortened += most < end
        return most

    def has_copy(self, content: Content) -> bool:
        return content in self.kept

    def reserve(self, name: str, tokens: list[int], named: Named, start: int, active: int, steps: int) -> int | None:
        before, length = start if self.requests[name].pages else 0, active - start
        came = super().reserve(name, tokens, named, start, active, steps)
        if came is None:
            return None
        active = active if came < active else min(len(tokens), came + length)
        if came > before:
            self.resume(self.content(tokens, named, came // PAGE_SIZE - 1))
            self.hits += 1
        elif active - came == 1:
            return came
        last = len(tokens) - 1
        self.ends.setdefault(name, {self.shared.get(name, 0), last - last % PAGE_SIZE})
        return came

    def end_of_chunk(self, name: str, start: int, active: int) -> int:
        """Where a chunk that would run up to `active` ends."""
        spaced = range(0, active, self.spacing) if self.spacing else ()
        return min((end for end in (*self.ends.get(name, ()), *spaced) if start < end < active), default=active)

    def resume(self, content: Content) -> None:
        """A request goes on from this copy."""
        self.touch(content)

    def touch(self, content: Content) -> None:
        self.kept.remove(content)
        self.kept.append(content)

    def make_room(self) -> bool:
        """Whether there is a page for one more copy, or a request that was claimed just now has one."""
        if len(self.requests) + len(self.kept) < self.state_pages:
            return True
        if self.kept:
            self.evict_copy()
            return True
        return False

    def evict_copy(self) -> None:
        self.spare(self.kept[0])
        self.kept.pop(0)
        self.state_evictions += 1

    def claimed(self, drafted: int = 0) -> None:
        while len(self.requests) + drafted + len(self.kept) > self.state_pages:
            self.evict_copy()

    def step(self, name: str, tokens: list[int], named: Named, start: int) -> tuple[int, list[int]]:
        done = super().step(name, tokens, named, start)
        if start % PAGE_SIZE or not start:
            return done
        content, before = self.content(tokens, named, start // PAGE_SIZE - 1), self.passing.pop(name, None)
        if before in self.kept:
            self.spare(before)
            self.kept.remove(before)
            self.replaced += 1
        stays = start in self.ends.get(name, ()) or (self.spacing > 0 and start % self.spacing == 0)
        if content in self.kept:
            self.touch(content)
        elif self.make_room():
            self.kept.append(content)
            if not stays:
                self.passing[name] = content
        if stays and content in self.kept:
            self.stay(content)
        return done

    def stay(self, content: Content) -> None:
        """A copy is not taken the place of."""

    def spare(self, content: Content) -> None:
        """A copy is about to go."""

    def fork(self, parent: str, child: str, computed: int, length: int) -> bool:
        done = super().fork(parent, child, computed, length)
        self.claimed()
        return done

    def release(self, name: str) -> None:
        super().release(name)
        if self.passing.get(name) in self.kept:
            self.stay(self.passing[name])
        for of_requests in (self.passing, self.shared, self.ends):
            of_requests.pop(name, None)

    def reset(self) -> None:
        super().reset()
        self.kept.clear()
        self.passing.clear()


class StateMoves(Moves):
    """A manager with state pages beside its model. A state is a number that depends on all tokens before it."""

    host_slots, few_copies = (0,), (0, 1, 2, 4, 8)

    def __init__(self, chooser: Chooser, params: dict[str, Any] | None = None) -> None:
        self.copies, self.every = chooser.pick(self.few_copies), chooser.pick((0, 0, 1, 2))
        super().__init__(chooser, params)

    def build(self, dp: int, slots: int, params: dict[str, Any] | None) -> PagedKVCacheManager:  # noqa: ARG002 - no host
        copies, every = (self.copies, self.every) if self.caching else (0, 0)
        told = {"states": SHAPE, "state_copies": copies, "state_every_pages": every, "page_size": PAGE_SIZE}
        return self.made_of(dp, told | (params or {} if self.caching else {}), ROWS + copies + 1)

    def made_of(self, dp: int, told: dict[str, Any], states: int) -> PagedKVCacheManager:
        """A manager of `dp` replicas, each with memory for the pages and so many states besides."""
        params = KVCacheParams(
            torch.int64, 1, 2, enable_prefix_caching=self.caching, n_devices=dp, data_parallel_degree=dp, **told
        )
        per_page = layer_tables(params.groups, self.layers).layers_per_page
        memory = self.pages * PAGE_SIZE * params.bytes_per_token(per_page)
        memory += states * page_bytes(state_layouts(SHAPE, 1))
        sizes = ROWS * dp, LONGEST, self.layers
        return PagedKVCacheManager(params, *sizes, ["cpu"] * dp, available_cache_memory=memory * dp)

    def model(self) -> ModelReplica:
        return StateReplica(self.pages, self.copies, self.every)

    @property
    def each_states(self) -> list[StateReplica]:
        return [model for model in self.models if isinstance(model, StateReplica)]

    def states_of(self, name: str) -> StateReplica:
        """The model of the replica that the request is claimed on."""
        return self.each_states[self.manager.get_replica(self.live[name])]

    def pages_of(self, name: str) -> StatePages:
        """The manager's state pages there."""
        return self.manager.states[self.manager.get_replica(self.live[name])]

    def claim_row(self, context: TextContext, replica: int) -> None:
        super().claim_row(context, replica)
        if self.caching:
            for model in self.each_states:
                model.claimed()

    def run(self) -> bool:
        """One run in three ends with guesses."""
        ready = [self.live[name] for name in sorted(self.reserved)]
        ready = [context for context in ready if context.active_idx == context.end_idx]
        if not ready or self.choose.integer(0, 2):
            return super().run()
        context = self.choose.pick(ready)
        most = min(self.states_of(context.request_id).room(context.request_id), LONGEST - 1) - context.end_idx
        if most < 1:
            return False
        return self.speculate(context, self.choose.integer(1, min(most, 4)))

    def speculate(self, context: TextContext, count: int) -> bool:
        """Run `count` guesses, of which some are taken away again."""
        name, start, end = context.request_id, context.start_idx, context.end_idx
        if not self.draft(name):
            self.seen["no draft"] += 1
            return False
        self.manager.check()
        for _ in range(count):
            context.update(self.choose.integer(1, 2))
        context.set_token_indices(start_idx=start)
        self.compute([context], [Run.of(self.manager, context)])
        self.manager.check()
        right = self.choose.integer(0, count)
        if right < count:
            context.set_token_indices(active_idx=end + right, end_idx=end + right)
        context.update(self.choose.integer(1, 2))
        self.manager.step([context])
        assert context.start_idx == (end + count if right == count else start)
        self.seen["all right" if right == count else "set back"] += 1
        self.model_step(context)
        self.drop_short()
        return True

    def draft(self, name: str) -> bool:
        """Whether the request has a second state page, as there should be one."""
        model = self.states_of(name)
        there = len(model.requests) < ROWS + self.copies * self.caching
        assert self.pages_of(name).draft(name) == there
        if there:
            model.claimed(1)
        return there

    def lease(self) -> bool:
        return False  # a state that was told under a lease is not run on: tested where the leases are

    def reserve_one(self, context: TextContext, steps: int) -> bool:
        start, length, refused = context.start_idx, context.active_length, self.seen["refused"]
        before, fresh = context.active_idx, not self.manager.get_req_blocks(context.request_id)
        asked = super().reserve_one(context, steps)
        if asked and self.caching and (fresh or length > 1) and self.seen["refused"] == refused:
            now = context.start_idx
            active = before if now < before else min(context.end_idx, now + length)
            wanted = self.states_of(context.request_id).end_of_chunk(context.request_id, now, active)
            assert context.active_idx == wanted, f"a chunk from {now} (was {start}) ends at {context.active_idx}"
            self.seen["cut"] += wanted < active
        return asked

    def compute(self, batch: Sequence[TextContext], runs: Sequence[Run]) -> None:
        super().compute(batch, runs)
        for replica, states in enumerate(self.manager.states):
            if mine := [run for run in runs if run.replica == replica]:
                self.compute_states(states, mine)

    def compute_states(self, states: StatePages, runs: Sequence[Run]) -> None:
        pages = states.pages_at([run.request_id for run in runs], [run.start for run in runs])
        for page, run in zip(pages.tolist(), runs, strict=True):
            values = kv_of(run.tokens, run.named, "state")
            wanted = int(values[run.start - 1]) if run.start else 0
            for tensor in states.blocks[0]:
                assert (tensor[page] == wanted).all(), f"{run.request_id}: another state after {run.start} tokens"
        written = states.drafts.written([run.request_id for run in runs], pages)
        for page, run in zip(written.tolist(), runs, strict=True):
            for tensor in states.blocks[0]:
                tensor[page] = int(kv_of(run.tokens, run.named, "state")[run.active - 1])
        states.advance(written, [run.active for run in runs])

    def same_books(self) -> None:
        super().same_books()
        self.same_states()

    def same_states(self) -> None:
        """Of states as many are held, kept, found and evicted."""
        for ours, theirs in zip(self.manager.states, self.each_states, strict=True):
            assert ours.num_held == len(theirs.requests)
            if self.caching:
                assert (ours.num_kept, ours.evictions, ours.hits) == (
                    len(theirs.kept),
                    theirs.state_evictions,
                    theirs.hits,
                )
