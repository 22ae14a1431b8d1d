"""Weighted random moves on a manager and on the model side by side. Who chooses is passed in: Hypothesis, or a seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch

from kvcache import (
    InvalidRequestError,
    NoFreeStatePageError,
    PagedKVCacheManager,
    PageLease,
    PromptTooLongError,
    TextContext,
)
from kvcache.tiers.tiers import Tiers
from tests.kvcache.build import manager_of
from tests.kvcache.kv import KVTokens, Run
from tests.kvcache.model import Content, Held, ModelHost, ModelLease, ModelReplica, Named

T = TypeVar("T")
Keys = tuple[tuple[int, bytes], ...]

PAGES, PAGE_SIZE, ROWS, LONGEST = 12, 3, 4, 60
HOST_SLOTS = (0, 6, 20, 60)  # 0: no host tier
WEIGHTS = {
    "claim": 6,
    "reserve": 8,
    "ask": 3,
    "run": 12,
    "run_batch": 4,
    "fork": 3,
    "rename": 2,
    "stale": 2,
    "release": 5,
    "preempt": 3,
    "lease": 3,
    "tell": 3,
    "end": 3,
}
KINDS = [kind for kind, weight in WEIGHTS.items() for _ in range(weight)]


def named_of(context: TextContext) -> Named:
    return context.cache_salt, context.extra_keys


def tiers_of(manager: PagedKVCacheManager) -> Tiers:
    assert manager._replicas.tiers is not None
    return manager._replicas.tiers


class Chooser(Protocol):
    """Where the choices come from."""

    def integer(self, low: int, high: int) -> int: ...
    def pick(self, choices: Sequence[T]) -> T: ...


class SeededChooser:
    """Choices of a seed: fast, and not shrunk."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick(self, choices: Sequence[T]) -> T:
        return self._random.choice(choices)


class Leased:
    """A lease on both sides, and what readers were told of it: pages, and the bytes of the tokens in them."""

    def __init__(self, ours: PageLease, model: ModelLease, claim: int) -> None:
        self.ours, self.model, self.claim = ours, model, claim
        self.told: list[tuple[list[int], int, torch.Tensor]] = []


