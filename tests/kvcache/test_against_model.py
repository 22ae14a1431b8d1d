"""Random moves on the manager and on the model: every answer agrees, and `check()` holds after each move."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache import PromptTooLongError, TextContext
from tests.kvcache.build import manager_of
from tests.kvcache.model import Held, ModelReplica

PAGES, PAGE_SIZE, ROWS, LONGEST = 12, 3, 4, 60
# Few distinct tokens and shared heads: prompts must meet in the index, diverge within pages, and evict one another.
HEADS = [[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 2, 2, 2, 2, 2, 2, 2], [2] * 20, []]


class AgainstModel(RuleBasedStateMachine):
    @initialize(dp=st.sampled_from([1, 2]), caching=st.booleans())
    def start(self, dp: int, caching: bool) -> None:
        self.manager = manager_of(
            PAGES, page_size=PAGE_SIZE, rows=ROWS, max_seq_len=LONGEST, dp=dp, caching=caching, checks=True
        )
        self.caching = caching
        self.models = [ModelReplica(PAGES, PAGE_SIZE) for _ in range(dp)]
        self.live: dict[str, TextContext] = {}
        self.reserved: set[str] = set()
        self.stepped: dict[str, int] = {}
        self.made = 0

    @rule(head=st.sampled_from(HEADS), tail=st.lists(st.integers(1, 2), min_size=1, max_size=12), data=st.data())
    def claim(self, head: list[int], tail: list[int], data: st.DataObject) -> None:
        replica = data.draw(st.integers(0, len(self.models) - 1))
        if len(self.models[replica].requests) == ROWS:
            return
        self.made += 1
        salt = data.draw(st.sampled_from([None, "other"]))
        context = TextContext([*head, *tail], LONGEST, f"r{self.made}", cache_salt=salt)
        self.manager.external_claim(context.request_id, replica)
        self.models[replica].requests[context.request_id] = Held()
        self.live[context.request_id] = context

    def pick(self, data: st.DataObject, names: set[str] | None = None) -> tuple[TextContext, ModelReplica]:
        name = data.draw(st.sampled_from(sorted(self.live if names is None else names)))
        return self.live[name], self.models[self.manager.get_replica(self.live[name])]

    def model_reserve(self, context: TextContext, steps: int) -> int | None:
        model = self.models[self.manager.get_replica(context)]
        # Without caching nothing is looked up, as if there were but one token to run.
        active = context.active_idx if self.caching else context.start_idx + 1
        tokens = context.tokens.tolist()
        return model.reserve(context.request_id, tokens, context.cache_salt, context.start_idx, active, steps)

    def model_step(self, context: TextContext) -> None:
        model = self.models[self.manager.get_replica(context)]
        model.step(context.request_id, context.tokens.tolist(), context.cache_salt, context.start_idx)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), steps=st.integers(1, 4))
    def reserve(self, data: st.DataObject, steps: int) -> None:
        context, _ = self.pick(data)
        before = (context.start_idx, context.active_idx)
        length = context.current_length + steps - 1
        if -(-length // PAGE_SIZE) > PAGES:
            try:
                self.manager.maybe_reserve(context, steps)
            except PromptTooLongError:
                return
            raise AssertionError(f"{length} tokens in {PAGES} pages")
        wanted = self.model_reserve(context, steps)
        assert self.manager.maybe_reserve(context, steps) == (wanted is not None)
        if wanted is None:
            assert (context.start_idx, context.active_idx) == before
        else:
            assert context.start_idx == wanted
            assert context.start_idx < context.active_idx <= context.end_idx
            self.reserved.add(context.request_id)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), token=st.integers(1, 2), chunk=st.integers(1, 9))
    def run(self, data: st.DataObject, token: int, chunk: int) -> None:
        context, _ = self.pick(data, self.reserved)
        if context.current_length == LONGEST:
            return
        if context.active_length > chunk:
            context.set_token_indices(active_idx=context.start_idx + chunk)
        self.manager.fetch([context])
        context.update(token)
        self.manager.step([context])
        self.stepped[context.request_id] = context.start_idx
        if self.caching:
            self.model_step(context)
        if len(self.manager.get_req_blocks(context.request_id)) * PAGE_SIZE < context.current_length:
            self.reserved.discard(context.request_id)

    @precondition(lambda self: self.reserved)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, model = self.pick(data, self.reserved)
        ready = parent.active_length == 1 and -(-parent.end_idx // PAGE_SIZE) <= PAGES
        if not ready or len(model.requests) == ROWS or self.stepped.get(parent.request_id) != parent.start_idx:
            return
        self.made += 1
        child = parent.fork(f"r{self.made}")
        wanted = model.fork(parent.request_id, child.request_id, parent.start_idx, parent.end_idx)
        assert self.manager.fork(parent, child) == wanted
        if wanted:
            self.live[child.request_id] = child
            self.reserved.add(child.request_id)
            self.stepped[child.request_id] = child.start_idx

    @precondition(lambda self: self.reserved)
    @rule(data=st.data(), steps=st.integers(1, 8))
    def run_batch(self, data: st.DataObject, steps: int) -> None:
        """Several steps of a `Batch` over the requests that have one token to run."""
        ready = [self.live[name] for name in sorted(self.reserved) if self.live[name].active_length == 1]
        if not ready:
            return
        batch = self.manager.batch(ready)
        for _ in range(steps):
            if max(batch.ends) == LONGEST or max(-(-int(end) // PAGE_SIZE) for end in batch.ends) > PAGES:
                break
            wanted = [self.model_reserve(context, 1) is not None for context in ready]
            assert self.manager.reserve_batch(batch).tolist() == wanted
            if not all(wanted):
                break
            self.manager.fetch(batch)
            batch.update(data.draw(st.lists(st.integers(1, 2), min_size=len(ready), max_size=len(ready))))
            self.manager.step(batch)
            for context in ready:
                self.stepped[context.request_id] = context.start_idx
                if self.caching:
                    self.model_step(context)
            self.same_books()
        self.reserved = {
            name
            for name in self.reserved
            if len(self.manager.get_req_blocks(name)) * PAGE_SIZE >= self.live[name].current_length
        }

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        context, model = self.pick(data)
        self.manager.release(context.request_id)
        model.release(context.request_id)
        del self.live[context.request_id]
        self.reserved.discard(context.request_id)

    @rule()
    def reset(self) -> None:
        self.manager.reset_prefix_cache()
        for model in self.models:
            model.reset()

    @invariant()
    def same_books(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.manager.check()
        assert self.manager.num_free_blocks == sum(model.free for model in self.models)
        assert self.manager.metrics.evictions == sum(model.evictions for model in self.models)
        names: dict[tuple[int, int], int] = {}
        for request_id, context in self.live.items():
            replica = self.manager.get_replica(context)
            pages = self.manager.get_req_blocks(request_id)
            held = self.models[replica].requests[request_id].pages
            # Two requests share a page in the manager exactly where they share one in the model.
            for mine, theirs in zip(pages, held, strict=True):
                assert names.setdefault((replica, mine), theirs) == theirs
        assert len({(replica, theirs) for (replica, _), theirs in names.items()}) == len(names)

    def teardown(self) -> None:
        for request_id in list(self.live):
            self.manager.release(request_id)
        if hasattr(self, "manager"):
            assert self.manager.num_free_blocks == self.manager.total_num_pages


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