class Moves:
    """A manager, its model, and the requests that are claimed."""

    pages, layers, host_slots, most_replicas = PAGES, 1, HOST_SLOTS, 2
    knows_less = False  # whether `admission` may say no where a request fits
    dtype = torch.int64

    def __init__(self, chooser: Chooser, params: dict[str, Any] | None = None) -> None:
        self.choose = chooser
        dp, self.caching = chooser.integer(1, self.most_replicas), chooser.integer(0, 4) > 0
        slots = chooser.pick(self.host_slots) if self.caching else 0
        self.manager = self.build(dp, slots, params)
        self.host = ModelHost(slots) if slots else None
        # Copies to the host wait for the clock, which no model foretells: here they are made at once, or never unless
        # an eviction asks for them.
        self.lazy = chooser.integer(0, 1) == 1
        if self.host:
            tiers_of(self.manager).share = 0.0
        self.models = [self.model() for _ in range(dp)]
        self.kv = KVTokens(self.manager)
        self.live: dict[str, TextContext] = {}
        self.away: list[TextContext] = []  # preempted: their contexts say how far they had come
        self.claims: Counter[str] = Counter()  # how often each request was claimed
        self.told_fits = False
        self.reserved: set[str] = set()
        self.stepped: dict[str, int] = {}
        self.past: list[tuple[list[int], Keys]] = [([1, 1, 1, 1, 1, 1, 1, 1, 1], ())]
        self.leases: list[Leased] = []
        self.seen: Counter[str] = Counter()
        self.made = 0

    def build(self, dp: int, slots: int, params: dict[str, Any] | None) -> PagedKVCacheManager:
        return manager_of(
            self.pages,
            page_size=PAGE_SIZE,
            rows=ROWS,
            max_seq_len=LONGEST,
            layers=self.layers,
            dp=dp,
            caching=self.caching,
            checks=False,
            dtype=self.dtype,
            host_slots=slots,
            params=params,
        )

    def model(self) -> ModelReplica:
        return ModelReplica(PAGES, PAGE_SIZE, self.host)

    def too_long(self, length: int, start: int, active: int, steps: int = 1) -> bool:  # noqa: ARG002 - with one table
        """Whether a request of `length` known tokens can never have its pages."""
        return -(-(length + steps - 1) // PAGE_SIZE) > self.pages

    def waits_too_long(self, context: TextContext, steps: int = 1) -> bool:
        return self.too_long(context.current_length, self.start_of(context), context.active_idx, steps)

    def start_of(self, context: TextContext) -> int:
        """How far a claimed request has come: one without pages has computed nothing, whatever its context says."""
        return context.start_idx if self.manager.get_req_blocks(context.request_id) else 0

    def move(self) -> None:
        """One move, then both must agree."""
        kind = self.choose.pick(KINDS)
        if kind == "claim" and self.choose.integer(0, 30) == 0:
            self.reset()
        else:
            move: Callable[[], bool] = getattr(self, kind)
            if move():
                self.seen[kind] += 1
        self.same_books()

    def claim(self) -> bool:
        """A new request, or one that was preempted; one in three asks first where it fits, and is reserved there."""
        context = self.choose.pick(self.away) if self.away and self.choose.integer(0, 1) else self.newcomer()
        asks = self.choose.integer(0, 2) == 0
        if asks and self.too_long(context.current_length, 0, context.active_idx):
            return False
        if asks:
            return self.admit(context)
        replica = self.choose.integer(0, len(self.models) - 1)
        if len(self.models[replica].requests) == ROWS:
            return False
        return self.comes(context, replica)

    def comes(self, context: TextContext, replica: int) -> bool:
        """Whether the request has a row of a replica with a free one."""
        try:
            self.claim_row(context, replica)
        except NoFreeStatePageError:
            return False
        self.seen["came back"] += context in self.away
        self.away = [one for one in self.away if one is not context]
        return True

    def claim_row(self, context: TextContext, replica: int) -> None:
        self.manager.external_claim(context.request_id, replica)
        self.models[replica].requests[context.request_id] = Held()
        self.live[context.request_id] = context
        self.claims[context.request_id] += 1

    def admit(self, context: TextContext) -> bool:
        """What `admission` says comes true: where it fits, it gets its row and its pages, and nowhere else."""
        self.before_asking(context)
        found = self.manager.admission(context)
        full = len(self.models[found.replica_idx].requests) == ROWS
        if full or not self.comes(context, found.replica_idx):
            assert not found.fits
            self.seen["does not fit"] += 1
            return False
        self.told_fits = True
        self.reserve_one(context, 1)
        self.told_fits = False
        has_pages = bool(self.manager.get_req_blocks(context.request_id))
        assert has_pages or not found.fits, f"{context}: {found}, but it got no pages"
        assert found.fits or not has_pages or self.knows_less, f"{context}: {found}, but it got its pages"
        self.seen["fits, and was not told"] += has_pages and not found.fits
        self.seen["fits" if found.fits else "does not fit"] += 1
        return True

    def before_asking(self, context: TextContext) -> None:
        """Whether the request fits is about to be asked."""

    def newcomer(self) -> TextContext:
        """A prompt that begins as an earlier one did, a little way or all along."""
        past, keys = self.choose.pick(self.past)
        tokens = past[: self.choose.integer(0, 2 * len(past))]  # in half the cases all of it
        tokens = tokens + [self.choose.integer(1, 2) for _ in range(self.choose.integer(1, 6))]
        context = TextContext(tokens[: LONGEST // 2], LONGEST, self.name(), cache_salt=self.salt())
        if self.choose.integer(0, 3):
            context.extra_keys = keys
        else:
            context.extra_keys = self.keys(context.end_idx)
        return context

    def salt(self) -> str | None:
        return None if self.choose.integer(0, 5) else "other"

    def keys(self, length: int) -> Keys:
        """None, or images near the end of the prompt, where a page is full only later, or anywhere."""
        kind = self.choose.integer(0, 5)
        if kind < 2:
            return ()
        first = max(0, length - 2 * PAGE_SIZE) if kind < 5 else 0
        count = self.choose.integer(1, 2)
        at = [self.choose.integer(first, length + 2) for _ in range(count)]
        return tuple((position, b"image%d" % self.choose.integer(0, 1)) for position in at)

    def rename(self) -> bool:
        """Another salt or other keys: at will while the request waits, refused while it holds pages."""
        if not self.live:
            return False
        context = self.live[self.choose.pick(sorted(self.live))]
        before = named_of(context)
        self.change(context)
        if not self.manager.get_req_blocks(context.request_id):
            self.seen["renamed"] += 1
        else:
            if context.active_length > 1 and not self.waits_too_long(context):
                self.refused(context, lambda: self.manager.maybe_reserve(context))
            context.cache_salt, context.extra_keys = before
        return True

    def step_renamed(self, context: TextContext) -> None:
        """A step that publishes a page refuses a context of another salt or other keys."""
        model = self.models[self.manager.get_replica(context)]
        if model.requests[context.request_id].committed == context.start_idx // PAGE_SIZE:
            return
        before = named_of(context)
        self.change(context)
        self.refused(context, lambda: self.manager.step([context]))
        context.cache_salt, context.extra_keys = before

    def change(self, context: TextContext) -> None:
        if self.choose.integer(0, 2):
            context.extra_keys = (*context.extra_keys, (self.choose.integer(0, context.end_idx), b"new"))
        else:
            context.cache_salt = "other" if context.cache_salt == "changed" else "changed"

    def refused(self, context: TextContext, call: Callable[[], object]) -> None:
        try:
            call()
        except InvalidRequestError as error:
            assert "while it holds pages" in str(error)  # noqa: PT017 - the moves run without pytest, too
            self.seen["rename refused"] += 1
            return
        raise AssertionError(f"{context.request_id}: other keys were taken")

    def reserve(self) -> bool:
        if not self.live:
            return False
        return self.reserve_one(self.live[self.choose.pick(sorted(self.live))], self.choose.integer(1, 3))

    def ask(self) -> bool:
        """What a waiting request was told may be true no more when it comes: it has other keys, or pages are gone."""
        waiting = [name for name in sorted(self.live) if not self.manager.get_req_blocks(name)]
        waiting = [name for name in waiting if not self.waits_too_long(self.live[name])]
        if not waiting:
            return False
        context, between = self.live[self.choose.pick(waiting)], self.choose.integer(0, 6)
        self.manager.admission(context)
        if between == 0:
            self.reset()
        elif between < 3:
            self.change(context)
        else:
            self.reserve()
            if self.manager.get_req_blocks(context.request_id):
                return True
        return self.reserve_one(context, 1)

    def stale(self) -> bool:
        """The context of a request without pages says that it has come somewhere."""
        waiting = [context for _, context in sorted(self.live.items()) if not self.start_of(context)]
        waiting = [context for context in waiting if not self.manager.get_req_blocks(context.request_id)]
        if not waiting:
            return False
        context = self.choose.pick(waiting)
        context.set_token_indices(start_idx=self.choose.integer(0, context.active_idx - 1))
        return True

    def reserve_one(self, context: TextContext, steps: int) -> bool:
        before, start = (context.start_idx, context.active_idx), self.start_of(context)
        if self.waits_too_long(context, steps):
            try:
                self.manager.maybe_reserve(context, steps)
            except PromptTooLongError:
                return False
            raise AssertionError(f"{context.current_length} tokens and {steps} steps in {self.pages} pages")
        wanted = self.model_reserve(context, steps)
        assert self.manager.maybe_reserve(context, steps) == (wanted is not None)
        if wanted is None:
            self.seen["refused"] += 1
            assert (context.start_idx, context.active_idx) == before
            return True
        self.seen["hit"] += wanted > start
        self.seen["moved back"] += wanted < before[0]
        assert context.start_idx == wanted
        assert context.start_idx < context.active_idx <= context.end_idx
        self.reserved.add(context.request_id)
        return True

    def run(self) -> bool:
        if not self.reserved:
            return False
        context = self.live[self.choose.pick(sorted(self.reserved))]
        if context.current_length == LONGEST:
            return False
        chunk = self.choose.integer(1, 30)
        if context.active_length > chunk:
            context.set_token_indices(active_idx=context.start_idx + chunk)
        self.compute([context], [Run.of(self.manager, context)])
        context.update(self.choose.integer(1, 2))
        if self.caching and self.choose.integer(0, 7) == 0:
            self.step_renamed(context)
        self.manager.step([context])
        self.model_step(context)
        self.drop_short()
        return True

    def compute(self, batch: Sequence[TextContext], runs: Sequence[Run]) -> None:
        """What a model does: reads the KV of every cached token, which must be right, and writes that of the others."""
        inputs = self.manager.fetch(batch)
        if self.host:
            self.host.drop({context.request_id for context in batch}, arrived=True)
        self.kv.run(runs, inputs)

    def run_batch(self) -> bool:
        """Several steps of a `Batch` over the requests that have one token to run."""
        ready = [self.live[name] for name in sorted(self.reserved) if self.live[name].active_length == 1]
        ready = [context for context in ready if context.active_idx == context.end_idx]
        if not ready:
            return False
        batch = self.manager.batch(ready)
        # Our own record of the tokens: a context that is read catches up, and here it must be able to lag behind.
        known = {context.request_id: context.tokens.tolist() for context in ready}
        for _ in range(self.choose.integer(1, 8)):
            longest = max(map(len, known.values()))
            if longest == LONGEST or any(self.too_long(len(one), len(one) - 1, len(one)) for one in known.values()):
                break
            wanted = self.batch_reserve(ready, known)
            assert self.manager.reserve_batch(batch).tolist() == wanted
            if not all(wanted):
                break
            self.compute(batch, [self.decoding(context, known[context.request_id]) for context in ready])
            tokens = [self.choose.integer(1, 2) for _ in ready]
            batch.update(tokens)
            self.manager.step(batch)
            for context, token in zip(ready, tokens, strict=True):
                known[context.request_id].append(token)
            self.batch_step(ready, known)
            self.same_books()
        assert {context.request_id: context.tokens.tolist() for context in ready} == known
        assert all(context.start_idx == context.end_idx - 1 for context in ready)
        self.drop_short()
        return True

    def decoding(self, context: TextContext, tokens: list[int]) -> Run:
        replica, length = self.manager.get_replica(context), len(tokens)
        return Run(context.request_id, replica, named_of(context), tokens, length - 1, length)

    def batch_reserve(self, batch: Sequence[TextContext], known: dict[str, list[int]]) -> list[bool]:
        return [self.reserve_next(context, known[context.request_id]) for context in batch]

    def reserve_next(self, context: TextContext, tokens: list[int]) -> bool:
        """Room for one more token of a request in a batch."""
        model, length = self.models[self.manager.get_replica(context)], len(tokens)
        return model.reserve(context.request_id, tokens, named_of(context), length - 1, length, 1) is not None

    def batch_step(self, batch: Sequence[TextContext], known: dict[str, list[int]]) -> None:
        for replica, model in enumerate(self.models):
            mine = [context for context in batch if self.manager.get_replica(context) == replica]
            published: list[list[int]] = []
            filled: list[Content] = []
            for context in mine:
                tokens = known[context.request_id]
                self.stepped[context.request_id] = len(tokens) - 1
                if self.caching:
                    if (len(tokens) - 1) % PAGE_SIZE == 0:
                        filled.append((*named_of(context), *tokens[:-1]))
                    shared, pages = model.step(context.request_id, tokens, named_of(context), len(tokens) - 1)
                    self.seen["shared"] += shared
                    published.append(pages)
                else:
                    model.requests[context.request_id].cached = len(tokens) - 1
            # The same content twice in one step: they are published one after another.
            together = [[*chain(*published)]] if len(set(filled)) == len(filled) else published
            for pages in together:
                model.queue(pages)
        self.store()

    def store(self) -> None:
        """What was published goes to the host now, or waits."""
        if self.host and not self.lazy:
            tiers_of(self.manager).settle()
            for model in self.models:
                model.store()

    def fork(self) -> bool:
        names = [name for name in sorted(self.reserved) if self.live[name].active_length == 1]
        if not names:
            return False
        parent = self.live[self.choose.pick(names)]
        replica = self.manager.get_replica(parent)
        room = not self.too_long(parent.end_idx, 0, parent.end_idx) and len(self.models[replica].requests) < ROWS
        if not room or not parent.start_idx or self.stepped.get(parent.request_id) != parent.start_idx:
            return False
        child = parent.fork(self.name())
        wanted = self.models[replica].fork(parent.request_id, child.request_id, parent.start_idx, parent.end_idx)
        assert self.manager.fork(parent, child) == wanted
        if wanted:
            self.live[child.request_id] = child
            self.reserved.add(child.request_id)
            self.stepped[child.request_id] = child.start_idx
        return True

    def release(self) -> bool:
        if not self.live:
            return False
        context = self.live[self.choose.pick(sorted(self.live))]
        self.say_last(context)
        self.leave(context)
        return True

    def preempt(self) -> bool:
        """A request gives its pages back, and comes again with the context that it had."""
        held = [context for _, context in sorted(self.live.items()) if self.manager.get_req_blocks(context.request_id)]
        if not held or len(self.away) == 4:
            return False
        context = self.choose.pick(held)
        self.leave(context)
        self.away.append(context)
        return True

    def leave(self, context: TextContext) -> None:
        name, model = context.request_id, self.models[self.manager.get_replica(context)]
        self.past = [*self.past[-7:], (context.tokens.tolist(), context.extra_keys)]
        self.manager.release(name)
        model.release(name)
        del self.live[name]
        self.reserved.discard(name)
        self.stepped.pop(name, None)

    def say_last(self, context: TextContext) -> None:
        """A request is about to be released."""

    def lease(self) -> bool:
        if not self.live or len(self.leases) == 4:
            return False
        name = self.choose.pick(sorted(self.live))
        model = self.models[self.manager.get_replica(self.live[name])]
        self.leases.append(Leased(self.manager.lease(name), model.lease(name), self.claims[name]))
        return True

    def tell(self) -> bool:
        """Somebody is told the pages of a leased request: from now on they stay as they are."""
        leases = [lease for lease in self.leases if self.stepped.get(lease.ours.request_id) and self.is_claimed(lease)]
        if not leases:
            return False
        lease = self.choose.pick(leases)
        table = self.manager.block_table(lease.ours.request_id)
        pages = list(table.groups[0])
        lease.told.append((pages, table.num_tokens, self.bytes_of(lease, pages, table.num_tokens)))
        return True

    def is_claimed(self, lease: Leased) -> bool:
        """Whether the request that is leased has its row still, and not another one by now."""
        name = lease.ours.request_id
        return name in self.live and self.claims[name] == lease.claim

    def end(self) -> bool:
        """A lease ends, also of a request that goes on, or has not begun; or has ended before."""
        if not self.leases:
            return False
        lease = self.choose.pick(self.leases)
        self.same_bytes(lease)
        self.seen["outlived"] += not self.is_claimed(lease)
        self.seen["kept"] += self.is_claimed(lease) and bool(lease.model.parts)
        self.manager.end_lease(lease.ours)
        self.models[lease.ours.replica_idx].end_lease(lease.model)
        assert lease.ours.is_over
        if self.choose.integer(0, 1):
            self.manager.end_lease(lease.ours)
        self.leases.remove(lease)
        return True

    def bytes_of(self, lease: Leased, pages: list[int], tokens: int) -> torch.Tensor:
        """The KV of the first `tokens` tokens in `pages`: whoever reads them gets this."""
        blocks = self.manager.device_tensors[lease.ours.replica_idx][0][pages]
        return blocks.transpose(1, 3).reshape(len(pages) * PAGE_SIZE, -1)[:tokens].clone()

    def same_bytes(self, lease: Leased) -> None:
        for pages, tokens, before in lease.told:
            assert torch.equal(self.bytes_of(lease, pages, tokens), before), f"{lease.ours}: pages were rewritten"

    def reset(self) -> None:
        self.seen["reset"] += 1
        self.manager.reset_prefix_cache()
        if self.host:
            self.host.drop(set(self.live), arrived=True)
            self.host.idle.clear()
        for model in self.models:
            model.reset()

    def of_groups(self) -> Counter[str]:
        """What happened in further tables."""
        return Counter()

    def finish(self) -> None:
        """Everything is released: every page is free."""
        for name in list(self.live):
            self.manager.release(name)
        for lease in self.leases:
            self.same_bytes(lease)
            self.manager.end_lease(lease.ours)
        assert self.manager.num_free_blocks == self.manager.total_num_pages
        self.manager.check()

    def name(self) -> str:
        self.made += 1
        return f"r{self.made}"

    def drop_short(self) -> None:
        """Who needs more pages to run has to reserve first."""
        self.reserved = {
            name
            for name in self.reserved
            if self.models[self.manager.get_replica(self.live[name])].room(name) >= self.live[name].current_length
        }

    def model_reserve(self, context: TextContext, steps: int) -> int | None:
        model = self.models[self.manager.get_replica(context)]
        # Without caching nothing is looked up, as if there were but one token to run.
        active = context.active_idx if self.caching else context.start_idx + 1
        tokens = context.tokens.tolist()
        return model.reserve(context.request_id, tokens, named_of(context), context.start_idx, active, steps)

    def model_step(self, context: TextContext) -> None:
        self.stepped[context.request_id] = context.start_idx
        if self.caching:
            model = self.models[self.manager.get_replica(context)]
            shared, new = model.step(context.request_id, context.tokens.tolist(), named_of(context), context.start_idx)
            self.seen["shared"] += shared
            model.queue(new)
            self.store()
        else:
            self.models[self.manager.get_replica(context)].requests[context.request_id].cached = context.start_idx

    def same_books(self) -> None:
        self.manager.check()
        assert self.manager.num_free_blocks == sum(model.free for model in self.models)
        assert self.manager.metrics.evictions == sum(model.evictions for model in self.models)
        if self.host:
            metrics = self.manager.metrics
            assert (metrics.d2h_blocks_copied, metrics.h2d_blocks_copied) == (self.host.stored, self.host.loaded)
            slots, published = self.host.num_slots, len(self.host.idle) + len(self.host.held)
            assert self.manager.host_committed_block_pct == published / slots
        for lease in self.leases:
            self.same_bytes(lease)
        leased = {
            (lease.ours.replica_idx, page) for lease in self.leases for part in lease.model.parts for page in part
        }
        assert self.manager.num_leased_blocks == len(leased)
        names: dict[tuple[int, int], int] = {}
        for request_id, context in self.live.items():
            replica = self.manager.get_replica(context)
            pages = self.manager.get_req_blocks(request_id)
            held = self.models[replica].requests[request_id].pages
            # Two requests share a page in the manager exactly where they share one in the model.
            for mine, theirs in zip(pages, held, strict=True):
                assert names.setdefault((replica, mine), theirs) == theirs
        assert len({(replica, theirs) for (replica, _), theirs in names.items()}) == len(names)
